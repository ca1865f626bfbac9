// SPDX-License-Identifier: Apache-2.0
//! Reports of the simulator's commands.

use std::path::Path;

use pagetide_sim::study::{Build, PointId, Preset, Study, Sweep, SweepSummary, Trace, TraceFile};
use pagetide_sim::verify::VerifyReport;
use pagetide_sim::{CacheCounts, Config, FaultOutcome, LatencySummary, Outcome};
use serde::Serialize;
use serde_json::Value;

use pagetide_report::text::{Text, table};

/// Points of a sweep that are printed; the file contains all of them.
const POINTS_SHOWN: usize = 200;

/// One run with its provenance.
#[derive(Debug, Serialize)]
pub struct RunReport {
    /// Identity of the point.
    pub id: PointId,
    /// The program.
    #[serde(flatten)]
    pub build: Build,
    /// The machine.
    pub host: String,
    /// Duration of the run.
    pub wall_seconds: f64,
    /// What the configuration was derived from.
    pub preset: Preset,
    /// The configuration.
    pub config: Config,
    /// The trace: its recipe, or the name of its file.
    pub trace: Value,
    /// Files that the trace comes from.
    pub trace_files: Vec<TraceFile>,
    /// Result of the run.
    pub figures: Outcome,
}

/// The recipe of a trace, or the name of its file.
pub fn trace(trace: &Trace) -> Value {
    match trace {
        Trace::File(path) => path.to_string_lossy().into(),
        Trace::Made(spec) => serde_json::to_value(spec).unwrap_or_default(),
        Trace::Memory(memory) => memory.sha256().into(),
    }
}

impl Text for RunReport {
    fn text(&self) -> String {
        let figures = &self.figures;
        let line = |name: &str, value: String| [name.to_owned(), value];
        let latency = &figures.latency;
        let mut text = table(&[
            line("point", self.id.to_string()),
            line("goodput", gbps(figures.gbps, figures.link_share)),
            line(
                "elapsed",
                format!(
                    "{} ns in the model, {:.2} s here",
                    figures.elapsed_ns, self.wall_seconds
                ),
            ),
            line(
                "requests",
                format!("{}, {} packets", figures.requests, figures.packets),
            ),
            line("dropped slots", figures.dropped_slots.to_string()),
            line(
                "latency",
                format!(
                    "mean {:.0} ns, p50 {}, p90 {}, p99 {}, p99.9 {}, max {}",
                    latency.mean_ns,
                    latency.p50_ns,
                    latency.p90_ns,
                    latency.p99_ns,
                    latency.p999_ns,
                    latency.max_ns
                ),
            ),
            line(
                "walks",
                format!(
                    "{}, {} memory accesses",
                    figures.walks, figures.walk_accesses
                ),
            ),
            line("prefetches", figures.prefetch.sent.to_string()),
            line("invalidations", figures.invalidations.to_string()),
            line("fairness", format!("{:.4}", figures.fairness)),
        ]);
        if let Some(faults) = &figures.faults {
            text.push('\n');
            text += &page_faults(faults);
        }
        text.push('\n');
        text += &caches(figures);
        if !figures.devices.is_empty() {
            text.push('\n');
            text += &devices(figures);
        }
        if !figures.tenants.is_empty() {
            text.push('\n');
            text += &tenants(figures);
        }
        text
    }
}

fn page_faults(faults: &FaultOutcome) -> String {
    let line = |name: &str, value: String| [name.to_owned(), value];
    let times = |name: &str, of: &LatencySummary| {
        line(
            name,
            format!(
                "mean {:.0} ns, p50 {}, p99 {}, p99.9 {}, max {}",
                of.mean_ns, of.p50_ns, of.p99_ns, of.p999_ns, of.max_ns
            ),
        )
    };
    table(&[
        line(
            "page requests",
            format!(
                "{}, {:.0} a second, for {} requests that waited and {} behind them",
                faults.page_requests,
                faults.page_requests_per_second,
                faults.waits,
                faults.held_requests
            ),
        ),
        line(
            "pages",
            format!(
                "{} in, {} out, {:.2} % present in the mean",
                faults.page_ins,
                faults.page_outs,
                faults.resident_share * 100.0
            ),
        ),
        times("time of a page request", &faults.service),
        times("requests of faulting tenants", &faults.faulting),
        times("requests of their neighbours", &faults.neighbours),
    ])
}

fn gbps(gbps: f64, link_share: f64) -> String {
    format!("{gbps:.2} Gb/s, {:.1} % of the link", link_share * 100.0)
}

fn caches(figures: &Outcome) -> String {
    let all = &figures.caches;
    let mut rows = vec![
        [
            "CACHE",
            "LOOKUPS",
            "HITS",
            "RATE",
            "EVICTIONS",
            "INVALIDATED",
        ]
        .map(String::from),
    ];
    let named: [(&str, CacheCounts); 10] = [
        ("context", all.context_cache),
        ("devtlb", all.devtlb),
        ("prefetch buffer", all.prefetch_buffer),
        ("iotlb", all.iotlb),
        ("l1", all.l1),
        ("l2", all.l2),
        ("l3", all.l3),
        ("l4", all.l4),
        ("nested tlb", all.nested_tlb),
        ("pasid cache", all.pasid_cache),
    ];
    for (name, counts) in named.into_iter().filter(|(_, counts)| counts.lookups > 0) {
        rows.push([
            name.to_owned(),
            counts.lookups.to_string(),
            counts.hits.to_string(),
            format!("{:.2} %", counts.hit_rate() * 100.0),
            counts.evictions.to_string(),
            counts.invalidated.to_string(),
        ]);
    }
    table(&rows)
}

