// SPDX-License-Identifier: Apache-2.0
//! A device's page request interface: its groups, and the answers to them.
//!
//! ```text
//!               begin              answer                end
//!        Free ────────► Waiting ───────────► Answered ────────► Free
//!                          │ give_up              ▲
//!                          └─► GivenUp ── answer ─┘ (to Free at once)
//! ```
//! A group's index is not reused before its answer has come, even if the
//! transfer that waited for it has given up: a late answer would be taken for
//! that of another group.
//!
//! *Response failure* stops the interface (PCIe 10.4.2, ATS 4.2): no group begins
//! until the device's driver has restarted it.

use super::prq::GROUPS_MAX;
use pagetide_addr::ResponseCode;
use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
};

const FREE: u8 = 0;
const WAITING: u8 = 1;
const GIVEN_UP: u8 = 2;
const SUCCESS: u8 = 3;
const INVALID: u8 = 4;
const FAILURE: u8 = 5;

/// Why no group can begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NotNow {
    /// All indices, or all messages of the device's allocation, are outstanding.
    Full,
    /// The interface is stopped.
    Stopped,
}

/// See the module.
#[derive(Debug)]
pub(super) struct PageRequests {
    states: Box<[AtomicU8]>,
    room: Mutex<Room>,
    stopped: AtomicBool,
    unexpected: AtomicU64,
}

#[derive(Debug)]
struct Room {
    free: Vec<u16>,
    /// Messages of each group that is outstanding.
    sizes: Box<[u32]>,
    messages_left: u32,
}

/// An outstanding group, held by its waiter. Returned by [`PageRequests::end`] or
/// [`PageRequests::give_up`].
#[must_use = "a group that is not ended keeps its index and its messages"]
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Group(pub u16);

impl PageRequests {
    /// An interface with at most `messages_max` outstanding (PCIe's *outstanding page request
    /// allocation*).
    pub fn new(messages_max: u32) -> Self {
        Self {
            states: (0..GROUPS_MAX).map(|_| AtomicU8::new(FREE)).collect(),
            room: Mutex::new(Room {
                free: (0..GROUPS_MAX).rev().collect(),
                sizes: vec![0; usize::from(GROUPS_MAX)].into_boxed_slice(),
                messages_left: messages_max,
            }),
            stopped: AtomicBool::new(false),
            unexpected: AtomicU64::new(0),
        }
    }

    /// Takes an index for a group of `messages`.
    pub fn begin(&self, messages: u32) -> Result<Group, NotNow> {
        if self.is_stopped() {
            return Err(NotNow::Stopped);
        }
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        if room.messages_left < messages {
            return Err(NotNow::Full);
        }
        let index = room.free.pop().ok_or(NotNow::Full)?;
        room.messages_left -= messages;
        room.sizes[usize::from(index)] = messages;
        self.state(index).store(WAITING, Ordering::Relaxed);
        Ok(Group(index))
    }

    /// The answer to a group has arrived; true if one was due.
    pub fn answer(&self, index: u16, code: ResponseCode) -> bool {
        let answered = match code {
            ResponseCode::Success => SUCCESS,
            ResponseCode::InvalidRequest => INVALID,
            ResponseCode::ResponseFailure => FAILURE,
        };
        if code == ResponseCode::ResponseFailure {
            self.stopped.store(true, Ordering::Release);
        }
        let state = self.state(index);
        let due = state.compare_exchange(WAITING, answered, Ordering::AcqRel, Ordering::Acquire);
        let given_up = due == Err(GIVEN_UP);
        if given_up {
            self.free(index);
        } else if due.is_err() {
            self.unexpected.fetch_add(1, Ordering::Relaxed);
        }
        due.is_ok() || given_up
    }

    /// The answer to `group`, if it has come.
    pub fn answer_to(&self, group: &Group) -> Option<ResponseCode> {
        match self.state(group.0).load(Ordering::Acquire) {
            SUCCESS => Some(ResponseCode::Success),
            INVALID => Some(ResponseCode::InvalidRequest),
            FAILURE => Some(ResponseCode::ResponseFailure),
            _ => None,
        }
    }

