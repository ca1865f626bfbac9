// SPDX-License-Identifier: Apache-2.0
//! What is asked of [`PagedMemory::fault`](super::PagedMemory::fault), and what it answers: why pages
//! are to be present ([`Cause`]), how the caller waits for what takes time ([`Wait`]), and what was
//! done ([`Served`]).

use super::{
    blank::Blank,
    fault::{Fault, FaultOutcome},
    overwrite::Overwrite,
    readahead::Readahead,
    waiters::Reply,
};
use pagetide_addr::{DeviceId, PageRange};

/// Pages that [`Served::installed`] has bits for.
pub(super) const TOLD_PAGES_MAX: u64 = u64::BITS as u64;

/// Why pages are to be present.
#[derive(Clone, Copy, Debug)]
pub enum Cause<'a> {
    /// A vCPU or a device waits for them.
    Fault(Fault),
    /// A device waits for them, and nobody needs what they held: those that are stored since before it had them
    /// become zeros.
    Blank(Blank),
    /// A device has written them whole: those that are absent get its bytes.
    Overwrite(Overwrite<'a>),
    /// They will probably be used soon. Only those that are stored and at hand are filled, while
    /// there is room.
    Readahead(Readahead),
}

impl Cause<'_> {
    /// The pages.
    #[must_use]
    pub const fn pages(&self) -> PageRange {
        match self {
            Self::Fault(fault) | Self::Blank(Blank { fault, .. }) => fault.pages,
            Self::Overwrite(overwrite) => overwrite.fault.pages,
            Self::Readahead(readahead) => readahead.pages(),
        }
    }

    pub(super) const fn device(&self) -> DeviceId {
        match self {
            Self::Fault(fault) | Self::Blank(Blank { fault, .. }) => fault.device,
            Self::Overwrite(overwrite) => overwrite.fault.device,
            Self::Readahead(_) => DeviceId::VCPUS,
        }
    }
}

/// How the caller of [`PagedMemory::fault`](super::PagedMemory::fault) waits for what takes time.
pub enum Wait {
    /// Not at all: for a thread that serves others besides.
    Never,
    /// As [`Self::Never`], except that a load of content which is not at hand is begun: that takes no time, and
    /// the kernel wakes a vCPU with the fill. So it is for vCPUs only, whose page then counts as served.
    Begin,
    /// In the call, for room, the lock, and content at hand. A page that another thread is filling
    /// counts as served, and so does one whose load has begun: the kernel wakes a vCPU with that
    /// fill.
    Here,
    /// As [`Self::Here`], but the outcome goes to the reply, once all pages are there, also those
    /// that other threads are filling and those whose load has begun. It is called exactly once, possibly by another thread,
    /// possibly before the call returns.
    Reply(Reply),
}

impl Wait {
    /// Hands over the result of a request that is over: to the reply, or else to the caller.
    pub(crate) fn answer(self, served: Served) -> Option<Served> {
        match self {
            Self::Never | Self::Begin | Self::Here => Some(served),
            Self::Reply(reply) => {
                reply(served.outcome);
                None
            }
        }
    }
}

impl std::fmt::Debug for Wait {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Never => "Never",
            Self::Begin => "Begin",
            Self::Here => "Here",
            Self::Reply(_) => "Reply",
        })
    }
}

/// Result of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "the device must write itself what was not installed"]
pub struct Served {
    /// `Present` if every page was handled; otherwise what stopped it. `installed` is valid either
    /// way.
    pub outcome: FaultOutcome,
    /// Bit `k` set: page `k` of the request was stored, or was to be overwritten and absent, and this
    /// request made it present. Pages from the 65th on have no bit. Of an overwrite, the other pages are unchanged: the device
    /// takes leases, faults if necessary, and writes them.
    pub installed: u64,
}

impl Served {
    /// Nothing was installed.
    pub const fn nothing(outcome: FaultOutcome) -> Self {
        Self {
            outcome,
            installed: 0,
        }
    }
}
