// SPDX-License-Identifier: Apache-2.0
//! The guest's vCPUs, its balloon, and copies by the kernel on the VMM's behalf.
//!
//! A vCPU that meets an absent or protected page sleeps in the kernel and
//! leaves a message. The message is only a hint: it may be read late, twice, or
//! when the vCPU has long gone on. Woken, the vCPU looks again.

use crate::{
    content::{SECTORS, Sectors},
    knobs::Eviction,
    state::State,
};
use pagetide_addr::{Access, PageNo, PageRange};

/// What a write puts where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Write {
    pub sectors: Sectors,
    pub stamp: u32,
}

/// An access to one page; without a write, it reads all of it.
#[derive(Clone, Copy, Debug)]
pub struct PageAccess {
    pub page: PageNo,
    pub write: Option<Write>,
}

/// A vCPU.
#[derive(Clone, Debug, Default)]
pub struct Vcpu {
    /// What it is about to do, or sleeps over.
    pub pending: Option<PageAccess>,
    pub asleep: bool,
    last: PageNo,
}

/// A page fault as the userfaultfd reports it.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    pub page: PageNo,
    pub access: Access,
}

/// A page that a system call of the VMM holds and will write to, whatever page tables say by then.
#[derive(Clone, Copy, Debug)]
pub struct KernelPin {
    pub page: PageNo,
    pub instance: u32,
    write: Write,
    until_ms: u64,
}

/// Longest life of a kernel pin: shorter than the reclaimer's wait after an unmapping.
const PIN_MS_MAX: u64 = 45;

impl State {
    pub fn vcpu_step(&mut self) {
        let awake: Vec<usize> = (0..self.vcpus.len())
            .filter(|i| !self.vcpus[*i].asleep)
            .collect();
        if awake.is_empty() {
            return;
        }
        let number = self.random.pick(&awake);
        let access = match self.vcpus[number].pending.take() {
            Some(access) => access,
            None => self.new_access(number),
        };
        self.access(number, access);
    }

    fn new_access(&mut self, number: usize) -> PageAccess {
        let next = self.vcpus[number].last.next();
        let sequential = self.random.coin() && self.knobs.active.contains(&next);
        let page = if sequential { next } else { self.active_page() };
        self.vcpus[number].last = page;
        let write = self.random.coin().then(|| self.write());
        PageAccess { page, write }
    }

    /// A write of one sector or a few.
    pub fn write(&mut self) -> Write {
        let from = self.random.index(SECTORS);
        let to = from + 1 + self.random.index(SECTORS - from);
        // Now and then zeros, so that whole pages of them come about.
        let stamp = if self.random.below(4) == 0 {
            0
        } else {
            self.stamp()
        };
        Write {
            sectors: Sectors { from, to },
            stamp,
        }
    }

    /// A vCPU tries its access, and sleeps if it cannot be.
    pub fn access(&mut self, number: usize, access: PageAccess) {
        let page = self.page(access.page);
        if page.poisoned {
            assert!(
                page.damaged,
                "{:?} is poisoned but was never damaged",
                access.page
            );
            self.coverage.poisoned_reads += 1;
            return;
        }
        let protected = access.write.is_some() && page.protected;
        match page.content {
            Some(content) if !protected => {
                page.mapped = true;
                match access.write {
                    Some(write) => self.complete_write(access.page, write, "a vCPU"),
                    None => self.observe(access.page, content, "a vCPU"),
                }
            }
            _ => self.sleep(number, access),
        }
    }

    fn sleep(&mut self, number: usize, access: PageAccess) {
        self.tell(
            access.page,
            format_args!("vCPU {number} sleeps over {access:?}"),
        );
        let vcpu = &mut self.vcpus[number];
        vcpu.pending = Some(access);
        vcpu.asleep = true;
        let wanted = if access.write.is_some() {
            Access::Write
        } else {
            Access::Read
        };
        self.messages.push_back(Message {
            page: access.page,
            access: wanted,
        });
    }

    /// vCPUs that are in the middle of an access try it; they begin no other.
    pub fn finish_accesses(&mut self) {
        for number in 0..self.vcpus.len() {
            if !self.vcpus[number].asleep
                && let Some(access) = self.vcpus[number].pending.take()
            {
                self.access(number, access);
            }
        }
    }

    /// True if nobody waits for anything, and no message is left to be read.
    pub fn is_quiet(&self) -> bool {
        self.vcpus.iter().all(|v| v.pending.is_none())
            && self.requests.is_empty()
            && self.messages.is_empty()
            && self.page_requests.is_empty()
    }

    /// Whoever sleeps over one of `pages` wakes.
    pub fn wake(&mut self, pages: PageRange) {
        self.tell_range(pages, "woken");
        for vcpu in &mut self.vcpus {
            if vcpu.asleep && vcpu.pending.is_some_and(|a| pages.contains(a.page)) {
                vcpu.asleep = false;
            }
        }
    }

    /// The daemon reads a message: mostly the oldest, and now and then it will read it once more.
    pub fn take_message(&mut self) -> Option<Message> {
        if self.messages.is_empty() {
            return None;
        }
        let at = if self.random.below(4) == 0 {
            self.random.index(self.messages.len())
        } else {
            0
        };
        self.coverage.vcpu_faults += 1;
        if self.random.below(8) == 0 {
            return self.messages.get(at).copied();
        }
        self.messages.remove(at)
    }

    /// Balloon or free page reporting: the page is punched, and nobody says so.
    pub fn give_up_a_page(&mut self) {
        let number = self.active_page();
        let page = self.page(number);
        page.content = None;
        page.mapped = false;
        page.versions.clone_from(&page.past);
        self.coverage.discards += 1;
        self.tell(number, "given up by the guest");
    }

    /// A system call of the VMM takes a page by its page table and will write to it a little later.
    /// Only the reclaimer's rules make that safe.
    pub fn take_kernel_pin(&mut self) {
        if self.knobs.eviction == Eviction::AtRandom {
            return;
        }
        let number = self.active_page();
        let write = self.write();
        let life_ms = 1 + self.random.below(PIN_MS_MAX);
        let until_ms = self.now_ms + life_ms;
        let page = self.page(number);
        if page.content.is_none() || page.protected || page.poisoned {
            return;
        }
        page.mapped = true;
        let instance = page.instance;
        self.kernel_pins.push(KernelPin {
            page: number,
            instance,
            write,
            until_ms,
        });
        self.coverage.kernel_pins += 1;
        self.tell(number, "taken by a system call");
    }

    /// Time goes by, and system calls end.
    pub fn pass_time(&mut self, time_ms: u64) {
        self.now_ms += time_ms;
        let now = self.now_ms;
        let (over, left): (Vec<_>, Vec<_>) = std::mem::take(&mut self.kernel_pins)
            .into_iter()
            .partition(|pin| pin.until_ms <= now);
        self.kernel_pins = left;
        for pin in over {
            // A page given up meanwhile was orphaned by the guest itself.
            let page = self.page(pin.page);
            if page.instance == pin.instance && page.content.is_some() {
                self.complete_write(pin.page, pin.write, "a system call");
            }
        }
    }
}
