// SPDX-License-Identifier: Apache-2.0
//! A guest without an operating system under QEMU, which any KVM can run.
//!
//! A stock kernel needs a KVM backed by hardware. This guest (`guest.c` beside this file is its
//! source and describes all that it does) needs RAM and a serial port; it touches pages, checks
//! each and counts. It exercises faults, eviction and the daemon's deaths with pages that KVM uses,
//! also on hosts where real guests are emulated in software. There KVM interprets the guest's
//! instructions and reaches its RAM through QEMU's page tables; with hardware behind it, it uses
//! tables of its own.
//!
//! ```text
//!   test ── BareGuest ──stdin──► QEMU's serial port ──► guest: c, v, r
//!                     ◄─stdout──                        counted …, sound N, resting …, wrong …
//! ```
//! The compiler that links Rust programs builds it, in the caller's folder.

mod content;

pub use content::{Content, PAGE_BYTES, WrongWord};

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::guest::{GuestError, end, ram_files, resident_bytes, tail};
use crate::image::command_line;
use crate::lines::listen;
use crate::qemu::{Accel, QEMU, QemuError, Ram, Version, memory};
use crate::swapless::{SwapError, Swapless};

/// Most RAM: what QEMU puts in one piece below 4 GiB.
pub const RAM_BYTES_MAX: u64 = 2 << 30;
/// Least RAM: program and versions, and a section to work on.
pub const RAM_BYTES_MIN: u64 = 8 << 20;
/// The guest's program.
const SOURCE: &str = include_str!("guest.c");
/// Options of the compiler: 32 bits, no library, one loadable piece at 1 MiB.
const FLAGS: [&str; 18] = [
    "-m32",
    "-march=i686",
    "-O2",
    "-std=gnu99",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-ffreestanding",
    "-fno-builtin",
    "-fno-pic",
    "-fcf-protection=none",
    "-fno-stack-protector",
    "-fno-asynchronous-unwind-tables",
    "-mgeneral-regs-only",
    "-nostdlib",
    "-static",
    "-no-pie",
    "-Wl,--build-id=none,-z,noexecstack,-z,noseparate-code,-z,max-page-size=4096,-Ttext-segment=0x100000,-e,start",
];
/// Time for the guest to boot and fill its RAM. An emulated guest needs five seconds for the
/// firmware and thirty microseconds a page on an otherwise idle machine.
const START_WAIT: Duration = Duration::from_secs(60);
/// Time for one answer; a full comparison takes the longest.
const ANSWER_WAIT: Duration = Duration::from_secs(120);

/// A bare guest failed.
#[derive(Debug, thiserror::Error)]
pub enum BareError {
    /// This machine cannot run it.
    #[error("{0}")]
    Unable(String),
    /// QEMU, its process or its RAM.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// A file failed.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It ended.
    #[error("QEMU ended ({status}) while {what} was waited for:\n{log}")]
    Ended {
        /// Its exit status.
        status: ExitStatus,
        /// What was waited for.
        what: &'static str,
        /// The end of QEMU's output.
        log: String,
    },
    /// It does not answer.
    #[error("the guest says nothing for {seconds} s while {what} was waited for:\n{log}")]
    Late {
        /// What was waited for.
        what: &'static str,
        /// How long.
        seconds: u64,
        /// The end of QEMU's output.
        log: String,
    },
    /// It has read a wrong word, or printed an unexpected line.
    #[error("the guest says '{said}' while {what} was waited for")]
    Surprise {
        /// Its line.
        said: String,
        /// What was waited for.
        what: &'static str,
    },
    /// A page is wrong, seen from outside.
    #[error("page {page} in the file of its RAM: {wrong}")]
    Wrong {
        /// Its number.
        page: u32,
        /// The word.
        wrong: WrongWord,
    },
}

impl From<QemuError> for BareError {
    fn from(error: QemuError) -> Self {
        Self::Unable(error.to_string())
    }
}

impl From<SwapError> for BareError {
    fn from(error: SwapError) -> Self {
        Self::Unable(error.to_string())
    }
}

/// A bare guest to be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BareSpec {
    /// Its RAM; all of it is filled.
    pub ram_bytes: u64,
    /// Thousandths of its pages that are touched at random.
    pub hot_permille: u32,
    /// One of the other pages is checked after this many touches; 0 for never.
    pub sweep_every: u32,
    /// What runs it.
    pub accel: Accel,
}

