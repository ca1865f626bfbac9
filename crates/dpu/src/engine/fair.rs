// SPDX-License-Identifier: Apache-2.0
//! Who may begin work on an engine, and how much: fair shares for tenants.
//!
//! # Terms
//! A *tenant* is a device; all its queues on the engine share what it gets. *Work* is a chain that
//! is taken from a ring, or a *step* of one: a transfer goes to the kernel in steps of bounded
//! size, and waits for its next turn between two of them. Work has a *cost* in bytes: what it
//! moves, and [`CHAIN_COST_BYTES`] for each chain, because a request that moves nothing takes CPU
//! time, too. A *turn* is one pass of the engine over all tenants.
//!
//! # Idea
//! Deficit round robin (Shreedhar and Varghese, SIGCOMM 1995): in each turn a tenant gets credit in
//! proportion to its weight, and begins work while it has credit. The cost of a chain is not known
//! before it has been taken apart, so a tenant may overdraw its credit by the last piece of work,
//! and pays in the next turns (the surplus variant: Adiseshu, Parulkar and Varghese, SIGCOMM 1996).
//! A tenant with nothing to do loses its credit: nobody saves up for a burst.
//!
//! ```text
//!   turn    A (weight 100, 128 KiB steps)          B (weight 100, 4 KiB reads)
//!     1     credit 320 K: 3 steps, 432 K spent     320 K: 1 read waits, 20 K; the rest is forfeited
//!     2     -112 + 320 = 208 K: 2 steps            320 K: 1 read, ...
//!     3     -80 + 320 = 240 K: 2 steps             320 K: 16 reads wait: all of them
//! ```
//!
//! Credit bounds how much is *begun* in a turn. What was begun and is not done occupies the disk,
//! places in the ring and kernel threads; whoever comes later waits behind it. So there are bounds
//! on what a tenant has with the kernel, too:
//!
//! | | alone | in company, of all tenants together |
//! |---|---|---|
//! | bytes in flight | [`WINDOW_ALONE_BYTES`] | [`WINDOW_SHARED_BYTES`], by weight |
//! | requests in flight | the ring's entries | the same, by weight |
//! | slow operations in flight | [`SLOW_MAX`] | the same, by weight |
//! | bytes of a step | [`STEP_ALONE_BYTES`] | [`STEP_SHARED_BYTES`] |
//!
//! *Slow* operations (flush, `fallocate`) wait on kernel threads, which all tenants of the engine
//! share.
//!
//! # Company
//! A tenant is *present* while it has something in flight, and for [`RECENT_NS`] after it last
//! began something: one that sends a request every few milliseconds is present all the time.
//! Shares are among tenants that are present, so an idle tenant takes nothing from the others.
//!
//! # Bounds
//! While every tenant has work, the costs that two tenants were charged, each divided by its
//! weight, differ by no more than one turn's credit and one piece of work, as in the papers. A
//! tenant that arrives waits for at most the turn that is under way, of
//! [`TURN_SHARED_COST_BYTES`] and one step a tenant (once with the step and window of one that was
//! alone until then), before its first work begins. It finds a place: a tenant never has more
//! requests than the ring has entries, and all together have twice as many.
//!
//! # What this is not
//! No clock and no I/O: the engine says what time it is, asks, and tells what it did. Costs are
//! charged when work begins; that the page cache makes one transfer cheaper than another is not
//! known here.

/// What a chain costs besides its bytes. The CPU time of a small request copies about so many
/// bytes; a disk's price of a request in bytes is of the same order.
pub(crate) const CHAIN_COST_BYTES: u64 = 16 << 10;
/// What a page request costs besides.
pub(crate) const FAULT_COST_BYTES: u64 = 4 << 10;
/// What a flush or the emptying of a range costs besides.
pub(crate) const SLOW_COST_BYTES: u64 = 64 << 10;
/// Cost of the work that a tenant begins in a turn if nobody else is there: 64 requests of 4 KiB.
pub(crate) const TURN_ALONE_COST_BYTES: u64 = 64 * (CHAIN_COST_BYTES + 4096);
/// Cost of the work that all tenants begin in a turn: half of it, for a turn is what each waits for.
pub(crate) const TURN_SHARED_COST_BYTES: u64 = TURN_ALONE_COST_BYTES / 2;
/// Least credit in a turn for each unit of weight, however many tenants there are: a turn looks at
/// each of them, which must not cost more than what it begins.
const UNIT_MIN_BYTES: u64 = CHAIN_COST_BYTES / 100;
/// Most bytes of one step in company: about what the CPU copies in 20 microseconds.
pub(crate) const STEP_SHARED_BYTES: u64 = 128 << 10;
/// The same for a tenant that is alone: one step at a time of a large request keeps a fast disk busy.
pub(crate) const STEP_ALONE_BYTES: u64 = 4 << 20;
/// Bytes with the kernel, of all tenants together: 1 ms of a disk that moves 4 GB/s.
pub(crate) const WINDOW_SHARED_BYTES: u64 = 4 << 20;
/// The same for a tenant that is alone.
pub(crate) const WINDOW_ALONE_BYTES: u64 = 16 << 20;
/// Slow operations with the kernel: half of [`crate::ring::KERNEL_THREADS`].
pub(crate) const SLOW_MAX: usize = crate::ring::KERNEL_THREADS as usize / 2;
/// A tenant has at least so many requests in flight before it is held back.
const REQUESTS_MIN: usize = 4;
/// How long a tenant counts as present after it last began something.
pub(crate) const RECENT_NS: u64 = 20_000_000;
/// How often it is looked who is gone.
const SWEEP_NS: u64 = RECENT_NS / 8;
/// What one queue of a tenant may begin before the next one has its turn: 8 requests of 4 KiB.
pub(crate) const QUEUE_COST_BYTES: u64 = 8 * (CHAIN_COST_BYTES + 4096);
/// Weights that an operator may give.
pub const WEIGHTS: std::ops::RangeInclusive<u32> = 1..=1000;
/// Weight of a device that was given none.
pub const WEIGHT_DEFAULT: u32 = 100;

