// SPDX-License-Identifier: Apache-2.0
//! The command line of `pagetide trace`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use pagetide_trace::{BlockFormat, FormatChoice, TraceFormat};

use pagetide_report::size::ByteSize;

/// Commands about traces.
#[derive(Subcommand, Debug)]
pub enum TraceCommand {
    /// Make a trace of synthetic tenants
    Make(Box<MakeArgs>),
    /// Build a trace from a recipe: synthetic tenants or recorded logs
    Build(BuildArgs),
    /// Write a trace in another format
    Convert(ConvertArgs),
    /// Record what the devices of a stock guest ask of its IOMMU
    Collect(CollectArgs),
    /// Show what is in a trace
    Info(InfoArgs),
    /// Analyze the DMA in access logs and block traces: footprint, reuse, faults
    Analyze(Box<AnalyzeArgs>),
}

/// Formats that can be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum WrittenFormat {
    /// The project's own, in Parquet
    Parquet,
    /// What the authors' program runs: OUT ends in iotlb_trace.bin
    HypersioBinary,
}

impl From<WrittenFormat> for TraceFormat {
    fn from(format: WrittenFormat) -> Self {
        match format {
            WrittenFormat::Parquet => Self::Parquet,
            WrittenFormat::HypersioBinary => Self::HypersioBinary,
        }
    }
}

/// Where a trace goes.
#[derive(Args, Debug)]
pub struct OutArgs {
    /// File to write
    #[arg(value_name = "OUT")]
    pub out: PathBuf,
    /// Format to write; without it hypersio-binary if OUT ends in iotlb_trace.bin, else parquet
    #[arg(long, value_name = "FORMAT")]
    pub to: Option<WrittenFormat>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `trace make`. A figure that has no flag is set by --set.
#[derive(Args, Debug)]
pub struct MakeArgs {
    /// Where the trace goes.
    #[command(flatten)]
    pub out: OutArgs,
    /// Tenants
    #[arg(long, value_name = "N")]
    pub tenants: u32,
    /// Packets of the whole trace; without it --lengths is needed
    #[arg(long, value_name = "N", required_unless_present_any = ["lengths", "set"])]
    pub packets: Option<u64>,
    /// What the tenants do: seq, iperf3, mediastream or websearch
    #[arg(long, value_name = "NAME", default_value = "iperf3")]
    pub workload: String,
    /// Whose turn it is: rr, rand or time
    #[arg(long, value_name = "ORDER")]
    pub order: Option<String>,
    /// Packets of one turn
    #[arg(long, value_name = "N")]
    pub burst: Option<u32>,
    /// What every random choice follows from
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Page of a packet's third request: mailbox, ring or data
    #[arg(long, value_name = "PAGE")]
    pub third: Option<String>,
    /// Source ids: unique, or logN for the authors' rule with N devices a log
    #[arg(long, value_name = "RULE")]
    pub sids: Option<String>,
    /// Packets until the window of live pages moves on by one
    #[arg(long, value_name = "N")]
    pub uses: Option<u32>,
    /// Data pages in use at one time
    #[arg(long, value_name = "N")]
    pub live: Option<u32>,
    /// Packets in a row on one page, exactly or on average
    #[arg(long, value_name = "N")]
    pub run: Option<u32>,
    /// Share of a tenant's packets that go to the pages of its start
    #[arg(long, value_name = "SHARE", value_parser = share, allow_hyphen_values = true)]
    pub init_frac: Option<f64>,
    /// Where tenants begin in their period: random or none
    #[arg(long, value_name = "WHERE")]
    pub stagger: Option<String>,
    /// Whether left pages are unmapped: never or when-left
    #[arg(long, value_name = "WHEN")]
    pub unmap: Option<String>,
    /// When the trace ends otherwise: first-runs-out, round-finished or all-run-out
    #[arg(long, value_name = "WHEN")]
    pub end: Option<String>,
    /// Lengths of the tenants in packets, from the shortest to the longest
    #[arg(long, value_name = "MIN..MAX")]
    pub lengths: Option<String>,
    /// Bandwidth of the tenants in proportion, such as 1,1,4
    #[arg(long, value_name = "W,…", value_delimiter = ',')]
    pub weights: Vec<u32>,
    /// Whether joins and leaves are told: silent or announced
    #[arg(long, value_name = "WORD")]
    pub membership: Option<String>,
    /// Any other figure by its key in a recipe, such as input.synthetic.ring.iova=0x34800000
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Arguments of `trace build`.
#[derive(Args, Debug)]
pub struct BuildArgs {
    /// Recipe, a TOML file
    #[arg(value_name = "SPEC")]
    pub spec: PathBuf,
    /// Where the trace goes.
    #[command(flatten)]
    pub out: OutArgs,
    /// Set a figure of the recipe by its key, such as tenants=64
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Arguments of `trace convert`.
#[derive(Args, Debug)]
pub struct ConvertArgs {
    /// Trace to read
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// Where it goes.
    #[command(flatten)]
    pub out: OutArgs,
    /// Format to read it as; auto goes by its content
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub from: FormatChoice,
}

/// Arguments of `trace collect`.
#[derive(Args, Debug)]
pub struct CollectArgs {
    /// Kind of devices, each of which is a tenant
    #[arg(long, value_name = "NAME", default_value = "vmxnet3",
          value_parser = ["vmxnet3", "e1000e", "virtio-net", "nvme"])]
    pub device: String,
    /// Devices; more than 24 are recorded in several runs
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub nics: u32,
    /// What they do; fio is for nvme, the others are for NICs
    #[arg(long, value_name = "NAME", default_value = "iperf3",
          value_parser = ["iperf3", "media", "search", "fio"])]
    pub workload: String,
    /// How long they do it
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub seconds: u32,
    /// Who maps their memory: the guest's drivers, strict or lazy, or VMs in the guest, with passthrough
    #[arg(long, value_name = "NAME", default_value = "strict",
          value_parser = ["strict", "lazy", "passthrough"])]
    pub mode: String,
    /// Directory for logs, records and recipe; it must be empty, or not exist
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `trace info`.
#[derive(Args, Debug)]
pub struct InfoArgs {
    /// Trace to read
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Format to read it as; auto goes by its content
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    pub from: FormatChoice,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `trace analyze`.
#[derive(Args, Debug)]
pub struct AnalyzeArgs {
    /// Files of access logs, in any order, and block traces. A block trace that was cut off between two
    /// records looks whole: no format has an end mark
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Format of the files, if content and name do not tell: vscsi, oracle-general, mqsim, hp-srt or block-ids
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<BlockFormat>,
    /// Memory of the VM, which footprints are shares of; without it, what an access log says
    #[arg(long, value_name = "BYTES")]
    pub memory: Option<ByteSize>,
    /// Size of a section
    #[arg(long, value_name = "BYTES", default_value = "2M")]
    pub section: ByteSize,
    /// A touch after longer than this is a simulated fault
    #[arg(long, value_name = "TIME", default_value = "300s", value_parser = time)]
    pub interval: Duration,
    /// Leave out what is before this, counted from the first record
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = time)]
    pub from: Duration,
    /// Leave out what is from here on, counted from the first record
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub until: Option<Duration>,
    /// Look at block traces through a modelled page cache of this size, or of one that suits them
    #[arg(
        long,
        value_name = "BYTES",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "auto"
    )]
    pub page_cache: Option<CacheSize>,
    /// Size of a block, in block traces that do not tell
    #[arg(long, value_name = "BYTES")]
    pub block_bytes: Option<u32>,
    /// Time from one request to the next, in block traces without times
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub request_interval: Option<Duration>,
    /// Draw what is printed as SVG files in this directory
    #[arg(long, value_name = "DIR")]
    pub plots: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Size of a modelled page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CacheSize {
    /// One that suits the trace.
    Suits,
    /// This.
    Is(ByteSize),
}

