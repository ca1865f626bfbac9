// SPDX-License-Identifier: Apache-2.0
//! [`PoolCap`]: the most memory that the pools of a daemon may take together, and what they take now.
//!
//! The size of the tmpfs and the daemon's memory cgroup bound the pools as well; this bound is the
//! operator's, and can be changed while VMs run. Header, page words and chunks of content are charged
//! before their memory is allocated, so the sum is never above the cap; except after the cap was
//! lowered, and for pools that a dead daemon left: their content exists, and goes only when its pages
//! come back.
//!
//! ```text
//!   cap ────────────────────────────
//!     │  a chunk that would cross it is refused: the store is full
//!     │  content of a pool above its share is refused, too
//!   high-water mark, 3/4 ───────────
//!     │  whoever comes first
//!   used = pool 1 + pool 2 + …          each a Charge, given back when the pool is closed,
//!                                       or a LeftPool, until it is opened
//! ```
//!
//! # Shares
//! What is in a pool stays there until its VM needs it again. So a VM of noise, of which nothing is freed,
//! would take all there is, and the others would find no room for what compresses. Above the high-water mark,
//! three quarters of the cap, a pool gets more content only up to its *share* of the cap, by the weights of
//! all VMs that have pools. Page words are not content: without them a VM cannot be attached at all.

use std::{
    io,
    os::unix::fs::MetadataExt as _,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
};

const NO_CAP: u64 = u64::MAX;
/// Unit in which the kernel tells what a file takes.
const BLOCK_BYTES: u64 = 512;
/// Least cap that can be set: the words of a VM of 1 GiB and some chunks of content.
pub const CAP_BYTES_MIN: u64 = 4 << 20;

/// Part of the cap above its high-water mark.
const ABOVE_HIGH_PART: u64 = 4;
/// Weight of a pool that is given none.
const WEIGHT_DEFAULT: u32 = 100;

/// The cap does not allow what was wanted.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CapReached {
    /// It would be exceeded.
    #[error(
        "the pools of this daemon have reached their cap of {cap_bytes} bytes: raise it (pagetide pool cap), or the \
         limits of VMs, or detach one"
    )]
    Whole {
        /// The cap.
        cap_bytes: u64,
    },
    /// The high-water mark is passed, and the pool has its share.
    #[error(
        "the pool of this VM has more than its share of {share_bytes} bytes, and the pools of this daemon have nearly \
         reached their cap of {cap_bytes} bytes: raise it (pagetide pool cap), or the VM's limit or weight"
    )]
    Share {
        /// The cap.
        cap_bytes: u64,
        /// The share.
        share_bytes: u64,
    },
}

impl CapReached {
    /// The cap that was reached.
    #[must_use]
    pub const fn cap_bytes(&self) -> u64 {
        match self {
            Self::Whole { cap_bytes } | Self::Share { cap_bytes, .. } => *cap_bytes,
        }
    }
}

/// See the module. One per daemon.
#[derive(Debug)]
pub struct PoolCap {
    cap_bytes: AtomicU64,
    used_bytes: AtomicU64,
    peak_bytes: AtomicU64,
    /// Sum of all pools' weights.
    weights: AtomicU64,
}

impl PoolCap {
    /// A cap of `cap_bytes`, or none.
    #[must_use]
    pub fn new(cap_bytes: Option<u64>) -> Arc<Self> {
        Arc::new(Self {
            cap_bytes: AtomicU64::new(cap_bytes.unwrap_or(NO_CAP)),
            used_bytes: AtomicU64::new(0),
            peak_bytes: AtomicU64::new(0),
            weights: AtomicU64::new(0),
        })
    }

    /// The cap.
    #[must_use]
    pub fn cap_bytes(&self) -> Option<u64> {
        let cap_bytes = self.cap_bytes.load(Relaxed);
        (cap_bytes != NO_CAP).then_some(cap_bytes)
    }

    /// Changes the cap. Memory that is above it already stays until its content is no longer needed.
    pub fn set(&self, cap_bytes: Option<u64>) {
        self.cap_bytes.store(cap_bytes.unwrap_or(NO_CAP), Relaxed);
    }

