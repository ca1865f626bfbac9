// SPDX-License-Identifier: Apache-2.0
//! Huge pages: each split, each collapse, each fill and punch of a section happens once for each time that it
//! is due, and no page of it is lost or old, in every interleaving.
//!
//! # Split and merge (Taiji 4.2.2)
//! In Taiji the hypervisor's page tables are split at the first page of a section that goes and merged after
//! the last that comes back. Here the tables are the kernel's, and what is split and merged are huge pages:
//!
//! | | shared memory in huge pages (THP) | hugetlbfs |
//! |---|---|---|
//! | split | before the first page of a section goes, when it is taken out: `HugePages::split` (crate `vmm`) | never |
//! | merge | after the last page has come back, when it is sampled in use: `HugePages::can_merge`, `MADV_COLLAPSE` | never |
//! | partly present | pages come and go one by one | never: [`crate::paging`]'s `whole` |
//!
//! A split or merge changes no content, so it races with fills and evictions harmlessly, but for one case: a
//! section that is merged again *between its split and its punches*, while somebody holds a reference to it.
//! The kernel then zeroes what is punched, and keeps it. So a section is merged only by the reclaim thread,
//! and only while it does not *stand* ready for eviction (`Selection::stands`, the reserve of crate `swap`):
//!
//! ```text
//!   reclaim thread    take out: unmap, split ─► offer (stands) ··· outcome applied ─► sample, merge
//!   any evictor                                  claim ─► evict ─► release with outcome
//! ```
//! The models below run that order; the last one leaves it out, and the checker finds the loss.

use super::check;
use super::section::{
    DPU, Kept, Memory, Model, SECTION, both, content, evict, fault, final_contents, present,
    remove, store_as_device, store_as_vcpu, stored,
};
use super::{NEW, OLD};
use crate::{ContentStore as _, FaultOutcome, Move, PageState};
use loom::sync::Mutex;
use loom::thread::{self, JoinHandle};
use pagetide_addr::{DeviceId, PageNo};
use std::sync::Arc;

const FIRST: PageNo = PageNo(0);
const LAST: PageNo = PageNo(1);

fn beside<R: 'static>(
    (model, space): (&Model, &Memory),
    act: impl FnOnce(&Model, &Memory) -> R + 'static,
) -> JoinHandle<R> {
    let (model, space) = (model.clone(), space.clone());
    thread::spawn(move || act(&model, &space))
}

fn evicts((model, space): (&Model, &Memory)) -> JoinHandle<bool> {
    beside((model, space), |model, space| {
        evict(model, space, both(), 4)
    })
}

#[test]
fn loom_whole_two_faults_on_two_pages_of_a_section_fill_it_once() {
    check(|| {
        let (model, space) = stored(Kept::Hugetlb);
        model.with(|k| k.stored[3] = None);
        let device = beside((&model, &space), |model, space| {
            store_as_device(model, space, FIRST);
        });
        store_as_vcpu(&model, &space, LAST);
        device.join().unwrap();
        assert_eq!(final_contents(&model, &space), [NEW, NEW]);
        assert_eq!(model.with(|k| (k.installs, k.frees)), (1, 2));
    });
}

#[test]
fn loom_whole_store_of_a_vcpu_survives_an_eviction() {
    check(|| {
        let (model, space) = present(Kept::Hugetlb);
        let evictor = evicts((&model, &space));
        store_as_vcpu(&model, &space, LAST);
        let went = u32::from(evictor.join().unwrap());
        assert_eq!(final_contents(&model, &space), [OLD, NEW]);
        assert_eq!(model.with(|k| k.punches), went);
        assert!(model.with(|k| k.installs) <= went);
    });
}

#[test]
fn loom_whole_store_of_a_device_survives_an_eviction() {
    check(|| {
        let (model, space) = present(Kept::Hugetlb);
        let evictor = evicts((&model, &space));
        store_as_device(&model, &space, LAST);
        evictor.join().unwrap();
        assert_eq!(final_contents(&model, &space), [OLD, NEW]);
    });
}

