// SPDX-License-Identifier: Apache-2.0
//! The disk tier over a simulated ring and file system, with faults, and over a real file.
#![expect(clippy::cast_possible_truncation, reason = "random numbers are cut")]

use super::engine::{self, ENTRIES, Engine};
use super::io::{Discard, Ground, Io, Tag};
use super::*;
use crate::bitmap::BlockSize;
use crate::health::{FAILED_WRITES_MAX, PROBE_INTERVAL, RECOVERY_PROBES};
use crate::{ExtentNo, Standing, Version};
use pagetide_random::SplitMix64;
use pagetide_sys::file_ring::{Completed, FileRing, NotStarted, Operation, Transfer};
use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

mod real;

const VM: VmId = VmId(5);
const BOUNDS: Bounds = Bounds {
    read: Duration::from_millis(100),
    lost: Duration::from_secs(3),
    write: Duration::from_millis(500),
    lock: Duration::from_secs(10),
};

/// What the simulated disk does with a transfer.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Done,
    /// It moves so many bytes only.
    Short(usize),
    Fails(rustix::io::Errno),
}

/// A disk in memory, on which nothing happens until the test says so.
#[derive(Default)]
struct Simulated {
    sectors: HashMap<u64, [u8; SECTOR_BYTES]>,
    in_ring: Vec<Transfer<Tag>>,
    done: VecDeque<Completed<Tag>>,
}

#[derive(Clone, Default)]
struct SimulatedIo(Arc<Mutex<Simulated>>);

impl SimulatedIo {
    fn disk(&self) -> std::sync::MutexGuard<'_, Simulated> {
        self.0.lock().unwrap()
    }

    fn in_ring(&self) -> usize {
        self.disk().in_ring.len()
    }

    fn tags(&self) -> Vec<Tag> {
        self.disk()
            .in_ring
            .iter()
            .map(|transfer| transfer.tag)
            .collect()
    }

    /// Ends the transfer at this place in the ring.
    fn end(&self, index: usize, fate: Fate) {
        let mut disk = self.disk();
        let mut transfer = disk.in_ring.remove(index);
        let part = transfer.part.clone();
        let moved = match fate {
            Fate::Done => part.len(),
            Fate::Short(bytes) => bytes.min(part.len()),
            Fate::Fails(_) => 0,
        };
        let first = transfer.offset / SECTOR_BYTES as u64;
        assert!(transfer.offset.is_multiple_of(SECTOR_BYTES as u64));
        let memory = &mut transfer.buffer[part.start..part.start + moved];
        for (sector, bytes) in (first..).zip(memory.chunks_mut(SECTOR_BYTES)) {
            match transfer.operation {
                Operation::Read => {
                    let stored = disk.sectors.get(&sector).unwrap_or(&[0; SECTOR_BYTES]);
                    bytes.copy_from_slice(&stored[..bytes.len()]);
                }
                _ => {
                    let stored = disk.sectors.entry(sector).or_insert([0; SECTOR_BYTES]);
                    stored[..bytes.len()].copy_from_slice(bytes);
                }
            }
        }
        let result = match fate {
            Fate::Fails(error) => Err(error.into()),
            _ => Ok(moved),
        };
        disk.done.push_back(Completed { transfer, result });
    }

    fn end_all(&self) {
        while self.in_ring() > 0 {
            self.end(0, Fate::Done);
        }
    }
}

impl Io for SimulatedIo {
    fn start(&mut self, transfer: Transfer<Tag>) -> Result<(), NotStarted<Tag>> {
        let mut disk = self.disk();
        if disk.in_ring.len() == usize::from(ENTRIES) {
            return Err(NotStarted::NoEntry(transfer));
        }
        disk.in_ring.push(transfer);
        Ok(())
    }

    fn wait(&mut self, _: Duration) -> std::io::Result<()> {
        Err(rustix::io::Errno::IO.into())
    }

    fn next_done(&mut self) -> Option<Completed<Tag>> {
        self.disk().done.pop_front()
    }
}

/// A file system with so many bytes free.
struct SimulatedGround(Arc<AtomicU64>);

impl Ground for SimulatedGround {
    fn allocate(&self, _: u64, bytes: u64) -> std::io::Result<()> {
        let taken = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| {
                free.checked_sub(bytes)
            });
        taken.map(drop).map_err(|_| rustix::io::Errno::NOSPC.into())
    }

    fn free_bytes(&self) -> std::io::Result<Option<u64>> {
        // What this says may be old by the time of the allocation.
        Ok(Some(u64::MAX))
    }
}

type Told<T> = Arc<Mutex<Option<Result<T, TierError>>>>;

fn told<T>(told: &Told<T>) -> Option<Result<T, TierError>> {
    told.lock().unwrap().take()
}

