// SPDX-License-Identifier: Apache-2.0
//! DMA domains: a file of guest RAM as devices see it (VPRI 5.1, R1).
//!
//! A domain is made when the first device maps a file, or when a VM with that
//! file is attached, whichever comes first; both find it by [`FileKey`]. As long
//! as no VM is attached every page is read-write. Attaching takes the bits away
//! and hands them out again page by page; detaching gives all of them back.
//!
//! A domain whose file its VM has unplugged is *retired*: no bit of it is ever
//! set again, and page requests for it are refused, so a device that still knows
//! it reaches nothing. Should the file come again, it gets a new domain.
//!
//! Where the host is another process it *declares* domains before any device may
//! have mapped their files; and until it has declared all, a domain that only a
//! device knows begins unmapped ([`DomainTable::set_initial`]). A device that does
//! not look up would not notice, so until then it gets no port.
//!
//! # What is mapped
//! A domain covers a file; mapped are only the parts of it that devices have
//! named ([`RamWindow`]), each as long as some device uses it. A file may be
//! sparse and of any length, and address space is everybody's.
//!
//! Order of locks: the table's entries, then a domain's owner. The list of
//! windows is a leaf.

mod port;
mod spaces;
mod window;

pub use port::EnginePort;
pub use window::RamWindow;

use crate::{bitmap::Attribute, delay::Delay, lease::PageAttributes};
use pagetide_addr::{DomainId, FileKey, PAGE_BYTES};
use pagetide_sys::{
    guest_ram::{RamFile, RamFileError},
    mapping::{FilePart, SharedMapping},
};
use std::{
    collections::{HashMap, HashSet},
    os::fd::BorrowedFd,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
};

/// Largest file a domain can cover, from the width of a lease's section numbers: 2^32 sections.
pub const DOMAIN_BYTES_MAX: u64 = 1 << 53;

/// Why a domain cannot be had or changed.
#[derive(Debug, thiserror::Error)]
pub enum DomainError {
    /// The file is larger than [`DOMAIN_BYTES_MAX`].
    #[error("a file of {0} bytes is too large for a DMA domain")]
    TooLarge(u64),
    /// The file cannot be guest RAM.
    #[error(transparent)]
    File(#[from] RamFileError),
    /// Part of the file cannot be mapped.
    #[error("{bytes} bytes of guest RAM file {key} cannot be mapped: {source}")]
    Map {
        /// The file.
        key: FileKey,
        /// Length of the part.
        bytes: u64,
        /// The kernel's answer.
        source: pagetide_sys::mapping::MappingError,
    },
    /// A device without look-up would touch memory of an attached VM.
    #[error(
        "look-up cannot be off for RAM file {0}: its VM is attached; detach the VM first, or start the device with look-up on"
    )]
    LookUpNeeded(FileKey),
    /// A device without look-up would touch memory of which nobody has said yet whether it is there.
    #[error(
        "look-up cannot be off for RAM file {0}: the host has not said yet which memory has pages elsewhere; connect the device again once 'pagetide run' is connected, or start the device with look-up on"
    )]
    NotKnown(FileKey),
    /// A VM cannot be attached while a device serves it without look-up.
    #[error(
        "{devices} device queue(s) work on RAM file {key} with look-up off; restart those devices with look-up on, then attach"
    )]
    LookUpOff {
        /// The file.
        key: FileKey,
        /// Number of such ports.
        devices: u32,
    },
    /// The file is not as long as its domain was declared.
    #[error(
        "RAM file {key} has {bytes} bytes, but the host has declared {declared_bytes}: the VM changed its RAM in between; connect the device again"
    )]
    Length {
        /// The file.
        key: FileKey,
        /// Its length.
        bytes: u64,
        /// What the host said.
        declared_bytes: u64,
    },
    /// The device is not there, or does not do what it is told.
    #[error("the DPU {0}")]
    Device(String),
    /// The file belongs to a VM that could not be taken up again.
    #[error(
        "RAM file {0} belongs to a VM whose evicted pages wait in a pool that could not be taken up: no device may touch it until then"
    )]
    Barred(FileKey),
    /// Two VMs cannot own one file.
    #[error("RAM file {0} belongs to a VM that is attached already")]
    AttachedAlready(FileKey),
}

/// Whether a device looks at the PA-bitmap before each DMA.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LookUp {
    /// It does: the only way for a VM that is attached.
    On,
    /// It does not; for measuring what the look-up costs.
    Off,
    /// It does and takes some time more for each; for measuring what a slower look-up would cost.
    Slowed(Delay),
}

