// SPDX-License-Identifier: Apache-2.0
//! `pagetide replay`: what DMA protection policies would have done on a trace.
//!
//! [`pagetide_sim::replay`] does the work; this module has the command line and the report. Policies run
//! in parallel, each on the same accesses.

pub mod args;
mod report;

use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use pagetide_addr::DomainId;
use pagetide_policy::{protect::PolicyChoice, set_times::SetTimes};
use pagetide_sim::replay::{
    CachedReads, DmaTouches, FleetParams, FleetReplay, Guest, ReplayError, Start, Through,
    TraceOptions, TracedVm, VmAccount, VmParams, VmReplay, survey,
};
use pagetide_trace::BlockOptions;

use crate::sim::of_trace;
use args::ReplayArgs;
use pagetide_report::outcome::{CommandError, print_report};
use pagetide_report::progress::Progress;
use report::{Conditions, Host, PolicyRun, ReplayReport};

/// Step of progress reports.
const STEP: Duration = Duration::from_secs(3600);
/// Initial content of the VMs. Their limits apply from the beginning, so the first fill of a section by
/// a device is mostly a fault; those are reported separately.
const START: Start = Start::AllPresent;

/// Executes the command.
pub fn execute(args: &ReplayArgs) -> Result<(), CommandError> {
    let options = trace_options(args);
    let vms = survey(&args.traces, &options).map_err(of_replay)?;
    let policies = policies(&args.policies);
    let runs = run_all(args, &vms, &policies)?;
    let conditions = Conditions {
        host: host(args),
        start: START,
        time_scale: args.time_scale,
    };
    let report = ReplayReport::of(vms, conditions, runs);
    print_report(&report, args.json.into())
}

fn trace_options(args: &ReplayArgs) -> TraceOptions {
    let through = match args.direct {
        Some(pool) => Through::Direct(pool.0),
        None => Through::PageCache(args.page_cache.map(|size| size.0)),
    };
    TraceOptions {
        block: BlockOptions {
            format: args.format,
            block_bytes: args.block_bytes,
            interval: args.request_interval,
        },
        through,
        space: args.space.map(DomainId),
        memory_bytes: args.vm_memory.map(|size| size.0),
        section_bytes: args.section.0,
        time_scale: args.time_scale,
        cpu_permille: args.cpu_share.0,
        guest: Guest {
            reads: if args.read_again {
                CachedReads::ReadAgain
            } else {
                CachedReads::Served
            },
            run_bytes: args.runs.map(|size| size.0),
            nic_bytes: args.nic.map(|size| size.0),
        },
    }
}

/// Policies to run: none first, then the requested ones, each once.
fn policies(asked: &[PolicyChoice]) -> Vec<PolicyChoice> {
    let mut all = vec![PolicyChoice::None];
    let every = PolicyChoice::all();
    for policy in if asked.is_empty() { &every } else { asked } {
        if !all.contains(policy) {
            all.push(policy.clone());
        }
    }
    all
}

fn host(args: &ReplayArgs) -> Host {
    match args.limit {
        Some(limit) => Host::Limit {
            limit_bytes: limit.0,
        },
        None => Host::Overcommit {
            overcommit_share: args.overcommit,
        },
    }
}

