// SPDX-License-Identifier: Apache-2.0
//! The command line.

use clap::{Parser, Subcommand};
use pagetide_bench::command::{self as bench, BenchArgs, BenchPart};
use pagetide_report::outcome::CommandError;

use crate::replay::{self, args::ReplayArgs};
use crate::reproduce::{self, ReproduceArgs};
use crate::sim::{self, args::SimCommand};
use crate::trace::{self, args::TraceCommand};
use crate::vpri::{self, VpriCommand};

/// Benches, simulator, traces and conformance tests of Pagetide.
///
/// Exit status: 0 success, 1 failure, 2 usage error or refusal.
#[derive(Parser, Debug)]
// Users write `pagetide bench`, so that is what its messages show.
#[command(
    name = "pagetide",
    bin_name = "pagetide",
    version,
    max_term_width = 100
)]
pub struct LabCli {
    /// What to do.
    #[command(subcommand)]
    pub command: LabCommand,
}

/// Commands.
#[derive(Subcommand, Debug)]
pub enum LabCommand {
    /// Run a benchmark, with its peer in the same run
    Bench(BenchArgs),
    /// Run DMA protection policies on traces, and compare them
    Replay(Box<ReplayArgs>),
    /// Print the papers' figures and tables beside what the benches found
    Reproduce(ReproduceArgs),
    /// Simulate the translation of I/O addresses for many tenants
    #[command(subcommand)]
    Sim(SimCommand),
    /// Make, build, convert and examine traces of I/O address translation and of DMA
    #[command(subcommand)]
    Trace(TraceCommand),
    /// Test implementations of the VPRI function
    #[command(subcommand)]
    Vpri(VpriCommand),
    /// A process that a bench starts for itself
    #[command(subcommand, hide = true)]
    BenchPart(BenchPart),
    /// A program that fails to succeed a daemon; for `pagetide bench upgrade`
    #[command(hide = true)]
    Successor,
}

/// Executes the command line.
///
/// # Errors
/// Of the command.
pub fn execute(cli: LabCli) -> Result<(), CommandError> {
    match cli.command {
        LabCommand::Bench(args) => bench::execute(&args),
        LabCommand::Replay(args) => replay::execute(&args),
        LabCommand::Reproduce(args) => reproduce::execute(&args),
        LabCommand::Sim(command) => sim::execute(command),
        LabCommand::Trace(command) => trace::execute(command),
        LabCommand::Vpri(command) => vpri::execute(command),
        LabCommand::BenchPart(part) => bench::execute_part(part),
        LabCommand::Successor => {
            pagetide_bench::upgrade::broken::act().map_err(CommandError::failed)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn command_line_definition_is_sound() {
        LabCli::command().debug_assert();
    }

    #[test]
    fn wrong_use_ends_with_status_2() {
        for line in [vec!["pagetide"], vec!["pagetide", "bench", "nothing"]] {
            let error = LabCli::try_parse_from(&line).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{line:?}");
        }
    }
}
