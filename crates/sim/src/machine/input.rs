// SPDX-License-Identifier: Apache-2.0
//! The trace as the model reads it: a batch of events and a position in it; with several devices, a queue of
//! events for each, read ahead.
//!
//! An event belongs to the device of its source, and takes effect when that device has come to it. One about a domain
//! names no source: it belongs to the device that has asked for the domain last. One about everything, or about a
//! domain that nobody has asked for, belongs to the device that reads it. A device that needs a packet reads the
//! trace until it has one. That may leave packets for the others, and their number is limited: no device gets ahead
//! of another one in the trace by more than that.

use std::collections::VecDeque;

use pagetide_trace::{Event, EventKind, EventSource, IommuDomain, SourceId};
use rustc_hash::FxHashMap;

use crate::error::SimError;
use crate::next_use::NextUses;

/// The trace as the model reads it.
pub(super) struct Input<'a> {
    pub(super) source: &'a mut dyn EventSource,
    pub(super) next_uses: Option<&'a NextUses>,
    pub(super) batch: Vec<Event>,
    pub(super) at: usize,
    pub(super) ended: bool,
    /// What was read ahead for each of several devices.
    pub(super) ahead: Vec<Ahead>,
    /// With several devices, the one that has asked for each domain last.
    device_of_domain: FxHashMap<IommuDomain, usize>,
    /// Requests that were read, with several devices.
    read: u64,
}

/// Events that were read for a device.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// Each with its number among the requests of the trace.
    events: VecDeque<(u64, Event)>,
    requests: u64,
}

/// Whether a device has a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Supply {
    /// It has one, or the trace's end.
    Ready,
    /// It cannot have one yet.
    Idle,
}

impl<'a> Input<'a> {
    /// At the beginning of `source`, for so many devices.
    pub(super) fn new(
        source: &'a mut dyn EventSource,
        next_uses: Option<&'a NextUses>,
        devices: usize,
    ) -> Self {
        let many = if devices > 1 { devices } else { 0 };
        Self {
            source,
            next_uses,
            batch: Vec::with_capacity(pagetide_trace::BATCH_EVENTS),
            at: 0,
            ended: false,
            ahead: (0..many).map(|_| Ahead::default()).collect(),
            device_of_domain: FxHashMap::default(),
            read: 0,
        }
    }

    /// The next event, without consuming it.
    #[inline]
    pub(super) fn peek(&mut self) -> Result<Option<&Event>, SimError> {
        if self.at == self.batch.len() && !self.ended {
            self.batch.clear();
            self.at = 0;
            self.ended = self.source.next_batch(&mut self.batch)? == 0;
        }
        Ok(self.batch.get(self.at))
    }

    /// Reads ahead until `device` has a packet of `per_packet` requests, the trace ends, or some device has
    /// `most` packets waiting. `device_of` says which device a source is a part of.
    pub(super) fn supply(
        &mut self,
        device: usize,
        per_packet: u64,
        most: u64,
        device_of: impl Fn(SourceId) -> usize,
    ) -> Result<Supply, SimError> {
        while self.ahead[device].requests < per_packet {
            let is_full = |ahead: &Ahead| ahead.requests / per_packet >= most;
            if self.ahead.iter().any(is_full) {
                return Ok(Supply::Idle);
            }
            let Some(event) = self.peek()?.copied() else {
                return Ok(Supply::Ready);
            };
            self.at += 1;
            let of = self.device_of(&event, device, &device_of);
            let ahead = &mut self.ahead[of];
            ahead.events.push_back((self.read, event));
            if event.kind == EventKind::Translate {
                ahead.requests += 1;
                self.read += 1;
            }
        }
        Ok(Supply::Ready)
    }

    /// The device that an event is for, which `reader` has read.
    fn device_of(
        &mut self,
        event: &Event,
        reader: usize,
        device_of: impl Fn(SourceId) -> usize,
    ) -> usize {
        match event.kind {
            EventKind::Translate => {
                let device = device_of(event.source);
                self.device_of_domain.insert(event.domain, device);
                device
            }
            EventKind::InvalidateSource | EventKind::Join | EventKind::Leave => {
                device_of(event.source)
            }
            EventKind::InvalidatePages
            | EventKind::InvalidateDomain
            | EventKind::InvalidateContextsOfDomain
            | EventKind::PageOut => {
                let asked = self.device_of_domain.get(&event.domain);
                asked.copied().unwrap_or(reader)
            }
            EventKind::InvalidateAll | EventKind::InvalidateContexts => reader,
        }
    }

    /// The next event of `device`, with its number if it is a request.
    pub(super) fn first_of(&self, device: usize) -> Option<&(u64, Event)> {
        self.ahead[device].events.front()
    }

    /// Consumes it, if there is one.
    pub(super) fn take_of(&mut self, device: usize) -> (u64, Event) {
        let ahead = &mut self.ahead[device];
        let (number, event) = ahead.events.pop_front().unwrap_or_default();
        ahead.requests -= u64::from(event.kind == EventKind::Translate);
        (number, event)
    }
}
