// SPDX-License-Identifier: Apache-2.0
//! `bench iopf-scale`: page faults of many tenants at a time (VPRI 7.2, figure 15), and of one tenant
//! during a fault storm of another.
//!
//! Each tenant has a vCPU on its own CPU, and faults ten times a second. The handler of a fault *waits* 5
//! ms, as for a slow tier, and does not compute; so the few CPUs of this machine can represent those of all
//! tenants (`cpus_for_tenants` has their number), and queueing behind a wait is visible. All are virtual
//! functions of one DPU: one page fault queue.
//!
//! | way | handled by |
//! |---|---|
//! | serialized | one worker for all, in the order of arrival (figure 15a) |
//! | affined | a worker of the tenant, on the CPU of its interrupts (figure 15b) |
//!
//! A latency is from the device's request until it receives the answer. The ratios are of means with all
//! tenants faulting at the same instants, the hardest case for one worker; independent arrivals and bursts
//! are reported beside them. Ways and numbers of tenants take turns.
//!
//! *Isolation*: tenant A's vCPU, the dispatcher and the device share one CPU, tenant B has another; both
//! vCPUs compute all the time. The ratio is B's p99.9 while A keeps as many faults outstanding as a device
//! may have, many thousands a second, over B's p99.9 while A is quiet: the median of pairs, quiet and storm
//! first in turn. B's worker must preempt its vCPU each time: `preempt_us`. Most of a latency is the hold,
//! the same in both halves, which pulls the ratio towards 1; `…_less_hold` is the ratio without it.

mod load;
mod rig;

use pagetide_sys::clock;
use std::time::Duration;

use pagetide_sys::cpu;
use pagetide_vpri::Handling;
use serde_json::{Map, Value, json};

use super::harness::{
    figures::{median, thousandths},
    latencies::Latencies,
    report::{BenchError, BenchReport, failed, unable},
    rounds::{WarmUp, progress, rounds},
};
use load::{Arrivals, Fault, Load, Storm};
use rig::{Broken, BusyVcpu, Rig};

const NAME: &str = "iopf-scale";
/// Numbers of tenants.
const TENANTS: [usize; 5] = [1, 2, 4, 8, 16];
/// Ways to handle, and their names in the report.
const WAYS: [(&str, Handling); 2] = [
    ("serialized", Handling::Serialized),
    ("affined", Handling::Affined),
];
/// Arrivals, and their names in the report.
const ARRIVALS: [(&str, Arrivals); 3] = [
    ("aligned", Arrivals::Aligned),
    ("poisson", Arrivals::Poisson),
    ("bursts", Arrivals::Bursts),
];
/// Most requests that a device may have outstanding.
const OUTSTANDING_MAX: u64 = 128;

/// The extent of a measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IopfScaleOptions {
    /// How long the handler of a fault waits.
    pub hold: Duration,
    /// Faults a second of each tenant.
    pub faults_per_s: u32,
    /// Each measurement of tenants at a time.
    pub time: Duration,
    /// Pairs of quiet and storm.
    pub pairs: usize,
    /// B's faults in each half of a pair.
    pub isolation_faults: u32,
    /// From one of B's faults to the next; longer than one takes.
    pub isolation_gap: Duration,
    /// From one wave of A's storm to the next.
    pub storm_every: Duration,
}

impl Default for IopfScaleOptions {
    fn default() -> Self {
        Self {
            hold: Duration::from_millis(5),
            faults_per_s: 10,
            time: Duration::from_millis(800),
            pairs: 5,
            isolation_faults: 1_000,
            isolation_gap: Duration::from_millis(6),
            storm_every: Duration::from_millis(10),
        }
    }
}

impl IopfScaleOptions {
    fn hold_us(&self) -> u32 {
        u32::try_from(self.hold.as_micros()).unwrap_or(u32::MAX)
    }
}

/// One way, one kind of arrivals, one number of tenants.
struct Cell {
    way: &'static str,
    arrivals: &'static str,
    tenants: usize,
    latencies: Latencies,
    preempt_us: Value,
}

