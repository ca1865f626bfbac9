// SPDX-License-Identifier: Apache-2.0
//! Which of our memory lies in RAM that was plugged in.
//!
//! QEMU's machines put memory devices above all other memory, and with less than 2 GiB of boot memory
//! nothing else lies above 4 GiB. So a page is in plugged RAM if its frame is, which root can read from
//! `/proc/self/pagemap` (Linux' `Documentation/admin-guide/mm/pagemap.rst`).

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::pattern::PAGE_BYTES;

/// First frame of plugged RAM.
const FIRST_FRAME: u64 = (4 << 30) / PAGE_BYTES as u64;
const ENTRY_BYTES: usize = 8;
const PRESENT: u64 = 1 << 63;
/// The bits of an entry that are the frame's number.
const FRAME: u64 = (1 << 55) - 1;

/// How much of `memory`, which begins on a page, lies in plugged RAM; 0 without permission to read that.
#[must_use]
pub fn plugged_bytes<T>(memory: &[T]) -> u64 {
    let pages = size_of_val(memory).div_ceil(PAGE_BYTES);
    let first = memory.as_ptr().addr() / PAGE_BYTES;
    let mut entries = vec![0; pages * ENTRY_BYTES];
    let read = File::open("/proc/self/pagemap")
        .and_then(|map| map.read_exact_at(&mut entries, (first * ENTRY_BYTES) as u64));
    match read {
        Ok(()) => count_plugged(&entries) * PAGE_BYTES as u64,
        Err(error) => {
            eprintln!("guest-work: where our memory lies: {error}");
            0
        }
    }
}

fn count_plugged(entries: &[u8]) -> u64 {
    let words = entries.as_chunks().0.iter();
    let plugged = words
        .map(|word| u64::from_ne_bytes(*word))
        .filter(|entry| entry & PRESENT != 0 && entry & FRAME >= FIRST_FRAME);
    plugged.count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn present_frames_above_4_gib_count_and_others_do_not() {
        let entries = [
            PRESENT | FIRST_FRAME,
            PRESENT | (FIRST_FRAME - 1),
            FIRST_FRAME,
            PRESENT | 1 << 55 | (FIRST_FRAME + 7),
            0,
        ];
        let bytes: Vec<u8> = entries
            .iter()
            .flat_map(|entry| entry.to_ne_bytes())
            .collect();
        assert_eq!(count_plugged(&bytes), 2);
    }

    #[test]
    fn memory_of_any_size_can_be_asked_about() {
        let memory = vec![1_u64; 3 * crate::pattern::PAGE_WORDS];
        assert!(plugged_bytes(&memory) <= 4 * PAGE_BYTES as u64);
        assert_eq!(plugged_bytes::<u8>(&[]), 0);
    }
}
