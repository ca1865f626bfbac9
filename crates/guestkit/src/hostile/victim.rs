// SPDX-License-Identifier: Apache-2.0
//! A well-behaved tenant beside the attacked one, which notices everything.
//!
//! A thread writes blocks of 4 to 64 KiB whose content is a function of sector and version, reads
//! them back at once, and reads another block of the disk that it wrote before. So it detects wrong
//! bytes, lost or misplaced writes and errors, and measures the longest request.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pagetide_random::SplitMix64;

use super::front::{Front, Io, SLOT_BYTES, T_IN, T_OUT, data_of};
use super::peer::{Failure, wrong};

const SECTOR_BYTES: usize = 512;
const SECTORS_PER_SLOT: u64 = SLOT_BYTES as u64 / SECTOR_BYTES as u64;
const PAGE_BYTES: u32 = 4096;
const PAGES_PER_SLOT: u64 = SLOT_BYTES as u64 / PAGE_BYTES as u64;
/// Longest time a request may take before the victim gives up.
const GIVES_UP_AFTER: Duration = Duration::from_secs(30);
/// Between two polls of the victim's progress.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A victim's progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// Blocks read and found correct.
    pub verified: u64,
    /// Bytes that were not as written.
    pub wrong_bytes: u64,
    /// Longest time a request took, the current one included.
    pub longest_gap: Duration,
    /// Why it has ended.
    pub ended: Option<String>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    verified: AtomicU64,
    wrong_bytes: AtomicU64,
    longest_ns: AtomicU64,
    /// When the current request began, in nanoseconds since the victim started.
    asked_ns: AtomicU64,
    ended: Mutex<Option<String>>,
}

/// See the module. Dropped, it leaves the device.
#[derive(Debug)]
pub struct Victim {
    shared: Arc<Shared>,
    began: Instant,
    thread: Option<JoinHandle<()>>,
}

impl Victim {
    /// Connects to the device at `socket`, whose disk has `disk_bytes`.
    ///
    /// # Errors
    /// The device refuses the connection.
    pub fn start(socket: &Path, disk_bytes: u64) -> Result<Self, Failure> {
        let front = Front::start(socket)?;
        let slots = disk_bytes / u64::from(SLOT_BYTES);
        if slots == 0 {
            return Err(wrong("a victim", format!("a disk of {disk_bytes} bytes")));
        }
        let began = Instant::now();
        let shared = Arc::new(Shared::default());
        let its = shared.clone();
        let mut tenant = Tenant {
            front,
            shared: its,
            began,
            blocks: vec![Block::default(); usize::try_from(slots).unwrap_or(usize::MAX)],
            random: SplitMix64::new(1),
        };
        let thread = thread::Builder::new()
            .name("victim".to_owned())
            .spawn(move || tenant.work())
            .map_err(super::peer::failed("starting the victim's thread"))?;
        Ok(Self {
            shared,
            began,
            thread: Some(thread),
        })
    }

