// SPDX-License-Identifier: Apache-2.0
//! The rounds of one size.

use super::watch::{Seen, Watch};
use crate::{
    busy::{
        guest::{BATCH, BusyGuestOptions, Order, RamSize},
        process::BusyGuest,
        ram::HugePages,
    },
    daemon::{Daemon, directory_in},
    harness::figures::to_f64,
    interrupt::Interrupted,
    options::{GivenSetting, flags},
};
use pagetide_addr::PAGE_BYTES;
use pagetide_daemon::control::VmReport;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// vCPUs of a stand-in: the daemon has other CPUs, where there are any.
const VCPUS: u32 = 1;
/// Hot share of the RAM, in thousandths.
const HOT: &str = "part:125";
/// How long a VM gets to be scanned, without other requests. A scan of the daemon is due after five
/// seconds.
const SCAN_TIME: Duration = Duration::from_secs(8);
/// How long the vCPU is observed without a daemon.
const QUIET_TIME: Duration = Duration::from_secs(2);
/// Between two polls of a squeeze's progress.
const SQUEEZE_LOOK: Duration = Duration::from_millis(50);
/// Tolerance above a limit within which a VM counts as within it, in thousandths.
const WITHIN_PERMILLE: u64 = 10;

/// The measurements of one size. Names as in the report.
#[derive(Clone, PartialEq, Default, Debug)]
pub(super) struct Sized {
    pub fill_s: f64,
    pub attach_s: Vec<f64>,
    pub detach_s: Vec<f64>,
    pub attach_gap_ms: Vec<f64>,
    pub quiet_gap_ms: f64,
    pub attach_pause_ms: f64,
    pub squeeze_s: f64,
    pub evict_mib_per_s: f64,
    pub evict_cpu_us_per_page: f64,
    pub recover_s: f64,
    pub recover_gap_ms: f64,
    pub detach_half_s: f64,
    pub detach_half_mib_per_s: f64,
    pub daemon_mib_per_gib: f64,
    pub attached_cpu_share: f64,
    pub verify_s: f64,
    pub show: BTreeMap<&'static str, Seen>,
}

/// Runs all rounds with `bytes` of RAM.
pub(super) fn measure(
    bytes: u64,
    rounds: u64,
    settings: &[GivenSetting],
    interrupted: &Interrupted,
) -> Result<Sized, String> {
    let in_memory = directory_in(Path::new("/dev/shm"))?;
    let on_disk = directory_in(&std::env::temp_dir())?;
    let options = BusyGuestOptions {
        ram_mib: bytes >> 20,
        size: RamSize::Exact,
        vcpus: VCPUS,
        first_cpu: 0,
        disk: None,
        batch: BATCH,
        rest_us: 0,
        time_faults: false,
        pattern: HOT.parse().map_err(|error| format!("{error}"))?,
        huge_pages: HugePages::NotAdvised,
    };
    let state_dir = in_memory.path().join("daemon");
    let settings = flags(settings);
    // Dropped in reverse order: the daemon detaches before the guest ends.
    let guest = BusyGuest::start(on_disk.path(), &options)?;
    let daemon = Daemon::start_for(&state_dir, &settings, bytes)?;
    let mut bench = Rounds {
        sized: Sized {
            fill_s: guest.fill.as_secs_f64(),
            ..Sized::default()
        },
        daemon,
        guest,
        bytes,
        state_dir,
        settings,
    };
    let quiet = bench.guest.count_for(QUIET_TIME)?;
    bench.sized.quiet_gap_ms = to_f64(quiet.longest_gap_ns) / 1e6;
    for _ in 0..rounds {
        interrupted.check()?;
        bench.attach()?;
        bench.detach()?;
    }
    interrupted.check()?;
    bench.attach()?;
    bench.leave_alone()?;
    bench.squeeze()?;
    interrupted.check()?;
    let mut bench = bench.recover()?;
    bench.detach_half()?;
    interrupted.check()?;
    bench.watched()?;
    let took = bench.guest.obey(&Order::VerifyAll)?;
    bench.sized.verify_s = took.as_secs_f64();
    Ok(bench.sized)
}

/// The resources of a run. Fields are dropped in this order.
struct Rounds {
    daemon: Daemon,
    guest: BusyGuest,
    sized: Sized,
    bytes: u64,
    state_dir: PathBuf,
    settings: Vec<String>,
}

impl Rounds {
    fn attach(&mut self) -> Result<(), String> {
        self.guest.count()?;
        let begun = Instant::now();
        let vm = self.daemon.attach(self.guest.pid(), None)?;
        self.sized.attach_s.push(begun.elapsed().as_secs_f64());
        let counted = self.guest.count()?;
        let gap_ms = to_f64(counted.longest_gap_ns) / 1e6;
        self.sized.attach_gap_ms.push(gap_ms);
        let pause_ms = vm.attach_pause_us / 1e3;
        self.sized.attach_pause_ms = self.sized.attach_pause_ms.max(pause_ms);
        if let Some(bar) = vm.eviction_blockers.first() {
            return Err(format!("nothing of the guest can be evicted: {bar}"));
        }
        Ok(())
    }

