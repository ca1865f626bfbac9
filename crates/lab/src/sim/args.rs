// SPDX-License-Identifier: Apache-2.0
//! The command line of `pagetide sim`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, Subcommand};

/// Commands of the simulator.
#[derive(Subcommand, Debug)]
pub enum SimCommand {
    /// Run one configuration over one trace
    Run(SimRunArgs),
    /// Run every point of a study on all cores; continues where a killed sweep stopped
    Sweep(SweepArgs),
    /// Compare with what the authors' program printed
    Verify(VerifyArgs),
    /// Run a study of the project's own
    #[command(subcommand)]
    Study(StudyCommand),
    /// Compute and draw the paper's figures
    Figures(FiguresArgs),
    /// Run the paper's findings as checks
    Findings {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}

/// Arguments of `sim figures`.
#[derive(Args, Debug)]
pub struct FiguresArgs {
    /// Directory for pictures, data and index.html; what is finished is kept there
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Packets of each run
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub packets: u64,
    /// Only these figures, such as 10,12b,history-length
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Threads; without it one for each core
    #[arg(long, value_name = "N")]
    pub jobs: Option<NonZeroUsize>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Studies.
#[derive(Subcommand, Debug)]
pub enum StudyCommand {
    /// Host pages, walkers, and links of 400 and 800 Gb/s
    Hardware(HardwareStudyArgs),
    /// What I/O page faults cost, by discipline, over a ladder of absent shares
    Faults(FaultStudyArgs),
    /// Recorded tenants beside made ones, by who mapped their memory
    Recorded(RecordedStudyArgs),
}

/// Arguments of `sim study recorded`.
#[derive(Args, Debug)]
pub struct RecordedStudyArgs {
    /// Directory with what `trace collect` left, anywhere below it
    #[arg(long, value_name = "DIR")]
    pub traces: PathBuf,
    /// Threads; without it one for each core
    #[arg(long, value_name = "N")]
    pub jobs: Option<NonZeroUsize>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `sim study hardware`.
#[derive(Args, Debug)]
pub struct HardwareStudyArgs {
    /// Threads; without it one for each core
    #[arg(long, value_name = "N")]
    pub jobs: Option<NonZeroUsize>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `sim study faults`.
#[derive(Args, Debug)]
pub struct FaultStudyArgs {
    /// Draw the times of faults from the samples in this output of `bench iopf-rtt --json`
    #[arg(long, value_name = "FILE")]
    pub samples: Option<PathBuf>,
    /// Way and case of the samples
    #[arg(long, value_name = "NAME", default_value = "vpri_in_process_idle_fill")]
    pub samples_of: String,
    /// Threads; without it one for each core
    #[arg(long, value_name = "N")]
    pub jobs: Option<NonZeroUsize>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// What is run.
#[derive(Args, Debug)]
pub struct StudyArgs {
    /// Ground of the parameters: base, hypertrio, hypertrio-400 or hypertrio-800
    #[arg(long, value_name = "NAME")]
    pub preset: Option<String>,
    /// Whose rules: paper or hypersio
    #[arg(long, value_name = "NAME")]
    pub flavour: Option<String>,
    /// Trace to run, in place of the study's; its format is told by its content
    #[arg(long = "trace", value_name = "FILE")]
    pub traces: Vec<PathBuf>,
    /// Set a parameter of the model by its name in a study, such as devtlb.entries=64
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Arguments of `sim run`.
#[derive(Args, Debug)]
pub struct SimRunArgs {
    /// Study of a single point; without it --trace says what is run
    #[arg(value_name = "STUDY")]
    pub study: Option<PathBuf>,
    /// Changes to it.
    #[command(flatten)]
    pub changes: StudyArgs,
    /// Write every step of every request to a file, one JSON object a line
    #[arg(long, value_name = "FILE")]
    pub events: Option<PathBuf>,
    /// Tell the figures of each tenant, too
    #[arg(long)]
    pub tenants: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `sim sweep`.
#[derive(Args, Debug)]
pub struct SweepArgs {
    /// Study: a TOML file in which any parameter may be a list
    #[arg(value_name = "STUDY")]
    pub study: PathBuf,
    /// Parquet file for the results; what is finished is kept beside it in OUT.journal
    #[arg(long, value_name = "OUT")]
    pub out: PathBuf,
    /// Threads; without it one for each core
    #[arg(long, value_name = "N")]
    pub jobs: Option<NonZeroUsize>,
    /// Changes to the study.
    #[command(flatten)]
    pub changes: StudyArgs,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `sim verify`.
#[derive(Args, Debug)]
pub struct VerifyArgs {
    /// Table of the program's answers, CSV with a header
    #[arg(long, value_name = "CSV")]
    pub reference: PathBuf,
    /// Directory with traces and their params.json, anywhere below it
    #[arg(long, value_name = "DIR")]
    pub traces: PathBuf,
    /// Tie seeds that a row with LFU is run under
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub seeds: u64,
    /// Threads; without it one for each core
    #[arg(long, value_name = "N")]
    pub jobs: Option<NonZeroUsize>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}
