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
    REQUESTS_PER_PACKET, RecordedInput, Recordings, Reuse, TraceError, TraceMeta, build, open,
};
use std::path::Path;

/// Tenants that the log's sources are copied to.
const TENANTS: u32 = 64;
/// Percentage of the log that is left out at its beginning, where drivers start and unmap little.
const SKIP_PERCENT: u32 = 50;
/// Packets of the trace.
const PACKETS: u64 = 400_000;
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

/// What was found.
pub(super) struct Cost {
    /// Of the trace, and of what was left out of it.
    requests: u64,
    invalidations: u64,
    /// By configuration: CPU time over that without invalidations.
    ratios: [f64; CONFIGS.len()],
}

/// Measures the cost of the invalidations of `log`.
pub(super) fn measure(log: &Path, directory: &Path) -> Result<Cost, BenchError> {
    progress(NAME, format_args!("copies of {} are made", log.display()));
    let whole = directory.join("whole.parquet");
    let without = directory.join("without.parquet");
    let invalidations = write(log, PACKETS, [&whole, &without])?;
    if invalidations == 0 {
        return Err(failed(format!(
            "{} has no invalidations behind the first {SKIP_PERCENT} % of its requests: record one in the mode strict, \
             and for longer",
            log.display()
        )));
    }
    let mut runs = CONFIGS.map(|_| (Vec::new(), Vec::new()));
    for _round in rounds(NAME, ROUNDS, WarmUp::None) {
        for (config, (all, fewer)) in CONFIGS.iter().zip(&mut runs) {
            all.push(run_trace(&whole, config)?);
            fewer.push(run_trace(&without, config)?);
        }
    }
    Ok(Cost {
        requests: runs[0].0.first().map_or(0, |run| run.requests),
        invalidations,
        ratios: runs.map(|(all, fewer)| median_ratio(&all, &fewer, |run| run.cpu_seconds)),
    })
}

/// Writes so many packets of copies, with and without invalidations; returns how many were left out.
fn write(log: &Path, packets: u64, [whole, without]: [&Path; 2]) -> Result<u64, BenchError> {
    let mut recordings = Recordings::new().map_err(failed)?;
    let mut source = open(log, FormatChoice::Detect).map_err(failed)?;
    recordings.add(&mut *source).map_err(failed)?;
    let create = |path: &Path| ParquetWriter::create(path, &TraceMeta::default()).map_err(failed);
    let sink = Box::new(create(whole)?);
    build(&mut copies(&recordings, packets)?, sink, &mut |_| {}).map_err(failed)?;
    let mut left_out = 0;
    let sink = Box::new(WithoutInvalidations {
        sink: create(without)?,
        left_out: &mut left_out,
    });
    build(&mut copies(&recordings, packets)?, sink, &mut |_| {}).map_err(failed)?;
    Ok(left_out)
}

impl Cost {
    pub(super) fn tell(&self, report: &mut BenchReport) {
        for (config, cost) in CONFIGS.iter().zip(self.ratios) {
            let name = match *config {
                "paper" => "invalidations_cost".to_owned(),
                other => format!("invalidations_cost_{other}"),
            };
            report.ratios.insert(name, thousandths(cost));
        }
        let figures = &mut report.figures;
        figures.insert("recorded_invalidations".into(), self.invalidations.into());
        figures.insert("recorded_requests".into(), self.requests.into());
    }
}

fn copies(recordings: &Recordings, packets: u64) -> Result<HyperTrace, BenchError> {
    let input = RecordedInput {
        logs: Vec::new(),
        requests_per_packet: REQUESTS_PER_PACKET.get(),
        reuse: Reuse::Wrap,
        skip_percent: SKIP_PERCENT,
    };
    let mut spec = HyperSpec::new(Input::Recorded(input), TENANTS);
    spec.packets = Some(packets);
    HyperTrace::recorded(&spec, recordings).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::Iova;
    use pagetide_trace::{IommuDomain, PageSize, SourceId};

    fn events_of(path: &Path) -> Vec<Event> {
        let mut source = open(path, FormatChoice::Detect).unwrap();
        let mut all = Vec::new();
        while source.next_batch(&mut all).unwrap() > 0 {}
        all
    }

    /// A log of one source that uses five pages in turn, and has one unmapped after every so many uses, or never.
    fn log(path: &Path, uses_before_unmap: Option<u64>) {
        let mut sink = ParquetWriter::create(path, &TraceMeta::default()).unwrap();
        for number in 0..300_u64 {
            let of = |kind| Event {
                kind,
                source: SourceId(8),
                domain: IommuDomain(1),
                iova: Iova((number % 5) << 12),
                page_size: Some(PageSize::SIZE_4K),
                ..Event::default()
            };
            sink.write(&[of(EventKind::Translate)]).unwrap();
            if uses_before_unmap.is_some_and(|uses| (number + 1).is_multiple_of(uses)) {
                sink.write(&[of(EventKind::InvalidatePages)]).unwrap();
            }
        }
        Box::new(sink).finish().unwrap();
    }

    #[test]
    fn copies_differ_by_their_invalidations_alone() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let [path, whole, without] = ["log.parquet", "whole.parquet", "without.parquet"].map(at);
        log(&path, Some(3));
        let left_out = write(&path, 200, [&whole, &without]).unwrap();
        let (all, fewer) = (events_of(&whole), events_of(&without));
        assert!(left_out > 0);
        assert_eq!((all.len() - fewer.len()) as u64, left_out);
        let stay = |event: &&Event| !is_invalidation(event);
        assert!(all.iter().filter(stay).eq(&fewer));
        log(&path, None);
        assert_eq!(write(&path, 200, [&whole, &without]).unwrap(), 0);
    }
}
