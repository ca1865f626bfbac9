// SPDX-License-Identifier: Apache-2.0
//! What I/O page faults cost by each discipline, over a ladder of absent shares.
//!
//! A device of 200 Gb/s has [`TENANTS`] tenants, all with the same load. Memory of the first quarter of them
//! may be absent; the others are their *neighbours*. Every point of the ladder is run by every discipline over
//! the same trace: goodput, and how long a request of a neighbour takes at p99.9, from the first try of its
//! packet to its end. With a growing share the device faults more often, so the ladder also says at how many
//! faults a second a twentieth of the link is lost. The ratios of neighbours are the worst over the points at
//! which VPRI out of order has not lost that much: beyond, the handlers are overloaded.
//!
//! Apart from that, the experiment of VPRI 7.2: tenants that fault at the same instant, whose handlers take 5 ms,
//! served by one worker or by one on each tenant's CPU.

use pagetide_addr::Iova;
use pagetide_trace::{
    Event, EventKind, Events, HyperSpec, HyperTrace, IommuDomain, PageSize, SourceId, TenantShape,
    Workload,
};
use serde_json::{Map, Value, json};

use crate::config::{
    Absent, Config, FaultConfig, FaultDiscipline, Flavour, Handlers, OnFault, PtbUnit,
};
use crate::error::SimError;
use crate::faults::ServiceSamples;
use crate::outcome::{FaultOutcome, Outcome};
use crate::run::{TraceInput, run};
use crate::run_all::run_all;

/// Tenants of the ladder.
pub const TENANTS: u32 = 256;
/// Those whose memory may be absent.
pub const FAULTING_TENANTS: u32 = TENANTS / 4;
/// Absent pages of a million.
pub const LADDER_PPM: [u32; 9] = [
    0, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 600_000, 1_000_000,
];
/// Packets of a run: 400 a tenant.
const PACKETS: u64 = 102_400;
/// Share of the goodput that is lost at the break-even.
const LOST: f64 = 0.05;
/// Fewest points of the ladder, that of nothing absent included, over which neighbours are compared.
const COMPARED_LEAST: usize = 3;
/// Handling of the experiment of VPRI 7.2.
pub const STORM_HANDLING_NS: u64 = 5_000_000;
/// Tenants of that experiment.
pub const STORM_TENANTS: u32 = 16;

/// A discipline with a queue's behaviour, and its name in the report.
const ARMS: [(&str, FaultDiscipline, OnFault); 6] = [
    ("pinned", FaultDiscipline::Pinned, OnFault::Pause),
    ("vpri", FaultDiscipline::Vpri, OnFault::Pause),
    (
        "vpri_out_of_order",
        FaultDiscipline::Vpri,
        OnFault::OutOfOrder,
    ),
    ("ats_pri", FaultDiscipline::AtsPri, OnFault::Pause),
    (
        "ats_pri_out_of_order",
        FaultDiscipline::AtsPri,
        OnFault::OutOfOrder,
    ),
    ("touch", FaultDiscipline::Touch, OnFault::Pause),
];

/// Place of VPRI out of order among them.
const OUT_OF_ORDER: usize = 2;

/// Figures and ratios of the study.
#[derive(Clone, PartialEq, Debug)]
pub struct FaultStudy {
    /// By discipline.
    pub figures: Map<String, Value>,
    /// Between disciplines.
    pub ratios: Map<String, Value>,
}

/// One run.
#[derive(Clone, Copy, Debug)]
struct Rung {
    arm: usize,
    absent_ppm: u32,
}

/// Runs the study on `threads` threads, with measured times if there are any in `samples`; `told` receives how
/// many runs of how many are done.
///
/// # Errors
/// If a run fails.
pub fn run_fault_study(
    samples: &ServiceSamples,
    threads: usize,
    told: &(dyn Fn(u64, u64) + Sync),
) -> Result<FaultStudy, SimError> {
    let rungs: Vec<Rung> = (0..ARMS.len())
        .flat_map(|arm| {
            LADDER_PPM
                .into_iter()
                .map(move |absent_ppm| Rung { arm, absent_ppm })
        })
        .collect();
    let outcomes = run_all(&rungs, threads, told, |rung| run_rung(*rung, samples))?;
    report(&outcomes)
}

