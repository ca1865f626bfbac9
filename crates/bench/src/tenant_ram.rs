// SPDX-License-Identifier: Apache-2.0
//! A tenant's memory, of benches of page requests: RAM in a memfd, an lz4 store, an address space over
//! both, and one kind of I/O address space as its device. It has no vCPU, so nothing but the fault service
//! and the bench itself touches it.

use std::{
    fs::File,
    io::Read as _,
    os::fd::AsFd as _,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use pagetide_addr::{
    FileKey, FilePage, FilePageSet, PageNo, PageRange, PageSet, SECTION_PAGES, Va,
};
use pagetide_gmem::{
    Activation, AddressSpace, AllocPolicy, Cause, Content, ContentStore, Device, Fault,
    FaultOutcome, Incidents, Installed, LoadDone, MemoryParts, Mode, PageTable, PagedMemory, Place,
    PlaceError, RegionRequest, StoreError, Unlimited, VolatileWords, Wait,
};
use pagetide_random::GAMMA;
use pagetide_swap::tier::{PAGE, Packer, Seed, form_of, unpack};
use pagetide_sys::{
    cpu::{self, Urgency},
    memory_file::GuestFile,
};
use pagetide_vpri::{DPU, DmaMmu, IoSpace, IoSpaces};

const SEED: Seed = Seed(0x10bf);
/// Longest wait for a page to be evicted.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of this program that are searched for pages that compress.
const PROGRAM_BYTES_MAX: u64 = 16 << 20;

/// What the pages hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Filling {
    /// Pages of this program, all present.
    Programs,
    /// The same, but every odd page is a hole, which is filled with zeros.
    ProgramsAndHoles,
    /// Holes.
    Holes,
}

impl Filling {
    const fn is_hole(self, page: PageNo) -> bool {
        match self {
            Self::Programs => false,
            Self::ProgramsAndHoles => page.0 % 2 == 1,
            Self::Holes => true,
        }
    }
}

/// The same page in the one file of the RAM, which begins at page 0.
pub(crate) const fn in_file(page: PageNo) -> FilePage {
    FilePage(page.0)
}

/// First word of `page`.
pub(crate) const fn stamp(page: PageNo) -> u64 {
    (page.0 + 1).wrapping_mul(GAMMA)
}

/// Place and store in one: page `n` is stored as content `n + 1`.
struct Ram {
    file: GuestFile,
    stored: Mutex<Vec<Option<Box<[u8]>>>>,
    disk: Option<ModelDisk>,
}

/// A disk as a model: what is stored is there so long after it is asked for, however much is asked for at a time.
pub(crate) struct ModelDisk {
    time_ns: Arc<AtomicU64>,
    reads: Mutex<mpsc::Sender<DiskRead>>,
}

/// When a read is done, and what is to be done then.
type DiskRead = (Instant, Box<dyn FnOnce() + Send>);

impl ModelDisk {
    /// A disk whose reads take the nanoseconds of `time_ns`, none at first perhaps. Its thread runs where the calling
    /// one may, and ends with it.
    pub(crate) fn start(time_ns: Arc<AtomicU64>) -> Result<Self, String> {
        let (reads, of_disk) = mpsc::channel::<DiskRead>();
        let thread = std::thread::Builder::new().name("disk".into());
        let started = thread.spawn(move || {
            // In order: all reads take the same time.
            for (done_at, done) in of_disk {
                std::thread::sleep(done_at.saturating_duration_since(Instant::now()));
                done();
            }
        });
        started.map_err(|error| failed("the thread of a disk")(&error))?;
        Ok(Self {
            time_ns,
            reads: Mutex::new(reads),
        })
    }

    fn time(&self) -> Duration {
        Duration::from_nanos(self.time_ns.load(Ordering::Relaxed))
    }

    fn read(&self, done: impl FnOnce() + Send + 'static) {
        let reads = self.reads.lock().unwrap_or_else(PoisonError::into_inner);
        let read: DiskRead = (Instant::now() + self.time(), Box::new(done));
        if reads.send(read).is_err() {
            tracing::error!("bench: the disk has ended");
        }
    }
}

fn kernel(
    operation: &'static str,
    pages: PageRange,
) -> impl Fn(pagetide_sys::memory_file::FileError) -> PlaceError {
    move |error| PlaceError::Kernel {
        operation,
        start: pages.start,
        end: pages.end,
        source: std::io::Error::other(error),
    }
}

