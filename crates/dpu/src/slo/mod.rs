// SPDX-License-Identifier: Apache-2.0
//! Service-level accounting: latencies of requests, what held the slow ones, the lowest throughput,
//! and the rate of page faults (VPRI 2.2, 3.4).
//!
//! | module | contents |
//! |---|---|
//! | `course` | the stages of one chain |
//! | `recorder` | an engine's list of unreported events |
//! | `account` | rolling windows of minute, hour and day |
//! | `tally`, `histogram`, `bins`, `bursts` | the counts of a stretch of time |
//! | `slow` | slow requests and their causes |
//! | `report` | the account as reported |

pub(crate) mod account;
mod bins;
mod bursts;
pub(crate) mod course;
pub(crate) mod histogram;
pub(crate) mod recorder;
pub(crate) mod report;
pub(crate) mod slow;
mod tally;
