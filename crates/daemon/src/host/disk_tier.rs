// SPDX-License-Identifier: Apache-2.0
//! The disk of a daemon: opened, or awaited.
//!
//! A daemon that finds no VM is not started with a disk that it cannot open. One that finds some serves them, and
//! the tier stands as gone until its disk is there: so neither a restart nor the rollback of an upgrade fails for
//! a disk that has gone away.

use super::pools::pools;
use crate::{control::ControlError, tiers::DiskSetting};
use pagetide_swap::{Pool, PoolError};
use pagetide_tiers::{
    DiskId,
    disk::{Bounds, DiskError, DiskTier, FoundDisk, Owner, Source},
};
use std::path::{Path, PathBuf};

/// Opens the disk of a daemon that has found these pools.
///
/// # Errors
/// A sentence: why it cannot be used, and nothing needs it.
pub(super) fn open(
    disk: &DiskSetting,
    state_dir: &Path,
    found: &[PathBuf],
) -> Result<FoundDisk, ControlError> {
    let source = Source {
        path: disk.path.clone(),
        limit_bytes: disk.limit_bytes,
        owner: owner(state_dir),
    };
    let id = found.iter().find_map(|pool| disk_of(pool));
    let why = match DiskTier::open(source.clone(), Bounds::default(), id) {
        Ok(opened) => {
            tracing::info!(path = %disk.path.display(), "the disk tier takes pages that stay cold");
            return Ok(opened);
        }
        Err(why) if found.is_empty() => return Err(refused(&why)),
        Err(why) => why,
    };
    tracing::error!(%why, "the disk tier does not work; VMs are served without it, and it is tried again");
    FoundDisk::awaited(source, Bounds::default(), id, &why).map_err(|why| refused(&why))
}

/// Begins, once the pools that were found are held.
///
/// # Errors
/// A sentence: it cannot be used, and nothing needs it.
pub(super) fn begin(disk: FoundDisk, found: &[PathBuf]) -> Result<DiskTier, ControlError> {
    let begun = match found.is_empty() {
        true => disk.begin(),
        false => disk.begin_or_await(),
    };
    begun.map_err(|why| refused(&why))
}

fn refused(why: &DiskError) -> ControlError {
    ControlError::refused(why.to_string())
}

/// The disk on which the VM of a pool has pages.
fn disk_of(pool: &Path) -> Option<DiskId> {
    // One that cannot be opened is told of where it is held.
    let pool = Pool::open(pool).ok();
    let pool = pool.filter(|pool| pool.extents().next().is_some());
    pool.and_then(|pool| pool.disk())
}

/// This daemon, as another one finds it in the header of the disk.
fn owner(state_dir: &Path) -> Owner {
    let state_dir = std::path::absolute(state_dir).unwrap_or_else(|_| state_dir.to_owned());
    Owner {
        state_dir: state_dir.canonicalize().unwrap_or(state_dir),
        boot: boot(),
        has_pages,
    }
}

/// Which boot of the host this is; 0, which claims nothing, if the kernel does not say.
fn boot() -> u128 {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap_or(0)
}

/// True if VMs whose pools are in `state_dir` have pages on this disk, or may have.
fn has_pages(state_dir: &Path, disk: DiskId) -> bool {
    let Ok(found) = pools(state_dir) else {
        return true;
    };
    found.iter().any(|path| match Pool::open(path) {
        Ok(pool) => pool.disk() == Some(disk) && pool.extents().next().is_some(),
        // Without its key nothing can be read.
        Err(PoolError::Damaged { .. }) => false,
        Err(_) => true,
    })
}