/// Watches this process' mappings of files that belong to VMs, so that DMA into an absent page is
/// noticed.
pub trait MappingWatch: std::fmt::Debug + Send + Sync {
    /// Watches `window`; does nothing if it is watched already.
    ///
    /// # Errors
    /// A sentence.
    fn watch(&self, window: &RamWindow) -> Result<(), String>;

    /// Watches it no more.
    fn unwatch(&self, window: &RamWindow);
}

/// The watch of a table, once it has one.
type TheWatch = Arc<OnceLock<Arc<dyn MappingWatch>>>;

/// One file of guest RAM with its page attributes.
#[derive(Debug)]
pub struct DmaDomain {
    id: DomainId,
    key: FileKey,
    len_bytes: u64,
    /// Those that devices of this process use; dead ones are cleared away when another is made.
    windows: Mutex<Vec<Weak<RamWindow>>>,
    attributes: PageAttributes,
    owner: Mutex<Ownership>,
    watch: TheWatch,
    /// Those of the table that it is in.
    entries: Arc<Mutex<Entries>>,
}

#[derive(Debug, Default)]
struct Ownership {
    attached: bool,
    ports_without_lookup: u32,
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
    /// device has one that covers them. `file` is what [`RamFile::of`] has looked at.
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
        let window = Arc::new(RamWindow::new(self, offset, mapping));
        windows.push(Arc::downgrade(&window));
        drop(windows);
        // After it is listed: an attach that comes now either finds it there, or is found here.
        if self.is_attached() {
            // Nobody has used it yet, so nothing is under way.
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

    /// Takes the domain for a VM: from now on no device may do without look-up.
    ///
    /// # Errors
    /// [`DomainError::AttachedAlready`], [`DomainError::LookUpOff`].
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
        owner.attached = true;
        Ok(())
    }

    /// From now on DMA of this process into an absent page of the VM is noticed. To be called when
    /// no DMA is under way that began before the domain was attached: that may go where it likes.
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
    /// memory be without userfaultfd again.
    pub fn detach(&self) {
        self.attributes.grant_all();
        let mut owner = self.lock_owner();
        owner.attached = false;
        self.unwatch_windows();
    }

    /// Gives the domain back though pages of it may be absent: all but the standing ones are
    /// unmapped, until somebody knows that they are present.
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
    /// What a domain begins as that only a device knows.
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

    /// Has the mappings of attached domains watched; the first one that is set stays.
    pub fn set_watch(&self, watch: Arc<dyn MappingWatch>) {
        if self.watch.set(watch).is_err() {
            tracing::debug!("a second watch over our mappings is not needed");
        }
    }

    /// What a domain is from now on as long as only a device knows it: read-write if the host knows
    /// all memory of which content is elsewhere, unmapped until then. A device without look-up gets
    /// a port in the first case only.
    pub fn set_initial(&self, initial: Attribute) {
        self.lock().initial = initial;
    }

    /// The domain of the file `key`, which no device needs to have brought yet: made, unmapped, if
    /// there is none.
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
        Ok(entries.make(key, bytes, (self, Attribute::Unmapped)))
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

    /// The domain of the file `key`, made if nobody has it yet. `key` and `bytes` are what `fstat`
    /// says of the file. Nothing of it is mapped ([`DmaDomain::map`]).
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
            None => Ok(entries.make(key, bytes, (self, initial))),
        }
    }

    /// All of `file`, mapped: for whoever made the file himself, as benches and tests do.
    ///
    /// # Errors
    /// [`DomainError`].
    pub fn map_whole(&self, file: BorrowedFd<'_>) -> Result<Arc<RamWindow>, DomainError> {
        let ram = RamFile::of(file)?;
        let domain = self.open(ram.key, ram.bytes)?;
        domain.map(file, &ram, 0, ram.bytes)
    }

    /// From now on nobody gets a domain of this file: pages of it are away, and nobody brings them
    /// back.
    pub fn bar(&self, key: FileKey) {
        self.lock().barred.insert(key);
    }

    /// Takes [`Self::bar`] back: the file belongs to nobody, or to a VM that was taken up after all.
    pub fn lift_bar(&self, key: FileKey) {
        self.lock().barred.remove(&key);
    }

    /// Ends `domain`, whose RAM is unplugged: nobody finds it any more, and all its bits are
    /// cleared for good. It stays its VM's as far as look-up is concerned. Whoever has a lease
    /// still may use it to its end; the memory goes when the last device lets go of the domain.
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

    /// The domain of a file, if anybody has it.
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
    /// Whether a device may do DMA into the file `key` without looking at its attributes.
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
        // One that a device has mapped stays as long as it was: whoever asks anew gets that part.
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
        (table, attribute): (&DomainTable, Attribute),
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
