// SPDX-License-Identifier: Apache-2.0
//! [`Life`]: how far the end of a VM has come, and which thread carries it out.
//!
//! A VM ends because a detach was requested (by the API, or by the daemon's own shutdown) or because its
//! VMM has ended. Both may happen at once, in any order. Either way the same things must be freed
//! exactly once: threads, page requests, descriptors, mappings, the pool. So the end has one owner. A
//! thread that reports an event receives its duty:
//!
//! ```text
//!                       DetachAsked                    DetachDone
//!             ┌──────────────────────► Leaving ───────────────────────────┐
//!             │                        │     ▲                            │
//!             │◄── DetachFailed ───────┘     └─ VmmEnded (noted)          ▼
//!          Served                      │ DetachFailed, VmmEnded noted    Over
//!             │                        ▼                                  ▲
//!             └── VmmEnded ──────► Dropping ───── Dropped ────────────────┘
//! ```
//! The thread that receives the duty to detach owns the VM's end until it reports *done* or *failed*. If
//! the VMM dies meanwhile, that is only noted: the owner runs into it anyway, at its next system call. A
//! detach that fails because of it does not put the VM back into service (there is no process to serve)
//! but drops it.
//!
//! [`Detaching`] and [`Dropping`] represent that ownership as values. Losing one, by a panic for
//! example, fails the detach or ends the dropping: no thread waits forever.

use super::lock::lock;
use crate::control::DetachEnd;
use std::sync::{Condvar, Mutex, PoisonError};

/// Whether the VMM is known to have ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Vmm {
    Runs,
    Ended,
}

/// How far the end of a VM has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Its faults are served.
    Served,
    /// A detach is under way.
    Leaving(Vmm),
    /// Its VMM has ended, and its resources are being freed.
    Dropping,
    /// Everything is freed.
    Over(DetachEnd),
}

/// What happens to a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    /// A detach was requested.
    DetachAsked,
    /// The VMM has exited.
    VmmEnded,
    /// Its detach has freed everything.
    DetachDone,
    /// Its detach has failed.
    DetachFailed,
    /// Everything is freed after the end of its VMM.
    Dropped,
}

/// What the thread that reports an [`Event`] must do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Duty {
    /// Nothing.
    None,
    /// Detach the VM.
    Detach,
    /// Free everything that was kept for the VM.
    Drop,
    /// Leave the VM to the thread that ends it.
    LeaveIt,
    /// Serve the VM as before.
    Stay,
}

/// The one place where a VM's stage changes. `None`: only the owner of a VM's end may report this event,
/// and there is no owner.
const fn next(stage: Stage, event: Event) -> Option<(Stage, Duty)> {
    use DetachEnd::{LetGo, VmmEnded};
    Some(match (stage, event) {
        (Stage::Served, Event::DetachAsked) => (Stage::Leaving(Vmm::Runs), Duty::Detach),
        (Stage::Served, Event::VmmEnded) | (Stage::Leaving(Vmm::Ended), Event::DetachFailed) => {
            (Stage::Dropping, Duty::Drop)
        }
        (Stage::Leaving(_), Event::VmmEnded) => (Stage::Leaving(Vmm::Ended), Duty::None),
        (Stage::Leaving(Vmm::Runs), Event::DetachDone) => (Stage::Over(LetGo), Duty::None),
        (Stage::Leaving(Vmm::Ended), Event::DetachDone) | (Stage::Dropping, Event::Dropped) => {
            (Stage::Over(VmmEnded), Duty::None)
        }
        (Stage::Leaving(Vmm::Runs), Event::DetachFailed) => (Stage::Served, Duty::Stay),
        (Stage::Leaving(_) | Stage::Dropping | Stage::Over(_), Event::DetachAsked) => {
            (stage, Duty::LeaveIt)
        }
        (Stage::Dropping | Stage::Over(_), Event::VmmEnded) => (stage, Duty::None),
        (Stage::Served | Stage::Dropping | Stage::Over(_), Event::DetachDone)
        | (Stage::Served | Stage::Dropping | Stage::Over(_), Event::DetachFailed)
        | (Stage::Served | Stage::Leaving(_) | Stage::Over(_), Event::Dropped) => return None,
    })
}

/// See the module.
#[derive(Debug)]
pub(super) struct Life {
    stage: Mutex<Stage>,
    changed: Condvar,
}

/// Outcome of a request to detach.
#[must_use]
pub(super) enum Asked<'a> {
    /// The caller must detach the VM.
    Yours(Detaching<'a>),
    /// Another detach is under way.
    UnderWay,
    /// The VM's end is already over.
    Over(DetachEnd),
}

