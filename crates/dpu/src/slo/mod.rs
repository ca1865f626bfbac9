// SPDX-License-Identifier: Apache-2.0
//! The account of service levels: how long requests took, what held the slow ones, how low
//! throughput fell, how often pages were missing (VPRI 2.2, 3.4).
//!
//! | module | what it is about |
//! |---|---|
//! | `course` | the stages of one chain |
//! | `recorder` | an engine's list of what it has to tell |
//! | `account` | rolling windows of minute, hour and day |
//! | `tally`, `histogram`, `bins`, `bursts` | what is counted of a stretch of time |
//! | `slow` | slow requests and their causes |
//! | `report` | the account as it is told |

pub(crate) mod account;
mod bins;
mod bursts;
pub(crate) mod course;
pub(crate) mod histogram;
pub(crate) mod recorder;
pub(crate) mod report;
pub(crate) mod slow;
mod tally;
