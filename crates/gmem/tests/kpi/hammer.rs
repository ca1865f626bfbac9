// SPDX-License-Identifier: Apache-2.0
//! Threads that do everything at once on the same pages, under a checker that knows every word.
//!
//! ```text
//!   stable region     word n of each page is thread n's: what it wrote last is what
//!                     it reads, by whatever device, wherever the page has moved to
//!   volatile regions  mapped, unmapped and given back at any time: a word holds what
//!                     was written to this very page, or nothing yet, and never what
//!                     belongs to another
//! ```
//! The machine does one access after another; beside it watches that no frame is
//! filled or copied while a device reaches it. Runs are bounded by operations.

use crate::kit::{
    Actor, Build, Machine, OWN_FRAMES, Stopped, end, other_space_of, own_frames, region_of,
    space_of,
};
use pagetide_addr::{Access, PAGE_SHIFT};
use pagetide_gmem::{
    AddressSpace, GmError, MapOptions, Mode, Placement, Protection, Region, RegionRequest,
};
use pagetide_random::SplitMix64;
use std::{
    collections::HashMap,
    sync::{Arc, Barrier, Mutex},
};

const THREADS: u64 = 4;
const STEPS: u64 = 8_000;
const STABLE_PAGES: u64 = 6;
const VOLATILE_PAGES: u64 = 2;
const VOLATILE: usize = 3;

struct Arena {
    machine: Machine,
    spaces: [Arc<AddressSpace>; 2],
    /// The first is the CPU, which stays attached.
    actors: Vec<Actor>,
    stable: Region,
    volatile: [Mutex<Region>; VOLATILE],
    protecting: Mutex<()>,
}

impl Arena {
    fn new() -> Self {
        let machine = Machine::new();
        let (cpu, gpu) = machine.cpu_and_gpu(10);
        let small = machine.gpu();
        small.give_memory(0x5000_0000, 2);
        let sharers = [7, 7].map(|format| machine.actor(Build::of_format(format)));
        let [one, two] = sharers;
        let actors = vec![cpu, gpu, small, one, two];
        let spaces = [space_of(64), other_space_of(64)];
        for actor in &actors {
            actor.join(&spaces[0], Mode::Shared).unwrap();
        }
        Self {
            stable: region_of(&spaces[0], STABLE_PAGES),
            volatile: [(); VOLATILE].map(|()| Mutex::new(region_of(&spaces[0], VOLATILE_PAGES))),
            protecting: Mutex::new(()),
            machine,
            spaces,
            actors,
        }
    }
}

/// What may be answered while others do what they like; all else is a defect.
fn is_expected(error: &GmError) -> bool {
    matches!(
        error,
        GmError::NotActive { .. }
            | GmError::NotAttached { .. }
            | GmError::AlreadyAttached { .. }
            | GmError::NotMapped { .. }
            | GmError::AlreadyMapped { .. }
            | GmError::NotAllocated { .. }
            | GmError::NoMemory { .. }
            | GmError::Denied { .. }
            | GmError::Destroyed
    )
}

#[track_caller]
fn expect<T>(result: Result<T, GmError>) -> Option<T> {
    match result {
        Ok(done) => Some(done),
        Err(error) => {
            assert!(is_expected(&error), "{error}");
            None
        }
    }
}

#[track_caller]
fn accessed<T>(result: Result<(T, u32), Stopped>) -> Option<T> {
    match result {
        Ok((done, _)) => Some(done),
        Err(Stopped::Refused(error)) => expect(Err(error)),
        Err(Stopped::NoTranslation) => panic!("all these devices recover"),
    }
}

struct Worker<'a> {
    arena: &'a Arena,
    number: u64,
    random: SplitMix64,
    /// What it wrote last to its word of a stable page.
    written: HashMap<u64, u64>,
    sequence: u64,
}

