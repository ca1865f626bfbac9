// SPDX-License-Identifier: Apache-2.0
//! Synchronisation primitives that a model checker can replace.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::sync::Mutex;
