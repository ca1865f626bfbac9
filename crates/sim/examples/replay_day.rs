// SPDX-License-Identifier: Apache-2.0
//! How long a day of a fleet takes to replay: 500 VMs with a disk and a NIC each, 24 virtual hours.
//!
//! ```text
//! cargo run --release -p pagetide-sim --example replay_day -- [POLICY] [VMS] [HOURS]
//! ```
//! The load is plain on purpose, so that the machine is timed and not its making: each second, one VM's disk
//! touches four sections, half of them anywhere, its NIC four of 200, its CPUs eight of a half.

use pagetide_addr::{Access, DeviceId, SectionNo};
use pagetide_sim::replay::{
    AccessStream, Actor, FleetParams, FleetReplay, ReplayAccess, Service, Start, Summary, VmParams,
};
use std::{
    io::Write as _,
    thread,
    time::{Duration, Instant},
};

const SECTIONS: u64 = 8192;
const NIC_SECTIONS: u64 = 200;
const PER_SECOND: u64 = 16;

struct Load {
    state: u64,
    count: u64,
}

impl Load {
    fn below(&mut self, end: u64) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state >> 33) % end
    }
}

impl Iterator for Load {
    type Item = ReplayAccess;

    fn next(&mut self) -> Option<ReplayAccess> {
        let at = Duration::from_nanos(self.count * (1_000_000_000 / PER_SECOND));
        let turn = self.count % PER_SECOND;
        self.count += 1;
        let disk = Actor::Device(DeviceId(1), Service::Block);
        let (actor, section) = match turn % 4 {
            0 if turn < PER_SECOND / 2 => (disk, self.below(SECTIONS)),
            0 => (disk, SECTIONS / 2 + self.below(SECTIONS / 16)),
            1 => (
                Actor::Device(DeviceId(2), Service::Network),
                SECTIONS - 1 - self.below(NIC_SECTIONS),
            ),
            _ => (Actor::Cpu, self.below(SECTIONS / 2)),
        };
        Some(ReplayAccess {
            at,
            actor,
            section: SectionNo(section),
            access: Access::Write,
            bytes: 4096,
        })
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let policy = args.next().unwrap_or_else(|| "adp".to_owned()).parse()?;
    let vms: u64 = args.next().map_or(Ok(500), |vms| vms.parse())?;
    let hours: u64 = args.next().map_or(Ok(24), |hours| hours.parse())?;
    let guest = |seed: u64| {
        let load = Load {
            state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            count: 0,
        };
        let params = VmParams {
            sections: SECTIONS,
            section_bytes: 2 << 20,
            start: Start::AllPresent,
            policy: Clone::clone(&policy),
            capacity_every: None,
        };
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
    let accesses = vms * hours * 3600 * PER_SECOND;
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