#[test]
fn loom_whole_section_that_is_filled_may_be_evicted_at_once() {
    check(|| {
        let (model, space) = stored(Kept::Hugetlb);
        model.with(|k| k.stored[3] = None);
        let evictor = evicts((&model, &space));
        assert_eq!(fault(&space, DPU, LAST), FaultOutcome::Present);
        let went = u32::from(evictor.join().unwrap());
        assert_eq!(final_contents(&model, &space), [OLD, OLD]);
        assert_eq!(model.with(|k| (k.installs, k.punches)), (1, went));
    });
}

#[test]
fn loom_whole_fill_against_a_relocation_reads_one_content_or_the_other_and_frees_both() {
    check(|| {
        let (model, space) = stored(Kept::Hugetlb);
        let mover = beside((&model, &space), |model, space| {
            let begun = space.begin_relocation(SECTION);
            let one = Move {
                page: LAST,
                from: content(2),
                to: content(3),
            };
            let done = space.relocate(begun, &[one]);
            for content in done.replaced.into_iter().chain(done.unused) {
                model.free(content);
            }
        });
        let device = beside((&model, &space), |_, space| fault(space, DPU, LAST));
        let outcome = fault(&space, DeviceId::VCPUS, FIRST);
        mover.join().unwrap();
        assert_eq!(
            (outcome, device.join().unwrap()),
            (FaultOutcome::Present, FaultOutcome::Present)
        );
        let lead = space.table().word(FIRST).state();
        assert_eq!(lead, PageState::Present);
        assert_eq!(final_contents(&model, &space), [OLD, OLD]);
        assert_eq!(model.with(|k| (k.installs, k.frees)), (1, 3));
    });
}

#[test]
fn loom_whole_fill_against_a_removal_is_before_it_or_not_at_all() {
    check(|| {
        let (model, space) = stored(Kept::Hugetlb);
        model.with(|k| k.stored[3] = None);
        let remover = beside((&model, &space), |model, space| remove(model, space));
        let outcome = fault(&space, DPU, LAST);
        assert!(matches!(
            outcome,
            FaultOutcome::Present | FaultOutcome::OutOfRange
        ));
        remover.join().unwrap();
        let left = model.with(|k| k.stored.iter().flatten().count());
        assert_eq!((left, model.with(|k| k.frees)), (0, 2));
    });
}

/// What is known of the section to those who evict and merge.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    Free,
    Ready,
    Claimed,
    /// Evicted by another thread; the reclaim thread has not seen that yet.
    Over,
}

type Reserve = Arc<Mutex<Standing>>;

fn change(reserve: &Reserve, from: Standing, to: Standing) -> bool {
    let mut standing = reserve.lock().unwrap();
    let is = *standing == from;
    if is {
        *standing = to;
    }
    is
}

/// A fill's thread that makes room, or one of the reclaimer's helpers.
fn evict_what_is_ready(model: &Model, space: &Memory, reserve: &Reserve) {
    if change(reserve, Standing::Ready, Standing::Claimed) {
        // Page by page, as batches do.
        evict(model, space, FIRST.single(), 4);
        evict(model, space, LAST.single(), 5);
        change(reserve, Standing::Claimed, Standing::Over);
    }
}

/// The reclaim thread samples the section, and merges it if it is free.
fn sample(model: &Model, reserve: &Reserve) {
    change(reserve, Standing::Over, Standing::Free);
    if *reserve.lock().unwrap() == Standing::Free {
        model.collapse();
    }
}

/// A reference to the folio that comes and goes: I/O, compaction.
fn hold_for_a_moment(model: &Model) {
    model.with(|k| k.held = true);
    model.with(|k| k.held = false);
}

