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

pub(crate) mod work;

use crate::{
    blk::{
        disk::{Disk, DiskReport},
        on_engine::{DiskFlight, DiskOnEngine},
    },
    memory::{DeviceMemory, OutsideMemory, Span},
    net::nic::{self, NicReport},
    ring::{Dma, FILES_PER_DEVICE, FileSlot, Step},
};
use pagetide_vpri::Service;
use std::{io, os::fd::BorrowedFd, sync::Arc};
use vhost::vhost_user::VhostUserProtocolFeatures;
use work::{Acted, Aim, Chain, Decided, Next, Outcome, QueueRole, Task};

/// A device's own part, as all its threads see it.
#[derive(Debug, Clone)]
pub(crate) enum Kind {
    Blk(Arc<Disk>),
    /// With so many queue pairs.
    Net(u16),
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
                VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            }
            // The front end has the configuration space, and QEMU no in-flight region.
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
            Self::Net(_) => nic::role_of(queue, features),
        }
    }

    /// The number of the group of queues that are served by one engine.
    pub fn group_of(&self, queue: u16) -> u16 {
        match self {
            Self::Blk(_) => queue,
            Self::Net(_) => nic::pair_of(queue),
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
            Self::Net(_) => None,
        }
    }

    /// Gives up what it holds of the host. No I/O of it is under way.
    pub fn release(&self) {
        match self {
            Self::Blk(disk) => disk.release(),
            Self::Net(_) => {}
        }
    }

    /// For a report.
    pub fn backing(&self) -> Backing {
        match self {
            Self::Blk(disk) => Backing::Disk(disk.report()),
            Self::Net(pairs) => Backing::Nic(NicReport { pairs: *pairs }),
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
        slots: [FileSlot; FILES_PER_DEVICE],
        set: impl FnMut(FileSlot, BorrowedFd<'_>) -> io::Result<()>,
    ) -> io::Result<OnEngine> {
        match self {
            Self::Blk(disk) => Ok(OnEngine::Blk(DiskOnEngine::open(disk, slots, set)?)),
            Self::Net(_) => Ok(OnEngine::Net),
        }
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
    Net,
}

impl OnEngine {
    /// The files that it has in the ring's table.
    pub fn files(&self) -> [Option<FileSlot>; FILES_PER_DEVICE] {
        match self {
            Self::Blk(disk) => disk.files(),
            Self::Net => [None; FILES_PER_DEVICE],
        }
    }

    /// Decides what a chain requests. Its header is leased, and what it is to read; what it is to
    /// write may be absent. `now_ns` is the time of the batch.
    #[inline]
    pub fn decide(&mut self, now_ns: u64, chain: Chain<'_>) -> Decided<Flight> {
        match self {
            Self::Blk(disk) => disk.decide(now_ns, chain).map(Flight::Blk),
            Self::Net => match nic::check(chain) {
                Outcome::Done => Decided::Act,
                refused => Decided::Answer(refused),
            },
        }
    }

    /// Does at once what was decided so. All of the chain is leased.
    pub fn act(&mut self, chain: Chain<'_>) -> Acted {
        match self {
            Self::Blk(disk) => disk.act(chain),
            Self::Net => nic::send(chain),
        }
    }

    /// Where the next step of a transfer goes.
    #[inline]
    pub fn aim(&self, flight: &Flight, dma: &Dma, step: &Step) -> Aim {
        match (self, flight) {
            (Self::Blk(disk), Flight::Blk(flight)) => disk.aim(flight, dma, step),
            (Self::Net, Flight::Blk(_)) => {
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
            (Self::Net, Flight::Blk(_)) => {
                debug_assert!(false, "a network device has no I/O of the kernel");
                Next::Complete(Outcome::Failed)
            }
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
            Self::Net => Ok(()),
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
