// SPDX-License-Identifier: Apache-2.0
//! Fair shares for tenants: which tenant may begin work on an engine, and how much.
//!
//! # Terms
//! A *tenant* is a device; all its queues on the engine share what it gets. *Work* is a chain taken
//! from a ring, a message of the front end that the engine obeys, or a *step* of a chain: a
//! transfer goes to the kernel in steps of bounded size, and waits for its next turn between two of
//! them. Work has a *cost* in bytes: the bytes it moves, plus [`CHAIN_COST_BYTES`] for each chain,
//! because a request that moves nothing takes CPU time, too. A *turn* is one pass of the engine
//! over all tenants.
//!
//! # Idea
//! Deficit round robin (Shreedhar and Varghese, SIGCOMM 1995): in each turn a tenant gets credit in
//! proportion to its weight, and begins work while it has credit. The cost of a chain is known only
//! after it has been parsed, so a tenant may overdraw its credit by its last piece of work and pays
//! in later turns (the surplus variant: Adiseshu, Parulkar and Varghese, SIGCOMM 1996). A tenant
//! with nothing to do loses its credit: it cannot save up for a burst.
//!
//! ```text
//!   turn    A (weight 100, 128 KiB steps)          B (weight 100, 4 KiB reads)
//!     1     credit 160 K: 2 steps, 256 K spent     160 K: 1 read waits, 20 K; the rest is forfeited
//!     2     -96 + 160 = 64 K: 1 step               160 K: 1 read, ...
//!     3     -64 + 160 = 96 K: 1 step               160 K: 8 reads wait: all of them
//! ```
//!
//! Credit bounds how much is *begun* in a turn. Work that was begun and is not done occupies the
//! disk, ring entries and kernel threads, and later work queues behind it. So there are also bounds
//! on what a tenant has with the kernel:
//!
//! | | alone | in company, of all tenants together |
//! |---|---|---|
//! | bytes in flight | [`WINDOW_ALONE_BYTES`] | [`WINDOW_SHARED_BYTES`], by weight |
//! | requests in flight | the ring's entries | the same, by weight |
//! | slow operations in flight | [`SLOW_ALONE_MAX`] | [`SLOW_SHARED_MAX`], by weight |
//! | bytes of a step | [`STEP_ALONE_BYTES`] | [`STEP_SHARED_BYTES`] |
//!
//! *Slow* operations (flush, `fallocate`) block kernel threads, which all tenants of the engine
//! share.
//!
//! # Company
//! A tenant is *present* while it has something in flight, and for [`RECENT_NS`] after it last
//! began something: one that sends a request every few milliseconds is always present. Only present
//! tenants get shares, so an idle tenant takes nothing from the others.
//!
//! # Bounds
//! While every tenant has work, the costs charged to two tenants, each divided by its weight,
//! differ by at most one turn's credit and one piece of work, as in the papers. A new tenant waits
//! at most for the current turn before its first work begins: [`TURN_SHARED_COST_BYTES`] and one
//! step per tenant (once, with the step and window of a tenant that was alone until then). It finds
//! room: no tenant has more requests than the ring has entries, and all together have at most twice
//! as many plus [`REQUESTS_MIN`] each.
//!
//! # Limits
//! This module uses no clock and does no I/O: the engine passes the time, queries, and reports what
//! it did. Costs are charged when work begins. That the page cache makes some transfers cheaper is
//! not known here.

use crate::shared::WEIGHT_DEFAULT;