#[test]
fn loom_thp_section_is_split_before_it_goes_and_merged_when_all_of_it_is_back() {
    check(|| {
        let (model, space) = present(Kept::Whole);
        let reserve = Arc::new(Mutex::new(Standing::Free));
        // Taken out: only one that is in small pages is offered.
        assert!(model.split());
        change(&reserve, Standing::Free, Standing::Ready);
        let evictor = {
            let reserve = Arc::clone(&reserve);
            beside((&model, &space), move |model, space| {
                evict_what_is_ready(model, space, &reserve);
            })
        };
        let guest = beside((&model, &space), |model, space| {
            store_as_vcpu(model, space, LAST);
        });
        sample(&model, &reserve);
        hold_for_a_moment(&model);
        sample(&model, &reserve);
        evictor.join().unwrap();
        guest.join().unwrap();
        assert_eq!(final_contents(&model, &space), [OLD, NEW]);
        // All of it comes back, and is made one page again: once.
        fault(&space, DPU, FIRST);
        fault(&space, DPU, LAST);
        sample(&model, &reserve);
        sample(&model, &reserve);
        assert_eq!(model.with(|k| k.present), [Some(OLD), Some(NEW)]);
        assert_eq!(model.with(|k| (k.splits, k.collapses)), (1, 1));
        assert_eq!(model.with(|k| k.kept), Kept::Whole);
    });
}

#[test]
fn loom_thp_section_that_is_held_is_not_split_and_does_not_go() {
    check(|| {
        let (model, space) = present(Kept::Whole);
        let reserve = Arc::new(Mutex::new(Standing::Free));
        let holder = beside((&model, &space), |model, _| hold_for_a_moment(model));
        if model.split() {
            change(&reserve, Standing::Free, Standing::Ready);
        }
        evict_what_is_ready(&model, &space, &reserve);
        holder.join().unwrap();
        assert_eq!(final_contents(&model, &space), [OLD, OLD]);
        let (splits, punches) = model.with(|k| (k.splits, k.punches));
        assert_eq!(punches, 2 * splits);
    });
}

#[test]
fn loom_thp_merge_waits_for_the_page_whose_load_is_under_way() {
    check(|| {
        let (model, space) = stored(Kept::Small);
        model.with(|k| (k.far, k.stored[3]) = (Some(2), None));
        let reserve = Arc::new(Mutex::new(Standing::Free));
        fault(&space, DeviceId::VCPUS, FIRST);
        fault(&space, DeviceId::VCPUS, LAST);
        let tier = beside((&model, &space), |model, _| model.deliver());
        let guest = beside((&model, &space), |model, space| {
            store_as_vcpu(model, space, FIRST);
        });
        sample(&model, &reserve);
        sample(&model, &reserve);
        tier.join().unwrap();
        guest.join().unwrap();
        sample(&model, &reserve);
        assert_eq!(final_contents(&model, &space), [NEW, OLD]);
        assert_eq!(model.with(|k| (k.collapses, k.kept)), (1, Kept::Whole));
        assert_eq!(model.with(|k| (k.installs, k.frees)), (2, 2));
    });
}

/// Without the order, the checker finds the interleaving that loses a page.
#[test]
fn loom_thp_merge_of_a_section_that_stands_ready_would_lose_a_page() {
    let lost = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let seen = Arc::clone(&lost);
    check(move || {
        let (model, space) = present(Kept::Whole);
        let reserve = Arc::new(Mutex::new(Standing::Free));
        assert!(model.split());
        change(&reserve, Standing::Free, Standing::Ready);
        let evictor = {
            let reserve = Arc::clone(&reserve);
            beside((&model, &space), move |model, space| {
                evict_what_is_ready(model, space, &reserve);
            })
        };
        model.collapse();
        hold_for_a_moment(&model);
        evictor.join().unwrap();
        if model.with(|k| k.lost > 0) {
            seen.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    });
    assert!(lost.load(std::sync::atomic::Ordering::Relaxed));
}
