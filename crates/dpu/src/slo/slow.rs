// SPDX-License-Identifier: Apache-2.0
//! A slow request, and the stage that held it longest.

use super::course::{Injected, RequestTimeline, Stages};
use pagetide_addr::Tier;
use std::time::Duration;

/// What held a slow request longest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SlowCause {
    /// The engine, which was busy with other work.
    Engine,
    /// Its queue was paused because an earlier request waited for pages.
    Behind,
    /// Parked, until the host began to handle its fault.
    WaitingForHost,
    /// Parked, while the host brought its pages from this tier.
    Handling(Tier),
    /// Parked, from the host's response until the engine resumed it.
    Resume,
    /// The disk.
    Disk,
    /// Installing data that was read into bounce buffers for absent pages.
    Bounce,
}

/// Number of causes.
pub(crate) const CAUSES: usize = 13;

impl SlowCause {
    /// All of them.
    pub const ALL: [Self; CAUSES] = [
        Self::Engine,
        Self::Behind,
        Self::WaitingForHost,
        Self::Handling(Tier::Present),
        Self::Handling(Tier::Zero),
        Self::Handling(Tier::Compressed),
        Self::Handling(Tier::Uncompressed),
        Self::Handling(Tier::Disk),
        Self::Handling(Tier::Remote),
        Self::Handling(Tier::Unknown),
        Self::Resume,
        Self::Disk,
        Self::Bounce,
    ];

    fn of(stages: &Stages) -> Self {
        let held = [
            (stages.engine_ns, Self::Engine),
            (stages.behind_ns, Self::Behind),
            (stages.waiting_ns, Self::WaitingForHost),
            (stages.handling_ns, Self::Handling(stages.tier)),
            (stages.resume_ns, Self::Resume),
            (stages.disk_ns, Self::Disk),
            (stages.bounce_ns, Self::Bounce),
        ];
        let longest = held.into_iter().max_by_key(|(ns, _)| *ns);
        longest.map_or(Self::Engine, |(_, cause)| cause)
    }

    pub(super) fn index(self) -> usize {
        // Every cause is in the list.
        Self::ALL.iter().position(|c| *c == self).unwrap_or(0)
    }
}

impl std::fmt::Display for SlowCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Engine => f.write_str("engine"),
            Self::Behind => f.write_str("behind a parked request"),
            Self::WaitingForHost => f.write_str("parked: waiting for the host"),
            Self::Handling(tier) => write!(f, "handling, {tier}"),
            Self::Resume => f.write_str("response to resume"),
            Self::Disk => f.write_str("disk"),
            Self::Bounce => f.write_str("bounce"),
        }
    }
}

/// A request that took longer than its device's threshold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlowRequest {
    /// How long ago it was completed.
    pub ago: Duration,
    /// Queue it came from.
    pub queue: u16,
    /// Data it moved.
    pub bytes: u32,
    /// Time from the pop from the ring to the entry in the used ring.
    pub latency: Duration,
    /// What held it longest.
    pub cause: SlowCause,
    /// How long it was held there.
    pub held: Duration,
    /// True if its fault was injected.
    pub injected: bool,
}

/// A completed request, as its engine reports it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Done {
    pub at_ns: u64,
    pub queue: u16,
    pub bytes: u32,
    pub course: RequestTimeline,
}

impl Done {
    pub fn latency_ns(&self) -> u64 {
        self.course.latency_ns(self.at_ns)
    }

    /// Its cause, and how long that held it.
    pub fn cause(&self) -> SlowCause {
        SlowCause::of(&self.course.stages(self.at_ns))
    }

    /// The report at `now_ns`.
    pub fn told(&self, now_ns: u64) -> SlowRequest {
        let stages = self.course.stages(self.at_ns);
        let cause = SlowCause::of(&stages);
        let held_ns = match cause {
            SlowCause::Engine => stages.engine_ns,
            SlowCause::Behind => stages.behind_ns,
            SlowCause::WaitingForHost => stages.waiting_ns,
            SlowCause::Handling(_) => stages.handling_ns,
            SlowCause::Resume => stages.resume_ns,
            SlowCause::Disk => stages.disk_ns,
            SlowCause::Bounce => stages.bounce_ns,
        };
        SlowRequest {
            ago: Duration::from_nanos(now_ns.saturating_sub(self.at_ns)),
            queue: self.queue,
            bytes: self.bytes,
            latency: Duration::from_nanos(self.latency_ns()),
            cause,
            held: Duration::from_nanos(held_ns),
            injected: self.course.injected == Injected::Yes,
        }
    }
}
