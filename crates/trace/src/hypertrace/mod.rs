// SPDX-License-Identifier: Apache-2.0
//! The trace constructor (HyperTRIO IV-B): merges many tenants' streams into one.
//!
//! ```text
//!   recipe, seed ──► SyntheticTenant ─┐
//!                                     ├─ seats ── turns (RR, RAND, time) ──► HyperTrace
//!   logs ──► Recordings ──► cursors ──┘   one a tenant                       an EventSource
//! ```
//!
//! A *turn* is `burst_packets` packets of one tenant. A *packet* is three requests of a synthetic tenant,
//! or `requests_per_packet` consecutive requests of a recorded one. Within a tenant, order is never
//! changed.
//!
//! Ids are assigned anew: tenant `i` is domain `i` and has the source that [`SourceRule`] gives, so no two
//! tenants share one unless that is the subject of the study. If a recorded source has further domains (a
//! device is handed from the host to a tenant), these get numbers after those of all tenants. Two sources
//! that shared a domain get one each. With several address spaces a tenant, its packets use them in turn:
//! space `s` of tenant `i` of `n` is domain `s * n + i`.
//!
//! Memory holds only a seat for each tenant and one batch of events.

mod build;
mod recorded;
mod spec;
mod turns;

use std::collections::BinaryHeap;
use std::path::Path;
use std::sync::Arc;

pub use build::{Built, Progress, build};
use recorded::Cursor;
pub use recorded::{
    MAX_DOMAINS_PER_SOURCE, MAX_RECORDS_PER_EVENT, MAX_SOURCES_PER_LOG, RecordedSource, Recordings,
};
pub use spec::{
    End, HyperSpec, Input, Lengths, MAX_BURST_PACKETS, MAX_REQUESTS_PER_PACKET, MAX_SPACES,
    MAX_TENANTS, MAX_WEIGHT, Membership, Order, RecordedInput, Reuse, SourceRule,
};
use turns::{Random, RoundRobin, Turns};

use crate::event::{Event, EventKind, IommuDomain, SourceId};
use crate::stream::{BATCH_EVENTS, EventSource};
use crate::tenant::SyntheticTenant;
use crate::tenant::random_stream::RandomStream;
use pagetide_access_log::TraceError;

/// First random stream that no tenant uses; tenants' numbers are below [`MAX_TENANTS`].
const STREAM_OF_LENGTHS: u64 = 1 << 40;
const STREAM_OF_TURNS: u64 = STREAM_OF_LENGTHS + 1;

/// Opens a log of any format.
pub type OpenLog<'a> = dyn FnMut(&Path) -> Result<Box<dyn EventSource>, TraceError> + 'a;

/// The origin of a tenant's packets.
#[derive(Debug)]
enum Stream {
    Synthetic(SyntheticTenant),
    Recorded(Cursor),
}

impl Stream {
    fn next_packet(&mut self, out: &mut Vec<Event>) -> Result<(), TraceError> {
        match self {
            Self::Synthetic(tenant) => {
                tenant.next_packet(out);
                Ok(())
            }
            Self::Recorded(cursor) => cursor.next_packet(out),
        }
    }

    fn next_time_ns(&mut self) -> Result<Option<u64>, TraceError> {
        match self {
            Self::Synthetic(tenant) => Ok(tenant.next_time_ns()),
            Self::Recorded(cursor) => cursor.next_time_ns(),
        }
    }
}

/// A tenant's state in the trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Presence {
    Coming,
    Here,
    Gone,
}

/// One tenant.
#[derive(Debug)]
struct Seat {
    stream: Stream,
    /// Packets left; `u64::MAX` for endless.
    packets_left: u64,
    source: SourceId,
    domain: IommuDomain,
    presence: Presence,
    /// The address space of its next packet.
    space: u32,
}

/// A hyper-trace, generated as it is read.
#[derive(Debug)]
pub struct HyperTrace {
    seats: Vec<Seat>,
    turns: Turns,
    order: Order,
    end: End,
    membership: Membership,
    burst_packets: u32,
    /// Address spaces of a tenant.
    spaces: u32,
    /// Whose turn it is, and its packets left; with none left it is no tenant's.
    tenant: u32,
    burst_left: u32,
    /// Packets that the whole trace may still have; `u64::MAX` for any number.
    packets_left: u64,
    packets_expected: Option<u64>,
    packets_made: u64,
    /// Time of the last event, under [`Order::Time`].
    now_ns: u64,
    /// Generated events, of which the first `sent` were returned.
    stage: Vec<Event>,
    sent: usize,
    ended: bool,
    /// Why it ended, if a log failed; reported after the events before it.
    failed: Option<TraceError>,
}

