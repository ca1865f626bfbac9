// SPDX-License-Identifier: Apache-2.0
//! An engine: one thread that serves queues of many devices and VMs.
//!
//! # A turn
//! ```text
//!   commands ─► completions ─► page responses ─► avail rings ─► page requests ─► calls ─► submit
//!      ▲                                                                                    │
//!      └─ anything done ◄───────────────────────────────────────────────────────────────────┤
//!                                     nothing done: poll a little, then arm and sleep ◄──────┘
//! ```
//! Everything is batched: one system call submits the work that a turn has begun and fetches
//! completions. An engine blocks only in [`Engine::sleep`].
//!
//! A turn is short whatever the tenants do: it takes a bounded number of events of each kind
//! ([`EVENTS_PER_TURN`], [`COMMANDS_PER_TURN`]) and begins work by fair shares ([`fair`]). The
//! remainder is left to the next turn, which follows at once.
//!
//! # Polling
//! An engine with nothing to do polls for some microseconds, because a sleep and a wake-up cost
//! more than that. It does so only where polling has paid off recently ([`patience`]): a busy
//! engine polls, an idle one costs nothing.
//!
//! # Sleep
//! The ring polls the doorbell and each queue's kick descriptor, so one wait covers I/O, kicks,
//! commands and page responses. The order is: arm the doorbell, enable kicks on every queue, check
//! everything once more, sleep. A kick, command or response that arrives after the check finds the
//! doorbell or the event index set and wakes the engine.
//!
//! While a chain waits for pages, the engine sleeps no longer than until that chain's timeout.

mod access;
mod account;
mod ahead;
mod begin;
mod bounce;
mod call;
pub(crate) mod chain;
pub(crate) mod command;
pub(crate) mod fair;
mod faults;
mod finish;
mod inject;
mod kicks;
mod obey;
mod pages;
mod patience;
pub(crate) mod queue;
mod scratch;
mod size;
mod start;
mod stop;

use crate::{
    mailbox::Mailbox,
    parked::{ParkedChains, QueueKey},
    ring::{Event, FileSlot, IoRing, Job},
    shared::{DeviceShared, StopReason},
    slo::{
        course::now_ns,
        recorder::{Recorder, Urgency},
    },
};
use chain::{Request, Served};
use command::Command;
use fair::Fair;
use kicks::{Kicks, Poll};
use pagetide_vpri::{AccessPen, DeviceEnd, Doorbell, FaultAssist, HostPresence};
use patience::{Idle, Patience, WaitsFor};
use queue::{EngineQueue, QueueState};
use scratch::Scratch;
use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// Ring token of the doorbell; queues have others.
const BELL_TOKEN: u32 = 0;

/// Completions taken per turn, and page responses taken per turn.
const EVENTS_PER_TURN: usize = 128;
/// Commands obeyed per turn. Most of their senders block until they get an answer.
const COMMANDS_PER_TURN: usize = 8;

/// The part of an engine that other threads see.
pub(crate) struct EngineShared {
    pub mailbox: Mailbox<Command>,
    pub sleeps: AtomicU64,
}

impl EngineShared {
    pub fn new(bell: Arc<Doorbell>) -> Self {
        Self {
            mailbox: Mailbox::new(bell),
            sleeps: AtomicU64::new(0),
        }
    }
}

/// What an engine is built from. It creates the rest on its own thread.
pub(crate) struct Seed {
    pub index: usize,
    pub ring_entries: u32,
    /// Page requests that may be outstanding.
    pub fault_queue_entries: usize,
    pub poll: Duration,
    /// How long a chain waits for its pages before it fails; `None` means forever.
    pub iopf_timeout: Option<Duration>,
    pub lock: OwnedFd,
    pub shared: Arc<EngineShared>,
    pub device_end: DeviceEnd,
    pub bell: Arc<Doorbell>,
}

