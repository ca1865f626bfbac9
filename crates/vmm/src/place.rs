// SPDX-License-Identifier: Apache-2.0
//! [`VmPlace`] and [`VcpuMmu`]: a VM's RAM as gmem sees it.
//!
//! Pages are installed through the VMM's own userfaultfd (so they are charged to the VMM and wake
//! waiting threads), and discarded by punching the files. Presence and content are read from the
//! files, never from a page table. For pages not in the current layout (unplugged RAM, gaps between
//! files), an install fails, and there is nothing to protect or to wake.
//!
//! A vCPU cannot be prevented from reading a present page, so its strongest restriction is
//! read-only; *no access* is reached by discarding.
//!
//! Huge pages (hugetlbfs) are installed and discarded as a whole; a wake, a protection or poison of a part
//! is one of all of it. A fill that finds none free fails with [`PlaceError::NoPageFree`].
//!
//! | answer of the kernel | what it means here |
//! |---|---|
//! | `EEXIST` | [`Installed::AlreadyThere`]; no thread is woken, since it may be a foreign page |
//! | `EAGAIN` | the address space is changing (`mmap` in the VMM): retried, a bounded number of times |
//! | `ESRCH`  | the VMM has ended: `Gone` |

use crate::layout::{LiveLayout, Piece, RamLayout};
use pagetide_addr::{
    Access, Hva, PAGE_BYTES, PAGE_SHIFT, PageNo, PageRange, PageSet, SectionNo, to_usize,
};
use pagetide_gmem::{
    Backing, Granule, Installed, Mmu, MmuError, MmuLimits, Place, PlaceError, Restrict, Restricted,
    TableId,
};
use pagetide_sys::memory_file::{FileError, GuestFile};
use pagetide_sys::pagemap::{Pagemap, PagemapError};
use pagetide_sys::uffd::{FillOutcome, ProtectOutcome, UffdError, Userfaultfd, WriteProtection};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Tries of a call that reports a changing address space; such a change lasts as long as one `mmap`
/// or `munmap` of the VMM. At least a twentieth of a second in all, most of it asleep.
const MOST_TRIES: u32 = 1_000;
/// The first of them, a microsecond or more each, with only a yield in between.
const QUICK_TRIES: u32 = 16;
const _: () = assert!(QUICK_TRIES < MOST_TRIES);
/// Sleep between later ones.
const PAUSE: Duration = Duration::from_micros(50);

/// The RAM of a VM that has been taken over.
#[derive(Clone, Debug)]
pub struct VmPlace {
    userfaultfd: Arc<Userfaultfd>,
    layout: Arc<LiveLayout>,
}

impl VmPlace {
    /// The RAM of `layout`, registered with `userfaultfd`.
    #[must_use]
    pub const fn new(userfaultfd: Arc<Userfaultfd>, layout: Arc<LiveLayout>) -> Self {
        Self {
            userfaultfd,
            layout,
        }
    }

    fn piece(layout: &RamLayout, page: PageNo) -> Result<Piece, PlaceError> {
        layout.pieces(page.single()).next().ok_or_else(|| {
            kernel("looking for", page.single())(io::Error::from(io::ErrorKind::InvalidInput))
        })
    }

    /// Fills pages by `call`, which is retried while the address space is changing. Returns the
    /// pages filled; 0 if the first was present already.
    fn fill(
        &self,
        operation: &'static str,
        piece: &Piece,
        call: impl Fn() -> Result<FillOutcome, UffdError>,
    ) -> Result<u64, PlaceError> {
        for tried in 0..MOST_TRIES {
            match call().map_err(|e| kernel(operation, piece.pages)(source_of(e)))? {
                FillOutcome::Filled { bytes } => return Ok(bytes >> PAGE_SHIFT),
                // Waiting threads keep waiting: it may be a foreign page.
                FillOutcome::AlreadyThere => return Ok(0),
                FillOutcome::Gone => return Err(PlaceError::Gone),
                FillOutcome::Retry => rest(tried),
            }
        }
        Err(kernel(operation, piece.pages)(io::Error::from(
            io::ErrorKind::TimedOut,
        )))
    }

