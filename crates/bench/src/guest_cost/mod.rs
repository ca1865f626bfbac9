// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench guest-cost`: the cost of being attached for a guest.
//!
//! A dense stand-in ([`super::busy`]) works all the time, and its operations are counted in slices:
//! attached, and released. One stand-in serves both, since two would have different physical pages and huge
//! mappings of the host, which alone differ by more than the effect measured here; and two that run in turn
//! would each be idle half of the time, which trackers notice. So the same stand-in is attached and
//! detached again and again:
//!
//! ```text
//!   released │ attached  attached │ released  released │ attached …
//!   └────── pair ──────┘└────── pair ──────┘└────── pair ───────…
//! ```
//! Slow drift affects both sides of the pairs alike, and a cell needs only half the attaches. After each
//! attach and detach the stand-in gets [`SETTLE`] before it is measured; under a limit also the time until
//! it is within that. A slice is as long as the daemon's scan period, so that each contains one scan.
//!
//! | cell | attached |
//! |---|---|
//! | `free_hot_1_8_vcpus_1` … | without a limit |
//! | `limited_…` | with a limit just above the hot part: 6 % and 4 MiB more, since the daemon keeps 4.5 % free |
//! | `huge_…` | with a limit as large as the RAM, in huge pages |
//! | `hugetlb_…` | with a limit as in `limited_…`, in huge pages of hugetlbfs, 1 GiB at most: what goes and comes, goes and comes 2 MiB at a time |
//! | `kvm_…` | without a limit, and a guest under KVM instead of the stand-in, on one vCPU, with 2 GiB at most |
//! | `stock_stress_vm`, `stock_stress_stream`, `stock_redis` | without a limit, and a stock Linux guest of 1 GiB and two vCPUs with that load ([`super::busy::stock`]) |
//!
//! A detach does not turn small pages into huge ones, so in `huge` cells each pair has its own stand-in,
//! released first. They need huge pages in shared memory, which the host's `shmem_enabled` must allow for
//! memory that asks (`advise`) or for all: the bench changes no setting of the host.
//!
//! The guest of `kvm` cells comes from the test kit ([`super::busy::kvm`]). Where KVM has no hardware
//! behind it and emulates the guest, that does some ten thousand operations a second and hardly notices
//! what a fault costs: then only a large loss is visible.
//!
//! Ratios are attached over released of one pair; a cell has their median, and the mean with its lower 95 %
//! bound (`PairedRatios::bounds`). `ratios` has the worst bound of each kind.

pub(super) mod cell;

use super::{
    busy::{
        kvm::KvmGuest,
        stock::{Load, StockGuest},
    },
    daemon::directory_in,
    harness::{
        figures::thousandths,
        report::{BenchError, BenchReport, failed, unable},
        rounds::progress,
    },
    interrupt::Interrupted,
    memory::{fitting, ram_key},
    options::SizeOptions,
};
use cell::{Cell, HUGETLB_BYTES_MAX, Kind, Pair, Plan, SETTLE, Summary};
use serde_json::{Value, json};

const NAME: &str = "guest-cost";
/// Default RAM.
const RAM_BYTES: u64 = 2 << 30;
/// Default number of alternations of each cell.
const PAIRS: u64 = 30;
/// Default length of a slice in seconds.
const SLICE_SECONDS: u64 = 5;
/// Shows how many huge pages of 2 MiB are free.
const HUGETLB_FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
/// Shows whether shared memory may have huge pages.
const SHMEM_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// All cells, those of one kind together.
fn cells() -> Vec<Cell> {
    let of_kind = |kind: Kind| {
        kind.works()
            .into_iter()
            .map(move |work| Cell { kind, work })
    };
    Kind::ALL.into_iter().flat_map(of_kind).collect()
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &SizeOptions) -> Result<BenchReport, BenchError> {
    let interrupted = Interrupted::listen().map_err(failed)?;
    let (ram_bytes, smaller) = fitting(options.ram_bytes(RAM_BYTES)).map_err(unable)?;
    let plan = Plan {
        ram_bytes,
        pairs: options.pairs.unwrap_or(PAIRS),
        slice: options.time(SLICE_SECONDS),
        settings: options.settings.clone(),
    };
    let cells = || {
        let all = cells().into_iter();
        all.filter(|cell| options.includes(&cell.name()))
    };
    let no_huge = huge_pages_are_given().err();
    let no_hugetlb = hugetlb_pages_are_free(ram_bytes.min(HUGETLB_BYTES_MAX)).err();
    let no_stock = if cells().any(|cell| cell.kind == Kind::Stock) {
        stock_guests_run().err()
    } else {
        None
    };
    let no_kvm = if cells().any(|cell| cell.kind == Kind::Kvm) {
        kvm_runs_guests().err()
    } else {
        None
    };
    let mut measured = Vec::new();
    for cell in cells() {
        let lacking = match cell.kind {
            Kind::Free | Kind::Limited => &None,
            Kind::Huge => &no_huge,
            Kind::Hugetlb => &no_hugetlb,
            Kind::Kvm => &no_kvm,
            Kind::Stock => &no_stock,
        };
        if lacking.is_some() {
            continue;
        }
        progress(NAME, cell.name());
        let pairs = cell::measure(cell, &plan, &interrupted).map_err(failed)?;
        measured.push((cell, pairs));
    }
    let mut report = BenchReport::new(NAME);
    let figures = &mut report.figures;
    figures.insert("ram".into(), json!(ram_key(ram_bytes)));
    figures.insert("smaller".into(), json!(smaller));
    figures.insert("slice_s".into(), plan.slice.as_secs_f64().into());
    describe(&measured, &mut report);
    let lacking = [
        ("huge_unavailable", no_huge),
        ("hugetlb_unavailable", no_hugetlb),
        ("kvm_unavailable", no_kvm),
        ("stock_unavailable", no_stock),
    ];
    for (name, lacking) in lacking {
        if let Some(reason) = lacking {
            report.figures.insert(name.into(), json!(reason));
        }
    }
    Ok(report)
}

