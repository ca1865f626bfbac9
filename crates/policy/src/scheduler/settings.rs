// SPDX-License-Identifier: Apache-2.0
//! [`SchedulerSettings`]: what an operator may set, and why a set of values is refused.

use super::class::{LEVELS, Shares, WHOLE_PERMILLE};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// No run is granted for less, in nanoseconds: starting a thread costs some microseconds, which must
/// stay small beside the work. What a class lacks to this it saves up from cycle to cycle.
pub const SLICE_NS_MIN: u64 = 100_000;
/// Shortest cycle: ten of the shortest slices.
pub const CYCLE_US_MIN: u64 = 1_000;
/// Longest cycle. A change of settings waits for the end of a cycle, and so may reclaim.
pub const CYCLE_US_MAX: u64 = 10_000_000;
/// Highest penalty for an overrun: ten times its length.
pub const PENALTY_PERCENT_MAX: u32 = 1_000;
/// The shortest slice, in the unit of the settings.
const RUN_US_MIN: u64 = SLICE_NS_MIN / 1_000;
/// Most CPUs: as many as an affinity set can name. So capacities stay far below 2^63 ns.
const CPUS_MAX: usize = 1_024;

/// What becomes of CPU time that no class is entitled to, or that the entitled classes do not want.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IdleTime {
    /// Any class may use it until an entitled one wants it.
    Lent,
    /// Nobody uses it: a class never gets more than its share and what was passed down to it.
    Unused,
}

/// Settings of the [`TaskScheduler`](super::TaskScheduler).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SchedulerSettings {
    /// Length of a cycle, in microseconds.
    pub cycle_us: u64,
    /// Most CPU time of one run, in microseconds.
    pub longest_run_us: u64,
    /// What a task pays for an overrun, in percent of it; 0 for no penalty.
    pub penalty_percent: u32,
    /// What becomes of idle time.
    pub idle_time: IdleTime,
    /// CPUs on which work may run. As many tasks run at once as there are CPUs.
    pub cpus: Vec<usize>,
    /// Shares in thousandths, together at most 1000.
    pub shares_permille: Shares,
}

impl SchedulerSettings {
    /// The defaults on `cpus`.
    #[must_use]
    pub fn on(cpus: Vec<usize>) -> Self {
        Self {
            cycle_us: 50_000,
            longest_run_us: 2_000,
            penalty_percent: 100,
            idle_time: IdleTime::Lent,
            cpus,
            shares_permille: Shares::default(),
        }
    }

    /// Checks the values on a host that has the CPUs `known`.
    ///
    /// # Errors
    /// The first value that is wrong.
    pub fn check(&self, known: &[usize]) -> Result<(), SettingsError> {
        let (cycle_us, run_us) = (self.cycle_us, self.longest_run_us);
        if !(CYCLE_US_MIN..=CYCLE_US_MAX).contains(&cycle_us) {
            return Err(SettingsError::Cycle { cycle_us });
        }
        if run_us < RUN_US_MIN {
            return Err(SettingsError::RunTooShort { run_us });
        }
        if run_us > cycle_us {
            return Err(SettingsError::RunAboveCycle { run_us, cycle_us });
        }
        if self.penalty_percent > PENALTY_PERCENT_MAX {
            let percent = self.penalty_percent;
            return Err(SettingsError::Penalty { percent });
        }
        if self.shares_permille.reclaim == 0 {
            return Err(SettingsError::NoReclaim);
        }
        let sum_permille = self.shares_permille.levels().iter().sum();
        if sum_permille > WHOLE_PERMILLE {
            return Err(SettingsError::Shares { sum_permille });
        }
        self.check_cpus(known)
    }

    fn check_cpus(&self, known: &[usize]) -> Result<(), SettingsError> {
        if self.cpus.is_empty() {
            return Err(SettingsError::NoCpu);
        }
        for (at, cpu) in self.cpus.iter().copied().enumerate() {
            if cpu >= CPUS_MAX || !known.contains(&cpu) {
                return Err(SettingsError::UnknownCpu { cpu });
            }
            if self.cpus[..at].contains(&cpu) {
                return Err(SettingsError::CpuTwice { cpu });
            }
        }
        Ok(())
    }
}

