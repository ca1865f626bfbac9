// SPDX-License-Identifier: Apache-2.0
//! Makes the runs behind the findings.
//!
//! A check requests the outcome of an experiment from the lab as if it already existed. All checks run
//! twice: the first time the lab only records the requests and answers with zeros; then it runs all
//! experiments on all cores; the second time it answers. An experiment that two checks request is run once.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use pagetide_trace::{
    Event, EventSource, Events, HyperSpec, HyperTrace, Order, TenantShape, ThirdPage, Unmap,
    Workload,
};

use crate::config::Config;
use crate::error::SimError;
use crate::next_use::NextUses;
use crate::outcome::Outcome;
use crate::run::{TraceInput, run};

/// Packets of every trace: 400 for each of 1,024 tenants, so that a tenant's misses at its start (some ten
/// requests) are below 1% of its requests, and nearly three hundred pages' worth for a single one. Also the
/// least number that gives each of the 1,024 a packet of the driver's start, which is 0.15% of the trace.
/// That matters: a page used often at the start has a count in an LFU cache that stays until another in its
/// set saturates.
pub(super) const PACKETS: u64 = 409_600;

/// Whose turn it is, and its number of packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Interleaving {
    Rr1,
    Rr4,
    Rand1,
}

impl Interleaving {
    pub(super) const ALL: [Self; 3] = [Self::Rr1, Self::Rr4, Self::Rand1];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Rr1 => "RR1",
            Self::Rr4 => "RR4",
            Self::Rand1 => "RAND1",
        }
    }
}

/// The requests of a trace that are run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Present {
    Everybody,
    /// Those of the first tenant alone.
    FirstTenant,
}

/// The part of a tenant's life that is run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Life {
    /// Its start and the time after it, pages never unmapped, as in the authors' traces.
    Whole,
    /// The time after its start; a page is used 'until the driver unmaps it' (IV-D).
    Steady,
}

/// A trace.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Trace {
    pub(super) workload: Workload,
    pub(super) interleaving: Interleaving,
    pub(super) tenants: u32,
    pub(super) third: ThirdPage,
    pub(super) life: Life,
    pub(super) packets: u64,
    /// Bandwidths in proportion; empty: all equal.
    pub(super) weights: Vec<u32>,
    pub(super) present: Present,
}

impl Trace {
    pub(super) fn new(
        workload: Workload,
        interleaving: Interleaving,
        tenants: u32,
        third: ThirdPage,
    ) -> Self {
        Self {
            workload,
            interleaving,
            tenants,
            third,
            life: Life::Whole,
            packets: PACKETS,
            weights: Vec::new(),
            present: Present::Everybody,
        }
    }

    /// 'iperf3 RR1, 64 tenants'
    fn name(&self) -> String {
        let (workload, order) = (self.workload.name(), self.interleaving.name());
        format!("{workload} {order}, {} tenants", self.tenants)
    }

    fn spec(&self) -> HyperSpec {
        let mut shape = TenantShape::of(self.workload);
        shape.third = self.third;
        if self.life == Life::Steady {
            shape.init.share = 0.0;
            shape.unmap = Unmap::WhenLeft;
        }
        let mut spec = HyperSpec::synthetic(shape, self.tenants);
        spec.packets = Some(self.packets);
        (spec.order, spec.burst_packets) = match self.interleaving {
            Interleaving::Rr1 => (Order::Rr, 1),
            Interleaving::Rr4 => (Order::Rr, 4),
            Interleaving::Rand1 => (Order::Rand, 1),
        };
        spec.weights.clone_from(&self.weights);
        spec
    }

    fn run(&self, config: &Config) -> Result<Outcome, SimError> {
        let open = || HyperTrace::synthetic(&self.spec());
        let next_uses = match config.needs_future() {
            true => Some(NextUses::of(&mut open()?)?),
            false => None,
        };
        if self.present == Present::Everybody {
            let input = TraceInput {
                events: &mut open()?,
                next_uses: next_uses.as_ref(),
            };
            return run(config, input);
        }
        let mut source = open()?;
        let mut kept: Vec<Event> = Vec::new();
        let mut batch = Vec::new();
        while source.next_batch(&mut batch)? > 0 {
            let first = kept.first().or(batch.first()).map(|event| event.source);
            kept.extend(batch.drain(..).filter(|e| Some(e.source) == first));
        }
        let input = TraceInput {
            events: &mut Events(&kept),
            next_uses: None,
        };
        run(config, input)
    }
}

