// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench tracker`: whether, how soon and how correctly the daemon detects cold memory.
//!
//! The cold part of each stand-in ([`super::busy`]) is known, since it is never touched; its vCPU touches
//! the other pages all the time, each several times a second.
//!
//! | row | cold |
//! |---|---|
//! | `section_10`, `_50`, `_90` | this percentage of sections, scattered |
//! | `page_10`, `_50`, `_90` | this percentage of pages, scattered: hardly a section is cold |
//! | `moving_10`, `_50`, `_90` | this percentage of sections, contiguous; the hot part moves by one in ten seconds |
//! | `one_page_of_512` | all but one page of each section: the worst case of a tracker that samples |
//!
//! For each row the VM is attached without a limit. The bench waits until the sets of `vm show` have nine
//! in ten of the cold sections in `cold`, but not for longer than `--seconds`; where no section is cold,
//! for [`PAGES_WAIT`]. Then it reclaims as much as is cold, and the stand-in reports which pages are in
//! memory.
//!
//! | figure of a row | |
//! |---|---|
//! | `cold_found_share` | sections in `cold` over cold sections, at most 1; absent where none is cold |
//! | `found_s` | time until that was 0.9 |
//! | `cold_evicted_share` | share of the cold pages that the reclaim has evicted |
//! | `refaults` | faults of the vCPU on absent pages from the reclaim until ten seconds after it |
//! | `refaults_share` | the same over the evicted pages |
//!
//! `figures.cold_found_share` is the worst of the rows by section. The sets only have counts; `refaults`
//! shows whether the right sections were found.
//!
//! The peer is a daemon of the same program with the settings of `--peer-setting`: one that unmaps
//! everything at each scan, where the program has such a tracker. `ratios.refaults_over_full_unmapping`
//! compares the sums over all rows; one in a thousand of the evicted pages is added to both, so that a
//! handful against zero does not dominate.

use super::{
    busy::{
        guest::{BATCH, BusyGuestOptions, Order, RamSize},
        pattern::Pattern,
        process::BusyGuest,
        ram::HugePages,
    },
    daemon::{Daemon, directory_in},
    harness::{
        figures::{thousandths, to_f64},
        report::{BenchError, BenchReport, failed, unable},
        rounds::progress,
    },
    interrupt::Interrupted,
    memory::{fitting, ram_key},
    options::{GivenSetting, SizeOptions, flags},
};
use pagetide_addr::PAGE_BYTES;
use pagetide_daemon::control::VmReport;
use serde_json::{Map, Value, json};
use std::{
    path::Path,
    time::{Duration, Instant},
};

const NAME: &str = "tracker";
/// Default RAM.
const RAM_BYTES: u64 = 2 << 30;
/// Default of the longest search for cold sections, in seconds.
const SEARCH_SECONDS: u64 = 300;
/// Time to learn about pages, where no section is cold.
const PAGES_WAIT: Duration = Duration::from_secs(30);
/// Between two polls of the sets.
const LOOK: Duration = Duration::from_millis(250);
/// The share that ends a search.
const FOUND_SHARE: f64 = 0.9;
/// How long after a reclaim faults are counted.
const REFAULT_TIME: Duration = Duration::from_secs(10);
/// Name of the set of `vm show` that is compared.
const COLD_SET: &str = "cold";
/// How fast hot parts move.
const SECTIONS_A_MINUTE: u32 = 6;

/// A kind of stand-in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Row {
    kind: &'static str,
    cold_percent: u32,
    pattern: Pattern,
}

impl Row {
    fn name(&self) -> String {
        match self.pattern {
            Pattern::OnePage => self.kind.to_owned(),
            _ => format!("{}_{}", self.kind, self.cold_percent),
        }
    }

    fn is_by_section(&self) -> bool {
        matches!(self.pattern, Pattern::Sections { .. })
    }
}

fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for kind in ["section", "page", "moving"] {
        for cold_percent in [10, 50, 90] {
            let hot_permille = 1000 - 10 * cold_percent;
            let pattern = match kind {
                "section" => Pattern::Sections { hot_permille },
                "page" => Pattern::Pages { hot_permille },
                _ => Pattern::Moving {
                    hot_permille,
                    sections_a_minute: SECTIONS_A_MINUTE,
                },
            };
            rows.push(Row {
                kind,
                cold_percent,
                pattern,
            });
        }
    }
    rows.push(Row {
        kind: "one_page_of_512",
        cold_percent: 100,
        pattern: Pattern::OnePage,
    });
    rows
}

