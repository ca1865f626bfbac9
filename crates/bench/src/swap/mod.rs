// SPDX-License-Identifier: Apache-2.0
//! `bench swap`: what each tier costs, in time and in memory.
//!
//! A *row* is a tier, or a mix, with the content that goes there. Each round measures all rows and all peers, on
//! stand-ins for VMs (those of `bench fault`) with the same content on both sides:
//!
//! | row | content | where it lies when it is measured |
//! |---|---|---|
//! | `zero`, `same` | zeros; a repeated word | in the page word |
//! | `lz4` | records | in the pool, as it was evicted |
//! | `zstd` | records | packed anew by age |
//! | `disk`, `remote` | records | sunk by age |
//! | `paper` | three of four pages are zeros, the others records | as it was evicted |
//! | `paper_in_tiers` | the same | a third each on disk, in zstd, in lz4 |
//!
//! ```text
//!   evict all (CPU time) ─► until it lies where it is to (CPU time, bytes)
//!      ─► first half: read by the vCPU      ─► second half: read by a device, as it writes to its image;
//!         in random order, each timed          the same once more, with all of it present
//! ```
//! Daemons here read nothing ahead, so that each page is fetched by its own fault. `retouch_…_over_zram` is of
//! a daemon with default settings: the total time until a vCPU has its working set back, in three orders. Swap-out
//! is measured on stand-ins of its own ([`out`]), 256 MiB large.
//!
//! The peers: kernel swap on zram, with lz4 and, where the kernel has it, zstd; and in a file beside the disk
//! tier's. For the latter, pages are reclaimed from the swap cache and caches are dropped before any is touched.
//! No peer reads ahead.
//!
//! | ratio | of |
//! |---|---|
//! | `cpu_over_zram_pNN`, `device_over_zram_pNN` | row `lz4`; a device's requests less the median of those to present pages |
//! | `uffd_round_trip_over_zram_pNN` | a fault answered at once with a constant page: the floor of `cpu` |
//! | `floor_over_zram_pNN` | the same, and what checking and unpacking the page takes by itself |
//! | `swap_out_cpu_over_zram` | CPU time of the whole daemon over that of the thread that pages out; the worse of records and the paper's mix |
//! | `zstd_tier_bytes_over_lz4_tier` | memory of the pool, fragmentation included, after over before; and slots of the memory of real programs ([`programs`]); the worse |
//! | `disk_in_p50_over_kernel_swap` | after the round trip is taken off; `disk_in_whole_p50_over_kernel_swap` is the whole |
//!
//! At the end the stand-ins compare every byte, and so are the images that the devices wrote.

mod out;
mod peers;
mod plan;
mod programs;
mod report;
mod rig;
mod row;
mod unpacking;

use self::{
    out::SwapOut,
    peers::Peers,
    plan::{Cpus, KINDS, RETOUCHES},
    programs::Programs,
    rig::RowRig,
    row::Row,
    unpacking::Stored,
};
use super::{
    daemon::{Daemon, directory_in},
    fault::{
        content::Kind,
        floor,
        guest::Order,
        process::{Guest, evict_all},
    },
    harness::{
        latencies::LatenciesByRound,
        report::{BenchError, BenchReport, failed, unable},
        rounds::{Round, WarmUp, progress, rounds},
    },
    interrupt::Interrupted,
    options::SizeOptions,
};
use pagetide_addr::{PAGE_BYTES, to_usize};
use std::path::Path;

const NAME: &str = "swap";
const ROUNDS: u64 = 6;
/// Of each stand-in; half of them are read by the vCPU, half by a device.
const RAM_BYTES: u64 = 32 << 20;
const RETOUCH: &str = "retouch";
const PROGRAMS: &str = "programs";
const SWAP_OUT: &str = "swap-out";

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &SizeOptions) -> Result<BenchReport, BenchError> {
    let interrupted = Interrupted::listen().map_err(failed)?;
    let mut bench = Bench::prepare(options).map_err(unable)?;
    let count = to_usize(options.pairs.unwrap_or(ROUNDS));
    for round in rounds(NAME, count, WarmUp::None) {
        bench.round(round, &interrupted).map_err(failed)?;
    }
    bench.verify().map_err(failed)?;
    let programs = if options.includes(PROGRAMS) {
        progress(NAME, "memory of real programs");
        Programs::measure(&interrupted).map_err(failed)?
    } else {
        Programs::default()
    };
    Ok(report::report(&bench, &programs))
}

/// A daemon with default settings, and how long it took to get a working set back.
struct Retouch {
    daemon: Daemon,
    took: [LatenciesByRound; RETOUCHES.len()],
}

/// One side's turn, given a seed.
type Phase = fn(&mut Bench, u64, &Interrupted) -> Result<(), String>;

/// The resources of a run. Fields are dropped in this order: nothing is removed while it is in use.
struct Bench {
    rows: Vec<RowRig>,
    /// Rows that cannot be measured here, and why.
    missing: Vec<(Row, String)>,
    retouch: Option<Retouch>,
    swap_out: Option<SwapOut>,
    guests: Vec<(Kind, Guest)>,
    peers: Peers,
    round_trip: LatenciesByRound,
    unpack: LatenciesByRound,
    stored: Stored,
    pages: u64,
    cpus: Cpus,
    _dirs: [tempfile::TempDir; 2],
}