/// Cost of a chain besides its bytes. The CPU time of a small request would copy about so many
/// bytes; a disk's cost per request, in bytes, is of the same order.
pub(crate) const CHAIN_COST_BYTES: u64 = 16 << 10;
/// Cost of a chain that is looked at, or done, without anything that goes to the kernel: its descriptors are read, and
/// its pages leased.
pub(crate) const LOOK_COST_BYTES: u64 = 4 << 10;
/// Additional cost of each part of such a chain.
pub(crate) const PART_COST_BYTES: u64 = 512;
/// Additional cost of a page request.
pub(crate) const FAULT_COST_BYTES: u64 = 4 << 10;
/// Cost of obeying a message of a front end: to start a ring takes longer than a request.
pub(crate) const COMMAND_COST_BYTES: u64 = 4 * CHAIN_COST_BYTES;
/// Additional cost of a flush or of emptying a range.
pub(crate) const SLOW_COST_BYTES: u64 = 16 << 10;
/// Cost of the work that a tenant begins per turn if it is alone: 64 requests of 4 KiB.
pub(crate) const TURN_ALONE_COST_BYTES: u64 = 64 * (CHAIN_COST_BYTES + 4096);
/// Cost of the work that all tenants begin per turn. Less, because each tenant waits for a turn.
pub(crate) const TURN_SHARED_COST_BYTES: u64 = TURN_ALONE_COST_BYTES / 4;
/// Least credit per turn and unit of weight, however many tenants there are: a turn visits each of
/// them, which must not cost more than the work it begins.
const UNIT_MIN_BYTES: u64 = CHAIN_COST_BYTES / 100;
/// Most bytes of a step in company: about what the CPU copies in 20 microseconds.
pub(crate) const STEP_SHARED_BYTES: u64 = 128 << 10;
/// The same for a tenant that is alone: one step at a time of a large request keeps a fast disk busy.
pub(crate) const STEP_ALONE_BYTES: u64 = 4 << 20;
/// Bytes with the kernel, of all tenants together: 1 ms of a disk that moves 4 GB/s.
pub(crate) const WINDOW_SHARED_BYTES: u64 = 4 << 20;
/// The same for a tenant that is alone.
pub(crate) const WINDOW_ALONE_BYTES: u64 = 16 << 20;
/// Slow operations with the kernel of a tenant that is alone: half of
/// [`crate::ring::KERNEL_THREADS`].
pub(crate) const SLOW_ALONE_MAX: usize = crate::ring::KERNEL_THREADS as usize / 2;
/// The same of all tenants together in company (one each at least): the threads that do them wake
/// on the engine's CPU, too, and each takes it from all tenants for a moment.
pub(crate) const SLOW_SHARED_MAX: u64 = 4;
/// Requests that a tenant may always have in flight, whatever the others have.
const REQUESTS_MIN: usize = 4;
/// How long a tenant counts as present after it last began something.
pub(crate) const RECENT_NS: u64 = 20_000_000;
/// How often tenants that are no longer present are removed.
const SWEEP_NS: u64 = RECENT_NS / 8;
/// What a queue of a tenant may begin before the tenant's next queue: 8 requests of 4 KiB.
pub(crate) const QUEUE_COST_BYTES: u64 = 8 * (CHAIN_COST_BYTES + 4096);

const _: () = assert!(WINDOW_SHARED_BYTES >= STEP_SHARED_BYTES);
const _: () = assert!(WINDOW_ALONE_BYTES >= 2 * STEP_ALONE_BYTES);
const _: () = assert!(UNIT_MIN_BYTES > 0 && SLOW_ALONE_MAX > 0);

/// What may be spent. A negative value is a debt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Credit(i64);

impl Credit {
    /// Adds credit, up to `bytes` in total.
    pub fn refill(&mut self, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.0 = self.0.saturating_add(bytes).min(bytes);
    }

    /// Spends credit.
    pub fn spend(&mut self, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.0 = self.0.saturating_sub(bytes);
    }

    /// Drops the remaining credit; a debt stays.
    pub fn forfeit(&mut self) {
        self.0 = self.0.min(0);
    }

    /// True while credit is left.
    pub fn is_left(self) -> bool {
        self.0 > 0
    }

    /// True if this is a debt.
    pub fn is_debt(self) -> bool {
        self.0 < 0
    }
}

/// Whether a tenant may begin work now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Yes.
    Go,
    /// In a later turn: the tenant's credit is spent.
    NextTurn,
    /// Not until something of the tenant or of the engine completes: the tenant's in-flight bound
    /// is reached.
    Full,
}

/// A step that is about to go to the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Load {
    /// A transfer of so many bytes.
    Data(u64),
    /// An operation that blocks a kernel thread.
    Slow,
}

#[derive(Debug, Default)]
struct Tenant {
    weight: u64,
    credit: Credit,
    requests: usize,
    bytes: u64,
    slow: usize,
    /// When the tenant last began something.
    seen_ns: u64,
    present: bool,
}

