// SPDX-License-Identifier: Apache-2.0
//! Swap-out: CPU time for each page, on stand-ins so large that what a pass takes by itself (scans, the look for
//! other processes that map the RAM) is as little of it as with a VM.

use super::{
    peers::Peers,
    plan::{Cpus, OUT_PAGES},
    rig::RowRig,
    row::Row,
};
use crate::{
    fault::{content::Kind, guest::Order, process::Guest},
    harness::figures::to_f64,
    interrupt::Interrupted,
};
use std::path::{Path, PathBuf};

/// What is evicted: only records, and as on the paper's fleet.
const ROWS: [Row; 2] = [Row::Lz4, Row::Paper];

/// One kind of content.
pub(super) struct OutMeasured {
    rig: RowRig,
    guest: Guest,
    /// CPU time of the thread that paged out to zram, for each page, by round, in microseconds.
    pub(super) zram_us: Vec<f64>,
}

impl OutMeasured {
    pub(super) const fn kind(&self) -> Kind {
        self.rig.row().content()
    }

    /// CPU time of the daemon for each page, by round, in microseconds.
    pub(super) fn ours_us(&self) -> &[f64] {
        &self.rig.measured.swap_out_us
    }
}

/// See the module.
pub(super) struct SwapOut {
    pub(super) by_kind: Vec<OutMeasured>,
    disk: PathBuf,
    cpus: Cpus,
}

impl SwapOut {
    /// Starts guests and daemons; `memory` and `disk` are folders.
    pub(super) fn prepare(memory: &Path, disk: &Path, cpus: Cpus) -> Result<Self, String> {
        let memory = memory.join("out");
        std::fs::create_dir(&memory).map_err(|error| format!("{}: {error}", memory.display()))?;
        let of = |row: Row| {
            Ok::<_, String>(OutMeasured {
                rig: RowRig::prepare(row, &memory, disk, cpus.engine, OUT_PAGES)?,
                guest: Guest::start(disk, row.content(), OUT_PAGES, cpus.vcpu)?,
                zram_us: Vec::new(),
            })
        };
        let by_kind = ROWS.into_iter().map(of).collect::<Result<_, _>>()?;
        Ok(Self {
            by_kind,
            disk: disk.to_owned(),
            cpus,
        })
    }

    /// Each time with a fresh guest: of one that a daemon had evicted and let go, the kernel did not swap the
    /// pages of zeros out.
    pub(super) fn measure_zram(
        &mut self,
        peers: &mut Peers,
        interrupted: &Interrupted,
    ) -> Result<(), String> {
        for out in &mut self.by_kind {
            interrupted.check()?;
            let mut guest = Guest::start(&self.disk, out.kind(), OUT_PAGES, self.cpus.vcpu)?;
            if let Some(paged_out) = peers.page_out(&mut guest, OUT_PAGES)? {
                let each_us = to_f64(paged_out.cpu_ns) / to_f64(OUT_PAGES) / 1e3;
                out.zram_us.push(each_us);
            }
        }
        Ok(())
    }

    pub(super) fn measure_ours(&mut self, interrupted: &Interrupted) -> Result<(), String> {
        for out in &mut self.by_kind {
            interrupted.check()?;
            out.rig.measure_out(&out.guest)?;
        }
        Ok(())
    }

    pub(super) fn verify(&mut self) -> Result<(), String> {
        self.by_kind
            .iter_mut()
            .try_for_each(|out| out.guest.have_done(&Order::Verify))
    }
}
