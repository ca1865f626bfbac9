// SPDX-License-Identifier: Apache-2.0
//! The attacks, by what they attack with.

mod changes;
mod connections;
mod inflight;
mod memory;
mod messages;
mod requests;
mod rings;
mod shrink;
mod signals;

use super::Attack;

/// Every attack.
#[must_use]
pub fn all() -> Vec<Attack> {
    [
        signals::attacks(),
        memory::attacks(),
        shrink::attacks(),
        inflight::attacks(),
        messages::attacks(),
        rings::attacks(),
        changes::attacks(),
        requests::attacks(),
        connections::attacks(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