/// Half of a pair.
struct Half {
    p999_ns: u64,
    p50_ns: u64,
    preempt_us: Value,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &IopfScaleOptions) -> Result<BenchReport, BenchError> {
    let cpus = cpu::affinity().map_err(failed)?;
    let [first, .., last] = *cpus else {
        return Err(unable(
            "it needs two CPUs, so that a tenant has one of its own",
        ));
    };
    let mut cells = Vec::new();
    for (arrivals_name, arrivals) in ARRIVALS {
        for tenants in TENANTS {
            progress(NAME, format_args!("{arrivals_name}, {tenants} tenants"));
            for (way, handling) in WAYS {
                let of_tenants: Vec<_> = cpus.iter().copied().cycle().take(tenants).collect();
                let measured = scale(options, handling, arrivals, &of_tenants, &cpus);
                let (latencies, preempt_us) = measured.map_err(failed)?;
                cells.push(Cell {
                    way,
                    arrivals: arrivals_name,
                    tenants,
                    latencies,
                    preempt_us,
                });
            }
        }
    }
    let mut pairs = Vec::new();
    progress(NAME, "isolation");
    for pair in rounds(NAME, options.pairs, WarmUp::None) {
        let (mut quiet, mut storm) = (None, None);
        for storms in pair.turns([Storms::No, Storms::Yes]) {
            let half = isolation(options, storms, [first, last]).map_err(failed)?;
            match storms {
                Storms::No => quiet = Some(half),
                Storms::Yes => storm = Some(half),
            }
        }
        pairs.extend(quiet.zip(storm).map(|(quiet, storm)| [quiet, storm]));
    }
    Ok(report(options, &cells, &pairs, cpus.len()))
}

/// Mean latency of a fault, in milliseconds, with all tenants faulting at the same instants: the largest number
/// of tenants, serialized and affined, in turns.
///
/// # Errors
/// [`BenchError`].
pub fn aligned_means_ms(options: &IopfScaleOptions) -> Result<[f64; 2], BenchError> {
    let cpus = cpu::affinity().map_err(failed)?;
    if cpus.len() < 2 {
        return Err(unable(
            "it needs two CPUs, so that a tenant has one of its own",
        ));
    }
    let most = TENANTS[TENANTS.len() - 1];
    let of_tenants: Vec<_> = cpus.iter().copied().cycle().take(most).collect();
    let mut means_ms = [0.0; 2];
    for ((_, handling), mean_ms) in WAYS.into_iter().zip(&mut means_ms) {
        let measured = scale(options, handling, Arrivals::Aligned, &of_tenants, &cpus);
        let (latencies, _) = measured.map_err(failed)?;
        *mean_ms = latencies.mean_ns() / 1e6;
    }
    Ok(means_ms)
}