    /// Installs all of a section in one huge page, or nothing of it.
    fn install_huge(
        &self,
        layout: &RamLayout,
        pages: PageRange,
        content: &[u8],
    ) -> Result<u64, PlaceError> {
        let piece = Self::piece(layout, pages.start)?;
        let piece = layout
            .pieces(pages)
            .next()
            .filter(|whole| whole.pages == pages)
            .ok_or_else(|| {
                let source = io::Error::from(io::ErrorKind::InvalidInput);
                kernel("UFFDIO_COPY of a part of a huge page", piece.pages)(source)
            })?;
        let (start, end) = (pages.start, pages.end);
        let none_free = PlaceError::NoPageFree { start, end };
        let filled = self.fill("UFFDIO_COPY", &piece, || {
            self.userfaultfd.copy(piece.hva, content)
        });
        match filled {
            Err(PlaceError::Kernel { source, .. })
                if source.kind() == io::ErrorKind::OutOfMemory =>
            {
                Err(none_free)
            }
            // Linux 6.18 says EEXIST of a huge page that it has no memory for.
            Ok(0) => match file(layout, &piece).is_data(piece.file_offset) {
                Ok(true) => Ok(0),
                Ok(false) => Err(none_free),
                Err(error) => Err(file_error("UFFDIO_CONTINUE", pages, error)),
            },
            filled => filled,
        }
    }

    fn clear_marker(&self, piece: &Piece) -> Result<(), PlaceError> {
        let failed = |source| kernel("UFFDIO_WRITEPROTECT", piece.pages)(source);
        for tried in 0..MOST_TRIES {
            let outcome = self
                .userfaultfd
                .unprotect_quietly(piece.hva, piece.pages.bytes());
            match outcome.map_err(|e| failed(source_of(e)))? {
                ProtectOutcome::Done => return Ok(()),
                ProtectOutcome::Gone => return Err(PlaceError::Gone),
                ProtectOutcome::Retry => rest(tried),
            }
        }
        Err(failed(io::Error::from(io::ErrorKind::TimedOut)))
    }

    fn wake_piece(&self, piece: &Piece) -> Result<(), PlaceError> {
        self.userfaultfd
            .wake(piece.hva, piece.pages.bytes())
            .map_err(|e| kernel("UFFDIO_WAKE", piece.pages)(source_of(e)))
    }
}

/// Lets the thread that changes the address space continue. It may have been preempted by this very
/// thread, and be of a scheduling class that a yield does not help: then only sleeping does.
fn rest(tried: u32) {
    if tried < QUICK_TRIES {
        std::thread::yield_now();
    } else {
        std::thread::sleep(PAUSE);
    }
}

impl Place for VmPlace {
    fn granule(&self, section: SectionNo) -> Granule {
        match self.layout.look().is_huge(section.first_page()) {
            true => Granule::Section,
            false => Granule::Page,
        }
    }

    fn install(&self, page: PageNo, content: &[u8; 4096]) -> Result<Installed, PlaceError> {
        let piece = Self::piece(&self.layout.look(), page)?;
        let filled = self.fill("UFFDIO_COPY", &piece, || {
            self.userfaultfd.copy(piece.hva, content)
        })?;
        Ok(installed(filled))
    }

    fn install_zero(&self, page: PageNo) -> Result<Installed, PlaceError> {
        let piece = Self::piece(&self.layout.look(), page)?;
        let filled = self.fill("UFFDIO_ZEROPAGE", &piece, || {
            self.userfaultfd.zeropage(piece.hva, PAGE_BYTES)
        })?;
        Ok(installed(filled))
    }

    fn install_run(&self, pages: PageRange, content: &[u8]) -> Result<u64, PlaceError> {
        assert_eq!(content.len() as u64, pages.bytes(), "content of each page");
        let mut installed = 0;
        let layout = self.layout.look();
        if layout.is_huge(pages.start) {
            return self.install_huge(&layout, pages, content);
        }
        for piece in layout.pieces(pages) {
            let from = piece.pages.start.since(pages.start) * PAGE_BYTES;
            let part = bytes_of(content, from, piece.pages.bytes());
            let filled = self.fill("UFFDIO_COPY", &piece, || {
                self.userfaultfd.copy(piece.hva, part)
            });
            match filled {
                Ok(filled) => {
                    installed += filled;
                    if filled < piece.pages.len() {
                        break;
                    }
                }
                // The pages before are installed, and that is what counts.
                Err(PlaceError::Kernel { .. }) if installed > 0 => break,
                Err(e) => return Err(e),
            }
        }
        Ok(installed)
    }

    fn read(&self, pages: PageRange, into: &mut [u8]) -> Result<(), PlaceError> {
        assert_eq!(into.len() as u64, pages.bytes(), "room for each page");
        let layout = self.layout.look();
        for piece in layout.pieces(pages) {
            let from = piece.pages.start.since(pages.start) * PAGE_BYTES;
            let (start, len) = (index(from), index(piece.pages.bytes()));
            file(&layout, &piece)
                .read_at(piece.file_offset, &mut into[start..start + len])
                .map_err(|e| file_error("pread", piece.pages, e))?;
        }
        Ok(())
    }

