// SPDX-License-Identifier: Apache-2.0
//! The hostile front end: a peer that can send any vhost-user message, at any time.
//!
//! A process that may connect to a device's socket is not trusted: it may stop its own device and
//! nothing else. The tests of this speak the protocol with an encoding of their own ([`wire`]),
//! over a connection that carries any bytes with any descriptors ([`peer`]), with rings written by
//! hand ([`front`]), with descriptors that block, lie or end ([`descriptors`]), and with memory
//! that changes or disappears meanwhile ([`changing`]).
//!
//! # Terms
//! An *attack* is one thing that a front end should not do, under a name. What its own device then
//! does is [`Seen`], and each attack lists the right outcomes. What it *holds* ([`Held`]) stays as
//! it is until it is dropped: connections, descriptors, threads. A *victim* ([`victim`]) is a
//! tenant of the same engine that verifies its data meanwhile.
//!
//! ```text
//!   attack ──► Held { seen } ── the victim goes on? the daemon answers? ──► dropped
//!                                                                              │
//!       the victim goes on? a new front end is served? nothing is left? ◄──────┘
//! ```

pub mod attacks;
pub mod changing;
pub mod descriptors;
pub mod front;
pub mod peer;
pub mod ram;
pub mod scene;
pub mod silent_fuse;
pub mod victim;
pub mod wire;

use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::Value;

pub use attacks::all as attacks;
pub use peer::Failure;

/// What the attacked device did, as its front end sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// It goes on and serves requests.
    Served,
    /// It refused a message and reported that.
    Refused,
    /// It hung up.
    HungUp,
    /// It stopped.
    Stopped,
}

/// A device that is attacked.
#[derive(Debug, Clone)]
pub struct Target {
    /// Its socket.
    pub socket: PathBuf,
    /// A folder on tmpfs for the attack's files.
    pub folder: PathBuf,
}

/// The outcome of an attack, and all that it holds until dropped.
pub struct Held {
    /// What the device did.
    pub seen: Seen,
    keep: Vec<Box<dyn Send>>,
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.keep.len();
        write!(f, "{:?}, holding {held} things", self.seen)
    }
}

impl Held {
    /// Nothing is held.
    #[must_use]
    pub fn nothing(seen: Seen) -> Self {
        Self {
            seen,
            keep: Vec::new(),
        }
    }

    /// Adds this, which is dropped after what is held already.
    #[must_use]
    pub fn and(mut self, thing: impl Send + 'static) -> Self {
        self.keep.push(Box::new(thing));
        self
    }
}

type Run = dyn Fn(&Target) -> Result<Held, Failure> + Send + Sync;

/// One thing that a front end should not do.
pub struct Attack {
    /// Its name.
    pub name: String,
    /// What the device may do.
    pub expected: Vec<Seen>,
    /// Arguments of `dpu blk`, for a device of its own; if empty, any device will do.
    pub options: Vec<&'static str>,
    /// What `dpu list --json` shows of the device while it is attacked.
    pub listed: Option<(&'static str, Value)>,
    run: Box<Run>,
}

impl fmt::Debug for Attack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} → {:?}", self.name, self.expected)
    }
}

impl Attack {
    fn new(
        name: impl Into<String>,
        expected: &[Seen],
        run: impl Fn(&Target) -> Result<Held, Failure> + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            expected: expected.to_vec(),
            options: Vec::new(),
            listed: None,
            run: Box::new(run),
        }
    }

    fn on_device_with(self, options: &[&'static str]) -> Self {
        Self {
            options: options.to_vec(),
            ..self
        }
    }

    fn listed(self, field: &'static str, value: Value) -> Self {
        Self {
            listed: Some((field, value)),
            ..self
        }
    }

    /// Attacks.
    ///
    /// # Errors
    /// [`Failure::NotHere`] where the machine lacks what is needed; else the device's reaction is
    /// not an answer to the attack, for example none at all.
    pub fn run(&self, target: &Target) -> Result<Held, Failure> {
        (self.run)(target)
    }
}

/// Runs the attack of this name on the device at `socket`, with `folder` for its files.
///
/// # Errors
/// As [`Attack::run`]; also if there is no such attack.
pub fn attack(name: &str, socket: &Path, folder: &Path) -> Result<Held, Failure> {
    let Some(attack) = attacks().into_iter().find(|attack| attack.name == name) else {
        return Err(peer::wrong(
            "an attack",
            format!("there is none named {name}"),
        ));
    };
    attack.run(&Target {
        socket: socket.to_owned(),
        folder: folder.to_owned(),
    })
}

/// The device's reaction to a step of an attack.
///
/// # Errors
/// It did not answer, or our own side failed.
pub fn seen<T>(outcome: Result<T, Failure>) -> Result<Seen, Failure> {
    match outcome {
        Ok(_) => Ok(Seen::Served),
        Err(Failure::Refused { .. }) => Ok(Seen::Refused),
        Err(Failure::HungUp { .. }) => Ok(Seen::HungUp),
        Err(Failure::Stopped { .. }) => Ok(Seen::Stopped),
        Err(other) => Err(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attacks_have_names_of_their_own_and_are_many() {
        let mut names: Vec<String> = attacks().into_iter().map(|attack| attack.name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(count >= 100, "{count}");
    }
}
