// SPDX-License-Identifier: Apache-2.0
//! The list of figures.

use super::base::{FIGURE_4, FIGURE_5, FIGURE_9, FIGURE_10, FIGURE_11A, FIGURE_11B, FIGURE_11C};
use super::figure::Figure;
use super::parts::{
    BUFFER_SIZE, FIGURE_12A, FIGURE_12B, FIGURE_12C, HISTORY_LENGTH, PARTITIONS, PREFETCHED_PAGES,
    TENANTS_A_PARTITION,
};

/// All figures, in the paper's order; those that are no study of the model among them.
const ORDER: [&str; 18] = [
    "4",
    "5",
    "8a",
    "8b",
    "9",
    "table-3",
    "10",
    "11a",
    "11b",
    "11c",
    "12a",
    "12b",
    "12c",
    "buffer-size",
    "history-length",
    "prefetched-pages",
    "partitions",
    "tenants-a-partition",
];

/// Place of a figure in the paper.
pub(super) fn place(name: &str) -> usize {
    let at = ORDER.iter().position(|other| *other == name);
    at.unwrap_or(ORDER.len())
}

/// Figures that are studies.
pub(super) const FIGURES: &[Figure] = &[
    FIGURE_4,
    FIGURE_5,
    FIGURE_9,
    FIGURE_10,
    FIGURE_11A,
    FIGURE_11B,
    FIGURE_11C,
    FIGURE_12A,
    FIGURE_12B,
    FIGURE_12C,
    BUFFER_SIZE,
    HISTORY_LENGTH,
    PREFETCHED_PAGES,
    PARTITIONS,
    TENANTS_A_PARTITION,
];
