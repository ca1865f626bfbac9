// SPDX-License-Identifier: Apache-2.0
//! Which entry of a full set a cache gives up: the interface, and the paper's policies behind it.
//!
//! A cache keeps a number for each entry, its *mark*, that only the policy reads and writes:
//!
//! ```text
//!   LRU     tick of the last use          victim: the least
//!   LFU     4-bit count of uses           victim: the least, ties by the seed
//!   oracle  index of the next use         victim: the greatest
//! ```
//! Entries are named by their index in the whole cache: `set * ways + way`.

use std::ops::Range;

use crate::config::{CacheConfig, Replacement};
use crate::hints::ENTRIES_MAX;
use crate::request::{NEVER, Tag, address_of, domain_of};
use crate::ties::{PACKED_WAYS, PackedLfu, ProgramTies, SMALL_WAYS, SmallLfu, TieBreak, Ties};

/// A use count at which all counts of the set are halved: 4 bits (V-C).
const LFU_SATURATED: u64 = 15;

/// One entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) tag: Tag,
    /// The policy's number.
    pub(crate) mark: u64,
}

/// Where an entry is, for those policies that need not divide to find it out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) at: usize,
    pub(crate) set: usize,
    pub(crate) way: usize,
}

/// The entries of a cache, as its policy sees them.
#[derive(Debug)]
pub struct Entries<'a> {
    entries: &'a mut [Entry],
    ways: usize,
}

impl<'a> Entries<'a> {
    /// Those of a cache with sets of `ways`.
    #[inline(always)]
    pub(crate) fn new(entries: &'a mut [Entry], ways: usize) -> Self {
        Self { entries, ways }
    }
}

impl Entries<'_> {
    /// Entries of a set.
    #[must_use]
    #[inline(always)]
    pub fn ways(&self) -> usize {
        self.ways
    }

    /// The set that entry `at` is in.
    #[must_use]
    #[inline(always)]
    pub fn set_of(&self, at: usize) -> usize {
        at / self.ways
    }

    /// Its place in the set.
    #[must_use]
    #[inline(always)]
    pub fn way_of(&self, at: usize) -> usize {
        at % self.ways
    }

    /// The entries of `set`.
    #[must_use]
    #[inline(always)]
    pub fn of_set(&self, set: usize) -> Range<usize> {
        set * self.ways..(set + 1) * self.ways
    }

    /// The number that the policy keeps for entry `at`; 0 for a new one.
    #[must_use]
    #[inline(always)]
    pub fn mark(&self, at: usize) -> u64 {
        self.entries.get(at).map_or(0, |entry| entry.mark)
    }

    /// Changes it.
    #[inline(always)]
    pub fn set_mark(&mut self, at: usize, mark: u64) {
        if let Some(entry) = self.entries.get_mut(at) {
            entry.mark = mark;
        }
    }

    /// The domain and the first address of what entry `at` translates.
    #[must_use]
    pub fn key(&self, at: usize) -> (u32, u64) {
        let tag = self.entries.get(at).map_or(0, |entry| entry.tag);
        (domain_of(tag), address_of(tag))
    }

    #[inline(always)]
    fn slice(&mut self, range: Range<usize>) -> &mut [Entry] {
        &mut self.entries[range]
    }

    #[inline(always)]
    fn tag(&self, at: usize) -> Tag {
        self.entries[at].tag
    }
}

