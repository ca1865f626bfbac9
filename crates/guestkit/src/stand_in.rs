// SPDX-License-Identifier: Apache-2.0
//! A stand-in for a VMM: a process with guest RAM and threads that use it, which starts in milliseconds.
//!
//! Operations on a VMM from outside (take-over, squeeze, detach, kill) do not need a guest. The stand-in
//! has a memfd like QEMU's (shared, `MADV_DONTFORK`), threads that touch it at random and compare what they
//! read, and optionally a connection to a vhost-user block device whose DMA goes into the same memory.
//!
//! ```text
//!   test ── StandIn ──stdin──► program: verify          main thread, asleep in read()
//!                   ◄─stdout── ready, sound N           vCPUs: touch, compare
//!                                                       disk: read into RAM, again and again
//! ```
//! The content of each page follows from its number, so any observer can detect a wrong page. Writers store
//! the existing content again, which the kernel sees as a write. The program ends at the end of its input,
//! and with status 3 at a wrong byte.
//!
//! The benches of large VMs have their own stand-in (`bench::busy` of `pagetide`): dense, busy, with
//! versions of pages, and without devices. This one is separate because its disk's rings and buffers lie in
//! the same memory, and because this crate knows only the product's command line.

mod disk;
mod guest;

pub use guest::{Wrong, serve};

use std::ffi::OsString;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// A program is recognised as a VMM by its name.
const PROGRAM: &str = "qemu-stand-in";
/// Its output once its memory is filled and its disk connected.
pub const READY: &str = "ready";
/// The command to compare every page.
pub const VERIFY: &str = "verify";
/// The prefix of the answer; the number of pages follows.
pub const SOUND: &str = "sound";

/// Pages that RAM consists of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RamPages {
    /// As the kernel likes.
    Usual,
    /// Huge ones of 2 MiB, of hugetlbfs.
    Hugetlb,
    /// One of 1 GiB, which is never touched: nothing is filled.
    Giant,
}

impl RamPages {
    /// As the program's command line has it.
    const fn word(self) -> &'static str {
        match self {
            Self::Usual => "usual",
            Self::Hugetlb => "hugetlb",
            Self::Giant => "giant",
        }
    }
}

/// What kind of VM it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StandInSpec {
    /// RAM to fill, in MiB.
    pub ram_mib: u64,
    /// Threads that use it.
    pub threads: u32,
    /// Its pages.
    pub pages: RamPages,
    /// Socket of a vhost-user block device to connect to.
    pub disk: Option<PathBuf>,
}

/// A running stand-in; killed on drop.
#[derive(Debug)]
pub struct StandIn {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl StandIn {
    /// Places the program `built` in `folder`, under a name that is recognised as a VMM's.
    ///
    /// # Errors
    /// It cannot be linked or copied there.
    pub fn program(built: &Path, folder: &Path) -> io::Result<PathBuf> {
        let program = folder.join(PROGRAM);
        if fs::hard_link(built, &program).is_err() {
            fs::copy(built, &program)?;
        }
        Ok(program)
    }

    /// Starts `program` and waits until its memory is filled and its disk connected.
    ///
    /// # Errors
    /// It cannot be started, or ends.
    pub fn start(program: &Path, spec: &StandInSpec) -> io::Result<Self> {
        let mut words: Vec<OsString> = vec![
            spec.ram_mib.to_string().into(),
            spec.threads.to_string().into(),
            spec.pages.word().into(),
        ];
        words.extend(spec.disk.as_ref().map(|socket| socket.clone().into()));
        let mut child = Command::new(program)
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let orders = child.stdin.take();
        let answers = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut stand_in = Self {
            child,
            orders,
            answers: BufReader::new(answers),
        };
        match stand_in.answer()?.as_str() {
            READY => Ok(stand_in),
            other => Err(io::Error::other(format!(
                "the stand-in began with '{other}'"
            ))),
        }
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Makes it compare every page; returns their number.
    ///
    /// # Errors
    /// It found a wrong byte, or has ended.
    pub fn verify(&mut self) -> io::Result<u64> {
        let orders = self.orders.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        writeln!(orders, "{VERIFY}")?;
        let answer = self.answer()?;
        let pages = answer
            .strip_prefix(SOUND)
            .map(|number| number.trim().parse());
        match pages {
            Some(Ok(pages)) => Ok(pages),
            Some(Err(_)) | None => Err(io::Error::other(format!("the stand-in says '{answer}'"))),
        }
    }

    /// Sends it a signal, as long as its end has not been waited for.
    ///
    /// # Errors
    /// It has ended.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        let pid = self.pid().try_into().ok().and_then(Pid::from_raw);
        Ok(kill_process(pid.ok_or(io::ErrorKind::NotFound)?, signal)?)
    }

    /// Kills it, and waits for its end.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }

    fn answer(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            return Err(io::Error::other("the stand-in has ended"));
        }
        Ok(line.trim().to_owned())
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            eprintln!("guestkit: killing process {}: {error}", self.pid());
        }
    }
}
