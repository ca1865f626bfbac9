// SPDX-License-Identifier: Apache-2.0
//! The slow tier: a disk that outlives daemons, under the real way down and up.
//!
//! What it is asked it does when the run says so, in any order. In runs with trouble it fails, is gone and back,
//! drops requests, and answers with bytes that stood there before or with a bit flipped: a page whose load got
//! [`WRONG_MAX`] such answers may be lost, and no other. A dead daemon's writes land, or do not. That no nonce is used twice, over all daemons of a run,
//! the disk itself asserts ([`FakeDisk`]).

use crate::{
    content::Stamps,
    daemon::{Between, Daemon, Task},
    kernel::{Call, Life},
    knobs::Slow,
    state::{Frame, State},
};
use pagetide_addr::PageNo;
use pagetide_gmem::{Content, PagedMemory};
use pagetide_swap::{
    ChainStore, Counter, Pool, PoolStore, Sinker, SlowTiers,
    slow::{Seat, SinkStop, WRONG_MAX, WhenGone, Which},
    tier::{Form, InSlow, Located, PAGE, unpack},
};
use pagetide_tiers::{
    Batch, DiskId, ExtentName, ExtentNo, Health, NotRecovered, Place, Position, ReadDone, Room,
    SlowTier, TierError, TierFigures, TierKind, VmId, WriteDone,
    fake::{Asked, FakeDisk},
    seal::Sealer,
};
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, atomic::Ordering::Relaxed},
};

/// So few that the disk is full now and then.
pub const SECTORS: u64 = 400;
const DISK: DiskId = DiskId(7);

/// Places that words name.
pub type SlowPlaces = BTreeSet<(ExtentNo, Position)>;

/// How a request ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RequestEnd {
    /// As it should.
    Done,
    /// A read, with what stood there before.
    Old,
    /// A read, with this bit flipped.
    Flipped(usize),
    /// The tier is gone.
    Gone,
    /// It takes too long, and nothing more is known of it.
    Slow,
    /// There are too many requests.
    Busy,
    /// This one failed.
    Failed,
    /// There is no space.
    Full,
    /// Nobody tells how it ended.
    Dropped,
}

impl RequestEnd {
    fn error(self) -> Option<TierError> {
        let kind = TierKind::Disk;
        let text = || "injected".to_owned();
        match self {
            Self::Gone => Some(TierError::Gone {
                kind,
                reason: text(),
            }),
            Self::Slow => Some(TierError::Slow { kind, bound_ms: 1 }),
            Self::Busy => Some(TierError::Busy(kind)),
            Self::Full => Some(TierError::Full(kind)),
            Self::Failed => Some(TierError::Io {
                kind,
                operation: "it",
                reason: text(),
            }),
            Self::Done | Self::Old | Self::Flipped(_) | Self::Dropped => None,
        }
    }
}

fn at(place: &Place) -> (u32, u32) {
    (place.extent.number.0, place.position.0)
}

impl State {
    /// Something is under way in the slow tier.
    pub fn has_slow_work(&self) -> bool {
        self.disk.requests() > 0 || self.slow_waiting > 0
    }

    /// A load is under way, or a batch.
    pub fn has_loads(&self) -> bool {
        !self.loads.is_empty() || self.has_slow_work()
    }

    fn end_of(&mut self, asked: Asked) -> RequestEnd {
        if self.knobs.slow != Slow::Troubled {
            return RequestEnd::Done;
        }
        let bit = self.random.index(1 << 16);
        // Where one answer is wrong, more are.
        if let Asked::Read(place) = asked
            && self.slow_wrong.contains_key(&at(&place))
            && self.random.below(8) > 0
        {
            let old = self.random.below(8) == 0;
            return if old {
                RequestEnd::Old
            } else {
                RequestEnd::Flipped(bit)
            };
        }
        if self.random.below(3) > 0 {
            return RequestEnd::Done;
        }
        let (reads, writes) = (
            [
                RequestEnd::Old,
                RequestEnd::Old,
                RequestEnd::Flipped(bit),
                RequestEnd::Gone,
                RequestEnd::Slow,
                RequestEnd::Busy,
                RequestEnd::Failed,
                RequestEnd::Dropped,
            ],
            [
                RequestEnd::Full,
                RequestEnd::Gone,
                RequestEnd::Slow,
                RequestEnd::Failed,
                RequestEnd::Dropped,
            ],
        );
        match asked {
            Asked::Read(_) => self.random.pick(&reads),
            Asked::Write => self.random.pick(&writes),
        }
    }

    /// A request is about to end so.
    fn note_end(&mut self, asked: Asked, how: RequestEnd) {
        match (asked, how) {
            (Asked::Read(_), RequestEnd::Done) => self.coverage.slow_reads += 1,
            (Asked::Read(place), RequestEnd::Old) => {
                self.coverage.old_answers += 1;
                self.wrong_answer(&place);
            }
            (Asked::Read(place), RequestEnd::Flipped(_)) => {
                self.coverage.flipped_answers += 1;
                self.wrong_answer(&place);
            }
            (Asked::Read(place), _) => {
                self.coverage.slow_reads_failed += 1;
                let passes = matches!(how, RequestEnd::Slow | RequestEnd::Busy);
                if self.knobs.when_gone == WhenGone::Lost && !passes {
                    self.may_be_lost(&place);
                    self.coverage.pages_lost_with_their_tier += 1;
                }
            }
            (Asked::Write, RequestEnd::Done) => {}
            (Asked::Write, _) => self.coverage.slow_writes_failed += 1,
        }
    }

