// SPDX-License-Identifier: Apache-2.0
//! The host's scheduler of background work, as an operator sees it: what may be set, and what is told.
//!
//! ```text
//!   pagetide run --scheduler-…  ─┐ defaults of this start
//!   STATE_DIR/scheduler.json    ─┴─► Schedule ─► HostScheduler (swap) ─► reclaim threads of all VMs
//!             ▲ kept                    ▲
//!             └── pagetide host scheduler (HTTP: GET, PATCH, DELETE /v1/host/scheduler)
//! ```
//! What was set while the daemon ran is kept in the state directory and wins over its settings at the next
//! start, until `--reset`. A change is checked as a whole, then kept, then made: if one of these fails, nothing
//! has changed.

pub mod api;
pub mod args;
pub mod command;
pub mod kept;
mod schedule;
mod share;

pub use schedule::Schedule;
pub use share::{Share, ShareList};

use crate::{control::ControlError, cpus::CpuList, figure::report, settings::RunSettings};
use clap::ValueEnum;
use pagetide_policy::scheduler::{IdleTime, SchedulerSettings, SettingsError, Shares};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What becomes of CPU time that no class is entitled to.
#[derive(
    Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum IdleTimeChoice {
    /// Any class may use it until an entitled one wants it.
    #[default]
    Lent,
    /// It is not used: no class gets more than its share and what was passed down to it.
    Unused,
}

impl std::str::FromStr for IdleTimeChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        <Self as ValueEnum>::from_str(text, false)
    }
}

/// Settings of the scheduler in an operator's terms.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleSettings {
    /// Length of a cycle.
    pub cycle_us: u64,
    /// Most CPU time of one run.
    pub longest_run_us: u64,
    /// What a task pays for an overrun, in percent of it.
    pub penalty_percent: u32,
    /// What becomes of idle time.
    pub idle_time: IdleTimeChoice,
    /// CPUs of background work.
    pub background_cpus: CpuList,
    /// Shares by class.
    pub shares_permille: Shares,
}

impl ScheduleSettings {
    /// Those of a daemon's start.
    #[must_use]
    pub fn of_run(settings: &RunSettings) -> Self {
        Self {
            cycle_us: settings.scheduler_cycle_us,
            longest_run_us: settings.scheduler_longest_run_us,
            penalty_percent: settings.scheduler_penalty_percent,
            idle_time: settings.scheduler_idle_time,
            background_cpus: settings.background_cpus.clone(),
            shares_permille: settings.scheduler_shares.0,
        }
    }

    /// Those of a scheduler on a host that has the CPUs `known`.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn on(&self, known: &[usize]) -> Result<SchedulerSettings, SettingsError> {
        let cpus = match self.background_cpus.numbers() {
            [] => known.to_vec(),
            given => given.to_vec(),
        };
        let settings = SchedulerSettings {
            cycle_us: self.cycle_us,
            longest_run_us: self.longest_run_us,
            penalty_percent: self.penalty_percent,
            idle_time: match self.idle_time {
                IdleTimeChoice::Lent => IdleTime::Lent,
                IdleTimeChoice::Unused => IdleTime::Unused,
            },
            cpus,
            shares_permille: self.shares_permille,
        };
        settings.check(known)?;
        Ok(settings)
    }
}

/// A change of the scheduler; what is not given stays.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ScheduleChange {
    /// Length of a cycle, from 1,000 to 10,000,000.
    pub cycle_us: Option<u64>,
    /// Most CPU time of one run, from 100 to the length of a cycle.
    pub longest_run_us: Option<u64>,
    /// What a task pays for an overrun, in percent of it, at most 1,000; 0 for no penalty.
    pub penalty_percent: Option<u32>,
    /// What becomes of CPU time that no class is entitled to.
    pub idle_time: Option<IdleTimeChoice>,
    /// CPUs on which background work may run, such as `0,2-5`; `any` for all that the daemon may use.
    #[schema(value_type = Option<String>)]
    pub background_cpus: Option<CpuList>,
    /// Share of vCPU faults in thousandths. All shares together are at most 1,000.
    pub vcpu_faults_permille: Option<u32>,
    /// Share of I/O page faults.
    pub io_faults_permille: Option<u32>,
    /// Share of reclaim.
    pub reclaim_permille: Option<u32>,
    /// Share of scans.
    pub scan_permille: Option<u32>,
    /// Share of other background work.
    pub background_permille: Option<u32>,
}