/// The result of a row.
#[derive(Clone, PartialEq, Default, Debug)]
struct Found {
    cold_sections: u64,
    /// Sections in the set.
    told_sections: u64,
    found_s: Option<f64>,
    searched_s: f64,
    cold_pages: u64,
    cold_present_pages: u64,
    evicted_pages: u64,
    refaults: u64,
    scan_cpu_share: f64,
    shortfall: Option<String>,
}

impl Found {
    fn cold_found_share(&self) -> Option<f64> {
        let found = self.told_sections.min(self.cold_sections);
        (self.cold_sections > 0).then(|| to_f64(found) / to_f64(self.cold_sections))
    }

    fn value(&self) -> Value {
        let share = |part: u64, whole: u64| thousandths(to_f64(part) / to_f64(whole.max(1)));
        let gone = self.cold_pages.saturating_sub(self.cold_present_pages);
        json!({
            "cold_sections": self.cold_sections,
            "told_cold_sections": self.told_sections,
            "cold_found_share": self.cold_found_share().map(thousandths),
            "found_s": self.found_s.map(thousandths),
            "searched_s": thousandths(self.searched_s),
            "cold_pages": self.cold_pages,
            "cold_evicted_share": share(gone, self.cold_pages),
            "evicted_pages": self.evicted_pages,
            "refaults": self.refaults,
            "refaults_share": share(self.refaults, self.evicted_pages),
            "daemon_cpu_share": thousandths(self.scan_cpu_share),
            "reclaim_shortfall": self.shortfall,
        })
    }
}

/// How rows are measured.
struct Plan<'a> {
    ram_bytes: u64,
    search: Duration,
    settings: &'a [GivenSetting],
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &SizeOptions) -> Result<BenchReport, BenchError> {
    let interrupted = Interrupted::listen().map_err(failed)?;
    let (ram_bytes, smaller) = fitting(options.ram_bytes(RAM_BYTES)).map_err(unable)?;
    let plan = |settings| Plan {
        ram_bytes,
        search: options.time(SEARCH_SECONDS),
        settings,
    };
    let has_peer = !options.peer_settings.is_empty();
    let (mut ours, mut peers) = (Vec::new(), Vec::new());
    for row in rows() {
        if !options.includes(&row.name()) {
            continue;
        }
        interrupted.check().map_err(failed)?;
        progress(NAME, row.name());
        ours.push((row, measure(row, &plan(&options.settings)).map_err(failed)?));
        if has_peer {
            interrupted.check().map_err(failed)?;
            let peer = measure(row, &plan(&options.peer_settings)).map_err(failed)?;
            peers.push((row, peer));
        }
    }
    let mut report = BenchReport::new(NAME);
    report
        .figures
        .insert("ram".into(), json!(ram_key(ram_bytes)));
    report.figures.insert("smaller".into(), json!(smaller));
    describe(&ours, &peers, &mut report);
    Ok(report)
}

/// Measures one row with one daemon.
fn measure(row: Row, plan: &Plan<'_>) -> Result<Found, String> {
    let in_memory = directory_in(Path::new("/dev/shm"))?;
    let on_disk = directory_in(&std::env::temp_dir())?;
    let options = BusyGuestOptions {
        ram_mib: plan.ram_bytes >> 20,
        size: RamSize::Exact,
        vcpus: 1,
        first_cpu: 0,
        disk: None,
        batch: BATCH,
        rest_us: 0,
        time_faults: false,
        pattern: row.pattern,
        huge_pages: HugePages::NotAdvised,
    };
    // Dropped in reverse order: the daemon detaches before the guest ends.
    let mut guest = BusyGuest::start(on_disk.path(), &options)?;
    let state_dir = in_memory.path().join("daemon");
    let daemon = Daemon::start_for(&state_dir, &flags(plan.settings), plan.ram_bytes)?;
    let mut found = search(&mut guest, &daemon, plan)?;
    let before = daemon.vm()?;
    let reclaimed = daemon.reclaim(Some(found.cold_pages * PAGE_BYTES))?;
    let presence = guest.presence()?;
    std::thread::sleep(REFAULT_TIME);
    let after = daemon.vm()?;
    found.cold_present_pages = presence.cold_present_pages;
    found.evicted_pages = after.evicted_pages - before.evicted_pages;
    found.refaults = after.vcpu_faults - before.vcpu_faults;
    found.shortfall = reclaimed.shortfall;
    daemon.detach()?;
    guest.obey(&Order::VerifyAll)?;
    Ok(found)
}

