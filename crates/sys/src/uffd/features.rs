// SPDX-License-Identifier: Apache-2.0
//! What a userfaultfd is asked for when it is made: fixed for its life by the first `UFFDIO_API`.

/// Features of a userfaultfd, fixed for its life.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Features(pub(super) u64);

impl Features {
    /// None: what plain `UFFDIO_API` gives.
    pub const NONE: Self = Self(0);
    /// Write-protect faults carry a flag.
    pub const PAGEFAULT_FLAG_WP: Self = Self(1);
    /// MISSING faults of shared memory.
    pub const MISSING_SHMEM: Self = Self(1 << 5);
    /// Messages carry the faulting thread.
    pub const THREAD_ID: Self = Self(1 << 8);
    /// MINOR faults of shared memory.
    pub const MINOR_SHMEM: Self = Self(1 << 10);
    /// Messages carry the very byte that was accessed.
    pub const EXACT_ADDRESS: Self = Self(1 << 11);
    /// Write protection of shared and huge memory.
    pub const WP_HUGETLBFS_SHMEM: Self = Self(1 << 12);
    /// `UFFDIO_POISON`.
    pub const POISON: Self = Self(1 << 14);

    /// All that Pagetide uses or may come to use for a VM's RAM.
    pub const WANTED: Self = Self(
        Self::EVICTION.0
            | Self::THREAD_ID.0
            | Self::EXACT_ADDRESS.0
            | Self::MINOR_SHMEM.0
            | Self::POISON.0,
    );
    /// Those without which nothing can be evicted.
    pub const EVICTION: Self =
        Self(Self::MISSING_SHMEM.0 | Self::PAGEFAULT_FLAG_WP.0 | Self::WP_HUGETLBFS_SHMEM.0);

    /// From a number that was stored (see [`Features::bits`]).
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// As a number, to be stored.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// True if all of `others` are among these.
    #[must_use]
    pub const fn contains(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    /// Those that are among both.
    pub(super) const fn intersect(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl std::fmt::Debug for Features {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Features({:#x})", self.0)
    }
}