/// Latencies, and what it took to preempt.
fn scale(
    options: &IopfScaleOptions,
    handling: Handling,
    arrivals: Arrivals,
    of_tenants: &[usize],
    cpus: &[usize],
) -> Result<(Latencies, Value), Broken> {
    let rig = Rig::new(handling, of_tenants)?;
    let load = Load {
        faults: load::faults(
            arrivals,
            of_tenants.len(),
            options.faults_per_s,
            options.time,
        ),
        hold_us: options.hold_us(),
        storm: None,
    };
    let latencies_ns = rig::as_device(cpus, || load::run(&rig, &load))?;
    let preempt_us = preempt_us(&rig, 0..of_tenants.len())?;
    rig.end();
    Ok((latencies_ns.into_iter().collect(), preempt_us))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Storms {
    Yes,
    No,
}

/// B's latencies, on its own CPU `b`; all else is on `a`.
fn isolation(
    options: &IopfScaleOptions,
    storms: Storms,
    [a, b]: [usize; 2],
) -> Result<Half, Broken> {
    const B: usize = 1;
    let _computing = [BusyVcpu::start(a)?, BusyVcpu::start(b)?];
    let fault = |number: u32| Fault {
        at: options.isolation_gap * number,
        tenant: B,
    };
    let load = Load {
        faults: (0..options.isolation_faults).map(fault).collect(),
        hold_us: options.hold_us(),
        storm: (storms == Storms::Yes).then_some(Storm {
            tenant: 0,
            faults: OUTSTANDING_MAX,
            every: options.storm_every,
        }),
    };
    // The dispatcher is started here, and so stays here.
    let (latencies_ns, preempt_us) = rig::as_device(&[a], || {
        let rig = Rig::new(Handling::Affined, &[a, b])?;
        let latencies_ns = load::run(&rig, &load)?;
        let preempt_us = preempt_us(&rig, B..B + 1)?;
        rig.end();
        Ok::<_, Broken>((latencies_ns, preempt_us))
    })?;
    let latencies: Latencies = latencies_ns.into_iter().collect();
    Ok(Half {
        p999_ns: latencies.ns(999),
        p50_ns: latencies.ns(500),
        preempt_us,
    })
}

fn preempt_us(rig: &Rig, tenants: std::ops::Range<usize>) -> Result<Value, Broken> {
    let mut all = rig.preempt_ns(tenants.start);
    for tenant in tenants.skip(1) {
        all.add(rig.preempt_ns(tenant))?;
    }
    let at = |quantile| thousandths(all.value_at_quantile(quantile) as f64 / 1e3);
    Ok(json!({ "p50": at(0.5), "p99": at(0.99), "count": all.len() }))
}

fn report(
    options: &IopfScaleOptions,
    cells: &[Cell],
    pairs: &[[Half; 2]],
    cpus: usize,
) -> BenchReport {
    let mut report = BenchReport::new(NAME);
    let figures = &mut report.figures;
    figures.insert("cpus_for_tenants".into(), cpus.into());
    figures.insert(
        "handlers".into(),
        "wait and do not compute; tenants share the CPUs in turn".into(),
    );
    figures.insert("hold_us".into(), options.hold_us().into());
    figures.insert(
        "faults_per_tenant_per_s".into(),
        options.faults_per_s.into(),
    );
    for (arrivals, _) in ARRIVALS {
        for (way, _) in WAYS {
            let of_tenants = TENANTS.map(|tenants| {
                let cell = find(cells, way, arrivals, tenants);
                let value = cell.map_or(Value::Null, Cell::figures);
                (format!("tenants_{tenants}"), value)
            });
            let name = format!("{arrivals}_{way}_ms");
            figures.insert(name, Map::from_iter(of_tenants).into());
        }
    }
    report_isolation(&mut report, options, pairs);
    let most = TENANTS[TENANTS.len() - 1];
    for (arrivals, _) in ARRIVALS {
        for (way, _) in WAYS {
            let mean =
                |tenants| find(cells, way, arrivals, tenants).map_or(f64::NAN, Cell::mean_ms);
            let name = match arrivals {
                "aligned" => format!("{way}_16_over_1"),
                _ => format!("{arrivals}_{way}_16_over_1"),
            };
            (report.ratios).insert(name, thousandths(mean(most) / mean(1)));
        }
    }
    (report.peers).insert("paper_serialized_16_over_1".into(), 10.4.into());
    report.peers.insert(
        "paper".into(),
        "VPRI, 7.2: 16 VMs at 10 faults of 5 ms a second each, one worker: 10.4 times the latency; \
         affined: the same at all rates"
            .into(),
    );
    report
}

fn report_isolation(report: &mut BenchReport, options: &IopfScaleOptions, pairs: &[[Half; 2]]) {
    let figures = &mut report.figures;
    let storm_per_s = OUTSTANDING_MAX as f64 / options.storm_every.as_secs_f64();
    figures.insert(
        "storm_faults_per_s_at_most".into(),
        thousandths(storm_per_s),
    );
    for (index, name) in ["quiet", "storm"].into_iter().enumerate() {
        let halves = || pairs.iter().map(|pair| &pair[index]);
        let ms = |ns: u64| thousandths(ns as f64 / 1e6);
        let less_hold_us = |half: &Half| thousandths(half.p999_less_ns(options.hold) as f64 / 1e3);
        for (figure, of_pairs) in [
            ("p50_ms", halves().map(|half| ms(half.p50_ns)).collect()),
            ("p999_ms", halves().map(|half| ms(half.p999_ns)).collect()),
            ("p999_less_hold_us", halves().map(less_hold_us).collect()),
            (
                "preempt_us",
                halves().map(|half| half.preempt_us.clone()).collect(),
            ),
        ] {
            let of_pairs: Value = of_pairs;
            figures.insert(format!("isolation_{name}_{figure}"), of_pairs);
        }
    }
    for (name, hold) in [
        ("isolation_p999", Duration::ZERO),
        ("isolation_p999_less_hold", options.hold),
    ] {
        let over_quiet = thousandths(p999_over_quiet(pairs, hold));
        (report.ratios).insert(name.into(), over_quiet);
    }
}

/// Median over the pairs of B's p99.9 in the storm over that in quiet, both without `hold`.
fn p999_over_quiet(pairs: &[[Half; 2]], hold: Duration) -> f64 {
    median(
        pairs.iter().map(|[quiet, storm]| {
            storm.p999_less_ns(hold) as f64 / quiet.p999_less_ns(hold) as f64
        }),
    )
}

impl Half {
    fn p999_less_ns(&self, hold: Duration) -> u64 {
        let hold_ns = clock::ns(hold);
        self.p999_ns.saturating_sub(hold_ns)
    }
}

fn find<'a>(cells: &'a [Cell], way: &str, arrivals: &str, tenants: usize) -> Option<&'a Cell> {
    (cells.iter())
        .find(|cell| cell.way == way && cell.arrivals == arrivals && cell.tenants == tenants)
}