/// A device on one engine.
pub(crate) struct Device {
    pub shared: Arc<DeviceShared>,
    pub direct: Option<FileSlot>,
    pub buffered: FileSlot,
    pub memory: Option<Rc<crate::memory::DeviceMemory>>,
    /// Boxed, because a queue is taken out of its place while it is served.
    pub queues: Vec<Option<Box<EngineQueue>>>,
    pub image_size: size::ImageSize,
    /// Numbers of the existing queues, in the order of their turns.
    pub running: Vec<u16>,
    /// Index in `running` of the queue whose turn is next.
    pub next_queue: usize,
    /// Flushes and other slow operations that have not begun; they count as in flight.
    pub slow: VecDeque<Box<Job<Request>>>,
    /// Commands of its front end that wait for the tenant's turn.
    pub waiting: VecDeque<command::Command>,
    pub recorder: Recorder,
    /// The device is in [`Io::news`].
    pub has_news: bool,
}

/// What all chains of an engine share.
pub(crate) struct Io {
    pub index: usize,
    pub ring: IoRing<Request>,
    pub parked: ParkedChains,
    pub bounces: bounce::BounceBuffers,
    pub scratch: Scratch,
    pub fair: Fair,
    pub shared: Arc<EngineShared>,
    /// When the current batch of events was taken; see [`crate::slo::course`].
    pub now_ns: u64,
    /// Slots of devices that have something to report to their accounts.
    pub news: Vec<usize>,
    /// Reports DMA accesses to the access log, if one may ever be read.
    pub pen: Option<AccessPen>,
}

/// The engine itself.
pub(crate) struct Engine {
    io: Io,
    devices: Vec<Option<Device>>,
    /// Queues that are running or stopping.
    active: Vec<(usize, u16)>,
    /// Slot of the device that goes first in the next turn.
    first: usize,
    kicks: Kicks,
    device_end: DeviceEnd,
    /// Presence of the host at the last check.
    host_seen: HostPresence,
    bell: Arc<Doorbell>,
    assist: Option<Arc<dyn FaultAssist>>,
    patience: Patience,
    next_token: u32,
    ending: bool,
}

/// What a turn has done.
#[derive(Debug, Default, Clone, Copy)]
struct Progress {
    anything: bool,
    /// Page requests were queued.
    asked: bool,
}

impl Engine {
    /// Creates the engine on the calling thread, which must then [`Self::run`] it.
    pub fn new(seed: Seed) -> io::Result<Self> {
        let mut ring = IoRing::new(seed.ring_entries, seed.lock)?;
        ring.poll(seed.bell.as_fd(), BELL_TOKEN)?;
        Ok(Self {
            io: Io {
                index: seed.index,
                ring,
                parked: ParkedChains::new(seed.index, seed.iopf_timeout)
                    .with_capacity(seed.fault_queue_entries),
                bounces: bounce::BounceBuffers::new(seed.index),
                scratch: Scratch::new(),
                fair: Fair::new(seed.ring_entries as usize),
                shared: seed.shared,
                now_ns: now_ns(),
                news: Vec::new(),
                pen: None,
            },
            devices: Vec::new(),
            active: Vec::new(),
            first: 0,
            kicks: Kicks::default(),
            device_end: seed.device_end,
            host_seen: HostPresence::Here,
            bell: seed.bell,
            assist: None,
            patience: Patience::new(seed.poll),
            next_token: BELL_TOKEN + 1,
            ending: false,
        })
    }

    /// Works until it is shut down, then until the last I/O is done.
    pub fn run(mut self) {
        if let Err(error) = self.work() {
            tracing::error!(engine = self.io.index, %error, "engine ends: its io_uring failed");
            for device in self.devices.iter().flatten() {
                device.shared.stop(StopReason::Engine(error.to_string()));
            }
        }
        self.io.shared.mailbox.close();
    }

    fn work(&mut self) -> io::Result<()> {
        let mut idle: Option<Idle> = None;
        loop {
            let progress = self.turn()?;
            if self.ending && self.active.is_empty() && self.io.ring.in_flight() == 0 {
                return Ok(());
            }
            if progress.anything {
                if let Some(idle) = idle.take() {
                    self.patience.rewarded(idle);
                }
                continue;
            }
            let waits_for = match self.io.ring.in_flight() {
                0 => WaitsFor::Guest,
                _ => WaitsFor::Disk,
            };
            let begun = idle.get_or_insert_with(|| self.patience.begin(waits_for));
            if begun.is_over() {
                self.patience.disappointed(*begun);
                self.sleep()?;
                idle = None;
            } else {
                std::hint::spin_loop();
            }
        }
    }

