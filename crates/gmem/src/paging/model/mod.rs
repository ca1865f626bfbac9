// SPDX-License-Identifier: Apache-2.0
//! The fault path and the eviction under loom: every interleaving, up to a bound of preemptions.
//!
//! The kernel is a mutex with one page in it; a guest that meets an absent or
//! protected page faults and tries again, as a vCPU does. What is checked is
//! what a user cares for: the last write is what is read in the end, wherever
//! the page is; every fault is answered once; stored content is freed once; and
//! of memory that was removed nothing is ever reached.

mod huge;
mod kernel;
mod section;
mod slow_fill;

use kernel::{Kernel, Model, space};

use crate::{
    Activation, AddressSpace, Admission, AllocPolicy, Backing, Blank, Cause, Committed, Content,
    ContentStore, Corrections, Device, Fault, FaultOutcome, GrowthError, Incidents, Installed,
    LoadDone, MemoryParts, Mmu, MmuError, MmuLimits, Mode, Overwrite, PageState, PageTable,
    PageWord, PagedMemory, Place, PlaceError, Restrict, Restricted, StoreError, TableId,
    VolatileWords, Wait,
};
use loom::sync::Mutex;
use pagetide_addr::{Access, DeviceId, PageNo, PageSet, SectionNo};
use std::sync::Arc;

const PAGE: PageNo = PageNo(0);
/// Where a copy of the stored content lies, if a model has one.
const COPY: Content = match Content::at(2) {
    Some(content) => content,
    None => panic!("2 is a place"),
};
const OLD: u8 = 7;
const NEW: u8 = 9;
/// What a device writes that lets its transfers land in a buffer of its own.
const BOUNCED: u8 = 5;

fn request(device: DeviceId) -> Fault {
    Fault {
        device,
        pages: PAGE.single(),
        access: Access::Write,
    }
}

fn fault(device: DeviceId) -> Cause<'static> {
    Cause::Fault(request(device))
}

/// A vCPU's store: it faults until the page is there and writable.
fn store_as_vcpu(model: &Model, space: &PagedMemory) {
    store_served_by(model, || {
        space.fault(&fault(DeviceId::VCPUS), Wait::Here);
    });
}

/// The same, its faults served by `serve`.
fn store_served_by(model: &Model, serve: impl Fn()) {
    loop {
        let stored = model.with(|k| {
            let can = k.present.is_some() && !k.write_protected;
            if can {
                k.present = Some(NEW);
            }
            can
        });
        if stored {
            return;
        }
        serve();
        loom::thread::yield_now();
    }
}

/// A device's DMA: it takes a lease if its bitmap allows, else it faults and tries again, until it is
/// refused.
fn store_as_device_or_be_refused(model: &Model, space: &PagedMemory, byte: u8) -> FaultOutcome {
    loop {
        let leased = model.with(|k| {
            k.device_busy = k.device_may;
            k.device_may
        });
        if leased {
            model.with(|k| {
                assert!(!k.removed, "DMA reaches removed memory");
                k.present = Some(byte);
            });
            model.with(|k| k.device_busy = false);
            return FaultOutcome::Present;
        }
        let outcome = fault_as_device(space);
        if outcome != FaultOutcome::Present {
            return outcome;
        }
    }
}

fn store_as_device(model: &Model, space: &PagedMemory) {
    let outcome = store_as_device_or_be_refused(model, space, NEW);
    assert_eq!(outcome, FaultOutcome::Present);
}

/// The answers to a device's fault. (Not the checker's mutex: to look for one is no step of a model.)
struct Answers(Arc<std::sync::Mutex<Vec<FaultOutcome>>>);

impl Answers {
    /// The answer, if it has come.
    fn get(&self) -> Option<FaultOutcome> {
        let answers = self.0.lock();
        let answers = answers.unwrap_or_else(std::sync::PoisonError::into_inner);
        match answers[..] {
            [] => None,
            [outcome] => Some(outcome),
            _ => panic!("answered more than once: {answers:?}"),
        }
    }
}

fn ask_as_device(space: &PagedMemory) -> Answers {
    let answers = Answers(Arc::default());
    let told = answers.0.clone();
    let reply = Box::new(move |outcome| {
        let answers = told.lock();
        (answers.unwrap_or_else(std::sync::PoisonError::into_inner)).push(outcome);
    });
    space.fault(&fault(DeviceId(1)), Wait::Reply(reply));
    answers
}