    /// Ends a group that was answered.
    pub fn end(&self, group: &Group) {
        self.free(group.0);
    }

    /// The waiter gives `group` up: it ends when its answer comes.
    pub fn give_up(&self, group: &Group) {
        let state = self.state(group.0);
        let waiting =
            state.compare_exchange(WAITING, GIVEN_UP, Ordering::AcqRel, Ordering::Acquire);
        if waiting.is_err() {
            // The answer has come in between.
            self.free(group.0);
        }
    }

    /// Groups that are not answered yet, including those given up.
    pub fn outstanding(&self) -> usize {
        let waits = |state: &&AtomicU8| matches!(state.load(Ordering::Acquire), WAITING | GIVEN_UP);
        self.states.iter().filter(waits).count()
    }

    /// Answers to groups that were not outstanding.
    pub fn unexpected(&self) -> u64 {
        self.unexpected.load(Ordering::Relaxed)
    }

    /// True if a response failure has stopped the interface.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Driver: lets the interface work again.
    pub fn restart(&self) {
        self.stopped.store(false, Ordering::Release);
    }

    fn free(&self, index: u16) {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        self.state(index).store(FREE, Ordering::Relaxed);
        room.messages_left += std::mem::take(&mut room.sizes[usize::from(index)]);
        room.free.push(index);
    }

    fn state(&self, index: u16) -> &AtomicU8 {
        &self.states[usize::from(index % GROUPS_MAX)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ResponseCode::{InvalidRequest, ResponseFailure, Success};

    #[test]
    fn indices_and_messages_are_bounded_and_come_back() {
        let requests = PageRequests::new(1000);
        let large = requests.begin(600).unwrap();
        assert_eq!(requests.begin(401), Err(NotNow::Full));
        let groups: Vec<Group> = (0..400).map(|_| requests.begin(1).unwrap()).collect();
        assert_eq!(requests.begin(1), Err(NotNow::Full));
        assert!(requests.answer(large.0, Success));
        requests.end(&large);
        let more = (0..112).map(|_| requests.begin(1).unwrap());
        assert_eq!(more.count(), 112);
        assert_eq!(
            requests.begin(1),
            Err(NotNow::Full),
            "all indices are taken"
        );
        assert_eq!(requests.outstanding(), 512);
        assert_eq!(requests.answer_to(&groups[7]), None);
        assert!(requests.answer(groups[7].0, InvalidRequest));
        assert_eq!(requests.answer_to(&groups[7]), Some(InvalidRequest));
        requests.end(&groups[7]);
        assert_eq!(requests.begin(1), Ok(Group(groups[7].0)));
    }

    #[test]
    fn second_answer_is_unexpected_and_changes_nothing() {
        let requests = PageRequests::new(8);
        let group = requests.begin(1).unwrap();
        assert!(requests.answer(group.0, InvalidRequest));
        assert!(!requests.answer(group.0, Success));
        assert_eq!(requests.answer_to(&group), Some(InvalidRequest));
        requests.end(&group);
        assert!(!requests.answer(group.0, Success));
        assert_eq!(requests.unexpected(), 2);
    }

    #[test]
    fn group_given_up_keeps_its_index_until_the_late_answer() {
        let requests = PageRequests::new(1);
        let group = requests.begin(1).unwrap();
        requests.give_up(&group);
        assert_eq!(requests.begin(1), Err(NotNow::Full));
        assert!(requests.answer(group.0, Success));
        assert_eq!(requests.unexpected(), 0);
        let again = requests.begin(1).unwrap();
        assert!(requests.answer(again.0, Success));
        requests.give_up(&again);
        assert!(
            requests.begin(1).is_ok(),
            "it was answered before it was given up"
        );
    }

    #[test]
    fn response_failure_stops_the_interface_until_its_driver_restarts_it() {
        let requests = PageRequests::new(8);
        let (failed, other) = (requests.begin(1).unwrap(), requests.begin(1).unwrap());
        assert!(requests.answer(failed.0, ResponseFailure));
        assert_eq!(requests.begin(1), Err(NotNow::Stopped));
        assert!(requests.answer(other.0, Success));
        requests.end(&other);
        requests.restart();
        assert!(requests.begin(1).is_ok());
    }
}