    fn turn(&mut self) -> io::Result<Progress> {
        let mut progress = Progress::default();
        for _ in 0..COMMANDS_PER_TURN {
            let Some(command) = self.io.shared.mailbox.take_if_any() else {
                break;
            };
            self.obey(command)?;
            progress.anything = true;
        }
        self.listen_again()?;
        self.take_completions(&mut progress)?;
        self.take_responses(&mut progress)?;
        self.give_up(&mut progress)?;
        self.stop_without_host(&mut progress)?;
        // Announce completions before beginning more work: a driver waits for them.
        self.call();
        self.serve_tenants(&mut progress)?;
        self.ask_for_pages(&mut progress);
        self.call();
        if self.io.ring.wants_submit() {
            self.io.ring.submit()?;
        }
        self.finish_stops()?;
        self.tell_accounts(Urgency::Routine);
        Ok(progress)
    }

    fn take_completions(&mut self, progress: &mut Progress) -> io::Result<()> {
        let mut first = true;
        for _ in 0..EVENTS_PER_TURN {
            let Some(event) = self.io.ring.next() else {
                break;
            };
            if std::mem::take(&mut first) {
                self.io.look_at_clock();
            }
            progress.anything = true;
            match event {
                Event::Done(job, result) => {
                    let key = job.request.key;
                    let Some(device) = self.devices.get_mut(key.device).and_then(Option::as_mut)
                    else {
                        debug_assert!(false, "a device went away under its I/O");
                        continue;
                    };
                    self.io.finish(device, job, result)?;
                }
                Event::Readable { token, over: true } => self.readable(token, Poll::HasEnded)?,
                Event::Readable { token, .. } => self.readable(token, Poll::GoesOn)?,
            }
        }
        Ok(())
    }

    /// Begins work of each device by its share. Each device in turn goes first.
    fn serve_tenants(&mut self, progress: &mut Progress) -> io::Result<()> {
        self.io.fair.begin_turn(self.io.now_ns);
        let count = self.devices.len();
        for at in 0..count {
            let slot = (self.first + at) % count;
            let Some(device) = &self.devices[slot] else {
                continue;
            };
            if device.running.is_empty() && device.waiting.is_empty() {
                continue;
            }
            self.io.fair.visit(slot, device.shared.weight());
            // Before its requests, which would always use up its credit.
            progress.anything |= self.obey_waiting(slot)?;
            if let Some(device) = self.devices[slot].as_mut()
                && !device.running.is_empty()
            {
                self.io.serve_tenant(device, slot, progress)?;
            }
        }
        self.first = (self.first + 1).checked_rem(count).unwrap_or(0);
        Ok(())
    }

    /// Signals completions to front ends.
    fn call(&mut self) {
        for (device, number) in &self.active {
            let Some(device) = self.devices[*device].as_mut() else {
                continue;
            };
            let Some(queue) = device.queues[usize::from(*number)].as_mut() else {
                continue;
            };
            if queue.needs_call
                && let Some(memory) = &device.memory
                && let Err(reason) = queue.call_if_wanted(memory)
            {
                device.shared.stop(reason);
            }
        }
    }

    /// True if a call is still due that could not be made.
    fn owes_a_call(&self) -> bool {
        self.active.iter().any(|(device, number)| {
            let device = self.devices[*device].as_ref();
            let queue = device.and_then(|device| device.queues[usize::from(*number)].as_ref());
            queue.is_some_and(|queue| queue.owes_call())
        })
    }

    fn sleep(&mut self) -> io::Result<()> {
        self.bell.arm();
        let awake = self.arm_queues()
            || !self.io.shared.mailbox.is_empty()
            || self.device_end.has_response()
            || self.device_end.host() != self.host_seen;
        if awake {
            self.disarm_queues();
            return self.bell.disarm();
        }
        self.tell_accounts(Urgency::Now);
        self.io.shared.sleeps.fetch_add(1, Ordering::Relaxed);
        let owed = self.owes_a_call().then_some(call::OWED_RETRY);
        let looks = [self.next_look(), self.kicks.next_look(), owed];
        match looks.into_iter().flatten().min() {
            Some(limit) => self.io.ring.submit_and_doze(limit)?,
            None => self.io.ring.submit_and_sleep()?,
        }
        self.disarm_queues();
        self.bell.disarm()
    }