/// A device's fault, answered once.
fn fault_as_device(space: &PagedMemory) -> FaultOutcome {
    let answers = ask_as_device(space);
    loop {
        match answers.get() {
            None => loom::thread::yield_now(),
            Some(outcome) => return outcome,
        }
    }
}

/// A device's transfer of a whole page, which has arrived in its own buffer: the page is overwritten, or
/// else written under a lease.
fn overwrite_as_device(model: &Model, space: &PagedMemory) -> FaultOutcome {
    let overwrite = Overwrite {
        fault: request(DeviceId(1)),
        content: &[BOUNCED; 4096],
        still_wanted: &|| true,
    };
    let done = space.fault(&Cause::Overwrite(overwrite), Wait::Here);
    let done = done.expect("a call that may wait is over");
    match (done.outcome, done.installed) {
        (FaultOutcome::Present, 0) => store_as_device_or_be_refused(model, space, BOUNCED),
        (outcome, _) => outcome,
    }
}

/// A vCPU's load: it faults until the page is there.
fn load_as_vcpu(model: &Model, space: &PagedMemory) -> u8 {
    loop {
        if let Some(seen) = model.with(|k| k.present) {
            return seen;
        }
        space.fault(&fault(DeviceId::VCPUS), Wait::Here);
        loom::thread::yield_now();
    }
}

/// The page's memory is taken out of the VM: it may be gone as soon as that is done.
fn remove(model: &Model, space: &PagedMemory) {
    loop {
        match space.deallocate(PAGE.single()) {
            Ok(()) => break,
            Err(GrowthError::Busy { .. } | GrowthError::Loading { .. }) => {
                loom::thread::yield_now();
            }
            Err(error) => panic!("{error}"),
        }
    }
    model.with(|k| {
        assert!(!k.device_may, "a device may use removed memory");
        assert!(!k.device_busy, "a device is using removed memory");
        k.removed = true;
        k.present = None;
    });
    assert_eq!(space.table().word(PAGE).state(), PageState::Unallocated);
    assert_eq!(space.table().page_count(), 0);
}

fn evict(model: &Model, space: &PagedMemory) {
    let section = SectionNo(0);
    let wanted = PageSet::of_range(section, PAGE.single());
    let Ok(mut round) = space.begin_eviction(section, &wanted) else {
        return;
    };
    let mut bytes = [0; 4096];
    round.read(PAGE.single(), &mut bytes).unwrap();
    model.with(|k| k.stored = Some(bytes[0]));
    let content = Content::at(1).unwrap();
    let Committed { unused, .. } = round.commit(&[(PAGE, content)]);
    for content in unused {
        model.free(content);
    }
}

/// The content of the page, wherever it is in the end.
fn final_content(model: &Model, space: &PagedMemory) -> u8 {
    let state = space.table().word(PAGE).state();
    model.with(|k| match state {
        PageState::Present => {
            assert_eq!(k.stored, None, "a stored copy was left behind");
            k.present.expect("present")
        }
        PageState::Stored(content) => {
            assert_eq!(k.present, None);
            let bytes = if content == COPY { k.copy } else { k.stored };
            bytes.expect("stored")
        }
        other => panic!("left in {other:?}"),
    })
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

fn present() -> Kernel {
    Kernel {
        present: Some(OLD),
        device_may: true,
        ..Kernel::default()
    }
}

#[test]
fn loom_store_of_a_vcpu_survives_an_eviction() {
    check(|| {
        let (model, space) = space(present(), PageState::Present);
        let evictor = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || evict(&model, &space))
        };
        store_as_vcpu(&model, &space);
        evictor.join().unwrap();
        assert_eq!(final_content(&model, &space), NEW);
    });
}

#[test]
fn loom_store_of_a_device_survives_an_eviction() {
    check(|| {
        let (model, space) = space(present(), PageState::Present);
        let evictor = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || evict(&model, &space))
        };
        store_as_device(&model, &space);
        evictor.join().unwrap();
        assert_eq!(final_content(&model, &space), NEW);
    });
}

#[test]
fn loom_two_askers_fill_once_and_both_are_answered() {
    check(|| {
        let kernel = Kernel {
            stored: Some(OLD),
            ..Kernel::default()
        };
        let (model, space) = space(kernel, PageState::Stored(Content::at(1).unwrap()));
        let device = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || store_as_device(&model, &space))
        };
        space.fault(&fault(DeviceId::VCPUS), Wait::Here);
        device.join().unwrap();
        assert_eq!(final_content(&model, &space), NEW);
        assert_eq!(model.with(|k| k.frees), 1);
    });
}

