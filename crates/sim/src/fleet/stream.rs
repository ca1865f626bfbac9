// SPDX-License-Identifier: Apache-2.0
//! [`GuestStream`]: the touches of a synthetic guest, for a replay.

use super::{
    guest::{Guest, GuestRecipe},
    sink::{GuestTouch, Who, Work},
};
use crate::replay::{AccessStream, Actor, ReplayAccess, ReplayError, Service};
use pagetide_addr::DeviceId;
use std::time::Duration;

/// Number of a guest's NIC.
pub const NIC: DeviceId = DeviceId(1);
/// Number of a guest's disk.
pub const DISK: DeviceId = DeviceId(2);

/// How long a guest runs before anything is counted.
///
/// The evictor must know what is hot and what is cold before a fault is meaningful. A protector sees DMA in
/// that time, as on a host: from the first second of a VM, and long before memory is short.
pub const PROLOGUE: Duration = Duration::from_secs(900);

/// See the module.
#[derive(Debug)]
pub struct GuestStream {
    guest: Box<dyn Work>,
    /// The next second, prologue included.
    next_second: u64,
    end_second: u64,
    /// Touches of the second before that, and how many of them were returned.
    given: usize,
}

impl GuestStream {
    /// The guest of `recipe` for [`PROLOGUE`] and `seconds` after it.
    #[must_use]
    pub fn new(recipe: &GuestRecipe, seconds: u64) -> Self {
        Self::of(Box::new(Guest::new(recipe)), seconds)
    }

    /// The guest that works so, for [`PROLOGUE`] and `seconds` after it.
    pub(super) fn of(guest: Box<dyn Work>, seconds: u64) -> Self {
        Self {
            guest,
            next_second: 0,
            end_second: PROLOGUE.as_secs() + seconds,
            given: 0,
        }
    }

    fn access(&self, touch: GuestTouch) -> ReplayAccess {
        let second = self.next_second.saturating_sub(1);
        let count = self.guest.touches().len().max(1) as u64;
        let within = Duration::from_nanos(1_000_000_000 / count * self.given as u64);
        let actor = match touch.who {
            Who::Cpu => Actor::Cpu,
            Who::Nic => Actor::Device(NIC, Service::Network),
            Who::Disk => Actor::Device(DISK, Service::Block),
        };
        ReplayAccess {
            at: Duration::from_secs(second) + within,
            actor,
            section: touch.section,
            access: touch.access,
            bytes: touch.bytes,
        }
    }
}

impl AccessStream for GuestStream {
    fn next(&mut self) -> Result<Option<ReplayAccess>, ReplayError> {
        loop {
            if let Some(touch) = self.guest.touches().get(self.given).copied() {
                let access = self.access(touch);
                self.given += 1;
                return Ok(Some(access));
            }
            if self.next_second == self.end_second {
                return Ok(None);
            }
            self.guest.second(self.next_second);
            self.next_second += 1;
            self.given = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Load, paper_fleet};
    use super::*;

    fn all(seed: u64, load: Load) -> Vec<ReplayAccess> {
        let recipe = GuestRecipe {
            sections: 512,
            load,
            ..paper_fleet(seed)[0]
        };
        let mut stream = GuestStream::new(&recipe, 600);
        let mut accesses = Vec::new();
        while let Some(access) = stream.next().unwrap() {
            accesses.push(access);
        }
        accesses
    }

    #[test]
    fn stream_is_the_same_for_the_same_seed_and_another_for_another() {
        let first = all(5, Load::Storage);
        assert_eq!(first, all(5, Load::Storage));
        assert_ne!(first, all(6, Load::Storage));
    }

    #[test]
    fn times_of_a_stream_never_run_backwards_and_sections_are_those_of_the_guest() {
        for load in [Load::Storage, Load::Network] {
            let accesses = all(7, load);
            assert!(accesses.is_sorted_by_key(|access| access.at));
            assert!(accesses.iter().all(|access| access.section.0 < 512));
        }
    }
}