fn duty<T: Send + 'static>() -> (crate::tier::Done<T>, Told<T>) {
    let answer = Told::default();
    let duty = crate::tier::Done::new(TierKind::Disk, {
        let answer = Arc::clone(&answer);
        move |result| {
            let before = answer.lock().unwrap().replace(result);
            assert!(before.is_none(), "told twice");
        }
    });
    (duty, answer)
}

/// A tier whose thread is the test.
struct Rig {
    tier: DiskTier,
    engine: Engine<SimulatedIo>,
    io: SimulatedIo,
    ground: SimulatedGround,
    free_bytes: Arc<AtomicU64>,
    clock: Arc<Mutex<Instant>>,
    version: u64,
}

impl Rig {
    fn new(block: BlockSize, discard: Discard) -> Self {
        let geometry = Geometry {
            block,
            segments: 5,
            discard,
        };
        let now = Instant::now();
        let clock = Arc::new(Mutex::new(now));
        let sectors = Sectors::new(geometry.segments, SegmentNo(geometry.segments), block);
        let shared = Arc::new(Shared::new(sectors, 4 * SEGMENT_BYTES, now));
        let ring: FileRing<()> = FileRing::new(1, tempfile::tempfile().unwrap().into()).unwrap();
        shared.opened(geometry, ring.waker(), 4 * SEGMENT_BYTES);
        let io = SimulatedIo::default();
        let free_bytes = Arc::new(AtomicU64::new(u64::MAX));
        Self {
            engine: Engine::new(io.clone(), Arc::clone(&shared), geometry, BOUNDS),
            tier: DiskTier {
                path: "/dev/null".into(),
                shared,
                space: Arc::default(),
                bounds: BOUNDS,
                clock: Box::new({
                    let clock = Arc::clone(&clock);
                    move || *clock.lock().unwrap()
                }),
                thread: None,
                ends: Mutex::new(sync_channel(0).1),
            },
            io,
            ground: SimulatedGround(Arc::clone(&free_bytes)),
            free_bytes,
            clock,
            version: 0,
        }
    }

    fn file() -> Self {
        Self::new(BlockSize::Bytes512, Discard::Punch)
    }

    fn turn(&mut self) -> Duration {
        self.engine.turn(self.tier.now())
    }

    fn pass(&mut self, time: Duration) -> Duration {
        *self.clock.lock().unwrap() += time;
        self.turn()
    }

    /// Segments that are ordered are allocated at once.
    fn room(&self, vm: VmId, bytes: &[usize]) -> Result<Vec<Room>, TierError> {
        loop {
            match self.tier.make_room(vm, bytes) {
                Err(TierError::Busy(_)) => self.allocate(),
                made => return made,
            }
        }
    }

    fn allocate(&self) {
        let clock = || *self.clock.lock().unwrap();
        let (space, shared) = (&self.tier.space, &self.tier.shared);
        space.allocate_next(shared, &self.ground, clock);
    }

    /// A batch with these pages, in one extent.
    fn batch(&mut self, pages: &[Vec<u8>]) -> (Batch, Vec<Place>) {
        let bytes: Vec<usize> = pages.iter().map(Vec::len).collect();
        let rooms = self.room(VM, &bytes).unwrap();
        assert_eq!(rooms.len(), 1);
        self.version += 1;
        let extent = ExtentName {
            vm: VM,
            number: ExtentNo(1),
            version: Version(self.version),
        };
        let mut batch = Batch::new(extent, rooms[0]);
        let places = pages.iter().map(|page| batch.push(page).unwrap()).collect();
        (batch, places)
    }

    fn write(&mut self, pages: &[Vec<u8>]) -> (Vec<Place>, Told<()>) {
        let (batch, places) = self.batch(pages);
        let (done, answer) = duty();
        self.tier.write(batch, done);
        self.turn();
        (places, answer)
    }

    fn stored(&mut self, pages: &[Vec<u8>]) -> Vec<Place> {
        let (places, answer) = self.write(pages);
        self.io.end_all();
        self.turn();
        assert_eq!(told(&answer), Some(Ok(())));
        places
    }

    fn read(&mut self, place: Place) -> Told<Vec<u8>> {
        let (done, answer) = duty();
        self.tier.read(place, done);
        self.turn();
        answer
    }

    /// Ends all that is in the ring, with a turn after each, until nothing more comes.
    fn settle(&mut self) {
        self.turn();
        while self.io.in_ring() > 0 {
            self.io.end(0, Fate::Done);
            self.turn();
        }
    }

    fn standing(&self) -> Standing {
        self.tier.health().standing
    }

    fn recover_by_probes(&mut self) {
        for _ in 0..RECOVERY_PROBES {
            assert_ne!(self.standing(), Standing::Working);
            self.pass(PROBE_INTERVAL);
            self.settle();
        }
        assert_eq!(self.standing(), Standing::Working);
    }
}

