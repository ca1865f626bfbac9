// SPDX-License-Identifier: Apache-2.0
//! The messages of a hand-over, version 1, which is frozen: see the rules at the head of the crate.

use crate::HandoverError;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The version of the messages that this program writes.
pub const VERSION: u16 = 1;
/// What this program knows of that a hand-over may require.
pub const KNOWN: [&str; 3] = [POOLS, DISKS, NICS];
/// VMs are recovered from their pools in the state directory.
pub const POOLS: &str = "pools";
/// Connections of front ends are handed over, with requests in flight in their in-flight regions.
pub const DISKS: &str = "disks";

/// Links of network devices are handed over, with the packets that wait for their guests.
pub const NICS: &str = "nics";

/// A message.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Message {
    /// From the daemon: take over.
    Offer(Offer),
    /// From the successor: it can.
    Ready(Ready),
    /// From the successor: it cannot, and has changed nothing that its predecessor cannot recover.
    Refused(Refused),
    /// From the daemon: all its work has stopped; begin.
    Go(Go),
    /// From the successor: everything is recovered and served.
    Serving,
    /// From the daemon: it ends, and the successor is the daemon.
    Commit,
}

impl Message {
    /// Its name in error messages.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Offer(_) => "offer",
            Self::Ready(_) => "ready",
            Self::Refused(_) => "refused",
            Self::Go(_) => "go",
            Self::Serving => "serving",
            Self::Commit => "commit",
        }
    }

    /// The error if this comes where `wanted` was expected.
    #[must_use]
    pub const fn instead_of(&self, wanted: &'static str) -> HandoverError {
        HandoverError::Unexpected {
            found: self.name(),
            wanted,
        }
    }
}

/// What a daemon offers to a successor.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Offer {
    /// Version of the messages.
    pub version: u16,
    /// What a successor must know, or refuse.
    pub requires: Vec<String>,
    /// Version of the daemon's program, for people.
    pub program: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// Its settings in force, as a settings file.
    pub settings: String,
}

impl Offer {
    /// The first thing in it that a successor of this version does not know.
    #[must_use]
    pub fn unknown(&self) -> Option<&str> {
        let is_known = |what: &&String| !KNOWN.contains(&what.as_str());
        self.requires.iter().find(is_known).map(String::as_str)
    }
}

/// A successor that can take over.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Ready {
    /// Version of its messages.
    pub version: u16,
    /// Version of its program, for people.
    pub program: String,
    /// Its process id.
    pub pid: u32,
}

/// A successor that cannot.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Refused {
    /// Why, as a sentence.
    pub reason: String,
}

/// A descriptor that comes with a message: its place among them. Each may be named once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fd(pub u32);

/// Everything that a successor gets. What is not here it recovers from the state directory, as after a death.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Go {
    /// When the daemon began to stop its work, by the host's monotonic clock.
    pub stopped_ns: u64,
    /// The lock file of the state directory, locked. The lock belongs to the open file, so it never falls.
    pub lock: Fd,
    /// The socket of the API, which listens.
    pub api: Fd,
    /// VMs that are served, by name: a successor that cannot recover one of them refuses.
    #[serde(default)]
    pub vms: Vec<String>,
    /// The devices that listen.
    #[serde(default)]
    pub devices: Vec<Device>,
}

/// A device with its connection.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Device {
    /// Path of its socket, by which it is found in the list of devices.
    pub socket: PathBuf,
    /// That socket, which listens.
    pub listener: Fd,
    /// Its front end, if one is connected.
    #[serde(default)]
    pub front_end: Option<FrontEnd>,
    /// What a network device has besides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nic: Option<Nic>,
}

/// What a network device has besides its front end.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Nic {
    /// What its link has open: each queue of a TAP, by number, or a packet socket.
    #[serde(default)]
    pub links: Vec<Fd>,
    /// Number of the host's interface that they are of.
    #[serde(default)]
    pub interface: u32,
    /// Packets for the guest, oldest first: for each the number of its queue pair (2 bytes), its length (4 bytes),
    /// little-endian, and header and packet.
    #[serde(default)]
    pub packets: Option<Fd>,
}

/// A front end as far as its session has come. Numbers are those of vhost-user's messages.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FrontEnd {
    /// Its connection, on which no message is under way.
    pub connection: Fd,
    /// Features of virtio that it has accepted.
    pub features: u64,
    /// Protocol features that it has accepted, once it has.
    #[serde(default)]
    pub protocol_features: Option<u64>,
    /// Its memory.
    #[serde(default)]
    pub memory: Vec<Region>,
    /// Where its requests in flight are recorded.
    #[serde(default)]
    pub inflight: Option<Inflight>,
    /// Its rings, by number.
    #[serde(default)]
    pub rings: Vec<Ring>,
}

/// A region of a front end's memory.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Region {
    /// Its address in descriptors.
    pub gpa: u64,
    /// Its length.
    pub bytes: u64,
    /// Its address in messages that set up rings.
    pub frontend: u64,
    /// Its first byte in its file.
    pub file_offset: u64,
    /// Its file.
    pub file: Fd,
}

/// An in-flight region.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Inflight {
    /// Its length.
    pub bytes: u64,
    /// Its first byte in its file.
    pub file_offset: u64,
    /// Queues that it has room for.
    pub queues: u16,
    /// Entries of a queue that it has room for.
    pub queue_size: u16,
    /// Its file.
    pub file: Fd,
}

/// What a front end has set of a ring.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Ring {
    /// Entries; 0 before it is set.
    pub size: u16,
    /// Where its avail ring is to be read next. A ring with an in-flight region is continued by that.
    pub base: u16,
    /// Where it is.
    #[serde(default)]
    pub addresses: Option<Addresses>,
    /// Signalled by the front end.
    #[serde(default)]
    pub kick: Option<Fd>,
    /// To be signalled at completions.
    #[serde(default)]
    pub call: Option<Fd>,
    /// To be signalled when the ring is broken.
    #[serde(default)]
    pub error: Option<Fd>,
    /// Whether the front end has enabled it.
    #[serde(default)]
    pub enabled: bool,
}

/// Addresses of a ring in the front end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Addresses {
    /// The descriptor table.
    pub descriptors: u64,
    /// The avail ring.
    pub avail: u64,
    /// The used ring.
    pub used: u64,
}
