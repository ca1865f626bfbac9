// SPDX-License-Identifier: Apache-2.0
//! The record under a model checker: a driver, an engine and its deaths, in all orders.
//!
//! The world is a ring, a record, and what each side knows. Every store, of the engine or of the
//! record, to memory that outlives the engine, is one step; the engine may die before any of them.
//! A successor then takes over by what is there, and may itself die while it does. The truth is the
//! driver's: it knows which buffers it has posted and not got back.

mod at_work;

use super::{HeldRecord, Left, Refusal, Ring, Tie, Words, record_words};
use pagetide_random::SplitMix64;
use std::{
    cell::{Cell, RefCell},
    collections::{BTreeSet, HashSet, VecDeque},
    rc::Rc,
};

/// Steps that a process has left before it dies.
#[derive(Debug, Clone)]
struct Life(Rc<Cell<usize>>);

impl Life {
    fn of(steps: usize) -> Self {
        Self(Rc::new(Cell::new(steps)))
    }

    /// True if the step is done.
    fn step(&self) -> bool {
        let left = self.0.get();
        self.0.set(left.saturating_sub(1));
        left > 0
    }

    fn is_over(&self) -> bool {
        self.0.get() == 0
    }
}

/// Words in memory, of a process that may die.
#[derive(Debug, Clone)]
pub(super) struct Cells {
    words: Rc<RefCell<Vec<u64>>>,
    life: Life,
}

impl Cells {
    pub fn of(words: Vec<u64>) -> Self {
        Self {
            words: Rc::new(RefCell::new(words)),
            life: Life::of(usize::MAX),
        }
    }

    pub fn zeros(count: usize) -> Self {
        Self::of(vec![0; count])
    }

    pub fn snapshot(&self) -> Vec<u64> {
        self.words.borrow().clone()
    }
}

impl Words for Cells {
    fn count(&self) -> usize {
        self.words.borrow().len()
    }

    fn load(&self, at: usize) -> u64 {
        self.words.borrow()[at]
    }

    fn store(&self, at: usize, word: u64) {
        if self.life.step() {
            self.words.borrow_mut()[at] = word;
        }
    }
}

/// The ring, with buffers of one descriptor each, whose address is the number of times that any
/// buffer was posted.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Memory {
    size: u16,
    avail: Vec<u16>,
    avail_index: u16,
    used: Vec<u32>,
    used_index: u16,
    descriptors: Vec<u64>,
}

impl Ring for Memory {
    fn used_index(&self) -> u16 {
        self.used_index
    }

    fn used_head(&self, index: u16) -> u32 {
        self.used[usize::from(index % self.size)]
    }

    fn avail_index(&self) -> u16 {
        self.avail_index
    }

    fn avail_head(&self, index: u16) -> u16 {
        self.avail[usize::from(index % self.size)]
    }

    fn descriptor(&self, head: u16) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.descriptors[usize::from(head)].to_le_bytes());
        bytes
    }
}

/// The engine's own memory, which dies with it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Engine {
    held: Vec<u16>,
    next: u16,
}

/// All that outlives an engine, and the engine.
#[derive(Debug, Clone)]
struct World {
    memory: Memory,
    words: Vec<u64>,
    /// The driver's: heads that it has posted and not got back.
    posted: BTreeSet<u16>,
    /// The driver's index of the used ring.
    seen: u16,
    engine: Engine,
}

/// What may happen next.
#[derive(Debug, Clone, Copy)]
enum Event {
    /// The driver posts that buffer.
    Post(u16),
    /// The driver takes what was returned.
    Collect,
    /// The engine holds the next buffer.
    Hold,
    /// It returns the next.
    Return,
    /// It returns the buffer that it holds at that place.
    ReturnHeld(usize),
    /// It returns the next and the one after the next as one packet, and holds the one between.
    ReturnAround,
    /// It returns the next one and the oldest held, as one packet.
    ReturnBoth,
}

fn tie(size: u16) -> Tie {
    Tie {
        dev: 1,
        ino: 2,
        descriptors: 0x1000,
        avail: 0x2000,
        used: 0x3000,
        queue: 0,
        size,
    }
}