fn run_rung(rung: Rung, samples: &ServiceSamples) -> Result<Outcome, SimError> {
    let (_, discipline, on_fault) = ARMS[rung.arm];
    let mut config = Config::hypertrio(Flavour::Paper);
    // The reading of the paper in which its device fills the link (docs/simulator.md).
    config.ptb.unit = PtbUnit::Packets;
    config.faults = FaultConfig {
        discipline,
        on_fault,
        absent: Absent::Share,
        absent_ppm: rung.absent_ppm,
        tenants: FAULTING_TENANTS,
        times: samples.clone(),
        ..FaultConfig::default()
    };
    let mut spec = HyperSpec::synthetic(TenantShape::of(Workload::Iperf3), TENANTS);
    spec.packets = Some(PACKETS);
    let input = TraceInput {
        events: &mut HyperTrace::synthetic(&spec)?,
        next_uses: None,
    };
    run(&config, input)
}

/// Mean time of a page request of [`STORM_TENANTS`] tenants that fault at the same instant, in milliseconds.
///
/// # Errors
/// If the run fails.
pub fn storm_mean_ms(handlers: Handlers) -> Result<f64, SimError> {
    let mut config = Config::base(Flavour::Paper);
    config.ptb.entries = STORM_TENANTS;
    config.link.requests_per_packet = 1;
    config.faults = FaultConfig {
        discipline: FaultDiscipline::Vpri,
        on_fault: OnFault::OutOfOrder,
        absent: Absent::Events,
        handlers,
        cpus: STORM_TENANTS,
        handling_ns: STORM_HANDLING_NS,
        ..FaultConfig::default()
    };
    let request = |tenant: u32| {
        Event::translate(
            SourceId(tenant << 3),
            IommuDomain(tenant),
            Iova(0x1000),
            Some(PageSize::SIZE_4K),
        )
    };
    let gone = (0..STORM_TENANTS).map(|tenant| Event {
        kind: EventKind::PageOut,
        ..request(tenant)
    });
    let events: Vec<Event> = gone.chain((0..STORM_TENANTS).map(request)).collect();
    let input = TraceInput {
        events: &mut Events(&events),
        next_uses: None,
    };
    let faults = run(&config, input)?.faults.unwrap_or_default();
    Ok(faults.service.mean_ns / 1e6)
}

fn faults(outcome: &Outcome) -> FaultOutcome {
    outcome.faults.unwrap_or_default()
}

