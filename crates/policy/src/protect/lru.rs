// SPDX-License-Identifier: Apache-2.0
//! Policy `lru`: protects the sections that the device touched last, up to a share of the VM (VPRI
//! 4.2.1, and 7.3, where ADP is compared with it).
//!
//! ```text
//!   touch of s:   protect s, as the newest
//!                 more than `share` of the VM's sections?  release the oldest
//! ```
//! A section is protected at once and stays so until the device has touched too many others,
//! however long that takes.

use super::{
    Change, Fate, PolicyReport, ProtectionPolicy, Touch,
    parameters::{Field, Parameters, Share},
    recency::Recency,
};
use pagetide_addr::SectionNo;
use std::time::Duration;

/// Parameters of `lru`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LruParams {
    /// Most sections protected, as a share of the VM's.
    pub share: Share,
}

impl Default for LruParams {
    fn default() -> Self {
        Self {
            share: Share::percent(10),
        }
    }
}

impl Parameters for LruParams {
    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
        vec![("share", Field::Share(&mut self.share))]
    }
}

/// See the module.
#[derive(Debug)]
pub struct Lru {
    params: LruParams,
    protected_max: u64,
    order: Recency<()>,
    dropped: u64,
}

impl Lru {
    /// The policy for a device of a VM with `sections` sections.
    #[must_use]
    pub fn new(params: LruParams, sections: u64) -> Self {
        Self {
            params,
            protected_max: params.share.of(sections),
            order: Recency::default(),
            dropped: 0,
        }
    }

    fn drop_surplus(&mut self, changes: &mut Vec<Change>) {
        while self.order.len() > self.protected_max {
            let Some(oldest) = self.order.oldest() else {
                return;
            };
            changes.push(Change::Release(self.order.remove(oldest)));
            self.dropped += 1;
        }
    }
}

impl ProtectionPolicy for Lru {
    fn touched(&mut self, touch: Touch, changes: &mut Vec<Change>) {
        if let Some(slot) = self.order.find(touch.section) {
            self.order.touch(slot, touch.at);
        } else {
            self.order.insert(touch.section, touch.at, ());
            changes.push(Change::Protect(touch.section));
            self.drop_surplus(changes);
        }
    }

    fn passed(&mut self, _now: Duration, _changes: &mut Vec<Change>) {}

    fn fate(&mut self, section: SectionNo, fate: Fate, _: Duration, changes: &mut Vec<Change>) {
        // What is absent needs no protection: its next touch is a first one.
        if matches!(fate, Fate::Evicted | Fate::Gone)
            && let Some(slot) = self.order.find(section)
        {
            changes.push(Change::Release(self.order.remove(slot)));
        }
    }

    fn resized(&mut self, sections: u64, changes: &mut Vec<Change>) {
        self.protected_max = self.params.share.of(sections);
        self.drop_surplus(changes);
    }

    fn warm_up(&self) {
        self.order.warm_up();
    }

    fn report(&self) -> PolicyReport {
        PolicyReport {
            tracked_sections: self.order.len(),
            protected_sections: self.order.len(),
            dropped_sections: self.dropped,
            bytes: size_of::<Self>() as u64 + self.order.bytes(),
        }
    }
}
