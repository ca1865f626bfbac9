// SPDX-License-Identifier: Apache-2.0
//! An engine: one thread that serves queues of many devices and VMs.
//!
//! # A turn
//! ```text
//!   commands ─► completions ─► page responses ─► avail rings ─► page requests ─► calls ─► submit
//!      ▲                                                                                    │
//!      └─ anything done ◄───────────────────────────────────────────────────────────────────┤
//!                                     nothing done: poll a little, then arm and sleep ◄──────┘
//! ```
//! Everything is batched: one system call submits the work that a turn has begun and fetches
//! completions. An engine blocks only where it sleeps (`turn`).
//!
//! A turn is short whatever the tenants do: it takes a bounded number of events of each kind
//! (`EVENTS_PER_TURN`, `COMMANDS_PER_TURN`) and begins work by fair shares ([`fair`]). The
//! remainder is left to the next turn, which follows at once.
//!
//! # Polling
//! An engine with nothing to do polls for some microseconds, because a sleep and a wake-up cost
//! more than that. It does so only where polling has paid off recently ([`patience`]): a busy
//! engine polls, an idle one costs nothing.
//!
//! # Sleep
//! The ring polls the doorbell and each queue's kick descriptor, so one wait covers I/O, kicks,
//! commands and page responses. The order is: arm the doorbell, enable kicks on every queue, check
//! everything once more, sleep. A kick, command or response that arrives after the check finds the
//! doorbell or the event index set and wakes the engine.
//!
//! While a chain waits for pages, the engine sleeps no longer than until that chain's timeout.
//!
//! # Files
//! Each uses only files above it in this table, so they can be read from top to bottom.
//!
//! | file | contents |
//! |---|---|
//! | [`fair`], [`patience`], [`call`] | shares of tenants; when to poll; signals to front ends |
//! | [`command`], [`request`], [`bounce::slots`] | plain types |
//! | [`held`] | the record of posted chains that are held |
//! | [`pin_down`], [`wires`] | what is wired for posted chains |
//! | [`queue`] with [`rings`], [`device`] | a queue on an engine, and the entries of its rings; a device |
//! | [`kicks`], [`reports`], [`scratch`] | kicks; counters, accounts, access log; reused memory |
//! | [`pages`], [`bounce::plan`], [`bounce`] | which pages a chain needs; reads that need none |
//! | [`io`] | what all chains of an engine share, and who owns what |
//! | [`answer`], [`submit`] | a chain's end; a chain's steps to the kernel |
//! | [`land`], [`begin`], [`finish`] | before the first step, and after each |
//! | [`at_once`] | the short way of a chain that is done at once |
//! | [`inject`], [`chain`], [`ahead`], [`faults`] | a chain until it has its pages; page requests |
//! | [`posted`], [`blank`], [`arrive`] | posted chains; which of their pages need no content; what arrives for them |
//! | [`start`], [`thread`], [`tenant`] | a queue's start; what the thread has; a tenant's turn |
//! | [`stop`], [`obey`] | queues that end; commands |
//! | [`turn`] | the loop |

mod ahead;
mod answer;
mod arrive;
mod at_once;
mod begin;
mod blank;
mod bounce;
mod call;
mod chain;
pub(crate) mod command;
mod device;
pub(crate) mod fair;
mod faults;
mod finish;
mod held;
mod inject;
mod io;
mod kicks;
mod land;
mod obey;
mod pages;
mod patience;
mod pin_down;
mod posted;
mod queue;
mod reports;
mod request;
mod rings;
mod scratch;
mod start;
mod stop;
mod submit;
mod tenant;
mod thread;
mod turn;
mod wires;

pub(crate) use thread::{Engine, Seed};
