// SPDX-License-Identifier: Apache-2.0
//! Kinds of device: what an engine must know of one to serve it, and nothing else.
//!
//! # Idea
//! An engine does for every device the same: it wires rings, walks chains, leases their pages or
//! parks them, asks for pages ahead, lets fair shares decide who begins, gives steps to the kernel,
//! injects faults, keeps accounts and the access log, writes used rings, and stops. A *kind* says
//! what the chains mean:
//!
//! ```text
//!   engine                                        kind
//!   a queue starts                            ──► role_of: header, answer, vector
//!   pop ─► walk ─► frame ─► lease all, or park
//!          all leased                         ──► decide: I/O | act | answer
//!          give a step to the kernel          ──► aim: which file, in which units
//!          its result                         ──► next: again | at once | complete
//!          complete                           ──► answer: into the chain, if it has a place for it
//!   used ring, account, log, release
//! ```
//! A kind is called with everything leased that it may touch. It keeps no lease, knows no queue's
//! state, and never sees an absent page: whether one parks the chain, and what its queue does
//! meanwhile, is the engine's to decide.
//!
//! # Dispatch
//! There are few kinds, all known here, and an engine serves devices of any kind with one ring. So
//! a kind is a variant of each enum below, and this is the only file in which kinds are told apart.
//! A new kind is a folder, and a line in each function here. (Reasons: ADR 0039.)
//!
//! | | one for each | owned by |
//! |---|---|---|
//! | [`Kind`] | device | everybody, shared |
//! | [`OnEngine`] | device and engine | the engine, which alone uses it |
//! | [`Flight`] | chain whose I/O is under way | the chain's job |

pub(crate) mod posted;
pub(crate) mod work;

use crate::{
    blk::{
        disk::{Disk, DiskReport},
        on_engine::{DiskFlight, DiskOnEngine},
    },
    memory::{DeviceMemory, OutsideMemory, Span},
    net::{
        device::{Nic, NicReport},
        handed::ParkedNic,
        nic,
        on_engine::NicOnEngine,
    },
    ring::{Dma, FILES_PER_DEVICE, FileSlot, Step},
};
use pagetide_vpri::{Doorbell, Service};
use posted::{Answered, ChainNo, PostedOrder, Ring};
use std::{io, os::fd::BorrowedFd, sync::Arc};
use vhost::vhost_user::VhostUserProtocolFeatures;
use work::{Acted, Aim, Chain, Decided, Next, Outcome, QueueRole, Task};

/// A device's own part, as all its threads see it.
#[derive(Debug, Clone)]
pub(crate) enum Kind {
    Blk(Arc<Disk>),
    Net(Arc<Nic>),
}

