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

use crate::{
    bitmap::Attribute,
    lease::{Lease, PageAttributes},
};
use pagetide_addr::{Access, DomainId, FileKey, PAGE_BYTES, PageRange};
use pagetide_sys::mapping::SharedMapping;
use std::{
    collections::{HashMap, HashSet},
    os::fd::BorrowedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

/// Largest file a domain can cover, from the width of a lease's section numbers: 2^32 sections.
pub const DOMAIN_BYTES_MAX: u64 = 1 << 53;

/// Why a domain cannot be had or changed.
#[derive(Debug, thiserror::Error)]
pub enum DomainError {
    /// The file is larger than [`DOMAIN_BYTES_MAX`].
    #[error("a file of {0} bytes is too large for a DMA domain")]
    TooLarge(u64),
    /// The file cannot be mapped.
    #[error("guest RAM file {key} of {bytes} bytes cannot be mapped: {source}")]
    Map {
        /// The file.
        key: FileKey,
        /// Its length.
        bytes: u64,
        /// The kernel's answer.
        source: pagetide_sys::mapping::MappingError,
    },
    /// A device without look-up would touch memory of an attached VM.
    #[error(
        "look-up cannot be off for RAM file {0}: its VM is attached; detach the VM first, or start the device with look-up on"
    )]
    LookUpNeeded(FileKey),
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
}

/// One file of guest RAM, mapped once in this process, with its page attributes.
#[derive(Debug)]
pub struct DmaDomain {
    id: DomainId,
    key: FileKey,
    mapping: Arc<SharedMapping>,
    attributes: PageAttributes,
    owner: Mutex<Ownership>,
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
        self.mapping.len_bytes()
    }

    /// This process' one mapping of the file.
    #[must_use]
    pub fn mapping(&self) -> &Arc<SharedMapping> {
        &self.mapping
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

    /// Gives the domain back: every page becomes read-write. All pages must be present, or the VM's
    /// memory be without userfaultfd again.
    pub fn detach(&self) {
        self.attributes.grant_all();
        self.lock_owner().attached = false;
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
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    next_id: u32,
    barred: HashSet<FileKey>,
    by_key: HashMap<FileKey, Weak<DmaDomain>>,
}

impl DomainTable {
    /// An empty table for a DPU of `engine_count` engines.
    #[must_use]
    pub fn new(engine_count: usize) -> Self {
        Self {
            engine_count,
            entries: Mutex::default(),
        }
    }

    /// Number of engines its domains count leases for.
    #[must_use]
    pub fn engine_count(&self) -> usize {
        self.engine_count
    }

    /// The domain of `file`, made and mapped if nobody has it yet. `key` and `bytes` are what
    /// `fstat` says of the file.
    ///
    /// # Errors
    /// [`DomainError::TooLarge`], [`DomainError::Map`].
    pub fn open(
        &self,
        file: BorrowedFd<'_>,
        key: FileKey,
        bytes: u64,
    ) -> Result<Arc<DmaDomain>, DomainError> {
        if bytes > DOMAIN_BYTES_MAX {
            return Err(DomainError::TooLarge(bytes));
        }
        let mut entries = self.lock();
        if entries.barred.contains(&key) {
            return Err(DomainError::Barred(key));
        }
        if let Some(domain) = entries.by_key.get(&key).and_then(Weak::upgrade) {
            return Ok(domain);
        }
        seal(file, key);
        let mapping = SharedMapping::new(file, bytes).map_err(|source| DomainError::Map {
            key,
            bytes,
            source,
        })?;
        let id = DomainId(entries.next_id);
        entries.next_id += 1;
        let attributes = PageAttributes::new(
            bytes.div_ceil(PAGE_BYTES),
            self.engine_count,
            Attribute::ReadWrite,
        );
        let domain = Arc::new(DmaDomain {
            id,
            key,
            mapping: Arc::new(mapping),
            attributes,
            owner: Mutex::default(),
        });
        entries.by_key.retain(|_, known| known.strong_count() > 0);
        entries.by_key.insert(key, Arc::downgrade(&domain));
        Ok(domain)
    }

    /// From now on nobody gets a domain of this file: pages of it are away, and nobody brings them
    /// back.
    pub fn bar(&self, key: FileKey) {
        self.lock().barred.insert(key);
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
    }

    /// The domain of a file, if anybody has it.
    #[must_use]
    pub fn find(&self, key: FileKey) -> Option<Arc<DmaDomain>> {
        self.lock().by_key.get(&key).and_then(Weak::upgrade)
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps a memfd from being shrunk: a page of ours past its end would kill this process. One that
/// takes no seals, or a file on tmpfs, is its owner's to keep whole.
fn seal(file: BorrowedFd<'_>, key: FileKey) {
    use rustix::fs::{SealFlags, fcntl_add_seals, fcntl_get_seals};
    if fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
        return;
    }
    if let Err(error) = fcntl_add_seals(file, SealFlags::SHRINK) {
        tracing::warn!(%key, %error, "the RAM file takes no seal: whoever has it open could stop this daemon by shrinking it");
    }
}

/// One device's way into a domain, used on one engine's thread only.
///
/// Not `Sync`, and to be moved to its engine's thread before the first lease: the counters of an
/// engine have one writer.
#[derive(Debug)]
pub struct EnginePort {
    domain: Arc<DmaDomain>,
    engine: usize,
    look_up: LookUp,
    not_sync: std::marker::PhantomData<std::cell::Cell<()>>,
}

impl EnginePort {
    /// A port of engine number `engine`.
    ///
    /// # Errors
    /// [`DomainError::LookUpNeeded`] if look-up is to be off and a VM owns the domain.
    pub fn new(
        domain: Arc<DmaDomain>,
        engine: usize,
        look_up: LookUp,
    ) -> Result<Self, DomainError> {
        if look_up == LookUp::Off {
            let mut owner = domain.lock_owner();
            if owner.attached {
                return Err(DomainError::LookUpNeeded(domain.key));
            }
            owner.ports_without_lookup += 1;
        }
        Ok(Self {
            domain,
            engine,
            look_up,
            not_sync: std::marker::PhantomData,
        })
    }

    /// The domain.
    #[must_use]
    pub fn domain(&self) -> &Arc<DmaDomain> {
        &self.domain
    }

    /// Leases `range` if all of it allows `access`; `None` means a page request is due.
    #[inline]
    pub fn lease(&self, range: PageRange, access: Access) -> Option<Lease> {
        match self.look_up {
            LookUp::On => self.domain.attributes.lease(self.engine, range, access),
            LookUp::Off => Some(Lease::nothing()),
        }
    }

    /// Returns a lease this port gave.
    #[inline]
    pub fn release(&self, lease: Lease) {
        self.domain.attributes.release(self.engine, lease);
    }
}

impl Drop for EnginePort {
    fn drop(&mut self) {
        if self.look_up == LookUp::Off {
            self.domain.lock_owner().ports_without_lookup -= 1;
        }
    }
}
