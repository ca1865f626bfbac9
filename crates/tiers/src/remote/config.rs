// SPDX-License-Identifier: Apache-2.0
//! How a remote tier is set up, and what it tells beside its health.

use std::time::{Duration, Instant};

use super::address::RemoteUrl;
use crate::figures::Durability;

/// After so many bounds without a reply a connection is given up.
const GONE_AFTER_BOUNDS: u32 = 4;

/// What becomes of reads while the server is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WhenGone {
    /// They wait until it is back.
    Wait,
    /// They fail, at their time bound.
    Lost,
}

/// How long requests may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TimeBounds {
    /// A connection with all that is asked when it is made.
    pub connect: Duration,
    /// A read.
    pub read: Duration,
    /// A batch.
    pub write: Duration,
}

impl TimeBounds {
    /// After so long without a reply a connection is given up.
    #[must_use]
    pub fn patience(&self) -> Duration {
        self.read.max(self.write) * GONE_AFTER_BOUNDS
    }
}

impl Default for TimeBounds {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            read: Duration::from_secs(1),
            write: Duration::from_secs(5),
        }
    }
}

/// How the first attempt to connect ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FirstContact {
    /// It has not.
    #[default]
    UnderWay,
    /// The server takes pages, or is full.
    Made,
    /// It could not be reached, or did not answer.
    NoAnswer,
    /// It answered, and is not a server for pages: it may evict them, or does not accept the password.
    Refused,
}

/// How a remote tier is set up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RemoteConfig {
    /// Where it is. What it names is read when a connection is made.
    pub url: RemoteUrl,
    /// Most bytes of sealed pages that it is given.
    pub limit_bytes: u64,
    /// What becomes of reads while the server is gone.
    pub when_gone: WhenGone,
    /// How long requests may take.
    pub bounds: TimeBounds,
}

/// What an operator should know beside how the tier stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RemoteNotes {
    /// What the server keeps across its end.
    pub durability: Durability,
    /// How often the server was found to have lost its data.
    pub losses: u64,
    /// When, the last time.
    pub last_loss: Option<Instant>,
    /// Pages that were read and not there.
    pub pages_not_there: u64,
}
