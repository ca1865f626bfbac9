// SPDX-License-Identifier: Apache-2.0
//! [`Ledger`]: who may use how much CPU time of the cycle under way.
//!
//! Every class has an account. A share is accounted in three parts that sum up to it:
//!
//! ```text
//!   share of the cycle = own (left) + drawn by runs + lapsed
//!                                                       │
//!                                     passed: what lower classes may draw
//! ```
//! A share accrues evenly over the cycle. What accrues to a class that has too few tasks to use it
//! *lapses*, and lower classes may draw it. What is still to accrue does not lapse, so a class that
//! wakes up in the middle of a cycle has its share of the rest of it. (If a class could lend all of
//! its share at once, reclaim would find nothing left whenever a scan came first.)
//!
//! Faults have no tasks that could be counted. What lapses of their share is what has accrued, less
//! the time that they have used.
//!
//! An overrun makes *own* negative. The next cycles pay it: the whole of a share if necessary, so that
//! a class whose steps are longer than its slices still gets no more than its share in the long run.
//! Debt is limited to [`DEBT_CYCLES_MAX`] cycles, so that no accident stops a class for long.

use super::{
    class::{FAULT_CLASSES, FaultClass, LEVELS, WHOLE_PERMILLE, WORK_CLASSES, WorkClass},
    settings::{SLICE_NS_MIN, Terms},
};

/// Most debt of a class, in cycles of its share (or of its longest run, if that is more). The rest is
/// forgiven, and counted.
pub const DEBT_CYCLES_MAX: u64 = 20;

/// From where a run may draw its time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Source {
    /// From the class's share only.
    Own,
    /// Also from what was passed down to it.
    OwnAndPassed,
}

/// CPU time that a run has drawn and not given back.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Draw {
    own_ns: u64,
    passed_ns: [u64; LEVELS],
}

impl Draw {
    /// The part passed down by higher classes.
    pub(super) fn passed_ns(&self) -> u64 {
        self.passed_ns.iter().sum()
    }

    pub(super) fn source(&self) -> Source {
        match self.passed_ns() {
            0 => Source::Own,
            _ => Source::OwnAndPassed,
        }
    }

    /// What is left of the class's own part after a use of `used_ns`: that part is used first.
    pub(super) fn own_left_ns(&self, used_ns: u64) -> u64 {
        self.own_ns.saturating_sub(used_ns)
    }
}

#[derive(Clone, Copy, Default, Debug)]
struct Account {
    share_permille: u64,
    /// Left of the share; negative after an overrun. Of classes of work only.
    own_ns: i64,
    /// Lapsed, and not drawn.
    passed_ns: u64,
    /// Used and lapsed in this cycle. Of classes of faults only.
    used_ns: u64,
    lapsed_ns: u64,
    /// Lapsed parts of a nanosecond, in thousandths.
    lapsed_rest: u64,
}

/// See the module. Times are in nanoseconds since any fixed moment.
#[derive(Debug)]
pub(super) struct Ledger {
    start_ns: u64,
    cycle_ns: u64,
    cpus: u64,
    /// The time until which shares have lapsed.
    updated_ns: u64,
    accounts: [Account; LEVELS],
}

impl Ledger {
    pub(super) fn new(terms: &Terms, now_ns: u64) -> Self {
        let mut ledger = Self {
            start_ns: now_ns,
            cycle_ns: terms.cycle_ns,
            cpus: terms.cpu_count(),
            updated_ns: now_ns,
            accounts: [Account::default(); LEVELS],
        };
        ledger.open(terms, [0; WORK_CLASSES]);
        ledger
    }

    pub(super) fn end_ns(&self) -> u64 {
        self.start_ns + self.cycle_ns
    }

    /// Time has passed until `now_ns`, at most the end of the cycle; meanwhile each class had `tasks`
    /// that could use CPU time.
    pub(super) fn lapse(&mut self, now_ns: u64, tasks: [u64; WORK_CLASSES]) {
        assert!(self.updated_ns <= now_ns && now_ns <= self.end_ns());
        let (elapsed, step) = (now_ns - self.start_ns, now_ns - self.updated_ns);
        let (faults, work) = self.accounts.split_at_mut(FAULT_CLASSES);
        for account in faults {
            let accrued = elapsed * self.cpus * account.share_permille / WHOLE_PERMILLE;
            let lapsed = accrued.saturating_sub(account.used_ns.saturating_add(account.lapsed_ns));
            account.lapsed_ns += lapsed;
            account.passed_ns += lapsed;
        }
        for (account, tasks) in work.iter_mut().zip(tasks) {
            let share = self.cpus * account.share_permille;
            account.lapsed_rest += step * share.saturating_sub(tasks * WHOLE_PERMILLE);
            let left = account.own_ns.max(0).cast_unsigned();
            let lapsed = (account.lapsed_rest / WHOLE_PERMILLE).min(left);
            account.lapsed_rest %= WHOLE_PERMILLE;
            account.own_ns -= lapsed.cast_signed();
            account.passed_ns += lapsed;
        }
        self.updated_ns = now_ns;
    }

    /// Begins the next cycle, on `terms`; the present one has lapsed to its end. `tasks` is as for
    /// [`Self::lapse`]. Returns how much debt of each class was forgiven.
    pub(super) fn next_cycle(
        &mut self,
        terms: &Terms,
        tasks: [u64; WORK_CLASSES],
    ) -> [u64; WORK_CLASSES] {
        self.start_ns = self.end_ns();
        self.cycle_ns = terms.cycle_ns;
        self.cpus = terms.cpu_count();
        self.updated_ns = self.start_ns;
        self.open(terms, tasks)
    }