impl Kind {
    /// Its name in logs, reports and names of threads.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Blk(_) => "blk",
            Self::Net(_) => "net",
        }
    }

    /// Features that it offers, besides those of rings.
    pub fn features(&self) -> u64 {
        match self {
            Self::Blk(disk) => disk.features(),
            Self::Net(_) => nic::FEATURES,
        }
    }

    /// Features of vhost-user that it offers, besides those of all devices.
    pub fn protocol_features(&self) -> VhostUserProtocolFeatures {
        match self {
            Self::Blk(_) => {
                VhostUserProtocolFeatures::CONFIG
                    | VhostUserProtocolFeatures::INFLIGHT_SHMFD
                    | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            }
            // The front end has the configuration space, and QEMU no in-flight region. It would tell each
            // region of memory once for each queue pair: tables it sends once.
            Self::Net(_) => VhostUserProtocolFeatures::empty(),
        }
    }

    /// `bytes` of the configuration space from `offset`; `None` outside of it.
    pub fn config(&self, queue_count: u16, offset: u32, bytes: u32) -> Option<Vec<u8>> {
        match self {
            Self::Blk(disk) => disk.config(queue_count, offset, bytes),
            Self::Net(_) => None,
        }
    }

    /// What the chains of a queue are made of, for a driver that has accepted `features`.
    pub fn role_of(&self, queue: u16, features: u64) -> QueueRole {
        match self {
            Self::Blk(_) => Disk::role_of(queue),
            Self::Net(nic) => nic.role_of(queue, features),
        }
    }

    /// The number of the group of queues that are served by one engine.
    pub fn group_of(&self, queue: u16) -> u16 {
        match self {
            Self::Blk(_) => queue,
            Self::Net(_) => nic::pair_of(queue),
        }
    }

    /// The engine, of so many, that serves a group of queues of the device in `slot`.
    pub fn engine_of(group: u16, slot: usize, engines: usize) -> usize {
        (slot + usize::from(group)) % engines.max(1)
    }

    /// What a front end is told that asks how many queues there are.
    pub fn queues_told(&self, queue_count: u16) -> u16 {
        match self {
            Self::Blk(_) => queue_count,
            // QEMU and DPDK count pairs.
            Self::Net(nic) => nic.pairs(),
        }
    }

    /// What its accesses count as in the access log.
    pub fn service(&self) -> Service {
        match self {
            Self::Blk(_) => Service::Block,
            Self::Net(_) => Service::Network,
        }
    }

    /// What is wrong with what is behind it, as a sentence.
    pub fn error(&self) -> Option<String> {
        match self {
            Self::Blk(disk) => disk.error(),
            Self::Net(nic) => nic.error(),
        }
    }

    /// A queue is about to run, for a driver that has accepted `features`, or has ended.
    pub fn set_running(&self, queue: u16, features: Option<u64>) {
        match self {
            Self::Blk(_) => {}
            Self::Net(nic) => nic.set_running(queue, features),
        }
    }

    /// Gives up what it holds of the host. No I/O of it is under way.
    pub fn release(&self) {
        match self {
            Self::Blk(disk) => disk.release(),
            Self::Net(nic) => nic.release(),
        }
    }

    /// The front end has gone, or is not the one that another process has left: what is kept for that one is lost.
    pub fn front_end_gone(&self) {
        match self {
            Self::Blk(_) => {}
            Self::Net(nic) => nic.front_end_gone(),
        }
    }

    /// Another process goes on with the device. Its queues stop next.
    pub fn begin_leaving(&self) {
        match self {
            Self::Blk(_) => {}
            Self::Net(nic) => nic.begin_leaving(),
        }
    }

    /// What that process gets besides the front end, once all queues have stopped.
    pub fn hand_over(&self) -> Option<ParkedNic> {
        match self {
            Self::Blk(_) => None,
            Self::Net(nic) => match nic.hand_over() {
                Ok(parked) => Some(parked),
                Err(error) => {
                    tracing::error!(%error, "the link of a network device is not handed over");
                    None
                }
            },
        }
    }

    /// No other process goes on with what was handed over.
    pub fn admit(&self) {
        match self {
            Self::Blk(_) => {}
            Self::Net(nic) => nic.admit(),
        }
    }

    /// For a report.
    pub fn backing(&self) -> Backing {
        match self {
            Self::Blk(disk) => Backing::Disk(disk.report()),
            Self::Net(nic) => Backing::Nic(nic.report()),
        }
    }

    /// The disk of a block device: two devices must not serve one image by mistake.
    pub fn disk(&self) -> Option<&Disk> {
        match self {
            Self::Blk(disk) => Some(disk),
            Self::Net(_) => None,
        }
    }

    /// Its part on one engine, whose ring gets its files by `set`.
    pub fn open_on(
        &self,
        place: &EnginePlace<'_>,
        slots: [FileSlot; FILES_PER_DEVICE],
        set: impl FnMut(FileSlot, BorrowedFd<'_>) -> io::Result<()>,
    ) -> io::Result<OnEngine> {
        match self {
            Self::Blk(disk) => Ok(OnEngine::Blk(DiskOnEngine::open(disk, slots, set)?)),
            Self::Net(nic) => Ok(OnEngine::Net(Box::new(NicOnEngine::open(nic, place)))),
        }
    }
}

/// Where a device's part on an engine is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EnginePlace<'a> {
    /// The slot of the device.
    pub slot: usize,
    /// The number of the engine, of so many.
    pub engine: usize,
    pub engines: usize,
    /// What wakes the engine.
    pub bell: &'a Arc<Doorbell>,
}

