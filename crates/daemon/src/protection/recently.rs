// SPDX-License-Identifier: Apache-2.0
//! [`Recently`]: which sections were reported to the policies a moment ago.
//!
//! A disk at full speed touches each of its sections dozens of times a second, while policies work at a
//! scale of seconds: a touch of a section that was touched a moment ago tells them nothing, and costs as
//! much as the first. Time is therefore divided into *ticks* of a quarter of a second, and only the
//! first touch of a section by a device in each tick is reported. A policy's time of a section's last
//! touch is then late by at most one tick.
//!
//! ```text
//!   place = some bits of hash(device, section)    48 further bits │ 16 bits of the tick
//!                                                 same as there: reported already
//! ```
//! The table has a fixed size: two entries with the same place replace each other, and are reported more
//! often than necessary. Two that agree in all bits (one pair in 2^60) count as one in that tick.

use pagetide_addr::{DeviceId, SectionNo};
use std::time::Duration;

/// Number of places: 32 KiB of them, for twice as many sections as 4 GiB of buffers have.
const PLACES: usize = 4096;
const _: () = assert!(PLACES.is_power_of_two());
/// Milliseconds of a tick, as a power of two.
const TICK_MS_SHIFT: u32 = 8;
const TICK_BITS: u32 = 16;
const TICK_MASK: u128 = (1 << TICK_BITS) - 1;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Recently {
    /// Empty until the first touch.
    places: Vec<u64>,
}

impl Recently {
    /// True if this is the section's first touch by the device in its tick, as far as the table
    /// remembers.
    pub(super) fn is_first(&mut self, device: DeviceId, section: SectionNo, at: Duration) -> bool {
        if self.places.is_empty() {
            // No hash is without a tick, but the first tick of all has zeros: never of a live clock.
            self.places.resize(PLACES, 0);
        }
        let hash = hash(device, section);
        let tick = u64::try_from((at.as_millis() >> TICK_MS_SHIFT) & TICK_MASK).unwrap_or(0);
        let entry = hash << TICK_BITS | tick;
        // The hash bits that the shift dropped from the entry choose the place.
        let place = usize::try_from(hash >> (u64::BITS - TICK_BITS)).unwrap_or(0) % PLACES;
        match self.places.get_mut(place) {
            Some(known) => std::mem::replace(known, entry) != entry,
            None => true,
        }
    }

    /// Forgets all reports: the policies have forgotten something and need them again.
    pub(super) fn forget(&mut self) {
        self.places.clear();
    }
}

/// Multiplies twice by an odd constant, with the upper bits folded down each time: spreads the key over
/// 64 bits.
fn hash(device: DeviceId, section: SectionNo) -> u64 {
    const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
    let own = section.0 ^ u64::from(device.0) << 44;
    let mixed = (own ^ own >> 32).wrapping_mul(SPREAD);
    (mixed ^ mixed >> 29).wrapping_mul(SPREAD)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const DISK: DeviceId = DeviceId(3);
    const NOW: Duration = Duration::from_millis(1000 << TICK_MS_SHIFT);

    #[test]
    fn section_is_told_once_a_tick_for_each_device() {
        let mut recently = Recently::default();
        let mut first = |device, section, after_ms| {
            recently.is_first(
                device,
                SectionNo(section),
                NOW + Duration::from_millis(after_ms),
            )
        };
        assert!(first(DISK, 5, 0));
        assert!(!first(DISK, 5, 1));
        assert!(!first(DISK, 5, 255));
        assert!(first(DeviceId(4), 5, 255));
        assert!(first(DISK, 6, 255));
        assert!(first(DISK, 5, 256));
        assert!(!first(DISK, 5, 257));
        recently.forget();
        assert!(recently.is_first(DISK, SectionNo(5), NOW + Duration::from_millis(257)));
    }

    #[test]
    fn sections_of_devices_have_hashes_of_their_own_and_few_share_a_place() {
        let mut recently = Recently::default();
        let mut hashes = BTreeSet::new();
        let (mut again, mut told) = (0, 0);
        for device in (0..4).map(DeviceId) {
            for section in (0..512).map(|at| SectionNo(at * 7)) {
                assert!(hashes.insert(hash(device, section)));
                assert!(recently.is_first(device, section, NOW), "never told before");
                told += 1;
            }
        }
        for device in (0..4).map(DeviceId) {
            for section in (0..512).map(|at| SectionNo(at * 7)) {
                again += u64::from(recently.is_first(device, section, NOW));
            }
        }
        // By chance, two in five of this many share a place with another.
        assert!(again < told * 6 / 10, "{again} of {told}");
    }
}
