// SPDX-License-Identifier: Apache-2.0
//! [`IdlePages`]: samples by the kernel's idle page tracking, which unmaps nothing.
//!
//! The pages that are chosen are marked idle, which takes the accessed bits out of all page tables; those
//! that are not idle any more when they are asked about were used ([`pagetide_sys::page_idle`]). The
//! guest pays no fault for it, and huge pages stay as they are mapped.
//!
//! ```text
//!   sample:  1. the devices' marks           → what DMA touched
//!            2. the frames of the pages       of those asked about and of those chosen, by pagemap
//!            3. idle still?                   no: touched
//!            4. mark the chosen ones idle
//! ```
//! A page that is not mapped has no frame that we could know, and was not used: its use would have
//! mapped it. One that was mapped since it was chosen is not idle, or looked at and found young. A page
//! that the kernel has moved to another frame has its mark there.
//!
//! Whole sections that are to go are still unmapped ([`UnmapAndLook`]): that a page is in no page table
//! is what says that nobody took a reference through one.

use super::unmap::UnmapAndLook;
use super::{AccessTracker, Sample, Sampled, Touched, TrackerError};
use crate::layout::Piece;
use pagetide_addr::{Marks, PageNo, PageSet, SectionNo};
use pagetide_sys::page_flags::{FrameNo, PageFlags};
use pagetide_sys::page_idle::IdleBitmap;
use std::collections::BTreeSet;
use std::io;

/// Its name.
pub const NAME: &str = "idle page tracking";

/// See the module.
pub struct IdlePages {
    whole: UnmapAndLook,
    bitmap: IdleBitmap,
    flags: PageFlags,
}

/// A page that is asked about, and where it lies.
struct Asked {
    /// Position of its sample.
    sample: usize,
    page: PageNo,
    frame: FrameNo,
}

/// Whether this kernel tracks idle pages for us.
///
/// # Errors
/// A sentence that says why not.
pub fn is_available() -> Result<(), String> {
    match IdleBitmap::open() {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err("this kernel has no idle page tracking (CONFIG_IDLE_PAGE_TRACKING)".into());
        }
        Err(error) => return Err(format!("its bitmap cannot be opened: {error}")),
    }
    match PageFlags::open() {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("/proc/kpageflags cannot be opened: {error}")),
    }
}

impl IdlePages {
    /// Samples of the VM that `whole` is for, by `bitmap`.
    ///
    /// # Errors
    /// [`TrackerError`].
    pub fn new(whole: UnmapAndLook, bitmap: IdleBitmap) -> Result<Self, TrackerError> {
        let flags = PageFlags::open().map_err(TrackerError::Large)?;
        Ok(Self {
            whole,
            bitmap,
            flags,
        })
    }

    /// Where the pages of `piece` lie that are in `pages` and mapped: the frames that have a mark.
    fn frames(
        &self,
        piece: &Piece,
        pages: &PageSet,
    ) -> Result<Vec<(PageNo, FrameNo)>, TrackerError> {
        let mut frames = Vec::new();
        self.whole
            .page_table()
            .visit(piece.hva, piece.pages.len(), |position, entry| {
                let page = piece.pages.start.plus(position);
                if pages.contains(page)
                    && let Some(frame) = entry.frame()
                {
                    frames.push((page, frame));
                }
            })?;
        for (_, frame) in &mut frames {
            *frame = self.flags.head(*frame).map_err(TrackerError::Large)?;
        }
        Ok(frames)
    }
}

impl AccessTracker for IdlePages {
    fn name(&self) -> &'static str {
        NAME
    }

    fn look_many(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError> {
        self.whole.look_many(sections)
    }

    fn take_out(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError> {
        self.whole.take_out(sections)
    }

    fn sample(&self, samples: &[Sample]) -> Result<Sampled, TrackerError> {
        let files = self.whole.files()?;
        let mut sampled = Sampled::default();
        let (mut asked, mut next) = (Vec::new(), Vec::new());
        for (number, sample) in samples.iter().enumerate() {
            let mut of_section = Touched::default();
            let mut either = sample.asked;
            either.unite(&sample.next);
            for piece in files.pieces(sample.section) {
                of_section
                    .dma
                    .unite(&self.whole.dma(&files, &piece, Marks::Forget)?);
                for (page, frame) in self.frames(&piece, &either)? {
                    if sample.asked.contains(page) {
                        asked.push(Asked {
                            sample: number,
                            page,
                            frame,
                        });
                    }
                    if sample.next.contains(page) {
                        next.push(frame);
                    }
                }
            }
            sampled.touched.push(of_section);
        }
        let frames: Vec<FrameNo> = asked.iter().map(|asked| asked.frame).collect();
        let idle = self
            .bitmap
            .idle_among(&frames)
            .map_err(TrackerError::Idle)?;
        let idle: BTreeSet<FrameNo> = idle.into_iter().collect();
        for asked in asked.iter().filter(|asked| !idle.contains(&asked.frame)) {
            sampled.touched[asked.sample].cpu.insert(asked.page);
        }
        self.bitmap.mark(&next).map_err(TrackerError::Idle)?;
        Ok(sampled)
    }

    fn is_mapped(&self, section: SectionNo) -> Result<PageSet, TrackerError> {
        self.whole.is_mapped(section)
    }
}
