// SPDX-License-Identifier: Apache-2.0
//! `bench remote`: another host's memory as a tier.
//!
//! The other host is a network namespace with a Redis server that syncs its log for each batch ([`hosts`]). One
//! guest (the stand-in of `bench fault`) is measured in rounds; in each of them all of it goes there and comes
//! back:
//!
//! | phase | what is timed |
//! |---|---|
//! | out | all pages from memory to the server, by batches of a section |
//! | in | the vCPU touches each page once, in random order: one fault at a time |
//! | back | all pages at a time, as a detach brings them back |
//! | round trip | a request over the same link that asks for nothing |
//! | floor | a fault that is answered at once (`uffd_round_trip_us`) |
//!
//! What a fault takes beyond the two floors is the tier: sealing, the client, the server's look-up of the key.
//! At the end the link is taken down while the vCPU touches pages, and put up after [`LINK_DOWN`]; then the server is
//! killed, and started after [`SERVER_DOWN`]. No page may be wrong or lost.

mod hosts;

use self::hosts::FarHost;
use super::{
    daemon::{Daemon, directory_in},
    fault::{
        content::Kind,
        floor,
        guest::{Answer, Order},
        process::Guest,
        touch::Pattern,
    },
    harness::{
        figures::{mean, rounded, to_f64},
        latencies::LatenciesByRound,
        report::{BenchError, BenchReport, failed, unable},
        rounds::{Round, WarmUp, rounds},
    },
    interrupt::Interrupted,
    options::SizeOptions,
};
use hyper::Method;
use pagetide_addr::to_usize;
use pagetide_daemon::pool::{PoolReport, TierReport};
use serde_json::json;
use std::{
    path::Path,
    thread::sleep,
    time::{Duration, Instant},
};

const NAME: &str = "remote";
/// Pages of the guest: 32 MiB, each of which takes its place in lz4.
const PAGES: u64 = 8192;
const ROUNDS: u64 = 4;
/// How long the link is down.
const LINK_DOWN: Duration = Duration::from_secs(2);
/// How long the server is down.
const SERVER_DOWN: Duration = Duration::from_secs(2);
/// How long faults have gone on before something fails.
const BEFORE_FAILURE: Duration = Duration::from_millis(50);
/// Between two looks at figures of the daemon.
const LOOK: Duration = Duration::from_millis(2);
/// Longest wait for anything of the tier.
const PATIENCE: Duration = Duration::from_secs(120);

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &SizeOptions) -> Result<BenchReport, BenchError> {
    let interrupted = Interrupted::listen().map_err(failed)?;
    let mut bench = Bench::prepare().map_err(unable)?;
    let count = options.pairs.unwrap_or(ROUNDS);
    for round in rounds(NAME, to_usize(count), WarmUp::None) {
        interrupted.check().map_err(failed)?;
        bench.round(round).map_err(failed)?;
    }
    let losses = bench.losses().map_err(failed)?;
    bench.report(&losses).map_err(failed)
}

/// What a tier's loss and return took.
struct Losses {
    after_link_up_us: f64,
    after_server_start_us: f64,
    longest_fault_us: [f64; 2],
}

#[derive(Default)]
struct Measured {
    faults: LatenciesByRound,
    round_trip: LatenciesByRound,
    floor: LatenciesByRound,
    out_pages_per_s: Vec<f64>,
    back_pages_per_s: Vec<f64>,
}

/// The resources of a run. Fields are dropped in this order: nothing is removed while it is in use.
struct Bench {
    daemon: Daemon,
    guest: Guest,
    far: FarHost,
    cpu: usize,
    measured: Measured,
    _dirs: [tempfile::TempDir; 2],
}

impl Bench {
    fn prepare() -> Result<Self, String> {
        let in_memory = directory_in(Path::new("/dev/shm"))?;
        let on_disk = directory_in(&std::env::temp_dir())?;
        let far = FarHost::make(on_disk.path())?;
        let cpus = pagetide_sys::cpu::affinity().map_err(|error| error.to_string())?;
        let cpu = cpus.last().copied().unwrap_or(0);
        let tiers = format!("zero,same,lz4,remote:{}=1G", far.url());
        let settings = [
            ["--tiers", &tiers],
            ["--sink-after", "100ms"],
            ["--neighbours", "0"],
        ];
        Ok(Self {
            daemon: Daemon::start(&in_memory.path().join("daemon"), &settings.concat())?,
            guest: Guest::start(on_disk.path(), Kind::Program, PAGES, cpu)?,
            far,
            cpu,
            measured: Measured::default(),
            _dirs: [in_memory, on_disk],
        })
    }

    fn round(&mut self, round: Round) -> Result<(), String> {
        let seed = round.seed() * 10;
        self.daemon.attach(self.guest.pid(), None)?;
        let took = self.send_all()?;
        self.measured.out_pages_per_s.push(per_second(PAGES, took));
        let touch = Order::touch_all(Pattern::Random, seed);
        let faults = self.guest.time(&touch)?;
        self.measured.faults.add(faults);
        self.send_all()?;
        let begun = Instant::now();
        self.daemon.detach()?;
        let took = begun.elapsed();
        self.measured.back_pages_per_s.push(per_second(PAGES, took));
        self.measured.round_trip.add(self.far.round_trips(PAGES)?);
        let (_copies, round_trips) = floor::measure(PAGES, self.cpu)?;
        self.measured.floor.add(round_trips);
        self.verify()
    }

