// SPDX-License-Identifier: Apache-2.0
//! The disk loop: verifiable blocks on a raw disk, through the page cache and past it.
//!
//! The purpose is DMA into pages that the host has evicted. It happens when a guest cycles through more
//! file data than its page cache holds: the kernel gives the least recently used page to the next read,
//! which is just the page that a host evicts. So the loop reads the disk in order, again and again, and
//! leaves the choice of pages to the guest's kernel. Some reads and writes bypass the cache, with our own
//! buffers, and flushes, zeroes and discards are mixed in. When the host makes the guest free and
//! reallocate memory, the buffers are reallocated, too: in plugged RAM, if there is any.
//!
//! A block: word 0 its number, 1 its generation, 2 the seed, 3 the checksum of the rest, the rest from
//! [`pattern`]. A zeroed block is all zeros. One thread works, so the generation that each block should
//! have is always known.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use rustix::fs::{Advice, FallocateFlags, OFlags, fadvise, fallocate};

use crate::memory::rest;
use crate::params::Params;
use crate::pattern::{self, Mismatch, PAGE_BYTES, PAGE_WORDS};
use crate::plugged::plugged_bytes;
use crate::shared::{Counters, Extent, Order, Shared};

/// Bytes the loop reads in one step of its cycle.
pub const CHUNK_BYTES: u64 = 1 << 20;

const BLOCK_BYTES: u64 = PAGE_BYTES as u64;
const CHUNK_BLOCKS: usize = 256;
const HEADER_WORDS: usize = 4;
/// Blocks rewritten at a time.
const WRITE_BLOCKS: usize = 16;
/// Buffers that direct reads use in turn, so that most of them have grown cold.
const DIRECT_BUFFERS: usize = 8;
/// An allocation of this size is separate from others, and returns to the kernel when it is freed.
const APART_BYTES: usize = 40 << 20;
/// `FALLOC_FL_NO_HIDE_STALE`: with it a punched range of a block device is discarded, not zeroed.
const NO_HIDE_STALE: u32 = 0x04;

/// The expected content of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Zero,
    Generation(u32),
}

/// An operation on the disk that failed.
#[derive(Debug, thiserror::Error)]
#[error("{operation} of {bytes} bytes at {offset}: {source}")]
pub struct DiskError {
    operation: &'static str,
    bytes: u64,
    offset: u64,
    source: io::Error,
}

/// Bytes of whole pages on a page boundary, as direct I/O requires.
#[derive(Debug)]
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    skew: usize,
    len: usize,
}

impl Buffer {
    pub(crate) fn new(len: usize) -> Self {
        Self::within(len, len + PAGE_BYTES)
    }

    /// Allocates a separate buffer; the part past `len` is never touched.
    fn apart(len: usize) -> Self {
        Self::within(len, APART_BYTES.max(len + PAGE_BYTES))
    }

    fn within(len: usize, all: usize) -> Self {
        let bytes = vec![0; all];
        let skew = bytes.as_ptr().align_offset(PAGE_BYTES).min(PAGE_BYTES);
        Self { bytes, skew, len }
    }

    pub(crate) fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[self.skew..self.skew + self.len]
    }

    /// Part number `turn`, of a chunk's length.
    fn part(&mut self, turn: usize) -> &mut [u8] {
        let bytes = CHUNK_BLOCKS * PAGE_BYTES;
        &mut self.get()[turn * bytes..(turn + 1) * bytes]
    }
}

/// The disk under work and its expected content.
#[derive(Debug)]
pub struct Disk {
    cached: File,
    direct: File,
    contents: Vec<Content>,
    buffer: Buffer,
    /// Used in turn; see [`DIRECT_BUFFERS`].
    direct_buffers: Buffer,
    seed: u64,
    random: u64,
    steps: u64,
    cursor: usize,
}

impl Disk {
    /// Opens the disk at `path`, once with and once without the page cache.
    ///
    /// # Errors
    /// The disk cannot be opened.
    pub fn open(path: &Path, params: &Params) -> io::Result<Self> {
        let cached = OpenOptions::new().read(true).write(true).open(path)?;
        let direct = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(OFlags::DIRECT.bits().cast_signed())
            .open(path)?;
        let blocks = usize::try_from(params.file_bytes / BLOCK_BYTES).unwrap_or(0);
        Ok(Self {
            cached,
            direct,
            contents: vec![Content::Generation(0); blocks],
            buffer: Buffer::new(CHUNK_BLOCKS * PAGE_BYTES),
            direct_buffers: Buffer::apart(DIRECT_BUFFERS * CHUNK_BLOCKS * PAGE_BYTES),
            seed: params.seed ^ 0x6469_736b,
            random: pattern::mix(params.seed ^ 0x0064_6973_6b00) | 1,
            steps: 0,
            cursor: 0,
        })
    }

