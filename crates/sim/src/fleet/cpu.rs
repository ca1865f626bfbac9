// SPDX-License-Identifier: Apache-2.0
//! What the guest's CPUs touch beside the page cache: a working set that drifts.

use super::{
    chance::{Chance, number, whole},
    sink::{CPU_TOLD_S, Sink, Who},
};
use pagetide_addr::{Access, SECTION_BYTES};

/// Share of the working set that is touched when the guest is quiet: its kernel and its services.
const QUIET_SHARE: f64 = 0.15;
/// Share of the working set that is exchanged for other memory in an hour.
const DRIFT_PER_HOUR: f64 = 0.5;

/// See the module.
#[derive(Debug)]
pub(super) struct Cpu {
    chance: Chance,
    /// Memory of processes; the working set comes first.
    memory: Vec<u64>,
    working: u64,
}

impl Cpu {
    /// Processes have `memory`, of which `working` sections are in use.
    pub(super) fn new(chance: Chance, memory: Vec<u64>, working: u64) -> Self {
        let working = working.min(memory.len() as u64);
        Self {
            chance,
            memory,
            working,
        }
    }

    /// The touches of one second: each section of the working set has its turn in [`CPU_TOLD_S`].
    pub(super) fn second(&mut self, busy: bool, sink: &mut Sink) {
        self.drift();
        let used = if busy {
            self.working
        } else {
            whole(number(self.working) * QUIET_SHARE)
        };
        let phase = sink.second % CPU_TOLD_S;
        for step in 0..used.saturating_sub(phase).div_ceil(CPU_TOLD_S) {
            let at = usize::try_from(phase + step * CPU_TOLD_S).unwrap_or(0);
            sink.touch(Who::Cpu, self.memory[at], Access::Write, SECTION_BYTES / 8);
        }
    }

    fn drift(&mut self) {
        let rest = self.memory.len() as u64 - self.working;
        let rate = number(self.working) * DRIFT_PER_HOUR / 3_600.0;
        for _ in 0..self.chance.count(rate) {
            if self.working == 0 || rest == 0 {
                return;
            }
            let left = usize::try_from(self.chance.below(self.working)).unwrap_or(0);
            let came = usize::try_from(self.working + self.chance.below(rest)).unwrap_or(0);
            self.memory.swap(left, came);
        }
    }
}
