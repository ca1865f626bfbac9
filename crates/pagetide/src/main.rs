// SPDX-License-Identifier: Apache-2.0
//! The program `pagetide`.

use std::process::ExitCode;

use clap::Parser as _;
use pagetide_daemon::{cli::Cli, command::execute};
use pagetide_report::outcome::end;

fn main() -> ExitCode {
    end(execute(Cli::parse()))
}
