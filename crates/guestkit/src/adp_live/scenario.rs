// SPDX-License-Identifier: Apache-2.0
//! The guest of [`super`]: its programs, sizes and rates, and the reasons for them.
//!
//! # The model
//! A storage-intensive VM as in VPRI 4.2: its disk's DMA goes to its page cache (O2), which is about 30% of
//! its RAM (the paper's footprint of a typical block device: 28%). fio reads objects of 1 MiB, as a file or
//! media server does, from a set three times as large as that cache, some more often than others (zipf). It
//! also appends to a log and reads it back. The rest of the RAM is memory in constant use, idle memory, and
//! the programs in the initramfs, which are idle too. All idle memory is evicted when the guest is
//! squeezed, and stays absent; the limit, half of what was resident (the deepest of the paper's 0 to 50%),
//! is a little less than the remainder.
//!
//! # Size and rate of requests
//! A 2 MiB section has 512 pages of the cache. With small requests at random each section is touched
//! several times a second as soon as pages are recycled within minutes: no section is idle, and a protector
//! of sections cannot distinguish any. Measured in this guest, zipf reads of 64 KiB: at 8 MiB/s of DMA none
//! of 120 sections was ever idle for 9 s in two minutes. Objects read whole fill sections in bursts,
//! between which they are idle: at 3 MiB/s for more than 15 s in 60% of the time, and hardly ever for more
//! than a minute.
//!
//! A policy can change only later evictions, and only pages that are requested again show an effect. So a
//! turn must be longer than the idle times of sections in a good part of the cache: hence fio's rate. It is
//! limited to less than the guest could do, even under software emulation, so that each policy meets the
//! same demand. fio reads through the page cache without readahead (it tells the kernel so).
//!
//! # Times
//! The policy has its defaults. It begins with the paper's promotion after 180 s, where sections are evicted
//! after 15 to 25 s, and learns that from the sections that it loses. What it learnt of the evictor stays while
//! the policy is `none`, so that only the first turn has to learn much.

use std::path::PathBuf;

use pagetide_guest::params::Params;

use crate::qemu::{Disk, GuestSpec};

/// RAM of the guest.
const RAM_BYTES: u64 = 768 << 20;
/// Of it, memory filled by the guest's own work.
const MEMORY_BYTES: u64 = 304 << 20;
/// Of that, its constantly used part.
const ACTIVE_BYTES: u64 = 64 << 20;
/// Pause of that work after a step: it only checks content and must not take the CPUs from fio.
const PACE_US: u64 = 10_000;
/// Of the disk, objects that are read.
const OBJECTS_MIB: u64 = 768;
/// Of the disk, a log that is written and read back.
const LOG_MIB: u64 = 256;
/// Its disk.
pub(super) const DISK_BYTES: u64 = (OBJECTS_MIB + LOG_MIB) << 20;
/// Objects read in a second, cached ones included.
const READ_MIB_A_SECOND: u64 = 3;
/// Appended to the log in a second.
const WRITE_KIB_A_SECOND: u64 = 256;
/// The VM's limit, in per cent of the resident memory before: the deepest of the paper's reclaim (0 to
/// 50%).
pub(super) const LIMIT_PERCENT: u64 = 50;
/// No protector.
pub(super) const NONE: &str = "none";
/// The simple LRU that the paper compares its own with.
pub(super) const LRU: &str = "lru";
/// The protector, as it is by default.
pub(super) const ADP: &str = "adp";

/// The guest with its disk at `socket`.
pub(super) fn guest(socket: PathBuf) -> GuestSpec {
    GuestSpec {
        ram_bytes: RAM_BYTES,
        disk: Disk::VhostUser(socket),
        work: Params {
            mem_bytes: MEMORY_BYTES,
            active_bytes: ACTIVE_BYTES,
            fio_bytes: DISK_BYTES,
            seed: 1,
            pace_us: PACE_US,
            ..Params::default()
        },
        ..GuestSpec::default()
    }
}

/// fio's job files, by name; see `pagetide_guest::fio`.
pub(super) fn jobs() -> [(&'static str, String); 3] {
    let every = "[global]\nfilename=/dev/vda\nioengine=psync\nthread\nclocksource=clock_gettime\n\
                 verify=crc32c\nverify_interval=4k\nverify_fatal=1\n";
    let all = DISK_BYTES >> 20;
    let fill = format!("{every}[fill]\nrw=write\nbs=256k\nsize={all}m\ndo_verify=0\n");
    // A year, until the host stops it.
    let work = format!(
        "{every}time_based\nruntime=365d\nnorandommap\n\
         [objects]\nrw=randread\nbs=1m\nsize={OBJECTS_MIB}m\nrandom_distribution=zipf:0.4\n\
         rate={READ_MIB_A_SECOND}m\nrate_process=poisson\n\
         [log]\nrw=write\nbs=128k\noffset={OBJECTS_MIB}m\nsize={LOG_MIB}m\n\
         rate={WRITE_KIB_A_SECOND}k\nverify_backlog=32\n"
    );
    let check = format!("{every}[check]\nrw=read\nbs=256k\nsize={all}m\ndirect=1\n");
    [("fill", fill), ("work", work), ("check", check)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_verify_and_cover_just_the_disk() {
        for (name, job) in jobs() {
            assert!(job.contains("verify=crc32c"), "{name}");
        }
        let [(_, fill), (_, work), (_, check)] = jobs();
        for whole in [fill, check] {
            assert!(whole.contains("size=1024m"), "{whole}");
        }
        assert!(work.contains("offset=768m\nsize=256m"), "{work}");
    }
}
