// SPDX-License-Identifier: Apache-2.0
//! A study with every list expanded: its traces, and its points over them.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::columns::{flatten, json, plain, varying};
use super::error::StudyError;
use super::trace::Trace;
use crate::config::{Config, Flavour};
use crate::error::SimError;

/// The configuration that a study's parameters modify.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// Table IV, *Base*.
    #[default]
    Base,
    /// Table IV, *HyperTRIO*.
    Hypertrio,
    /// HyperTRIO on a link of 400 Gb/s; values with their sources: `sim study hardware`.
    #[serde(rename = "hypertrio-400")]
    Hypertrio400,
    /// HyperTRIO on a link of 800 Gb/s.
    #[serde(rename = "hypertrio-800")]
    Hypertrio800,
}

impl Preset {
    /// Its configuration by the rules of `flavour`.
    #[must_use]
    pub fn config(self, flavour: Flavour) -> Config {
        match self {
            Self::Base => Config::base(flavour),
            Self::Hypertrio => Config::hypertrio(flavour),
            Self::Hypertrio400 => Config::hypertrio_times(flavour, 2),
            Self::Hypertrio800 => Config::hypertrio_times(flavour, 4),
        }
    }
}

/// One run of a study.
#[derive(Clone, PartialEq, Debug)]
pub struct Point {
    /// The study's variant that it belongs to, if the study has any.
    pub variant: Option<String>,
    /// The preset of the configuration.
    pub preset: Preset,
    /// The configuration.
    pub config: Config,
    /// The trace's place in [`Study::traces`].
    pub trace: usize,
}

impl Point {
    fn check(&self) -> Result<(), SimError> {
        self.config.check_heeded()?;
        self.config.check()
    }

    /// Variant, preset, configuration and `trace`, which is its own, under their names in a study.
    fn parameters(&self, trace: &Trace) -> Vec<(String, Value)> {
        let mut row = Vec::new();
        if let Some(variant) = &self.variant {
            row.push(("variant".to_owned(), variant.as_str().into()));
        }
        row.push(("preset".to_owned(), json(&self.preset)));
        flatten("", '.', &json(&self.config), &mut row);
        match trace {
            Trace::File(path) => {
                row.push(("trace.file".to_owned(), path.to_string_lossy().into()));
            }
            Trace::Made(spec) => flatten("trace", '.', &json(spec), &mut row),
            Trace::Memory(memory) => {
                row.push(("trace.events_sha256".to_owned(), memory.sha256().into()));
            }
        }
        row
    }
}

/// A study with every list expanded.
#[derive(Clone, PartialEq, Debug)]
pub struct Study {
    /// The distinct traces, in the order of the study.
    pub traces: Vec<Trace>,
    /// The runs, in the order of the study: by trace, then by variant, then by configuration.
    pub points: Vec<Point>,
    /// Points that were left out because their configurations are impossible.
    pub skipped: usize,
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
            .map(|point| point.parameters(&self.traces[point.trace]))
            .collect();
        // The name of a preset or a flavour implies the values that follow from it.
        let mut names = varying(&flat);
        let variants = self.source.get("variant").and_then(Value::as_array);
        let tables: Vec<&Value> = variants
            .into_iter()
            .flatten()
            .chain([&self.source])
            .collect();
        // The name of a variant does so, too.
        names.retain(|name| {
            let pointer = format!("/{}", name.replace('.', "/"));
            let listed = |table: &&Value| table.pointer(&pointer).is_some_and(Value::is_array);
            tables.iter().any(listed) || name.starts_with("trace.")
        });
        flat.iter()
            .map(|row| {
                let parts: Vec<String> = row
                    .iter()
                    .filter(|(name, _)| names.contains(name.as_str()))
                    .map(|(name, value)| format!("{name}={}", plain(value)))
                    .collect();
                parts.join(" ")
            })
            .collect()
    }

    /// An error of the model, with point `number` of which it is; an error of a trace names its file.
    #[must_use]
    pub fn at_point(&self, number: usize, error: StudyError) -> StudyError {
        match error {
            StudyError::Run(SimError::Trace(_)) => error,
            StudyError::Run(source) => StudyError::Point {
                point: number,
                label: self.labels().swap_remove(number),
                source: Box::new(source),
            },
            other => other,
        }
    }

    /// The only point.
    ///
    /// # Errors
    /// [`StudyError::Several`] if there are several.
    pub fn single(&self) -> Result<&Point, StudyError> {
        match self.points.as_slice() {
            [point] => Ok(point),
            points => Err(StudyError::Several {
                points: points.len(),
            }),
        }
    }

    /// Checks every configuration.
    ///
    /// # Errors
    /// The first point whose configuration is impossible or says what has no effect.
    pub(super) fn check(&self) -> Result<(), StudyError> {
        for (number, point) in self.points.iter().enumerate() {
            if let Err(error) = point.check() {
                return Err(StudyError::Point {
                    point: number,
                    label: self.labels().swap_remove(number),
                    source: Box::new(error),
                });
            }
        }
        Ok(())
    }

    /// Leaves out the points whose configuration is impossible or says what has no effect.
    ///
    /// # Errors
    /// The first of them, if that is all there are.
    pub(super) fn skip_impossible(&mut self) -> Result<(), StudyError> {
        if self.points.iter().all(|point| point.check().is_err()) {
            return self.check();
        }
        let before = self.points.len();
        self.points.retain(|point| point.check().is_ok());
        self.skipped = before - self.points.len();
        Ok(())
    }
}
