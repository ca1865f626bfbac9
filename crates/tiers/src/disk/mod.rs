// SPDX-License-Identifier: Apache-2.0
//! The disk tier: a file or block device of this host, by direct I/O.
//!
//! ```text
//!   callers                       thread `pt-tier-disk`              kernel
//!   make_room ─► sectors, or an order ─► thread `pt-tier-space` ─────► fallocate
//!   write ─────► inbox ──────────► engine ─► ring (64 entries) ─────► file
//!   read ──────► inbox ──────────►    │  ◄─── completions
//!   forget ────► sectors              └► duties are told
//! ```
//! - [`open`]: what is refused, and the header. [`identity`]: which file or device it is.
//! - [`attend`]: the thread, from the opening of the disk to the end.
//! - [`engine`]: what it does with requests; time bounds, and what happens to what is late.
//! - [`probe`]: how a tier that does not work comes back.
//! - [`space`]: segments for VMs, allocated by a thread of its own.
//! - [`request`]: requests as the thread keeps them.
//! - [`shared`]: what callers and thread share.
//! - [`io`]: the seams to the kernel.
//! - [`panics`]: what becomes of panics.
//!
//! # Start
//! [`DiskTier::open`] locks the disk, so that all I/O of a predecessor is done. Then every VM that the
//! predecessor left is held ([`FoundDisk::hold`]); only then can the tier begin ([`FoundDisk::begin`]), and
//! with it the first write. What no VM holds goes back to the file system. A VM that is recovered says which
//! of its pages are there ([`SlowTier::recover`]).
//!
//! If the disk cannot be opened, VMs that need it must still be served: then it is awaited
//! ([`FoundDisk::awaited`]). VMs are held and recovered as on a disk that is there, the tier stands as gone, and
//! its thread tries again.
//!
//! # Space
//! Segments of 16 MiB are allocated by `fallocate` before they are used, up to the operator's limit and as
//! long as the file system keeps a reserve for others. Whoever needs one is told [`TierError::Busy`] until it is
//! there. So a full file system shows as [`TierError::Full`]
//! when room is made, not when a batch is written.

mod attend;
mod engine;
mod identity;
mod io;
mod open;
mod panics;
mod probe;
mod request;
mod shared;
mod space;
#[cfg(test)]
mod tests;

use crate::batch::{PAGE_SECTORS_MAX, SECTOR_BYTES};
use crate::bitmap::BlockSize;
use crate::extent::{NoRoom, SEGMENT_BYTES, SectorError, Sectors, SegmentNo};
use crate::table::ExtentEntry;
use crate::{
    Batch, DiskId, ExtentName, Health, NotRecovered, Place, ReadDone, Room, SectorNo, SlowTier,
    TierError, TierFigures, TierKind, VmId, WriteDone,
};
use attend::{Attendant, IfRefused};
use identity::Identity;
use io::Geometry;
pub use open::{DiskError, Owner, Source};
use open::{OpenDisk, Wanted};
use pagetide_sys::file_ring::Buffer;
pub use request::Bounds;
use shared::{READS_MAX, ReadOrder, Shared, WRITES_MAX, WriteOrder};
use space::Space;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// How long the end of a tier waits for its threads: a ring drains for 5 s at most.
const END_TIME: Duration = Duration::from_secs(10);
/// Most segments of a disk that is awaited: 64 TiB. Its size is not known, so this bounds what damaged tables
/// of extents may ask for.
const AWAITED_SEGMENTS_MAX: u32 = 1 << 22;

/// A disk that is ours, before anything is written to it; or one that is awaited.
pub struct FoundDisk {
    source: Source,
    disk: Option<OpenDisk>,
    id: DiskId,
    wanted: Wanted,
    /// Why it is awaited.
    why: String,
    sectors: Sectors,
    bounds: Bounds,
}

/// See the module documentation.
pub struct DiskTier {
    path: PathBuf,
    shared: Arc<Shared>,
    space: Arc<Space>,
    bounds: Bounds,
    clock: Box<dyn Fn() -> Instant + Send + Sync>,
    thread: Option<ThreadId>,
    /// Tells nothing, and is closed when all threads have let go of the disk.
    ends: Mutex<Receiver<()>>,
}

impl std::fmt::Debug for DiskTier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskTier")
            .field("geometry", &self.shared.geometry)
            .finish_non_exhaustive()
    }
}

impl FoundDisk {
    /// By what a VM's pool knows it again.
    #[must_use]
    pub fn id(&self) -> DiskId {
        self.id
    }