const _: () = assert!(WINDOW_SHARED_BYTES >= STEP_SHARED_BYTES);
const _: () = assert!(WINDOW_ALONE_BYTES >= 2 * STEP_ALONE_BYTES);
const _: () = assert!(UNIT_MIN_BYTES > 0 && SLOW_MAX > 0);

/// What may be spent. Below zero it is a debt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Credit(i64);

impl Credit {
    /// More of it, up to `bytes` in all.
    pub fn refill(&mut self, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.0 = self.0.saturating_add(bytes).min(bytes);
    }

    /// Takes from it.
    pub fn spend(&mut self, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.0 = self.0.saturating_sub(bytes);
    }

    /// Gives up what is left; a debt stays.
    pub fn forfeit(&mut self) {
        self.0 = self.0.min(0);
    }

    /// True while work may be begun.
    pub fn is_left(self) -> bool {
        self.0 > 0
    }
}

/// Whether a tenant may begin work now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It may.
    Go,
    /// In a later turn: its credit is spent.
    NextTurn,
    /// Once something of its own, or of the engine's, is done: it has all that it may have in flight.
    Full,
}

/// A step that is about to go to the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Load {
    /// A transfer of so many bytes.
    Data(u64),
    /// An operation that waits on a thread of the kernel.
    Slow,
}

#[derive(Debug, Default)]
struct Tenant {
    weight: u64,
    credit: Credit,
    requests: usize,
    bytes: u64,
    slow: usize,
    /// When it last began something.
    seen_ns: u64,
    present: bool,
}

/// All tenants of an engine, by the slots of their devices.
#[derive(Debug)]
pub(crate) struct Fair {
    tenants: Vec<Option<Tenant>>,
    /// Slots of those that are present.
    present: Vec<usize>,
    /// The sum of their weights.
    weight_present: u64,
    requests: usize,
    requests_max: usize,
    now_ns: u64,
    swept_ns: u64,
}

impl Fair {
    /// Nobody yet; a tenant alone has at most `requests_max` in flight.
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

    /// A tenant has come, which is not present yet.
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

    /// A tenant has gone, with nothing in flight.
    pub fn remove(&mut self, slot: usize) {
        let gone = self.tenants.get_mut(slot).and_then(Option::take);
        if let Some(tenant) = gone.filter(|tenant| tenant.present) {
            self.weight_present -= tenant.weight;
            self.present.retain(|other| *other != slot);
        }
    }

    /// A turn begins.
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

    /// It is this tenant's turn; it has `weight` from now on.
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
            // Nobody is there to whom it could owe anything.
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
        if tenant.requests >= share.max(REQUESTS_MIN) || self.requests >= 2 * self.requests_max {
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
        // One step at least: a window is full once it is reached.
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
        let share = usize::try_from(self.share(tenant, SLOW_MAX as u64)).unwrap_or(usize::MAX);
        if tenant.slow >= share.max(1) {
            return Verdict::Full;
        }
        if tenant.credit.is_left() {
            Verdict::Go
        } else {
            Verdict::NextTurn
        }
    }

    /// Most bytes of a step that this tenant begins now.
    pub fn step_bytes_max(&self, slot: usize) -> u64 {
        match self.tenant(slot) {
            Some(tenant) if self.is_alone(tenant) => STEP_ALONE_BYTES,
            _ => STEP_SHARED_BYTES,
        }
    }

    /// A tenant has begun something of that cost, and is present.
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

    /// A tenant has nothing more to begin in this turn.
    pub fn rest(&mut self, slot: usize) {
        if let Some(tenant) = self.tenants.get_mut(slot).and_then(Option::as_mut) {
            tenant.credit.forfeit();
        }
    }

    /// A request of a tenant is in flight from now on.
    pub fn request_began(&mut self, slot: usize) {
        if let Some(tenant) = self.tenants.get_mut(slot).and_then(Option::as_mut) {
            tenant.requests += 1;
            self.requests += 1;
        }
    }

    /// It is in flight no more.
    pub fn request_ended(&mut self, slot: usize) {
        if let Some(tenant) = self.tenants.get_mut(slot).and_then(Option::as_mut) {
            debug_assert!(tenant.requests > 0, "a request ended twice");
            tenant.requests -= 1;
            self.requests -= 1;
        }
    }

    /// A step goes to the kernel: charges it.
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

    /// The kernel has done a step.
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