#[test]
fn loom_fault_against_a_removal_is_served_before_or_refused() {
    check(|| {
        let kernel = Kernel {
            stored: Some(OLD),
            ..Kernel::default()
        };
        let (model, space) = space(kernel, PageState::Stored(Content::at(1).unwrap()));
        let remover = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || remove(&model, &space))
        };
        let outcome = fault_as_device(&space);
        assert!(matches!(
            outcome,
            FaultOutcome::Present | FaultOutcome::OutOfRange
        ));
        remover.join().unwrap();
        assert_eq!(model.with(|k| (k.frees, k.stored)), (1, None));
        assert_eq!(fault_as_device(&space), FaultOutcome::OutOfRange);
    });
}

#[test]
fn loom_dma_never_reaches_removed_memory() {
    check(|| {
        let kernel = Kernel {
            stored: Some(OLD),
            ..Kernel::default()
        };
        let (model, space) = space(kernel, PageState::Stored(Content::at(1).unwrap()));
        let remover = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || remove(&model, &space))
        };
        let outcome = store_as_device_or_be_refused(&model, &space, NEW);
        assert!(matches!(
            outcome,
            FaultOutcome::Present | FaultOutcome::OutOfRange
        ));
        remover.join().unwrap();
        assert!(model.with(|k| !k.device_may));
    });
}

#[test]
fn loom_device_that_is_attached_during_a_removal_gets_nothing_of_it() {
    check(|| {
        let kernel = Kernel {
            device_may: false,
            ..present()
        };
        let (model, space) = space(kernel, PageState::Present);
        let remover = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || remove(&model, &space))
        };
        space.grant_present(DeviceId(1)).unwrap();
        remover.join().unwrap();
        assert!(model.with(|k| !k.device_may));
    });
}

#[test]
fn loom_removal_under_an_eviction_frees_stored_content_once() {
    check(|| {
        let (model, space) = space(present(), PageState::Present);
        let evictor = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || evict(&model, &space))
        };
        remove(&model, &space);
        evictor.join().unwrap();
        assert_eq!(model.with(|k| k.stored), None, "content is left behind");
    });
}

/// A vCPU's fault as its reader serves it, or whoever the reader hands it to because it would wait.
fn serve_as_reader(space: &PagedMemory) {
    let cause = fault(DeviceId::VCPUS);
    if space.fault(&cause, Wait::Begin).is_none() {
        space.fault(&cause, Wait::Here);
    }
}

#[test]
fn loom_faults_served_by_reader_and_server_fill_once() {
    check(|| {
        let (kernel, state) = stored();
        let (model, space) = space(kernel, state);
        let server = {
            let space = space.clone();
            loom::thread::spawn(move || serve_as_reader(&space))
        };
        serve_as_reader(&space);
        server.join().unwrap();
        // Nobody's vCPU is left to sleep: whoever joined was woken by the fill.
        assert_eq!(space.table().word(PAGE).state(), PageState::Present);
        assert_eq!(final_content(&model, &space), OLD);
        assert_eq!(model.with(|k| k.frees), 1);
    });
}

#[test]
fn loom_store_served_without_waiting_survives_an_eviction() {
    check(|| {
        let (model, space) = space(present(), PageState::Present);
        let evictor = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || evict(&model, &space))
        };
        store_served_by(&model, || serve_as_reader(&space));
        evictor.join().unwrap();
        assert_eq!(final_content(&model, &space), NEW);
    });
}

#[test]
fn loom_fault_without_waiting_against_a_removal_is_served_before_or_refused() {
    check(|| {
        let (kernel, state) = stored();
        let (model, space) = space(kernel, state);
        let remover = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || remove(&model, &space))
        };
        serve_as_reader(&space);
        remover.join().unwrap();
        assert_eq!(model.with(|k| (k.frees, k.stored)), (1, None));
    });
}

fn stored() -> (Kernel, PageState) {
    let kernel = Kernel {
        stored: Some(OLD),
        ..Kernel::default()
    };
    (kernel, PageState::Stored(Content::at(1).unwrap()))
}

#[test]
fn loom_overwrite_against_a_load_shows_the_old_bytes_or_the_new_and_ends_with_the_new() {
    check(|| {
        let (kernel, state) = stored();
        let (model, space) = space(kernel, state);
        let device = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || overwrite_as_device(&model, &space))
        };
        let seen = load_as_vcpu(&model, &space);
        assert!(matches!(seen, OLD | BOUNCED), "{seen}");
        assert_eq!(device.join().unwrap(), FaultOutcome::Present);
        assert_eq!(final_content(&model, &space), BOUNCED);
        assert_eq!(model.with(|k| k.frees), 1);
    });
}

