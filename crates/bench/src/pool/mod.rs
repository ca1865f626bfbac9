// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench pool`: what evicted memory costs, in memory.
//!
//! The mix of pages is that of the Taiji paper's fleet (5.3.3): of all evicted pages 76.79 % are zero, and
//! the others compress to 47.63 % of their size on average. A stand-in for a VMM maps RAM with such pages; a
//! daemon takes it over, evicts all of it, and reports what that takes:
//!
//! ```text
//!   mixed      all of it evicted once
//!   churned    three times a third of the pages, drawn at random, came back, was written anew with content
//!              of another size, and was evicted again with all the rest
//!   shrunk     then half of the pages, drawn at random, were read; readahead brought many others along
//! ```
//! Of these, `shrunk` is the worst case of fragmentation: what is left lies in chunks of which most slots are
//! free. Later evictions fill those slots; until then the memory stays with the pool.
//!
//! | figure | meaning |
//! |---|---|
//! | `stored_bytes` | content with its CRCs |
//! | `fragmented_bytes` | memory of the pool that holds none: what content leaves of its slot, free slots, empty chunks |
//! | `metadata_bytes` | page words, the pool's header, sections, the record of slots, page attributes, heat |
//! | `metadata_share` | the most that was of all RAM, evicted or not |
//! | `freed_over_spent` | bytes of evicted pages over the sum of the three above; 9 in the paper without metadata |
//!
//! Beside that, without a daemon: what pages take in the tier zstd over what they take in lz4
//! (`figures.zstd_tier_bytes_over_lz4_tier`, see [`crate::tiers`]): of these pages, of pages of records that
//! are as compressible, and of the memory of this program.
//!
//! The peer is kernel zram, which is given the same pages as `mixed`: `mem_used_total`, without its table of
//! pages. At the end every byte is compared.

pub(crate) mod content;
pub(crate) mod guest;
mod ram;

use super::{
    daemon::{Daemon, directory_in},
    harness::{
        figures::{rounded, to_f64},
        report::{BenchError, BenchReport, failed, unable},
        rounds::progress,
    },
    interrupt::Interrupted,
    kernel_swap::{Compressor, KernelSwap},
    memory::{fitting, ram_key},
    options::{SizeOptions, flags},
    tiers::{self, TierBytes},
};
use content::{RATIO, ZERO_SHARE};
use guest::{Guest, Order};
use pagetide_addr::{PAGE_BYTES, PageNo, to_usize};
use pagetide_daemon::control::VmReport;
use pagetide_swap::tier::PAGE;
use serde_json::{Value, json};
use std::path::Path;

const NAME: &str = "pool";
const RAM_BYTES: u64 = 1 << 30;
/// Times that a third of the pages is written anew.
const CHURNS: u32 = 3;
/// Pages of each kind that are packed for the tiers.
const TIER_PAGES: u64 = 8_000;

/// What evicted memory took at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Spent {
    ram_bytes: u64,
    evicted_pages: u64,
    zero_pages: u64,
    stored_bytes: u64,
    fragmented_bytes: u64,
    metadata_bytes: u64,
}

impl Spent {
    fn of(vm: &VmReport) -> Self {
        Self {
            ram_bytes: vm.ram_bytes,
            evicted_pages: vm.stored_pages,
            zero_pages: vm.zero_pages,
            stored_bytes: vm.stored_bytes,
            fragmented_bytes: vm.fragmented_bytes,
            metadata_bytes: vm.metadata_bytes,
        }
    }

    fn metadata_share(&self) -> f64 {
        to_f64(self.metadata_bytes) / to_f64(self.ram_bytes)
    }

    fn freed_over_spent(&self) -> f64 {
        let spent = self.stored_bytes + self.fragmented_bytes + self.metadata_bytes;
        to_f64(self.evicted_pages * PAGE_BYTES) / to_f64(spent)
    }

