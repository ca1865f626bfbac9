// SPDX-License-Identifier: Apache-2.0
//! The tiers outside memory of a daemon: opened at its start, before any VM is recovered.
//!
//! ```text
//!   disk opened and locked      all I/O of a dead daemon has ended
//!   extents of all pools held   whether their VMs can be recovered or not
//!   begun                       what no pool has goes back to the file system
//! ```
//! A daemon that finds no VM is not started with a disk that it cannot open. One that finds some serves them, and
//! the tier stands as gone until its disk is there: so neither a restart nor the rollback of an upgrade fails for
//! a disk that has gone away.

use super::{
    failure::failed,
    pools::{name_of, pools},
};
use crate::{control::ControlError, pool::TierReport, settings::RunSettings};
use pagetide_swap::{
    Pool, PoolError, SlowTiers,
    slow::{RetryPauses, Seat},
};
use pagetide_tiers::{
    DiskId, Standing,
    disk::{Bounds, DiskError, DiskTier, FoundDisk, Owner, Source},
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// Opens the tiers outside memory that `settings` name.
///
/// # Errors
/// A sentence: why a tier cannot be used.
pub(super) fn open(
    settings: &RunSettings,
    pools: &[PathBuf],
) -> Result<Arc<SlowTiers>, ControlError> {
    let Some(disk) = settings.tiers.disk() else {
        return Ok(SlowTiers::none());
    };
    let source = Source {
        path: disk.path.clone(),
        limit_bytes: disk.limit_bytes,
        owner: owner(&settings.state_dir),
    };
    let (id, tier) = begin(source, pools)?;
    let seat = Seat {
        disk: Some(id),
        tier: Arc::new(tier),
        when_gone: settings.disk_when_gone.0,
    };
    SlowTiers::new(vec![seat], RetryPauses::default()).map_err(failed)
}

/// Opens the disk. VMs that a predecessor left are served whatever has become of it: then it is awaited, and what
/// they have there with it.
fn begin(source: Source, pools: &[PathBuf]) -> Result<(DiskId, DiskTier), ControlError> {
    let refused = |why: DiskError| ControlError::refused(why.to_string());
    let id = pools.iter().find_map(|pool| disk_of(pool));
    let why = match DiskTier::open(source.clone(), Bounds::default(), id) {
        Err(why) => why,
        Ok(found) => {
            let id = found.id();
            match held(found, pools)?.begin() {
                Err(why) => why,
                Ok(tier) => {
                    tracing::info!(path = %source.path.display(), "the disk tier takes pages that stay cold");
                    return Ok((id, tier));
                }
            }
        }
    };
    if pools.is_empty() {
        return Err(refused(why));
    }
    tracing::error!(%why, "the disk tier does not work; VMs are served without it, and it is tried again");
    let found = FoundDisk::awaited(source, Bounds::default(), id, &why).map_err(refused)?;
    let id = found.id();
    Ok((id, held(found, pools)?.begin().map_err(refused)?))
}

/// The disk on which the VM of a pool has pages.
fn disk_of(pool: &Path) -> Option<DiskId> {
    // One that cannot be opened is told of where it is held.
    let pool = Pool::open(pool).ok();
    let pool = pool.filter(|pool| pool.extents().next().is_some());
    pool.and_then(|pool| pool.disk())
}

fn held(mut found: FoundDisk, pools: &[PathBuf]) -> Result<FoundDisk, ControlError> {
    for pool in pools {
        hold(&mut found, pool)?;
    }
    Ok(found)
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

/// Whether a successor can open the tiers.
///
/// # Errors
/// A sentence: it would wait for one of them while nobody serves.
pub(super) fn may_hand_over(tiers: &SlowTiers) -> Result<(), ControlError> {
    for seat in tiers.seats() {
        match seat.tier.health().standing {
            Standing::Working | Standing::Full => {}
            Standing::Slow { .. } | Standing::Gone { .. } => {
                return Err(ControlError::refused(format!(
                    "the {} tier does not work now, and another program could not open it: `pagetide pool show` says \
                     why; upgrade when it works again",
                    seat.tier.kind()
                )));
            }
        }
    }
    Ok(())
}

/// Keeps what the pool at `path` has on the disk, if that is this disk.
///
/// # Errors
/// The pool cannot be opened now. What is held for no pool is given back, so this daemon must not begin then.
fn hold(found: &mut FoundDisk, path: &Path) -> Result<(), ControlError> {
    let name = name_of(path);
    let pool = match Pool::open(path) {
        Ok(pool) => pool,
        // Its VM can never be recovered: without the key in the pool nothing can be read.
        Err(error @ PoolError::Damaged { .. }) => {
            tracing::error!(vm = name, %error, "nothing is kept for a VM on disk");
            return Ok(());
        }
        Err(error) => {
            return Err(ControlError::refused(format!(
                "what VM '{name}' has on the disk would be given up, because its pool cannot be opened ({error}): \
                 start again when it can be"
            )));
        }
    };
    let Some(vm) = pool.slow_vm() else {
        return Ok(());
    };
    if pool.disk() != Some(found.id()) {
        return Ok(());
    }
    // Each by itself: one that cannot be must not cost the others.
    for (number, entry) in pool.extents().filter(|(_, entry)| entry.sectors > 0) {
        if let Err(error) = found.hold(vm, [entry]) {
            tracing::error!(vm = name, ?number, %error, "an extent of a VM is not on the disk");
        }
    }
    Ok(())
}

/// How the tiers stand, and what they have done.
pub(super) fn reports(tiers: &SlowTiers) -> Vec<TierReport> {
    tiers.seats().iter().map(report).collect()
}

fn report(seat: &Seat) -> TierReport {
    let health = seat.tier.health();
    let figures = seat.tier.figures();
    let (standing, reason) = match health.standing {
        Standing::Working => ("working", None),
        Standing::Slow { bound_ms } => (
            "slow",
            Some(format!("a request took more than {bound_ms} ms")),
        ),
        Standing::Full => ("full", None),
        Standing::Gone { reason } => ("gone", Some(reason)),
    };
    TierReport {
        tier: seat.tier.kind().to_string(),
        standing: standing.to_owned(),
        reason,
        standing_seconds: health.since.elapsed().as_secs_f64(),
        is_working: u64::from(standing == "working"),
        limit_bytes: figures.limit_bytes,
        stored_bytes: figures.stored_bytes,
        pages_read: figures.pages_read,
        read_bytes: figures.read_bytes,
        pages_written: figures.pages_written,
        batches_written: figures.batches_written,
        written_bytes: figures.written_bytes,
        read_errors: figures.read_errors,
        write_errors: figures.write_errors,
        overdue_requests: figures.overdue,
        refused_requests: figures.refused,
        read_p50_us: figures.read_latency.p50_us,
        read_p99_us: figures.read_latency.p99_us,
        write_p50_us: figures.write_latency.p50_us,
        write_p99_us: figures.write_latency.p99_us,
    }
}
