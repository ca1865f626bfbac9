// SPDX-License-Identifier: Apache-2.0
//! `bench iopf-rtt`: the round-trip time of an I/O page fault (VPRI 2.1 and 3.2, figures 2 and 3).
//!
//! One device faults, 1,000 times one after the other, by each of these ways:
//!
//! | way | path of its request |
//! |---|---|
//! | `vpri_in_process` | engine's queue → dispatcher → worker on the tenant's CPU → response queue (`iopf-payer = vm`) |
//! | `vpri_engine_itself` | engine's queue, which the engine serves itself, being idle (`iopf-payer = engine`) |
//! | `vpri_across_processes` | the same through a VPRI function whose device is in another process ([`across`]) |
//! | `ats_pri` | device TLB, ATS, page request queue → interrupt thread → the same service → invalidation queue, ATS again |
//! | `ats_pri_work_queue` | the same, but handled by a thread of the ordinary class, as Linux does |
//!
//! and by each of these hosts and handlers:
//! - *idle*, and *busy*: a thread that compresses by lz4 and one that scans page tables run all the time on
//!   the tenant's CPU (`load_compress_turns` and `load_scan_turns` are those that worked; a load without
//!   one of them fails the bench);
//! - a handler that only answers: the page is present, and is granted (figure 3's does not even do that);
//!   and, as `fill`, one that fills the page from lz4.
//!
//! Each round trip has three parts: *pre* from the moment the device sees that the page is absent until its
//! handling begins, *handling*, and *post* from there until the device may touch the page. All ways take
//! turns in each round. The report also has the three times of each fault in nanoseconds, as `samples`, which
//! the simulator's model of page faults draws from.
//!
//! *Who pays* (6.1): by `vpri_engine_itself` the CPU of the engine is taken for `handling`, and the tenant's for
//! nothing; by `vpri_in_process` the tenant's for `handling` and two wake-ups, and the engine's for none of it.
//! `WAY_CASE_tenant_cpu_us_per_fault` is the CPU time, while the host is idle, of all threads of this process on the
//! tenant's CPU: the device's is not there.
//!
//! **Two CPUs**: one is the device's, which keeps it while it waits, as hardware would, and excludes other
//! threads (`SCHED_FIFO`, where allowed); on the other are the tenant's vCPUs (none runs here), all threads
//! of the host and the load. A device of the paper is hardware beyond PCIe, which the ways of VPRI do not
//! cross here; the model of ATS and PRI spins for [`sides::CROSSING`] at each crossing, four times between
//! *absent* and *usable*: `ats_pri_less_crossings_over_…` excludes these.

pub mod across;
mod busy;
mod sides;

use std::{cmp::Ordering, time::Duration};

use pagetide_addr::PageNo;
use pagetide_sys::cpu::{self, Urgency};
use pagetide_vpri::IdleEngines;
use serde_json::{Map, Value, json};

use self::{
    across::AcrossProcesses,
    busy::{Busy, Turns},
    sides::{AtsPri, Bottom, CROSSING, InProcess, Side, Split, cpus},
};
use super::harness::{
    figures::thousandths,
    latencies::Latencies,
    report::{BenchError, BenchReport, failed, unable},
    rounds::{Round, WarmUp, rounds},
};
use super::tenant_ram::{move_to, stand};

const NAME: &str = "iopf-rtt";
/// Pages of a tenant.
const PAGES: u64 = 512;
/// Crossings of PCIe between *absent* and *usable* by ATS and PRI: request, response, and both ways
/// of the second translation.
const CROSSINGS: u32 = 4;
/// Uncounted faults of each slice: the first ones wake threads that have slept for long.
const WARM_UP: usize = 5;

/// Other threads of the device's CPU wait while the device works: it represents hardware.
const DEVICE_URGENCY: Urgency = Urgency::Preempting(1);

/// The extent of a measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IopfRttBenchOptions {
    /// Rounds of all ways, hosts and handlers.
    pub rounds: usize,
    /// Faults of each in a round.
    pub faults: usize,
    /// Pause before each fault, so that the host's threads sleep.
    pub pause: Duration,
    /// Whether the way across processes is among them.
    pub across: Across,
}

