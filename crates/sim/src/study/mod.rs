// SPDX-License-Identifier: Apache-2.0
//! Studies: which configurations are run over which traces, and how results are recorded.
//!
//! A study is a TOML file. Its keys are those of [`Config`](crate::Config), with `preset` as the base that they modify,
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
//! the file is laid out: traces as they are written, then variants, then `preset`, then parameters as
//! `Config` declares them; the last varies fastest.
//!
//! What lists cannot say, because some values go together, **variants** do. A study is then run once for each
//! of them, over all its traces; a variant's settings, lists included, replace the study's:
//!
//! ```toml
//! [[variant]]
//! name = "partitions"
//! devtlb.partitions = 8
//! [[variant]]
//! name = "partitions and a PTB of 32"
//! devtlb.partitions = 8
//! ptb.entries = 32
//! ```
//!
//! A point that is impossible ends a study before anything is run. With `skip_impossible = true` it is left
//! out and counted: the lists of entries and of ways may then have combinations that do not fit.
//!
//! `link.requests_per_packet` comes from the trace, if that records it: a study sets it only for traces
//! that do not, and may not contradict one that does.
//!
//! A point's identity ([`identity`]) is a hash of everything that determines its result: the complete
//! configuration, and the trace's recipe or content. The journal records finished points by it
//! ([`journal`]), so a killed sweep resumes, and a changed study runs only its new points.

mod build_id;
mod columns;
mod document;
mod draft;
mod error;
mod expand;
mod identity;
mod journal;
mod ledger;
mod memory;
mod output;
mod points;
mod recipe;
mod results;
mod sweep;
#[cfg(test)]
mod tests;
mod trace;
mod traces;

pub use draft::{Draft, POINTS_MAX};
pub use error::{StudyError, is_wrong_trace};
pub use identity::{PointId, TraceIdentity};
pub use journal::{Build, Run};
pub use ledger::Ledger;
pub use memory::MemoryTrace;
pub use output::check_output;
pub use points::{Point, Preset, Study};
pub use recipe::Recipe;
pub(crate) use results::write_table;
pub use results::{ColumnKind, RESULTS_FORMAT, ResultColumn, SweepRow, cells, result_columns};
pub use sweep::{Sweep, SweepOptions, SweepProgress, SweepSummary, run_point, sweep};
pub use trace::Trace;
pub use traces::{TraceFile, Traces};