impl Place for Ram {
    fn install(&self, page: PageNo, content: &[u8; PAGE]) -> Result<Installed, PlaceError> {
        if self.is_present(page)? {
            return Ok(Installed::AlreadyThere);
        }
        let written = self.file.write_at(page.byte_offset(), content);
        written.map_err(kernel("pwrite", page.single()))?;
        Ok(Installed::Installed)
    }

    fn install_zero(&self, page: PageNo) -> Result<Installed, PlaceError> {
        self.install(page, &[0; PAGE])
    }

    fn install_run(&self, pages: PageRange, content: &[u8]) -> Result<u64, PlaceError> {
        let mut done = 0;
        for (page, bytes) in pages.iter().zip(content.as_chunks::<PAGE>().0) {
            if self.install(page, bytes)? == Installed::AlreadyThere {
                break;
            }
            done += 1;
        }
        Ok(done)
    }

    fn read(&self, pages: PageRange, into: &mut [u8]) -> Result<(), PlaceError> {
        let read = self.file.read_at(pages.start.byte_offset(), into);
        read.map_err(kernel("pread", pages))
    }

    fn discard(&self, pages: PageRange) -> Result<(), PlaceError> {
        let punched = self.file.punch(pages.start.byte_offset(), pages.bytes());
        punched.map_err(kernel("fallocate", pages))
    }

    fn is_present(&self, page: PageNo) -> Result<bool, PlaceError> {
        let is_data = self.file.is_data(page.byte_offset());
        is_data.map_err(kernel("lseek", page.single()))
    }

    fn present_runs(&self, pages: PageRange) -> Result<Vec<PageRange>, PlaceError> {
        let mut runs = Vec::new();
        for page in pages.iter() {
            if self.is_present(page)? {
                runs.push(page.single());
            }
        }
        Ok(runs)
    }

    fn wake(&self, _pages: PageRange) -> Result<(), PlaceError> {
        Ok(())
    }

    fn poison(&self, _page: PageNo) -> Result<(), PlaceError> {
        Err(PlaceError::Gone)
    }
}

impl Ram {
    fn with_stored<R>(&self, page: PageNo, act: impl FnOnce(&mut Option<Box<[u8]>>) -> R) -> R {
        let mut stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        if stored.len() <= page.index() {
            stored.resize_with(page.index() + 1, || None);
        }
        act(&mut stored[page.index()])
    }
}

impl ContentStore for Ram {
    fn load(&self, page: PageNo, _: Content, into: &mut [u8; PAGE]) -> Result<(), StoreError> {
        let loaded = self.with_stored(page, |stored| match stored {
            Some(stored) => unpack(SEED, page, form_of(stored), stored, into),
            None => Err("nothing is stored"),
        });
        loaded.map_err(|why| StoreError::Damaged { page, why })
    }

    fn load_later(&self, page: PageNo, content: Content, done: LoadDone) {
        let mut bytes = [0; PAGE];
        let loaded = self.load(page, content, &mut bytes);
        let done = move || done.complete(loaded.map(|()| &bytes));
        match &self.disk {
            Some(disk) => disk.read(done),
            None => done(),
        }
    }

    fn is_at_hand(&self, _: Content) -> bool {
        self.disk.as_ref().is_none_or(|disk| disk.time().is_zero())
    }

    fn free(&self, content: Content) {
        if let Some(page) = content.bits().checked_sub(1) {
            self.with_stored(PageNo(page), |stored| *stored = None);
        }
    }
}

impl Incidents for Ram {
    fn foreign_page(&self, page: PageNo) {
        tracing::error!(%page, "bench: a foreign page");
    }

    fn poisoned(&self, page: PageNo, why: &StoreError) {
        tracing::error!(%page, %why, "bench: a page is poisoned");
    }

    fn cannot_poison(&self, page: PageNo, why: &PlaceError) {
        tracing::error!(%page, %why, "bench: a page cannot be poisoned");
    }

    fn fill_failed(&self, page: PageNo, why: &dyn std::error::Error) {
        tracing::error!(%page, %why, "bench: a fill failed");
    }
}

