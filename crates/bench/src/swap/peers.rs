// SPDX-License-Identifier: Apache-2.0
//! The peers: kernel swap on zram, with lz4 and with zstd, and in a file.

use super::plan::{BY_VCPU, KINDS, OUT_PAGES, RETOUCHES};
use crate::{
    fault::{
        content::Kind,
        guest::Order,
        process::Guest,
        touch::{Part, Pattern},
    },
    harness::{figures::to_f64, latencies::LatenciesByRound},
    kernel_swap::{Compressor, KernelSwap, PagedOut},
};
use pagetide_addr::PAGE_BYTES;
use std::path::Path;

/// A peer's figures for one kind of content.
#[derive(Default)]
pub(super) struct PeerMeasured {
    pub(super) cpu: LatenciesByRound,
    /// CPU time of the thread that paged out, for each page, by round, in microseconds.
    pub(super) swap_out_us: Vec<f64>,
    /// Memory that a page takes, by round.
    pub(super) bytes_per_page: Vec<f64>,
}

impl PeerMeasured {
    fn add(&mut self, out: PagedOut, took: Vec<u32>, pages: u64) {
        self.cpu.add(took);
        let pages = to_f64(pages);
        self.swap_out_us.push(to_f64(out.cpu_ns) / pages / 1e3);
        if let Some(bytes) = out.memory_bytes {
            self.bytes_per_page.push(to_f64(bytes) / pages);
        }
    }
}

/// A peer, or why there is none.
pub(super) struct Peer {
    swap: Result<KernelSwap, String>,
    pub(super) by_kind: Vec<(Kind, PeerMeasured)>,
}

impl Peer {
    fn new(swap: Result<KernelSwap, String>, kinds: &[Kind]) -> Self {
        let by_kind = kinds.iter().map(|kind| (*kind, PeerMeasured::default()));
        Self {
            swap,
            by_kind: by_kind.collect(),
        }
    }

    /// Why there is none.
    pub(super) fn missing(&self) -> Option<&str> {
        self.swap.as_ref().err().map(String::as_str)
    }

    /// What it came to with content of `kind`, if it was measured.
    pub(super) fn of(&self, kind: Kind) -> Option<&PeerMeasured> {
        let found = self.by_kind.iter().find(|(it, _)| *it == kind);
        found
            .map(|(_, measured)| measured)
            .filter(|_| self.swap.is_ok())
    }

    fn measure(
        &mut self,
        kind: Kind,
        guest: &mut Guest,
        pages: u64,
        order: &Order,
    ) -> Result<(), String> {
        let found = self.by_kind.iter_mut().find(|(it, _)| *it == kind);
        let (Ok(swap), Some((_, measured))) = (&mut self.swap, found) else {
            return Ok(());
        };
        let (out, took) =
            swap.paged_out(guest, pages, |guest, out| Ok((out, guest.time(order)?)))?;
        measured.add(out, took, pages);
        Ok(())
    }
}

/// See the module.
pub(super) struct Peers {
    pub(super) zram: Peer,
    pub(super) zram_zstd: Peer,
    pub(super) file: Peer,
    /// zram with lz4, in the orders of [`RETOUCHES`].
    pub(super) retouched: [LatenciesByRound; RETOUCHES.len()],
    pages: u64,
}

impl Peers {
    /// Peers for guests of `pages` pages, of which the file is in `disk`.
    pub(super) fn prepare(disk: &Path, pages: u64) -> Self {
        let bytes = 2 * pages * PAGE_BYTES;
        Self {
            zram: Peer::new(
                KernelSwap::on_zram(bytes.max(2 * OUT_PAGES * PAGE_BYTES), Compressor::Lz4),
                &KINDS,
            ),
            zram_zstd: Peer::new(
                KernelSwap::on_zram(bytes, Compressor::Zstd),
                &[Kind::Records, Kind::Paper],
            ),
            file: Peer::new(
                KernelSwap::in_file(disk.join("kernel.swap"), bytes),
                &[Kind::Records],
            ),
            retouched: Default::default(),
            pages,
        }
    }

    /// Runs `start` where guests are started that can be paged out to any of the peers.
    pub(super) fn within<T>(&self, start: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        match &self.file.swap {
            Ok(file) => file.within(start),
            Err(_) => start(),
        }
    }

    /// Measures all peers with `guest`, whose content is of `kind`, once.
    pub(super) fn measure(
        &mut self,
        kind: Kind,
        guest: &mut Guest,
        seed: u64,
    ) -> Result<(), String> {
        // The same pages as ours, and as many.
        let order = Order::Touch {
            pattern: Pattern::Random,
            part: BY_VCPU,
            seed,
        };
        for peer in [&mut self.zram, &mut self.zram_zstd, &mut self.file] {
            peer.measure(kind, guest, self.pages, &order)?;
        }
        Ok(())
    }

    /// Pages out a large guest of `pages` pages to zram with lz4; `None` if there is none.
    pub(super) fn page_out(
        &mut self,
        guest: &mut Guest,
        pages: u64,
    ) -> Result<Option<PagedOut>, String> {
        match &mut self.zram.swap {
            Ok(zram) => zram.paged_out(guest, pages, |_, out| Ok(out)).map(Some),
            Err(_) => Ok(None),
        }
    }

    /// Measures how long zram with lz4 takes to give all of `guest` back.
    pub(super) fn retouch(&mut self, guest: &mut Guest, seed: u64) -> Result<(), String> {
        let Ok(zram) = &mut self.zram.swap else {
            return Ok(());
        };
        for ((_, pattern), took) in RETOUCHES.into_iter().zip(&mut self.retouched) {
            let order = Order::Touch {
                pattern,
                part: Part::All,
                seed,
            };
            took.add(zram.paged_out(guest, self.pages, |guest, _| guest.time(&order))?);
        }
        Ok(())
    }
}
