// SPDX-License-Identifier: Apache-2.0
//! What a daemon holds, by the kernel: descriptors, threads, shared memory, files of its state.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{SoakError, file_error};
use crate::product::Product;

/// What a daemon holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// What each descriptor is.
    descriptors: Vec<String>,
    /// Names.
    threads: Vec<String>,
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
            descriptors: descriptors(&process.join("fd"))?,
            threads: threads(&process.join("task"))?,
            bytes: shared_bytes(&text) + file_bytes(state_dir)?,
        })
    }

    /// Whether it is no more than `before`.
    #[must_use]
    pub fn is_within(&self, before: &Self) -> bool {
        let beyond = self.beyond(before);
        beyond.descriptors.is_empty() && beyond.threads.is_empty() && beyond.bytes == 0
    }

    /// What is more than `before`.
    #[must_use]
    pub fn beyond(&self, before: &Self) -> Self {
        Self {
            descriptors: surplus(&self.descriptors, &before.descriptors),
            threads: surplus(&self.threads, &before.threads),
            bytes: self.bytes.saturating_sub(before.bytes),
        }
    }

    /// Number of descriptors.
    #[must_use]
    pub fn descriptors(&self) -> u64 {
        self.descriptors.len() as u64
    }

    /// Number of threads.
    #[must_use]
    pub fn threads(&self) -> u64 {
        self.threads.len() as u64
    }

    /// Bytes of shared mappings, and of files in the state directory.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// What is in `now` more often than in `before`.
fn surplus(now: &[String], before: &[String]) -> Vec<String> {
    let mut before = before.to_vec();
    let mut surplus = Vec::new();
    for name in now {
        match before.iter().position(|other| other == name) {
            Some(place) => drop(before.swap_remove(place)),
            None => surplus.push(name.clone()),
        }
    }
    surplus
}

fn descriptors(folder: &Path) -> Result<Vec<String>, SoakError> {
    let kind = |path: &Path| {
        // One may be closed between the list and here.
        let target = fs::read_link(path).unwrap_or_default();
        let name = target.to_string_lossy();
        // `socket:[123]`: the number is of this one only.
        name.split(":[").next().unwrap_or_default().to_owned()
    };
    Ok(paths(folder)?.iter().map(|path| kind(path)).collect())
}

fn threads(folder: &Path) -> Result<Vec<String>, SoakError> {
    let name = |path: &PathBuf| {
        let name = fs::read_to_string(path.join("comm")).unwrap_or_default();
        name.trim().to_owned()
    };
    Ok(paths(folder)?.iter().map(name).collect())
}

fn paths(folder: &Path) -> Result<Vec<PathBuf>, SoakError> {
    let failed = |source| file_error(folder, source);
    let entries = fs::read_dir(folder).map_err(failed)?;
    entries
        .map(|entry| entry.map(|entry| entry.path()).map_err(failed))
        .collect()
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
    fn surplus_counts_each_name_as_often_as_it_is_there() {
        let names = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let surplus = surplus(&names("a b socket socket"), &names("socket a c"));
        assert_eq!(surplus, names("b socket"));
    }

    #[test]
    fn only_shared_mappings_count() {
        let maps = "7f00-8f00 rw-s 00000000 00:01 9 /dev/shm/pool\n\
                    9000-a000 rw-p 00000000 00:00 0 [heap]\n\
                    b000-b800 r--s 00000000 00:0f 3 anon_inode:[io_uring]\n";
        assert_eq!(shared_bytes(maps), 0x1000 + 0x800);
    }
}
