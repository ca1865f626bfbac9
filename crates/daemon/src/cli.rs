// SPDX-License-Identifier: Apache-2.0
//! The command line: what may be written, not what it does.

use pagetide_dpu::WEIGHT_DEFAULT;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::bench::SizeOptions;
use crate::control::{DEFAULT_BLK_QUEUES, OnFault, RamKind};
use crate::dpu::disk::SocketMode;
use crate::injection::{DEFAULT_BURST, DEFAULT_SECONDS, TimeUs};
use crate::protection::ProtectorChoice;
use crate::protection::recording::DEFAULT_FILES;
use crate::replay::args::ReplayArgs;
use crate::settings::{GivenDpuSettings, GivenSettings};
use crate::sim::args::SimCommand;
use crate::size::ByteSize;
use crate::trace::args::TraceCommand;
use crate::vpri::VpriCommand;

/// Memory for running virtual machines whose devices live in user space.
///
/// Exit status: 0 done, 1 failed, 2 wrong use or refused.
#[derive(Parser, Debug)]
#[command(name = "pagetide", version, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run the daemon in the foreground; SIGTERM and SIGINT detach every VM and end it
    Run(RunArgs),
    /// Take over the RAM of a running VMM
    Attach(AttachArgs),
    /// Look at VMs and steer them
    #[command(subcommand)]
    Vm(VmCommand),
    /// Run the software DPU as a process of its own, or look at its devices and steer them
    Dpu(DpuArgs),
    /// I/O page faults of devices
    #[command(subcommand)]
    Iopf(IopfCommand),
    /// Say what taking over a VM would save, without taking it over
    Estimate(EstimateArgs),
    /// Measure, beside a peer in the same run
    Bench(BenchArgs),
    /// Say what policies for the protection of DMA would have done on traces
    Replay(Box<ReplayArgs>),
    /// Simulate the translation of I/O addresses for many tenants
    #[command(subcommand)]
    Sim(SimCommand),
    /// Make, build, convert and look at traces of I/O address translation and of DMA
    #[command(subcommand)]
    Trace(TraceCommand),
    /// Try implementations of the VPRI function
    #[command(subcommand)]
    Vpri(VpriCommand),
    /// Print the OpenAPI document of the HTTP API
    Openapi,
    /// A process that a bench starts for itself
    #[command(subcommand, hide = true)]
    BenchPart(BenchPart),
}

/// Where the daemon is, and how to print its answer.
#[derive(Args, Clone, PartialEq, Eq, Debug)]
pub struct ClientArgs {
    /// Socket of the daemon's API
    #[arg(
        long,
        value_name = "PATH",
        env = "PAGETIDE_API",
        default_value = "/dev/shm/pagetide/api.sock"
    )]
    pub api: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Where settings come from, beside flags.
#[derive(Args, Debug)]
pub struct SettingsArgs {
    /// TOML file of settings, its keys named like the flags
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print the settings in force as such a file, and end
    #[arg(long)]
    pub print_settings: bool,
}

/// Arguments of `run`.
#[derive(Args, Debug)]
pub struct RunArgs {
    /// Of every process with settings.
    #[command(flatten)]
    pub source: SettingsArgs,
    /// Settings given as flags.
    #[command(flatten)]
    pub given: GivenSettings,
}

/// Arguments of `dpu`: without a command, those of the process.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub struct DpuArgs {
    /// What to do with devices of a running daemon or DPU process.
    #[command(subcommand)]
    pub command: Option<DpuCommand>,
    /// Of the process.
    #[command(flatten)]
    pub run: DpuRunArgs,
}

/// Arguments of `dpu` as a process.
#[derive(Args, Debug)]
pub struct DpuRunArgs {
    /// Of every process with settings.
    #[command(flatten)]
    pub source: SettingsArgs,
    /// Settings given as flags.
    #[command(flatten)]
    pub given: GivenDpuSettings,
}

