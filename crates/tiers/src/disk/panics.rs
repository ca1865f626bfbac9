// SPDX-License-Identifier: Apache-2.0
//! What becomes of panics on the threads of a disk tier.

use crate::tier::Done;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What a panic says.
pub fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let literal = panic.downcast_ref::<&str>().copied();
    let made = || panic.downcast_ref::<String>().map(String::as_str);
    literal.or_else(made).unwrap_or("it does not say why")
}

/// Drops a duty, which tells its owner. A panic of the owner is its own.
pub fn drop_alone<T>(done: Done<T>) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(done))) {
        let why = panic_text(&*panic);
        tracing::error!(why, "whoever waited for the disk tier panicked");
    }
}
