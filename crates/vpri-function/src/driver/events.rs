// SPDX-License-Identifier: Apache-2.0
//! The event queue: all messages from driver to device, in one order (VPRI 5.2).
//!
//! ```text
//!   many threads ── post, call ──► [mutex] slots ══ ring ══► device
//!        ▲                                                     │
//!        └── a waiter takes all completions ◄══════════════════┘
//! ```
//! MAP, RESPOND and UNMAP must not pass one another, so there is one queue, and a
//! message is in it when [`EventQueue::post`] returns. Callers hold a section's
//! lock, so the order of the lock is the order of the queue.
//!
//! # Waiting
//! No thread is assigned to take completions. A waiting thread polls by itself, for
//! some microseconds without sleeping, because a device that is awake answers in
//! about that time. Then one of the waiters, the *sleeper*, sleeps on the call
//! eventfd and the others on a condition variable; the sleeper takes the
//! completions, wakes the others, and another takes its place.
//!
//! # A device that does not answer
//! Each wait has an end: after [`PATIENCE`] the device counts as dead for all
//! callers, and every other call returns at once. Events that are sent with a
//! section's lock held are also charged to an account ([`credit`](super::credit)):
//! after a long wait the next one must be shorter. So a device can hold up section
//! locks for at most [`PATIENCE`] at once, and in the long run for a tenth of the
//! time, besides waits of [`SHORT`](super::credit::SHORT) and those for DMA. A
//! malformed reply also ends the connection: its reports on DMA cannot be relied
//! on.

