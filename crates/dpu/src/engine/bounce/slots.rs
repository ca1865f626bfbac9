// SPDX-License-Identifier: Apache-2.0
//! Which bounce buffers are free.
//!
//! The pages of a run need adjacent slots, so that one request names them all. Runs are short and
//! soon finished, so a search starts where the last one ended. A device gets at most half of the
//! slots, so a slow host of one tenant cannot take them all.

use crate::memory::Span;
use pagetide_addr::DeviceId;
use pagetide_vpri::BounceArea;
use std::{collections::HashMap, sync::Arc};

/// Adjacent slots that belong to a transfer.
///
/// The holder must pass it to [`Slots::give_back`], or the slots are lost.
#[must_use = "slots that are not given back are lost"]
#[derive(Debug)]
pub(crate) struct Taken {
    pub area: Arc<BounceArea>,
    pub device: DeviceId,
    pub first: u32,
    pub count: u32,
}

/// A run of absent pages that a read covers entirely, and the slots for their new content.
#[derive(Debug)]
pub(crate) struct Run {
    /// The pages, whole.
    pub span: Span,
    /// Bytes of the transfer that precede it.
    pub from: u64,
    pub slots: Taken,
}

/// The slots of the engine's current area.
#[derive(Debug)]
pub(crate) struct Slots {
    area: Arc<BounceArea>,
    taken: Box<[bool]>,
    by_device: HashMap<DeviceId, u32>,
    /// Where the next search starts.
    next: usize,
}

impl Slots {
    /// All slots free.
    pub fn new(area: Arc<BounceArea>) -> Self {
        let count = area.slots().len();
        Self {
            area,
            taken: vec![false; count].into(),
            by_device: HashMap::new(),
            next: 0,
        }
    }

    fn area(&self) -> &Arc<BounceArea> {
        &self.area
    }

    /// Takes `count` adjacent slots, if `device` may have them and they are free.
    pub fn take(&mut self, device: DeviceId, count: u32) -> Option<Taken> {
        let wanted = count as usize;
        let most = self.taken.len().div_ceil(2);
        let has = self.by_device.get(&device).copied().unwrap_or(0);
        if wanted == 0 || has as usize + wanted > most {
            return None;
        }
        let at = (self.find(self.next, wanted)).or_else(|| self.find(0, wanted))?;
        // An area has fewer slots than a u32 counts.
        let offset = u32::try_from(at).unwrap_or(u32::MAX);
        self.taken[at..at + wanted].fill(true);
        self.next = at + wanted;
        *self.by_device.entry(device).or_insert(0) += count;
        Some(Taken {
            area: self.area.clone(),
            device,
            first: self.area.slots().start + offset,
            count,
        })
    }

    fn find(&self, from: usize, wanted: usize) -> Option<usize> {
        let mut run = 0;
        for (at, taken) in self.taken.iter().enumerate().skip(from) {
            run = if *taken { 0 } else { run + 1 };
            if run == wanted {
                return Some(at + 1 - wanted);
            }
        }
        None
    }

    /// Takes slots back. Those of an earlier area need nothing: that area goes with its last slots.
    pub fn give_back(&mut self, slots: &Taken) {
        if !Arc::ptr_eq(&slots.area, &self.area) {
            return;
        }
        let index = |slot: u32| usize::try_from(slot - self.area.slots().start).unwrap_or(0);
        let at = index(slots.first);
        let given = &mut self.taken[at..at + index(self.area.slots().start + slots.count)];
        debug_assert!(given.iter().all(|taken| *taken), "given back twice");
        given.fill(false);
        if let Some(has) = self.by_device.get_mut(&slots.device) {
            *has -= slots.count;
            if *has == 0 {
                self.by_device.remove(&slots.device);
            }
        }
    }
}

/// The slots of the area that the host provides now, if it provides any.
#[derive(Debug, Default)]
pub(crate) struct CurrentSlots(Option<Slots>);

impl CurrentSlots {
    /// Transfers use this area from now on; data in an earlier area stays until it is settled.
    pub fn set_area(&mut self, area: Option<Arc<BounceArea>>) {
        let same = match (&self.0, &area) {
            (Some(slots), Some(area)) => Arc::ptr_eq(slots.area(), area),
            (None, None) => true,
            _ => false,
        };
        if !same {
            self.0 = area.map(Slots::new);
        }
    }

    /// See [`Slots::take`].
    pub fn take(&mut self, device: DeviceId, count: u32) -> Option<Taken> {
        self.0.as_mut()?.take(device, count)
    }

    /// See [`Slots::give_back`].
    pub fn give_back(&mut self, slots: &Taken) {
        if let Some(mine) = &mut self.0 {
            mine.give_back(slots);
        }
    }

    /// Returns the slots of runs that will not be transferred.
    pub fn give_up(&mut self, runs: impl IntoIterator<Item = Run>) {
        for run in runs {
            self.give_back(&run.slots);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: DeviceId = DeviceId(1);
    const OTHER: DeviceId = DeviceId(2);

    fn slots(count: u32) -> Slots {
        Slots::new(Arc::new(BounceArea::new(count).unwrap()))
    }

    #[test]
    fn slots_are_neighbours_and_nobody_elses_until_they_are_given_back() {
        let mut slots = slots(16);
        let first = slots.take(ONE, 5).unwrap();
        let second = slots.take(OTHER, 8).unwrap();
        assert_eq!((first.first, second.first), (0, 5));
        assert!(slots.take(ONE, 4).is_none(), "three are left");
        slots.give_back(&first);
        assert!(slots.take(ONE, 6).is_none(), "five and three, not together");
        let third = slots.take(ONE, 3).unwrap();
        let fourth = slots.take(ONE, 5).unwrap();
        assert_eq!((third.first, fourth.first), (13, 0));
    }

    #[test]
    fn device_gets_no_more_than_half_of_them() {
        let mut slots = slots(8);
        let half = slots.take(ONE, 4).unwrap();
        assert!(slots.take(ONE, 1).is_none());
        assert!(slots.take(OTHER, 4).is_some());
        slots.give_back(&half);
        assert!(slots.take(ONE, 4).is_some());
    }

    #[test]
    fn slots_of_an_earlier_area_are_not_mixed_up_with_those_of_this_one() {
        let mut old = slots(4);
        let left = old.take(ONE, 2).unwrap();
        let mut new = slots(4);
        let taken = new.take(ONE, 2).unwrap();
        new.give_back(&left);
        assert!(new.take(ONE, 1).is_none());
        new.give_back(&taken);
    }

    #[test]
    fn random_takings_never_overlap() {
        let mut slots = slots(64);
        let mut held: Vec<Taken> = Vec::new();
        let mut seed = 7_u32;
        for _ in 0..20_000 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let draw = seed >> 16;
            if draw.is_multiple_of(2) && !held.is_empty() {
                let at = usize::try_from(draw).unwrap() % held.len();
                slots.give_back(&held.swap_remove(at));
            } else if let Some(taken) = slots.take(DeviceId(1 + draw % 3), 1 + draw % 9) {
                let ends = |t: &Taken| (t.first, t.first + t.count);
                let (from, to) = ends(&taken);
                assert!(to <= 64);
                for other in held.iter().map(ends) {
                    assert!(to <= other.0 || from >= other.1, "{from}..{to} {other:?}");
                }
                held.push(taken);
            }
        }
        for taken in held {
            slots.give_back(&taken);
        }
        assert!(slots.by_device.is_empty() && !slots.taken.contains(&true));
    }
}