/// The guest with content of `kind`.
fn guest_of(guests: &mut [(Kind, Guest)], kind: Kind) -> Result<&mut Guest, String> {
    let found = guests.iter_mut().find(|(it, _)| *it == kind);
    found
        .map(|(_, guest)| guest)
        .ok_or_else(|| format!("there is no guest of {kind}"))
}

impl Bench {
    fn prepare(options: &SizeOptions) -> Result<Self, String> {
        let pages = options.ram_bytes(RAM_BYTES) / PAGE_BYTES;
        let in_memory = directory_in(Path::new("/dev/shm"))?;
        // Not on tmpfs, where neither a disk tier nor a swap file can be.
        let on_disk = directory_in(Path::new("/var/tmp"))?;
        let allowed = pagetide_sys::cpu::affinity().map_err(|error| error.to_string())?;
        let cpus = Cpus {
            vcpu: allowed.last().copied().unwrap_or(0),
            engine: allowed.first().copied().unwrap_or(0),
        };
        let peers = Peers::prepare(on_disk.path(), pages);
        let start = |kind| {
            let start = || Guest::start(on_disk.path(), kind, pages, cpus.vcpu);
            Ok::<_, String>((kind, peers.within(start)?))
        };
        let is_needed = |kind: &Kind| {
            let mut rows = Row::ALL.into_iter();
            let is_of_row = rows.any(|row| row.content() == *kind && options.includes(row.name()));
            is_of_row || *kind == Kind::Records && options.includes(RETOUCH)
        };
        let kinds = KINDS.into_iter().filter(is_needed);
        let guests = kinds.map(start).collect::<Result<_, _>>()?;
        let (mut rows, mut missing) = (Vec::new(), Vec::new());
        for row in Row::ALL {
            if !options.includes(row.name()) {
                continue;
            }
            let rig = RowRig::prepare(row, in_memory.path(), on_disk.path(), cpus.engine, pages);
            match rig {
                Ok(rig) => rows.push(rig),
                // A machine need not have a Redis server.
                Err(reason) if row == Row::Remote => missing.push((row, reason)),
                Err(reason) => return Err(reason),
            }
        }
        let retouch = match options.includes(RETOUCH) {
            true => Some(Retouch {
                daemon: Daemon::start::<&str>(&in_memory.path().join(RETOUCH), &[])?,
                took: Default::default(),
            }),
            false => None,
        };
        let swap_out = match options.includes(SWAP_OUT) {
            true => Some(SwapOut::prepare(in_memory.path(), on_disk.path(), cpus)?),
            false => None,
        };
        Ok(Self {
            rows,
            missing,
            retouch,
            swap_out,
            guests,
            peers,
            round_trip: LatenciesByRound::default(),
            unpack: LatenciesByRound::default(),
            stored: Stored::new(pages)?,
            pages,
            cpus,
            _dirs: [in_memory, on_disk],
        })
    }

    fn round(&mut self, round: Round, interrupted: &Interrupted) -> Result<(), String> {
        let phases: [Phase; 2] = [Self::measure_peers, Self::measure_ours];
        for phase in round.turns(phases) {
            phase(self, round.seed() * 100, interrupted)?;
        }
        let (_, round_trips) = floor::measure(self.pages, self.cpus.vcpu)?;
        self.round_trip.add(round_trips);
        self.unpack.add(self.stored.unpack_all(round.seed())?);
        Ok(())
    }

    fn measure_peers(&mut self, seed: u64, interrupted: &Interrupted) -> Result<(), String> {
        for (kind, guest) in &mut self.guests {
            interrupted.check()?;
            self.peers.measure(*kind, guest, seed)?;
            if *kind == Kind::Records && self.retouch.is_some() {
                self.peers.retouch(guest, seed)?;
            }
        }
        match &mut self.swap_out {
            Some(out) => out.measure_zram(&mut self.peers, interrupted),
            None => Ok(()),
        }
    }

    fn measure_ours(&mut self, seed: u64, interrupted: &Interrupted) -> Result<(), String> {
        for row in &mut self.rows {
            interrupted.check()?;
            let guest = guest_of(&mut self.guests, row.row().content())?;
            row.measure(guest, seed)?;
        }
        interrupted.check()?;
        self.retouch(seed)?;
        match &mut self.swap_out {
            Some(out) => out.measure_ours(interrupted),
            None => Ok(()),
        }
    }

    fn retouch(&mut self, seed: u64) -> Result<(), String> {
        let Some(Retouch { daemon, took }) = &mut self.retouch else {
            return Ok(());
        };
        let guest = guest_of(&mut self.guests, Kind::Records)?;
        daemon.attach(guest.pid(), None)?;
        for ((_, pattern), took) in RETOUCHES.into_iter().zip(took) {
            evict_all(daemon, self.pages)?;
            took.add(guest.time(&Order::touch_all(pattern, seed))?);
        }
        daemon.detach().map(|_| ())
    }

    fn verify(&mut self) -> Result<(), String> {
        progress(NAME, "comparing every byte");
        for (_, guest) in &mut self.guests {
            guest.have_done(&Order::Verify)?;
        }
        if let Some(out) = &mut self.swap_out {
            out.verify()?;
        }
        self.rows.iter().try_for_each(RowRig::verify)
    }
}
