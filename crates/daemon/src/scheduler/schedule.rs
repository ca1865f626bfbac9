// SPDX-License-Identifier: Apache-2.0
//! [`Schedule`]: the scheduler of a running daemon with the settings that it goes by.

use super::{
    ScheduleChange, ScheduleSettings, SchedulerClassReport, SchedulerReport,
    kept::KeptSettings,
    share::{CLASSES, permilles},
    wrong,
};
use crate::control::ControlError;
use pagetide_policy::scheduler::{FaultClass, WorkClass};
use pagetide_swap::scheduled::{HostScheduler, Weakness};
use pagetide_sys::cpu;
use std::{
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// See the module.
#[derive(Debug)]
pub struct Schedule {
    scheduler: Arc<HostScheduler>,
    kept: KeptSettings,
    /// Settings of the start.
    given: ScheduleSettings,
    now: Mutex<Now>,
}

/// The settings that hold.
#[derive(Clone, Debug)]
struct Now {
    settings: ScheduleSettings,
    is_kept: bool,
}

/// CPUs that this process may use now: those of its first thread, which no work is bound to.
fn known_cpus() -> Result<Vec<usize>, ControlError> {
    let own = cpu::affinity_of(std::process::id());
    own.ok_or_else(|| ControlError::failed("the CPUs of this process are not known"))
}

impl Schedule {
    /// A scheduler by what is kept in `state_dir`, or else by `given`.
    ///
    /// # Errors
    /// Wrong settings.
    pub fn start(given: ScheduleSettings, state_dir: &Path) -> Result<Self, ControlError> {
        let known = known_cpus()?;
        let of_start = given.on(&known).map_err(|error| wrong(&error))?;
        let kept = KeptSettings::in_dir(state_dir);
        let found = kept.read().and_then(|found| match found {
            Some(settings) => match settings.on(&known) {
                Ok(checked) => Ok(Some((settings, checked))),
                Err(error) => Err(error.to_string()),
            },
            None => Ok(None),
        });
        let (now, settings) = match found {
            Ok(Some((settings, checked))) => {
                tracing::info!(
                    "the scheduler goes by what was set before; `pagetide host scheduler --reset` ends that"
                );
                let now = Now {
                    settings,
                    is_kept: true,
                };
                (now, checked)
            }
            none => {
                if let Err(why) = none {
                    tracing::warn!(
                        why,
                        "what was set for the scheduler before cannot be used; the settings of this start hold"
                    );
                }
                let now = Now {
                    settings: given.clone(),
                    is_kept: false,
                };
                (now, of_start)
            }
        };
        let scheduler = HostScheduler::new(settings, &known).map_err(|error| wrong(&error))?;
        Ok(Self {
            scheduler,
            kept,
            given,
            now: Mutex::new(now),
        })
    }

    /// What threads ask.
    #[must_use]
    pub fn scheduler(&self) -> &Arc<HostScheduler> {
        &self.scheduler
    }

    /// Its settings, and what it has done.
    #[must_use]
    pub fn report(&self) -> SchedulerReport {
        let now = self.lock().clone();
        let settings = &now.settings;
        SchedulerReport {
            cycle_us: settings.cycle_us,
            longest_run_us: settings.longest_run_us,
            penalty_percent: settings.penalty_percent,
            idle_time: settings.idle_time,
            background_cpus: settings.background_cpus.to_string(),
            is_kept: now.is_kept,
            weakness: weakness_name(self.scheduler.weakness()).to_owned(),
            unplaced: self.scheduler.unplaced(),
            classes: self.classes(settings),
        }
    }

    /// Changes settings from the next cycle on, and keeps them.
    ///
    /// # Errors
    /// They make no sense, or cannot be kept; nothing has changed then.
    pub fn change(&self, change: &ScheduleChange) -> Result<SchedulerReport, ControlError> {
        let mut now = self.lock();
        let settings = change.applied_to(&now.settings);
        if settings != now.settings {
            let known = known_cpus()?;
            let checked = settings.on(&known).map_err(|error| wrong(&error))?;
            self.kept.write(&settings).map_err(not_kept)?;
            let changed = self.scheduler.change(checked, &known);
            changed.map_err(|error| wrong(&error))?;
            *now = Now {
                settings,
                is_kept: true,
            };
            tracing::info!(settings = ?now.settings, "the scheduler was changed");
        }
        drop(now);
        Ok(self.report())
    }

    /// Returns to the settings of the start.
    ///
    /// # Errors
    /// They do not suit this host any more, or those kept cannot be removed; nothing has changed then.
    pub fn reset(&self) -> Result<SchedulerReport, ControlError> {
        let mut now = self.lock();
        let known = known_cpus()?;
        let checked = self.given.on(&known).map_err(|error| wrong(&error))?;
        self.kept.forget().map_err(not_kept)?;
        let changed = self.scheduler.change(checked, &known);
        changed.map_err(|error| wrong(&error))?;
        *now = Now {
            settings: self.given.clone(),
            is_kept: false,
        };
        tracing::info!("the scheduler goes by the settings of the start again");
        drop(now);
        Ok(self.report())
    }

    fn classes(&self, settings: &ScheduleSettings) -> Vec<SchedulerClassReport> {
        let shares = permilles(settings.shares_permille);
        let faults = FaultClass::ALL.map(|class| self.faults(class));
        let work = WorkClass::ALL.map(|class| self.work(class));
        let named = CLASSES.iter().zip(shares);
        let reports = faults.into_iter().chain(work).zip(named);
        let named = reports.map(|(report, (class, share))| SchedulerClassReport {
            class: (*class).to_owned(),
            share_permille: share.into(),
            ..report
        });
        named.collect()
    }

    fn faults(&self, class: FaultClass) -> SchedulerClassReport {
        let figures = self.scheduler.faults(class);
        SchedulerClassReport {
            runs: figures.faults,
            own_seconds: figures.time.as_secs_f64(),
            ..SchedulerClassReport::default()
        }
    }

    fn work(&self, class: WorkClass) -> SchedulerClassReport {
        let (figures, held) = (self.scheduler.figures(class), self.scheduler.held(class));
        let seconds = |time: Duration| time.as_secs_f64();
        SchedulerClassReport {
            runs: figures.runs,
            own_seconds: seconds(figures.own),
            passed_down_seconds: seconds(figures.passed_down),
            idle_seconds: seconds(figures.idle),
            inherited_seconds: seconds(figures.inherited),
            held_runs: held.runs,
            held_seconds: seconds(held.time),
            overruns: figures.overruns,
            overrun_seconds: seconds(figures.overrun),
            withheld_seconds: seconds(figures.withheld),
            forgiven_seconds: seconds(figures.forgiven),
            ..SchedulerClassReport::default()
        }
    }

    fn lock(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn not_kept(error: std::io::Error) -> ControlError {
    ControlError::failed(format!(
        "the scheduler is as before, for what is set cannot be kept in the state directory: {error}"
    ))
}

const fn weakness_name(weakness: Weakness) -> &'static str {
    match weakness {
        Weakness::Full => "full",
        Weakness::Niceness => "niceness",
        Weakness::None => "none",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::IdleTimeChoice;
    use crate::settings::{GivenSettings, RunSettings, Settings as _};

    fn of_start() -> ScheduleSettings {
        ScheduleSettings::of_run(&RunSettings::merge(
            GivenSettings::default(),
            GivenSettings::default(),
        ))
    }

    fn change(edit: impl FnOnce(&mut ScheduleChange)) -> ScheduleChange {
        let mut change = ScheduleChange::default();
        edit(&mut change);
        change
    }

    #[test]
    fn what_was_set_holds_at_the_next_start_until_it_is_reset() {
        let dir = tempfile::tempdir().unwrap();
        let first = Schedule::start(of_start(), dir.path()).unwrap();
        assert!(!first.report().is_kept);
        let set = change(|change| {
            change.cycle_us = Some(20_000);
            change.scan_permille = Some(50);
            change.idle_time = Some(IdleTimeChoice::Unused);
        });
        let report = first.change(&set).unwrap();
        assert_eq!((report.cycle_us, report.is_kept), (20_000, true));
        drop(first);
        let other = ScheduleSettings {
            cycle_us: 30_000,
            ..of_start()
        };
        let second = Schedule::start(other, dir.path()).unwrap();
        let report = second.report();
        assert_eq!((report.cycle_us, report.is_kept), (20_000, true));
        assert_eq!(report.idle_time, IdleTimeChoice::Unused);
        assert_eq!(report.classes[3].share_permille, 50);
        assert_eq!(second.scheduler().settings().cycle_us, 20_000);
        let report = second.reset().unwrap();
        assert_eq!((report.cycle_us, report.is_kept), (30_000, false));
        assert_eq!(second.scheduler().settings().cycle_us, 30_000);
        let third = Schedule::start(of_start(), dir.path()).unwrap();
        assert!(!third.report().is_kept);
    }

    #[test]
    fn what_makes_no_sense_is_refused_and_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let schedule = Schedule::start(of_start(), dir.path()).unwrap();
        let before = schedule.report();
        for (wrong, part) in [
            (change(|c| c.cycle_us = Some(0)), "a cycle of 0 us"),
            (change(|c| c.longest_run_us = Some(60_000)), "does not fit"),
            (change(|c| c.reclaim_permille = Some(900)), "above 100 %"),
            (change(|c| c.penalty_percent = Some(1_001)), "1001 %"),
            (
                change(|c| c.background_cpus = Some("1023".parse().unwrap())),
                "CPU 1023 is not among",
            ),
        ] {
            let said = schedule.change(&wrong).unwrap_err().to_string();
            assert!(said.contains(part), "{said}");
            assert_eq!(schedule.report().classes, before.classes);
            assert_eq!(schedule.report(), before);
        }
        let mut settings = of_start();
        settings.cycle_us = 1;
        let refused = Schedule::start(settings, dir.path()).unwrap_err();
        assert!(refused.to_string().contains("a cycle of 1 us"), "{refused}");
    }

    #[test]
    fn kept_settings_that_cannot_be_used_leave_those_of_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("scheduler.json");
        let mut gone = of_start();
        gone.background_cpus = "1023".parse().unwrap();
        let gone = serde_json::to_string(&gone).unwrap();
        for text in ["", "{", "[]", "{\"cycle_us\": 20000}", &gone] {
            std::fs::write(&path, text).unwrap();
            let schedule = Schedule::start(of_start(), dir.path()).unwrap();
            assert!(!schedule.report().is_kept, "{text}");
            assert_eq!(schedule.scheduler().settings().cycle_us, 50_000);
        }
    }

    #[test]
    fn what_cannot_be_kept_is_not_set() {
        let dir = tempfile::tempdir().unwrap();
        let schedule = Schedule::start(of_start(), dir.path()).unwrap();
        let before = schedule.report();
        std::fs::remove_dir(dir.path()).unwrap();
        let refused = schedule.change(&change(|c| c.cycle_us = Some(20_000)));
        assert!(refused.unwrap_err().to_string().contains("as before"));
        assert_eq!(schedule.report(), before);
    }
}
