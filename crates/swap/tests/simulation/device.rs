// SPDX-License-Identifier: Apache-2.0
//! Devices that do DMA: bits, leases, parked requests, and transfers that outlive the daemon.
//!
//! ```text
//!   Popped ── bits set ──► Leased ── each page pinned ──► the transfer lands; gone
//!     ▲  └─ not ─► Parked    │  ▲
//!     │  answered    │       └──┴ a page is a hole all the same (the guest gave it up):
//!     │  answered    │            alias fault, wait for the answer
//!     └──────────────┤
//!     ▲  pages left  │ writes pages whole, and lands in a buffer first
//!     └────────────── Landed ── overwrite answered, no page left ──► gone
//! ```
//! A pinned page is written whatever the page tables say: that is why it must
//! not be punched. When the daemon dies, transfers that have all their pages
//! land later, until the successor holds the ring's lock; it then does every
//! unfinished request again, with pages that were overwritten already.

use crate::{
    content::{SECTORS, Sectors, Stamps},
    dimm::{BASE, SLOT},
    guest::Write,
    knobs::LeaseUnit,
    random::OneIn,
    state::State,
};
use pagetide_addr::{PageNo, PageRange, PageSet, SectionNo};
use pagetide_gmem::{FaultOutcome, Restricted, Served};

const REQUESTS_MAX: usize = 4;

/// The bits of a device, and the pages its rings lie in.
#[derive(Clone, Debug)]
pub struct Device {
    pub may: Vec<bool>,
    pub wired: Vec<PageNo>,
    /// Pages that were wired at any time, and so may have been given up with their bits set.
    pub once_wired: Vec<PageNo>,
    /// It may use its bits. One that is not active does no DMA: if it cannot be attached nobody asks it
    /// for leases any more, and what it was granted until then may go.
    pub active: bool,
    /// It could not be attached, for its VMM has ended: what it had popped is nobody's.
    pub cut_off: bool,
}

/// Where a request is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    Popped,
    Parked,
    Leased,
    /// Leased, and waiting for an alias fault.
    Faulted,
    /// In a buffer of the device, which has asked that its pages be overwritten.
    Bounced,
}

/// A page request that waits to be taken.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    pub request: u64,
    pub pages: PageRange,
    /// What the device has written to each of them, if they are to be overwritten.
    pub overwrite: Option<Stamps>,
}

/// A request of the guest to a device: read or write the same sectors of each page.
#[derive(Clone, Debug)]
pub struct Request {
    pub id: u64,
    pub device: usize,
    pub pages: PageRange,
    pub phase: Phase,
    write: Option<Write>,
    /// Pages that the transfer is still to reach: all but those that were overwritten.
    left: Vec<PageNo>,
    /// Instances of the first of these, pinned.
    pins: Vec<u32>,
    /// Pages that were installed with its content while it was in a bounce buffer; and those among them that
    /// cannot have had that content for any other reason.
    installed: Vec<PageNo>,
    surely_installed: Vec<PageNo>,
}

impl Device {
    pub fn new(page_count: usize) -> Self {
        Self {
            may: vec![false; page_count],
            wired: Vec::new(),
            once_wired: Vec::new(),
            active: false,
            cut_off: false,
        }
    }

    fn allows(&self, pages: &[PageNo]) -> bool {
        self.active && pages.iter().all(|page| self.may[page.index()])
    }
}

impl Request {
    fn holds_lease(&self) -> bool {
        matches!(self.phase, Phase::Leased | Phase::Faulted)
    }

    fn is_submitted(&self) -> bool {
        self.pins.len() == self.left.len()
    }

    fn pinned(&self) -> impl Iterator<Item = (PageNo, u32)> {
        self.left.iter().copied().zip(self.pins.iter().copied())
    }

    /// It begins at the beginning.
    fn begin_again(&mut self) {
        self.phase = Phase::Popped;
        self.left = self.pages.iter().collect();
        self.pins.clear();
    }

    /// What it writes to each page, if it writes pages whole.
    fn whole_pages(&self) -> Option<Stamps> {
        let write = self.write?;
        let is_whole = write.sectors.to - write.sectors.from == SECTORS;
        is_whole.then_some(Stamps([write.stamp; SECTORS]))
    }

