// SPDX-License-Identifier: Apache-2.0
//! The memory loop: verify every page, rewrite some, in mixed order.
//!
//! A sweep alone would make every page equally cold, and a random walk alone would make none cold. Real
//! guests do both and keep a small set hot, so each step takes one stride of the sweep, a few random pages
//! and a few pages of the hot set. Where a guest must have idle memory (`pt.active`), these steps stay in
//! the first part of the memory, and the rest is swept so slowly that it grows cold, but is still verified.
//!
//! The memory is two halves, each its own allocation. On request of the host the upper half is freed, and
//! later allocated again with new content: a balloon that reports free pages then has some to report, and
//! the kernel uses RAM plugged in meanwhile first. The allocator gives an allocation of more than 32 MiB
//! back to the kernel at once.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::params::Params;
use crate::pattern::{self, PAGE_BYTES, PAGE_WORDS};
use crate::plugged::plugged_bytes;
use crate::shared::{Counters, Extent, Order, Shared};

/// Pages of one stride of the sweep.
const STRIDE_PAGES: usize = 64;
/// Random pages checked in each step.
const RANDOM_PAGES: usize = 8;
/// Hot pages rewritten in each step.
const HOT_PAGES_A_STEP: usize = 16;
/// A stride of the inactive part is swept once in this many steps.
const REST_EVERY_STEPS: u64 = 64;
/// Pages of the hot set (2 MiB).
const HOT_PAGES: usize = 512;

/// Contiguous pages.
#[derive(Debug)]
struct Pages {
    words: Vec<u64>,
    /// Words before the first page boundary.
    skew_words: usize,
}

impl Pages {
    /// Allocates this many pages, untouched.
    fn new(pages: usize) -> Self {
        let words = vec![0; (pages + 1) * PAGE_WORDS];
        let skew_words = words.as_ptr().align_offset(PAGE_BYTES).min(PAGE_WORDS);
        Self { words, skew_words }
    }

    fn page(&self, index: usize) -> &[u64] {
        let start = self.skew_words + index * PAGE_WORDS;
        &self.words[start..start + PAGE_WORDS]
    }

    fn page_mut(&mut self, index: usize) -> &mut [u64] {
        let start = self.skew_words + index * PAGE_WORDS;
        &mut self.words[start..start + PAGE_WORDS]
    }
}

/// The memory under work and its expected content.
#[derive(Debug)]
pub struct Memory {
    lower: Pages,
    /// Absent while its memory is freed.
    upper: Option<Pages>,
    lower_pages: usize,
    /// Of all pages, freed ones included.
    generations: Vec<u32>,
    seed: u64,
    random: u64,
    steps: u64,
    /// The first pages, which are in constant use.
    active_pages: usize,
    cursor: usize,
    /// Position of the sweep over the inactive part.
    rest_cursor: usize,
}

impl Memory {
    /// Allocates the memory without touching it.
    #[must_use]
    pub fn new(params: &Params) -> Self {
        let pages = usize::try_from(params.mem_bytes).unwrap_or(usize::MAX) / PAGE_BYTES;
        let lower_pages = pages.div_ceil(2);
        let active_pages = match usize::try_from(params.active_bytes) {
            Ok(0) | Err(_) => pages,
            Ok(bytes) => (bytes / PAGE_BYTES).clamp(1, pages.max(1)),
        };
        Self {
            lower: Pages::new(lower_pages),
            upper: Some(Pages::new(pages - lower_pages)),
            lower_pages,
            generations: vec![0; pages],
            seed: params.seed,
            random: pattern::mix(params.seed ^ 0x6d65_6d6f_7279) | 1,
            steps: 0,
            active_pages,
            cursor: 0,
            rest_cursor: 0,
        }
    }

    /// Number of pages under work.
    #[must_use]
    pub fn pages(&self) -> usize {
        match self.upper {
            Some(_) => self.generations.len(),
            None => self.lower_pages,
        }
    }

