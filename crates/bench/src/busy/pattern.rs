// SPDX-License-Identifier: Apache-2.0
//! Which pages are hot.
//!
//! | pattern | written | hot |
//! |---|---|---|
//! | part | `part:125` | this many thousandths of the RAM, contiguous |
//! | moving | `moving:500:6` | the same, and the piece moves by this many sections a minute |
//! | sections | `sections:500` | whole sections, scattered |
//! | pages | `pages:500` | pages, scattered: each section has hot and cold ones |
//! | one page | `one-page` | one page of each section |
//!
//! Shares are rounded to sections (pages to pages), and there is always a hot part. vCPUs choose all hot
//! pages with equal probability.

use pagetide_addr::{PageNo, SECTION_PAGES, to_usize};
use pagetide_random::SplitMix64;
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    str::FromStr,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Seed of the scattered choices: the same in each run.
const SEED: u64 = 14;

/// See the module. Shares are in thousandths of the RAM.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Pattern {
    /// One piece.
    Part {
        /// Share.
        hot_permille: u32,
    },
    /// One piece that moves.
    Moving {
        /// Share.
        hot_permille: u32,
        /// Its speed.
        sections_a_minute: u32,
    },
    /// Whole sections.
    Sections {
        /// Share.
        hot_permille: u32,
    },
    /// Pages.
    Pages {
        /// Share.
        hot_permille: u32,
    },
    /// One page of each section.
    OnePage,
}

/// Why text is not a valid pattern.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("'{0}' is none of part:N, moving:N:M, sections:N, pages:N and one-page, N from 1 to 1000")]
pub struct PatternError(String);

impl FromStr for Pattern {
    type Err = PatternError;

    fn from_str(text: &str) -> Result<Self, PatternError> {
        let wrong = || PatternError(text.to_owned());
        let (name, numbers) = text.split_once(':').unwrap_or((text, ""));
        let numbers: Vec<u32> = numbers
            .split(':')
            .filter(|number| !number.is_empty())
            .map(|number| number.parse().map_err(|_| wrong()))
            .collect::<Result<_, _>>()?;
        let pattern = match (name, &numbers[..]) {
            ("part", &[hot_permille]) => Self::Part { hot_permille },
            ("moving", &[hot_permille, sections_a_minute]) => Self::Moving {
                hot_permille,
                sections_a_minute,
            },
            ("sections", &[hot_permille]) => Self::Sections { hot_permille },
            ("pages", &[hot_permille]) => Self::Pages { hot_permille },
            ("one-page", []) => Self::OnePage,
            _ => return Err(wrong()),
        };
        match numbers.first() {
            Some(0 | 1001..) => Err(wrong()),
            _ => Ok(pattern),
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Part { hot_permille } => write!(f, "part:{hot_permille}"),
            Self::Moving {
                hot_permille,
                sections_a_minute,
            } => write!(f, "moving:{hot_permille}:{sections_a_minute}"),
            Self::Sections { hot_permille } => write!(f, "sections:{hot_permille}"),
            Self::Pages { hot_permille } => write!(f, "pages:{hot_permille}"),
            Self::OnePage => f.write_str("one-page"),
        }
    }
}

impl TryFrom<String> for Pattern {
    type Error = PatternError;

    fn try_from(text: String) -> Result<Self, PatternError> {
        text.parse()
    }
}

impl From<Pattern> for String {
    fn from(pattern: Pattern) -> Self {
        pattern.to_string()
    }
}

impl Pattern {
    /// How long a moving piece stays in place.
    #[must_use]
    pub fn stays_for(self) -> Option<Duration> {
        match self {
            Self::Moving {
                sections_a_minute, ..
            } if sections_a_minute > 0 => Some(Duration::from_secs(60) / sections_a_minute),
            _ => None,
        }
    }
}

/// The hot pages of a RAM.
#[derive(Debug)]
pub struct HotPages {
    sections: u64,
    places: Places,
}

#[derive(Debug)]
enum Places {
    /// `count` sections from `first` on, wrapping around.
    Piece { first: AtomicU64, count: AtomicU64 },
    /// Sections by their numbers, ascending.
    Sections(Vec<u32>),
    /// Pages by their numbers, ascending.
    Pages(Vec<u32>),
}

impl HotPages {
    /// Those of a RAM of `sections` sections by `pattern`. At least one section; page numbers are
    /// kept in 32 bits, which is 16 TiB.
    #[must_use]
    pub fn new(pattern: Pattern, sections: u64) -> Self {
        let places = match pattern {
            Pattern::Part { hot_permille } | Pattern::Moving { hot_permille, .. } => {
                Places::Piece {
                    first: AtomicU64::new(0),
                    count: AtomicU64::new(share(sections, hot_permille)),
                }
            }
            Pattern::Sections { hot_permille } => {
                Places::Sections(chosen(sections, share(sections, hot_permille)))
            }
            Pattern::Pages { hot_permille } => {
                let pages = sections * SECTION_PAGES;
                Places::Pages(chosen(pages, share(pages, hot_permille)))
            }
            Pattern::OnePage => {
                let mut random = SplitMix64::new(SEED);
                let page = |section| section * SECTION_PAGES + random.below(SECTION_PAGES);
                Places::Pages((0..sections).map(page).map(to_u32).collect())
            }
        };
        Self { sections, places }
    }

