// SPDX-License-Identifier: Apache-2.0
//! Policy `adp`: the adaptive DMA protector (VPRI 6.2, figure 14).
//!
//! A section that a device touched a moment ago needs no protection: the memory subsystem saw the
//! touch too, and keeps it. A section not touched for long is about to be evicted; exactly those
//! are protected.
//!
//! ```text
//!      touch                                                  one order, by last touch
//!        │      newest ◄───────────────────────────────────────────────────────► oldest
//!        ▼      ┌──────────────── recent ─────────────┐┌────────── resting ──────────┐
//!     at front  │ active  active  LEAVING  active …   ││ RESTING  RESTING  RESTING … │─► dropped
//!               └─────────────────────────────────────┘└─────────────────────────────┘
//!                                          promotion: the border moves to the left
//!
//!   active block   := active                at most `active-max` of the VM's sections (30 %)
//!   inactive block := RESTING + LEAVING     at most `protected-max` (5 %); these are protected
//!
//!   touch of an unknown section    active, as the newest
//!   touch of an active one         the newest
//!   touch of a RESTING one         LEAVING and the newest; active `demote-after` (30 s) later
//!   touch of a LEAVING one         the newest; its delay goes on
//!   active block too long          the oldest recent one becomes RESTING, until it fits
//!   every `scan-every` (20 s)      the oldest recent ones, as long as they were not touched for
//!                                  `promote-after` (180 s), become RESTING
//!   inactive block too long        its oldest is forgotten, and counted
//!   section evicted                forgotten: what is absent takes no slot
//! ```
//! Both blocks are parts of one list, since both are sorted by last touch and promotion takes the
//! tail of the active block: no entry of the resting part is newer than one of the recent part. So
//! promotion and demotion move no entries, and every step is O(1).
//!
//! # Times that follow the evictor
//! The three times above are the paper's, for the paper's evictor, and are right where sections are evicted a
//! little after they are promoted. With `follow=N` the time of promotion begins as the paper's and is a
//! [`PromotionAge`]: shorter where most sections are evicted before they are promoted, longer where nothing is
//! evicted. The interval of scans and the delay of demotion keep their proportion to it where it is shorter; the
//! delay is never less than a round of the evictor's samples. With `follow=0` all times stay as they are written:
//! the paper's policy. By default ([`AdpParams::beside`]) they are fixed where the evictor's own times say that
//! nothing is cold before it is promoted, and follow it elsewhere.
//!
//! # Where the paper is silent
//! - *Order of the inactive block.* "Metadata in each block is sorted by the last access interval":
//!   by last touch, not by promotion. The two differ only for sections touched while in the block.
//! - *A touch within the delay of 30 s* does not prolong it: the delay is for the memory subsystem to
//!   notice that the page is hot, and a second touch does not make that later. The second touch does
//!   count as the last touch.
//! - *The place of a demoted section in the active block* is that of its last touch, so that the
//!   block stays sorted, which the early stop of the scan relies on.
//! - *The active block overflows while the oldest recent section is a leaving one*: it would be
//!   demoted to the tail of a full block and promoted at once. It stays in the inactive block, and its delay ends.
//! - *A section dropped* from the inactive block is forgotten: its next touch is a first one.
//! - *Evictions*: the paper's protector receives accesses only, and a section that is absent may be pinned.
//!   Here it is forgotten, wherever it was, and its next touch is a first one. *Page faults* change nothing.
//! - *Shares* are of the VM's sections, for each device, rounded down.
//! - *Promotion at exactly 180 s*: the scan stops at an interval *shorter* than the threshold, so
//!   it promotes that one.
//! - *Several things due at once*: demotions, then overflow, then the scan, then overflow.

use super::{
    Change, Fate, PolicyReport, PromotionAge, ProtectionPolicy, Touch,
    parameters::{Field, Parameters, Share},
    recency::{Recency, Slot, nanos},
};
use crate::{sampling::SWEEP_WANTED, set_times::SetTimes};
use pagetide_addr::SectionNo;
use std::{collections::VecDeque, sync::Arc, time::Duration};

