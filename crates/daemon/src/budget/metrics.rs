// SPDX-License-Identifier: Apache-2.0
//! Figures of the host on the metrics page. Those of each VM are with its other figures.

use super::{HostReport, WaterState};
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use std::fmt;

/// A figure of the host: a gauge without labels.
struct HostFigure {
    name: &'static str,
    help: &'static str,
    read: fn(&HostReport) -> Option<u64>,
}

const FIGURES: [HostFigure; 9] = [
    HostFigure {
        name: "pagetide_host_ram_bytes",
        help: "RAM of the host.",
        read: |host| Some(host.ram_bytes),
    },
    HostFigure {
        name: "pagetide_host_used_bytes",
        help: "What all VMs take now: resident memory, stored content and metadata.",
        read: |host| Some(host.used_bytes),
    },
    HostFigure {
        name: "pagetide_host_budget_bytes",
        help: "The most that all VMs may take; absent without a budget.",
        read: |host| host.budget_bytes,
    },
    HostFigure {
        name: "pagetide_host_free_bytes",
        help: "What is free of the budget.",
        read: |host| host.free_bytes,
    },
    HostFigure {
        name: "pagetide_host_over_bytes",
        help: "What is used beyond the budget.",
        read: |host| host.over_bytes,
    },
    HostFigure {
        name: "pagetide_host_min_bytes",
        help: "Free memory of the budget below which a fill first evicts of its own VM.",
        read: |host| host.min_bytes,
    },
    HostFigure {
        name: "pagetide_host_low_bytes",
        help: "Free memory of the budget below which memory is reclaimed.",
        read: |host| host.low_bytes,
    },
    HostFigure {
        name: "pagetide_host_high_bytes",
        help: "Free memory of the budget from which on there is enough.",
        read: |host| host.high_bytes,
    },
    HostFigure {
        name: "pagetide_host_water",
        help: "Free memory against the watermarks: 0 below min, 1 below low, 2 between low and high, 3 above high.",
        read: |host| host.water.map(level),
    },
];

fn level(water: WaterState) -> u64 {
    match water {
        WaterState::BelowMin => 0,
        WaterState::BelowLow => 1,
        WaterState::Between => 2,
        WaterState::AboveHigh => 3,
    }
}

/// Writes the figures that there are.
pub(crate) fn encode(encoder: &mut DescriptorEncoder, host: &HostReport) -> fmt::Result {
    for figure in &FIGURES {
        let Some(number) = (figure.read)(host) else {
            continue;
        };
        let help = figure.help.trim_end_matches('.');
        let mut metric = encoder.encode_descriptor(figure.name, help, None, MetricType::Gauge)?;
        metric.encode_gauge(&number)?;
    }
    Ok(())
}

/// Adds the figures to the page of documentation.
pub(crate) fn document(page: &mut String) {
    for HostFigure { name, help, .. } in &FIGURES {
        *page += &format!("| `{name}` | gauge | | {help} |\n");
    }
}