    fn tier(&self) -> Result<TierReport, String> {
        let pool: PoolReport = self.daemon.ask(Method::GET, "/v1/pool")?;
        let tier = pool.tiers.into_iter().next();
        tier.ok_or_else(|| "the daemon has no tier outside memory".to_owned())
    }

    /// Evicts all and waits until all is on the other host; returns how long its way from memory took.
    fn send_all(&self) -> Result<Duration, String> {
        let deadline = Instant::now() + PATIENCE;
        let mut begun = None;
        loop {
            let vm = self.daemon.vm()?;
            if vm.remote_pages == PAGES && vm.resident_bytes == 0 {
                return Ok(begun.map_or(Duration::ZERO, |begun: Instant| begun.elapsed()));
            }
            if vm.remote_pages > 0 {
                begun.get_or_insert_with(Instant::now);
            }
            if vm.resident_bytes > 0 {
                self.daemon.reclaim(None)?;
            }
            if Instant::now() > deadline {
                let tier = self.tier()?;
                return Err(self.daemon.with_log(format!(
                    "of {PAGES} pages {} are on the other host, whose tier is {}",
                    vm.remote_pages, tier.standing
                )));
            }
            sleep(LOOK);
        }
    }

    fn losses(&mut self) -> Result<Losses, String> {
        self.daemon.attach(self.guest.pid(), None)?;
        let (after_link_up_us, over_link) = self.over_loss(
            LINK_DOWN,
            |bench| bench.far.link_down(),
            |bench| bench.far.link_up(),
        )?;
        let (after_server_start_us, over_server) = self.over_loss(
            SERVER_DOWN,
            |bench| bench.far.kill_server(),
            |bench| bench.far.start_server(),
        )?;
        let vm = self.daemon.vm()?;
        if vm.poisoned_pages > 0 {
            let lost = vm.poisoned_pages;
            return Err(self.daemon.with_log(format!("{lost} pages are lost")));
        }
        self.daemon.detach()?;
        self.verify()?;
        Ok(Losses {
            after_link_up_us,
            after_server_start_us,
            longest_fault_us: [over_link, over_server],
        })
    }

    /// Takes something away while the vCPU touches pages, and gives it back; returns how long after that the first
    /// page came, and the longest fault.
    fn over_loss(
        &mut self,
        down: Duration,
        take: fn(&mut Self) -> Result<(), String>,
        give: fn(&mut Self) -> Result<(), String>,
    ) -> Result<(f64, f64), String> {
        self.send_all()?;
        self.guest.begin(&Order::touch_all(Pattern::Random, 1))?;
        sleep(BEFORE_FAILURE);
        take(self)?;
        sleep(down);
        let before = self.tier()?.pages_read;
        give(self)?;
        let given = Instant::now();
        while self.tier()?.pages_read == before {
            if given.elapsed() > PATIENCE {
                return Err(self.daemon.with_log("no page came from the other host"));
            }
            sleep(LOOK);
        }
        let back = given.elapsed();
        match self.guest.answer()? {
            Answer::Took { ns } => {
                let longest = ns.into_iter().max().unwrap_or(0);
                Ok((rounded(us(back)), rounded(f64::from(longest) / 1e3)))
            }
            other => Err(format!("the guest answered {other:?} to its touches")),
        }
    }

    fn verify(&mut self) -> Result<(), String> {
        match self.guest.obey(&Order::Verify)? {
            Answer::Done => Ok(()),
            other => Err(format!("the guest answered {other:?} to its verification")),
        }
    }

    fn report(&self, losses: &Losses) -> Result<BenchReport, String> {
        let mut report = BenchReport::new(NAME);
        let measured = &self.measured;
        let tier = self.tier()?;
        let rate = |rates: &Vec<f64>| rounded(mean(rates.iter().copied()));
        for (name, value) in [
            ("remote_in_us", measured.faults.report(0.0)),
            (
                "remote_in_p50_us_by_round",
                json!(measured.faults.us_by_round(500)),
            ),
            ("tier_read_p50_us", tier.read_p50_us.into()),
            ("tier_read_p99_us", tier.read_p99_us.into()),
            ("batch_p50_us", tier.write_p50_us.into()),
            ("batch_p99_us", tier.write_p99_us.into()),
            ("out_pages_per_s", rate(&measured.out_pages_per_s).into()),
            ("back_pages_per_s", rate(&measured.back_pages_per_s).into()),
            (
                "first_page_after_link_up_us",
                losses.after_link_up_us.into(),
            ),
            (
                "first_page_after_server_start_us",
                losses.after_server_start_us.into(),
            ),
            (
                "longest_fault_over_loss_us",
                json!({"link": losses.longest_fault_us[0], "server": losses.longest_fault_us[1]}),
            ),
            ("lost_pages", 0.into()),
            ("wrong_pages", 0.into()),
        ] {
            report.figures.insert(name.into(), value);
        }
        let peers = &mut report.peers;
        peers.insert("link_round_trip_us".into(), measured.round_trip.report(0.0));
        peers.insert("uffd_round_trip_us".into(), measured.floor.report(0.0));
        for (name, permille) in [("p50", 500), ("p99", 990)] {
            let floors = measured.round_trip.us(permille) + measured.floor.us(permille);
            let ratio = measured.faults.us(permille) / floors;
            report.ratios.insert(
                format!("remote_in_over_floors_{name}"),
                rounded(ratio).into(),
            );
        }
        Ok(report)
    }
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn per_second(pages: u64, took: Duration) -> f64 {
    to_f64(pages) / took.as_secs_f64().max(1e-9)
}