use super::credit::PATIENCE;
use super::line::{Gone, Line};
use crate::frontend::{
    area::{Area, BASE, EVENT_SLOTS, MESSAGE_ROOM},
    event::{event, ring_event},
    ring::{Descriptor, NEXT, Ring, RingError, WRITE},
};
use crate::wire::{Code, Event, Opcode, Reply, Status, WireError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    io,
    os::fd::OwnedFd,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// How long a waiter polls without sleeping.
const SPIN: Duration = Duration::from_micros(20);

/// When a wait ends.
#[derive(Clone, Copy, Debug)]
struct End {
    at: Instant,
    /// Its length from the beginning.
    patience: Duration,
}

/// True for events that are sent with a section's lock held.
const fn is_under_locks(opcode: Opcode) -> bool {
    match opcode {
        Opcode::Map
        | Opcode::Unmap
        | Opcode::Protect
        | Opcode::Invalidate
        | Opcode::Standing
        | Opcode::Touched
        | Opcode::Respond => true,
        Opcode::Create
        | Opcode::Destroy
        | Opcode::UnmapAll
        | Opcode::Begin
        | Opcode::Ready
        | Opcode::Bar
        | Opcode::Bounce => false,
    }
}

#[derive(Debug)]
enum Slot {
    Free,
    /// No thread waits for the reply.
    Posted(Opcode),
    /// A thread waits for the reply.
    Awaited,
    Answered(Reply),
}

#[derive(Debug)]
struct State {
    ring: Ring,
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// A thread sleeps on the call eventfd.
    has_sleeper: bool,
    message: Vec<u8>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct EventQueue {
    area: Arc<Area>,
    line: Arc<Line>,
    /// How long the device may wait for DMA.
    lease_wait: Duration,
    kick: OwnedFd,
    call: OwnedFd,
    state: Mutex<State>,
    changed: Condvar,
}

impl EventQueue {
    /// The queue on `ring`, which is empty. `lease_wait` is how long the device may wait for DMA.
    pub(crate) fn new(
        ring: Ring,
        area: Arc<Area>,
        line: Arc<Line>,
        lease_wait: Duration,
    ) -> io::Result<Self> {
        let slots = (0..EVENT_SLOTS).map(|_| Slot::Free).collect();
        Ok(Self {
            area,
            line,
            lease_wait,
            kick: event()?,
            call: event()?,
            state: Mutex::new(State {
                ring,
                slots,
                free: (0..EVENT_SLOTS).rev().collect(),
                has_sleeper: false,
                message: Vec::new(),
            }),
            changed: Condvar::new(),
        })
    }

    /// The eventfd that wakes the device.
    pub(crate) fn kick(&self) -> &OwnedFd {
        &self.kick
    }

    /// The eventfd by which the device wakes us.
    pub(crate) fn called(&self) -> &OwnedFd {
        &self.call
    }

    /// Sends an event, and waits only for room in the queue.
    pub(crate) fn post(&self, event: &Event<'_>) -> Result<(), Gone> {
        let posted = Slot::Posted(event.opcode());
        self.within(event.opcode(), |end| self.send(event, posted, end))?;
        Ok(())
    }

    /// Sends an event, and waits for its reply.
    pub(crate) fn call(&self, event: &Event<'_>) -> Result<Reply, Gone> {
        self.within(event.opcode(), |end| self.call_until(event, end))
    }

    /// Runs `work`, which waits for the device, within the patience that is left.
    fn within<T>(
        &self,
        opcode: Opcode,
        work: impl FnOnce(End) -> Result<T, Gone>,
    ) -> Result<T, Gone> {
        let began = Instant::now();
        let patience = self.patience(opcode, began);
        let done = work(End {
            at: began + patience,
            patience,
        });
        if is_under_locks(opcode) {
            let credit = &self.line.counts().credit;
            credit.spend(began + self.lease_wait, Instant::now());
        }
        done
    }

    /// How long an event that is sent at `now` may take.
    pub(crate) fn patience(&self, opcode: Opcode, now: Instant) -> Duration {
        let patience = if is_under_locks(opcode) {
            self.line.counts().credit.left(now)
        } else {
            PATIENCE
        };
        patience + self.lease_wait
    }

    fn call_until(&self, event: &Event<'_>, end: End) -> Result<Reply, Gone> {
        let slot = self.send(event, Slot::Awaited, end)?;
        let began = Instant::now();
        loop {
            let mut state = self.lock();
            if let Some(reply) = self.answer_in(&mut state, slot)? {
                return Ok(reply);
            }
            if began.elapsed() < SPIN {
                drop(state);
                std::hint::spin_loop();
            } else {
                drop(self.wait(state, end)?);
            }
        }
    }

    /// Wakes all waiters, so that they see that the line is down.
    pub(crate) fn wake_all(&self) {
        // Under the lock, no waiter is between its check of the line and its sleep.
        let state = self.lock();
        ring_event(&self.call);
        self.changed.notify_all();
        drop(state);
    }

    fn send(&self, event: &Event<'_>, how: Slot, end: End) -> Result<u16, Gone> {
        let mut state = self.lock();
        let slot = loop {
            self.line.check()?;
            self.harvest(&mut state)?;
            match state.free.pop() {
                Some(slot) => break slot,
                None => state = self.wait(state, end)?,
            }
        };
        let put = self.put(&mut state, event, slot);
        if let Some(place) = state.slots.get_mut(usize::from(slot)) {
            *place = how;
        }
        let wants_kick = put.map_err(|error| self.broken(&error))?;
        drop(state);
        if wants_kick {
            ring_event(&self.kick);
        }
        Ok(slot)
    }

    /// Writes the message into `slot` and shows it to the device; true if the device wants to be
    /// kicked.
    fn put(&self, state: &mut State, event: &Event<'_>, slot: u16) -> Result<bool, RingError> {
        state.message.clear();
        event.encode(&mut state.message);
        let len = u32::try_from(state.message.len()).unwrap_or(u32::MAX);
        assert!(u64::from(len) <= MESSAGE_ROOM, "an event of {len} bytes");
        let copied = (self.area.memory()).copy_to(Area::message_at(slot), &state.message);
        copied.map_err(|_| RingError::Outside)?;
        // If the device writes no status, this must not look like one.
        let blank = [0xff; 16];
        let copied = (self.area.memory()).copy_to(Area::reply_at(slot), &blank);
        copied.map_err(|_| RingError::Outside)?;
        let room = u32::try_from(event.reply_bytes()).unwrap_or(0);
        let (head, tail) = (2 * slot, 2 * slot + 1);
        let message = Descriptor {
            address: BASE + Area::message_at(slot),
            len,
            flags: NEXT,
            next: tail,
        };
        let reply = Descriptor {
            address: BASE + Area::reply_at(slot),
            len: room,
            flags: WRITE,
            next: 0,
        };
        state.ring.describe(head, message)?;
        state.ring.describe(tail, reply)?;
        state.ring.publish(head, room)?;
        state.ring.show()
    }

    /// The reply in `slot`, if it has come; the slot is then free.
    fn answer_in(&self, state: &mut State, slot: u16) -> Result<Option<Reply>, Gone> {
        self.harvest(state)?;
        let Some(place) = state.slots.get_mut(usize::from(slot)) else {
            return Ok(None);
        };
        if !matches!(place, Slot::Answered(_)) {
            self.line.check()?;
            return Ok(None);
        }
        let Slot::Answered(reply) = std::mem::replace(place, Slot::Free) else {
            return Ok(None);
        };
        state.free.push(slot);
        Ok(Some(reply))
    }

    /// Takes the chains that the device has finished.
    fn harvest(&self, state: &mut State) -> Result<(), Gone> {
        loop {
            let used = match state.ring.take() {
                Ok(Some(used)) => used,
                Ok(None) => return Ok(()),
                Err(error) => return Err(self.broken(&error)),
            };
            // Heads are even, and the ring has checked that this one was out.
            let slot = used.head / 2;
            let reply = self.reply_in(slot, used.len).map_err(|error| {
                self.line.counts().malformed_replies.add();
                self.broken(&error)
            })?;
            let Some(place) = state.slots.get_mut(usize::from(slot)) else {
                return Err(self.broken(&RingError::Head(u32::from(used.head))));
            };
            match place {
                Slot::Posted(opcode) => {
                    self.look_at_posted(*opcode, reply);
                    *place = Slot::Free;
                    state.free.push(slot);
                }
                _ => {
                    *place = Slot::Answered(reply);
                    self.changed.notify_all();
                }
            }
        }
    }

    fn reply_in(&self, slot: u16, len: u32) -> Result<Reply, WireError> {
        // The ring has checked that it does not exceed the room.
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
        let copied = (self.area.memory()).copy_from(Area::reply_at(slot), &mut bytes);
        debug_assert!(copied.is_ok(), "replies lie in the area");
        Reply::decode(&bytes)
    }

    fn look_at_posted(&self, opcode: Opcode, reply: Reply) {
        let Status { code, detail, .. } = reply.status;
        if code != Code::Ok {
            let counts = self.line.counts();
            counts.refused_events.add();
            counts.complain(&format_args!("it refused {opcode:?}: {code:?} ({detail})"));
        }
    }

    /// Waits until completions may have come, and takes those that have.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        end: End,
    ) -> Result<MutexGuard<'a, State>, Gone> {
        self.line.check()?;
        let left = end.at.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let seconds = end.patience.as_secs_f32();
            let why = format!("it has not answered for {seconds} s");
            self.line.break_off(&why);
            ring_event(&self.call);
            self.changed.notify_all();
            return Err(Gone);
        }
        if state.has_sleeper {
            let (state, _) = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner);
            return Ok(state);
        }
        let has_come = state.ring.arm().map_err(|error| self.broken(&error))?;
        state.has_sleeper = true;
        drop(state);
        if !has_come {
            sleep_on(&self.call, left);
        }
        state = self.lock();
        state.has_sleeper = false;
        let taken = self.harvest(&mut state);
        self.changed.notify_all();
        taken?;
        let disarmed = state.ring.disarm();
        disarmed.map_err(|error| self.broken(&error))?;
        Ok(state)
    }

    /// The device can no longer be trusted. Wakes all threads that wait for it.
    fn broken(&self, error: &dyn std::fmt::Display) -> Gone {
        self.line
            .break_off(&format_args!("the event queue: {error}"));
        ring_event(&self.call);
        self.changed.notify_all();
        Gone
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sleeps until `event` is rung, at most for `left`; resets the counter.
fn sleep_on(event: &OwnedFd, left: Duration) {
    let timeout = Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    };
    let mut polled = [PollFd::new(event, PollFlags::IN)];
    match poll(&mut polled, Some(&timeout)) {
        // A signal: the waiter checks and comes again.
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => tracing::error!(%error, "cannot wait for the event queue"),
    }
    match rustix::io::read(event, &mut [0; 8]) {
        Ok(_) | Err(rustix::io::Errno::AGAIN) => {}
        Err(error) => tracing::error!(%error, "the event queue's doorbell is broken"),
    }
}
