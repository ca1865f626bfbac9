// SPDX-License-Identifier: Apache-2.0
//! Features of a userfaultfd. The first `UFFDIO_API` fixes them for good.

/// Features of a userfaultfd, fixed after the handshake.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Features(pub(super) u64);

impl Features {
    /// None, as of a plain `UFFDIO_API`.
    pub const NONE: Self = Self(0);
    /// Write-protect faults carry a flag.
    pub const PAGEFAULT_FLAG_WP: Self = Self(1);
    /// MISSING faults of shared memory.
    pub const MISSING_SHMEM: Self = Self(1 << 5);
    /// Messages contain the faulting thread.
    pub const THREAD_ID: Self = Self(1 << 8);
    /// MINOR faults of shared memory.
    pub const MINOR_SHMEM: Self = Self(1 << 10);
    /// Messages contain the exact byte address of the access.
    pub const EXACT_ADDRESS: Self = Self(1 << 11);
    /// Write protection of shared and huge memory.
    pub const WP_HUGETLBFS_SHMEM: Self = Self(1 << 12);
    /// `UFFDIO_POISON`.
    pub const POISON: Self = Self(1 << 14);

    /// All that Pagetide uses or may use later for a VM's RAM.
    pub const WANTED: Self = Self(
        Self::EVICTION.0
            | Self::THREAD_ID.0
            | Self::EXACT_ADDRESS.0
            | Self::MINOR_SHMEM.0
            | Self::POISON.0,
    );
    /// The features required for eviction.
    pub const EVICTION: Self =
        Self(Self::MISSING_SHMEM.0 | Self::PAGEFAULT_FLAG_WP.0 | Self::WP_HUGETLBFS_SHMEM.0);

    /// Creates the set from a stored number (see [`Features::bits`]).
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The set as a number that can be stored.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// True if this set contains all of `others`.
    #[must_use]
    pub const fn contains(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    /// The features in both sets.
    pub(super) const fn intersect(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl std::fmt::Debug for Features {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Features({:#x})", self.0)
    }
}
