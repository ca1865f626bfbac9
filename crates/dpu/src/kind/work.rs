// SPDX-License-Identifier: Apache-2.0
//! What an engine and a kind of device tell each other of a chain. Plain types.

use crate::{
    chain::{Buffers, Layout},
    frame::Frame,
    memory::DeviceMemory,
    ring::{FileSlot, Step},
};

/// What an engine must know of a queue before it reads its ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueueRole {
    pub layout: Layout,
    pub chains: Chains,
    /// Interrupt vector that the page requests of its chains name.
    pub vector: u16,
    /// What stays present for it, besides its rings.
    pub keeping: Keeping,
    pub completes: Completes,
}

/// In which order chains of a queue complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Completes {
    /// In any order: only an in-flight region, or a record, says which are under way.
    InAnyOrder,
    /// In that of the ring: the used index says it.
    InRingOrder,
}

/// What an engine keeps present for a queue, besides its rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Keeping {
    /// What its kind has wired, until the chain is used.
    #[default]
    ToUse,
    /// What its kind has wired, for as long as less than so many bytes are.
    Cache { bytes: u64 },
    /// All memory of the device.
    Everything,
}

/// What a driver makes chains of a queue available for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Chains {
    /// Each requests something, and is begun as soon as it may be.
    Requests,
    /// Each is a buffer for what may come. It stays in the ring until then.
    Posted,
}

/// A chain that is in memory.
#[derive(Clone, Copy)]
pub(crate) struct Chain<'a> {
    /// The number of its queue.
    pub queue: u16,
    pub memory: &'a DeviceMemory,
    pub frame: &'a Frame,
    /// Its data.
    pub buffers: &'a Buffers,
}

/// How a chain ended. Kinds have numbers of their own for this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// What it requested was done.
    Done,
    /// It could not be done.
    Failed,
    /// The device has no such request.
    Unsupported,
}

/// What a chain requests.
#[derive(Debug)]
pub(crate) enum Decided<F> {
    /// I/O of the kernel.
    Io(Task<F>),
    /// Something that is done at once, without the kernel, by [`OnEngine::act`](super::OnEngine).
    Act,
    /// Nothing: it is answered.
    Answer(Outcome),
}

/// Which data of a chain its I/O moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Data {
    /// Its writable buffers are filled.
    ToGuest,
    /// Its readable buffers are read.
    FromGuest,
    /// None.
    Unmoved,
}

/// How the steps of a task take their turns; see [`crate::engine::fair`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// With the other transfers of its queue.
    Transfers,
    /// With the other operations of its device that block a thread of the kernel.
    Slow,
}

/// The I/O of a chain.
#[derive(Debug)]
pub(crate) struct Task<F> {
    pub data: Data,
    pub lane: Lane,
    /// Its first step.
    pub step: Step,
    /// What the kind must know of it when a step is done.
    pub flight: F,
}

/// What was done at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Acted {
    pub outcome: Outcome,
    /// Bytes of data that were read from the guest.
    pub from_guest_bytes: u32,
}

/// Where the next step of a transfer goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Aim {
    pub file: FileSlot,
    /// No step is cut shorter than this.
    pub unit_bytes: u64,
}

/// What follows a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Another step, in its turn.
    Again,
    /// The same step, changed, at once.
    AtOnce,
    /// Nothing.
    Complete(Outcome),
}
