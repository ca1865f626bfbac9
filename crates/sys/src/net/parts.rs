// SPDX-License-Identifier: Apache-2.0
//! Vectors over a packet: a header of ours, and parts in guest memory.
#![expect(
    unsafe_code,
    reason = "the kernel is given pointers to volatile slices, whose lifetime is known here"
)]

use libc::iovec;
use std::{ffi::c_void, marker::PhantomData, ptr};
use vm_memory::VolatileSlice;

/// Most parts of a packet that are sent without a copy. Linux sends at most 18.
pub const PARTS_MAX: usize = 64;

/// Header and parts as the kernel takes them.
pub(super) struct Vectors<'a> {
    vectors: [iovec; PARTS_MAX + 1],
    count: usize,
    of: PhantomData<&'a [u8]>,
}

impl<'a> Vectors<'a> {
    /// `None` if there are more than [`PARTS_MAX`] parts.
    pub(super) fn new(
        header: &'a [u8],
        parts: impl Iterator<Item = VolatileSlice<'a>>,
    ) -> Option<Self> {
        let empty = iovec {
            iov_base: ptr::null_mut(),
            iov_len: 0,
        };
        let mut vectors = [empty; PARTS_MAX + 1];
        vectors[0] = iovec {
            iov_base: header.as_ptr().cast_mut().cast::<c_void>(),
            iov_len: header.len(),
        };
        let mut count = 1;
        for part in parts {
            *vectors.get_mut(count)? = iovec {
                iov_base: part.ptr_guard_mut().as_ptr().cast::<c_void>(),
                iov_len: part.len(),
            };
            count += 1;
        }
        Some(Self {
            vectors,
            count,
            of: PhantomData,
        })
    }

    /// What the kernel may only read, until `self` is dropped.
    pub(super) fn as_slice(&self) -> &[iovec] {
        &self.vectors[..self.count]
    }
}

/// Gathers all parts with one call of the kernel.
pub(super) fn write(
    fd: std::os::fd::BorrowedFd<'_>,
    vectors: &Vectors<'_>,
) -> std::io::Result<usize> {
    use std::os::fd::AsRawFd;
    let vectors = vectors.as_slice();
    let count = i32::try_from(vectors.len()).unwrap_or(i32::MAX);
    // SAFETY: each vector is a live slice of this process that `Vectors` borrows, and the kernel
    // only reads it during the call. Guest memory may change meanwhile, which the kernel expects of
    // any memory of a process.
    let written = unsafe { libc::writev(fd.as_raw_fd(), vectors.as_ptr(), count) };
    usize::try_from(written).map_err(|_| std::io::Error::last_os_error())
}
