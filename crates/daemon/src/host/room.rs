// SPDX-License-Identifier: Apache-2.0
//! Checks and warnings, at startup and at an attach, of whether the daemon's memory cgroup has room for
//! its pools.
//!
//! While VMs are evicted, [`pagetide_swap::room`] ensures that the cgroup's limit is not reached.

use crate::control::ControlError;
use pagetide_addr::PAGE_BYTES;
use pagetide_report::size::readable;
use pagetide_swap::{Room, cgroup::Level, room::margin_bytes};
use std::path::Path;

/// Bytes that a page's word takes in a pool.
const WORD_BYTES: u64 = 8;

/// Warns if the pools may grow beyond the cgroup's limit. The size of their tmpfs bounds them too.
pub(super) fn warn_if_smaller(room: &Room, state_dir: &Path) {
    let Some(level) = room.tightest() else {
        return;
    };
    match rustix::fs::statvfs(state_dir) {
        Ok(tmpfs) => {
            if let Some(warning) = smaller(&level, state_dir, tmpfs.f_blocks * tmpfs.f_frsize) {
                tracing::warn!("{warning}");
            }
        }
        Err(error) => {
            tracing::warn!(%error, "cannot determine the size of the tmpfs of the pools");
        }
    }
}

fn smaller(level: &Level, state_dir: &Path, tmpfs_bytes: u64) -> Option<String> {
    (level.limit_bytes < tmpfs_bytes).then(|| {
        format!(
            "the daemon's memory cgroup {} allows {} ({}), and evicted pages may take up to {}, the size of the tmpfs \
             of {}: eviction stops when less than {} of the group's limit is free; raise {} to let it go on",
            level.group.display(),
            readable(level.limit_bytes),
            level.file,
            readable(tmpfs_bytes),
            state_dir.display(),
            readable(margin_bytes(level.limit_bytes)),
            level.file,
        )
    })
}

/// Refuses a VM if the cgroup has no room for its page words, and warns if it may not have room for its
/// evicted pages.
pub(super) fn refuse_if_short(
    room: &Room,
    ram_bytes: u64,
    limit_bytes: Option<u64>,
) -> Result<(), ControlError> {
    let words_bytes = ram_bytes / PAGE_BYTES * WORD_BYTES;
    room.take_once(words_bytes).map_err(|shortage| {
        ControlError::refused(format!(
            "a VM with {} of RAM takes {} of the daemon's memory to begin with, and there is no room for that: {shortage}",
            readable(ram_bytes),
            readable(words_bytes)
        ))
    })?;
    let (Some(level), Some(limit_bytes)) = (room.tightest(), limit_bytes) else {
        return Ok(());
    };
    let evicted_bytes = ram_bytes.saturating_sub(limit_bytes);
    let free = level
        .free_bytes()
        .saturating_sub(margin_bytes(level.limit_bytes));
    if evicted_bytes > free {
        tracing::warn!(
            "to keep this VM within its limit takes up to {} of the daemon's memory if its pages do not compress, and \
             the memory cgroup {} leaves {} ({}): eviction stops when that is used up",
            readable(evicted_bytes),
            level.group.display(),
            readable(free),
            level.file
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_smaller_than_the_tmpfs_is_named_with_what_to_raise() {
        let level = Level {
            group: "/sys/fs/cgroup/pt".into(),
            file: "memory.max",
            limit_bytes: 1 << 30,
            charged_bytes: 0,
            cache_bytes: 0,
        };
        assert_eq!(smaller(&level, Path::new("/dev/shm"), 1 << 30), None);
        let warning = smaller(&level, Path::new("/dev/shm"), 1 << 31).unwrap();
        for part in [
            "/sys/fs/cgroup/pt",
            "memory.max",
            "1.0 GiB",
            "2.0 GiB",
            "64.0 MiB",
        ] {
            assert!(warning.contains(part), "{part}: {warning}");
        }
    }
}
