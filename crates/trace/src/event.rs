// SPDX-License-Identifier: Apache-2.0
//! The content of a trace: one [`Event`] for each thing that the translation agent saw, in order.
//!
//! Most events are translation requests. The rest change what may be cached (invalidations) or which
//! tenants exist (joins and leaves). A packet is not an event: the devices that the traces are about issue
//! a fixed number of requests a packet (HyperTRIO IV-C: ring, data, mailbox), so a packet is that many
//! consecutive requests.

use std::fmt;

use pagetide_addr::Iova;

/// Highest bit of an I/O virtual address, plus one: no IOMMU translates more
/// (VT-d with 5-level paging).
pub const IOVA_BITS: u32 = 57;

/// Id of the function that issues a request: in hardware its bus, device and
/// function number, 16 bits; a hyper-trace may number past that.
#[doc(alias = "SID")]
#[doc(alias = "requester id")]
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Debug,
    Default,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(transparent)]
pub struct SourceId(pub u32);

/// Address space that the IOMMU translates for a source.
#[doc(alias = "DID")]
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Debug,
    Default,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(transparent)]
pub struct IommuDomain(pub u32);

/// Size of a page, or of the naturally aligned span that an invalidation
/// covers: a power of two of at least 4 KiB.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageSize(u8);

impl PageSize {
    /// 4 KiB, mapped at level 1.
    pub const SIZE_4K: Self = Self(12);
    /// 2 MiB, mapped at level 2.
    pub const SIZE_2M: Self = Self(21);
    /// 1 GiB, mapped at level 3.
    pub const SIZE_1G: Self = Self(30);

    /// A span of `1 << shift` bytes, or `None` if that is below 4 KiB or beyond [`IOVA_BITS`].
    #[must_use]
    pub const fn from_shift(shift: u32) -> Option<Self> {
        #[expect(clippy::cast_possible_truncation, reason = "at most 57")]
        if shift >= 12 && shift <= IOVA_BITS {
            Some(Self(shift as u8))
        } else {
            None
        }
    }

    /// The page size that an entry of page-table level `level` maps (1: 4 KiB, 2: 2 MiB, 3: 1 GiB).
    #[must_use]
    pub const fn from_level(level: u64) -> Option<Self> {
        match level {
            1 => Some(Self::SIZE_4K),
            2 => Some(Self::SIZE_2M),
            3 => Some(Self::SIZE_1G),
            _ => None,
        }
    }

    /// A span of `bytes`, if that is a power of two in range.
    #[must_use]
    pub const fn from_bytes(bytes: u64) -> Option<Self> {
        if bytes.is_power_of_two() {
            Self::from_shift(bytes.trailing_zeros())
        } else {
            None
        }
    }

    /// log2 of the bytes.
    #[must_use]
    pub const fn shift(self) -> u32 {
        self.0 as u32
    }

    /// Bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        1 << self.0
    }

    /// Page-table level of an entry that maps such a page; `None` for a span that is no page.
    #[must_use]
    pub const fn level(self) -> Option<u32> {
        match self.0 {
            12 => Some(1),
            21 => Some(2),
            30 => Some(3),
            _ => None,
        }
    }
}

impl fmt::Debug for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0..20 => write!(f, "{} KiB", self.bytes() >> 10),
            20..30 => write!(f, "{} MiB", self.bytes() >> 20),
            _ => write!(f, "{} GiB", self.bytes() >> 30),
        }
    }
}

/// The access of a request, as far as the trace records it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum TraceAccess {
    /// The trace does not record it.
    #[default]
    Unknown,
    /// DMA from memory.
    Read,
    /// DMA to memory.
    Write,
}

/// Kind of an event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum EventKind {
    /// A request to translate `iova` for `source`, in front of any cache.
    #[default]
    Translate,
    /// Translations of `domain` in the span `page_size` around `iova` are void.
    InvalidatePages,
    /// Every translation of `domain` is void.
    InvalidateDomain,
    /// Every translation is void.
    InvalidateAll,
    /// The context entry of `source` is void, and `domain`'s translations with it.
    InvalidateSource,
    /// The context entries of all sources of `domain` are void.
    InvalidateContextsOfDomain,
    /// Every context entry is void.
    InvalidateContexts,
    /// `source` starts to work, for `domain` (the host has configured it).
    Join,
    /// `source` stops working.
    Leave,
    /// The host has paged out `domain`'s memory in the span `page_size` around `iova`: it is absent until
    /// somebody asks for it.
    PageOut,
}

/// One thing that the translation agent saw.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Event {
    /// Time from an arbitrary zero; never runs backwards in a trace. `None` if the trace has only the
    /// order.
    pub time_ns: Option<u64>,
    /// The source, for events about a source.
    pub source: SourceId,
    /// The domain, for events about a domain.
    pub domain: IommuDomain,
    /// The address; below `1 << IOVA_BITS`. Need not be aligned.
    pub iova: Iova,
    /// Page size (of a [`EventKind::Translate`]: one that has a level) or span; `None` if the trace does
    /// not record it.
    pub page_size: Option<PageSize>,
    /// The access.
    pub access: TraceAccess,
    /// The event's kind.
    pub kind: EventKind,
}

impl Event {
    /// A translation request without time or access.
    #[must_use]
    pub const fn translate(
        source: SourceId,
        domain: IommuDomain,
        iova: Iova,
        page_size: Option<PageSize>,
    ) -> Self {
        Self {
            time_ns: None,
            source,
            domain,
            iova,
            page_size,
            access: TraceAccess::Unknown,
            kind: EventKind::Translate,
        }
    }
}
