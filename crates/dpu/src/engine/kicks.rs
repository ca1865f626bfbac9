// SPDX-License-Identifier: Apache-2.0
//! Kicks, and front ends that kick without end.
//!
//! Each kick wakes its engine, whether there is a chain or not. A front end that writes its kick
//! descriptor in a loop would keep the engine awake and make it enter the kernel in every turn. A
//! driver kicks after it has put chains into its ring, so kicks without chains between them
//! indicate such a flood. After [`IN_VAIN_MAX`] of them in a row the engine ignores kicks of that
//! queue for [`DEAF`]. It still checks the ring whenever it is awake, and wakes when that time is
//! over: the flood only costs its own driver some latency.

use super::{BELL_TOKEN, Engine};
use std::{
    collections::HashMap,
    io,
    os::fd::AsFd,
    time::{Duration, Instant},
};

/// Kicks of a queue in a row that may bring no chain. A driver's last kicks often bring none,
/// because the engine saw the chain before its kick.
const IN_VAIN_MAX: u32 = 32;
/// How long the engine ignores a queue that kicks in vain.
const DEAF: Duration = Duration::from_millis(1);

/// The queues whose kicks are polled, and those whose kicks are ignored.
#[derive(Debug, Default)]
pub(super) struct Kicks {
    /// Key: token of the poll. Value: the device's slot and the queue's number.
    heard: HashMap<u32, (usize, u16)>,
    unheard: Vec<(usize, u16)>,
    /// When the ignored queues are polled again.
    until: Option<Instant>,
}

impl Kicks {
    /// Polls a queue's kicks under that token.
    pub fn listen(&mut self, token: u32, slot: usize, number: u16) {
        self.heard.insert(token, (slot, number));
    }

    /// Forgets a queue that has ended.
    pub fn forget(&mut self, token: u32, slot: usize, number: u16) {
        self.heard.remove(&token);
        self.unheard.retain(|queue| *queue != (slot, number));
    }

    /// How long the engine may sleep before it must poll ignored queues again.
    pub fn next_look(&self) -> Option<Duration> {
        let until = self.until?;
        Some(until.saturating_duration_since(Instant::now()))
    }
}

/// Whether a poll that found its descriptor readable continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Poll {
    GoesOn,
    /// The kernel's completion queue was full for a moment, or we have stopped the poll.
    HasEnded,
}

impl Engine {
    /// A polled descriptor is readable.
    pub(super) fn readable(&mut self, token: u32, poll: Poll) -> io::Result<()> {
        if token == BELL_TOKEN {
            return match poll {
                Poll::HasEnded => self.io.ring.poll(self.bell.as_fd(), token),
                Poll::GoesOn => Ok(()),
            };
        }
        let Some((slot, number)) = self.kicks.heard.get(&token).copied() else {
            return Ok(());
        };
        let device = self.devices.get_mut(slot).and_then(Option::as_mut);
        let queue = device.and_then(|device| device.queues[usize::from(number)].as_mut());
        let Some(queue) = queue.filter(|queue| queue.token == token && queue.polled) else {
            return Ok(());
        };
        queue.kicks_in_vain += 1;
        if queue.kicks_in_vain > IN_VAIN_MAX {
            queue.kicks_in_vain = 0;
            queue.polled = false;
            self.kicks.heard.remove(&token);
            self.kicks.unheard.push((slot, number));
            self.kicks
                .until
                .get_or_insert_with(|| Instant::now() + DEAF);
            if poll == Poll::GoesOn {
                self.io.ring.stop_poll(token)?;
            }
            // The poll must be gone before its descriptor can be closed and reused.
            return self.io.ring.submit();
        }
        match (&queue.kick, poll) {
            (Some(kick), Poll::HasEnded) => self.io.ring.poll(kick.as_fd(), token),
            _ => Ok(()),
        }
    }

    /// Polls the ignored queues again once their time is over.
    pub(super) fn listen_again(&mut self) -> io::Result<()> {
        if self.kicks.until.is_none_or(|until| Instant::now() < until) {
            return Ok(());
        }
        self.kicks.until = None;
        for (slot, number) in std::mem::take(&mut self.kicks.unheard) {
            // A new token: late events of the old poll do not belong to this one.
            let token = self.new_token();
            let device = self.devices.get_mut(slot).and_then(Option::as_mut);
            let queue = device.and_then(|device| device.queues[usize::from(number)].as_mut());
            if let Some(queue) = queue
                && let Some(kick) = &queue.kick
            {
                self.io.ring.poll(kick.as_fd(), token)?;
                queue.token = token;
                queue.polled = true;
                self.kicks.listen(token, slot, number);
            }
        }
        self.io.ring.submit()
    }

    /// Returns a token that no poll uses.
    pub(super) fn new_token(&mut self) -> u32 {
        // Token numbers wrap around, and a long-lived queue may still have its own.
        while self.kicks.heard.contains_key(&self.next_token) {
            self.next_token = self.next_token.wrapping_add(1).max(1);
        }
        let token = self.next_token;
        self.next_token = self.next_token.wrapping_add(1).max(1);
        token
    }
}
