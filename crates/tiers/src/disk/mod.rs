// SPDX-License-Identifier: Apache-2.0
//! The disk tier: a file or block device of this host, by direct I/O.
//!
//! ```text
//!   callers                       thread `pt-tier-disk`              kernel
//!   make_room ─► sectors, fallocate
//!   write ─────► inbox ──────────► engine ─► ring (64 entries) ─────► file
//!   read ──────► inbox ──────────►    │  ◄─── completions
//!   forget ────► sectors              └► duties are told
//! ```
//! - [`open`]: what is refused, and the header.
//! - [`engine`]: the thread; time bounds, and what happens to what is late.
//! - [`request`]: requests as the thread keeps them.
//! - [`shared`]: what callers and thread share.
//! - [`io`]: the seams to the kernel.
//!
//! # Start
//! [`DiskTier::open`] locks the disk, so that all I/O of a predecessor is done. Then every VM that the
//! predecessor left is held ([`FoundDisk::hold`]); only then can the tier begin ([`FoundDisk::begin`]), and
//! with it the first write. What no VM holds goes back to the file system. A VM that is recovered says which
//! of its pages are there ([`SlowTier::recover`]).
//!
//! # Space
//! Segments of 16 MiB are allocated by `fallocate` before they are used, up to the operator's limit and as
//! long as the file system keeps a reserve for others. So a full file system shows as [`TierError::Full`]
//! when room is made, not when a batch is written.

mod engine;
mod io;
mod open;
mod request;
mod shared;
#[cfg(test)]
mod tests;

use crate::batch::{PAGE_SECTORS_MAX, SECTOR_BYTES};
use crate::extent::{NoRoom, SEGMENT_BYTES, SectorError, Sectors, SegmentNo};
use crate::table::ExtentEntry;
use crate::{
    Batch, DiskId, ExtentName, Health, NotRecovered, Place, ReadDone, Room, SectorNo, SlowTier,
    TierError, TierFigures, TierKind, VmId, WriteDone,
};
use engine::{ENTRIES, Engine};
use io::{Geometry, Ground};
pub use open::DiskError;
use open::OpenDisk;
use pagetide_sys::file_ring::{Buffer, FileRing, RingWaker};
pub use request::Bounds;
use shared::{Inbox, READS_MAX, ReadOrder, Shared, WRITES_MAX, WriteOrder};
use std::path::{Path, PathBuf};
use std::sync::{Arc, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

/// Attempts to find room: each adds a segment, which another batch may take first.
const ROOM_TRIES: usize = 16;

/// A disk that is ours, before anything is written to it.
pub struct FoundDisk {
    path: PathBuf,
    disk: OpenDisk,
    sectors: Sectors,
    bounds: Bounds,
}

/// See the module documentation.
pub struct DiskTier {
    shared: Arc<Shared>,
    ground: Box<dyn Ground>,
    geometry: Geometry,
    clock: Box<dyn Fn() -> Instant + Send + Sync>,
    waker: RingWaker,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for DiskTier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskTier")
            .field("geometry", &self.geometry)
            .finish_non_exhaustive()
    }
}

impl FoundDisk {
    /// By what a VM's pool knows it again.
    #[must_use]
    pub fn id(&self) -> DiskId {
        self.disk.id
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
        self.sectors.hold(vm, entries)
    }

