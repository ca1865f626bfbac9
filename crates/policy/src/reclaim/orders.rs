// SPDX-License-Identifier: Apache-2.0
//! [`Situation`] and [`Order`]: what the reclaim loop is told, and what it orders.

use crate::{
    sampling::Want,
    swap_in::Wanted,
    victims::{Need, Reach},
    watermarks::Headroom,
};
use std::time::Duration;

/// Whether content can be stored.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Content {
    /// It can.
    #[default]
    Taken,
    /// The store is full: only pages of one repeated word, mostly zeros, can be evicted.
    Refused,
}

/// Whether pages may be evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Eviction {
    /// They may.
    Allowed,
    /// A hazard forbids it, or it is suspended.
    Blocked,
}

/// All that the loop is told each time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Situation {
    /// The time.
    pub now: Duration,
    /// How far the limit is.
    pub headroom: Headroom,
    /// Whether pages may be evicted.
    pub eviction: Eviction,
    /// Sweeps over all sections so far.
    pub sweeps: u64,
    /// Pages that the oldest open request wants evicted, if there is one.
    pub requested_pages: Option<u64>,
    /// Why sections are wanted back, if there are any ([`super::Selection::wanted_back`]).
    pub wanted_back: Option<Wanted>,
    /// How long it is to the next section that is to be demoted, if any waits
    /// ([`Demotion::due_in`](crate::demotion::Demotion::due_in)).
    pub demotion_in: Option<Duration>,
}

/// A pass to be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EvictOrder {
    /// Pages to be evicted.
    pub pages: u64,
    /// Within which sections.
    pub reach: Reach,
    /// What for.
    pub need: Need,
    /// Threads that take part beside the reclaim thread.
    pub helpers: u64,
    /// The pass ends at this time, however much was evicted.
    pub until: Duration,
}

/// What is to be done next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Order {
    /// Wait until the low watermark is passed or a request comes, but no longer than this.
    Wait(Duration),
    /// Wait for this time, whatever comes.
    Rest(Duration),
    /// Suspended eviction may be tried again.
    EndSuspension,
    /// Follow the VM's RAM, check for hazards, correct all counts.
    Poll,
    /// Check for hazards.
    CheckHazards,
    /// Correct the count of present pages.
    CorrectHeadroom,
    /// Continue the sweep.
    Sample(Want),
    /// Sweep all sections now; give up at `until`.
    Sweep {
        /// The time to give up.
        until: Duration,
    },
    /// Sections that were found in use may be tried again.
    TryAgain,
    /// Stop the VM's vCPUs, until [`Order::Release`] or for this time. Where that is not possible the
    /// loop goes on all the same.
    Hold(Duration),
    /// Let them go on.
    Release,
    /// Evict, and report it by [`ReclaimLoop::passed`](super::ReclaimLoop::passed).
    Evict(EvictOrder),
    /// Keep cold sections with about this many pages ready for eviction.
    KeepReady {
        /// The pages.
        pages: u64,
    },
    /// Have sections filled that are wanted back, and report it by [`ReclaimLoop::swapped_in`](super::ReclaimLoop::swapped_in).
    SwapIn {
        /// Why they are wanted.
        wanted: Wanted,
        /// Pages in all, about: there is room for them.
        pages: u64,
    },
    /// Pack the stored pages of the section anew that [`Demotion`](crate::demotion::Demotion) names.
    Demote,
    /// A reclaim is over. If it was for a request ([`Need::Wish`]), the request is to be answered.
    Finish(Need),
    /// Answer all requests: nothing can be evicted.
    RefuseRequests,
}