/// What a bare guest has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Pages touched since its start.
    pub touched: u64,
    /// Cold pages checked since its start.
    pub swept: u64,
}

/// Offsets of its pages in its RAM, and so in the RAM file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resting {
    /// The versions, 4 bytes each.
    pub versions_at: u64,
    /// The pages.
    pub pages_at: u64,
}

impl Resting {
    /// Offset of `page`.
    #[must_use]
    pub fn page(&self, page: u32) -> u64 {
        self.pages_at + u64::from(page) * PAGE_BYTES as u64
    }
}

/// A bare guest under QEMU. Dropped, it is killed and waited for.
#[derive(Debug)]
pub struct BareGuest {
    child: Child,
    orders: ChildStdin,
    lines: Receiver<String>,
    log: PathBuf,
    pages: u32,
    /// Dropped after the process, because a cgroup that contains a process cannot be removed.
    _swapless: Swapless,
}

/// Builds the guest's program in `folder`.
///
/// # Errors
/// There is no compiler, or it cannot build 32-bit programs for this processor.
pub fn build(folder: &Path) -> Result<PathBuf, BareError> {
    let (source, program) = (folder.join("bare.c"), folder.join("bare.elf"));
    fs::write(&source, SOURCE).map_err(|error| file_error(&source, error))?;
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut command = Command::new(compiler);
    command.args(FLAGS).arg("-o").arg(&program).arg(&source);
    let unable = |said: &str| {
        BareError::Unable(format!(
            "`{}` makes no guest: {said}",
            command_line(&command)
        ))
    };
    let output = Command::new(command.get_program())
        .args(command.get_args())
        .output()
        .map_err(|error| unable(&error.to_string()))?;
    if output.status.success() {
        Ok(program)
    } else {
        Err(unable(String::from_utf8_lossy(&output.stderr).trim()))
    }
}

/// The arguments of `qemu-system-x86_64` for the guest `program`, its serial port on standard input
/// and output.
#[must_use]
pub fn arguments(spec: &BareSpec, ram: &Ram, program: &Path) -> Vec<OsString> {
    let (object, machine) = memory(ram, spec.ram_bytes);
    let mut words: Vec<OsString> = ["-nodefaults", "-no-user-config", "-display", "none"]
        .map(OsString::from)
        .to_vec();
    let mut option = |name: &str, value: OsString| words.extend([name.into(), value]);
    option("-accel", spec.accel.argument().into());
    option("-cpu", "max".into());
    option("-m", format!("{}M", spec.ram_bytes >> 20).into());
    if let Some(object) = object {
        option("-object", object.into());
    }
    option("-machine", machine.into());
    option("-kernel", program.into());
    let (hot, sweep) = (spec.hot_permille, spec.sweep_every);
    option("-append", format!("hot={hot} sweep={sweep}").into());
    option("-chardev", "stdio,id=port,signal=off".into());
    option("-serial", "chardev:port".into());
    words
}

impl BareSpec {
    /// Fails if this machine or its QEMU cannot run such a guest, as far as that shows without
    /// trying.
    ///
    /// # Errors
    /// [`BareError::Unable`].
    pub fn check(&self) -> Result<(), BareError> {
        Version::installed()?;
        if !(RAM_BYTES_MIN..=RAM_BYTES_MAX).contains(&self.ram_bytes)
            || !self.ram_bytes.is_multiple_of(1 << 20)
        {
            return Err(BareError::Unable(format!(
                "{} bytes are no RAM for it: give whole MiB from {} to {}",
                self.ram_bytes,
                RAM_BYTES_MIN >> 20,
                RAM_BYTES_MAX >> 20
            )));
        }
        if self.accel == Accel::Tcg {
            return Ok(());
        }
        let device = File::options().read(true).write(true).open("/dev/kvm");
        device
            .map(|_opened| ())
            .map_err(|error| BareError::Unable(format!("/dev/kvm: {error}")))
    }
}

