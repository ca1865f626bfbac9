// SPDX-License-Identifier: Apache-2.0
//! [`Boost`]: real-time priority for a thread of another process, for as long as it is held.
//!
//! A thread that runs remote system calls should pause for microseconds only. On a busy host it
//! would wait milliseconds for a CPU at each stop, unless it has priority over other threads.
//!
//! Its scheduling policy is not changed: it would have to be restored, and would not be if this
//! process were killed in between. Instead the priority is **lent**, as the kernel lends it to the
//! owner of a lock from a waiter for that lock (priority inheritance). The kernel reads the owner
//! of a `FUTEX_LOCK_PI` lock from the lock word. So a thread of ours, in class `SCHED_FIFO`, waits
//! for a lock in our memory whose word names the other thread:
//!
//! ```text
//!   word := its thread number      lender: FUTEX_LOCK_PI, sleeps     it: FIFO, priority 1
//!   word := 0, signal to lender    lender: gets the lock, ends       it: as it was
//!   this process is killed         lender is gone                    it: as it was
//! ```
//! The word is zeroed before the signal is sent. A signal that comes before the lender sleeps is
//! lost, and the lender then finds a free lock. A later signal interrupts the call, the kernel
//! restarts it, and it then finds a free lock.
//!
//! The lock is not `FUTEX_PRIVATE`: a private lock belongs to threads of this process.

use crate::cpu::{self, Urgency, priority};
use crate::interrupt;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Priority of the tracer and of the thread it stops: of the real-time class, which precedes every
/// ordinary thread. It is the same for both, so that a `sched_yield` of the tracer
/// lets the other run if they share a CPU.
pub(super) const PRIORITY: u8 = priority::REMOTE_CALL;
/// How long the loan may take to become visible. It takes a few microseconds; if it never shows,
/// only time is lost.
const SHOW_WAIT: Duration = Duration::from_millis(2);
/// Pause between two checks.
const LOOK_SLEEP: Duration = Duration::from_micros(20);
/// How long the lender may take to end. The lock is free, and the lender only needs a CPU.
const END_WAIT: Duration = Duration::from_secs(1);

/// Real-time priority lent to a thread of another process. The loan ends when this is dropped.
pub(super) struct Boost {
    word: Arc<AtomicU32>,
    lender: Option<JoinHandle<()>>,
    lender_thread: u32,
}

impl Boost {
    /// Lends `thread` priority [`PRIORITY`].
    ///
    /// # Errors
    /// `EPERM` if this process may not have a real-time thread, and the errors of starting one.
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
                // The receiver is gone if the borrower has given up; then there is nothing to lend.
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
        // A lender that has not ended by now gets the lock when it gets a CPU; it owns the word,
        // too.
        if lender.is_finished() && lender.join().is_err() {
            debug_assert!(false, "the lender panicked");
        }
    }
}

/// Waits until the lock is free or its owner has ended, or returns if the kernel lacks such locks.
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
