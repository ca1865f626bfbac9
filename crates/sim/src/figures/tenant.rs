// SPDX-License-Identifier: Apache-2.0
//! Figures 8a and 8b and table III: what a single tenant asks for, and how long traces are (IV-D, V-A).
//!
//! They are about traces and need no run of the model. The tenants are synthetic, made by the numbers of the
//! same section, so the figures show that they are what they should be; what a recorded log has is shown by
//! `trace info`.

use std::collections::BTreeMap;
use std::path::Path;

use pagetide_access_log::TraceError;
use pagetide_trace::{
    Event, EventKind, EventSource, HyperSpec, HyperTrace, Lengths, TenantShape, Workload,
};
use serde_json::{Value, json};

use super::{Beside, Computed, Curve, Form, Panel, Places, Shares, write_rows};
use crate::study::StudyError;

/// Their names.
pub(super) const NAMES: [&str; 3] = ["8a", "8b", "table-3"];

/// Packets of the single tenant: a third of the paper's 4.6 million requests.
const PACKETS: u64 = 1_533_333;
/// Data pages of figure 8b are shown over so many packets: two periods of 32 pages.
const SHOWN_PACKETS: u64 = 96_000;
/// Every so many packets has a dot.
const PACKETS_PER_DOT: u64 = 250;
/// Tenants of table III.
const TENANTS: u32 = 1024;
/// Where data pages are.
const DATA: std::ops::Range<u64> = 0xbbe0_0000..0xc000_0000;
/// Where pages of the driver's start begin.
const STARTS: u64 = 0xf000_0000;

/// Computes one of them and writes its data to `out`.
pub(super) fn compute(name: &str, out: &Path) -> Result<Computed, StudyError> {
    match name {
        "8a" => frequencies(out),
        "8b" => in_order(out),
        _ => lengths(out),
    }
}

/// The single tenant of IV-D: *mediastream*, from its start. 8b takes the section's sentence literally (one page
/// at a time), which only the workload *seq* does.
fn tenant(workload: Workload, packets: u64) -> HyperSpec {
    let mut spec = HyperSpec::synthetic(TenantShape::of(workload), 1);
    spec.packets = Some(packets);
    spec
}

/// Calls `told` with every event.
fn each(spec: &HyperSpec, mut told: impl FnMut(&Event)) -> Result<(), TraceError> {
    let mut trace = HyperTrace::synthetic(spec)?;
    let mut batch = Vec::new();
    while trace.next_batch(&mut batch)? > 0 {
        batch.drain(..).for_each(|event| told(&event));
    }
    Ok(())
}

fn cell(name: &str, value: Value) -> (String, Value) {
    (name.to_owned(), value)
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts of a trace, for a picture"
)]
const fn number(count: u64) -> f64 {
    count as f64
}

fn frequencies(out: &Path) -> Result<Computed, StudyError> {
    let mut counts: BTreeMap<(u64, u64), u64> = BTreeMap::new();
    each(&tenant(Workload::Mediastream, PACKETS), |event| {
        if event.kind == EventKind::Translate
            && let Some(size) = event.page_size
        {
            let page = event.iova.0 & !(size.bytes() - 1);
            *counts.entry((page, size.bytes())).or_default() += 1;
        }
    })?;
    let rows: Vec<Vec<(String, Value)>> = counts
        .iter()
        .map(|((page, bytes), count)| {
            vec![
                cell("iova", json!(page)),
                cell("page_bytes", json!(bytes)),
                cell("requests", json!(count)),
            ]
        })
        .collect();
    let file = "figure-8a.parquet".to_owned();
    write_rows(&out.join(&file), &rows, "one mediastream tenant")?;
    let shown = counts
        .iter()
        .filter(|((page, _), _)| *page < DATA.end)
        .map(|((page, _), count)| (format!("{page:#x}"), number(*count) / 1e3));
    let (places, heights): (Vec<String>, Vec<f64>) = shown.unzip();
    Ok(Computed {
        id: "8a",
        title: "Requests to each page of a tenant",
        section: "IV-D",
        about: "A synthetic mediastream tenant, made after the same section: ring page and data pages. The third \
                group, and the mailbox, which the paper does not name, are in the data file",
        panels: vec![Panel {
            reading: String::new(),
            name: String::new(),
            x_name: "page",
            y_name: "thousands of requests",
            shares: Shares::No,
            places: Places::Named(places),
            form: Form::Bars,
            curves: vec![Curve {
                name: "requests".to_owned(),
                points: (0_u32..).map(f64::from).zip(heights).collect(),
            }],
        }],
        beside: groups(&counts),
        files: vec![file],
    })
}

/// The three groups of pages in `counts`, by page and size.
fn groups(counts: &BTreeMap<(u64, u64), u64>) -> Vec<Beside> {
    let of = |which: &dyn Fn(u64) -> bool| -> Vec<u64> {
        let own = counts.iter().filter(|((page, _), _)| which(*page));
        own.map(|(_, count)| *count).collect()
    };
    let shape = TenantShape::default();
    let data = of(&|page| DATA.contains(&page));
    let ring = of(&|page| page == shape.ring.iova);
    let starts = of(&|page| page >= STARTS && page != shape.mailbox.iova);
    let mean = number(data.iter().sum()) / number(data.len() as u64).max(1.0);
    vec![
        beside(
            "page frames of the second group",
            "32, of 2 MB",
            data.len().to_string(),
        ),
        beside(
            "page frames of the third group",
            "70, of 4 KB",
            starts.len().to_string(),
        ),
        beside(
            "requests to each of the third group, at most",
            "less than 100",
            starts.iter().max().copied().unwrap_or(0).to_string(),
        ),
        beside(
            "requests to the ring's page over those to a data page",
            "around 30",
            format!("{:.1}", number(ring.iter().sum()) / mean),
        ),
    ]
}