/// Decides which entry of a full set goes.
pub trait ReplacementPolicy: std::fmt::Debug {
    /// Entry `at` was used. `next_use` is the index of the next request for the same page among the requests of
    /// the trace, if the run knows the future, else `u64::MAX`.
    fn used(&mut self, entries: &mut Entries<'_>, at: usize, next_use: u64);

    /// Entry `at` is new. It has not been used yet.
    fn inserted(&mut self, entries: &mut Entries<'_>, at: usize, next_use: u64);

    /// Entry `at` is void.
    fn removed(&mut self, entries: &mut Entries<'_>, at: usize);

    /// What was entry `from` is entry `to` of the same set now, in the place of one that was removed.
    fn moved(&mut self, entries: &mut Entries<'_>, from: usize, to: usize);

    /// The entry of the full set `set` that goes. It is replaced without a call of [`Self::removed`]. An entry
    /// that is not in the set ends the run with an error.
    fn victim(&mut self, entries: &mut Entries<'_>, set: usize) -> usize;

    /// Why the run must end, if it must.
    fn failure(&mut self) -> Option<String> {
        None
    }
}

/// Any policy: one of the paper's, called without indirection, or somebody's own.
#[derive(Debug)]
pub(crate) enum AnyPolicy {
    Lru(Lru),
    Lfu(Lfu),
    SmallLfu(SmallLfu),
    PackedLfu(PackedLfu),
    Oracle(Oracle),
    Own(Box<dyn ReplacementPolicy>),
}

impl AnyPolicy {
    /// That of `config`, for `sets` sets.
    pub(crate) fn new(config: &CacheConfig, ties: &TieBreak, sets: usize) -> Self {
        match config.replacement {
            Replacement::Lru => Self::Lru(Lru::default()),
            Replacement::Oracle => Self::Oracle(Oracle(match ties {
                TieBreak::Program(rand) => Some(ProgramTies::new(rand, sets)),
                TieBreak::Seed(_) => None,
            })),
            Replacement::Lfu => match ties {
                TieBreak::Program(rand) if config.ways <= SMALL_WAYS => {
                    Self::SmallLfu(SmallLfu::new(rand, sets))
                }
                TieBreak::Seed(seed)
                    if config.ways <= PACKED_WAYS && config.ways.is_power_of_two() =>
                {
                    Self::PackedLfu(PackedLfu::new(*seed, sets, config.ways))
                }
                _ => Self::Lfu(Lfu(Ties::new(ties, sets))),
            },
        }
    }
}

impl AnyPolicy {
    /// As [`ReplacementPolicy::used`]. It is the most frequent call by far: the common policies are reached by a
    /// few comparisons, and without an [`Entries`], which would be built in memory for the policies of others.
    #[inline(always)]
    pub(crate) fn touched(&mut self, entries: &mut [Entry], ways: usize, at: usize, next_use: u64) {
        if let Self::Lru(lru) = self {
            lru.tick += 1;
            if let Some(entry) = entries.get_mut(at) {
                entry.mark = lru_mark(lru.tick, at);
            }
        } else if let Self::PackedLfu(packed) = self {
            packed.use_entry(at);
        } else if let Self::SmallLfu(small) = self {
            small.use_entry(at, ways);
        } else {
            self.touched_otherwise(entries, ways, at, next_use);
        }
    }

    #[inline(never)]
    fn touched_otherwise(&mut self, entries: &mut [Entry], ways: usize, at: usize, next_use: u64) {
        self.used(&mut Entries::new(entries, ways), at, next_use);
    }

    /// As [`ReplacementPolicy::inserted`], without a division to find the entry's set.
    #[inline(always)]
    pub(crate) fn entered(
        &mut self,
        entries: &mut Entries<'_>,
        place: Place,
        tag: Tag,
        next_use: u64,
    ) {
        match self {
            Self::Lru(lru) => lru.used(entries, place.at, next_use),
            Self::SmallLfu(small) => small.enters(place.set, program_hash(tag), place.way as u64),
            Self::PackedLfu(packed) => packed.enters(place.at),
            Self::Lfu(Lfu(ties)) => {
                if let Ties::Program(program) = ties {
                    program.enters(place.set, program_hash(tag), narrow(place.way));
                }
            }
            Self::Oracle(oracle) => oracle.inserted(entries, place.at, next_use),
            Self::Own(own) => own.inserted(entries, place.at, next_use),
        }
    }

    /// True if it is the caller's, who may err.
    #[inline(always)]
    pub(crate) const fn is_own(&self) -> bool {
        matches!(self, Self::Own(_))
    }
}

/// Calls the same method of whichever policy it is.
macro_rules! of_any {
    ($any:expr, $policy:ident => $call:expr) => {
        match $any {
            AnyPolicy::Lru($policy) => $call,
            AnyPolicy::Lfu($policy) => $call,
            AnyPolicy::SmallLfu($policy) => $call,
            AnyPolicy::PackedLfu($policy) => $call,
            AnyPolicy::Oracle($policy) => $call,
            AnyPolicy::Own($policy) => $call,
        }
    };
}

impl ReplacementPolicy for AnyPolicy {
    #[inline(always)]
    fn used(&mut self, entries: &mut Entries<'_>, at: usize, next_use: u64) {
        of_any!(self, policy => policy.used(entries, at, next_use));
    }

    #[inline(always)]
    fn inserted(&mut self, entries: &mut Entries<'_>, at: usize, next_use: u64) {
        of_any!(self, policy => policy.inserted(entries, at, next_use));
    }

    fn removed(&mut self, entries: &mut Entries<'_>, at: usize) {
        of_any!(self, policy => policy.removed(entries, at));
    }

    fn moved(&mut self, entries: &mut Entries<'_>, from: usize, to: usize) {
        of_any!(self, policy => policy.moved(entries, from, to));
    }

    #[inline(always)]
    fn victim(&mut self, entries: &mut Entries<'_>, set: usize) -> usize {
        of_any!(self, policy => policy.victim(entries, set))
    }

    fn failure(&mut self) -> Option<String> {
        of_any!(self, policy => policy.failure())
    }
}

/// The entry not used for the longest time. A mark is a tick, with the entry's index in the lower bits: the
/// least mark of a set also gives its entry.
#[derive(Debug, Default)]
pub(crate) struct Lru {
    tick: u64,
}

impl ReplacementPolicy for Lru {
    #[inline(always)]
    fn used(&mut self, entries: &mut Entries<'_>, at: usize, _next_use: u64) {
        self.tick += 1;
        entries.set_mark(at, lru_mark(self.tick, at));
    }

    #[inline(always)]
    fn inserted(&mut self, entries: &mut Entries<'_>, at: usize, next_use: u64) {
        self.used(entries, at, next_use);
    }

    fn removed(&mut self, _entries: &mut Entries<'_>, _at: usize) {}

    fn moved(&mut self, entries: &mut Entries<'_>, _from: usize, to: usize) {
        let tick = lru_tick(entries.mark(to));
        entries.set_mark(to, lru_mark(tick, to));
    }

    #[inline(always)]
    fn victim(&mut self, entries: &mut Entries<'_>, set: usize) -> usize {
        let set = entries.of_set(set);
        lru_entry(least_mark(entries.slice(set)))
    }
}

/// The entry with the least use count. A mark is a count.
#[derive(Debug)]
pub(crate) struct Lfu(Ties);

impl ReplacementPolicy for Lfu {
    #[inline(always)]
    fn used(&mut self, entries: &mut Entries<'_>, at: usize, _next_use: u64) {
        let count = entries.mark(at) + 1;
        entries.set_mark(at, count);
        if count == LFU_SATURATED {
            halve(entries, at);
        }
    }

    #[inline(always)]
    fn inserted(&mut self, entries: &mut Entries<'_>, at: usize, _next_use: u64) {
        if let Ties::Program(program) = &mut self.0 {
            let (set, way) = (entries.set_of(at), narrow(entries.way_of(at)));
            program.enters(set, program_hash(entries.tag(at)), way);
        }
    }

    fn removed(&mut self, entries: &mut Entries<'_>, at: usize) {
        if let Ties::Program(program) = &mut self.0 {
            program.leaves(entries.set_of(at), narrow(entries.way_of(at)));
        }
    }

    fn moved(&mut self, entries: &mut Entries<'_>, from: usize, to: usize) {
        if let Ties::Program(program) = &mut self.0 {
            let (from_way, to_way) = (entries.way_of(from), entries.way_of(to));
            program.moves(entries.set_of(to), narrow(from_way), narrow(to_way));
        }
    }

    #[inline(always)]
    fn victim(&mut self, entries: &mut Entries<'_>, set: usize) -> usize {
        let range = entries.of_set(set);
        let first = range.start;
        let way = way_of_least_used(entries.slice(range), set, &mut self.0);
        if let Ties::Program(program) = &mut self.0 {
            program.leaves(set, narrow(way));
        }
        first + way
    }
}

/// Halves the use counts of the set that `at` is in; those of free entries are not used.
#[cold]
fn halve(entries: &mut Entries<'_>, at: usize) {
    let set = entries.of_set(entries.set_of(at));
    for entry in entries.slice(set) {
        entry.mark >>= 1;
    }
}

impl ReplacementPolicy for SmallLfu {
    #[inline(always)]
    fn used(&mut self, entries: &mut Entries<'_>, at: usize, _next_use: u64) {
        self.use_entry(at, entries.ways());
    }

    #[inline(always)]
    fn inserted(&mut self, entries: &mut Entries<'_>, at: usize, _next_use: u64) {
        let (set, way) = (entries.set_of(at), entries.way_of(at));
        self.enters(set, program_hash(entries.tag(at)), way as u64);
    }

    fn removed(&mut self, entries: &mut Entries<'_>, at: usize) {
        self.leaves(entries.set_of(at), entries.way_of(at) as u64);
    }

    fn moved(&mut self, entries: &mut Entries<'_>, from: usize, to: usize) {
        let (from_way, to_way) = (entries.way_of(from), entries.way_of(to));
        self.moves(entries.set_of(to), from_way as u64, to_way as u64);
    }

    #[inline(always)]
    fn victim(&mut self, entries: &mut Entries<'_>, set: usize) -> usize {
        #[expect(clippy::cast_possible_truncation, reason = "below SMALL_WAYS")]
        let way = self.evict(set) as usize;
        entries.of_set(set).start + way
    }
}

impl ReplacementPolicy for PackedLfu {
    #[inline(always)]
    fn used(&mut self, _entries: &mut Entries<'_>, at: usize, _next_use: u64) {
        self.use_entry(at);
    }

    #[inline(always)]
    fn inserted(&mut self, _entries: &mut Entries<'_>, at: usize, _next_use: u64) {
        self.enters(at);
    }

    fn removed(&mut self, _entries: &mut Entries<'_>, _at: usize) {}

    fn moved(&mut self, _entries: &mut Entries<'_>, from: usize, to: usize) {
        self.moves(from, to);
    }

    #[inline(always)]
    fn victim(&mut self, _entries: &mut Entries<'_>, set: usize) -> usize {
        self.evict(set)
    }
}

/// The entry used furthest in the future. A mark is the index of a request. Pages that are not used again are
/// equally far: the first entry goes, or the first in the order of the program's map.
#[derive(Debug)]
pub(crate) struct Oracle(Option<ProgramTies>);

impl ReplacementPolicy for Oracle {
    #[inline(always)]
    fn used(&mut self, entries: &mut Entries<'_>, at: usize, next_use: u64) {
        entries.set_mark(at, next_use);
    }

    #[inline(always)]
    fn inserted(&mut self, entries: &mut Entries<'_>, at: usize, next_use: u64) {
        if let Some(order) = &mut self.0 {
            let (set, way) = (entries.set_of(at), narrow(entries.way_of(at)));
            order.enters(set, program_hash(entries.tag(at)), way);
        }
        entries.set_mark(at, next_use);
    }

    fn removed(&mut self, entries: &mut Entries<'_>, at: usize) {
        if let Some(order) = &mut self.0 {
            order.leaves(entries.set_of(at), narrow(entries.way_of(at)));
        }
    }

    fn moved(&mut self, entries: &mut Entries<'_>, from: usize, to: usize) {
        if let Some(order) = &mut self.0 {
            let (from_way, to_way) = (entries.way_of(from), entries.way_of(to));
            order.moves(entries.set_of(to), narrow(from_way), narrow(to_way));
        }
    }

    #[inline(always)]
    fn victim(&mut self, entries: &mut Entries<'_>, set: usize) -> usize {
        let range = entries.of_set(set);
        let first = range.start;
        let entries = entries.slice(range);
        let way = position_of_furthest(entries);
        let Some(order) = &mut self.0 else {
            return first + way;
        };
        let furthest = entries[way].mark;
        let is_furthest = |way: u32| entries[way as usize].mark == furthest;
        let way = order.first(set, is_furthest).unwrap_or(0);
        order.leaves(set, way);
        first + way as usize
    }
}

/// A way as the program's ties are written.
const fn narrow(way: usize) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "at most ENTRIES_MAX")]
    let way = way as u32;
    way
}

/// Hash of a tag in the authors' program.
fn program_hash(tag: Tag) -> u64 {
    address_of(tag) << 16 | u64::from(domain_of(tag))
}

/// Bits of an entry's index in a mark of [`Lru`]; 40 bits remain for the
/// tick, 10^12 uses.
const LRU_ENTRY_BITS: u32 = ENTRIES_MAX.ilog2();

#[inline(always)]
const fn lru_mark(tick: u64, at: usize) -> u64 {
    tick << LRU_ENTRY_BITS | at as u64
}

const fn lru_tick(mark: u64) -> u64 {
    mark >> LRU_ENTRY_BITS
}

#[inline(always)]
const fn lru_entry(mark: u64) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "24 bits")]
    let at = mark as usize & (ENTRIES_MAX as usize - 1);
    at
}

/// The least mark. Four at a time, each with its own minimum, so that no comparison waits for the previous
/// one.
#[inline(always)]
fn least_mark(entries: &[Entry]) -> u64 {
    let (fours, rest) = entries.as_chunks::<4>();
    let mut least = [u64::MAX; 4];
    for four in fours {
        for (least, entry) in least.iter_mut().zip(four) {
            *least = entry.mark.min(*least);
        }
    }
    let rest = rest.iter().map(|entry| entry.mark);
    least.into_iter().chain(rest).min().unwrap_or(u64::MAX)
}

/// The way with the least use count, or one of several.
#[inline]
fn way_of_least_used(entries: &[Entry], set: usize, ties: &mut Ties) -> usize {
    let least = least_mark(entries);
    match ties {
        Ties::Random(random) if entries.len() <= 64 => {
            let bits = entries.iter().enumerate();
            let mut tied = bits.fold(0_u64, |all, (way, entry)| {
                all | u64::from(entry.mark == least) << way
            });
            for _ in 0..random.index(tied.count_ones() as usize) {
                tied &= tied - 1;
            }
            tied.trailing_zeros() as usize
        }
        Ties::Random(random) => {
            let tied = || (0..entries.len()).filter(|way| entries[*way].mark == least);
            let chosen = random.index(tied().count());
            tied().nth(chosen).unwrap_or(0)
        }
        Ties::Program(program) => {
            let is_least = |way: u32| entries[way as usize].mark == least;
            program.choose(set, is_least).unwrap_or(0) as usize
        }
    }
}

#[inline]
fn position_of_furthest(entries: &[Entry]) -> usize {
    let mut furthest = (0, 0);
    for (way, entry) in entries.iter().enumerate() {
        if entry.mark > furthest.0 {
            furthest = (entry.mark, way);
            if entry.mark == NEVER {
                break;
            }
        }
    }
    furthest.1
}