    fn discard(&self, pages: PageRange) -> Result<(), PlaceError> {
        let layout = self.layout.look();
        for piece in layout.pieces(pages) {
            file(&layout, &piece)
                .punch(piece.file_offset, piece.pages.bytes())
                .map_err(|e| file_error("punching", piece.pages, e))?;
        }
        Ok(())
    }

    fn is_present(&self, page: PageNo) -> Result<bool, PlaceError> {
        let layout = self.layout.look();
        let piece = Self::piece(&layout, page)?;
        file(&layout, &piece)
            .is_data(piece.file_offset)
            .map_err(|e| file_error("SEEK_DATA", piece.pages, e))
    }

    fn present_runs(&self, pages: PageRange) -> Result<Vec<PageRange>, PlaceError> {
        let mut runs: Vec<PageRange> = Vec::new();
        let layout = self.layout.look();
        for piece in layout.pieces(pages) {
            let found = file(&layout, &piece)
                .present_runs(piece.file_offset, piece.pages.bytes())
                .map_err(|e| file_error("SEEK_DATA", piece.pages, e))?;
            for (offset, bytes) in found {
                let start = piece.pages.start.0 + ((offset - piece.file_offset) >> PAGE_SHIFT);
                let run = PageRange::new(PageNo(start), PageNo(start + (bytes >> PAGE_SHIFT)));
                match runs.last_mut() {
                    Some(last) if last.end == run.start => last.end = run.end,
                    _ => runs.push(run),
                }
            }
        }
        Ok(runs)
    }

    fn wake(&self, pages: PageRange) -> Result<(), PlaceError> {
        let layout = self.layout.look();
        for piece in layout.pieces(layout.widened(pages)) {
            self.wake_piece(&piece)?;
        }
        Ok(())
    }

    /// An evicted page still has the marker of its write protection, which counts as a present
    /// page; so the marker is cleared first. A page poisoned before stays so, and its waiters are
    /// released.
    fn poison(&self, page: PageNo) -> Result<(), PlaceError> {
        let layout = self.layout.look();
        let whole = layout.widened(page.single());
        let piece = Self::piece(&layout, whole.start)?;
        let piece = layout.pieces(whole).next().unwrap_or(piece);
        let there = || {
            let source = io::Error::from(io::ErrorKind::AlreadyExists);
            Err(kernel("UFFDIO_POISON", piece.pages)(source))
        };
        // A present page: its protection is not ours to remove.
        if self.is_present(page)? {
            return there();
        }
        self.clear_marker(&piece)?;
        let poisoned = self.fill("UFFDIO_POISON", &piece, || {
            self.userfaultfd.poison(piece.hva, piece.pages.bytes())
        })?;
        if poisoned > 0 {
            return Ok(());
        }
        if self.is_present(page)? {
            return there();
        }
        // If it was protected again meanwhile, its next user faults and the request comes again.
        self.wake_piece(&piece)
    }
}

/// The vCPUs of a VM, and all other threads of its VMM.
#[derive(Clone, Debug)]
pub struct VcpuMmu {
    userfaultfd: Arc<Userfaultfd>,
    layout: Arc<LiveLayout>,
    /// The VMM's page table, to see which pages are protected at all.
    map: Option<Arc<Pagemap>>,
}

/// From this many pages on, the page table is read first to find which of them are protected. Removing a
/// protection that is not there makes the page read-only all the same, until its next user faults.
const LOOK_PAGES_MIN: u64 = 32;

impl VcpuMmu {
    /// For the VMM whose RAM is registered with `userfaultfd`.
    #[must_use]
    pub const fn new(userfaultfd: Arc<Userfaultfd>, layout: Arc<LiveLayout>) -> Self {
        Self {
            userfaultfd,
            layout,
            map: None,
        }
    }

    /// The same, which removes protection only from pages that have it.
    ///
    /// # Errors
    /// [`PagemapError`]: the page table of process `pid` cannot be read.
    pub fn seeing(self, pid: u32) -> Result<Self, PagemapError> {
        Ok(Self {
            map: Some(Arc::new(Pagemap::of_process(pid)?)),
            ..self
        })
    }

    fn protect(&self, pages: PageRange, protection: WriteProtection) -> Result<(), MmuError> {
        let layout = self.layout.look();
        for piece in layout.pieces(layout.widened(pages)) {
            match (&self.map, protection) {
                // One entry of the page table stands for the whole of a huge page.
                _ if layout.files()[piece.file].is_huge() => {
                    self.protect_piece(&piece, protection)?;
                }
                (Some(map), WriteProtection::Off) if piece.pages.len() >= LOOK_PAGES_MIN => {
                    self.unprotect(map, &piece)?;
                }
                _ => self.protect_piece(&piece, protection)?,
            }
        }
        Ok(())
    }