impl Worker<'_> {
    fn actor(&mut self) -> Actor {
        let count = self.arena.actors.len() as u64;
        self.arena.actors[self.index(count)].clone()
    }

    fn index(&mut self, count: u64) -> usize {
        usize::try_from(self.random.below(count)).unwrap()
    }

    /// Its word of some page of a region.
    fn own_word(&mut self, region: &Region) -> u64 {
        let page = self.random.below(region.pages().len());
        region.start().0 + (page << PAGE_SHIFT) + self.number * 8
    }

    fn volatile(&mut self) -> Region {
        let at = self.index(VOLATILE as u64);
        self.arena.volatile[at].lock().unwrap().clone()
    }

    fn step(&mut self) {
        match self.random.below(40) {
            0..14 => self.write_stable(),
            14..20 => self.read_stable(),
            20..26 => self.use_volatile(),
            26 | 27 => self.unmap(),
            28 | 29 => self.wire(),
            30 => self.exchange(),
            31 | 32 => self.set_policy(),
            33 => self.protect(),
            34 | 35 => self.leave_and_join(),
            36 | 37 => self.switch(),
            38 => self.touch_by_fault(),
            _ => {
                // Failures of others' operations are told to whoever asks first.
                expect(self.arena.spaces[0].synchronize());
            }
        }
    }

    fn write_stable(&mut self) {
        let (actor, va) = (self.actor(), self.own_word(&self.arena.stable.clone()));
        self.sequence += 1;
        let value = va << 24 | self.sequence;
        let before = self.written.get(&va).copied().unwrap_or(0);
        let wrote = actor.access(va, Access::Write, |word| {
            assert_eq!(*word, before, "{va:#x} lost a write before this one");
            *word = value;
        });
        if accessed(wrote).is_some() {
            self.written.insert(va, value);
        }
    }

    fn read_stable(&mut self) {
        let (actor, va) = (self.actor(), self.own_word(&self.arena.stable.clone()));
        if let Some(value) = accessed(actor.access(va, Access::Read, |word| *word)) {
            let expected = self.written.get(&va).copied().unwrap_or(0);
            assert_eq!(value, expected, "{va:#x} by {:?}", actor.device);
        }
    }

    fn use_volatile(&mut self) {
        let (actor, region) = (self.actor(), self.volatile());
        let va = self.own_word(&region);
        self.sequence += 1;
        let value = va << 24 | self.sequence;
        accessed(actor.access(va, Access::Write, |word| {
            // Nothing yet, or of this page; a test's own frames begin with a mark.
            let is_fresh = *word == 0 || *word == 0xdead;
            assert!(
                is_fresh || *word >> 24 == va,
                "{:#x} is in {va:#x}",
                *word >> 24
            );
            *word = value;
        }));
    }

    fn unmap(&mut self) {
        let region = self.volatile();
        if self.random.below(2) == 0 {
            expect(region.unmap());
        } else {
            expect(region.unmap_later(None));
        }
    }

    /// Frames belong to addresses, so that a word shows if it is another page's.
    fn wire(&mut self) {
        let region = self.volatile();
        let first = region.pages().start.0;
        let options = MapOptions::new(Access::Write);
        let frames = own_frames(first, VOLATILE_PAGES);
        assert!(frames[0].0 >= OWN_FRAMES);
        if self.random.below(2) == 0 {
            expect(region.map(&frames, &options));
        } else {
            expect(region.map_later(frames, options, None));
        }
    }

    /// A region is given back and another takes its place.
    fn exchange(&mut self) {
        let at = self.index(VOLATILE as u64);
        let mut slot = self.arena.volatile[at].lock().unwrap();
        if expect(slot.dealloc()).is_some() {
            let request = RegionRequest::of_bytes(VOLATILE_PAGES << PAGE_SHIFT);
            *slot = self.arena.spaces[0].alloc(&request).unwrap();
        }
    }

    fn set_policy(&mut self) {
        let placement = match self.random.below(3) {
            0 => Placement::Unique,
            1 => Placement::RemoteAccess,
            _ => Placement::Prefetch,
        };
        let actor = self.actor();
        let home = (self.random.below(2) == 0).then_some(&actor.device);
        expect(self.arena.stable.set_policy(placement, home));
    }

    /// While the stable region is read only, nothing in it changes.
    fn protect(&mut self) {
        let _one = self.arena.protecting.lock().unwrap();
        self.arena.stable.protect(Protection::ReadOnly).unwrap();
        let first = self.look();
        std::thread::yield_now();
        assert_eq!(self.look(), first, "written under protection");
        self.arena.stable.protect(Protection::ReadWrite).unwrap();
    }

    fn look(&self) -> Vec<Option<u64>> {
        let cpu = &self.arena.actors[0];
        let words = self
            .arena
            .stable
            .pages()
            .iter()
            .flat_map(|page| (0..THREADS).map(move |thread| page.byte_offset() + thread * 8));
        words
            .map(|va| accessed(cpu.access(va, Access::Read, |word| *word)))
            .collect()
    }

    fn leave_and_join(&mut self) {
        let actor = self.arena.actors[1 + self.index(4)].clone();
        let space = &self.arena.spaces[0];
        expect(actor.device.detach(space));
        let mode = if self.random.below(2) == 0 {
            Mode::Shared
        } else {
            Mode::Coherent
        };
        expect(actor.join(space, mode));
    }

    fn switch(&mut self) {
        let actor = self.arena.actors[1 + self.index(4)].clone();
        let other = &self.arena.spaces[1];
        if expect(actor.device.switch(other)).is_none() {
            expect(actor.join(other, Mode::Coherent));
        }
        expect(actor.device.switch(&self.arena.spaces[0]));
    }

    fn touch_by_fault(&mut self) {
        let actor = self.actor();
        let va = self.own_word(&self.arena.stable.clone());
        expect(actor.device.fault(pagetide_addr::Va(va), Access::Read));
    }
}

fn hammer(seed: u64) {
    let arena = Arena::new();
    let begin = Barrier::new(usize::try_from(THREADS).unwrap());
    std::thread::scope(|scope| {
        let server = scope.spawn(|| arena.spaces[0].serve_operations());
        let workers: Vec<_> = (0..THREADS)
            .map(|number| {
                let (arena, begin) = (&arena, &begin);
                scope.spawn(move || {
                    let mut worker = Worker {
                        arena,
                        number,
                        random: SplitMix64::new(seed * THREADS + number),
                        written: HashMap::new(),
                        sequence: 0,
                    };
                    begin.wait();
                    for _ in 0..STEPS {
                        worker.step();
                    }
                    worker.written
                })
            })
            .collect();
        let written: Vec<_> = workers
            .into_iter()
            .map(std::thread::ScopedJoinHandle::join)
            .collect();
        arena.spaces[0].stop_operations();
        server.join().unwrap();
        for (va, value) in written.into_iter().flat_map(Result::unwrap) {
            assert_eq!(arena.actors[0].read(va), value, "at the end, {va:#x}");
        }
    });
    expect(arena.spaces[0].synchronize());
    let Arena {
        machine,
        spaces,
        actors,
        ..
    } = arena;
    let all: Vec<_> = actors.iter().collect();
    for region in spaces[0].regions() {
        region.dealloc().unwrap();
    }
    for actor in &all {
        expect(actor.device.detach(&spaces[1]));
    }
    for space in &spaces {
        for actor in &all {
            expect(actor.device.detach(space));
        }
    }
    for space in &spaces {
        end(&machine, space, &all);
    }
}

#[test]
fn every_word_is_what_was_written_last_whatever_threads_do() {
    for seed in 0..6 {
        hammer(seed);
    }
}
