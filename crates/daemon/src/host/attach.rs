// SPDX-License-Identifier: Apache-2.0
//! Attaching a VM, and recovering one that a dead daemon left.
//!
//! ```text
//!   attach                                    recover
//!   1 check: pid, layout, hazards, limit      1 open the pool, its VMM by pid and start time
//!   2 domains: bits cleared, leases drained   2 userfaultfd duplicated by its number
//!   3 pool created ("attaching")              3 domains: bits cleared
//!   4 userfaultfd created in the VMM, RAM     4 words repaired, content adopted
//!     registered; number into the pool        5 all waiters woken
//!   5 words set; pool "attached"                                         ─► regrant
//!          └────────────── Vm::start ──────────────┘
//! ```
//! A failure undoes the completed steps, in reverse. A daemon that dies between 3 and 5 leaves a pool
//! that says *attaching*: nothing was evicted, so its successor just detaches the VM. The same holds for
//! a daemon that dies while it releases a VM.

use super::{
    budget::{Governed, Newcomer, Seat},
    claim::{Claim, drain, refuse_unseen_pages, refuse_without_dpu},
    core::VmCore,
    failure::failed,
    hotplug,
    identity::{self, Identity, mappings_of},
    room,
    shared::{ENDING_WAIT, Shared},
    vm::{Prepared, Vm, empty_table_of, put_into},
    waiting::Expected,
};
use crate::budget::{CeilingChange, ShareChange};
use crate::control::{AttachRequest, ControlError, ErrorKind};
use pagetide_addr::{PageNo, SECTION_PAGES, SectionNo};
use pagetide_gmem::{PageTable, Place, WordArray, recovery};
use pagetide_swap::{
    ChainStore, Pool, PoolError, PoolStore, PoolWords, limit::LIMIT_PAGES_MIN, pool::Phase, slow,
};
use pagetide_sys::{
    memory_file::FileError,
    uffd::{UffdError, Userfaultfd},
};
use pagetide_vmm::{
    Refusal, hazards,
    layout::{LiveLayout, RamLayout},
    place::VmPlace,
    process::VmmProcess,
    takeover::{self, TakeOverError},
};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::Duration,
};

/// How long the I/O under way at an attach may take to finish.
const DRAIN_WAIT: Duration = Duration::from_secs(10);
/// Smallest limit, in bytes.
const LIMIT_BYTES_MIN: u64 = LIMIT_PAGES_MIN * pagetide_addr::PAGE_BYTES;

/// Path of the pool of a VM.
pub(super) fn pool_path(state_dir: &Path, name: &str) -> PathBuf {
    state_dir.join(format!("{name}.{}", pagetide_swap::pool::POOL_SUFFIX))
}

/// Refuses a limit that cannot work.
pub(super) fn check_limit(limit_bytes: Option<u64>, ram_bytes: u64) -> Result<(), ControlError> {
    match limit_bytes {
        Some(limit) if limit < LIMIT_BYTES_MIN => Err(ControlError::wrong_use(format!(
            "a limit of {limit} bytes cannot work: an instruction, a device's rings and a section under eviction \
             need {LIMIT_BYTES_MIN} bytes at least; give --limit {}M or more",
            LIMIT_BYTES_MIN >> 20
        ))),
        Some(limit) if limit > ram_bytes => {
            tracing::info!(
                limit,
                ram_bytes,
                "the limit is above the VM's RAM and will never be reached"
            );
            Ok(())
        }
        _ => Ok(()),
    }
}

fn refused(refusal: &Refusal) -> ControlError {
    ControlError::refused(refusal.to_string())
}

