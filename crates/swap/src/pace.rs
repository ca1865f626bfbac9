// SPDX-License-Identifier: Apache-2.0
//! [`Pace`]: when work that is cut into steps goes on, pauses or ends.

/// See the module. A function is one that never pauses, and says whether work goes on.
pub trait Pace {
    /// Between two steps, after which the work may also end here: whether it goes on. May wait.
    fn go_on(&self) -> bool;

    /// Within a step, every few ten microseconds: false if the thread should pause as soon as it holds nothing
    /// that others wait for. Does not wait.
    fn may_stay(&self) -> bool {
        true
    }

    /// Between two parts of work that must be done as a whole. May wait.
    fn pause(&self) {}

    /// Most sections that are unmapped in one step, at least one.
    fn unmapped_sections_max(&self) -> usize {
        usize::MAX
    }

    /// Runs a part that holds what faults wait for: a thread that is weak on the host must not be so in it.
    fn firmly<T>(&self, work: impl FnOnce() -> T) -> T {
        work()
    }
}

impl<F: Fn() -> bool> Pace for F {
    fn go_on(&self) -> bool {
        self()
    }
}
