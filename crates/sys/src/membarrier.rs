// SPDX-License-Identifier: Apache-2.0
//! An asymmetric fence: free where it is passed often, expensive where it is passed rarely.
//!
//! DMA takes a lease (store), then checks the PA-bitmap (load). Eviction clears the bitmap (store),
//! then checks for leases (load). That is Dekker's pattern: without a full fence between store and
//! load on *both* sides, each may miss the other. [`heavy`] makes every running thread of this
//! process pass a full fence, so on the other side [`light`], which only keeps the compiler from
//! reordering, is enough. It does not reach another process: the process that owns the bitmap
//! issues it.

use rustix::thread::MembarrierCommand;
use std::sync::atomic::{Ordering, compiler_fence, fence};

/// The kernel does not support the heavy side.
#[derive(Debug, thiserror::Error)]
#[error(
    "membarrier({command}) failed: {source}; Linux 4.14 or later with CONFIG_MEMBARRIER is needed"
)]
pub struct MembarrierError {
    command: &'static str,
    source: std::io::Error,
}

/// Announces that this process will call [`heavy`]. Call it once, before the first [`heavy`].
///
/// # Errors
/// [`MembarrierError`]: then both sides must use a real fence.
pub fn register() -> Result<(), MembarrierError> {
    rustix::thread::membarrier(MembarrierCommand::RegisterPrivateExpedited).map_err(|source| {
        MembarrierError {
            command: "REGISTER_PRIVATE_EXPEDITED",
            source: source.into(),
        }
    })
}

/// The expensive side: after it, each thread of this process has passed a full fence.
///
/// # Errors
/// [`MembarrierError`]: only the calling thread has passed one; leases must not be relied on.
pub fn heavy() -> Result<(), MembarrierError> {
    rustix::thread::membarrier(MembarrierCommand::PrivateExpedited).map_err(|source| {
        fence(Ordering::SeqCst);
        MembarrierError {
            command: "PRIVATE_EXPEDITED",
            source: source.into(),
        }
    })
}

/// The free side, between the store and the load. Partner: [`heavy`].
pub fn light() {
    compiler_fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicBool, AtomicU32};

    #[test]
    fn of_two_sides_that_store_then_load_at_least_one_sees_the_other() {
        const ROUNDS: u32 = 20_000;
        register().unwrap();
        let (lease, cleared) = (AtomicBool::new(false), AtomicBool::new(false));
        let missed = AtomicU32::new(0);
        let start = Barrier::new(2);
        std::thread::scope(|scope| {
            let dma = scope.spawn(|| {
                let mut saw = Vec::new();
                for _ in 0..ROUNDS {
                    start.wait();
                    lease.store(true, Ordering::Relaxed);
                    light();
                    saw.push(cleared.load(Ordering::Relaxed));
                    start.wait();
                }
                saw
            });
            let mut saw = Vec::new();
            for _ in 0..ROUNDS {
                lease.store(false, Ordering::Relaxed);
                cleared.store(false, Ordering::Relaxed);
                start.wait();
                cleared.store(true, Ordering::Relaxed);
                heavy().unwrap();
                saw.push(lease.load(Ordering::Relaxed));
                start.wait();
            }
            for (ours, theirs) in saw.iter().zip(dma.join().unwrap()) {
                if !ours && !theirs {
                    missed.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        assert_eq!(missed.into_inner(), 0);
    }
}
