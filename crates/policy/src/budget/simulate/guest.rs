// SPDX-License-Identifier: Apache-2.0
//! A guest and its memory, as [`super`] models them.

use super::super::{
    Admission, Bytes, Fill, Gate, Heat, Permille, Rate, Refaults, VmId, VmReport, VmShare,
};
use super::demand::Demand;
use crate::sets::Level;
use pagetide_addr::PAGE_BYTES;
use std::time::Duration;

/// Time of a touch of a page, with the work on it.
pub const TOUCH: Duration = Duration::from_micros(20);
/// Additional time if the page is absent.
pub const FAULT: Duration = Duration::from_micros(30);
/// How fast a VM above its target evicts.
pub const EVICTION: Rate = Rate(Bytes::mib(512));
/// What is filled under one fault, and so the most that is under way at a moment.
pub const FILL: Bytes = Bytes(16 * PAGE_BYTES);
/// vCPUs that touch memory all the time, in each VM.
const TOUCHERS: u64 = 2;
/// Of a VM's RAM, in thousandths: page words, sections, heat.
const METADATA: Permille = Permille(4);

/// A guest and its memory.
#[derive(Clone, Debug)]
pub(super) struct Guest {
    pub id: VmId,
    pub share: VmShare,
    pub ram: Bytes,
    /// Stored bytes of evicted ones.
    pub ratio: Permille,
    pub demand: Demand,
    pub working_set: Bytes,
    /// All that it has ever touched: it is resident or stored.
    pub touched: Bytes,
    /// Resident: of the working set, and of what has left it: inactive, cool, cold.
    pub hot: Bytes,
    pub aged: [Bytes; 3],
    /// Of what is stored: evicted before the daemon was started, at a time that it does not know.
    pub forgotten: Bytes,
    /// Whether the daemon has scanned it since it was started.
    pub scanned: bool,
    pub target: Bytes,
    pub refaults: Refaults,
    pub account: Account,
}

/// How a guest fared.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Account {
    /// Touches if all memory were there, and those that came to pass.
    pub wanted: u64,
    pub done: u64,
    pub evicted: Bytes,
    /// Evictions that went from its floor or more to less.
    pub floors_broken: u64,
    pub starved: Duration,
}

/// How far fills went beyond the budget.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Over {
    pub bytes: Bytes,
    /// Beyond the fill under way, too.
    pub beyond_fill: Bytes,
}

impl Guest {
    /// One that has touched `touched`, of which so much is resident and nothing is known yet.
    pub fn new(
        id: VmId,
        share: VmShare,
        ram: Bytes,
        touched: Bytes,
        resident: Bytes,
        demand: Demand,
    ) -> Self {
        Self {
            id,
            share,
            ram,
            ratio: Permille(200),
            demand,
            working_set: resident,
            touched,
            hot: resident,
            aged: [Bytes::ZERO; 3],
            forgotten: touched.less(resident),
            scanned: true,
            target: resident,
            refaults: Refaults::default(),
            account: Account::default(),
        }
    }

    /// The most that it ever touches.
    pub fn footprint(&self) -> Bytes {
        self.ram.part(9, 10)
    }

    pub fn resident(&self) -> Bytes {
        self.hot + self.aged.iter().copied().sum()
    }

    fn swapped(&self) -> Bytes {
        self.touched.less(self.resident())
    }

    fn content(&self) -> Bytes {
        self.ratio.of(self.swapped())
    }

    pub fn stored(&self) -> Bytes {
        self.content() + METADATA.of(self.ram)
    }

    pub fn used(&self) -> Bytes {
        self.resident() + self.stored()
    }

    /// Its floor, as the budget takes it.
    pub fn floor(&self) -> Bytes {
        self.share.floor.min(self.ram)
    }

    /// The most that it may have resident, and would ever use.
    pub fn ceiling(&self) -> Bytes {
        let ceiling = self.share.ceiling.unwrap_or(self.ram);
        ceiling.min(self.footprint()).max(self.floor())
    }

