// SPDX-License-Identifier: Apache-2.0
//! The command line of `pagetide bench`, and of the processes that benches start for themselves.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use pagetide_report::outcome::{CommandError, print, print_report};

use crate::{
    BenchError, BenchReport, SizeOptions, access_log, adp, adp_live, blk, budget, burst, cold_ring,
    crash, fairness, fault, fault_parallel, gmem_async, gmem_va, guest_cost, head_of_line,
    iopf_daily, iopf_impact, iopf_rtt, iopf_scale, memory_move, name::BenchName, neighbour,
    net_guest, net_pps, nic_impact, overcommit, overhead, pa_bitmap, pinning, pool, real_size,
    remote, rnpf_rate, schedule, sim, single_fault, swap, tracker, upgrade,
};

/// Arguments of `bench`.
#[derive(Args, Debug)]
pub struct BenchArgs {
    /// What to measure
    pub name: BenchName,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Of the benches of large VMs.
    #[command(flatten)]
    pub sizes: SizeOptions,
}

/// Processes that benches start for themselves.
#[derive(Subcommand, Debug)]
pub enum BenchPart {
    /// Our back end of `bench blk`
    BlkBackend {
        /// Socket to listen on
        #[arg(long)]
        socket: PathBuf,
        /// Image to serve
        #[arg(long)]
        image: PathBuf,
        /// Directory for the engine's lock
        #[arg(long)]
        state_dir: PathBuf,
        /// Longest time the engine polls before it sleeps, in microseconds
        #[arg(long, default_value_t = 60)]
        poll_us: u64,
        /// Queues of the device
        #[arg(long, default_value_t = 1)]
        queues: u16,
        /// Whether the engine looks pages up before each DMA
        #[arg(long, value_enum, default_value_t = crate::blk::backend::LookUpMode::On)]
        look_up: crate::blk::backend::LookUpMode,
        /// Time each look-up takes more, in nanoseconds
        #[arg(long, default_value_t = 0)]
        look_up_extra_ns: u64,
    },
    /// Our back end of `bench head-of-line`
    HeadOfLineBackend(crate::head_of_line::backend::BackendOptions),
    /// Our back end of `bench net-pps`
    NetBackend(crate::net_pps::backend::NetBackendOptions),
    /// The client of `bench head-of-line`
    HeadOfLineFrontend {
        /// Socket of A's disk
        #[arg(long)]
        socket_a: PathBuf,
        /// Socket of B's disk
        #[arg(long)]
        socket_b: PathBuf,
    },
    /// The VM of `bench pinning`
    NicGuest(crate::pinning::guest::NicGuestOptions),
    /// What `bench head-of-line` asks how late threads wake
    HeadOfLineWakes,
    /// The guest of `bench fault` and `fault-parallel`
    FaultGuest {
        /// What they are
        #[arg(long, value_enum, default_value_t = crate::fault::content::Kind::Program)]
        content: crate::fault::content::Kind,
        /// Pages of its memory
        #[arg(long)]
        pages: u64,
        /// CPU of its vCPU
        #[arg(long)]
        cpu: usize,
    },
    /// The guest of `bench pool`
    PoolGuest {
        /// Bytes of its memory
        #[arg(long)]
        bytes: u64,
    },
    /// The dense, busy guest of `bench real-size`, `guest-cost`, `schedule` and `tracker`
    BusyGuest(crate::busy::guest::BusyGuestOptions),
    /// A VM of `bench overcommit`
    RequestGuest(crate::overcommit::guest::RequestGuestOptions),
    /// Makes the RAM of a real guest of `bench overcommit` present
    FillRam(crate::overcommit::real::FillRamOptions),
    /// The device of `bench iopf-rtt` that is in another process
    IopfRttDevice {
        /// Socket of its VPRI function
        #[arg(long)]
        socket: PathBuf,
        /// CPU it stays on
        #[arg(long)]
        cpu: usize,
    },
    /// One run of `bench sim`
    SimRun {
        /// Configuration of table IV
        #[arg(long)]
        preset: String,
        /// A trace, in whatever format
        #[arg(long)]
        trace: PathBuf,
    },
    /// The front end of `bench blk`
    BlkFrontend {
        /// Socket of the back end
        #[arg(long)]
        socket: PathBuf,
    },
}

/// Runs a bench and prints its report.
///
/// # Errors
/// If the options are not for it, or it gave no result.
pub fn execute(args: &BenchArgs) -> Result<(), CommandError> {
    args.sizes.check(args.name).map_err(CommandError::refused)?;
    let report = run(args.name, &args.sizes)
        .map_err(|error| CommandError::failed(format!("bench {} {error}", args.name)))?;
    print_report(&report, args.json.into())
}