    /// True if it could not be opened yet.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        self.disk.is_none()
    }

    /// Keeps the segments of a VM that a dead daemon left: nothing is written there.
    ///
    /// # Errors
    /// [`SectorError`] of an entry that names no extent of this disk.
    pub fn hold(
        &mut self,
        vm: VmId,
        entries: impl IntoIterator<Item = ExtentEntry>,
    ) -> Result<(), SectorError> {
        for entry in entries {
            if self.is_awaited() {
                let segment = entry.start.0 * SECTOR_BYTES as u64 / SEGMENT_BYTES;
                let needed = u32::try_from(segment + 1).unwrap_or(u32::MAX);
                if needed <= AWAITED_SEGMENTS_MAX {
                    self.sectors.stretch(needed);
                }
            }
            self.sectors.hold(vm, [entry])?;
        }
        Ok(())
    }

    /// There are VMs whose extents are not known now. Nothing is given back then, and no further segment is given out;
    /// a VM that is recovered all the same has its pages. A disk that is awaited is not taken over then if it has a
    /// name: it may be the one on which those VMs have their pages.
    pub fn keep_all(&mut self) {
        self.sectors.keep_all();
        if let Wanted::Named(id) = self.wanted {
            self.wanted = Wanted::Unnamed(id);
        }
    }

    /// Begins, once all VMs are held. Gives back what none of them has.
    ///
    /// # Errors
    /// [`DiskError::Kernel`], if there is no ring or no thread.
    pub fn begin(self) -> Result<DiskTier, DiskError> {
        self.begin_as(IfRefused::Fail)
    }

    /// As [`Self::begin`]; but a disk that does not work any more is awaited.
    ///
    /// # Errors
    /// There is no thread.
    pub fn begin_or_await(self) -> Result<DiskTier, DiskError> {
        self.begin_as(IfRefused::Await)
    }

    fn begin_as(self, if_refused: IfRefused) -> Result<DiskTier, DiskError> {
        let failed = |operation| {
            let path = self.source.path.clone();
            move |source| DiskError::Kernel {
                path,
                operation,
                source,
            }
        };
        let shared = Arc::new(Shared::new(self.sectors, 0, Instant::now()));
        let space = Arc::<Space>::default();
        let (ends, ended) = sync_channel(0);
        let attendant = Attendant {
            shared: Arc::clone(&shared),
            space: Arc::clone(&space),
            source: self.source.clone(),
            wanted: self.wanted,
            bounds: self.bounds,
            ends,
        };
        let thread = std::thread::Builder::new().name("pt-tier-disk".to_owned());
        let (told, begun) = sync_channel(1);
        let spawned = match self.disk {
            Some(disk) => thread
                .spawn(move || attendant.serve(disk, if_refused, |begun| drop(told.send(begun)))),
            None => {
                shared.begin_gone(self.why, Instant::now());
                drop(told.send(Ok(())));
                thread.spawn(move || attendant.await_and_serve())
            }
        };
        let thread = spawned.map_err(failed("a thread"))?;
        let ended_early = |_| std::io::Error::other("its thread ended");
        begun
            .recv()
            .map_err(ended_early)
            .map_err(failed("a thread"))??;
        Ok(DiskTier {
            path: self.source.path,
            shared,
            space,
            bounds: self.bounds,
            clock: Box::new(Instant::now),
            thread: Some(thread.thread().id()),
            ends: Mutex::new(ended),
        })
    }

    /// A disk that could not be opened, because of `why`, and on which VMs have pages if its `id` is known. It is
    /// awaited: the tier stands as gone until it is there.
    ///
    /// # Errors
    /// There are no random numbers.
    pub fn awaited(
        source: Source,
        bounds: Bounds,
        id: Option<DiskId>,
        why: &DiskError,
    ) -> Result<Self, DiskError> {
        let drawn = |why| DiskError::Kernel {
            path: source.path.clone(),
            operation: "getrandom",
            source: std::io::Error::other(why),
        };
        let (id, wanted) = match id {
            Some(id) => (id, Wanted::Known(id)),
            None => {
                let id = DiskId::draw().map_err(drawn)?;
                (id, Wanted::Named(id))
            }
        };
        Ok(Self {
            source,
            disk: None,
            id,
            wanted,
            why: why.to_string(),
            sectors: Sectors::new(1, SegmentNo(0), BlockSize::Bytes512),
            bounds,
        })
    }
}

