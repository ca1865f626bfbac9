// SPDX-License-Identifier: Apache-2.0
//! The environment of a soak: daemon, disk, guest, and the devices of the other tenants.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use pagetide_guest::params::Params;
use pagetide_guest::wire::Phase;

use super::below::Below;
use super::report::{KILLS_AN_HOUR, Report, Versions};
use super::{Options, SoakError, Tiers, file_error, say};
use crate::guest::{Guest, tail};
use crate::image::{Addition, Extras, Image, prepare_with};
use crate::product::{Product, ProductError, Role};
use crate::programs::{FIO, Program, REDIS_SERVER, STRESS_NG};
use crate::qemu::{Disk, GuestSpec, QEMU};
use crate::stage::RunFolder;

const RAM_BYTES: u64 = 512 << 20;
const MEMORY_BYTES: u64 = 64 << 20;
const MIB: u64 = 1 << 20;
const SECTOR_BYTES: u64 = 512;
/// Sizes of the partitions in MiB, in order; see `pagetide_guest::soak`.
const PARTITIONS: [(u8, u64); 4] = [
    (LINUX, 1),
    (LINUX, 48),
    (LINUX_SWAP, 96),
    (LINUX, FILES_MIB),
];
const FILES_MIB: u64 = 224;
const LINUX: u8 = 0x83;
const LINUX_SWAP: u8 = 0x82;
/// Devices of other tenants.
pub const TENANTS: usize = 3;
const TENANT_BYTES: u64 = 16 << 20;

const PROGRAMS: [Program; 3] = [FIO, STRESS_NG, REDIS_SERVER];

/// Programs of the host, and the packages they come with.
const HOST_PROGRAMS: [(&str, &str); 4] = [
    (QEMU, "qemu-system-x86"),
    ("mkfs.ext4", "e2fsprogs"),
    ("apt-get", "apt"),
    ("dpkg-deb", "dpkg"),
];

/// What this machine lacks for a soak, as a sentence.
pub fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("a soak needs root, for the take-over of the guest".to_owned());
    }
    if let Err(error) = Product::binary() {
        return Some(format!(
            "{error}: build it with `cargo build --release -p pagetide`"
        ));
    }
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let guests = PROGRAMS
        .iter()
        .map(|program| (program.path, program.package));
    first_missing(guests.chain(HOST_PROGRAMS), &paths)
}

/// The first of these programs that is missing; each is a path or a name to look up in `paths`.
fn first_missing<'a>(
    programs: impl IntoIterator<Item = (&'a str, &'a str)>,
    paths: &OsStr,
) -> Option<String> {
    let is_there = |program: &str| {
        // An absolute path stays as it is.
        std::env::split_paths(paths)
            .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")])
            .any(|folder| folder.join(program).is_file())
    };
    let mut programs = programs.into_iter();
    let (program, package) = programs.find(|(program, _)| !is_there(program))?;
    Some(format!(
        "a soak needs {program}: install the package {package} (scripts/install-packages)"
    ))
}

/// A device: its socket and its image.
#[derive(Clone, Debug)]
pub struct Device {
    /// Where it listens.
    pub socket: PathBuf,
    /// What it serves.
    pub image: PathBuf,
}

/// Everything that runs. The guest is dropped before the daemon, the folder last.
pub struct Stand {
    /// The guest.
    pub guest: Guest,
    /// The daemon.
    pub product: Product,
    /// The guest's disk.
    pub disk: Device,
    /// Those of the other tenants.
    pub tenants: Vec<Device>,
    /// The disk and the other host of its tiers.
    pub below: Option<Below>,
    image: Image,
    log: PathBuf,
    _images: Images,
    run_folder: RunFolder,
}

/// Disk images, removed on drop.
struct Images(Vec<PathBuf>);

impl Drop for Images {
    fn drop(&mut self) {
        for path in &self.0 {
            if let Err(error) = fs::remove_file(path) {
                eprintln!("guestkit: {} stays: {error}", path.display());
            }
        }
    }
}

