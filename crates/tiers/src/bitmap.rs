// SPDX-License-Identifier: Apache-2.0
//! The sectors of one segment: which are used, and runs of those that are not.
//!
//! A disk reads and writes whole blocks, of 512 or 4,096 bytes. What is written must not share a block with
//! anything else, so a sector counts as free only if its whole block is unused. A block of 4,096 bytes is a
//! byte of this map.

/// Sectors of a segment (16 MiB).
pub const SEGMENT_SECTORS: u32 = 1 << 15;
const WORDS: usize = SEGMENT_SECTORS as usize / 64;

/// The unit in which a disk reads and writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockSize {
    /// One sector.
    Bytes512,
    /// Eight sectors.
    Bytes4096,
}

impl BlockSize {
    /// Sectors of a block.
    #[must_use]
    pub const fn sectors(self) -> u32 {
        match self {
            Self::Bytes512 => 1,
            Self::Bytes4096 => 8,
        }
    }

    /// Bytes of a block.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bytes512 => 512,
            Self::Bytes4096 => 4096,
        }
    }

    /// `used`, with every sector marked that shares a block with a used one.
    const fn spread(self, used: u64) -> u64 {
        match self {
            Self::Bytes512 => used,
            Self::Bytes4096 => {
                let pairs = used | (used >> 4);
                let quads = pairs | (pairs >> 2);
                let low = (quads | (quads >> 1)) & 0x0101_0101_0101_0101;
                low * 0xff
            }
        }
    }
}

/// A run of sectors of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// Its first sector, from the segment's.
    pub start: u32,
    /// How many there are.
    pub sectors: u32,
}

/// The used sectors of a segment.
#[derive(Clone, PartialEq, Eq)]
pub struct SectorMap {
    used: Box<[u64; WORDS]>,
    block: BlockSize,
}

impl SectorMap {
    /// A map in which nothing is used.
    pub fn new(block: BlockSize) -> Self {
        Self {
            used: Box::new([0; WORDS]),
            block,
        }
    }

    /// The same sectors on a disk with these blocks.
    pub fn in_blocks(&self, block: BlockSize) -> Self {
        Self {
            used: self.used.clone(),
            block,
        }
    }

    /// Marks the sectors of `run` as used.
    pub fn set(&mut self, run: Run) {
        self.each_word(run, |word, mask| *word |= mask);
    }

    /// Marks the sectors of `run` as unused.
    pub fn clear(&mut self, run: Run) {
        self.each_word(run, |word, mask| *word &= !mask);
    }

    /// How many sectors of `run` are used.
    pub fn used_in(&mut self, run: Run) -> u32 {
        let mut used = 0;
        self.each_word(run, |word, mask| used += (*word & mask).count_ones());
        used
    }

    fn each_word(&mut self, run: Run, mut act: impl FnMut(&mut u64, u64)) {
        let end = (run.start + run.sectors).min(SEGMENT_SECTORS);
        let mut at = run.start;
        while at < end {
            let (bit, bits) = (at % 64, (64 - at % 64).min(end - at));
            let mask = (u64::MAX >> (64 - bits)) << bit;
            act(&mut self.used[(at / 64) as usize], mask);
            at += bits;
        }
    }

    /// The free run around `sector`; empty if its block is used.
    pub fn free_around(&self, sector: u32) -> Run {
        let end = self.first_from(sector, Wanted::Used);
        let mut start = sector;
        // Backwards word by word: the highest used sector below ends the run.
        while start > 0 && end > sector {
            let word = (start - 1) / 64;
            let below = u64::MAX >> (63 - (start - 1) % 64);
            let used = self.block.spread(self.used[word as usize]) & below;
            if used != 0 {
                start = word * 64 + 64 - used.leading_zeros();
                break;
            }
            start = word * 64;
        }
        Run {
            start,
            sectors: end - start,
        }
    }

    /// The longest free run that has any of `run`, which is unused. What it shares its first and last block
    /// with may be used; the blocks between are free.
    pub fn longest_touching(&self, run: Run) -> u32 {
        let last = run.start + run.sectors.max(1) - 1;
        let second = run.start.next_multiple_of(self.block.sectors()).min(last);
        let around = [run.start, second, last].map(|sector| self.free_around(sector).sectors);
        around.into_iter().max().unwrap_or(0)
    }

