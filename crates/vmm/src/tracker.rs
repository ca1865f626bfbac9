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
//! Step 4 passes over files on a tmpfs mounted with `noswap`, whose pages are
//! unevictable. For those a thread of the VMM is borrowed (see
//! [`pagetide_sys::ptrace`]) to drop its own translations, which is 0.2 ms of that
//! thread's time a look and some more for pages. `MADV_DONTNEED` on anything but a
//! shared file would lose content, so the mappings are looked at first, with the
//! thread stopped: RAM that the VMM unplugs is left alone.
//!
//! An access between steps 1 and 4 is lost to the tracker: such a page looks
//! colder than it is, once. Some ten pages per CPU stay mapped because they are
//! in the kernel's batches: they look warmer, once.

use crate::Refusal;
use crate::layout::{LiveLayout, MapsChange, Piece, RamLayout};
use crate::process::VmmProcess;
use crate::swap;
use pagetide_addr::{FileKey, Hva, PAGE_SHIFT, PageNo, PageSet, SectionNo};
use pagetide_sys::mapping::{MappingError, SharedMapping};
use pagetide_sys::pagemap::{Pagemap, PagemapError};
use pagetide_sys::process::ProcessError;
use pagetide_sys::ptrace::{PtraceError, run_inside};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Why accesses could not be told.
#[derive(Debug, thiserror::Error)]
pub enum TrackerError {
    /// A page table could not be read.
    #[error(transparent)]
    Pagemap(#[from] PagemapError),
    /// The VMM's pages could not be unmapped.
    #[error("unmapping the VMM's pages (are they locked?): {0}")]
    Unmap(#[from] ProcessError),
    /// A thread of the VMM could not unmap them.
    #[error("having the VMM unmap its pages: {0}")]
    Inside(#[from] PtraceError),
    /// Where its RAM is mapped could not be told.
    #[error(transparent)]
    Look(#[from] Refusal),
    /// Its RAM is mapped otherwise than it was.
    #[error("the VMM's RAM has changed: {0}")]
    Changed(MapsChange),
    /// What is mounted could not be told.
    #[error("looking for file systems that never swap: {0}")]
    Mounts(#[from] io::Error),
    /// Our own could not.
    #[error("dropping our own translations: {0}")]
    Drop(#[from] MappingError),
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

/// This process' own mappings of RAM files, which its devices use.
pub trait OwnMappings: Send + Sync {
    /// The mapping of all of `file`; `None` if this process has none.
    fn of(&self, file: FileKey) -> Option<Arc<SharedMapping>>;
}

/// For a process that maps no RAM.
#[derive(Clone, Copy, Debug)]
pub struct NoMappings;

impl OwnMappings for NoMappings {
    fn of(&self, _file: FileKey) -> Option<Arc<SharedMapping>> {
        None
    }
}

/// Unmaps pages and looks which come back; see the module.
pub struct UnmapAndLook {
    layout: Arc<LiveLayout>,
    vmm: VmmProcess,
    vmm_map: Pagemap,
    own_map: Pagemap,
    own: Arc<dyn OwnMappings>,
    files: Mutex<Files>,
}

/// What is known of the files of a layout, in their order.
struct Files {
    layout: Arc<RamLayout>,
    aliases: Vec<Option<Arc<SharedMapping>>>,
    ways: Vec<Way>,
}

/// How pages of a file are taken out of the VMM's page table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// By `MADV_PAGEOUT` from here.
    PageOut,
    /// By `MADV_DONTNEED` in the VMM.
    Inside,
}

/// Ranges of the VMM, one after another.
#[derive(Default)]
struct Ranges(Vec<(Hva, u64)>);

impl Ranges {
    fn add(&mut self, start: Hva, len_bytes: u64) {
        match self.0.last_mut() {
            Some((first, len)) if first.0 + *len == start.0 => *len += len_bytes,
            _ => self.0.push((start, len_bytes)),
        }
    }
}

impl UnmapAndLook {
    /// For the RAM of `vmm`. `own` tells our own mappings of its files.
    ///
    /// # Errors
    /// [`TrackerError`].
    pub fn new(
        vmm: &VmmProcess,
        layout: Arc<LiveLayout>,
        own: Arc<dyn OwnMappings>,
    ) -> Result<Self, TrackerError> {
        let vmm_map = Pagemap::of_process(vmm.pid())?;
        // Opened by pid: it is the VMM's if that had not ended even afterwards.
        if vmm.fd().has_ended()? {
            return Err(PagemapError::Gone.into());
        }
        let files = Files::new(vmm.pid(), layout.now(), own.as_ref())?;
        Ok(Self {
            vmm: vmm.try_clone()?,
            vmm_map,
            own_map: Pagemap::of_self()?,
            layout,
            own,
            files: Mutex::new(files),
        })
    }

    /// The files as they are now: known anew whenever the layout has changed.
    fn files(&self) -> Result<MutexGuard<'_, Files>, TrackerError> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.layout.now();
        if !Arc::ptr_eq(&files.layout, &now) {
            *files = Files::new(self.vmm.pid(), now, self.own.as_ref())?;
        }
        Ok(files)
    }

    /// Has the VMM drop its translations of `ranges`.
    fn unmap_inside(&self, ranges: &[(Hva, u64)]) -> Result<(), TrackerError> {
        run_inside(self.vmm.fd(), |thread| {
            if let Some(change) = self.layout.look().maps_change(&self.vmm)? {
                return Err(TrackerError::Changed(change));
            }
            for (start, len_bytes) in ranges {
                thread.drop_translations(*start, *len_bytes)?;
            }
            Ok(())
        })?;
        Ok(())
    }

    fn mapped(&self, files: &Files, piece: &Piece) -> Result<Touched, TrackerError> {
        let mut touched = Touched::default();
        if let Some(alias) = &files.aliases[piece.file] {
            let ours = Hva(alias.address() as u64 + piece.file_offset);
            collect(&self.own_map, ours, piece, &mut touched.dma)?;
        }
        collect(&self.vmm_map, piece.hva, piece, &mut touched.cpu)?;
        Ok(touched)
    }
}

impl Files {
    fn new(pid: u32, layout: Arc<RamLayout>, own: &dyn OwnMappings) -> Result<Self, TrackerError> {
        let never_swapped = swap::file_systems_without_swap(pid)?;
        let way = |key: FileKey| {
            if never_swapped.contains(&key.dev) {
                Way::Inside
            } else {
                Way::PageOut
            }
        };
        let keys = || layout.files().iter().map(|file| file.key());
        let (ways, aliases) = (
            keys().map(way).collect(),
            keys().map(|k| own.of(k)).collect(),
        );
        Ok(Self {
            layout,
            aliases,
            ways,
        })
    }

    fn pieces(&self, section: SectionNo) -> impl Iterator<Item = Piece> + '_ {
        self.layout.pieces(section.pages(self.layout.page_count()))
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
        let files = self.files()?;
        let mut all = Vec::with_capacity(sections.len());
        let (mut to_page_out, mut to_drop) = (Ranges::default(), Ranges::default());
        for section in sections {
            let mut of_section = Touched::default();
            for piece in files.pieces(*section) {
                let touched = self.mapped(&files, &piece)?;
                of_section.cpu.unite(&touched.cpu);
                of_section.dma.unite(&touched.dma);
                let bytes = piece.pages.len() << PAGE_SHIFT;
                if let Some(alias) = &files.aliases[piece.file]
                    && !touched.dma.is_empty()
                {
                    alias.drop_translations(piece.file_offset, bytes)?;
                }
                if touched.cpu.is_empty() {
                    continue;
                }
                match files.ways[piece.file] {
                    Way::PageOut => to_page_out.add(piece.hva, bytes),
                    Way::Inside => to_drop.add(piece.hva, bytes),
                }
            }
            all.push(of_section);
        }
        if !to_page_out.0.is_empty() {
            self.vmm.fd().page_out(&to_page_out.0)?;
        }
        if !to_drop.0.is_empty() {
            self.unmap_inside(&to_drop.0)?;
        }
        Ok(all)
    }

    fn is_mapped(&self, section: SectionNo) -> Result<PageSet, TrackerError> {
        let files = self.files()?;
        let mut mapped = PageSet::EMPTY;
        for piece in files.pieces(section) {
            mapped.unite(&self.mapped(&files, &piece)?.by_anybody());
        }
        Ok(mapped)
    }
}