/// See the module.
pub(crate) struct Tenant {
    ram: Arc<Ram>,
    pub(crate) io: Arc<dyn IoSpace>,
    pub(crate) mmu: Arc<DmaMmu>,
    pub(crate) space: Arc<AddressSpace>,
    filled: PageRange,
    filling: Filling,
    packer: Packer,
}

/// Formats a failure.
pub(crate) fn failed(what: &str) -> impl Fn(&dyn std::fmt::Display) -> String + '_ {
    move |error| format!("{what}: {error}")
}

impl Tenant {
    /// A tenant with an I/O address space from `spaces`, in which nothing is granted. The first `pages`
    /// pages of its memory are filled; the rest of their last section are holes.
    pub(crate) fn new(spaces: &dyn IoSpaces, pages: u64, filling: Filling) -> Result<Self, String> {
        let wrong = failed("the tenant's memory");
        let all = PageNo(0).run(pages.next_multiple_of(SECTION_PAGES));
        let bytes = all.bytes();
        let file = GuestFile::new_memfd("pagetide-tenant", bytes).map_err(|e| wrong(&e))?;
        let models = models()?;
        for (page, model) in PageNo(0).run(pages).iter().zip(models.iter().cycle()) {
            if filling.is_hole(page) {
                continue;
            }
            let mut content = *model;
            content[..8].copy_from_slice(&stamp(page).to_ne_bytes());
            let written = file.write_at(page.byte_offset(), &content);
            written.map_err(|e| wrong(&e))?;
        }
        Self::over(file, spaces, pages, filling, None)
    }

    /// A tenant whose memory is `file`, which is filled, with what is evicted on `disk` if there is one.
    pub(crate) fn over(
        file: GuestFile,
        spaces: &dyn IoSpaces,
        pages: u64,
        filling: Filling,
        disk: Option<ModelDisk>,
    ) -> Result<Self, String> {
        let wrong = failed("the tenant's memory");
        let all = PageNo(0).run(pages.next_multiple_of(SECTION_PAGES));
        let bytes = all.bytes();
        let key: FileKey = file.key().map_err(|e| wrong(&e))?;
        let io = spaces
            .open(file.as_fd(), key, bytes)
            .map_err(|e| wrong(&e))?;
        io.attach().map_err(|e| wrong(&e))?;
        io.unmap_all();
        let ram = Arc::new(Ram {
            file,
            stored: Mutex::default(),
            disk,
        });
        let memory = PagedMemory::new(MemoryParts {
            table: PageTable::growing(Box::new(VolatileWords::with_capacity(all.len()))),
            place: Arc::clone(&ram) as _,
            store: Arc::clone(&ram) as _,
            admission: Arc::new(Unlimited),
            incidents: Arc::clone(&ram) as _,
            neighbours_max: 0,
        });
        let space = AddressSpace::over(memory, Va(0), Va(bytes), AllocPolicy::default());
        let space = space.map_err(|e| wrong(&e))?;
        let mmu = Arc::new(DmaMmu::new([(Arc::clone(&io), all)]));
        let device = Device::with_id(DPU, Arc::clone(&mmu) as _);
        let attached = space.attach(&device, Mode::Coherent, Activation::Now);
        attached.map_err(|e| wrong(&e))?;
        let region = space.alloc(&RegionRequest::of_bytes(bytes));
        region.map_err(|e| wrong(&e))?;
        Ok(Self {
            ram,
            io,
            mmu,
            space,
            filled: PageNo(0).run(pages),
            filling,
            packer: Packer::default(),
        })
    }

    /// The file of its RAM.
    pub(crate) fn file(&self) -> &GuestFile {
        &self.ram.file
    }

    /// Makes its page `page` absent for devices, but present in memory.
    pub(crate) fn hide(&self, page: PageNo) -> Result<(), String> {
        let page = in_file(page);
        let one = FilePageSet::of_range(page.section(), page.single());
        until("a device releases a page", || {
            Ok(self.io.unmap(page.section(), &one))
        })
    }

