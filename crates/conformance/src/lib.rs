// SPDX-License-Identifier: Apache-2.0
//! A conformance tester: checks any implementation of the VPRI function against
//! `docs/vpri.md`.
//!
//! It connects as a driver and tries what the specification covers, valid and
//! invalid, one named check after the other, each on a connection of its own. It
//! needs no VM: the memory it makes spaces of has names that no file has. How a
//! device does DMA can only be tested if a device can be made to do some: with a
//! vhost-user-blk device of the same DPU ([`CheckOptions::disk`]) the tester reads
//! from that disk into memory of its own whose pages it has unmapped.
//!
//! # Before it is run
//! It is a driver, so the function must have none. Like each driver it sends READY,
//! after which unknown memory is read-write. So run it on a DPU that serves no VM.

mod chains;
mod disk;
mod lifecycle;
mod log;
mod messages;
mod probe;
mod transfers;

use pagetide_addr::{DomainId, FileKey};
use pagetide_vpri_function::{
    frontend::connect::ConnectError,
    wire::{Code, Config, Event, Reply},
};
use probe::Probe;
use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// How long a device may refuse a new connection after the last has closed.
const RETURN_PATIENCE: Duration = Duration::from_secs(5);
/// Between two tries to connect.
const RETURN_LOOK: Duration = Duration::from_millis(5);
/// First half of the names of the tester's memory.
const NAME: u64 = u64::from_le_bytes(*b"pt-check");

/// What to test.
#[derive(Clone, Debug)]
pub struct CheckOptions {
    /// Socket of the function.
    pub socket: PathBuf,
    /// Socket of a vhost-user-blk device of the same DPU, of 1 MiB at least. It is only read from.
    pub disk: Option<PathBuf>,
}

/// How a check ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The device follows the specification.
    Passed,
    /// It does not: a sentence.
    Failed(String),
    /// The check could not be run: a sentence.
    Skipped(String),
}

/// One check and how it ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CheckOutcome {
    /// Group and name, such as `map/range-past-the-end`.
    pub name: &'static str,
    /// What the specification demands.
    pub demand: &'static str,
    /// How it ended.
    pub verdict: Verdict,
}

/// The results of the tester.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CheckReport {
    /// Socket of the function.
    pub socket: PathBuf,
    /// The device's limits.
    pub config: Config,
    /// Feature bits that it offers.
    pub features: u64,
    /// Every check.
    pub checks: Vec<CheckOutcome>,
}

impl CheckReport {
    /// Number of checks that failed.
    #[must_use]
    pub fn failed(&self) -> usize {
        let failed = |check: &&CheckOutcome| matches!(check.verdict, Verdict::Failed(_));
        self.checks.iter().filter(failed).count()
    }
}

/// Why nothing could be tested.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// There is no function, or it accepts no driver.
    #[error(
        "{socket} cannot be tested: {source}; is a VPRI function there, without another driver?"
    )]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// The error.
        source: ConnectError,
    },
}

/// Why a check ended early.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The device violates the specification.
    Failed(String),
    /// It cannot be run.
    Skipped(String),
}

impl From<ConnectError> for Ended {
    fn from(error: ConnectError) -> Self {
        Self::Failed(error.to_string())
    }
}

type Checked = Result<(), Ended>;

/// A check.
#[derive(Clone, Copy)]
struct Check {
    name: &'static str,
    demand: &'static str,
    run: fn(&mut Tester) -> Checked,
}