    /// The target that holds a fixed `share` of a budget, with what is stored of it.
    pub fn target_of_split(&self, share: Bytes) -> Bytes {
        let resident = share.less(self.ratio.of(self.footprint()) + METADATA.of(self.ram));
        let target = resident.part(1000, u64::from(1000 - self.ratio.0));
        target.min(self.ceiling())
    }

    pub fn report(&self) -> VmReport {
        let [inactive, cool, cold] = self.aged;
        let heat = Heat::default()
            .with(Level::Hot, self.hot)
            .with(Level::Inactive, inactive)
            .with(Level::Cool, cool)
            .with(Level::Cold, cold);
        VmReport {
            ram: self.ram,
            resident: self.resident(),
            swapped: self.swapped(),
            content: self.content(),
            stored: self.stored(),
            heat: if self.scanned { heat } else { Heat::default() },
            ..VmReport::default()
        }
    }

    /// What has not been used for a scan or more, resident or stored, of all that it has touched.
    pub fn cold_share(&self) -> (Bytes, Bytes) {
        let unused = self.touched.less(self.working_set.min(self.touched));
        (unused, self.touched)
    }

    /// The working set from `now` on. `step` is the time to the next call.
    pub fn live(&mut self, now: Duration, step: Duration) {
        let wanted = self.demand.at(now, step, self.ram);
        self.age(wanted.min(self.footprint()));
        self.scanned = true;
    }

    fn age(&mut self, working_set: Bytes) {
        let [inactive, cool, cold] = self.aged;
        self.aged = [Bytes::ZERO, inactive, cool + cold];
        let before = self.working_set;
        if working_set < before {
            let stays = self.hot.part(working_set.pages(), before.pages());
            self.aged[0] = self.hot.less(stays);
            self.hot = stays;
        } else {
            // What is resident comes back without a fault, the warmest first.
            let mut grown = working_set.less(before);
            for aged in &mut self.aged {
                let back = grown.min(*aged);
                *aged = aged.less(back);
                grown = grown.less(back);
                self.hot += back;
            }
        }
        self.working_set = working_set;
    }

    /// Whether it wants more than it has, has all that its target allows, and that is less than its
    /// floor.
    pub fn lacks_floor(&self) -> bool {
        let resident = self.resident();
        self.target < self.floor() && resident + FILL > self.target && resident < self.working_set
    }

    /// The daemon was started anew: it knows neither heat nor what was evicted when.
    pub fn forget(&mut self) {
        self.forgotten = self.swapped();
        self.aged = [self.aged.iter().copied().sum(), Bytes::ZERO, Bytes::ZERO];
        self.refaults = Refaults::default();
        self.scanned = false;
    }

    /// Evicts up to `bytes`, the coldest first.
    pub fn evict(&mut self, bytes: Bytes) {
        let kept_floor = self.resident() >= self.floor();
        let mut left = bytes;
        for part in self.aged.iter_mut().rev().chain([&mut self.hot]) {
            let gone = left.min(*part);
            *part = part.less(gone);
            left = left.less(gone);
        }
        self.account.evicted += bytes.less(left);
        self.account.floors_broken += u64::from(kept_floor && self.resident() < self.floor());
    }

    /// Evicts for `time` what it has beyond its target.
    pub fn obey(&mut self, time: Duration) {
        let excess = self.resident().less(self.target);
        self.evict(excess.min(EVICTION.over(time)));
    }

    /// Touches memory for `time` while nobody serves faults: the first one stops it.
    pub fn touch_unserved(&mut self, time: Duration) {
        let all = touches(time, nanos(TOUCH));
        self.account.wanted += all;
        if self.working_set <= self.hot {
            self.account.done += all;
        }
    }