    /// The first free run of at least `sectors`.
    pub fn first_free(&self, sectors: u32) -> Option<Run> {
        self.free_runs().find(|run| run.sectors >= sectors)
    }

    /// The longest free run, in sectors.
    pub fn longest_free(&self) -> u32 {
        self.free_runs().map(|run| run.sectors).max().unwrap_or(0)
    }

    fn free_runs(&self) -> impl Iterator<Item = Run> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.first_from(at, Wanted::Free);
            if start >= SEGMENT_SECTORS {
                return None;
            }
            at = self.first_from(start, Wanted::Used);
            Some(Run {
                start,
                sectors: at - start,
            })
        })
    }

    fn first_from(&self, from: u32, wanted: Wanted) -> u32 {
        let mut ignored = u64::MAX << (from % 64);
        for index in from / 64..SEGMENT_SECTORS / 64 {
            let used = self.block.spread(self.used[index as usize]);
            let found = ignored
                & match wanted {
                    Wanted::Used => used,
                    Wanted::Free => !used,
                };
            if found != 0 {
                return index * 64 + found.trailing_zeros();
            }
            ignored = u64::MAX;
        }
        SEGMENT_SECTORS
    }
}

#[derive(Clone, Copy)]
enum Wanted {
    Used,
    Free,
}

#[cfg(test)]
mod tests {
    #![expect(clippy::cast_possible_truncation, reason = "random numbers are cut")]

    use super::*;
    use pagetide_random::SplitMix64;

    /// The free runs of a naive map.
    fn runs(used: &[bool], block: BlockSize) -> Vec<Run> {
        let size = block.sectors() as usize;
        let free: Vec<bool> = (0..used.len())
            .map(|at| used[at / size * size..][..size].iter().all(|used| !used))
            .collect();
        let mut runs = Vec::new();
        let mut at = 0;
        while at < free.len() {
            let sectors = free[at..].iter().take_while(|free| **free).count();
            if sectors > 0 {
                runs.push(Run {
                    start: at as u32,
                    sectors: sectors as u32,
                });
            }
            at += sectors.max(1);
        }
        runs
    }

    #[test]
    fn runs_follow_a_naive_model() {
        for block in [BlockSize::Bytes512, BlockSize::Bytes4096] {
            let mut random = SplitMix64::new(3);
            let mut map = SectorMap::new(block);
            let mut naive = vec![false; SEGMENT_SECTORS as usize];
            for step in 0..300 {
                let longest = [3, 80, 5000][random.index(3)];
                let start = random.below(u64::from(SEGMENT_SECTORS)) as u32;
                let sectors = (1 + random.below(longest) as u32).min(SEGMENT_SECTORS - start);
                let run = Run { start, sectors };
                let part = &mut naive[start as usize..(start + sectors) as usize];
                let used = part.iter().filter(|used| **used).count();
                assert_eq!(map.used_in(run) as usize, used);
                let set = random.below(3) > 0;
                part.fill(set);
                if set {
                    map.set(run);
                } else {
                    map.clear(run);
                }
                let expected = runs(&naive, block);
                assert_eq!(map.free_runs().collect::<Vec<_>>(), expected, "step {step}");
                if !set {
                    let end = start + sectors;
                    let touching = expected
                        .iter()
                        .filter(|other| other.start < end && start < other.start + other.sectors);
                    let longest = touching.map(|other| other.sectors).max().unwrap_or(0);
                    assert_eq!(map.longest_touching(run), longest, "step {step}");
                }
                let longest = expected.iter().map(|run| run.sectors).max().unwrap_or(0);
                assert_eq!(map.longest_free(), longest);
                let at = random.below(u64::from(SEGMENT_SECTORS)) as u32;
                let around = expected
                    .iter()
                    .find(|run| (run.start..run.start + run.sectors).contains(&at));
                let none = Run {
                    start: at,
                    sectors: 0,
                };
                assert_eq!(map.free_around(at), *around.unwrap_or(&none));
                let wanted = random.below(100) as u32 + 1;
                let first = expected.iter().find(|run| run.sectors >= wanted);
                assert_eq!(map.first_free(wanted), first.copied());
            }
        }
    }
}
