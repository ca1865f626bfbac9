// SPDX-License-Identifier: Apache-2.0
//! Addresses, page numbers, ranges and ids: one newtype per address space.
//!
//! Several different numbers can name one byte of a guest's memory, and confusing two of them
//! corrupts data. So each has a type of its own, and no arithmetic converts one into another except
//! through a table that knows both sides:
//!
//! ```text
//!   guest          Gpa                    what the guest and its drivers say
//!   device         Iova                   what a device says (equal to Gpa without a vIOMMU)
//!   VMM process    Hva                    where the VMM has mapped guest RAM
//!   front end      FrontendVa             where a vhost-user front end has mapped it
//!   backing file   FileKey, FilePage      the memfd, the one thing all processes share, and its pages
//!   Pagetide       PageNo, SectionNo      pages of an address space: the VM's files, one after the other
//!   GMEM           Va, Pa                 the same in bytes, and the physical memory behind it
//! ```
//!
//! All ranges are half-open.
//!
//! ```
//! use pagetide_addr::{Gpa, PageNo, SECTION_PAGES};
//!
//! assert_eq!(Gpa(0x1000).checked_add(0x1000), Some(Gpa(0x2000)));
//! assert_eq!(Gpa(u64::MAX).checked_add(1), None);
//!
//! let run = PageNo(SECTION_PAGES - 1).run(2);
//! assert_eq!(run.bytes(), 8192);
//! assert_eq!(run.sections().count(), 2);
//! ```
//! A page of a file is not taken for one of an address space:
//! ```compile_fail,E0308
//! use pagetide_addr::{FilePage, PageNo};
//!
//! let page: PageNo = FilePage(3);
//! ```

mod id;
mod message;
mod page;
mod set;

pub use id::{DeviceId, DomainId, FileKey, QueueId};
pub use message::{
    Access, Marks, OVERWRITE_PAGES_MAX, PageRequest, PageResponse, RequestId, RequestKind,
    ResponseCode, Tier,
};
pub use page::{
    FilePage, FileRange, FileSection, PAGE_BYTES, PAGE_SHIFT, PageNo, PageRange, SECTION_BYTES,
    SECTION_PAGES, SectionNo, to_usize,
};

pub use set::{FilePageSet, PageSet};

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[derive(serde::Serialize, serde::Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// The address `bytes` further on, or `None` past the end of the address space.
            #[must_use]
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(sum) => Some(Self(sum)),
                    None => None,
                }
            }

            /// Bytes from `base` to this address, or `None` if it lies below `base`.
            #[must_use]
            pub const fn offset_from(self, base: Self) -> Option<u64> {
                self.0.checked_sub(base.0)
            }

            /// True if the address is a multiple of the 4 KiB page size.
            #[must_use]
            pub const fn is_page_aligned(self) -> bool {
                self.0.is_multiple_of(PAGE_BYTES)
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

address! {
    /// Guest-physical address, in bytes.
    #[doc(alias = "guest physical address")]
    Gpa
}
address! {
    /// Address that a device issues, in bytes; equal to [`Gpa`] without a virtual IOMMU.
    Iova
}
address! {
    /// Address in a GMEM address space, in bytes: the same for the CPU and all attached devices.
    #[doc(alias = "gm_va_t")]
    Va
}
address! {
    /// Address of physical memory, in bytes: of the host's, or of a device's own.
    #[doc(alias = "gm_pa_t")]
    Pa
}
address! {
    /// Address in the VMM's own address space, in bytes.
    Hva
}
address! {
    /// Address in a vhost-user front end's address space, in bytes ("user address" on the wire).
    FrontendVa
}

impl Va {
    /// The page that holds it.
    #[must_use]
    pub const fn page(self) -> PageNo {
        PageNo::containing(self.0)
    }
}

impl PageNo {
    /// Its first byte.
    #[must_use]
    pub const fn va(self) -> Va {
        Va(self.byte_offset())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addition_past_the_end_is_none() {
        assert_eq!(Gpa(u64::MAX).checked_add(1), None);
        assert_eq!(Gpa(4096).checked_add(4096), Some(Gpa(8192)));
    }

    #[test]
    fn offset_below_base_is_none() {
        assert_eq!(Hva(0x1000).offset_from(Hva(0x2000)), None);
        assert_eq!(Hva(0x2000).offset_from(Hva(0x1000)), Some(0x1000));
    }
}