    /// Frees the upper half, or allocates it again and fills it with a new generation.
    pub fn resize(&mut self, extent: Extent) {
        match (extent, &self.upper) {
            (Extent::Half, Some(_)) => {
                self.upper = None;
                self.cursor = 0;
            }
            (Extent::Whole, None) => {
                let all = self.generations.len();
                self.upper = Some(Pages::new(all - self.lower_pages));
                for number in self.lower_pages..all {
                    self.rewrite(number);
                }
            }
            _ => {}
        }
    }

    /// Writes the first generation of every page.
    pub fn fill(&mut self) {
        for number in 0..self.pages() {
            self.write(number);
        }
    }

    /// One stride of the sweep, some random pages, some hot ones.
    pub fn step(&mut self, counters: &Counters) {
        if self.pages() == 0 {
            return;
        }
        let active = self.active_pages.min(self.pages());
        for offset in 0..STRIDE_PAGES {
            let number = self.cursor;
            self.verify(number, counters);
            if offset % 4 == 0 {
                self.rewrite(number);
            }
            self.cursor += 1;
            if self.cursor >= active {
                self.cursor = 0;
                Counters::add(&counters.rounds, 1);
            }
        }
        for _ in 0..RANDOM_PAGES {
            let number = self.draw(active);
            self.verify(number, counters);
        }
        for _ in 0..HOT_PAGES_A_STEP {
            let number = self.draw(HOT_PAGES.min(active));
            self.verify(number, counters);
            self.rewrite(number);
        }
        self.steps += 1;
        if self.steps.is_multiple_of(REST_EVERY_STEPS) {
            self.step_of_the_rest(active, counters);
        }
    }

    /// A stride of the sweep over the inactive part.
    fn step_of_the_rest(&mut self, active: usize, counters: &Counters) {
        let rest = self.pages() - active;
        for _ in 0..STRIDE_PAGES.min(rest) {
            self.rest_cursor = (self.rest_cursor + 1) % rest;
            let number = active + self.rest_cursor;
            self.verify(number, counters);
            if number.is_multiple_of(4) {
                self.rewrite(number);
            }
        }
    }

    /// How much of it lies in plugged RAM.
    #[must_use]
    pub fn plugged_bytes(&self) -> u64 {
        let of = |pages: &Pages| plugged_bytes(&pages.words[pages.skew_words..]);
        of(&self.lower) + self.upper.as_ref().map_or(0, of)
    }

    /// Verifies every page once, in order.
    pub fn verify_all(&self, counters: &Counters) {
        for number in 0..self.pages() {
            self.verify(number, counters);
            Counters::add(&counters.final_bytes, PAGE_BYTES as u64);
        }
    }

    fn draw(&mut self, below: usize) -> usize {
        self.random = pattern::step(self.random);
        usize::try_from(self.random >> 8).unwrap_or(0) % below
    }

    fn page(&self, number: usize) -> &[u64] {
        match (number.checked_sub(self.lower_pages), &self.upper) {
            (Some(index), Some(upper)) => upper.page(index),
            _ => self.lower.page(number),
        }
    }

    fn page_mut(&mut self, number: usize) -> &mut [u64] {
        match (number.checked_sub(self.lower_pages), &mut self.upper) {
            (Some(index), Some(upper)) => upper.page_mut(index),
            _ => self.lower.page_mut(number),
        }
    }

    fn key(&self, number: usize) -> u64 {
        pattern::key(self.seed, number as u64, self.generations[number])
    }

    fn write(&mut self, number: usize) {
        let key = self.key(number);
        pattern::fill(self.page_mut(number), key);
    }

    fn rewrite(&mut self, number: usize) {
        self.generations[number] = self.generations[number].wrapping_add(1);
        self.write(number);
    }

    fn verify(&self, number: usize, counters: &Counters) {
        let page = self.page(number);
        if let Err(wrong) = pattern::check(page, self.key(number))
            && counters.count_error()
        {
            eprintln!(
                "guest-work: memory page {number} at {:p}, generation {}: {wrong:x?}",
                page.as_ptr(),
                self.generations[number],
            );
        }
        Counters::add(&counters.bytes_verified, PAGE_BYTES as u64);
    }
}

