// SPDX-License-Identifier: Apache-2.0
//! Commands of `pagetide-lab`, which this program starts in its place, as git and cargo do with theirs.
//!
//! Benches, simulator, traces and the conformance tester are not in the program that runs as root and
//! reaches into VMMs; they are in a second one, which lies beside it.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use pagetide_report::outcome::CommandError;

use crate::cli::LabArgs;

/// Name of the other program.
const LAB: &str = "pagetide-lab";

/// Replaces this process by `pagetide-lab COMMAND ARGUMENT…`; returns only if that fails.
pub(crate) fn exec(command: &str, args: &LabArgs) -> Result<(), CommandError> {
    let program = lab_beside(std::env::current_exe())?;
    let error = Command::new(&program)
        .arg(command)
        .args(&args.arguments)
        .exec();
    Err(cannot_start(command, &program, &error))
}

fn lab_beside(own: std::io::Result<PathBuf>) -> Result<PathBuf, CommandError> {
    let own = own.map_err(|error| {
        CommandError::refused(format!(
            "cannot find where this program lies, and so not {LAB} beside it: {error}"
        ))
    })?;
    Ok(own.with_file_name(LAB))
}

fn cannot_start(command: &str, program: &Path, error: &std::io::Error) -> CommandError {
    CommandError::refused(format!(
        "`{command}` is a command of {LAB}, and {} cannot be started: {error}; install {LAB} beside this \
         program (`cargo build --release -p pagetide` builds both)",
        program.display()
    ))
}
