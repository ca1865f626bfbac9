// SPDX-License-Identifier: Apache-2.0
//! A squeezed guest with fio on its disk, or bursts on its interface, with and without a DMA protector, in turns (VPRI
//! 7.3).
//!
//! ```text
//!   one guest, one daemon, one limit
//!   boot ─► fill ─► squeeze ─► warm-up under `none`, until steady ─► turns ─► everything verified
//!   turn  = policy set ─► settle ─► measure         turns: none adp │ adp none │ none adp │ …
//! ```
//! [`scenario`] describes the guest with a disk and the reasons for it, [`bursts`] the one with an interface, whose turns
//! have a simple LRU between the other two. It verifies all it reads, and at the end all
//! its memory and disk; a wrong byte fails the run.
//!
//! # Steady first
//! A squeezed guest's faults change for minutes: pages evicted first are filled again one by one. So turns
//! begin when two warm-up turns in a row differ by less than [`STEADY_SHARE`], or after
//! [`WARM_UP_TURNS_MAX`] of them; the result says which. Two turns may be near each other by chance: faults
//! were seen to fall by half afterwards. The rest of a trend affects the policies alike, since their order
//! changes from one alternation to the next.
//!
//! # What the turns can show
//! A policy begins with no section in its turn, and finds those pages absent that the previous one evicted. Both
//! make it look like the other one; a difference between turns is less than between days. The tail of
//! latencies comes from the daemon's own account of the last minute, so settling and measuring together
//! last longer than that.

mod bursts;
mod scenario;
mod turn;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::Serialize;

use crate::fio;
use crate::guest::{Guest, GuestError};
use crate::image::{self, Extras, Image, ImageError, repository};
use crate::network::{self, Pings, Server};
use crate::product::{Product, ProductError};
use crate::programs::ProgramError;
use crate::qemu::{GuestSpec, QemuError, Version};
use crate::stage::RunFolder;
use bursts::Bursts;
use scenario::{ADP, DISK_BYTES, LIMIT_PERCENT, LRU, NONE};
pub use turn::Turn;
use turn::{LOOK, Meter};

/// Two warm-up turns in a row are steady if the faults of one differ from the other's by less than this share.
const STEADY_SHARE: f64 = 0.15;
/// Most warm-up turns.
const WARM_UP_TURNS_MAX: usize = 8;
/// Length of a warm-up turn.
const WARM_UP_TURN: Duration = Duration::from_secs(20);
const BOOT_TIMEOUT: Duration = Duration::from_secs(600);
const SQUEEZE_TIMEOUT: Duration = Duration::from_secs(180);
const NAME: &str = "adp-live";

/// What of the guest does DMA.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Device {
    /// Its disk.
    #[default]
    Blk,
    /// Its network interface.
    Net,
}

impl Device {
    /// The policies, in the order of the first alternation.
    const fn policies(self) -> &'static [&'static str] {
        match self {
            Self::Blk => &[NONE, ADP],
            Self::Net => &[NONE, LRU, ADP],
        }
    }
}