    /// Leaves out the cycles before the one that `now_ns` is in; returns how many. The present one has only
    /// begun, and all of them are the same.
    pub(super) fn skip_cycles(&mut self, now_ns: u64) -> u64 {
        let cycles = (now_ns - self.start_ns) / self.cycle_ns;
        self.start_ns += cycles * self.cycle_ns;
        self.updated_ns = self.start_ns;
        cycles
    }

    /// Gives each class its share of a new cycle, less its debt. Returns how much debt was forgiven.
    fn open(&mut self, terms: &Terms, tasks: [u64; WORK_CLASSES]) -> [u64; WORK_CLASSES] {
        for (account, share_permille) in self.accounts.iter_mut().zip(terms.shares_permille) {
            *account = Account {
                share_permille,
                own_ns: account.own_ns,
                ..Account::default()
            };
        }
        WorkClass::ALL.map(|class| {
            let own_ns = &mut self.accounts[class.level()].own_ns;
            let budget = terms.budget_ns(class.level());
            let debt_max = DEBT_CYCLES_MAX * budget.max(terms.longest_ns);
            let owed = (*own_ns).min(0).unsigned_abs();
            let debt = owed.min(debt_max);
            // A share that is less than a slice in a cycle is saved up to one.
            let saved = match tasks[class.index()] {
                0 => 0,
                _ => (*own_ns).clamp(0, SLICE_NS_MIN.cast_signed()),
            };
            *own_ns = budget.cast_signed() + saved - debt.cast_signed();
            owed - debt
        })
    }

    /// Faults have used CPU time.
    pub(super) fn fault_used(&mut self, class: FaultClass, used_ns: u64) {
        let account = &mut self.accounts[class.level()];
        account.used_ns = account.used_ns.saturating_add(used_ns);
    }

    /// What `class` has left of its share, its debts deducted.
    pub(super) fn own_ns(&self, class: WorkClass) -> i64 {
        self.accounts[class.level()].own_ns
    }

    /// What higher classes have passed down and nobody has drawn, as far as `class` may draw it.
    pub(super) fn passed_ns(&self, class: WorkClass) -> u64 {
        let higher = &self.accounts[..class.level()];
        higher.iter().map(|account| account.passed_ns).sum()
    }

    /// What `class` may draw.
    pub(super) fn available_ns(&self, class: WorkClass, source: Source) -> u64 {
        let passed = match source {
            Source::Own => 0,
            Source::OwnAndPassed => self.passed_ns(class),
        };
        let sum = self.own_ns(class).saturating_add_unsigned(passed);
        sum.max(0).cast_unsigned()
    }

    /// Draws `amount_ns` for a run of `class`, which must be available: of its own share first, so that no more is
    /// guaranteed to it later than it still lacks; then of what was passed down, and of that first the part that
    /// the fewest others may draw.
    pub(super) fn draw(&mut self, class: WorkClass, source: Source, amount_ns: u64) -> Draw {
        assert!(amount_ns <= self.available_ns(class, source));
        let own_ns = &mut self.accounts[class.level()].own_ns;
        let mut draw = Draw {
            own_ns: amount_ns.min((*own_ns).max(0).cast_unsigned()),
            ..Draw::default()
        };
        *own_ns -= draw.own_ns.cast_signed();
        let mut left = amount_ns - draw.own_ns;
        for level in (0..class.level()).rev() {
            let part = left.min(self.accounts[level].passed_ns);
            self.accounts[level].passed_ns -= part;
            draw.passed_ns[level] = part;
            left -= part;
        }
        draw
    }

    /// A run of `class` ended in the cycle in which it drew, and has not used `unused_ns` of `draw`.
    pub(super) fn give_back(&mut self, class: WorkClass, draw: &Draw, unused_ns: u64) {
        let mut left = unused_ns;
        for (account, drawn) in self.accounts.iter_mut().zip(draw.passed_ns) {
            let part = left.min(drawn);
            account.passed_ns += part;
            left -= part;
        }
        self.accounts[class.level()].own_ns += left.min(draw.own_ns).cast_signed();
    }

    /// A run of `class` has used `overrun_ns` more than it was granted.
    pub(super) fn overrun(&mut self, class: WorkClass, overrun_ns: u64) {
        let own = &mut self.accounts[class.level()].own_ns;
        *own = own.saturating_sub_unsigned(overrun_ns);
    }

    /// The earliest time at which `class`, which may not draw `amount_ns` yet, may do so, if no other draws and
    /// the demand stays as it is; `None` if not in this cycle, or if it may already.
    pub(super) fn when_ns(
        &self,
        class: WorkClass,
        amount_ns: u64,
        tasks: [u64; WORK_CLASSES],
    ) -> Option<u64> {
        let available = self
            .own_ns(class)
            .saturating_add_unsigned(self.passed_ns(class));
        let lacks = amount_ns.cast_signed().saturating_sub(available).max(0);
        let rate: u64 = (0..class.level())
            .map(|level| {
                let share = self.cpus * self.accounts[level].share_permille;
                match level.checked_sub(FAULT_CLASSES) {
                    None => share,
                    Some(_) if self.accounts[level].own_ns <= 0 => 0,
                    Some(work) => share.saturating_sub(tasks[work] * WHOLE_PERMILLE),
                }
            })
            .sum();
        let lacks = lacks.cast_unsigned().checked_mul(WHOLE_PERMILLE)?;
        let wait = lacks.checked_add(rate)?.checked_div(rate)?;
        let when = self.updated_ns.checked_add(wait)?;
        (lacks > 0 && when < self.end_ns()).then_some(when)
    }
}