impl DiskTier {
    /// Opens and locks a file or device: that of this `id`, if VMs have pages there. Pages beyond a limit that was
    /// lowered stay where they are.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn open(
        source: Source,
        bounds: Bounds,
        id: Option<DiskId>,
    ) -> Result<FoundDisk, DiskError> {
        let disk = open::open(&source, id.map_or(Wanted::Any, Wanted::Known), bounds.lock)?;
        Ok(FoundDisk {
            source,
            id: disk.id,
            wanted: Wanted::Known(disk.id),
            why: String::new(),
            sectors: Sectors::new(disk.segments, disk.limit, disk.block),
            disk: Some(disk),
            bounds,
        })
    }

    /// Whether a disk that another program has open could be opened once that has let go of it; nothing is changed.
    ///
    /// # Errors
    /// [`DiskError`]: why not.
    pub fn examine(source: &Source, id: Option<DiskId>) -> Result<(), DiskError> {
        open::examine(source, id)
    }

    fn now(&self) -> Instant {
        (self.clock)()
    }

    fn free_room(&self, vm: VmId, room: Room) {
        self.free(vm, room.start, room.sectors);
    }

    fn free(&self, vm: VmId, start: SectorNo, sectors: u16) {
        match self.shared.free(vm, start, sectors) {
            Ok(emptied) => (self.shared).give_back_segments(emptied.into_iter().collect()),
            // Sectors that are lost until the VM is recovered the next time, not pages.
            Err(error) => {
                tracing::error!(%error, %vm, "a page of the disk tier could not be forgotten")
            }
        }
    }

    /// Where the sectors of a place are, if they are on this disk.
    fn sectors_of(&self, place: &Place, geometry: Geometry) -> Option<(u64, usize)> {
        let first = place.start.0.checked_add(u64::from(place.position.0))?;
        let end = first.checked_add(u64::from(place.sectors))?;
        let segment_sectors = SEGMENT_BYTES / SECTOR_BYTES as u64;
        let is_there = end <= u64::from(geometry.segments) * segment_sectors
            && (1..=PAGE_SECTORS_MAX).contains(&place.sectors);
        is_there.then_some((
            first * SECTOR_BYTES as u64,
            usize::from(place.sectors) * SECTOR_BYTES,
        ))
    }

    /// Why nothing is taken or returned now, while there is no disk.
    fn not_there(&self) -> TierError {
        let refusal = self.health().refusal(TierKind::Disk);
        refusal.unwrap_or_else(Shared::ended)
    }

    fn end(&self) {
        self.space.end();
        self.shared.end();
        // The last owner may be a duty that the thread itself tells. It ends by itself then.
        if self
            .thread
            .is_none_or(|it| it == std::thread::current().id())
        {
            return;
        }
        let ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        if ends.recv_timeout(END_TIME) == Err(RecvTimeoutError::Timeout) {
            tracing::error!(
                "the disk of the disk tier does not answer: it is let go of when it does"
            );
        }
    }
}

impl Drop for DiskTier {
    fn drop(&mut self) {
        self.end();
    }
}

impl SlowTier for DiskTier {
    fn kind(&self) -> TierKind {
        TierKind::Disk
    }

    fn is_found(&self) -> Result<(), TierError> {
        let gone = |reason| TierError::Gone {
            kind: TierKind::Disk,
            reason,
        };
        let there = Identity::at(&self.path)
            .map_err(|error| gone(format!("{}: {error}", self.path.display())))?;
        match self.shared.identity.get() {
            Some(open) if *open == there => Ok(()),
            Some(_) => Err(gone(DiskError::Replaced(self.path.clone()).to_string())),
            None => Err(self.not_there()),
        }
    }

    fn granule_bytes(&self) -> usize {
        SECTOR_BYTES
    }

    fn make_room(&self, vm: VmId, sealed_bytes: &[usize]) -> Result<Vec<Room>, TierError> {
        let refusal = self.health().refusal(TierKind::Disk);
        if let Some(refusal) = refusal {
            self.shared.note_refused();
            return Err(refusal);
        }
        let impossible = TierError::Io {
            kind: TierKind::Disk,
            operation: "making room",
            reason: "a page has 1 to 16 sectors".to_owned(),
        };
        let mut pages = Vec::with_capacity(sealed_bytes.len());
        for bytes in sealed_bytes {
            let sectors = u16::try_from(bytes.div_ceil(SECTOR_BYTES)).unwrap_or(u16::MAX);
            if sectors > PAGE_SECTORS_MAX {
                return Err(impossible);
            }
            pages.push(sectors);
        }
        let now = self.now();
        // Before the look: what comes meanwhile is found.
        let is_on_its_way = self.space.is_ordered(vm);
        let taken = self.shared.sectors().take(vm, &pages);
        match taken {
            Ok(rooms) => Ok(rooms),
            Err(NoRoom::Impossible) => Err(impossible),
            Err(NoRoom::Segment) => {
                Err((self.space).order(vm, self.bounds.write, &self.shared, now))
            }
            Err(NoRoom::Full) if is_on_its_way => Err(TierError::Busy(TierKind::Disk)),
            Err(NoRoom::Full) => {
                self.shared.note_full(now);
                Err(TierError::Full(TierKind::Disk))
            }
        }
    }

