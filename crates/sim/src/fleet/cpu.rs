// SPDX-License-Identifier: Apache-2.0
//! The memory that the guest's CPUs touch beside the page cache: a working set that drifts.

use super::{
    activity::Pace,
    random::{LoadRandom, number, whole},
    sink::{CPU_TOLD_S, Sink, Who},
};
use pagetide_addr::{Access, SECTION_BYTES};

/// Share of the core that is touched when the guest is quiet: its kernel and its services.
const QUIET_SHARE: f64 = 0.15;
/// Share of the working set that is replaced by other memory in an hour.
const DRIFT_PER_HOUR: f64 = 0.1;
/// Share of the working set that is in use all the time; the rest is swept over.
const CORE: f64 = 0.45;
/// Least and greatest length of a sweep, in seconds.
const SWEEP_S: (u64, u64) = (270, 390);

/// See the module.
#[derive(Debug)]
pub(super) struct Cpu {
    random: LoadRandom,
    /// Memory of processes; the working set comes first.
    memory: Vec<u64>,
    working: u64,
    /// Length of a sweep.
    sweep_s: u64,
    /// Sections swept since the beginning.
    swept: f64,
}

impl Cpu {
    /// Processes have `memory`, of which `working` sections are in use.
    pub(super) fn new(mut random: LoadRandom, memory: Vec<u64>, working: u64) -> Self {
        let working = working.min(memory.len() as u64);
        let sweep_s = random.between(SWEEP_S.0, SWEEP_S.1);
        Self {
            random,
            memory,
            working,
            sweep_s,
            swept: 0.0,
        }
    }

    /// The touches of one second: each section of the core is touched once in [`CPU_TOLD_S`].
    pub(super) fn second(&mut self, pace: Pace, sink: &mut Sink) {
        self.drift();
        let core = whole(number(self.working) * CORE);
        let used = if pace == Pace::Busy {
            self.sweep(core, sink);
            core
        } else {
            whole(number(core) * QUIET_SHARE)
        };
        let phase = sink.second % CPU_TOLD_S;
        for step in 0..used.saturating_sub(phase).div_ceil(CPU_TOLD_S) {
            self.touch(phase + step * CPU_TOLD_S, sink);
        }
    }

    fn sweep(&mut self, core: u64, sink: &mut Sink) {
        let span = self.working - core;
        if span == 0 {
            return;
        }
        let end = self.swept + number(span) / number(self.sweep_s);
        for step in whole(self.swept)..whole(end) {
            self.touch(core + step % span, sink);
        }
        self.swept = end;
    }

    fn touch(&self, at: u64, sink: &mut Sink) {
        if let Some(section) = usize::try_from(at).ok().and_then(|at| self.memory.get(at)) {
            sink.touch(Who::Cpu, *section, Access::Write, SECTION_BYTES / 8);
        }
    }

    fn drift(&mut self) {
        let rest = self.memory.len() as u64 - self.working;
        let rate = number(self.working) * DRIFT_PER_HOUR / 3_600.0;
        for _ in 0..self.random.count(rate) {
            if self.working == 0 || rest == 0 {
                return;
            }
            let left = usize::try_from(self.random.below(self.working)).unwrap_or(0);
            let came = usize::try_from(self.working + self.random.below(rest)).unwrap_or(0);
            self.memory.swap(left, came);
        }
    }
}
