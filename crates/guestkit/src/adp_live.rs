// SPDX-License-Identifier: Apache-2.0
//! A squeezed guest with and without a DMA protector, in turns: what its disk feels of it.
//!
//! ```text
//!   one guest, one daemon, one limit
//!   turn = policy set ─► settle ─► measure        turns: none adp adp none  none adp adp none …
//! ```
//! The guest is the one of the demo: it reads its disk in order through its page cache,
//! again and again, and works on its memory beside; so its kernel gives the next read
//! just the page that a host would rather evict. A part of the reads and writes goes past
//! the cache. It verifies all it reads; a wrong byte fails the run.
//!
//! # Times
//! A run of minutes cannot show a policy that thinks in minutes. So the policy's times are
//! divided by [`SCALE`], as the guest's are: it goes round its disk in seconds, not in
//! hours. Shares (5% a device, 30% remembered) are the paper's.
//!
//! The tail of latencies is that of the daemon's own account of the last minute, so a turn
//! lasts longer than that.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_guest::params::Params;
use serde::Serialize;
use serde_json::Value;

use crate::guest::{Guest, GuestError};
use crate::image::{self, ImageError, repository};
use crate::product::{Product, ProductError};
use crate::qemu::{Disk, GuestSpec};
use crate::stage::RunFolder;

/// RAM of the guest.
const RAM_BYTES: u64 = 512 << 20;
/// Of it, memory the guest works on: what is left for its page cache, to which its disk's DMA goes, is
/// about the share of the paper's typical VM (28%).
const MEMORY_BYTES: u64 = 320 << 20;
/// Its disk: more than its page cache holds.
const DISK_BYTES: u64 = 256 << 20;
/// Rest of each of the guest's loops after a step.
const PACE_US: u64 = 2_000;
/// The VM's limit, in per cent of what is resident before.
const LIMIT_PERCENT: u64 = 80;
/// By what the policy's times are divided.
pub const SCALE: u32 = 30;
/// `adp` with its times divided by [`SCALE`]: 180 s, 30 s and 20 s.
const ADP: &str = "adp:promote-after=6s,demote-after=1s,scan-every=667ms";
const NONE: &str = "none";
/// The policies in the turns of two alternations.
const TURNS: [&str; 4] = [NONE, ADP, ADP, NONE];
/// Part of a turn that is not measured.
const SETTLE: Duration = Duration::from_secs(10);
/// Between two looks.
const LOOK: Duration = Duration::from_secs(1);
const BOOT_TIMEOUT: Duration = Duration::from_secs(600);
const SQUEEZE_TIMEOUT: Duration = Duration::from_secs(120);
const NAME: &str = "adp-live";