    /// A hot page, selected by 64 random bits.
    #[inline]
    #[must_use]
    pub fn pick(&self, random: u64) -> PageNo {
        // The high and the low half select: multiplication is cheaper than division.
        let within = |count: u64, bits: u64| (count * (bits & 0xffff_ffff)) >> 32;
        let (high, low) = (random >> 32, random);
        let in_section = |section: u64| PageNo(section * SECTION_PAGES + low % SECTION_PAGES);
        match &self.places {
            Places::Piece { first, count } => {
                let count = count.load(Ordering::Relaxed);
                let section = first.load(Ordering::Relaxed) + within(count, high);
                in_section(if section < self.sections {
                    section
                } else {
                    section - self.sections
                })
            }
            Places::Sections(sections) => {
                let at = to_usize(within(sections.len() as u64, high));
                in_section(u64::from(sections[at]))
            }
            Places::Pages(pages) => {
                let at = to_usize(within(pages.len() as u64, high));
                PageNo(u64::from(pages[at]))
            }
        }
    }

    /// True for a hot page.
    #[must_use]
    pub fn is_hot(&self, page: PageNo) -> bool {
        let section = page.0 / SECTION_PAGES;
        match &self.places {
            Places::Piece { first, count } => {
                let first = first.load(Ordering::Relaxed);
                let count = count.load(Ordering::Relaxed);
                (section + self.sections - first) % self.sections < count
            }
            Places::Sections(sections) => sections.binary_search(&to_u32(section)).is_ok(),
            Places::Pages(pages) => pages.binary_search(&to_u32(page.0)).is_ok(),
        }
    }

    /// Makes a hot piece so large that it is `hot_permille` of the RAM; its first section stays. Other
    /// patterns stay as they are.
    pub fn resize(&self, hot_permille: u32) {
        if let Places::Piece { count, .. } = &self.places {
            count.store(share(self.sections, hot_permille), Ordering::Relaxed);
        }
    }

    /// Moves a hot piece by `sections`; other patterns do not move.
    pub fn advance(&self, sections: u64) {
        if let Places::Piece { first, .. } = &self.places {
            // Only one thread moves it.
            let moved = (first.load(Ordering::Relaxed) + sections) % self.sections;
            first.store(moved, Ordering::Relaxed);
        }
    }
}

/// So many thousandths of `of`, but at least one.
fn share(of: u64, permille: u32) -> u64 {
    (of * u64::from(permille) / 1000).clamp(1, of)
}

fn to_u32(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// `count` of the numbers below `of`, ascending.
fn chosen(of: u64, count: u64) -> Vec<u32> {
    let mut random = SplitMix64::new(SEED);
    let mut missing = count;
    // Each number is chosen with the probability that makes the count exact at the end.
    (0..of)
        .filter(|number| {
            let take = random.below(of - number) < missing;
            missing -= u64::from(take);
            take
        })
        .map(to_u32)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const SECTIONS: u64 = 20;

    fn hot(pages: &HotPages) -> BTreeSet<u64> {
        let all = (0..SECTIONS * SECTION_PAGES).filter(|page| pages.is_hot(PageNo(*page)));
        all.collect()
    }

    fn picked(pages: &HotPages) -> BTreeSet<u64> {
        let mut random = SplitMix64::new(1);
        (0..200_000)
            .map(|_| pages.pick(random.next_u64()).0)
            .collect()
    }

    #[test]
    fn just_the_hot_pages_are_picked() {
        for (text, count) in [
            ("part:125", 2 * SECTION_PAGES),
            ("moving:500:60", 10 * SECTION_PAGES),
            ("sections:250", 5 * SECTION_PAGES),
            ("pages:100", SECTIONS * SECTION_PAGES / 10),
            ("one-page", SECTIONS),
            ("part:1", SECTION_PAGES),
            ("part:1000", SECTIONS * SECTION_PAGES),
        ] {
            let pages = HotPages::new(text.parse().unwrap(), SECTIONS);
            assert_eq!(hot(&pages).len() as u64, count, "{text}");
            assert_eq!(hot(&pages), picked(&pages), "{text}");
        }
    }

    #[test]
    fn piece_moves_round_the_end() {
        let pages = HotPages::new("moving:500:60".parse().unwrap(), SECTIONS);
        pages.advance(15);
        let sections: BTreeSet<u64> = hot(&pages).iter().map(|p| p / SECTION_PAGES).collect();
        assert!(sections.into_iter().eq((0..5).chain(15..20)));
        assert_eq!(hot(&pages), picked(&pages));
        pages.advance(5);
        assert!(pages.is_hot(PageNo(0)) && !pages.is_hot(PageNo(19 * SECTION_PAGES)));
    }

    #[test]
    fn piece_grows_from_its_first_section_on() {
        let pages = HotPages::new("part:250".parse().unwrap(), SECTIONS);
        pages.advance(18);
        pages.resize(500);
        let sections: BTreeSet<u64> = hot(&pages).iter().map(|p| p / SECTION_PAGES).collect();
        assert!(sections.into_iter().eq((0..8).chain(18..20)));
        assert_eq!(hot(&pages), picked(&pages));
    }

    #[test]
    fn patterns_are_read_as_they_are_written() {
        for text in [
            "part:125",
            "moving:500:6",
            "sections:900",
            "pages:1",
            "one-page",
        ] {
            assert_eq!(text.parse::<Pattern>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "part",
            "part:0",
            "part:1001",
            "moving:5",
            "one-page:5",
            "pages:x",
        ] {
            assert!(text.parse::<Pattern>().is_err(), "{text}");
        }
        let moving: Pattern = "moving:500:6".parse().unwrap();
        assert_eq!(moving.stays_for(), Some(Duration::from_secs(10)));
        assert_eq!("part:5".parse::<Pattern>().unwrap().stays_for(), None);
    }
}
