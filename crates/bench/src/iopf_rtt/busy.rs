// SPDX-License-Identifier: Apache-2.0
//! The load of a busy host: threads that compress, and threads that scan page tables, on one CPU (VPRI 3.2
//! names both as the load of its figure 3).
//!
//! Successful turns are counted separately for each kind: a load of which one half always fails is not the
//! load that the figures claim, see [`Turns::of_both`].

use std::{
    os::fd::AsFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread::JoinHandle,
};

use pagetide_addr::{Hva, PAGE_BYTES, PageNo, to_usize};
use pagetide_swap::tier::{PAGE, Packer, Seed};
use pagetide_sys::{mapping::SharedMapping, memory_file::GuestFile, pagemap::Pagemap};

use crate::tenant_ram::{failed, move_to};

/// Memory whose page table is scanned.
const SCANNED_BYTES: u64 = 64 << 20;

/// Successful turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Turns {
    /// Pages that were compressed.
    pub(super) compressed: u64,
    /// Scans of the whole page table.
    pub(super) scanned: u64,
}

impl Turns {
    /// Both kinds, or a message about the one without any turn.
    pub(super) fn of_both(self) -> Result<Self, String> {
        let missing = match self {
            Self { compressed: 0, .. } => "compressed nothing",
            Self { scanned: 0, .. } => "scanned no page table",
            _ => return Ok(self),
        };
        Err(format!("the load on the host's CPU {missing}"))
    }
}

impl std::ops::AddAssign for Turns {
    fn add_assign(&mut self, more: Self) {
        self.compressed += more.compressed;
        self.scanned += more.scanned;
    }
}

/// Whether a turn succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Worked,
    Failed,
}

/// Load on one CPU; ends when dropped.
pub(super) struct Busy {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    compressed: Arc<AtomicU64>,
    scanned: Arc<AtomicU64>,
}

impl Busy {
    /// Starts to load `cpu`; both threads have tried a turn when it returns.
    pub(super) fn start(cpu: usize) -> Result<Self, String> {
        let wrong = failed("the load");
        let file = GuestFile::new_memfd("pagetide-busy", SCANNED_BYTES).map_err(|e| wrong(&e))?;
        let scanned = SharedMapping::new(file.as_fd(), SCANNED_BYTES).map_err(|e| wrong(&e))?;
        for page in (0..SCANNED_BYTES / PAGE_BYTES).map(PageNo) {
            let touched = scanned.copy_to(page.byte_offset(), &page.0.to_ne_bytes());
            touched.map_err(|e| wrong(&e))?;
        }
        let mut packer = Packer::default();
        let mut content = [7; PAGE];
        let compress = move |turn: u64| {
            content[to_usize(turn % PAGE_BYTES)] ^= turn.to_le_bytes()[0];
            // None is a page of zeros, which is not compressed.
            let packed = packer.pack(Seed(1), PageNo(turn), &content);
            match std::hint::black_box(packed) {
                Some(_) => Turn::Worked,
                None => Turn::Failed,
            }
        };
        let pagemap = Pagemap::of_self().map_err(|e| wrong(&e))?;
        let scan = move |_| {
            let first = Hva(scanned.address() as u64);
            let mut present = 0_u64;
            let count = |_, entry: pagetide_sys::pagemap::PagemapEntry| {
                present += u64::from(entry.is_present());
            };
            match pagemap.visit(first, SCANNED_BYTES / PAGE_BYTES, count) {
                Ok(()) if std::hint::black_box(present) > 0 => Turn::Worked,
                _ => Turn::Failed,
            }
        };
        Self::of(cpu, compress, scan)
    }

    fn of(
        cpu: usize,
        compress: impl FnMut(u64) -> Turn + Send + 'static,
        scan: impl FnMut(u64) -> Turn + Send + 'static,
    ) -> Result<Self, String> {
        let mut busy = Self {
            stop: Arc::default(),
            threads: Vec::new(),
            compressed: Arc::default(),
            scanned: Arc::default(),
        };
        let tried = [
            busy.run(cpu, Arc::clone(&busy.compressed), compress)?,
            busy.run(cpu, Arc::clone(&busy.scanned), scan)?,
        ];
        for first in tried {
            first.recv().map_err(|e| failed("the load")(&e))?;
        }
        Ok(busy)
    }

    /// Successful turns so far.
    pub(super) fn turns(&self) -> Turns {
        Turns {
            compressed: self.compressed.load(Ordering::Relaxed),
            scanned: self.scanned.load(Ordering::Relaxed),
        }
    }

    /// Starts a thread; the returned receiver gets a message after the first turn.
    fn run(
        &mut self,
        cpu: usize,
        worked: Arc<AtomicU64>,
        mut turn: impl FnMut(u64) -> Turn + Send + 'static,
    ) -> Result<mpsc::Receiver<()>, String> {
        let stop = Arc::clone(&self.stop);
        let (tried, first) = mpsc::sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("busy".into())
            .spawn(move || {
                if let Err(error) = move_to(cpu) {
                    tracing::warn!(%error, "the load is where it likes");
                }
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    if turn(number) == Turn::Worked {
                        worked.fetch_add(1, Ordering::Relaxed);
                    }
                    if number == 0 && tried.send(()).is_err() {
                        // The receiver is gone: the load was ended.
                        return;
                    }
                    number += 1;
                }
            });
        self.threads
            .push(thread.map_err(|e| failed("a thread")(&e))?);
        Ok(first)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn any_cpu() -> usize {
        pagetide_sys::cpu::affinity().unwrap()[0]
    }

    #[test]
    fn load_compresses_and_scans() {
        let busy = Busy::start(any_cpu()).unwrap();
        let turns = busy.turns().of_both().unwrap();
        assert!(turns.compressed > 0 && turns.scanned > 0, "{turns:?}");
    }

    #[test]
    fn turns_that_fail_are_not_counted_and_a_load_without_either_kind_is_refused() {
        let turns = |compress, scan| {
            let busy = Busy::of(any_cpu(), move |_| compress, move |_| scan).unwrap();
            busy.turns()
        };
        let only_compressed = turns(Turn::Worked, Turn::Failed);
        assert!(only_compressed.compressed > 0 && only_compressed.scanned == 0);
        let refused = only_compressed.of_both().unwrap_err();
        assert!(refused.contains("scanned no page table"), "{refused}");
        let refused = turns(Turn::Failed, Turn::Worked).of_both().unwrap_err();
        assert!(refused.contains("compressed nothing"), "{refused}");
    }
}
