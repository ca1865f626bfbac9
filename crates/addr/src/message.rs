// SPDX-License-Identifier: Apache-2.0
//! Page request and page response: what a device and its host tell one another
//! about an I/O page fault (VPRI 5.2, after PCIe PRI).

use crate::{DeviceId, DomainId, PageRange, QueueId};

/// What an access wants to do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, serde::Serialize, serde::Deserialize)]
pub enum Access {
    /// Read only.
    Read,
    /// Write, or read and write.
    Write,
}

/// Tells a device's outstanding page requests apart; chosen by the device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct RequestId(pub u64);

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
    pub pages: PageRange,
    /// Access wanted.
    pub access: Access,
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

/// The host's answer to one [`PageRequest`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageResponse {
    /// Of the request.
    pub id: RequestId,
    /// Queue of the request.
    pub queue: QueueId,
    /// How it ended.
    pub code: ResponseCode,
}
