// SPDX-License-Identifier: Apache-2.0
//! The floor under every fill: `UFFDIO_COPY` of one page into a hole, nobody waiting.

use super::content::PAGE;
use pagetide_addr::{Hva, PAGE_BYTES};
use pagetide_sys::{
    cpu,
    mapping::SharedMapping,
    memory_file::GuestFile,
    uffd::{Features, FillOutcome, Userfaultfd, Watch},
};
use std::{fmt::Display, os::fd::AsFd, time::Instant};

fn failed(error: impl Display) -> String {
    format!("measuring UFFDIO_COPY: {error}")
}

/// Times the filling of `pages` pages, in nanoseconds. The thread stays on `cpu` meanwhile.
pub(super) fn measure(pages: u64, cpu: usize) -> Result<Vec<u32>, String> {
    let before = cpu::affinity().map_err(failed)?;
    cpu::set_affinity(&[cpu]).map_err(failed)?;
    let measured = fill(pages);
    cpu::set_affinity(&before).map_err(failed)?;
    measured
}

fn fill(pages: u64) -> Result<Vec<u32>, String> {
    let bytes = pages * PAGE_BYTES;
    let file = GuestFile::new_memfd("pagetide-floor", bytes).map_err(failed)?;
    // Memory that the host of this machine has given once: the guest's has been touched, too.
    file.allocate(0, bytes).map_err(failed)?;
    file.punch(0, bytes).map_err(failed)?;
    let mapping = SharedMapping::new(file.as_fd(), bytes).map_err(failed)?;
    let userfaultfd = Userfaultfd::create_here().map_err(failed)?;
    userfaultfd.api(Features::NONE).map_err(failed)?;
    let start = Hva(mapping.address() as u64);
    userfaultfd
        .register(start, bytes, Watch::Missing)
        .map_err(failed)?;
    let content = [7; PAGE];
    let mut taken = Vec::new();
    for page in 0..pages {
        let target = Hva(start.0 + page * PAGE_BYTES);
        let begun = Instant::now();
        let outcome = userfaultfd.copy(target, &content).map_err(failed)?;
        taken.push(super::guest::ns_since(begun));
        if outcome != (FillOutcome::Filled { bytes: PAGE_BYTES }) {
            return Err(failed(format!("{outcome:?} instead of a fill")));
        }
    }
    Ok(taken)
}