/// A trace under a configuration.
struct Job {
    key: String,
    trace: Trace,
    config: Config,
}

/// All experiments.
pub(super) struct Lab {
    /// Requested and not run yet.
    wanted: Vec<Job>,
    /// Requested since the last [`Lab::forget_needs`], with their traces.
    needed: BTreeMap<String, String>,
    outcomes: HashMap<String, Outcome>,
}

impl Lab {
    pub(super) fn new() -> Self {
        Self {
            wanted: Vec::new(),
            needed: BTreeMap::new(),
            outcomes: HashMap::new(),
        }
    }

    /// The outcome of `config` on `trace`; zeros if it has not been run yet.
    pub(super) fn outcome(&mut self, trace: &Trace, config: &Config) -> Outcome {
        let key = format!("{trace:?} {config:?}");
        self.needed.insert(key.clone(), trace.name());
        if let Some(outcome) = self.outcomes.get(&key) {
            return outcome.clone();
        }
        if !self.wanted.iter().any(|job| job.key == key) {
            self.wanted.push(Job {
                key,
                trace: trace.clone(),
                config: config.clone(),
            });
        }
        Outcome::default()
    }

    /// Starts to note which runs are needed.
    pub(super) fn forget_needs(&mut self) {
        self.needed.clear();
    }

    /// How many runs were needed since then, and their traces.
    pub(super) fn needs(&self) -> (u64, Vec<String>) {
        let mut traces: Vec<String> = self.needed.values().cloned().collect();
        traces.sort();
        traces.dedup();
        (self.needed.len() as u64, traces)
    }

    /// Requests of all runs.
    pub(super) fn requests(&self) -> u64 {
        self.outcomes.values().map(|outcome| outcome.requests).sum()
    }

    /// Runs.
    pub(super) fn runs(&self) -> u64 {
        self.outcomes.len() as u64
    }

    /// Runs all requested experiments, on all cores. `progress` receives how many are done, of how many.
    ///
    /// # Errors
    /// The first that a run gave.
    pub(super) fn run_wanted(
        &mut self,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<(), SimError> {
        let jobs = std::mem::take(&mut self.wanted);
        let next = AtomicUsize::new(0);
        let done = Mutex::new(Vec::with_capacity(jobs.len()));
        let work = || {
            // Each job's number is taken by one thread; nothing else is shared.
            while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let outcome = job.trace.run(&job.config).map(|mut outcome| {
                    // The first few show the isolation; a thousand rows do not matter.
                    outcome.tenants.truncate(1);
                    outcome
                });
                let count = {
                    let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
                    done.push((job.key.clone(), outcome));
                    done.len()
                };
                progress(count as u64, jobs.len() as u64);
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(work);
            }
        });
        for (key, outcome) in done.into_inner().unwrap_or_else(PoisonError::into_inner) {
            self.outcomes.insert(key, outcome?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Flavour;

    fn small(present: Present) -> Trace {
        Trace {
            packets: 600,
            present,
            ..Trace::new(Workload::Iperf3, Interleaving::Rr1, 6, ThirdPage::Mailbox)
        }
    }

    #[test]
    fn experiment_asked_for_twice_is_run_once_and_then_answered() {
        let mut lab = Lab::new();
        let config = Config::base(Flavour::Paper);
        for _ in 0..2 {
            let zeros = lab.outcome(&small(Present::Everybody), &config);
            assert_eq!(zeros, Outcome::default());
        }
        let told = Mutex::new(Vec::new());
        lab.run_wanted(&|done, all| told.lock().unwrap().push((done, all)))
            .unwrap();
        assert_eq!(told.into_inner().unwrap(), [(1, 1)]);
        assert_eq!((lab.runs(), lab.requests()), (1, 1800));
        let outcome = lab.outcome(&small(Present::Everybody), &config);
        assert_eq!(outcome.requests, 1800);
    }

    #[test]
    fn first_tenant_alone_has_its_own_requests_and_no_others() {
        let mut lab = Lab::new();
        let config = Config::base(Flavour::Paper);
        lab.outcome(&small(Present::FirstTenant), &config);
        lab.run_wanted(&|_, _| ()).unwrap();
        let outcome = lab.outcome(&small(Present::FirstTenant), &config);
        assert_eq!((outcome.requests, outcome.tenants.len()), (300, 1));
    }
}