/// All tenants of an engine, indexed by the slots of their devices.
#[derive(Debug)]
pub(crate) struct Fair {
    tenants: Vec<Option<Tenant>>,
    /// Slots of the present tenants.
    present: Vec<usize>,
    /// Sum of the weights of present tenants.
    weight_present: u64,
    requests: usize,
    requests_max: usize,
    now_ns: u64,
    swept_ns: u64,
}

impl Fair {
    /// No tenants yet. A tenant alone has at most `requests_max` in flight.
    pub fn new(requests_max: usize) -> Self {
        Self {
            tenants: Vec::new(),
            present: Vec::new(),
            weight_present: 0,
            requests: 0,
            requests_max,
            now_ns: 0,
            swept_ns: 0,
        }
    }

    /// Adds a tenant, which is not present yet.
    pub fn add(&mut self, slot: usize) {
        if self.tenants.len() <= slot {
            self.tenants.resize_with(slot + 1, || None);
        }
        debug_assert!(self.tenants[slot].is_none(), "two tenants in one slot");
        self.tenants[slot] = Some(Tenant {
            weight: u64::from(WEIGHT_DEFAULT),
            ..Tenant::default()
        });
    }

    /// Removes a tenant that has nothing in flight.
    pub fn remove(&mut self, slot: usize) {
        let gone = self.tenants.get_mut(slot).and_then(Option::take);
        if let Some(tenant) = gone.filter(|tenant| tenant.present) {
            self.weight_present -= tenant.weight;
            self.present.retain(|other| *other != slot);
        }
    }

    /// Begins a turn.
    pub fn begin_turn(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        if now_ns.saturating_sub(self.swept_ns) >= SWEEP_NS {
            self.sweep();
        }
    }

    fn sweep(&mut self) {
        self.swept_ns = self.now_ns;
        let (tenants, weight, now_ns) = (&mut self.tenants, &mut self.weight_present, self.now_ns);
        self.present.retain(|slot| {
            let Some(tenant) = tenants[*slot].as_mut() else {
                return false;
            };
            tenant.present =
                tenant.requests > 0 || now_ns.saturating_sub(tenant.seen_ns) < RECENT_NS;
            if !tenant.present {
                *weight -= tenant.weight;
            }
            tenant.present
        });
    }

    /// Begins the turn of this tenant and sets its weight.
    pub fn visit(&mut self, slot: usize, weight: u32) {
        let Some(tenant) = self.tenants.get_mut(slot).and_then(Option::as_mut) else {
            return;
        };
        let weight = u64::from(weight.max(1));
        if tenant.weight != weight {
            if tenant.present {
                self.weight_present = self.weight_present - tenant.weight + weight;
            }
            tenant.weight = weight;
        }
        let all = self.weight_present + if tenant.present { 0 } else { weight };
        if all == weight {
            // No tenant is there to whom this one could owe anything.
            tenant.credit = Credit::default();
            tenant.credit.refill(TURN_ALONE_COST_BYTES);
            return;
        }
        let unit = (TURN_SHARED_COST_BYTES / all).max(UNIT_MIN_BYTES);
        tenant.credit.refill(unit * weight);
    }

    /// Whether a tenant may take a chain now.
    pub fn may_take(&self, slot: usize) -> Verdict {
        let Some(tenant) = self.tenant(slot) else {
            return Verdict::Full;
        };
        let share = self.share(tenant, self.requests_max as u64);
        let share = usize::try_from(share).unwrap_or(usize::MAX);
        let has_its_share = tenant.requests >= share || self.requests >= 2 * self.requests_max;
        if tenant.requests >= REQUESTS_MIN && has_its_share {
            return Verdict::Full;
        }
        self.may_step(slot)
    }

    /// Whether a tenant may give a step of a transfer to the kernel now.
    pub fn may_step(&self, slot: usize) -> Verdict {
        let Some(tenant) = self.tenant(slot) else {
            return Verdict::Full;
        };
        let window = match self.is_alone(tenant) {
            true => WINDOW_ALONE_BYTES,
            false => self.share(tenant, WINDOW_SHARED_BYTES),
        };
        // Allows one step at least: a window is full once it is reached.
        if tenant.bytes >= window.max(1) {
            return Verdict::Full;
        }
        if tenant.credit.is_left() {
            Verdict::Go
        } else {
            Verdict::NextTurn
        }
    }

