// SPDX-License-Identifier: Apache-2.0
//! [`RamPolicy`]: which files a device accepts as guest RAM, and how much of them.
//!
//! The kind of a file has been determined before ([`RamFile`]), without a query that could block.
//! Here it is decided by what can be guaranteed. A memfd keeps its memory if it is sealed; if not,
//! only its own device is at risk. A file that another party can make run out of memory is accepted
//! only if the operator vouches for it.

use crate::regions::MemoryError;
use pagetide_sys::guest_ram::{RamFile, RamFileKind, Sealed};

/// Default for the most guest RAM of one device. Address space is 128 TiB for all devices, of which
/// there are at most 128: this uses half of it.
pub const RAM_BYTES_MAX: u64 = 512 << 30;

/// What a device accepts as guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamPolicy {
    /// Whether files that can shrink are accepted.
    pub sealing: Sealing,
    /// Whether files on a tmpfs are accepted.
    pub tmpfs: RamAllowed,
    /// Whether hugetlbfs files are accepted.
    pub hugetlbfs: RamAllowed,
    /// Most bytes of all regions together, and of any one file: the memory kept per file grows with
    /// the file's length, however small the named part is.
    pub bytes_max: u64,
}

impl Default for RamPolicy {
    fn default() -> Self {
        Self {
            sealing: Sealing::default(),
            tmpfs: RamAllowed::default(),
            hugetlbfs: RamAllowed::default(),
            bytes_max: RAM_BYTES_MAX,
        }
    }
}

/// Whether a RAM file must be sealed against shrinking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sealing {
    /// The file is sealed if it accepts seals.
    #[default]
    Preferred,
    /// The file is refused if it accepts no seals.
    Required,
}

/// Whether a kind of file is accepted as guest RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RamAllowed {
    /// The operator vouches for it.
    Yes,
    /// It is refused.
    #[default]
    No,
}

impl RamPolicy {
    /// Refuses files that the policy does not allow.
    ///
    /// # Errors
    /// [`MemoryError::NotAllowed`], [`MemoryError::NotSealed`], [`MemoryError::FileOverQuota`].
    pub(crate) fn check(&self, file: &RamFile) -> Result<(), MemoryError> {
        let (allowed, kind) = match file.kind {
            RamFileKind::Memfd => (RamAllowed::Yes, "memfd"),
            RamFileKind::Tmpfs => (self.tmpfs, "tmpfs"),
            RamFileKind::Hugetlbfs => (self.hugetlbfs, "hugetlbfs"),
        };
        if allowed == RamAllowed::No {
            let key = file.key;
            return Err(MemoryError::NotAllowed { key, kind });
        }
        if self.sealing == Sealing::Required && file.sealed == Sealed::No {
            return Err(MemoryError::NotSealed(file.key));
        }
        if file.bytes > self.bytes_max {
            return Err(MemoryError::FileOverQuota {
                key: file.key,
                bytes: file.bytes,
                max_bytes: self.bytes_max,
            });
        }
        Ok(())
    }

    /// Refuses more memory than a front end may have mapped.
    ///
    /// # Errors
    /// [`MemoryError::OverQuota`].
    pub(crate) fn check_bytes(
        &self,
        regions: impl Iterator<Item = u64>,
    ) -> Result<(), MemoryError> {
        let bytes = regions.fold(0, u64::saturating_add);
        let max_bytes = self.bytes_max;
        if bytes > max_bytes {
            return Err(MemoryError::OverQuota { bytes, max_bytes });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::FileKey;

    #[test]
    fn policy_decides_by_what_can_be_guaranteed() {
        let file = |kind, sealed| RamFile {
            key: FileKey { dev: 1, ino: 2 },
            bytes: 4096,
            kind,
            sealed,
            page_bytes: 4096,
        };
        let usual = RamPolicy::default();
        let strict = RamPolicy {
            sealing: Sealing::Required,
            ..usual
        };
        let lenient = RamPolicy {
            tmpfs: RamAllowed::Yes,
            hugetlbfs: RamAllowed::Yes,
            ..usual
        };
        for sealed in [Sealed::Yes, Sealed::No] {
            assert!(usual.check(&file(RamFileKind::Memfd, sealed)).is_ok());
            let strictly = strict.check(&file(RamFileKind::Memfd, sealed));
            assert_eq!(strictly.is_ok(), sealed == Sealed::Yes);
            for kind in [RamFileKind::Tmpfs, RamFileKind::Hugetlbfs] {
                let refused = usual.check(&file(kind, sealed));
                assert!(matches!(refused, Err(MemoryError::NotAllowed { .. })));
                assert!(lenient.check(&file(kind, sealed)).is_ok());
            }
        }
        let long = RamFile {
            bytes: RAM_BYTES_MAX + 1,
            ..file(RamFileKind::Memfd, Sealed::Yes)
        };
        let refused = usual.check(&long);
        assert!(matches!(refused, Err(MemoryError::FileOverQuota { .. })));
        assert!(usual.check_bytes([RAM_BYTES_MAX].into_iter()).is_ok());
        assert!(usual.check_bytes([RAM_BYTES_MAX, 1].into_iter()).is_err());
        assert!(usual.check_bytes([u64::MAX, 1].into_iter()).is_err());
    }
}
