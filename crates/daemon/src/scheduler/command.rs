// SPDX-License-Identifier: Apache-2.0
//! `pagetide host scheduler`: shows the scheduler of background work, changes it, or takes changes back.

use super::{IdleTimeChoice, ScheduleChange, SchedulerReport, Share, api::PATH};
use crate::{cli::ClientArgs, command::Call, cpus::CpuList};
use clap::Args;
use hyper::Method;
use pagetide_report::{
    outcome::CommandError,
    text::{Text, table, word},
};

/// Arguments of `host scheduler`; without any it is shown.
#[derive(Args, Clone, PartialEq, Eq, Debug)]
pub struct SchedulerArgs {
    /// Share of the faults of vCPUs; all shares together are at most 100%
    #[arg(
        long,
        value_name = "SHARE",
        help_heading = "Shares of CPU time, such as 25%"
    )]
    pub vcpu_faults: Option<Share>,
    /// Share of I/O page faults
    #[arg(
        long,
        value_name = "SHARE",
        help_heading = "Shares of CPU time, such as 25%"
    )]
    pub io_faults: Option<Share>,
    /// Share of reclaim
    #[arg(
        long,
        value_name = "SHARE",
        help_heading = "Shares of CPU time, such as 25%"
    )]
    pub reclaim: Option<Share>,
    /// Share of scans
    #[arg(
        long,
        value_name = "SHARE",
        help_heading = "Shares of CPU time, such as 25%"
    )]
    pub scan: Option<Share>,
    /// Share of other background work
    #[arg(
        long,
        value_name = "SHARE",
        help_heading = "Shares of CPU time, such as 25%"
    )]
    pub background: Option<Share>,
    /// Length of a cycle in microseconds, 1000 to 10000000
    #[arg(long, value_name = "US")]
    pub cycle_us: Option<u64>,
    /// Most CPU time of one run in microseconds, 100 to the length of a cycle
    #[arg(long, value_name = "US")]
    pub longest_run_us: Option<u64>,
    /// What a task pays for a run beyond its maximum time, in percent of that; at most 1000, 0 for nothing
    #[arg(long, value_name = "PERCENT")]
    pub penalty_percent: Option<u32>,
    /// Whether CPU time that no class is entitled to is lent to any, or unused
    #[arg(long, value_enum, value_name = "HOW")]
    pub idle_time: Option<IdleTimeChoice>,
    /// CPUs on which background work may run, such as 0,2-5, or any
    #[arg(long, value_name = "CPUS")]
    pub background_cpus: Option<CpuList>,
    /// Return to the settings that the daemon was started with
    #[arg(long)]
    pub reset: bool,
    /// Of every client.
    #[command(flatten)]
    pub client: ClientArgs,
}

impl SchedulerArgs {
    fn change(&self) -> ScheduleChange {
        let permille = |share: Option<Share>| share.map(|share| share.permille);
        ScheduleChange {
            cycle_us: self.cycle_us,
            longest_run_us: self.longest_run_us,
            penalty_percent: self.penalty_percent,
            idle_time: self.idle_time,
            background_cpus: self.background_cpus.clone(),
            vcpu_faults_permille: permille(self.vcpu_faults),
            io_faults_permille: permille(self.io_faults),
            reclaim_permille: permille(self.reclaim),
            scan_permille: permille(self.scan),
            background_permille: permille(self.background),
        }
    }
}

/// Executes it.
///
/// # Errors
/// The daemon's, or that there is none.
pub fn execute(args: &SchedulerArgs) -> Result<(), CommandError> {
    let change = args.change();
    let is_change = change != ScheduleChange::default();
    let (method, body) = match (args.reset, is_change) {
        (true, true) => {
            return Err(CommandError::refused(
                "--reset returns to the settings of the start, so nothing else can be set with it: give it alone",
            ));
        }
        (true, false) => (Method::DELETE, None),
        (false, true) => (Method::PATCH, Some(&change)),
        (false, false) => (Method::GET, None),
    };
    let call = Call {
        client: &args.client,
        method,
        path: PATH.into(),
    };
    call.make::<_, SchedulerReport>(body)
}

impl Text for SchedulerReport {
    fn text(&self) -> String {
        let header = [
            "CLASS",
            "SHARE",
            "RUNS",
            "USED",
            "PASSED DOWN",
            "IDLE",
            "HELD BACK",
            "OVERRUNS",
        ];
        let mut rows = vec![header.map(String::from)];
        rows.extend(self.classes.iter().map(|class| {
            let permille = u32::try_from(class.share_permille).unwrap_or(0);
            let seconds = |seconds: f64| format!("{seconds:.3} s");
            [
                class.class.clone(),
                Share { permille }.to_string(),
                class.runs.to_string(),
                seconds(class.own_seconds + class.inherited_seconds),
                seconds(class.passed_down_seconds),
                seconds(class.idle_seconds),
                format!("{} ({})", class.held_runs, seconds(class.held_seconds)),
                class.overruns.to_string(),
            ]
        }));
        let source = match self.is_kept {
            true => "set while it ran, and kept over restarts",
            false => "as the daemon was started",
        };
        format!(
            "cycle {} us, longest run {} us, penalty {} %, idle time {}, background on CPUs {} ({source})\n{}",
            self.cycle_us,
            self.longest_run_us,
            self.penalty_percent,
            word(&self.idle_time),
            self.background_cpus,
            table(&rows)
        )
    }
}
