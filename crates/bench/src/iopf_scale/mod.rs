// SPDX-License-Identifier: Apache-2.0
//! `bench iopf-scale`: page faults of many tenants at a time (VPRI 7.2, figure 15), and of one tenant
//! during a fault storm of another.
//!
//! Each tenant has a vCPU on its own CPU, and faults ten times a second. The handler of a fault *waits* 5
//! ms for a modelled disk, as the paper's does, and then fills the page: every second one from zeros, the
//! others by lz4. Each fault is of another page, and all pages are checked at the end. The wait is most of
//! it, so the few CPUs of this machine can represent those of all tenants (`cpus_for_tenants` has their
//! number), and queueing behind a wait is visible. All are virtual functions of one DPU: one page fault
//! queue.
//!
//! | way | handled by |
//! |---|---|
//! | serialized | one worker for all, in the order of arrival (figure 15a) |
//! | affined | a worker of the tenant, on the CPU of its interrupts (figure 15b) |
//!
//! | arrivals | |
//! |---|---|
//! | poisson | of each tenant independently: the figures that count |
//! | memory | the same, with content at hand: no disk, so fills alone |
//! | bursts | ten at a time |
//! | aligned | all tenants at the same instants: the worst case. Its serialized ratio is (1 + n) / 2 by construction, and shows only that there is one worker |
//!
//! A latency is from the device's request until it receives the answer; the ratios are of means. Ways and
//! numbers of tenants take turns.
//!
//! `peers.theory` has what queueing theory ([`theory`]) says of one worker: `poisson_…` by the formula of
//! M/D/1 with 5 ms; `…_of_these_arrivals` by the very arrivals of the run; `…_as_handled` by these with the
//! time that the handler took here, which is the figure to compare with. What ours has above it is the
//! machine's: waking the worker and the device.
//!
//! *Isolation*: tenant A's vCPU, the dispatcher and the device share one CPU, tenant B has another; both
//! vCPUs compute all the time. The ratio is B's p99.9 while A keeps as many faults outstanding as a device
//! may have, many thousands a second, all of them fills of zeros, over B's p99.9 while A is quiet: the median
//! of pairs, quiet and storm first in turn. B's worker must preempt its vCPU each time: `preempt_us`. Most of
//! a latency is the disk, the same in both halves, which pulls the ratio towards 1; `…_less_hold` is the ratio
//! without it.
//!
//! *Weak points.* The disk is a sleep in the worker, as in the paper; the product's own slow tiers do not
//! keep a worker waiting. Pages are written through their memory file, not through a userfaultfd, for the
//! tenants have no processes.

mod load;
mod rig;
mod theory;

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
use crate::{SizeOptions, tenant_ram::Filling};
use load::{Arrivals, Fault, Load, Storm};
use rig::{Broken, BusyVcpu, Rig, TenantPlan};

const NAME: &str = "iopf-scale";
/// Numbers of tenants.
const TENANTS: [usize; 5] = [1, 2, 4, 8, 16];
/// The most of them.
const MOST: usize = TENANTS[TENANTS.len() - 1];
/// Ways to handle, and their names in the report.
const WAYS: [(&str, Handling); 2] = [
    ("serialized", Handling::Serialized),
    ("affined", Handling::Affined),
];
/// Kinds of cells.
const KINDS: [Kind; 4] = [
    Kind::new("aligned", Arrivals::Aligned, From::Disk),
    Kind::new("poisson", Arrivals::Poisson, From::Disk),
    Kind::new("memory", Arrivals::Poisson, From::Memory),
    Kind::new("bursts", Arrivals::Bursts, From::Disk),
];
/// Longest cell of aligned arrivals: each instant is like the others.
const ALIGNED_MAX: Duration = Duration::from_secs(2);

/// Arrivals, and where the content is.
#[derive(Clone, Copy, Debug)]
struct Kind {
    /// Its name in the report.
    name: &'static str,
    arrivals: Arrivals,
    from: From,
}

/// Where the content of absent pages is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum From {
    /// Beyond the wait of [`IopfScaleOptions::hold`].
    Disk,
    Memory,
}

impl Kind {
    const fn new(name: &'static str, arrivals: Arrivals, from: From) -> Self {
        Self {
            name,
            arrivals,
            from,
        }
    }
}

/// Most requests that a device may have outstanding.
const OUTSTANDING_MAX: u64 = 128;

