// SPDX-License-Identifier: Apache-2.0
//! What all benches have in common, so that figures of one name mean the same in each.
//!
//! A machine is never quiet, and its speed drifts by the minute. So no bench compares a figure with one of
//! another day; each measures two or more *sides* in one run and reports ratios:
//!
//! ```text
//!   round 0 (warm-up)    round 1         round 2         …  round n
//!   a b                  b a             a b                each side first as often as the other
//!                         └ ratio 1       └ ratio 2          of slices of the same round
//!   ratio of the bench = median over rounds, or geometric mean with its 95% interval
//! ```
//! - [`rounds`]: the rounds with their progress on stderr, and the order of turns in each.
//! - [`latencies`]: times of single operations and their percentiles, of a slice or by round.
//! - [`ratios`]: ratios of pairs, their mean, and its bounds.
//! - [`figures`]: medians and means of figures, and rounding.
//! - [`report`]: the report of a bench, and why there is none.

pub(crate) mod figures;
pub(crate) mod latencies;
pub(crate) mod ratios;
pub mod report;
pub(crate) mod rounds;
