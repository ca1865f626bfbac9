// SPDX-License-Identifier: Apache-2.0
//! The tiers outside memory of a daemon: opened at its start, before any VM is recovered.
//!
//! ```text
//!   disk opened and locked      all I/O of a dead daemon has ended
//!   server of the remote tier   is connected to meanwhile: a VM that is recovered waits for nothing of it
//!   extents of all pools held   whether their VMs can be recovered or not
//!   begun                       what no pool has goes back to the file system
//! ```
//! A server that is refused (it may evict pages, or does not accept the password) ends the start of a daemon that
//! nobody waits for ([`Needed`]). Where there are VMs or disks, they come first, and so does the end of an upgrade: the
//! tier is then gone, and says why. Nothing is waited for then.

use super::{disk_tier, failure::failed, needed::Needed, pools::name_of};
use crate::{
    control::ControlError,
    dpu::Owed,
    pool::TierReport,
    settings::RunSettings,
    tiers::{RemoteSetting, SlowSetting},
};
use pagetide_swap::{
    Pool, PoolError, SlowTiers,
    slow::{RetryPauses, Seat, WhenGone},
};
use pagetide_tiers::{
    ExtentName, Standing, TierKind,
    disk::FoundDisk,
    remote::{self, Durability, FirstContact, RemoteConfig, RemoteTier, TimeBounds},
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// How long a start by hand waits for a server to say that it takes pages.
const CONTACT_BOUND: Duration = Duration::from_secs(10);

/// A tier, before the pools are known.
enum Opening {
    Disk(Box<FoundDisk>),
    Remote(RemoteTier),
}

/// Opens the tiers outside memory that `settings` name.
///
/// # Errors
/// A sentence: why a tier cannot be used.
pub(super) fn open(
    settings: &RunSettings,
    pools: &[PathBuf],
    needed: Needed,
    owed: Owed,
) -> Result<Arc<SlowTiers>, ControlError> {
    let named = settings.tiers.slow();
    if named.is_empty() {
        return Ok(SlowTiers::none());
    }
    let opening = named.iter().map(|slow| match slow {
        SlowSetting::Disk(disk) => disk_tier::open(disk, &settings.state_dir, pools, needed, owed)
            .map(|found| Opening::Disk(Box::new(found))),
        SlowSetting::Remote(remote) => {
            if needed == Needed::ByNobody {
                remote::check_access(remote.url()).map_err(refused)?;
            }
            open_remote(remote, settings.remote_when_gone.0).map(Opening::Remote)
        }
    });
    let mut opening = opening.collect::<Result<Vec<_>, _>>()?;
    for pool in pools {
        hold(&mut opening, pool);
    }
    if needed == Needed::ByNobody {
        opening.iter().try_for_each(greet)?;
    }
    let seats = opening.into_iter().map(|opening| match opening {
        Opening::Disk(found) => Ok(Seat {
            disk: Some(found.id()),
            tier: Arc::new(disk_tier::begin(*found, needed, owed)?),
            when_gone: settings.disk_when_gone.0,
        }),
        Opening::Remote(tier) => Ok(Seat {
            disk: None,
            tier: Arc::new(tier),
            when_gone: settings.remote_when_gone.0,
        }),
    });
    let seats = seats.collect::<Result<Vec<_>, ControlError>>()?;
    SlowTiers::new(seats, RetryPauses::default()).map_err(failed)
}

fn refused(why: impl std::fmt::Display) -> ControlError {
    ControlError::refused(why.to_string())
}

fn open_remote(setting: &RemoteSetting, when_gone: WhenGone) -> Result<RemoteTier, ControlError> {
    tracing::info!(address = %setting.url(), "the remote tier takes pages that stay cold");
    RemoteTier::start(RemoteConfig {
        url: setting.url().clone(),
        limit_bytes: setting.limit_bytes,
        when_gone: match when_gone {
            WhenGone::Wait => remote::WhenGone::Wait,
            WhenGone::Lost => remote::WhenGone::Lost,
        },
        bounds: TimeBounds::default(),
    })
    .map_err(refused)
}

/// Waits for the first answer of a server.
///
/// # Errors
/// It is none for pages. One that cannot be reached is no error: it may come.
fn greet(opening: &Opening) -> Result<(), ControlError> {
    let Opening::Remote(tier) = opening else {
        return Ok(());
    };
    match tier.first_contact(CONTACT_BOUND) {
        (FirstContact::Refused, health) => match health.standing {
            Standing::Gone { reason } => Err(ControlError::refused(format!(
                "the server of the remote tier is refused: {reason}"
            ))),
            // It was corrected meanwhile.
            Standing::Working | Standing::Slow { .. } | Standing::Full => Ok(()),
        },
        _ => Ok(()),
    }
}

/// Whether the tiers could be opened with these settings, as far as it can be known without opening them.
///
/// # Errors
/// A sentence: a disk would be refused, or a password or a file for TLS cannot be read.
pub(super) fn examine(settings: &RunSettings) -> Result<(), ControlError> {
    for slow in settings.tiers.slow() {
        match slow {
            SlowSetting::Disk(disk) => disk_tier::examine(disk, &settings.state_dir)?,
            SlowSetting::Remote(setting) => {
                remote::check_access(setting.url()).map_err(refused)?;
            }
        }
    }
    Ok(())
}

/// Whether a successor can open the tiers. It does not wait for another host.
///
/// # Errors
/// A sentence: it would wait for one of them while nobody serves, or would not find it.
pub(super) fn may_hand_over(tiers: &SlowTiers) -> Result<(), ControlError> {
    let waited_for = tiers
        .seats()
        .iter()
        .filter(|seat| seat.tier.kind() == TierKind::Disk);
    for seat in waited_for {
        match seat.tier.health().standing {
            Standing::Working | Standing::Full => seat.tier.is_found().map_err(refused)?,
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

/// Keeps what the pool at `path` has in the tiers. If that cannot be known now, nothing is given back on the disk.
fn hold(opening: &mut [Opening], path: &Path) {
    let name = name_of(path);
    let pool = match Pool::open(path) {
        Ok(pool) => pool,
        // Its VM can never be recovered: without the key in the pool nothing can be read.
        Err(error @ PoolError::Damaged { .. }) => {
            tracing::error!(vm = name, %error, "nothing is kept for a VM outside memory");
            return;
        }
        Err(error) => {
            tracing::error!(
                vm = name,
                %error,
                "the pool cannot be opened now, so it is not known what its VM has on disk: until the next start no \
                 further room is given out there, and none is given back"
            );
            for tier in opening {
                if let Opening::Disk(found) = tier {
                    found.keep_all();
                }
            }
            return;
        }
    };
    for tier in opening {
        match tier {
            Opening::Disk(found) => hold_on_disk(found, &pool, &name),
            Opening::Remote(tier) => hold_remotely(tier, &pool),
        }
    }
}

fn hold_on_disk(found: &mut FoundDisk, pool: &Pool, name: &str) {
    let Some(vm) = pool.slow_vm() else {
        return;
    };
    if pool.disk() != Some(found.id()) {
        return;
    }
    let here = pool
        .extents()
        .filter(|(_, entry)| entry.kind() == TierKind::Disk);
    // Each by itself: one that cannot be must not cost the others.
    for (number, entry) in here {
        if let Err(error) = found.hold(vm, [entry]) {
            tracing::error!(vm = name, ?number, %error, "an extent of a VM is not on the disk");
        }
    }
}

fn hold_remotely(tier: &RemoteTier, pool: &Pool) {
    let Some(vm) = pool.slow_vm() else {
        return;
    };
    let here = pool
        .extents()
        .filter(|(_, entry)| entry.kind() == TierKind::Remote);
    let names = here.map(|(number, entry)| ExtentName {
        vm,
        number,
        version: entry.version,
    });
    tier.hold(vm, pool.last_version(), names);
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
        keeps: figures.durability.map(|keeps| keeps_of(keeps).to_owned()),
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
        losses: figures.losses,
        pages_not_there: figures.pages_not_there,
        read_p50_us: figures.read_latency.p50_us,
        read_p99_us: figures.read_latency.p99_us,
        write_p50_us: figures.write_latency.p50_us,
        write_p99_us: figures.write_latency.p99_us,
    }
}

const fn keeps_of(durability: Durability) -> &'static str {
    match durability {
        Durability::Always => "all",
        Durability::Lagging => "lagging",
        Durability::Nothing => "nothing",
        Durability::Unknown => "unknown",
    }
}
