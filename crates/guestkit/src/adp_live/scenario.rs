// SPDX-License-Identifier: Apache-2.0
//! The guest of [`super`]: what runs in it, how large, how fast, and why so.
//!
//! # Like what
//! A storage-intensive VM as in VPRI 4.2: its disk's DMA goes to its page cache (O2), which is about half of
//! its RAM (the footprint of the paper's block devices grows to 53% of the VM in weeks). fio reads objects
//! from a set larger than that cache, some far more often than others (zipf), and rewrites
//! records of another, of which it reads back what it wrote. What is not cache is memory that is in use all the
//! time, memory that rests, and the programs in the initramfs, which rest too.
//!
//! # How fast
//! A policy can change only what is evicted from now on, and of that one sees what is asked for again.
//! So a turn must hold more than one life of a page in the cache. The daemon's evictor is real and
//! has its own times: what is left alone for 5 to 15 s is cold ([`REACH`]). fio's rate is such that the cache
//! is renewed about once in 40 s under software emulation: then sections rest between two
//! visits for less and for more than the evictor's reach, and a turn holds more than one renewal. It is a *rate*,
//! held back below what the guest could do, so that each policy meets the same demand.
//! fio reads through the page cache without read-ahead (it says so to the kernel).
//!
//! # How the policy's times are divided
//! The paper promotes after 180 s where sections are evicted after about 300 s (4.2.2). Here it is
//! [`REACH`], so times are divided by 300 s over that. But for the delay of demotion (30 s), which is
//! there until a scan of the page tables has seen the touch: the scans here come every 5 s, undivided, and so is this.

use std::path::PathBuf;
use std::time::Duration;

use pagetide_guest::params::Params;

use crate::qemu::{Disk, GuestSpec};

/// RAM of the guest.
pub(super) const RAM_BYTES: u64 = 1 << 30;
/// Of it, memory the guest's own work has filled.
const MEMORY_BYTES: u64 = 256 << 20;
/// Of that, what it works on all the time.
const ACTIVE_BYTES: u64 = 96 << 20;
/// Rest of that work after a step: it is there to be checked, not to take the CPUs from fio.
const PACE_US: u64 = 20_000;
/// Of the disk, objects that are read.
const OBJECTS_MIB: u64 = 768;
/// And records that are written and read back.
const RECORDS_MIB: u64 = 256;
/// Its disk: about twice what its page cache holds.
pub(super) const DISK_BYTES: u64 = (OBJECTS_MIB + RECORDS_MIB) << 20;
/// Bytes of objects read in a second, cached ones included.
const READ_MIB_A_SECOND: u64 = 20;
/// Bytes of records written in a second.
const WRITE_MIB_A_SECOND: u64 = 1;
/// The VM's limit, in per cent of what is resident before: the deepest of the paper's reclaim (0 to 50%).
pub(super) const LIMIT_PERCENT: u64 = 50;
/// A section that was left alone so long has drifted to the evictor's coldest set.
const REACH: Duration = Duration::from_secs(15);
/// By what the policy's times are divided.
pub(super) const TIMES_DIVIDED_BY: u64 = 300 / REACH.as_secs();

/// No protector.
pub(super) const NONE: &str = "none";
/// `adp`: 180 s and 20 s divided by [`TIMES_DIVIDED_BY`]; 30 s is a scan's round instead.
pub(super) const ADP: &str = "adp:promote-after=9s,demote-after=5s,scan-every=1s";
/// `adaptive`, whose times are its own and not divided.
pub(super) const ADAPTIVE: &str = "adaptive";

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
    // A year, until the host says stop.
    let work = format!(
        "{every}time_based\nruntime=365d\nnorandommap\nrate_process=poisson\n\
         [objects]\nrw=randread\nbs=64k\nsize={OBJECTS_MIB}m\nrandom_distribution=zipf:0.8\n\
         rate={READ_MIB_A_SECOND}m\n\
         [records]\nrw=randwrite\nbs=16k\noffset={OBJECTS_MIB}m\nsize={RECORDS_MIB}m\n\
         random_distribution=zipf:0.8\nrate={WRITE_MIB_A_SECOND}m\nverify_backlog=64\n"
    );
    let check = format!("{every}[check]\nrw=read\nbs=256k\nsize={all}m\ndirect=1\n");
    [("fill", fill), ("work", work), ("check", check)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policys_times_are_the_papers_divided_but_for_the_demotion() {
        assert_eq!(TIMES_DIVIDED_BY, 20);
        let promote = 180 / TIMES_DIVIDED_BY;
        let scan = 20 / TIMES_DIVIDED_BY;
        assert_eq!(
            ADP,
            format!("adp:promote-after={promote}s,demote-after=5s,scan-every={scan}s")
        );
    }

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