    /// Touches memory for `time`. `others` is what the rest of the host uses.
    pub fn touch(&mut self, time: Duration, others: Bytes, gate: Option<&Gate>) -> Over {
        let missing = self.working_set.less(self.hot);
        let all = touches(time, nanos(TOUCH));
        self.account.wanted += all;
        if missing == Bytes::ZERO {
            self.account.done += all;
            return Over::default();
        }
        let miss = missing.part(1000, self.working_set.0).0;
        let some = touches(time, nanos(TOUCH) + nanos(FAULT) * miss / 1000);
        self.account.done += some;
        // Pages that are touched twice are filled once.
        let filled = missing.part(some, some + self.working_set.pages());
        let room = self.target.less(self.resident()) + self.aged.iter().copied().sum();
        let grown = filled.min(room);
        let fresh = self.refault(filled, missing);
        let over = self.fill(grown, fresh.part(grown.0, filled.0), others, gate);
        // The rest replaces what was hot.
        self.account.evicted += filled.less(grown);
        self.touched += fresh.part(filled.less(grown).0, filled.0);
        over
    }

    /// Counts what is filled as refaults, but for what it touches for the first time, which is
    /// returned.
    fn refault(&mut self, filled: Bytes, missing: Bytes) -> Bytes {
        let stored = self.swapped();
        let fresh = filled.part(missing.less(stored).0, missing.0);
        let again = filled.less(fresh);
        let unknown = again.part(self.forgotten.0, stored.0).min(self.forgotten);
        self.forgotten = self.forgotten.less(unknown);
        self.refaults.unknown += unknown;
        let known = again.less(unknown);
        let absent = missing.min(stored);
        for parts in [8, 4, 2, 1] {
            self.refaults.add(absent.part(1, parts), known.part(1, 4));
        }
        fresh
    }

    /// Fills so much, `fresh` of it for the first time: fault by fault, but all that may go ahead at
    /// once is filled at once.
    fn fill(&mut self, bytes: Bytes, fresh: Bytes, others: Bytes, gate: Option<&Gate>) -> Over {
        let (mut left, mut part, mut over) = (bytes, bytes, Over::default());
        while left > Bytes::ZERO {
            part = self.admitted((part + part).min(left), others, gate);
            self.hot = (self.hot + part).min(self.working_set);
            self.touched += fresh.part(part.0, bytes.0);
            left = left.less(part);
            if let Some(gate) = gate {
                let beyond = (others + self.used()).less(gate.budget);
                over.bytes = over.bytes.max(beyond);
                over.beyond_fill = over.beyond_fill.max(beyond.less(FILL));
            }
        }
        over
    }

    /// How much of `wanted` goes ahead: as much as may at once, or one fault for which something is
    /// evicted first.
    fn admitted(&mut self, wanted: Bytes, others: Bytes, gate: Option<&Gate>) -> Bytes {
        let mut part = wanted;
        loop {
            let answer = gate.map_or(Admission::Proceed, |gate| {
                gate.admit(&Fill {
                    bytes: part,
                    resident: self.resident(),
                    host_used: others + self.used(),
                })
            });
            let excess = (self.resident() + part).less(self.target);
            if excess == Bytes::ZERO && answer == Admission::Proceed {
                return part;
            }
            if part <= FILL {
                self.evict(excess.min(part));
                if let Admission::ReclaimFirst(bytes) = answer {
                    self.evict(bytes);
                }
                return part;
            }
            part = part.part(1, 2).max(FILL);
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Touches in `time` by all vCPUs at so many nanoseconds each.
fn touches(time: Duration, each_ns: u64) -> u64 {
    nanos(time) / each_ns * TOUCHERS
}

/// The share of the work that was `wanted`.
pub(super) fn share_of(done: u64, wanted: u64) -> Permille {
    let share = u128::from(done) * 1000 / u128::from(wanted.max(1));
    Permille(u16::try_from(share).unwrap_or(u16::MAX))
}

/// Touches of a guest that never waits, in `time`.
pub(super) fn touches_of(time: Duration) -> u64 {
    touches(time, nanos(TOUCH))
}
