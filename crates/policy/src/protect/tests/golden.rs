// SPDX-License-Identifier: Apache-2.0
//! Golden sequences: the events a policy receives, line by line, and the changes it must return.
//!
//! ```text
//!   policy adp:protected-max=0.1   which, and its parameters
//!   sections 20                    how many the VM has
//!   0 touch 5                      time in seconds, event, and the changes that must follow:
//!   180 pass +5                    +N protected, -N released, in this order
//!   200 gone 5 -5                  also: evicted N, faulted N, resized SECTIONS
//! ```

use crate::protect::{Change, Fate, PolicyChoice, ProtectionPolicy, Touch};
use pagetide_addr::{Access, SECTION_BYTES, SectionNo};
use std::time::Duration;

/// Plays a sequence; `name` is for the messages.
fn play(name: &str, sequence: &str) {
    let mut choice = PolicyChoice::None;
    let mut policy: Option<Box<dyn ProtectionPolicy>> = None;
    for (line, text) in (1..).zip(sequence.lines()) {
        let words: Vec<&str> = text.split_whitespace().collect();
        match words[..] {
            [] | ["#", ..] => {}
            ["policy", text] => choice = text.parse().expect("a policy"),
            ["sections", count] => {
                policy = Some(choice.policy(number(count), &choice.promotion_age()))
            }
            [at, event, ref rest @ ..] => {
                let policy = policy.as_mut().expect("sections come first").as_mut();
                let at = Duration::from_millis(milliseconds(at));
                let (changes, expected) = step(policy, at, event, rest);
                let shown: Vec<String> = changes.iter().map(show).collect();
                assert_eq!(shown, expected, "{name}, line {line}: {text}");
            }
            _ => panic!("{name}, line {line} is no event: {text}"),
        }
    }
}

fn step<'a>(
    policy: &mut dyn ProtectionPolicy,
    at: Duration,
    event: &str,
    rest: &'a [&'a str],
) -> (Vec<Change>, &'a [&'a str]) {
    let mut changes = Vec::new();
    let expected = match (event, rest) {
        ("pass", expected) => {
            policy.passed(at, &mut changes);
            expected
        }
        ("touch", [section, expected @ ..]) => {
            policy.touched(touch(number(section), at), &mut changes);
            expected
        }
        ("resized", [sections, expected @ ..]) => {
            policy.resized(number(sections), &mut changes);
            expected
        }
        (fate, [section, expected @ ..]) => {
            let fate = match fate {
                "evicted" => Fate::Evicted,
                "faulted" => Fate::Faulted,
                "gone" => Fate::Gone,
                _ => panic!("there is no event {fate}"),
            };
            policy.fate(SectionNo(number(section)), fate, at, &mut changes);
            expected
        }
        _ => panic!("{event} of what?"),
    };
    (changes, expected)
}

fn number(text: &str) -> u64 {
    text.parse().expect("a number")
}

fn milliseconds(text: &str) -> u64 {
    let (seconds, part) = text.split_once('.').unwrap_or((text, "0"));
    number(seconds) * 1_000 + number(&format!("{part:0<3}"))
}

fn touch(section: u64, at: Duration) -> Touch {
    Touch {
        section: SectionNo(section),
        at,
        access: Access::Write,
        bytes: SECTION_BYTES,
    }
}

fn show(change: &Change) -> String {
    match change {
        Change::Protect(section) => format!("+{}", section.0),
        Change::Release(section) => format!("-{}", section.0),
    }
}

#[test]
fn lru_answers_its_golden_sequence() {
    play("lru", include_str!("golden/lru.txt"));
}

#[test]
fn adp_answers_its_golden_sequence() {
    play("adp", include_str!("golden/adp.txt"));
}

#[test]
fn adp_with_full_blocks_answers_its_golden_sequence() {
    play("adp-overflow", include_str!("golden/adp-overflow.txt"));
}

#[test]
fn adp_whose_times_follow_the_evictor_answers_its_golden_sequence() {
    play("adp-follow", include_str!("golden/adp-follow.txt"));
}