impl std::str::FromStr for CacheSize {
    type Err = pagetide_report::size::SizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Suits),
            size => size.parse().map(Self::Is),
        }
    }
}

/// Units of a time by their suffix, in nanoseconds. Longer ones first where one
/// ends with another.
const TIME_UNITS: [(&str, u64); 5] = [
    ("us", 1_000),
    ("ms", 1_000_000),
    ("min", 60_000_000_000),
    ("s", 1_000_000_000),
    ("h", 3_600_000_000_000),
];

/// A whole number with its unit.
pub(crate) fn time(text: &str) -> Result<Duration, String> {
    let found = TIME_UNITS
        .into_iter()
        .find_map(|(suffix, unit_ns)| Some((text.strip_suffix(suffix)?, unit_ns)));
    let time_ns = match found.map(|(number, unit_ns)| (number.parse::<u64>(), unit_ns)) {
        Some((Ok(number), unit_ns)) => number.checked_mul(unit_ns),
        _ => None,
    };
    time_ns
        .map(Duration::from_nanos)
        .ok_or_else(|| "a time is a whole number with us, ms, s, min or h, such as 300s".to_owned())
}

/// A part of a whole. Judged here, since JSON, on the way to the recipe, has no
/// word for what is no number.
fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a share is a number from 0 to 1, such as 0.0015".to_owned()),
    }
}