fn beside(what: &'static str, paper: &'static str, ours: String) -> Beside {
    Beside {
        what,
        paper,
        ours: vec![(String::new(), ours)],
    }
}

/// Data page of each packet, by number.
fn pages_in_order(workload: Workload) -> Result<Vec<u64>, TraceError> {
    let mut spec = tenant(workload, SHOWN_PACKETS);
    let mut shape = TenantShape::of(workload);
    shape.init.share = 0.0;
    spec.input = pagetide_trace::Input::Synthetic(shape);
    let mut pages = Vec::new();
    each(&spec, |event| {
        if DATA.contains(&event.iova.0) {
            pages.push(event.iova.0 >> 21);
        }
    })?;
    Ok(pages)
}

fn in_order(out: &Path) -> Result<Computed, StudyError> {
    let mut rows = Vec::new();
    let mut curves = Vec::new();
    let mut stays = Vec::new();
    for workload in [Workload::Mediastream, Workload::Seq] {
        let pages = pages_in_order(workload)?;
        let first = pages.iter().min().copied().unwrap_or(0);
        let dots: Vec<(f64, f64)> = pages
            .iter()
            .zip(0_u64..)
            .filter(|(_, packet)| packet % PACKETS_PER_DOT == 0)
            .map(|(page, packet)| (number(packet), number(page - first)))
            .collect();
        rows.extend(pages.iter().zip(0_u64..).map(|(page, packet)| {
            vec![
                cell("workload", json!(workload.name())),
                cell("packet", json!(packet)),
                cell("data_page", json!(page - first)),
            ]
        }));
        let runs = pages.chunk_by(|a, b| a == b);
        let longest = runs.map(<[u64]>::len).max().unwrap_or(0);
        let of_each = number(pages.len() as u64) / 64.0;
        stays.push((
            workload.name().to_owned(),
            format!("{longest} in a row at most, {of_each:.0} a page and period"),
        ));
        curves.push(Curve {
            name: workload.name().to_owned(),
            points: dots,
        });
    }
    let file = "figure-8b.parquet".to_owned();
    write_rows(&out.join(&file), &rows, "one tenant of each workload")?;
    Ok(Computed {
        id: "8b",
        title: "Data pages of a tenant in the order of use",
        section: "IV-D",
        about: "Two synthetic tenants. The section says that a page is used 1,500 times sequentially, and V-C that \
                32 pages are active at a time. The workload seq does the first, mediastream both in a mean: a window of \
                active pages moves on by one every 1,500 packets",
        panels: vec![Panel {
            reading: String::new(),
            name: String::new(),
            x_name: "packet",
            y_name: "data page",
            shares: Shares::No,
            places: Places::Numbers(number(SHOWN_PACKETS)),
            form: Form::Dots,
            curves,
        }],
        beside: vec![Beside {
            what: "uses of a page until it is left",
            paper: "around 1500",
            ours: stays,
        }],
        files: vec![file],
    })
}

/// Requests of traces of 1,024 tenants whose lengths are those of table III.
fn lengths(out: &Path) -> Result<Computed, StudyError> {
    let mut rows = Vec::new();
    let mut table = Vec::new();
    for (workload, what, paper) in [
        (Workload::Iperf3, "iperf3", "68,079, 108,510, 69,712,894"),
        (
            Workload::Mediastream,
            "mediastream",
            "5,520, 73,657, 5,652,477",
        ),
        (
            Workload::Websearch,
            "websearch",
            "43,362, 108,513, 44,402,679",
        ),
    ] {
        let mut spec = HyperSpec::synthetic(TenantShape::of(workload), TENANTS);
        spec.lengths = Lengths::of_paper(workload);
        let mut by_source: BTreeMap<u32, u64> = BTreeMap::new();
        each(&spec, |event| {
            *by_source.entry(event.source.0).or_default() += 1;
        })?;
        let total: u64 = by_source.values().sum();
        let most = by_source.values().max().copied().unwrap_or(0);
        let [least_length, most_length] = spec.lengths.map_or([0, 0], |lengths| {
            [3 * lengths.min_packets, 3 * lengths.max_packets]
        });
        rows.push(vec![
            cell("workload", json!(workload.name())),
            cell("tenants", json!(TENANTS)),
            cell("shortest_tenant_requests", json!(least_length)),
            cell("longest_tenant_requests", json!(most_length)),
            cell("most_of_a_tenant_in_trace_requests", json!(most)),
            cell("total_requests", json!(total)),
        ]);
        let ours = format!("{least_length}, {most_length}, {total}");
        table.push(beside(what, paper, ours));
    }
    let file = "table-3.parquet".to_owned();
    write_rows(&out.join(&file), &rows, "1,024 synthetic tenants, RR1")?;
    Ok(Computed {
        id: "table-3",
        title: "Requests of the shortest tenant, of the longest, and of a trace of 1,024",
        section: "V-A",
        about: "Lengths of synthetic tenants are drawn between the paper's least and greatest; a trace ends when the \
                shortest tenant has no packet left, so its total is about 1,024 times the least. Requests come in packets \
                of three, so a length is the paper's rounded down to that",
        panels: Vec::new(),
        beside: table,
        files: vec![file],
    })
}
