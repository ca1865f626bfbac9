// SPDX-License-Identifier: Apache-2.0
//! Synchronisation primitives that a model checker can replace, and the two
//! halves of the asymmetric fence.

#[cfg(loom)]
pub(crate) use loom::{
    hint::spin_loop,
    sync::{
        Mutex,
        atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
};
#[cfg(not(loom))]
pub(crate) use std::{
    hint::spin_loop,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
};

/// Replaces the standard type under the model checker, which has none. The checker only needs to
/// see that one store publishes the value. Set by one thread at a time.
#[cfg(loom)]
pub(crate) struct OnceLock<T> {
    value: std::sync::OnceLock<T>,
    shown: loom::sync::atomic::AtomicBool,
}

#[cfg(loom)]
impl<T> OnceLock<T> {
    pub(crate) fn new() -> Self {
        Self {
            value: std::sync::OnceLock::new(),
            shown: loom::sync::atomic::AtomicBool::new(false),
        }
    }

    pub(crate) fn get(&self) -> Option<&T> {
        let shown = self.shown.load(Ordering::Acquire);
        shown.then(|| self.value.get()).flatten()
    }

    pub(crate) fn set(&self, value: T) -> Result<(), T> {
        self.value.set(value)?;
        self.shown.store(true, Ordering::Release);
        Ok(())
    }
}

/// The engine's half: keeps the compiler from moving its bitmap load above its lease store.
/// [`heavy_fence`] on the other side forces the same order on the processor.
pub(crate) fn light_fence() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
    #[cfg(not(loom))]
    pagetide_sys::membarrier::light();
}

/// The evictor's half: after it, every engine of this process has either published its lease or
/// will see our bitmap. Costs some microseconds while engines run, once a section.
///
/// # Panics
/// If the kernel has no expedited membarrier (before Linux 4.14): leases protect nothing then, so
/// going on would lose DMA.
pub(crate) fn heavy_fence() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::SeqCst);
    #[cfg(not(loom))]
    {
        static REGISTERED: std::sync::Once = std::sync::Once::new();
        let check = |outcome: Result<(), pagetide_sys::membarrier::MembarrierError>| {
            if let Err(error) = outcome {
                panic!("leases cannot be relied on: {error}");
            }
        };
        REGISTERED.call_once(|| check(pagetide_sys::membarrier::register()));
        check(pagetide_sys::membarrier::heavy());
    }
}