impl World {
    /// A ring of `size` that has been served in order up to `begin`.
    fn new(size: u16, begin: u16) -> Self {
        let cells = Cells::zeros(record_words(size));
        let record = HeldRecord::begin(cells, &tie(size), begin).unwrap();
        let slots = usize::from(size);
        Self {
            memory: Memory {
                size,
                avail: vec![0; slots],
                avail_index: begin,
                used: vec![0; slots],
                used_index: begin,
                descriptors: vec![0; slots],
            },
            words: record.words().snapshot(),
            posted: BTreeSet::new(),
            seen: begin,
            engine: Engine {
                held: Vec::new(),
                next: begin,
            },
        }
    }

    fn waiting(&self) -> u16 {
        self.memory.avail_index.wrapping_sub(self.engine.next)
    }

    fn events(&self) -> Vec<Event> {
        let mut events: Vec<Event> = (0..self.memory.size)
            .filter(|head| self.is_drivers(*head))
            .map(Event::Post)
            .collect();
        if self.seen != self.memory.used_index {
            events.push(Event::Collect);
        }
        if self.waiting() > 0 {
            events.extend([Event::Hold, Event::Return]);
            if !self.engine.held.is_empty() {
                events.push(Event::ReturnBoth);
            }
        }
        if self.waiting() > 2 {
            events.push(Event::ReturnAround);
        }
        events.extend((0..self.engine.held.len()).map(Event::ReturnHeld));
        events
    }

    /// True if the driver has the buffer, and knows it.
    fn is_drivers(&self, head: u16) -> bool {
        let since = self.memory.used_index.wrapping_sub(self.seen);
        let mut unseen = (0..since).map(|n| self.memory.used_head(self.seen.wrapping_add(n)));
        !self.posted.contains(&head) && unseen.all(|used| used != u32::from(head))
    }

    /// Does `event`; an engine dies after so many of its steps. Returns true if it lives.
    fn apply(&mut self, event: Event, steps: usize) -> bool {
        match event {
            Event::Post(head) => {
                let posts = self.memory.descriptors.iter().max().copied().unwrap_or(0) + 1;
                self.memory.descriptors[usize::from(head)] = posts;
                let slot = usize::from(self.memory.avail_index % self.memory.size);
                self.memory.avail[slot] = head;
                self.memory.avail_index = self.memory.avail_index.wrapping_add(1);
                self.posted.insert(head);
                return true;
            }
            Event::Collect => {
                self.seen = self.memory.used_index;
                return true;
            }
            _ => {}
        }
        let life = Life::of(steps);
        let cells = Cells {
            words: Rc::new(RefCell::new(std::mem::take(&mut self.words))),
            life: life.clone(),
        };
        let mut record = self.record_of_live_engine(cells.clone());
        let next = self.engine.next;
        let head_of = |ahead| self.memory.avail_head(next.wrapping_add(ahead));
        match event {
            Event::Post(_) | Event::Collect => {}
            Event::Hold => self.hold(&mut record, 0),
            Event::Return => {
                let heads = [head_of(0)];
                self.give_back(&mut record, &heads, &[], 1, &life);
            }
            Event::ReturnHeld(at) => {
                let head = self.engine.held.remove(at);
                self.give_back(&mut record, &[head], &[head], 0, &life);
            }
            Event::ReturnAround => {
                let heads = [head_of(0), head_of(2)];
                self.hold(&mut record, 1);
                self.engine.next = next;
                self.give_back(&mut record, &heads, &[], 3, &life);
            }
            Event::ReturnBoth => {
                let held = self.engine.held.remove(0);
                let heads = [held, head_of(0)];
                self.give_back(&mut record, &heads, &[held], 1, &life);
            }
        }
        self.words = cells.snapshot();
        !life.is_over()
    }

    /// The record as the engine has it: nothing of it is in the engine's memory but counters that
    /// are in the record, too.
    fn record_of_live_engine(&self, cells: Cells) -> HeldRecord<Cells> {
        let life = cells.life.0.replace(usize::MAX);
        let taken = HeldRecord::take_over(cells, &tie(self.memory.size), &self.memory);
        let (record, left) = taken.unwrap();
        let expected = Left {
            held: self.engine.held.clone(),
            next_avail: self.engine.next,
        };
        assert_eq!(left.next_avail, expected.next_avail);
        let sorted = |mut heads: Vec<u16>| {
            heads.sort_unstable();
            heads
        };
        assert_eq!(sorted(left.held), sorted(expected.held));
        record.words.life.0.set(life);
        record
    }