/// The extent of a measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IopfScaleOptions {
    /// How long the handler of a fault waits for the modelled disk.
    pub hold: Duration,
    /// Faults a second of each tenant.
    pub faults_per_s: u32,
    /// Each measurement of tenants at a time; of aligned ones at most two seconds.
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
            time: Duration::from_secs(30),
            pairs: 5,
            isolation_faults: 1_000,
            isolation_gap: Duration::from_millis(6),
            storm_every: Duration::from_millis(10),
        }
    }
}

impl IopfScaleOptions {
    /// As asked for on the command line.
    #[must_use]
    pub fn of(sizes: &SizeOptions) -> Self {
        let full = Self::default();
        Self {
            time: sizes.time(full.time.as_secs()),
            pairs: sizes.pairs(full.pairs),
            ..full
        }
    }

    fn time_of(&self, kind: Kind) -> Duration {
        match kind.arrivals {
            Arrivals::Aligned => self.time.min(ALIGNED_MAX),
            Arrivals::Poisson | Arrivals::Bursts => self.time,
        }
    }

    fn faults(&self, kind: Kind, tenants: usize) -> Vec<Fault> {
        load::faults(
            kind.arrivals,
            tenants,
            self.faults_per_s,
            self.time_of(kind),
        )
    }

    /// Most faults of A in a storm.
    fn storm_faults(&self) -> u64 {
        let storm = self.isolation_gap * self.isolation_faults;
        let waves = storm.as_nanos() / self.storm_every.as_nanos().max(1) + 1;
        u64::try_from(waves)
            .unwrap_or(u64::MAX)
            .saturating_mul(OUTSTANDING_MAX)
    }

    fn hold_us(&self) -> u32 {
        u32::try_from(self.hold.as_micros()).unwrap_or(u32::MAX)
    }
}

/// One way, one kind of arrivals, one number of tenants.
struct Cell {
    way: &'static str,
    kind: &'static str,
    tenants: usize,
    measured: Measured,
}

