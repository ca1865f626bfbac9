// SPDX-License-Identifier: Apache-2.0
//! The program `pagetide-lab`.

use std::process::ExitCode;

use clap::Parser as _;
use pagetide_lab::cli::{LabCli, execute};
use pagetide_report::outcome::end;

fn main() -> ExitCode {
    end(execute(LabCli::parse()))
}
