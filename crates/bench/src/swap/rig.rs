// SPDX-License-Identifier: Apache-2.0
//! A row as it is measured: its daemon, its device, and what came of it.

use super::{
    plan::{BY_DEVICE, BY_VCPU},
    row::{Lie, Row},
};
use crate::{
    daemon::Daemon,
    fault::{
        content::Content,
        guest::{Direction, Order},
        process::{Guest, add_blk, remove_blk},
        touch::Pattern,
    },
    harness::{figures::to_f64, latencies::LatenciesByRound},
    redis::RedisServer,
    tiers::TierBytes,
};
use pagetide_addr::{PAGE_BYTES, PageNo, to_usize};
use pagetide_swap::tier::PAGE;
use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Longest wait until all content lies where it is to. Its pace is 4,096 pages a second.
const SETTLE_WAIT: Duration = Duration::from_secs(60);
/// A pool that gives back nothing for so long has given back all.
const TRIM_LOOK: Duration = Duration::from_millis(1500);
const SETTLE_RETRY: Duration = Duration::from_millis(20);
/// Of what zstd is to take, in thousandths, so much counts as all: some pages of a section that was just evicted
/// may wait for its next turn.
const SETTLED_PERMILLE: u64 = 990;

/// See the module.
pub(super) struct RowRig {
    daemon: Daemon,
    row: Row,
    socket: PathBuf,
    image: PathBuf,
    /// Ends after its daemon.
    _server: Option<RedisServer>,
    pages: u64,
    /// Pages that zstd keeps of those that have content.
    zstd_pages: u64,
    pub(super) measured: RowMeasured,
}

/// What a row came to.
#[derive(Default)]
pub(super) struct RowMeasured {
    pub(super) cpu: LatenciesByRound,
    pub(super) device: LatenciesByRound,
    pub(super) device_again: LatenciesByRound,
    /// CPU time of the daemon for each evicted page, by round, in microseconds.
    pub(super) swap_out_us: Vec<f64>,
    /// The same until the content lay where it was to, for each page that moved.
    pub(super) settle_us: Vec<f64>,
    /// Where it lay when it was evicted, and when it was measured, in the last round.
    pub(super) evicted: Lie,
    pub(super) settled: Lie,
}

impl RowRig {
    /// Starts the daemon. `memory` and `disk` are folders for its state and its tier; its engine runs on CPU
    /// `engine`.
    pub(super) fn prepare(
        row: Row,
        memory: &Path,
        disk: &Path,
        engine: usize,
        pages: u64,
    ) -> Result<Self, String> {
        let server = match row {
            Row::Remote => Some(RedisServer::start(disk)?),
            _ => None,
        };
        let port = server.as_ref().map_or(0, RedisServer::port);
        let mut settings = row.settings(disk, port);
        let engine = engine.to_string();
        let common = ["--neighbours", "0", "--engine-cpus", &engine];
        settings.extend(common.map(str::to_owned));
        let state = memory.join(row.name());
        // In memory: what a disk of the guest takes is not measured.
        let image = memory.join(format!("{}.image", row.name()));
        File::create(&image)
            .and_then(|file| file.set_len(pages * PAGE_BYTES))
            .map_err(|error| format!("{}: {error}", image.display()))?;
        Ok(Self {
            daemon: Daemon::start(&state, &settings)?,
            row,
            socket: memory.join(format!("{}.sock", row.name())),
            image,
            _server: server,
            pages,
            zstd_pages: zstd_pages_of(row, pages)?,
            measured: RowMeasured::default(),
        })
    }

    pub(super) const fn row(&self) -> Row {
        self.row
    }

    /// Measures it once.
    pub(super) fn measure(&mut self, guest: &mut Guest, seed: u64) -> Result<(), String> {
        self.daemon.attach(guest.pid(), None)?;
        add_blk(&self.daemon, &self.socket, &self.image)?;
        if self.row == Row::PaperInTiers {
            self.evict_by_thirds()?;
        } else {
            self.evict()?;
            self.settle()?;
        }
        let by_device = |seed| Order::ByDevice {
            direction: Direction::OutOfMemory,
            part: BY_DEVICE,
            socket: self.socket.clone(),
            seeds: vec![seed],
        };
        let cpu = guest.time(&Order::Touch {
            pattern: Pattern::Random,
            part: BY_VCPU,
            seed,
        })?;
        let device = guest.time(&by_device(seed + 1))?;
        let again = guest.time(&by_device(seed + 2))?;
        self.measured.cpu.add(cpu);
        self.measured.device.add(device);
        self.measured.device_again.add(again);
        remove_blk(&self.daemon, &self.socket)?;
        self.daemon.detach().map(|_| ())
    }

