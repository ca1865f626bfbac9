// SPDX-License-Identifier: Apache-2.0
//! The model's distance from the authors' program.

use std::path::PathBuf;

use serde::Serialize;

use super::row::Reference;
use crate::config::Replacement;

/// LRU and oracle rows may differ by this fraction of the elapsed time.
pub const EXACT_ERROR_MAX: f64 = 0.001;
/// LFU rows may lie outside the range of the tie seeds by this fraction.
pub const LFU_ERROR_MAX: f64 = 0.03;

/// The seed under which the model breaks ties as the program does.
pub(super) const PROGRAM_SEED: u64 = 0;

/// One row's comparison.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct RowOutcome {
    /// Number of the row in the table, from 1.
    pub row: usize,
    /// Name of its configuration.
    pub config: String,
    /// Replacement of the DevTLB.
    pub replacement: Replacement,
    /// The program's answer.
    pub reference_ns: u64,
    /// The model's answer; the least of the tie seeds.
    pub least_ns: u64,
    /// The greatest of the tie seeds; equal to the least without ties.
    pub most_ns: u64,
    /// The answer of seed 0 equals the program's, to the nanosecond.
    pub exact: bool,
    /// Its dropped slots equal the program's, too, where the table has them.
    pub drops_agree: Option<bool>,
    /// Distance of the program's answer from the range, as a fraction of it.
    pub error: f64,
}

/// The model's answer for a row under one seed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    pub(super) row: usize,
    pub(super) seed: u64,
    pub(super) elapsed_ns: u64,
    pub(super) dropped_slots: u64,
}

impl RowOutcome {
    /// Compares `row` with the answers of its seeds; those of other rows are ignored.
    pub(super) fn of(row: &Reference, answers: &[Answer]) -> Self {
        let own = || answers.iter().filter(|answer| answer.row == row.row);
        let times = || own().map(|answer| answer.elapsed_ns);
        let least_ns = times().min().unwrap_or(0);
        let most_ns = times().max().unwrap_or(0);
        let reference_ns = row.elapsed_ns;
        let distance = least_ns
            .saturating_sub(reference_ns)
            .max(reference_ns.saturating_sub(most_ns));
        let program = own().find(|answer| answer.seed == PROGRAM_SEED);
        Self {
            row: row.row,
            config: row.name.clone(),
            replacement: row.config.devtlb.replacement,
            reference_ns,
            least_ns,
            most_ns,
            exact: program.is_some_and(|answer| answer.elapsed_ns == reference_ns),
            drops_agree: row
                .dropped_slots
                .map(|dropped| program.is_some_and(|answer| answer.dropped_slots == dropped)),
            error: crate::outcome::ratio(distance, reference_ns),
        }
    }
}

/// The comparison in figures.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct VerifyFigures {
    /// Rows compared.
    pub rows: usize,
    /// Rows without a trace.
    pub rows_without_trace: usize,
    /// LRU rows compared.
    pub lru_rows: usize,
    /// Oracle rows compared.
    pub oracle_rows: usize,
    /// LFU rows compared.
    pub lfu_rows: usize,
    /// LRU rows equal to the nanosecond.
    pub lru_exact: usize,
    /// Oracle rows equal to the nanosecond.
    pub oracle_exact: usize,
    /// LFU rows equal to the nanosecond under seed 0, which breaks ties as the program does.
    pub lfu_exact: usize,
    /// LFU rows within the range of the tie seeds.
    pub lfu_within: usize,
    /// Rows whose dropped slots are equal under seed 0.
    pub drops_exact: usize,
    /// Worst LRU row, as a fraction of the elapsed time.
    pub lru_error_max: f64,
    /// Worst oracle row.
    pub oracle_error_max: f64,
    /// Worst LFU row.
    pub lfu_error_max: f64,
}

/// The whole comparison.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct VerifyReport {
    /// `verify`.
    pub name: &'static str,
    /// True if every row compared is within its bound, and there was one.
    pub agrees: bool,
    /// In figures.
    pub figures: VerifyFigures,
    /// Rows that are not exact, the worst first.
    pub worst: Vec<RowOutcome>,
    /// Traces whose parameters match a row, but whose files are missing.
    pub missing_traces: Vec<PathBuf>,
}

/// Rows that are shown.
const SHOWN: usize = 10;

impl VerifyReport {
    pub(super) fn of(
        mut rows: Vec<RowOutcome>,
        rows_without_trace: usize,
        missing_traces: Vec<PathBuf>,
    ) -> Self {
        let mut figures = VerifyFigures {
            rows: rows.len(),
            rows_without_trace,
            ..VerifyFigures::default()
        };
        for row in &rows {
            figures.drops_exact += usize::from(row.drops_agree == Some(true));
            let (count, exact, worst) = match row.replacement {
                Replacement::Lru => (
                    &mut figures.lru_rows,
                    &mut figures.lru_exact,
                    &mut figures.lru_error_max,
                ),
                Replacement::Oracle => (
                    &mut figures.oracle_rows,
                    &mut figures.oracle_exact,
                    &mut figures.oracle_error_max,
                ),
                Replacement::Lfu => {
                    figures.lfu_within += usize::from(row.error == 0.0);
                    (
                        &mut figures.lfu_rows,
                        &mut figures.lfu_exact,
                        &mut figures.lfu_error_max,
                    )
                }
            };
            *count += 1;
            *exact += usize::from(row.exact);
            *worst = worst.max(row.error);
        }
        rows.retain(|row| row.error > 0.0 || !row.exact);
        rows.sort_by(|one, other| other.error.total_cmp(&one.error));
        rows.truncate(SHOWN);
        Self {
            name: "verify",
            agrees: figures.rows > 0
                && figures.lru_error_max <= EXACT_ERROR_MAX
                && figures.oracle_error_max <= EXACT_ERROR_MAX
                && figures.lfu_error_max <= LFU_ERROR_MAX,
            figures,
            worst: rows,
            missing_traces,
        }
    }
}