#[test]
fn loom_overwrite_against_a_store_loses_neither_to_the_old_bytes() {
    check(|| {
        let (kernel, state) = stored();
        let (model, space) = space(kernel, state);
        let device = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || overwrite_as_device(&model, &space))
        };
        store_as_vcpu(&model, &space);
        assert_eq!(device.join().unwrap(), FaultOutcome::Present);
        // They race, and the last one wins.
        let last = final_content(&model, &space);
        assert!(matches!(last, NEW | BOUNCED), "{last}");
        assert_eq!(model.with(|k| k.frees), 1);
    });
}

#[test]
fn loom_overwrite_survives_an_eviction() {
    check(|| {
        let (model, space) = space(present(), PageState::Present);
        let evictor = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || evict(&model, &space))
        };
        assert_eq!(overwrite_as_device(&model, &space), FaultOutcome::Present);
        evictor.join().unwrap();
        assert_eq!(final_content(&model, &space), BOUNCED);
    });
}

#[test]
fn loom_overwritten_page_may_be_evicted_at_once() {
    check(|| {
        let (kernel, state) = stored();
        let (model, space) = space(kernel, state);
        let evictor = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || evict(&model, &space))
        };
        assert_eq!(overwrite_as_device(&model, &space), FaultOutcome::Present);
        evictor.join().unwrap();
        assert_eq!(final_content(&model, &space), BOUNCED);
    });
}

/// A device wants a page that it saw at `posted_ns` in a posted buffer, whose content nobody needs.
fn blank_as_device(space: &PagedMemory, posted_ns: u64) -> FaultOutcome {
    let fault = request(DeviceId(1));
    let cause = Cause::Blank(Blank { fault, posted_ns });
    let done = space.fault(&cause, Wait::Here);
    done.expect("a call that may wait is over").outcome
}

#[test]
fn loom_blank_against_a_load_shows_the_old_bytes_or_zeros_and_never_another_than_before() {
    check(|| {
        let (kernel, state) = stored();
        let (model, space) = space(kernel, state);
        let posted_ns = model.now_ns();
        let device = {
            let space = space.clone();
            loom::thread::spawn(move || blank_as_device(&space, posted_ns))
        };
        let seen = load_as_vcpu(&model, &space);
        assert!(matches!(seen, OLD | 0), "{seen}");
        assert_eq!(device.join().unwrap(), FaultOutcome::Present);
        assert_eq!(final_content(&model, &space), seen);
    });
}

#[test]
fn loom_blank_that_comes_late_takes_nothing_that_was_written_since() {
    check(|| {
        let (kernel, state) = stored();
        let (model, space) = space(kernel, state);
        let posted_ns = model.now_ns();
        let device = {
            let space = space.clone();
            loom::thread::spawn(move || blank_as_device(&space, posted_ns))
        };
        // Its buffer went back to the driver, which uses the page; then it is evicted.
        store_as_vcpu(&model, &space);
        evict(&model, &space);
        assert_eq!(device.join().unwrap(), FaultOutcome::Present);
        assert_eq!(final_content(&model, &space), NEW);
    });
}

#[test]
fn loom_blank_against_the_eviction_of_what_was_read_since_shows_that_again() {
    check(|| {
        let (kernel, state) = stored();
        let (model, space) = space(kernel, state);
        let posted_ns = model.now_ns();
        let seen = load_as_vcpu(&model, &space);
        let device = {
            let space = space.clone();
            loom::thread::spawn(move || blank_as_device(&space, posted_ns))
        };
        evict(&model, &space);
        assert_eq!(load_as_vcpu(&model, &space), seen);
        assert_eq!(device.join().unwrap(), FaultOutcome::Present);
    });
}

#[test]
fn loom_overwrite_against_a_removal_is_done_before_or_refused() {
    check(|| {
        let (kernel, state) = stored();
        let (model, space) = space(kernel, state);
        let remover = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || remove(&model, &space))
        };
        let outcome = overwrite_as_device(&model, &space);
        assert!(matches!(
            outcome,
            FaultOutcome::Present | FaultOutcome::OutOfRange
        ));
        remover.join().unwrap();
        assert_eq!(model.with(|k| (k.frees, k.stored)), (1, None));
    });
}
