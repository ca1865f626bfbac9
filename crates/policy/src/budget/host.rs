// SPDX-License-Identifier: Apache-2.0
//! [`HostBudget`]: the settings in force, the VMs, and a step that decides their targets.

use super::{
    admission::{Gate, saving},
    fill::{Claim, share_out},
    ladder::{self, Ladder, Pots},
    plan::{
        BudgetError, HostMemory, Marks, Plan, Saved, VMS_MAX, VmShare, check_floors, check_plan,
        check_share,
    },
    trial::Lack,
    units::{Bytes, Rate, VmId},
    vm::{Entitled, Period, Shrunk, Vm, VmReport},
    workingset::Refaults,
};
use crate::sets::Level;
use pagetide_addr::SECTION_BYTES;
use std::time::Duration;

/// A step is taken for at least and at most this long: rates from a shorter time are noise, and a
/// host that was suspended has not been idle for that long.
const PERIOD: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(60);
/// Length of the first step.
const PERIOD_FIRST: Duration = Duration::from_secs(1);
/// A target is not raised by less, except to the floor.
const RAISE_MIN: Bytes = Bytes(SECTION_BYTES);

/// Free memory of the budget against the watermarks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Water {
    /// Fills evict first.
    BelowMin,
    /// Reclaim is under way.
    BelowLow,
    /// Cold memory is reclaimed at a pace, or it is being reclaimed up to high.
    Between,
    /// There is enough.
    AboveHigh,
}

/// What is reclaimed now beyond what VMs take from each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reclaim {
    /// Nothing.
    Rest,
    /// Cold memory, at this pace over all VMs.
    Paced(Rate),
    /// So many bytes must be freed until the high watermark is reached.
    UntilHigh(Bytes),
}

/// Why a target changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// The VM has just come under the budget.
    Joined,
    /// Raised to the floor.
    Floor,
    /// Raised: what it refaults is worth it.
    Refaults,
    /// Raised: nobody needs the memory more.
    Room,
    /// Lowered, but to no less than is resident: others need what it does not use.
    Unused,
    /// Lowered: others need the memory more than this one its memory in that set.
    Taken(Level),
    /// Lowered below its need: all want more than there is, and this is its share by weight.
    Share,
    /// Lowered: it has been quiet.
    Idle,
    /// Lowered: cold memory is reclaimed at a pace.
    Paced,
    /// Lowered to a new ceiling, or to RAM that has shrunk.
    Ceiling,
    /// Lowered below its floor: the floors and what is stored exceed the budget.
    BelowFloor,
}

/// A new target of a VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Change {
    /// The VM.
    pub vm: VmId,
    /// The target until now, if there was one.
    pub from: Option<Bytes>,
    /// The most of the VM that may be resident from now on.
    pub to: Bytes,
    /// Why.
    pub reason: Reason,
}

/// What a step has decided.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Decision {
    /// New targets. Lowered ones can be put into force in any order, at once.
    pub changes: Vec<Change>,
    /// The state against the watermarks.
    pub water: Water,
    /// See [`Reclaim`].
    pub reclaim: Reclaim,
    /// What is free.
    pub free: Bytes,
    /// What is used beyond the budget.
    pub over: Bytes,
}

/// How a VM stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VmStatus {
    /// What is set.
    pub share: VmShare,
    /// The most that may be resident; `None` before the first step.
    pub target: Option<Bytes>,
    /// What it is taken to need.
    pub need: Bytes,
    /// What it has or was promised beyond that.
    pub spare: Bytes,
    /// How long it has been quiet.
    pub quiet_for: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Rest,
    /// Since free memory fell below low, until it reaches high.
    Reclaim,
}

/// See the module `budget`.
#[derive(Clone, Debug)]
pub struct HostBudget {
    plan: Plan,
    host: HostMemory,
    /// By id.
    vms: Vec<Vm>,
    phase: Phase,
    stepped_at: Option<Duration>,
}

/// How far a target is raised, of all that a VM should have.
type Bound = fn(&Vm) -> Bytes;

/// What all VMs take together.
#[derive(Clone, Copy, Debug)]
struct Totals {
    resident: Bytes,
    stored: Bytes,
    promised: Bytes,
    charged: Bytes,
}

impl Marks {
    /// What is left for resident memory if `mark` is kept free.
    fn left(&self, mark: Bytes, stored: Bytes) -> Bytes {
        self.budget.less(mark).less(stored)
    }
}

impl HostBudget {
    /// A budget without VMs.
    ///
    /// # Errors
    /// If the plan contradicts itself or the host.
    pub fn new(plan: Plan, host: HostMemory) -> Result<Self, BudgetError> {
        check_plan(&plan, &host)?;
        Ok(Self {
            plan,
            host,
            vms: Vec::new(),
            phase: Phase::Rest,
            stepped_at: None,
        })
    }

