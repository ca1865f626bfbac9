// SPDX-License-Identifier: Apache-2.0
//! Kicks, and front ends that kick without end.
//!
//! Each kick wakes its engine, whether there is a chain or not. A front end that writes its kick
//! descriptor in a loop would keep the engine awake and make it enter the kernel in every turn. A
//! driver kicks after it has put chains into its ring, so kicks without chains between them
//! indicate such a flood. After [`IN_VAIN_MAX`] of them in a row the engine ignores kicks of that
//! queue for [`DEAF`]. It still checks the ring whenever it is awake, and wakes when that time is
//! over: the flood only costs its own driver some latency.

use super::{device::Device, request::Request};
use crate::ring::IoRing;
use std::{
    collections::HashMap,
    io,
    os::fd::AsFd,
    time::{Duration, Instant},
};

/// Ring token of the doorbell; queues have others.
pub(super) const BELL_TOKEN: u32 = 0;
/// Set in the tokens of descriptors that say that something has arrived for a queue.
pub(super) const ARRIVALS: u32 = 1 << 31;
/// Kicks of a queue in a row that may bring no chain. A driver's last kicks often bring none,
/// because the engine saw the chain before its kick.
const IN_VAIN_MAX: u32 = 32;
/// How long the engine ignores a queue that kicks in vain.
const DEAF: Duration = Duration::from_millis(1);

/// Whether a poll that found its descriptor readable continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Poll {
    GoesOn,
    /// The kernel's completion queue was full for a moment, or we have stopped the poll.
    HasEnded,
}

/// The queues whose kicks are polled, and those whose kicks are ignored.
#[derive(Debug)]
pub(super) struct Kicks {
    /// Key: token of the poll. Value: the device's slot and the queue's number.
    heard: HashMap<u32, (usize, u16)>,
    unheard: Vec<(usize, u16)>,
    /// When the ignored queues are polled again.
    until: Option<Instant>,
    next_token: u32,
}

impl Kicks {
    /// No queues yet.
    pub fn new() -> Self {
        Self {
            heard: HashMap::new(),
            unheard: Vec::new(),
            until: None,
            next_token: BELL_TOKEN + 1,
        }
    }

    /// Polls a queue's kicks under that token.
    pub fn listen(&mut self, token: u32, slot: usize, number: u16) {
        self.heard.insert(token, (slot, number));
    }

    /// The queue for which something has arrived, by the token of that poll.
    pub fn arrived(&self, token: u32) -> Option<(usize, u16)> {
        self.heard.get(&token).copied()
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

    /// The kick descriptor that is polled under that token is readable.
    pub fn readable(
        &mut self,
        ring: &mut IoRing<Request>,
        devices: &mut [Option<Device>],
        token: u32,
        poll: Poll,
    ) -> io::Result<()> {
        let Some((slot, number)) = self.heard.get(&token).copied() else {
            return Ok(());
        };
        let device = devices.get_mut(slot).and_then(Option::as_mut);
        let queue = device.and_then(|device| device.queues[usize::from(number)].as_mut());
        let Some(queue) = queue.filter(|queue| queue.token == token && queue.polled) else {
            return Ok(());
        };
        queue.kicks_in_vain += 1;
        if queue.kicks_in_vain > IN_VAIN_MAX {
            queue.kicks_in_vain = 0;
            queue.polled = false;
            self.heard.remove(&token);
            self.unheard.push((slot, number));
            self.until.get_or_insert_with(|| Instant::now() + DEAF);
            if poll == Poll::GoesOn {
                ring.stop_poll(token)?;
            }
            // The poll must be gone before its descriptor can be closed and reused.
            return ring.submit();
        }
        match (&queue.kick, poll) {
            (Some(kick), Poll::HasEnded) => ring.poll(kick.as_fd(), token),
            _ => Ok(()),
        }
    }

    /// Polls the ignored queues again once their time is over.
    pub fn listen_again(
        &mut self,
        ring: &mut IoRing<Request>,
        devices: &mut [Option<Device>],
    ) -> io::Result<()> {
        if self.until.is_none_or(|until| Instant::now() < until) {
            return Ok(());
        }
        self.until = None;
        for (slot, number) in std::mem::take(&mut self.unheard) {
            // A new token: late events of the old poll do not belong to this one.
            let token = self.new_token();
            let device = devices.get_mut(slot).and_then(Option::as_mut);
            let queue = device.and_then(|device| device.queues[usize::from(number)].as_mut());
            if let Some(queue) = queue
                && let Some(kick) = &queue.kick
            {
                ring.poll(kick.as_fd(), token)?;
                queue.token = token;
                queue.polled = true;
                self.listen(token, slot, number);
            }
        }
        ring.submit()
    }

    /// Returns a token that no poll uses.
    pub fn new_token(&mut self) -> u32 {
        // Token numbers wrap around, and a long-lived queue may still have its own.
        while self.heard.contains_key(&self.next_token) {
            self.next_token = after(self.next_token);
        }
        let token = self.next_token;
        self.next_token = after(token);
        token
    }
}

fn after(token: u32) -> u32 {
    (token.wrapping_add(1) & !ARRIVALS).max(1)
}