    /// True if `page` may be installed with `content` on its behalf now.
    fn may_overwrite(&self, page: PageNo, content: Stamps) -> bool {
        self.phase == Phase::Bounced
            && self.left.contains(&page)
            && self.whole_pages() == Some(content)
    }

    /// Its pages are asked for.
    fn asked(&self, overwrite: Option<Stamps>) -> Asked {
        Asked {
            request: self.id,
            pages: self.pages,
            overwrite,
        }
    }
}

impl State {
    pub fn device_step(&mut self) {
        if self.devices.is_empty() || !self.alive {
            return;
        }
        if self.requests.len() < REQUESTS_MAX && self.random.below(3) == 0 {
            self.pop();
        } else if !self.requests.is_empty() {
            let at = self.random.index(self.requests.len());
            self.advance(at);
        }
    }

    fn pop(&mut self) {
        // Now and then the guest names memory that it has given back, or never had.
        let astray = self.knobs.plugging != OneIn(0) && self.random.below(12) == 0;
        let start = if astray {
            SLOT.start.plus(self.random.below(SLOT.len()))
        } else {
            self.active_page()
        };
        let memory = if BASE.contains(start) { BASE } else { SLOT };
        let len = self.random.pick(&[1, 1, 2, 5, 18]);
        let end = start.plus(len).min(memory.end);
        let mut write = self.random.coin().then(|| self.write());
        if let Some(write) = &mut write
            && self.random.coin()
        {
            (write.sectors.from, write.sectors.to) = (0, SECTORS);
        }
        let pages = PageRange::new(start, end);
        let request = Request {
            id: self.number(),
            device: self.random.index(self.devices.len()),
            pages,
            phase: Phase::Popped,
            write,
            left: pages.iter().collect(),
            pins: Vec::new(),
            installed: Vec::new(),
            surely_installed: Vec::new(),
        };
        self.requests.push(request);
    }

    /// One step of one request.
    pub fn advance(&mut self, at: usize) {
        let request = &mut self.requests[at];
        match request.phase {
            Phase::Parked | Phase::Faulted | Phase::Bounced => {}
            Phase::Popped if self.devices[request.device].allows(&request.left) => {
                for page in &request.left {
                    let removed = self.pages[page.index()].removed;
                    assert!(!removed, "a device reaches {page:?}, which is removed");
                }
                request.phase = Phase::Leased;
            }
            Phase::Popped => {
                // What was overwritten once is not written again.
                let is_new = request.left.len() as u64 == request.pages.len();
                let overwrite = (request.whole_pages()).filter(|_| is_new && self.random.coin());
                request.phase = match overwrite {
                    Some(_) => Phase::Bounced,
                    None => Phase::Parked,
                };
                self.page_requests.push_back(request.asked(overwrite));
            }
            Phase::Leased if request.is_submitted() => {
                let request = self.requests.swap_remove(at);
                self.land(&request);
            }
            Phase::Leased => self.pin_next(at),
        }
    }

    fn pin_next(&mut self, at: usize) {
        let request = &mut self.requests[at];
        let next = request.left[request.pins.len()];
        let page = &mut self.pages[next.index()];
        assert!(!page.removed, "DMA reaches {next:?}, which is removed");
        page.dma = true;
        // What the VMM has unmapped is still in our own mapping, and harms nobody there.
        if page.content.is_some() || page.unmapped {
            request.pins.push(page.instance);
            return;
        }
        assert!(
            self.coverage.discards > 0,
            "DMA meets a hole at {next:?}, which nobody gave up"
        );
        request.phase = Phase::Faulted;
        let asked = request.asked(None);
        self.page_requests.push_back(Asked {
            pages: next.single(),
            ..asked
        });
        self.coverage.alias_faults += 1;
    }

    fn land(&mut self, request: &Request) {
        self.coverage.transfers += 1;
        for (number, instance) in request.pinned() {
            let page = &self.pages[number.index()];
            let Some(content) = page.content.filter(|_| page.instance == instance) else {
                // The guest gave the page up under its own transfer.
                continue;
            };
            match request.write {
                Some(write) => self.complete_write(number, write, "a device"),
                None => self.observe(number, content, "a device"),
            }
        }
    }

