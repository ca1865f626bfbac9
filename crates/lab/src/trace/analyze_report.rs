// SPDX-License-Identifier: Apache-2.0
//! The report of `pagetide trace analyze`.

use std::path::PathBuf;

use pagetide_access_log::Service;
use pagetide_sim::replay::{OriginKind, VmOrigin};
use pagetide_trace::{
    AccessAnalysis, BlockAbout, ByteOrder, DeviceAnalysis, Locality, ServiceAnalysis,
};
use serde::Serialize;

use pagetide_report::size::readable;
use pagetide_report::text::{Text, table};

/// Number of times at which footprints are printed.
const FOOTPRINT_TIMES: usize = 6;

/// What the addresses of a trace refer to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Addresses {
    /// The VM's memory.
    Memory,
    /// The disk: where the DMA went in memory is not known.
    Disk,
    /// Memory of a modelled guest, since the trace has disk addresses.
    PageCache,
}

/// One VM or one block trace.
#[derive(Debug, Serialize)]
pub struct TraceAnalysis {
    /// The VM, or the file.
    pub name: String,
    /// What its addresses refer to.
    pub addresses: Addresses,
    /// How a block trace was read.
    pub about: Option<BlockAbout>,
    /// The guest modelled for it.
    pub origin: Option<VmOrigin>,
    /// Accesses that the log has lost.
    pub lost_records: u64,
    /// The results.
    #[serde(flatten)]
    pub analysis: AccessAnalysis,
}

/// The report on all traces.
#[derive(Debug, Serialize)]
pub struct AnalyzeReport {
    /// One entry per trace.
    pub traces: Vec<TraceAnalysis>,
    /// The devices of all traces by kind, if there are several traces.
    pub services: Vec<ServiceAnalysis>,
    /// Plots that were drawn.
    pub plots: Vec<PathBuf>,
}

impl AnalyzeReport {
    /// The report on `traces`.
    #[must_use]
    pub fn of(traces: Vec<TraceAnalysis>) -> Self {
        let devices = || traces.iter().flat_map(|trace| &trace.analysis.devices);
        let services = Service::ALL
            .into_iter()
            .map(|service| ServiceAnalysis::of(service, devices()))
            .filter(|service| service.devices > 0 && traces.len() > 1)
            .collect();
        Self {
            traces,
            services,
            plots: Vec::new(),
        }
    }
}

impl Text for AnalyzeReport {
    fn text(&self) -> String {
        let mut text: Vec<String> = self.traces.iter().map(trace_text).collect();
        if !self.services.is_empty() {
            text.push(format!(
                "All {} traces\n\n{}",
                self.traces.len(),
                services_text(&self.services)
            ));
        }
        if !self.plots.is_empty() {
            let lines = self
                .plots
                .iter()
                .map(|plot| format!("{}\n", plot.display()));
            text.push(lines.collect());
        }
        text.join("\n")
    }
}

fn trace_text(trace: &TraceAnalysis) -> String {
    let analysis = &trace.analysis;
    let mut text = format!(
        "{}: {:.0} s, sections of {}, simulated faults after {:.0} s{}\n",
        trace.name,
        analysis.span_seconds,
        readable(analysis.section_bytes),
        analysis.fault_interval_seconds,
        analysis
            .memory_bytes
            .map_or_else(String::new, |bytes| format!(", VM of {}", readable(bytes))),
    );
    text += &source_text(trace);
    if analysis.devices.is_empty() {
        return text + "There is nothing in it.\n";
    }
    text += &format!(
        "\n{}\n{}\n{}",
        devices_text(&analysis.devices),
        services_text(&analysis.services),
        footprint_text(analysis)
    );
    text
}

/// Caveats about the source of the accesses.
fn source_text(trace: &TraceAnalysis) -> String {
    let mut text = match trace.addresses {
        Addresses::Memory => String::new(),
        Addresses::Disk => "Addresses are disk addresses: which memory the DMA went to, the trace \
                            does not tell (see --page-cache).\n"
            .to_owned(),
        Addresses::PageCache => "DMA is that of a modelled guest with a page cache; the trace has \
                                 disk addresses.\n"
            .to_owned(),
    };
    if let Some(OriginKind::PageCache { cache_bytes, .. }) =
        trace.origin.as_ref().map(|vm| &vm.kind)
    {
        text += &format!("Its cache has {}.\n", readable(*cache_bytes));
    }
    if let Some(about) = trace.about {
        text += &format!(
            "Read as {}, blocks of {} bytes",
            about.format, about.block_bytes
        );
        text += match about.byte_order {
            Some(ByteOrder::BigEnd) => ", big end first",
            Some(ByteOrder::LittleEnd) => ", little end first",
            None => "",
        };
        if let Some(interval_ns) = about.interval_ns {
            let seconds = std::time::Duration::from_nanos(interval_ns).as_secs_f64();
            text += &format!(", its requests taken to be {seconds} s apart");
        }
        text += ".\n";
    }
    if trace.lost_records > 0 {
        text += &format!(
            "{} accesses were lost when it was recorded.\n",
            trace.lost_records
        );
    }
    text
}

