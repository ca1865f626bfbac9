// SPDX-License-Identifier: Apache-2.0
//! The load of the allocators: the same for all.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use pagetide_random::SplitMix64;

use crate::harness::figures::to_f64;

/// Pages of the space: 2^48 bytes.
pub(super) const SPACE_PAGES: u64 = 1 << 36;

/// Sizes in pages: allocations of a thousand, smallest, largest, even in between.
pub(super) type Mix = &'static [(u64, u64, u64)];

/// Sizes of typical DMA buffers and mappings: a page is a packet buffer or a file system's block, 2 to 4
/// jumbo frames and receive buffers, up to 16 the 64 KiB of segmentation offload, of a pipe and of
/// readahead, up to 64 a large block request, up to 512 a ring or a huge page, more a heap's growth or a
/// file.
pub(super) const MIXED: Mix = &[
    (500, 1, 1),
    (250, 2, 4),
    (170, 5, 16),
    (60, 17, 64),
    (15, 65, 512),
    (5, 513, 4096),
];

/// Only sizes that Linux's magazines hold as well.
pub(super) const SMALL: Mix = &[(550, 1, 1), (250, 2, 4), (150, 5, 16), (50, 17, 32)];

/// Only sizes that they do not hold, in the shares of [`MIXED`].
pub(super) const LARGE: Mix = &[(500, 33, 64), (375, 65, 512), (125, 513, 4096)];

/// Steps between two reads of the clock.
const BATCH: usize = 64;

/// An allocator of addresses, called from several threads.
pub(super) trait Allocator: Send + Sync {
    /// Address of `pages` free pages.
    fn alloc(&self, pages: u64) -> Option<u64>;
    /// Frees them; false if the allocator does not know them.
    fn free(&self, start: u64, pages: u64) -> bool;
}