    fn hold(&mut self, record: &mut HeldRecord<Cells>, ahead: u16) {
        let index = self.engine.next.wrapping_add(ahead);
        let head = self.memory.avail_head(index);
        record.hold(head, index, &self.memory.descriptor(head));
        self.engine.held.push(head);
        self.engine.next = index.wrapping_add(1);
    }

    /// Fills the buffers and returns them, by one store of the used index.
    fn give_back(
        &mut self,
        record: &mut HeldRecord<Cells>,
        heads: &[u16],
        held: &[u16],
        taken: u16,
        life: &Life,
    ) {
        for head in heads {
            // Filling it is a step, too.
            if life.step() {
                assert!(self.posted.contains(head), "the driver has buffer {head}");
            }
        }
        let mut index = self.memory.used_index;
        for head in heads {
            if life.step() {
                let slot = usize::from(index % self.memory.size);
                self.memory.used[slot] = u32::from(*head);
            }
            index = index.wrapping_add(1);
        }
        if life.step() {
            self.memory.used_index = index;
            for head in heads {
                assert!(self.posted.remove(head), "{head} is returned twice");
            }
        }
        self.engine.next = self.engine.next.wrapping_add(taken);
        record.settle(held.iter().copied(), index);
    }

    /// The engine has died. A successor takes over, and dies after so many steps; returns true if
    /// it lives.
    fn succeed(&mut self, steps: usize) -> bool {
        let life = Life::of(steps);
        let cells = Cells {
            words: Rc::new(RefCell::new(std::mem::take(&mut self.words))),
            life: life.clone(),
        };
        let taken = HeldRecord::take_over(cells.clone(), &tie(self.memory.size), &self.memory);
        let (_, left) = taken.unwrap();
        self.words = cells.snapshot();
        self.check(&left);
        self.engine = Engine {
            held: left.held,
            next: left.next_avail,
        };
        !life.is_over()
    }

    /// What a successor has found must be exactly what the driver has posted and not got back.
    fn check(&self, left: &Left) {
        let waiting = self.memory.avail_index.wrapping_sub(left.next_avail);
        let ahead = (0..waiting).map(|n| self.memory.avail_head(left.next_avail.wrapping_add(n)));
        let found: Vec<u16> = left.held.iter().copied().chain(ahead).collect();
        let distinct: BTreeSet<u16> = found.iter().copied().collect();
        assert_eq!(found.len(), distinct.len(), "twice: {found:?}");
        assert_eq!(distinct, self.posted, "leaked, or the driver's");
    }

    /// For the set of worlds seen: everything that matters from here on.
    fn key(&self) -> (Memory, Vec<u64>, BTreeSet<u16>, u16, Engine) {
        let memory = self.memory.clone();
        (
            memory,
            self.words.clone(),
            self.posted.clone(),
            self.seen,
            self.engine.clone(),
        )
    }
}

/// More steps than any event has.
const STEPS_MAX: usize = 40;

/// All worlds that follow from `world` by one event: with death after each step of it, and with
/// death of the successor after each of its own.
fn successors(world: &World) -> Vec<World> {
    let mut next = Vec::new();
    for event in world.events() {
        for steps in 0..STEPS_MAX {
            let mut died = world.clone();
            if died.apply(event, steps) {
                next.push(died);
                break;
            }
            for steps in 0..STEPS_MAX {
                let mut again = died.clone();
                let lives = again.succeed(steps);
                if !lives {
                    assert!(again.succeed(STEPS_MAX));
                }
                next.push(again);
                if lives {
                    break;
                }
            }
        }
    }
    next
}

fn search(size: u16, begin: u16, depth: usize) -> usize {
    let first = World::new(size, begin);
    let mut seen = HashSet::from([first.key()]);
    let mut rank = VecDeque::from([first]);
    for _ in 0..depth {
        let mut following = VecDeque::new();
        for world in rank {
            for next in successors(&world) {
                if seen.insert(next.key()) {
                    following.push_back(next);
                }
            }
        }
        rank = following;
    }
    seen.len()
}

#[test]
fn death_at_any_step_of_any_order_of_events_leaves_every_buffer_where_it_was() {
    // Indices begin just before they wrap.
    let worlds = search(2, 0xffff, 10) + search(4, 0xfffe, 7);
    assert!(worlds > 5_000, "{worlds} worlds");
}

