// SPDX-License-Identifier: Apache-2.0
//! [`RingSettings`]: what a front end has set of a ring.

use pagetide_addr::FrontendVa;
use std::{os::fd::OwnedFd, sync::Arc};

/// Whether a ring runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Runs {
    /// It does.
    Yes,
    /// It does not.
    #[default]
    No,
}

/// Addresses of a ring in the front end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingAddresses {
    /// The descriptor table.
    pub descriptors: FrontendVa,
    /// The avail ring.
    pub avail: FrontendVa,
    /// The used ring.
    pub used: FrontendVa,
}

/// Whether a front end has enabled a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Enabled {
    /// It has.
    Yes,
    /// It has not.
    #[default]
    No,
}

/// What a front end has set of a ring. The descriptors are eventfds.
#[derive(Debug, Default)]
pub struct RingSettings {
    /// Entries; a power of two, at most as many as were offered; 0 before it is set.
    pub size: u16,
    /// Where it is.
    pub addresses: Option<RingAddresses>,
    /// Where its avail ring is to be read next.
    pub base: u16,
    /// Signalled by the front end.
    pub kick: Option<Arc<OwnedFd>>,
    /// To be signalled at completions.
    pub call: Option<OwnedFd>,
    /// To be signalled when the ring is broken.
    pub error: Option<OwnedFd>,
    /// Whether the front end has enabled it.
    pub enabled: Enabled,
    /// Whether it runs.
    pub runs: Runs,
}
