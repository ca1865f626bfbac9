// SPDX-License-Identifier: Apache-2.0
//! Where the parts of a guest put their touches of one second, coalesced.

use pagetide_addr::{Access, SectionNo};

/// Who touches.
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

/// A touch of a section by the CPU is told this often: at least once between two scans of the daemon, so
/// that each sees in use what is. (CallbackObserver every 20 s, as it once was, such a section was on the cold side
/// for a quarter of the time, and went for what devices had filled.)
pub(super) const CPU_TOLD_S: u64 = 4;

/// Touches of one second, in order.
#[derive(Debug)]
pub(super) struct Sink {
    pub(super) second: u64,
    pub(super) touches: Vec<GuestTouch>,
    /// Second of each section's last told touch and one more, by who: 0 is never.
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

    /// Tells of a touch, unless the section was told of so lately that it is the same one.
    pub(super) fn touch(&mut self, who: Who, section: u64, access: Access, bytes: u64) {
        let (told, gap_s) = match who {
            Who::Cpu => (&mut self.told[0], CPU_TOLD_S),
            Who::Nic => (&mut self.told[1], 1),
            Who::Disk => (&mut self.told[2], 1),
        };
        let Some(last) = usize::try_from(section)
            .ok()
            .and_then(|at| told.get_mut(at))
        else {
            return;
        };
        if *last == 0 || self.second + 1 >= *last + gap_s {
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