    /// Writes the first generation of every block, and flushes.
    ///
    /// # Errors
    /// A write or the flush failed.
    pub fn fill(&mut self) -> Result<(), DiskError> {
        for first in (0..self.contents.len()).step_by(CHUNK_BLOCKS) {
            self.write(first, CHUNK_BLOCKS)?;
        }
        self.flush()
    }

    /// Allocates new buffers for direct I/O.
    pub fn renew_buffers(&mut self) {
        // The old ones first, so that their memory is free.
        self.direct_buffers = Buffer::new(0);
        self.direct_buffers = Buffer::apart(DIRECT_BUFFERS * CHUNK_BLOCKS * PAGE_BYTES);
    }

    /// One chunk of the cycle, and another operation in turn.
    ///
    /// # Errors
    /// An operation failed; the loop may go on.
    pub fn step(&mut self, counters: &Counters) -> Result<(), DiskError> {
        let first = self.cursor;
        self.cursor += CHUNK_BLOCKS;
        if self.cursor >= self.contents.len() {
            self.cursor = 0;
            Counters::add(&counters.rounds, 1);
        }
        self.steps += 1;
        if self.steps.is_multiple_of(8) {
            self.verify_direct(first, counters)?;
        } else {
            self.verify(first, CHUNK_BLOCKS, counters)?;
        }
        let other = self.draw(self.contents.len() / WRITE_BLOCKS) * WRITE_BLOCKS;
        match self.steps % 64 {
            3 => self.zero(other)?,
            19 => {
                self.discard(other)?;
                self.rewrite(other)?;
            }
            35 => self.forget(first)?,
            51 => self.flush()?,
            turn if turn % 16 == 8 => self.rewrite_direct(other, counters)?,
            turn if turn % 4 == 0 => self.rewrite(other)?,
            turn if turn % 4 == 2 => {
                let block = self.draw(self.contents.len());
                self.verify(block, 1, counters)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Flushes and verifies every block once, read from the disk itself.
    ///
    /// # Errors
    /// An operation failed.
    pub fn verify_all(&mut self, counters: &Counters) -> Result<(), DiskError> {
        self.flush()?;
        for first in (0..self.contents.len()).step_by(CHUNK_BLOCKS) {
            self.verify_direct(first, counters)?;
            Counters::add(&counters.final_bytes, CHUNK_BYTES);
        }
        Ok(())
    }

    fn draw(&mut self, below: usize) -> usize {
        self.random = pattern::step(self.random);
        usize::try_from(self.random >> 8).unwrap_or(0) % below.max(1)
    }

    fn rewrite(&mut self, first: usize) -> Result<(), DiskError> {
        self.next_generation(first);
        self.write(first, WRITE_BLOCKS)
    }

    /// The same with direct I/O.
    fn rewrite_direct(&mut self, first: usize, counters: &Counters) -> Result<(), DiskError> {
        self.next_generation(first);
        let turn = (first / WRITE_BLOCKS) % DIRECT_BUFFERS;
        let bytes = &mut self.direct_buffers.part(turn)[..WRITE_BLOCKS * PAGE_BYTES];
        make_blocks(bytes, self.seed, first, &self.contents[first..]);
        let offset = first as u64 * BLOCK_BYTES;
        let outcome = self.direct.write_all_at(bytes, offset);
        Counters::add(&counters.plugged_bytes, plugged_bytes(bytes));
        named("direct write", WRITE_BLOCKS, offset, outcome)
    }

    fn next_generation(&mut self, first: usize) {
        for content in &mut self.contents[first..first + WRITE_BLOCKS] {
            *content = Content::Generation(match *content {
                Content::Zero => 1,
                Content::Generation(generation) => generation.wrapping_add(1),
            });
        }
    }

    fn write(&mut self, first: usize, blocks: usize) -> Result<(), DiskError> {
        let bytes = &mut self.buffer.get()[..blocks * PAGE_BYTES];
        make_blocks(bytes, self.seed, first, &self.contents[first..]);
        let offset = first as u64 * BLOCK_BYTES;
        let outcome = self.cached.write_all_at(bytes, offset);
        named("write", blocks, offset, outcome)
    }

    fn verify(
        &mut self,
        first: usize,
        blocks: usize,
        counters: &Counters,
    ) -> Result<(), DiskError> {
        let bytes = &mut self.buffer.get()[..blocks * PAGE_BYTES];
        let offset = first as u64 * BLOCK_BYTES;
        let outcome = self.cached.read_exact_at(bytes, offset);
        named("read", blocks, offset, outcome)?;
        compare(
            bytes,
            self.seed,
            first,
            &self.contents[first..first + blocks],
            counters,
        );
        Ok(())
    }

    fn verify_direct(&mut self, first: usize, counters: &Counters) -> Result<(), DiskError> {
        let turn = (first / CHUNK_BLOCKS) % DIRECT_BUFFERS;
        let bytes = self.direct_buffers.part(turn);
        let offset = first as u64 * BLOCK_BYTES;
        let outcome = self.direct.read_exact_at(bytes, offset);
        named("direct read", CHUNK_BLOCKS, offset, outcome)?;
        Counters::add(&counters.plugged_bytes, plugged_bytes(bytes));
        let contents = &self.contents[first..first + CHUNK_BLOCKS];
        compare(bytes, self.seed, first, contents, counters);
        Ok(())
    }

    fn zero(&mut self, first: usize) -> Result<(), DiskError> {
        self.contents[first..first + WRITE_BLOCKS].fill(Content::Zero);
        self.punch("zeroing", first, FallocateFlags::empty())
    }

    fn discard(&self, first: usize) -> Result<(), DiskError> {
        self.punch(
            "discard",
            first,
            FallocateFlags::from_bits_retain(NO_HIDE_STALE),
        )
    }

    fn punch(
        &self,
        name: &'static str,
        first: usize,
        extra: FallocateFlags,
    ) -> Result<(), DiskError> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE | extra;
        let offset = first as u64 * BLOCK_BYTES;
        let bytes = WRITE_BLOCKS as u64 * BLOCK_BYTES;
        let outcome = match fallocate(&self.cached, flags, offset, bytes) {
            // A disk that supports neither is no error: zeros are written, a discard is skipped.
            Err(rustix::io::Errno::OPNOTSUPP) if extra.is_empty() => self
                .cached
                .write_all_at(&[0; WRITE_BLOCKS * PAGE_BYTES], offset),
            Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
            other => other.map_err(io::Error::from),
        };
        named(name, WRITE_BLOCKS, offset, outcome)
    }

    /// Drops the cache of the chunk just read, so that its pages serve other reads early.
    fn forget(&self, first: usize) -> Result<(), DiskError> {
        let offset = first as u64 * BLOCK_BYTES;
        let len = std::num::NonZero::new(CHUNK_BYTES);
        let outcome = fadvise(&self.cached, offset, len, Advice::DontNeed);
        named(
            "fadvise",
            CHUNK_BLOCKS,
            offset,
            outcome.map_err(io::Error::from),
        )
    }

    fn flush(&self) -> Result<(), DiskError> {
        named("flush", self.contents.len(), 0, self.cached.sync_data())
    }
}

fn named(
    operation: &'static str,
    blocks: usize,
    offset: u64,
    outcome: io::Result<()>,
) -> Result<(), DiskError> {
    let bytes = blocks as u64 * BLOCK_BYTES;
    outcome.map_err(|source| DiskError {
        operation,
        bytes,
        offset,
        source,
    })
}

/// Fills `bytes` with the blocks from number `first` on.
fn make_blocks(bytes: &mut [u8], seed: u64, first: usize, contents: &[Content]) {
    let mut block = [0; PAGE_WORDS];
    let blocks = bytes.chunks_exact_mut(PAGE_BYTES).zip(contents);
    for (number, (space, content)) in (first..).zip(blocks) {
        make_block(&mut block, seed, number, *content);
        for (word, place) in block.iter().zip(space.chunks_exact_mut(8)) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }
}

fn make_block(block: &mut [u64; PAGE_WORDS], seed: u64, number: usize, content: Content) {
    let Content::Generation(generation) = content else {
        block.fill(0);
        return;
    };
    let key = pattern::key(seed, number as u64, generation);
    pattern::fill_nonzero(&mut block[HEADER_WORDS..], key);
    block[0] = number as u64;
    block[1] = u64::from(generation);
    block[2] = seed;
    block[3] = pattern::checksum(&block[HEADER_WORDS..]);
}

fn check_block(
    block: &[u64; PAGE_WORDS],
    seed: u64,
    number: usize,
    content: Content,
) -> Result<(), Mismatch> {
    let Content::Generation(generation) = content else {
        return pattern::check_zero(block);
    };
    let header = [number as u64, u64::from(generation), seed];
    for (word, (&want, &got)) in header.iter().zip(block).enumerate() {
        if want != got {
            return Err(Mismatch { word, want, got });
        }
    }
    let key = pattern::key(seed, number as u64, generation);
    pattern::check_nonzero(&block[HEADER_WORDS..], key)
}

fn compare(bytes: &[u8], seed: u64, first: usize, contents: &[Content], counters: &Counters) {
    let mut block = [0; PAGE_WORDS];
    for (index, (space, &content)) in bytes.chunks_exact(PAGE_BYTES).zip(contents).enumerate() {
        for (word, place) in block.iter_mut().zip(space.as_chunks().0) {
            *word = u64::from_le_bytes(*place);
        }
        let number = first + index;
        if let Err(wrong) = check_block(&block, seed, number, content)
            && counters.count_error()
        {
            eprintln!("guest-work: disk block {number}, should be {content:?}: {wrong:x?}");
        }
    }
    Counters::add(&counters.bytes_verified, bytes.len() as u64);
}

/// Fills, works until the stop command, verifies everything.
///
/// # Errors
/// The disk cannot be opened, filled or read at the end. Failures on the way are counted, printed and
/// skipped.
pub fn run(path: &Path, params: &Params, shared: &Shared) -> Result<(), DiskError> {
    let counters = &shared.disk;
    counters.bytes.store(params.file_bytes, Relaxed);
    let opened = Disk::open(path, params);
    let mut disk = opened.map_err(|source| DiskError {
        operation: "open",
        bytes: 0,
        offset: 0,
        source,
    })?;
    disk.fill()?;
    counters.filled.store(true, Relaxed);
    let mut extent = shared.extent();
    while shared.order() == Order::Step {
        let before = std::mem::replace(&mut extent, shared.extent());
        if before == Extent::Half && extent == Extent::Whole {
            disk.renew_buffers();
        }
        if let Err(error) = disk.step(counters)
            && counters.count_error()
        {
            eprintln!("guest-work: {error}");
        }
        rest(params.pace_us);
    }
    disk.verify_all(counters)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file instead of the disk; its file system must support direct I/O.
    fn disk(params: &Params) -> Option<(tempfile::NamedTempFile, Disk)> {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).expect("a file");
        file.as_file().set_len(params.file_bytes).expect("its size");
        match Disk::open(file.path(), params) {
            Ok(disk) => Some((file, disk)),
            Err(error) => {
                eprintln!("SKIPPED: no direct I/O here: {error}");
                None
            }
        }
    }

    #[test]
    fn sound_disk_many_steps_no_error() {
        let params = Params {
            file_bytes: 4 * CHUNK_BYTES,
            ..Params::default()
        };
        let Some((_file, mut disk)) = disk(&params) else {
            return;
        };
        let counters = Counters::default();
        disk.fill().expect("fill");
        for _ in 0..200 {
            disk.step(&counters).expect("step");
        }
        disk.verify_all(&counters).expect("last pass");
        assert_eq!(counters.errors.load(Relaxed), 0);
        assert_eq!(counters.rounds.load(Relaxed), 50);
        assert_eq!(counters.final_bytes.load(Relaxed), params.file_bytes);
    }

    #[test]
    fn lost_write_is_found() {
        let params = Params {
            file_bytes: 2 * CHUNK_BYTES,
            ..Params::default()
        };
        let Some((file, mut disk)) = disk(&params) else {
            return;
        };
        let counters = Counters::default();
        disk.fill().expect("fill");
        let mut old = vec![0; PAGE_BYTES];
        file.as_file()
            .read_exact_at(&mut old, 0)
            .expect("old block");
        disk.rewrite(0).expect("rewrite");
        file.as_file().write_all_at(&old, 0).expect("undo");
        disk.verify_all(&counters).expect("last pass");
        assert_eq!(counters.errors.load(Relaxed), 1);
    }

    #[test]
    fn block_checksum_covers_its_body() {
        let mut block = [0; PAGE_WORDS];
        make_block(&mut block, 5, 7, Content::Generation(2));
        assert_eq!(block[3], pattern::checksum(&block[HEADER_WORDS..]));
        assert_eq!(check_block(&block, 5, 7, Content::Generation(2)), Ok(()));
        assert!(check_block(&block, 5, 7, Content::Generation(3)).is_err());
        assert!(check_block(&block, 5, 8, Content::Generation(2)).is_err());
        assert!(check_block(&block, 5, 7, Content::Zero).is_err());
    }
}
