// SPDX-License-Identifier: Apache-2.0
//! [`DeviceRequest`]: what was requested, of whatever kind, and what all kinds have in common.

use crate::control::{BlkRequest, NetRequest, RamKind, SocketMode};
use std::path::Path;

/// A request for a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum DeviceRequest {
    /// For a disk.
    Blk(BlkRequest),
    /// For a network device.
    Net(NetRequest),
}

/// What requests of all kinds have.
#[derive(Clone, Copy)]
pub(super) struct Common<'a> {
    pub(super) socket: &'a Path,
    pub(super) lookup: bool,
    pub(super) weight: u32,
    pub(super) require_sealed: bool,
    pub(super) allow_ram: &'a [RamKind],
    pub(super) ram_max_bytes: u64,
    pub(super) owner: Option<&'a str>,
    pub(super) group: Option<&'a str>,
    pub(super) mode: Option<SocketMode>,
}

/// The fields of [`Common`], which both kinds of request have under the same names.
macro_rules! common_of {
    ($request:expr) => {
        Common {
            socket: &$request.socket,
            lookup: $request.lookup,
            weight: $request.weight,
            require_sealed: $request.require_sealed,
            allow_ram: &$request.allow_ram,
            ram_max_bytes: $request.ram_max_bytes,
            owner: $request.owner.as_deref(),
            group: $request.group.as_deref(),
            mode: $request.mode,
        }
    };
}

impl DeviceRequest {
    pub(super) fn common(&self) -> Common<'_> {
        match self {
            Self::Blk(request) => common_of!(request),
            Self::Net(request) => common_of!(request),
        }
    }

    /// The socket it listens on, which is its name.
    pub(super) fn socket(&self) -> &Path {
        self.common().socket
    }

    /// Its kind in reports and on the list.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Blk(_) => "blk",
            Self::Net(_) => "net",
        }
    }

    /// Changes its weight; returns what that was.
    pub(super) fn set_weight(&mut self, weight: u32) -> u32 {
        let its = match self {
            Self::Blk(request) => &mut request.weight,
            Self::Net(request) => &mut request.weight,
        };
        std::mem::replace(its, weight)
    }

    /// Which posted buffers of a network device stay present.
    pub(super) fn wire(&self) -> Option<String> {
        match self {
            Self::Blk(_) => None,
            Self::Net(request) => Some(request.wire.to_string()),
        }
    }

    /// The serial number of a disk.
    pub(super) fn serial(&self) -> Option<&str> {
        match self {
            Self::Blk(request) => request.serial.as_deref(),
            Self::Net(_) => None,
        }
    }
}
