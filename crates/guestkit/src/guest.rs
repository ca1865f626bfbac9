// SPDX-License-Identifier: Apache-2.0
//! A running guest, seen from outside: its process, its port, its resident memory.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_guest::wire::{
    Command, Phase, Progress, SoakProgress, parse_progress, parse_soak_progress,
};

use crate::image::Image;
use crate::qemu::{Accel, GuestSpec, Paths, QEMU, QemuError, Ram, Version, arguments, is_ram};
use crate::qmp::{Qmp, QmpError};
use crate::swapless::{SwapError, Swapless};

/// Longest wait for QEMU to open its sockets.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A guest failed.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// QEMU cannot be used.
    #[error(transparent)]
    Qemu(#[from] QemuError),
    /// Kernel swap cannot be excluded.
    #[error(transparent)]
    Swap(#[from] SwapError),
    /// QEMU's monitor failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// A file or socket failed.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// QEMU ended before its time.
    #[error("QEMU ended ({status}) while waiting for {what}:\n{log}")]
    Ended {
        /// How it ended.
        status: ExitStatus,
        /// What was waited for.
        what: String,
        /// Ends of QEMU's log and the guest's console.
        log: String,
    },
    /// Something did not happen in time.
    #[error("{what} did not happen within {seconds} s; last report: {last:?}\n{log}")]
    Late {
        /// What was waited for.
        what: String,
        /// How long.
        seconds: u64,
        /// The guest's last report.
        last: Option<Box<Progress>>,
        /// Ends of QEMU's log and the guest's console.
        log: String,
    },
    /// The process has no file for guest RAM.
    #[error("process {0} has no open file of guest RAM: no memory-backend-memfd, no -file")]
    NoRam(u32),
}

#[derive(Debug, Default)]
struct Heard {
    last: Option<Progress>,
    reports: u64,
    soak: Option<SoakReport>,
}

/// The last report of a guest that soaks.
#[derive(Clone, Copy, Debug)]
pub struct SoakReport {
    /// The report.
    pub progress: SoakProgress,
    /// When it came.
    pub at: Instant,
}

#[derive(Debug, Default)]
struct Ear {
    heard: Mutex<Heard>,
    news: Condvar,
}

/// A guest under QEMU. Dropped, it is killed and waited for.
#[derive(Debug)]
pub struct Guest {
    child: Child,
    paths: Paths,
    accel: Accel,
    version: Version,
    port: UnixStream,
    ear: Arc<Ear>,
    /// Dropped after the process, because a cgroup that contains a process cannot be removed.
    _swapless: Swapless,
}

impl Guest {
    /// Starts QEMU with its files in `folder` and returns when its sockets answer.
    ///
    /// # Errors
    /// QEMU is missing, ends at once, or does not open its sockets.
    pub fn start(spec: &GuestSpec, image: &Image, folder: &Path) -> Result<Self, GuestError> {
        fs::create_dir_all(folder).map_err(|source| file_error(folder, source))?;
        let (paths, accel) = (Paths::in_folder(folder), Accel::of_this_machine());
        let version = Version::installed()?;
        for socket in [&paths.qmp, &paths.port] {
            remove_stale(socket)?;
        }
        let group = format!("pagetide-guest-{}", std::process::id());
        let swapless = Swapless::prepare(&group, folder, spec.ram_bytes)?;
        let mut spec = spec.clone();
        if let (Some(folder), Ram::SharedMemfd) = (swapless.ram_folder(), &spec.ram) {
            spec.ram = Ram::SharedFile(folder.to_owned());
        }
        let log = File::create(&paths.log).map_err(|source| file_error(&paths.log, source))?;
        let out = log
            .try_clone()
            .map_err(|source| file_error(&paths.log, source))?;
        let mut child = swapless
            .command(QEMU)
            .args(arguments(&spec, image, &paths, accel, version))
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(log)
            .spawn()
            .map_err(QemuError::Missing)?;
        let port = match connect(&paths, &mut child) {
            Ok(port) => port,
            Err(error) => {
                end(&mut child);
                return Err(error);
            }
        };
        let ear = Arc::new(Ear::default());
        let guest = Self {
            child,
            paths,
            accel,
            version,
            port,
            ear,
            _swapless: swapless,
        };
        guest.listen()?;
        Ok(guest)
    }

    /// QEMU's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What runs its instructions.
    #[must_use]
    pub fn accel(&self) -> Accel {
        self.accel
    }

    /// QEMU's version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// Its files.
    #[must_use]
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// A connection to QEMU's monitor; one at a time.
    ///
    /// # Errors
    /// QEMU does not answer.
    pub fn qmp(&self) -> Result<Qmp, GuestError> {
        Ok(Qmp::connect(&self.paths.qmp)?)
    }

    /// The guest's last report, if there was one.
    #[must_use]
    pub fn progress(&self) -> Option<Progress> {
        self.heard().last
    }

    /// The last report of a soak, if there was one.
    #[must_use]
    pub fn soak_report(&self) -> Option<SoakReport> {
        self.heard().soak
    }

    /// QEMU's exit status, if it has ended.
    ///
    /// # Errors
    /// It cannot be queried.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>, GuestError> {
        self.exited()
    }

    /// Sends a command word.
    ///
    /// # Errors
    /// The port is closed.
    pub fn send(&mut self, command: Command) -> Result<(), GuestError> {
        let line = format!("{}\n", command.word());
        self.port
            .write_all(line.as_bytes())
            .map_err(|source| file_error(&self.paths.port, source))
    }

    /// Waits for a later report that satisfies `holds`.
    ///
    /// # Errors
    /// No such report within `timeout`, or QEMU ended.
    pub fn wait_for(
        &mut self,
        what: &str,
        timeout: Duration,
        holds: impl Fn(&Progress) -> bool,
    ) -> Result<Progress, GuestError> {
        let deadline = Instant::now() + timeout;
        let mut seen = self.heard().reports;
        loop {
            let last = {
                let heard = self.heard();
                let patience = Duration::from_millis(200);
                let (heard, _) = self
                    .ear
                    .news
                    .wait_timeout_while(heard, patience, |heard| heard.reports == seen)
                    .unwrap_or_else(PoisonError::into_inner);
                let fresh = heard.reports != seen;
                seen = heard.reports;
                if let Some(progress) = heard.last
                    && fresh
                    && holds(&progress)
                {
                    return Ok(progress);
                }
                heard.last
            };
            if let Some(status) = self.exited()? {
                let log = self.log_tails();
                return Err(GuestError::Ended {
                    status,
                    what: what.to_owned(),
                    log,
                });
            }
            if Instant::now() > deadline {
                let (seconds, log) = (timeout.as_secs(), self.log_tails());
                return Err(GuestError::Late {
                    what: what.to_owned(),
                    seconds,
                    last: last.map(Box::new),
                    log,
                });
            }
        }
    }

    /// Waits until all content was written and the guest works on it.
    ///
    /// # Errors
    /// As [`Guest::wait_for`].
    pub fn wait_for_work(&mut self, timeout: Duration) -> Result<Progress, GuestError> {
        self.wait_for("the guest's work", timeout, |progress| {
            progress.phase == Phase::Work
        })
    }

    /// Makes the guest verify everything a last time, and waits for its final report and for QEMU to end.
    ///
    /// # Errors
    /// As [`Guest::wait_for`].
    pub fn finish(&mut self, timeout: Duration) -> Result<Progress, GuestError> {
        self.send(Command::Stop)?;
        let done = |progress: &Progress| progress.phase == Phase::Done;
        let last = self.wait_for("the last verification", timeout, done)?;
        let deadline = Instant::now() + timeout;
        while self.exited()?.is_none() {
            if Instant::now() > deadline {
                let (seconds, log) = (timeout.as_secs(), self.log_tails());
                let what = "power off".to_owned();
                return Err(GuestError::Late {
                    what,
                    seconds,
                    last: Some(Box::new(last)),
                    log,
                });
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(last)
    }

    /// Resident bytes of guest RAM, from the blocks of its file; independent of the daemon.
    ///
    /// # Errors
    /// The process is gone or has no such file.
    pub fn resident_bytes(&self) -> Result<u64, GuestError> {
        resident_bytes(self.pid())
    }

    /// The error that `what` did not happen within `timeout`, with all known details.
    #[must_use]
    pub fn late(&self, what: String, timeout: Duration) -> GuestError {
        GuestError::Late {
            what,
            seconds: timeout.as_secs(),
            last: self.progress().map(Box::new),
            log: self.log_tails(),
        }
    }

    /// What the guest's kernel and its first process have printed.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn console(&self) -> Result<String, GuestError> {
        let path = &self.paths.console;
        let bytes = fs::read(path).map_err(|source| file_error(path, source))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Last lines of QEMU's log and the guest's console.
    #[must_use]
    pub fn log_tails(&self) -> String {
        [&self.paths.log, &self.paths.console]
            .map(|path| tail(path, 15))
            .join("")
    }

    /// Kills QEMU, as a crash would, and waits for its end.
    pub fn kill(&mut self) {
        end(&mut self.child);
    }

    fn exited(&mut self) -> Result<Option<ExitStatus>, GuestError> {
        self.child
            .try_wait()
            .map_err(|source| file_error(&self.paths.folder, source))
    }

    fn heard(&self) -> std::sync::MutexGuard<'_, Heard> {
        self.ear
            .heard
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn listen(&self) -> Result<(), GuestError> {
        let stream = self
            .port
            .try_clone()
            .map_err(|source| file_error(&self.paths.port, source))?;
        let ear = Arc::clone(&self.ear);
        // Ends when QEMU closes the port.
        thread::spawn(move || {
            for line in BufReader::new(stream).lines() {
                let Ok(line) = line else { return };
                if let Some(progress) = parse_progress(&line) {
                    let mut heard = ear.heard.lock().unwrap_or_else(PoisonError::into_inner);
                    heard.last = Some(progress);
                    heard.reports += 1;
                    ear.news.notify_all();
                } else if let Some(progress) = parse_soak_progress(&line) {
                    let mut heard = ear.heard.lock().unwrap_or_else(PoisonError::into_inner);
                    let at = Instant::now();
                    heard.soak = Some(SoakReport { progress, at });
                }
            }
        });
        Ok(())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

/// Resident bytes of the guest RAM of QEMU process `pid`.
///
/// # Errors
/// The process is gone or has no such file.
pub fn resident_bytes(pid: u32) -> Result<u64, GuestError> {
    let mut bytes = 0;
    for path in ram_files(pid)? {
        // It may have been closed since.
        if let Ok(metadata) = fs::metadata(&path) {
            bytes += metadata.blocks() * 512;
        }
    }
    Ok(bytes)
}

/// The files of guest RAM that QEMU process `pid` has open, one at least.
///
/// # Errors
/// The process is gone or has no such file.
pub fn ram_files(pid: u32) -> Result<Vec<PathBuf>, GuestError> {
    let folder = PathBuf::from(format!("/proc/{pid}/fd"));
    let mut files = Vec::new();
    for entry in fs::read_dir(&folder).map_err(|source| file_error(&folder, source))? {
        let path = entry.map_err(|source| file_error(&folder, source))?.path();
        // A descriptor may be closed between the listing and here: then it is not RAM.
        let Ok(target) = fs::read_link(&path) else {
            continue;
        };
        if is_ram(&target.to_string_lossy()) {
            files.push(path);
        }
    }
    if files.is_empty() {
        return Err(GuestError::NoRam(pid));
    }
    Ok(files)
}

fn connect(paths: &Paths, child: &mut Child) -> Result<UnixStream, GuestError> {
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        let source = match UnixStream::connect(&paths.port) {
            Ok(port) => return Ok(port),
            Err(source) => source,
        };
        let exited = child
            .try_wait()
            .map_err(|source| file_error(&paths.folder, source))?;
        if let Some(status) = exited {
            let (what, log) = ("its sockets".to_owned(), tail(&paths.log, 15));
            return Err(GuestError::Ended { status, what, log });
        }
        if Instant::now() > deadline {
            return Err(file_error(&paths.port, source));
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Kills a process, as a crash would, and waits for its end.
pub(crate) fn end(child: &mut Child) {
    // An error means that it has ended already, and there is no process to wait for.
    if let Err(error) = child.kill() {
        eprintln!("guestkit: killing process {}: {error}", child.id());
    }
    if let Err(error) = child.wait() {
        eprintln!("guestkit: waiting for process {}: {error}", child.id());
    }
}

fn remove_stale(path: &Path) -> Result<(), GuestError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(file_error(path, source)),
        _ => Ok(()),
    }
}

/// The last `lines` lines of a text file, each indented, under its path.
#[must_use]
pub fn tail(path: &Path, lines: usize) -> String {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) => return format!("  ({}: {error})\n", path.display()),
    };
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().collect();
    let mut tail = format!("  {}:\n", path.display());
    for line in &all[all.len().saturating_sub(lines)..] {
        tail += &format!("    {}\n", line.trim_end());
    }
    tail
}

pub(crate) fn file_error(path: &Path, source: io::Error) -> GuestError {
    GuestError::File {
        path: path.to_owned(),
        source,
    }
}
