// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench real-size`: the cost of taking over, squeezing and detaching large VMs, and whether it
//! grows no faster than the VM.
//!
//! For each size a dense stand-in ([`super::busy`]) with one vCPU, an eighth of its RAM hot, goes through
//! two kinds of rounds:
//!
//! ```text
//!   watched   attach ─ scan ─ squeeze to half ─ detach       a thread polls the VM all the time
//!   timed     attach ─ detach                                with nothing absent; several times
//!             attach ─ squeeze to half ─ kill ─ recover ─ detach ─ verify every byte
//! ```
//! Polling costs the daemon time, so nothing else is measured in the watched round.
//!
//! | figure | from, to |
//! |---|---|
//! | `attach_s`, `detach_s` | the request, its answer; medians |
//! | `attach_gap_ms` | longest time that the vCPU needed for a few dozen pages while it was attached; `quiet_gap_ms` is the same without any daemon |
//! | `squeeze_s` | the limit being set, the VM being within it |
//! | `evict_mib_per_s` | from the first evicted page to the last; CPU time of the daemon per page over all of the squeeze |
//! | `recover_s` | the start of the second daemon, its first answer: by then faults are served |
//! | `detach_half_mib_per_s` | the same as `detach_s` with half of the RAM absent |
//! | `daemon_mib_per_gib` | anonymous memory of the daemon, plus the pool without stored pages, per GiB of RAM |
//! | `attached_cpu_share` | CPU time of the daemon over elapsed time, without requests |
//!
//! Figures are by size: `gib_16`, or `mib_512`. Where memory is short a smaller stand-in is used; the key
//! is that of the size used, and `smaller` gives the reason. `ratios` compare the largest with the
//! smallest, and have the names of 16 GiB over 1 only if it was these.

mod rounds;
mod watch;

use super::{
    harness::{
        figures::{median, thousandths},
        report::{BenchError, BenchReport, failed, unable},
        rounds::progress,
    },
    interrupt::Interrupted,
    memory::{fitting, ram_key},
    options::SizeOptions,
};
use rounds::{Sized, measure};
use serde_json::{Map, Value, json};

const NAME: &str = "real-size";
/// Default sizes of RAM.
const RAM_BYTES: [u64; 3] = [1 << 30, 4 << 30, 16 << 30];
/// Default rounds of attach and detach.
const ROUNDS: u64 = 3;

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &SizeOptions) -> Result<BenchReport, BenchError> {
    let interrupted = Interrupted::listen().map_err(failed)?;
    let wanted: Vec<u64> = match &options.ram[..] {
        [] => RAM_BYTES.to_vec(),
        given => given.iter().map(|size| size.0).collect(),
    };
    let mut measured: Vec<(u64, Sized)> = Vec::new();
    let mut smaller = Vec::new();
    for wanted_bytes in wanted {
        let (bytes, why) = fitting(wanted_bytes).map_err(unable)?;
        smaller.extend(why);
        if measured.iter().any(|(of, _)| *of == bytes) {
            continue;
        }
        progress(NAME, ram_key(bytes));
        let rounds = options.pairs.unwrap_or(ROUNDS);
        let of_size = measure(bytes, rounds, &options.settings, &interrupted).map_err(failed)?;
        measured.push((bytes, of_size));
    }
    let mut report = BenchReport::new(NAME);
    describe(&measured, &mut report);
    report.figures.insert("smaller".into(), json!(smaller));
    Ok(report)
}

/// How to read one figure of a size.
type Read = fn(&Sized) -> f64;