impl Life {
    pub(super) fn new() -> Self {
        Self {
            stage: Mutex::new(Stage::Served),
            changed: Condvar::new(),
        }
    }

    /// The current stage.
    pub(super) fn stage(&self) -> Stage {
        *lock(&self.stage)
    }

    /// Requests a detach. Waits while the VM is being dropped, but not for another detach.
    pub(super) fn detach(&self) -> Asked<'_> {
        match self.tell(Event::DetachAsked) {
            Duty::Detach => Asked::Yours(Detaching(Some(self))),
            _ => match self.wait_while(|stage| stage == Stage::Dropping) {
                Stage::Over(end) => Asked::Over(end),
                Stage::Served | Stage::Leaving(_) | Stage::Dropping => Asked::UnderWay,
            },
        }
    }

    /// The VMM has ended. The caller must drop the VM if it gets the duty.
    pub(super) fn vmm_ended(&self) -> Option<Dropping<'_>> {
        (self.tell(Event::VmmEnded) == Duty::Drop).then(|| Dropping(Some(self)))
    }

    /// True while the VMM must be watched for its end.
    pub(super) fn awaits_end(&self) -> bool {
        matches!(self.stage(), Stage::Served | Stage::Leaving(Vmm::Runs))
    }

    /// Waits until no end of the VM is in progress.
    pub(super) fn wait_settled(&self) -> Stage {
        self.wait_while(|stage| matches!(stage, Stage::Leaving(_) | Stage::Dropping))
    }

    fn wait_while(&self, still: impl Fn(Stage) -> bool) -> Stage {
        let stage = lock(&self.stage);
        let waited = self.changed.wait_while(stage, |stage| still(*stage));
        *waited.unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, event: Event) -> Duty {
        let mut stage = lock(&self.stage);
        let Some((after, duty)) = next(*stage, event) else {
            unreachable!("{event:?} in {stage:?}: the end of a VM has one owner");
        };
        *stage = after;
        drop(stage);
        self.changed.notify_all();
        duty
    }
}

/// The duty to detach a VM.
#[must_use]
pub(super) struct Detaching<'a>(Option<&'a Life>);

impl<'a> Detaching<'a> {
    /// The detach itself has found that the VMM has ended.
    pub(super) fn vmm_ended(&self) {
        if let Some(life) = self.0 {
            // Only noted; the duty follows at the end of the detach.
            let duty = life.tell(Event::VmmEnded);
            debug_assert_eq!(duty, Duty::None);
        }
    }

    /// Everything is freed.
    pub(super) fn done(mut self) -> DetachEnd {
        if let Some(life) = self.0.take() {
            life.tell(Event::DetachDone);
            if let Stage::Over(end) = life.stage() {
                return end;
            }
        }
        DetachEnd::LetGo
    }

    /// The detach failed: the VM is served as before, or is to be dropped because its VMM has ended.
    pub(super) fn failed(mut self) -> Option<Dropping<'a>> {
        let life = self.0.take()?;
        (life.tell(Event::DetachFailed) == Duty::Drop).then(|| Dropping(Some(life)))
    }
}

impl Drop for Detaching<'_> {
    fn drop(&mut self) {
        if let Some(life) = self.0.take()
            && life.tell(Event::DetachFailed) == Duty::Drop
        {
            drop(Dropping(Some(life)));
        }
    }
}

/// The duty to free everything kept for a VM whose VMM has ended; fulfilled when this value is dropped.
#[must_use]
pub(super) struct Dropping<'a>(Option<&'a Life>);