    /// Begins, once all VMs are held. Gives back what none of them has.
    ///
    /// # Errors
    /// [`DiskError::Kernel`], if there is no ring or no thread.
    pub fn begin(self) -> Result<DiskTier, DiskError> {
        let failed = |operation| {
            let path = self.path.clone();
            move |source| DiskError::Kernel {
                path,
                operation,
                source,
            }
        };
        for run in self.sectors.free_runs() {
            let bytes = u64::from(run.end.0 - run.start.0) * SEGMENT_BYTES;
            let punched = self.disk.punch(run.start.start().byte_offset(), bytes);
            punched.map_err(failed("fallocate(PUNCH_HOLE)"))?;
        }
        let geometry = Geometry {
            block: self.disk.block,
            segments: self.disk.segments,
            discard: self.disk.discard,
        };
        let limit_bytes = u64::from(self.disk.limit.0 - 1) * SEGMENT_BYTES;
        let shared = Arc::new(Shared::new(self.sectors, limit_bytes, Instant::now()));
        let file = self.disk.file.try_clone().map_err(failed("dup"))?;
        let (to_us, waker) = std::sync::mpsc::sync_channel(1);
        let run = {
            let (shared, bounds) = (Arc::clone(&shared), self.bounds);
            move || {
                // The thread that makes a ring is the one that uses it.
                let made = FileRing::new(ENTRIES, file).map(|ring| {
                    let waker = ring.waker();
                    (ring, waker)
                });
                match made {
                    Err(error) => drop(to_us.send(Err(error))),
                    Ok((ring, waker)) => {
                        drop(to_us.send(Ok(waker)));
                        Engine::new(ring, shared, geometry, bounds).run();
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("pt-tier-disk".to_owned());
        let thread = thread.spawn(run).map_err(failed("a thread"))?;
        let ended = |_| std::io::Error::other("its thread ended");
        let waker = (waker.recv().map_err(ended))
            .and_then(|made| made)
            .map_err(failed("io_uring"))?;
        Ok(DiskTier {
            shared,
            ground: Box::new(self.disk),
            geometry,
            clock: Box::new(Instant::now),
            waker,
            thread: Some(thread),
        })
    }
}

impl DiskTier {
    /// Opens and locks the file or device at `path`, of which at most `limit_bytes` are given out. A file that
    /// does not exist is created. Pages beyond a limit that was lowered stay where they are.
    ///
    /// # Errors
    /// [`DiskError`].
    pub fn open(path: &Path, limit_bytes: u64, bounds: Bounds) -> Result<FoundDisk, DiskError> {
        let disk = open::open(path, limit_bytes, bounds.lock)?;
        Ok(FoundDisk {
            path: path.to_owned(),
            sectors: Sectors::new(disk.segments, disk.limit, disk.block),
            disk,
            bounds,
        })
    }

    fn now(&self) -> Instant {
        (self.clock)()
    }

    fn give_back_segments(&self, segments: Vec<SegmentNo>) {
        if segments.is_empty() {
            return;
        }
        let mut inbox = self.shared.inbox();
        inbox.punches.extend(segments);
        self.wake(inbox);
    }

    /// Ends the adding of an order.
    fn wake(&self, inbox: MutexGuard<'_, Inbox>) {
        if self.shared.added(inbox) {
            self.waker.wake();
        }
    }

    /// Adds a segment to those of `vm`.
    fn add_segment(&self, vm: VmId) -> Result<(), TierError> {
        let full = TierError::Full(TierKind::Disk);
        let begun = self.shared.sectors().begin_segment();
        let Some(segment) = begun else {
            self.shared.note_full(self.now());
            return Err(full);
        };
        let free = self.ground.free_bytes();
        let allocated = match free {
            Ok(Some(free_bytes)) if free_bytes < SEGMENT_BYTES => {
                Err(rustix::io::Errno::NOSPC.into())
            }
            _ => (self.ground).allocate(segment.start().byte_offset(), SEGMENT_BYTES),
        };
        let mut sectors = self.shared.sectors();
        let Err(error) = allocated else {
            sectors.add_segment(vm, segment);
            return Ok(());
        };
        sectors.end_transit(segment);
        drop(sectors);
        let is_full = error.kind() == std::io::ErrorKind::StorageFull
            || error.kind() == std::io::ErrorKind::QuotaExceeded;
        if is_full {
            self.shared.note_full(self.now());
            return Err(full);
        }
        Err(TierError::Io {
            kind: TierKind::Disk,
            operation: "fallocate",
            reason: error.to_string(),
        })
    }

    fn free_room(&self, vm: VmId, room: Room) {
        self.free(vm, room.start, room.sectors);
    }

    fn free(&self, vm: VmId, start: SectorNo, sectors: u16) {
        match self.shared.free(vm, start, sectors) {
            Ok(emptied) => self.give_back_segments(emptied.into_iter().collect()),
            // Sectors that are lost until the VM is recovered the next time, not pages.
            Err(error) => {
                tracing::error!(%error, %vm, "a page of the disk tier could not be forgotten")
            }
        }
    }

    /// Where the sectors of a place are, if they are on this disk.
    fn sectors_of(&self, place: &Place) -> Option<(u64, usize)> {
        let first = place.start.0.checked_add(u64::from(place.position.0))?;
        let end = first.checked_add(u64::from(place.sectors))?;
        let segment_sectors = SEGMENT_BYTES / SECTOR_BYTES as u64;
        let is_there = end <= u64::from(self.geometry.segments) * segment_sectors
            && (1..=PAGE_SECTORS_MAX).contains(&place.sectors);
        is_there.then_some((
            first * SECTOR_BYTES as u64,
            usize::from(place.sectors) * SECTOR_BYTES,
        ))
    }

    fn end(&mut self) {
        let mut inbox = self.shared.inbox();
        inbox.over = true;
        self.wake(inbox);
        let thread = self.thread.take();
        // The last owner may be a duty that the thread itself tells. It ends by itself then.
        let thread = thread.filter(|it| it.thread().id() != std::thread::current().id());
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of the disk tier panicked");
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
        for _ in 0..ROOM_TRIES {
            let taken = self.shared.sectors().take(vm, &pages);
            match taken {
                Ok(rooms) => return Ok(rooms),
                Err(NoRoom::Impossible) => return Err(impossible),
                Err(NoRoom::Segment) => self.add_segment(vm)?,
                Err(NoRoom::Full) => break,
            }
        }
        self.shared.note_full(self.now());
        Err(TierError::Full(TierKind::Disk))
    }

    fn give_back(&self, vm: VmId, room: Room) {
        self.free_room(vm, room);
    }

    fn write(&self, batch: Batch, done: WriteDone) {
        let (vm, room) = (batch.extent().vm, batch.room());
        let mut buffer = Buffer::zeroed(
            batch
                .bytes()
                .len()
                .next_multiple_of(self.geometry.block.bytes()),
        );
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
                self.wake(inbox);
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
        let Some((start, bytes)) = self.sectors_of(&place) else {
            return done.tell(Err(TierError::NotThere(TierKind::Disk)));
        };
        let block = self.geometry.block.bytes() as u64;
        let offset = start - start % block;
        let skipped = usize::try_from(start - offset).unwrap_or(0);
        let order = ReadOrder {
            offset,
            buffer: Buffer::zeroed((skipped + bytes).next_multiple_of(self.geometry.block.bytes())),
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
                return self.wake(inbox);
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
        self.give_back_segments(empty);
        Ok(())
    }

    fn forget_vm(&self, vm: VmId, _: &[ExtentName]) {
        let segments = self.shared.sectors().end_vm(vm);
        self.give_back_segments(segments);
    }

    fn health(&self) -> Health {
        self.shared.health(self.now())
    }

    fn figures(&self) -> TierFigures {
        self.shared.figures()
    }
}
