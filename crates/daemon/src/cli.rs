// SPDX-License-Identifier: Apache-2.0
//! The command line: what may be written, not what it does.

mod net;
pub(crate) mod shared;

pub use net::{LinkArgs, NetArgs};
pub use shared::{ClientArgs, DeviceArgs, Limit};

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue};
use clap::{Args, Parser, Subcommand};

use crate::budget::cli::{HostCommand, ShareArgs};
use crate::control::{DEFAULT_BLK_QUEUES, OnFault};
use crate::injection::{DEFAULT_BURST, DEFAULT_SECONDS, TimeUs};
use crate::pool::PoolMax;
use crate::protection::ProtectorChoice;
use crate::protection::recording::DEFAULT_FILES;
use crate::settings::{GivenDpuSettings, GivenSettings};
use crate::tiers::may_be_secret;
use pagetide_report::size::ByteSize;

/// Memory for running virtual machines whose devices live in user space.
///
/// Exit status: 0 success, 1 failure, 2 usage error or refusal.
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
    Run(Box<RunArgs>),
    /// Take over the RAM of a running VMM
    Attach(AttachArgs),
    /// Replace the running daemon by another program while its VMs and devices run
    Upgrade(UpgradeArgs),
    /// Show and control VMs
    #[command(subcommand)]
    Vm(VmCommand),
    /// Run the software DPU in a process of its own, or show and control its devices
    Dpu(Box<DpuArgs>),
    /// What evicted pages take of the host's memory, and its cap
    #[command(subcommand)]
    Pool(PoolCommand),
    /// I/O page faults of devices
    #[command(subcommand)]
    Iopf(IopfCommand),
    /// Show the host's memory and the CPU time of background work, and divide them
    #[command(subcommand)]
    Host(HostCommand),
    /// Estimate what attaching to a VM would save, without attaching
    Estimate(EstimateArgs),
    /// Run a benchmark, with its peer in the same run
    #[command(disable_help_flag = true)]
    Bench(LabArgs),
    /// Run DMA protection policies on traces, and compare them
    #[command(disable_help_flag = true)]
    Replay(LabArgs),
    /// Simulate the translation of I/O addresses for many tenants
    #[command(disable_help_flag = true)]
    Sim(LabArgs),
    /// Make, build, convert and examine traces of I/O address translation and of DMA
    #[command(disable_help_flag = true)]
    Trace(LabArgs),
    /// Test implementations of the VPRI function
    #[command(disable_help_flag = true)]
    Vpri(LabArgs),
    /// Print the OpenAPI document of the HTTP API
    Openapi,
    /// Succeed the daemon that has started this process; for `pagetide upgrade`
    #[command(hide = true)]
    Successor,
    /// Wait for a successor that this process has started; for `pagetide upgrade`
    #[command(hide = true)]
    Hold,
}

/// The command line of this process; ends the process if it is wrong, or asks for help.
#[must_use]
pub fn parsed() -> Cli {
    Cli::try_parse().unwrap_or_else(|error| without_secrets(error).exit())
}

