// SPDX-License-Identifier: Apache-2.0
//! The command line of `pagetide replay`.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use pagetide_policy::protect::PolicyChoice;
use pagetide_trace::BlockFormat;

use crate::trace::args::time;
use pagetide_report::size::ByteSize;

/// Arguments of `replay`.
#[derive(Args, Debug)]
pub struct ReplayArgs {
    /// Files of access logs, in any order, and block traces; each is a VM, and all are on one host. A
    /// block trace that was cut off between two records looks whole: no format has an end mark
    #[arg(value_name = "TRACE", required = true)]
    pub traces: Vec<PathBuf>,
    /// Policy with its parameters, such as adp:promote-after=120s; may be given again. Without it all
    /// there are; none is always run, for the others are compared with it
    #[arg(long = "policy", value_name = "NAME[:PARAMETER=VALUE,…]")]
    pub policies: Vec<PolicyChoice>,
    /// The address space of access logs that is replayed. Those the daemon writes have one; a log with
    /// several is refused without this, since they are not one memory
    #[arg(long, value_name = "N")]
    pub space: Option<u32>,
    /// Memory of each VM; without it, what an access log says or what suits a block trace
    #[arg(long, value_name = "SIZE")]
    pub vm_memory: Option<ByteSize>,
    /// Memory promised beyond what the host has, as a share of that; limits are balanced every minute
    #[arg(
        long,
        value_name = "SHARE",
        default_value = "0.2",
        conflicts_with = "limit"
    )]
    pub overcommit: f64,
    /// Limit of each VM, in place of an overcommit
    #[arg(long, value_name = "SIZE")]
    pub limit: Option<ByteSize>,
    /// Size of the guests' page caches in block traces; without it, what suits the trace
    #[arg(long, value_name = "SIZE")]
    pub page_cache: Option<ByteSize>,
    /// Block traces go past the page cache, into buffers of this size that are used in turn
    #[arg(
        long,
        value_name = "SIZE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "64M",
        conflicts_with = "page_cache"
    )]
    pub direct: Option<ByteSize>,
    /// Block traces tell what disks did, so what they read was not in the guest's cache: read it again,
    /// also if the modelled one has it
    #[arg(long, conflicts_with = "direct")]
    pub read_again: bool,
    /// Page caches get memory in shuffled runs of this size, as in a guest that has been up for long
    #[arg(long, value_name = "SIZE", conflicts_with = "direct")]
    pub runs: Option<ByteSize>,
    /// Add a synthetic NIC beside each trace, with receive buffers of this size
    #[arg(long, value_name = "SIZE")]
    pub nic: Option<ByteSize>,
    /// Size of a section: what is tracked and evicted
    #[arg(long, value_name = "SIZE", default_value = "2M")]
    pub section: ByteSize,
    /// Share of the memory that devices do not touch which CPUs keep in use
    #[arg(long, value_name = "SHARE", default_value = "0.75")]
    pub cpu_share: ShareArg,
    /// Stretch the times of the traces, where they are too short for the policies' times
    #[arg(long, value_name = "FACTOR", default_value = "1")]
    pub time_scale: f64,
    /// Format of block traces, if content and name do not tell: vscsi, oracle-general, mqsim, hp-srt or block-ids
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<BlockFormat>,
    /// Size of a block, in block traces that do not tell
    #[arg(long, value_name = "BYTES")]
    pub block_bytes: Option<u32>,
    /// Time from one request to the next, in block traces without times
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub request_interval: Option<Duration>,
    /// Tell what each device's policy held, this often
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub capacity_every: Option<Duration>,
    /// Threads; without it one for each core
    #[arg(long, value_name = "N")]
    pub jobs: Option<NonZeroUsize>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// A share from 0 to 1, in thousandths.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShareArg(pub u64);

impl FromStr for ShareArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is no share: write a number from 0 to 1, such as 0.75");
        let share: f64 = text.parse().map_err(|_| wrong())?;
        if !(0.0..=1.0).contains(&share) {
            return Err(wrong());
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "from 0 to 1000"
        )]
        Ok(Self((share * 1000.0).round() as u64))
    }
}
