// SPDX-License-Identifier: Apache-2.0
//! The program `pagetide`: command line, configuration, HTTP API, metrics, and
//! the composition of the other crates into a running daemon.
//!
//! [`control`] is the seam: everything a person or a program can ask for is a
//! method of one trait, its answers are the report types there.

pub mod control;
pub mod figure;
