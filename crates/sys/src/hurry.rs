// SPDX-License-Identifier: Apache-2.0
//! [`Hurry`]: a time in which all threads of this process go before those of the ordinary class.
//!
//! Guests wait for what the process does then, and a busy host must not make that longer. Without it, each thread that
//! is woken by another one waits until somebody's time slice is over; and a weak thread
//! ([`Urgency::Idle`](crate::cpu::Urgency::Idle)) may need a second until it has got far enough to end.
//!
//! ```text
//!   begin   threads that are there ─► real-time class     what they were is noted
//!           threads that they start    inherit it
//!   end     those that were there ──► as they were
//!           those that have come ───► as the thread was that has begun it
//! ```
//! Only threads that still have exactly the priority that was given here are changed at the end: one that has chosen
//! another one itself keeps that. The class is `SCHED_RR`, so of two threads that want one CPU neither waits for ever.
//! Without the right to real-time priorities nothing happens.

#![expect(unsafe_code, reason = "sched_setscheduler has no safe wrapper")]

use std::io;

/// Threads may start others while they are looked for: so many times at most.
const LOOKS: u32 = 16;

/// Policy and real-time priority of a thread. Its niceness stays what it is, and is in force with an ordinary policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Scheduling {
    policy: libc::c_int,
    priority: libc::c_int,
}

impl Scheduling {
    const HURRIED: Self = Self {
        policy: libc::SCHED_RR,
        priority: crate::cpu::priority::HURRY as libc::c_int,
    };
    const ORDINARY: Self = Self {
        policy: libc::SCHED_OTHER,
        priority: 0,
    };

    /// Of a thread of this process; 0 is the calling one.
    fn of(thread: libc::pid_t) -> io::Result<Self> {
        // SAFETY: the call changes no memory.
        let policy = unsafe { libc::sched_getscheduler(thread) };
        if policy < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut parameters = libc::sched_param { sched_priority: 0 };
        // SAFETY: the call writes the parameters, which are ours, and nothing else.
        if unsafe { libc::sched_getparam(thread, &raw mut parameters) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            policy,
            priority: parameters.sched_priority,
        })
    }

    fn give(self, thread: libc::pid_t) -> io::Result<()> {
        let parameters = libc::sched_param {
            sched_priority: self.priority,
        };
        // SAFETY: the call changes no memory, and the parameters are read during it only.
        match unsafe { libc::sched_setscheduler(thread, self.policy, &raw const parameters) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// See the module.
#[derive(Debug)]
#[must_use = "it ends when it is dropped"]
pub struct Hurry {
    before: Vec<(libc::pid_t, Scheduling)>,
    /// What other threads become.
    others: Scheduling,
}

/// Threads of this process.
fn threads() -> Vec<libc::pid_t> {
    let entries = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    // A thread that has ended meanwhile is none of them.
    let names = entries.filter_map(|entry| entry.ok().map(|entry| entry.file_name()));
    let number = |name: std::ffi::OsString| name.to_str().and_then(|name| name.parse().ok());
    names.filter_map(number).collect()
}

impl Hurry {
    /// All threads of this process hurry from now on, if they may.
    pub fn begin() -> Self {
        let own = Scheduling::of(0).ok();
        let own = own.filter(|own| *own != Scheduling::HURRIED);
        let mut hurry = Self {
            before: Vec::new(),
            others: own.unwrap_or(Scheduling::ORDINARY),
        };
        for _ in 0..LOOKS {
            if !hurry.raise_all() {
                break;
            }
        }
        hurry
    }

    /// Goes on with what the program has begun by which this one was executed: see [`Self::leave`].
    pub fn inherited(policy: i32) -> Self {
        Self {
            before: Vec::new(),
            others: Scheduling {
                policy,
                priority: 0,
            },
        }
    }

    /// Does not end with this program, which is about to execute another one. Returns what that needs to end it.
    pub fn leave(mut self) -> i32 {
        let policy = self.others.policy;
        self.before.clear();
        std::mem::forget(self);
        policy
    }

    /// True if there was a thread that does not hurry yet. (One that may not is left alone, and nothing is said: no
    /// thread may then.)
    fn raise_all(&mut self) -> bool {
        let mut is_raised = false;
        for thread in threads() {
            // It may have ended meanwhile.
            let Ok(was) = Scheduling::of(thread) else {
                continue;
            };
            if was != Scheduling::HURRIED && Scheduling::HURRIED.give(thread).is_ok() {
                self.before.push((thread, was));
                is_raised = true;
            }
        }
        is_raised
    }

    /// True if there was a thread that still hurries.
    fn lower_all(&self) -> bool {
        let mut is_lowered = false;
        for thread in threads() {
            if Scheduling::of(thread).ok() != Some(Scheduling::HURRIED) {
                continue;
            }
            let known = self.before.iter().find(|(known, _)| *known == thread);
            let was = known.map_or(self.others, |(_, was)| *was);
            is_lowered |= was.give(thread).is_ok();
        }
        is_lowered
    }
}

impl Drop for Hurry {
    fn drop(&mut self) {
        for _ in 0..LOOKS {
            if !self.lower_all() {
                break;
            }
        }
    }
}
