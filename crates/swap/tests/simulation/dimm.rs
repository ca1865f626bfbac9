// SPDX-License-Identifier: Apache-2.0
//! Memory that is plugged into the VM and taken out of it, while it runs and while no daemon does.
//!
//! ```text
//!   Out ─ plug ─► Plugged ─ the daemon allocates ─► Allocated ─ unplug ─► Unplugged
//!    ▲               └──────────────── unplug ────────────────────────────►  │
//!    └──────────────────── the daemon deallocates (or its successor forgets) ┘
//! ```
//! With an unplug the guest stops using the memory, but the devices' requests
//! go on, for a guest is not to be trusted; and the VMM unmaps it at once or
//! when the daemon has released it. From the moment a removal has succeeded no
//! device may reach the memory, and the daemon may not touch it.
//!
//! Which memory is in the slot is written into the pool's identity before it is
//! allocated, and out of it after it was deallocated. A successor compares that
//! with what the VMM has: other memory may lie in the slot by then.

use crate::{
    content::{SECTORS, Stamps},
    daemon::{Daemon, Task},
    kernel::{Call, Life},
    random::OneIn,
    state::{Frame, State},
};
use pagetide_addr::{PageNo, PageRange};
use pagetide_gmem::{GrowthError, PageTable, recovery::forget_pages};
use pagetide_swap::Pool;

/// Memory that is always there: two whole sections and a piece of one.
pub const BASE: PageRange = PageRange {
    start: PageNo(0),
    end: PageNo(1024 + 21),
};
/// Where memory is plugged. The sections between are never memory.
pub const SLOT: PageRange = PageRange {
    start: PageNo(2048),
    end: PageNo(2048 + 512 + 30),
};
/// Pages of all the simulated memory, and what lies between.
pub const PAGE_COUNT: u64 = SLOT.end.0;
/// Pages the pool has room for.
pub const CAPACITY_PAGES: u64 = 8 * 512;

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    Out,
    Plugged,
    Allocated,
    Unplugged,
}

/// The memory in the slot.
#[derive(Clone, Copy, Debug)]
pub struct Dimm {
    pub phase: Phase,
    /// The part of the slot it fills.
    pub pages: PageRange,
    /// Which memory it is: another after each plug.
    serial: u64,
}

impl Dimm {
    pub const NONE: Self = Self {
        phase: Phase::Out,
        pages: PageRange {
            start: SLOT.start,
            end: SLOT.start,
        },
        serial: 0,
    };

    fn identity(&self) -> String {
        self.serial.to_string()
    }
}

impl State {
    /// Now and then memory is plugged or unplugged.
    pub fn change_memory(&mut self) {
        let plugging = self.knobs.plugging;
        if self.gone || !self.happens(plugging) {
            return;
        }
        match self.dimm.phase {
            Phase::Out => self.plug(),
            Phase::Plugged | Phase::Allocated => self.unplug(),
            // A daemon that lives is told of a removal before anything else comes into the slot.
            Phase::Unplugged if self.alive => {}
            Phase::Unplugged => self.plug(),
        }
    }

    fn plug(&mut self) {
        let len = self.random.pick(&[SLOT.len(), 512, 20]);
        let pages = SLOT.start.run(len);
        self.unmap_memory();
        self.dimm = Dimm {
            phase: Phase::Plugged,
            pages,
            serial: self.number(),
        };
        self.coverage.plugs += 1;
        for number in pages.iter() {
            let written = self.random.below(3) == 0;
            let content = written.then(|| Stamps([self.stamp(); SECTORS]));
            let held = content.unwrap_or(Stamps::ZERO);
            let page = self.page(number);
            page.unmapped = false;
            page.content = content;
            page.instance += u32::from(written);
            (page.poisoned, page.damaged, page.protected) = (false, false, false);
            (page.mapped, page.dma) = (written, false);
            page.versions = vec![held];
            page.past = vec![Stamps::ZERO, held];
            self.tell(number, "plugged");
        }
        let border = SLOT.start.plus(512);
        for _ in 0..6 {
            let from = self
                .random
                .pick(&[pages.start, border.min(PageNo(pages.end.0 - 1))]);
            let page = PageNo((from.0 + self.random.below(12)).min(pages.end.0 - 1));
            if !self.knobs.active.contains(&page) {
                self.knobs.active.push(page);
            }
        }
    }

    fn unplug(&mut self) {
        let slot = |page: &PageNo| SLOT.contains(*page);
        self.knobs.active.retain(|page| !slot(page));
        self.forget_hot_page();
        for vcpu in &mut self.vcpus {
            if vcpu.pending.is_some_and(|access| slot(&access.page)) {
                vcpu.pending = None;
                vcpu.asleep = false;
            }
        }
        self.kernel_pins.retain(|pin| !slot(&pin.page));
        self.dimm.phase = Phase::Unplugged;
        self.coverage.unplugs += 1;
        if self.random.coin() {
            self.unmap_memory();
        }
    }

    /// The VMM unmaps what is in the slot, and closes its file.
    fn unmap_memory(&mut self) {
        for number in SLOT.iter() {
            let page = self.page(number);
            page.unmapped = true;
            page.content = None;
            page.instance += 1;
            (page.mapped, page.protected) = (false, false);
            self.tell(number, "unmapped by the VMM");
        }
    }

