// SPDX-License-Identifier: Apache-2.0
//! What is known of a VM, what it needs according to that, and how far it may be shrunk unasked.

use super::{
    plan::{Tuning, VmShare},
    trial::{Lack, Seen, Trial},
    units::{Bytes, Permille, VmId, millis},
    workingset::{Refaults, Terms},
};
use crate::sets::{LEVELS, Level};
use pagetide_addr::SECTION_BYTES;
use std::time::Duration;

/// Under pressure a refault counts for at most this many.
const PRESSED_MAX: u32 = 4;

/// Resident memory by how lately it was touched.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Heat([Bytes; LEVELS.len()]);

impl Heat {
    /// From the sections in each set ([`crate::sets::HotColdSets::counts`]).
    #[must_use]
    pub fn of_sections(counts: [(Level, u64); LEVELS.len()]) -> Self {
        let mut heat = Self::default();
        for (level, sections) in counts {
            heat.0[level as usize] = Bytes(sections.saturating_mul(SECTION_BYTES));
        }
        heat
    }

    /// The same with this much at `level`.
    #[must_use]
    pub fn with(mut self, level: Level, bytes: Bytes) -> Self {
        self.0[level as usize] = bytes;
        self
    }

    /// What is at `level`.
    #[must_use]
    pub fn at(&self, level: Level) -> Bytes {
        self.0[level as usize]
    }

    /// Scaled down to `resident`, since sections need not be resident as a whole.
    fn within(&self, resident: Bytes) -> Self {
        let all: Bytes = self.0.iter().copied().sum();
        if all <= resident {
            return *self;
        }
        Self(self.0.map(|bytes| bytes.part(resident.0, all.0)))
    }
}

/// Whether the VM's pages may be evicted now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Eviction {
    /// They may.
    #[default]
    Possible,
    /// Something forbids it. What is resident stays, and counts as if it were the VM's floor.
    Blocked,
}

/// A VM at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VmReport {
    /// Its RAM, which may grow and shrink.
    pub ram: Bytes,
    /// How much of that is resident.
    pub resident: Bytes,
    /// How much is swapped out, as the guest counts it.
    pub swapped: Bytes,
    /// The content of that as it is stored: what evicting more will cost is measured by it.
    pub content: Bytes,
    /// What the VM's pool takes: memory for content and for metadata, with what is lost to
    /// fragmentation. It counts against the budget.
    pub stored: Bytes,
    /// Resident memory by heat. What is in no set counts as in use.
    pub heat: Heat,
    /// Share of time for which the VMM's cgroup was stalled for memory (PSI), where that is known.
    pub pressure: Option<Permille>,
    /// See [`Eviction`].
    pub eviction: Eviction,
}

/// A VM under the budget.
#[derive(Clone, Debug)]
pub(super) struct Vm {
    pub id: VmId,
    pub share: VmShare,
    pub report: VmReport,
    /// Since the last step.
    pub refaults: Refaults,
    /// `None` until the first step.
    pub target: Option<Bytes>,
    /// What it uses and would be worth having in addition; the highest lately.
    pub need: Bytes,
    held: Held,
    trial: Trial,
    /// It is shrunk to this though nobody needs the memory yet.
    pub cap: Bytes,
    pub shrunk: Shrunk,
    pub quiet_for: Duration,
}

/// Why a VM is shrunk though nobody needs its memory yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Shrunk {
    No,
    /// It is idle.
    Idle,
    /// Free memory is between low and high.
    Paced,
}

/// The highest need of the window under way and of the one before.
#[derive(Clone, Copy, Debug)]
struct Held {
    now: Bytes,
    before: Bytes,
    window: Duration,
}

impl Held {
    fn see(&mut self, seen: Bytes, period: &Period) -> Bytes {
        if self.window >= period.tuning.hold {
            self.before = std::mem::take(&mut self.now);
            self.window = Duration::ZERO;
        }
        self.window = self.window.saturating_add(period.length);
        self.now = self.now.max(seen);
        self.now.max(self.before)
    }

    /// What was seen before may be wrong beyond this.
    fn lower(&mut self, most: Bytes) {
        self.now = self.now.min(most);
        self.before = self.before.min(most);
    }
}

/// What a VM could have if it wanted more.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entitled {
    /// With what others do not need.
    pub reach: Bytes,
    /// Without the cold memory of others.
    pub owed: Bytes,
}

/// What a step knows before it looks at each VM.
#[derive(Clone, Copy, Debug)]
pub(super) struct Period {
    pub length: Duration,
    pub tuning: Tuning,
    /// Cold memory to be reclaimed in this period, and the cold memory of all VMs.
    pub paced: Bytes,
    pub cold: Bytes,
    /// Whether another VM would take what one can do without.
    pub lack: Lack,
}

impl Vm {
    pub fn new(id: VmId, share: VmShare, report: VmReport) -> Self {
        Self {
            id,
            share,
            report,
            refaults: Refaults::default(),
            target: None,
            need: report.resident,
            held: Held {
                now: report.resident,
                before: Bytes::ZERO,
                window: Duration::ZERO,
            },
            trial: Trial::default(),
            cap: report.ram,
            shrunk: Shrunk::No,
            quiet_for: Duration::ZERO,
        }
    }

