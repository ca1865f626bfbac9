// SPDX-License-Identifier: Apache-2.0
//! The stand-in's own side: its memory, the threads that use it, the commands it executes.

use std::io::{self, BufRead, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::exit;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pagetide_frontend::FrontendError;
use pagetide_random::SplitMix64;
use pagetide_sys::mapping::{MappingError, SharedMapping};
use pagetide_sys::memory_file::{FileError, GuestFile};

use super::disk::{DISK_BYTES, Disk};
use super::{READY, RamPages, SOUND, StandInSpec, VERIFY};

const PAGE_BYTES: u64 = 4096;
const PAGE: usize = 4096;
const HUGE_BYTES: u64 = 2 << 20;
/// Touches of a thread between two pauses: the host has other work.
const TOUCHES_A_TURN: u32 = 32;
/// The length of such a pause.
const REST: Duration = Duration::from_millis(1);
/// Where a thread writes the existing content again.
const WRITTEN_AT: u64 = 2048;
/// Status of a stand-in that has read a wrong byte.
const WRONG: i32 = 3;

/// Why a stand-in cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum Wrong {
    /// Its memory cannot be allocated.
    #[error("no memory: {0}")]
    File(#[from] FileError),
    /// Nor mapped.
    #[error("no memory: {0}")]
    Mapping(#[from] MappingError),
    /// Its input or output.
    #[error("orders: {0}")]
    Orders(#[from] io::Error),
    /// Its disk.
    #[error("disk: {0}")]
    Disk(#[from] FrontendError),
    /// A page has other bytes than it should.
    #[error("page {page} is wrong at byte {at}")]
    Page {
        /// Its number.
        page: u64,
        /// The first byte that differs.
        at: usize,
    },
}

/// Acts as a VMM until its input ends: the program's `main`.
///
/// # Errors
/// [`Wrong`].
pub fn serve(spec: &StandInSpec) -> Result<(), Wrong> {
    let filled_bytes = spec.ram_mib << 20;
    let bytes = filled_bytes + DISK_BYTES;
    let file = match spec.pages {
        RamPages::Usual => GuestFile::new_memfd("stand-in", bytes)?,
        RamPages::Hugetlb => {
            GuestFile::new_huge_memfd("stand-in", bytes.next_multiple_of(HUGE_BYTES))?
        }
        RamPages::Giant => giant()?,
    };
    let ram = Arc::new(SharedMapping::new(file.as_fd(), file.len_bytes()?)?);
    let pages = filled_bytes / PAGE_BYTES;
    for page in 0..pages {
        ram.copy_to(page * PAGE_BYTES, &content_of(page))?;
    }
    if let Some(socket) = &spec.disk {
        let disk = Disk::connect(socket, &file, Arc::clone(&ram), filled_bytes)?;
        thread::spawn(move || or_end(disk.read_for_ever()));
    }
    for number in 0..spec.threads {
        let ram = Arc::clone(&ram);
        thread::spawn(move || or_end(touch_for_ever(&ram, pages, number)));
    }
    println_now(READY)?;
    for order in io::stdin().lock().lines() {
        if order? == VERIFY {
            for page in 0..pages {
                compare(&ram, page)?;
            }
            println_now(&format!("{SOUND} {pages}"))?;
        }
    }
    Ok(())
}

impl StandInSpec {
    /// As the program's command line has it: `RAM_MIB THREADS PAGES [SOCKET]`.
    #[must_use]
    pub fn parse(mut words: impl Iterator<Item = String>) -> Option<Self> {
        let number = |word: Option<String>| word.and_then(|word| parsed(&word));
        Some(Self {
            ram_mib: number(words.next())?,
            threads: number(words.next())?
                .try_into()
                .map_or(1, |threads| threads),
            pages: match words.next()?.as_str() {
                "usual" => RamPages::Usual,
                "hugetlb" => RamPages::Hugetlb,
                "giant" => RamPages::Giant,
                _ => return None,
            },
            disk: words.next().map(PathBuf::from),
        })
    }
}

/// A file of one page of 1 GiB, which the host need not have: it is mapped, and no more.
fn giant() -> io::Result<GuestFile> {
    use rustix::fs::MemfdFlags;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB;
    let file = rustix::fs::memfd_create("giant", flags)?;
    rustix::fs::ftruncate(&file, 1 << 30)?;
    Ok(GuestFile::from(file))
}

fn parsed(word: &str) -> Option<u64> {
    word.parse().ok()
}

fn println_now(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// A thread that finds an error ends the process.
fn or_end(outcome: Result<(), Wrong>) {
    if let Err(error) = outcome {
        eprintln!("stand-in {}: {error}", std::process::id());
        exit(WRONG);
    }
}

/// Pages of zeros, pages that compress and pages that do not, by turns.
fn content_of(page: u64) -> [u8; PAGE] {
    let mut content = [0; PAGE];
    let mut random = SplitMix64::new(page);
    let kind = page % 4;
    for (at, word) in content.chunks_exact_mut(8).enumerate() {
        let noise = random.next_u64();
        let value = match kind {
            0 => 0,
            1 | 2 if at % 8 != 0 => page,
            _ => noise,
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
    content
}

fn compare(ram: &SharedMapping, page: u64) -> Result<(), Wrong> {
    let mut found = [0; PAGE];
    ram.copy_from(page * PAGE_BYTES, &mut found)?;
    let wanted = content_of(page);
    match found
        .iter()
        .zip(&wanted)
        .position(|(found, wanted)| found != wanted)
    {
        None => Ok(()),
        Some(at) => Err(Wrong::Page { page, at }),
    }
}

fn touch_for_ever(ram: &SharedMapping, pages: u64, number: u32) -> Result<(), Wrong> {
    let mut random = SplitMix64::new(number.into());
    loop {
        for touch in 0..TOUCHES_A_TURN {
            let page = random.below(pages);
            compare(ram, page)?;
            if touch % 4 == 0 {
                let same = [content_of(page)[2048]];
                ram.copy_to(page * PAGE_BYTES + WRITTEN_AT, &same)?;
            }
        }
        thread::sleep(REST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_follows_from_the_number_and_a_wrong_byte_is_found() {
        let file = GuestFile::new_memfd("content", 4 * PAGE_BYTES).expect("a memfd");
        let ram = SharedMapping::new(file.as_fd(), 4 * PAGE_BYTES).expect("a mapping");
        for page in 0..4 {
            ram.copy_to(page * PAGE_BYTES, &content_of(page))
                .expect("there");
            compare(&ram, page).expect("sound");
        }
        assert_ne!(content_of(1), content_of(5));
        ram.copy_to(2 * PAGE_BYTES + 7, &[0xee]).expect("there");
        assert!(matches!(
            compare(&ram, 2),
            Err(Wrong::Page { page: 2, at: 7 })
        ));
    }

    #[test]
    fn command_line_is_read() {
        let words = |line: &str| StandInSpec::parse(line.split(' ').map(str::to_owned));
        let spec = words("64 2 hugetlb /a/b.sock").expect("right");
        assert_eq!((spec.ram_mib, spec.threads), (64, 2));
        assert_eq!(spec.pages, RamPages::Hugetlb);
        assert_eq!(spec.disk, Some(PathBuf::from("/a/b.sock")));
        assert_eq!(words("64 2 usual").expect("right").disk, None);
        for wrong in ["x 2 usual", "64 2", "64 2 small"] {
            assert_eq!(words(wrong), None, "{wrong}");
        }
    }
}
