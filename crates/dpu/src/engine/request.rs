// SPDX-License-Identifier: Apache-2.0
//! A chain on its way: where it comes from, and what is kept of it while the kernel has its I/O.
//!
//! Plain types. The stages that a chain passes are in files of their own, see [`super`].

use super::{bounce::slots::Run, fair::Load};
use crate::{
    kind::{
        Flight,
        work::{Data, Lane},
    },
    memory::{LeaseSet, Span},
    parked::{Ended, Purpose, QueueKey},
    ring::Step,
    slo::course::{Injected, RequestTimeline},
};
use std::time::Instant;

/// Where a chain comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Origin {
    /// From the avail ring or the in-flight region.
    Fresh(RequestTimeline),
    /// From the parked chains.
    Resumed {
        purpose: Purpose,
        since: Instant,
        course: RequestTimeline,
        ended: Ended,
    },
    /// Its transfer had arrived in a bounce buffer, but could not be delivered.
    Again(RequestTimeline),
}

impl Origin {
    /// The course of the chain so far.
    pub fn course(&self) -> RequestTimeline {
        match self {
            Self::Fresh(course) | Self::Again(course) | Self::Resumed { course, .. } => *course,
        }
    }

    /// Notes that an injected fault has parked the chain.
    pub fn mark_injected(&mut self) {
        if let Self::Fresh(course) = self {
            course.injected = Injected::Yes;
        }
    }
}

/// A chain that was taken and has not begun.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TakenChain {
    pub head: u16,
    pub origin: Origin,
}

/// What an engine must know of a request when its I/O completes.
#[derive(Debug)]
pub(crate) struct Request {
    pub key: QueueKey,
    pub head: u16,
    /// Where its answer is written, if anywhere.
    pub answer: Option<Span>,
    pub leases: LeaseSet,
    pub step: Step,
    /// What the step counts as while the kernel has it.
    pub load: Load,
    pub lane: Lane,
    pub data: Data,
    pub flight: Flight,
    /// Bytes of data, for the used ring and the statistics.
    pub data_bytes: u32,
    pub sample: Sample,
    pub course: RequestTimeline,
    /// Absent pages of the request: the data read for them is in bounce buffers.
    pub bounced: Vec<Run>,
}

/// Whether the look-up of this request is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sample {
    No,
    Yes,
}