    /// Enables kicks; true if a queue has chains already.
    fn arm_queues(&mut self) -> bool {
        let mut more = false;
        for (device, number) in &self.active {
            let Some(device) = self.devices[*device].as_mut() else {
                continue;
            };
            let Some(queue) = device.queues[usize::from(*number)].as_mut() else {
                continue;
            };
            // A queue that is held back waits for a completion or response, which wakes the engine
            // anyway.
            let room = self.io.may_park(&device.shared)
                && self.io.fair.may_take(queue.key.device) != fair::Verdict::Full;
            if !(room && queue.may_pop()) || device.shared.is_stopped() {
                continue;
            }
            if let Some(memory) = &device.memory {
                match queue.ask_for_kicks(memory) {
                    Ok(waiting) => more |= waiting,
                    Err(reason) => device.shared.stop(reason),
                }
            }
        }
        more
    }

    fn disarm_queues(&mut self) {
        for (device, number) in &self.active {
            let Some(device) = self.devices[*device].as_mut() else {
                continue;
            };
            if let (Some(queue), Some(memory)) =
                (device.queues[usize::from(*number)].as_mut(), &device.memory)
                && let Err(reason) = queue.ask_for_no_kicks(memory)
            {
                device.shared.stop(reason);
            }
        }
    }
}

impl Io {
    /// Begins work of a device until its share of this turn is spent. Its queues take turns. The
    /// caller has called `Fair::visit` for the device.
    fn serve_tenant(
        &mut self,
        device: &mut Device,
        slot: usize,
        progress: &mut Progress,
    ) -> io::Result<()> {
        let slow = self.start_slow(device, slot)?;
        progress.anything |= matches!(slow, Served::InPart | Served::Spent);
        let mut with_nothing = 0;
        while with_nothing < device.running.len() {
            let at = device.next_queue % device.running.len();
            device.next_queue = at + 1;
            let number = usize::from(device.running[at]);
            with_nothing += 1;
            // Most queues have nothing to do: check before taking one out.
            let queue = device.queues[number].as_deref();
            if !queue.is_some_and(EngineQueue::is_serving) {
                continue;
            }
            let Some(mut queue) = device.queues[number].take() else {
                continue;
            };
            let served = self.serve_queue(device, &mut queue);
            if queue.is_paused()
                && let Some(memory) = device.memory.clone()
            {
                self.look_ahead(device, &mut queue, &memory);
            }
            device.queues[number] = Some(queue);
            match served? {
                Served::Nothing => {}
                Served::InPart => {
                    progress.anything = true;
                    with_nothing = 0;
                }
                Served::Spent => {
                    // More work is left: do not sleep.
                    progress.anything = true;
                    return Ok(());
                }
                Served::Full => return Ok(()),
            }
        }
        if slow != Served::Spent {
            self.fair.rest(slot);
        }
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Only after the ring failed. Jobs may still be with the kernel, so their leases are never
        // released and their pages are never evicted.
        for device in self.devices.iter_mut().flatten() {
            for slot in &mut device.queues {
                if let Some(mut queue) = slot.take() {
                    queue.end(&device.shared.counters[self.io.index]);
                }
            }
        }
    }
}

/// Takes the queue of `key` out of its device, if that queue is still there.
fn take_queue(device: &mut Device, key: QueueKey) -> Option<Box<EngineQueue>> {
    let slot = device.queues.get_mut(usize::from(key.queue))?;
    if slot.as_ref()?.key != key {
        return None;
    }
    slot.take()
}

/// Answers a control thread, which may be gone.
fn answer<T>(reply: &std::sync::mpsc::Sender<T>, value: T) {
    if reply.send(value).is_err() {
        tracing::debug!("the sender no longer waits for this engine's answer");
    }
}

impl EngineQueue {
    /// True if chains may be taken from the queue.
    fn is_serving(&self) -> bool {
        !matches!(self.state, QueueState::Starting)
    }
}