    fn detach(&mut self) -> Result<(), String> {
        let begun = Instant::now();
        self.daemon.detach()?;
        self.sized.detach_s.push(begun.elapsed().as_secs_f64());
        Ok(())
    }

    /// The daemon's CPU time for a VM without requests.
    fn leave_alone(&mut self) -> Result<(), String> {
        let (begun, before) = (Instant::now(), self.daemon.cpu_ns()?);
        std::thread::sleep(SCAN_TIME);
        let spent = to_f64(self.daemon.cpu_ns()?.saturating_sub(before)) / 1e9;
        self.sized.attached_cpu_share = spent / begun.elapsed().as_secs_f64();
        Ok(())
    }

    /// Sets the limit to half of the RAM, and waits until the VM is within it.
    fn squeeze(&mut self) -> Result<(), String> {
        let before = self.daemon.vm()?;
        let (begun, cpu_ns) = (Instant::now(), self.daemon.cpu_ns()?);
        let squeezed = self.wait_for_squeeze(&before)?;
        let cpu_ns = self.daemon.cpu_ns()?.saturating_sub(cpu_ns);
        let sized = &mut self.sized;
        sized.squeeze_s = begun.elapsed().as_secs_f64();
        let pages = to_f64(squeezed.vm.evicted_pages - before.evicted_pages).max(1.0);
        let mib = pages * to_f64(PAGE_BYTES) / to_f64(1 << 20);
        sized.evict_mib_per_s = mib / squeezed.evicting.as_secs_f64();
        sized.evict_cpu_us_per_page = to_f64(cpu_ns) / 1e3 / pages;
        let own = self.daemon.anonymous_bytes()?
            + squeezed
                .vm
                .pool_bytes
                .saturating_sub(squeezed.vm.stored_bytes);
        sized.daemon_mib_per_gib =
            to_f64(own) / to_f64(1 << 20) / (to_f64(self.bytes) / to_f64(1 << 30));
        Ok(())
    }

    fn wait_for_squeeze(&self, before: &VmReport) -> Result<Squeezed, String> {
        let limit = self.bytes / 2;
        let patience = Duration::from_secs(60) + Duration::from_secs(self.bytes >> 24);
        let begun = Instant::now();
        self.daemon.set_limit(Some(limit))?;
        let mut first = begun;
        loop {
            let vm = self.daemon.vm()?;
            if vm.resident_bytes <= limit + limit * WITHIN_PERMILLE / 1000 {
                let evicting = first.elapsed();
                return Ok(Squeezed { vm, evicting });
            }
            if vm.evicted_pages == before.evicted_pages {
                first = Instant::now();
            }
            if begun.elapsed() > patience {
                return Err(self.daemon.with_log(format!(
                    "{} of {limit} bytes are resident {} s after the limit was set{}",
                    vm.resident_bytes,
                    patience.as_secs(),
                    vm.eviction_blockers
                        .first()
                        .map_or_else(String::new, |bar| format!(" ({bar})")),
                )));
            }
            std::thread::sleep(SQUEEZE_LOOK);
        }
    }

    /// Kills the daemon and starts another one.
    fn recover(mut self) -> Result<Self, String> {
        self.guest.count()?;
        self.daemon.kill()?;
        let begun = Instant::now();
        let daemon = Daemon::start_for(&self.state_dir, &self.settings, self.bytes)?;
        self.sized.recover_s = begun.elapsed().as_secs_f64();
        let vm = daemon.vm()?;
        if vm.restarts == 0 || vm.stored_pages == 0 {
            return Err(daemon.with_log(format!(
                "the second daemon has not taken the VM up: {} restarts, {} stored pages",
                vm.restarts, vm.stored_pages
            )));
        }
        self.sized.recover_gap_ms = to_f64(self.guest.count()?.longest_gap_ns) / 1e6;
        Ok(Self { daemon, ..self })
    }

    fn detach_half(&mut self) -> Result<(), String> {
        let stored = self.daemon.vm()?.stored_pages;
        let begun = Instant::now();
        self.daemon.detach()?;
        let seconds = begun.elapsed().as_secs_f64();
        let mib = to_f64(stored * PAGE_BYTES) / to_f64(1 << 20);
        self.sized.detach_half_s = seconds;
        self.sized.detach_half_mib_per_s = mib / seconds;
        Ok(())
    }

    fn watched(&mut self) -> Result<(), String> {
        let watch = Watch::start(&self.daemon);
        let outcome = self.watched_phases(&watch);
        let seen = watch.end()?;
        outcome?;
        self.sized.show = seen;
        Ok(())
    }

    fn watched_phases(&self, watch: &Watch) -> Result<(), String> {
        watch.phase("attach");
        let vm = self.daemon.attach(self.guest.pid(), None)?;
        watch.phase("scan");
        std::thread::sleep(SCAN_TIME);
        watch.phase("squeeze");
        self.wait_for_squeeze(&vm)?;
        watch.phase("detach");
        self.daemon.detach().map(|_| ())
    }
}

/// A VM that is within its limit.
struct Squeezed {
    vm: VmReport,
    /// From the first evicted page on.
    evicting: Duration,
}
