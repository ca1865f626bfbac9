// SPDX-License-Identifier: Apache-2.0
//! DMA domains: a file of guest RAM as devices see it (VPRI 5.1, R1).
//!
//! A domain is made when the first device maps a file, or when a VM with that
//! file is attached, whichever comes first; both find it by [`FileKey`]. As long
//! as no VM is attached, every page is read-write. Attaching unmaps all pages
//! and then grants them one by one; detaching grants all of them again.
//!
//! A domain whose file its VM has unplugged is *retired*: its bits are never set
//! again, and page requests for it are refused, so a device that still knows the
//! domain reaches nothing. If the file comes back, it gets a new domain.
//!
//! A host in another process *declares* domains before any device may have mapped
//! their files. Until it has declared all of them, a domain that only a device
//! knows begins unmapped ([`DomainTable::set_initial`]). A device without look-up
//! would not notice, so it gets no port until then.
//!
//! # What is mapped
//! A domain covers a whole file. Only the parts that devices have named
//! ([`RamWindow`]) are mapped, each as long as some device uses it. A file may
//! be sparse and of any length, and all domains share one address space.
//!
//! Lock order: the table's entries, then a domain's owner. The list of windows
//! is a leaf lock.

mod error;

pub use error::DomainError;

pub mod own;
mod port;
mod spaces;
mod window;

pub use port::EnginePort;
pub use window::RamWindow;

use crate::{bitmap::Attribute, delay::Delay, lease::PageAttributes};
use pagetide_addr::{DomainId, FileKey, PAGE_BYTES};
use pagetide_sys::{
    guest_ram::RamFile,
    mapping::{FilePart, SharedMapping},
};
use std::{
    collections::{HashMap, HashSet},
    os::fd::BorrowedFd,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
};

/// Largest file a domain can cover, from the width of a lease's section numbers: 2^32 sections.
pub const DOMAIN_BYTES_MAX: u64 = 1 << 53;

/// Whether a device looks at the PA-bitmap before each DMA.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LookUp {
    /// It does: the only way while a VM is attached.
    On,
    /// It does not; for measuring what the look-up costs.
    Off,
    /// It does, and each look-up takes some extra time; for measuring what a slower look-up would
    /// cost.
    Slowed(Delay),
}

/// Watches this process' mappings of files that belong to VMs, so that DMA into an absent page is
/// noticed.
pub trait MappingWatch: std::fmt::Debug + Send + Sync {
    /// Watches `window`; does nothing if it is watched already.
    ///
    /// # Errors
    /// A sentence that says why the window cannot be watched.
    fn watch(&self, window: &RamWindow) -> Result<(), String>;

    /// Stops watching it.
    fn unwatch(&self, window: &RamWindow);
}

/// The watch of a table, once it is set.
type TheWatch = Arc<OnceLock<Arc<dyn MappingWatch>>>;

/// One file of guest RAM with its page attributes.
#[derive(Debug)]
pub struct DmaDomain {
    id: DomainId,
    key: FileKey,
    len_bytes: u64,
    /// Windows that devices of this process use; dead ones are removed when another is made.
    windows: Mutex<Vec<Weak<RamWindow>>>,
    attributes: PageAttributes,
    owner: Mutex<Ownership>,
    watch: TheWatch,
    /// The entries of the table that the domain is in.
    entries: Arc<Mutex<Entries>>,
}

#[derive(Debug, Default)]
struct Ownership {
    attached: bool,
    ports_without_lookup: u32,
    /// Uses as memory of the DPU's own ([`own::OwnUse`]), which looks nothing up.
    own_uses: u32,
}

impl DmaDomain {
    /// Id by which page requests name the domain.
    #[must_use]
    pub fn id(&self) -> DomainId {
        self.id
    }

    /// The file.
    #[must_use]
    pub fn key(&self) -> FileKey {
        self.key
    }

    /// Length of the file, in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// The window through which a device reaches `bytes` bytes at `offset` of the file, made if no
    /// existing window covers them. [`RamFile::of`] has checked `file`.
    ///
    /// # Errors
    /// [`DomainError::Map`], or [`DomainError::Device`] if the domain's VM is attached and the window
    /// cannot be watched.
    pub fn map(
        self: &Arc<Self>,
        file: BorrowedFd<'_>,
        ram: &RamFile,
        offset: u64,
        bytes: u64,
    ) -> Result<Arc<RamWindow>, DomainError> {
        let mut windows = lock(&self.windows);
        windows.retain(|window| window.strong_count() > 0);
        let mut live = windows.iter().filter_map(Weak::upgrade);
        if let Some(window) = live.find(|window| window.covers(offset, bytes) && !window.is_lost())
        {
            return Ok(window);
        }
        let part = FilePart {
            offset,
            bytes,
            page_bytes: ram.page_bytes,
        };
        let mapping = SharedMapping::guarded(file, part).map_err(|source| DomainError::Map {
            key: self.key,
            bytes,
            source,
        })?;
        let window = Arc::new(RamWindow::new(self, part, mapping));
        windows.push(Arc::downgrade(&window));
        drop(windows);
        // Check only after listing it: a concurrent attach either finds the window in the list or
        // is found here.
        if self.is_attached() {
            // The window has not been used yet, so no DMA is under way.
            self.watch_window(&window)?;
        }
        Ok(window)
    }