fn pages(seed: u64, sectors: &[usize]) -> Vec<Vec<u8>> {
    let mut random = SplitMix64::new(seed);
    let page = |sectors: &usize| {
        (0..sectors * SECTOR_BYTES)
            .map(|_| random.next_u64() as u8)
            .collect()
    };
    sectors.iter().map(page).collect()
}

#[test]
fn pages_come_back_whatever_the_order_of_completions() {
    for block in [BlockSize::Bytes512, BlockSize::Bytes4096] {
        let mut rig = Rig::new(block, Discard::Punch);
        let content = pages(1, &[1, 9, 3, 16, 2, 8, 7]);
        let places = rig.stored(&content);
        let answers: Vec<_> = places.iter().map(|place| rig.read(*place)).collect();
        for index in [4, 0, 4, 1, 2, 1, 0] {
            rig.io.end(index, Fate::Done);
            rig.turn();
        }
        for (answer, page) in answers.iter().zip(&content) {
            assert_eq!(told(answer).unwrap().unwrap(), *page);
        }
        let figures = rig.tier.figures();
        assert_eq!((figures.pages_written, figures.batches_written), (7, 1));
        assert_eq!((figures.pages_read, figures.read_bytes), (7, 46 * 512));
        assert_eq!(
            (figures.stored_bytes, figures.read_latency.count),
            (46 * 512, 7)
        );
        rig.tier.forget(&places);
        assert_eq!(rig.tier.figures().stored_bytes, 0);
    }
}

#[test]
fn short_transfers_go_on_where_they_ended() {
    let mut rig = Rig::file();
    let content = pages(2, &[9, 8, 16]);
    let (places, answer) = rig.write(&content);
    for moved in [512, 700, 5000, 1024] {
        assert_eq!(told(&answer), None);
        rig.io.end(0, Fate::Short(moved));
        rig.turn();
    }
    rig.settle();
    assert_eq!(told(&answer), Some(Ok(())));
    for (place, page) in places.iter().zip(&content) {
        let answer = rig.read(*place);
        rig.io.end(0, Fate::Short(1500));
        rig.turn();
        rig.settle();
        assert_eq!(told(&answer).unwrap().unwrap(), *page);
    }
    // Less than a block, or nothing at all, is no progress.
    let answer = rig.read(places[0]);
    rig.io.end(0, Fate::Short(100));
    rig.turn();
    assert!(matches!(told(&answer), Some(Err(TierError::Io { .. }))));
    let answer = rig.read(places[0]);
    rig.io.end(0, Fate::Short(0));
    rig.turn();
    assert_eq!(
        told(&answer),
        Some(Err(TierError::NotThere(TierKind::Disk)))
    );
    let (_, answer) = rig.write(&content);
    rig.io.end(0, Fate::Short(0));
    rig.turn();
    assert!(matches!(told(&answer), Some(Err(TierError::Io { .. }))));
    assert_eq!(rig.tier.figures().stored_bytes, 33 * 512);
}

#[test]
fn bad_sector_is_an_error_of_its_page_and_a_lost_device_of_the_tier() {
    let mut rig = Rig::file();
    let places = rig.stored(&pages(3, &[8]));
    for _ in 0..5 {
        let answer = rig.read(places[0]);
        rig.io.end(0, Fate::Fails(rustix::io::Errno::IO));
        rig.turn();
        assert!(matches!(told(&answer), Some(Err(TierError::Io { .. }))));
        assert_eq!(rig.standing(), Standing::Working);
    }
    let answer = rig.read(places[0]);
    rig.io.end(0, Fate::Fails(rustix::io::Errno::NXIO));
    rig.turn();
    assert!(told(&answer).unwrap().unwrap_err().may_pass());
    assert!(matches!(rig.standing(), Standing::Gone { .. }));
    assert!(matches!(rig.room(VM, &[512]), Err(TierError::Gone { .. })));
    // Reads are tried all the same.
    let answer = rig.read(places[0]);
    rig.settle();
    assert!(told(&answer).unwrap().is_ok());
    rig.recover_by_probes();
    assert_eq!(rig.tier.figures().read_errors, 6);
}

