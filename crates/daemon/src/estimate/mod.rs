// SPDX-License-Identifier: Apache-2.0
//! `pagetide estimate`: what taking over a VM would save, without taking it over.
//!
//! Nothing is injected and nothing is stopped: the VMM's page tables are read, its pages are unmapped
//! (they stay present; see [`pagetide_vmm::tracker`]) and some of them are read through their file. The
//! VM takes minor faults, up to about one for each watched page and look.
//!
//! The cost of a look is bounded, whatever the size of the VM: at most
//! [`WATCHED_SECTIONS`] sections are watched, one chosen at random in each of as
//! many equal parts of the RAM, and [`content::READ_PAGES`] pages are read once,
//! at the end, for each line of the report.
//!
//! Where pages can go to kernel swap, unmapping would actually evict them. Such a VM is refused, and
//! this is checked again before each look.

mod content;
mod heat;
mod report;
mod watch;

use std::time::{Duration, Instant};

use pagetide_addr::{PAGE_BYTES, PageNo};
use pagetide_vmm::layout::RamLayout;

use crate::cli::EstimateArgs;
use content::{Contents, READ_PAGES, choose};
use heat::{Cold, Heat, ratio};
use pagetide_random::SplitMix64;
use pagetide_report::outcome::{CommandError, print_report};
use watch::Watch;

pub use report::{ColdReport, EstimateReport};

/// Most sections watched: 128 Ki pages. A look unmaps those that were touched, at about a microsecond
/// each: at most about 0.15 s per look.
const WATCHED_SECTIONS: u64 = 256;
/// Reported idle times, in minutes.
const THRESHOLDS_MINUTES: [f64; 4] = [2.0, 5.0, 7.0, 10.0];
/// Bytes that a page of RAM costs while a VM is attached: its page word.
const WORD_BYTES: u64 = 8;
/// Shortest interval between two lines of progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(10);

/// Observes a VM for a while and prints a report.
pub fn run(args: &EstimateArgs) -> Result<(), CommandError> {
    let watch = Watch::open(args.pid, WATCHED_SECTIONS)?;
    let report = observe(&watch, args)?;
    print_report(&report, args.json.into())
}

/// The thresholds up to `minutes`; half of `minutes` if there is none, so that there is at least one.
fn thresholds(minutes: f64) -> Vec<f64> {
    let mut reached: Vec<f64> = THRESHOLDS_MINUTES.into();
    reached.retain(|threshold| *threshold <= minutes);
    if reached.is_empty() {
        reached.push(minutes / 2.0);
    }
    reached
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the command line admits minutes above 0 and up to a day"
)]
fn to_ms(minutes: f64) -> u64 {
    (minutes * 60e3).round() as u64
}

fn observe(watch: &Watch, args: &EstimateArgs) -> Result<EstimateReport, CommandError> {
    let thresholds_ms: Vec<u64> = thresholds(args.minutes).into_iter().map(to_ms).collect();
    let start = Instant::now();
    let end = Duration::from_millis(to_ms(args.minutes));
    let interval = Duration::from_secs(args.interval);
    // The first look brings every watched page to the same state and is not counted.
    let seen = watch.look()?;
    let mut heat = Heat::new(watch.sections(), &seen, &thresholds_ms, 0);
    let mut looks = 1;
    let mut look_max = start.elapsed();
    let mut blockers = watch.eviction_blockers()?;
    let mut told = start;
    let mut at = Duration::ZERO;
    while at < end {
        at = (at + interval).min(end);
        watch.wait_until(start + at)?;
        let before = Instant::now();
        let seen = watch.look()?;
        look_max = look_max.max(before.elapsed());
        heat.look(&seen, at_ms(at));
        looks += 1;
        if told.elapsed() >= PROGRESS_EVERY || at == end {
            told = Instant::now();
            progress(at, end, &heat);
        }
    }
    for blocker in watch.eviction_blockers()? {
        if !blockers.contains(&blocker) {
            blockers.push(blocker);
        }
    }
    let mut random = SplitMix64::new(at_ms(start.elapsed()) ^ u64::from(args.pid) << 32);
    let layout = watch.layout();
    let all = read(layout, heat.cold_pages(0), &mut random)?;
    let resident_bytes = layout.allocated_bytes().map_err(CommandError::failed)?;
    let watched_share = ratio(heat.resident_pages() * PAGE_BYTES, resident_bytes).min(1.0);
    let vm = Extent {
        ram_bytes: layout.len_bytes(),
        resident_bytes,
        watched_share,
    };
    let mut cold = Vec::new();
    for found in heat.cold() {
        let pages = heat.cold_pages(found.threshold_ms);
        let contents = read(layout, pages, &mut random)?;
        cold.push(cold_report(&found, &contents, &vm));
    }
    Ok(EstimateReport {
        pid: args.pid,
        vmm: watch.vmm().to_owned(),
        observed_seconds: end.as_secs_f64(),
        interval_seconds: args.interval,
        looks,
        tracker: watch.tracker().to_owned(),
        ram_bytes: layout.len_bytes(),
        resident_bytes,
        free_bytes: layout.len_bytes().saturating_sub(resident_bytes),
        free_share: (1.0 - ratio(resident_bytes, layout.len_bytes())).max(0.0),
        watched_share,
        read_pages: all.pages(),
        zero_share: all.zero_share(),
        compressible_share: all.compressible_share(),
        lz4_ratio: all.lz4_ratio(),
        look_max_seconds: look_max.as_secs_f64(),
        cold,
        refusals: watch.refusals().to_vec(),
        eviction_blockers: blockers,
        warnings: watch.warnings(),
    })
}

