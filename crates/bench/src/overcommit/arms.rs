// SPDX-License-Identifier: Apache-2.0
//! Four VMs that demand more than the budget: with all memory, under the daemon's budget, and on the peer.

use super::{
    guest::{RequestGuestOptions, Served},
    host::{Counts, Host, evicted_bytes, resident_bytes, stored_bytes},
    peer::{Peer, swapped_in_pages},
    process::{Guests, Requests},
    vms::{Speed, Vms},
    working_set::Choice,
};
use crate::{
    daemon::directory_in,
    harness::figures::to_f64,
    options::{SizeOptions, flags},
};
use pagetide_addr::SECTION_BYTES;
use std::{
    path::Path,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// Of each VM, what it did not use for ten minutes, in thousandths of its RAM. On average 70 % and never below
/// 50 %, as in Taiji's Fig. 3a.
const COLD_PERMILLE: [u32; 4] = [500, 700, 750, 850];
/// The demand is this much of the budget.
const DEMAND_TENTHS: u64 = 15;
/// Time for an arm to come to rest before it is measured: pages that were away are mapped again.
const SETTLE: Duration = Duration::from_secs(3);

/// See the module `overcommit`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Arm {
    AllMemory,
    Pagetide,
    Zram,
}

impl Arm {
    pub(super) const ALL: [Self; 3] = [Self::AllMemory, Self::Pagetide, Self::Zram];
}

/// What came of a slice of an arm.
pub(super) struct Slice {
    /// Of all VMs together.
    pub requests: Requests,
    /// Of each VM.
    pub vms: Vec<Speed>,
    /// Figures of this arm, by name: the same in each slice.
    pub figures: Vec<(&'static str, f64)>,
}

/// The resources of a run, dropped in this order: the daemon detaches before the VMs end, and those end before
/// their cgroup is removed.
pub(super) struct Bench<V> {
    host: Host,
    guests: V,
    peer: Result<Peer, String>,
    /// Why a peer that there is was not measured.
    no_peer: Option<String>,
    budget_bytes: u64,
    demand_bytes: u64,
    slice: Duration,
    _dirs: [TempDir; 2],
}

/// What is there before the VMs, which are started in it.
pub(super) struct Place<'a> {
    /// A folder on disk.
    pub dir: &'a Path,
    /// The memory cgroup of the peer's arm, if there is one.
    pub group: Option<&'a Path>,
}

/// The stand-ins, with `sections` each.
pub(super) fn stand_ins(place: &Place<'_>, sections: u32) -> Result<Guests, String> {
    let vms = (0..).zip(COLD_PERMILLE).map(|(number, cold_permille)| {
        // Half of what is used within ten minutes is used all the time, and the other half in turn.
        let used_permille = (1000 - cold_permille) / 2;
        RequestGuestOptions {
            sections,
            cpu: number,
            used_permille,
            choice: Choice::Zipf,
            moves_permille: 1000 - cold_permille - used_permille,
            rate: None,
            seed: number as u64 + 1,
            group: place.group.map(Path::to_owned),
        }
    });
    Guests::start(place.dir, vms)
}