    /// True if the pool tells of the memory that is in the slot.
    pub fn knows_the_slot(&self, pool: &Pool) -> bool {
        let known = pool.identity().expect("an identity");
        known == self.dimm.identity().as_bytes()
    }

    /// Pages that are to leave the space.
    pub fn pages_to_remove(&self) -> Option<PageRange> {
        (self.dimm.phase == Phase::Unplugged).then_some(self.dimm.pages)
    }

    /// Nothing in the slot is part of the space any more.
    fn slot_is_empty(&mut self) {
        self.assert_out_of_reach(SLOT);
        for number in SLOT.iter() {
            self.page(number).removed = true;
            self.tell(number, "removed");
        }
    }

    /// And the VMM has nothing there either.
    fn memory_is_out(&mut self) {
        self.slot_is_empty();
        self.unmap_memory();
        self.dimm.phase = Phase::Out;
    }
}

impl Task {
    /// What the daemon has to do about the memory in the slot.
    pub fn about_memory(state: &State) -> Option<Self> {
        match state.dimm.phase {
            Phase::Plugged => Some(Self::Grow),
            Phase::Unplugged => Some(Self::Shrink),
            Phase::Out | Phase::Allocated => None,
        }
    }
}

impl Daemon {
    /// What is in the slot becomes part of the space.
    pub fn grow(&self) {
        let life = self.life();
        let _frame = life.frame(Frame::Grow);
        let dimm = life.world.lock().dimm;
        if dimm.phase != Phase::Plugged {
            return;
        }
        set_identity(&life, self.store.pool(), &dimm.identity());
        for page in dimm.pages.iter() {
            life.world.lock().page(page).removed = false;
        }
        match self.space.allocate(dimm.pages) {
            Ok(()) => {
                let mut state = life.world.lock();
                if state.alive && state.dimm.phase == Phase::Plugged {
                    state.dimm.phase = Phase::Allocated;
                }
            }
            Err(error) => life.expect_trouble(&error),
        }
    }

    /// What is in the slot leaves the space; it may be gone by now.
    pub fn shrink(&self) {
        let life = self.life();
        let _frame = life.frame(Frame::Grow);
        let dimm = life.world.lock().dimm;
        if dimm.phase != Phase::Unplugged {
            return;
        }
        match self.space.deallocate(dimm.pages) {
            Ok(()) => {
                {
                    let mut state = life.world.lock();
                    state.memory_is_out();
                    state.coverage.removals += 1;
                }
                set_identity(&life, self.store.pool(), "");
                self.swap_in_other_memory();
            }
            Err(GrowthError::Busy { .. }) => life.world.lock().coverage.busy_removals += 1,
            Err(GrowthError::Loading { .. }) => {
                life.world.lock().coverage.loading_removals += 1;
            }
            Err(GrowthError::Wired { .. }) => {
                let mut state = life.world.lock();
                state.coverage.wired_removals += 1;
                for device in &mut state.devices {
                    device.wired.retain(|page| !SLOT.contains(*page));
                }
            }
            Err(error) => life.expect_trouble(&error),
        }
    }

    /// Now and then other memory comes into the slot at once: rounds may be under way that had begun
    /// with the old one.
    fn swap_in_other_memory(&self) {
        let life = self.life();
        let swapped = {
            let mut state = life.world.lock();
            let plugging = state.knobs.plugging;
            let may = plugging != OneIn(0) && state.alive && state.dimm.phase == Phase::Out;
            let swaps = may && state.random.below(3) == 0;
            if swaps {
                state.plug();
            }
            swaps
        };
        if swapped {
            self.grow();
        }
    }

    /// A VM's memory as it was at the attach becomes part of the space, or is already.
    pub fn allocate_base(&self) {
        let life = self.life();
        let _frame = life.frame(Frame::Grow);
        loop {
            match self.space.allocate(BASE) {
                Ok(()) => break,
                Err(error) => life.expect_trouble(&error),
            }
            if life.world.lock().gone {
                return;
            }
        }
        life.world.lock().base_allocated = true;
    }
}

fn set_identity(life: &Life, pool: &Pool, identity: &str) {
    if life.enter(Call::Unlocked).is_some() {
        let written = pool.set_identity(identity.as_bytes());
        written.expect("a short identity");
    }
}

/// What a successor does about the slot before it looks at any word: memory that its predecessor knew,
/// and that the VMM has no more, is forgotten.
pub fn forget_what_is_gone(life: &Life, pool: &Pool, table: &PageTable) {
    let known = pool.identity().expect("an identity");
    let known = String::from_utf8(known).expect("digits");
    let dimm = life.world.lock().dimm;
    let there = matches!(dimm.phase, Phase::Plugged | Phase::Allocated);
    if there && known == dimm.identity() {
        return;
    }
    if known.is_empty() {
        assert_ne!(dimm.phase, Phase::Allocated, "the pool does not know");
        let left = SLOT.sections().map(|s| table.pages_of(s).len());
        assert_eq!(left.sum::<u64>(), 0, "words that nobody knows of");
    } else {
        forget_pages(table, SLOT);
        life.world.lock().coverage.forgotten_regions += 1;
    }
    let mut state = life.world.lock();
    if there {
        state.slot_is_empty();
    } else {
        state.memory_is_out();
    }
    drop(state);
    set_identity(life, pool, "");
}
