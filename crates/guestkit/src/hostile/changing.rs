// SPDX-License-Identifier: Apache-2.0
//! Changes while the device works: memory that changes, kicks that do not end.
//!
//! A back end that reads a word of guest memory twice may see two values ('double fetch'). A thread
//! that writes two values in turn finds such places.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};

use super::front::Ram;
use super::peer::{Failure, failed};

/// A thread that repeats one action until it is dropped or the action fails.
#[derive(Debug)]
pub struct Restless {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Restless {
    /// Calls `turn` with 0, 1, 2 and so on.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(
        mut turn: impl FnMut(u64) -> Result<(), Failure> + Send + 'static,
    ) -> Result<Self, Failure> {
        let stop = Arc::new(AtomicBool::new(false));
        let its = stop.clone();
        let thread = thread::Builder::new()
            .name("restless".to_owned())
            .spawn(move || {
                let mut round = 0;
                while !its.load(Relaxed) {
                    if let Err(failure) = turn(round) {
                        eprintln!("guestkit: a thread of an attack ends: {failure}");
                        return;
                    }
                    round += 1;
                }
            })
            .map_err(failed("starting a thread"))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Writes `values` at `at` in turn.
    ///
    /// # Errors
    /// As [`Restless::start`].
    pub fn flip(ram: &Ram, at: u64, values: Vec<Vec<u8>>) -> Result<Self, Failure> {
        let ram = ram.clone();
        Self::start(move |round| {
            let count = values.len().max(1) as u64;
            let which = usize::try_from(round % count).unwrap_or(0);
            match values.get(which) {
                Some(value) => ram.put(at, value),
                None => Ok(()),
            }
        })
    }
}

impl Drop for Restless {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            eprintln!("guestkit: a thread of an attack panicked");
        }
    }
}
