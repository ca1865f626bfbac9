// SPDX-License-Identifier: Apache-2.0
//! A daemon that is run until it has said something, for a bounded time.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How long it may take. It takes a second on a machine that is not busy.
const WAIT: Duration = Duration::from_secs(120);

/// What became of it.
pub struct Said {
    /// Its log.
    pub log: String,
    /// How it ended, unless it was killed because it had said what was waited for.
    pub ended: Option<ExitStatus>,
}

/// Killed and reaped, also when a test fails.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait().map(drop)) {
            eprintln!("a daemon of a test: {error}");
        }
    }
}

/// Runs `command` until its log has one of `words`, or it ends.
pub fn run_until(command: &mut Command, words: &[&str]) -> Said {
    let begun = Instant::now();
    let mut running = Running(command.stderr(Stdio::piped()).spawn().unwrap());
    let lines = BufReader::new(running.0.stderr.take().unwrap()).lines();
    let (sender, told) = channel();
    // Ends with the daemon, whose end of the pipe is the last.
    std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let mut log = String::new();
    let ended = loop {
        match told.recv_timeout(WAIT.saturating_sub(begun.elapsed())) {
            Ok(line) => {
                log += &line;
                log.push('\n');
                if words.iter().any(|word| line.contains(word)) {
                    break None;
                }
            }
            Err(RecvTimeoutError::Disconnected) => break Some(running.0.wait().unwrap()),
            Err(RecvTimeoutError::Timeout) => {
                panic!("neither {words:?} nor an end within {WAIT:?}: {log}");
            }
        }
    };
    Said { log, ended }
}