/// A step failed.
#[derive(Debug, thiserror::Error)]
pub enum AdpLiveError {
    /// The machine lacks something.
    #[error("{0}")]
    Unable(String),
    /// fio cannot be provided to the guest.
    #[error(transparent)]
    Fio(#[from] ProgramError),
    /// No image for the guest.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The guest.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The daemon.
    #[error(transparent)]
    Product(#[from] ProductError),
    /// The guest's network.
    #[error("the guest's network: {0}")]
    Network(io::Error),
    /// A file.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The daemon does not report such a figure.
    #[error("the daemon does not report '{0}'")]
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
    /// The guest read wrong content.
    #[error("the guest found {errors} wrong blocks or pages, or fio ended early: {why}")]
    Corrupt {
        /// How many.
        errors: u64,
        /// Its last report, and the end of its console.
        why: String,
    },
}

impl AdpLiveError {
    /// Whether the machine lacks something that the message names, and nothing failed.
    #[must_use]
    pub fn is_unable(&self) -> bool {
        matches!(
            self,
            Self::Unable(_)
                | Self::Fio(ProgramError::Missing { .. })
                | Self::Guest(GuestError::Qemu(QemuError::Missing(_)))
        )
    }
}

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// What does DMA.
    pub device: Device,
    /// Turns of each policy.
    pub alternations: u32,
    /// Part of a turn before the measurement.
    pub settle: Duration,
    /// Measured part of a turn.
    pub measure: Duration,
}

impl Default for Options {
    /// 45 minutes in all.
    fn default() -> Self {
        Self {
            device: Device::default(),
            alternations: 8,
            settle: Duration::from_secs(60),
            measure: Duration::from_secs(90),
        }
    }
}

/// How the guest became steady.
#[derive(Clone, Debug, Serialize)]
pub struct WarmUp {
    /// I/O page faults a minute, turn by turn.
    pub iopfs_per_minute: Vec<f64>,
    /// Whether the last two differ by less than [`WarmUp::share`].
    pub is_steady: bool,
    /// The bound of [`WarmUp::is_steady`].
    pub share: f64,
}

/// The result.
#[derive(Clone, Debug, Serialize)]
pub struct Found {
    /// What does DMA.
    pub device: Device,
    /// What ran the guest: kvm, or emulated.
    pub accel: String,
    /// QEMU's version.
    pub qemu_version: String,
    /// The policies as set, in the order of the first alternation.
    pub policies: Vec<&'static str>,
    /// The VM's RAM.
    pub ram_bytes: u64,
    /// Its disk; 0 without one.
    pub disk_bytes: u64,
    /// Its limit.
    pub limit_bytes: u64,
    /// Before the turns.
    pub warm_up: WarmUp,
    /// Every turn.
    pub turns: Vec<Turn>,
    /// Bytes of memory, disk and network that were verified while it worked.
    pub verified_bytes: u64,
    /// Bytes verified at the end: everything.
    pub finally_verified_bytes: u64,
}

/// Runs it.
///
/// # Errors
/// [`AdpLiveError`].
pub fn run(options: &Options) -> Result<Found, AdpLiveError> {
    if !rustix::process::geteuid().is_root() {
        let why = "the take-over of a guest needs root";
        return Err(AdpLiveError::Unable(why.to_owned()));
    }
    match options.device {
        Device::Blk => run_with_disk(options),
        Device::Net => {
            network::in_own_network(|| run_with_network(options)).map_err(AdpLiveError::Unable)?
        }
    }
}

fn run_with_disk(options: &Options) -> Result<Found, AdpLiveError> {
    let additions = fio::additions(&scenario::jobs())?;
    eprintln!("bench adp-live: the guest's kernel and initramfs, with fio");
    let image = image::prepare_with(&Extras {
        suffix: "-fio",
        additions: &additions,
        ..Extras::default()
    })?;
    let folder = new_folder()?;
    let disk = DiskImage::new()?;
    let product = start_product(&folder)?;
    let socket = folder.path().join("disk.sock");
    product.serve_disk(&socket, &disk.0)?;
    let scene = Scene {
        spec: scenario::guest(socket.clone()),
        socket,
        image,
        product: &product,
        folder: &folder,
    };
    scene.play(options)
}

fn run_with_network(options: &Options) -> Result<Found, AdpLiveError> {
    eprintln!("bench adp-live: the guest's kernel and initramfs, with a network");
    let image = image::prepare_with(&Extras {
        suffix: "-bursts",
        additions: &network::additions(&[Server::Echo], Pings::None)?,
        ..Extras::default()
    })?;
    let folder = new_folder()?;
    let product = start_product(&folder)?;
    let socket = folder.path().join("net.sock");
    let name = socket.to_string_lossy();
    let words = ["dpu", "net", "--socket", &*name, "--tap", network::TAP];
    product.client(words)?.success()?;
    let version = Version::installed().map_err(GuestError::from)?;
    let scene = Scene {
        spec: bursts::guest(&socket, version),
        socket: socket.clone(),
        image,
        product: &product,
        folder: &folder,
    };
    scene.play(options)
}

fn new_folder() -> Result<RunFolder, AdpLiveError> {
    RunFolder::new().map_err(|source| file_error(Path::new("/dev/shm"), source))
}

fn start_product(folder: &RunFolder) -> Result<Product, AdpLiveError> {
    let log = folder.path().join("pagetide.log");
    let state = folder.path().join("state");
    Ok(Product::start(&Product::binary()?, &state, &log)?)
}

/// A guest to be, and a daemon that serves its device.
struct Scene<'a> {
    spec: GuestSpec,
    /// Of the device.
    socket: PathBuf,
    image: Image,
    product: &'a Product,
    folder: &'a RunFolder,
}

impl Scene<'_> {
    fn play(&self, options: &Options) -> Result<Found, AdpLiveError> {
        let (product, spec) = (self.product, &self.spec);
        let mut guest = Guest::start(spec, &self.image, &self.folder.path().join("guest"))?;
        let accel = guest.accel().name().to_owned();
        eprintln!("bench adp-live: waiting for the guest ({accel}) to fill its disk and memory");
        guest.wait_for_work(BOOT_TIMEOUT)?;
        let bursts = match options.device {
            Device::Blk => None,
            Device::Net => Some(Bursts::start()?),
        };
        product.attach(guest.pid(), NAME)?;
        let limit_bytes = guest.resident_bytes()? * LIMIT_PERCENT / 100;
        product.limit(NAME, limit_bytes)?;
        wait_until_squeezed(&guest, limit_bytes)?;
        let meter = Meter {
            product,
            guest: &guest,
            name: NAME,
            socket: &self.socket,
            device: options.device,
        };
        let warm_up = warm_up(&meter)?;
        let turns = alternate(&meter, options)?;
        product.detach(NAME)?;
        let echoed_bytes = bursts.map_or(Ok(0), Bursts::end)?;
        let qemu_version = guest.version().to_string();
        let disk_bytes = spec.work.fio_bytes;
        let (verified_bytes, finally_verified_bytes) = verified(&mut guest, disk_bytes)?;
        Ok(Found {
            device: options.device,
            accel,
            qemu_version,
            policies: options.device.policies().to_vec(),
            ram_bytes: spec.ram_bytes,
            disk_bytes,
            limit_bytes,
            warm_up,
            turns,
            verified_bytes: verified_bytes + echoed_bytes,
            finally_verified_bytes,
        })
    }
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