fn at_ms(at: Duration) -> u64 {
    u64::try_from(at.as_millis()).unwrap_or(u64::MAX)
}

fn progress(at: Duration, end: Duration, heat: &Heat) {
    let untouched = heat.cold_pages(at_ms(at)).len() as u64;
    eprintln!(
        "estimate: {} of {} s, {:.1} % of the pages watched not touched since the start",
        at.as_secs(),
        end.as_secs(),
        ratio(untouched, heat.resident_pages()) * 100.0
    );
}

/// Reads a random sample of `pages`; skips pages that are gone by now.
fn read(
    layout: &RamLayout,
    mut pages: Vec<PageNo>,
    random: &mut SplitMix64,
) -> Result<Contents, CommandError> {
    choose(random, &mut pages, READ_PAGES);
    let mut contents = Contents::default();
    let mut buffer = [0; pagetide_swap::tier::PAGE];
    for page in pages {
        for piece in layout.pieces(page.single()) {
            let file = layout.files()[piece.file].file();
            if !file
                .is_data(piece.file_offset)
                .map_err(CommandError::failed)?
            {
                continue;
            }
            file.read_at(piece.file_offset, &mut buffer)
                .map_err(CommandError::failed)?;
            contents.take(page, &buffer);
        }
    }
    Ok(contents)
}

/// Size of a VM, and the share of its resident pages that is watched.
struct Extent {
    ram_bytes: u64,
    resident_bytes: u64,
    watched_share: f64,
}

/// Scales shares of the sample to bytes and rates of the VM.
fn cold_report(found: &Cold, contents: &Contents, vm: &Extent) -> ColdReport {
    let cold_bytes = part_of(vm.resident_bytes, found.page_share);
    let stored_bytes = part_of(cold_bytes, contents.stored_share());
    let words_bytes = vm.ram_bytes / PAGE_BYTES * WORD_BYTES;
    #[expect(clippy::cast_precision_loss, reason = "a threshold is at most a day")]
    let minutes = found.threshold_ms as f64 / 60e3;
    ColdReport {
        minutes,
        cold_share: found.page_share,
        cold_section_share: found.section_share,
        cold_bytes,
        zero_share: contents.zero_share(),
        compressible_share: contents.compressible_share(),
        stored_bytes,
        saved_bytes: cold_bytes.saturating_sub(stored_bytes + words_bytes),
        faults_per_second: found
            .refaults_per_second
            .filter(|_| vm.watched_share > 0.0)
            .map(|refaults| refaults / vm.watched_share),
    }
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an estimate of bytes, from a share that is not negative"
)]
fn part_of(bytes: u64, share: f64) -> u64 {
    (bytes as f64 * share).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_go_as_far_as_the_time_reaches() {
        assert_eq!(thresholds(30.0), [2.0, 5.0, 7.0, 10.0]);
        assert_eq!(thresholds(5.0), [2.0, 5.0]);
        assert_eq!(thresholds(1.0), [0.5]);
    }

    #[test]
    fn saving_is_what_is_cold_less_what_is_stored_and_the_words() {
        let mut contents = Contents::default();
        contents.take(PageNo(0), &[0; pagetide_swap::tier::PAGE]);
        let found = Cold {
            threshold_ms: 120_000,
            page_share: 0.5,
            section_share: 0.25,
            refaults_per_second: Some(3.0),
        };
        let vm = Extent {
            ram_bytes: 1 << 30,
            resident_bytes: 1 << 29,
            watched_share: 0.25,
        };
        let report = cold_report(&found, &contents, &vm);
        assert_eq!(report.cold_bytes, 1 << 28);
        assert_eq!(report.saved_bytes, (1 << 28) - (1 << 18) * 8);
        assert_eq!(report.faults_per_second, Some(12.0));
        assert!((report.minutes - 2.0).abs() < 1e-9);
    }
}