    fn give_back(&self, vm: VmId, room: Room) {
        self.free_room(vm, room);
    }

    fn write(&self, batch: Batch, done: WriteDone) {
        let (vm, room) = (batch.extent().vm, batch.room());
        let Some(geometry) = self.shared.geometry.get() else {
            return done.tell(Err(self.not_there()));
        };
        let blocks = batch.bytes().len().next_multiple_of(geometry.block.bytes());
        let mut buffer = Buffer::zeroed(blocks);
        buffer[..batch.bytes().len()].copy_from_slice(batch.bytes());
        let order = WriteOrder {
            buffer,
            vm,
            room,
            pages: batch.len(),
            done,
            began: self.now(),
        };
        let refusal = self.health().refusal(TierKind::Disk);
        let mut inbox = self.shared.inbox();
        let refusal = match refusal {
            _ if inbox.over => Some(Shared::ended()),
            // Its room was made before the disk was full.
            Some(TierError::Full(_)) | None if inbox.open_writes < WRITES_MAX => None,
            Some(TierError::Full(_)) | None => Some(TierError::Busy(TierKind::Disk)),
            refusal => refusal,
        };
        match refusal {
            None => {
                inbox.open_writes += 1;
                inbox.writes.push_back(order);
                self.shared.added(inbox);
            }
            Some(refusal) => {
                drop(inbox);
                self.shared.note_refused();
                self.free_room(vm, room);
                order.done.tell(Err(refusal));
            }
        }
    }

    fn read(&self, place: Place, done: ReadDone) {
        let Some(geometry) = self.shared.geometry.get() else {
            return done.tell(Err(self.not_there()));
        };
        let Some((start, bytes)) = self.sectors_of(&place, *geometry) else {
            return done.tell(Err(TierError::NotThere(TierKind::Disk)));
        };
        let block = geometry.block.bytes() as u64;
        let offset = start - start % block;
        let skipped = usize::try_from(start - offset).unwrap_or(0);
        let order = ReadOrder {
            place,
            offset,
            buffer: Buffer::zeroed((skipped + bytes).next_multiple_of(geometry.block.bytes())),
            page: skipped..skipped + bytes,
            done,
            began: self.now(),
        };
        let mut inbox = self.shared.inbox();
        let refusal = match inbox.open_reads {
            _ if inbox.over => Shared::ended(),
            READS_MAX.. => TierError::Busy(TierKind::Disk),
            _ => {
                inbox.open_reads += 1;
                inbox.reads.push_back(order);
                return self.shared.added(inbox);
            }
        };
        drop(inbox);
        self.shared.note_refused();
        order.done.tell(Err(refusal));
    }

    fn forget(&self, places: &[Place]) {
        for place in places {
            let start = place.start.plus(u64::from(place.position.0));
            self.free(place.extent.vm, start, place.sectors);
        }
    }

    /// All other sectors of the VM are free then.
    fn recover(&self, vm: VmId, places: &[Place]) -> Result<(), NotRecovered> {
        let sectors = |place: &Place| {
            let start = place.start.plus(u64::from(place.position.0));
            (start, place.sectors)
        };
        let recovered = (self.shared.sectors()).recover(vm, places.iter().map(sectors));
        let empty = recovered.map_err(|why| NotRecovered {
            kind: TierKind::Disk,
            why: why.to_string(),
        })?;
        self.shared.give_back_segments(empty);
        Ok(())
    }

    fn forget_vm(&self, vm: VmId, _: &[ExtentName]) {
        self.space.cancel(vm);
        let segments = self.shared.sectors().end_vm(vm);
        self.shared.give_back_segments(segments);
    }

    fn health(&self) -> Health {
        self.shared.health(self.now())
    }

    fn figures(&self) -> TierFigures {
        self.shared.figures()
    }
}