impl ScheduleChange {
    /// `settings` with this change.
    #[must_use]
    pub fn applied_to(&self, settings: &ScheduleSettings) -> ScheduleSettings {
        let shares = settings.shares_permille;
        ScheduleSettings {
            cycle_us: self.cycle_us.unwrap_or(settings.cycle_us),
            longest_run_us: self.longest_run_us.unwrap_or(settings.longest_run_us),
            penalty_percent: self.penalty_percent.unwrap_or(settings.penalty_percent),
            idle_time: self.idle_time.unwrap_or(settings.idle_time),
            background_cpus: (self.background_cpus.clone())
                .unwrap_or_else(|| settings.background_cpus.clone()),
            shares_permille: Shares {
                vcpu_faults: self.vcpu_faults_permille.unwrap_or(shares.vcpu_faults),
                io_faults: self.io_faults_permille.unwrap_or(shares.io_faults),
                reclaim: self.reclaim_permille.unwrap_or(shares.reclaim),
                scan: self.scan_permille.unwrap_or(shares.scan),
                background: self.background_permille.unwrap_or(shares.background),
            },
        }
    }
}

report! {
    /// What a class of CPU work has got since the daemon began.
    pub struct SchedulerClassReport in "pagetide_scheduler" {
        /// The class: vcpu-faults, io-faults, reclaim, scan or background.
        class: String => label "class",
        /// Its share of the CPU time of the allowed CPUs, in thousandths.
        share_permille: u64 => gauge,
        /// Runs granted; of faults, those served.
        runs: u64 => counter,
        /// CPU time used of its share, and beyond slices; of faults, the time in which they were served.
        own_seconds: f64 => counter,
        /// CPU time used of what higher classes passed down.
        passed_down_seconds: f64 => counter,
        /// Idle CPU time used.
        idle_seconds: f64 => counter,
        /// CPU time used with the priority of a fault that waited for room.
        inherited_seconds: f64 => counter,
        /// Runs that were held back: not granted at once.
        held_runs: u64 => counter,
        /// Time for which they were held back.
        held_seconds: f64 => counter,
        /// Runs that used clearly more than their maximum time.
        overruns: u64 => counter,
        /// CPU time used beyond the maximum time of runs.
        overrun_seconds: f64 => counter,
        /// Time for which work was granted nothing, as a penalty for that.
        withheld_seconds: f64 => counter,
        /// CPU time owed that was forgiven because it was too much.
        forgiven_seconds: f64 => counter,
    }
}

/// The host's scheduler: its settings, and what it has done.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct SchedulerReport {
    /// Length of a cycle.
    pub cycle_us: u64,
    /// Most CPU time of one run.
    pub longest_run_us: u64,
    /// What a task pays for an overrun, in percent of it.
    pub penalty_percent: u32,
    /// What becomes of CPU time that no class is entitled to.
    pub idle_time: IdleTimeChoice,
    /// CPUs on which background work may run.
    pub background_cpus: String,
    /// True if this was set while a daemon ran, and is kept over restarts; false if it is from its settings.
    pub is_kept: bool,
    /// Priorities that background threads get on the host: full, niceness or none.
    pub weakness: String,
    /// Times that a thread could not be put on its CPUs or given its priority.
    pub unplaced: u64,
    /// The classes, the highest priority first.
    pub classes: Vec<SchedulerClassReport>,
}

/// Settings that make no sense, as the API's error.
pub(crate) fn wrong(error: &SettingsError) -> ControlError {
    ControlError::wrong_use(error.to_string())
}
