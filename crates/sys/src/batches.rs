// SPDX-License-Identifier: Apache-2.0
//! [`drain_batches`]: makes the kernel put the pages in the batches of all CPUs on its lists.
//!
//! A page that is new, or was used, first waits in a batch of its CPU, with up to some dozen others, before it
//! gets on the lists of pages in memory. `MADV_PAGEOUT` takes pages from these lists, and drains the batch of the CPU
//! that it runs on only. So a page in the batch of a CPU that has gone idle stays mapped, however often it is
//! paged out from another CPU.
//!
//! There is no call for draining. `MADV_COLLAPSE` (Linux 6.1) begins with it, whatever it is to collapse: here a
//! page of our own, which is too little for a huge page, so that nothing else happens.

use crate::process::{Merge, ProcessError, ProcessFd};
use pagetide_addr::{Hva, PAGE_BYTES};

/// What the kernel collapses to.
const HUGE_BYTES: usize = 2 << 20;

/// Whether the batches were drained.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Drained {
    /// They were.
    All,
    /// This kernel has no call that does it: it is older than Linux 6.1, or has no huge pages.
    NotHere,
}

/// Drains them. It takes a tenth of a millisecond, and some milliseconds where CPUs are busy.
///
/// # Errors
/// [`ProcessError`].
pub fn drain_batches() -> Result<Drained, ProcessError> {
    // A huge page has room in it, for else the kernel refuses before it drains.
    let mut memory = vec![0_u8; 2 * HUGE_BYTES];
    let first = memory.as_ptr().align_offset(HUGE_BYTES);
    let Some(aligned) = memory.get_mut(first) else {
        return Ok(Drained::NotHere);
    };
    // Memory that was never touched is refused, too.
    *std::hint::black_box(&mut *aligned) = 1;
    let at = Hva(std::ptr::from_mut(aligned).addr() as u64);
    let own = ProcessFd::open(std::process::id())?;
    Ok(match own.merge(at, PAGE_BYTES)? {
        Merge::Done => Drained::All,
        Merge::NotMapped | Merge::NotNow => Drained::NotHere,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cpu, mapping::SharedMapping, memory_file::GuestFile, pagemap::Pagemap};
    use std::{os::fd::AsFd as _, thread};

    const PAGES: u64 = 5;
    const BYTES: u64 = PAGES * PAGE_BYTES;

    #[test]
    fn page_in_the_batch_of_another_cpu_leaves_the_page_table_once_batches_are_drained() {
        let swaps = std::fs::read_to_string("/proc/swaps").unwrap();
        let cpus = cpu::affinity().unwrap();
        let [here, there, ..] = cpus[..] else {
            eprintln!("SKIPPED: one CPU");
            return;
        };
        if crate::emulated::skip() || swaps.lines().count() > 1 {
            return;
        }
        let own = ProcessFd::open(std::process::id()).unwrap();
        let map = Pagemap::of_self().unwrap();
        let on = |cpu: usize, work: &(dyn Fn() + Sync)| {
            thread::scope(|scope| {
                scope.spawn(|| {
                    cpu::set_affinity(&[cpu]).unwrap();
                    work();
                });
            });
        };
        let mut lingered = 0;
        for round in 0..20 {
            let file = GuestFile::new_memfd("batch", BYTES).unwrap();
            let mapping = SharedMapping::new(file.as_fd(), BYTES).unwrap();
            let at = Hva(mapping.address() as u64);
            on(there, &|| {
                for page in 0..PAGES {
                    mapping.copy_to(page * PAGE_BYTES, &[7]).unwrap();
                }
            });
            let page_out = || {
                on(here, &|| {
                    own.page_out(&[(at, BYTES)]).unwrap();
                });
                map.count_present(at, PAGES).unwrap()
            };
            lingered += page_out();
            // A page that was being looked at by the kernel is one that was not taken this time.
            let left = (0..3).map(|_| {
                if drain_batches().unwrap() == Drained::NotHere {
                    eprintln!("SKIPPED: this kernel cannot");
                    return 0;
                }
                page_out()
            });
            assert_eq!(left.min(), Some(0), "round {round}");
        }
        eprintln!("{lingered} of {} pages had lingered", 20 * PAGES);
    }
}
