// SPDX-License-Identifier: Apache-2.0
//! The kernel, the guest and the devices as one value, without a daemon.
//!
//! A page is in the page cache or not; the VMM's page table holds a protection
//! marker for it, and says whether it is mapped. All that the daemon can do to
//! it is in `kernel.rs`; guest and devices do theirs in `guest.rs` and
//! `device.rs`, step by step, between any two calls of the daemon.
//!
//! # What the guest may see
//! For each page the *versions* that it may hold now. A write that completes
//! leaves one; giving the page up adds zeros and whatever the page has held (an
//! old content of its own may turn up, for the daemon is not told); whoever
//! looks leaves the one he saw. Anything else that is ever seen is lost or
//! foreign data.

use crate::{
    content::Stamps,
    device::{Asked, Device, Request},
    dimm::{BASE, Dimm, PAGE_COUNT},
    guest::{KernelPin, Message, Vcpu},
    knobs::Knobs,
    random::{OneIn, Random},
};
use pagetide_addr::{PageNo, PageRange, SectionNo, to_usize};
use pagetide_gmem::{Content, LoadDone};
use pagetide_tiers::fake::FakeDisk;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

/// One page of the VM.
#[derive(Clone, Debug)]
pub struct Page {
    /// What the page cache holds.
    pub content: Option<Stamps>,
    /// Which page of the page cache that is: another after each punch.
    pub instance: u32,
    /// Writes of the VMM fault.
    pub protected: bool,
    /// The VMM's page table has it.
    pub mapped: bool,
    /// A device has used it since the tracker looked.
    pub dma: bool,
    /// Accesses fail.
    pub poisoned: bool,
    /// The run has flipped a bit of its stored content.
    pub damaged: bool,
    /// There is no memory here, or no more.
    pub unmapped: bool,
    /// It is no part of the space: nobody may reach it.
    pub removed: bool,
    /// See the module.
    pub versions: Vec<Stamps>,
    /// All it ever held.
    pub past: Vec<Stamps>,
}

macro_rules! coverage {
    ($($name:ident)*) => {
        /// What happened: a simulation in which nothing happens finds nothing.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Coverage {
            $(pub $name: u64,)*
        }

        impl Coverage {
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }

            /// Everything that can happen has.
            pub fn assert_complete(&self) {
                $(assert!(self.$name > 0, "no run has any {}", stringify!($name));)*
            }
        }
    };
}

coverage! {
    calls
    deaths
    deaths_in_recovery
    errors
    vcpu_faults
    nested_tasks
    page_requests
    overwrites
    overwritten_pages
    overwrites_cut_short
    slow_fills
    loads_failed
    loads_dropped
    loads_of_the_dead
    relocated_pages
    relocations_in_vain
    loading_removals
    granted_sections
    alias_faults
    attached_devices
    transfers
    dead_io_bounced
    kernel_pins
    discards
    evicted_pages
    evicted_beside_protected
    evicted_though_protected
    directly_evicted_pages
    sections_taken_whole
    sections_taken_in_part
    cancelled_pages
    joined_faults
    readahead_pages
    swapped_in_ahead_pages
    demoted_pages
    demotions_in_vain
    same_filled_pages
    sunk_pages
    sinks_in_vain
    sinks_refused
    slow_reads
    slow_reads_failed
    slow_reads_retried
    slow_writes_failed
    old_answers
    flipped_answers
    wrong_answers_in_a_row
    pages_lost_with_their_tier
    slow_requests_of_the_dead
    busy
    store_full
    damaged_pages
    poisoned_reads
    over_limit_pages
    vm_ends
    vmm_deaths
    vmm_deaths_under_way
    pools_of_dead_vmms
    plugs
    unplugs
    removals
    busy_removals
    wired_removals
    forgotten_regions
    refused_requests
}

/// What the daemon is doing, innermost last: it tells which locks are held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Frame {
    /// The lock of this section is held shared in every call.
    VcpuFault(SectionNo),
    /// Some section's lock is held shared; and in between, a list of waiters is locked.
    DeviceFault,
    /// A section's lock is held exclusively in every call but `read`.
    Evict,
    /// A section's lock is held shared.
    Setup,
    /// A section's lock is held exclusively in every call.
    Grow,
}

