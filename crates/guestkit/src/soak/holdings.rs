// SPDX-License-Identifier: Apache-2.0
//! What a daemon holds, by the kernel: descriptors, threads, shared memory, files of its state.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{SoakError, file_error};
use crate::product::Product;

/// What a daemon holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    descriptors: u64,
    threads: u64,
    /// Bytes of shared mappings, and of files in the state directory.
    bytes: u64,
}

impl Holdings {
    /// Of a running daemon with its state in `state_dir`.
    ///
    /// # Errors
    /// It is gone.
    pub fn of(product: &Product, state_dir: &Path) -> Result<Self, SoakError> {
        let process = Path::new("/proc").join(product.pid().unwrap_or_default().to_string());
        let maps = process.join("maps");
        let text = fs::read_to_string(&maps).map_err(|source| file_error(&maps, source))?;
        Ok(Self {
            descriptors: entries(&process.join("fd"))?,
            threads: entries(&process.join("task"))?,
            bytes: shared_bytes(&text) + file_bytes(state_dir)?,
        })
    }

    /// Whether it is no more than `before`.
    #[must_use]
    pub fn is_within(&self, before: &Self) -> bool {
        self.descriptors <= before.descriptors
            && self.threads <= before.threads
            && self.bytes <= before.bytes
    }

    /// Descriptors more than `before`.
    #[must_use]
    pub fn descriptors_beyond(&self, before: &Self) -> u64 {
        self.descriptors.saturating_sub(before.descriptors)
    }

    /// Threads more than `before`.
    #[must_use]
    pub fn threads_beyond(&self, before: &Self) -> u64 {
        self.threads.saturating_sub(before.threads)
    }

    /// Bytes more than `before`.
    #[must_use]
    pub fn bytes_beyond(&self, before: &Self) -> u64 {
        self.bytes.saturating_sub(before.bytes)
    }

    /// Both, for a person.
    #[must_use]
    pub fn told_beside(&self, before: &Self) -> String {
        format!("{self:?}; before its first VM: {before:?}")
    }
}

fn entries(folder: &Path) -> Result<u64, SoakError> {
    let list = fs::read_dir(folder).map_err(|source| file_error(folder, source))?;
    Ok(list.count() as u64)
}

/// Bytes of the mappings in a `maps` that are shared and writable: pools, guest RAM, rings.
fn shared_bytes(maps: &str) -> u64 {
    let bytes = |line: &str| {
        let mut words = line.split_whitespace();
        let (range, rights) = (words.next()?, words.next()?);
        let (from, to) = range.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        rights
            .ends_with('s')
            .then_some(number(to)?.saturating_sub(number(from)?))
    };
    maps.lines().filter_map(bytes).sum()
}

fn file_bytes(folder: &Path) -> Result<u64, SoakError> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder).map_err(|source| file_error(folder, source))? {
        let path = entry.map_err(|source| file_error(folder, source))?.path();
        let metadata = fs::symlink_metadata(&path).map_err(|source| file_error(&path, source))?;
        bytes += if metadata.is_dir() {
            file_bytes(&path)?
        } else {
            metadata.blocks() * 512
        };
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_shared_mappings_count() {
        let maps = "7f00-8f00 rw-s 00000000 00:01 9 /dev/shm/pool\n\
                    9000-a000 rw-p 00000000 00:00 0 [heap]\n\
                    b000-b800 r--s 00000000 00:0f 3 anon_inode:[io_uring]\n";
        assert_eq!(shared_bytes(maps), 0x1000 + 0x800);
    }
}
