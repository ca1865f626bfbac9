// SPDX-License-Identifier: Apache-2.0
//! A disk tier without a disk, for tests of the crates above (feature `fake`): nothing happens until the test
//! says so, in the order that it says.
//!
//! | a test may | |
//! |---|---|
//! | end requests in any order | [`FakeDisk::finish`] |
//! | have them fail, or drop them | [`FakeDisk::fail`], [`FakeDisk::drop_request`] |
//! | let the daemon die with some writes landed | [`FakeDisk::die`], [`FakeDisk::forsake`] |
//! | flip bits | [`FakeDisk::flip`], [`FakeDisk::finish_flipped`] |
//! | answer with what stood there before | [`FakeDisk::finish_with_old`] |
//! | fill it up, take it away | [`FakeDisk::set_standing`] |
//!
//! Sectors that are freed keep what they held, and are the first to be used again: so whoever believes an old
//! place reads old bytes. Sectors that are freed twice, or used by two pages, are a panic, and so is a nonce that is
//! used twice: a version and position of a VM, over all daemons that write to the disk.

use crate::batch::SECTOR_BYTES;
use crate::{
    Batch, ExtentName, Health, NotRecovered, Place, Position, ReadDone, Room, SectorNo, SlowTier,
    Standing, TierError, TierFigures, TierKind, Version, VmId, WriteDone,
};
use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

type Sector = [u8; SECTOR_BYTES];
/// As on a disk, nothing is in segment 0.
const FIRST_SECTOR: u64 = 64;

enum Request {
    Write(Batch, WriteDone),
    Read(Place, ReadDone),
}

/// What a request is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Asked {
    /// A batch is written.
    Write,
    /// The page at this place is read.
    Read(Place),
}

/// A request of a daemon that is dead. Its duty is told that the tier is gone when this is dropped.
pub struct Forsaken(Request);

impl Forsaken {
    /// What it was.
    #[must_use]
    pub fn asked(&self) -> Asked {
        self.0.asked()
    }
}

impl Request {
    fn asked(&self) -> Asked {
        match self {
            Self::Write(..) => Asked::Write,
            Self::Read(place, _) => Asked::Read(*place),
        }
    }
}

struct State {
    sectors: BTreeMap<u64, Sector>,
    /// What stood in a sector before.
    past: BTreeMap<u64, Sector>,
    /// All nonces ever used.
    nonces: HashSet<(VmId, Version, Position)>,
    used: BTreeMap<u64, VmId>,
    sectors_max: u64,
    requests: Vec<Request>,
    standing: Standing,
    figures: TierFigures,
}

/// See the module.
pub struct FakeDisk(Mutex<State>);