    /// Compresses its page `page` and makes it absent.
    pub(crate) fn evict(&mut self, page: PageNo) -> Result<(), String> {
        let (ram, packer) = (Arc::clone(&self.ram), &mut self.packer);
        let Some(memory) = self.space.memory() else {
            return Err("an address space without memory".into());
        };
        let one = PageSet::of_range(page.section(), page.single());
        until("a page goes", || {
            let Ok(mut round) = memory.begin_eviction(page.section(), &one) else {
                return Ok(false);
            };
            let mut bytes = [0; PAGE];
            let read = round.read(page.single(), &mut bytes);
            read.map_err(|e| failed("reading a page")(&e))?;
            let stored = packer.pack(SEED, page, &bytes);
            let stored = stored.ok_or("a page of zeros")?.into();
            ram.with_stored(page, |place| *place = Some(stored));
            let content = Content::at(page.0 + 1).ok_or("too many pages")?;
            let committed = round.commit(&[(page, content)]);
            Ok(committed.evicted.contains(page))
        })
    }

    /// Makes all its pages absent.
    pub(crate) fn evict_all(&mut self) -> Result<(), String> {
        for page in self.filled.iter() {
            if !self.filling.is_hole(page) {
                self.evict(page)?;
            }
        }
        Ok(())
    }

    /// Fails unless its page `page` is present with its own content.
    pub(crate) fn check(&self, page: PageNo) -> Result<(), String> {
        let wrong = failed("checking a page");
        let mut word = [0; 8];
        let read = self.ram.file.read_at(page.byte_offset(), &mut word);
        read.map_err(|e| wrong(&e))?;
        let is_hole = self.filling.is_hole(page);
        let wanted = if is_hole { 0 } else { stamp(page) };
        let is_present = self.ram.is_present(page).map_err(|e| wrong(&e))?;
        if is_present && u64::from_ne_bytes(word) == wanted {
            return Ok(());
        }
        Err(format!("{page} was answered and not filled"))
    }

    /// Makes pages present and grants them, as a plain work queue does; calls `reply` once.
    pub(crate) fn fault(
        space: &AddressSpace,
        fault: &Fault,
        reply: impl FnOnce(FaultOutcome) + Send + 'static,
    ) {
        let cause = Cause::Fault(*fault);
        match space.fault(&cause, Wait::Never) {
            Some(served) => reply(served.outcome),
            None => {
                space.fault(&cause, Wait::Reply(Box::new(reply)));
            }
        }
    }
}

fn until(what: &str, mut done: impl FnMut() -> Result<bool, String>) -> Result<(), String> {
    let begun = Instant::now();
    while !done()? {
        if begun.elapsed() > PATIENCE {
            return Err(format!("waited in vain: {what}"));
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Pages of this program with a typical lz4 ratio: they represent a guest's. Searched once.
fn models() -> Result<&'static [[u8; PAGE]], String> {
    static MODELS: OnceLock<Result<Vec<[u8; PAGE]>, String>> = OnceLock::new();
    let models = MODELS.get_or_init(search_models).as_deref();
    models.map_err(Clone::clone)
}

fn search_models() -> Result<Vec<[u8; PAGE]>, String> {
    let wrong = failed("this program");
    let file = File::open("/proc/self/exe").map_err(|e| wrong(&e))?;
    let mut program = Vec::new();
    let read = file.take(PROGRAM_BYTES_MAX).read_to_end(&mut program);
    read.map_err(|e| wrong(&e))?;
    let mut packer = Packer::default();
    let compresses = |page: &&[u8; PAGE]| {
        let stored = packer.pack(SEED, PageNo(0), page).map(<[u8]>::len);
        stored.is_some_and(|bytes| (PAGE / 8..PAGE * 3 / 4).contains(&bytes))
    };
    let pages = program.as_chunks::<PAGE>().0.iter();
    let models: Vec<_> = pages.filter(compresses).take(64).copied().collect();
    if models.is_empty() {
        return Err("no page of this program compresses".into());
    }
    Ok(models)
}

/// Runs this thread on one CPU.
pub(crate) fn move_to(cpu: usize) -> Result<(), String> {
    cpu::set_affinity(&[cpu]).map_err(|e| failed("moving to a CPU")(&e))
}

/// Runs this thread on one CPU, with this urgency if permitted.
pub(crate) fn stand(cpu: usize, urgency: Urgency) -> Result<(), String> {
    move_to(cpu)?;
    if let Err(error) = cpu::set_urgency(urgency) {
        tracing::warn!(%error, ?urgency, "other processes may hold the bench's device up");
    }
    Ok(())
}
