// SPDX-License-Identifier: Apache-2.0
//! [`PageFlags`]: the kernel's flags of page frames (`/proc/kpageflags`), and the folios they
//! belong to.
//!
//! A *folio* is the unit in which the kernel keeps a file's memory: 1, 2, 4, … or 512 pages in a
//! row, whose first frame is a multiple of their number. The first is its *head*, the others are
//! *tails*:
//!
//! ```text
//!   frame     0x200   0x201 … 0x3ff     0x400
//!             head    tail    tail      (a page of its own)
//!             └── a huge page: 2 MiB ──┘
//! ```
//! Parts of a large folio cannot be punched reliably. The kernel splits the folio first. While
//! anything holds a reference to it, the split fails, and **the part to be punched is filled with
//! zeros and stays**. So code that punches parts must know that the folio is split.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const ENTRY_BYTES: usize = 8;
const COMPOUND_HEAD: u64 = 1 << 15;
const COMPOUND_TAIL: u64 = 1 << 16;
/// Log2 of the number of frames of the largest folio in shared memory.
const HUGE_ORDER: u32 = 9;

/// A page frame of the host.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FrameNo(pub u64);

/// The flags of all page frames.
#[derive(Debug)]
pub struct PageFlags {
    file: File,
}

impl PageFlags {
    /// Opens the flags of this host.
    ///
    /// # Errors
    /// Usually that we are not root.
    pub fn open() -> io::Result<Self> {
        Ok(Self::of(File::open("/proc/kpageflags")?))
    }

    const fn of(file: File) -> Self {
        Self { file }
    }

    fn flags(&self, frame: FrameNo) -> io::Result<u64> {
        let mut entry = [0; ENTRY_BYTES];
        self.file.read_exact_at(&mut entry, at(frame))?;
        Ok(u64::from_ne_bytes(entry))
    }

    /// True if `frame` is part of a 2 MiB page.
    ///
    /// # Errors
    /// The error of reading.
    pub fn is_huge(&self, frame: FrameNo) -> io::Result<bool> {
        let first = FrameNo(frame.0 >> HUGE_ORDER << HUGE_ORDER);
        let middle = FrameNo(first.0 + (1 << (HUGE_ORDER - 1)));
        // If there are smaller folios, one of them begins in the middle.
        Ok(self.flags(first)? & COMPOUND_HEAD != 0 && self.flags(middle)? & COMPOUND_TAIL != 0)
    }

    /// Those of `frames` that are part of a folio of more than one page. Adjacent frames are read
    /// together.
    ///
    /// # Errors
    /// The error of reading.
    pub fn large_among(&self, frames: &[FrameNo]) -> io::Result<Vec<FrameNo>> {
        let mut large = Vec::new();
        let mut buffer = vec![0; frames.len() * ENTRY_BYTES];
        let follows = |one: &FrameNo, other: &FrameNo| one.0 + 1 == other.0;
        for run in frames.chunk_by(follows) {
            let entries = &mut buffer[..run.len() * ENTRY_BYTES];
            self.file.read_exact_at(entries, at(run[0]))?;
            for (frame, entry) in run.iter().zip(entries.as_chunks().0) {
                if u64::from_ne_bytes(*entry) & (COMPOUND_HEAD | COMPOUND_TAIL) != 0 {
                    large.push(*frame);
                }
            }
        }
        Ok(large)
    }

    /// The first frame of the folio that `frame` is part of.
    ///
    /// # Errors
    /// The error of reading.
    pub fn head(&self, frame: FrameNo) -> io::Result<FrameNo> {
        if self.flags(frame)? & COMPOUND_TAIL == 0 {
            return Ok(frame);
        }
        for order in 1..=HUGE_ORDER {
            let first = FrameNo(frame.0 >> order << order);
            // Between it and the frame are only tails, or a smaller order would have found its
            // head.
            if self.flags(first)? & COMPOUND_HEAD != 0 {
                return Ok(first);
            }
        }
        // The folio was split meanwhile.
        Ok(frame)
    }
}

/// Offset of a frame's entry.
const fn at(frame: FrameNo) -> u64 {
    frame.0 * ENTRY_BYTES as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Folios of these orders, one after another from frame 0 on, as the kernel would report them.
    fn host(orders: &[u32]) -> PageFlags {
        let mut file = tempfile::tempfile().unwrap();
        for order in orders {
            for at in 0..1_u64 << order {
                let flags = match (order, at) {
                    (0, _) => 0,
                    (_, 0) => COMPOUND_HEAD,
                    _ => COMPOUND_TAIL,
                };
                file.write_all(&(flags | 0x20).to_ne_bytes()).unwrap();
            }
        }
        PageFlags::of(file)
    }

    #[test]
    fn head_is_found_from_every_frame_of_folios_of_all_sizes() {
        let orders = [9, 8, 8, 7, 7, 8, 4, 4, 5, 6, 7, 8, 0, 0, 1, 2, 3];
        let flags = host(&orders);
        let mut first = 0;
        for order in orders {
            let all: Vec<_> = (first..first + (1 << order)).map(FrameNo).collect();
            let large = flags.large_among(&all).unwrap();
            assert_eq!(large, if order > 0 { all } else { vec![] });
            for frame in first..first + (1 << order) {
                assert_eq!(flags.head(FrameNo(frame)).unwrap(), FrameNo(first));
                if frame < 2048 {
                    assert_eq!(
                        flags.is_huge(FrameNo(frame)).unwrap(),
                        order == 9,
                        "{frame}"
                    );
                }
            }
            first += 1 << order;
        }
    }

    #[test]
    fn frame_that_the_host_does_not_have_is_an_error() {
        assert!(host(&[0]).head(FrameNo(1)).is_err());
    }
}
