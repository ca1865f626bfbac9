// SPDX-License-Identifier: Apache-2.0
//! `pagetide-lab reproduce`: the papers' figures and tables, their numbers beside ours.
//!
//! Our numbers are read from the reports that `make bench` leaves in a directory, one JSON object a bench.
//! Nothing is measured here. A line without a report says which command makes it; one that nothing
//! answers says *absent* and why.

pub mod table;

use clap::Args;
use pagetide_report::outcome::{CommandError, print};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    io::ErrorKind,
    path::{Path, PathBuf},
};
use table::{Line, Ours, TABLE};

/// Arguments of `reproduce`.
#[derive(Args, Debug)]
pub struct ReproduceArgs {
    /// Directory of the benches' reports, NAME.json each
    #[arg(long, value_name = "DIR", default_value = "target/bench")]
    pub reports: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// What is known of a field.
#[derive(Clone, PartialEq, Debug)]
enum Found {
    Value(Value),
    /// The bench has not run.
    NotMeasured,
    /// It ran, and its report lacks the field or has null there.
    Missing,
    Absent(&'static str),
}

/// Prints the table.
///
/// # Errors
/// A report that cannot be read.
pub fn execute(args: &ReproduceArgs) -> Result<(), CommandError> {
    let mut reports = BTreeMap::new();
    let mut lines = Vec::new();
    for line in TABLE {
        lines.push((line, find(line, &args.reports, &mut reports)?));
    }
    let text = if args.json {
        as_json(&lines).to_string()
    } else {
        as_text(&lines)
    };
    print(&text)
}

fn find(
    line: &Line,
    dir: &Path,
    reports: &mut BTreeMap<String, Option<Value>>,
) -> Result<Found, CommandError> {
    let (name, path) = match line.ours {
        Ours::Absent(why) => return Ok(Found::Absent(why)),
        Ours::Field(name, path) => (name.to_string(), path),
    };
    if !reports.contains_key(&name) {
        let report = read(&dir.join(format!("{name}.json")))?;
        reports.insert(name.clone(), report);
    }
    let Some(Some(report)) = reports.get(&name) else {
        return Ok(Found::NotMeasured);
    };
    let value = path
        .split('.')
        .try_fold(report, |value, part| value.get(part));
    Ok(match value {
        None | Some(Value::Null) => Found::Missing,
        Some(value) => Found::Value(value.clone()),
    })
}

/// The report there; `None` if there is no file, or an empty one of a bench that did not end.
fn read(path: &Path) -> Result<Option<Value>, CommandError> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        text => text.map_err(|e| CommandError::failed(format!("{}: {e}", path.display())))?,
    };
    if text.trim().is_empty() {
        return Ok(None);
    }
    let report = serde_json::from_str(&text);
    let report = report.map_err(|e| {
        CommandError::failed(format!("{} is no report of a bench: {e}", path.display()))
    })?;
    Ok(Some(report))
}

fn as_json(lines: &[(&Line, Found)]) -> Value {
    let of = |(line, found): &(&Line, Found)| {
        let (state, value) = match found {
            Found::Value(value) => ("measured", value.clone()),
            Found::NotMeasured => ("not measured", Value::Null),
            Found::Missing => ("not in the report", Value::Null),
            Found::Absent(_) => ("absent", Value::Null),
        };
        let mut told = json!({
            "paper": line.paper.name(),
            "item": line.item,
            "what": line.what,
            "theirs": line.theirs,
            "state": state,
            "ours": value,
        });
        match line.ours {
            Ours::Field(name, path) => {
                told["bench"] = name.to_string().into();
                told["field"] = path.into();
            }
            Ours::Absent(why) => told["why"] = why.into(),
        }
        told
    };
    json!({ "lines": lines.iter().map(of).collect::<Vec<_>>() })
}

fn as_text(lines: &[(&Line, Found)]) -> String {
    let mut text = String::new();
    let mut paper = "";
    for (line, found) in lines {
        if line.paper.name() != paper {
            paper = line.paper.name();
            text += &format!("{paper}\n");
        }
        let (name, path) = match line.ours {
            Ours::Field(name, path) => (name.to_string(), path),
            Ours::Absent(_) => (String::new(), ""),
        };
        let ours = match found {
            Found::Value(value @ (Value::Object(_) | Value::Array(_))) => {
                let size = value.as_object().map_or(0, serde_json::Map::len);
                format!("{} values", size.max(value.as_array().map_or(0, Vec::len)))
            }
            Found::Value(value) => value.to_string(),
            Found::NotMeasured => format!("not measured: pagetide bench {name} --json"),
            Found::Missing => "null in the report, or an older one".to_owned(),
            Found::Absent(why) => format!("absent: {why}"),
        };
        let from = match found {
            Found::Value(_) => format!("  (bench {name}, {path})"),
            _ => String::new(),
        };
        let (item, what, theirs) = (line.item, line.what, line.theirs);
        text += &format!("  {item:<12}{what}\n              paper {theirs}; ours {ours}{from}\n");
    }
    text.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_bench::name::BenchName;
    use table::Paper;

    const OF_A_BENCH: Line = Line {
        paper: Paper::Vpri,
        item: "Fig 15a",
        what: "16 tenants over 1",
        theirs: "10.4",
        ours: Ours::Field(BenchName::IopfScale, "ratios.serialized_16_over_1"),
    };

    fn in_report(report: Option<Value>) -> Found {
        let mut reports = BTreeMap::from([("iopf-scale".to_owned(), report)]);
        find(&OF_A_BENCH, Path::new("/nowhere"), &mut reports).unwrap()
    }

    #[test]
    fn field_is_found_missing_or_not_measured() {
        assert_eq!(in_report(None), Found::NotMeasured);
        assert_eq!(in_report(Some(json!({"ratios": {}}))), Found::Missing);
        let null = json!({"ratios": {"serialized_16_over_1": null}});
        assert_eq!(in_report(Some(null)), Found::Missing);
        let report = json!({"ratios": {"serialized_16_over_1": 8.5}});
        assert_eq!(in_report(Some(report)), Found::Value(8.5.into()));
        let mut none = BTreeMap::new();
        let found = find(&OF_A_BENCH, Path::new("/nowhere"), &mut none).unwrap();
        assert_eq!(found, Found::NotMeasured);
    }

    #[test]
    fn text_has_both_numbers_or_the_reason() {
        let absent = Line {
            ours: Ours::Absent("no fleet"),
            ..OF_A_BENCH
        };
        let lines = [
            (&OF_A_BENCH, Found::Value(8.5.into())),
            (&OF_A_BENCH, Found::NotMeasured),
            (&absent, Found::Absent("no fleet")),
        ];
        let text = as_text(&lines);
        assert!(text.starts_with("VPRI\n"), "{text}");
        assert!(
            text.contains("paper 10.4; ours 8.5  (bench iopf-scale"),
            "{text}"
        );
        assert!(
            text.contains("not measured: pagetide bench iopf-scale --json"),
            "{text}"
        );
        assert!(text.contains("ours absent: no fleet"), "{text}");
        let told = as_json(&lines);
        assert_eq!(told["lines"][0]["ours"], 8.5);
        assert_eq!(told["lines"][2]["state"], "absent");
    }
}