    /// Share of the pool's chunks that holds no content.
    fn fragmented_share(&self) -> f64 {
        to_f64(self.fragmented_bytes) / to_f64(self.stored_bytes + self.fragmented_bytes)
    }

    /// Bytes stored of each byte that is not in a page of zeros.
    fn compression_ratio(&self) -> f64 {
        let pages = self.evicted_pages - self.zero_pages;
        to_f64(self.stored_bytes) / to_f64(pages * PAGE_BYTES)
    }

    fn figures(&self) -> Value {
        json!({
            "evicted_bytes": self.evicted_pages * PAGE_BYTES,
            "zero_share": rounded(to_f64(self.zero_pages) / to_f64(self.evicted_pages)),
            "compression_ratio": rounded(self.compression_ratio()),
            "stored_bytes": self.stored_bytes,
            "fragmented_bytes": self.fragmented_bytes,
            "fragmented_share": rounded(self.fragmented_share()),
            "metadata_bytes": self.metadata_bytes,
            "freed_over_spent": rounded(self.freed_over_spent()),
        })
    }
}

/// The moments of a run.
struct Measured {
    mixed: Spent,
    churned: Spent,
    shrunk: Spent,
    daemon_anonymous_bytes: u64,
    zram: Result<u64, String>,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &SizeOptions) -> Result<BenchReport, BenchError> {
    let interrupted = Interrupted::listen().map_err(failed)?;
    let (bytes, smaller) = fitting(options.ram_bytes(RAM_BYTES)).map_err(unable)?;
    let in_memory = directory_in(Path::new("/dev/shm")).map_err(unable)?;
    let on_disk = directory_in(&std::env::temp_dir()).map_err(unable)?;
    let zram = zram_bytes(bytes);
    interrupted.check().map_err(failed)?;
    let state_dir = in_memory.path().join("daemon");
    let mut guest = Guest::start(on_disk.path(), bytes).map_err(unable)?;
    let daemon = Daemon::start_for(&state_dir, &flags(&options.settings), bytes).map_err(unable)?;
    daemon.attach(guest.pid(), None).map_err(unable)?;
    let measured = measure(&daemon, &mut guest, &interrupted, zram).map_err(failed)?;
    progress(NAME, "comparing every byte");
    guest.obey(Order::Verify).map_err(failed)?;
    daemon.detach().map_err(failed)?;
    let mut report = report(bytes, &measured);
    report.figures.insert("smaller".into(), json!(smaller));
    let zstd = zstd_over_lz4().map_err(failed)?;
    let name = "zstd_tier_bytes_over_lz4_tier";
    report.figures.insert(name.into(), zstd);
    Ok(report)
}

fn measure(
    daemon: &Daemon,
    guest: &mut Guest,
    interrupted: &Interrupted,
    zram: Result<u64, String>,
) -> Result<Measured, String> {
    progress(NAME, "evicting all");
    let mixed = Spent::of(&daemon.evict_whole()?);
    for churn in 1..=CHURNS {
        interrupted.check()?;
        progress(NAME, format_args!("churn {churn} of {CHURNS}"));
        guest.obey(Order::RewriteAThird)?;
        daemon.evict_whole()?;
    }
    let churned = Spent::of(&daemon.vm()?);
    progress(NAME, "half of it comes back");
    guest.obey(Order::ReadHalf)?;
    let shrunk = Spent::of(&daemon.vm()?);
    Ok(Measured {
        mixed,
        churned,
        shrunk,
        daemon_anonymous_bytes: daemon.anonymous_bytes()?,
        zram,
    })
}