#[test]
fn writes_that_fail_end_the_tier_and_free_their_room_and_probes_bring_it_back() {
    let mut rig = Rig::file();
    for attempt in 1..=FAILED_WRITES_MAX {
        assert_eq!(rig.standing(), Standing::Working);
        let (_, answer) = rig.write(&pages(4, &[8, 8]));
        rig.io.end(0, Fate::Fails(rustix::io::Errno::IO));
        rig.turn();
        let error = told(&answer).unwrap().unwrap_err();
        let is_last = attempt == FAILED_WRITES_MAX;
        assert_eq!(matches!(error, TierError::Gone { .. }), is_last);
        assert_eq!(rig.tier.figures().stored_bytes, 0);
    }
    // A probe that fails, and one that returns other bytes, start the row anew.
    rig.pass(PROBE_INTERVAL);
    rig.settle();
    rig.pass(PROBE_INTERVAL);
    assert_eq!(rig.io.tags(), [Tag::ProbeWrite]);
    rig.io.end(0, Fate::Fails(rustix::io::Errno::IO));
    rig.turn();
    rig.pass(PROBE_INTERVAL);
    rig.io.end(0, Fate::Done);
    rig.turn();
    assert_eq!(rig.io.tags(), [Tag::ProbeRead]);
    rig.io.disk().sectors.clear();
    rig.settle();
    rig.recover_by_probes();
    rig.stored(&pages(4, &[8]));
}

#[test]
fn disk_without_space_is_full_until_something_is_freed() {
    let mut rig = Rig::file();
    let places = rig.stored(&pages(5, &[8; 400]));
    let (_, answer) = rig.write(&pages(5, &[8]));
    rig.io.end(0, Fate::Fails(rustix::io::Errno::NOSPC));
    rig.turn();
    let full = Err(TierError::Full(TierKind::Disk));
    assert_eq!(told(&answer), Some(full.clone()));
    assert_eq!(rig.standing(), Standing::Full);
    assert_eq!(rig.room(VM, &[512]).map(drop), full);
    let answer = rig.read(places[0]);
    rig.settle();
    assert!(told(&answer).unwrap().is_ok(), "reads work");
    rig.tier.forget(&places[..256]);
    assert_eq!(rig.standing(), Standing::Working);
    rig.stored(&pages(5, &[8]));
    // Others may have freed something: after a time it is tried again.
    let (_, answer) = rig.write(&pages(5, &[8]));
    rig.io.end(0, Fate::Fails(rustix::io::Errno::NOSPC));
    rig.turn();
    assert!(told(&answer).unwrap().is_err());
    assert_eq!(rig.standing(), Standing::Full);
    rig.pass(Duration::from_secs(11));
    assert_eq!(rig.standing(), Standing::Working);
}

#[test]
fn space_that_cannot_be_allocated_is_told_when_room_is_made() {
    let mut rig = Rig::file();
    rig.free_bytes.store(2 * SEGMENT_BYTES, Ordering::Relaxed);
    let mut batches = 0;
    let full = loop {
        match rig.room(VM, &[4096; 512]) {
            Ok(rooms) => batches += rooms.len(),
            Err(error) => break error,
        }
    };
    assert_eq!((batches, full), (16, TierError::Full(TierKind::Disk)));
    assert_eq!(rig.standing(), Standing::Full);
    rig.tier.forget_vm(VM, &[]);
    rig.turn();
    assert_eq!(rig.io.in_ring(), 2, "segments are given back");
    rig.free_bytes.store(SEGMENT_BYTES, Ordering::Relaxed);
    rig.settle();
    assert_eq!(rig.standing(), Standing::Working);
    assert_eq!(rig.room(VM, &[4096; 512]).unwrap().len(), 1);
}

#[test]
fn read_that_is_late_makes_the_tier_slow_and_is_told_when_it_is_done() {
    let mut rig = Rig::file();
    let content = pages(6, &[8, 8]);
    let places = rig.stored(&content);
    let answer = rig.read(places[0]);
    let left = rig.pass(Duration::from_millis(60));
    assert_eq!((left, told(&answer)), (Duration::from_millis(40), None));
    rig.pass(left);
    assert_eq!(told(&answer), None);
    let slow = TierError::Slow {
        kind: TierKind::Disk,
        bound_ms: 100,
    };
    assert_eq!(rig.standing(), Standing::Slow { bound_ms: 100 });
    assert_eq!(rig.room(VM, &[512]).map(drop), Err(slow));
    assert_eq!(rig.tier.figures().overdue, 1);
    rig.pass(Duration::from_secs(2));
    assert_eq!(told(&answer), None);
    rig.io.end(0, Fate::Done);
    rig.settle();
    assert_eq!(told(&answer).unwrap().unwrap(), content[0]);
    while rig.standing() != Standing::Working {
        rig.pass(PROBE_INTERVAL);
        rig.settle();
    }
    let answer = rig.read(places[1]);
    rig.settle();
    assert_eq!(told(&answer).unwrap().unwrap(), content[1]);
    assert_eq!(rig.tier.shared.inbox().open_reads, 0);
    assert_eq!(rig.tier.figures().read_errors, 0);
}

