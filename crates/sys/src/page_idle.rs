// SPDX-License-Identifier: Apache-2.0
//! [`IdleBitmap`]: marks page frames as idle, and reports which were not used since.
//!
//! `/sys/kernel/mm/page_idle/bitmap` (`CONFIG_IDLE_PAGE_TRACKING`) has a bit for each page frame of
//! the host. Writing a one marks the frame idle, and clears the accessed bits in every page table
//! that maps it, including KVM's; writing a zero changes nothing. A bit reads as one if the frame
//! was marked and has not been used since, neither through a page table nor by `read` or `write`.
//! Of a large folio only the first frame has a bit
//! ([`PageFlags::head`](crate::page_flags::PageFlags::head)).
//!
//! The marks belong to the host: another program that marks frames destroys our information. And
//! TLBs are not flushed, so a use soon after the mark may go unnoticed.

use crate::page_flags::FrameNo;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

const BITMAP: &str = "/sys/kernel/mm/page_idle/bitmap";
const WORD_BYTES: usize = 8;
const WORD_FRAMES: u64 = 64;

/// See the module documentation.
#[derive(Debug)]
pub struct IdleBitmap {
    file: File,
}

impl IdleBitmap {
    /// Opens the host's bitmap.
    ///
    /// # Errors
    /// `NotFound`: this kernel does not track idle pages. Otherwise the error of `open`.
    pub fn open() -> io::Result<Self> {
        Self::at(Path::new(BITMAP))
    }

    /// Opens a file that stands in for it.
    ///
    /// # Errors
    /// The error of `open`.
    pub fn at(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(path)?;
        Ok(Self { file })
    }

    /// Marks `frames` idle.
    ///
    /// # Errors
    /// The error of writing; some frames may have been marked.
    pub fn mark(&self, frames: &[FrameNo]) -> io::Result<()> {
        for (word, bits) in words(frames) {
            self.file
                .write_all_at(&bits.to_ne_bytes(), word * WORD_BYTES as u64)?;
        }
        Ok(())
    }

    /// Those of `frames` that are still idle, ascending.
    ///
    /// # Errors
    /// The error of reading.
    pub fn idle_among(&self, frames: &[FrameNo]) -> io::Result<Vec<FrameNo>> {
        let mut idle = Vec::new();
        for (word, bits) in words(frames) {
            let mut entry = [0; WORD_BYTES];
            self.file
                .read_exact_at(&mut entry, word * WORD_BYTES as u64)?;
            let mut left = u64::from_ne_bytes(entry) & bits;
            while left != 0 {
                idle.push(FrameNo(
                    word * WORD_FRAMES + u64::from(left.trailing_zeros()),
                ));
                left &= left - 1;
            }
        }
        Ok(idle)
    }
}

/// The words of the bitmap that contain `frames`, ascending, and their bits.
fn words(frames: &[FrameNo]) -> Vec<(u64, u64)> {
    let mut sorted = frames.to_vec();
    sorted.sort_unstable();
    let mut words: Vec<(u64, u64)> = Vec::new();
    for frame in sorted {
        let (word, bit) = (frame.0 / WORD_FRAMES, 1 << (frame.0 % WORD_FRAMES));
        match words.last_mut() {
            Some((last, bits)) if *last == word => *bits |= bit,
            _ => words.push((word, bit)),
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_that_were_marked_are_idle_until_they_are_used() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1024).unwrap();
        let bitmap = IdleBitmap::at(file.path()).unwrap();
        let frames = [700, 3, 64, 63, 127, 0].map(FrameNo);
        assert_eq!(bitmap.idle_among(&frames).unwrap(), []);
        bitmap.mark(&frames).unwrap();
        let all = [0, 3, 63, 64, 127, 700].map(FrameNo);
        assert_eq!(bitmap.idle_among(&frames).unwrap(), all);
        // Only the requested frames.
        assert_eq!(
            bitmap.idle_among(&[FrameNo(64), FrameNo(65)]).unwrap(),
            [FrameNo(64)]
        );
        // Frame 63 is used.
        file.as_file().write_all_at(&[0], 7).unwrap();
        assert_eq!(
            bitmap.idle_among(&all).unwrap(),
            [0, 3, 64, 127, 700].map(FrameNo)
        );
    }

    #[test]
    fn frame_behind_the_end_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8).unwrap();
        let bitmap = IdleBitmap::at(file.path()).unwrap();
        assert!(bitmap.idle_among(&[FrameNo(64)]).is_err());
    }
}
