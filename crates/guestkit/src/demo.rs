// SPDX-License-Identifier: Apache-2.0
//! The demo: a running stock guest squeezed to half, its daemon killed, every byte verified; then a dense
//! stand-in of real size.
//!
//! ```text
//!   boot ─► work ─► attach ─► limit = half ─► squeezed ───── kill -9 ─ run ─────► detach ─► verify all
//!                                             └ sampled from outside, all the time ┘
//! ```
//! The [stand-in](crate::dense) comes when the guest is off, since both would want the CPUs.
//! Each step is a method of [`Demo`]; the steps share the [`Report`] they fill in.

use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_guest::params::Params;
use pagetide_guest::wire::Progress;
use serde_json::Value;

use crate::dense::{self, DenseError};
use crate::guest::{Guest, GuestError};
use crate::image::{self, Image, ImageError, repository};
use crate::product::{Product, ProductError, is_listening};
use crate::qemu::{Disk, GuestSpec, is_ram};
use crate::report::{DemoGoals, LEAST_FAULTS, Report, mib};
use crate::sampler::Sampler;
use crate::stage::RunFolder;

const NAME: &str = "demo";
const RAM_BYTES: u64 = 512 << 20;
const MEMORY_BYTES: u64 = 160 << 20;
/// More than the page cache of a guest with [`MEMORY_BYTES`] holds.
const DISK_BYTES: u64 = 320 << 20;
/// Pause of each guest loop after a step: the guest is busy, but not a benchmark.
const PACE_US: u64 = 2_000;
const BOOT_TIMEOUT: Duration = Duration::from_secs(180);
const SQUEEZE_TIMEOUT: Duration = Duration::from_secs(90);
const FINISH_TIMEOUT: Duration = Duration::from_secs(180);
/// Time for a restarted daemon to reopen its disks.
const DISK_TIMEOUT: Duration = Duration::from_secs(10);

/// The demo could not be completed.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// The guest's image could not be made.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The guest failed.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The daemon failed.
    #[error("{source}\nthe end of the daemon's log:\n{log}")]
    Product {
        /// How.
        source: ProductError,
        /// End of its log.
        log: String,
    },
    /// The dense stand-in.
    #[error("{source}\nthe end of the daemon's log:\n{log}")]
    Dense {
        /// How.
        source: DenseError,
        /// End of the daemon's log.
        log: String,
    },
    /// The limit was not reached.
    #[error(
        "{resident} are resident {seconds} s after the limit of {limit}; eviction blockers: {blockers}\n\
         the end of the daemon's log:\n{log}"
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
        /// End of its log.
        log: String,
    },
    /// A file could not be used.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Whether the guest has a disk of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// A vhost-user-blk disk served by the daemon.
    Disk,
    /// None: memory only.
    Absent,
}

/// How a demo is to run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether there is a device.
    pub device: Device,
    /// Seconds to stay squeezed.
    pub seconds: u32,
}

impl Options {
    /// The conditions that the report must meet.
    #[must_use]
    pub fn wanted(&self) -> DemoGoals {
        DemoGoals {
            squeezed_seconds: f64::from(self.seconds),
            iopfs: if self.device == Device::Disk {
                LEAST_FAULTS
            } else {
                0
            },
        }
    }
}

/// Runs the demo; files stay in `target/demo/`.
///
/// # Errors
/// A step failed. A report whose conditions do not hold is not an error here.
pub fn run(options: &Options) -> Result<Report, DemoError> {
    let mut voice = Voice::new();
    voice.say("preparing the guest's kernel and initramfs (Debian packages, unmodified)");
    let image = image::prepare()?;
    let folder = repository().join("target/demo");
    fs::create_dir_all(&folder).map_err(|source| file_error(&folder, source))?;
    // A failed run must not leave an earlier run's report behind.
    let path = folder.join("report.json");
    match fs::remove_file(&path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            return Err(file_error(&path, source));
        }
        _ => {}
    }
    let mut demo = Demo::start(options, &image, &folder, voice)?;
    let outcome = demo.play(options, &folder);
    demo.keep_logs(&folder)?;
    outcome?;
    let json = serde_json::to_string_pretty(&demo.report).map_err(io::Error::from);
    json.and_then(|json| fs::write(&path, json + "\n"))
        .map_err(|source| file_error(&path, source))?;
    Ok(demo.report.clone())
}

struct Demo {
    report: Report,
    voice: Voice,
    /// Dropped before the product: a guest without its disk would only wait.
    guest: Guest,
    product: Product,
    disk: Option<(PathBuf, PathBuf)>,
    run_folder: RunFolder,
}