/// Parameters of `adp`; the paper's by default.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdpParams {
    /// Most sections in the active block, as a share of the VM's.
    pub active_max: Share,
    /// Most sections in the inactive block, which are those protected, as a share of the VM's.
    pub protected_max: Share,
    /// A section not touched for this long is promoted to the inactive block, until more is known of the evictor.
    pub promote_after: Duration,
    /// Sections are scanned for promotion this often.
    pub scan_every: Duration,
    /// A section of the inactive block is demoted this long after it was touched.
    pub demote_after: Duration,
    /// The times become shorter when more than one section is evicted before it is promoted for so many that are
    /// not; 0: the times are as written. `None`: what is right beside the evictor's times.
    pub follow: Option<u64>,
}

impl Default for AdpParams {
    fn default() -> Self {
        Self {
            active_max: Share::percent(30),
            protected_max: Share::percent(5),
            promote_after: Duration::from_secs(180),
            scan_every: Duration::from_secs(20),
            demote_after: Duration::from_secs(30),
            follow: None,
        }
    }
}

/// `follow`, where following is needed and nothing else is asked for.
const FOLLOW: u64 = 1;

impl AdpParams {
    /// The same beside an evictor with these times, if it is not said whether to follow it: fixed if no section is
    /// cold before it is promoted, at the scan after `promote-after`.
    #[must_use]
    pub fn beside(self, times: &SetTimes) -> Self {
        let promoted_by = self.promote_after.saturating_add(self.scan_every);
        let by_times = match times.cold_after() >= promoted_by {
            true => 0,
            false => FOLLOW,
        };
        Self {
            follow: Some(self.follow.unwrap_or(by_times)),
            ..self
        }
    }
}

impl Parameters for AdpParams {
    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
        vec![
            ("active-max", Field::Share(&mut self.active_max)),
            ("protected-max", Field::Share(&mut self.protected_max)),
            ("promote-after", Field::Time(&mut self.promote_after)),
            ("scan-every", Field::Time(&mut self.scan_every)),
            ("demote-after", Field::Time(&mut self.demote_after)),
            ("follow", Field::CountOrAuto(&mut self.follow)),
        ]
    }

    fn check(&self) -> Result<(), String> {
        if self.demote_after >= self.promote_after {
            return Err(format!(
                "demote-after ({} ms) must be shorter than promote-after ({} ms), or a section \
                 would be promoted again before it is demoted",
                self.demote_after.as_millis(),
                self.promote_after.as_millis()
            ));
        }
        Ok(())
    }
}

/// Where a section is; see the diagram of the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Block {
    Active,
    Resting,
    /// With the number of its entry in [`Adp::demotions`], which is at least [`FIRST_DEMOTION`].
    Leaving(u32),
}

/// A [`Block`] in four bytes.
#[derive(Clone, Copy, Debug)]
struct PackedBlock(u32);

const FIRST_DEMOTION: u32 = 2;

impl From<Block> for PackedBlock {
    fn from(block: Block) -> Self {
        Self(match block {
            Block::Active => 0,
            Block::Resting => 1,
            Block::Leaving(number) => number,
        })
    }
}

impl From<PackedBlock> for Block {
    fn from(packed: PackedBlock) -> Self {
        match packed.0 {
            0 => Self::Active,
            1 => Self::Resting,
            number => Self::Leaving(number),
        }
    }
}

/// A pending demotion. Void if the section is no longer `Leaving` with this number.
#[derive(Debug)]
struct Demotion {
    due_ns: u64,
    slot: Slot,
    number: u32,
}

/// Demotions that may be void before they are searched for and removed.
const VOID_DEMOTIONS_MIN: u64 = 64;

/// See the module.
#[derive(Debug)]
pub struct Adp {
    params: AdpParams,
    age: Arc<PromotionAge>,
    active_max: u64,
    inactive_max: u64,
    order: Recency<PackedBlock>,
    /// The sections last dropped from the inactive block, as many as that may have: if one of them is evicted, the
    /// evictor is near.
    surplus: Recency<()>,
    newest_resting: Option<Slot>,
    active: u64,
    leaving: u64,
    /// By when they are due.
    demotions: VecDeque<Demotion>,
    demotion_number: u32,
    last_due_ns: u64,
    scanned_at: Option<Duration>,
    dropped: u64,
}

impl Adp {
    /// The policy for a device of a VM with `sections` sections, whose devices share `age`.
    #[must_use]
    pub fn new(params: AdpParams, sections: u64, age: &Arc<PromotionAge>) -> Self {
        Self {
            params,
            age: Arc::clone(age),
            active_max: params.active_max.of(sections),
            inactive_max: params.protected_max.of(sections),
            order: Recency::default(),
            surplus: Recency::default(),
            newest_resting: None,
            active: 0,
            leaving: 0,
            demotions: VecDeque::new(),
            demotion_number: FIRST_DEMOTION,
            last_due_ns: 0,
            scanned_at: None,
            dropped: 0,
        }
    }