#[test]
fn read_that_is_never_done_is_told_gone_and_one_that_asks_again_gets_its_answer() {
    let mut rig = Rig::file();
    let content = pages(6, &[8, 8]);
    let places = rig.stored(&content);
    let answer = rig.read(places[0]);
    rig.pass(BOUNDS.read);
    rig.pass(BOUNDS.lost - BOUNDS.read - Duration::from_millis(1));
    assert_eq!(told(&answer), None);
    rig.pass(Duration::from_millis(1));
    let error = told(&answer).unwrap().unwrap_err();
    assert!(matches!(error, TierError::Gone { .. }), "{error}");
    assert!(matches!(rig.standing(), Standing::Gone { .. }));
    // It is asked for again and again, and read once.
    let reads = |rig: &Rig| {
        let is_read = |tag: &&Tag| matches!(tag, Tag::Read(_));
        rig.io.tags().iter().filter(is_read).count()
    };
    for _ in 0..3 {
        let answer = rig.read(places[0]);
        rig.pass(BOUNDS.read);
        let gone = told(&answer).unwrap();
        assert!(matches!(gone, Err(TierError::Gone { .. })), "{gone:?}");
        assert_eq!((reads(&rig), rig.tier.shared.inbox().open_reads), (1, 1));
    }
    let again = rig.read(places[0]);
    rig.settle();
    assert_eq!(told(&again).unwrap().unwrap(), content[0]);
    assert_eq!(rig.tier.shared.inbox().open_reads, 0);
    // A late one does not wait for its own bound once the disk is known to be gone.
    let (late, lost) = (rig.read(places[0]), rig.read(places[1]));
    rig.pass(BOUNDS.read);
    rig.io
        .end(reads(&rig) - 1, Fate::Fails(rustix::io::Errno::NODEV));
    rig.turn();
    for answer in [late, lost] {
        assert!(matches!(told(&answer), Some(Err(TierError::Gone { .. }))));
    }
    rig.settle();
    assert_eq!(rig.tier.shared.inbox().open_reads, 0);
}

#[test]
fn whoever_makes_room_does_not_wait_for_a_segment_to_be_allocated() {
    let rig = Rig::file();
    let busy = Err(TierError::Busy(TierKind::Disk));
    for _ in 0..3 {
        assert_eq!(rig.tier.make_room(VM, &[4096]).map(drop), busy);
    }
    let free_bytes = rig.free_bytes.load(Ordering::Relaxed);
    assert_eq!(free_bytes, u64::MAX, "nothing is allocated in the call");
    rig.allocate();
    assert_eq!(rig.tier.make_room(VM, &[4096; 512]).unwrap().len(), 1);
    assert!(
        !rig.tier.space.is_ordered(VM),
        "three asked for one segment"
    );
}

#[test]
fn segment_that_comes_when_its_vm_has_ended_is_given_back() {
    let mut rig = Rig::file();
    let other = VmId(6);
    assert!(rig.tier.make_room(other, &[4096]).is_err());
    rig.tier.forget_vm(other, &[]);
    assert!(!rig.tier.space.is_ordered(other), "it was not begun");
    assert!(rig.tier.make_room(other, &[4096]).is_err());
    let ending = Ending {
        tier: &rig.tier,
        ground: &rig.ground,
        vm: other,
    };
    let clock = || rig.tier.now();
    (rig.tier.space).allocate_next(&rig.tier.shared, &ending, clock);
    assert_eq!(rig.tier.shared.sectors().segments_of(other), 0);
    rig.settle();
    let free = rig.tier.shared.sectors().free_runs();
    assert_eq!(free, [SegmentNo(1)..SegmentNo(5)]);
}

/// The VM ends while its segment is allocated.
struct Ending<'a> {
    tier: &'a DiskTier,
    ground: &'a SimulatedGround,
    vm: VmId,
}

impl Ground for Ending<'_> {
    fn allocate(&self, offset: u64, bytes: u64) -> std::io::Result<()> {
        self.tier.forget_vm(self.vm, &[]);
        self.ground.allocate(offset, bytes)
    }

    fn free_bytes(&self) -> std::io::Result<Option<u64>> {
        Ok(None)
    }
}

/// Each allocation takes so long, and ends so.
struct Slowly<'a> {
    tier: &'a DiskTier,
    clock: &'a Mutex<Instant>,
    time: Duration,
    ends: rustix::io::Errno,
    asked: Mutex<Vec<TierError>>,
}

impl Ground for Slowly<'_> {
    fn allocate(&self, _: u64, _: u64) -> std::io::Result<()> {
        *self.clock.lock().unwrap() += self.time;
        let asked = self.tier.make_room(VM, &[4096]);
        self.asked.lock().unwrap().push(asked.unwrap_err());
        Err(self.ends.into())
    }

    fn free_bytes(&self) -> std::io::Result<Option<u64>> {
        Ok(None)
    }
}