/// Why settings are refused. Nothing has changed then.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SettingsError {
    /// No cycle, or one out of range.
    #[error(
        "a cycle of {cycle_us} us is not possible: set cycle_us between {CYCLE_US_MIN} and {CYCLE_US_MAX}"
    )]
    Cycle {
        /// The length given.
        cycle_us: u64,
    },
    /// The longest run is shorter than the shortest slice.
    #[error(
        "a longest run of {run_us} us is too short to do any work: set longest_run_us to {RUN_US_MIN} or more"
    )]
    RunTooShort {
        /// The time given.
        run_us: u64,
    },
    /// One run could take more than a whole cycle.
    #[error(
        "a longest run of {run_us} us does not fit into a cycle of {cycle_us} us: set longest_run_us to at most cycle_us"
    )]
    RunAboveCycle {
        /// The time given.
        run_us: u64,
        /// The cycle given.
        cycle_us: u64,
    },
    /// The penalty is too high.
    #[error(
        "a penalty of {percent} % is too high: set penalty_percent to at most {PENALTY_PERCENT_MAX}"
    )]
    Penalty {
        /// The percentage given.
        percent: u32,
    },
    /// More is promised than there is.
    #[error(
        "the shares sum up to {sum_permille} thousandths, which is above 100 %: lower some of them until the sum is 1000 or less"
    )]
    Shares {
        /// Their sum.
        sum_permille: u64,
    },
    /// Reclaim would have no share.
    #[error(
        "a share of 0 for reclaim would leave it without CPU time as long as faults come, and no limit could be kept: set it to 0.1 % or more"
    )]
    NoReclaim,
    /// The list of CPUs is empty.
    #[error("the list of CPUs is empty, so no work could ever run: name at least one CPU")]
    NoCpu,
    /// A CPU that this host does not have or that may not be used.
    #[error(
        "CPU {cpu} is not among the CPUs that may be used here: name only those that are online and allowed"
    )]
    UnknownCpu {
        /// Its number.
        cpu: usize,
    },
    /// A CPU is listed more than once.
    #[error("CPU {cpu} is named twice: name each CPU once")]
    CpuTwice {
        /// Its number.
        cpu: usize,
    },
}

/// Checked settings, in the units of the scheduler.
#[derive(Clone, Debug)]
pub(super) struct Terms {
    pub(super) cycle_ns: u64,
    pub(super) longest_ns: u64,
    pub(super) penalty_percent: u64,
    /// By level.
    pub(super) shares_permille: [u64; LEVELS],
    pub(super) idle_time: IdleTime,
    pub(super) cpus: Arc<[usize]>,
}

impl Terms {
    /// The terms of `settings` on a host that has the CPUs `known`.
    pub(super) fn of(settings: &SchedulerSettings, known: &[usize]) -> Result<Self, SettingsError> {
        settings.check(known)?;
        Ok(Self {
            cycle_ns: settings.cycle_us * 1_000,
            longest_ns: settings.longest_run_us * 1_000,
            penalty_percent: u64::from(settings.penalty_percent),
            shares_permille: settings.shares_permille.levels(),
            idle_time: settings.idle_time,
            cpus: settings.cpus.clone().into(),
        })
    }

    pub(super) fn cpu_count(&self) -> u64 {
        self.cpus.len() as u64
    }

    /// CPU time of a cycle that is the share of `level`.
    pub(super) fn budget_ns(&self, level: usize) -> u64 {
        self.cycle_ns * self.cpu_count() * self.shares_permille[level] / WHOLE_PERMILLE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The defaults on two CPUs after `edit`.
    fn edited(edit: impl Fn(&mut SchedulerSettings)) -> SchedulerSettings {
        let mut settings = SchedulerSettings::on(vec![0, 2]);
        edit(&mut settings);
        settings
    }

    #[test]
    fn each_wrong_setting_is_refused_by_one_sentence_that_names_it() {
        let known = [0, 1, 2, 3];
        assert_eq!(edited(|_| ()).check(&known), Ok(()));
        for (wrong, part) in [
            (edited(|s| s.cycle_us = 0), "a cycle of 0 us"),
            (edited(|s| s.cycle_us = CYCLE_US_MAX + 1), "set cycle_us"),
            (edited(|s| s.longest_run_us = 0), "longest run of 0 us"),
            (edited(|s| s.longest_run_us = 50_001), "does not fit"),
            (edited(|s| s.penalty_percent = 1_001), "1001 %"),
            (edited(|s| s.shares_permille.scan = 101), "1001 thousandths"),
            (edited(|s| s.shares_permille.scan = u32::MAX), "above 100 %"),
            (edited(|s| s.shares_permille.reclaim = 0), "to 0.1 %"),
            (edited(|s| s.cpus.clear()), "empty"),
            (edited(|s| s.cpus = vec![0, 4]), "CPU 4 is not"),
            (edited(|s| s.cpus = vec![1, 3, 1]), "CPU 1 is named twice"),
        ] {
            let said = wrong.check(&known).unwrap_err().to_string();
            assert!(said.contains(part), "{said}");
            let is_one = !said.contains('\n') && !said.contains(". ") && !said.ends_with('.');
            assert!(is_one, "one sentence: {said}");
        }
        let beyond = [usize::MAX];
        assert!(edited(|s| s.cpus = beyond.to_vec()).check(&beyond).is_err());
    }

    #[test]
    fn the_bounds_themselves_are_accepted() {
        for (cycle_us, longest_run_us) in [
            (CYCLE_US_MIN, RUN_US_MIN),
            (CYCLE_US_MIN, CYCLE_US_MIN),
            (CYCLE_US_MAX, CYCLE_US_MAX),
        ] {
            let settings = edited(|s| {
                (s.cycle_us, s.longest_run_us) = (cycle_us, longest_run_us);
            });
            assert_eq!(settings.check(&[0, 2]), Ok(()));
        }
    }
}