/// Whether a device process is started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Across {
    /// Yes: this program once more.
    Measured,
    /// No: this program is not the one that users run.
    LeftOut,
}

impl Default for IopfRttBenchOptions {
    /// 1,000 of each.
    fn default() -> Self {
        Self {
            rounds: 5,
            faults: 200,
            pause: Duration::from_micros(500),
            across: Across::Measured,
        }
    }
}

/// The host's other load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Host {
    Idle,
    Busy,
}

/// The handler's work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Handler {
    Answer,
    Fill,
}

const CASES: [(Host, Handler, &str); 4] = [
    (Host::Idle, Handler::Answer, "idle"),
    (Host::Idle, Handler::Fill, "idle_fill"),
    (Host::Busy, Handler::Answer, "busy"),
    (Host::Busy, Handler::Fill, "busy_fill"),
];

/// A way with its name and its measurements, by case.
struct Way {
    name: &'static str,
    side: Box<dyn Side>,
    samples: [Vec<Split>; CASES.len()],
    /// CPU time of this process but for the device's thread.
    host_cpu: [Duration; CASES.len()],
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &IopfRttBenchOptions) -> Result<BenchReport, BenchError> {
    let (device_cpu, host_cpu) = cpus().map_err(unable)?;
    // Threads started from here on stay on the host's CPU.
    move_to(host_cpu).map_err(failed)?;
    let measured = ways(options.across, device_cpu, host_cpu).and_then(|mut ways| {
        let mut turns = Turns::default();
        for round in rounds(NAME, options.rounds, WarmUp::None) {
            turns += one_round(&mut ways, round, options, device_cpu, host_cpu)?;
        }
        Ok(report(&ways, turns, options))
    });
    stand(device_cpu, Urgency::Ordinary).map_err(failed)?;
    cpu::set_affinity(&[device_cpu, host_cpu]).map_err(failed)?;
    measured.map_err(failed)
}

fn ways(across: Across, device_cpu: usize, host_cpu: usize) -> Result<Vec<Way>, String> {
    let in_process = |idle_engines| InProcess::new(idle_engines, host_cpu);
    let ats_pri = |bottom| AtsPri::new(bottom, host_cpu);
    let mut sides: Vec<(&'static str, Box<dyn Side>)> = vec![
        ("vpri_in_process", Box::new(in_process(IdleEngines::Leave)?)),
        (
            "vpri_engine_itself",
            Box::new(in_process(IdleEngines::Serve)?),
        ),
        ("ats_pri", Box::new(ats_pri(Bottom::Service)?)),
        ("ats_pri_work_queue", Box::new(ats_pri(Bottom::WorkQueue)?)),
    ];
    if across == Across::Measured {
        let side = AcrossProcesses::new(device_cpu, host_cpu)?;
        sides.push(("vpri_across_processes", Box::new(side)));
    }
    let way = |(name, side)| Way {
        name,
        side,
        samples: Default::default(),
        host_cpu: Default::default(),
    };
    Ok(sides.into_iter().map(way).collect())
}

/// One slice of each way in each case; returns the turns of the load, of which each slice with a load has
/// both kinds.
fn one_round(
    ways: &mut [Way],
    round: Round,
    options: &IopfRttBenchOptions,
    device_cpu: usize,
    host_cpu: usize,
) -> Result<Turns, String> {
    let mut turns = Turns::default();
    for (case, (host, handler, _)) in CASES.into_iter().enumerate() {
        stand(host_cpu, Urgency::Ordinary)?;
        let busy = match host {
            Host::Idle => None,
            Host::Busy => Some(Busy::start(host_cpu)?),
        };
        stand(device_cpu, DEVICE_URGENCY)?;
        for number in round.rotated(ways.len()) {
            let way = &mut ways[number];
            let mut before = Duration::ZERO;
            for fault in 0..=WARM_UP + options.faults {
                let page = PageNo((fault * 37 + round.number) as u64 % PAGES);
                let split = one_fault(&mut *way.side, page, handler, options.pause)
                    .map_err(|error| format!("{}: {error}", way.name))?;
                match fault.cmp(&WARM_UP) {
                    Ordering::Less => {}
                    // The device's thread goes on once it has its answer; those of the host go to sleep again.
                    Ordering::Equal => before = of_others(),
                    Ordering::Greater => way.samples[case].push(split),
                }
            }
            way.host_cpu[case] += of_others().saturating_sub(before);
        }
        if let Some(busy) = busy {
            turns += busy.turns().of_both()?;
        }
    }
    Ok(turns)
}

