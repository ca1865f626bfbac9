// SPDX-License-Identifier: Apache-2.0
//! Rows of results by the names that figures give them.

use std::collections::HashMap;

use serde_json::Value;

/// One row, by column.
#[derive(Clone, Debug)]
pub(super) struct Row(HashMap<String, Value>);

/// A name for what a row is about: `RR1`, `64 entries`.
pub(super) type Name = fn(&Row) -> String;

impl Row {
    pub(super) fn of(cells: Vec<(String, Value)>) -> Self {
        Self(cells.into_iter().collect())
    }

    /// A column as text; empty if the row has no such value.
    pub(super) fn text(&self, column: &str) -> String {
        match self.0.get(column) {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
        }
    }

    /// A column as a number; 0 if the row has no such value.
    pub(super) fn number(&self, column: &str) -> f64 {
        self.0.get(column).and_then(Value::as_f64).unwrap_or(0.0)
    }
}

pub(super) fn tenants(row: &Row) -> String {
    row.text("trace_tenants")
}

pub(super) fn workload(row: &Row) -> String {
    row.text("trace_input_synthetic_workload")
}

/// RR1, RR4 or RAND1, as the paper names orders.
pub(super) fn order(row: &Row) -> String {
    let name = row.text("trace_order").to_uppercase();
    format!("{name}{}", row.text("trace_burst_packets"))
}

pub(super) fn design(row: &Row) -> String {
    match row.text("preset").as_str() {
        "base" => "Base",
        _ => "HyperTRIO",
    }
    .to_owned()
}

pub(super) fn variant(row: &Row) -> String {
    row.text("variant")
}

pub(super) fn entries(row: &Row) -> String {
    format!("{} entries", row.text("config_devtlb_entries"))
}

pub(super) fn replacement(row: &Row) -> String {
    match row.text("config_devtlb_replacement").as_str() {
        "oracle" => "oracle".to_owned(),
        other => other.to_uppercase(),
    }
}

pub(super) fn shape(row: &Row) -> String {
    match row.number("config_devtlb_ways") < row.number("config_devtlb_entries") {
        true => format!("{} ways", row.text("config_devtlb_ways")),
        false => "fully associative".to_owned(),
    }
}

pub(super) fn ptb(row: &Row) -> String {
    format!("PTB of {}", row.text("config_ptb_entries"))
}

pub(super) fn many_tenants(row: &Row) -> String {
    format!("{} tenants", tenants(row))
}

pub(super) fn history(row: &Row) -> String {
    row.text("config_prefetch_history_length")
}

pub(super) fn buffer(row: &Row) -> String {
    row.text("config_prefetch_buffer_entries")
}

pub(super) fn pages(row: &Row) -> String {
    row.text("config_prefetch_pages_per_tenant")
}

pub(super) fn partitions(row: &Row) -> String {
    format!(
        "{} of {} ways",
        row.text("config_devtlb_partitions"),
        row.text("config_devtlb_ways")
    )
}

pub(super) fn sources(row: &Row) -> String {
    format!(
        "{} a partition",
        row.text("config_devtlb_sources_per_partition")
    )
}

/// The reading of the paper's three questions that a row is computed under.
pub(super) fn reading(row: &Row) -> [String; 3] {
    [
        match row.text("config_walk_cost").as_str() {
            "short" => "short walk",
            _ => "24 accesses a walk",
        }
        .to_owned(),
        format!("PTB of {}", row.text("config_ptb_unit")),
        format!("third page {}", row.text("trace_input_synthetic_third")),
    ]
}