    /// Whether a tenant may give a slow operation to the kernel now.
    pub fn may_begin_slow(&self, slot: usize) -> Verdict {
        let Some(tenant) = self.tenant(slot) else {
            return Verdict::Full;
        };
        let most = match self.is_alone(tenant) {
            true => SLOW_ALONE_MAX,
            false => usize::try_from(self.share(tenant, SLOW_SHARED_MAX)).unwrap_or(1),
        };
        if tenant.slow >= most.max(1) {
            return Verdict::Full;
        }
        if tenant.credit.is_left() {
            Verdict::Go
        } else {
            Verdict::NextTurn
        }
    }

    /// True while a tenant has spent more than its credit.
    pub fn is_in_debt(&self, slot: usize) -> bool {
        self.tenant(slot)
            .is_some_and(|tenant| tenant.credit.is_debt())
    }

    /// Most bytes of a step that this tenant may begin now.
    pub fn step_bytes_max(&self, slot: usize) -> u64 {
        match self.tenant(slot) {
            Some(tenant) if self.is_alone(tenant) => STEP_ALONE_BYTES,
            _ => STEP_SHARED_BYTES,
        }
    }

    /// Charges a tenant for something it has begun; the tenant is present.
    pub fn charge(&mut self, slot: usize, cost_bytes: u64) {
        let now_ns = self.now_ns;
        let Some(tenant) = self.tenants.get_mut(slot).and_then(Option::as_mut) else {
            return;
        };
        tenant.credit.spend(cost_bytes);
        tenant.seen_ns = now_ns;
        if !std::mem::replace(&mut tenant.present, true) {
            self.weight_present += tenant.weight;
            self.present.push(slot);
        }
    }

    /// The tenant has nothing more to begin in this turn.
    pub fn rest(&mut self, slot: usize) {
        if let Some(tenant) = self.tenants.get_mut(slot).and_then(Option::as_mut) {
            tenant.credit.forfeit();
        }
    }

    /// Counts a request of a tenant as in flight.
    pub fn request_began(&mut self, slot: usize) {
        if let Some(tenant) = self.tenants.get_mut(slot).and_then(Option::as_mut) {
            tenant.requests += 1;
            self.requests += 1;
        }
    }

    /// Counts a request of a tenant as ended.
    pub fn request_ended(&mut self, slot: usize) {
        if let Some(tenant) = self.tenants.get_mut(slot).and_then(Option::as_mut) {
            debug_assert!(tenant.requests > 0, "a request ended twice");
            tenant.requests -= 1;
            self.requests -= 1;
        }
    }

    /// Charges a tenant for a step that goes to the kernel.
    pub fn step_began(&mut self, slot: usize, load: Load) {
        let cost = match load {
            Load::Data(bytes) => bytes,
            Load::Slow => SLOW_COST_BYTES,
        };
        self.charge(slot, cost);
        if let Some(tenant) = self.tenants.get_mut(slot).and_then(Option::as_mut) {
            match load {
                Load::Data(bytes) => tenant.bytes += bytes,
                Load::Slow => tenant.slow += 1,
            }
        }
    }

    /// The kernel has completed a step.
    pub fn step_ended(&mut self, slot: usize, load: Load) {
        if let Some(tenant) = self.tenants.get_mut(slot).and_then(Option::as_mut) {
            match load {
                Load::Data(bytes) => {
                    debug_assert!(tenant.bytes >= bytes, "a step ended twice");
                    tenant.bytes -= bytes;
                }
                Load::Slow => tenant.slow -= 1,
            }
        }
    }

    fn tenant(&self, slot: usize) -> Option<&Tenant> {
        self.tenants.get(slot).and_then(Option::as_ref)
    }

    fn weight_with(&self, tenant: &Tenant) -> u64 {
        self.weight_present + if tenant.present { 0 } else { tenant.weight }
    }

    fn is_alone(&self, tenant: &Tenant) -> bool {
        self.weight_with(tenant) == tenant.weight
    }

    fn share(&self, tenant: &Tenant, of: u64) -> u64 {
        of * tenant.weight / self.weight_with(tenant).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, VecDeque};

