// SPDX-License-Identifier: Apache-2.0
//! The rounds of a bench, their progress, and the order of turns in them.
//!
//! Progress goes to stderr, a line a step, so that it can be read in the log of a run of hours, too.

/// Whether the first round only warms up code, caches and pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WarmUp {
    /// It does, and comes in addition.
    First,
    /// It counts as the others do.
    None,
}

/// One round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Round {
    /// Its number, from 0, one that warms up included.
    pub number: usize,
    /// Whether its figures count.
    pub counts: bool,
}

/// Tells on stderr what the bench does now.
pub(crate) fn progress(bench: &str, step: impl std::fmt::Display) {
    eprintln!("bench {bench}: {step}");
}

/// `count` rounds that count, and one before them that warms up if `warm_up` says so. Each is told as it
/// begins; one that warms up as round 0.
pub(crate) fn rounds(
    bench: &'static str,
    count: usize,
    warm_up: WarmUp,
) -> impl Iterator<Item = Round> {
    silent_rounds(count, warm_up).inspect(move |round| {
        let name = match warm_up {
            WarmUp::First => round.number,
            WarmUp::None => round.number + 1,
        };
        progress(bench, format_args!("round {name} of {count}"));
    })
}

/// The same without a word: of the parts of a step that is told as a whole.
pub(crate) fn silent_rounds(count: usize, warm_up: WarmUp) -> impl Iterator<Item = Round> {
    let uncounted = usize::from(warm_up == WarmUp::First);
    (0..count + uncounted).map(move |number| Round {
        number,
        counts: number >= uncounted,
    })
}

impl Round {
    /// As it counts up in seeds.
    pub(crate) const fn seed(self) -> u64 {
        self.number as u64
    }

    /// The sides' turns: as given, and in every second round the other way round. So of two sides each is
    /// first as often as the other, and drift within rounds affects both.
    pub(crate) fn turns<T, const SIDES: usize>(self, mut sides: [T; SIDES]) -> [T; SIDES] {
        if self.number % 2 == 1 {
            sides.reverse();
        }
        sides
    }

    /// The places of `count` sides, in each round from the next one on: each is first in its turn.
    pub(crate) fn rotated(self, count: usize) -> impl Iterator<Item = usize> {
        (0..count).map(move |turn| (turn + self.number) % count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_that_warms_up_comes_in_addition_and_does_not_count() {
        let of = |warm_up| silent_rounds(3, warm_up).map(|round| round.counts);
        assert!(of(WarmUp::First).eq([false, true, true, true]));
        assert!(of(WarmUp::None).eq([true, true, true]));
        assert!(silent_rounds(0, WarmUp::First).all(|round| !round.counts));
        let numbers = rounds("test", 2, WarmUp::First).map(|round| round.number);
        assert!(numbers.eq([0, 1, 2]));
    }

    #[test]
    fn each_side_is_first_as_often_as_the_others() {
        let rounds = || silent_rounds(24, WarmUp::None);
        let first = |side| rounds().filter(move |round| round.turns(['a', 'b'])[0] == side);
        assert_eq!([first('a').count(), first('b').count()], [12, 12]);
        for side in 0..4 {
            let first = rounds().filter(|round| round.rotated(4).next() == Some(side));
            assert_eq!(first.count(), 6);
        }
        for round in rounds() {
            let mut all: Vec<usize> = round.rotated(4).collect();
            all.sort_unstable();
            assert_eq!(all, [0, 1, 2, 3]);
        }
    }
}
