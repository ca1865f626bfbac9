// SPDX-License-Identifier: Apache-2.0
//! The daemon of the bench: all VMs of an arm at a time.

use crate::daemon::Daemon;
use hyper::Method;
use pagetide_daemon::{
    api::AttachBody,
    budget::{BudgetBody, HostReport},
    client::vm_path,
    control::{DetachReport, VmReport},
};
use std::{
    path::Path,
    time::{Duration, Instant},
};

const HOST: &str = "/v1/host";
const BUDGET: &str = "/v1/host/budget";
/// Between two looks at memory that is being reclaimed.
const LOOK: Duration = Duration::from_millis(50);
/// The VMs are at rest when in this time
const REST: Duration = Duration::from_secs(1);
/// no more than this was evicted: what is used by turns comes and goes all the time.
const REST_PAGES: u64 = 256;
/// Longest wait for that. A VM that never rests is measured as it is.
const REST_MAX: Duration = Duration::from_secs(30);
/// Longest wait for memory to be reclaimed: a minute, and a second for each 16 MiB.
fn patience(ram_bytes: u64) -> Duration {
    Duration::from_secs(60 + (ram_bytes >> 24))
}

/// See the module.
pub(super) struct Host {
    daemon: Daemon,
    ram_bytes: u64,
    names: Vec<String>,
}

/// What became of all VMs since they were attached.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub(super) struct Counts {
    pub faults: u64,
    pub readahead_pages: u64,
    pub evicted_pages: u64,
    pub directly_evicted_pages: u64,
    pub over_limit_fills: u64,
    pub short_fills: u64,
    pub sampled_pages: u64,
    pub daemon_cpu_ns: u64,
}

impl Host {
    /// Starts it for VMs with `ram_bytes` of RAM together.
    pub(super) fn start(
        state_dir: &Path,
        settings: &[String],
        ram_bytes: u64,
    ) -> Result<Self, String> {
        // The budget of the bench is no budget of this host.
        let lock = format!(
            "--budget-lock={}",
            state_dir.with_extension("lock").display()
        );
        let settings = [&[lock][..], settings].concat();
        Ok(Self {
            daemon: Daemon::start_for(state_dir, &settings, ram_bytes)?,
            ram_bytes,
            names: Vec::new(),
        })
    }

    /// Its process id.
    pub(super) fn pid(&self) -> u32 {
        self.daemon.pid()
    }

    /// Takes over the VMMs `pids`, each with this limit.
    pub(super) fn attach(
        &mut self,
        pids: impl Iterator<Item = u32>,
        limit_bytes: Option<u64>,
    ) -> Result<(), String> {
        for (number, pid) in pids.enumerate() {
            let name = format!("vm-{}", number + 1);
            let body = AttachBody {
                pid,
                name: Some(name.clone()),
                limit_bytes,
                weight: None,
                floor_bytes: None,
            };
            let vm: VmReport = self.daemon.send("/v1/vms", &body)?;
            self.names.push(name);
            if let Some(blocker) = vm.eviction_blockers.first() {
                return Err(format!("nothing of {} can be evicted: {blocker}", vm.name));
            }
        }
        Ok(())
    }

    /// Lets go of all VMs, with all of their memory.
    pub(super) fn detach(&mut self) -> Result<(), String> {
        while let Some(name) = self.names.pop() {
            let _gone: DetachReport = self.daemon.ask(Method::DELETE, &vm_path(&name))?;
        }
        Ok(())
    }

    /// Sets the budget.
    pub(super) fn set_budget(&self, bytes: u64) -> Result<(), String> {
        let body = BudgetBody {
            budget_bytes: Some(bytes),
            ..BudgetBody::default()
        };
        let set = self.daemon.send_by(Method::PUT, BUDGET, &body);
        set.map(|_host: HostReport| ())
    }

    /// Lifts it.
    pub(super) fn lift_budget(&self) -> Result<(), String> {
        let lifted = self.daemon.ask(Method::DELETE, BUDGET);
        lifted.map(|_host: HostReport| ())
    }

    /// Memory and budget now.
    pub(super) fn now(&self) -> Result<HostReport, String> {
        self.daemon.ask(Method::GET, HOST)
    }

    /// Waits until `is_there`; returns how long that took.
    pub(super) fn wait_until(
        &self,
        is_there: impl Fn(&HostReport) -> bool,
    ) -> Result<Duration, String> {
        let begun = Instant::now();
        loop {
            let now = self.now()?;
            if is_there(&now) {
                return Ok(begun.elapsed());
            }
            let wait = patience(self.ram_bytes);
            if begun.elapsed() > wait {
                return Err(self.daemon.with_log(format!(
                    "after {} s {} MiB of all VMs are resident and {} MiB stored, more than they may have",
                    wait.as_secs(),
                    resident_bytes(&now) >> 20,
                    stored_bytes(&now) >> 20,
                )));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Waits until reclaim has come to rest; returns how long that took.
    pub(super) fn wait_for_rest(&self) -> Result<Duration, String> {
        let begun = Instant::now();
        let mut before = self.counts()?;
        loop {
            std::thread::sleep(REST);
            let now = self.counts()?;
            if now.since(before).evicted_pages <= REST_PAGES || begun.elapsed() > REST_MAX {
                return Ok(begun.elapsed());
            }
            before = now;
        }
    }

    /// What became of the VMs until now.
    pub(super) fn counts(&self) -> Result<Counts, String> {
        let mut sum = Counts {
            daemon_cpu_ns: self.daemon.cpu_ns()?,
            ..Counts::default()
        };
        for name in &self.names {
            let vm: VmReport = self.daemon.ask(Method::GET, &vm_path(name))?;
            sum.faults += vm.vcpu_faults;
            sum.readahead_pages += vm.readahead_pages;
            sum.evicted_pages += vm.evicted_pages;
            sum.directly_evicted_pages += vm.directly_evicted_pages;
            sum.over_limit_fills += vm.over_limit_fills;
            sum.short_fills += vm.short_fills;
            sum.sampled_pages += vm.sampled_pages;
        }
        Ok(sum)
    }
}

impl Counts {
    /// What came since `before`.
    pub(super) fn since(self, before: Self) -> Self {
        Self {
            faults: self.faults - before.faults,
            readahead_pages: self.readahead_pages - before.readahead_pages,
            evicted_pages: self.evicted_pages - before.evicted_pages,
            directly_evicted_pages: self.directly_evicted_pages - before.directly_evicted_pages,
            over_limit_fills: self.over_limit_fills - before.over_limit_fills,
            short_fills: self.short_fills - before.short_fills,
            sampled_pages: self.sampled_pages - before.sampled_pages,
            // Threads that have ended are no longer seen.
            daemon_cpu_ns: self.daemon_cpu_ns.saturating_sub(before.daemon_cpu_ns),
        }
    }
}

/// RAM of all VMs that is present.
pub(super) fn resident_bytes(host: &HostReport) -> u64 {
    host.vms.iter().map(|vm| vm.resident_bytes).sum()
}

/// Pools of all VMs: content and metadata.
pub(super) fn stored_bytes(host: &HostReport) -> u64 {
    host.vms.iter().map(|vm| vm.stored_bytes).sum()
}

/// RAM of all VMs that is away.
pub(super) fn evicted_bytes(host: &HostReport) -> u64 {
    let ram: u64 = host.vms.iter().map(|vm| vm.ram_bytes).sum();
    ram.saturating_sub(resident_bytes(host))
}
