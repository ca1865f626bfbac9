// SPDX-License-Identifier: Apache-2.0
//! Resources that a test borrows from the machine: a mount, huge pages, swap. Returned on drop.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::image::command_line;

/// Number of 2 MiB huge pages that the kernel reserves.
const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// Adds and removes compressed disks in memory.
const ZRAM_CONTROL: &str = "/sys/class/zram-control";

/// The machine does not provide it.
#[derive(Debug, thiserror::Error)]
pub enum BorrowError {
    /// A program failed.
    #[error("`{command}`: {said}")]
    Failed {
        /// The command line.
        command: String,
        /// Its output, or why it could not be started.
        said: String,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is swap already, which must not be changed.
    #[error("swap is on already, on {0}")]
    SwapIsOn(String),
    /// Fewer huge pages than asked for.
    #[error("the kernel finds {free} free huge pages of 2 MiB, and {wanted} are needed")]
    TooFewHugePages {
        /// Free now.
        free: u64,
        /// Needed.
        wanted: u64,
    },
}

/// A tmpfs of our own.
#[derive(Debug)]
pub struct Tmpfs(PathBuf);

impl Tmpfs {
    /// Mounts one at `path`, which is created for it, with the words of `options`.
    ///
    /// # Errors
    /// Not permitted, or an option that this kernel does not support.
    pub fn mount(path: &Path, options: &str) -> Result<Self, BorrowError> {
        fs::create_dir_all(path).map_err(|source| file_error(path, source))?;
        run(Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "pagetide-guestkit"])
            .arg(path))?;
        Ok(Self(path.to_owned()))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // The ring of a killed process holds its lock file a moment longer, hence `--lazy`.
        if let Err(error) = run(Command::new("umount").arg("--lazy").arg(&self.0)) {
            eprintln!("guestkit: {} stays mounted: {error}", self.0.display());
            return;
        }
        if let Err(error) = fs::remove_dir(&self.0) {
            eprintln!("guestkit: {} stays: {error}", self.0.display());
        }
    }
}

/// Huge pages for the next process that needs them; the number is restored on drop. Only one test of the machine has
/// some at a time: whoever restored the number first would take the others' pages away.
#[derive(Debug)]
pub struct HugePages {
    before: u64,
    /// Dropped, and with it the lock, after the number is restored.
    _turn: fs::File,
}

impl HugePages {
    /// Ensures at least `wanted` free huge pages of 2 MiB.
    ///
    /// # Errors
    /// Not permitted, or memory is too fragmented.
    pub fn of_2_mib(wanted: u64) -> Result<Self, BorrowError> {
        let folder = Path::new(HUGE_PAGES);
        let turn = fs::File::open(folder).map_err(|source| file_error(folder, source))?;
        rustix::fs::flock(&turn, rustix::fs::FlockOperation::LockExclusive)
            .map_err(|source| file_error(folder, source.into()))?;
        let before = read_number("nr_hugepages")?;
        let borrowed = Self {
            before,
            _turn: turn,
        };
        let missing = wanted.saturating_sub(read_number("free_hugepages")?);
        write_number("nr_hugepages", before + missing)?;
        let free = read_number("free_hugepages")?;
        if free < wanted {
            return Err(BorrowError::TooFewHugePages { free, wanted });
        }
        Ok(borrowed)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Err(error) = write_number("nr_hugepages", self.before) {
            eprintln!("guestkit: {error}: the number of huge pages stays changed");
        }
    }
}

/// Kernel swap on a compressed disk in memory. The machine had no swap before, and has none after.
#[derive(Debug)]
pub struct ZramSwap {
    number: u32,
}

impl ZramSwap {
    /// Switches swap of `bytes` on.
    ///
    /// # Errors
    /// There is swap already, no zram, or no permission.
    pub fn of_bytes(bytes: u64) -> Result<Self, BorrowError> {
        let swaps = Path::new("/proc/swaps");
        let list = fs::read_to_string(swaps).map_err(|source| file_error(swaps, source))?;
        if let Some(line) = list.lines().nth(1) {
            let first = line.split_whitespace().next().unwrap_or_default();
            return Err(BorrowError::SwapIsOn(first.to_owned()));
        }
        let add = Path::new(ZRAM_CONTROL).join("hot_add");
        let number = fs::read_to_string(&add).map_err(|source| file_error(&add, source))?;
        let number = number.trim().parse().map_err(io::Error::other);
        let number = number.map_err(|source| file_error(&add, source))?;
        let swap = Self { number };
        let size = PathBuf::from(format!("/sys/block/zram{number}/disksize"));
        fs::write(&size, bytes.to_string()).map_err(|source| file_error(&size, source))?;
        run(Command::new("mkswap").arg(swap.device()))?;
        run(Command::new("swapon").arg(swap.device()))?;
        Ok(swap)
    }

    fn device(&self) -> String {
        format!("/dev/zram{}", self.number)
    }

    fn give_back(&self) -> Result<(), BorrowError> {
        let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
        if swaps.contains(&format!("{} ", self.device())) {
            run(Command::new("swapoff").arg(self.device()))?;
        }
        let remove = Path::new(ZRAM_CONTROL).join("hot_remove");
        fs::write(&remove, self.number.to_string()).map_err(|source| file_error(&remove, source))
    }
}

impl Drop for ZramSwap {
    fn drop(&mut self) {
        if let Err(error) = self.give_back() {
            eprintln!("guestkit: {} stays: {error}", self.device());
        }
    }
}

fn read_number(name: &str) -> Result<u64, BorrowError> {
    let path = Path::new(HUGE_PAGES).join(name);
    let text = fs::read_to_string(&path).map_err(|source| file_error(&path, source))?;
    let number = text.trim().parse().map_err(io::Error::other);
    number.map_err(|source| file_error(&path, source))
}

fn write_number(name: &str, number: u64) -> Result<(), BorrowError> {
    let path = Path::new(HUGE_PAGES).join(name);
    fs::write(&path, number.to_string()).map_err(|source| file_error(&path, source))
}

fn run(command: &mut Command) -> Result<(), BorrowError> {
    let said = match command.output() {
        Ok(output) if output.status.success() => return Ok(()),
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => error.to_string(),
    };
    let command = command_line(command);
    Err(BorrowError::Failed { command, said })
}

fn file_error(path: &Path, source: io::Error) -> BorrowError {
    BorrowError::File {
        path: path.to_owned(),
        source,
    }
}
