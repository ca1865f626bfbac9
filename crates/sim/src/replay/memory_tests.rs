// SPDX-License-Identifier: Apache-2.0
//! The replay's side of the golden trace of reclaim orders; the daemon's side is in `pagetide-swap`.

use super::*;
use std::fmt::Write;

/// Events, and after each the orders that they lead to.
const GOLDEN: &str = include_str!("../../../policy/tests/golden/reclaim.txt");
/// Sections of the VM in the trace.
const SECTIONS: u64 = 240;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// The sections of `from-to`, or of one number.
fn sections(text: &str) -> impl Iterator<Item = SectionNo> {
    let (from, to) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| text.parse::<u64>().unwrap();
    (number(from)..=number(to)).map(SectionNo)
}

fn take_log(memory: &mut Memory, into: &mut String) {
    for line in memory.states.log.drain(..) {
        writeln!(into, "  {line}").unwrap();
    }
}

#[test]
fn orders_to_a_replay_are_those_of_the_golden_trace() {
    let protected = Arc::default();
    let mut memory = Memory::new(
        SECTIONS,
        2 << 20,
        Start::AllPresent,
        protected,
        SetTimes::QUICK,
        Ages::default(),
    );
    let mut found = String::new();
    for event in GOLDEN.lines().filter(|line| !line.starts_with(' ')) {
        let words: Vec<&str> = event.split(' ').collect();
        let at = ms(words[0].parse().unwrap());
        while memory.due() <= at {
            memory.pass(memory.due());
        }
        take_log(&mut memory, &mut found);
        writeln!(found, "{event}").unwrap();
        match words[1..] {
            ["limit", sections] => {
                memory.set_limit(sections.parse().ok());
                memory.wake(at);
            }
            ["touch", touched] => {
                for section in sections(touched) {
                    if memory.touch(section) != Found::Present {
                        memory.fill(at, section, Trace::Left);
                    }
                }
            }
            _ => panic!("{event}"),
        }
        take_log(&mut memory, &mut found);
    }
    assert_eq!(memory.counts().over_limit_fills, 0);
    assert!(memory.counts().evicted_sections > 50);
    if let Some(path) = std::env::var_os("PAGETIDE_GOLDEN_WRITE") {
        std::fs::write(path, &found).unwrap();
    }
    let pairs = GOLDEN.lines().zip(found.lines());
    for (number, (golden, found)) in pairs.enumerate() {
        assert_eq!(golden, found, "line {}", number + 1);
    }
    assert_eq!(GOLDEN.lines().count(), found.lines().count());
}

/// A VM of 240 sections that uses the first 140 each second, under a limit of 100, for a minute; and then stands
/// still until its memory is within the limit.
fn pressed() -> Memory {
    let mut memory = Memory::new(
        SECTIONS,
        2 << 20,
        Start::AllPresent,
        Arc::default(),
        SetTimes::QUICK,
        Ages::default(),
    );
    memory.set_limit(Some(100));
    for second in 1..=60 {
        pass_to(&mut memory, ms(second * 1000));
        for section in (0..140).map(SectionNo) {
            if memory.touch(section) != Found::Present {
                memory.fill(ms(second * 1000), section, Trace::Left);
            }
        }
    }
    pass_to(&mut memory, ms(60_900));
    assert!(memory.present() <= 100, "{} present", memory.present());
    memory
}

fn pass_to(memory: &mut Memory, until: Duration) {
    while memory.due() <= until {
        memory.pass(memory.due());
    }
}

#[test]
fn limit_that_is_raised_brings_back_what_was_in_use_into_spare_memory_and_evicts_nothing() {
    let mut memory = pressed();
    let before = memory.counts();
    assert!(before.evicted_sections > 500, "{before:?}");
    memory.set_limit(Some(200));
    // Nobody touches anything any more.
    pass_to(&mut memory, ms(90_000));
    let after = memory.counts();
    let back = after.swapped_in_ahead - before.swapped_in_ahead;
    assert!(back >= 30, "{back} sections");
    assert_eq!(after.evicted_sections, before.evicted_sections);
    // Only what was in use: the others were evicted first, and not again.
    assert!(memory.present() <= 140, "{} present", memory.present());
}

#[test]
fn vm_at_its_limit_gets_nothing_back_but_by_faults() {
    let mut memory = pressed();
    pass_to(&mut memory, ms(90_000));
    assert_eq!(memory.counts().swapped_in_ahead, 0);
}
