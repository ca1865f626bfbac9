// SPDX-License-Identifier: Apache-2.0
//! A limit for tests.

use super::{PATIENCE, lock};
use crate::{Admission, Corrections};
use pagetide_addr::{DeviceId, SectionNo};
use std::sync::{Condvar, Mutex, PoisonError};

#[derive(Default)]
struct RoomState {
    is_full: bool,
    waiting: usize,
    taken: i64,
    counted_in: u64,
    given_back: u64,
    corrections: u64,
    refilled: Vec<(SectionNo, u64)>,
    faulted: Vec<DeviceId>,
    clock_ns: Option<u64>,
}

/// A limit that is full or not, as the test says.
#[derive(Default)]
pub struct FakeRooms {
    state: Mutex<RoomState>,
    changed: Condvar,
}

impl FakeRooms {
    /// From now on fills have to wait for room.
    pub fn fill_up(&self) {
        lock(&self.state).is_full = true;
    }

    /// From now on there is room for all.
    pub fn make_room(&self) {
        lock(&self.state).is_full = false;
        self.changed.notify_all();
    }

    /// Returns when `count` fills wait for room.
    ///
    /// # Panics
    /// If that takes too long.
    pub fn wait_for_waiting(&self, count: usize) {
        let state = lock(&self.state);
        let too_few = |state: &mut RoomState| state.waiting < count;
        let waited = (self.changed).wait_timeout_while(state, PATIENCE, too_few);
        let (state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        let waiting = state.waiting;
        assert!(
            !timeout.timed_out(),
            "{waiting} fills wait for room, not {count}"
        );
    }

    /// Pages for which room was taken and not given back.
    #[must_use]
    pub fn taken(&self) -> i64 {
        lock(&self.state).taken
    }

    /// What was taken is corrected to what is present.
    pub fn correct(&self, present: u64) {
        let mut state = lock(&self.state);
        state.corrections += 1;
        state.taken = signed(present);
    }

    /// Pages that were present when they became part of the space.
    #[must_use]
    pub fn counted_in(&self) -> u64 {
        lock(&self.state).counted_in
    }

    /// Fills with content from the store, in order: section and pages.
    #[must_use]
    pub fn refilled(&self) -> Vec<(SectionNo, u64)> {
        lock(&self.state).refilled.clone()
    }

    /// Devices whose faults began, in order.
    #[must_use]
    pub fn faulted(&self) -> Vec<DeviceId> {
        lock(&self.state).faulted.clone()
    }

    /// The time from now on. Before that, there is no clock.
    pub fn set_clock(&self, now_ns: u64) {
        lock(&self.state).clock_ns = Some(now_ns);
    }

    /// Pages for which room was given back.
    #[must_use]
    pub fn given_back(&self) -> u64 {
        lock(&self.state).given_back
    }
}

impl Admission for FakeRooms {
    fn admit(&self, pages: u64) -> Corrections {
        let mut state = lock(&self.state);
        state.waiting += 1;
        self.changed.notify_all();
        // As a real limit, it does not let a guest wait for ever.
        let waited = (self.changed).wait_timeout_while(state, PATIENCE, |state| state.is_full);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        state.taken += signed(pages);
        Corrections(state.corrections)
    }

    fn try_admit(&self, pages: u64) -> bool {
        let mut state = lock(&self.state);
        if !state.is_full {
            state.taken += signed(pages);
        }
        !state.is_full
    }

    fn give_back(&self, pages: u64) {
        let mut state = lock(&self.state);
        state.taken -= signed(pages);
        state.given_back += pages;
    }

    fn give_back_unless_corrected(&self, pages: u64, since: Corrections) {
        let is_corrected = lock(&self.state).corrections != since.0;
        if !is_corrected {
            self.give_back(pages);
        }
    }

    fn count_in(&self, pages: u64) {
        let mut state = lock(&self.state);
        state.taken += signed(pages);
        state.counted_in += pages;
    }

    fn clock_ns(&self) -> u64 {
        lock(&self.state).clock_ns.unwrap_or(u64::MAX)
    }

    fn fault_begins(&self, device: DeviceId) {
        lock(&self.state).faulted.push(device);
    }

    fn refilled(&self, section: SectionNo, pages: u64) {
        lock(&self.state).refilled.push((section, pages));
    }
}

fn signed(pages: u64) -> i64 {
    i64::try_from(pages).unwrap_or(i64::MAX)
}