/// Fails with a message if this machine's KVM does not run our guest.
fn kvm_runs_guests() -> Result<(), String> {
    let dir = directory_in(&std::env::temp_dir())?;
    KvmGuest::try_one(dir.path())
}

/// Fails with a message if no stock guest can run.
fn stock_guests_run() -> Result<(), String> {
    let dir = directory_in(&std::env::temp_dir())?;
    StockGuest::try_one(dir.path(), &Load::BUSY)
}

/// Fails with a message if the host gives shared memory no huge pages.
fn huge_pages_are_given() -> Result<(), String> {
    let text = std::fs::read_to_string(SHMEM_ENABLED).map_err(|error| {
        format!("this kernel has no huge pages in shared memory: {SHMEM_ENABLED}: {error}")
    })?;
    match chosen_word(&text) {
        Some("always" | "within_size" | "advise" | "force") => Ok(()),
        chosen => Err(format!(
            "{SHMEM_ENABLED} is {}: write advise to it and run this again",
            chosen.unwrap_or("without a choice")
        )),
    }
}

/// Fails with a message if fewer huge pages are free than RAM of `bytes` takes.
fn hugetlb_pages_are_free(bytes: u64) -> Result<(), String> {
    let text = std::fs::read_to_string(HUGETLB_FREE).map_err(|error| {
        format!("this kernel has no huge pages of 2 MiB: {HUGETLB_FREE}: {error}")
    })?;
    let free: u64 = text.trim().parse().map_or(0, |free| free);
    let wanted = bytes.div_ceil(pagetide_addr::SECTION_BYTES);
    match free >= wanted {
        true => Ok(()),
        false => Err(format!(
            "{free} huge pages of 2 MiB are free, and {wanted} are needed: raise vm.nr_hugepages and run this again"
        )),
    }
}

/// Of `always [never] deny`.
fn chosen_word(text: &str) -> Option<&str> {
    text.split_whitespace()
        .find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
}

fn describe(measured: &[(Cell, Vec<Pair>)], report: &mut BenchReport) {
    let mut lows = Vec::new();
    for (cell, pairs) in measured {
        let summary = Summary::of(pairs);
        if let Some(bounds) = summary.bounds {
            lows.push((cell.kind, summary.median, bounds.low95));
        }
        report.figures.insert(cell.name(), summary.figures);
    }
    for kind in Kind::ALL {
        let of_kind = lows.iter().filter(|(of, ..)| *of == kind);
        let worst = |read: fn(&(Kind, f64, f64)) -> f64| {
            let least = of_kind.clone().map(read).reduce(f64::min);
            least.map_or(Value::Null, thousandths)
        };
        let name = kind.ratio_name();
        report
            .ratios
            .insert(format!("{name}_median"), worst(|(_, median, _)| *median));
        report
            .ratios
            .insert(format!("{name}_low95"), worst(|(.., low)| *low));
    }
    let settle = SETTLE.as_secs_f64();
    report.figures.insert("settle_s".into(), settle.into());
}

#[cfg(test)]
mod tests {
    use super::cell::{Hot, Work};
    use super::*;
    use crate::busy::guest::Counted;

    fn pair(attached: u64) -> Pair {
        let counted = |operations| Counted {
            operations,
            ns: 1_000_000_000,
            ..Counted::default()
        };
        Pair {
            released: counted(1_000_000),
            attached: counted(attached),
            ..Pair::default()
        }
    }

    #[test]
    fn worst_cell_of_a_kind_is_its_ratio_and_a_kind_without_cells_has_none() {
        let cell = |hot_eighths| Cell {
            kind: Kind::Free,
            work: Work::Hot(Hot {
                hot_eighths,
                vcpus: 1,
            }),
        };
        let measured = [
            (cell(1), vec![pair(990_000), pair(990_000), pair(990_000)]),
            (cell(7), vec![pair(900_000), pair(900_000), pair(900_000)]),
        ];
        let mut report = BenchReport::new(NAME);
        describe(&measured, &mut report);
        assert_eq!(report.ratios["attached_over_free_low95"], json!(0.9));
        assert_eq!(report.ratios["attached_over_free_median"], json!(0.9));
        assert_eq!(report.ratios["huge_over_free_low95"], Value::Null);
        assert_eq!(report.figures["free_hot_1_8_vcpus_1"]["low95"], json!(0.99));
        assert_eq!(report.figures["free_hot_7_8_vcpus_1"]["pairs"], json!(3));
    }

    #[test]
    fn choice_of_the_host_is_read() {
        assert_eq!(chosen_word("always [advise] never\n"), Some("advise"));
        assert_eq!(chosen_word("always never\n"), None);
    }

    #[test]
    fn cells_have_names_of_their_own() {
        let names: std::collections::BTreeSet<_> = cells().iter().map(Cell::name).collect();
        assert_eq!(names.len(), 21);
        assert!(names.contains("limited_hot_7_8_vcpus_2"));
        assert!(names.contains("stock_stress_vm") && names.contains("stock_redis"));
        assert!(names.contains("kvm_hot_1_8_vcpus_1") && !names.contains("kvm_hot_1_8_vcpus_2"));
    }
}