impl Drop for Dropping<'_> {
    fn drop(&mut self) {
        if let Some(life) = self.0.take() {
            life.tell(Event::Dropped);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    const STAGES: [Stage; 6] = [
        Stage::Served,
        Stage::Leaving(Vmm::Runs),
        Stage::Leaving(Vmm::Ended),
        Stage::Dropping,
        Stage::Over(DetachEnd::LetGo),
        Stage::Over(DetachEnd::VmmEnded),
    ];
    const EVENTS: [Event; 5] = [
        Event::DetachAsked,
        Event::VmmEnded,
        Event::DetachDone,
        Event::DetachFailed,
        Event::Dropped,
    ];

    /// The diagram in the module's documentation, row by row as `STAGES`, column by column as `EVENTS`.
    #[test]
    fn each_pair_of_stage_and_event_comes_to_what_the_table_says() {
        use DetachEnd::{LetGo, VmmEnded};
        use Duty::{Detach, Drop, LeaveIt, Stay};
        use Stage::{Dropping, Leaving, Over, Served};
        let none = Duty::None;
        let ended = Leaving(Vmm::Ended);
        let table = [
            [
                Some((Leaving(Vmm::Runs), Detach)),
                Some((Dropping, Drop)),
                None,
                None,
                None,
            ],
            [
                Some((Leaving(Vmm::Runs), LeaveIt)),
                Some((ended, none)),
                Some((Over(LetGo), none)),
                Some((Served, Stay)),
                None,
            ],
            [
                Some((ended, LeaveIt)),
                Some((ended, none)),
                Some((Over(VmmEnded), none)),
                Some((Dropping, Drop)),
                None,
            ],
            [
                Some((Dropping, LeaveIt)),
                Some((Dropping, none)),
                None,
                None,
                Some((Over(VmmEnded), none)),
            ],
            [
                Some((Over(LetGo), LeaveIt)),
                Some((Over(LetGo), none)),
                None,
                None,
                None,
            ],
            [
                Some((Over(VmmEnded), LeaveIt)),
                Some((Over(VmmEnded), none)),
                None,
                None,
                None,
            ],
        ];
        for (stage, row) in STAGES.into_iter().zip(table) {
            for (event, wanted) in EVENTS.into_iter().zip(row) {
                assert_eq!(next(stage, event), wanted, "{event:?} in {stage:?}");
            }
        }
    }

    /// Every allowed order of events: there is at most one owner at a time, and each path ends in the
    /// one end.
    #[test]
    fn whatever_the_order_at_most_one_thread_owns_the_end() {
        fn follow(stage: Stage, owners: u32, depth: u32) {
            for event in EVENTS {
                let is_owners = matches!(
                    event,
                    Event::DetachDone | Event::DetachFailed | Event::Dropped
                );
                if is_owners && owners == 0 {
                    continue;
                }
                let Some((after, duty)) = next(stage, event) else {
                    continue;
                };
                let gone = u32::from(is_owners);
                let come = u32::from(matches!(duty, Duty::Detach | Duty::Drop));
                let owners = owners - gone + come;
                assert!(owners <= 1, "{event:?} in {stage:?}");
                let under_way = matches!(after, Stage::Leaving(_) | Stage::Dropping);
                assert_eq!(under_way, owners == 1, "{after:?}");
                if depth > 0 {
                    follow(after, owners, depth - 1);
                }
            }
        }
        follow(Stage::Served, 0, 7);
    }

    #[test]
    fn death_in_a_detach_that_fails_is_dropped_by_the_detach_and_nobody_else() {
        let life = Life::new();
        let Asked::Yours(detach) = life.detach() else {
            panic!("it is nobody's yet");
        };
        assert!(life.vmm_ended().is_none());
        assert!(!life.awaits_end());
        assert!(matches!(life.detach(), Asked::UnderWay));
        let dropping = detach.failed().expect("it falls to the detach");
        assert!(life.vmm_ended().is_none());
        drop(dropping);
        assert!(matches!(life.detach(), Asked::Over(DetachEnd::VmmEnded)));
    }

    #[test]
    fn death_in_a_detach_that_succeeds_is_told_by_it() {
        let life = Life::new();
        let Asked::Yours(detach) = life.detach() else {
            panic!("it is nobody's yet");
        };
        assert!(life.vmm_ended().is_none());
        assert_eq!(detach.done(), DetachEnd::VmmEnded);
        assert_eq!(life.wait_settled(), Stage::Over(DetachEnd::VmmEnded));
    }

    #[test]
    fn detach_that_is_lost_has_failed_and_another_one_may_be_asked_for() {
        let life = Life::new();
        drop(life.detach());
        assert_eq!(life.stage(), Stage::Served);
        assert!(matches!(life.detach(), Asked::Yours(_)));
    }

    #[test]
    fn whoever_detaches_a_vm_that_is_dropped_waits_for_its_end() {
        let life = Life::new();
        let dropping = life.vmm_ended().expect("it is nobody's yet");
        std::thread::scope(|scope| {
            let (told, heard) = mpsc::channel();
            let life = &life;
            scope.spawn(move || {
                let over = matches!(life.detach(), Asked::Over(DetachEnd::VmmEnded));
                told.send(over).expect("somebody hears");
            });
            assert_eq!(heard.try_recv(), Err(mpsc::TryRecvError::Empty));
            drop(dropping);
            assert_eq!(heard.recv(), Ok(true));
        });
    }
}
