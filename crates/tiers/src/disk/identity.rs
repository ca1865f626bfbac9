// SPDX-License-Identifier: Apache-2.0
//! Which file or device a path names: [`Identity`], and whether the kernel swaps to it.

use rustix::fs::{FileType, Stat};
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// What tells a file or device from all others while it is open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Identity {
    device: u64,
    number: u64,
}

impl Identity {
    fn of(stat: &Stat) -> Self {
        match FileType::from_raw_mode(stat.st_mode) {
            // It may have several names.
            FileType::BlockDevice => Self {
                device: stat.st_rdev,
                number: 0,
            },
            _ => Self {
                device: stat.st_dev,
                number: stat.st_ino,
            },
        }
    }

    pub fn of_open(file: &OwnedFd) -> io::Result<Self> {
        Ok(Self::of(&rustix::fs::fstat(file)?))
    }

    /// Of what lies at `path`, without following it.
    pub fn at(path: &Path) -> io::Result<Self> {
        Ok(Self::of(&rustix::fs::lstat(path)?))
    }
}

/// True if the kernel swaps to this file or device.
pub(super) fn is_swapped_to(stat: &Stat) -> bool {
    // A kernel without swap has no such file.
    let swaps = std::fs::read("/proc/swaps").unwrap_or_default();
    swap_paths(&swaps).iter().any(|swap| is_same(swap, stat))
}

/// The files and devices in `/proc/swaps`, whose names have blanks and backslashes as octal numbers.
fn swap_paths(swaps: &[u8]) -> Vec<PathBuf> {
    let lines = swaps.split(|byte| *byte == b'\n').skip(1);
    let names = lines.filter_map(|line| line.split(u8::is_ascii_whitespace).next());
    let names = names.filter(|name| !name.is_empty());
    names
        .map(|name| PathBuf::from(OsString::from_vec(unescape(name))))
        .collect()
}

fn unescape(name: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((&byte, behind)) = rest.split_first() {
        let code = match (byte, behind.first_chunk()) {
            (b'\\', Some(digits)) => octal(*digits),
            _ => None,
        };
        plain.push(code.unwrap_or(byte));
        rest = if code.is_some() { &behind[3..] } else { behind };
    }
    plain
}

fn octal(digits: [u8; 3]) -> Option<u8> {
    digits.iter().try_fold(0_u8, |code, digit| {
        let digit = digit.checked_sub(b'0').filter(|digit| *digit < 8)?;
        code.checked_mul(8)?.checked_add(digit)
    })
}

fn is_same(swap: &Path, stat: &Stat) -> bool {
    rustix::fs::stat(swap).is_ok_and(|other| {
        let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
        match is_device {
            true => other.st_rdev == stat.st_rdev && other.st_rdev != 0,
            false => (other.st_dev, other.st_ino) == (stat.st_dev, stat.st_ino),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_files_are_found_by_what_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let swap = dir.path().join("swap file");
        std::fs::write(&swap, "").unwrap();
        std::fs::write(dir.path().join("other"), "").unwrap();
        let listed = swap.to_str().unwrap().replace(' ', "\\040");
        let swaps =
            format!("Filename\t\tType\n/dev/none partition 1 0 -2\n{listed}\tfile 9 0 -3\n");
        let paths = swap_paths(swaps.as_bytes());
        assert_eq!(paths, [PathBuf::from("/dev/none"), swap.clone()]);
        let is_swap = |path: &Path| {
            let stat = rustix::fs::stat(path).unwrap();
            paths.iter().any(|swap| is_same(swap, &stat))
        };
        assert!(is_swap(&swap));
        std::fs::hard_link(&swap, dir.path().join("again")).unwrap();
        assert!(is_swap(&dir.path().join("again")), "by another name");
        assert!(!is_swap(&dir.path().join("other")));
        assert!(!is_swap(Path::new("/dev/null")));
        assert_eq!(unescape(b"a\\040b\\134\\08\\777"), b"a b\\\\08\\777");
    }
}
