// SPDX-License-Identifier: Apache-2.0
//! Nested values as flat columns: of the parameters of a point, and of the results of its run.

use std::collections::{HashMap, HashSet};

use serde::Serialize;
use serde_json::{Map, Value};

/// Every leaf of `value` under its name: parts joined by `joint`. Lists are leaves.
pub(super) fn flatten(prefix: &str, joint: char, value: &Value, into: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(table) => {
            for (key, inner) in table {
                let name = match prefix {
                    "" => key.clone(),
                    _ => format!("{prefix}{joint}{key}"),
                };
                flatten(&name, joint, inner, into);
            }
        }
        leaf => into.push((prefix.to_owned(), leaf.clone())),
    }
}

/// A serialisable value as JSON. Our own types always succeed.
pub(super) fn json<T: Serialize>(value: &T) -> Value {
    match serde_json::to_value(value) {
        Ok(value) => value,
        Err(error) => unreachable!("plain data is always JSON: {error}"),
    }
}

/// Names that do not have the same value in each of `rows`.
pub(super) fn varying(rows: &[Vec<(String, Value)>]) -> HashSet<&str> {
    let mut seen: HashMap<&str, (&Value, usize)> = HashMap::new();
    let mut varying = HashSet::new();
    for (name, value) in rows.iter().flatten() {
        let (first, times) = seen.entry(name).or_insert((value, 0));
        *times += 1;
        if *first != value {
            varying.insert(name.as_str());
        }
    }
    for (name, (_, times)) in seen {
        if times != rows.len() {
            varying.insert(name);
        }
    }
    varying
}

/// A value as text without quotes.
pub(super) fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The figures of a run as one flat table.
pub(super) fn figures(outcome: &crate::Outcome) -> Map<String, Value> {
    let mut value = json(outcome);
    if let Value::Object(table) = &mut value {
        table.remove("tenants");
        table.remove("devices");
    }
    let mut row = Vec::new();
    flatten("", '_', &value, &mut row);
    let mut table: Map<String, Value> = row.into_iter().collect();
    let slowest = outcome.tenants.iter().map(|t| t.gbps).reduce(f64::min);
    let fastest = outcome.tenants.iter().map(|t| t.gbps).reduce(f64::max);
    table.insert("tenants".to_owned(), outcome.tenants.len().into());
    table.insert(
        "tenant_gbps_min".to_owned(),
        slowest.unwrap_or_default().into(),
    );
    table.insert(
        "tenant_gbps_max".to_owned(),
        fastest.unwrap_or_default().into(),
    );
    table
}
