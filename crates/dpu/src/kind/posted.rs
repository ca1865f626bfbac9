// SPDX-License-Identifier: Apache-2.0
//! What an engine and a kind tell each other of posted chains: buffers that a driver makes
//! available for what may come ([`Chains::Posted`](super::work::Chains)).
//!
//! ```text
//!   engine                                      kind
//!   a turn of the queue                     ──► arrive(ring)
//!     what is the next chain like?          ◄── look   (leased, if all of it is present)
//!                                           ◄── an order
//!   requests pages, gives chains back,
//!   has chains filled ──────────────────────► fill(chosen chains, leased)
//!   puts them into the used ring, releases
//!   pages answered                          ──► answered
//! ```
//! No chain waits in the engine for a packet, and none is parked: an absent buffer is no waiting
//! request.

/// Number of a posted chain, from 0 at the start of its queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ChainNo(pub u64);

impl ChainNo {
    /// The one that is posted next.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// A posted chain, as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Look {
    /// There is none yet.
    #[default]
    Unposted,
    /// All its pages are present; so many bytes fit, with the header.
    Present { room: u32 },
    /// Some of its pages are absent.
    Absent { room: u32 },
    /// The table that describes it is absent.
    Unknown,
    /// No packet can be put into it.
    Unfit,
    /// Not looked at: this step has looked at enough.
    Later,
}

/// The posted chains of a queue. See the module documentation.
pub(crate) trait Ring {
    /// Looks at a chain that is not used.
    fn look(&mut self, chain: ChainNo) -> Look;
    /// Most chains that can be posted at a time.
    fn size(&self) -> u16;
    /// Chains that were used, and that the driver does not see in its used ring yet.
    fn unreported(&self) -> usize {
        0
    }
    /// The time, in nanoseconds of the monotonic clock, as it was read last.
    fn now_ns(&self) -> u64 {
        0
    }
}

/// When filled chains are reported to the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Report {
    Now,
    /// By a later [`PostedOrder::Report`].
    Later,
}

/// How soon pages are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// A packet waits for them, or was lost for want of them.
    Now,
    /// A packet may come.
    Ahead,
}

/// The answer to an [`PostedOrder::Ask`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answered {
    /// The pages were brought in, and may be gone again.
    Present,
    /// Their content is lost.
    Lost,
}

/// What is to be done in the turn of a queue with posted chains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PostedOrder {
    /// Nothing more.
    Nothing,
    /// Nothing by the engine, but something was done, and there may be more.
    Done,
    /// Request the absent pages of this chain, and tell the answer.
    Ask(ChainNo, Need),
    /// This chain goes back to the driver, empty.
    GiveBack(ChainNo),
    /// Wire the pages of this chain, which was looked at in this step, until it is used.
    Wire(ChainNo),
    /// Have the chosen chains filled.
    Fill(Report),
    /// Report the chosen chains, which were filled earlier.
    Report,
    /// Tell what is in the chosen chains, which were filled earlier. They are free again.
    ReadBack,
}