impl FakeDisk {
    /// A disk with room for so many sectors.
    #[must_use]
    pub fn new(sectors_max: u64) -> Self {
        Self(Mutex::new(State {
            sectors: BTreeMap::new(),
            past: BTreeMap::new(),
            nonces: HashSet::new(),
            used: BTreeMap::new(),
            sectors_max,
            requests: Vec::new(),
            standing: Standing::Working,
            figures: TierFigures::default(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests that have not ended.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.lock().requests.len()
    }

    /// Sectors in use.
    #[must_use]
    pub fn used_sectors(&self) -> usize {
        self.lock().used.len()
    }

    /// From now on it stands so.
    pub fn set_standing(&self, standing: Standing) {
        self.lock().standing = standing;
    }

    /// Ends a request as a disk does.
    ///
    /// # Panics
    /// If there is none of this index.
    pub fn finish(&self, index: usize) {
        let mut state = self.lock();
        match state.requests.remove(index) {
            Request::Write(batch, done) => {
                state.land(&batch);
                state.figures.batches_written += 1;
                state.figures.pages_written += batch.len() as u64;
                drop(state);
                done.tell(Ok(()));
            }
            Request::Read(place, done) => {
                let bytes = state.read(&place);
                state.figures.pages_read += 1;
                drop(state);
                done.tell(Ok(bytes));
            }
        }
    }

    /// What a request is; `None` if there is none of this index.
    #[must_use]
    pub fn asked(&self, index: usize) -> Option<Asked> {
        self.lock().requests.get(index).map(Request::asked)
    }

    /// The bytes at a place.
    #[must_use]
    pub fn stored(&self, place: &Place) -> Vec<u8> {
        self.lock().read(place)
    }

    /// Nonces used so far.
    #[must_use]
    pub fn nonces(&self) -> usize {
        self.lock().nonces.len()
    }

    /// True if other bytes stood before at the place of a read.
    #[must_use]
    pub fn has_old(&self, index: usize) -> bool {
        let state = self.lock();
        match state.requests.get(index) {
            Some(Request::Read(place, _)) => state.read_old(place) != state.read(place),
            _ => false,
        }
    }

    /// Answers a read with what stood at its place before.
    ///
    /// # Panics
    /// If there is no read of this index.
    pub fn finish_with_old(&self, index: usize) {
        self.finish_with(index, |state, place| state.read_old(place));
    }

    /// Answers a read with one bit flipped.
    ///
    /// # Panics
    /// If there is no read of this index.
    pub fn finish_flipped(&self, index: usize, bit: usize) {
        self.finish_with(index, |state, place| {
            let mut bytes = state.read(place);
            let at = bit / 8 % bytes.len();
            bytes[at] ^= 1 << (bit % 8);
            bytes
        });
    }

    fn finish_with(&self, index: usize, bytes: impl FnOnce(&State, &Place) -> Vec<u8>) {
        let mut state = self.lock();
        match state.requests.remove(index) {
            Request::Read(place, done) => {
                let bytes = bytes(&state, &place);
                drop(state);
                done.tell(Ok(bytes));
            }
            Request::Write(..) => panic!("request {index} is a write"),
        }
    }

    /// The daemon is dead: of the writes under way those land that `lands` picks. The duties of all requests are
    /// returned, to be dropped where nothing of the daemon has an effect any more.
    pub fn forsake(&self, mut lands: impl FnMut() -> bool) -> Vec<Forsaken> {
        let mut state = self.lock();
        let requests = std::mem::take(&mut state.requests);
        for request in &requests {
            if let Request::Write(batch, _) = request
                && lands()
            {
                state.land(batch);
            }
        }
        requests.into_iter().map(Forsaken).collect()
    }

    /// Ends all requests, and those that follow from them, the last one first.
    pub fn finish_all(&self) {
        while let Some(last) = self.requests().checked_sub(1) {
            self.finish(last);
        }
    }

    /// Ends a request with an error.
    ///
    /// # Panics
    /// If there is none of this index.
    pub fn fail(&self, index: usize, error: TierError) {
        let mut state = self.lock();
        match state.requests.remove(index) {
            Request::Write(batch, done) => {
                state.free_room(batch.extent().vm, batch.room());
                drop(state);
                done.tell(Err(error));
            }
            Request::Read(_, done) => {
                drop(state);
                done.tell(Err(error));
            }
        }
    }

    /// Drops a request: its duty is not told.
    ///
    /// # Panics
    /// If there is none of this index.
    pub fn drop_request(&self, index: usize) {
        let mut state = self.lock();
        let request = state.requests.remove(index);
        if let Request::Write(batch, _) = &request {
            state.free_room(batch.extent().vm, batch.room());
        }
        drop(state);
        drop(request);
    }

    /// The daemon dies: nobody is told any more, and of the writes under way those land that `lands` picks,
    /// which are returned: the daemon may have entered them. Its successor recovers each VM.
    pub fn die(&self, mut lands: impl FnMut() -> bool) -> Vec<(ExtentName, Room)> {
        let mut state = self.lock();
        let mut landed = Vec::new();
        for request in std::mem::take(&mut state.requests) {
            match request {
                Request::Write(batch, done) => {
                    if lands() {
                        state.land(&batch);
                        landed.push((batch.extent(), batch.room()));
                    }
                    std::mem::forget(done);
                }
                Request::Read(_, done) => std::mem::forget(done),
            }
        }
        landed
    }

    /// Flips a bit of a sector in use, `at` counted over all of them; false if none is.
    pub fn flip(&self, at: usize) -> bool {
        let mut state = self.lock();
        let used: Vec<u64> = state.used.keys().copied().collect();
        let Some(sector) = used.get(at % used.len().max(1)) else {
            return false;
        };
        let Some(bytes) = state.sectors.get_mut(sector) else {
            return false;
        };
        bytes[at % SECTOR_BYTES] ^= 1 << (at % 8);
        true
    }
}

impl State {
    fn land(&mut self, batch: &Batch) {
        let start = batch.room().start.0;
        for (sector, bytes) in (start..).zip(batch.bytes().chunks(SECTOR_BYTES)) {
            let mut whole = [0; SECTOR_BYTES];
            whole[..bytes.len()].copy_from_slice(bytes);
            if let Some(before) = self.sectors.insert(sector, whole) {
                self.past.insert(sector, before);
            }
        }
    }

    fn read(&self, place: &Place) -> Vec<u8> {
        let first = place.start.0 + u64::from(place.position.0);
        let sectors = first..first + u64::from(place.sectors);
        let bytes = |sector| self.sectors.get(&sector).copied();
        sectors
            .flat_map(|sector| bytes(sector).unwrap_or([0; SECTOR_BYTES]))
            .collect()
    }

    fn read_old(&self, place: &Place) -> Vec<u8> {
        let first = place.start.0 + u64::from(place.position.0);
        let sectors = first..first + u64::from(place.sectors);
        let bytes = |sector| {
            self.past
                .get(&sector)
                .or(self.sectors.get(&sector))
                .copied()
        };
        sectors
            .flat_map(|sector| bytes(sector).unwrap_or([0; SECTOR_BYTES]))
            .collect()
    }

    fn take(&mut self, vm: VmId, start: u64, sectors: u64) {
        for sector in start..start + sectors {
            let before = self.used.insert(sector, vm);
            assert_eq!(before, None, "sector {sector} is used by two pages");
        }
    }

    fn free(&mut self, vm: VmId, start: u64, sectors: u64) {
        for sector in start..start + sectors {
            let before = self.used.remove(&sector);
            assert_eq!(before, Some(vm), "sector {sector} is freed twice");
        }
    }

    fn free_room(&mut self, vm: VmId, room: Room) {
        self.free(vm, room.start.0, room.sectors.into());
    }

    /// The first run of free sectors.
    fn free_run(&self, sectors: u64) -> Option<u64> {
        let mut start = FIRST_SECTOR;
        for used in self.used.keys() {
            if used - start >= sectors {
                break;
            }
            start = used + 1;
        }
        (start + sectors <= FIRST_SECTOR + self.sectors_max).then_some(start)
    }
}

impl SlowTier for FakeDisk {
    fn kind(&self) -> TierKind {
        TierKind::Disk
    }

    fn granule_bytes(&self) -> usize {
        SECTOR_BYTES
    }

    /// Two rooms for a large batch, so that stores see both.
    fn make_room(&self, vm: VmId, sealed_bytes: &[usize]) -> Result<Vec<Room>, TierError> {
        let mut state = self.lock();
        let health = Health {
            standing: state.standing.clone(),
            since: Instant::now(),
        };
        if let Some(refusal) = health.refusal(TierKind::Disk) {
            return Err(refusal);
        }
        let parts = match sealed_bytes.len() {
            0..8 => vec![sealed_bytes],
            pages => {
                let (first, rest) = sealed_bytes.split_at(pages / 3);
                vec![first, rest]
            }
        };
        let mut rooms: Vec<Room> = Vec::new();
        for part in parts {
            let bytes: usize = part.iter().sum();
            let sectors = (bytes / SECTOR_BYTES) as u64;
            let Some(start) = state.free_run(sectors) else {
                for room in rooms {
                    state.free_room(vm, room);
                }
                return Err(TierError::Full(TierKind::Disk));
            };
            state.take(vm, start, sectors);
            rooms.push(Room {
                kind: TierKind::Disk,
                start: SectorNo(start),
                sectors: u16::try_from(sectors).unwrap_or(u16::MAX),
                pages: u16::try_from(part.len()).unwrap_or(u16::MAX),
            });
        }
        Ok(rooms)
    }

    fn give_back(&self, vm: VmId, room: Room) {
        self.lock().free_room(vm, room);
    }

    fn write(&self, batch: Batch, done: WriteDone) {
        let mut state = self.lock();
        let extent = batch.extent();
        for page in batch.pages() {
            let is_new = (state.nonces).insert((extent.vm, extent.version, page.position));
            assert!(
                is_new,
                "{extent:?} uses the nonce of {:?} again",
                page.position
            );
        }
        state.requests.push(Request::Write(batch, done));
    }

    fn read(&self, place: Place, done: ReadDone) {
        self.lock().requests.push(Request::Read(place, done));
    }

    fn forget(&self, places: &[Place]) {
        let mut state = self.lock();
        for place in places {
            let start = place.start.0 + u64::from(place.position.0);
            state.free(place.extent.vm, start, place.sectors.into());
        }
    }

    fn recover(&self, vm: VmId, places: &[Place]) -> Result<(), NotRecovered> {
        let mut state = self.lock();
        state.used.retain(|_, owner| *owner != vm);
        let mut seen = BTreeSet::new();
        for place in places {
            let start = place.start.0 + u64::from(place.position.0);
            if !seen.insert(start) {
                return Err(NotRecovered {
                    kind: TierKind::Disk,
                    why: format!("sector {start} is used by two pages"),
                });
            }
            state.take(vm, start, place.sectors.into());
        }
        Ok(())
    }

    fn forget_vm(&self, vm: VmId, _: &[ExtentName]) {
        self.lock().used.retain(|_, owner| *owner != vm);
    }

    fn health(&self) -> Health {
        Health {
            standing: self.lock().standing.clone(),
            since: Instant::now(),
        }
    }

    fn figures(&self) -> TierFigures {
        let state = self.lock();
        TierFigures {
            limit_bytes: state.sectors_max * SECTOR_BYTES as u64,
            stored_bytes: (state.used.len() * SECTOR_BYTES) as u64,
            ..state.figures
        }
    }
}