/// See the module.
pub struct State {
    pub random: Random,
    pub knobs: Knobs,
    pub pages: Vec<Page>,
    pub dimm: Dimm,
    /// The memory that is always there has become part of the space.
    pub base_allocated: bool,
    pub vcpus: Vec<Vcpu>,
    pub messages: VecDeque<Message>,
    pub kernel_pins: Vec<KernelPin>,
    pub devices: Vec<Device>,
    pub requests: Vec<Request>,
    /// Page requests that wait to be taken.
    pub page_requests: VecDeque<Asked>,
    /// Page requests the daemon has taken and not answered, by ticket.
    pub unanswered: BTreeSet<u64>,
    /// Loads of far content under way.
    pub loads: Vec<(Content, LoadDone)>,
    /// The slow tier, which outlives daemons.
    pub disk: Arc<FakeDisk>,
    /// Pages whose content was asked for there, by extent and position.
    pub slow_pages: BTreeMap<(u32, u32), PageNo>,
    /// Reads that wait until they are tried again.
    pub slow_waiting: usize,
    /// Answers to the load under way from a place that were not what it holds.
    pub slow_wrong: BTreeMap<(u32, u32), u32>,
    /// DMA that a dead daemon had submitted.
    pub dead_io: Vec<Request>,
    pub frames: Vec<Frame>,
    /// Number of the daemon that lives, or lived last.
    pub incarnation: u32,
    pub alive: bool,
    /// The VM has ended: the kernel knows nothing of it any more.
    pub gone: bool,
    /// Pages said to be a foreign page's.
    pub foreign_pages: Vec<PageNo>,
    /// Deaths that may still come before the next daemon has begun its work.
    pub deaths_left: u32,
    pub now_ms: u64,
    /// Pages whose damaged content this incarnation has found.
    pub quarantined: u64,
    pub coverage: Coverage,
    hot: PageNo,
    /// The page whose life is to be told, from `PAGETIDE_SIM_PAGE`.
    told: Option<PageNo>,
    next_stamp: u32,
    next_number: u64,
}

/// How long one page stays the hottest, in choices of a page.
const HOT_PICKS: u64 = 100;

fn page_to_tell_of() -> Option<PageNo> {
    let Ok(text) = std::env::var("PAGETIDE_SIM_PAGE") else {
        return None;
    };
    Some(PageNo(text.parse().expect("the number of a page")))
}

/// Most successors that die before one gets to work: a successor makes some thousand calls.
pub const DEATHS_MAX: u32 = 4;