    /// What all pools take now.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Relaxed)
    }

    /// The most that they have taken.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.peak_bytes.load(Relaxed)
    }

    /// What they may still take; `u64::MAX` without a cap.
    #[must_use]
    pub fn left_bytes(&self) -> u64 {
        match self.cap_bytes() {
            Some(cap_bytes) => cap_bytes.saturating_sub(self.used_bytes()),
            None => u64::MAX,
        }
    }

    fn take(&self, bytes: u64) -> Result<(), CapReached> {
        // Relaxed: the counter guards no other memory.
        let cap_bytes = self.cap_bytes.load(Relaxed);
        let taken = self.used_bytes.fetch_update(Relaxed, Relaxed, |used| {
            let next = used.checked_add(bytes)?;
            (next <= cap_bytes).then_some(next)
        });
        match taken {
            Ok(before) => {
                self.peak_bytes.fetch_max(before + bytes, Relaxed);
                Ok(())
            }
            Err(_) => Err(CapReached::Whole { cap_bytes }),
        }
    }

    /// What they may take before shares count.
    fn high_bytes(&self) -> u64 {
        match self.cap_bytes() {
            Some(cap_bytes) => cap_bytes - cap_bytes / ABOVE_HIGH_PART,
            None => u64::MAX,
        }
    }

    /// Takes what exists already, whatever the cap.
    fn take_existing(&self, bytes: u64) {
        let used = self.used_bytes.fetch_add(bytes, Relaxed) + bytes;
        self.peak_bytes.fetch_max(used, Relaxed);
    }

    fn give_back(&self, bytes: u64) {
        let before = self.used_bytes.fetch_sub(bytes, Relaxed);
        debug_assert!(before >= bytes, "{bytes} of {before} bytes given back");
    }
}

/// What one pool takes of a [`PoolCap`].
#[derive(Debug)]
pub(super) struct Charge {
    cap: Arc<PoolCap>,
    bytes: AtomicU64,
    weight: AtomicU32,
}

impl Charge {
    /// Of a pool that exists and takes `bytes`.
    pub fn existing(cap: &Arc<PoolCap>, bytes: u64) -> Self {
        cap.take_existing(bytes);
        Self::of(cap, bytes)
    }

    /// Of a new pool that takes `bytes`.
    pub fn new(cap: &Arc<PoolCap>, bytes: u64) -> Result<Self, CapReached> {
        cap.take(bytes)?;
        Ok(Self::of(cap, bytes))
    }

    fn of(cap: &Arc<PoolCap>, bytes: u64) -> Self {
        cap.weights.fetch_add(u64::from(WEIGHT_DEFAULT), Relaxed);
        Self {
            cap: Arc::clone(cap),
            bytes: AtomicU64::new(bytes),
            weight: AtomicU32::new(WEIGHT_DEFAULT),
        }
    }

    pub fn cap(&self) -> &Arc<PoolCap> {
        &self.cap
    }

    /// What the pool takes.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    pub fn set_weight(&self, weight: u32) {
        let before = self.weight.swap(weight, Relaxed);
        // First the new one: the sum is never less than a weight in it.
        self.cap.weights.fetch_add(u64::from(weight), Relaxed);
        self.cap.weights.fetch_sub(u64::from(before), Relaxed);
    }

    /// The pool's part of the cap, by weight; `u64::MAX` without a cap.
    pub fn share_bytes(&self) -> u64 {
        let Some(cap_bytes) = self.cap.cap_bytes() else {
            return u64::MAX;
        };
        let weights = u128::from(self.cap.weights.load(Relaxed).max(1));
        let share = u128::from(cap_bytes) * u128::from(self.weight.load(Relaxed)) / weights;
        u64::try_from(share).unwrap_or(u64::MAX).min(cap_bytes)
    }

    /// What content may still take; `u64::MAX` without a cap.
    pub fn left_bytes(&self) -> u64 {
        if self.cap.cap_bytes().is_none() {
            return u64::MAX;
        }
        let below_high = self.cap.high_bytes().saturating_sub(self.cap.used_bytes());
        let below_share = self.share_bytes().saturating_sub(self.bytes());
        below_high.max(below_share).min(self.cap.left_bytes())
    }

    /// Takes `bytes` more, for content; returns what the pool takes then. Two threads at once may take a chunk
    /// more than the share, but never more than the cap.
    pub fn take_for_content(&self, bytes: u64) -> Result<u64, CapReached> {
        if self.cap.left_bytes() >= bytes && self.left_bytes() < bytes {
            return Err(CapReached::Share {
                cap_bytes: self.cap.cap_bytes().unwrap_or(NO_CAP),
                share_bytes: self.share_bytes(),
            });
        }
        self.take(bytes)
    }

    /// Takes `bytes` more; returns what the pool takes then.
    pub fn take(&self, bytes: u64) -> Result<u64, CapReached> {
        self.cap.take(bytes)?;
        Ok(self.bytes.fetch_add(bytes, Relaxed) + bytes)
    }

    pub fn give_back(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Relaxed);
        self.cap.give_back(bytes);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.cap.give_back(self.bytes());
        let weight = u64::from(self.weight.load(Relaxed));
        self.cap.weights.fetch_sub(weight, Relaxed);
    }
}

/// A pool that a dead daemon left and nobody has opened: its VM waits to be recovered. What it takes counts all
/// the same, until this is dropped.
#[derive(Debug)]
pub struct LeftPool {
    _charge: Charge,
}

