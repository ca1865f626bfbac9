// SPDX-License-Identifier: Apache-2.0
//! Reports as text for people.
//!
//! A figure is formatted by the unit at the end of its name, so a new figure needs no change here.

use serde::Serialize;
use serde_json::Value;

use crate::size::readable;

/// A report that can be printed as text.
pub trait Text {
    /// Lines, each with its newline.
    fn text(&self) -> String;
}

/// A report as one indented JSON object with a final newline.
pub fn json<T: Serialize>(report: &T) -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(report).map(|text| text + "\n")
}

/// The JSON string of a plain enum.
///
/// # Panics
/// If `value` is anything else.
pub fn word<T: Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(Value::String(word)) => word,
        other => unreachable!("a state is one word, not {other:?}"),
    }
}

/// Every field of a flat report on its own line, named and aligned.
pub fn fields<T: Serialize>(report: &T) -> String {
    let Ok(Value::Object(object)) = serde_json::to_value(report) else {
        unreachable!("a report is an object");
    };
    let rows: Vec<[String; 2]> = object
        .iter()
        .flat_map(|(name, value)| {
            let (label, unit) = unit_of(name);
            lines(value, unit)
                .into_iter()
                .enumerate()
                .map(move |(i, line)| {
                    let label = if i == 0 {
                        label.replace('_', " ")
                    } else {
                        String::new()
                    };
                    [label, line]
                })
        })
        .collect();
    table(&rows)
}

/// The unit at the end of a field's name, and the name without it.
fn unit_of(name: &str) -> (&str, &str) {
    for unit in ["_bytes", "_us", "_seconds", "_share"] {
        if let Some(label) = name.strip_suffix(unit) {
            return (label, unit);
        }
    }
    (name, "")
}

/// A value as lines; none for an absent value.
fn lines(value: &Value, unit: &str) -> Vec<String> {
    match value {
        Value::Null => vec![],
        Value::Bool(yes) => vec![if *yes { "yes" } else { "no" }.into()],
        Value::String(text) => vec![text.clone()],
        Value::Number(number) => vec![number_text(number, unit)],
        Value::Array(values) => values.iter().flat_map(|value| lines(value, unit)).collect(),
        Value::Object(object) => {
            let parts: Vec<String> = object
                .iter()
                .map(|(name, part)| {
                    let unit = if unit.is_empty() {
                        unit_of(name).1
                    } else {
                        unit
                    };
                    let name = unit_of(name).0.replace('_', " ");
                    format!("{name} {}", lines(part, unit).join(" "))
                })
                .collect();
            vec![parts.join(", ")]
        }
    }
}

fn number_text(number: &serde_json::Number, unit: &str) -> String {
    let real = number.as_f64().unwrap_or(f64::NAN);
    match (number.as_u64(), unit) {
        (Some(bytes), "_bytes") => readable(bytes),
        (_, "_us") => format!("{real:.1} us"),
        (_, "_seconds") => format!("{real:.2} s"),
        (_, "_share") => format!("{:.1} %", real * 100.0),
        (Some(whole), _) => whole.to_string(),
        (None, _) => format!("{real:.3}"),
    }
}

/// Columns wide enough for their widest cell, two spaces apart.
#[must_use]
pub fn table<const N: usize>(rows: &[[String; N]]) -> String {
    let widths: [usize; N] = std::array::from_fn(|column| {
        rows.iter()
            .map(|row| row[column].chars().count())
            .max()
            .unwrap_or(0)
    });
    let mut text = String::new();
    for row in rows {
        let line: Vec<String> = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        text += line.join("  ").trim_end();
        text.push('\n');
    }
    text
}
