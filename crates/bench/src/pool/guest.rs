// SPDX-License-Identifier: Apache-2.0
//! The guest: a process with RAM that executes the bench's orders on it.

use super::ram::Ram;
use crate::orders::{Ordered, say, vmm_program};
use serde::{Deserialize, Serialize};
use std::{io::BufRead as _, path::Path, process::Command};

/// What it is to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// A third of the pages, drawn at random, gets new content.
    RewriteAThird,
    /// Half of the pages, drawn at random, are read and compared.
    ReadHalf,
    /// All pages are compared.
    Verify,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum Answer {
    Done,
    Failed { reason: String },
}

/// Is the guest until its input ends.
pub(crate) fn run(bytes: u64) -> Result<(), String> {
    let mut ram = Ram::new(bytes)?;
    say(&Answer::Done)?;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|error| error.to_string())?;
        let order = serde_json::from_str(&line).map_err(|error| format!("{line:?}: {error}"))?;
        let done = match order {
            Order::RewriteAThird => ram.rewrite_a_third(),
            Order::ReadHalf => ram.read_half(),
            Order::Verify => ram.verify(),
        };
        say(&match done {
            Ok(()) => Answer::Done,
            Err(reason) => Answer::Failed { reason },
        })?;
    }
    Ok(())
}

/// The guest as the bench controls it.
pub(super) struct Guest(Ordered);

impl Guest {
    /// Starts one with `bytes` of RAM. `dir` takes its program.
    pub(super) fn start(dir: &Path, bytes: u64) -> Result<Self, String> {
        let mut command = Command::new(vmm_program(dir)?);
        command.args(["bench-part", "pool-guest", "--bytes", &bytes.to_string()]);
        let mut guest = Self(Ordered::start(&mut command)?);
        guest.answer()?;
        Ok(guest)
    }

    pub(super) fn pid(&self) -> u32 {
        self.0.pid()
    }

    pub(super) fn obey(&mut self, order: Order) -> Result<(), String> {
        self.0.order(&order)?;
        self.answer()
    }

    fn answer(&mut self) -> Result<(), String> {
        match self.0.answer()? {
            Answer::Done => Ok(()),
            Answer::Failed { reason } => Err(format!("the guest: {reason}")),
        }
    }
}