    /// True while a device of this process has part of the file mapped.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        !self.windows().is_empty()
    }

    /// The parts of the file that devices of this process have mapped.
    #[must_use]
    pub fn windows(&self) -> Vec<Arc<RamWindow>> {
        lock(&self.windows)
            .iter()
            .filter_map(Weak::upgrade)
            .collect()
    }

    /// The page attributes.
    #[must_use]
    pub fn attributes(&self) -> &PageAttributes {
        &self.attributes
    }

    /// Takes the domain for a VM: from now on, every device must look up.
    ///
    /// # Errors
    /// [`DomainError::AttachedAlready`], [`DomainError::LookUpOff`], [`DomainError::OwnMemory`].
    pub fn attach(&self) -> Result<(), DomainError> {
        let mut owner = self.lock_owner();
        if owner.attached {
            return Err(DomainError::AttachedAlready(self.key));
        }
        if owner.ports_without_lookup > 0 {
            return Err(DomainError::LookUpOff {
                key: self.key,
                devices: owner.ports_without_lookup,
            });
        }
        if owner.own_uses > 0 {
            return Err(DomainError::OwnMemory(self.key));
        }
        owner.attached = true;
        Ok(())
    }

    /// From now on, DMA of this process into an absent page of the VM is noticed. To be called when
    /// no DMA is under way that began before the domain was attached: such DMA is not restricted.
    ///
    /// # Errors
    /// [`DomainError::Device`]: our own mapping cannot be watched.
    pub fn watch(&self) -> Result<(), DomainError> {
        let windows = self.windows();
        windows
            .iter()
            .try_for_each(|window| self.watch_window(window))
    }

    fn watch_window(&self, window: &RamWindow) -> Result<(), DomainError> {
        let watched = self.watch.get().map_or(Ok(()), |watch| watch.watch(window));
        watched.map_err(|error| {
            DomainError::Device(format!(
                "cannot watch its own mapping of the VM's RAM: {error}"
            ))
        })
    }

    fn unwatch_windows(&self) {
        let windows = self.windows();
        windows.iter().for_each(|window| window.unwatch());
    }

    /// Gives the domain back: every page becomes read-write. All pages must be present, or the VM's
    /// memory must no longer have a userfaultfd.
    pub fn detach(&self) {
        self.attributes.grant_all();
        let mut owner = self.lock_owner();
        owner.attached = false;
        self.unwatch_windows();
    }

    /// Gives the domain back although pages of it may be absent: all but the standing ones stay
    /// unmapped until they are known to be present.
    pub fn disown(&self) {
        self.attributes.unmap_all();
        let mut owner = self.lock_owner();
        owner.attached = false;
        self.unwatch_windows();
    }

    /// True while a VM owns the domain.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        self.lock_owner().attached
    }

    fn lock_owner(&self) -> MutexGuard<'_, Ownership> {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All domains of the process.
#[derive(Debug)]
pub struct DomainTable {
    engine_count: usize,
    watch: TheWatch,
    entries: Arc<Mutex<Entries>>,
}

#[derive(Debug)]
struct Entries {
    next_id: u32,
    /// Initial attribute of a domain that only a device knows.
    initial: Attribute,
    barred: HashSet<FileKey>,
    by_key: HashMap<FileKey, Weak<DmaDomain>>,
}

impl DomainTable {
    /// An empty table for a DPU of `engine_count` engines.
    #[must_use]
    pub fn new(engine_count: usize) -> Self {
        Self {
            engine_count,
            watch: Arc::default(),
            entries: Arc::new(Mutex::new(Entries {
                next_id: 0,
                initial: Attribute::ReadWrite,
                barred: HashSet::new(),
                by_key: HashMap::new(),
            })),
        }
    }

    /// Sets the watch for mappings of attached domains; the first one that is set stays.
    pub fn set_watch(&self, watch: Arc<dyn MappingWatch>) {
        if self.watch.set(watch).is_err() {
            tracing::debug!("a second watch over our mappings is not needed");
        }
    }

    /// Sets the initial attribute of domains that only a device knows: read-write if the host knows
    /// all memory whose content is elsewhere, unmapped until then. A device without look-up gets a
    /// port in the first case only.
    pub fn set_initial(&self, initial: Attribute) {
        self.lock().initial = initial;
    }

    /// The domain of the file `key`, made (unmapped) if there is none. No device needs to have
    /// mapped the file.
    ///
    /// # Errors
    /// [`DomainError::TooLarge`], [`DomainError::Length`].
    pub fn declare(&self, key: FileKey, bytes: u64) -> Result<Arc<DmaDomain>, DomainError> {
        if bytes > DOMAIN_BYTES_MAX {
            return Err(DomainError::TooLarge(bytes));
        }
        let mut entries = self.lock();
        if let Some(domain) = entries.known(key, bytes)? {
            return Ok(domain);
        }
        Ok(entries.make(key, bytes, self, Attribute::Unmapped))
    }