/// CPU time of all threads of this process but this one, the device's.
fn of_others() -> Duration {
    cpu::process_time().saturating_sub(cpu::thread_time())
}

fn one_fault(
    side: &mut dyn Side,
    page: PageNo,
    handler: Handler,
    pause: Duration,
) -> Result<Split, String> {
    match handler {
        Handler::Answer => side.tenant().hide(page)?,
        Handler::Fill => side.tenant().evict(page)?,
    }
    std::thread::sleep(pause);
    side.fault(page)
}

/// Percentiles of one part, in microseconds.
fn part(splits: &[Split], of: impl Fn(&Split) -> u64) -> Value {
    let times: Latencies = splits.iter().map(of).collect();
    times.report_us(&[("p50", 500), ("p90", 900), ("p99", 990), ("worst", 1000)])
}

fn total_us(ways: &[Way], name: &str, case: &str, permille: usize) -> f64 {
    let case = CASES.iter().position(|(_, _, known)| *known == case);
    let way = ways.iter().find(|way| way.name == name);
    let (Some(case), Some(way)) = (case, way) else {
        return f64::NAN;
    };
    let times: Latencies = way.samples[case].iter().map(Split::total_ns).collect();
    times.us(permille)
}

fn report(ways: &[Way], turns: Turns, options: &IopfRttBenchOptions) -> BenchReport {
    let mut report = BenchReport::new(NAME);
    let figures = &mut report.figures;
    figures.insert(
        "faults_of_each".into(),
        (options.rounds * options.faults).into(),
    );
    figures.insert(
        "pause_us".into(),
        thousandths(options.pause.as_secs_f64() * 1e6),
    );
    figures.insert(
        "ats_pri_crossing_us".into(),
        thousandths(CROSSING.as_secs_f64() * 1e6),
    );
    figures.insert("ats_pri_crossings".into(), CROSSINGS.into());
    figures.insert("device_cpus".into(), 1.into());
    figures.insert("host_and_tenant_cpus".into(), 1.into());
    figures.insert("load_compress_turns".into(), turns.compressed.into());
    figures.insert("load_scan_turns".into(), turns.scanned.into());
    for way in ways {
        for ((samples, host_cpu), (host, _, case)) in
            way.samples.iter().zip(&way.host_cpu).zip(CASES)
        {
            // What else runs on a busy host's CPU is in this process, too.
            if host == Host::Idle {
                let of_each = host_cpu.as_secs_f64() * 1e6 / samples.len().max(1) as f64;
                let name = format!("{}_{case}_tenant_cpu_us_per_fault", way.name);
                figures.insert(name, thousandths(of_each));
            }
            let parts = json!({
                "pre": part(samples, |split| split.pre_ns),
                "handling": part(samples, |split| split.handling_ns),
                "post": part(samples, |split| split.post_ns),
                "total": part(samples, Split::total_ns),
            });
            figures.insert(format!("{}_{case}_us", way.name), parts);
            let all = samples
                .iter()
                .map(|split| json!([split.pre_ns, split.handling_ns, split.post_ns]));
            (report.samples).insert(format!("{}_{case}", way.name), all.collect());
        }
    }
    let peers = &mut report.peers;
    peers.insert("paper_ats_pri_idle_us".into(), "10 to 40 (figure 3)".into());
    peers.insert("paper_ats_pri_busy_p99_us".into(), 427.into());
    peers.insert(
        "paper_ats_translation_us".into(),
        "about 1 on PCIe, both ways".into(),
    );
    peers.insert("model".into(), MODEL.into());
    report.ratios = ratios(ways);
    report
}

