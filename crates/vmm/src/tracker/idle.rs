// SPDX-License-Identifier: Apache-2.0
//! [`IdlePages`]: samples by the kernel's idle page tracking, which unmaps nothing.
//!
//! The chosen pages are marked idle, which clears the accessed bits in all page tables; pages that are no
//! longer idle when queried were used ([`pagetide_sys::page_idle`]). The guest takes no fault for it, and
//! huge pages stay mapped as they are.
//!
//! ```text
//!   sample:  1. the devices' marks           → what DMA touched
//!            2. the frames of the pages       of those asked about and of those chosen, by pagemap
//!            3. idle still?                   no: touched
//!            4. mark the chosen ones idle
//! ```
//! An unmapped page has no frame that we could find, and was not used: a use would have mapped it. A
//! page mapped since it was chosen is not idle, or is found to be young. The mark of a page moves with
//! it when the kernel moves it to another frame.
//!
//! Whole sections to be evicted are still unmapped ([`UnmapAndLook`]): only a page that is in no page
//! table has certainly gained no reference through one.

use super::TrackerError;
use super::unmap::UnmapAndLook;
use crate::layout::Piece;
use pagetide_addr::{Marks, PageNo, PageSet, SectionNo};
use pagetide_policy::{
    sampling::{Look, Sampled, Touched},
    tracker::{self, AccessTracker},
};
use pagetide_sys::page_flags::{FrameNo, PageFlags};
use pagetide_sys::page_idle::IdleBitmap;
use std::collections::BTreeSet;
use std::io;

/// See the module.
pub struct IdlePages {
    whole: UnmapAndLook,
    bitmap: IdleBitmap,
    flags: PageFlags,
}

/// A queried page, and its frame.
struct Asked {
    /// Index of its sample.
    sample: usize,
    page: PageNo,
    frame: FrameNo,
}

/// Checks that idle page tracking is available here.
///
/// # Errors
/// A message that says why not.
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
    /// Samples the VM of `whole`, by `bitmap`.
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

    /// The frames, with the idle mark, of those mapped pages of `piece` that are in `pages`.
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
    fn take_out(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, tracker::TrackerError> {
        self.whole.take_out(sections)
    }

    fn sample(&self, samples: &[Look]) -> Result<Sampled, tracker::TrackerError> {
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

    fn mapped(&self, section: SectionNo) -> Result<PageSet, tracker::TrackerError> {
        self.whole.mapped(section)
    }

    fn is_held(&self, section: SectionNo) -> bool {
        self.whole.is_held(section)
    }
}