impl Stand {
    /// Starts daemon and guest.
    ///
    /// # Errors
    /// Something is missing or does not start.
    pub fn set(options: &Options, folder: &Path) -> Result<Self, SoakError> {
        say("preparing the guest's kernel and initramfs (Debian packages, unmodified)");
        let image = prepare()?;
        let run_folder =
            RunFolder::new().map_err(|source| file_error(Path::new("/dev/shm"), source))?;
        let log = folder.join("pagetide.log");
        fs::write(&log, "").map_err(|source| file_error(&log, source))?;
        let bare = |source| SoakError::Product {
            source,
            log: tail(&log, 25),
        };
        let binary = Product::binary().map_err(bare)?;
        let mut below = match options.tiers {
            Tiers::InMemory => None,
            Tiers::All => Some(Below::set(options.seed, folder, run_folder.path())?),
        };
        let role = match &below {
            None => Role::Daemon,
            Some(below) => Role::DaemonWith(below.flags()),
        };
        let state = run_folder.path().join("state");
        let product = Product::start_in(role, &binary, &state, &log).map_err(bare)?;
        if let Some(below) = &mut below {
            below.ask(product.clients());
        }
        let mut images = Images(Vec::new());
        let (disk, tenants) = devices(folder, run_folder.path(), &mut images)?;
        for device in std::iter::once(&disk).chain(&tenants) {
            product
                .serve_disk(&device.socket, &device.image)
                .map_err(bare)?;
        }
        let spec = spec(options.seed, &disk);
        let guest = Guest::start(&spec, &image, &run_folder.path().join("guest"))?;
        say(&format!(
            "booting {} under QEMU {} ({}) as process {}",
            image.release,
            guest.version(),
            guest.accel().name(),
            guest.pid()
        ));
        Ok(Self {
            guest,
            product,
            disk,
            tenants,
            below,
            image,
            log,
            _images: images,
            run_folder,
        })
    }

    /// Waits until every load has something to show.
    ///
    /// # Errors
    /// Not within `timeout`, or QEMU ended.
    pub fn wait_for_loads(&mut self, timeout: Duration) -> Result<(), SoakError> {
        let deadline = Instant::now() + timeout;
        loop {
            let report = self.guest.soak_report();
            if report.is_some_and(|report| report.progress.phase == Phase::Work) {
                return Ok(());
            }
            if Instant::now() > deadline || self.guest.ended()?.is_some() {
                let what = "the beginning of all loads".to_owned();
                return Err(self.guest.late(what, timeout).into());
            }
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Removes every device.
    ///
    /// # Errors
    /// The daemon refuses.
    pub fn remove_devices(&self) -> Result<(), SoakError> {
        let devices = self.product.devices();
        for device in self.told(devices)? {
            let socket = device["socket"].as_str().unwrap_or_default().to_owned();
            let words = ["dpu", "remove", "--socket", &socket];
            let removed = self
                .product
                .client(words)
                .and_then(|answer| answer.success());
            self.told(removed)?;
        }
        Ok(())
    }

    /// Bytes of pools in the state directory: of VMs that were not detached.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn pool_bytes(&self) -> Result<u64, SoakError> {
        let state = self.run_folder.path().join("state");
        let failed = |source| file_error(&state, source);
        let mut bytes = 0;
        for entry in fs::read_dir(&state).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.extension().is_some_and(|ending| ending == "pool") {
                say(&format!("left in the state directory: {}", path.display()));
                let metadata = fs::metadata(&path).map_err(failed)?;
                // An empty one must be reported, too.
                bytes += metadata.len().max(1);
            }
        }
        Ok(bytes)
    }

