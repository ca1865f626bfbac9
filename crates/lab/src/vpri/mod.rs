// SPDX-License-Identifier: Apache-2.0
//! `pagetide vpri check`: tests an implementation of the VPRI function against the specification.
//!
//! [`pagetide_conformance`] has the checks; this module has the command line and the report.

mod report;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use pagetide_conformance::{CheckOptions, CheckOutcome, run};

use pagetide_report::outcome::{CommandError, Form, print, print_report};
use report::{CheckReport, line};

/// Commands about VPRI functions.
#[derive(Subcommand, Debug)]
pub enum VpriCommand {
    /// Try a VPRI function against docs/vpri.md; it must serve no VM and have no driver
    ///
    /// Exit status: 0 every check passed or was skipped, 1 one failed, 2 nothing could be tested.
    Check(CheckArgs),
}

/// Arguments of `vpri check`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// Socket of the function
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// Socket of a vhost-user-blk device of the same DPU, to see what DMA does; it is only read
    #[arg(long, value_name = "PATH")]
    pub disk: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Executes the command.
pub fn execute(command: VpriCommand) -> Result<(), CommandError> {
    match command {
        VpriCommand::Check(args) => check_function(args),
    }
}

fn check_function(args: CheckArgs) -> Result<(), CommandError> {
    let options = CheckOptions {
        socket: args.socket,
        disk: args.disk,
    };
    let form = Form::from(args.json);
    // If the reader of the output is gone the command fails, but only after the device was left in
    // order.
    let mut printed = Ok(());
    let mut tell = |outcome: &CheckOutcome| {
        if form == Form::Text && printed.is_ok() {
            printed = print(&line(outcome));
        }
    };
    let report = run(&options, &mut tell).map_err(CommandError::refused)?;
    printed?;
    let report = CheckReport::from(report);
    print_report(&report, form)?;
    match report.failed {
        0 => Ok(()),
        failed => Err(CommandError::Failed(format!(
            "{failed} of {} checks failed",
            report.checks.len()
        ))),
    }
}
