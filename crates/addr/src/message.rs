// SPDX-License-Identifier: Apache-2.0
//! Page request and page response: the messages between a device and its host about an I/O page
//! fault (VPRI 5.2, after PCIe PRI).
//!
//! These are the messages as the program sees them, whatever the transport: a queue within one
//! process, the page fault queue of a VPRI function, the page request queue of an IOMMU.

use crate::{DeviceId, DomainId, FileRange, QueueId};

/// What an access wants to do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, serde::Serialize, serde::Deserialize)]
pub enum Access {
    /// Read only.
    Read,
    /// Write, or read and write.
    Write,
}

/// Whether reading the marks of touched pages clears them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Marks {
    /// They stay.
    Keep,
    /// They are cleared: the next read returns pages touched after this one.
    Forget,
}

/// Identifies one of a device's outstanding page requests; chosen by the device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Most pages of one [`RequestKind::Overwrite`], so that one word has a bit for each.
pub const OVERWRITE_PAGES_MAX: u64 = 64;

/// Why a device requests pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestKind {
    /// A transfer waits for them.
    Demand,
    /// No transfer waits yet: they belong to descriptors that will be processed soon.
    Prefault,
    /// The device has written each page whole, into bounce buffers of its own. The pages are to be
    /// installed with that content, and their stored content dropped. A page that is present does
    /// not change, and the device copies its bytes itself.
    Overwrite {
        /// Bounce buffer of the first page; the others follow it. At most [`OVERWRITE_PAGES_MAX`].
        slot: u32,
    },
    /// As [`Self::Demand`], but nobody needs what the pages held: they lie wholly in buffers that were posted when
    /// the device looked, after [`PageRequest::sent_ns`]. Content that was stored before that time becomes zeros
    /// instead of being loaded.
    Blank,
    /// The same as [`Self::Prefault`]: no transfer waits yet.
    BlankAhead,
    /// The device touched an absent page, which the userfaultfd on its own mapping caught. Served
    /// like a demand and counted: without a balloon in the guest it is a bug.
    AliasFault,
}

impl RequestKind {
    /// True if no transfer waits for the pages.
    #[must_use]
    pub const fn is_ahead(self) -> bool {
        matches!(self, Self::Prefault | Self::BlankAhead)
    }

    /// The request for the same pages with their content: for a host that does not know the other kinds.
    #[must_use]
    pub const fn with_content(self) -> Self {
        match self {
            Self::Blank => Self::Demand,
            Self::BlankAhead => Self::Prefault,
            other => other,
        }
    }
}

/// A device's request for pages it may not touch yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageRequest {
    /// Chosen by the device, returned in the response.
    pub id: RequestId,
    /// Device that faulted.
    pub device: DeviceId,
    /// Its queue that is parked until the response.
    pub queue: QueueId,
    /// Domain in which `pages` are counted.
    pub domain: DomainId,
    /// Pages wanted, as page numbers of the domain's file.
    pub pages: FileRange,
    /// Access wanted.
    pub access: Access,
    /// Why they are requested.
    pub kind: RequestKind,
    /// Interrupt vector that notifies the driver of this queue; `None` if it polls instead (VPRI
    /// 6.1: the fault is handled where that interrupt goes).
    pub vector: Option<u16>,
    /// When the device sent it, in nanoseconds of the host's monotonic clock; 0 if the device has
    /// no such clock. Of a blank request: a time before the device saw that the pages lie in posted buffers.
    pub sent_ns: u64,
    /// Fault injection: the host answers no sooner than this many microseconds after it has begun.
    pub hold_us: u32,
}

impl PageRequest {
    /// A plain request of a transfer that waits.
    #[must_use]
    pub const fn demand(
        id: RequestId,
        device: DeviceId,
        queue: QueueId,
        domain: DomainId,
        pages: FileRange,
        access: Access,
    ) -> Self {
        Self {
            id,
            device,
            queue,
            domain,
            pages,
            access,
            kind: RequestKind::Demand,
            vector: None,
            sent_ns: 0,
            hold_us: 0,
        }
    }
}

/// How a page request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ResponseCode {
    /// All pages were made present; retry (one may have been evicted again meanwhile).
    Success,
    /// The pages do not belong to the domain, or the access is not allowed there.
    InvalidRequest,
    /// The content is lost or the VM is going away: fail the DMA.
    ResponseFailure,
}

/// The tier of the slowest page of a request.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    Debug,
    serde::Serialize,
    serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Tier {
    /// Every page was present.
    #[default]
    Present,
    /// Known to be zero.
    Zero,
    /// Kept compressed.
    Compressed,
    /// Kept in memory uncompressed.
    Uncompressed,
    /// Kept on a disk.
    Disk,
    /// Kept in the memory of another host.
    Remote,
    /// Not known.
    Unknown,
}

impl std::fmt::Display for Tier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Present => "present",
            Self::Zero => "zero",
            Self::Compressed => "compressed",
            Self::Uncompressed => "uncompressed",
            Self::Disk => "disk",
            Self::Remote => "remote",
            Self::Unknown => "unknown tier",
        })
    }
}

/// The host's answer to one [`PageRequest`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageResponse {
    /// Id of the request.
    pub id: RequestId,
    /// Queue of the request.
    pub queue: QueueId,
    /// How it ended.
    pub code: ResponseCode,
    /// Where the content came from.
    pub tier: Tier,
    /// For an overwrite: bit `k` says that page `k` was installed with the device's content.
    pub installed: u64,
    /// From [`PageRequest::sent_ns`] until its handling began (pre-fault), in nanoseconds; measured
    /// from its receipt if the device gave no time.
    pub waited_ns: u64,
    /// How long its handling took, in nanoseconds.
    pub handling_ns: u64,
}

impl PageResponse {
    /// The response `code` to `request`, as if there was nothing to do.
    #[must_use]
    pub const fn to(request: &PageRequest, code: ResponseCode) -> Self {
        Self {
            id: request.id,
            queue: request.queue,
            code,
            tier: Tier::Present,
            installed: 0,
            waited_ns: 0,
            handling_ns: 0,
        }
    }
}