    /// Panics in the daemon's log.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn panics(&self) -> Result<u64, SoakError> {
        let log = fs::read(&self.log).map_err(|source| file_error(&self.log, source))?;
        let text = String::from_utf8_lossy(&log);
        Ok(text
            .lines()
            .filter(|line| line.contains("panicked at"))
            .count() as u64)
    }

    /// `result`, with the end of the daemon's log if it is an error.
    ///
    /// # Errors
    /// As given.
    pub fn told<T>(&self, result: Result<T, ProductError>) -> Result<T, SoakError> {
        result.map_err(|source| SoakError::Product {
            source,
            log: self.product.log_tail(),
        })
    }

    /// Copies the output of guest and QEMU to `folder`.
    ///
    /// # Errors
    /// A file cannot be copied.
    pub fn keep_logs(&self, folder: &Path) -> Result<(), SoakError> {
        for name in ["console.log", "qemu.log"] {
            let from = self.run_folder.path().join("guest").join(name);
            fs::copy(&from, folder.join(name)).map_err(|source| file_error(&from, source))?;
        }
        Ok(())
    }

    /// A folder of this run on tmpfs.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.run_folder.path()
    }

    /// A report with the properties of the run.
    #[must_use]
    pub fn report(&self, options: &Options, elapsed: Duration) -> Report {
        let hours = elapsed.as_secs_f64() / 3600.0;
        Report {
            kills_wanted: kills_wanted(hours),
            minutes: hours * 60.0,
            seed: options.seed,
            versions: self.versions(),
            ..Report::default()
        }
    }

    fn versions(&self) -> Versions {
        let pagetide = match Product::binary() {
            Ok(path) => first_line(&path.to_string_lossy(), "--version"),
            Err(error) => error.to_string(),
        };
        Versions {
            pagetide,
            qemu: self.guest.version().to_string(),
            accel: self.guest.accel().name().to_owned(),
            guest_kernel: self.image.release.clone(),
            host_kernel: first_line("uname", "-r"),
            stress_ng: first_line("stress-ng", "--version"),
            fio: first_line("fio", "--version"),
            redis: first_line("redis-cli", "--version"),
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a few thousand at most, and never negative"
)]
fn whole(number: f64) -> u64 {
    number.max(0.0) as u64
}

fn first_line(program: &str, option: &str) -> String {
    match Command::new(program).arg(option).output() {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            text.lines().next().unwrap_or_default().trim().to_owned()
        }
        Err(error) => error.to_string(),
    }
}

fn prepare() -> Result<Image, SoakError> {
    // Programs share objects: each goes in once.
    let mut additions = BTreeMap::new();
    for program in PROGRAMS {
        for addition in program.additions()? {
            additions.insert(addition.name().to_owned(), addition);
        }
    }
    let additions: Vec<Addition> = additions.into_values().collect();
    Ok(prepare_with(&Extras {
        suffix: "-soak",
        additions: &additions,
        ..Extras::default()
    })?)
}

fn spec(seed: u64, disk: &Device) -> GuestSpec {
    GuestSpec {
        ram_bytes: RAM_BYTES,
        disk: Disk::VhostUser(disk.socket.clone()),
        work: Params {
            mem_bytes: MEMORY_BYTES,
            soak_seed: seed,
            seed,
            pace_us: 20_000,
            ..Params::default()
        },
        ..GuestSpec::default()
    }
}

fn devices(
    folder: &Path,
    run_folder: &Path,
    images: &mut Images,
) -> Result<(Device, Vec<Device>), SoakError> {
    let mut make = |name: String, bytes: u64| {
        let image = folder.join(format!("{name}.raw"));
        File::create(&image)
            .and_then(|file| file.set_len(bytes))
            .map_err(|source| file_error(&image, source))?;
        images.0.push(image.clone());
        let socket = run_folder.join(format!("{name}.sock"));
        Ok::<Device, SoakError>(Device { socket, image })
    };
    let all_mib = 1 + PARTITIONS.iter().map(|(_, mib)| mib).sum::<u64>();
    let disk = make("disk".to_owned(), all_mib * MIB)?;
    let tenants = (0..TENANTS)
        .map(|number| make(format!("tenant{number}"), TENANT_BYTES))
        .collect::<Result<Vec<_>, _>>()?;
    partition(&disk.image)?;
    Ok((disk, tenants))
}

