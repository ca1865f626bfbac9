// SPDX-License-Identifier: Apache-2.0
//! A VMM of real size, taken over, squeezed and detached: what a large VM notices of it.
//!
//! A guest of some GiB takes minutes to fill its memory. The stand-in of the product's benches
//! (`pagetide-lab bench-part busy-guest`) does it in seconds: all of its RAM is filled, and its vCPU
//! never pauses and checks what it reads. Here it is taken over once, as a user would do it:
//!
//! ```text
//!   fill ─► count ─► attach ─► count ─► limit = half ─► detach ─► verify each byte
//!           before   time      attached MiB/s
//! ```
//! Where memory is short, the stand-in takes less and the report gives the reason.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use crate::guest::end;
use crate::lines::listen;
use crate::product::{Product, ProductError};
use crate::report::mib;
use crate::stand_in::StandIn;

/// RAM if there is room for it.
const RAM_BYTES: u64 = 4 << 30;
/// Share of its RAM that its vCPU touches, in thousandths.
const HOT_PERMILLE: u64 = 125;
/// Wait after a start or an attach, before counting.
const SETTLE: Duration = Duration::from_secs(1);
/// Time over which touches are counted.
const COUNTED: Duration = Duration::from_secs(5);
/// Between two polls of the squeeze's progress.
const LOOK: Duration = Duration::from_millis(20);
/// Longest wait for filling, a squeeze, or verifying.
const PATIENCE: Duration = Duration::from_secs(300);
const NAME: &str = "dense";

/// The stand-in could not be taken over, squeezed or verified.
#[derive(Debug, thiserror::Error)]
pub enum DenseError {
    /// A file or its process.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It did not answer as expected: it may have read a wrong byte.
    #[error("the dense stand-in, asked for {asked}: {said}")]
    Said {
        /// The order.
        asked: String,
        /// Its answer, or a note that there was none.
        said: String,
    },
    /// The daemon.
    #[error(transparent)]
    Product(#[from] ProductError),
    /// The limit was not reached.
    #[error(
        "{resident} of the dense stand-in are resident {seconds} s after the limit of {limit}; eviction \
         eviction blockers: {blockers}"
    )]
    NotSqueezed {
        /// Resident now.
        resident: String,
        /// Time given.
        seconds: u64,
        /// The limit.
        limit: String,
        /// The daemon's reasons against eviction.
        blockers: String,
    },
}

/// Results of the dense stand-in.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DenseReport {
    /// Its RAM, all of it filled.
    pub ram_bytes: u64,
    /// Why that is less than it should be.
    pub smaller: Option<String>,
    /// From the request until it is attached.
    pub attach_s: f64,
    /// Time for which one of its threads was stopped for that.
    pub attach_pause_us: f64,
    /// Pages touched a second before the attach.
    pub counts_per_s_before: f64,
    /// Pages touched a second while attached, without a limit.
    pub counts_per_s_attached: f64,
    /// How much fewer that are, in percent; below zero if more.
    pub slow_down_percent: f64,
    /// From all resident to half of it, while the vCPU runs.
    pub squeeze_mib_per_s: f64,
    /// From the request until it is detached, with half of it absent.
    pub detach_s: f64,
    /// Bytes verified after that.
    pub verified_bytes: u64,
}

