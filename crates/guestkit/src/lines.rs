// SPDX-License-Identifier: Apache-2.0
//! What a process says, line by line, heard by a thread of its own so that nobody waits for ever.

use std::io::{BufRead, BufReader};
use std::process::ChildStdout;
use std::sync::mpsc::{self, Receiver};
use std::thread;

/// Hears what a process says until it closes its output.
pub(crate) fn listen(answers: ChildStdout) -> Receiver<String> {
    let (said, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(answers).lines() {
            let Ok(line) = line else { return };
            // Nobody listens any more: the process is gone, too.
            if said.send(line.trim().to_owned()).is_err() {
                return;
            }
        }
    });
    lines
}
