// SPDX-License-Identifier: Apache-2.0
//! Arguments of `pagetide host scheduler`.

use super::{IdleTimeChoice, ScheduleChange, Share};
use crate::{cli::shared::ClientArgs, cpus::CpuList};
use clap::Args;

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
    /// The change they ask for.
    pub(super) fn change(&self) -> ScheduleChange {
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