/// An error of the command line without words that may have a password in them: a URL that stands where none belongs,
/// because of a blank too much, say.
fn without_secrets(mut error: clap::Error) -> clap::Error {
    let is_secret = |value: &ContextValue| match value {
        ContextValue::String(text) => may_be_secret(text),
        _ => false,
    };
    let secret = error.context().filter(|(_, value)| is_secret(value));
    let kinds: Vec<ContextKind> = secret.map(|(kind, _)| kind).collect();
    for kind in kinds {
        error.insert(kind, ContextValue::String("…".to_owned()));
    }
    error
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
    /// Limit on resident RAM, such as 256M: its ceiling under a budget
    #[arg(long, value_name = "SIZE", visible_alias = "ceiling")]
    pub limit: Option<ByteSize>,
    /// Its share of the host's budget beside the weights of other VMs, 1 to 10000 [default: 100]
    #[arg(long, value_name = "N")]
    pub weight: Option<u32>,
    /// It may always have this much of the host's budget resident [default: 16M]
    #[arg(long, value_name = "SIZE")]
    pub floor: Option<ByteSize>,
    /// Of every client.
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Arguments of `upgrade`.
#[derive(Args, Debug)]
pub struct UpgradeArgs {
    /// The new program; it and all directories above it must be root's, and writable by nobody else
    pub program: PathBuf,
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
    /// Change what a VM may have of the host's budget
    Set(ShareArgs),
    /// Change the policy that protects what devices of a VM are about to touch
    Protector {
        /// Name of the VM
        name: String,
        /// none, lru or adp, with parameters such as adp:promote-after=120s
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
    /// Swap in all pages of the VM, then release it; Ctrl-C stops this, and the VM is served as before
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

/// Commands about the pools of all VMs.
#[derive(Subcommand, Debug)]
pub enum PoolCommand {
    /// Show what the pools of all VMs take
    Show {
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Set or lift the cap of all pools, from now on and over restarts
    Cap {
        /// Size such as 8G; 'none'; or 'default' for the setting pool-max
        #[arg(value_name = "SIZE|none|default")]
        cap: GivenCap,
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
}

/// A cap of the pools as it is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GivenCap {
    /// That of the setting.
    Default,
    /// This, or none.
    Cap(PoolMax),
}

impl std::str::FromStr for GivenCap {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "default" => Ok(Self::Default),
            _ => text.parse().map(Self::Cap),
        }
    }
}

/// Commands about devices.
#[derive(Subcommand, Debug)]
pub enum DpuCommand {
    /// Serve an image as a vhost-user-blk device
    Blk(BlkArgs),
    /// Serve a network interface as a vhost-user-net device
    Net(NetArgs),
    /// List every device
    List {
        /// Of every client.
        #[command(flatten)]
        client: ClientArgs,
    },
    /// Show service levels: latencies, throughput, faults, causes of slow requests
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
    /// Serial number shown to the guest, at most 20 bytes [default: made of the socket's path]
    #[arg(long)]
    pub serial: Option<String>,
    /// Of the image.
    #[command(flatten)]
    pub shares: BlkShareArgs,
    /// What a queue does while one of its requests waits for pages: begin no later one, or go on
    #[arg(long, value_enum, value_name = "HOW", default_value_t)]
    pub on_fault: OnFault,
    /// Of every device.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Of every client.
    #[command(flatten)]
    pub client: ClientArgs,
}

/// Arguments of `dpu blk` on who else has the image.
#[derive(Args, Debug)]
pub struct BlkShareArgs {
    /// Let others write the image meanwhile: they know of one another (a cluster file system, say)
    #[arg(long)]
    pub shared: bool,
    /// Serve the image's bytes as they are, whatever format they look like
    #[arg(long)]
    pub raw: bool,
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

/// A command of `pagetide-lab`, as it was written.
#[derive(Args, Clone, PartialEq, Eq, Debug)]
pub struct LabArgs {
    /// What follows the command; `--help` lists it
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub arguments: Vec<OsString>,
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
            vec!["pagetide", "pool", "cap"],
            vec!["pagetide", "pool", "cap", "3M"],
            vec!["pagetide", "run", "--pool-max", "1K"],
            vec!["pagetide", "vm", "set", "a", "--weight", "-1"],
            vec!["pagetide", "host", "budget", "much"],
            vec!["pagetide", "host", "budget", "1G", "--low", "200%"],
            vec!["pagetide", "run", "--host-budget", "some"],
            vec!["pagetide", "estimate", "--pid", "1", "--minutes", "0"],
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
    fn error_repeats_no_word_that_may_be_a_password() {
        let url = "remote:redis://:hunter2@far=1G";
        let list = format!("lz4,{url}");
        for words in [
            vec!["run", url],
            vec!["run", "--tiers", &list],
            vec!["run", "--tiers", "lz4", url],
            vec!["run", "--tier", url],
            vec!["run", "--reader-poll-us", url],
            vec![url],
        ] {
            let line = [vec!["pagetide"], words].concat();
            let error = Cli::try_parse_from(&line).unwrap_err();
            let told = without_secrets(error).render().to_string();
            assert!(
                !told.contains("hunter2") && told.len() > 20,
                "{line:?}: {told}"
            );
        }
    }

    #[test]
    fn limit_none_is_no_limit() {
        assert_eq!("none".parse(), Ok(Limit::None));
        assert_eq!("1M".parse(), Ok(Limit::Size(ByteSize(1 << 20))));
    }
}
