// SPDX-License-Identifier: Apache-2.0
//! [`Retries`]: loads whose tier did not answer wait here, and are tried again after a pause.
//!
//! One thread for all VMs. Each load here is a fault that waits, so there are as many as the guests have;
//! beyond [`WAITING_MAX`] a load is given up, and the fault comes again by itself. A load that panics is given up,
//! too, and the others are not.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Most loads that wait.
const WAITING_MAX: usize = 1 << 16;

/// How long loads wait before they are tried again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RetryPauses {
    /// If the tier had too many requests.
    pub busy: Duration,
    /// If it failed.
    pub failed: Duration,
}

impl Default for RetryPauses {
    fn default() -> Self {
        Self {
            busy: Duration::from_millis(5),
            failed: Duration::from_secs(1),
        }
    }
}

/// What is tried again. If it is dropped, it is given up.
pub(super) trait Again: Send {
    /// Tries it.
    fn again(self: Box<Self>);
}

#[derive(Default)]
struct Waiting {
    loads: Vec<(Instant, Box<dyn Again>)>,
    is_over: bool,
}

/// See the module.
pub(super) struct Retries {
    pub(super) pauses: RetryPauses,
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

impl Retries {
    pub(super) fn new(pauses: RetryPauses) -> Arc<Self> {
        Arc::new(Self {
            pauses,
            waiting: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    pub(super) fn start(retries: &Arc<Self>) -> io::Result<()> {
        let retries = Arc::clone(retries);
        let thread = std::thread::Builder::new().name("pt-tier-retry".to_owned());
        // It is not joined: the last owner of the tiers may be one of its loads.
        thread.spawn(move || retries.run()).map(drop)
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a load tried again after `pause`, unless too many wait.
    pub(super) fn put(&self, load: impl Again + 'static, pause: Duration) {
        let mut waiting = self.lock();
        if waiting.is_over || waiting.loads.len() >= WAITING_MAX {
            drop(waiting);
            // Whoever waits for it is told, which takes locks of its own.
            return drop(load);
        }
        (waiting.loads).push((Instant::now() + pause, Box::new(load)));
        drop(waiting);
        self.changed.notify_one();
    }

    /// The thread ends. Loads that wait end unanswered.
    pub(super) fn end(&self) {
        let mut waiting = self.lock();
        waiting.is_over = true;
        let left = std::mem::take(&mut waiting.loads);
        drop(waiting);
        self.changed.notify_one();
        drop(left);
    }

    /// Has all loads that wait tried again now, whatever their time; returns how many there were.
    pub(super) fn try_all(&self) -> usize {
        let waiting = std::mem::take(&mut self.lock().loads);
        let count = waiting.len();
        waiting.into_iter().for_each(|(_, load)| load.again());
        count
    }

    /// Loads that wait.
    pub(super) fn waiting(&self) -> usize {
        self.lock().loads.len()
    }

    fn run(&self) {
        while let Some(due) = self.next() {
            for load in due {
                // What it had to tell is told as it unwinds.
                if catch_unwind(AssertUnwindSafe(|| load.again())).is_err() {
                    tracing::error!("a load from a slow tier panicked; its page is not served");
                }
            }
        }
    }

    /// The loads that are due, once there are any; `None` at the end.
    fn next(&self) -> Option<Vec<Box<dyn Again>>> {
        let mut waiting = self.lock();
        while !waiting.is_over {
            let now = Instant::now();
            let due: Vec<Box<dyn Again>> = (waiting.loads)
                .extract_if(.., |(at, _)| *at <= now)
                .map(|(_, load)| load)
                .collect();
            if !due.is_empty() {
                return Some(due);
            }
            waiting = match waiting.loads.iter().map(|(at, _)| *at).min() {
                None => (self.changed.wait(waiting)).unwrap_or_else(PoisonError::into_inner),
                Some(first) => {
                    let waited = self.changed.wait_timeout(waiting, first - now);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};

    enum Try {
        Panics,
        Tells,
    }

    struct Told(Try, Sender<&'static str>);

    impl Again for Told {
        fn again(self: Box<Self>) {
            match self.0 {
                Try::Panics => panic!("for the test"),
                Try::Tells => self.1.send("tried").unwrap(),
            }
        }
    }

    impl Drop for Told {
        fn drop(&mut self) {
            if self.1.send("dropped").is_err() {
                eprintln!("the test has ended");
            }
        }
    }

    #[test]
    fn load_that_panics_is_told_and_does_not_cost_those_behind_it() {
        let retries = Retries::new(RetryPauses::default());
        let (tell, told) = channel();
        for what in [Try::Panics, Try::Tells, Try::Panics, Try::Tells] {
            retries.put(Told(what, tell.clone()), Duration::ZERO);
        }
        Retries::start(&retries).unwrap();
        let heard: Vec<_> = (0..6).map(|_| told.recv().unwrap()).collect();
        assert_eq!(heard.iter().filter(|it| **it == "tried").count(), 2);
        retries.put(Told(Try::Tells, tell), Duration::ZERO);
        assert_eq!(told.recv(), Ok("tried"));
        retries.end();
    }
}
