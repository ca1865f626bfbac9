// SPDX-License-Identifier: Apache-2.0
//! How long a day of a fleet takes to replay: 500 VMs with a disk and a NIC each, 24 virtual hours.
//!
//! ```text
//! cargo run --release -p pagetide-sim --example replay_day -- [POLICY] [VMS] [HOURS]
//! ```
//! The load is plain on purpose ([`SteadyLoad`]), so that the machine is timed and not its making. `bench adp`
//! has the same fleet for one policy, and one of synthetic guests.

use pagetide_policy::set_times::SetTimes;
use pagetide_sim::replay::{
    AccessStream, DmaTouches, FleetParams, FleetReplay, Start, SteadyLoad, Summary, VmParams,
};
use std::{
    io::Write as _,
    thread,
    time::{Duration, Instant},
};

const SECTIONS: u64 = 8192;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let policy = args.next().unwrap_or_else(|| "adp".to_owned()).parse()?;
    let vms: u64 = args.next().map_or(Ok(500), |vms| vms.parse())?;
    let hours: u64 = args.next().map_or(Ok(24), |hours| hours.parse())?;
    let guest = |seed: u64| {
        let params = VmParams {
            sections: SECTIONS,
            section_bytes: 2 << 20,
            start: Start::AllPresent,
            policy: Clone::clone(&policy),
            dma: DmaTouches::Seen,
            set_times: SetTimes::QUICK,
            busy_sections: 0,
            capacity_every: None,
            oldest_first: Vec::new(),
        };
        let load = SteadyLoad::new(SECTIONS, seed);
        (params, Box::new(load) as Box<dyn AccessStream>)
    };
    let params = FleetParams {
        threads: thread::available_parallelism()?,
        ..FleetParams::default()
    };
    let mut fleet = FleetReplay::new(params, (1..=vms).map(guest).collect())?;
    let begun = Instant::now();
    fleet.run_until(Duration::from_secs(hours * 3600))?;
    let took = begun.elapsed();
    let accesses = vms * hours * 3600 * SteadyLoad::PER_SECOND;
    let summary = Summary::of(&fleet.accounts(), None);
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{policy}: {vms} VMs, {} devices, {hours} h in {:.1} s on {} threads; {accesses} accesses, {:.0} ns each \
         and thread",
        2 * vms,
        took.as_secs_f64(),
        params.threads,
        took.as_secs_f64() * 1e9 * f64::from(u32::try_from(params.threads.get())?)
            / f64::from(u32::try_from(accesses / 1000)?)
            / 1000.0
    )?;
    for service in summary.services {
        writeln!(
            out,
            "  {}: {} faults of {} DMA, {:.2} % pinned a device",
            service.service,
            service.faults,
            service.touches,
            service.pinned_share * 100.0
        )?;
    }
    Ok(())
}