    pub fn observe(&mut self, report: VmReport, refaults: &Refaults) {
        self.report = report;
        self.report.heat = report.heat.within(report.resident);
        self.refaults.merge(refaults);
    }

    /// Its floor, which is all its RAM if that has shrunk below it.
    pub fn floor(&self) -> Bytes {
        self.share.floor.min(self.report.ram)
    }

    /// Its ceiling, which is never above its RAM.
    pub fn ceiling(&self) -> Bytes {
        let ram = self.report.ram;
        self.share
            .ceiling
            .map_or(ram, |ceiling| ceiling.min(ram))
            .max(self.floor())
    }

    /// What is promised to it or still in its hands.
    pub fn charge(&self) -> Bytes {
        self.target.unwrap_or(Bytes::ZERO).max(self.report.resident)
    }

    /// What it is charged with beyond its need: lost before anything that is used.
    pub fn spare(&self) -> Bytes {
        match self.report.eviction {
            Eviction::Possible => self.charge().less(self.need.max(self.floor())),
            Eviction::Blocked => Bytes::ZERO,
        }
    }

    /// Resident memory without that of the given sets.
    pub fn resident_without(&self, levels: &[Level]) -> Bytes {
        let heat = &self.report.heat;
        let without: Bytes = levels.iter().map(|level| heat.at(*level)).sum();
        self.report.resident.less(without)
    }

    /// Brings need and cap up to date.
    pub fn appraise(&mut self, period: &Period, entitled: Entitled) {
        let trusted = self.try_less(period);
        let used = self.resident_without(&[Level::Cold, Level::Cool, Level::Inactive]);
        let used = used.min(trusted);
        let pressed = (1 + self.pressure(period)).min(PRESSED_MAX);
        let worth = self.refaults.worth(&Terms {
            absent: self.report.ram.less(self.report.resident),
            reach: entitled.reach.less(used),
            owed: entitled.owed.less(used),
            period: period.length,
            payback: period.tuning.payback.saturating_mul(pressed),
        });
        let gained = self.charge() + period.tuning.gain.over(period.length);
        self.held.lower(trusted + worth);
        self.need = self.held.see((used + worth).min(gained), period);
        let refaulted = self.refaults.filled() > period.tuning.quiet.over(period.length);
        if refaulted || self.pressure(period) > 0 {
            self.quiet_for = Duration::ZERO;
        } else {
            self.quiet_for = self.quiet_for.saturating_add(period.length);
        }
        self.shrink(period);
        self.refaults = Refaults::default();
    }

    /// The most that counts as used, while it is tried with less.
    fn try_less(&mut self, period: &Period) -> Bytes {
        let seen = Seen {
            resident: self.report.resident,
            refaulted: self.refaults.filled(),
            length: period.length,
        };
        let may_be_tried = self.report.eviction == Eviction::Possible && self.pressure(period) == 0;
        let lack = if may_be_tried {
            period.lack
        } else {
            Lack::None
        };
        self.trial.go_on(&seen, lack);
        self.trial.trusted().unwrap_or(self.report.ram)
    }

    /// Whether it refaults more in a second than a target is lowered by at least.
    pub fn lack(&self, tuning: &Tuning, length: Duration) -> Lack {
        let a_second = self.refaults.filled().part(1000, millis(length).max(1));
        if a_second > tuning.deadband.of(self.report.resident) {
            Lack::OfSome
        } else {
            Lack::None
        }
    }

    /// Its stalls, in multiples of the largest pressure.
    fn pressure(&self, period: &Period) -> u32 {
        let stalls = self.report.pressure.unwrap_or_default().0;
        u32::from(stalls / period.tuning.pressure_max.0.max(1))
    }

    fn shrink(&mut self, period: &Period) {
        let tuning = &period.tuning;
        let mut less = Bytes::ZERO;
        self.shrunk = Shrunk::No;
        if self.pressure(period) == 0 {
            less += period.paced.part(self.cold().0, period.cold.0);
            if less > Bytes::ZERO {
                self.shrunk = Shrunk::Paced;
            }
        }
        if self.quiet_for >= tuning.idle_after {
            let all = self.report.ram.less(self.floor());
            less += all.part(millis(period.length), millis(tuning.idle_shrink));
            self.shrunk = Shrunk::Idle;
        }
        self.cap = match self.shrunk {
            Shrunk::No => self.report.ram,
            Shrunk::Idle | Shrunk::Paced => {
                let from = self.cap.min(self.report.resident);
                from.less(less).max(self.need).max(self.floor())
            }
        };
    }

    /// Cold memory that may be taken.
    pub fn cold(&self) -> Bytes {
        match self.report.eviction {
            Eviction::Possible => self.report.heat.at(Level::Cold),
            Eviction::Blocked => Bytes::ZERO,
        }
    }
}