    /// Sections in the inactive block, which are those protected.
    #[must_use]
    pub fn inactive_sections(&self) -> u64 {
        self.order.len() - self.active
    }

    /// See [`AdpParams::follow`]; what nobody has found out is fixed.
    fn follow(&self) -> u64 {
        self.params.follow.unwrap_or(0)
    }

    /// A section not touched for this long is promoted.
    fn promote_after(&self) -> Duration {
        match self.follow() {
            0 => self.params.promote_after,
            _ => self.age.get(),
        }
    }

    /// `time` in proportion to the time of promotion, if that became shorter.
    fn in_proportion(&self, time: Duration) -> Duration {
        let (now, written) = (self.promote_after(), self.params.promote_after);
        if now >= written {
            return time;
        }
        time.mul_f64(now.as_secs_f64() / written.as_secs_f64())
    }

    fn scan_every(&self) -> Duration {
        self.in_proportion(self.params.scan_every)
    }

    /// Not less than the evictor takes to notice that the section is in use.
    fn demote_after(&self) -> Duration {
        let written = self.params.demote_after;
        self.in_proportion(written).max(SWEEP_WANTED.min(written))
    }

    fn block(&self, slot: Slot) -> Block {
        (*self.order.state(slot)).into()
    }

    /// Puts the section at `slot` into another block; returns the previous one.
    fn move_to(&mut self, slot: Slot, block: Block) -> Block {
        std::mem::replace(self.order.state_mut(slot), block.into()).into()
    }

    fn oldest_recent(&self) -> Option<Slot> {
        match self.newest_resting {
            Some(resting) => self.order.newer(resting),
            None => self.order.oldest(),
        }
    }

    /// Moves the border off `slot`, which leaves its place.
    fn move_border_off(&mut self, slot: Slot) {
        if self.newest_resting == Some(slot) {
            self.newest_resting = self.order.older(slot);
        }
    }

    /// Takes the oldest recent section over the border.
    fn promote(&mut self, slot: Slot, changes: &mut Vec<Change>) {
        match self.move_to(slot, Block::Resting) {
            Block::Active => {
                self.active -= 1;
                changes.push(Change::Protect(self.order.section(slot)));
            }
            Block::Leaving(_) => self.leaving -= 1,
            Block::Resting => unreachable!("a resting section is not recent"),
        }
        self.newest_resting = Some(slot);
    }

    fn begin_leaving(&mut self, slot: Slot, at: Duration) {
        self.move_border_off(slot);
        self.demotion_number = self.demotion_number.wrapping_add(1).max(FIRST_DEMOTION);
        let number = self.demotion_number;
        self.move_to(slot, Block::Leaving(number));
        self.leaving += 1;
        // The delay may have become shorter: none ends before one that began before it.
        let due_ns = nanos(at.saturating_add(self.demote_after()));
        self.last_due_ns = self.last_due_ns.max(due_ns);
        self.demotions.push_back(Demotion {
            due_ns: self.last_due_ns,
            slot,
            number,
        });
        if self.demotions.len() as u64 > 2 * self.leaving + VOID_DEMOTIONS_MIN {
            let order = &self.order;
            let block = |slot| Block::from(*order.state(slot));
            self.demotions
                .retain(|demotion| block(demotion.slot) == Block::Leaving(demotion.number));
        }
    }

    fn demote_due(&mut self, now: Duration, changes: &mut Vec<Change>) {
        let now_ns = nanos(now);
        while let Some(demotion) = self.demotions.front()
            && demotion.due_ns <= now_ns
        {
            let (slot, number) = (demotion.slot, demotion.number);
            self.demotions.pop_front();
            if self.block(slot) == Block::Leaving(number) {
                self.move_to(slot, Block::Active);
                self.leaving -= 1;
                self.active += 1;
                changes.push(Change::Release(self.order.section(slot)));
            }
        }
    }

    fn scan(&mut self, now: Duration, changes: &mut Vec<Change>) {
        let promote_after = self.promote_after();
        while let Some(slot) = self.oldest_recent() {
            if now.saturating_sub(self.order.touched_at(slot)) < promote_after {
                return;
            }
            if self.block(slot) == Block::Active && self.follow() > 0 {
                self.age.promoted_first();
            }
            self.promote(slot, changes);
        }
    }