impl EnginePlace<'_> {
    /// True if the engine serves that group of queues of the device.
    pub fn serves(&self, group: u16) -> bool {
        Kind::engine_of(group, self.slot, self.engines) == self.engine
    }
}

/// What is behind a device.
#[derive(Debug, Clone)]
pub enum Backing {
    /// A block device's image.
    Disk(DiskReport),
    /// A network interface.
    Nic(NicReport),
}

impl Backing {
    /// The kind of the device: `blk`, `net`.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Disk(_) => "blk",
            Self::Nic(_) => "net",
        }
    }

    /// The network interface, if it is one.
    #[must_use]
    pub fn nic(&self) -> Option<&NicReport> {
        match self {
            Self::Disk(_) => None,
            Self::Nic(nic) => Some(nic),
        }
    }

    /// The disk, if it is one.
    #[must_use]
    pub fn disk(&self) -> Option<&DiskReport> {
        match self {
            Self::Disk(disk) => Some(disk),
            Self::Nic(_) => None,
        }
    }
}

/// A device's own part on one engine.
#[derive(Debug)]
pub(crate) enum OnEngine {
    Blk(DiskOnEngine),
    Net(Box<NicOnEngine>),
}

impl OnEngine {
    /// The files that it has in the ring's table.
    pub fn files(&self) -> [Option<FileSlot>; FILES_PER_DEVICE] {
        match self {
            Self::Blk(disk) => disk.files(),
            Self::Net(_) => [None; FILES_PER_DEVICE],
        }
    }

    /// Decides what a chain requests. Its header is leased, and what it is to read; what it is to
    /// write may be absent. `now_ns` is the time of the batch.
    #[inline]
    pub fn decide(&mut self, now_ns: u64, chain: Chain<'_>) -> Decided<Flight> {
        match self {
            Self::Blk(disk) => disk.decide(now_ns, chain).map(Flight::Blk),
            Self::Net(nic) => match nic.check(chain) {
                Outcome::Done => Decided::Act,
                refused => Decided::Answer(refused),
            },
        }
    }

    /// Does at once what was decided so. All of the chain is leased.
    pub fn act(&mut self, chain: Chain<'_>) -> Acted {
        match self {
            Self::Blk(disk) => disk.act(chain),
            Self::Net(nic) => nic.send(chain),
        }
    }

    /// Where the next step of a transfer goes.
    #[inline]
    pub fn aim(&self, flight: &Flight, dma: &Dma, step: &Step) -> Aim {
        match (self, flight) {
            (Self::Blk(disk), Flight::Blk(flight)) => disk.aim(flight, dma, step),
            (Self::Net(_), Flight::Blk(_)) => {
                debug_assert!(false, "a network device has no I/O of the kernel");
                Aim {
                    file: step.file,
                    unit_bytes: 1,
                }
            }
        }
    }

    /// Takes the result of a step, a count or a negated error number, and decides what follows.
    #[inline]
    pub fn next(
        &mut self,
        now_ns: u64,
        flight: &mut Flight,
        io: (&mut Dma, &mut Step),
        result: i32,
    ) -> Next {
        match (self, flight) {
            (Self::Blk(disk), Flight::Blk(flight)) => disk.next(now_ns, flight, io, result),
            (Self::Net(_), Flight::Blk(_)) => {
                debug_assert!(false, "a network device has no I/O of the kernel");
                Next::Complete(Outcome::Failed)
            }
        }
    }

    /// A queue runs from now on, for a driver that has accepted `features`.
    pub fn started(&mut self, queue: u16, features: u64) {
        match self {
            Self::Blk(_) => {}
            Self::Net(nic) => nic.started(queue, features),
        }
    }

    /// A queue has ended.
    pub fn stopped(&mut self, queue: u16) {
        match self {
            Self::Blk(_) => {}
            Self::Net(nic) => nic.stopped(queue),
        }
    }

    /// Whether what is done at once for a queue, or arrives for it, passes through the kernel.
    pub fn enters_kernel(&self, queue: u16) -> bool {
        match self {
            Self::Blk(_) => true,
            Self::Net(nic) => nic.enters_kernel(queue),
        }
    }

