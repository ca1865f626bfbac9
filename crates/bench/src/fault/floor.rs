// SPDX-License-Identifier: Apache-2.0
//! The floors of every fill: `UFFDIO_COPY` of one page into a hole without a waiter, and a fault answered
//! by it at once, from the same CPU.

use super::content::{PAGE, random_order};
use pagetide_addr::{Hva, PAGE_BYTES, PageNo};
use pagetide_sys::{
    cpu,
    lent::LentMemory,
    uffd::{Features, FillOutcome, Userfaultfd, Watch},
};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::{fmt::Display, os::fd::AsFd, time::Instant};

static CONTENT: [u8; PAGE] = [7; PAGE];

fn failed(error: impl Display) -> String {
    format!("measuring userfaultfd: {error}")
}

/// Times fills and round trips, `pages` of each, in nanoseconds. The thread stays on `cpu` meanwhile.
pub(crate) fn measure(pages: u64, cpu: usize) -> Result<(Vec<u32>, Vec<u32>), String> {
    let before = cpu::affinity().map_err(failed)?;
    cpu::set_affinity(&[cpu]).map_err(failed)?;
    let measured = fills(pages).and_then(|fills| Ok((fills, round_trips(pages)?)));
    cpu::set_affinity(&before).map_err(failed)?;
    measured
}

/// Registered memory with holes. The file's pages have been present once, so that a hypervisor below this
/// machine has allocated memory for them, as for a guest's touched pages.
fn watched_holes(pages: u64) -> Result<(LentMemory, Userfaultfd), String> {
    let bytes = pages * PAGE_BYTES;
    let memory = LentMemory::new("pagetide-floor", bytes).map_err(failed)?;
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(memory.as_fd(), punch, 0, bytes).map_err(failed)?;
    let userfaultfd = Userfaultfd::create_here().map_err(failed)?;
    userfaultfd.api(Features::NONE).map_err(failed)?;
    let start = Hva(memory.address() as u64);
    userfaultfd
        .register(start, bytes, Watch::Missing)
        .map_err(failed)?;
    Ok((memory, userfaultfd))
}

fn fill(userfaultfd: &Userfaultfd, at: Hva) -> Result<(), String> {
    let outcome = userfaultfd.copy(at, &CONTENT).map_err(failed)?;
    if outcome == (FillOutcome::Filled { bytes: PAGE_BYTES }) {
        Ok(())
    } else {
        Err(failed(format!("{outcome:?} instead of a fill")))
    }
}

fn fills(pages: u64) -> Result<Vec<u32>, String> {
    let (memory, userfaultfd) = watched_holes(pages)?;
    let mut taken = Vec::new();
    for page in (0..pages).map(PageNo) {
        let target = Hva(memory.address() as u64 + page.byte_offset());
        let begun = Instant::now();
        fill(&userfaultfd, target)?;
        taken.push(super::guest::ns_since(begun));
    }
    Ok(taken)
}

fn round_trips(pages: u64) -> Result<Vec<u32>, String> {
    let (mut memory, userfaultfd) = watched_holes(pages)?;
    // As in the fault reader: it waits in `read`.
    let flags = fcntl_getfl(userfaultfd.as_fd()).map_err(failed)?;
    fcntl_setfl(userfaultfd.as_fd(), flags & !OFlags::NONBLOCK).map_err(failed)?;
    let answering = std::thread::spawn(move || answer(&userfaultfd, pages));
    let mut taken = Vec::new();
    for page in random_order(pages, pages) {
        let bytes = memory
            .bytes_mut(page.byte_offset(), PAGE_BYTES)
            .ok_or_else(|| failed("the memory ends early"))?;
        let begun = Instant::now();
        std::hint::black_box(bytes.first().copied());
        taken.push(super::guest::ns_since(begun));
    }
    match answering.join() {
        Ok(answered) => answered.map(|()| taken),
        Err(_) => Err(failed("the thread that answers has panicked")),
    }
}

/// Answers `pages` faults. If one cannot be answered, its thread reads zeros: the return closes the
/// userfaultfd.
fn answer(userfaultfd: &Userfaultfd, pages: u64) -> Result<(), String> {
    let mut faults = Vec::new();
    let mut answered = 0;
    while answered < pages {
        userfaultfd.read_faults(&mut faults).map_err(failed)?;
        for fault in &faults {
            fill(userfaultfd, Hva(fault.address.0 & !(PAGE_BYTES - 1)))?;
            answered += 1;
        }
    }
    Ok(())
}