    fn end_overflow(&mut self, changes: &mut Vec<Change>) {
        while self.active > self.active_max
            && let Some(slot) = self.oldest_recent()
        {
            self.promote(slot, changes);
        }
        while self.inactive_sections() > self.inactive_max
            && let Some(slot) = self.oldest_inactive()
        {
            let (section, at) = (self.order.section(slot), self.order.touched_at(slot));
            self.forget(slot, changes);
            self.dropped += 1;
            self.age.dropped();
            self.surplus.insert(section, at, ());
        }
        while self.surplus.len() > self.inactive_max
            && let Some(oldest) = self.surplus.oldest()
        {
            self.surplus.remove(oldest);
        }
    }

    /// The oldest of all, except when no section is resting, which is rare: the VM has shrunk.
    fn oldest_inactive(&self) -> Option<Slot> {
        self.order
            .oldest_first()
            .find(|slot| self.block(*slot) != Block::Active)
    }

    fn forget(&mut self, slot: Slot, changes: &mut Vec<Change>) {
        self.move_border_off(slot);
        // A demotion of this section must find nothing at its slot.
        match self.move_to(slot, Block::Active) {
            Block::Active => {
                self.active -= 1;
                self.order.remove(slot);
                return;
            }
            Block::Leaving(_) => self.leaving -= 1,
            Block::Resting => {}
        }
        changes.push(Change::Release(self.order.remove(slot)));
    }
}

impl ProtectionPolicy for Adp {
    fn touched(&mut self, touch: Touch, changes: &mut Vec<Change>) {
        // The order is by time; queues of one device may be a little late.
        let newest = self.order.newest().map(|slot| self.order.touched_at(slot));
        let at = newest.map_or(touch.at, |newest| newest.max(touch.at));
        if let Some(slot) = self.order.find(touch.section) {
            if self.block(slot) == Block::Resting {
                self.begin_leaving(slot, at);
            }
            self.order.touch(slot, at);
        } else {
            if let Some(slot) = self.surplus.find(touch.section) {
                self.surplus.remove(slot);
            }
            self.order.insert(touch.section, at, Block::Active.into());
            self.active += 1;
            self.end_overflow(changes);
        }
    }

    fn passed(&mut self, now: Duration, changes: &mut Vec<Change>) {
        self.demote_due(now, changes);
        self.end_overflow(changes);
        let is_due = |at: Duration| now.saturating_sub(at) >= self.scan_every();
        if self.scanned_at.is_none_or(is_due) {
            self.scanned_at = Some(now);
            self.scan(now, changes);
            self.end_overflow(changes);
            if self.follow() > 0 {
                self.age.look(now, self.follow());
            }
        }
    }

    fn fate(&mut self, section: SectionNo, fate: Fate, now: Duration, changes: &mut Vec<Change>) {
        if let Some(slot) = self.surplus.find(section)
            && fate != Fate::Faulted
        {
            self.surplus.remove(slot);
            if fate == Fate::Evicted {
                self.age.evicted(now);
            }
        }
        let Some(slot) = self.order.find(section) else {
            return;
        };
        match fate {
            Fate::Faulted => {}
            Fate::Gone => self.forget(slot, changes),
            Fate::Evicted => {
                self.age.evicted(now);
                if self.block(slot) == Block::Active && self.follow() > 0 {
                    let idle = now.saturating_sub(self.order.touched_at(slot));
                    self.age.evicted_first(idle);
                }
                self.forget(slot, changes);
            }
        }
    }

    fn resized(&mut self, sections: u64, changes: &mut Vec<Change>) {
        self.active_max = self.params.active_max.of(sections);
        self.inactive_max = self.params.protected_max.of(sections);
        self.end_overflow(changes);
    }

    fn warm_up(&self) {
        self.order.warm_up();
    }

    fn report(&self) -> PolicyReport {
        let demotions = self.demotions.capacity() * size_of::<Demotion>();
        PolicyReport {
            tracked_sections: self.order.len(),
            protected_sections: self.inactive_sections(),
            dropped_sections: self.dropped,
            bytes: (size_of::<Self>() + demotions) as u64
                + self.order.bytes()
                + self.surplus.bytes(),
        }
    }
}
