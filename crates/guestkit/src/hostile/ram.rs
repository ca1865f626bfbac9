// SPDX-License-Identifier: Apache-2.0
//! Guest RAM as a file that is shared with the back end.
//!
//! It is written with `pwrite` and read with `pread`: a back end that maps the file sees these as a
//! guest's own stores, and no mapping is needed here. (A file that cannot be written so, such as
//! one of hugetlbfs, is lent as further memory beside the ring's.)

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::peer::{Failure, failed};

/// Guest RAM: a file, shared with the back end.
#[derive(Debug, Clone)]
pub struct Ram {
    file: Arc<File>,
    bytes: u64,
}

impl Ram {
    /// A memfd that may be sealed, as QEMU makes it.
    ///
    /// # Errors
    /// No memory.
    pub fn new(bytes: u64) -> Result<Self, Failure> {
        Self::memfd(bytes, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
    }

    /// A memfd that cannot be sealed, as DPDK's `--no-huge` makes it.
    ///
    /// # Errors
    /// No memory.
    pub fn unsealable(bytes: u64) -> Result<Self, Failure> {
        Self::memfd(bytes, MemfdFlags::CLOEXEC)
    }

    /// A memfd with these flags.
    ///
    /// # Errors
    /// No memory, or flags that the kernel does not support.
    pub fn memfd(bytes: u64, flags: MemfdFlags) -> Result<Self, Failure> {
        let file = memfd_create("hostile-ram", flags).map_err(failed("memfd_create"))?;
        ftruncate(&file, bytes).map_err(failed("ftruncate"))?;
        Ok(Self::of(File::from(file), bytes))
    }

    /// `file`, of which `bytes` are RAM.
    #[must_use]
    pub fn of(file: File, bytes: u64) -> Self {
        Self {
            file: Arc::new(file),
            bytes,
        }
    }

    /// Its file.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes as the guest would.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn put(&self, at: u64, bytes: &[u8]) -> Result<(), Failure> {
        let written = self.file.write_all_at(bytes, at);
        written.map_err(failed("writing guest RAM"))
    }

    /// Reads as the guest would.
    ///
    /// # Errors
    /// The kernel's error; the file may have been shrunk.
    pub fn get<const N: usize>(&self, at: u64) -> Result<[u8; N], Failure> {
        let mut bytes = [0; N];
        self.read(at, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads as the guest would.
    ///
    /// # Errors
    /// As [`Ram::get`].
    pub fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Failure> {
        let read = self.file.read_exact_at(into, at);
        read.map_err(failed("reading guest RAM"))
    }

    /// Changes the file's length.
    ///
    /// # Errors
    /// It is sealed.
    pub fn resize(&self, bytes: u64) -> Result<(), Failure> {
        ftruncate(&*self.file, bytes).map_err(failed("ftruncate"))
    }
}
