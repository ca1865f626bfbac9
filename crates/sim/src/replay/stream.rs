// SPDX-License-Identifier: Apache-2.0
//! [`AccessStream`]: accesses in the order of their time, which a replay is fed with.

use super::error::ReplayError;
use pagetide_access_log::Service;
use pagetide_addr::{Access, DeviceId, SectionNo};
use std::time::Duration;

/// The origin of an access.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Actor {
    /// The guest's CPUs.
    Cpu,
    /// A device, by DMA.
    Device(DeviceId, Service),
}

/// One access to one section; one that spans sections is several.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReplayAccess {
    /// Time since the start of the replay.
    pub at: Duration,
    /// Its origin.
    pub actor: Actor,
    /// The section of the VM.
    pub section: SectionNo,
    /// Its effect on memory: a device that reads a disk writes memory.
    pub access: Access,
    /// Bytes of the section.
    pub bytes: u64,
}

/// The accesses of one VM, in order of time.
pub trait AccessStream: Send {
    /// The next one; `None` at the end.
    ///
    /// # Errors
    /// The source's: a broken record, a file that cannot be read.
    fn next(&mut self) -> Result<Option<ReplayAccess>, ReplayError>;

    /// Origin of the access returned last, for messages: a file and a record, if there are any.
    fn whence(&self) -> String {
        "accesses without a trace".to_owned()
    }
}