impl State {
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let knobs = Knobs::of(&mut random);
        let hole = Page {
            content: None,
            instance: 0,
            protected: false,
            mapped: false,
            dma: false,
            poisoned: false,
            damaged: false,
            unmapped: false,
            removed: false,
            versions: vec![Stamps::ZERO],
            past: vec![Stamps::ZERO],
        };
        let hot = random.pick(&knobs.active);
        let count = to_usize(PAGE_COUNT);
        let nowhere = Page {
            unmapped: true,
            removed: true,
            ..hole.clone()
        };
        let mut pages = vec![hole; BASE.end.index()];
        pages.resize(count, nowhere);
        let devices = (0..knobs.devices).map(|_| Device::new(count)).collect();
        let vcpus = (0..knobs.vcpus).map(|_| Vcpu::default()).collect();
        Self {
            random,
            knobs,
            pages,
            dimm: Dimm::NONE,
            base_allocated: false,
            vcpus,
            messages: VecDeque::new(),
            kernel_pins: Vec::new(),
            devices,
            requests: Vec::new(),
            page_requests: VecDeque::new(),
            unanswered: BTreeSet::new(),
            loads: Vec::new(),
            disk: Arc::new(FakeDisk::new(crate::slow::SECTORS)),
            slow_pages: BTreeMap::new(),
            slow_waiting: 0,
            slow_wrong: BTreeMap::new(),
            dead_io: Vec::new(),
            frames: Vec::new(),
            incarnation: 0,
            alive: false,
            gone: false,
            foreign_pages: Vec::new(),
            deaths_left: DEATHS_MAX,
            now_ms: 1000,
            quarantined: 0,
            coverage: Coverage::default(),
            hot,
            told: page_to_tell_of(),
            next_stamp: 1,
            next_number: 0,
        }
    }

    /// One step of the guest or a device.
    pub fn step(&mut self) {
        // Nobody is left to take one; DMA under way ends as it would.
        if self.gone {
            self.advance_all();
            return;
        }
        match self.random.below(16) {
            0..=8 => self.vcpu_step(),
            9..=14 => self.device_step(),
            _ => self.take_kernel_pin(),
        }
        self.change_memory();
        let discards = self.knobs.discards;
        if self.random.happens(discards) {
            self.give_up_a_page();
        }
    }

    /// A page the guest uses; for a while one of them more than all others, so that much befalls it
    /// at once.
    pub fn active_page(&mut self) -> PageNo {
        if self.random.below(HOT_PICKS) == 0 {
            self.hot = self.random.pick(&self.knobs.active);
        }
        if self.random.coin() {
            self.hot
        } else {
            self.random.pick(&self.knobs.active)
        }
    }

    /// It may be no memory any more.
    pub fn forget_hot_page(&mut self) {
        self.hot = self.random.pick(&self.knobs.active);
    }

    pub fn page(&mut self, page: PageNo) -> &mut Page {
        &mut self.pages[page.index()]
    }

    /// A stamp nobody has had.
    pub fn stamp(&mut self) -> u32 {
        self.next_stamp += 1;
        self.next_stamp
    }

    /// A number nobody has had.
    pub fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    /// Tells what befalls a page, if somebody wants to know.
    pub fn tell(&self, page: PageNo, what: impl std::fmt::Display) {
        if self.told == Some(page) {
            let content = self.pages[page.index()].content;
            eprintln!("{:>6} {what}; it holds {content:?}", self.coverage.calls);
        }
    }

    /// The same for a range.
    pub fn tell_range(&self, pages: PageRange, what: impl std::fmt::Display) {
        if let Some(page) = self.told.filter(|page| pages.contains(*page)) {
            self.tell(page, what);
        }
    }

    /// Tells what befalls all pages.
    pub fn tell_all(&self, what: impl std::fmt::Display) {
        if let Some(page) = self.told {
            self.tell(page, what);
        }
    }

    pub fn happens(&mut self, how_often: OneIn) -> bool {
        self.random.happens(how_often)
    }

    /// True if a call is to fail now.
    pub fn fails(&mut self) -> bool {
        let fails = self.random.happens(self.knobs.errors);
        self.coverage.errors += u64::from(fails);
        fails
    }

    /// Somebody sees `seen` in a page: it must be one of its versions, and is the only one now.
    pub fn observe(&mut self, number: PageNo, seen: Stamps, who: &str) {
        let page = &mut self.pages[number.index()];
        assert!(
            page.versions.contains(&seen),
            "{who} sees {seen:?} in {number:?}, which may hold {:?}",
            page.versions
        );
        page.versions = vec![seen];
        self.tell(number, format_args!("seen by {who}"));
    }

    /// A write to a present page completes.
    pub fn complete_write(&mut self, number: PageNo, written: crate::guest::Write, who: &str) {
        let before = self.pages[number.index()].content;
        let before = before.unwrap_or_else(|| panic!("{who} writes to absent {number:?}"));
        self.observe(number, before, who);
        let after = before.with(written.sectors, written.stamp);
        let page = &mut self.pages[number.index()];
        page.content = Some(after);
        page.versions = vec![after];
        page.past.push(after);
        self.tell(number, format_args!("written by {who}"));
    }

    pub fn resident_pages(&self) -> u64 {
        self.pages.iter().filter(|p| p.content.is_some()).count() as u64
    }

    /// Pages that were present at any time, and are part of the space.
    pub fn pages_ever_used(&self) -> Vec<PageNo> {
        let used = |page: &PageNo| {
            let page = &self.pages[page.index()];
            page.instance > 0 && !page.removed && !page.unmapped
        };
        (0..PAGE_COUNT).map(PageNo).filter(used).collect()
    }

    /// The daemon dies: what was in its memory is gone, what it had submitted is not.
    pub fn die(&mut self) {
        self.tell_all("the daemon is dead");
        self.alive = false;
        self.frames.clear();
        self.unanswered.clear();
        self.page_requests.clear();
        self.quarantined = 0;
        self.slow_pages.clear();
        self.slow_waiting = 0;
        self.slow_wrong.clear();
        let mut random = self.random.clone();
        self.messages.retain(|_| random.coin());
        self.random = random;
        self.devices_die();
    }
}
