// SPDX-License-Identifier: Apache-2.0
//! The program `pagetide`.

use std::process::ExitCode;

use pagetide_daemon::{cli::parsed, command::execute};
use pagetide_report::outcome::end;

fn main() -> ExitCode {
    end(execute(parsed()))
}