    /// A page request is answered.
    pub fn answer(&mut self, id: u64, outcome: FaultOutcome) {
        let Some(at) = self.requests.iter().position(|r| r.id == id) else {
            panic!("request {id} is answered but not there");
        };
        let request = &mut self.requests[at];
        request.phase = match (outcome, request.phase) {
            (FaultOutcome::Present, Phase::Parked) => Phase::Popped,
            (FaultOutcome::Present, Phase::Faulted) => Phase::Leased,
            (FaultOutcome::OutOfRange, Phase::Parked | Phase::Faulted) => {
                let request = self.requests.swap_remove(at);
                let right = !BASE.contains(request.pages.start) || !self.base_allocated;
                assert!(right, "request {id} is refused: {:?}", request.pages);
                self.coverage.refused_requests += 1;
                return;
            }
            // The guest gets an I/O error; its memory is as it was.
            (FaultOutcome::Lost | FaultOutcome::Gone, Phase::Parked | Phase::Faulted) => {
                self.requests.swap_remove(at);
                return;
            }
            (outcome, phase) => panic!("request {id} in {phase:?} is answered {outcome:?}"),
        };
    }

    /// The page becomes present with `content`; true if a device has asked for that.
    pub fn note_installed(&mut self, number: PageNo, content: Stamps) -> bool {
        let expected = self.pages[number.index()].versions.contains(&content);
        let may = |request: &&mut Request| request.may_overwrite(number, content);
        let mut asked: Vec<_> = self.requests.iter_mut().filter(may).collect();
        for request in &mut asked {
            request.installed.push(number);
        }
        if let [only] = &mut asked[..]
            && !expected
        {
            only.surely_installed.push(number);
        }
        !asked.is_empty()
    }

    /// An overwrite is answered.
    pub fn answer_overwrite(&mut self, id: u64, done: Served) {
        let Some(at) = self.requests.iter().position(|r| r.id == id) else {
            panic!("request {id} is answered but not there");
        };
        let request = &mut self.requests[at];
        assert_eq!(request.phase, Phase::Bounced);
        let first = request.pages.start.0;
        let told = |page: &PageNo| done.installed & 1 << (page.0 - first) != 0;
        let untold = request.surely_installed.iter().find(|page| !told(page));
        assert_eq!(
            untold, None,
            "installed by request {id}, and it is not told"
        );
        let never = |page: &PageNo| told(page) && !request.installed.contains(page);
        let never = request.pages.iter().find(never);
        assert_eq!(never, None, "request {id} is told so, and it never was");
        request.left = request.pages.iter().filter(|page| !told(page)).collect();
        request.installed.clear();
        request.surely_installed.clear();
        request.phase = Phase::Popped;
        let is_over = request.left.is_empty();
        let memory = request.pages.start;
        match done.outcome {
            FaultOutcome::OutOfRange => {
                self.requests.swap_remove(at);
                let right = !BASE.contains(memory) || !self.base_allocated;
                assert!(right, "request {id} is refused, at {memory:?}");
                self.coverage.refused_requests += 1;
            }
            _ if is_over => {
                self.requests.swap_remove(at);
                self.coverage.transfers += 1;
            }
            // Whatever the reason, the way by a fault tells it once more.
            _ => {}
        }
    }

    /// A device that does no DMA now disconnects, and begins anew without a bit.
    pub fn reset_an_idle_device(&mut self) -> Option<usize> {
        if self.devices.is_empty() {
            return None;
        }
        let number = self.random.index(self.devices.len());
        let mut own = self.requests.iter().filter(|r| r.device == number);
        if own.any(Request::holds_lease) {
            return None;
        }
        self.devices[number].may.fill(false);
        self.devices[number].wired.clear();
        Some(number)
    }

    /// The pages that a device keeps.
    pub fn wired_in(&self, device: usize, section: SectionNo) -> PageSet {
        let mut set = PageSet::EMPTY;
        for page in &self.devices[device].wired {
            if page.section() == section {
                set.insert(*page);
            }
        }
        set
    }

