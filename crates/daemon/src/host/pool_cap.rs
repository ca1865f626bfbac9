// SPDX-License-Identifier: Apache-2.0
//! The pools of all VMs together: their report, and the change of their cap.

use super::{Host, slow_tiers};
use crate::{
    control::ControlError,
    pool::{NewCap, PoolReport},
};
use std::sync::atomic::Ordering::Relaxed;

impl Host {
    pub(super) fn pool_report(&self) -> PoolReport {
        let cap = self.pool_cap.cap();
        let tmpfs = rustix::fs::statvfs(&self.state_dir);
        let mut report = PoolReport {
            state_dir: self.state_dir.display().to_string(),
            cap_bytes: cap.cap_bytes(),
            used_bytes: cap.used_bytes(),
            peak_bytes: cap.peak_bytes(),
            tmpfs_free_bytes: tmpfs.map_or(0, |tmpfs| tmpfs.f_bavail * tmpfs.f_frsize),
            ..PoolReport::default()
        };
        let mut ram_bytes = 0;
        for vm in self.vms.all() {
            let bytes = vm.core.store.bytes();
            ram_bytes += vm.core.layout.look().len_bytes();
            report.stored_bytes += bytes.stored_bytes;
            let tiers = vm.core.store.counts();
            report.zstd_bytes += tiers.zstd_bytes.load(Relaxed);
            report.same_filled_pages += tiers.same_filled_pages.load(Relaxed);
            report.fragmented_bytes += bytes.fragmented_bytes();
            let devices = vm.core.protection.report().devices;
            let policies = devices.iter().map(|device| device.policy.bytes);
            report.metadata_bytes += vm.core.metadata_bytes() + policies.sum::<u64>();
            report.full_vms += u64::from(vm.core.store.full().is_some());
        }
        report.tiers = slow_tiers::reports(&self.shared.slow);
        report.metadata_share = share(report.metadata_bytes, ram_bytes);
        report
    }

    /// Changes the cap; VMs whose pools were full go on as soon as there is room.
    pub(super) fn change_pool_cap(&self, cap: NewCap) -> Result<PoolReport, ControlError> {
        match cap {
            NewCap::None => self.pool_cap.set(None)?,
            NewCap::Bytes(bytes) => self.pool_cap.set(Some(bytes))?,
            NewCap::Default => self.pool_cap.reset()?,
        }
        tracing::info!(cap_bytes = ?self.pool_cap.cap().cap_bytes(), "the cap of the pools was changed");
        for vm in self.vms.all() {
            vm.core.look_at_store();
            vm.core.limit.want_reclaim();
        }
        Ok(self.pool_report())
    }
}

#[expect(clippy::cast_precision_loss, reason = "sizes far below 2^53")]
fn share(part_bytes: u64, of_bytes: u64) -> f64 {
    match of_bytes {
        0 => 0.0,
        _ => part_bytes as f64 / of_bytes as f64,
    }
}