/// Runs every policy on the same VMs, up to the number of threads at once.
fn run_all(
    args: &ReplayArgs,
    vms: &[TracedVm],
    policies: &[PolicyChoice],
) -> Result<Vec<PolicyRun>, CommandError> {
    let threads = args
        .jobs
        .or_else(|| thread::available_parallelism().ok())
        .map_or(1, NonZeroUsize::get);
    let at_once = threads.min(policies.len());
    // Many VMs keep the cores busy on their own.
    let in_fleet = NonZeroUsize::new(threads / at_once).unwrap_or(NonZeroUsize::MIN);
    let end = vms.iter().map(|vm| vm.end).max().unwrap_or_default() + Duration::from_nanos(1);
    let progress = Progress::new("replay", "hours");
    let told = ReplayProgress {
        hours: Mutex::new(0),
        progress: &progress,
        expected: (end.as_secs().div_ceil(3600).max(1)) * policies.len() as u64,
    };
    let mut runs: Vec<Option<Result<PolicyRun, ReplayError>>> = Vec::new();
    runs.resize_with(policies.len(), || None);
    let queue = Mutex::new(policies.iter().zip(&mut runs));
    let work = || {
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((policy, run)) = next else { return };
            let accounts = replay(args, vms, policy, in_fleet, &|| told.step());
            *run = Some(accounts.map(|accounts| PolicyRun {
                policy: policy.clone(),
                accounts,
            }));
        }
    };
    thread::scope(|scope| {
        for _ in 1..at_once {
            scope.spawn(work);
        }
        work();
    });
    drop(progress);
    runs.into_iter()
        .flatten()
        .map(|run| run.map_err(of_replay))
        .collect()
}

/// Progress of several runs.
struct ReplayProgress<'a> {
    hours: Mutex<u64>,
    progress: &'a Progress,
    expected: u64,
}

impl ReplayProgress<'_> {
    fn step(&self) {
        let mut hours = self.hours.lock().unwrap_or_else(PoisonError::into_inner);
        *hours += 1;
        self.progress.at(*hours, Some(self.expected));
    }
}

fn replay(
    args: &ReplayArgs,
    vms: &[TracedVm],
    policy: &PolicyChoice,
    threads: NonZeroUsize,
    step: &dyn Fn(),
) -> Result<Vec<VmAccount>, ReplayError> {
    let end = vms.iter().map(|vm| vm.end).max().unwrap_or_default() + Duration::from_nanos(1);
    let params = |vm: &TracedVm| VmParams {
        sections: vm.sections,
        section_bytes: args.section.0,
        start: START,
        policy: policy.clone(),
        dma: DmaTouches::Seen,
        set_times: SetTimes::QUICK,
        busy_sections: 0,
        capacity_every: args.capacity_every,
        oldest_first: Vec::new(),
    };
    if let Some(limit) = args.limit {
        let one = |vm: &TracedVm| {
            let mut replay = VmReplay::new(params(vm), vm.stream()?)?;
            replay.set_limit(Some(limit.0 / args.section.0));
            in_steps(end, step, |until| replay.run_until(until))?;
            Ok(replay.account())
        };
        return vms.iter().map(one).collect();
    }
    let fleet_params = FleetParams {
        overcommit: args.overcommit,
        threads,
        ..FleetParams::default()
    };
    let guests = vms.iter().map(|vm| Ok((params(vm), vm.stream()?)));
    let guests = guests.collect::<Result<Vec<_>, ReplayError>>()?;
    let mut fleet = FleetReplay::new(fleet_params, guests)?;
    in_steps(end, step, |until| fleet.run_until(until))?;
    Ok(fleet.accounts())
}

fn in_steps(
    end: Duration,
    step: &dyn Fn(),
    mut run_until: impl FnMut(Duration) -> Result<(), ReplayError>,
) -> Result<(), ReplayError> {
    let mut now = Duration::ZERO;
    while now < end {
        now = (now + STEP).min(end);
        run_until(now)?;
        step();
    }
    Ok(())
}

/// The command error of a replay without a result.
pub fn of_replay(error: ReplayError) -> CommandError {
    match error {
        ReplayError::Trace(error) => of_trace(error),
        other => CommandError::refused(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_always_run_first_and_nothing_is_run_twice() {
        let lru: PolicyChoice = "lru".parse().unwrap();
        let names = |asked: &[PolicyChoice]| -> Vec<_> {
            policies(asked).iter().map(PolicyChoice::name).collect()
        };
        assert_eq!(names(&[]), ["none", "lru", "adp"]);
        assert_eq!(names(&[lru.clone(), lru.clone()]), ["none", "lru"]);
        assert_eq!(names(&[PolicyChoice::None]), ["none"]);
        let other = "lru:share=0.05".parse().unwrap();
        assert_eq!(names(&[lru, other]), ["none", "lru", "lru"]);
    }
}