#[test]
fn allocation_that_hangs_makes_the_tier_slow_and_one_that_fails_is_not_repeated_at_once() {
    let rig = Rig::file();
    let busy = TierError::Busy(TierKind::Disk);
    assert_eq!(rig.tier.make_room(VM, &[4096]).unwrap_err(), busy);
    let slowly = Slowly {
        tier: &rig.tier,
        clock: &rig.clock,
        time: BOUNDS.write,
        ends: rustix::io::Errno::IO,
        asked: Mutex::default(),
    };
    let clock = || rig.tier.now();
    (rig.tier.space).allocate_next(&rig.tier.shared, &slowly, clock);
    let asked = slowly.asked.lock().unwrap().clone();
    assert!(matches!(asked[..], [TierError::Slow { .. }]), "{asked:?}");
    assert!(matches!(rig.standing(), Standing::Slow { .. }));
    let rig = Rig::file();
    assert_eq!(rig.tier.make_room(VM, &[4096]).unwrap_err(), busy);
    let failing = Slowly {
        tier: &rig.tier,
        clock: &rig.clock,
        time: Duration::ZERO,
        ends: rustix::io::Errno::IO,
        asked: Mutex::default(),
    };
    let clock = || rig.tier.now();
    (rig.tier.space).allocate_next(&rig.tier.shared, &failing, clock);
    for _ in 0..2 {
        let error = rig.tier.make_room(VM, &[4096]).unwrap_err();
        assert!(matches!(error, TierError::Io { .. }), "{error}");
    }
    assert!(!rig.tier.space.is_ordered(VM));
    *rig.clock.lock().unwrap() += Duration::from_secs(5);
    assert_eq!(rig.tier.make_room(VM, &[4096]).unwrap_err(), busy);
    assert_eq!(rig.room(VM, &[4096]).unwrap().len(), 1);
}

/// While a segment is allocated, probes succeed again and again, and whoever needs room asks.
struct Probed<'a> {
    engine: Mutex<&'a mut Engine<SimulatedIo>>,
    tier: &'a DiskTier,
    io: &'a SimulatedIo,
    clock: &'a Mutex<Instant>,
    since: Mutex<Vec<Instant>>,
}

impl Ground for Probed<'_> {
    fn allocate(&self, _: u64, _: u64) -> std::io::Result<()> {
        *self.clock.lock().unwrap() += BOUNDS.write;
        let mut engine = self.engine.lock().unwrap();
        for _ in 0..3 * RECOVERY_PROBES {
            let room = self.tier.make_room(VM, &[4096]);
            assert!(matches!(room, Err(TierError::Slow { .. })), "{room:?}");
            *self.clock.lock().unwrap() += PROBE_INTERVAL;
            for _ in 0..3 {
                engine.turn(self.tier.now());
                self.io.end_all();
            }
            self.since.lock().unwrap().push(self.tier.health().since);
        }
        Ok(())
    }

    fn free_bytes(&self) -> std::io::Result<Option<u64>> {
        Ok(None)
    }
}

#[test]
fn tier_is_slow_as_long_as_an_allocation_hangs_though_probes_succeed() {
    let mut rig = Rig::file();
    assert!(rig.tier.make_room(VM, &[4096]).is_err());
    let probed = Probed {
        engine: Mutex::new(&mut rig.engine),
        tier: &rig.tier,
        io: &rig.io,
        clock: &rig.clock,
        since: Mutex::default(),
    };
    let clock = || rig.tier.now();
    (rig.tier.space).allocate_next(&rig.tier.shared, &probed, clock);
    let mut since = probed.since.into_inner().unwrap();
    since.dedup();
    assert_eq!(since.len(), 1, "it became slow once");
    rig.recover_by_probes();
    assert_eq!(rig.tier.make_room(VM, &[4096]).unwrap().len(), 1);
}

#[test]
fn panic_of_the_thread_is_told_to_whoever_waits_and_the_tier_is_gone() {
    let mut rig = Rig::file();
    let places = rig.stored(&pages(9, &[8, 8, 8]));
    let mine = rig.read(places[1]);
    let panics = crate::tier::Done::new(TierKind::Disk, |_| panic!("for the test"));
    rig.tier.read(places[0], panics);
    rig.turn();
    let (_, write) = rig.write(&pages(9, &[8]));
    // It waits in the inbox.
    let (done, waits) = duty();
    rig.tier.read(places[2], done);
    rig.io.end(1, Fate::Done);
    let Rig { tier, engine, .. } = rig;
    engine.run();
    let gone = |error: &TierError| matches!(error, TierError::Gone { .. });
    assert!(told(&mine).unwrap().is_err_and(|error| gone(&error)));
    assert!(told(&waits).unwrap().is_err_and(|error| gone(&error)));
    assert!(told(&write).unwrap().is_err_and(|error| gone(&error)));
    let Standing::Gone { reason } = tier.health().standing else {
        panic!("it stands otherwise");
    };
    assert!(reason.contains("for the test"), "{reason}");
    let (done, later) = duty();
    tier.read(places[1], done);
    assert!(told(&later).unwrap().is_err_and(|error| gone(&error)));
    assert!(gone(&tier.make_room(VM, &[512]).unwrap_err()));
}

