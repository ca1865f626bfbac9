// SPDX-License-Identifier: Apache-2.0
//! Collects and coalesces the touches of a guest's parts within one second.

use pagetide_addr::{Access, SectionNo};

/// The origin of a touch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Who {
    Cpu,
    Nic,
    Disk,
}

/// One touch of a section.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct GuestTouch {
    pub(super) who: Who,
    pub(super) section: SectionNo,
    pub(super) access: Access,
    pub(super) bytes: u64,
}

/// What a guest does, second by second.
pub(super) trait Work: Send + std::fmt::Debug {
    /// The touches of second `second` from the start. Seconds are requested in order.
    fn second(&mut self, second: u64);

    /// The touches of the second requested last.
    fn touches(&self) -> &[GuestTouch];
}

/// Touches of one second, in order.
#[derive(Debug)]
pub(super) struct Sink {
    pub(super) second: u64,
    pub(super) touches: Vec<GuestTouch>,
    /// Second of each section's last reported touch plus one, by origin: 0 is never.
    told: [Vec<u64>; 3],
}

impl Sink {
    pub(super) fn new(sections: u64) -> Self {
        let count = usize::try_from(sections).unwrap_or(0);
        Self {
            second: 0,
            touches: Vec::new(),
            told: [vec![0; count], vec![0; count], vec![0; count]],
        }
    }

    /// Reports a touch, unless one of the section was reported in this second.
    pub(super) fn touch(&mut self, who: Who, section: u64, access: Access, bytes: u64) {
        let told = match who {
            Who::Cpu => &mut self.told[0],
            Who::Nic => &mut self.told[1],
            Who::Disk => &mut self.told[2],
        };
        let Some(last) = usize::try_from(section)
            .ok()
            .and_then(|at| told.get_mut(at))
        else {
            return;
        };
        if *last != self.second + 1 {
            *last = self.second + 1;
            self.touches.push(GuestTouch {
                who,
                section: SectionNo(section),
                access,
                bytes,
            });
        }
    }
}
