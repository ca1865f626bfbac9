// SPDX-License-Identifier: Apache-2.0
//! Pages that come back before anything asks for them: how much at a time, and what came of it. Which sections
//! they are of is decided in [`swap_in`](crate::swap_in).

use std::time::Duration;

/// Time between two turns.
pub const TURN: Duration = Duration::from_millis(50);
/// Pages prefetched in one turn of a VM, about: 20,000 a second, a few per cent of a CPU's time.
pub const TURN_PAGES: u64 = 1024;
/// Most sections that wait; the oldest beyond that are forgotten.
pub const WAITING_MAX: usize = 2048;

/// What came of filling a section.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Prefetched {
    /// Pages filled.
    pub pages: u64,
    /// Whether there is more to fill.
    pub rest: Rest,
}

/// What is left of a section after an order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rest {
    /// Pages that can be filled in another turn.
    Some,
    /// None, or none that can be filled without waiting.
    None,
}
