// SPDX-License-Identifier: Apache-2.0
//! The disk of a daemon: opened, or awaited.
//!
//! A daemon that nobody waits for is not started with a disk that it cannot open. Any other one serves what there is,
//! and the tier stands as gone until its disk is there: so neither a restart nor the rollback of an upgrade fails for
//! a disk that has gone away. The successor of an upgrade is as strict as a start by hand: its predecessor has the
//! disk, and goes on with it.

use super::{needed::Needed, pools::pools};
use crate::{control::ControlError, dpu::Owed, tiers::DiskSetting};
use pagetide_swap::{Pool, PoolError};
use pagetide_tiers::{
    DiskId, TierKind,
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
    needed: Needed,
    owed: Owed,
) -> Result<FoundDisk, ControlError> {
    let usual = Bounds::default();
    let bounds = Bounds {
        lock: owed.wait(usual.lock),
        ..usual
    };
    let source = source(disk, state_dir);
    let id = found.iter().find_map(|pool| disk_of(pool));
    let why = match DiskTier::open(source.clone(), bounds, id) {
        Ok(opened) => {
            tracing::info!(path = %disk.path.display(), "the disk tier takes pages that stay cold");
            return Ok(opened);
        }
        Err(why) if if_gone(needed, owed) == IfGone::Refuse => return Err(refused(&why)),
        Err(why) => why,
    };
    tracing::error!(%why, "the disk tier does not work; VMs are served without it, and it is tried again");
    FoundDisk::awaited(source, bounds, id, &why).map_err(|why| refused(&why))
}

/// Begins, once the pools that were found are held.
///
/// # Errors
/// A sentence: it cannot be used, and nothing needs it.
pub(super) fn begin(disk: FoundDisk, needed: Needed, owed: Owed) -> Result<DiskTier, ControlError> {
    let begun = match if_gone(needed, owed) {
        IfGone::Refuse => disk.begin(),
        IfGone::Await => disk.begin_or_await(),
    };
    begun.map_err(|why| refused(&why))
}

/// Whether a program that is to succeed a daemon which has this disk can open it, once that has let go of it.
///
/// # Errors
/// A sentence: why not.
pub(super) fn examine(disk: &DiskSetting, state_dir: &Path) -> Result<(), ControlError> {
    let found = pools(state_dir)?;
    let id = found.iter().find_map(|pool| disk_of(pool));
    DiskTier::examine(&source(disk, state_dir), id).map_err(|why| refused(&why))
}

/// What becomes of a start without the disk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum IfGone {
    Refuse,
    Await,
}

fn if_gone(needed: Needed, owed: Owed) -> IfGone {
    match (needed, owed) {
        (Needed::ByNobody, _) | (_, Owed::AsBefore { .. }) => IfGone::Refuse,
        (Needed::BySomebody, Owed::AsAfterDeath) => IfGone::Await,
    }
}

fn source(disk: &DiskSetting, state_dir: &Path) -> Source {
    Source {
        path: disk.path.clone(),
        limit_bytes: disk.limit_bytes,
        owner: owner(state_dir),
    }
}

fn refused(why: &DiskError) -> ControlError {
    ControlError::refused(why.to_string())
}

/// The disk on which the VM of a pool has pages.
fn disk_of(pool: &Path) -> Option<DiskId> {
    // One that cannot be opened is told of where it is held.
    let pool = Pool::open(pool).ok();
    let pool = pool.filter(has_extents);
    pool.and_then(|pool| pool.disk())
}

fn has_extents(pool: &Pool) -> bool {
    let mut extents = pool.extents();
    extents.any(|(_, entry)| entry.kind() == TierKind::Disk)
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
        Ok(pool) => pool.disk() == Some(disk) && has_extents(&pool),
        // Without its key nothing can be read.
        Err(PoolError::Damaged { .. }) => false,
        Err(_) => true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn disk_that_is_not_there_is_awaited_only_where_nobody_else_could_go_on() {
        let dir = tempfile::tempdir().unwrap();
        let disk = DiskSetting {
            path: dir.path().join("nowhere/tier"),
            limit_bytes: Some(64 << 20),
        };
        let open = |needed, owed| open(&disk, dir.path(), &[], needed, owed);
        let before = Owed::before(Instant::now() + Duration::from_secs(60));
        assert!(open(Needed::ByNobody, Owed::AsAfterDeath).is_err());
        assert!(open(Needed::BySomebody, before).is_err());
        let awaited = open(Needed::BySomebody, Owed::AsAfterDeath).unwrap();
        assert!(awaited.is_awaited());
        assert!(examine(&disk, dir.path()).is_err());
    }
}
