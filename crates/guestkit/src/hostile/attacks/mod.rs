// SPDX-License-Identifier: Apache-2.0
//! The attacks, by what they attack with.

mod signals;

use super::Attack;

/// Every attack.
#[must_use]
pub fn all() -> Vec<Attack> {
    [signals::attacks()].into_iter().flatten().collect()
}
