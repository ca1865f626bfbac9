// SPDX-License-Identifier: Apache-2.0
//! Studies: which configurations are run over which traces, and how results are recorded.
//!
//! A study is a TOML file. Its keys are those of [`Config`], with `preset` as the base that they modify,
//! and one or more `[[trace]]`. **Any value may be a list**; the study is then every combination, one
//! *point* each:
//!
//! ```toml
//! preset = ["base", "hypertrio"]
//! flavour = "paper"
//! [devtlb]
//! entries = [32, 64]
//! [[trace]]
//! tenants = [4, 16, 64]
//! packets = 100_000
//! input.synthetic.workload = "iperf3"
//! ```
//!
//! These are 2 × 2 × 3 points. Their order, which is that of the rows of results, does not depend on how
//! the file is laid out: traces as they are written, then `preset`, then parameters as [`Config`] declares
//! them; the last varies fastest.
//!
//! `link.requests_per_packet` comes from the trace, if that records it: a study sets it only for traces
//! that do not, and may not contradict one that does.
//!
//! A point's identity ([`identity`]) is a hash of everything that determines its result: the complete
//! configuration, and the trace's recipe or content. The journal records finished points by it
//! ([`journal`]), so a killed sweep resumes, and a changed study runs only its new points.

mod columns;
mod draft;
mod error;
mod expand;
mod identity;
mod journal;
mod output;
mod recipe;
mod results;
mod sweep;
#[cfg(test)]
mod tests;
mod traces;

pub use draft::{Draft, POINTS_MAX};
pub use error::{StudyError, is_wrong_trace};
pub use identity::{PointId, TraceIdentity};
pub use journal::{Build, Run};
pub use output::check_output;
pub use recipe::Recipe;
pub use results::RESULTS_FORMAT;
pub use sweep::{Sweep, SweepOptions, SweepProgress, SweepRow, SweepSummary, sweep};
pub use traces::{Trace, TraceFile, Traces};

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::{Config, Flavour};

/// The configuration that a study's parameters modify.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// Table IV, *Base*.
    #[default]
    Base,
    /// Table IV, *HyperTRIO*.
    Hypertrio,
}

impl Preset {
    /// Its configuration by the rules of `flavour`.
    #[must_use]
    pub fn config(self, flavour: Flavour) -> Config {
        match self {
            Self::Base => Config::base(flavour),
            Self::Hypertrio => Config::hypertrio(flavour),
        }
    }
}

/// One run of a study.
#[derive(Clone, PartialEq, Debug)]
pub struct Point {
    /// The preset of the configuration.
    pub preset: Preset,
    /// The configuration.
    pub config: Config,
    /// The trace's place in [`Study::traces`].
    pub trace: usize,
}

/// A study with every list expanded.
#[derive(Clone, PartialEq, Debug)]
pub struct Study {
    /// The distinct traces, in the order of the study.
    pub traces: Vec<Trace>,
    /// The runs, in the order of the study: by trace, then by configuration.
    pub points: Vec<Point>,
    /// The study as it was written, for the record.
    pub source: Value,
    /// The file that it was read from.
    pub file: Option<PathBuf>,
}

impl Study {
    /// For each point, its value in each list of the study and the properties of its trace that differ from
    /// the others', as `name=value`; empty for a study of one point.
    #[must_use]
    pub fn labels(&self) -> Vec<String> {
        let flat: Vec<Vec<(String, Value)>> = self
            .points
            .iter()
            .map(|point| columns::parameters(point, &self.traces[point.trace]))
            .collect();
        // The name of a preset or a flavour implies the values that follow from it.
        let mut varying = columns::varying(&flat);
        varying.retain(|name| {
            let pointer = format!("/{}", name.replace('.', "/"));
            let listed = self.source.pointer(&pointer).is_some_and(Value::is_array);
            listed || name.starts_with("trace.")
        });
        flat.iter()
            .map(|row| {
                let parts: Vec<String> = row
                    .iter()
                    .filter(|(name, _)| varying.contains(name.as_str()))
                    .map(|(name, value)| format!("{name}={}", columns::plain(value)))
                    .collect();
                parts.join(" ")
            })
            .collect()
    }
}
