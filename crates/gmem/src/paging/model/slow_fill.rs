// SPDX-License-Identifier: Apache-2.0
//! Slow fills: the load ends on a thread of the store's, at any moment after it has begun.

use super::{
    COPY, DeviceId, FaultOutcome, NEW, OLD, PAGE, PageState, Wait, ask_as_device, check, evict,
    fault, fault_as_device, final_content,
    kernel::{Kernel, Memory, Model, Tier, space, space_with},
    overwrite_as_device, remove, store_as_device, stored,
};
use crate::{Content, ContentStore as _, Move, Relocation};
use pagetide_addr::SectionNo;

/// The page is stored far away, and copied to where it is at hand.
fn far() -> (Model, Memory) {
    let (kernel, state) = stored();
    let kernel = Kernel {
        copy: kernel.stored,
        ..kernel
    };
    space_with(kernel, state, Tier::Far)
}

/// The same, and a vCPU's fault has begun to load it.
fn loading() -> (Model, Memory) {
    let (model, space) = far();
    space.fault(&fault(DeviceId::VCPUS), Wait::Here);
    (model, space)
}

fn deliver_aside(model: &Model) -> loom::thread::JoinHandle<()> {
    let model = model.clone();
    loom::thread::spawn(move || model.deliver())
}

#[test]
fn loom_slow_fill_answers_whoever_joins_or_comes_after_it() {
    check(|| {
        let (model, space) = loading();
        let tier = deliver_aside(&model);
        assert_eq!(fault_as_device(&space), FaultOutcome::Present);
        tier.join().unwrap();
        assert_eq!(final_content(&model, &space), OLD);
        assert!(model.with(|k| k.device_may));
        assert_eq!(model.with(|k| k.frees), 1);
    });
}

#[test]
fn loom_two_devices_join_a_slow_fill_and_both_store() {
    check(|| {
        let (model, space) = loading();
        let tier = deliver_aside(&model);
        let device = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || store_as_device(&model, &space))
        };
        let answers = ask_as_device(&space);
        tier.join().unwrap();
        device.join().unwrap();
        assert_eq!(answers.get(), Some(FaultOutcome::Present));
        assert_eq!(final_content(&model, &space), NEW);
        assert_eq!(model.with(|k| k.frees), 1);
    });
}

#[test]
fn loom_slow_fill_against_a_relocation_wins_or_loses_whole() {
    check(|| {
        let (model, space) = far();
        let mover = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || {
                let begun = space.begin_relocation(SectionNo(0));
                relocate(&model, &space, begun);
            })
        };
        let answers = ask_as_device(&space);
        model.deliver();
        mover.join().unwrap();
        assert_eq!(answers.get(), Some(FaultOutcome::Present));
        assert_eq!(final_content(&model, &space), OLD);
        // Each of the two contents, once.
        assert_eq!(model.with(|k| (k.frees, k.copy)), (2, None));
    });
}

/// The page has been copied.
fn relocate(model: &Model, space: &Memory, begun: Relocation) {
    let one = Move {
        page: PAGE,
        from: Content::at(1).unwrap(),
        to: COPY,
    };
    let done = space.relocate(begun, &[one]);
    for content in done.replaced.into_iter().chain(done.unused) {
        model.free(content);
    }
}

#[test]
fn loom_relocation_never_brings_back_what_a_page_held_before_it_was_evicted_anew() {
    check(|| {
        let (kernel, state) = stored();
        let (model, space) = space(kernel, state);
        let mover = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || {
                let begun = space.begin_relocation(SectionNo(0));
                let is_copied = model.with(|k| {
                    k.copy = k.stored;
                    k.copy.is_some()
                });
                if is_copied {
                    relocate(&model, &space, begun);
                }
            })
        };
        // Without a moment at which the mover must run.
        space.fault(&fault(DeviceId::VCPUS), Wait::Here);
        model.with(|k| {
            assert!(!k.write_protected);
            let before = k.present.replace(NEW);
            assert_eq!(before, Some(OLD));
        });
        // Into the place of the old content, once that is free.
        if model.with(|k| k.stored.is_none()) {
            evict(&model, &space);
        }
        mover.join().unwrap();
        assert_eq!(final_content(&model, &space), NEW);
    });
}

#[test]
fn loom_slow_fill_against_a_removal_installs_before_it_or_not_at_all() {
    check(|| {
        let (model, space) = far();
        let remover = {
            let (model, space) = (model.clone(), space.clone());
            loom::thread::spawn(move || remove(&model, &space))
        };
        let answers = ask_as_device(&space);
        model.deliver();
        let outcome = answers.get().expect("its load has ended");
        assert!(matches!(
            outcome,
            FaultOutcome::Present | FaultOutcome::OutOfRange
        ));
        remover.join().unwrap();
        assert_eq!(model.with(|k| (k.frees, k.stored)), (1, None));
    });
}

#[test]
fn loom_load_that_is_dropped_leaves_nobody_waiting_and_the_page_stored() {
    check(|| {
        let (model, space) = loading();
        let tier = {
            let model = model.clone();
            loom::thread::spawn(move || drop(model.take_load()))
        };
        let answers = ask_as_device(&space);
        tier.join().unwrap();
        // It may have come too late to join, and begun a load of its own: then it waits for that, or
        // was told of the failure all the same, for it came before that was over.
        let again = model.with(|k| k.loading.is_some());
        let early = answers.get();
        assert!(early == Some(FaultOutcome::Lost) || (early.is_none() && again));
        model.deliver();
        let state = match again {
            true => PageState::Present,
            false => PageState::Stored(Content::at(1).unwrap()),
        };
        assert_eq!(answers.get(), early.or(Some(FaultOutcome::Present)));
        assert_eq!(space.table().word(PAGE).state(), state);
        assert_eq!(final_content(&model, &space), OLD);
        assert_eq!(model.with(|k| k.failures), 1);
    });
}

#[test]
fn loom_slow_fill_against_an_overwrite_ends_with_the_bytes_of_the_device() {
    check(|| {
        let (model, space) = loading();
        let tier = deliver_aside(&model);
        assert_eq!(overwrite_as_device(&model, &space), FaultOutcome::Present);
        tier.join().unwrap();
        assert_eq!(final_content(&model, &space), super::BOUNCED);
        assert_eq!(model.with(|k| k.frees), 1);
    });
}

#[test]
fn loom_slowly_filled_page_may_be_evicted_at_once() {
    check(|| {
        let (model, space) = loading();
        let tier = deliver_aside(&model);
        evict(&model, &space);
        tier.join().unwrap();
        assert_eq!(final_content(&model, &space), OLD);
    });
}
