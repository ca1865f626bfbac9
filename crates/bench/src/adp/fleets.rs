// SPDX-License-Identifier: Apache-2.0
//! How long fleets of a thousand devices take to replay: 500 VMs of 16 GiB, a disk and a NIC each.
//!
//! ```text
//!   fleet             two hours, 16 touches a second and VM, anywhere (`SteadyLoad`); policy adp
//!   fleet_of_guests   20 minutes of synthetic guests, some hundred touches a second and VM, nearly all of
//!                     them by CPUs
//! ```
//! How long a day would take at this speed is worked out, not measured.
//! The first measures the replay alone. The second includes the generation of the load, but not the setup
//! before the virtual time begins.

use super::{AdpBenchOptions, NAME, threads};
use crate::harness::{
    report::{BenchError, BenchReport, failed},
    rounds::progress,
};
use pagetide_policy::{protect::PolicyChoice, set_times::SetTimes};
use pagetide_sim::{
    fleet::{GuestRecipe, GuestStream, PROLOGUE, paper_fleet},
    replay::{AccessStream, DmaTouches, FleetParams, FleetReplay, Start, SteadyLoad, VmParams},
};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const DAY_S: u64 = 24 * 3_600;

/// The times of a fleet.
struct FleetRun {
    devices: u64,
    touches: u64,
    virtual_s: u64,
    wall: Duration,
}

/// Runs the fleets.
pub(super) fn run(report: &mut BenchReport, options: &AdpBenchOptions) -> Result<(), BenchError> {
    let adp = PolicyChoice::Adp(Default::default());
    progress(NAME, format_args!("a fleet under {adp}"));
    let streams = (1..).map(|seed| {
        let load = SteadyLoad::new(options.fleet_sections, seed);
        Box::new(load) as Box<dyn AccessStream>
    });
    let mut steady = fleet(options, &adp, streams)?;
    let run = time(&mut steady, Duration::ZERO, options.steady_seconds)?;
    report
        .figures
        .insert("fleet".into(), figures(options, &run));
    progress(NAME, "a fleet of synthetic guests");
    let kinds = paper_fleet(2);
    let guests = kinds.iter().cycle().zip(0..).map(|(guest, number)| {
        let recipe = GuestRecipe {
            sections: options.fleet_sections,
            seed: guest.seed.wrapping_add(number),
            ..*guest
        };
        Box::new(GuestStream::new(&recipe, options.guest_seconds)) as Box<dyn AccessStream>
    });
    let mut fleet = fleet(options, &adp, guests)?;
    let run = time(&mut fleet, PROLOGUE, options.guest_seconds)?;
    report
        .figures
        .insert("fleet_of_guests".into(), figures(options, &run));
    Ok(())
}

fn fleet(
    options: &AdpBenchOptions,
    policy: &PolicyChoice,
    streams: impl Iterator<Item = Box<dyn AccessStream>>,
) -> Result<FleetReplay, BenchError> {
    let params = FleetParams {
        threads: threads(),
        ..FleetParams::default()
    };
    let vm = VmParams {
        sections: options.fleet_sections,
        section_bytes: pagetide_addr::SECTION_BYTES,
        start: Start::AllPresent,
        policy: policy.clone(),
        dma: DmaTouches::Seen,
        set_times: SetTimes::QUICK,
        busy_sections: 0,
        capacity_every: None,
        oldest_first: Vec::new(),
    };
    let vms = streams.take(options.fleet_vms);
    let vms = vms.map(|stream| (vm.clone(), stream)).collect();
    FleetReplay::new(params, vms).map_err(failed)
}

/// `seconds` virtual seconds of a fleet, from `begin` on.
fn time(fleet: &mut FleetReplay, begin: Duration, seconds: u64) -> Result<FleetRun, BenchError> {
    fleet.run_until(begin).map_err(failed)?;
    let before = touches(fleet);
    let begun = Instant::now();
    let end = begin + Duration::from_secs(seconds);
    fleet.run_until(end).map_err(failed)?;
    let wall = begun.elapsed();
    let devices = fleet
        .accounts()
        .iter()
        .map(|vm| vm.devices.len())
        .sum::<usize>();
    Ok(FleetRun {
        devices: devices as u64,
        touches: touches(fleet) - before,
        virtual_s: seconds,
        wall,
    })
}

fn touches(fleet: &mut FleetReplay) -> u64 {
    let accounts = fleet.accounts();
    let devices = accounts.iter().flat_map(|vm| &vm.devices);
    let by_cpu: u64 = accounts.iter().map(|vm| vm.cpu_touches).sum();
    by_cpu + devices.map(|device| device.touches).sum::<u64>()
}

fn figures(options: &AdpBenchOptions, run: &FleetRun) -> Value {
    let wall_s = run.wall.as_secs_f64();
    let day_s = wall_s * DAY_S as f64 / run.virtual_s.max(1) as f64;
    json!({
        "devices": run.devices,
        "vms": options.fleet_vms,
        "vm_sections": options.fleet_sections,
        "virtual_hours": run.virtual_s as f64 / 3_600.0,
        "touches": run.touches,
        "wall_seconds": wall_s,
        "worked_out_day_wall_seconds": day_s,
        "threads": threads().get(),
        "ns_per_touch": wall_s * 1e9 / (run.touches.max(1) as f64),
    })
}