    /// A queue is enabled, or disabled: its ring stays where it is meanwhile.
    pub fn change_wiring(&mut self) {
        if self.devices.is_empty() {
            return;
        }
        let number = self.random.index(self.devices.len());
        let page = self.active_page();
        let present = self.pages[page.index()].content.is_some();
        let device = &mut self.devices[number];
        if device.wired.pop().is_none() && present && device.may[page.index()] {
            device.wired.push(page);
            device.once_wired.push(page);
        }
    }

    /// The device clears its bits, and looks for leases.
    pub fn restrict_device(
        &mut self,
        device: usize,
        section: SectionNo,
        pages: &PageSet,
    ) -> Restricted {
        let mut pages = *pages;
        pages.subtract(&self.wired_in(device, section));
        for page in pages.pages(section) {
            self.devices[device].may[page.index()] = false;
            self.tell(page, format_args!("taken from device {device}"));
        }
        let unit = self.knobs.lease_unit;
        let leased = self
            .requests
            .iter()
            .filter(|r| r.device == device && r.holds_lease())
            .any(|r| {
                let mut leased = PageSet::EMPTY;
                (r.left.iter().filter(|page| page.section() == section))
                    .for_each(|page| leased.insert(*page));
                match unit {
                    LeaseUnit::Page => leased.intersects(&pages),
                    LeaseUnit::Section => !leased.is_empty(),
                }
            });
        let busy = self.knobs.busy;
        if leased || self.random.happens(busy) {
            self.coverage.busy += 1;
            Restricted::Busy
        } else {
            Restricted::Done
        }
    }

    /// Why a present page must not be punched now, if so.
    pub fn held_by_a_device(&self, number: PageNo) -> Option<String> {
        let instance = self.pages[number.index()].instance;
        let holds = |r: &&Request| r.pinned().any(|pin| pin == (number, instance));
        if let Some(request) = self.requests.iter().find(holds) {
            return Some(format!("request {} does DMA there", request.id));
        }
        if self.dead_io.iter().any(|r| holds(&r)) {
            return Some("a transfer of a dead daemon is under way there".into());
        }
        let granted = (0..self.devices.len()).find(|d| self.devices[*d].may[number.index()]);
        granted.map(|device| format!("device {device} may use it"))
    }

    /// No device may use a page of the range, nor is using one.
    pub fn assert_out_of_reach(&self, pages: PageRange) {
        for request in self.requests.iter().filter(|r| r.holds_lease()) {
            let apart = !request.left.iter().any(|page| pages.contains(*page));
            assert!(apart, "request {} has a lease of {pages:?}", request.id);
        }
        for (number, device) in self.devices.iter().enumerate() {
            let may = pages.iter().find(|page| device.may[page.index()]);
            assert_eq!(may, None, "device {number} may use a page of {pages:?}");
        }
    }

    /// The daemon's process is gone: bits, leases and parked requests with it.
    pub fn devices_die(&mut self) {
        for device in &mut self.devices {
            device.may.fill(false);
            device.wired.clear();
            device.active = false;
        }
        for request in &mut self.requests {
            if request.holds_lease() && request.is_submitted() {
                self.dead_io.push(request.clone());
            }
            self.coverage.overwrites_cut_short += u64::from(!request.installed.is_empty());
            request.installed.clear();
            request.surely_installed.clear();
            request.begin_again();
        }
    }

    /// A transfer of a dead daemon lands.
    pub fn land_dead_io(&mut self) {
        if self.dead_io.is_empty() {
            return;
        }
        let at = self.random.index(self.dead_io.len());
        let request = self.dead_io.swap_remove(at);
        self.land(&request);
        self.coverage.dead_io_bounced += 1;
    }

    /// The sectors a request writes, for messages.
    pub fn describe(&self) -> String {
        let sectors = |w: Write| -> Sectors { w.sectors };
        let requests: Vec<_> = self
            .requests
            .iter()
            .map(|r| (r.id, r.pages, r.phase, r.write.map(sectors)))
            .collect();
        let vcpus: Vec<_> = self
            .vcpus
            .iter()
            .map(|v| (v.asleep, v.pending.map(|a| (a.page, a.write.is_some()))))
            .collect();
        format!("vCPUs (asleep, access) {vcpus:?}; requests {requests:?}")
    }
}