impl Demo {
    fn start(
        options: &Options,
        image: &Image,
        folder: &Path,
        mut voice: Voice,
    ) -> Result<Self, DemoError> {
        let run_folder =
            RunFolder::new().map_err(|source| file_error(Path::new("/dev/shm"), source))?;
        let log = folder.join("pagetide.log");
        fs::write(&log, "").map_err(|source| file_error(&log, source))?;
        let bare = |source| DemoError::Product {
            source,
            log: crate::guest::tail(&log, 25),
        };
        voice.say("starting `pagetide run`");
        let binary = Product::binary().map_err(bare)?;
        let product =
            Product::start(&binary, &run_folder.path().join("state"), &log).map_err(bare)?;
        let disk = match options.device {
            Device::Absent => None,
            Device::Disk => Some((run_folder.path().join("disk.sock"), new_disk(folder)?)),
        };
        if let Some((socket, image)) = &disk {
            product.serve_disk(socket, image).map_err(bare)?;
        }
        let spec = spec(disk.as_ref().map(|(socket, _)| socket));
        let guest = Guest::start(&spec, image, &run_folder.path().join("guest"))?;
        let report = Report {
            accel: guest.accel().name().to_owned(),
            qemu_version: guest.version().to_string(),
            kernel: image.release.clone(),
            guest_ram_bytes: spec.ram_bytes,
            ..Report::default()
        };
        voice.say(&format!(
            "booting {} under QEMU {} ({}) as process {}",
            report.kernel,
            report.qemu_version,
            report.accel,
            guest.pid()
        ));
        Ok(Self {
            report,
            voice,
            guest,
            product,
            disk,
            run_folder,
        })
    }

    fn play(&mut self, options: &Options, folder: &Path) -> Result<(), DemoError> {
        let start = self.guest.wait_for_work(BOOT_TIMEOUT)?;
        self.voice
            .say("the guest has filled its memory and disk, and works on both");
        let sampler = Sampler::start(self.guest.pid());
        self.attach_and_limit()?;
        self.wait_until_squeezed(&sampler)?;
        self.stay_squeezed(options, &sampler)?;
        let seen = sampler.seen();
        self.report.resident_max_after_bytes = seen.max_bytes;
        self.report.squeezed_seconds = seen.below.as_secs_f64();
        self.let_go()?;
        self.verify(&start)?;
        self.take_a_dense_one(folder)?;
        self.stop()
    }

    fn attach_and_limit(&mut self) -> Result<(), DemoError> {
        let resident = self.guest.resident_bytes()?;
        let limit = resident / 2;
        let vm = self.product.attach(self.guest.pid(), NAME);
        let pause_us = self.told(vm)?["attach_pause_us"]
            .as_f64()
            .unwrap_or_default();
        self.voice.say(&format!(
            "took over the running VM; QEMU stood still for {pause_us:.0} us"
        ));
        let limited = self.product.limit(NAME, limit);
        self.told(limited)?;
        self.voice.say(&format!(
            "{} resident; the limit is now {}",
            mib(resident),
            mib(limit)
        ));
        self.report.resident_before_bytes = resident;
        self.report.limit_bytes = limit;
        Ok(())
    }

    fn wait_until_squeezed(&mut self, sampler: &Sampler) -> Result<(), DemoError> {
        let ceiling = Report::ceiling_bytes(self.report.limit_bytes);
        let deadline = Instant::now() + SQUEEZE_TIMEOUT;
        let begin = Instant::now();
        loop {
            let resident = self.guest.resident_bytes()?;
            if resident <= ceiling {
                sampler.watch(ceiling);
                let seconds = begin.elapsed().as_secs_f64();
                self.voice
                    .say(&format!("squeezed to {} in {seconds:.1} s", mib(resident)));
                return Ok(());
            }
            let vm = self.show()?;
            if Instant::now() > deadline {
                return Err(DemoError::NotSqueezed {
                    resident: mib(resident),
                    seconds: SQUEEZE_TIMEOUT.as_secs(),
                    limit: mib(self.report.limit_bytes),
                    blockers: vm["eviction_blockers"].to_string(),
                    log: self.product.log_tail(),
                });
            }
            self.live(&vm, resident);
            thread::sleep(Duration::from_millis(500));
        }
    }