    /// A load gets bytes that are not its page: it reads again, until it has had enough of it.
    fn wrong_answer(&mut self, place: &Place) {
        let wrong = self.slow_wrong.entry(at(place)).or_default();
        *wrong += 1;
        if *wrong >= WRONG_MAX {
            self.coverage.wrong_answers_in_a_row += 1;
            self.may_be_lost(place);
        }
    }

    /// A page that a read is for may be lost by how it ends.
    fn may_be_lost(&mut self, place: &Place) {
        let page = self.slow_pages.get(&at(place)).copied();
        let page = page.expect("it was asked for");
        self.page(page).damaged = true;
    }
}

impl Task {
    /// A request ends, or what failed is tried again. There is one of them.
    pub fn next_request(state: &mut State) -> Self {
        let requests = state.disk.requests();
        if requests == 0 || state.slow_waiting > 0 && state.random.below(4) == 0 {
            return Self::RetryLoads;
        }
        let index = state.random.index(requests);
        let asked = state.disk.asked(index).expect("below their number");
        let how = state.end_of(asked);
        Self::EndRequest { index, how }
    }
}

impl Daemon {
    /// As a thread of the tier does.
    pub fn end_request(&self, index: usize, how: RequestEnd) {
        let _frame = self.life.frame(Frame::Grow);
        let disk = Arc::clone(&self.life.world.lock().disk);
        // Another thread was faster.
        let Some(asked) = disk.asked(index) else {
            return;
        };
        let how = match (asked, how) {
            (Asked::Read(_), RequestEnd::Old) if !disk.has_old(index) => RequestEnd::Done,
            (Asked::Write, RequestEnd::Old | RequestEnd::Flipped(_) | RequestEnd::Busy) => {
                RequestEnd::Failed
            }
            (_, how) => how,
        };
        self.life.world.lock().note_end(asked, how);
        let sunk = self.store.pool().counter(Counter::SunkPages);
        let before = sunk.load(Relaxed);
        match (how, how.error()) {
            (_, Some(error)) => disk.fail(index, error),
            (RequestEnd::Old, _) => disk.finish_with_old(index),
            (RequestEnd::Flipped(bit), _) => disk.finish_flipped(index, bit),
            (RequestEnd::Dropped, _) => disk.drop_request(index),
            _ => disk.finish(index),
        }
        let mut state = self.life.world.lock();
        state.slow_waiting = self.tiers.waiting_loads();
        state.coverage.sunk_pages += sunk.load(Relaxed) - before;
    }

    pub fn retry_loads(&self) {
        let _frame = self.life.frame(Frame::Grow);
        let retried = self.tiers.try_again() as u64;
        let mut state = self.life.world.lock();
        state.slow_waiting = self.tiers.waiting_loads();
        state.coverage.slow_reads_retried += retried;
    }

    /// Begins to move stored pages of a section down.
    pub fn sink(&self, section: pagetide_addr::SectionNo, which: Which) {
        let Some(Ok(mut sinker)) = self.sinker.as_ref().map(|sinker| sinker.try_lock()) else {
            return;
        };
        let _frame = self.life.frame(Frame::Evict);
        let sunk = sinker.sink(section, which, &Between(self.life.clone()));
        let mut state = self.life.world.lock();
        state.coverage.sinks_in_vain += sinker.take_failed().len() as u64;
        match sunk.stop {
            None | Some(SinkStop::UnderWay) => {}
            Some(SinkStop::Tier(_)) => state.coverage.sinks_refused += 1,
            Some(why) => panic!("{why}"),
        }
    }
}

/// The disk as one incarnation of the daemon has it.
struct Hooked {
    life: Life,
    disk: Arc<FakeDisk>,
}

impl Hooked {
    fn lives(&self) -> bool {
        self.life.lives()
    }
}

impl SlowTier for Hooked {
    fn kind(&self) -> TierKind {
        TierKind::Disk
    }

    fn granule_bytes(&self) -> usize {
        self.disk.granule_bytes()
    }

    fn make_room(&self, vm: VmId, sealed_bytes: &[usize]) -> Result<Vec<Room>, TierError> {
        let refusal = match self.life.enter(Call::Unlocked) {
            None => RequestEnd::Gone.error(),
            Some(mut state) => {
                let is_refused = state.knobs.slow == Slow::Troubled && state.random.below(8) == 0;
                let ends = [RequestEnd::Gone, RequestEnd::Slow, RequestEnd::Busy];
                is_refused
                    .then(|| state.random.pick(&ends).error())
                    .flatten()
            }
        };
        match refusal {
            Some(refusal) => Err(refusal),
            None => self.disk.make_room(vm, sealed_bytes),
        }
    }