fn devices_text(devices: &[DeviceAnalysis]) -> String {
    let mut rows = vec![
        [
            "DEVICE",
            "NAME",
            "SERVICE",
            "ACCESSES",
            "FOOTPRINT",
            "OF VM",
            "BUSIEST MINUTE",
            "FAULTS",
        ]
        .map(String::from),
    ];
    rows.extend(devices.iter().map(|device| {
        [
            device.device.0.to_string(),
            device.name.clone().unwrap_or_else(|| "-".to_owned()),
            device.service.to_string(),
            device.locality.accesses.to_string(),
            readable(device.footprint_bytes),
            share(device.footprint_share),
            readable(device.busiest_minute_bytes),
            device.locality.simulated_faults.to_string(),
        ]
    }));
    table(&rows)
}

/// Devices by kind, with the paper's figures below (VPRI Fig 10 and 11).
fn services_text(services: &[ServiceAnalysis]) -> String {
    let mut rows = vec![
        [
            "SERVICE",
            "DEVICES",
            "OF VM, MEAN",
            "P95",
            "SECTIONS",
            "UNDER 10",
            "OVER 2",
            "FAULTS",
            "UNDER 10",
            "UNDER 50",
        ]
        .map(String::from),
    ];
    for service in services {
        let footprint = service.footprint_share;
        let locality = &service.locality;
        rows.push([
            service.service.to_string(),
            service.devices.to_string(),
            share(footprint.map(|shares| shares.mean)),
            share(footprint.map(|shares| shares.p95)),
            locality.sections.to_string(),
            share(locality.sections_under_10_share),
            share(locality.sections_over_2_share),
            locality.simulated_faults.to_string(),
            share(locality.faults_under_10_share),
            share(locality.faults_under_50_share),
        ]);
    }
    rows.push(
        [
            "VPRI's disk",
            "1",
            "28%",
            "",
            "",
            "87.3%",
            "70.3%",
            "",
            "94.3%",
            "nearly all",
        ]
        .map(String::from),
    );
    rows.push(["VPRI's NIC", "1", "3%", "", "", "", "", "", "", ""].map(String::from));
    let mut text = table(&rows);
    for service in services {
        text += &format!("\n{}", locality_text(service.service, &service.locality));
    }
    text
}

/// Both distributions of a kind.
fn locality_text(service: Service, locality: &Locality) -> String {
    let mut rows = vec![[
        format!("{service}: ACCESSES"),
        "SECTIONS".to_owned(),
        String::new(),
        "FAULTS".to_owned(),
        String::new(),
    ]];
    for row in &locality.by_access_count {
        if row.sections > 0 {
            rows.push([
                range(row.from_accesses, row.to_accesses),
                row.sections.to_string(),
                share(row.sections_share),
                row.faults.to_string(),
                share(row.faults_share),
            ]);
        }
    }
    let mut reuse = vec![[
        format!("{service}: TOUCHED AGAIN AFTER"),
        "TIMES".to_owned(),
        String::new(),
    ]];
    for row in &locality.reuse_intervals {
        if row.intervals > 0 {
            let length = match row.to_seconds {
                Some(to) => format!("at most {to} s"),
                None => format!("more than {} s", row.from_seconds),
            };
            reuse.push([
                length,
                row.intervals.to_string(),
                share(row.intervals_share),
            ]);
        }
    }
    format!("{}\n{}", table(&rows), table(&reuse))
}

/// The footprints over time, at selected times. All devices have the same points.
fn footprint_text(analysis: &AccessAnalysis) -> String {
    let points = analysis
        .devices
        .first()
        .map_or(0, |device| device.footprint_points_sections.len());
    // The end of each sixth; in a short trace some coincide and are printed once.
    let mut ends: Vec<usize> = (1..=FOOTPRINT_TIMES)
        .map(|sixth| (points * sixth).div_ceil(FOOTPRINT_TIMES))
        .collect();
    ends.dedup();
    let cells = |first: String, cell: &dyn Fn(usize) -> String| -> [String; 1 + FOOTPRINT_TIMES] {
        let mut row: [String; 1 + FOOTPRINT_TIMES] = Default::default();
        row[0] = first;
        for (place, end) in row.iter_mut().skip(1).zip(&ends) {
            *place = cell(*end);
        }
        row
    };
    let step = analysis
        .devices
        .first()
        .map_or(60, |device| device.footprint_step_seconds);
    let minutes = |end: usize| {
        let seconds = u64::try_from(end).unwrap_or(u64::MAX).saturating_mul(step);
        format!("{} MIN", seconds / 60)
    };
    let mut rows = vec![cells("TOUCHED AFTER".to_owned(), &minutes)];
    for device in &analysis.devices {
        let touched = |end: usize| {
            let sections = end
                .checked_sub(1)
                .and_then(|last| device.footprint_points_sections.get(last))
                .copied()
                .unwrap_or(0);
            let bytes = sections.saturating_mul(analysis.section_bytes);
            of_memory(bytes, analysis.memory_bytes)
                .map_or_else(|| readable(bytes), |part| share(Some(part)))
        };
        rows.push(cells(format!("device {}", device.device.0), &touched));
    }
    table(&rows)
}

/// Share of the VM's memory.
#[expect(
    clippy::cast_precision_loss,
    reason = "shares are shown to a tenth of a percent"
)]
pub fn of_memory(bytes: u64, memory_bytes: Option<u64>) -> Option<f64> {
    memory_bytes
        .filter(|memory| *memory > 0)
        .map(|memory| bytes as f64 / memory as f64)
}

/// Row name for a range of access counts.
pub fn range(from: u64, to: Option<u64>) -> String {
    match to {
        Some(to) if to == from => from.to_string(),
        Some(to) => format!("{from}-{to}"),
        None => format!("{from} and more"),
    }
}

fn share(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.1}%", share * 100.0))
}