fn warm_up(meter: &Meter<'_>) -> Result<WarmUp, AdpLiveError> {
    meter.set(NONE)?;
    let mut rates = Vec::new();
    while rates.len() < WARM_UP_TURNS_MAX && !is_steady(&rates) {
        let rate = meter.measure(NONE, WARM_UP_TURN)?.iopfs_per_minute;
        eprintln!("bench adp-live: warming up: {rate:.0} I/O page faults a minute");
        rates.push(rate);
    }
    Ok(WarmUp {
        is_steady: is_steady(&rates),
        iopfs_per_minute: rates,
        share: STEADY_SHARE,
    })
}

/// Whether the last two of `rates` are near each other.
fn is_steady(rates: &[f64]) -> bool {
    match rates {
        [.., before, last] => (last - before).abs() < STEADY_SHARE * before.max(*last),
        _ => false,
    }
}

/// Runs the turns in the order of [`Device::policies`], then in reverse.
fn alternate(meter: &Meter<'_>, options: &Options) -> Result<Vec<Turn>, AdpLiveError> {
    let mut turns = Vec::new();
    for policy in order(options.device.policies(), options.alternations) {
        meter.set(policy)?;
        thread::sleep(options.settle);
        let turn = meter.measure(policy, options.measure)?;
        eprintln!(
            "bench adp-live: {}: {:.0} I/O page faults a minute, {:.1} sections protected after {:.0} s",
            turn.policy,
            turn.iopfs_per_minute,
            turn.protected_sections,
            turn.promote_after_ms / 1_000.0
        );
        turns.push(turn);
    }
    Ok(turns)
}

fn order(policies: &[&'static str], alternations: u32) -> Vec<&'static str> {
    let there = policies.iter().copied();
    let back = policies.iter().rev().copied();
    let both: Vec<_> = there.chain(back).collect();
    let turns = policies.len() * alternations as usize;
    both.into_iter().cycle().take(turns).collect()
}

/// Ends the guest; returns the bytes it verified on the way and at the end.
fn verified(guest: &mut Guest, disk_bytes: u64) -> Result<(u64, u64), AdpLiveError> {
    eprintln!("bench adp-live: the guest verifies all its memory and disk");
    let last = guest.finish(BOOT_TIMEOUT)?;
    let errors = last.memory_errors + last.disk_errors;
    if errors > 0 || last.final_disk_bytes < disk_bytes {
        let why = format!("{last:?}\n{}", guest.log_tails());
        return Err(AdpLiveError::Corrupt { errors, why });
    }
    let on_the_way = last.memory_bytes_verified + last.disk_bytes_verified;
    Ok((on_the_way, last.final_memory_bytes + last.final_disk_bytes))
}

/// The disk's image, removed on drop.
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
        let policies = Device::Blk.policies();
        let turns = order(policies, 8);
        let sum_of_places = |one: &str| -> usize {
            let places = turns.iter().enumerate();
            places.filter(|(_, t)| **t == one).map(|(at, _)| at).sum()
        };
        assert_eq!(sum_of_places(NONE), sum_of_places(ADP));
        assert_eq!(order(policies, 2), [NONE, ADP, ADP, NONE]);
        let of_net = order(Device::Net.policies(), 2);
        assert_eq!(of_net, [NONE, LRU, ADP, ADP, LRU, NONE]);
    }

    #[test]
    fn warm_up_is_steady_when_two_turns_in_a_row_are_near_each_other() {
        assert!(!is_steady(&[]));
        assert!(!is_steady(&[100.0]));
        assert!(!is_steady(&[0.0, 0.0]));
        assert!(!is_steady(&[100.0, 80.0]));
        assert!(!is_steady(&[100.0, 95.0, 120.0]));
        assert!(is_steady(&[200.0, 100.0, 110.0]));
    }

    #[test]
    fn what_is_not_installed_is_told_apart_from_what_went_wrong() {
        let missing = ProgramError::Missing {
            path: "/usr/bin/fio",
            package: "fio",
        };
        assert!(AdpLiveError::from(missing).is_unable());
        assert!(!AdpLiveError::NoFigure("iopfs").is_unable());
    }
}
