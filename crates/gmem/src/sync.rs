// SPDX-License-Identifier: Apache-2.0
//! Synchronisation primitives, so that a model checker can stand in for them.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Arc, Mutex, RwLock,
    atomic::{AtomicU64, Ordering},
};
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Arc, Mutex, RwLock,
    atomic::{AtomicU64, Ordering},
};