    /// What is set for the host.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The host is as `host` says from now on: its limits were raised or lowered. The plan is checked against
    /// it by the next [`Self::set_plan`].
    pub fn set_host(&mut self, host: HostMemory) {
        self.host = host;
    }

    /// Everything that was set. What was learnt is not part of it: after a restart, targets start at
    /// what is resident, and needs are learnt again within seconds.
    #[must_use]
    pub fn saved(&self) -> Saved {
        Saved {
            plan: self.plan,
            vms: self.vms.iter().map(|vm| (vm.id, vm.share)).collect(),
        }
    }

    /// Sets budget, watermarks and tuning, from the next step on.
    ///
    /// # Errors
    /// If the plan contradicts itself, the host or the floors.
    pub fn set_plan(&mut self, plan: Plan) -> Result<(), BudgetError> {
        check_plan(&plan, &self.host)?;
        check_floors(&plan, self.floors(None))?;
        self.plan = plan;
        Ok(())
    }

    /// Brings a VM under the budget. Its first target comes with the next step, which should follow
    /// at once.
    ///
    /// # Errors
    /// If its share contradicts itself or the budget, or it is there already.
    pub fn join(&mut self, vm: VmId, share: VmShare, report: VmReport) -> Result<(), BudgetError> {
        let Err(place) = self.find(vm) else {
            return Err(BudgetError::VmTwice { vm });
        };
        if self.vms.len() == VMS_MAX {
            return Err(BudgetError::TooManyVms);
        }
        check_share(vm, &share, report.ram)?;
        let floor = std::iter::once(share.floor);
        check_floors(&self.plan, self.floors(None).chain(floor))?;
        let mut joined = Vm::new(vm, share, report);
        joined.observe(report, &Refaults::default());
        self.vms.insert(place, joined);
        Ok(())
    }

    /// Takes a VM out of the budget. Its memory counts no longer, so it should be gone, or the VM
    /// be released with the budget lowered accordingly.
    ///
    /// # Errors
    /// If it is not there.
    pub fn leave(&mut self, vm: VmId) -> Result<(), BudgetError> {
        let place = self.find(vm).map_err(|_| BudgetError::NoSuchVm { vm })?;
        self.vms.remove(place);
        Ok(())
    }

    /// Sets weight, floor and ceiling of a VM, from the next step on.
    ///
    /// # Errors
    /// If they contradict each other, the VM's RAM or the budget, or it is not there.
    pub fn set_share(&mut self, vm: VmId, share: VmShare) -> Result<(), BudgetError> {
        let place = self.find(vm).map_err(|_| BudgetError::NoSuchVm { vm })?;
        check_share(vm, &share, self.vms[place].report.ram)?;
        let floor = std::iter::once(share.floor);
        check_floors(&self.plan, self.floors(Some(place)).chain(floor))?;
        self.vms[place].share = share;
        Ok(())
    }

    /// A VM as it is now, and what it refaulted since the last call. May be called any number of
    /// times between two steps.
    ///
    /// # Errors
    /// If it is not there.
    pub fn observe(
        &mut self,
        vm: VmId,
        report: VmReport,
        refaults: &Refaults,
    ) -> Result<(), BudgetError> {
        let place = self.find(vm).map_err(|_| BudgetError::NoSuchVm { vm })?;
        self.vms[place].observe(report, refaults);
        Ok(())
    }

    /// The VM, if it has joined.
    fn known(&self, vm: VmId) -> Option<&Vm> {
        match self.find(vm) {
            Ok(place) => Some(&self.vms[place]),
            Err(_) => None,
        }
    }

    /// How a VM stands.
    #[must_use]
    pub fn vm(&self, vm: VmId) -> Option<VmStatus> {
        let vm = self.known(vm)?;
        Some(VmStatus {
            share: vm.share,
            target: vm.target,
            need: vm.need,
            spare: vm.spare(),
            quiet_for: vm.quiet_for,
        })
    }

    /// What fills of a VM are measured by until the next step.
    #[must_use]
    pub fn gate(&self, vm: VmId) -> Option<Gate> {
        let vm = self.known(vm)?;
        let marks = self.plan.marks();
        Some(Gate {
            budget: marks.budget,
            min: marks.min,
            target: vm.target.unwrap_or(vm.report.resident),
            floor: vm.floor(),
            saving: saving(vm.report.swapped, vm.report.content),
        })
    }

    fn find(&self, vm: VmId) -> Result<usize, usize> {
        self.vms.binary_search_by_key(&vm, |vm| vm.id)
    }