    const RING: usize = 256;
    const MS: u64 = 1_000_000;

    /// The same decisions, each made from the full state, without sums kept up to date.
    #[derive(Default)]
    struct Model {
        tenants: BTreeMap<usize, ModelTenant>,
        now_ns: u64,
        swept_ns: u64,
    }

    #[derive(Default, Clone)]
    struct ModelTenant {
        weight: i128,
        credit: i128,
        requests: Vec<()>,
        steps: Vec<Load>,
        charged_ns: Option<u64>,
    }

    impl Model {
        fn company(&self, slot: usize) -> i128 {
            let there = |(other, t): (&usize, &ModelTenant)| {
                let counts = t.charged_ns.is_some() || *other == slot;
                if counts { t.weight } else { 0 }
            };
            self.tenants.iter().map(there).sum()
        }

        fn begin_turn(&mut self, now_ns: u64) {
            self.now_ns = now_ns;
            if now_ns - self.swept_ns >= SWEEP_NS {
                self.swept_ns = now_ns;
                for tenant in self.tenants.values_mut() {
                    let gone = |seen: &u64| now_ns - seen >= RECENT_NS;
                    if tenant.requests.is_empty() && tenant.charged_ns.as_ref().is_some_and(gone) {
                        tenant.charged_ns = None;
                    }
                }
            }
        }

        fn visit(&mut self, slot: usize, weight: i128) {
            self.tenants.get_mut(&slot).unwrap().weight = weight;
            let all = self.company(slot);
            let tenant = self.tenants.get_mut(&slot).unwrap();
            if all == weight {
                tenant.credit = i128::from(TURN_ALONE_COST_BYTES);
            } else {
                let unit = (i128::from(TURN_SHARED_COST_BYTES) / all).max(UNIT_MIN_BYTES.into());
                tenant.credit = (tenant.credit + unit * weight).min(unit * weight);
            }
        }

        fn part(&self, slot: usize, of: u64) -> i128 {
            i128::from(of) * self.tenants[&slot].weight / self.company(slot)
        }

        /// Verdict for a tenant that has `has` in flight of at most `most`.
        fn verdict(&self, slot: usize, has: i128, most: i128) -> Verdict {
            match (has >= most, self.tenants[&slot].credit > 0) {
                (true, _) => Verdict::Full,
                (false, true) => Verdict::Go,
                (false, false) => Verdict::NextTurn,
            }
        }

        fn may_step(&self, slot: usize) -> Verdict {
            let tenant = &self.tenants[&slot];
            let window = match self.company(slot) == tenant.weight {
                true => i128::from(WINDOW_ALONE_BYTES),
                false => self.part(slot, WINDOW_SHARED_BYTES).max(1),
            };
            let bytes = tenant.steps.iter().map(|load| match load {
                Load::Data(bytes) => i128::from(*bytes),
                Load::Slow => 0,
            });
            self.verdict(slot, bytes.sum(), window)
        }

        fn may_take(&self, slot: usize) -> Verdict {
            let count = |t: &ModelTenant| t.requests.len() as i128;
            let most = self.part(slot, RING as u64).max(REQUESTS_MIN as i128);
            let all: i128 = self.tenants.values().map(count).sum();
            match count(&self.tenants[&slot]) >= most || all >= 2 * RING as i128 {
                true => Verdict::Full,
                false => self.may_step(slot),
            }
        }

        fn may_begin_slow(&self, slot: usize) -> Verdict {
            let slow = |load: &&Load| **load == Load::Slow;
            let slow = self.tenants[&slot].steps.iter().filter(slow).count();
            let most = match self.company(slot) == self.tenants[&slot].weight {
                true => SLOW_ALONE_MAX as i128,
                false => self.part(slot, SLOW_SHARED_MAX).max(1),
            };
            self.verdict(slot, slow as i128, most)
        }

        fn charge(&mut self, slot: usize, cost: u64) {
            let now_ns = self.now_ns;
            let tenant = self.tenants.get_mut(&slot).unwrap();
            tenant.credit -= i128::from(cost);
            tenant.charged_ns = Some(now_ns);
        }
    }