/// Fills, works until the stop command, verifies everything.
pub fn run(params: &Params, shared: &Shared) {
    let counters = &shared.memory;
    let mut memory = Memory::new(params);
    let tell = |memory: &Memory| {
        let bytes = (memory.pages() * PAGE_BYTES) as u64;
        counters.bytes.store(bytes, Relaxed);
    };
    tell(&memory);
    memory.fill();
    counters.filled.store(true, Relaxed);
    let mut looked = None;
    while shared.order() == Order::Step {
        memory.resize(shared.extent());
        tell(&memory);
        // A sweep has been everywhere, so all of it is present.
        let now = (memory.pages(), counters.rounds.load(Relaxed));
        if looked.replace(now) != Some(now) {
            counters
                .plugged_bytes
                .store(memory.plugged_bytes(), Relaxed);
        }
        memory.step(counters);
        rest(params.pace_us);
    }
    memory.verify_all(counters);
}

/// The pause of a busy loop after each step, which reduces the guest's load; never a wait for anything.
pub(crate) fn rest(pace_us: u64) {
    if pace_us > 0 {
        std::thread::sleep(Duration::from_micros(pace_us));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(pages: u64) -> Memory {
        let bytes = pages * PAGE_BYTES as u64;
        let mut memory = Memory::new(&Params {
            mem_bytes: bytes,
            ..Params::default()
        });
        memory.fill();
        memory
    }

    #[test]
    fn sound_memory_many_steps_no_error() {
        let (mut memory, counters) = (memory(1000), Counters::default());
        for _ in 0..100 {
            memory.step(&counters);
        }
        memory.verify_all(&counters);
        assert_eq!(counters.errors.load(Relaxed), 0);
        assert_eq!(counters.rounds.load(Relaxed), 6);
        assert_eq!(counters.final_bytes.load(Relaxed), 1000 * PAGE_BYTES as u64);
    }

    #[test]
    fn page_of_an_older_generation_is_an_error() {
        let (mut memory, counters) = (memory(64), Counters::default());
        let old = memory.page(5).to_vec();
        while pattern::kind(memory.key(5)) != pattern::Kind::Text || old == memory.page(5) {
            memory.rewrite(5);
        }
        memory.page_mut(5).copy_from_slice(&old);
        memory.verify_all(&counters);
        assert_eq!(counters.errors.load(Relaxed), 1);
    }

    #[test]
    fn memory_that_is_not_active_is_swept_too_but_seldom() {
        let mut memory = Memory::new(&Params {
            mem_bytes: 1000 * PAGE_BYTES as u64,
            active_bytes: 128 * PAGE_BYTES as u64,
            ..Params::default()
        });
        memory.fill();
        let (counters, first) = (Counters::default(), memory.generations.clone());
        for _ in 0..20 * REST_EVERY_STEPS {
            memory.step(&counters);
        }
        memory.verify_all(&counters);
        assert_eq!(counters.errors.load(Relaxed), 0);
        // Twenty strides of the inactive part, of which a quarter is rewritten: each page at most twice.
        let rewritten = memory.generations[128..].iter().zip(&first[128..]);
        let times: Vec<u32> = rewritten.map(|(now, then)| now - then).collect();
        assert_eq!(times.iter().sum::<u32>(), 320);
        assert!(times.iter().all(|&times| times <= 2), "{times:?}");
    }

    #[test]
    fn upper_half_given_up_and_taken_again_is_sound_and_new() {
        let (mut memory, counters) = (memory(1001), Counters::default());
        let before = memory.generations.clone();
        memory.resize(Extent::Half);
        assert_eq!(memory.pages(), 501);
        for _ in 0..20 {
            memory.step(&counters);
        }
        memory.resize(Extent::Whole);
        assert_eq!(memory.pages(), 1001);
        memory.verify_all(&counters);
        assert_eq!(counters.errors.load(Relaxed), 0);
        let upper = 501..1001;
        assert!(
            upper
                .clone()
                .all(|n| memory.generations[n] == before[n] + 1)
        );
        memory.resize(Extent::Whole);
        assert!(
            upper
                .clone()
                .all(|n| memory.generations[n] == before[n] + 1)
        );
    }

    #[test]
    fn pages_begin_on_page_boundaries() {
        let memory = memory(3);
        for number in 0..3 {
            assert_eq!(memory.page(number).as_ptr().align_offset(PAGE_BYTES), 0);
        }
    }
}
