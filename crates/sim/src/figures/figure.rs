// SPDX-License-Identifier: Apache-2.0
//! What a figure is: a study as data, its axes, and the numbers that the paper's text has; and what many figures
//! have in common.

use std::fmt::Write as _;

use super::paper::{Quantity, Stated, Where};
use super::rows::{Name, design, order, tenants, workload};

/// The readings that matter to a figure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Readings {
    /// Cost of a walk, unit of the PTB, third page.
    All,
    /// Cost and third page: with a PTB of one entry a packet is in flight either way.
    OfOneEntry,
}

/// The traces of a figure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traces {
    /// Order and packets in a row.
    pub(super) orders: &'static [(&'static str, u32)],
    pub(super) tenants: &'static [u32],
    pub(super) workloads: &'static [&'static str],
    /// Further settings of each trace.
    pub(super) settings: &'static str,
}

/// One figure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figure {
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    pub(super) section: &'static str,
    /// What is computed, and where it differs from the paper's.
    pub(super) about: &'static str,
    /// Settings of the study.
    pub(super) settings: &'static str,
    /// Its variants.
    pub(super) variants: &'static str,
    pub(super) traces: Traces,
    pub(super) readings: Readings,
    /// What has a panel of its own.
    pub(super) panel: Option<Name>,
    /// What has a line of its own.
    pub(super) series: &'static [Name],
    pub(super) x: Name,
    pub(super) x_name: &'static str,
    pub(super) y: Quantity,
    pub(super) y_name: &'static str,
    pub(super) paper: &'static [Stated],
}

impl Figure {
    /// Its study as a file.
    pub(super) fn toml(&self, packets: u64) -> String {
        let mut text = format!(
            "# {}, after HyperTRIO {}, figure {}.\n# pagetide sim sweep FILE --out RESULTS.parquet\n",
            self.title, self.section, self.id
        );
        text += "walk.cost = [\"nested\", \"short\"]\n";
        if self.readings == Readings::All {
            text += "ptb.unit = [\"requests\", \"packets\"]\n";
        }
        for part in [self.settings, self.variants] {
            if !part.is_empty() {
                text += part;
                text.push('\n');
            }
        }
        let Traces {
            orders,
            tenants,
            workloads,
            settings,
        } = self.traces;
        for (order, burst) in orders {
            // Formatting into a string cannot fail.
            let written = write!(
                text,
                "\n[[trace]]\ntenants = {tenants:?}\npackets = {packets}\norder = \"{order}\"\n\
                 burst_packets = {burst}\ninput.synthetic.workload = {workloads:?}\n\
                 input.synthetic.third = [\"mailbox\", \"ring\"]\n{settings}"
            );
            debug_assert!(written.is_ok());
        }
        text
    }
}

/// The paper's ladder.
pub(super) const TENANTS: &[u32] = &[4, 8, 16, 32, 64, 128, 256, 512, 1024];
pub(super) const WORKLOADS: &[&str] = &["iperf3", "mediastream", "websearch"];
pub(super) const RR1: &[(&str, u32)] = &[("rr", 1)];
pub(super) const ORDERS: &[(&str, u32)] = &[("rr", 1), ("rr", 4), ("rand", 1)];

pub(super) const PAPERS: Traces = Traces {
    orders: RR1,
    tenants: TENANTS,
    workloads: WORKLOADS,
    settings: "",
};
pub(super) const OF_ALL_ORDERS: Traces = Traces {
    orders: ORDERS,
    ..PAPERS
};
pub(super) const OF_SOME_TENANTS: Traces = Traces {
    tenants: &[64, 256, 1024],
    ..PAPERS
};

pub(super) const GBPS: Quantity = Quantity::Of("gbps");
pub(super) const LINK: Quantity = Quantity::Of("link_share");
pub(super) const BUFFER: Quantity = Quantity::Share(
    "caches_prefetch_buffer_hits",
    "caches_prefetch_buffer_lookups",
);
pub(super) const IOTLB_MISSES: Quantity =
    Quantity::Misses("caches_iotlb_hits", "caches_iotlb_lookups");

pub(super) const BEYOND_32: Where = (tenants, &["64", "128", "256", "512", "1024"]);
pub(super) const AT_1024: Where = (tenants, &["1024"]);
pub(super) const IPERF3: Where = (workload, &["iperf3"]);
pub(super) const WEBSEARCH: Where = (workload, &["websearch"]);
pub(super) const HYPERTRIO: Where = (design, &["HyperTRIO"]);
pub(super) const BASE: Where = (design, &["Base"]);
pub(super) const IN_RR1: Where = (order, &["RR1"]);
pub(super) const IN_RR: Where = (order, &["RR1", "RR4"]);

/// What most figures have in common.
pub(super) const GROUND: Figure = Figure {
    id: "",
    title: "",
    section: "V",
    about: "",
    settings: "preset = \"base\"",
    variants: "",
    traces: PAPERS,
    readings: Readings::OfOneEntry,
    panel: None,
    series: &[workload],
    x: tenants,
    x_name: "tenants",
    y: GBPS,
    y_name: "Gb/s",
    paper: &[],
};