impl LeftPool {
    /// The pool at `path`.
    ///
    /// # Errors
    /// What it takes cannot be read.
    pub fn at(path: &Path, cap: &Arc<PoolCap>) -> io::Result<Self> {
        let charge = Charge::existing(cap, bytes_at(path)?);
        Ok(Self { _charge: charge })
    }
}

/// Memory that the pool at `path` takes.
///
/// # Errors
/// It cannot be read.
pub fn bytes_at(path: &Path) -> io::Result<u64> {
    Ok(std::fs::metadata(path)?.blocks() * BLOCK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_that_nobody_has_opened_counts_until_somebody_does() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("left.pool");
        let cap = PoolCap::new(Some(100));
        assert!(LeftPool::at(&path, &cap).is_err());
        std::fs::write(&path, vec![1; 10_000]).unwrap();
        let left = LeftPool::at(&path, &cap).unwrap();
        assert_eq!(cap.used_bytes(), 12 << 10);
        assert_eq!(bytes_at(&path).unwrap(), 12 << 10);
        assert!(Charge::new(&cap, 1).is_err());
        drop(left);
        assert_eq!(cap.used_bytes(), 0);
    }

    #[test]
    fn pools_take_up_to_the_cap_together_and_give_back_when_they_are_closed() {
        let cap = PoolCap::new(Some(100));
        let one = Charge::new(&cap, 40).unwrap();
        let other = Charge::new(&cap, 30).unwrap();
        assert_eq!(one.take(30), Ok(70));
        assert_eq!(other.take(1), Err(CapReached::Whole { cap_bytes: 100 }));
        assert_eq!(Charge::new(&cap, 1).unwrap_err().cap_bytes(), 100);
        one.give_back(10);
        assert_eq!((cap.used_bytes(), cap.left_bytes()), (90, 10));
        drop(one);
        assert_eq!((cap.used_bytes(), cap.peak_bytes()), (30, 100));
        drop(other);
        assert_eq!(cap.used_bytes(), 0);
    }

    #[test]
    fn pool_above_the_high_water_mark_gets_no_more_than_its_share_and_leaves_the_rest_to_others() {
        let cap = PoolCap::new(Some(1_000));
        let noise = Charge::new(&cap, 0).unwrap();
        let alone = noise.take_for_content(900);
        assert_eq!(alone, Ok(900), "nobody else has a share");
        noise.give_back(900);
        let other = Charge::new(&cap, 0).unwrap();
        assert_eq!(noise.take_for_content(750), Ok(750));
        let refused = CapReached::Share {
            cap_bytes: 1_000,
            share_bytes: 500,
        };
        assert_eq!(
            (noise.left_bytes(), noise.take_for_content(1)),
            (0, Err(refused))
        );
        // Words come first: a VM that is attached needs them.
        assert_eq!(noise.take(1), Ok(751));
        assert_eq!(
            (other.left_bytes(), other.take_for_content(249)),
            (249, Ok(249))
        );
        assert!(matches!(
            other.take_for_content(1),
            Err(CapReached::Whole { .. })
        ));
        other.give_back(249);
        // By weight.
        noise.set_weight(400);
        assert_eq!((noise.share_bytes(), other.share_bytes()), (800, 200));
        assert_eq!(noise.take_for_content(49), Ok(800));
        assert!(noise.take_for_content(1).is_err());
        assert_eq!(other.take_for_content(200), Ok(200));
        drop(noise);
        assert_eq!(other.share_bytes(), 1_000);
        cap.set(None);
        assert_eq!(
            (other.left_bytes(), other.share_bytes()),
            (u64::MAX, u64::MAX)
        );
    }

    #[test]
    fn cap_below_what_is_taken_refuses_more_and_takes_nothing_away() {
        let cap = PoolCap::new(None);
        let charge = Charge::new(&cap, 1 << 40).unwrap();
        cap.set(Some(10));
        assert_eq!(cap.left_bytes(), 0);
        assert!(charge.take(1).is_err());
        // What a dead daemon left is there, and counts.
        let found = Charge::existing(&cap, 5);
        assert_eq!(cap.used_bytes(), (1 << 40) + 5);
        charge.give_back(1 << 40);
        assert_eq!(found.take(5), Ok(10));
        assert!(found.take(1).is_err());
        cap.set(None);
        assert_eq!((cap.cap_bytes(), cap.left_bytes()), (None, u64::MAX));
    }

    #[test]
    fn threads_that_take_at_once_never_exceed_the_cap() {
        let cap = PoolCap::new(Some(1_000));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let charge = Charge::new(&cap, 0).unwrap();
                    for _ in 0..2_000 {
                        if charge.take(7).is_ok() {
                            assert!(cap.used_bytes() <= 1_000);
                        } else {
                            charge.give_back(charge.bytes());
                        }
                    }
                });
            }
        });
        assert_eq!(cap.used_bytes(), 0);
        assert!(cap.peak_bytes() <= 1_000);
    }
}
