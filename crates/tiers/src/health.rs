// SPDX-License-Identifier: Apache-2.0
//! Whether a tier can be used: a machine without I/O and clock, which is told what happened and when.
//!
//! ```text
//!                  a request is overdue
//!      Working ───────────────────────────► Slow
//!       │   ▲                                │
//!       │   └── probes in a row that succeed ┤
//!       │   ┌────────────────────────────────┘
//!       │   │ the tier is lost, or writes in a row fail
//!       ▼   ▼
//!       Gone          back to Working, by probes as well
//! ```
//! *Full* is not a state of this machine: a tier is full when it has no room, whatever its health. Batches
//! are only sent to a tier that works. Reads are always tried: a page may be had from a tier that fails
//! otherwise, and nothing else has it.

use crate::{TierError, TierKind};
use std::time::{Duration, Instant};

/// Writes that fail one after the other before a tier counts as gone. A single one may be a bad sector.
pub const FAILED_WRITES_MAX: u32 = 3;
/// Probes that must succeed one after the other before a tier is used again.
pub const RECOVERY_PROBES: u32 = 3;
/// Time between two probes.
pub const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// How a tier stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Standing {
    /// It takes batches and returns pages.
    Working,
    /// A request took longer than its bound: it is sent no batches until it has recovered.
    Slow {
        /// The bound.
        bound_ms: u64,
    },
    /// It returns pages and has no room for more.
    Full,
    /// It cannot be reached.
    Gone {
        /// What the kernel or the network reported.
        reason: String,
    },
}

/// How a tier stands, and since when.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Health {
    /// How it stands.
    pub standing: Standing,
    /// Since when.
    pub since: Instant,
}

impl Health {
    /// Why a batch would be refused now, if it would.
    #[must_use]
    pub fn refusal(&self, kind: TierKind) -> Option<TierError> {
        match &self.standing {
            Standing::Working => None,
            Standing::Slow { bound_ms } => Some(TierError::Slow {
                kind,
                bound_ms: *bound_ms,
            }),
            Standing::Full => Some(TierError::Full(kind)),
            Standing::Gone { reason } => Some(TierError::Gone {
                kind,
                reason: reason.clone(),
            }),
        }
    }
}

/// What happened to a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Symptom {
    /// A write was done in time.
    Written,
    /// A write failed; the tier may still work.
    WriteFailed(String),
    /// A request took longer than its bound, in milliseconds.
    Overdue(u64),
    /// The device or the connection does not exist any more.
    Lost(String),
    /// A probe was done in time, with the right answer.
    ProbeDone,
    /// A probe failed.
    ProbeFailed(String),
}

/// The machine.
#[derive(Clone, Debug)]
pub struct Pulse {
    health: Health,
    failed_writes: u32,
    good_probes: u32,
    next_probe: Instant,
}

impl Pulse {
    /// A tier that works.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self {
            health: Health {
                standing: Standing::Working,
                since: now,
            },
            failed_writes: 0,
            good_probes: 0,
            next_probe: now,
        }
    }

    /// A tier that cannot be reached from the start.
    #[must_use]
    pub fn gone(reason: String, now: Instant) -> Self {
        Self {
            health: Health {
                standing: Standing::Gone { reason },
                since: now,
            },
            next_probe: now + PROBE_INTERVAL,
            ..Self::new(now)
        }
    }

    /// How the tier stands.
    #[must_use]
    pub fn health(&self) -> &Health {
        &self.health
    }

    /// Takes note of what happened. Returns the new standing if it changed.
    pub fn note(&mut self, symptom: Symptom, now: Instant) -> Option<&Standing> {
        let next = match (symptom, &self.health.standing) {
            (Symptom::Written, _) => {
                self.failed_writes = 0;
                None
            }
            (Symptom::WriteFailed(reason), standing) => {
                self.failed_writes += 1;
                self.good_probes = 0;
                let many = self.failed_writes >= FAILED_WRITES_MAX;
                (many && !is_gone(standing)).then_some(Standing::Gone { reason })
            }
            (Symptom::Overdue(bound_ms), standing) => {
                self.good_probes = 0;
                (*standing == Standing::Working).then_some(Standing::Slow { bound_ms })
            }
            (Symptom::Lost(reason), standing) => {
                self.good_probes = 0;
                (!is_gone(standing)).then_some(Standing::Gone { reason })
            }
            (Symptom::ProbeDone, _) => {
                self.next_probe = now + PROBE_INTERVAL;
                self.good_probes += 1;
                let well = self.good_probes >= RECOVERY_PROBES;
                (well && self.health.standing != Standing::Working).then_some(Standing::Working)
            }
            (Symptom::ProbeFailed(_), _) => {
                self.next_probe = now + PROBE_INTERVAL;
                self.good_probes = 0;
                None
            }
        };
        let standing = next?;
        self.failed_writes = 0;
        self.good_probes = 0;
        self.next_probe = now + PROBE_INTERVAL;
        self.health = Health {
            standing,
            since: now,
        };
        Some(&self.health.standing)
    }

    /// When the next probe is due; `None` while the tier works.
    #[must_use]
    pub fn probe_due(&self) -> Option<Instant> {
        (self.health.standing != Standing::Working).then_some(self.next_probe)
    }
}