fn report(outcomes: &[Outcome]) -> Result<FaultStudy, SimError> {
    let arms: Vec<&[Outcome]> = outcomes.chunks(LADDER_PPM.len()).collect();
    let pinned = arms[0][0].link_share;
    let mut figures = Map::new();
    let mut break_even = Map::new();
    for ((name, ..), rungs) in ARMS.iter().zip(&arms) {
        let over_ladder = |of: &dyn Fn(&Outcome) -> f64| -> Value {
            let all = LADDER_PPM.iter().zip(rungs.iter());
            let all = all.map(|(ppm, outcome)| (format!("absent_{ppm}_ppm"), json!(of(outcome))));
            Value::Object(all.collect())
        };
        figures.insert(
            (*name).to_owned(),
            json!({
                "goodput_share": over_ladder(&|outcome| outcome.link_share),
                "neighbour_p999_ns": over_ladder(&|o| faults(o).neighbours.p999_ns as f64),
                "faulting_p999_ns": over_ladder(&|o| faults(o).faulting.p999_ns as f64),
                "resident_share": over_ladder(&|o| faults(o).resident_share),
                "faults_per_second": over_ladder(&|o| faults(o).page_requests_per_second),
                "fault_mean_ns": over_ladder(&|o| faults(o).service.mean_ns),
            }),
        );
        break_even.insert((*name).to_owned(), json!(faults_at_loss(rungs, pinned)));
    }
    figures.insert("break_even_faults_per_second".to_owned(), break_even.into());
    for (key, value) in [("tenants", TENANTS), ("faulting_tenants", FAULTING_TENANTS)] {
        figures.insert(key.to_owned(), value.into());
    }
    let p999 = |outcome: &Outcome| faults(outcome).neighbours.p999_ns as f64;
    // Where the handlers are overloaded, whoever shares the link waits, whatever the queues do.
    let is_loaded = |rung: &usize| arms[OUT_OF_ORDER][*rung].link_share < pinned * (1.0 - LOST);
    let rungs = (0..LADDER_PPM.len()).take_while(|rung| !is_loaded(rung));
    let compared = rungs.count();
    figures.insert("neighbour_p999_rungs".to_owned(), compared.into());
    let worst = |arm: usize| {
        let of_rungs = (0..compared).map(|rung| p999(&arms[arm][rung]) / p999(&arms[0][rung]));
        (compared >= COMPARED_LEAST).then(|| of_rungs.fold(0.0, f64::max))
    };
    let serialized_ms = storm_mean_ms(Handlers::Serialized)?;
    let affined_ms = storm_mean_ms(Handlers::Affined)?;
    figures.insert("serialized_16_ms".to_owned(), json!(serialized_ms));
    figures.insert("affined_16_ms".to_owned(), json!(affined_ms));
    let mut ratios = Map::new();
    for (name, ratio) in [
        (
            "vpri_over_pinned_nothing_absent",
            Some(arms[1][0].link_share / pinned),
        ),
        ("neighbour_p999_pause", worst(1)),
        ("neighbour_p999_out_of_order", worst(OUT_OF_ORDER)),
        ("neighbour_p999_ats_pri", worst(3)),
        ("neighbour_p999_touch", worst(5)),
        (
            "serialized_over_affined_16",
            Some(serialized_ms / affined_ms),
        ),
    ] {
        ratios.insert(name.to_owned(), json!(ratio));
    }
    Ok(FaultStudy { figures, ratios })
}

/// Faults a second at which [`LOST`] of the goodput `pinned` is lost: between the two points of the ladder
/// around it, on a line; `None` if so much is never lost.
fn faults_at_loss(rungs: &[Outcome], pinned: f64) -> Option<f64> {
    let least = pinned * (1.0 - LOST);
    let points: Vec<(f64, f64)> = rungs
        .iter()
        .map(|outcome| (faults(outcome).page_requests_per_second, outcome.link_share))
        .collect();
    points.windows(2).find_map(|pair| {
        let [(few, above), (many, below)] = *pair else {
            return None;
        };
        if above < least || below >= least {
            return None;
        }
        Some(few + (many - few) * (above - least) / (above - below))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_at_loss_lie_on_the_line_between_two_points() {
        let outcome = |rate, link_share| Outcome {
            link_share,
            faults: Some(FaultOutcome {
                page_requests_per_second: rate,
                ..FaultOutcome::default()
            }),
            ..Outcome::default()
        };
        let rungs = [
            outcome(0.0, 1.0),
            outcome(100.0, 0.98),
            outcome(200.0, 0.92),
        ];
        let rate = faults_at_loss(&rungs, 1.0).unwrap();
        assert!((rate - 150.0).abs() < 1e-6, "{rate}");
        assert_eq!(faults_at_loss(&rungs[..2], 1.0), None);
    }

    #[test]
    fn serialized_handler_serves_sixteen_faults_one_after_the_other() {
        let serialized = storm_mean_ms(Handlers::Serialized).unwrap();
        let affined = storm_mean_ms(Handlers::Affined).unwrap();
        assert!((serialized - 42.5).abs() < 0.1, "{serialized}");
        assert!((affined - 5.0).abs() < 0.1, "{affined}");
    }
}