/// Takes a dense stand-in over by `product`, squeezes and detaches it. Its program goes into
/// `folder`; `say` reports progress.
///
/// # Errors
/// A step failed, or a byte is wrong.
pub fn run(
    product: &Product,
    folder: &Path,
    mut say: impl FnMut(&str),
) -> Result<DenseReport, DenseError> {
    let (mut vmm, ram_bytes, smaller) = Dense::start_fitting(folder, RAM_BYTES, HOT_PERMILLE)?;
    let mut report = DenseReport {
        ram_bytes,
        smaller,
        ..DenseReport::default()
    };
    if let Some(why) = &report.smaller {
        say(&format!("memory is short, so the dense stand-in is {why}"));
    }
    say(&format!(
        "filled a stand-in for a VMM, with {} of RAM and a vCPU that never rests, as process {}",
        mib(ram_bytes),
        vmm.child.id()
    ));
    report.counts_per_s_before = vmm.counts_per_s()?;
    let begin = Instant::now();
    let vm = product.attach(vmm.child.id(), NAME)?;
    report.attach_s = begin.elapsed().as_secs_f64();
    report.attach_pause_us = vm["attach_pause_us"].as_f64().unwrap_or_default();
    report.counts_per_s_attached = vmm.counts_per_s()?;
    report.slow_down_percent =
        (1.0 - report.counts_per_s_attached / report.counts_per_s_before) * 100.0;
    say(&format!(
        "took it over in {:.2} s; {:.2} million touches a second before, {:.2} attached ({:+.1} %)",
        report.attach_s,
        report.counts_per_s_before / 1e6,
        report.counts_per_s_attached / 1e6,
        -report.slow_down_percent
    ));
    report.squeeze_mib_per_s = squeeze(product, ram_bytes / 2)?;
    say(&format!(
        "squeezed it to half of that at {:.0} MiB/s",
        report.squeeze_mib_per_s
    ));
    let begin = Instant::now();
    product.detach(NAME)?;
    report.detach_s = begin.elapsed().as_secs_f64();
    vmm.verify()?;
    report.verified_bytes = ram_bytes;
    say(&format!(
        "let it go in {:.1} s; each of its bytes is right",
        report.detach_s
    ));
    Ok(report)
}

/// Limits the VM, and returns how fast it shrinks, in MiB a second.
fn squeeze(product: &Product, limit_bytes: u64) -> Result<f64, DenseError> {
    let resident = |vm: &Value| vm["resident_bytes"].as_u64().unwrap_or(u64::MAX);
    let before = resident(&product.show(NAME)?);
    let begin = Instant::now();
    product.limit(NAME, limit_bytes)?;
    loop {
        let vm = product.show(NAME)?;
        let (now, time) = (resident(&vm), begin.elapsed());
        if now <= limit_bytes {
            return Ok(to_f64(before.saturating_sub(now) >> 20) / time.as_secs_f64());
        }
        if time > PATIENCE {
            return Err(DenseError::NotSqueezed {
                resident: mib(now),
                seconds: PATIENCE.as_secs(),
                limit: mib(limit_bytes),
                blockers: vm["eviction_blockers"].to_string(),
            });
        }
        thread::sleep(LOOK);
    }
}

/// The stand-in's process. Dropped, it is killed and waited for.
pub struct Dense {
    child: Child,
    orders: ChildStdin,
    answers: Receiver<String>,
    /// Dropped after the process.
    _own: OwnFolder,
}

/// A folder for its program alone, so that no link from an earlier run is written through; removed
/// on drop.
struct OwnFolder(PathBuf);

impl OwnFolder {
    fn new(parent: &Path) -> Result<Self, DenseError> {
        let path = parent.join(format!("dense-{}", std::process::id()));
        fs::create_dir(&path).map_err(|source| file_error(&path, source))?;
        Ok(Self(path))
    }
}

impl Drop for OwnFolder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("guestkit: {} stays: {error}", self.0.display());
        }
    }
}

impl Dense {
    /// Starts a stand-in of `ram_bytes` with its program in `folder`; its vCPUs touch a share of
    /// the RAM, in thousandths, at random.
    ///
    /// # Errors
    /// It cannot be started, or filled.
    pub fn start(
        folder: &Path,
        ram_bytes: u64,
        vcpus: u32,
        hot_permille: u64,
    ) -> Result<Self, DenseError> {
        let size = ["--ram-mib", &(ram_bytes >> 20).to_string()];
        let started = Self::start_as(folder, &size, vcpus, hot_permille)?;
        Ok(started.0)
    }

