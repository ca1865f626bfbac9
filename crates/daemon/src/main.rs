// SPDX-License-Identifier: Apache-2.0
//! The binary `pagetide`.

use std::process::ExitCode;

use clap::Parser as _;
use pagetide::cli::Cli;
use pagetide::command::execute;
use pagetide::outcome::CommandError;

fn main() -> ExitCode {
    match execute(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if error != CommandError::OutputClosed {
                eprintln!("pagetide: {error}");
            }
            error.exit_code()
        }
    }
}
