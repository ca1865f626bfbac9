// SPDX-License-Identifier: Apache-2.0
//! Reads a process's output line by line in a thread of its own, so that no caller waits for ever.

use std::io::{BufRead, BufReader};
use std::process::ChildStdout;
use std::sync::mpsc::{self, Receiver};
use std::thread;

/// Reads a process's output until it is closed.
pub(crate) fn listen(answers: ChildStdout) -> Receiver<String> {
    let (said, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(answers).lines() {
            let Ok(line) = line else { return };
            // The receiver is gone, and so is the process.
            if said.send(line.trim().to_owned()).is_err() {
                return;
            }
        }
    });
    lines
}