    fn stay_squeezed(&mut self, options: &Options, sampler: &Sampler) -> Result<(), DemoError> {
        let wanted = Duration::from_secs(u64::from(options.seconds));
        let (kill_at, give_up) = (wanted / 3, Instant::now() + wanted * 2 + SQUEEZE_TIMEOUT);
        let mut killed = false;
        loop {
            let vm = self.show()?;
            let seen = sampler.seen();
            self.live(&vm, seen.now_bytes);
            if !killed && seen.below >= kill_at {
                killed = true;
                self.kill_and_restart()?;
            }
            let faults = self.report.vcpu_faults >= LEAST_FAULTS
                && self.report.iopfs >= options.wanted().iopfs;
            if (seen.below > wanted && killed && faults) || Instant::now() > give_up {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(500));
        }
    }

    fn kill_and_restart(&mut self) -> Result<(), DemoError> {
        let begin = Instant::now();
        self.product.kill();
        let ran = self.product.run();
        self.told(ran)?;
        let Some((socket, image)) = self.disk.clone() else {
            self.voice.say(&restarted(begin));
            return Ok(());
        };
        let deadline = Instant::now() + DISK_TIMEOUT;
        loop {
            let listening = is_listening(&socket);
            if self.told(listening)? {
                break;
            }
            if Instant::now() > deadline {
                let served = self.product.serve_disk(&socket, &image);
                self.told(served)?;
            }
            thread::sleep(Duration::from_millis(20));
        }
        self.voice.say(&restarted(begin));
        Ok(())
    }

    fn let_go(&mut self) -> Result<(), DemoError> {
        self.show()?;
        let begin = Instant::now();
        let detached = self.product.detach(NAME);
        let detached = self.told(detached)?;
        if let Some(vm) = detached.get("vm") {
            self.report.take_figures(vm);
        }
        let gone = !self
            .product
            .client(["vm", "show", NAME, "--json"])
            .is_ok_and(|a| a.status.success());
        self.report.detached = gone && !is_registered(self.guest.pid())?;
        let seconds = begin.elapsed().as_secs_f64();
        let resident = mib(self.guest.resident_bytes()?);
        self.voice.say(&format!(
            "detached in {seconds:.1} s, with {resident} resident"
        ));
        Ok(())
    }

    fn verify(&mut self, start: &Progress) -> Result<(), DemoError> {
        self.voice
            .say("the guest verifies every byte a last time and powers off");
        let last = self.guest.finish(FINISH_TIMEOUT)?;
        let report = &mut self.report;
        report.memory_bytes_verified = last.memory_bytes_verified - start.memory_bytes_verified;
        report.disk_bytes_verified = last.disk_bytes_verified - start.disk_bytes_verified;
        report.memory_errors = last.memory_errors;
        report.disk_errors = last.disk_errors;
        report.verified_after_detach = report.detached
            && last.final_memory_bytes == last.memory_bytes
            && last.final_disk_bytes == last.disk_bytes
            && (last.memory_errors, last.disk_errors) == (0, 0);
        Ok(())
    }

    fn take_a_dense_one(&mut self, folder: &Path) -> Result<(), DemoError> {
        let voice = &mut self.voice;
        let taken = dense::run(&self.product, folder, |text| voice.say(text));
        self.report.dense = taken.map_err(|source| DemoError::Dense {
            source,
            log: self.product.log_tail(),
        })?;
        Ok(())
    }

    fn stop(&mut self) -> Result<(), DemoError> {
        let stopped = self.product.stop();
        let status = self.told(stopped)?;
        if !status.success() {
            self.voice.say(&format!("the daemon ended with {status}"));
        }
        Ok(())
    }

    fn show(&mut self) -> Result<Value, DemoError> {
        let vm = self.product.show(NAME);
        let vm = self.told(vm)?;
        self.report.take_figures(&vm);
        Ok(vm)
    }

    fn live(&mut self, vm: &Value, resident: u64) {
        let verified = self
            .guest
            .progress()
            .map_or(0, |p| p.memory_bytes_verified + p.disk_bytes_verified);
        let errors = self
            .guest
            .progress()
            .map_or(0, |progress| progress.memory_errors + progress.disk_errors);
        self.voice.live(&format!(
            "resident {}, stored {} in {}, faults: vCPU {}, I/O {}; verified {}, {errors} errors",
            mib(resident),
            vm["stored_pages"],
            mib(vm["stored_bytes"].as_u64().unwrap_or_default()),
            self.report.vcpu_faults,
            self.report.iopfs,
            mib(verified),
        ));
    }

    fn told<T>(&self, result: Result<T, ProductError>) -> Result<T, DemoError> {
        result.map_err(|source| DemoError::Product {
            source,
            log: self.product.log_tail(),
        })
    }