    /// Its progress.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let shared = &self.shared;
        let ended = shared.ended.lock();
        let ended = ended.unwrap_or_else(PoisonError::into_inner).clone();
        let out = match (shared.asked_ns.load(Relaxed), &ended) {
            (0, _) | (_, Some(_)) => 0,
            (asked, None) => since(self.began).saturating_sub(asked),
        };
        Progress {
            verified: shared.verified.load(Relaxed),
            wrong_bytes: shared.wrong_bytes.load(Relaxed),
            longest_gap: Duration::from_nanos(shared.longest_ns.load(Relaxed).max(out)),
            ended,
        }
    }

    /// Waits until it has verified `blocks` more.
    ///
    /// # Errors
    /// It has not within `patience`, found something wrong, or ended.
    pub fn advance(&self, blocks: u64, patience: Duration) -> Result<(), Failure> {
        let wanted = self.shared.verified.load(Relaxed) + blocks;
        let deadline = Instant::now() + patience;
        loop {
            let now = self.progress();
            if let Some(why) = now.ended {
                return Err(wrong("the victim", why));
            }
            if now.wrong_bytes > 0 {
                let what = format!("{} of its bytes are wrong", now.wrong_bytes);
                return Err(wrong("the victim", what));
            }
            if now.verified >= wanted {
                return Ok(());
            }
            if Instant::now() > deadline {
                let step = format!("the victim: {} blocks of {wanted}", now.verified);
                return Err(Failure::Silent {
                    step,
                    waited: patience,
                });
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Leaves the device, and returns its progress.
    #[must_use]
    pub fn stop(mut self) -> Progress {
        self.end();
        self.progress()
    }

    fn end(&mut self) {
        self.shared.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            eprintln!("guestkit: the victim panicked");
        }
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.end();
    }
}

/// The last write into a slot of the disk.
#[derive(Debug, Clone, Copy, Default)]
struct Block {
    version: u64,
    len: u32,
}

struct Tenant {
    front: Front,
    shared: Arc<Shared>,
    began: Instant,
    blocks: Vec<Block>,
    random: SplitMix64,
}

impl Tenant {
    fn work(&mut self) {
        while !self.shared.stop.load(Relaxed) {
            if let Err(failure) = self.turn() {
                let ended = self.shared.ended.lock();
                *ended.unwrap_or_else(PoisonError::into_inner) = Some(failure.to_string());
                return;
            }
        }
    }

    fn turn(&mut self) -> Result<(), Failure> {
        let count = self.blocks.len() as u64;
        let slot = self.random.below(count);
        let pages = 1 + self.random.below(PAGES_PER_SLOT);
        let len = PAGE_BYTES * u32::try_from(pages).unwrap_or(1);
        let at = index(slot);
        let block = Block {
            version: self.blocks[at].version + 1,
            len,
        };
        let sector = slot * SECTORS_PER_SLOT;
        let content = content(sector, block.version, len);
        self.front.ram.put(data_of(0), &content)?;
        self.ask(0, Io::of_slot(0, T_OUT, sector, len))?;
        self.blocks[at] = block;
        self.verify(slot)?;
        let other = self.random.below(count);
        if self.blocks[index(other)].len > 0 {
            self.verify(other)?;
        }
        Ok(())
    }

    fn verify(&mut self, slot: u64) -> Result<(), Failure> {
        let block = self.blocks[index(slot)];
        let sector = slot * SECTORS_PER_SLOT;
        self.front
            .ram
            .put(data_of(1), &vec![0xa5; block.len as usize])?;
        self.ask(1, Io::of_slot(1, T_IN, sector, block.len))?;
        let mut came = vec![0; block.len as usize];
        self.front.ram.read(data_of(1), &mut came)?;
        let expected = content(sector, block.version, block.len);
        let wrong = came.iter().zip(&expected).filter(|(a, b)| a != b).count();
        if wrong > 0 {
            self.shared.wrong_bytes.fetch_add(wrong as u64, Relaxed);
            eprintln!("guestkit: the victim finds {wrong} wrong bytes at sector {sector}");
        }
        self.shared.verified.fetch_add(1, Relaxed);
        Ok(())
    }

    fn ask(&mut self, slot: u16, io: Io) -> Result<(), Failure> {
        let asked = since(self.began).max(1);
        self.shared.asked_ns.store(asked, Relaxed);
        self.front.post(slot, io)?;
        self.front.kick()?;
        self.front.wait_within(GIVES_UP_AFTER)?;
        self.shared.asked_ns.store(0, Relaxed);
        let took = since(self.began) - asked;
        self.shared.longest_ns.fetch_max(took, Relaxed);
        match self.front.status(slot)? {
            0 => Ok(()),
            status => Err(wrong("a request", format!("its status is {status}"))),
        }
    }
}

fn index(slot: u64) -> usize {
    usize::try_from(slot).unwrap_or(usize::MAX)
}

fn since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// The content of `len` bytes from `sector` on, in version `version`.
#[must_use]
pub fn content(sector: u64, version: u64, len: u32) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len as usize);
    let mut at = sector;
    while bytes.len() < len as usize {
        let mut random = SplitMix64::stream(version, at);
        for _ in 0..SECTOR_BYTES / 8 {
            bytes.extend(random.next_u64().to_le_bytes());
        }
        at += 1;
    }
    bytes.truncate(len as usize);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_differs_by_sector_and_version_and_not_by_length() {
        let one = content(8, 1, 4096);
        assert_eq!(one.len(), 4096);
        assert_ne!(one, content(8, 2, 4096));
        assert_ne!(one, content(16, 1, 4096));
        assert_eq!(one[512..1024], content(9, 1, 512));
        assert_eq!(one[..1024], content(8, 1, 1024));
    }
}