    /// The same with one vCPU and as much of `wanted_bytes` as there is memory for; with its RAM, and why
    /// that is less.
    fn start_fitting(
        folder: &Path,
        wanted_bytes: u64,
        hot_permille: u64,
    ) -> Result<(Self, u64, Option<String>), DenseError> {
        let mib = (wanted_bytes >> 20).to_string();
        let size = ["--ram-mib", &mib, "--size", "at-most"];
        let (dense, ready) = Self::start_as(folder, &size, 1, hot_permille)?;
        match ready["ram_bytes"].as_u64() {
            Some(bytes) => Ok((dense, bytes, ready["smaller"].as_str().map(str::to_owned))),
            None => Err(said("its RAM", &ready.to_string())),
        }
    }

    /// With its answer when it is ready.
    fn start_as(
        folder: &Path,
        size: &[&str],
        vcpus: u32,
        hot_permille: u64,
    ) -> Result<(Self, Value), DenseError> {
        let built = Product::lab_binary()?;
        let own = OwnFolder::new(folder)?;
        let program =
            StandIn::program(&built, &own.0).map_err(|source| file_error(&own.0, source))?;
        let mut child = Command::new(&program)
            .args(["bench-part", "busy-guest"])
            .args(["--vcpus", &vcpus.to_string()])
            .args(size)
            .args(["--pattern", &format!("part:{hot_permille}")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|source| file_error(&program, source))?;
        let (Some(orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            end(&mut child);
            return Err(file_error(&program, io::ErrorKind::BrokenPipe.into()));
        };
        let mut dense = Self {
            child,
            orders,
            answers: listen(answers),
            _own: own,
        };
        let ready = dense.answer("its RAM", "Ready")?;
        Ok((dense, ready))
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn counts_per_s(&mut self) -> Result<f64, DenseError> {
        thread::sleep(SETTLE);
        self.ask("Count", "Counted")?;
        thread::sleep(COUNTED);
        let counted = self.ask("Count", "Counted")?;
        let number = |name: &str| to_f64(counted[name].as_u64().unwrap_or_default());
        Ok(number("operations") * 1e9 / number("ns").max(1.0))
    }

    /// Checks each byte of its RAM.
    ///
    /// # Errors
    /// A byte is wrong, or was when a vCPU read it.
    pub fn verify(&mut self) -> Result<(), DenseError> {
        self.ask("VerifyAll", "Done").map(|_time| ())
    }

    fn ask(&mut self, order: &str, wanted: &str) -> Result<Value, DenseError> {
        let told = writeln!(self.orders, "\"{order}\"").and_then(|()| self.orders.flush());
        told.map_err(|error| said(order, &error.to_string()))?;
        self.answer(order, wanted)
    }

    fn answer(&mut self, asked: &str, wanted: &str) -> Result<Value, DenseError> {
        let line = match self.answers.recv_timeout(PATIENCE) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => {
                let seconds = PATIENCE.as_secs();
                return Err(said(asked, &format!("nothing for {seconds} s")));
            }
            Err(RecvTimeoutError::Disconnected) => return Err(said(asked, "it has ended")),
        };
        answer_in(&line, wanted).ok_or_else(|| said(asked, &line))
    }
}

impl Drop for Dense {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

/// The value of `{"WANTED": …}`.
fn answer_in(line: &str, wanted: &str) -> Option<Value> {
    match serde_json::from_str::<Value>(line) {
        Ok(mut answer) => answer.get_mut(wanted).map(Value::take),
        Err(_no_json) => None,
    }
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn to_f64(number: u64) -> f64 {
    number as f64
}

fn said(asked: &str, said: &str) -> DenseError {
    DenseError::Said {
        asked: asked.to_owned(),
        said: said.to_owned(),
    }
}

fn file_error(path: &Path, source: io::Error) -> DenseError {
    DenseError::File {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_taken_by_their_names_alone() {
        let counted = answer_in(r#"{"Counted":{"operations":7}}"#, "Counted").unwrap();
        assert_eq!(counted["operations"], 7);
        assert_eq!(answer_in(r#"{"Failed":{"reason":"x"}}"#, "Counted"), None);
        assert_eq!(answer_in("Counted", "Counted"), None);
    }
}