/// What is measured of a cell.
struct Measured {
    latencies: Latencies,
    /// Handling of a fault on average.
    handling: Duration,
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
    for kind in KINDS {
        for tenants in TENANTS {
            progress(NAME, format_args!("{}, {tenants} tenants", kind.name));
            for (way, handling) in WAYS {
                let of_tenants: Vec<_> = cpus.iter().copied().cycle().take(tenants).collect();
                let measured = scale(options, handling, kind, &of_tenants, &cpus);
                cells.push(Cell {
                    way,
                    kind: kind.name,
                    tenants,
                    measured: measured.map_err(failed)?,
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
    let of_tenants: Vec<_> = cpus.iter().copied().cycle().take(MOST).collect();
    let mut means_ms = [0.0; 2];
    for ((_, handling), mean_ms) in WAYS.into_iter().zip(&mut means_ms) {
        let [aligned, ..] = KINDS;
        let measured = scale(options, handling, aligned, &of_tenants, &cpus);
        *mean_ms = measured.map_err(failed)?.latencies.mean_ns() / 1e6;
    }
    Ok(means_ms)
}

fn scale(
    options: &IopfScaleOptions,
    handling: Handling,
    kind: Kind,
    of_tenants: &[usize],
    cpus: &[usize],
) -> Result<Measured, Broken> {
    let load = Load {
        faults: options.faults(kind, of_tenants.len()),
        hold_us: match kind.from {
            From::Disk => options.hold_us(),
            From::Memory => 0,
        },
        storm: None,
    };
    let plan = |(tenant, cpu): (usize, &usize)| TenantPlan {
        cpu: *cpu,
        faults: load.faults.iter().filter(|f| f.tenant == tenant).count() as u64,
        filling: Filling::ProgramsAndHoles,
    };
    let plans: Vec<_> = of_tenants.iter().enumerate().map(plan).collect();
    let rig = Rig::new(handling, &plans)?;
    let latencies_ns = rig::as_device(cpus, || load::run(&rig, &load))?;
    rig.check_filled()?;
    let measured = Measured {
        latencies: latencies_ns.into_iter().collect(),
        handling: rig.handling_mean(),
        preempt_us: preempt_us(&rig, 0..of_tenants.len())?,
    };
    rig.end();
    Ok(measured)
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
    let plans = [
        TenantPlan {
            cpu: a,
            faults: options.storm_faults(),
            filling: Filling::Holes,
        },
        TenantPlan {
            cpu: b,
            faults: options.isolation_faults.into(),
            filling: Filling::ProgramsAndHoles,
        },
    ];
    // The dispatcher is started here, and so stays here.
    let (latencies_ns, preempt_us) = rig::as_device(&[a], || {
        let rig = Rig::new(Handling::Affined, &plans)?;
        let latencies_ns = load::run(&rig, &load)?;
        rig.check_filled()?;
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
        "wait for a modelled disk, then fill from zeros and by lz4 in turn; tenants share the CPUs in \
         turn"
        .into(),
    );
    figures.insert("hold_us".into(), options.hold_us().into());
    figures.insert(
        "faults_per_tenant_per_s".into(),
        options.faults_per_s.into(),
    );
    for kind in KINDS {
        for (way, _) in WAYS {
            let of_tenants = TENANTS.map(|tenants| {
                let cell = find(cells, way, kind.name, tenants);
                let value = cell.map_or(Value::Null, Cell::figures);
                (format!("tenants_{tenants}"), value)
            });
            let name = format!("{}_{way}_ms", kind.name);
            figures.insert(name, Map::from_iter(of_tenants).into());
        }
    }
    report_isolation(&mut report, options, pairs);
    for kind in KINDS {
        for (way, _) in WAYS {
            let mean =
                |tenants| find(cells, way, kind.name, tenants).map_or(f64::NAN, Cell::mean_ms);
            let name = match kind.arrivals {
                Arrivals::Aligned => format!("{way}_16_over_1"),
                _ => format!("{}_{way}_16_over_1", kind.name),
            };
            (report.ratios).insert(name, thousandths(mean(MOST) / mean(1)));
        }
    }
    (report.peers).insert("theory".into(), theory_of(options, cells));
    (report.peers).insert("paper_serialized_16_over_1".into(), 10.4.into());
    report.peers.insert(
        "paper".into(),
        "VPRI, 7.2: 16 VMs at 10 faults of 5 ms a second each, one worker: 10.4 times the latency; \
         affined: the same at all rates"
            .into(),
    );
    report
}

/// What [`theory`] says of the serialized ratios.
fn theory_of(options: &IopfScaleOptions, cells: &[Cell]) -> Value {
    let mut told = Map::new();
    let mut tell = |name: String, ratio: f64| told.insert(name, thousandths(ratio));
    for kind in KINDS.into_iter().filter(|kind| kind.from == From::Disk) {
        let name = match kind.arrivals {
            Arrivals::Aligned => "serialized_16_over_1".to_owned(),
            _ => format!("{}_serialized_16_over_1", kind.name),
        };
        if kind.arrivals == Arrivals::Poisson {
            let ratio = theory::poisson_ratio(MOST, options.faults_per_s, options.hold);
            tell(name.clone(), ratio);
        }
        let mean = |tenants, service| {
            theory::mean_of(&options.faults(kind, tenants), service).as_secs_f64()
        };
        let ratio = mean(MOST, options.hold) / mean(1, options.hold);
        tell(format!("{name}_of_these_arrivals"), ratio);
        let handled = |tenants| {
            let cell = find(cells, "serialized", kind.name, tenants);
            cell.map_or(f64::NAN, |cell| mean(tenants, cell.measured.handling))
        };
        tell(format!("{name}_as_handled"), handled(MOST) / handled(1));
    }
    told.into()
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

fn find<'a>(cells: &'a [Cell], way: &str, kind: &str, tenants: usize) -> Option<&'a Cell> {
    (cells.iter()).find(|cell| cell.way == way && cell.kind == kind && cell.tenants == tenants)
}

impl Cell {
    fn mean_ms(&self) -> f64 {
        self.measured.latencies.mean_ns() / 1e6
    }

    fn figures(&self) -> Value {
        let Measured {
            latencies,
            handling,
            preempt_us,
        } = &self.measured;
        let at_ms = |permille| thousandths(latencies.ns(permille) as f64 / 1e6);
        json!({
            "mean": thousandths(self.mean_ms()),
            "p50": at_ms(500),
            "p99": at_ms(990),
            "faults": latencies.count(),
            "handling_mean": thousandths(handling.as_secs_f64() * 1e3),
            "preempt_us": preempt_us,
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
            "poisson_serialized_16_over_1",
            "memory_affined_16_over_1",
            "bursts_serialized_16_over_1",
            "isolation_p999",
            "isolation_p999_less_hold",
        ] {
            // Runs this short give no meaningful value.
            assert!(report.ratios[ratio].as_f64().unwrap() > 0.0, "{ratio}");
        }
        let theory = &report.peers["theory"];
        for (name, least) in [
            ("poisson_serialized_16_over_1", 1.0),
            ("poisson_serialized_16_over_1_of_these_arrivals", 1.0),
            // With handlers' times measured here, which in a run this short say nothing.
            ("poisson_serialized_16_over_1_as_handled", 0.0),
            ("serialized_16_over_1_as_handled", 0.0),
        ] {
            assert!(theory[name].as_f64().unwrap() >= least, "{name}");
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