#[test]
fn sectors_of_a_late_write_are_not_used_again_before_it_ends() {
    for discard in [Discard::Punch, Discard::Keep] {
        let mut rig = Rig::new(BlockSize::Bytes512, discard);
        let (places, answer) = rig.write(&pages(7, &[8, 8]));
        rig.pass(Duration::from_secs(1));
        assert!(matches!(
            told(&answer),
            Some(Err(TierError::Slow { bound_ms: 500, .. }))
        ));
        assert_eq!(rig.tier.figures().stored_bytes, 16 * 512);
        rig.tier.forget_vm(VM, &[]);
        rig.turn();
        assert!(matches!(rig.io.tags()[..], [Tag::Write(_)]));
        let held = |rig: &Rig| rig.tier.shared.sectors().free_runs();
        assert_eq!(held(&rig), [SegmentNo(2)..SegmentNo(5)]);
        rig.io.end(0, Fate::Done);
        rig.turn();
        if discard == Discard::Punch {
            assert_eq!(rig.io.tags(), [Tag::Punch(SegmentNo(1))]);
            rig.io.end(0, Fate::Fails(rustix::io::Errno::OPNOTSUPP));
            rig.turn();
        }
        assert_eq!(held(&rig), [SegmentNo(1)..SegmentNo(5)]);
        assert_eq!(rig.tier.figures().stored_bytes, 0);
        assert_eq!(rig.tier.shared.inbox().open_writes, 0);
        drop(places);
    }
}

#[test]
fn late_write_frees_its_room_though_it_succeeded() {
    let mut rig = Rig::file();
    let (_, answer) = rig.write(&pages(7, &[8]));
    // A second one waits behind it and never reaches the disk.
    let waiting: Vec<_> = (0..engine::WRITES_AT_ONCE)
        .map(|_| rig.write(&pages(7, &[8])).1)
        .collect();
    assert_eq!(rig.io.in_ring(), engine::WRITES_AT_ONCE);
    rig.pass(Duration::from_secs(1));
    assert!(told(&answer).unwrap().is_err());
    assert!(waiting.iter().all(|answer| told(answer).unwrap().is_err()));
    rig.settle();
    assert_eq!(rig.tier.figures().stored_bytes, 0);
    assert_eq!(rig.tier.shared.inbox().open_writes, 0);
}

#[test]
fn queues_are_bounded_and_reads_go_before_writes() {
    let mut rig = Rig::file();
    let places = rig.stored(&pages(8, &[8; 4]));
    let writes: Vec<_> = (0..WRITES_MAX)
        .map(|_| {
            let (batch, _) = rig.batch(&pages(8, &[8]));
            let (done, answer) = duty();
            rig.tier.write(batch, done);
            answer
        })
        .collect();
    let before = rig.tier.figures().stored_bytes;
    let (batch, _) = rig.batch(&pages(8, &[8]));
    let (done, refused) = duty();
    rig.tier.write(batch, done);
    assert_eq!(told(&refused), Some(Err(TierError::Busy(TierKind::Disk))));
    assert_eq!(rig.tier.figures().stored_bytes, before, "its room is free");
    let reads: Vec<_> = (0..READS_MAX)
        .map(|index| {
            let (done, answer) = duty();
            rig.tier.read(places[index % 4], done);
            answer
        })
        .collect();
    let (done, refused) = duty();
    rig.tier.read(places[0], done);
    assert_eq!(told(&refused), Some(Err(TierError::Busy(TierKind::Disk))));
    rig.turn();
    let tags = rig.io.tags();
    assert_eq!(tags.len(), usize::from(ENTRIES));
    assert!(tags.iter().all(|tag| matches!(tag, Tag::Read(_))));
    rig.settle();
    assert!(reads.iter().all(|answer| told(answer).unwrap().is_ok()));
    assert!(writes.iter().all(|answer| told(answer).unwrap().is_ok()));
    assert_eq!(rig.tier.figures().refused, 2);
}

#[test]
fn places_that_are_not_on_the_disk_are_not_there() {
    let mut rig = Rig::file();
    let place = rig.stored(&pages(9, &[8]))[0];
    let (mut far, mut further, mut empty, mut long) = (place, place, place, place);
    far.start = SectorNo(5 * 32_768 - 4);
    further.start = SectorNo(u64::MAX);
    empty.sectors = 0;
    long.sectors = 17;
    for nowhere in [far, further, empty, long] {
        let answer = rig.read(nowhere);
        let error = told(&answer).unwrap().unwrap_err();
        assert_eq!(error, TierError::NotThere(TierKind::Disk));
        assert!(!error.may_pass());
    }
    assert!(matches!(
        rig.room(VM, &[512, 17 * 512]),
        Err(TierError::Io { .. })
    ));
}

