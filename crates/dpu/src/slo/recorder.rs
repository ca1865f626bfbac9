// SPDX-License-Identifier: Apache-2.0
//! Batched reports of an engine to the account of a device.
//!
//! # Cost
//! A request costs two stores: one entry in a list that belongs to this engine. The clock is read
//! once per turn for everything that the turn takes. The account is behind a lock that all engines
//! of a device and all readers of reports share. It is taken once a millisecond or for [`TELL_AT`]
//! requests, without waiting unless the list is very long ([`KEEP_MAX`]), and always before the
//! engine sleeps. So a report lacks at most the last millisecond of a busy engine.
//!
//! Requests under a millisecond are never slow ([`super::account`]), so their entries are short;
//! other entries contain the whole course.

use super::{
    account::{Account, SLOW_FLOOR_NS},
    course::{Injected, RequestTimeline},
    slow::Done,
};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// Report at this many requests.
const TELL_AT: usize = 256;
/// Report at this many requests even if the lock is contended.
const KEEP_MAX: usize = 16 * TELL_AT;
/// Report after this time.
const TELL_AFTER_NS: u64 = 1_000_000;

#[derive(Debug, Clone, Copy)]
struct Quick {
    at_ns: u64,
    latency_ns: u32,
    bytes: u32,
}

#[derive(Debug, Clone, Copy)]
enum Rare {
    Done(Done),
    Faults {
        at_ns: u64,
        count: u32,
        injected: Injected,
    },
    Busy {
        at_ns: u64,
    },
    Idle {
        at_ns: u64,
    },
}

/// Whether a device has requests in flight on an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Load {
    /// None.
    #[default]
    Idle,
    /// At least one, perhaps parked.
    Busy,
}

/// Whether to wait for the account's lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// Report if it is due and the lock is free.
    Routine,
    /// The engine is about to sleep, or the queue to end.
    Now,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Recorder {
    engine: usize,
    quick: Vec<Quick>,
    rare: Vec<Rare>,
    load: Load,
    told_ns: u64,
}

impl Recorder {
    /// For engine number `engine`.
    pub fn new(engine: usize) -> Self {
        Self {
            engine,
            quick: Vec::new(),
            rare: Vec::new(),
            load: Load::Idle,
            told_ns: 0,
        }
    }

    /// A request was put into the used ring.
    #[inline]
    pub fn done(&mut self, at_ns: u64, queue: u16, bytes: u32, course: &RequestTimeline) {
        let latency_ns = course.latency_ns(at_ns);
        match u32::try_from(latency_ns) {
            Ok(latency_ns) if u64::from(latency_ns) < SLOW_FLOOR_NS => self.quick.push(Quick {
                at_ns,
                latency_ns,
                bytes,
            }),
            _ => self.rare.push(Rare::Done(Done {
                at_ns,
                queue,
                bytes,
                course: *course,
            })),
        }
    }

    /// Page requests with a waiter were sent.
    pub fn faults(&mut self, at_ns: u64, count: u32, injected: Injected) {
        self.rare.push(Rare::Faults {
            at_ns,
            count,
            injected,
        });
    }

    /// Sets whether requests are in flight.
    #[inline]
    pub fn load(&mut self, at_ns: u64, load: Load) {
        if self.load != load {
            self.load = load;
            self.rare.push(match load {
                Load::Busy => Rare::Busy { at_ns },
                Load::Idle => Rare::Idle { at_ns },
            });
        }
    }

    /// Reports to the account if it is time; true if nothing is left to report.
    pub fn tell(&mut self, account: &Mutex<Account>, now_ns: u64, urgency: Urgency) -> bool {
        let lines = self.quick.len() + self.rare.len();
        if lines == 0 {
            return true;
        }
        let due = lines >= TELL_AT || now_ns.saturating_sub(self.told_ns) >= TELL_AFTER_NS;
        if urgency == Urgency::Routine && !due {
            return false;
        }
        let Some(mut account) = enter(account, lines, urgency) else {
            return false;
        };
        account.advance(now_ns);
        for line in self.quick.drain(..) {
            account.quick(line.at_ns, u64::from(line.latency_ns), line.bytes);
        }
        for line in self.rare.drain(..) {
            match line {
                Rare::Done(done) => account.done(done),
                Rare::Faults {
                    at_ns,
                    count,
                    injected,
                } => account.faults(at_ns, count, injected),
                Rare::Busy { at_ns } => account.busy(self.engine, at_ns),
                Rare::Idle { at_ns } => account.idle(self.engine, at_ns),
            }
        }
        self.told_ns = now_ns;
        true
    }
}

fn enter(
    account: &Mutex<Account>,
    lines: usize,
    urgency: Urgency,
) -> Option<MutexGuard<'_, Account>> {
    if urgency == Urgency::Now || lines >= KEEP_MAX {
        return Some(account.lock().unwrap_or_else(PoisonError::into_inner));
    }
    match account.try_lock() {
        Ok(account) => Some(account),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(account: &Mutex<Account>, now_ns: u64) -> u64 {
        account.lock().unwrap().report(now_ns).minute.requests
    }

    fn some(recorder: &mut Recorder, count: usize, at_ns: u64) {
        for _ in 0..count {
            recorder.done(at_ns, 0, 512, &RequestTimeline::popped(at_ns));
        }
    }

    #[test]
    fn lines_are_told_after_a_millisecond_or_when_there_are_many_or_when_it_must_be() {
        let account = Mutex::new(Account::new(1, 0));
        let mut recorder = Recorder::new(0);
        recorder.told_ns = 100;
        some(&mut recorder, 1, 200);
        assert!(!recorder.tell(&account, 200, Urgency::Routine));
        assert!(recorder.tell(&account, 200, Urgency::Now));
        some(&mut recorder, TELL_AT, 300);
        assert!(recorder.tell(&account, 300, Urgency::Routine));
        some(&mut recorder, 1, 400);
        assert!(!recorder.tell(&account, 400, Urgency::Routine));
        assert!(recorder.tell(&account, 300 + TELL_AFTER_NS, Urgency::Routine));
        assert_eq!(told(&account, 2_000_000), TELL_AT as u64 + 2);
    }

    #[test]
    fn engine_does_not_wait_for_who_reads_the_account_and_loses_nothing() {
        let account = Mutex::new(Account::new(1, 0));
        let mut recorder = Recorder::new(0);
        {
            let _reader = account.lock().unwrap();
            some(&mut recorder, TELL_AT, 5);
            assert!(!recorder.tell(&account, 9, Urgency::Routine));
        }
        assert!(recorder.tell(&account, 10, Urgency::Routine));
        assert_eq!(told(&account, 11), TELL_AT as u64);
    }

    #[test]
    fn load_is_told_when_it_changes_only() {
        let mut recorder = Recorder::new(0);
        for load in [Load::Idle, Load::Busy, Load::Busy, Load::Idle, Load::Idle] {
            recorder.load(7, load);
        }
        assert_eq!(recorder.rare.len(), 2);
    }
}
