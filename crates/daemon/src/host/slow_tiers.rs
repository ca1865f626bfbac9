// SPDX-License-Identifier: Apache-2.0
//! The tiers outside memory of a daemon: opened at its start, before any VM is recovered.
//!
//! ```text
//!   disk opened and locked      all I/O of a dead daemon has ended
//!   extents of all pools held   whether their VMs can be recovered or not
//!   begun                       what no pool has goes back to the file system
//! ```

use super::{disk_tier, failure::failed, pools::name_of};
use crate::{control::ControlError, pool::TierReport, settings::RunSettings};
use pagetide_swap::{
    Pool, PoolError, SlowTiers,
    slow::{RetryPauses, Seat},
};
use pagetide_tiers::{Standing, disk::FoundDisk};
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
    let mut found = disk_tier::open(disk, &settings.state_dir, pools)?;
    for pool in pools {
        hold(&mut found, pool)?;
    }
    let seat = Seat {
        disk: Some(found.id()),
        tier: Arc::new(disk_tier::begin(found, pools)?),
        when_gone: settings.disk_when_gone.0,
    };
    SlowTiers::new(vec![seat], RetryPauses::default()).map_err(failed)
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