    #[derive(Debug, Clone)]
    enum Act {
        Add(usize),
        Remove(usize),
        Turn(u64),
        Visit(usize, u32),
        Charge(usize, u64),
        Rest(usize),
        Begin(usize),
        End(usize),
        Step(usize, Load),
        StepDone(usize),
    }

    fn acts() -> impl Strategy<Value = Act> {
        let slot = 0_usize..4;
        let load = prop_oneof![(1_u64..5 << 20).prop_map(Load::Data), Just(Load::Slow)];
        prop_oneof![
            1 => slot.clone().prop_map(Act::Add),
            1 => slot.clone().prop_map(Act::Remove),
            3 => (0_u64..30 * MS).prop_map(Act::Turn),
            6 => (slot.clone(), 1_u32..=1000).prop_map(|(s, w)| Act::Visit(s, w)),
            4 => (slot.clone(), 0_u64..1 << 20).prop_map(|(s, c)| Act::Charge(s, c)),
            1 => slot.clone().prop_map(Act::Rest),
            8 => slot.clone().prop_map(Act::Begin),
            4 => slot.clone().prop_map(Act::End),
            8 => (slot.clone(), load).prop_map(|(s, l)| Act::Step(s, l)),
            6 => slot.prop_map(Act::StepDone),
        ]
    }

    fn apply(fair: &mut Fair, model: &mut Model, act: Act) {
        let known = |model: &Model, slot| model.tenants.contains_key(&slot);
        match act {
            Act::Add(slot) if !known(model, slot) => {
                fair.add(slot);
                let weight = i128::from(WEIGHT_DEFAULT);
                let tenant = ModelTenant {
                    weight,
                    ..ModelTenant::default()
                };
                model.tenants.insert(slot, tenant);
            }
            Act::Remove(slot)
                if model
                    .tenants
                    .get(&slot)
                    .is_some_and(|t| t.requests.is_empty() && t.steps.is_empty()) =>
            {
                fair.remove(slot);
                model.tenants.remove(&slot);
            }
            Act::Turn(ns) => {
                let now_ns = model.now_ns + ns;
                fair.begin_turn(now_ns);
                model.begin_turn(now_ns);
            }
            Act::Visit(slot, weight) if known(model, slot) => {
                fair.visit(slot, weight);
                model.visit(slot, weight.into());
            }
            Act::Charge(slot, cost) if known(model, slot) => {
                fair.charge(slot, cost);
                model.charge(slot, cost);
            }
            Act::Rest(slot) if known(model, slot) => {
                fair.rest(slot);
                let tenant = model.tenants.get_mut(&slot).unwrap();
                tenant.credit = tenant.credit.min(0);
            }
            Act::Begin(slot) if known(model, slot) => {
                fair.request_began(slot);
                model.tenants.get_mut(&slot).unwrap().requests.push(());
            }
            Act::End(slot) => {
                let tenant = model.tenants.get_mut(&slot);
                if tenant.is_some_and(|tenant| tenant.requests.pop().is_some()) {
                    fair.request_ended(slot);
                }
            }
            Act::Step(slot, load) if known(model, slot) => {
                fair.step_began(slot, load);
                model.charge(
                    slot,
                    match load {
                        Load::Data(bytes) => bytes,
                        Load::Slow => SLOW_COST_BYTES,
                    },
                );
                model.tenants.get_mut(&slot).unwrap().steps.push(load);
            }
            Act::StepDone(slot) if known(model, slot) => {
                if let Some(load) = model.tenants.get_mut(&slot).unwrap().steps.pop() {
                    fair.step_ended(slot, load);
                }
            }
            _ => {}
        }
    }

    #[test]
    fn messages_without_end_are_paid_out_of_their_tenants_share_and_wait_until_it_has_paid() {
        const TURNS: u64 = 1000;
        let mut fair = Fair::new(RING);
        fair.add(0);
        fair.add(1);
        let (mut obeyed, mut spent) = (0_u64, 0);
        for turn in 0..TURNS {
            fair.begin_turn(turn * MS / 100);
            // A front end whose next message is ready as soon as one is obeyed.
            fair.visit(0, WEIGHT_DEFAULT);
            while !fair.is_in_debt(0) {
                fair.charge(0, COMMAND_COST_BYTES);
                obeyed += 1;
            }
            fair.visit(1, WEIGHT_DEFAULT);
            while fair.may_take(1) == Verdict::Go {
                fair.charge(1, CHAIN_COST_BYTES);
                spent += CHAIN_COST_BYTES;
            }
        }
        // In its first turn the tenant was alone.
        let slack = TURN_ALONE_COST_BYTES + TURN_SHARED_COST_BYTES + COMMAND_COST_BYTES;
        let cost = obeyed * COMMAND_COST_BYTES;
        assert!(cost.abs_diff(spent) <= slack, "{cost} {spent}");
    }

