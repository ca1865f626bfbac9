// SPDX-License-Identifier: Apache-2.0
//! [`Boost`]: real-time priority for a thread of another process, for as long as it is held.
//!
//! A thread that is borrowed should be away for microseconds. On a busy host it waits
//! for a CPU at each stop, for milliseconds each time, unless it goes before the others.
//!
//! Its scheduling policy is left alone: it would have to be put back, and nobody would put it
//! back if this process were killed in between. Instead the priority is **lent**, as the
//! kernel lends it to the owner of a lock from whoever waits for that lock (priority
//! inheritance). The kernel reads who owns a `FUTEX_LOCK_PI` lock from the lock's word. So a
//! thread of ours, of the class `SCHED_FIFO`, waits for a lock in our memory whose word names
//! the other thread:
//!
//! ```text
//!   word := its thread number      lender: FUTEX_LOCK_PI, sleeps     it: FIFO, priority 1
//!   word := 0, signal to lender    lender: gets the lock, ends       it: as it was
//!   this process is killed         lender is gone                    it: as it was
//! ```
//! The word is zeroed before the signal is sent. A signal that comes before the lender sleeps is
//! lost, and then the lender finds a free lock. One that comes later interrupts the call, which
//! the kernel restarts, and which then finds a free lock.
//!
//! The lock is not `FUTEX_PRIVATE`: a private lock belongs to threads of this process.

use crate::cpu::{self, Urgency};
use crate::interrupt;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Priority of the tracer and of the thread that it borrows: the lowest of the real-time class,
/// which goes before every ordinary thread. It is the same for both, so that a `sched_yield` of
/// the tracer lets the other run where they share a CPU.
pub(super) const PRIORITY: u8 = 1;
/// How long the loan may take to show. It is a few microseconds; if it does not show, nothing
/// is lost but time.
const SHOW_WAIT: Duration = Duration::from_millis(2);
/// Between two looks.
const LOOK_SLEEP: Duration = Duration::from_micros(20);
/// How long the lender may take to end. It has a free lock and needs a CPU.
const END_WAIT: Duration = Duration::from_secs(1);

/// Real-time priority lent to a thread of another process; dropped, the loan ends.
pub(super) struct Boost {
    word: Arc<AtomicU32>,
    lender: Option<JoinHandle<()>>,
    lender_thread: u32,
}

impl Boost {
    /// Lends `thread` priority [`PRIORITY`].
    ///
    /// # Errors
    /// `EPERM` where this process may not have a real-time thread, and what starting one says.
    pub(super) fn lend(thread: u32) -> io::Result<Self> {
        interrupt::allow()?;
        let word = Arc::new(AtomicU32::new(thread));
        let (tell, told) = mpsc::channel();
        let lock = Arc::clone(&word);
        let lender = std::thread::Builder::new()
            .name("pt-lender".to_owned())
            .spawn(move || {
                let urgent = cpu::set_urgency(Urgency::Preempting(PRIORITY));
                let is_urgent = urgent.is_ok();
                let own = rustix::thread::gettid().as_raw_pid().cast_unsigned();
                // Nobody listens if the borrower has given up; then there is nothing to lend.
                if tell.send(urgent.map(|()| own)).is_ok() && is_urgent {
                    wait_for_lock(&lock);
                }
            })?;
        let lender_thread = match told.recv() {
            Ok(urgent) => urgent?,
            Err(gone) => return Err(io::Error::other(gone)),
        };
        let boost = Self {
            word,
            lender: Some(lender),
            lender_thread,
        };
        boost.await_show(thread);
        Ok(boost)
    }

    fn await_show(&self, thread: u32) {
        let begun = Instant::now();
        while begun.elapsed() < SHOW_WAIT
            && !self.lender.as_ref().is_none_or(JoinHandle::is_finished)
            && !is_realtime(thread)
        {
            std::thread::sleep(LOOK_SLEEP);
        }
    }
}

impl Drop for Boost {
    fn drop(&mut self) {
        self.word.store(0, SeqCst);
        let Some(lender) = self.lender.take() else {
            return;
        };
        let begun = Instant::now();
        while !lender.is_finished() && begun.elapsed() < END_WAIT {
            if let Err(error) = interrupt::interrupt(self.lender_thread) {
                debug_assert!(false, "a thread of ours cannot be signalled: {error}");
            }
            std::thread::sleep(LOOK_SLEEP);
        }
        // One that has not ended by now gets the lock when it gets a CPU; the word is its own too.
        if lender.is_finished() && lender.join().is_err() {
            debug_assert!(false, "the lender panicked");
        }
    }
}

/// Waits until the lock is free, its owner has ended, or the kernel knows no such locks.
pub(super) fn wait_for_lock(word: &AtomicU32) {
    let forever = std::ptr::null::<libc::timespec>();
    // SAFETY: the word is a live, aligned u32 that only atomics touch, for the whole call: the
    // caller holds it in an Arc. There is no time-out structure to read.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_LOCK_PI,
            0,
            forever,
        );
    }
}

/// True if thread `thread` of any process is in the real-time class now, by a loan or by itself:
/// its priority in `/proc/TID/stat` is negative.
pub(super) fn is_realtime(thread: u32) -> bool {
    const PRIORITY_AFTER_NAME: usize = 15;
    std::fs::read_to_string(format!("/proc/{thread}/stat")).is_ok_and(|stat| {
        stat.rsplit_once(") ")
            .and_then(|(_, fields)| fields.split(' ').nth(PRIORITY_AFTER_NAME))
            .is_some_and(|priority| priority.starts_with('-'))
    })
}
