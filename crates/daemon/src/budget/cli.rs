// SPDX-License-Identifier: Apache-2.0
//! Command lines about the host's budget and a VM's share of it.

use super::{Amount, BudgetSetting, CeilingChange, ShareChange};
use crate::cli::shared::{ClientArgs, Limit};
use crate::scheduler::args::SchedulerArgs;
use clap::{Args, Subcommand};
use pagetide_report::size::ByteSize;

/// Commands about the host.
#[derive(Subcommand, Debug)]
pub enum HostCommand {
    /// Set the budget for all VMs together, or change its watermarks; without arguments, show it
    Budget(BudgetArgs),
    /// Show the budget, what is free of it, and what each VM has and why
    Show {
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show or change when background work (reclaim, scans) may use CPU time, beside faults
    Scheduler(SchedulerArgs),
}

/// Arguments of `host budget`.
#[derive(Args, Debug)]
pub struct BudgetArgs {
    /// The most that resident memory and pools of all VMs may take: a size such as 48G, or 'off'
    #[arg(value_name = "SIZE|off")]
    pub budget: Option<BudgetSetting>,
    /// Free below this, a page that is swapped in first has others of its VM evicted: a share of the budget, or a size
    #[arg(long, value_name = "AMOUNT")]
    pub min: Option<Amount>,
    /// Free below this, memory is reclaimed until --high is free
    #[arg(long, value_name = "AMOUNT")]
    pub low: Option<Amount>,
    /// From this on there is enough
    #[arg(long, value_name = "AMOUNT")]
    pub high: Option<Amount>,
    /// Between --low and --high, cold memory of all VMs is reclaimed at so much a second; 0: not
    #[arg(long, value_name = "SIZE")]
    pub pace: Option<ByteSize>,
    /// Of every client.
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Arguments of `vm set`.
#[derive(Args, Debug)]
pub struct ShareArgs {
    /// Name of the VM
    pub name: String,
    /// Its share of the budget beside the weights of other VMs when all want more, 1 to 10000
    #[arg(long, value_name = "N")]
    pub weight: Option<u32>,
    /// It may always have this much resident
    #[arg(long, value_name = "SIZE")]
    pub floor: Option<ByteSize>,
    /// It never has more resident, as by `vm limit`: a size, or 'none'
    #[arg(long, value_name = "SIZE|none")]
    pub ceiling: Option<Limit>,
    /// Of every client.
    #[command(flatten)]
    pub client: ClientArgs,
}

impl ShareArgs {
    /// The change that they ask for.
    #[must_use]
    pub fn change(&self) -> ShareChange {
        ShareChange {
            weight: self.weight,
            floor_bytes: self.floor.map(|size| size.0),
            ceiling_bytes: match self.ceiling {
                None => CeilingChange::Keep,
                Some(Limit::None) => CeilingChange::Lift,
                Some(Limit::Size(size)) => CeilingChange::Set(size.0),
            },
        }
    }
}