/// Attaches the VM that `request` names.
pub(super) fn attach(
    request: &AttachRequest,
    state_dir: &Path,
    shared: &Shared,
) -> Result<Vm, ControlError> {
    let vmm = VmmProcess::open(request.pid).map_err(|r| refused(&r))?;
    attach_process(&vmm, request, state_dir, shared).map_err(|error| {
        let patience = match error.kind {
            ErrorKind::Failed => ENDING_WAIT,
            // A rule forbids it, whether the process lives or not.
            ErrorKind::WrongUse | ErrorKind::NotFound | ErrorKind::Refused => Duration::ZERO,
        };
        if vmm.ends_within(patience) {
            ControlError::refused(format!(
                "process {} ended while it was being attached ({error}); nothing is kept for it",
                request.pid
            ))
        } else {
            error
        }
    })
}

/// Why a VMM could not be taken over, and which process may be managing it already.
fn not_taken(error: &TakeOverError, vmm: &VmmProcess, layout: &RamLayout) -> ControlError {
    let mut sentence = error.to_string();
    if matches!(error, TakeOverError::Uffd(UffdError::Busy { .. })) {
        for other in hazards::who_else_has_open(vmm, layout) {
            let named = format!("; {} (process {}) has its RAM open", other.name, other.pid);
            sentence.push_str(&named);
        }
    }
    ControlError::refused(sentence)
}

/// Its place under the host's budget.
fn take_seat(
    request: &AttachRequest,
    layout: &RamLayout,
    shared: &Shared,
) -> Result<Seat, ControlError> {
    let change = ShareChange {
        weight: request.weight,
        floor_bytes: request.floor_bytes,
        ceiling_bytes: CeilingChange::to(request.limit_bytes),
    };
    let vm = Newcomer {
        name: &request.name,
        pid: request.pid,
        ram_bytes: layout.len_bytes(),
        resident_bytes: layout.allocated_bytes().map_err(failed)?,
        hugetlb_bytes: layout.huge_bytes(),
    };
    shared.budget.admit(&vm, &change)
}

fn governed(vm: &Vm) -> Weak<dyn Governed> {
    let core: Weak<VmCore> = Arc::downgrade(&vm.core);
    core
}

fn attach_process(
    vmm: &VmmProcess,
    request: &AttachRequest,
    state_dir: &Path,
    shared: &Shared,
) -> Result<Vm, ControlError> {
    let layout = RamLayout::of_process(vmm).map_err(|r| refused(&r))?;
    hazards::refuse_if_shared(vmm, &layout, &shared.spaces.processes()).map_err(|r| refused(&r))?;
    check_limit(request.limit_bytes, layout.len_bytes())?;
    for warning in layout.warnings() {
        tracing::warn!(vm = request.name, "{warning}");
    }
    let identity = Identity {
        name: request.name.clone(),
        pid: request.pid,
        start_time: vmm.identity().start_time,
        vmm: vmm.name().to_owned(),
        mappings: mappings_of(&layout),
    };
    refuse_unseen_pages(&layout)?;
    refuse_without_dpu(shared)?;
    let seat = take_seat(request, &layout, shared)?;
    let claim = Claim::take(&layout, shared)?;
    drain(&claim.mmu.domains(), DRAIN_WAIT)?;
    claim.watch()?;
    let path = pool_path(state_dir, &request.name);
    room::refuse_if_short(&shared.room, layout.len_bytes(), request.limit_bytes)?;
    let pool = Arc::new(make_pool(&path, &layout, &identity, shared)?);
    put_into(&pool, &seat.share().standing().share);
    let undo = UndoPool(Some(Arc::clone(&pool)));
    // If this fails (another userfaultfd, too little privilege, an old kernel), the VM is as it was.
    let taken =
        takeover::take_over(vmm, &layout).map_err(|error| not_taken(&error, vmm, &layout))?;
    pool.set_userfaultfd(taken.number, taken.pause_us);
    tracing::info!(
        vm = request.name,
        pid = request.pid,
        pause_us = taken.pause_us,
        "taken over"
    );
    let userfaultfd = Arc::new(taken.userfaultfd);
    let started = (|| {
        let live = Arc::new(LiveLayout::new(layout.clone()));
        let prepared = Prepared {
            identity,
            vmm: vmm.try_clone().map_err(failed)?,
            layout: live,
            chain: chain_of(&pool, shared),
            pool: Arc::clone(&pool),
            table: empty_table_of(words_of(&pool, shared)),
            mmu: Arc::clone(&claim.mmu),
            userfaultfd: Arc::clone(&userfaultfd),
            seat: seat.share(),
        };
        Vm::start(prepared, shared)
    })();
    match started {
        Ok(vm) => {
            undo.keep();
            claim.keep();
            seat.keep(governed(&vm));
            vm.core.look_for_hazards(Ok(Vec::new()));
            vm.core.enforce_limit();
            vm.core.limit.want_reclaim();
            Ok(vm)
        }
        Err(error) => {
            // Nothing was evicted yet: holes read as zeros again, as before.
            if let Err(error) = takeover::let_go(vmm, &layout, &userfaultfd, taken.number) {
                tracing::error!(vm = request.name, %error, "a failed attach left its userfaultfd in the VMM");
            }
            Err(error)
        }
    }
}