impl HyperTrace {
    /// The trace that `spec` describes; its logs, if any, are opened by `open_log` and split now.
    ///
    /// # Errors
    /// [`TraceError::Asked`] if the settings are not valid; others if a log is broken.
    pub fn new(spec: &HyperSpec, open_log: &mut OpenLog<'_>) -> Result<Self, TraceError> {
        spec.look_at_settings()?;
        let Input::Recorded(input) = &spec.input else {
            return Self::synthetic(spec);
        };
        let mut recordings = Recordings::new()?;
        for path in &input.logs {
            recordings.add(&mut *open_log(path)?)?;
        }
        Self::recorded(spec, &recordings)
    }

    /// The trace that `spec` describes, of synthetic tenants.
    ///
    /// # Errors
    /// [`TraceError::Asked`] if the settings are not valid, or name logs.
    pub fn synthetic(spec: &HyperSpec) -> Result<Self, TraceError> {
        spec.look_at_settings()?;
        let Input::Synthetic(shape) = &spec.input else {
            return asked("input is recorded: the logs are missing".to_owned());
        };
        let layout = Arc::new(shape.layout()?);
        let lengths = drawn_lengths(spec);
        let shares = Shares::new(spec);
        let seats = (0..spec.tenants)
            .map(|tenant| {
                let packets_left = length_of(&lengths, tenant);
                let init = shape.init_packets(packets_left.min(shares.of(spec.weight(tenant))));
                let (source, domain) = ids(spec, tenant)?;
                let stream = SyntheticTenant::of(Arc::clone(&layout), spec.seed, tenant, init)
                    .named(source, domain);
                Ok(Seat {
                    stream: Stream::Synthetic(stream),
                    packets_left,
                    source,
                    domain,
                    presence: Presence::Coming,
                    space: 0,
                })
            })
            .collect::<Result<Vec<_>, TraceError>>()?;
        Self::of_seats(spec, seats)
    }

    /// The trace that `spec` describes, of the sources of `recordings`, whatever logs `spec` names.
    ///
    /// # Errors
    /// [`TraceError::Asked`] if the settings are not valid for these sources.
    pub fn recorded(spec: &HyperSpec, recordings: &Recordings) -> Result<Self, TraceError> {
        spec.look_at_settings()?;
        let Input::Recorded(input) = &spec.input else {
            return asked("input is synthetic: it takes no logs".to_owned());
        };
        let sources = recordings.sources();
        let enough = spec.tenants as usize <= sources.len();
        if sources.is_empty() {
            return asked(format!(
                "the {} logs of input.recorded.logs hold no request, so there is no source to \
                 take a tenant from: name logs with requests",
                input.logs.len()
            ));
        }
        if input.reuse == Reuse::Never && !enough {
            return asked(format!(
                "{} tenants of {} recorded sources: record more, or set reuse = \"wrap\"",
                spec.tenants,
                sources.len()
            ));
        }
        let lengths = drawn_lengths(spec);
        let mut next_domain = spec.tenants;
        // Finding the place once is enough for all tenants that are one source.
        let mut starts: Vec<Option<Cursor>> = vec![None; sources.len()];
        let mut seats = Vec::with_capacity(spec.tenants as usize);
        for (tenant, (at, recorded)) in (0..spec.tenants).zip(sources.iter().enumerate().cycle()) {
            if spec.order == Order::Time && !recorded.timed {
                return asked(format!(
                    "order = \"time\": source {:#x} of log {} has events without a time",
                    recorded.source.0, recorded.log
                ));
            }
            let (source, domain) = ids(spec, tenant)?;
            let mut domains = vec![domain];
            for _ in 1..recorded.domains.len() {
                domains.push(IommuDomain(next_domain));
                next_domain += 1;
            }
            let per_packet = input.requests_per_packet;
            let start = match starts[at].take() {
                Some(start) => start,
                None => Cursor::new(recordings, recorded, per_packet)
                    .past(input.skipped(recorded.requests))?,
            };
            let cursor = start.clone().named(source, domains.into());
            starts[at] = Some(start);
            seats.push(Seat {
                packets_left: cursor.packets_left().min(length_of(&lengths, tenant)),
                stream: Stream::Recorded(cursor),
                source,
                domain,
                presence: Presence::Coming,
                space: 0,
            });
        }
        Self::of_seats(spec, seats)
    }

