// SPDX-License-Identifier: Apache-2.0
//! Progress of long work, on stderr: a bar on a terminal, otherwise an occasional line.

use std::io::IsTerminal as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Shortest interval between two lines without a terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Work in progress. Dropping it removes its bar from the terminal.
#[derive(Debug)]
pub struct Progress {
    what: &'static str,
    shown: Shown,
}

#[derive(Debug)]
enum Shown {
    Bar(ProgressBar),
    /// When the last line was written.
    Lines(Mutex<Instant>),
}

impl Progress {
    /// Starts progress of `what`, counted in `unit`.
    #[must_use]
    pub fn new(what: &'static str, unit: &'static str) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self {
                what,
                shown: Shown::Lines(Mutex::new(Instant::now())),
            };
        }
        let bar = ProgressBar::no_length();
        let template = format!(
            "{{prefix}} {{bar:30}} {{human_pos}}/{{human_len}} {unit}, {{eta}} left {{msg}}"
        );
        // A wrong template only means a bar in the default style.
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style);
        }
        bar.set_prefix(what);
        Self {
            what,
            shown: Shown::Bar(bar),
        }
    }

    /// Reports the amount done, and the expected total if known.
    pub fn at(&self, done: u64, expected: Option<u64>) {
        match &self.shown {
            Shown::Bar(bar) => {
                if let Some(expected) = expected {
                    bar.set_length(expected);
                }
                bar.set_position(done);
            }
            Shown::Lines(last) => {
                let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
                if last.elapsed() >= LINE_EVERY {
                    *last = Instant::now();
                    match expected {
                        Some(expected) => eprintln!("{}: {done} of {expected}", self.what),
                        None => eprintln!("{}: {done}", self.what),
                    }
                }
            }
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Shown::Bar(bar) = &self.shown {
            bar.finish_and_clear();
        }
    }
}