/// Figures that are a number for each size.
const BY_SIZE: [(&str, Read); 17] = [
    ("fill_s", |sized| sized.fill_s),
    ("attach_s", |sized| median(sized.attach_s.iter().copied())),
    ("detach_s", |sized| median(sized.detach_s.iter().copied())),
    ("attach_gap_ms", |sized| {
        median(sized.attach_gap_ms.iter().copied())
    }),
    ("attach_gap_max_ms", |sized| {
        sized.attach_gap_ms.iter().copied().fold(0.0, f64::max)
    }),
    ("quiet_gap_ms", |sized| sized.quiet_gap_ms),
    ("attach_pause_ms", |sized| sized.attach_pause_ms),
    ("squeeze_s", |sized| sized.squeeze_s),
    ("evict_mib_per_s", |sized| sized.evict_mib_per_s),
    ("evict_cpu_us_per_page", |sized| sized.evict_cpu_us_per_page),
    ("recover_s", |sized| sized.recover_s),
    ("recover_gap_ms", |sized| sized.recover_gap_ms),
    ("detach_half_s", |sized| sized.detach_half_s),
    ("detach_half_mib_per_s", |sized| sized.detach_half_mib_per_s),
    ("daemon_mib_per_gib", |sized| sized.daemon_mib_per_gib),
    ("attached_cpu_share", |sized| sized.attached_cpu_share),
    ("verify_s", |sized| sized.verify_s),
];

fn describe(measured: &[(u64, Sized)], report: &mut BenchReport) {
    let figures = &mut report.figures;
    for (name, read) in BY_SIZE {
        let by_size = measured
            .iter()
            .map(|(bytes, sized)| (ram_key(*bytes), thousandths(read(sized))));
        figures.insert(name.into(), Value::Object(by_size.collect()));
    }
    let mut longest_ms = 0.0_f64;
    let mut by_size = Map::new();
    for (bytes, sized) in measured {
        let mut by_phase = Map::new();
        for (phase, seen) in &sized.show {
            let ms = seen.longest.as_secs_f64() * 1e3;
            longest_ms = longest_ms.max(ms);
            let value = json!({ "max_ms": thousandths(ms), "answers": seen.answers });
            by_phase.insert((*phase).into(), value);
        }
        by_size.insert(ram_key(*bytes), by_phase.into());
    }
    figures.insert("show_max_ms".into(), thousandths(longest_ms));
    figures.insert("show_by_phase".into(), by_size.into());
    let least = measured.iter().min_by_key(|(bytes, _)| *bytes);
    let most = measured.iter().max_by_key(|(bytes, _)| *bytes);
    if let (Some((small, of_small)), Some((large, of_large))) = (least, most)
        && small != large
    {
        let between = ratio_key(*large, *small);
        for (name, read) in [("attach", BY_SIZE[1].1), ("evict_cpu", BY_SIZE[9].1)] {
            let ratio = thousandths(read(of_large) / read(of_small));
            report.ratios.insert(format!("{name}_{between}"), ratio);
        }
    }
}

/// `16_over_1` of GiB; with units where it is not GiB.
fn ratio_key(large_bytes: u64, small_bytes: u64) -> String {
    let (large, small) = (ram_key(large_bytes), ram_key(small_bytes));
    match (large.strip_prefix("gib_"), small.strip_prefix("gib_")) {
        (Some(large), Some(small)) => format!("{large}_over_{small}"),
        _ => format!("{large}_over_{small}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_has_the_names_of_the_sizes_measured() {
        let sized = |attach_s: f64, cpu: f64| Sized {
            attach_s: vec![9.0, attach_s, 0.0],
            evict_cpu_us_per_page: cpu,
            show: [(
                "attach",
                watch::Seen {
                    longest: std::time::Duration::from_millis(7),
                    answers: 3,
                },
            )]
            .into(),
            ..Sized::default()
        };
        let mut report = BenchReport::new(NAME);
        let measured = [(1 << 30, sized(0.1, 5.0)), (16 << 30, sized(1.0, 5.5))];
        describe(&measured, &mut report);
        assert_eq!(report.figures["attach_s"]["gib_16"], json!(1.0));
        assert_eq!(report.ratios["attach_16_over_1"], json!(10.0));
        assert_eq!(report.ratios["evict_cpu_16_over_1"], json!(1.1));
        assert_eq!(report.figures["show_max_ms"], json!(7.0));
        assert_eq!(
            report.figures["show_by_phase"]["gib_1"]["attach"]["answers"],
            json!(3)
        );
        assert_eq!(ratio_key(2 << 30, 1 << 29), "gib_2_over_mib_512");
    }
}