/// What pages of three kinds take in zstd over what they take in lz4.
fn zstd_over_lz4() -> Result<Value, String> {
    let ratio_of = |pages: &[[u8; PAGE]]| {
        let bytes = TierBytes::of(pages.iter());
        let bytes = bytes.map_err(|error| error.to_string())?;
        Ok::<_, String>(rounded(bytes.zstd_over_lz4()))
    };
    let all = (0..TIER_PAGES).map(PageNo);
    let fleet: Vec<_> = all.clone().map(|page| content::content(page, 0)).collect();
    let records: Vec<_> = all.map(tiers::records).collect();
    let memory = tiers::memory_of(std::process::id(), to_usize(TIER_PAGES));
    let memory = memory.map_err(|error| format!("memory of this program: {error}"))?;
    Ok(json!({
        "fleet": ratio_of(&fleet)?,
        "records": ratio_of(&records)?,
        "this_program": ratio_of(&memory)?,
    }))
}

/// What zram takes for the same pages.
fn zram_bytes(bytes: u64) -> Result<u64, String> {
    progress(NAME, "zram");
    let zram = KernelSwap::on_zram(bytes, Compressor::Lz4)?;
    zram.write((0..bytes / PAGE_BYTES).map(|page| content::content(PageNo(page), 0)))?;
    zram.memory_bytes()
}

fn report(bytes: u64, measured: &Measured) -> BenchReport {
    let mut report = BenchReport::new(NAME);
    let Measured {
        mixed,
        churned,
        shrunk,
        ..
    } = measured;
    let moments = [("mixed", mixed), ("churned", churned), ("shrunk", shrunk)];
    let share = moments
        .map(|(_, spent)| spent.metadata_share())
        .into_iter()
        .fold(0.0, f64::max);
    let figures = &mut report.figures;
    figures.insert("ram".into(), ram_key(bytes).into());
    figures.insert("wanted_zero_share".into(), ZERO_SHARE.into());
    figures.insert("wanted_compression_ratio".into(), RATIO.into());
    figures.insert(
        "metadata_share".into(),
        ((share * 1e6).round() / 1e6).into(),
    );
    for (name, spent) in moments {
        figures.insert(name.into(), spent.figures());
    }
    let anonymous = measured.daemon_anonymous_bytes;
    figures.insert("daemon_anonymous_bytes".into(), anonymous.into());
    let ratios = &mut report.ratios;
    for (name, spent) in [
        ("freed_over_spent", mixed),
        ("freed_over_spent_churned", churned),
        ("freed_over_spent_shrunk", shrunk),
    ] {
        ratios.insert(name.into(), rounded(spent.freed_over_spent()).into());
    }
    match &measured.zram {
        Ok(zram_bytes) => {
            let freed_over_spent = to_f64(bytes) / to_f64(*zram_bytes);
            let zram = json!({
                "memory_bytes": zram_bytes,
                "freed_over_spent": rounded(freed_over_spent),
            });
            report.peers.insert("zram".into(), zram);
            let ratio = mixed.freed_over_spent() / freed_over_spent;
            ratios.insert("freed_over_spent_over_zram".into(), rounded(ratio).into());
        }
        Err(reason) => {
            report.peers.insert("zram".into(), json!(reason));
        }
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_has_the_worst_share_of_metadata_and_what_each_moment_took() {
        let spent = |stored_bytes, metadata_bytes| Spent {
            ram_bytes: 1 << 30,
            evicted_pages: 1 << 18,
            zero_pages: 3 << 16,
            stored_bytes,
            fragmented_bytes: 1 << 20,
            metadata_bytes,
        };
        let measured = Measured {
            mixed: spent(126 << 20, 1 << 20),
            churned: spent(100 << 20, 2 << 20),
            shrunk: spent(60 << 20, 3 << 20),
            daemon_anonymous_bytes: 7,
            zram: Ok(256 << 20),
        };
        let report = report(1 << 30, &measured);
        assert_eq!(report.figures["metadata_share"], json!(0.00293));
        assert_eq!(report.figures["shrunk"]["freed_over_spent"], json!(16.0));
        assert_eq!(report.figures["mixed"]["zero_share"], json!(0.75));
        assert_eq!(report.ratios["freed_over_spent"], json!(8.0));
        assert_eq!(report.ratios["freed_over_spent_over_zram"], json!(2.0));
    }
}
