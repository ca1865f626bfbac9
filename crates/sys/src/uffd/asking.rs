// SPDX-License-Identifier: Apache-2.0
//! Questions to the kernel that change nothing a guest could notice: whether a mapping is watched, and whether a page
//! is in its file.
#![expect(unsafe_code, reason = "mmap of a page that is never touched")]

use super::abi::{
    CONTINUE_WITHOUT_WAKING, COPY_PROTECTED, COPY_WITHOUT_WAKING, CopyIn, Fill, UFFDIO_CONTINUE,
    UFFDIO_COPY,
};
use super::{FillOutcome, UffdError, Userfaultfd, fill_outcome, kernel, range};
use crate::to_usize;
use pagetide_addr::{Hva, PAGE_BYTES};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::sync::OnceLock;

/// Bytes of the huge pages that are supported.
const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Result of mapping a page that may be in its file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum MapOutcome {
    /// It is in the file, and mapped now.
    Mapped,
    /// It is not in the file.
    Absent,
    /// The address space is changing; try again.
    Retry,
}

impl Userfaultfd {
    /// Maps the page at `start`, of `len_bytes`, if its file has it ([`Watch::MissingAndMinor`](super::Watch::MissingAndMinor)).
    ///
    /// # Errors
    /// [`UffdError::Kernel`].
    pub fn map_present(&self, start: Hva, len_bytes: u64) -> Result<MapOutcome, UffdError> {
        let mut fill = Fill {
            range: range(start, len_bytes),
            mode: CONTINUE_WITHOUT_WAKING,
            done: 0,
        };
        let answer = self.ioctl(UFFDIO_CONTINUE, &mut fill);
        if let Err(absent) = &answer
            && absent.raw_os_error() == Some(libc::EFAULT)
        {
            return Ok(MapOutcome::Absent);
        }
        let outcome = fill_outcome("UFFDIO_CONTINUE", start, len_bytes, answer, fill.done)?;
        Ok(match outcome {
            FillOutcome::Filled { .. } | FillOutcome::AlreadyThere => MapOutcome::Mapped,
            FillOutcome::Retry => MapOutcome::Retry,
            FillOutcome::Gone => MapOutcome::Absent,
        })
    }

    /// True if the mapping that contains the page at `at` is watched for
    /// [`Watch::MissingAndWriteProtected`](super::Watch::MissingAndWriteProtected). Changes nothing, even if the page is in use.
    ///
    /// This attempts a copy from an unreadable page. The kernel checks the mapping first (`ENOENT`,
    /// or `EINVAL` without write protection); any other error means that this check passed. The
    /// check does not distinguish userfaultfds; [`Userfaultfd::register`] reports another one.
    ///
    /// # Errors
    /// [`UffdError::Kernel`] if there is no address space left for the unreadable page.
    pub fn is_watched(&self, at: Hva) -> Result<bool, UffdError> {
        Ok(match self.try_copy(at, PAGE_BYTES)? {
            Some(libc::ENOENT) => false,
            // In huge pages also: a copy must be as long as one.
            Some(libc::EINVAL) => !matches!(
                self.try_copy(at, HUGE_PAGE_BYTES)?,
                Some(libc::ENOENT | libc::EINVAL)
            ),
            _ => true,
        })
    }

    /// The error of a copy of `len` bytes from an unreadable page to the page at `at`.
    fn try_copy(&self, at: Hva, len: u64) -> Result<Option<i32>, UffdError> {
        let src =
            unreadable_page().map_err(|source| kernel("reserving a page", at, len, source))?;
        let mut copy = CopyIn {
            dst: at.0 & !(len - 1),
            src,
            len,
            mode: COPY_WITHOUT_WAKING | COPY_PROTECTED,
            done: 0,
        };
        let answer = self.ioctl(UFFDIO_COPY, &mut copy);
        Ok(answer.err().and_then(|error| error.raw_os_error()))
    }
}

/// Address of a page of this process that is unreadable, even for the kernel.
fn unreadable_page() -> io::Result<u64> {
    static PAGE: OnceLock<u64> = OnceLock::new();
    if let Some(page) = PAGE.get() {
        return Ok(*page);
    }
    // SAFETY: a null hint without MAP_FIXED touches no existing mapping; the page is kept for the
    // life of the process (two, if two threads come here at once).
    let page = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            to_usize(PAGE_BYTES),
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    }?;
    Ok(*PAGE.get_or_init(|| page.addr() as u64))
}