/// A step failed.
#[derive(Debug, thiserror::Error)]
pub enum AdpLiveError {
    /// No image for the guest.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The guest.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The daemon.
    #[error(transparent)]
    Product(#[from] ProductError),
    /// A file.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The daemon tells no such figure.
    #[error("the daemon tells no '{0}'")]
    NoFigure(&'static str),
    /// The limit is not kept.
    #[error("{resident_bytes} bytes are resident {seconds} s after a limit of {limit_bytes}")]
    NotSqueezed {
        /// Resident now.
        resident_bytes: u64,
        /// The limit.
        limit_bytes: u64,
        /// Time given.
        seconds: u64,
    },
    /// The guest read what it had not written.
    #[error("the guest found {errors} wrong blocks or pages: {why}")]
    Corrupt {
        /// How many.
        errors: u64,
        /// Its last report.
        why: String,
    },
}

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Pairs of turns.
    pub alternations: u32,
    /// Length of what is measured of a turn.
    pub measure: Duration,
}

impl Default for Options {
    /// Ten minutes in all.
    fn default() -> Self {
        Self {
            alternations: 4,
            measure: Duration::from_secs(65),
        }
    }
}

/// What was measured in one turn.
#[derive(Clone, Debug, Serialize)]
pub struct Turn {
    /// The policy, as it was given.
    pub policy: String,
    /// I/O page faults a minute on pages that were away.
    pub iopfs_per_minute: f64,
    /// The same for each request of the disk: the guest does more of them when it waits less.
    pub iopfs_per_request: f64,
    /// All but one in a thousand requests of the last minute took no longer.
    pub blk_p999_us: f64,
    /// Half of them.
    pub blk_p50_us: f64,
    /// Requests a second.
    pub blk_iops: f64,
    /// Mean over the turn.
    pub resident_bytes: f64,
    /// Mean over the turn.
    pub protected_sections: f64,
    /// Faults of vCPUs a minute.
    pub vcpu_faults_per_minute: f64,
}

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Found {
    /// What ran the guest: kvm, or emulated.
    pub accel: String,
    /// QEMU's version.
    pub qemu_version: String,
    /// By what the policy's times were divided.
    pub times_divided_by: u32,
    /// The VM's RAM.
    pub ram_bytes: u64,
    /// Its limit.
    pub limit_bytes: u64,
    /// Every turn.
    pub turns: Vec<Turn>,
    /// Pages and blocks the guest verified in bytes.
    pub verified_bytes: u64,
}

/// Runs it.
///
/// # Errors
/// [`AdpLiveError`].
pub fn run(options: &Options) -> Result<Found, AdpLiveError> {
    eprintln!("bench adp-live: the guest's kernel and initramfs");
    let image = image::prepare()?;
    let folder = RunFolder::new().map_err(|source| file_error(Path::new("/dev/shm"), source))?;
    let disk = DiskImage::new()?;
    let binary = Product::binary()?;
    let log = folder.path().join("pagetide.log");
    let product = Product::start(&binary, &folder.path().join("state"), &log)?;
    let socket = folder.path().join("disk.sock");
    product.serve_disk(&socket, &disk.0)?;
    let spec = GuestSpec {
        ram_bytes: RAM_BYTES,
        disk: Disk::VhostUser(socket.clone()),
        work: Params {
            mem_bytes: MEMORY_BYTES,
            file_bytes: DISK_BYTES,
            seed: 1,
            pace_us: PACE_US,
            ..Params::default()
        },
        ..GuestSpec::default()
    };
    let mut guest = Guest::start(&spec, &image, &folder.path().join("guest"))?;
    let accel = guest.accel().name().to_owned();
    eprintln!("bench adp-live: waiting for the guest ({accel}) to fill its disk and memory");
    guest.wait_for_work(BOOT_TIMEOUT)?;
    product.attach(guest.pid(), NAME)?;
    let limit_bytes = guest.resident_bytes()? * LIMIT_PERCENT / 100;
    product.limit(NAME, limit_bytes)?;
    wait_until_squeezed(&guest, limit_bytes)?;
    let mut turns = Vec::new();
    for policy in TURNS.iter().cycle().take(2 * options.alternations as usize) {
        let turn = turn(&product, &guest, policy, (&socket, options.measure))?;
        eprintln!(
            "bench adp-live: {policy}: {:.0} I/O page faults a minute, p99.9 {:.0} us",
            turn.iopfs_per_minute, turn.blk_p999_us
        );
        turns.push(turn);
    }
    product.detach(NAME)?;
    let last = guest.finish(BOOT_TIMEOUT)?;
    let errors = last.memory_errors + last.disk_errors;
    if errors > 0 {
        let why = format!("{last:?}");
        return Err(AdpLiveError::Corrupt { errors, why });
    }
    Ok(Found {
        accel,
        qemu_version: guest.version().to_string(),
        times_divided_by: SCALE,
        ram_bytes: RAM_BYTES,
        limit_bytes,
        turns,
        verified_bytes: last.final_memory_bytes + last.final_disk_bytes,
    })
}

fn wait_until_squeezed(guest: &Guest, limit_bytes: u64) -> Result<(), AdpLiveError> {
    let begun = Instant::now();
    loop {
        let resident_bytes = guest.resident_bytes()?;
        if resident_bytes <= limit_bytes {
            return Ok(());
        }
        if begun.elapsed() > SQUEEZE_TIMEOUT {
            return Err(AdpLiveError::NotSqueezed {
                resident_bytes,
                limit_bytes,
                seconds: SQUEEZE_TIMEOUT.as_secs(),
            });
        }
        thread::sleep(LOOK);
    }
}

fn turn(
    product: &Product,
    guest: &Guest,
    policy: &str,
    (socket, measure): (&Path, Duration),
) -> Result<Turn, AdpLiveError> {
    let words = ["vm", "protector", NAME, policy, "--json"];
    product.client(words)?.success()?;
    thread::sleep(SETTLE);
    let (before, requests_before) = (product.show(NAME)?, requests(product, socket)?);
    let begun = Instant::now();
    let (mut resident, mut protected, mut looks) = (0.0, 0.0, 0.0);
    while begun.elapsed() < measure {
        thread::sleep(LOOK);
        #[expect(clippy::cast_precision_loss, reason = "bytes far below 2^53")]
        let bytes = guest.resident_bytes()? as f64;
        resident += bytes;
        protected += figure(&product.show(NAME)?, "protected_sections")?;
        looks += 1.0;
    }
    let seconds = begun.elapsed().as_secs_f64();
    let after = product.show(NAME)?;
    let more = |name| Ok::<_, AdpLiveError>(figure(&after, name)? - figure(&before, name)?);
    let faults = more("absent_iopfs")?;
    let done = requests(product, socket)? - requests_before;
    let account = product.client(["dpu", "slo", "--json"])?.json()?;
    let minute = &account["devices"][0]["windows"][0];
    Ok(Turn {
        policy: policy.to_owned(),
        iopfs_per_minute: faults / seconds * 60.0,
        iopfs_per_request: faults / done.max(1.0),
        blk_p999_us: figure(minute, "p999_us")?,
        blk_p50_us: figure(minute, "p50_us")?,
        blk_iops: done / seconds,
        resident_bytes: resident / looks,
        protected_sections: protected / looks,
        vcpu_faults_per_minute: more("vcpu_faults")? / seconds * 60.0,
    })
}

fn requests(product: &Product, socket: &Path) -> Result<f64, AdpLiveError> {
    figure(&product.device(socket)?, "requests")
}

fn figure(report: &Value, name: &'static str) -> Result<f64, AdpLiveError> {
    report[name].as_f64().ok_or(AdpLiveError::NoFigure(name))
}

/// The disk's image, gone on drop.
struct DiskImage(PathBuf);

impl DiskImage {
    fn new() -> Result<Self, AdpLiveError> {
        let folder = repository().join("target/guest/disks");
        fs::create_dir_all(&folder).map_err(|source| file_error(&folder, source))?;
        let path = folder.join(format!("adp-live-{}.raw", std::process::id()));
        let made = fs::File::create(&path).and_then(|file| file.set_len(DISK_BYTES));
        made.map_err(|source| file_error(&path, source))?;
        Ok(Self(path))
    }
}

impl Drop for DiskImage {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            eprintln!("bench adp-live: {} stays: {error}", self.0.display());
        }
    }
}

fn file_error(path: &Path, source: io::Error) -> AdpLiveError {
    AdpLiveError::File {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_have_their_turns_before_each_other_as_often_as_after() {
        let before = |one: &str| {
            let places = TURNS.iter().enumerate();
            let sum: usize = places.filter(|(_, t)| **t == one).map(|(at, _)| at).sum();
            sum
        };
        assert_eq!(before(NONE), before(ADP));
    }

    #[test]
    fn figure_that_is_not_told_is_named() {
        let report = serde_json::json!({"iopfs": 3});
        assert!(figure(&report, "iopfs").is_ok_and(|it| (it - 3.0).abs() < 1e-9));
        let error = figure(&report, "p999_us").expect_err("it is not there");
        assert!(error.to_string().contains("p999_us"));
    }
}
