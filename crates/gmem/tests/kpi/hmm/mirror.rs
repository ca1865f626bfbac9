// SPDX-License-Identifier: Apache-2.0
//! [`Mirror`]: a device with the commands of Linux's test driver (`HMM_DMIRROR_*`).

use crate::kit::{Actor, Build, Machine, Stopped, attach_all, end, space_of};
use pagetide_addr::{Access, PAGE_SHIFT, PageNo, PageRange, to_usize};
use pagetide_gmem::{
    AddressSpace, Cause, Fault, FaultOutcome, Placement, Region, RegionRequest, Wait,
};
use std::sync::{Arc, mpsc};

/// Pages of the buffers of most tests (4 MiB there; here enough for several faults to show).
pub const BUFFER_PAGES: u64 = 32;
/// Pages of a huge page.
pub const HUGE_PAGES: u64 = 512;
/// Repetitions of the tests that repeat.
pub const TIMES: u64 = 10;

/// What a command reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Report {
    /// Pages it went over, or moved.
    pub cpages: u64,
    /// How often it had to ask.
    pub faults: u64,
}

/// Two devices with memory, and a process.
pub struct Fixture {
    pub machine: Machine,
    pub space: Arc<AddressSpace>,
    pub cpu: Actor,
    pub devices: [Mirror; 2],
}

pub struct Mirror {
    pub actor: Actor,
    space: Arc<AddressSpace>,
}

impl Fixture {
    pub fn new() -> Self {
        let machine = Machine::eager();
        let (cpu, one) = machine.cpu_and_gpu(2 * HUGE_PAGES);
        let two = machine.actor(Build::default());
        two.give_memory(0x6000_0000, 2 * HUGE_PAGES);
        let space = space_of(8 * HUGE_PAGES);
        attach_all(&space, &[&cpu, &one, &two]);
        let mirror = |actor| Mirror {
            actor,
            space: Arc::clone(&space),
        };
        let devices = [mirror(one), mirror(two)];
        Self {
            machine,
            space,
            cpu,
            devices,
        }
    }

    /// The device that most tests use.
    pub fn device(&self) -> &Mirror {
        &self.devices[0]
    }

    /// An anonymous mapping.
    pub fn buffer(&self, pages: u64) -> Region {
        let align = if pages == HUGE_PAGES {
            HUGE_PAGES << PAGE_SHIFT
        } else {
            0
        };
        let request = RegionRequest {
            align,
            ..RegionRequest::of_bytes(pages << PAGE_SHIFT)
        };
        self.space.alloc(&request).unwrap()
    }

    /// The process ends.
    pub fn end(self) {
        let [one, two] = &self.devices;
        end(
            &self.machine,
            &self.space,
            &[&self.cpu, &one.actor, &two.actor],
        );
    }
}

/// A buffer of the driver's, with what the device read or is to write.
pub type Words = Vec<u64>;

pub fn pattern(pages: PageRange, seed: u64) -> Words {
    let begin = pages.start.byte_offset();
    (begin..begin + pages.bytes())
        .step_by(8)
        .map(|va| va ^ seed)
        .collect()
}

pub fn zeros(pages: PageRange) -> Words {
    vec![0; to_usize(pages.bytes() / 8)]
}

impl Mirror {
    pub fn new(actor: Actor, space: &Arc<AddressSpace>) -> Self {
        let space = Arc::clone(space);
        Self { actor, space }
    }

    /// Reads a buffer (`HMM_DMIRROR_READ`).
    pub fn read(&self, pages: PageRange) -> Result<(Report, Words), FaultOutcome> {
        let mut words = zeros(pages);
        let report = self.command(pages, Access::Read, |at, word| words[at] = *word)?;
        Ok((report, words))
    }

    /// Writes a buffer (`HMM_DMIRROR_WRITE`).
    pub fn write(&self, pages: PageRange, words: &Words) -> Result<Report, FaultOutcome> {
        self.command(pages, Access::Write, |at, word| *word = words[at])
    }

    fn command(
        &self,
        pages: PageRange,
        access: Access,
        mut act: impl FnMut(usize, &mut u64),
    ) -> Result<Report, FaultOutcome> {
        let mut report = Report {
            cpages: 0,
            faults: 0,
        };
        let begin = pages.start.byte_offset();
        for page in pages.iter() {
            while !self.has(page, access) {
                report.faults += 1;
                self.ask(PageRange::new(page, pages.end), access)?;
            }
            for va in (page.byte_offset()..page.byte_offset() + 4096).step_by(8) {
                let at = to_usize((va - begin) / 8);
                let done = self.actor.access(va, access, |word| act(at, word));
                assert!(matches!(done, Ok(((), 0))), "it has the page");
            }
            report.cpages += 1;
        }
        Ok(report)
    }

    fn has(&self, page: PageNo, access: Access) -> bool {
        let entry = self.actor.entry(page.byte_offset());
        entry.is_some_and(|entry| access == Access::Read || entry.access == Access::Write)
    }

    /// One request for all that is left of a buffer.
    fn ask(&self, pages: PageRange, access: Access) -> Result<(), FaultOutcome> {
        let (told, heard) = mpsc::channel();
        let reply = Box::new(move |outcome| told.send(outcome).unwrap());
        let device = self.actor.device.id();
        let fault = Fault {
            device,
            pages,
            access,
        };
        (self.space).fault(&Cause::Fault(fault), Wait::Reply(reply));
        match heard.recv().unwrap() {
            FaultOutcome::Present => Ok(()),
            other => Err(other),
        }
    }

    /// Brings a buffer into the device's memory (`HMM_DMIRROR_MIGRATE_TO_DEV`); its report counts the
    /// pages that are there now and were not.
    pub fn migrate(&self, buffer: &Region, pages: PageRange) -> Result<Report, FaultOutcome> {
        buffer.set_policy(Placement::Unique, None).unwrap();
        let before = self.actor.device.used_memory_bytes();
        self.ask(pages, Access::Read)?;
        let moved = self.actor.device.used_memory_bytes() - before;
        Ok(Report {
            cpages: moved >> PAGE_SHIFT,
            faults: 1,
        })
    }

    /// What it has mapped of each page (`HMM_DMIRROR_SNAPSHOT`).
    pub fn snapshot(&self, pages: PageRange) -> Vec<Option<(Access, Owner)>> {
        let of = |page: PageNo| {
            let entry = self.actor.entry(page.byte_offset())?;
            Some((entry.access, owner(entry.pa)))
        };
        pages.iter().map(of).collect()
    }
}

/// Whose memory a frame is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    Host,
    First,
    Second,
    Tests,
}

fn owner(pa: u64) -> Owner {
    match pa {
        0x4000_0000..0x6000_0000 => Owner::First,
        0x6000_0000..0x8000_0000 => Owner::Second,
        0x100_0000..0x1000_0000 => Owner::Host,
        _ => Owner::Tests,
    }
}

/// An access by the CPU to each page of a buffer, which brings it home; how many faults that took.
#[track_caller]
pub fn fault_back(cpu: &Actor, pages: PageRange) -> u64 {
    u64::from(cpu.touch(pages, Access::Read))
}

pub fn denied(stopped: Result<(), Stopped>) -> bool {
    matches!(stopped, Err(Stopped::Refused(_)))
}