impl BareGuest {
    /// Starts QEMU with its files in `folder`, and returns when the guest has filled its RAM and
    /// works.
    ///
    /// # Errors
    /// [`BareError::Unable`] where it does not get that far: nothing of ours has touched it then.
    pub fn start(spec: &BareSpec, folder: &Path) -> Result<Self, BareError> {
        spec.check()?;
        fs::create_dir_all(folder).map_err(|error| file_error(folder, error))?;
        let program = build(folder)?;
        let group = format!("pagetide-bare-{}", std::process::id());
        let swapless = Swapless::prepare(&group, folder, spec.ram_bytes)?;
        let ram = match swapless.ram_folder() {
            Some(folder) => Ram::SharedFile(folder.to_owned()),
            None => Ram::SharedMemfd,
        };
        let log = folder.join("qemu.log");
        let said = File::create(&log).map_err(|error| file_error(&log, error))?;
        let mut child = swapless
            .command(QEMU)
            .args(arguments(spec, &ram, &program))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(said)
            .spawn()
            .map_err(|error| file_error(Path::new(QEMU), error))?;
        let (Some(orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            end(&mut child);
            return Err(BareError::Unable("QEMU has no input or output".to_owned()));
        };
        let mut guest = Self {
            child,
            orders,
            lines: listen(answers),
            log,
            pages: 0,
            _swapless: swapless,
        };
        let wait = START_WAIT + Duration::from_micros(spec.ram_bytes / 4096 * 100);
        match guest.answer("its boot", "ready", wait) {
            Ok(numbers) => {
                guest.pages = page_number(numbers.first());
                Ok(guest)
            }
            Err(error) => {
                let (accel, error) = (spec.accel.name(), error.to_string());
                // One line, because reasons to skip are listed one a line.
                let words: Vec<&str> = error.split_whitespace().collect();
                Err(BareError::Unable(format!(
                    "a guest without an operating system does not start under {accel}: {}",
                    words.join(" ")
                )))
            }
        }
    }

    /// QEMU's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Pages that it tests.
    #[must_use]
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Its counts since its start.
    ///
    /// # Errors
    /// It has ended, does not answer, or has read a wrong word.
    pub fn count(&mut self) -> Result<Counted, BareError> {
        let numbers = self.ask("c", "a count", "counted")?;
        Ok(Counted {
            touched: numbers.first().copied().unwrap_or(0),
            swept: numbers.get(1).copied().unwrap_or(0),
        })
    }

    /// Waits until it has touched and checked this many more pages than in `since`.
    ///
    /// # Errors
    /// As [`BareGuest::count`]; or it takes longer than the time for an answer.
    pub fn wait_for_more(&mut self, since: Counted, more: Counted) -> Result<Counted, BareError> {
        let deadline = Instant::now() + ANSWER_WAIT;
        loop {
            let now = self.count()?;
            if now.touched >= since.touched + more.touched && now.swept >= since.swept + more.swept
            {
                return Ok(now);
            }
            if Instant::now() > deadline {
                return Err(self.late("more work", ANSWER_WAIT));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Has it compare stamps and noise of all its pages; returns their number.
    ///
    /// # Errors
    /// As [`BareGuest::count`].
    pub fn verify(&mut self) -> Result<u64, BareError> {
        let numbers = self.ask("v", "the comparison of all", "sound")?;
        Ok(numbers.first().copied().unwrap_or(0))
    }

    /// Stops its work until the next request.
    ///
    /// # Errors
    /// As [`BareGuest::count`].
    pub fn rest(&mut self) -> Result<Resting, BareError> {
        let numbers = self.ask("r", "its rest", "resting")?;
        let [versions_at, pages_at] = numbers[..] else {
            let said = format!("resting {numbers:x?}");
            return Err(BareError::Surprise {
                said,
                what: "its rest",
            });
        };
        Ok(Resting {
            versions_at,
            pages_at,
        })
    }

    /// Stops its work, compares every byte of its pages in its RAM file, and lets it go on. The
    /// guest must not be attached, since absent pages read as zeros in the file. Returns the number
    /// of pages.
    ///
    /// # Errors
    /// As [`BareGuest::count`]; or a page is wrong, or the file cannot be read.
    pub fn compare_all(&mut self) -> Result<u32, BareError> {
        let places = self.rest()?;
        let path = self.ram_file()?;
        let failed = |error| file_error(&path, error);
        let file = File::open(&path).map_err(failed)?;
        let (content, mut found) = (Content::default(), [0; PAGE_BYTES]);
        for page in 0..self.pages {
            let mut version = [0; 4];
            file.read_exact_at(&mut version, places.versions_at + u64::from(page) * 4)
                .map_err(failed)?;
            file.read_exact_at(&mut found, places.page(page))
                .map_err(failed)?;
            content
                .compare(page, u32::from_le_bytes(version), &found)
                .map_err(|wrong| BareError::Wrong { page, wrong })?;
        }
        self.count()?;
        Ok(self.pages)
    }

    /// The file of its RAM; guest-physical addresses are offsets in it.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn ram_file(&self) -> Result<PathBuf, BareError> {
        let files = ram_files(self.pid())?;
        // `ram_files` returns at least one.
        Ok(files.into_iter().next().unwrap_or_default())
    }

    /// Resident bytes of its RAM.
    ///
    /// # Errors
    /// QEMU has ended.
    pub fn resident_bytes(&self) -> Result<u64, BareError> {
        Ok(resident_bytes(self.pid())?)
    }

    /// Kills QEMU, as a crash would, and waits for its end.
    pub fn kill(&mut self) {
        end(&mut self.child);
    }

    fn ask(
        &mut self,
        order: &str,
        what: &'static str,
        word: &'static str,
    ) -> Result<Vec<u64>, BareError> {
        let told = self
            .orders
            .write_all(order.as_bytes())
            .and_then(|()| self.orders.flush());
        // QEMU may have ended: then its answer shows that.
        if let Err(error) = told
            && error.kind() != io::ErrorKind::BrokenPipe
        {
            return Err(file_error(Path::new(QEMU), error));
        }
        self.answer(what, word, ANSWER_WAIT)
    }

    /// The numbers after `word` in its next line.
    fn answer(
        &mut self,
        what: &'static str,
        word: &'static str,
        wait: Duration,
    ) -> Result<Vec<u64>, BareError> {
        let said = match self.lines.recv_timeout(wait) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => return Err(self.late(what, wait)),
            Err(RecvTimeoutError::Disconnected) => {
                let status = self
                    .child
                    .wait()
                    .map_err(|error| file_error(Path::new(QEMU), error))?;
                let log = tail(&self.log, 15);
                return Err(BareError::Ended { status, what, log });
            }
        };
        let numbers = said.strip_prefix(word).map(numbers_of);
        match numbers {
            Some(Ok(numbers)) => Ok(numbers),
            Some(Err(_)) | None => Err(BareError::Surprise { said, what }),
        }
    }

    fn late(&self, what: &'static str, wait: Duration) -> BareError {
        BareError::Late {
            what,
            seconds: wait.as_secs(),
            log: tail(&self.log, 15),
        }
    }
}

impl Drop for BareGuest {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

fn numbers_of(text: &str) -> Result<Vec<u64>, std::num::ParseIntError> {
    text.split_whitespace()
        .map(|number| u64::from_str_radix(number, 16))
        .collect()
}

fn page_number(number: Option<&u64>) -> u32 {
    // RAM ends at 4 GiB, so there are no more pages than a u32 holds.
    number.map_or(0, |pages| u32::try_from(*pages).unwrap_or(u32::MAX))
}

fn file_error(path: &Path, source: io::Error) -> BareError {
    BareError::File {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_hexadecimal_numbers() {
        assert_eq!(
            numbers_of(" 0 1f 35a12d1448f4").unwrap()[1..],
            [31, 0x35a1_2d14_48f4]
        );
        numbers_of(" 1g").unwrap_err();
    }

    #[test]
    fn guest_of_a_size_that_cannot_be_is_refused() {
        let spec = |ram_bytes| BareSpec {
            ram_bytes,
            hot_permille: 500,
            sweep_every: 0,
            accel: Accel::Tcg,
        };
        let words = arguments(&spec(64 << 20), &Ram::SharedMemfd, Path::new("/p"));
        let line = words.join(" ".as_ref()).into_string().unwrap();
        assert!(
            line.contains("memory-backend-memfd,share=on,id=ram,size=67108864"),
            "{line}"
        );
        assert!(line.contains("-append hot=500 sweep=0"), "{line}");
        if Version::installed().is_err() {
            eprintln!("SKIPPED: no QEMU");
            return;
        }
        for bytes in [0, 4 << 20, (64 << 20) + 4096, 3 << 30] {
            assert!(
                matches!(spec(bytes).check(), Err(BareError::Unable(_))),
                "{bytes}"
            );
        }
        spec(64 << 20).check().unwrap();
    }
}