    /// The floors of all VMs but the one at `except`.
    fn floors(&self, except: Option<usize>) -> impl Iterator<Item = Bytes> + Clone {
        let vms = self.vms.iter().enumerate();
        vms.filter(move |(place, _)| Some(*place) != except)
            .map(|(_, vm)| vm.share.floor)
    }

    fn totals(&self) -> Totals {
        let of = |amount: fn(&Vm) -> Bytes| self.vms.iter().map(amount).sum();
        Totals {
            resident: of(|vm| vm.report.resident),
            stored: of(|vm| vm.report.stored),
            promised: of(|vm| vm.target.unwrap_or(vm.report.resident)),
            charged: of(Vm::charge),
        }
    }

    /// Decides all targets anew, by the latest report of each VM. `now` is the time since any fixed
    /// moment.
    pub fn step(&mut self, now: Duration) -> Decision {
        let length = match self.stepped_at.replace(now) {
            None => PERIOD_FIRST,
            Some(before) => now
                .saturating_sub(before)
                .clamp(*PERIOD.start(), *PERIOD.end()),
        };
        let (marks, totals) = (self.plan.marks(), self.totals());
        let used = totals.resident + totals.stored;
        let free = marks.budget.less(used);
        if free < marks.low {
            self.phase = Phase::Reclaim;
        } else if free >= marks.high {
            self.phase = Phase::Rest;
        }
        let water = if free < marks.min {
            Water::BelowMin
        } else if free < marks.low {
            Water::BelowLow
        } else if free < marks.high {
            Water::Between
        } else {
            Water::AboveHigh
        };
        let reclaim = self.appraise(length, water, &totals);
        let before: Vec<Option<Bytes>> = self.vms.iter().map(|vm| vm.target).collect();
        let pots = self.pots(&marks, &totals);
        let ladders: Vec<Ladder> = self.vms.iter().map(Ladder::of).collect();
        let ideal = ladder::ideal(pots, &ladders);
        self.lower(&ideal, pots.all);
        self.raise(&ideal, &marks);
        // A target may have been raised to what is resident anyway, while another was nearly right.
        self.lower(&ideal, pots.all);
        Decision {
            changes: self.changes(&before),
            water,
            reclaim: match reclaim {
                Reclaim::Rest if self.phase == Phase::Reclaim => {
                    Reclaim::UntilHigh(marks.high.less(free))
                }
                other => other,
            },
            free,
            over: used.less(marks.budget),
        }
    }

    /// What may be promised. At rest, targets stay where they are anywhere between the watermarks:
    /// giving back at once what was just reclaimed would have it reclaimed again.
    fn pots(&self, marks: &Marks, totals: &Totals) -> Pots {
        let left = |mark| marks.left(mark, totals.stored);
        Pots {
            floors: left(marks.min),
            all: match self.phase {
                Phase::Reclaim => left(marks.high),
                Phase::Rest => totals.promised.clamp(left(marks.high), left(marks.low)),
            },
        }
    }

    /// Brings needs and caps up to date; returns the pace at which cold memory is reclaimed.
    fn appraise(&mut self, length: Duration, water: Water, totals: &Totals) -> Reclaim {
        let marks = self.plan.marks();
        let tuning = self.plan.tuning;
        let left = marks.left(marks.high, totals.stored);
        let reach = self.shares(left, |vm| vm.need);
        let owed = self.shares(left, |vm| vm.need.max(vm.report.resident));
        let cold: Bytes = self.vms.iter().map(Vm::cold).sum();
        let is_paced = water == Water::Between && self.phase == Phase::Rest && cold > Bytes::ZERO;
        let pace = if is_paced {
            tuning.pace
        } else {
            Rate(Bytes::ZERO)
        };
        let lacks = |vm: &Vm| vm.lack(&tuning, length) == Lack::OfSome;
        let period = Period {
            length,
            tuning,
            paced: pace.over(length),
            cold,
            lack: match self.vms.iter().any(lacks) {
                true => Lack::OfSome,
                false => Lack::None,
            },
        };
        for ((vm, reach), owed) in self.vms.iter_mut().zip(reach).zip(owed) {
            vm.appraise(&period, Entitled { reach, owed });
        }
        if pace.0 == Bytes::ZERO {
            Reclaim::Rest
        } else {
            Reclaim::Paced(pace)
        }
    }