    proptest! {
        #[test]
        fn decides_as_the_naive_model_whatever_happens(
            acts in proptest::collection::vec(acts(), 1..300)
        ) {
            let (mut fair, mut model) = (Fair::new(RING), Model::default());
            for act in acts {
                apply(&mut fair, &mut model, act);
                for (slot, tenant) in &model.tenants {
                    prop_assert_eq!(fair.may_take(*slot), model.may_take(*slot));
                    prop_assert_eq!(fair.may_step(*slot), model.may_step(*slot));
                    prop_assert_eq!(fair.may_begin_slow(*slot), model.may_begin_slow(*slot));
                    let alone = model.company(*slot) == tenant.weight;
                    let step = if alone { STEP_ALONE_BYTES } else { STEP_SHARED_BYTES };
                    prop_assert_eq!(fair.step_bytes_max(*slot), step);
                }
            }
        }
    }

    /// An engine with a disk that completes every step `latency` turns after it began.
    struct Simulated {
        fair: Fair,
        now_ns: u64,
        turn: u64,
        latency: u64,
        kernel: VecDeque<(u64, usize, Load)>,
        spent: Vec<u64>,
    }

    impl Simulated {
        fn new(tenants: usize, latency: u64) -> Self {
            let mut fair = Fair::new(RING);
            (0..tenants).for_each(|slot| fair.add(slot));
            Self {
                fair,
                now_ns: 0,
                turn: 0,
                latency,
                kernel: VecDeque::new(),
                spent: vec![0; tenants],
            }
        }