/// An allocator refused, though there is room for all.
#[derive(Debug, thiserror::Error)]
#[error("an allocator failed though there is room: {0}")]
pub(super) struct Refused(&'static str);

/// A live region: its address and its pages.
type Region = (u64, u64);

/// An allocator with its live regions.
pub(super) struct Load {
    allocator: Box<dyn Allocator>,
    threads: Vec<ThreadLoad>,
    /// How often a thread has slept in [`Self::run`]: it waited for a lock, for there is nothing else.
    sleeps: u64,
    operations: f64,
}

/// The state of one thread.
struct ThreadLoad {
    live: Vec<Region>,
    random: SplitMix64,
    mix: Mix,
}

impl Load {
    /// `live` regions with sizes of `mix`, divided among `threads`.
    pub(super) fn new(
        allocator: Box<dyn Allocator>,
        mix: Mix,
        live: usize,
        threads: usize,
    ) -> Result<Self, Refused> {
        let mut load = Self {
            threads: Vec::new(),
            allocator,
            sleeps: 0,
            operations: 0.0,
        };
        for seed in 1..=threads {
            let mut random = SplitMix64::new(seed as u64);
            let regions = (0..live / threads).map(|_| {
                let pages = draw_pages(&mut random, mix);
                let start = load.allocator.alloc(pages).ok_or(Refused("alloc"))?;
                Ok((start, pages))
            });
            let live = regions.collect::<Result<Vec<_>, Refused>>()?;
            load.threads.push(ThreadLoad { live, random, mix });
        }
        Ok(load)
    }

    /// All threads step for `slice`; operations a second of all together.
    pub(super) fn run(&mut self, slice: Duration) -> Result<f64, Refused> {
        let barrier = Barrier::new(self.threads.len());
        let (allocator, barrier) = (&*self.allocator, &barrier);
        let rates = std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .threads
                .iter_mut()
                .map(|thread| {
                    scope.spawn(move || {
                        barrier.wait();
                        thread.steps_for(allocator, slice)
                    })
                })
                .collect();
            let rates = threads.into_iter().map(|thread| match thread.join() {
                Ok(rate) => rate,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            rates.collect::<Result<Vec<_>, _>>()
        })?;
        for (per_second, sleeps) in &rates {
            self.operations += per_second * slice.as_secs_f64();
            self.sleeps += sleeps;
        }
        Ok(rates.iter().map(|(per_second, _)| per_second).sum())
    }

    /// Sleeps of all threads in a million operations so far.
    pub(super) fn sleeps_per_million(&self) -> f64 {
        to_f64(self.sleeps) * 1e6 / self.operations
    }

    /// Nanoseconds of an operation of the first thread, without the harness's work.
    pub(super) fn operation_ns(&mut self, slice: Duration) -> Result<f64, Refused> {
        let (mut steps, mut inside) = (0_u32, Duration::ZERO);
        while inside < slice {
            inside += self.threads[0].batch_apart(&*self.allocator)?;
            steps += 1;
        }
        let operations = f64::from(steps) * (2 * BATCH) as f64;
        Ok(inside.as_secs_f64() * 1e9 / operations)
    }

    /// At least `steps` steps of the first thread.
    pub(super) fn step_apart(&mut self, steps: usize) -> Result<(), Refused> {
        for _ in 0..steps.div_ceil(BATCH) {
            self.threads[0].batch_apart(&*self.allocator)?;
        }
        Ok(())
    }

    /// All live regions.
    #[cfg(test)]
    pub(super) fn regions(&self) -> Vec<Region> {
        let threads = self.threads.iter();
        threads.flat_map(|thread| thread.live.clone()).collect()
    }
}

impl ThreadLoad {
    /// Steps for `slice`; operations a second, and how often the thread slept.
    fn steps_for(
        &mut self,
        allocator: &dyn Allocator,
        slice: Duration,
    ) -> Result<(f64, u64), Refused> {
        let slept_before = sleeps_of_this_thread();
        let (begin, mut steps) = (Instant::now(), 0_u32);
        loop {
            for _ in 0..BATCH {
                let index = self.random.index(self.live.len());
                let (start, pages) = self.live[index];
                if !allocator.free(start, pages) {
                    return Err(Refused("free"));
                }
                let pages = draw_pages(&mut self.random, self.mix);
                let start = allocator.alloc(pages).ok_or(Refused("alloc"))?;
                self.live[index] = (start, pages);
            }
            steps += 1;
            let elapsed = begin.elapsed();
            if elapsed >= slice {
                let operations = f64::from(steps) * (2 * BATCH) as f64;
                let sleeps = sleeps_of_this_thread().saturating_sub(slept_before);
                return Ok((operations / elapsed.as_secs_f64(), sleeps));
            }
        }
    }

    /// A batch of steps with all random draws made before; returns its time.
    fn batch_apart(&mut self, allocator: &dyn Allocator) -> Result<Duration, Refused> {
        let mut regions: [(Region, u64); BATCH] = [((0, 0), 0); BATCH];
        for (victim, pages) in &mut regions {
            let index = self.random.index(self.live.len());
            *victim = self.live.swap_remove(index);
            *pages = draw_pages(&mut self.random, self.mix);
        }
        let mut refused = false;
        let begin = Instant::now();
        for (region, pages) in black_box(&mut regions) {
            refused |= !allocator.free(region.0, region.1);
            let start = allocator.alloc(*pages);
            refused |= start.is_none();
            *region = (start.unwrap_or(0), *pages);
        }
        let inside = begin.elapsed();
        if refused {
            return Err(Refused("alloc or free"));
        }
        self.live.extend(regions.iter().map(|(region, _)| *region));
        Ok(inside)
    }
}

/// How often this thread has given up its CPU by itself; 0 if the kernel does not say.
fn sleeps_of_this_thread() -> u64 {
    const FIELD: &str = "voluntary_ctxt_switches:";
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let count = status.lines().find_map(|line| line.strip_prefix(FIELD));
    count
        .and_then(|count| count.trim().parse().ok())
        .unwrap_or(0)
}

/// A size from `mix`, in pages.
fn draw_pages(random: &mut SplitMix64, mix: Mix) -> u64 {
    let mut drawn = random.below(1000);
    for &(share, smallest, largest) in mix {
        if drawn < share {
            return random.between(smallest, largest + 1);
        }
        drawn -= share;
    }
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mix_adds_up_and_sizes_stay_within_it() {
        for (mix, smallest, largest) in [(MIXED, 1, 4096), (SMALL, 1, 32), (LARGE, 33, 4096)] {
            assert_eq!(mix.iter().map(|(share, _, _)| share).sum::<u64>(), 1000);
            let mut random = SplitMix64::new(1);
            let sizes: Vec<u64> = (0..10_000).map(|_| draw_pages(&mut random, mix)).collect();
            assert!(
                sizes
                    .iter()
                    .all(|pages| (smallest..=largest).contains(pages))
            );
            if smallest > 1 {
                continue;
            }
            let single = sizes.iter().filter(|&&pages| pages == 1).count();
            assert!((4_500..6_000).contains(&single), "{single}");
        }
    }
}