/// Is such a process until it ends.
///
/// # Errors
/// If it failed.
pub fn execute_part(part: BenchPart) -> Result<(), CommandError> {
    match part {
        BenchPart::BlkBackend {
            socket,
            image,
            state_dir,
            poll_us,
            queues,
            look_up,
            look_up_extra_ns,
        } => {
            let options = crate::blk::backend::BackendOptions {
                socket,
                image,
                state_dir,
                poll_max: std::time::Duration::from_micros(poll_us),
                queue_count: queues,
                look_up: look_up.with_extra(std::time::Duration::from_nanos(look_up_extra_ns)),
            };
            crate::blk::backend::serve(options).map_err(CommandError::failed)
        }
        BenchPart::HeadOfLineBackend(options) => {
            crate::head_of_line::backend::serve(&options).map_err(CommandError::failed)
        }
        BenchPart::NetBackend(options) => {
            crate::net_pps::backend::serve(&options).map_err(CommandError::failed)
        }
        BenchPart::NicGuest(options) => {
            crate::pinning::guest::run(&options).map_err(CommandError::failed)
        }
        BenchPart::HeadOfLineFrontend { socket_a, socket_b } => {
            crate::head_of_line::frontend::serve(&socket_a, &socket_b).map_err(CommandError::failed)
        }
        BenchPart::HeadOfLineWakes => {
            crate::head_of_line::wakes::serve().map_err(CommandError::failed)
        }
        BenchPart::FaultGuest {
            content,
            pages,
            cpu,
        } => crate::fault::guest::run(content, pages, cpu).map_err(CommandError::failed),
        BenchPart::PoolGuest { bytes } => {
            crate::pool::guest::run(bytes).map_err(CommandError::failed)
        }
        BenchPart::BusyGuest(options) => {
            crate::busy::guest::run(&options).map_err(CommandError::failed)
        }
        BenchPart::RequestGuest(options) => {
            crate::overcommit::guest::run(&options).map_err(CommandError::failed)
        }
        BenchPart::FillRam(options) => {
            crate::overcommit::real::fill_ram(&options).map_err(CommandError::failed)
        }
        BenchPart::IopfRttDevice { socket, cpu } => {
            crate::iopf_rtt::across::serve(&socket, cpu).map_err(CommandError::failed)
        }
        BenchPart::SimRun { preset, trace } => {
            let figures = crate::sim::part::run(&preset, &trace).map_err(CommandError::failed)?;
            print(&serde_json::to_string(&figures).map_err(CommandError::failed)?)
        }
        BenchPart::BlkFrontend { socket } => {
            crate::blk::frontend::serve(&socket).map_err(CommandError::failed)
        }
    }
}

/// Runs the bench `name`; `sizes` must be for it ([`SizeOptions::check`]).
///
/// # Errors
/// [`BenchError`].
pub fn run(name: BenchName, sizes: &SizeOptions) -> Result<BenchReport, BenchError> {
    match name {
        BenchName::AccessLog => access_log::run(&access_log::AccessLogBenchOptions::default()),
        BenchName::Adp => adp::run(&adp::AdpBenchOptions::of(sizes.seeds, sizes.plots.clone())),
        BenchName::AdpLive => adp_live::run(sizes),
        BenchName::Fairness => fairness::run(&fairness::FairnessOptions::default()),
        BenchName::Fault => fault::run(&fault::FaultBenchOptions::of_rounds(sizes.pairs)),
        BenchName::FaultParallel => fault_parallel::run(
            &fault_parallel::FaultParallelOptions::of_rounds(sizes.pairs),
        ),
        BenchName::Blk => blk::run(),
        BenchName::Budget => budget::run(sizes),
        BenchName::Burst => burst::run(sizes),
        BenchName::Crash => crash::run(sizes),
        BenchName::GmemAsync => gmem_async::run(&gmem_async::GmemAsyncBenchOptions::default()),
        BenchName::GmemVa => gmem_va::run(&gmem_va::GmemVaBenchOptions::default()),
        BenchName::IopfDaily => iopf_daily::run(&iopf_daily::IopfDailyOptions::of(sizes)),
        BenchName::IopfImpact => iopf_impact::run(&iopf_impact::IopfImpactOptions::of(sizes)),
        BenchName::Overhead => overhead::run(sizes),
        BenchName::PaBitmap => pa_bitmap::run(&pa_bitmap::PaBitmapBenchOptions::default()),
        BenchName::NetPps => net_pps::run(sizes),
        BenchName::ColdRing => cold_ring::run(sizes),
        BenchName::Neighbour => neighbour::run(sizes),
        BenchName::RnpfRate => rnpf_rate::run(sizes),
        BenchName::Pinning => pinning::run(sizes),
        BenchName::NicImpact => nic_impact::run(sizes),
        BenchName::MemoryMove => memory_move::run(sizes),
        BenchName::NetGuest => net_guest::run(sizes),
        BenchName::SingleFault => single_fault::run(sizes),
        BenchName::HeadOfLine => head_of_line::run(&head_of_line::HeadOfLineOptions::of(sizes)),
        BenchName::IopfRtt => iopf_rtt::run(&iopf_rtt::IopfRttBenchOptions::default()),
        BenchName::IopfScale => iopf_scale::run(&iopf_scale::IopfScaleOptions::of(sizes)),
        BenchName::Sim => sim::run(sizes.hypersio.as_deref(), sizes.recorded.as_deref()),
        BenchName::Overcommit => overcommit::run(sizes),
        BenchName::Pool => pool::run(sizes),
        BenchName::RealSize => real_size::run(sizes),
        BenchName::Remote => remote::run(sizes),
        BenchName::GuestCost => guest_cost::run(sizes),
        BenchName::Schedule => schedule::run(sizes),
        BenchName::Swap => swap::run(sizes),
        BenchName::Tracker => tracker::run(sizes),
        BenchName::Upgrade => upgrade::run(sizes),
    }
}