impl<V: Vms> Bench<V> {
    /// VMs with `demand_bytes` of RAM together, as `start` starts them.
    pub(super) fn prepare(
        demand_bytes: u64,
        slice: Duration,
        options: &SizeOptions,
        start: impl FnOnce(&Place<'_>) -> Result<V, String>,
    ) -> Result<Self, String> {
        let in_memory = directory_in(Path::new("/dev/shm"))?;
        let on_disk = directory_in(&std::env::temp_dir())?;
        let budget_bytes = demand_bytes / DEMAND_TENTHS * 10;
        let peer = Peer::prepare(demand_bytes, budget_bytes);
        let guests = start(&Place {
            dir: on_disk.path(),
            group: peer.as_ref().ok().map(Peer::group),
        })?;
        let state_dir = in_memory.path().join("daemon");
        Ok(Self {
            host: Host::start(&state_dir, &flags(&options.settings), demand_bytes)?,
            guests,
            peer,
            no_peer: None,
            budget_bytes,
            demand_bytes,
            slice,
            _dirs: [in_memory, on_disk],
        })
    }

    /// RAM of all VMs, all of it filled.
    pub(super) fn demand_bytes(&self) -> u64 {
        self.demand_bytes
    }

    /// The budget.
    pub(super) fn budget_bytes(&self) -> u64 {
        self.budget_bytes
    }

    /// Why there is no peer.
    pub(super) fn no_peer(&self) -> Option<&str> {
        let none = self.peer.as_ref().err();
        none.or(self.no_peer.as_ref()).map(String::as_str)
    }

    /// A slice of `arm`; `None` of a peer that there is not.
    pub(super) fn slice(&mut self, arm: Arm) -> Result<Option<Slice>, String> {
        match arm {
            Arm::AllMemory => self.with_all_memory().map(Some),
            Arm::Pagetide => self.under_budget().map(Some),
            Arm::Zram => self.on_zram(),
        }
    }

    fn with_all_memory(&mut self) -> Result<Slice, String> {
        std::thread::sleep(SETTLE);
        let served = self.guests.measure(self.slice, &mut || Ok(()))?;
        Ok(Slice::of(&served, Vec::new()))
    }

    fn under_budget(&mut self) -> Result<Slice, String> {
        self.host.attach(self.guests.pids().into_iter(), None)?;
        self.host.set_budget(self.budget_bytes)?;
        let budget = self.budget_bytes;
        let squeeze = self.host.wait_until(|host| host.used_bytes <= budget)?;
        // The daemon goes on until its high watermark is free.
        let rest = self.host.wait_for_rest()?;
        std::thread::sleep(SETTLE);
        let before = self.host.counts()?;
        let mut most_used_bytes = 0;
        let host = &self.host;
        let served = self.guests.measure(self.slice, &mut || {
            most_used_bytes = host.now()?.used_bytes.max(most_used_bytes);
            Ok(())
        })?;
        let counts = self.host.counts()?.since(before);
        let now = self.host.now()?;
        let mut figures = vec![
            ("squeeze_s", squeeze.as_secs_f64()),
            ("rest_s", rest.as_secs_f64()),
            ("resident_mib", mib(resident_bytes(&now))),
            ("stored_mib", mib(stored_bytes(&now))),
            ("evicted_mib", mib(evicted_bytes(&now))),
            (
                "most_used_over_budget",
                to_f64(most_used_bytes) / to_f64(budget),
            ),
        ];
        figures.extend(per_second(&counts, self.slice));
        self.host.lift_budget()?;
        self.host.detach()?;
        self.guests.touch_all()?;
        Ok(Slice::of(&served, figures))
    }

    fn on_zram(&mut self) -> Result<Option<Slice>, String> {
        let own = self.host.pid();
        let Ok(peer) = &mut self.peer else {
            return Ok(None);
        };
        let squeeze = match peer.begin(own) {
            Ok(squeeze) => squeeze,
            Err(reason) => {
                self.no_peer.get_or_insert(reason);
                return Ok(None);
            }
        };
        let settling = Instant::now();
        while settling.elapsed() < SETTLE {
            peer.follow()?;
            std::thread::sleep(SETTLE / 50);
        }
        let before = swapped_in_pages()?;
        let served = self.guests.measure(self.slice, &mut || peer.follow())?;
        let swapped_in = swapped_in_pages()?.saturating_sub(before);
        let figures = vec![
            ("squeeze_s", squeeze.as_secs_f64()),
            ("resident_mib", mib(peer.resident_bytes()?)),
            ("stored_mib", mib(peer.stored_bytes()?)),
            ("limit_mib", mib(peer.limit_bytes())),
            (
                "faults_per_s",
                to_f64(swapped_in) / self.slice.as_secs_f64(),
            ),
        ];
        peer.end()?;
        Ok(Some(Slice::of(&served, figures)))
    }

    /// Compares every byte.
    pub(super) fn end(mut self) -> Result<(), String> {
        self.guests.verify_all()
    }
}

impl Slice {
    fn of(served: &[Served], figures: Vec<(&'static str, f64)>) -> Self {
        Self {
            requests: Requests::of(served),
            vms: served.iter().map(Speed::of).collect(),
            figures,
        }
    }
}

/// Sections of a RAM.
pub(super) fn sections_of(ram_bytes: u64) -> Result<u32, String> {
    u32::try_from(ram_bytes / SECTION_BYTES)
        .map_err(|_| format!("{ram_bytes} bytes of RAM are too many for a stand-in"))
}

/// The same in MiB.
pub(super) fn mib(bytes: u64) -> f64 {
    to_f64(bytes) / to_f64(1 << 20)
}

/// What happened in `time`, as figures a second.
pub(super) fn per_second(counts: &Counts, time: Duration) -> Vec<(&'static str, f64)> {
    let per_s = |count| to_f64(count) / time.as_secs_f64();
    vec![
        ("faults_per_s", per_s(counts.faults)),
        ("readahead_pages_per_s", per_s(counts.readahead_pages)),
        ("evicted_pages_per_s", per_s(counts.evicted_pages)),
        (
            "directly_evicted_pages_per_s",
            per_s(counts.directly_evicted_pages),
        ),
        ("over_limit_fills_per_s", per_s(counts.over_limit_fills)),
        ("short_fills_per_s", per_s(counts.short_fills)),
        ("sampled_pages_per_s", per_s(counts.sampled_pages)),
        ("daemon_cpus", per_s(counts.daemon_cpu_ns) / 1e9),
    ]
}