    /// Removes the protection from those pages that have it.
    fn unprotect(&self, map: &Pagemap, piece: &Piece) -> Result<(), MmuError> {
        // Half-open ranges of positions in the piece.
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let seen = map.visit(piece.hva, piece.pages.len(), |position, entry| {
            match runs.last_mut() {
                _ if !entry.is_write_protected() => {}
                Some((_, end)) if *end == position => *end = position + 1,
                _ => runs.push((position, position + 1)),
            }
        });
        if let Err(error) = seen {
            tracing::debug!(%error, "protected pages cannot be determined; all are assumed to be");
            return self.protect_piece(piece, WriteProtection::Off);
        }
        for (first, end) in runs {
            let part = Piece {
                hva: Hva(piece.hva.0 + PageNo(first).byte_offset()),
                pages: PageRange::new(piece.pages.start.plus(first), piece.pages.start.plus(end)),
                file_offset: piece.file_offset + PageNo(first).byte_offset(),
                ..*piece
            };
            self.protect_piece(&part, WriteProtection::Off)?;
        }
        Ok(())
    }

    fn protect_piece(&self, piece: &Piece, protection: WriteProtection) -> Result<(), MmuError> {
        let failed = |source| MmuError::Kernel {
            operation: "UFFDIO_WRITEPROTECT",
            source,
        };
        for tried in 0..MOST_TRIES {
            let outcome =
                self.userfaultfd
                    .write_protect(piece.hva, piece.pages.bytes(), protection);
            match outcome.map_err(|e| failed(source_of(e)))? {
                ProtectOutcome::Done => return Ok(()),
                ProtectOutcome::Gone => return Err(MmuError::Gone),
                ProtectOutcome::Retry => rest(tried),
            }
        }
        Err(failed(io::Error::from(io::ErrorKind::TimedOut)))
    }
}

impl Mmu for VcpuMmu {
    fn limits(&self) -> MmuLimits {
        MmuLimits {
            strongest: Restrict::ReadOnly,
            ..MmuLimits::PAGED
        }
    }

    /// Protects run by run and never a page more: a protection that is never removed costs the
    /// guest a fault. On return no CPU can write to the pages: the kernel has flushed the TLBs.
    fn restrict(
        &self,
        _table: TableId,
        section: SectionNo,
        pages: &PageSet,
        to: Restrict,
    ) -> Result<Restricted, MmuError> {
        if to == Restrict::NoAccess {
            return Err(MmuError::Kernel {
                operation: "taking read access from vCPUs",
                source: io::Error::from(io::ErrorKind::Unsupported),
            });
        }
        for run in pages.runs(section) {
            self.protect(run, WriteProtection::On)?;
        }
        Ok(Restricted::Done)
    }

    /// Removes the protection, whatever the access: that releases waiting threads.
    fn grant(
        &self,
        _table: TableId,
        pages: PageRange,
        _access: Access,
        _backing: Backing,
    ) -> Result<(), MmuError> {
        self.protect(pages, WriteProtection::Off)
    }
}

fn file<'a>(layout: &'a RamLayout, piece: &Piece) -> &'a GuestFile {
    layout.files()[piece.file].file()
}

const fn installed(filled: u64) -> Installed {
    if filled == 0 {
        Installed::AlreadyThere
    } else {
        Installed::Installed
    }
}

const fn index(bytes: u64) -> usize {
    // PageNo::index is the one place that turns 64-bit numbers into indices.
    to_usize(bytes)
}

fn bytes_of(content: &[u8], from: u64, len: u64) -> &[u8] {
    &content[index(from)..index(from + len)]
}

fn source_of(error: UffdError) -> io::Error {
    match error {
        UffdError::Kernel { source, .. } | UffdError::NotPermitted { source } => source,
        UffdError::Busy { .. } => io::Error::from(io::ErrorKind::ResourceBusy),
    }
}

fn kernel(operation: &'static str, pages: PageRange) -> impl FnOnce(io::Error) -> PlaceError {
    move |source| PlaceError::Kernel {
        operation,
        start: pages.start,
        end: pages.end,
        source,
    }
}

fn file_error(operation: &'static str, pages: PageRange, error: FileError) -> PlaceError {
    let source = match error {
        FileError::Kernel { source, .. } => source,
        other => io::Error::other(other.to_string()),
    };
    kernel(operation, pages)(source)
}