    /// The descriptor that is readable when something has arrived for a queue, if there is one.
    pub fn readiness(&self, queue: u16) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Blk(_) => None,
            Self::Net(nic) => nic.readiness(queue),
        }
    }

    /// That descriptor is readable.
    pub fn arrived(&mut self, queue: u16) {
        match self {
            Self::Blk(_) => {}
            Self::Net(nic) => nic.arrived(queue),
        }
    }

    /// True if something has arrived for a queue with posted chains.
    pub fn has_arrivals(&self, queue: u16) -> bool {
        match self {
            Self::Blk(_) => false,
            Self::Net(nic) => nic.has_arrivals(queue),
        }
    }

    /// Decides what is done next in the turn of a queue with posted chains. What it chooses was
    /// looked at in this call.
    pub fn arrive(&mut self, queue: u16, ring: &mut impl Ring) -> PostedOrder {
        match self {
            Self::Blk(_) => PostedOrder::Nothing,
            Self::Net(nic) => nic.arrive(queue, ring),
        }
    }

    /// The chains that its last order is about.
    pub fn chosen(&self, queue: u16) -> &[ChainNo] {
        match self {
            Self::Blk(_) => &[],
            Self::Net(nic) => nic.chosen(queue),
        }
    }

    /// Fills so many chosen chains, whose writable parts are leased; returns how many bytes.
    pub fn fill(&mut self, queue: u16, memory: &DeviceMemory, into: &[Span], chains: usize) -> u32 {
        match self {
            Self::Blk(_) => 0,
            Self::Net(nic) => nic.fill(queue, memory, into, chains),
        }
    }

    /// Since when the packet has waited that is to be filled, if it has.
    pub fn waits_since(&self, queue: u16) -> Option<u64> {
        match self {
            Self::Blk(_) => None,
            Self::Net(nic) => nic.waits_since(queue),
        }
    }

    /// The pages of a posted chain were requested, and that was the answer.
    pub fn answered(&mut self, queue: u16, chain: ChainNo, answer: Answered) {
        match self {
            Self::Blk(_) => {}
            Self::Net(nic) => nic.answered(queue, chain, answer),
        }
    }

    /// A queue with posted chains ends: what is still to be reported, one after the other.
    pub fn stopping(&mut self, queue: u16) -> PostedOrder {
        match self {
            Self::Blk(_) => PostedOrder::Nothing,
            Self::Net(nic) => nic.stopping(queue),
        }
    }

    /// True if another process goes on with the device: what its queues have is kept for that, or is that one's already.
    pub fn is_anothers(&self) -> bool {
        match self {
            Self::Blk(_) => false,
            Self::Net(nic) => nic.is_anothers(),
        }
    }

    /// Another process goes on with a queue with posted chains: what is still to be done, one after the other.
    pub fn leaving(&mut self, queue: u16) -> PostedOrder {
        match self {
            Self::Blk(_) => PostedOrder::Nothing,
            Self::Net(nic) => nic.leaving(queue),
        }
    }

    /// What was in the chosen chains of the last order.
    pub fn read_back(&mut self, queue: u16, bytes: &[u8]) {
        match self {
            Self::Blk(_) => {}
            Self::Net(nic) => nic.read_back(queue, bytes),
        }
    }

    /// Writes the answer to a chain at its place, which is leased.
    #[inline]
    pub fn answer(
        &self,
        memory: &DeviceMemory,
        at: Span,
        outcome: Outcome,
    ) -> Result<(), OutsideMemory> {
        match self {
            Self::Blk(_) => DiskOnEngine::answer(memory, at, outcome),
            // Its chains have no place for one.
            Self::Net(_) => Ok(()),
        }
    }
}

/// What a kind must know of a chain when a step of its I/O is done.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Flight {
    Blk(DiskFlight),
}

impl<F> Decided<F> {
    #[inline]
    fn map<G>(self, wrap: impl FnOnce(F) -> G) -> Decided<G> {
        match self {
            Self::Act => Decided::Act,
            Self::Answer(outcome) => Decided::Answer(outcome),
            Self::Io(task) => Decided::Io(Task {
                data: task.data,
                lane: task.lane,
                step: task.step,
                flight: wrap(task.flight),
            }),
        }
    }
}