/// The stores of a VM: that in its pool, bounded by the room in the daemon's memory cgroup and by the limits of
/// tiers, and what is below it.
fn chain_of(pool: &Arc<Pool>, shared: &Shared) -> Arc<ChainStore> {
    let store = PoolStore::new(Arc::clone(pool)).within(Arc::clone(&shared.room));
    ChainStore::new(Arc::new(store.in_tiers(&shared.tiers)), &shared.slow)
}

/// Removes the pool of a VM that has ended while nobody served it, and then what it had elsewhere.
fn remove_found(pool: &Pool, shared: &Shared) -> Result<(), ControlError> {
    pool.remove().map_err(failed)?;
    slow::forget(pool, &shared.slow);
    Ok(())
}

/// The words of a pool, bounded likewise.
fn words_of(pool: &Arc<Pool>, shared: &Shared) -> PoolWords {
    PoolWords::of(Arc::clone(pool)).within(Arc::clone(&shared.room))
}

fn make_pool(
    path: &Path,
    layout: &RamLayout,
    identity: &Identity,
    shared: &Shared,
) -> Result<Pool, ControlError> {
    let json = serde_json::to_vec(identity).map_err(failed)?;
    // Room for the words of the present RAM; they are set as each file is allocated.
    let page_count = layout.page_count().next_multiple_of(SECTION_PAGES);
    let pool = Pool::create(path, page_count, random_seed()?, &json);
    let pool = pool.and_then(|pool| pool.within(&shared.pool_cap));
    pool.map_err(|error| match error {
        PoolError::Cap(reached) => ControlError::refused(format!(
            "there is no room for the page words of this VM: {reached}"
        )),
        PoolError::File {
            source: FileError::NoSpace { len_bytes, .. },
            ..
        } => ControlError::refused(format!(
            "the tmpfs of {} has no room for the pool of this VM, which takes {len_bytes} bytes to begin with: \
             make it larger (mount -o remount,size=…), or give the daemon another --state-dir",
            path.display()
        )),
        other => failed(other),
    })
}

fn random_seed() -> Result<u32, ControlError> {
    use std::io::Read;
    let mut bytes = [0; 4];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|error| failed(format!("no random numbers: {error}")))?;
    Ok(u32::from_ne_bytes(bytes))
}

/// Removes the pool of an attach that fails.
struct UndoPool(Option<Arc<Pool>>);

