// SPDX-License-Identifier: Apache-2.0
//! The largest stand-in that fits this machine: benches of large VMs use smaller ones where memory is
//! short, report that, and never trigger the OOM killer.
//!
//! A stand-in needs its RAM, page tables for it, and for a moment both copies of pages being evicted.
//! Stored pages are on `/dev/shm`, which has its own limit.

use pagetide_addr::SECTION_BYTES;
use pagetide_report::size::readable;
use pagetide_swap::cgroup::{Level, MemoryGroups};
use std::path::Path;

/// Left free for other processes.
const RESERVE_BYTES: u64 = 1 << 30;
/// Beside the RAM: page tables, the daemon, pages in transit; in eighths of the RAM.
const EXTRA_EIGHTHS: u64 = 1;
/// The stored half of the RAM takes at most this much of it, in eighths.
const STORED_EIGHTHS: u64 = 4;
/// Least RAM of a stand-in: half of it is the least limit of a VM.
pub(super) const RAM_BYTES_MIN: u64 = 32 << 20;

/// Free memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Room {
    free_bytes: u64,
    /// The constraint that determines it.
    bound: String,
    shm_bytes: u64,
}

impl Room {
    /// Measures it now.
    pub(super) fn now() -> Result<Self, String> {
        let meminfo = std::fs::read_to_string("/proc/meminfo")
            .map_err(|error| format!("/proc/meminfo: {error}"))?;
        let mut room = Self {
            free_bytes: available_bytes(&meminfo).ok_or("/proc/meminfo has no MemAvailable")?,
            bound: "MemAvailable of this machine".into(),
            shm_bytes: free_on(Path::new("/dev/shm"))?,
        };
        let levels = MemoryGroups::of_this_process().levels();
        let levels = levels.map_err(|error| format!("memory cgroups: {error}"))?;
        if let Some(level) = levels.into_iter().min_by_key(Level::free_bytes)
            && level.free_bytes() < room.free_bytes
        {
            room.free_bytes = level.free_bytes();
            room.bound = format!("{} of {}", level.file, level.group.display());
        }
        Ok(room)
    }

    fn holds(&self, ram_bytes: u64) -> bool {
        let needed = ram_bytes + ram_bytes / 8 * EXTRA_EIGHTHS + RESERVE_BYTES;
        needed <= self.free_bytes && ram_bytes / 8 * STORED_EIGHTHS <= self.shm_bytes
    }

    /// The RAM to use instead of `wanted_bytes`: that, or half of it repeatedly until it fits. `None` if
    /// even the least does not fit.
    pub(super) fn fit(&self, wanted_bytes: u64) -> Option<u64> {
        let mut bytes = wanted_bytes;
        while bytes >= RAM_BYTES_MIN {
            if self.holds(bytes) {
                return Some(bytes.next_multiple_of(SECTION_BYTES));
            }
            bytes /= 2;
        }
        None
    }

    /// Why less is used.
    pub(super) fn why(&self) -> String {
        format!(
            "{} are free by {}, and {} on /dev/shm",
            readable(self.free_bytes),
            self.bound,
            readable(self.shm_bytes)
        )
    }
}

/// The RAM to use instead of `wanted_bytes`, with a sentence if it is less.
pub(super) fn fitting(wanted_bytes: u64) -> Result<(u64, Option<String>), String> {
    let room = Room::now()?;
    match room.fit(wanted_bytes) {
        None => Err(format!(
            "there is no memory for a stand-in of {}: {}",
            readable(RAM_BYTES_MIN),
            room.why()
        )),
        Some(bytes) if bytes < wanted_bytes => {
            let why = format!(
                "{} instead of {}: {}",
                readable(bytes),
                readable(wanted_bytes),
                room.why()
            );
            eprintln!("bench: a stand-in of {why}");
            Ok((bytes, Some(why)))
        }
        Some(bytes) => Ok((bytes, None)),
    }
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib = line.split_whitespace().next()?.parse::<u64>();
    kib.map_or(None, |kib| Some(kib << 10))
}

fn free_on(path: &Path) -> Result<u64, String> {
    let stat = rustix::fs::statvfs(path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(stat.f_bavail * stat.f_frsize)
}

/// Key of figures about a stand-in with this much RAM: `gib_16`, or `mib_512` where that is no whole
/// number.
pub(super) fn ram_key(bytes: u64) -> String {
    if bytes > 0 && bytes.is_multiple_of(1 << 30) {
        format!("gib_{}", bytes >> 30)
    } else {
        format!("mib_{}", bytes >> 20)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(free_gib: u64, shm_gib: u64) -> Room {
        Room {
            free_bytes: free_gib << 30,
            bound: "a test".into(),
            shm_bytes: shm_gib << 30,
        }
    }

    #[test]
    fn stand_in_is_halved_until_there_is_room() {
        assert_eq!(room(20, 12).fit(16 << 30), Some(16 << 30));
        assert_eq!(room(18, 12).fit(16 << 30), Some(8 << 30));
        assert_eq!(room(20, 4).fit(16 << 30), Some(8 << 30));
        assert_eq!(room(1, 4).fit(16 << 30), None);
        let bytes = room(2, 2).fit(1_000_000_000).unwrap();
        assert!(bytes.is_multiple_of(SECTION_BYTES) && bytes < 1_000_000_000);
    }

    #[test]
    fn keys_say_the_size() {
        assert_eq!(ram_key(16 << 30), "gib_16");
        assert_eq!(ram_key(1 << 29), "mib_512");
        assert_eq!(ram_key(3 << 29), "mib_1536");
    }

    #[test]
    fn room_of_this_machine_is_known() {
        assert_eq!(
            available_bytes("MemFree: 1 kB\nMemAvailable:  2048 kB\n"),
            Some(2 << 20)
        );
        assert_eq!(available_bytes("MemFree: 1 kB\n"), None);
        assert!(Room::now().unwrap().free_bytes > 0);
    }
}
