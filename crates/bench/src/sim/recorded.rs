// SPDX-License-Identifier: Apache-2.0
//! What invalidations of a recorded log cost the model.
//!
//! ```text
//!   log ─► copies for 64 tenants ─┬─ as they are ──────────► runs ─┐
//!                                 └─ without invalidations ► runs ─┴► CPU time of the first over that of the second
//! ```
//! Made tenants have no invalidations but those of their spec; a driver in strict mode has one for each buffer.

use super::{NAME, run_trace};
use crate::harness::{
    figures::{median_ratio, thousandths},
    report::{BenchError, BenchReport, failed},
    rounds::{WarmUp, progress, rounds},
};
use pagetide_trace::{
    Event, EventKind, EventSink, FormatChoice, HyperSpec, HyperTrace, Input, ParquetWriter,
    RecordedInput, Recordings, Reuse, TraceError, TraceMeta, build, open,
};
use std::path::Path;

/// Tenants that the log's sources are copied to.
const TENANTS: u32 = 64;
/// Packets of the trace.
const PACKETS: u64 = 400_000;
/// Requests of a packet (IV-C).
const REQUESTS_PER_PACKET: u32 = 3;
/// Times that both are run.
const ROUNDS: usize = 5;
/// Configurations whose ratio is given.
const CONFIGS: [&str; 2] = ["paper", "base"];

/// Leaves out what says that translations are void, and counts it.
struct WithoutInvalidations<'a> {
    sink: ParquetWriter,
    left_out: &'a mut u64,
}

fn is_invalidation(event: &Event) -> bool {
    match event.kind {
        EventKind::InvalidatePages
        | EventKind::InvalidateDomain
        | EventKind::InvalidateAll
        | EventKind::InvalidateSource
        | EventKind::InvalidateContextsOfDomain
        | EventKind::InvalidateContexts => true,
        EventKind::Translate | EventKind::Join | EventKind::Leave | EventKind::PageOut => false,
    }
}

impl EventSink for WithoutInvalidations<'_> {
    fn write(&mut self, events: &[Event]) -> Result<(), TraceError> {
        let stay = |event: &&Event| !is_invalidation(event);
        let stay: Vec<Event> = events.iter().filter(stay).copied().collect();
        *self.left_out += (events.len() - stay.len()) as u64;
        self.sink.write(&stay)
    }

    fn finish(self: Box<Self>) -> Result<(), TraceError> {
        Box::new(self.sink).finish()
    }
}

/// Adds the cost of the invalidations of `log` to the report.
pub(super) fn measure(
    log: &Path,
    directory: &Path,
    report: &mut BenchReport,
) -> Result<(), BenchError> {
    progress(NAME, format_args!("copies of {} are made", log.display()));
    let (whole, without) = (
        directory.join("whole.parquet"),
        directory.join("without.parquet"),
    );
    let mut recordings = Recordings::new().map_err(failed)?;
    let mut source = open(log, FormatChoice::Detect).map_err(failed)?;
    recordings.add(&mut *source).map_err(failed)?;
    let create = |path: &Path| ParquetWriter::create(path, &TraceMeta::default()).map_err(failed);
    let sink = Box::new(create(&whole)?);
    build(&mut copies(&recordings)?, sink, &mut |_| {}).map_err(failed)?;
    let mut count = 0_u64;
    let sink = Box::new(WithoutInvalidations {
        sink: create(&without)?,
        left_out: &mut count,
    });
    build(&mut copies(&recordings)?, sink, &mut |_| {}).map_err(failed)?;
    let mut runs = CONFIGS.map(|_| (Vec::new(), Vec::new()));
    for _round in rounds(NAME, ROUNDS, WarmUp::None) {
        for (config, (all, fewer)) in CONFIGS.iter().zip(&mut runs) {
            all.push(run_trace(&whole, config)?);
            fewer.push(run_trace(&without, config)?);
        }
    }
    for (config, (all, fewer)) in CONFIGS.iter().zip(&runs) {
        let cost = median_ratio(all, fewer, |run| run.cpu_seconds);
        let name = match *config {
            "paper" => "invalidations_cost".to_owned(),
            other => format!("invalidations_cost_{other}"),
        };
        report.ratios.insert(name, thousandths(cost));
    }
    report
        .figures
        .insert("recorded_invalidations".into(), count.into());
    let requests = runs[0].0.first().map_or(0, |run| run.requests);
    report
        .figures
        .insert("recorded_requests".into(), requests.into());
    Ok(())
}

fn copies(recordings: &Recordings) -> Result<HyperTrace, BenchError> {
    let input = RecordedInput {
        logs: Vec::new(),
        requests_per_packet: REQUESTS_PER_PACKET,
        reuse: Reuse::Wrap,
        skip_percent: 0,
    };
    let mut spec = HyperSpec::new(Input::Recorded(input), TENANTS);
    spec.packets = Some(PACKETS);
    HyperTrace::recorded(&spec, recordings).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_trace::IommuDomain;

    #[test]
    fn what_is_left_out_is_counted_and_the_rest_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace.parquet");
        let mut count = 0;
        let mut sink = WithoutInvalidations {
            sink: ParquetWriter::create(&path, &TraceMeta::default()).unwrap(),
            left_out: &mut count,
        };
        let of = |kind, domain| Event {
            kind,
            domain: IommuDomain(domain),
            ..Event::default()
        };
        let events = [
            of(EventKind::Join, 1),
            of(EventKind::InvalidatePages, 2),
            of(EventKind::Translate, 3),
            of(EventKind::InvalidateDomain, 4),
        ];
        sink.write(&events).unwrap();
        Box::new(sink).finish().unwrap();
        assert_eq!(count, 2);
        let mut left = Vec::new();
        let mut source = open(&path, FormatChoice::Detect).unwrap();
        source.next_batch(&mut left).unwrap();
        let domains: Vec<u32> = left.iter().map(|event| event.domain.0).collect();
        assert_eq!(domains, [1, 3]);
    }
}