    fn of_seats(spec: &HyperSpec, mut seats: Vec<Seat>) -> Result<Self, TraceError> {
        let weights = (0..spec.tenants).map(|tenant| spec.weight(tenant));
        let turns = match spec.order {
            Order::Rr => Turns::RoundRobin(RoundRobin::new(weights)),
            Order::Rand => Turns::Random(Random::new(
                RandomStream::new(spec.seed, STREAM_OF_TURNS),
                weights,
            )),
            Order::Time => {
                let mut heap = BinaryHeap::new();
                for (tenant, seat) in (0..).zip(&mut seats) {
                    // A tenant without any packet is detected right away.
                    let time_ns = seat.stream.next_time_ns()?.unwrap_or(0);
                    heap.push(std::cmp::Reverse((time_ns, tenant)));
                }
                Turns::ByTime(heap)
            }
        };
        Ok(Self {
            packets_expected: packets_expected(spec, &seats),
            seats,
            turns,
            order: spec.order,
            end: spec.end,
            membership: spec.membership,
            burst_packets: spec.burst_packets,
            spaces: spec.spaces,
            tenant: 0,
            burst_left: 0,
            packets_left: spec.packets.unwrap_or(u64::MAX),
            packets_made: 0,
            now_ns: 0,
            stage: Vec::new(),
            sent: 0,
            ended: false,
            failed: None,
        })
    }

    /// Tenants of the trace.
    #[must_use]
    pub fn tenants(&self) -> usize {
        self.seats.len()
    }

    /// Packets generated so far; up to a batch of events ahead of those returned.
    #[must_use]
    pub fn packets_made(&self) -> u64 {
        self.packets_made
    }

    /// Approximate number of packets of the trace, for a progress bar.
    #[must_use]
    pub fn packets_expected(&self) -> Option<u64> {
        self.packets_expected
    }

    /// Generates one packet, or notes that a tenant or the trace has none left.
    fn step(&mut self) -> Result<(), TraceError> {
        if self.packets_left == 0 {
            self.close();
            return Ok(());
        }
        if self.burst_left == 0 {
            let Some(tenant) = self.turns.next() else {
                self.close();
                return Ok(());
            };
            self.tenant = tenant;
            self.burst_left = self.burst_packets;
        }
        let tenant = self.tenant;
        if self.seats[tenant as usize].packets_left == 0 {
            self.burst_left = 0;
            self.ran_out(tenant);
            return Ok(());
        }
        self.burst_left -= 1;
        self.packet(tenant)?;
        if self.order == Order::Time {
            let seat = &mut self.seats[tenant as usize];
            let time_ns = seat.stream.next_time_ns()?.unwrap_or(self.now_ns);
            self.turns.again_at(tenant, time_ns);
        }
        Ok(())
    }

    fn packet(&mut self, tenant: u32) -> Result<(), TraceError> {
        #[expect(clippy::cast_possible_truncation, reason = "at most MAX_TENANTS")]
        let tenants = self.seats.len() as u32;
        let seat = &mut self.seats[tenant as usize];
        let from = self.stage.len();
        let announced = self.membership == Membership::Announced;
        if announced && seat.presence == Presence::Coming {
            self.stage.push(seat.passage(EventKind::Join));
        }
        seat.presence = Presence::Here;
        let packet_from = self.stage.len();
        seat.stream.next_packet(&mut self.stage)?;
        if self.spaces > 1 {
            let first_domain = seat.space * tenants;
            for event in &mut self.stage[packet_from..] {
                event.domain.0 += first_domain;
            }
            seat.space = (seat.space + 1) % self.spaces;
        }
        if let Some(first) = self.stage.get(packet_from) {
            let time_ns = first.time_ns;
            for join in &mut self.stage[from..packet_from] {
                join.time_ns = time_ns;
            }
        }
        if seat.packets_left != u64::MAX {
            seat.packets_left -= 1;
        }
        if self.packets_left != u64::MAX {
            self.packets_left -= 1;
        }
        self.packets_made += 1;
        if announced && seat.packets_left == 0 {
            seat.presence = Presence::Gone;
            let leave = seat.passage(EventKind::Leave);
            self.stage.push(leave);
        }
        self.set_times(from);
        Ok(())
    }

    /// RR and RAND impose an order, so the old times would run backwards and are removed. Ordered by time,
    /// a packet's requests stay together; where that would make time run backwards, later events are
    /// delayed.
    fn set_times(&mut self, from: usize) {
        if self.order == Order::Time {
            for event in &mut self.stage[from..] {
                self.now_ns = self.now_ns.max(event.time_ns.unwrap_or(0));
                event.time_ns = Some(self.now_ns);
            }
        } else {
            for event in &mut self.stage[from..] {
                event.time_ns = None;
            }
        }
    }