        /// One turn: `work` returns the bytes of a tenant's next chain, if any.
        fn turn(&mut self, weights: &[u32], mut work: impl FnMut(usize) -> Option<u64>) {
            self.turn += 1;
            self.now_ns += 50_000;
            while let Some((due, slot, load)) = self.kernel.front().copied()
                && due <= self.turn
            {
                self.kernel.pop_front();
                self.fair.step_ended(slot, load);
                self.fair.request_ended(slot);
            }
            self.fair.begin_turn(self.now_ns);
            for (slot, weight) in weights.iter().enumerate() {
                self.fair.visit(slot, *weight);
                while self.fair.may_take(slot) == Verdict::Go {
                    let Some(bytes) = work(slot) else {
                        self.fair.rest(slot);
                        break;
                    };
                    let bytes = bytes.min(self.fair.step_bytes_max(slot));
                    self.fair.charge(slot, CHAIN_COST_BYTES);
                    self.fair.request_began(slot);
                    self.fair.step_began(slot, Load::Data(bytes));
                    self.spent[slot] += CHAIN_COST_BYTES + bytes;
                    self.kernel
                        .push_back((self.turn + self.latency, slot, Load::Data(bytes)));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn backlogged_tenants_are_charged_by_weight(
            weights in proptest::collection::vec(1_u32..=1000, 2..6),
            kib in proptest::collection::vec(1_u64..2048, 6),
        ) {
            // The disk is quick, so that only credit holds tenants back.
            let mut engine = Simulated::new(weights.len(), 1);
            for _ in 0..5000 {
                engine.turn(&weights, |slot| Some(kib[slot] << 10));
            }
            let all: u64 = weights.iter().map(|w| u64::from(*w)).sum();
            let unit = (TURN_SHARED_COST_BYTES / all).max(UNIT_MIN_BYTES);
            for (one, w) in engine.spent.iter().zip(&weights) {
                for (other, v) in engine.spent.iter().zip(&weights) {
                    let (w, v) = (u64::from(*w), u64::from(*v));
                    // One turn's credit and one piece of work each; and the first turns, in which
                    // not all tenants are present yet.
                    let slack = unit * w * v
                        + (CHAIN_COST_BYTES + STEP_SHARED_BYTES) * w.max(v)
                        + 2 * (TURN_ALONE_COST_BYTES + STEP_ALONE_BYTES) * w.max(v);
                    prop_assert!((one * v).abs_diff(other * w) <= slack, "{:?}", engine.spent);
                }
            }
        }

        #[test]
        fn tenant_that_arrives_begins_in_its_first_turn_whatever_the_others_do(
            crowd in 1_usize..12,
            bytes in 1_u64..64 << 20,
            latency in 1_u64..200,
            weight in 1_u32..=1000,
        ) {
            let mut weights = vec![1000; crowd];
            weights.push(weight);
            let mut engine = Simulated::new(crowd + 1, latency);
            for _ in 0..400 {
                engine.turn(&weights, |slot| (slot < crowd).then_some(bytes));
            }
            prop_assert_eq!(engine.spent[crowd], 0);
            let before: u64 = engine.spent.iter().sum();
            let mut left = 1;
            engine.turn(&weights, |slot| match slot == crowd {
                true if left == 0 => None,
                true => { left -= 1; Some(4096) }
                false => Some(bytes),
            });
            prop_assert_eq!(engine.spent[crowd], CHAIN_COST_BYTES + 4096);
            // What the others began before it fits into one turn.
            let others = engine.spent.iter().sum::<u64>() - before - engine.spent[crowd];
            let work = CHAIN_COST_BYTES + STEP_ALONE_BYTES;
            prop_assert!(others <= TURN_ALONE_COST_BYTES + work * crowd as u64);
        }
    }

    #[test]
    fn tenant_alone_is_never_held_back_but_by_what_it_has_in_flight() {
        let mut engine = Simulated::new(2, 3);
        for _ in 0..1000 {
            let before = engine.spent[0];
            engine.turn(&[1, 1000], |slot| (slot == 0).then_some(4096));
            let begun = (engine.spent[0] - before) / (CHAIN_COST_BYTES + 4096);
            // All that a turn allows, or all that the ring does.
            assert!(begun == 64 || engine.fair.requests == RING, "{begun}");
            assert_eq!(engine.fair.step_bytes_max(0), STEP_ALONE_BYTES);
        }
    }

    #[test]
    fn idle_tenant_takes_nothing_and_a_steady_one_is_always_there() {
        let mut engine = Simulated::new(2, 1);
        for _ in 0..2000 {
            engine.turn(&[100, 100], |slot| (slot == 0).then_some(64 << 20));
        }
        assert_eq!(engine.fair.step_bytes_max(0), STEP_ALONE_BYTES);
        // One request every 5 ms keeps its tenant present.
        let mut asked = None;
        for turn in 0..2000 {
            engine.turn(&[100, 100], |slot| match slot {
                0 => Some(64 << 20),
                _ if turn % 100 == 0 && asked != Some(turn) => {
                    asked = Some(turn);
                    Some(4096)
                }
                _ => None,
            });
            assert_eq!(engine.fair.step_bytes_max(0), STEP_SHARED_BYTES, "{turn}");
        }
    }

    #[test]
    fn what_is_in_flight_is_bounded_by_weight() {
        let mut engine = Simulated::new(2, 100_000);
        for _ in 0..2000 {
            engine.turn(&[300, 100], |_| Some(64 << 20));
        }
        let bytes = |slot: usize| engine.fair.tenants[slot].as_ref().unwrap().bytes;
        // The first tenant was alone in its first turn.
        assert!(bytes(0) <= WINDOW_SHARED_BYTES * 3 / 4 + STEP_ALONE_BYTES);
        assert!(bytes(1) <= WINDOW_SHARED_BYTES / 4 + STEP_SHARED_BYTES);
        let mut engine = Simulated::new(2, 100_000);
        for _ in 0..2000 {
            engine.turn(&[300, 100], |_| Some(512));
        }
        let requests = |slot: usize| engine.fair.tenants[slot].as_ref().unwrap().requests;
        assert!((RING * 3 / 4..=RING).contains(&requests(0)));
        assert_eq!(requests(1), RING / 4);
    }
}
