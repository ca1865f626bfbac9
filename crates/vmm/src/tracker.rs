// SPDX-License-Identifier: Apache-2.0
//! [`AccessTracker`]: which pages were touched lately, without help from guest or VMM.
//!
//! [`UnmapAndLook`] works on any kernel since 5.10, for memory that cannot go to
//! swap. The idea: a page that is in its file but in nobody's page table costs
//! its next user a small fault that the kernel resolves alone, and leaves a
//! trace: the present bit. So
//!
//! ```text
//!   look:   1. our own present bits        → what DMA touched since the last look
//!           2. the VMM's present bits      → what CPUs touched since the last look
//!           3. drop our own translations   (pages mapped by two processes would be skipped)
//!           4. MADV_PAGEOUT on the VMM's   out of every page table, kept in the file
//! ```
//!
//! An access between steps 1 and 4 is lost to the tracker: such a page looks
//! colder than it is, once. Some ten pages per CPU stay mapped because they are
//! in the kernel's batches: they look warmer, once.

use crate::layout::{Piece, RamLayout};
use crate::process::VmmProcess;
use pagetide_addr::{Hva, PAGE_SHIFT, PageNo, PageSet, SectionNo};
use pagetide_sys::mapping::{MappingError, SharedMapping};
use pagetide_sys::pagemap::{Pagemap, PagemapError};
use pagetide_sys::process::{ProcessError, ProcessFd};
use std::sync::Arc;

/// Why accesses could not be told.
#[derive(Debug, thiserror::Error)]
pub enum TrackerError {
    /// A page table could not be read.
    #[error(transparent)]
    Pagemap(#[from] PagemapError),
    /// The VMM's pages could not be unmapped.
    #[error("unmapping the VMM's pages (are they locked?): {0}")]
    Unmap(#[from] ProcessError),
    /// Our own could not.
    #[error("dropping our own translations: {0}")]
    Drop(#[from] MappingError),
    /// An alias is missing.
    #[error("{aliases} mappings of ours were given for {files} RAM files, or of another length")]
    Aliases {
        /// Mappings given.
        aliases: usize,
        /// Files there are.
        files: usize,
    },
}

/// Pages of one section that were touched.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Touched {
    /// By vCPUs, or anything else in the VMM.
    pub cpu: PageSet,
    /// By devices of ours.
    pub dma: PageSet,
}

impl Touched {
    /// By anybody.
    #[must_use]
    pub fn by_anybody(&self) -> PageSet {
        let mut all = self.cpu;
        all.unite(&self.dma);
        all
    }
}

/// Tells which pages were touched.
pub trait AccessTracker: Send + Sync {
    /// How it works, for the log.
    fn name(&self) -> &'static str;

    /// For each of `sections`: what was touched since it was last asked about, and starts again.
    ///
    /// # Errors
    /// [`TrackerError`]; some sections may have started again.
    fn look_many(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError>;

    /// [`AccessTracker::look_many`] for one section.
    ///
    /// # Errors
    /// As there.
    fn look(&self, section: SectionNo) -> Result<Touched, TrackerError> {
        let touched = self.look_many(&[section])?;
        Ok(touched.into_iter().next().unwrap_or_default())
    }

    /// Pages that may have been touched since the last look, which goes on.
    ///
    /// # Errors
    /// [`TrackerError`].
    fn is_mapped(&self, section: SectionNo) -> Result<PageSet, TrackerError>;
}

/// Unmaps pages and looks which come back; see the module.
#[derive(Debug)]
pub struct UnmapAndLook {
    layout: Arc<RamLayout>,
    vmm: ProcessFd,
    vmm_map: Pagemap,
    own_map: Pagemap,
    aliases: Vec<Arc<SharedMapping>>,
}

impl UnmapAndLook {
    /// For the RAM of `vmm`. `aliases` are our own mappings of its files, in the order of the
    /// layout's; none at all if this process maps no RAM.
    ///
    /// # Errors
    /// [`TrackerError`].
    pub fn new(
        vmm: &VmmProcess,
        layout: Arc<RamLayout>,
        aliases: Vec<Arc<SharedMapping>>,
    ) -> Result<Self, TrackerError> {
        let files = layout.files();
        let fits = aliases
            .iter()
            .zip(files)
            .all(|(alias, file)| alias.len_bytes() == file.pages().bytes());
        if !aliases.is_empty() && (aliases.len() != files.len() || !fits) {
            return Err(TrackerError::Aliases {
                aliases: aliases.len(),
                files: files.len(),
            });
        }
        let vmm_map = Pagemap::of_process(vmm.pid())?;
        // Opened by pid: it is the VMM's if that had not ended even afterwards.
        if vmm.fd().has_ended()? {
            return Err(PagemapError::Gone.into());
        }
        Ok(Self {
            vmm: vmm.fd().try_clone()?,
            vmm_map,
            own_map: Pagemap::of_self()?,
            layout,
            aliases,
        })
    }

    fn pieces(&self, section: SectionNo) -> impl Iterator<Item = Piece> + '_ {
        self.layout.pieces(section.pages(self.layout.page_count()))
    }

    fn mapped(&self, piece: &Piece) -> Result<Touched, TrackerError> {
        let mut touched = Touched::default();
        let alias = self.aliases.get(piece.file);
        if let Some(alias) = alias {
            let ours = Hva(alias.address() as u64 + piece.file_offset);
            collect(&self.own_map, ours, piece, &mut touched.dma)?;
        }
        collect(&self.vmm_map, piece.hva, piece, &mut touched.cpu)?;
        Ok(touched)
    }
}

fn collect(
    map: &Pagemap,
    start: Hva,
    piece: &Piece,
    into: &mut PageSet,
) -> Result<(), TrackerError> {
    map.visit(start, piece.pages.len(), |position, entry| {
        if entry.is_present() {
            into.insert(PageNo(piece.pages.start.0 + position));
        }
    })?;
    Ok(())
}

impl AccessTracker for UnmapAndLook {
    fn name(&self) -> &'static str {
        "unmap-and-look"
    }

    fn look_many(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError> {
        let mut all = Vec::with_capacity(sections.len());
        let mut to_unmap: Vec<(Hva, u64)> = Vec::new();
        for section in sections {
            let mut of_section = Touched::default();
            for piece in self.pieces(*section) {
                let touched = self.mapped(&piece)?;
                of_section.cpu.unite(&touched.cpu);
                of_section.dma.unite(&touched.dma);
                let bytes = piece.pages.len() << PAGE_SHIFT;
                if let Some(alias) = self.aliases.get(piece.file)
                    && !touched.dma.is_empty()
                {
                    alias.drop_translations(piece.file_offset, bytes)?;
                }
                if touched.cpu.is_empty() {
                    continue;
                }
                match to_unmap.last_mut() {
                    Some((start, len)) if start.0 + *len == piece.hva.0 => *len += bytes,
                    _ => to_unmap.push((piece.hva, bytes)),
                }
            }
            all.push(of_section);
        }
        if !to_unmap.is_empty() {
            self.vmm.page_out(&to_unmap)?;
        }
        Ok(all)
    }

    fn is_mapped(&self, section: SectionNo) -> Result<PageSet, TrackerError> {
        let mut mapped = PageSet::EMPTY;
        for piece in self.pieces(section) {
            mapped.unite(&self.mapped(&piece)?.by_anybody());
        }
        Ok(mapped)
    }
}