#[test]
fn long_lives_with_many_deaths_lose_nothing() {
    let mut random = SplitMix64::new(195);
    for _ in 0..30 {
        let mut world = World::new(16, 0xfff0);
        let mut deaths = 0;
        for _ in 0..2_000 {
            let events = world.events();
            let event = events[random.index(events.len())];
            let steps = match random.below(4) {
                0 => random.index(12),
                _ => STEPS_MAX,
            };
            if !world.apply(event, steps) {
                deaths += 1;
                while !world.succeed(random.index(STEPS_MAX)) {}
            }
        }
        assert!(deaths > 50, "{deaths} deaths");
    }
}

/// A driver resets its device while nobody serves it: whatever it posts then is served from the
/// beginning, or as it is recorded if that is the same.
#[test]
fn ring_that_was_set_up_anew_meanwhile_is_not_mistaken() {
    let mut random = SplitMix64::new(5);
    let mut refused = 0;
    for _ in 0..2_000 {
        let mut old = World::new(4, 0);
        for _ in 0..random.below(12) {
            let events = old.events();
            let event = events[random.index(events.len())];
            assert!(old.apply(event, STEPS_MAX));
        }
        let mut new = World::new(4, 0);
        for _ in 0..random.below(6) {
            let free: Vec<u16> = (0..4).filter(|head| new.is_drivers(*head)).collect();
            if !free.is_empty() {
                new.apply(Event::Post(free[random.index(free.len())]), STEPS_MAX);
            }
        }
        let cells = Cells::of(old.words);
        match HeldRecord::take_over(cells, &tie(4), &new.memory) {
            Ok((_, left)) => new.check(&left),
            Err((_, Refusal::Another(_))) => refused += 1,
            Err((_, refusal)) => panic!("{refusal}"),
        }
    }
    assert!(refused > 100, "{refused} were refused");
}

#[test]
fn record_that_dies_at_any_step_of_its_beginning_is_empty_or_right() {
    for steps in 0..STEPS_MAX {
        let world = World::new(4, 7);
        let cells = Cells::of(vec![0xffff_ffff_ffff_ffff; record_words(4)]);
        let life = Life::of(steps);
        let mortal = Cells {
            words: cells.words.clone(),
            life: life.clone(),
        };
        HeldRecord::begin(mortal, &tie(4), 7).unwrap();
        if steps == 0 {
            continue;
        }
        match HeldRecord::take_over(cells, &tie(4), &world.memory) {
            Ok((_, left)) => {
                world.check(&left);
                return;
            }
            Err((_, refusal)) => assert_eq!(refusal, Refusal::Empty, "{steps} steps"),
        }
    }
    panic!("it was never begun");
}

/// Bytes of any kind, of the record and of the ring.
#[test]
fn whatever_is_in_record_and_ring_heads_are_of_the_ring() {
    let mut random = SplitMix64::new(77);
    let mut taken = 0;
    for _ in 0..20_000 {
        let mut world = World::new(4, 0xfffd);
        for _ in 0..random.below(16) {
            let events = world.events();
            let event = events[random.index(events.len())];
            world.apply(event, STEPS_MAX);
        }
        for _ in 0..random.below(3) {
            let at = random.index(world.words.len());
            world.words[at] = match random.below(3) {
                0 => 0,
                1 => random.next_u64(),
                _ => world.words[at] ^ 1 << random.below(64),
            };
        }
        for _ in 0..random.below(3) {
            let wild = random.next_u64().to_le_bytes();
            let wild = u16::from_le_bytes([wild[0], wild[1]]);
            match random.below(4) {
                0 => world.memory.used_index = wild,
                1 => world.memory.avail_index = wild,
                2 => world.memory.used[usize::from(wild % 4)] = u32::from(wild) << 7,
                _ => world.memory.avail[usize::from(wild % 4)] = wild,
            }
        }
        let cells = Cells::of(world.words);
        if let Ok((_, left)) = HeldRecord::take_over(cells, &tie(4), &world.memory) {
            taken += 1;
            let distinct: BTreeSet<u16> = left.held.iter().copied().collect();
            assert_eq!(distinct.len(), left.held.len());
            assert!(distinct.iter().all(|head| *head < 4));
        }
    }
    assert!(taken > 1_000, "{taken} were taken over");
}