    fn give_back(&self, vm: VmId, room: Room) {
        if self.lives() {
            self.disk.give_back(vm, room);
        }
    }

    fn write(&self, batch: Batch, done: WriteDone) {
        if self.life.enter(Call::Unlocked).is_none() {
            return;
        }
        let life = self.life.clone();
        let told = move |written| {
            // A dead daemon hears nothing.
            if life.lives() {
                done.tell(written);
            }
        };
        self.disk.write(batch, WriteDone::new(TierKind::Disk, told));
    }

    fn read(&self, place: Place, done: ReadDone) {
        if !self.lives() {
            return;
        }
        let life = self.life.clone();
        let told = move |read| {
            if life.lives() {
                done.tell(read);
            }
        };
        self.disk.read(place, ReadDone::new(TierKind::Disk, told));
    }

    fn forget(&self, places: &[Place]) {
        if self.lives() {
            self.disk.forget(places);
        }
    }

    fn recover(&self, vm: VmId, places: &[Place]) -> Result<(), NotRecovered> {
        self.disk.recover(vm, places)
    }

    fn forget_vm(&self, vm: VmId, extents: &[ExtentName]) {
        self.disk.forget_vm(vm, extents);
    }

    fn health(&self) -> Health {
        self.disk.health()
    }

    fn figures(&self) -> TierFigures {
        self.disk.figures()
    }
}

/// What a daemon has: its pool, and the disk if the run has one.
pub fn chain_of(life: &Life, pool: Arc<Pool>) -> (Arc<ChainStore>, Arc<SlowTiers>) {
    let (slow, when_gone, disk) = {
        let state = life.world.lock();
        (state.knobs.slow, state.knobs.when_gone, state.disk.clone())
    };
    let life = life.clone();
    let seat = Seat {
        tier: Arc::new(Hooked { life, disk }),
        when_gone,
        disk: Some(DISK),
    };
    let seats = match slow {
        Slow::Nothing => Vec::new(),
        Slow::Sound | Slow::Troubled => vec![seat],
    };
    let tiers = SlowTiers::stepped(seats);
    let chain = ChainStore::new(Arc::new(PoolStore::new(pool)), &tiers);
    (chain, tiers)
}

/// What moves content of `space` down, if there is somewhere to go.
pub fn sinker_of(space: &Arc<PagedMemory>, chain: &ChainStore) -> Option<Mutex<Sinker>> {
    let slow = Arc::clone(chain.slow()?);
    let (space, pool) = (Arc::clone(space), Arc::clone(chain.pool()));
    Some(Mutex::new(Sinker::new(space, pool, slow)))
}

/// Where content in the slow tier is.
pub fn in_slow(content: Content) -> Option<InSlow> {
    match Located::of(content) {
        Ok(Located::Slow(place)) => Some(place),
        _ => None,
    }
}

/// What a successor would load; `None` if it is damaged.
pub fn load_slow(disk: &FakeDisk, pool: &Pool, page: PageNo, at: InSlow) -> Option<Stamps> {
    let entry = pool.extent(at.extent).expect("an entry before a word");
    let vm = pool.slow_vm().expect("a pool with a key");
    let place = entry.place(vm, at.extent, at.position, at.sectors);
    let sealer = Sealer::new(&pool.slow_key().expect("a key"));
    let mut sealed = disk.stored(&place);
    let Ok(opened) = sealer.open(TierKind::Disk, page, &place, &mut sealed) else {
        return None;
    };
    let (form, stored) = opened.split_first()?;
    let form = match form {
        1 => Form::Lz4,
        2 => Form::Uncompressed,
        3 => Form::Zstd,
        other => panic!("{page}: form {other}"),
    };
    let mut bytes = [0; PAGE];
    if unpack(pool.seed(), page, form, stored, &mut bytes).is_err() {
        return None;
    }
    Some(Stamps::parse(&bytes).unwrap_or_else(|| panic!("{page:?}: nobody wrote what is stored")))
}

/// Loads from the slow tier under way.
pub fn slow_loads(state: &State, daemon: &Daemon) -> u64 {
    let is_read = |index: &usize| matches!(state.disk.asked(*index), Some(Asked::Read(_)));
    let reads = (0..state.disk.requests()).filter(is_read).count();
    (reads + daemon.tiers.waiting_loads()) as u64
}

/// What the slow tier holds is what words name, and what is under way to it.
pub fn audit_slow(state: &State, daemon: &Daemon, named: u64) {
    let Some(slow) = daemon.chain.slow() else {
        return;
    };
    let (pages, bytes) = (
        slow.counts().pages(),
        slow.counts().disk_bytes.load(Relaxed),
    );
    assert!(
        (named..=named + state.quarantined).contains(&pages),
        "{pages} pages are in the slow tier, {named} are named, {} found damaged",
        state.quarantined
    );
    let is_write = |index: &usize| state.disk.asked(*index) == Some(Asked::Write);
    if !(0..state.disk.requests()).any(|index| is_write(&index)) {
        assert_eq!(state.disk.figures().stored_bytes, bytes, "sectors in use");
    }
}
