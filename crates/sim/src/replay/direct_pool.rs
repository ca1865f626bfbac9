// SPDX-License-Identifier: Apache-2.0
//! [`DirectPool`]: a guest that reads and writes its disks past the page cache.
//!
//! Its programs use their own buffers in turn, as databases do: each request uses the next pages of a pool,
//! which wraps around at its end. The DMA happens at once.

use super::{
    DiskRequest, ReplayAccess, ReplayError,
    page_cache::{dma, push_merged},
};
use pagetide_addr::{Access, PAGE_BYTES, SectionNo};
use std::time::Duration;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub struct DirectPool {
    base_bytes: u64,
    pages: u64,
    section_bytes: u64,
    next: u64,
}

impl DirectPool {
    /// A pool of `pool_bytes` that begins at `base_bytes` of the guest's memory.
    ///
    /// # Errors
    /// [`ReplayError::Asked`] if it has no page, or sections are smaller than pages.
    pub fn new(base_bytes: u64, pool_bytes: u64, section_bytes: u64) -> Result<Self, ReplayError> {
        let pages = pool_bytes / PAGE_BYTES;
        if pages == 0 || section_bytes < PAGE_BYTES {
            return Err(ReplayError::Asked(format!(
                "a pool of {pool_bytes} bytes in sections of {section_bytes} bytes cannot be modelled: \
                 both take at least 4096"
            )));
        }
        Ok(Self {
            base_bytes,
            pages,
            section_bytes,
            next: 0,
        })
    }

    /// The memory accesses of a request at `at`, appended to `out`.
    ///
    /// # Errors
    /// [`ReplayError::Request`].
    pub fn request(
        &mut self,
        at: Duration,
        request: &DiskRequest,
        out: &mut Vec<ReplayAccess>,
    ) -> Result<(), ReplayError> {
        let access = match request.access {
            Access::Read => Access::Write,
            Access::Write => Access::Read,
        };
        for _ in request.blocks()? {
            let address = self.base_bytes + self.next * PAGE_BYTES;
            self.next = (self.next + 1) % self.pages;
            let touch = ReplayAccess {
                at,
                actor: dma(request.disk),
                section: SectionNo(address / self.section_bytes),
                access,
                bytes: PAGE_BYTES,
            };
            push_merged(out, touch);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::DeviceId;

    #[test]
    fn requests_take_the_pages_of_the_pool_in_turn() {
        let mut pool = DirectPool::new(2 << 20, 16 << 10, 8 << 10).unwrap();
        let mut out = Vec::new();
        let mut ask = |access, len_bytes| {
            let request = DiskRequest {
                number: 0,
                disk: DeviceId(1),
                offset_bytes: 1 << 40,
                len_bytes,
                access,
            };
            out.clear();
            pool.request(Duration::ZERO, &request, &mut out).unwrap();
            let touch = |t: &ReplayAccess| (t.section.0, t.access, t.bytes);
            out.iter().map(touch).collect::<Vec<_>>()
        };
        assert_eq!(ask(Access::Read, 8 << 10), [(256, Access::Write, 8192)]);
        assert_eq!(
            ask(Access::Write, 12 << 10),
            [(257, Access::Read, 8192), (256, Access::Read, 4096)]
        );
        assert_eq!(ask(Access::Read, 0), []);
    }
}