/// Runs every check. `tell` is called with each outcome as a check ends.
///
/// # Errors
/// [`CheckError`]: there is nothing to test.
pub fn run(
    options: &CheckOptions,
    tell: &mut dyn FnMut(&CheckOutcome),
) -> Result<CheckReport, CheckError> {
    let connect = |source| CheckError::Connect {
        socket: options.socket.clone(),
        source,
    };
    let probe = Probe::open(&options.socket).map_err(connect)?;
    let (config, features) = (*probe.config(), probe.offered());
    let mut tester = Tester {
        options: options.clone(),
        probe: Some(probe),
        next_name: u64::from(std::process::id()) << 32,
    };
    let groups = [
        messages::CHECKS,
        lifecycle::CHECKS,
        chains::CHECKS,
        transfers::CHECKS,
        log::CHECKS,
    ];
    let mut checks = Vec::new();
    for check in groups.into_iter().flatten() {
        let outcome = CheckOutcome {
            name: check.name,
            demand: check.demand,
            verdict: match tester.fresh().and_then(|()| (check.run)(&mut tester)) {
                Ok(()) => Verdict::Passed,
                Err(Ended::Failed(why)) => Verdict::Failed(why),
                Err(Ended::Skipped(why)) => Verdict::Skipped(why),
            },
        };
        tell(&outcome);
        checks.push(outcome);
    }
    // Give back what was created.
    if let Err(Ended::Failed(why) | Ended::Skipped(why)) =
        tester.fresh().and_then(|()| tester.ready())
    {
        tracing::warn!("the function is left as the last check has left it: {why}");
    }
    Ok(CheckReport {
        socket: options.socket.clone(),
        config,
        features,
        checks,
    })
}

/// The state that a check works with.
pub(crate) struct Tester {
    options: CheckOptions,
    probe: Option<Probe>,
    next_name: u64,
}

/// Connections.
impl Tester {
    /// A new connection after BEGIN, without spaces of an earlier one.
    fn fresh(&mut self) -> Checked {
        self.reconnect()?;
        for event in [Event::Begin, Event::Ready, Event::Begin] {
            self.must(&event, Code::Ok)?;
        }
        Ok(())
    }

    /// Hangs up, and connects again.
    pub(crate) fn reconnect(&mut self) -> Checked {
        drop(self.probe.take());
        self.probe = Some(connected(&self.options.socket)?);
        Ok(())
    }

    /// Hangs up.
    pub(crate) fn hang_up(&mut self) {
        drop(self.probe.take());
    }

    /// The connection.
    pub(crate) fn probe(&mut self) -> Result<&mut Probe, Ended> {
        let none = || Ended::Failed("the device cannot be reached any more".to_owned());
        self.probe.as_mut().ok_or_else(none)
    }

    /// Socket of the function.
    pub(crate) fn socket(&self) -> &Path {
        &self.options.socket
    }

    /// Socket of a disk.
    pub(crate) fn disk(&self) -> Option<&Path> {
        self.options.disk.as_deref()
    }
}

/// Events.
impl Tester {
    /// A name that no memory has.
    pub(crate) fn name(&mut self) -> FileKey {
        self.next_name += 1;
        FileKey {
            dev: NAME,
            ino: self.next_name,
        }
    }

    /// Sends `event`, which must be answered with `code`.
    pub(crate) fn must(&mut self, event: &Event<'_>, code: Code) -> Result<Reply, Ended> {
        let reply = self.probe()?.call(event)?;
        let what = format!("{:?}", event.opcode());
        expect(reply, code, &what)
    }

    /// Sends READY.
    pub(crate) fn ready(&mut self) -> Checked {
        self.must(&Event::Ready, Code::Ok).map(|_| ())
    }

    /// Creates a space of `page_count` pages of new memory; returns its number.
    pub(crate) fn create(&mut self, page_count: u64) -> Result<DomainId, Ended> {
        let name = self.name();
        self.create_named(name, page_count)
    }

    /// Creates a space of the memory `name`; returns its number.
    pub(crate) fn create_named(
        &mut self,
        name: FileKey,
        page_count: u64,
    ) -> Result<DomainId, Ended> {
        let reply = self.must(&Event::Create { name, page_count }, Code::Ok)?;
        let number = reply.status.value;
        let number = u32::try_from(number).map(DomainId);
        number.map_err(|_| Ended::Failed("CREATE gave a number above 32 bits".to_owned()))
    }