/// Arguments of `attach`.
#[derive(Args, Debug)]
pub struct AttachArgs {
    /// Process id of the VMM
    #[arg(long)]
    pub pid: u32,
    /// Name for the VM; without it the VMM's -name, else vm-PID
    #[arg(long)]
    pub name: Option<String>,
    /// Limit on resident RAM, such as 256M
    #[arg(long, value_name = "SIZE")]
    pub limit: Option<ByteSize>,
    /// Of every client.
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Commands about VMs.
#[derive(Subcommand, Debug)]
pub enum VmCommand {
    /// List every VM
    List {
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show one VM with all its figures
    Show {
        /// Name of the VM
        name: String,
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Set or lift the limit on a VM's resident RAM
    Limit {
        /// Name of the VM
        name: String,
        /// Size such as 256M, or 'none'
        #[arg(value_name = "SIZE|none")]
        limit: Limit,
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Protect what devices of a VM are about to touch by another policy
    Protector {
        /// Name of the VM
        name: String,
        /// none, lru, adp or adaptive, with parameters such as adp:promote-after=120s
        policy: ProtectorChoice,
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Evict pages of a VM now, coldest first
    Reclaim {
        /// Name of the VM
        name: String,
        /// How much; without it all that can go
        #[arg(long, value_name = "SIZE")]
        bytes: Option<ByteSize>,
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Bring every page back, then let go of the VM; Ctrl-C stops it, and the VM is served as before
    Detach {
        /// Name of the VM
        name: String,
        /// Stop a detach that is under way
        #[arg(long)]
        stop: bool,
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// A limit as it is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    /// No limit.
    None,
    /// This much.
    Size(ByteSize),
}

impl std::str::FromStr for Limit {
    type Err = crate::size::SizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "none" {
            Ok(Self::None)
        } else {
            text.parse().map(Self::Size)
        }
    }
}

/// Commands about devices.
#[derive(Subcommand, Debug)]
pub enum DpuCommand {
    /// Serve an image as a vhost-user-blk device
    Blk(BlkArgs),
    /// List every device
    List {
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show the accounts of service levels: latencies, throughput, faults, what held slow requests
    Slo {
        /// Socket or serial number of a device; without it all are shown
        #[arg(long, value_name = "SOCKET|SERIAL")]
        device: Option<String>,
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Record what DMA of attached VMs touches, as files
    #[command(subcommand)]
    Log(LogCommand),
    /// Change a device's share of the engines
    Weight {
        /// Socket of the device
        #[arg(long, value_name = "PATH")]
        socket: PathBuf,
        /// Its weight, 1 to 1000: among devices that have work, each gets what its weight is of all
        #[arg(value_name = "N")]
        weight: u32,
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Drain and remove a device
    Remove {
        /// Socket of the device
        #[arg(long, value_name = "PATH")]
        socket: PathBuf,
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// Commands about recordings of the access log.
#[derive(Subcommand, Debug)]
pub enum LogCommand {
    /// Begin a recording: files DIR/VM-000001.parquet and so on of each attached VM
    Start(LogStartArgs),
    /// Show how far the last recording is
    Status {
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
    /// End the recording and complete its files
    Stop {
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// Arguments of `dpu log start`.
#[derive(Args, Debug)]
pub struct LogStartArgs {
    /// Directory for the files, which must be there
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
    /// Only this device: socket, serial number, or number; without it all
    #[arg(long, value_name = "SOCKET|SERIAL|N")]
    pub device: Option<String>,
    /// Size of a file at which the next is begun
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    pub max_file_bytes: ByteSize,
    /// Files of each VM that are kept; the oldest go
    #[arg(long, value_name = "N", default_value_t = DEFAULT_FILES)]
    pub max_files: u32,
    /// How long; without it until `dpu log stop`
    #[arg(long, value_name = "S")]
    pub seconds: Option<u64>,
    /// Of every client.
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Commands about I/O page faults.
#[derive(Subcommand, Debug)]
pub enum IopfCommand {
    /// Let requests of a live device fault as if their pages were absent
    Inject(InjectArgs),
    /// Show how far the last injection into a device is
    Show {
        /// Socket or serial number of the device
        #[arg(long, value_name = "SOCKET|SERIAL")]
        device: String,
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
    /// End the injection into a device
    Stop {
        /// Socket or serial number of the device
        #[arg(long, value_name = "SOCKET|SERIAL")]
        device: String,
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// Arguments of `iopf inject`.
#[derive(Args, Debug)]
pub struct InjectArgs {
    /// Socket or serial number of the device
    #[arg(long, value_name = "SOCKET|SERIAL")]
    pub device: String,
    /// Arrivals a second, evenly spaced; at most 10000
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub rate: f64,
    /// How long the host holds each fault, such as 5ms or 800us; at most 10s
    #[arg(long, value_name = "TIME", allow_negative_numbers = true)]
    pub latency: TimeUs,
    /// Faults back to back at each arrival, at most 128
    #[arg(long, value_name = "N", default_value_t = DEFAULT_BURST)]
    pub burst: u32,
    /// How long the injection lasts, at most 3600 s
    #[arg(long, value_name = "S", default_value_t = DEFAULT_SECONDS)]
    pub seconds: u64,
    /// Wait until it is over, then say how many were injected and how long they took
    #[arg(long)]
    pub wait: bool,
    /// Of every client.
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Arguments of `dpu blk`.
#[derive(Args, Debug)]
pub struct BlkArgs {
    /// Unix socket to listen on
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// Image file or block device
    #[arg(long, value_name = "FILE")]
    pub image: PathBuf,
    /// Request queues offered to the guest
    #[arg(long, value_name = "N", default_value_t = DEFAULT_BLK_QUEUES)]
    pub queues: u16,
    /// Refuse writes
    #[arg(long)]
    pub read_only: bool,
    /// Do not look pages up before DMA; only for VMs that are not attached
    #[arg(long)]
    pub no_lookup: bool,
    /// Serial number shown to the guest, at most 20 bytes [default: made of the socket's path]
    #[arg(long)]
    pub serial: Option<String>,
    /// Of the image, and of the socket.
    #[command(flatten)]
    pub shares: BlkShareArgs,
    /// What a queue does while one of its requests waits for pages: begin no later one, or go on
    #[arg(long, value_enum, value_name = "HOW", default_value_t)]
    pub on_fault: OnFault,
    /// Refuse guest RAM that is not sealed against shrinking
    #[arg(long)]
    pub require_sealed: bool,
    /// Take guest RAM of these kinds, too: it can be lost under the device, which then stops
    #[arg(long, value_enum, value_name = "KIND,…", value_delimiter = ',')]
    pub allow_ram: Vec<RamKind>,
    /// Most guest RAM that a front end may have mapped
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(pagetide_dpu::RAM_BYTES_MAX))]
    pub ram_max: ByteSize,
    /// Share of the engines beside the weights of other devices that have work, 1 to 1000
    #[arg(long, value_name = "N", default_value_t = WEIGHT_DEFAULT)]
    pub weight: u32,
    /// Of every client.
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Arguments of `dpu blk` on who else has the image, and who may have the disk.
#[derive(Args, Debug)]
pub struct BlkShareArgs {
    /// Let others write the image meanwhile: they know of one another (a cluster file system, say)
    #[arg(long)]
    pub shared: bool,
    /// Serve the image's bytes as they are, whatever format they look like
    #[arg(long)]
    pub raw: bool,
    /// User to whom the socket is to belong, by name or number
    #[arg(long, value_name = "USER")]
    pub owner: Option<String>,
    /// Group to which the socket is to belong, by name or number
    #[arg(long, value_name = "GROUP")]
    pub group: Option<String>,
    /// Permission bits of the socket, in octal [default: 0660 with --owner or --group, else by the umask]
    #[arg(long, value_name = "OCTAL")]
    pub mode: Option<SocketMode>,
}

/// Arguments of `estimate`.
#[derive(Args, Clone, PartialEq, Debug)]
pub struct EstimateArgs {
    /// Process id of the VMM
    #[arg(long)]
    pub pid: u32,
    /// How long to look, in minutes; fractions are allowed
    #[arg(long, value_name = "M", value_parser = minutes)]
    pub minutes: f64,
    /// Seconds between two looks
    #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub interval: u64,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Longest estimate: a day.
const MINUTES_MAX: f64 = 24.0 * 60.0;

fn minutes(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number <= MINUTES_MAX => Ok(number),
        _ => Err(format!(
            "write a number of minutes above 0, at most {MINUTES_MAX}"
        )),
    }
}

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
        #[arg(long, value_enum, default_value_t = crate::bench::blk::backend::LookUpMode::On)]
        look_up: crate::bench::blk::backend::LookUpMode,
        /// Time each look-up takes more, in nanoseconds
        #[arg(long, default_value_t = 0)]
        look_up_extra_ns: u64,
    },
    /// Our back end of `bench head-of-line`
    HeadOfLineBackend(crate::bench::head_of_line::backend::BackendOptions),
    /// The client of `bench head-of-line`
    HeadOfLineFrontend {
        /// Socket of A's disk
        #[arg(long)]
        socket_a: PathBuf,
        /// Socket of B's disk
        #[arg(long)]
        socket_b: PathBuf,
    },
    /// What `bench head-of-line` asks how late threads wake
    HeadOfLineWakes,
    /// The guest of `bench fault` and `fault-parallel`
    FaultGuest {
        /// Pages of its memory
        #[arg(long)]
        pages: u64,
        /// CPU of its vCPU
        #[arg(long)]
        cpu: usize,
    },
    /// The dense, busy guest of `bench real-size`, `guest-cost` and `tracker`
    BusyGuest(crate::bench::busy::guest::BusyGuestOptions),
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
        /// Trace in the authors' format
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

/// Benches by name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum BenchName {
    /// What the access log and a DMA protector cost a disk, switched on and off in turns
    AccessLog,
    /// Page faults of devices under no protector, a simple LRU, the paper's and ours, of made-up guests
    Adp,
    /// The disk of a squeezed guest with a DMA protector and without, in turns
    AdpLive,
    /// Time to get an evicted page back, by CPU and by device, beside kernel zram
    Fault,
    /// Faults of 1 to 8 threads at a time beside kernel zram, and beside a fault that is held
    FaultParallel,
    /// What a hostile tenant takes from a steady one on the same engine, beside one of its own
    Fairness,
    /// 4 KiB I/O of vhost-user-blk, beside qemu-storage-daemon
    Blk,
    /// Unmaps a second that are queued, beside unmaps that wait for their invalidation
    GmemAsync,
    /// Allocations and frees a second of virtual addresses, beside three other allocators
    GmemVa,
    /// What page faults do to the throughput and the tail of a disk, pause against out of order
    IopfImpact,
    /// Look-ups and updates of the PA-bitmap of a terabyte, and what look-ups cost a disk
    PaBitmap,
    /// What one tenant's page faults do to another's requests on the same engine
    HeadOfLine,
    /// An I/O page fault there and back, idle and busy, by VPRI and by a model of ATS and PRI
    IopfRtt,
    /// Page faults of 1 to 16 tenants at a time, serialized and on the tenants' CPUs; and beside a storm
    IopfScale,
    /// Translation requests a second that the performance model gets through
    Sim,
    /// Attach, squeeze, recovery and detach of dense VMs of 1, 4 and 16 GiB, and what grows faster than they
    RealSize,
    /// Throughput of a busy guest attached over released, in turns, with and without a limit
    GuestCost,
    /// How much of what is cold is known to be, how soon, and what an eviction by that knowledge costs
    Tracker,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_definition_is_sound() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }

    #[test]
    fn wrong_use_ends_with_status_2() {
        for line in [
            vec!["pagetide"],
            vec!["pagetide", "attach"],
            vec!["pagetide", "attach", "--pid", "x"],
            vec!["pagetide", "attach", "--pid", "1", "--limit", "50%"],
            vec!["pagetide", "vm", "limit", "a", "much"],
            vec!["pagetide", "estimate", "--pid", "1", "--minutes", "0"],
            vec!["pagetide", "bench", "nothing"],
            vec!["pagetide", "run", "--engines", "0"],
            vec!["pagetide", "iopf", "inject", "--device", "d", "--rate", "1"],
            vec![
                "pagetide",
                "iopf",
                "inject",
                "--device",
                "d",
                "--rate",
                "1",
                "--latency",
                "5x",
            ],
            vec![
                "pagetide",
                "iopf",
                "inject",
                "--device",
                "d",
                "--rate",
                "1",
                "--latency",
                "-5ms",
            ],
        ] {
            let error = Cli::try_parse_from(&line).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{line:?}");
        }
    }

    #[test]
    fn limit_none_is_no_limit() {
        assert_eq!("none".parse(), Ok(Limit::None));
        assert_eq!("1M".parse(), Ok(Limit::Size(ByteSize(1 << 20))));
    }
}