const MODEL: &str = "ats_pri is a model: its device is a thread, an interrupt is the wake-up of a \
    thread, and a crossing of PCIe is a spin of the time given";

fn ratios(ways: &[Way]) -> Map<String, Value> {
    let total = |name: &str, case: &str, permille| total_us(ways, name, case, permille);
    let ours = |case, permille| total("vpri_in_process", case, permille);
    let mut ratios = Map::new();
    let mut put = |name: &str, ratio: f64| {
        ratios.insert(name.into(), thousandths(ratio));
    };
    for (peer, over) in [
        ("ats_pri", "ats_pri_over_vpri"),
        ("ats_pri_work_queue", "ats_pri_work_queue_over_vpri"),
        ("vpri_engine_itself", "engine_itself_over_service"),
        ("vpri_across_processes", "across_over_in_process"),
    ] {
        for case in ["idle", "busy"] {
            for (permille, name) in [(500, "p50"), (990, "p99")] {
                let ratio = total(peer, case, permille) / ours(case, permille);
                put(&format!("{over}_{case}_{name}"), ratio);
            }
        }
    }
    let crossings_us = (CROSSING * CROSSINGS).as_secs_f64() * 1e6;
    let less = total("ats_pri", "idle", 500) - crossings_us;
    put(
        "ats_pri_less_crossings_over_vpri_idle_p50",
        less / ours("idle", 500),
    );
    ratios
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_and_case_is_there_with_its_parts_after_a_short_run() {
        let options = IopfRttBenchOptions {
            rounds: 1,
            faults: 3,
            pause: Duration::ZERO,
            across: Across::LeftOut,
        };
        let report = match run(&options) {
            Err(BenchError::Unable { reason, .. }) => {
                eprintln!("SKIPPED: {reason}");
                return;
            }
            ran => ran.unwrap(),
        };
        let ways = [
            "vpri_in_process",
            "vpri_engine_itself",
            "ats_pri",
            "ats_pri_work_queue",
        ];
        for way in ways {
            for (_, _, case) in CASES {
                let figure = &report.figures[&format!("{way}_{case}_us")];
                let p50 = |part: &str| figure[part]["p50"].as_f64().unwrap();
                assert!(p50("total") > 0.0, "{way} {case}");
                assert!(p50("handling") <= p50("total"), "{way} {case}");
                assert!(figure["pre"]["worst"].is_f64() && figure["post"]["p99"].is_f64());
            }
        }
        for way in ways {
            let paid = &report.figures[&format!("{way}_idle_fill_tenant_cpu_us_per_fault")];
            assert!(paid.as_f64() >= Some(0.0), "{way}: {paid}");
        }
        let samples = &report.samples["vpri_in_process_idle_fill"];
        assert_eq!(samples.as_array().unwrap().len(), 3);
        assert!(samples[2][1].as_u64().is_some());
        for ratio in ["ats_pri_over_vpri_idle_p50", "ats_pri_over_vpri_busy_p99"] {
            assert!(report.ratios[ratio].is_f64(), "{ratio}");
        }
        for kind in ["load_compress_turns", "load_scan_turns"] {
            assert!(report.figures[kind].as_u64() > Some(0), "{kind}");
        }
    }

    #[test]
    fn percentiles_are_of_the_part_asked_for() {
        let split = |pre_ns| Split {
            pre_ns,
            handling_ns: 500,
            post_ns: 1000,
        };
        let splits: Vec<Split> = (1..=100).rev().map(|us| split(us * 1000)).collect();
        let pre = part(&splits, |split| split.pre_ns);
        assert_eq!(
            (&pre["p50"], &pre["p99"], &pre["worst"]),
            (&50.0.into(), &99.0.into(), &100.0.into())
        );
        let total = part(&splits, Split::total_ns);
        assert_eq!(total["p90"], 91.5);
    }
}