    /// Skips the check unless the device has `feature`, called `name`.
    pub(crate) fn needs(&mut self, feature: u64, name: &str) -> Checked {
        if self.probe()?.offered() & feature == 0 {
            return Err(Ended::Skipped(format!("it does not offer {name}")));
        }
        Ok(())
    }
}

/// Fails unless `reply` has `code`.
pub(crate) fn expect(reply: Reply, code: Code, what: &str) -> Result<Reply, Ended> {
    let got = reply.status.code;
    ensure(
        || got == code,
        || format!("{what} was answered with {got:?}, not {code:?}"),
    )?;
    Ok(reply)
}

/// Fails with a sentence unless `is_so`.
pub(crate) fn ensure(is_so: impl FnOnce() -> bool, why: impl FnOnce() -> String) -> Checked {
    if is_so() {
        return Ok(());
    }
    Err(Ended::Failed(why()))
}

/// A new connection, retried: a device that has not yet noticed that the last one closed hangs up.
fn connected(socket: &Path) -> Result<Probe, ConnectError> {
    let began = Instant::now();
    loop {
        match Probe::open(socket) {
            Ok(probe) => return Ok(probe),
            Err(error) if began.elapsed() > RETURN_PATIENCE => return Err(error),
            Err(_) => std::thread::sleep(RETURN_LOOK),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_vpri_function::fake::{Answers, Fake};

    /// Runs the checks named `names` against a device that answers by `script`.
    fn verdicts(
        names: &[&str],
        script: impl FnMut(&Event<'static>, u64) -> Answers + Send + 'static,
    ) -> Vec<Result<(), String>> {
        let dir = tempfile::tempdir().unwrap();
        let _fake = Fake::listen(dir.path(), script);
        let mut tester = Tester {
            options: CheckOptions {
                socket: dir.path().join("vpri.sock"),
                disk: None,
            },
            probe: None,
            next_name: 0,
        };
        let all = [messages::CHECKS, lifecycle::CHECKS, chains::CHECKS].concat();
        let chosen = names.iter().map(|name| {
            let check = all.iter().find(|check| check.name == *name).unwrap();
            match tester.fresh().and_then(|()| (check.run)(&mut tester)) {
                Ok(()) => Ok(()),
                Err(Ended::Failed(why) | Ended::Skipped(why)) => Err(why),
            }
        });
        chosen.collect()
    }

    #[test]
    fn device_that_says_ok_to_everything_fails_what_is_to_be_refused() {
        let names = [
            "config/layout",
            "features/known",
            "map/good",
            "message/unknown-space",
            "respond/unknown",
            "session/ready-once",
            "space/numbers",
            "space/release",
            "bar/create",
            "order/strict",
        ];
        let verdicts = verdicts(&names, |_, _| Answers::ok());
        for (name, verdict) in names.iter().zip(&verdicts) {
            let is_plain = ["config/layout", "features/known", "map/good"].contains(name);
            assert_eq!(verdict.is_ok(), is_plain, "{name}: {verdict:?}");
        }
    }

    #[test]
    fn device_that_hangs_up_or_writes_nonsense_fails() {
        let verdicts = verdicts(&["map/good", "unmap/good"], |event, number| match event {
            Event::Map { .. } => Answers::HangUp,
            Event::Unmap { .. } | Event::Protect { .. } => Answers::Bytes(vec![0xee; 16], 16),
            _ => Answers::good(event, number),
        });
        assert!(verdicts.iter().all(Result::is_err), "{verdicts:?}");
    }

    #[test]
    fn names_of_checks_are_told_apart() {
        let groups = [
            messages::CHECKS,
            lifecycle::CHECKS,
            chains::CHECKS,
            transfers::CHECKS,
            log::CHECKS,
        ];
        let mut names: Vec<_> = groups
            .into_iter()
            .flatten()
            .map(|check| check.name)
            .collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