fn is_gone(standing: &Standing) -> bool {
    matches!(standing, Standing::Gone { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slow() -> Standing {
        Standing::Slow { bound_ms: 5 }
    }

    fn gone() -> Standing {
        Standing::Gone {
            reason: "unplugged".to_owned(),
        }
    }

    fn symptoms() -> [Symptom; 6] {
        [
            Symptom::Written,
            Symptom::WriteFailed("unplugged".to_owned()),
            Symptom::Overdue(5),
            Symptom::Lost("unplugged".to_owned()),
            Symptom::ProbeDone,
            Symptom::ProbeFailed("unplugged".to_owned()),
        ]
    }

    fn in_standing(standing: &Standing, now: Instant) -> Pulse {
        let mut pulse = Pulse::new(now);
        match standing {
            Standing::Working | Standing::Full => {}
            Standing::Slow { .. } => assert!(pulse.note(Symptom::Overdue(5), now).is_some()),
            Standing::Gone { .. } => {
                let lost = Symptom::Lost("unplugged".to_owned());
                assert!(pulse.note(lost, now).is_some());
            }
        }
        assert_eq!(pulse.health().standing, *standing);
        pulse
    }

    #[test]
    fn every_standing_and_symptom_once_and_three_times() {
        let working = Standing::Working;
        // After the symptom once, after it three times in a row.
        let expected = [
            (
                working.clone(),
                [
                    (working.clone(), working.clone()),
                    (working.clone(), gone()),
                    (slow(), slow()),
                    (gone(), gone()),
                    (working.clone(), working.clone()),
                    (working.clone(), working.clone()),
                ],
            ),
            (
                slow(),
                [
                    (slow(), slow()),
                    (slow(), gone()),
                    (slow(), slow()),
                    (gone(), gone()),
                    (slow(), working.clone()),
                    (slow(), slow()),
                ],
            ),
            (
                gone(),
                [
                    (gone(), gone()),
                    (gone(), gone()),
                    (gone(), gone()),
                    (gone(), gone()),
                    (gone(), working),
                    (gone(), gone()),
                ],
            ),
        ];
        let began = Instant::now();
        for (standing, after) in expected {
            for (symptom, (once, thrice)) in symptoms().into_iter().zip(after) {
                let mut pulse = in_standing(&standing, began);
                let mut now = began;
                for (time, wanted) in [(1, &once), (2, &once), (3, &thrice)] {
                    now += Duration::from_millis(10);
                    let before = pulse.health().clone();
                    let changed = pulse.note(symptom.clone(), now).cloned();
                    let health = pulse.health();
                    if time != 2 {
                        assert_eq!(health.standing, *wanted, "{standing:?} {symptom:?} {time}");
                    }
                    assert_eq!(changed.is_some(), before.standing != health.standing);
                    let since = if changed.is_some() { now } else { before.since };
                    assert_eq!(health.since, since);
                    let works = health.standing == Standing::Working;
                    assert_eq!(pulse.probe_due().is_none(), works);
                }
            }
        }
    }

    #[test]
    fn only_an_unbroken_row_counts() {
        let now = Instant::now();
        let mut pulse = in_standing(&slow(), now);
        for _ in 0..5 {
            for symptom in [
                Symptom::ProbeDone,
                Symptom::ProbeDone,
                Symptom::ProbeFailed(String::new()),
                Symptom::ProbeDone,
                Symptom::ProbeDone,
                Symptom::Overdue(5),
            ] {
                assert_eq!(pulse.note(symptom, now), None);
            }
        }
        let mut pulse = Pulse::new(now);
        for _ in 0..5 {
            for symptom in [
                Symptom::WriteFailed(String::new()),
                Symptom::WriteFailed(String::new()),
                Symptom::Written,
            ] {
                assert_eq!(pulse.note(symptom, now), None);
            }
        }
    }

    #[test]
    fn probes_are_an_interval_apart() {
        let now = Instant::now();
        let mut pulse = in_standing(&slow(), now);
        assert_eq!(pulse.probe_due(), Some(now + PROBE_INTERVAL));
        let later = now + 3 * PROBE_INTERVAL;
        pulse.note(Symptom::ProbeDone, later);
        assert_eq!(pulse.probe_due(), Some(later + PROBE_INTERVAL));
    }

    #[test]
    fn refusal_says_what_is_wrong() {
        let since = Instant::now();
        let refusal = |standing| Health { standing, since }.refusal(TierKind::Disk);
        assert_eq!(refusal(Standing::Working), None);
        let full = refusal(Standing::Full).unwrap();
        assert!(!full.may_pass());
        assert!(refusal(slow()).unwrap().may_pass());
        let gone = refusal(gone()).unwrap();
        assert!(gone.may_pass());
        assert_eq!(gone.to_string(), "the disk tier is gone: unplugged");
    }
}