/// Writes the partition table, and ext4 into the last partition.
fn partition(image: &Path) -> Result<(), SoakError> {
    let written = File::options()
        .write(true)
        .open(image)
        .and_then(|mut file| file.write_all(&partition_table()));
    written.map_err(|source| file_error(image, source))?;
    let before_files = PARTITIONS.iter().rev().skip(1).map(|(_, mib)| mib);
    let offset = (1 + before_files.sum::<u64>()) * MIB;
    let mut make = Command::new("mkfs.ext4");
    make.args(["-q", "-F", "-b", "4096", "-E"])
        .arg(format!("offset={offset}"))
        .arg(image)
        .arg(format!("{FILES_MIB}M"));
    let output = make
        .output()
        .map_err(|source| file_error(Path::new("mkfs.ext4"), source))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(file_error(
        Path::new("mkfs.ext4"),
        std::io::Error::other(said),
    ))
}

/// A master boot record with [`PARTITIONS`], the first at 1 MiB.
fn partition_table() -> [u8; 512] {
    let mut table = [0; 512];
    let mut first = MIB / SECTOR_BYTES;
    for (index, (kind, mib)) in PARTITIONS.iter().enumerate() {
        let sectors = mib * MIB / SECTOR_BYTES;
        let entry = &mut table[446 + 16 * index..446 + 16 * (index + 1)];
        entry[4] = *kind;
        // Sector numbers fit 32 bits: the disk is some hundred MiB.
        entry[8..12].copy_from_slice(&first.to_le_bytes()[..4]);
        entry[12..16].copy_from_slice(&sectors.to_le_bytes()[..4]);
        first += sectors;
    }
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    table
}

/// Shortest run that must keep up the rate of an hour. In a shorter run the first and the last recovery,
/// and a moment of load on the machine, weigh too much.
const FULL_RATE_HOURS: f64 = 1.0 / 6.0;

/// Fewest deaths in a run of this many hours.
fn kills_wanted(hours: f64) -> u64 {
    let share = if hours < FULL_RATE_HOURS { 0.5 } else { 1.0 };
    whole(hours * KILLS_AN_HOUR * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_program_that_is_not_there_is_named_with_its_package() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("there"), "").unwrap();
        let path = folder.path().join("there");
        let by_path = (path.to_str().unwrap(), "a");
        let first = |programs: &[(&'static str, &'static str)]| {
            let all = std::iter::once(by_path).chain(programs.iter().copied());
            first_missing(all, folder.path().as_os_str())
        };
        assert_eq!(first(&[("there", "b")]), None);
        let missing = first(&[
            ("there", "b"),
            ("pagetide-nowhere", "c"),
            ("/no/where", "d"),
        ]);
        let missing = missing.unwrap();
        assert!(
            missing.contains("pagetide-nowhere") && missing.contains("package c"),
            "{missing}"
        );
        assert!(first(&[("/no/where", "d")]).unwrap().contains("/no/where"));
    }

    #[test]
    fn partitions_follow_one_another_and_the_record_is_signed() {
        let table = partition_table();
        let number = |at: usize| {
            u32::from_le_bytes(table[at..at + 4].try_into().expect("four bytes of a table"))
        };
        let mut end = 2048;
        for index in 0..PARTITIONS.len() {
            let entry = 446 + 16 * index;
            assert_eq!(number(entry + 8), end);
            end += number(entry + 12);
        }
        assert_eq!(&table[510..], [0x55, 0xaa]);
    }

    #[test]
    fn wanted_kills_follow_the_time() {
        assert_eq!(kills_wanted(1.0), 600);
        assert_eq!(kills_wanted(0.5), 300);
        assert_eq!(kills_wanted(2.0 / 60.0), 10);
    }
}