impl UndoPool {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for UndoPool {
    fn drop(&mut self) {
        if let Some(pool) = self.0.take()
            && let Err(error) = pool.remove()
        {
            tracing::warn!(%error, "the pool of a failed attach stays behind");
        }
    }
}

/// Outcome for a pool that was found.
pub(super) enum Found {
    /// The VM is served again.
    Recovered(Box<Vm>),
    /// The pool was no longer of use, and is removed.
    Removed,
}

/// Identity in the pool at `path`.
///
/// # Errors
/// An error message: it cannot be read.
pub(super) fn identity_of(path: &Path) -> Result<Identity, ControlError> {
    identity::of_pool(&Pool::open(path).map_err(failed)?)
}

/// Removes the pool of a VM that could not be recovered and has ended.
///
/// # Errors
/// An error message.
pub(super) fn remove_pool(
    state_dir: &Path,
    name: &str,
    shared: &Shared,
) -> Result<(), ControlError> {
    let pool = Pool::open(&pool_path(state_dir, name)).map_err(failed)?;
    remove_found(&pool, shared)
}

/// Recovers a VM.
///
/// # Errors
/// An error message; the pool stays where it is.
pub(super) fn recover(expected: &mut Expected, shared: &Shared) -> Result<Found, ControlError> {
    let pool = Pool::open(&expected.path).map_err(failed)?;
    expected.pool_is_opened();
    let pool = Arc::new(pool.found_within(&shared.pool_cap).map_err(failed)?);
    let identity = identity::of_pool(&pool)?;
    let vmm = match VmmProcess::reopen(identity.process()) {
        Ok(vmm) => vmm,
        Err(Refusal::NoSuchProcess { .. } | Refusal::PidUsedAgain { .. }) => {
            tracing::info!(
                vm = identity.name,
                pid = identity.pid,
                "the VM ended while no daemon ran"
            );
            remove_found(&pool, shared)?;
            return Ok(Found::Removed);
        }
        Err(refusal) => return Err(refused(&refusal)),
    };
    take_up(&pool, identity, &vmm, expected, shared).or_else(|error| {
        if !vmm.ends_within(ENDING_WAIT) {
            return Err(error);
        }
        tracing::info!(pid = vmm.pid(), %error, "the VM ended while it was being recovered");
        remove_found(&pool, shared)?;
        Ok(Found::Removed)
    })
}

fn take_up(
    pool: &Arc<Pool>,
    identity: Identity,
    vmm: &VmmProcess,
    expected: &mut Expected,
    shared: &Shared,
) -> Result<Found, ControlError> {
    let vmm = vmm.try_clone().map_err(failed)?;
    let recorded = identity.recorded();
    if pool.phase() != Phase::Attached {
        let layout = RamLayout::of_recorded(&vmm, &recorded).map_err(|r| refused(&r))?;
        abandon(pool, &vmm, &layout, shared)?;
        return Ok(Found::Removed);
    }
    let Some(number) = pool.userfaultfd_number() else {
        return Err(failed(format!(
            "pool {} has lost the userfaultfd's number",
            pool.path().display()
        )));
    };
    let resumed = takeover::resume(&vmm, &recorded, number).map_err(failed)?;
    let userfaultfd = Arc::new(resumed.userfaultfd);
    let words = words_of(pool, shared);
    let table = PageTable::reopen(Box::new(words.clone())).map_err(failed)?;
    let layout = leave_out_misfits(&resumed.layout, &table, &words, &userfaultfd);
    let claim = Claim::take(&layout, shared)?;
    claim.watch()?;
    let live = Arc::new(LiveLayout::new(layout.clone()));
    let place = VmPlace::new(Arc::clone(&userfaultfd), Arc::clone(&live));
    forget_what_went(&table, &layout);
    let chain = chain_of(pool, shared);
    adopt_words(&table, &place, &chain, &vmm, &identity)?;
    // Faults whose messages were lost come again, and those at the write protection of rounds that died.
    let everything = PageNo(0).run(layout.page_count());
    place.wake(everything).map_err(failed)?;
    let newcomer = Newcomer {
        name: &identity.name,
        pid: identity.pid,
        ram_bytes: layout.len_bytes(),
        resident_bytes: layout.allocated_bytes().map_err(failed)?,
        hugetlb_bytes: layout.huge_bytes(),
    };
    let seat = expected.seat_of(&newcomer, pool, shared);
    let prepared = Prepared {
        identity,
        vmm,
        layout: live,
        pool: Arc::clone(pool),
        chain,
        table,
        mmu: Arc::clone(&claim.mmu),
        userfaultfd,
        seat,
    };
    let vm = Vm::start(prepared, shared)?;
    if let Err(error) = vm.grant_present() {
        tracing::debug!(%error, "present pages are granted as they are needed");
    }
    pool.count_restart();
    claim.keep();
    expected.is_served_as(governed(&vm));
    vm.core.enforce_limit();
    vm.core.limit.want_reclaim();
    Ok(Found::Recovered(Box::new(vm)))
}

/// Removes words from the table that belong to RAM the VM no longer has, or to a part of a removal that
/// the dead daemon had begun.
pub(super) fn forget_what_went(table: &PageTable, layout: &RamLayout) {
    let sections: Vec<SectionNo> = table.sections().collect();
    for section in sections {
        for part in hotplug::outside(layout, table.pages_of(section)) {
            recovery::forget_pages(table, part);
        }
    }
}

/// The layout without files that the dead daemon had only begun to take over, if the pool cannot hold
/// their words: none of their pages was ever evicted, and they are new RAM again.
pub(super) fn leave_out_misfits(
    layout: &RamLayout,
    table: &PageTable,
    words: &PoolWords,
    userfaultfd: &Userfaultfd,
) -> RamLayout {
    let mut left = layout.clone();
    for file in layout.files() {
        let pages = file.pages();
        let is_known = |section| !table.pages_of(section).intersect(pages).is_empty();
        if pages.sections().any(is_known) || left.files().len() == 1 {
            continue;
        }
        let fits = if pages.end.0 > words.capacity_pages() {
            Err("it is past the end of the pool".to_owned())
        } else {
            words.make_room(pages).map_err(|error| error.to_string())
        };
        if let Err(why) = fits {
            tracing::warn!(file = %file.key(), why, "RAM that was being plugged in is left out for now");
            hotplug::unwatch(userfaultfd, &hotplug::only(&left, file.key()));
            left = left.without(file.key());
        }
    }
    left
}

fn adopt_words(
    table: &PageTable,
    place: &VmPlace,
    chain: &ChainStore,
    vmm: &VmmProcess,
    identity: &Identity,
) -> Result<(), ControlError> {
    let mut wrong = None;
    let report = recovery::recover_words(table, place, |page, content| {
        if let Err(error) = chain.adopt(content) {
            wrong.get_or_insert((page, error));
        }
    });
    let report = report.map_err(|error| {
        if matches!(error, recovery::RecoveryError::ForeignPage { .. }) {
            match vmm.try_clone() {
                Ok(process) => {
                    super::sink::VmIncidents::new(&identity.name, process)
                        .stop_vm(error.to_string());
                }
                Err(error) => tracing::error!(%error, "the VM cannot be held to be stopped"),
            }
        }
        failed(error)
    })?;
    if let Some((page, error)) = wrong {
        return Err(failed(format!("{page} of {}: {error}", identity.name)));
    }
    chain.finish_adoption().map_err(failed)?;
    tracing::info!(
        vm = identity.name,
        present_pages = report.present_pages,
        stored_pages = report.stored_pages,
        mended_words = report.mended_words,
        "recovered"
    );
    Ok(())
}

/// A daemon died in the middle of an attach or a detach: nothing is stored, so the VM is released.
fn abandon(
    pool: &Pool,
    vmm: &VmmProcess,
    layout: &RamLayout,
    shared: &Shared,
) -> Result<(), ControlError> {
    let number = match pool.userfaultfd_number() {
        Some(number) => Some(number),
        None => takeover::find_inside(vmm).map_err(failed)?,
    };
    if let Some(number) = number {
        takeover::abandon(vmm, layout, number).map_err(failed)?;
    }
    tracing::info!(
        pid = vmm.pid(),
        "an attach or detach that did not finish was ended: the VM is released"
    );
    remove_found(pool, shared)
}