    fn keep_logs(&self, folder: &Path) -> Result<(), DemoError> {
        for name in ["console.log", "qemu.log"] {
            let from = self.run_folder.path().join("guest").join(name);
            fs::copy(&from, folder.join(name)).map_err(|source| file_error(&from, source))?;
        }
        Ok(())
    }
}

fn restarted(begin: Instant) -> String {
    let ms = begin.elapsed().as_millis();
    format!("killed the daemon with SIGKILL and ran it again; it answers after {ms} ms")
}

fn spec(socket: Option<&PathBuf>) -> GuestSpec {
    GuestSpec {
        ram_bytes: RAM_BYTES,
        disk: socket.map_or(Disk::Absent, |socket| Disk::VhostUser(socket.clone())),
        work: Params {
            mem_bytes: if socket.is_some() {
                MEMORY_BYTES
            } else {
                2 * MEMORY_BYTES
            },
            file_bytes: if socket.is_some() { DISK_BYTES } else { 0 },
            seed: 1,
            pace_us: PACE_US,
            ..Params::default()
        },
        ..GuestSpec::default()
    }
}

fn new_disk(folder: &Path) -> Result<PathBuf, DemoError> {
    let path = folder.join("disk.raw");
    let made = fs::File::create(&path).and_then(|file| file.set_len(DISK_BYTES));
    made.map_err(|source| file_error(&path, source))?;
    Ok(path)
}

/// Whether a mapping of guest RAM is still registered with some userfaultfd: flags `um`, `uw`.
fn is_registered(pid: u32) -> Result<bool, DemoError> {
    let path = PathBuf::from(format!("/proc/{pid}/smaps"));
    let smaps = fs::read_to_string(&path).map_err(|source| file_error(&path, source))?;
    Ok(registered_in(&smaps))
}

fn registered_in(smaps: &str) -> bool {
    let mut in_ram = false;
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let registered = flags
                .split_whitespace()
                .any(|flag| matches!(flag, "um" | "uw"));
            if in_ram && registered {
                return true;
            }
        } else if line
            .split_whitespace()
            .nth(1)
            .is_some_and(|word| word.len() == 4 && word.ends_with(['s', 'p']))
        {
            in_ram = is_ram(line);
        }
    }
    false
}

/// Prints on stderr: plain lines, or on a terminal one line that is rewritten in place.
struct Voice {
    begin: Instant,
    terminal: bool,
    live_at: Option<Instant>,
    live_shown: bool,
}

impl Voice {
    fn new() -> Self {
        let terminal = io::stderr().is_terminal();
        Self {
            begin: Instant::now(),
            terminal,
            live_at: None,
            live_shown: false,
        }
    }

    fn say(&mut self, text: &str) {
        let clear = if self.live_shown { "\r\x1b[K" } else { "" };
        self.live_shown = false;
        self.write(&format!(
            "{clear}{:6.1} s  {text}\n",
            self.begin.elapsed().as_secs_f64()
        ));
    }

    fn live(&mut self, text: &str) {
        let period = Duration::from_millis(if self.terminal { 0 } else { 2_500 });
        if self.live_at.is_some_and(|at| at.elapsed() < period) {
            return;
        }
        self.live_at = Some(Instant::now());
        let seconds = self.begin.elapsed().as_secs_f64();
        if self.terminal {
            self.live_shown = true;
            self.write(&format!("\r\x1b[K{seconds:6.1} s  {text}"));
        } else {
            self.write(&format!("{seconds:6.1} s  {text}\n"));
        }
    }

    fn write(&mut self, text: &str) {
        let mut stderr = io::stderr();
        // Stderr is closed: there is nowhere left to report that.
        if stderr
            .write_all(text.as_bytes())
            .and_then(|()| stderr.flush())
            .is_err()
        {
            self.terminal = false;
        }
    }
}

fn file_error(path: &Path, source: io::Error) -> DemoError {
    DemoError::File {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAM: &str = "7f00-7f10 rw-s 00000000 00:01 9   /memfd:memory-backend-memfd (deleted)\n";
    const OTHER: &str = "7f20-7f30 rw-p 00000000 00:00 0 \n";

    #[test]
    fn registration_counts_on_guest_ram_only() {
        let flags = |flags: &str| format!("Rss: 4 kB\nVmFlags: rd wr {flags}\n");
        assert!(registered_in(&format!("{RAM}{}", flags("um uw"))));
        assert!(!registered_in(&format!("{RAM}{}", flags("dc"))));
        assert!(!registered_in(&format!(
            "{RAM}{}{OTHER}{}",
            flags(""),
            flags("um")
        )));
    }
}
