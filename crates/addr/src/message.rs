// SPDX-License-Identifier: Apache-2.0
//! Page request and page response: what a device and its host tell one another
//! about an I/O page fault (VPRI 5.2, after PCIe PRI).
//!
//! These are the messages as the program sees them, whatever carries them: a
//! queue within one process, the page fault queue of a VPRI function, the page
//! request queue of an IOMMU.

use crate::{DeviceId, DomainId, FileRange, QueueId};

/// What an access wants to do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, serde::Serialize, serde::Deserialize)]
pub enum Access {
    /// Read only.
    Read,
    /// Write, or read and write.
    Write,
}

/// What becomes of the marks of touched pages when they have been looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Marks {
    /// They stay.
    Keep,
    /// They go: the next look tells what was touched after this one.
    Forget,
}

/// Tells a device's outstanding page requests apart; chosen by the device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Most pages of one [`RequestKind::Overwrite`], so that one word tells of each.
pub const OVERWRITE_PAGES_MAX: u64 = 64;

/// Why a device asks for pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestKind {
    /// A transfer waits for them.
    Demand,
    /// Nobody waits yet: they belong to descriptors that will be worked on soon.
    Prefault,
    /// The device has written each of them whole, into bounce buffers of its own: the pages are to
    /// be installed with that content, and what is stored of them dropped. A page that is present
    /// stays as it is, and the device copies its bytes itself.
    Overwrite {
        /// Bounce buffer of the first page; the others follow it. At most [`OVERWRITE_PAGES_MAX`].
        slot: u32,
    },
    /// The device touched the page though it was absent, which its watch over its own mapping
    /// caught: served like a demand and counted, for without a balloon in the guest it is a bug.
    AliasFault,
}

/// A device asks for pages it may not touch yet.
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
    /// Why.
    pub kind: RequestKind,
    /// Interrupt vector by which the driver hears of this queue; `None` if it polls instead
    /// (VPRI 6.1: the fault is handled where that interrupt goes).
    pub vector: Option<u16>,
    /// When the device sent it, in nanoseconds of the host's monotonic clock; 0 if the device has
    /// no such clock.
    pub sent_ns: u64,
    /// Fault injection: the host answers no sooner than this after it has begun, in microseconds.
    pub hold_us: u32,
}

impl PageRequest {
    /// A request of a transfer that waits, without anything special about it.
    #[must_use]
    pub const fn demand(
        id: RequestId,
        (device, queue): (DeviceId, QueueId),
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
    /// All pages were made present; try again (another eviction may have come between).
    Success,
    /// The pages do not belong to the domain, or the access is not allowed there.
    InvalidRequest,
    /// The content is lost or the VM is going away: fail the DMA.
    ResponseFailure,
}

/// Where the slowest page of a request came from.
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
    /// Every page was there.
    #[default]
    Present,
    /// Known to be zero.
    Zero,
    /// Kept compressed.
    Compressed,
    /// Kept in memory as it was.
    Uncompressed,
    /// Nobody knows.
    Unknown,
}

impl std::fmt::Display for Tier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Present => "present",
            Self::Zero => "zero",
            Self::Compressed => "compressed",
            Self::Uncompressed => "uncompressed",
            Self::Unknown => "unknown tier",
        })
    }
}

/// The host's answer to one [`PageRequest`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageResponse {
    /// Of the request.
    pub id: RequestId,
    /// Queue of the request.
    pub queue: QueueId,
    /// How it ended.
    pub code: ResponseCode,
    /// Where the content came from.
    pub tier: Tier,
    /// Of an overwrite: bit `k` says that page `k` was installed with the device's content.
    pub installed: u64,
    /// From [`PageRequest::sent_ns`] until its handling began (pre-fault), in nanoseconds; counted
    /// from its receipt if the device gave no time.
    pub waited_ns: u64,
    /// How long it was handled, in nanoseconds.
    pub handling_ns: u64,
}

impl PageResponse {
    /// The answer `code` to `request`, as if nothing had been to do.
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