impl Cell {
    fn mean_ms(&self) -> f64 {
        self.latencies.mean_ns() / 1e6
    }

    fn figures(&self) -> Value {
        let at_ms = |permille| thousandths(self.latencies.ns(permille) as f64 / 1e6);
        json!({
            "mean": thousandths(self.mean_ms()),
            "p50": at_ms(500),
            "p99": at_ms(990),
            "faults": self.latencies.count(),
            "preempt_us": self.preempt_us,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ratio_is_there_after_a_short_run() {
        let options = IopfScaleOptions {
            hold: Duration::from_micros(200),
            faults_per_s: 100,
            time: Duration::from_millis(20),
            pairs: 1,
            isolation_faults: 10,
            isolation_gap: Duration::from_millis(1),
            storm_every: Duration::from_millis(1),
        };
        let report = match run(&options) {
            Ok(report) => report,
            Err(BenchError::Unable { reason, .. }) => {
                eprintln!("SKIPPED: {reason}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        for ratio in [
            "serialized_16_over_1",
            "affined_16_over_1",
            "poisson_affined_16_over_1",
            "bursts_serialized_16_over_1",
            "isolation_p999",
            "isolation_p999_less_hold",
        ] {
            // Runs this short give no meaningful value.
            assert!(report.ratios[ratio].as_f64().unwrap() > 0.0, "{ratio}");
        }
        let aligned = &report.figures["aligned_affined_ms"];
        assert_eq!(aligned["tenants_16"]["faults"], 32);
        for half in ["quiet", "storm"] {
            let name = format!("isolation_{half}_p999_less_hold_us");
            assert!(report.figures[&name][0].as_f64().unwrap() > 0.0, "{name}");
        }
        assert_eq!(report.peers["paper_serialized_16_over_1"], 10.4);
    }

    #[test]
    fn ratio_less_hold_is_of_what_the_hold_leaves_of_both() {
        let half = |p999_us: u64| Half {
            p999_ns: p999_us * 1_000,
            p50_ns: 0,
            preempt_us: Value::Null,
        };
        let pairs = [(5_100, 5_200), (5_100, 5_400), (5_200, 5_800)]
            .map(|(quiet, storm)| [half(quiet), half(storm)]);
        let hold = Duration::from_millis(5);
        assert!((p999_over_quiet(&pairs, hold) - 4.0).abs() < 1e-9);
        let with_hold = p999_over_quiet(&pairs, Duration::ZERO);
        assert!((with_hold - 5_400.0 / 5_100.0).abs() < 1e-9);
    }
}