    /// `tenant` has its turn and no packets left.
    fn ran_out(&mut self, tenant: u32) {
        match self.end {
            End::FirstRunsOut => self.close(),
            End::RoundFinished => self.turns.finish_round(),
            End::AllRunOut => self.turns.remove(tenant),
        }
    }

    /// The end: the remaining tenants leave.
    fn close(&mut self) {
        self.ended = true;
        if self.membership == Membership::Silent {
            return;
        }
        let from = self.stage.len();
        for seat in &mut self.seats {
            if seat.presence == Presence::Here {
                seat.presence = Presence::Gone;
                self.stage.push(seat.passage(EventKind::Leave));
            }
        }
        self.set_times(from);
    }
}

impl Seat {
    /// A join or leave.
    fn passage(&self, kind: EventKind) -> Event {
        Event {
            source: self.source,
            domain: self.domain,
            kind,
            ..Event::default()
        }
    }
}

impl EventSource for HyperTrace {
    fn next_batch(&mut self, batch: &mut Vec<Event>) -> Result<usize, TraceError> {
        if self.stage.len() - self.sent < BATCH_EVENTS && !self.ended {
            self.stage.drain(..self.sent);
            self.sent = 0;
            while !self.ended && self.stage.len() < BATCH_EVENTS {
                if let Err(error) = self.step() {
                    self.failed = Some(error);
                    self.ended = true;
                }
            }
        }
        if self.sent == self.stage.len()
            && let Some(error) = self.failed.take()
        {
            return Err(error);
        }
        let rest = &self.stage[self.sent..];
        let now = &rest[..rest.len().min(BATCH_EVENTS)];
        batch.extend_from_slice(now);
        let count = now.len();
        self.sent += count;
        Ok(count)
    }
}

/// The ids of tenant `tenant`.
fn ids(spec: &HyperSpec, tenant: u32) -> Result<(SourceId, IommuDomain), TraceError> {
    match spec.sources.source(tenant) {
        Some(source) => Ok((source, IommuDomain(tenant))),
        None => asked(format!(
            "tenant {tenant} would need a source id of more than 32 bits"
        )),
    }
}

/// Packets of each tenant, if tenants end.
fn drawn_lengths(spec: &HyperSpec) -> Option<Vec<u64>> {
    let Lengths {
        min_packets,
        max_packets,
    } = spec.lengths?;
    let mut random = RandomStream::new(spec.seed, STREAM_OF_LENGTHS);
    let mut lengths: Vec<u64> = (0..spec.tenants)
        .map(|_| min_packets + random.below_u64((max_packets - min_packets).saturating_add(1)))
        .collect();
    let shortest = random.below(spec.tenants) as usize;
    let step = 1 + random.below(spec.tenants - 1) as usize;
    let longest = (shortest + step) % lengths.len();
    lengths[longest] = max_packets;
    lengths[shortest] = min_packets;
    Some(lengths)
}

fn length_of(lengths: &Option<Vec<u64>>, tenant: u32) -> u64 {
    lengths
        .as_ref()
        .map_or(u64::MAX, |lengths| lengths[tenant as usize])
}

/// The share of each tenant in a trace of limited length.
struct Shares {
    packets: Option<u64>,
    all_weights: u64,
}

impl Shares {
    fn new(spec: &HyperSpec) -> Self {
        Self {
            packets: spec.packets,
            all_weights: (0..spec.tenants).map(|t| u64::from(spec.weight(t))).sum(),
        }
    }

    /// Packets of a tenant of weight `weight`; `u64::MAX` if the trace has no limit.
    fn of(&self, weight: u32) -> u64 {
        self.packets.map_or(u64::MAX, |packets| {
            let share = u128::from(packets) * u128::from(weight) / u128::from(self.all_weights);
            u64::try_from(share).unwrap_or(u64::MAX)
        })
    }
}

/// Number of packets of the trace: exact in RR without weights, else approximate.
fn packets_expected(spec: &HyperSpec, seats: &[Seat]) -> Option<u64> {
    let lengths = seats.iter().map(|seat| seat.packets_left);
    let by_tenants = match spec.end {
        End::AllRunOut => lengths.fold(0, u64::saturating_add),
        End::FirstRunsOut | End::RoundFinished => lengths
            .min()
            .unwrap_or(0)
            .saturating_mul(seats.len() as u64),
    };
    let packets = by_tenants.min(spec.packets.unwrap_or(u64::MAX));
    (packets != u64::MAX).then_some(packets)
}

fn asked<T>(sentence: String) -> Result<T, TraceError> {
    Err(TraceError::Asked(sentence))
}