    /// Measures what evicting all of it takes.
    pub(super) fn measure_out(&mut self, guest: &Guest) -> Result<(), String> {
        self.daemon.attach(guest.pid(), None)?;
        self.evict()?;
        self.daemon.detach().map(|_| ())
    }

    fn lie(&self) -> Result<Lie, String> {
        Ok(Lie::of(&self.daemon.vm()?))
    }

    fn evict(&mut self) -> Result<(), String> {
        let before = self.daemon.cpu_ns()?;
        let vm = self.daemon.evict_whole()?;
        let cpu_ns = self.daemon.cpu_ns()?.saturating_sub(before);
        let each_us = to_f64(cpu_ns) / to_f64(self.pages) / 1e3;
        self.measured.swap_out_us.push(each_us);
        self.measured.evicted = Lie::of(&vm);
        Ok(())
    }

    fn settle(&mut self) -> Result<(), String> {
        let before = self.daemon.cpu_ns()?;
        let stored = self.measured.evicted.stored_pages();
        let moved = match self.row {
            Row::Zstd => {
                let wanted = self.zstd_pages * SETTLED_PERMILLE / 1000;
                self.until("in zstd", |lie| lie.zstd_pages >= wanted)?;
                self.until_trimmed()?;
                wanted
            }
            Row::Disk => {
                self.until("on disk", |lie| lie.disk_pages >= stored)?;
                stored
            }
            Row::Remote => {
                self.until("on the server", |lie| lie.remote_pages >= stored)?;
                stored
            }
            Row::Zero | Row::Same | Row::Lz4 | Row::Paper | Row::PaperInTiers => 0,
        };
        let cpu_ns = self.daemon.cpu_ns()?.saturating_sub(before);
        if moved > 0 {
            self.measured
                .settle_us
                .push(to_f64(cpu_ns) / to_f64(moved) / 1e3);
        }
        self.measured.settled = self.lie()?;
        Ok(())
    }

    /// What is evicted first is on disk, what is evicted then in zstd, and the rest as it was evicted.
    fn evict_by_thirds(&mut self) -> Result<(), String> {
        let third_bytes = self.pages * PAGE_BYTES / 3;
        self.daemon.evict_down_to(2 * third_bytes)?;
        self.until("on disk", |lie| lie.disk_pages > 0 && lie.pool_pages() == 0)?;
        self.daemon.evict_down_to(third_bytes)?;
        self.until("in zstd", |lie| {
            lie.zstd_pages > 0 && lie.lz4_pages <= lie.zstd_pages / 50
        })?;
        self.measured.settled = Lie::of(&self.daemon.evict_whole()?);
        Ok(())
    }

    /// Until the pool has given back the memory of what moved.
    fn until_trimmed(&self) -> Result<(), String> {
        let (begun, mut before) = (Instant::now(), self.lie()?.memory_bytes);
        loop {
            std::thread::sleep(TRIM_LOOK);
            let now = self.lie()?.memory_bytes;
            if now == before || begun.elapsed() > SETTLE_WAIT {
                return Ok(());
            }
            before = now;
        }
    }

    fn until(&self, place: &str, lies: impl Fn(&Lie) -> bool) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            let lie = self.lie()?;
            if lies(&lie) {
                return Ok(());
            }
            if begun.elapsed() > SETTLE_WAIT {
                return Err(self.daemon.with_log(format!(
                    "row {}: after {} s not all of it is {place}: {lie:?}",
                    self.row.name(),
                    SETTLE_WAIT.as_secs()
                )));
            }
            std::thread::sleep(SETTLE_RETRY);
        }
    }

    /// Compares what the device has read from memory with what was there.
    pub(super) fn verify(&self) -> Result<(), String> {
        let failed = |error: std::io::Error| format!("{}: {error}", self.image.display());
        let image = File::open(&self.image).map_err(failed)?;
        let content = Content::of(self.row.content())?;
        let mut found = [0; PAGE];
        for page in BY_DEVICE.of(self.pages).iter() {
            image
                .read_exact_at(&mut found, page.byte_offset())
                .map_err(failed)?;
            if found != content.page(page) {
                return Err(format!(
                    "row {}: a device read wrong bytes from {page}",
                    self.row.name()
                ));
            }
        }
        Ok(())
    }
}

/// How many pages of a row's content zstd keeps.
fn zstd_pages_of(row: Row, pages: u64) -> Result<u64, String> {
    if row != Row::Zstd {
        return Ok(0);
    }
    let content = Content::of(row.content())?;
    let pages = (0..pages).map(|page| content.page(PageNo(page)));
    let pages: Vec<_> = pages.collect();
    let bytes = TierBytes::of(pages.iter()).map_err(|error| error.to_string())?;
    match to_usize(bytes.zstd_pages) {
        0 => Err("zstd takes no page of these".to_owned()),
        _ => Ok(bytes.zstd_pages),
    }
}