fn devices(figures: &Outcome) -> String {
    let mut rows = vec![
        [
            "DEVICE",
            "TENANTS",
            "PACKETS",
            "GB/S",
            "DROPPED SLOTS",
            "IDLE SLOTS",
        ]
        .map(String::from),
    ];
    rows.extend(figures.devices.iter().enumerate().map(|(number, device)| {
        [
            number.to_string(),
            device.tenants.to_string(),
            device.packets.to_string(),
            format!("{:.3}", device.gbps),
            device.dropped_slots.to_string(),
            device.idle_slots.to_string(),
        ]
    }));
    table(&rows)
}

fn tenants(figures: &Outcome) -> String {
    let mut rows = vec![
        [
            "SOURCE",
            "PACKETS",
            "GB/S",
            "DEVTLB HITS",
            "PREFETCH HITS",
            "MEAN NS",
        ]
        .map(String::from),
    ];
    rows.extend(figures.tenants.iter().map(|tenant| {
        [
            tenant.source.to_string(),
            tenant.packets.to_string(),
            format!("{:.3}", tenant.gbps),
            tenant.devtlb_hits.to_string(),
            tenant.prefetch_hits.to_string(),
            format!("{:.0}", tenant.mean_latency_ns),
        ]
    }));
    table(&rows)
}

/// A finished sweep.
#[derive(Debug, Serialize)]
pub struct SweepReport {
    /// Summary of the sweep; the rows are in the file.
    #[serde(flatten)]
    summary: SweepSummary,
    #[serde(skip)]
    labels: Vec<String>,
    #[serde(skip)]
    sweep: Vec<[String; 4]>,
}

impl SweepReport {
    /// The report of a sweep of `study`.
    #[must_use]
    pub fn of(study: &Study, sweep: Sweep) -> Self {
        let figure = |figures: &serde_json::Map<String, Value>, name: &str| {
            figures.get(name).and_then(Value::as_f64).unwrap_or(0.0)
        };
        let rows = sweep.rows.iter().take(POINTS_SHOWN).map(|row| {
            let of = |name| figure(&row.run.figures, name);
            let lookups = of("caches_devtlb_lookups").max(1.0);
            [
                format!("{:.2}", of("gbps")),
                format!("{:.1} %", of("link_share") * 100.0),
                format!("{:.1} %", of("caches_devtlb_hits") / lookups * 100.0),
                format!("{:.0}", of("latency_p99_ns")),
            ]
        });
        Self {
            sweep: rows.collect(),
            labels: study.labels(),
            summary: sweep.summary,
        }
    }
}

impl Text for SweepReport {
    fn text(&self) -> String {
        let mut rows = vec![["POINT", "GB/S", "LINK", "DEVTLB", "P99 NS", ""].map(String::from)];
        for (number, (row, label)) in self.sweep.iter().zip(&self.labels).enumerate() {
            let [gbps, link, devtlb, p99] = row.clone();
            rows.push([number.to_string(), gbps, link, devtlb, p99, label.clone()]);
        }
        let mut text = table(&rows);
        let summary = &self.summary;
        let out = summary.out.as_deref().unwrap_or(Path::new("not written"));
        if summary.points > self.sweep.len() {
            text += &format!("… and {} more\n", summary.points - self.sweep.len());
        }
        text += &format!(
            "{}: {} points, {} run now in {:.1} s on {} threads, {} kept{}\n",
            out.display(),
            summary.points,
            summary.run,
            summary.elapsed_seconds,
            summary.jobs,
            summary.kept,
            match summary.skipped {
                0 => String::new(),
                skipped => format!(", {skipped} impossible ones skipped"),
            }
        );
        text
    }
}

/// What a comparison with the authors' program gave, for people.
pub(super) fn verify_text(report: &VerifyReport) -> String {
    let figures = &report.figures;
    let percent = |error: f64| format!("{:.4} %", error * 100.0);
    let count = |count: usize| count.to_string();
    let mut text = table(&[
        ["ROWS", "COMPARED", "TO THE NS", "WORST"].map(String::from),
        [
            "lru".into(),
            count(figures.lru_rows),
            count(figures.lru_exact),
            percent(figures.lru_error_max),
        ],
        [
            "oracle".into(),
            count(figures.oracle_rows),
            count(figures.oracle_exact),
            percent(figures.oracle_error_max),
        ],
        [
            "lfu".into(),
            count(figures.lfu_rows),
            count(figures.lfu_exact),
            percent(figures.lfu_error_max),
        ],
    ]);
    for row in &report.worst {
        text += &format!(
            "row {} ({}): {} ns, here {} to {}: off by {}\n",
            row.row,
            row.config,
            row.reference_ns,
            row.least_ns,
            row.most_ns,
            percent(row.error)
        );
    }
    for trace in &report.missing_traces {
        text += &format!(
            "not there, though its parameters are: {}\n",
            trace.display()
        );
    }
    text += &format!(
        "{} rows have no trace here; {}\n",
        figures.rows_without_trace,
        match (figures.rows, report.agrees) {
            (0, _) => "nothing was compared",
            (_, true) => "all others agree",
            (_, false) => "the others do not all agree",
        }
    );
    text
}
