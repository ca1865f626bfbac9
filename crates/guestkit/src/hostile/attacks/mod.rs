// SPDX-License-Identifier: Apache-2.0
//! The attacks, by what they attack with.

mod memory;
mod messages;
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
        messages::attacks(),
    ]
    .into_iter()
    .flatten()
    .collect()
}
