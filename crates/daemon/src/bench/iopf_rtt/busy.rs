// SPDX-License-Identifier: Apache-2.0
//! What keeps a host busy: threads that compress, and threads that scan page tables, on
//! one CPU (VPRI 3.2 names both as the load under which its figure 3 was taken).

use std::{
    os::fd::AsFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
};

use pagetide_addr::{Hva, PAGE_BYTES, PageNo};
use pagetide_swap::tier::{PAGE, Packer, Seed};
use pagetide_sys::{mapping::SharedMapping, memory_file::GuestFile, pagemap::Pagemap};

use super::memory::{failed, move_to};

/// Memory whose page table is scanned.
const SCANNED_BYTES: u64 = 64 << 20;

/// Load on one CPU; ends when dropped.
pub(super) struct Busy {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    work: Arc<AtomicU64>,
}

impl Busy {
    /// Begins to load `cpu`.
    pub(super) fn start(cpu: usize) -> Result<Self, String> {
        let wrong = failed("the load");
        let file = GuestFile::new_memfd("pagetide-busy", SCANNED_BYTES).map_err(|e| wrong(&e))?;
        let scanned = SharedMapping::new(file.as_fd(), SCANNED_BYTES).map_err(|e| wrong(&e))?;
        for page in (0..SCANNED_BYTES / PAGE_BYTES).map(PageNo) {
            let touched = scanned.copy_to(page.byte_offset(), &page.0.to_ne_bytes());
            touched.map_err(|e| wrong(&e))?;
        }
        let mut busy = Self {
            stop: Arc::default(),
            threads: Vec::new(),
            work: Arc::default(),
        };
        let mut packer = Packer::default();
        let mut content = [7; PAGE];
        busy.run(cpu, move |turn| {
            content[PageNo(turn % PAGE_BYTES).index()] ^= turn.to_le_bytes()[0];
            std::hint::black_box(packer.pack(Seed(1), PageNo(turn), &content));
        })?;
        let pagemap = Pagemap::of_self().map_err(|e| wrong(&e))?;
        busy.run(cpu, move |_| {
            let first = Hva(scanned.address() as u64);
            let mut present = 0_u64;
            let count = |_, entry: pagetide_sys::pagemap::PagemapEntry| {
                present += u64::from(entry.is_present());
            };
            // A scan that fails is no load, and shows as such: see `work`.
            if pagemap
                .visit(first, SCANNED_BYTES / PAGE_BYTES, count)
                .is_ok()
            {
                std::hint::black_box(present);
            }
        })?;
        Ok(busy)
    }

    /// Turns of work done so far.
    pub(super) fn work(&self) -> u64 {
        self.work.load(Ordering::Relaxed)
    }

    fn run(
        &mut self,
        cpu: usize,
        mut turn: impl FnMut(u64) + Send + 'static,
    ) -> Result<(), String> {
        let (stop, work) = (Arc::clone(&self.stop), Arc::clone(&self.work));
        let thread = std::thread::Builder::new()
            .name("busy".into())
            .spawn(move || {
                if let Err(error) = move_to(cpu) {
                    tracing::warn!(%error, "the load is where it likes");
                }
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    turn(number);
                    number += 1;
                    work.fetch_add(1, Ordering::Relaxed);
                }
            });
        self.threads
            .push(thread.map_err(|e| failed("a thread")(&e))?);
        Ok(())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::warn!("a thread of the load has panicked");
            }
        }
    }
}