    /// What each VM that refaults would get if all of those wanted all there is, and the others as
    /// much as `keep` says.
    fn shares(&self, pot: Bytes, keep: fn(&Vm) -> Bytes) -> Vec<Bytes> {
        let claims = self.vms.iter().map(|vm| {
            let floor = vm.floor();
            let is_content = vm.refaults.filled() == Bytes::ZERO;
            let upper = if is_content { keep(vm) } else { vm.ceiling() };
            Claim {
                weight: vm.share.weight,
                lower: floor,
                upper: upper.max(floor),
            }
        });
        share_out(pot, &claims.collect::<Vec<_>>())
    }

    /// Lowers targets to what they should be, those that are nearly right only if they must be.
    fn lower(&mut self, ideal: &[Bytes], pot: Bytes) {
        let deadband = self.plan.tuning.deadband;
        let mut lowered = Vec::with_capacity(self.vms.len());
        for (vm, ideal) in self.vms.iter().zip(ideal) {
            let exact = vm.target.unwrap_or(vm.report.resident).min(*ideal);
            let nearly = match vm.target {
                Some(target)
                    if target <= vm.ceiling()
                        && *ideal != vm.floor()
                        && target.less(exact) < deadband.of(target) =>
                {
                    target
                }
                _ => exact,
            };
            lowered.push((exact, nearly));
        }
        let sum: Bytes = lowered.iter().map(|(_, nearly)| *nearly).sum();
        let must = self.phase == Phase::Reclaim || sum > pot;
        for (vm, (exact, nearly)) in self.vms.iter_mut().zip(lowered) {
            vm.target = Some(if must { exact } else { nearly });
        }
    }

    /// Raises targets towards what they should be, as far as memory has been freed for it: what a
    /// VM was asked to give is given to another only when it is evicted.
    fn raise(&mut self, ideal: &[Bytes], marks: &Marks) {
        let bounds: [(Bytes, Bound); 3] = [
            (marks.min, Vm::floor),
            (marks.low, |vm| vm.need.max(vm.floor())),
            (marks.high, |_| Bytes(u64::MAX)),
        ];
        for (mark, bound) in bounds {
            let totals = self.totals();
            let pot = marks.left(mark, totals.stored).less(totals.charged);
            let both = self.vms.iter().zip(ideal);
            let wishes: Vec<Bytes> = both
                .map(|(vm, ideal)| wish(vm, bound(vm).min(*ideal)))
                .collect();
            let costs = self.vms.iter().zip(&wishes).map(|(vm, wish)| Claim {
                weight: vm.share.weight,
                lower: Bytes::ZERO,
                upper: (*wish).max(vm.report.resident).less(vm.charge()),
            });
            let grants = share_out(pot, &costs.collect::<Vec<_>>());
            for ((vm, wish), grant) in self.vms.iter_mut().zip(wishes).zip(grants) {
                vm.target = vm.target.max(Some(wish.min(vm.charge() + grant)));
            }
        }
    }

    fn changes(&self, before: &[Option<Bytes>]) -> Vec<Change> {
        let both = self.vms.iter().zip(before);
        both.filter(|(vm, from)| vm.target != **from)
            .filter_map(|(vm, from)| {
                let to = vm.target?;
                Some(Change {
                    vm: vm.id,
                    from: *from,
                    to,
                    reason: reason(vm, *from, to),
                })
            })
            .collect()
    }
}

/// The target of `vm` if it is raised to `wanted`, as far as that is worth a change.
fn wish(vm: &Vm, wanted: Bytes) -> Bytes {
    let target = vm.target.unwrap_or(Bytes::ZERO);
    if wanted < target + RAISE_MIN && wanted > vm.floor() {
        target
    } else {
        wanted.max(target)
    }
}

fn reason(vm: &Vm, from: Option<Bytes>, to: Bytes) -> Reason {
    let floor = vm.floor();
    match from {
        None => Reason::Joined,
        Some(_) if to < floor => Reason::BelowFloor,
        Some(from) if to > from => {
            if to == floor {
                Reason::Floor
            } else if from < vm.need {
                Reason::Refaults
            } else {
                Reason::Room
            }
        }
        Some(from) if from > vm.ceiling() && to == vm.ceiling() => Reason::Ceiling,
        Some(_) if vm.shrunk != Shrunk::No && to >= vm.cap => match vm.shrunk {
            Shrunk::Paced => Reason::Paced,
            Shrunk::Idle | Shrunk::No => Reason::Idle,
        },
        Some(_) if to >= vm.report.resident => Reason::Unused,
        Some(_) if to < vm.need => Reason::Share,
        Some(_) if to >= vm.resident_without(&[Level::Cold]) => Reason::Taken(Level::Cold),
        Some(_) if to >= vm.resident_without(&[Level::Cold, Level::Cool]) => {
            Reason::Taken(Level::Cool)
        }
        Some(_) => Reason::Taken(Level::Inactive),
    }
}