    /// Every domain there is.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<DmaDomain>> {
        let entries = self.lock();
        entries.by_key.values().filter_map(Weak::upgrade).collect()
    }

    /// Number of engines its domains count leases for.
    #[must_use]
    pub fn engine_count(&self) -> usize {
        self.engine_count
    }

    /// The domain of the file `key`, made if there is none. `key` and `bytes` are as `fstat`
    /// reports them. Nothing of it is mapped ([`DmaDomain::map`]).
    ///
    /// # Errors
    /// [`DomainError::TooLarge`], [`DomainError::Barred`], [`DomainError::Length`].
    pub fn open(&self, key: FileKey, bytes: u64) -> Result<Arc<DmaDomain>, DomainError> {
        if bytes > DOMAIN_BYTES_MAX {
            return Err(DomainError::TooLarge(bytes));
        }
        let mut entries = self.lock();
        if entries.barred.contains(&key) {
            return Err(DomainError::Barred(key));
        }
        let initial = entries.initial;
        match entries.known(key, bytes)? {
            Some(domain) => Ok(domain),
            None => Ok(entries.make(key, bytes, self, initial)),
        }
    }

    /// All of `file`, mapped: for callers that made the file themselves, such as benches and tests.
    ///
    /// # Errors
    /// [`DomainError`].
    pub fn map_whole(&self, file: BorrowedFd<'_>) -> Result<Arc<RamWindow>, DomainError> {
        let ram = RamFile::of(file)?;
        let domain = self.open(ram.key, ram.bytes)?;
        domain.map(file, &ram, 0, ram.bytes)
    }

    /// From now on, no device gets a domain of this file: some of its pages are absent, and nothing
    /// can fill them.
    pub fn bar(&self, key: FileKey) {
        self.lock().barred.insert(key);
    }

    /// Reverts [`Self::bar`]: the file belongs to no VM, or to one that was recovered after all.
    pub fn lift_bar(&self, key: FileKey) {
        self.lock().barred.remove(&key);
    }

    /// Ends `domain`, whose RAM is unplugged: it is no longer found by key, and all its bits are
    /// cleared for good. For look-up it still belongs to its VM. A lease that is still held may be
    /// used to its end; the memory is freed when the last device releases the domain.
    pub fn retire(&self, domain: &DmaDomain) {
        let mut entries = self.lock();
        let is_it = |known: &Weak<DmaDomain>| known.as_ptr() == std::ptr::from_ref(domain);
        if entries.by_key.get(&domain.key).is_some_and(is_it) {
            entries.by_key.remove(&domain.key);
        }
        drop(entries);
        domain.attributes.unmap_all();
        domain.unwatch_windows();
    }

    /// The domain of a file, if there is one.
    #[must_use]
    pub fn find(&self, key: FileKey) -> Option<Arc<DmaDomain>> {
        self.lock().by_key.get(&key).and_then(Weak::upgrade)
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        lock(&self.entries)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Entries {
    /// Checks that a device may do DMA into the file `key` without look-up.
    fn permit_without_look_up(&self, key: FileKey) -> Result<(), DomainError> {
        match self.initial {
            _ if self.barred.contains(&key) => Err(DomainError::Barred(key)),
            Attribute::ReadWrite => Ok(()),
            Attribute::Unmapped | Attribute::ReadOnly => Err(DomainError::NotKnown(key)),
        }
    }

    fn known(&self, key: FileKey, bytes: u64) -> Result<Option<Arc<DmaDomain>>, DomainError> {
        let Some(domain) = self.by_key.get(&key).and_then(Weak::upgrade) else {
            return Ok(None);
        };
        // A domain that a device has mapped keeps its length: later callers get that part.
        if !domain.is_mapped() && domain.len_bytes != bytes {
            return Err(DomainError::Length {
                key,
                bytes,
                declared_bytes: domain.len_bytes,
            });
        }
        Ok(Some(domain))
    }

    fn make(
        &mut self,
        key: FileKey,
        bytes: u64,
        table: &DomainTable,
        attribute: Attribute,
    ) -> Arc<DmaDomain> {
        let id = DomainId(self.next_id);
        self.next_id += 1;
        let pages = bytes.div_ceil(PAGE_BYTES);
        let domain = Arc::new(DmaDomain {
            id,
            key,
            len_bytes: bytes,
            windows: Mutex::default(),
            attributes: PageAttributes::new(pages, table.engine_count, attribute),
            owner: Mutex::default(),
            watch: Arc::clone(&table.watch),
            entries: Arc::clone(&table.entries),
        });
        self.by_key.retain(|_, known| known.strong_count() > 0);
        self.by_key.insert(key, Arc::downgrade(&domain));
        domain
    }
}
