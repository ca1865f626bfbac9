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

/// Becomes `pagetide-lab COMMAND ARGUMENT…`; returns only if that fails.
pub(crate) fn become_it(command: &str, args: &LabArgs) -> Result<(), CommandError> {
    let program = lab_of(std::env::current_exe())?;
    let error = Command::new(&program)
        .arg(command)
        .args(&args.arguments)
        .exec();
    Err(missing(command, &program, &error))
}

fn lab_of(own: std::io::Result<PathBuf>) -> Result<PathBuf, CommandError> {
    let own = own.map_err(|error| {
        CommandError::refused(format!(
            "cannot find where this program lies, and so not {LAB} beside it: {error}"
        ))
    })?;
    Ok(own.with_file_name(LAB))
}

fn missing(command: &str, program: &Path, error: &std::io::Error) -> CommandError {
    CommandError::refused(format!(
        "`{command}` is a command of {LAB}, and {} cannot be started: {error}; install {LAB} beside this \
         program (`cargo build --release -p pagetide` builds both)",
        program.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_lab_is_one_sentence_and_status_2() {
        let program = lab_of(Ok("/nowhere/pagetide".into())).unwrap();
        let error = Command::new(&program).exec();
        let error = missing("bench", &program, &error);
        let CommandError::Refused(sentence) = &error else {
            panic!("{error}");
        };
        assert!(
            sentence.contains("/nowhere/pagetide-lab cannot be started"),
            "{sentence}"
        );
        assert_eq!(sentence.lines().count(), 1, "{sentence}");
    }
}