#[test]
fn who_waits_when_the_ring_fails_is_told_that_the_tier_is_gone() {
    let mut rig = Rig::file();
    let places = rig.stored(&pages(10, &[8]));
    let in_ring = rig.read(places[0]);
    let (done, untaken) = duty();
    rig.tier.read(places[0], done);
    // The simulated ring cannot wait: as if its descriptor was gone.
    rig.engine.run();
    for answer in [in_ring, untaken] {
        assert!(matches!(told(&answer), Some(Err(TierError::Gone { .. }))));
    }
    let (done, late) = duty();
    rig.tier.read(places[0], done);
    assert!(matches!(told(&late), Some(Err(TierError::Gone { .. }))));
    let standing = rig.tier.health().standing;
    assert!(matches!(standing, Standing::Gone { .. }), "{standing:?}");
}

/// What a random run knows of a page that was written.
struct Kept {
    place: Place,
    bytes: Vec<u8>,
}

#[test]
fn random_faults_lose_no_answer_and_invent_no_byte() {
    for seed in 0..12 {
        let mut random = SplitMix64::new(seed);
        let block = [BlockSize::Bytes512, BlockSize::Bytes4096][random.index(2)];
        let mut rig = Rig::new(block, Discard::Punch);
        let mut kept: Vec<Kept> = Vec::new();
        let mut writes: Vec<(Vec<Kept>, Told<()>)> = Vec::new();
        let mut reads: Vec<(Vec<u8>, Told<Vec<u8>>)> = Vec::new();
        for step in 0..600 {
            match random.below(10) {
                0..=1 => {
                    let sizes: Vec<usize> = (0..1 + random.index(30))
                        .map(|_| 1 + random.index(9))
                        .collect();
                    let bytes: Vec<usize> = sizes.iter().map(|size| size * 512).collect();
                    if rig.standing() == Standing::Working
                        && let Ok(rooms) = rig.room(VM, &bytes)
                    {
                        rig.tier.give_back(VM, rooms[0]);
                        let content = pages(seed * 1000 + step, &sizes);
                        let (batch, places) = rig.batch(&content);
                        let (done, answer) = duty();
                        rig.tier.write(batch, done);
                        let pages = places.into_iter().zip(content);
                        let pages = pages.map(|(place, bytes)| Kept { place, bytes }).collect();
                        writes.push((pages, answer));
                    }
                }
                2..=4 if !kept.is_empty() => {
                    let page = &kept[random.index(kept.len())];
                    let (done, answer) = duty();
                    rig.tier.read(page.place, done);
                    reads.push((page.bytes.clone(), answer));
                }
                5 if reads.is_empty() && !kept.is_empty() => {
                    let page = kept.swap_remove(random.index(kept.len()));
                    rig.tier.forget(&[page.place]);
                }
                6 => drop(rig.pass(Duration::from_millis(random.below(80)))),
                _ if rig.io.in_ring() > 0 => {
                    let fate = match random.below(8) {
                        0 => Fate::Fails(rustix::io::Errno::IO),
                        1 => Fate::Short(random.index(6000)),
                        2 if random.below(6) == 0 => Fate::Fails(rustix::io::Errno::NOSPC),
                        _ => Fate::Done,
                    };
                    rig.io.end(random.index(rig.io.in_ring()), fate);
                }
                _ => {}
            }
            rig.turn();
            collect(&mut writes, &mut reads, &mut kept);
        }
        rig.settle();
        collect(&mut writes, &mut reads, &mut kept);
        assert!(
            writes.is_empty() && reads.is_empty(),
            "seed {seed}: all are told"
        );
        assert!(!kept.is_empty());
        let stored: usize = kept.iter().map(|page| page.bytes.len()).sum();
        assert_eq!(
            rig.tier.figures().stored_bytes,
            stored as u64,
            "seed {seed}"
        );
        let inbox = rig.tier.shared.inbox();
        assert_eq!((inbox.open_reads, inbox.open_writes), (0, 0));
    }
}

fn collect(
    writes: &mut Vec<(Vec<Kept>, Told<()>)>,
    reads: &mut Vec<(Vec<u8>, Told<Vec<u8>>)>,
    kept: &mut Vec<Kept>,
) {
    writes.retain_mut(|(pages, answer)| match told(answer) {
        None => true,
        Some(result) => {
            if result.is_ok() {
                kept.append(pages);
            }
            false
        }
    });
    reads.retain(|(bytes, answer)| match told(answer) {
        None => true,
        Some(Ok(read)) => {
            assert!(read == *bytes, "other bytes than were written");
            false
        }
        Some(Err(_)) => false,
    });
}