/// Attaches, and waits until the cold part is known.
fn search(guest: &mut BusyGuest, daemon: &Daemon, plan: &Plan<'_>) -> Result<Found, String> {
    let vm = daemon.attach(guest.pid(), None)?;
    if let Some(bar) = vm.eviction_blockers.first() {
        return Err(format!("nothing of the guest can be evicted: {bar}"));
    }
    let truth = guest.presence()?;
    let mut found = Found {
        cold_sections: truth.cold_sections,
        cold_pages: truth.cold_pages,
        ..Found::default()
    };
    let time = if truth.cold_sections == 0 {
        plan.search.min(PAGES_WAIT)
    } else {
        plan.search
    };
    let (begun, cpu_ns) = (Instant::now(), daemon.cpu_ns()?);
    while begun.elapsed() < time && found.found_s.is_none() {
        std::thread::sleep(LOOK);
        found.told_sections = sections_in(&daemon.vm()?, COLD_SET);
        if found
            .cold_found_share()
            .is_some_and(|share| share >= FOUND_SHARE)
        {
            found.found_s = Some(begun.elapsed().as_secs_f64());
        }
    }
    found.searched_s = begun.elapsed().as_secs_f64();
    let spent_ns = daemon.cpu_ns()?.saturating_sub(cpu_ns);
    found.scan_cpu_share = to_f64(spent_ns) / 1e9 / found.searched_s;
    Ok(found)
}

fn sections_in(vm: &VmReport, name: &str) -> u64 {
    let named = vm.sections.iter().filter(|set| set.set == name);
    named.map(|set| set.sections).sum()
}

fn describe(ours: &[(Row, Found)], peers: &[(Row, Found)], report: &mut BenchReport) {
    let by_section = ours.iter().filter(|(row, _)| row.is_by_section());
    let worst = by_section
        .filter_map(|(_, found)| found.cold_found_share())
        .reduce(f64::min);
    let table = |rows: &[(Row, Found)]| -> Map<String, Value> {
        let named = rows.iter().map(|(row, found)| (row.name(), found.value()));
        named.collect()
    };
    let figures = &mut report.figures;
    figures.insert("cold_found_share".into(), worst.map(thousandths).into());
    figures.insert("rows".into(), table(ours).into());
    let ratio = if peers.is_empty() {
        let reason = "not measured: name a tracker that unmaps everything by --peer-setting";
        report.peers.insert("full_unmapping".into(), json!(reason));
        None
    } else {
        report
            .peers
            .insert("full_unmapping".into(), table(peers).into());
        Some(refaults(ours) / refaults(peers))
    };
    let ratio = ratio.map(thousandths).into();
    report
        .ratios
        .insert("refaults_over_full_unmapping".into(), ratio);
}

/// Over all rows, and one for a thousand evicted pages.
fn refaults(rows: &[(Row, Found)]) -> f64 {
    let sum = |read: fn(&Found) -> u64| rows.iter().map(|(_, found)| read(found)).sum::<u64>();
    to_f64(sum(|found| found.refaults)) + to_f64(sum(|found| found.evicted_pages)) / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(told_sections: u64, refaults: u64) -> Found {
        Found {
            cold_sections: 100,
            told_sections,
            evicted_pages: 10_000,
            refaults,
            ..Found::default()
        }
    }

    #[test]
    fn worst_row_by_section_counts_and_more_than_all_is_all() {
        let all = rows();
        let ours = [
            (all[0], found(95, 5)),
            (all[1], found(120, 5)),
            (all[3], found(7, 5)),
        ];
        let mut report = BenchReport::new(NAME);
        describe(&ours, &[], &mut report);
        assert_eq!(report.figures["cold_found_share"], json!(0.95));
        assert_eq!(
            report.figures["rows"]["section_50"]["cold_found_share"],
            json!(1.0)
        );
        assert_eq!(report.ratios["refaults_over_full_unmapping"], Value::Null);
        let peers = [
            (all[0], found(100, 0)),
            (all[1], found(100, 0)),
            (all[3], found(100, 0)),
        ];
        describe(&ours, &peers, &mut report);
        assert_eq!(report.ratios["refaults_over_full_unmapping"], json!(1.5));
    }

    #[test]
    fn row_without_cold_sections_has_no_share() {
        assert_eq!(Found::default().cold_found_share(), None);
        let names: Vec<_> = rows().iter().map(Row::name).collect();
        assert_eq!(names[0], "section_10");
        assert_eq!(names[9], "one_page_of_512");
    }
}
