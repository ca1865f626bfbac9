// SPDX-License-Identifier: Apache-2.0
//! One turn: sets a policy, and measures the VM and its disk under it.

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use super::{AdpLiveError, Device};
use crate::guest::Guest;
use crate::product::Product;

/// Between two polls.
pub(super) const LOOK: Duration = Duration::from_secs(1);

/// What was measured in one turn.
///
/// Of a disk there are `overwritten_pages_per_minute` (absent pages that a read covered whole: their old content was
/// not filled), `iopfs_per_request`, `blk_p50_us`, `blk_p99_us` and `blk_p999_us` of the requests of the last minute, and
/// `blk_iops`; of an interface `iopfs_per_packet` of those received, `received_packets_per_s`, and by the minute
/// `prefaults`, `stored_packets` and `fault_dropped_packets`.
#[derive(Clone, Debug, Serialize)]
pub struct Turn {
    /// The policy, by its name.
    pub policy: &'static str,
    /// I/O page faults a minute: page requests of the disk for absent pages.
    pub iopfs_per_minute: f64,
    /// Mean over the turn.
    pub resident_bytes: f64,
    /// Mean over the turn.
    pub protected_sections: f64,
    /// Sections a minute that the policy protected, and dropped for lack of room.
    pub dropped_sections_per_minute: f64,
    /// Pages a minute that were evicted though protected.
    pub evicted_protected_pages_per_minute: f64,
    /// How long the disk left a section alone before it was protected, at the end of the turn.
    pub promote_after_ms: f64,
    /// Pages evicted a minute.
    pub evicted_pages_per_minute: f64,
    /// Faults of vCPUs a minute.
    pub vcpu_faults_per_minute: f64,
    /// Of the device.
    #[serde(flatten)]
    pub of_device: BTreeMap<&'static str, f64>,
}

/// What turns are measured on.
pub(super) struct Meter<'a> {
    pub(super) product: &'a Product,
    pub(super) guest: &'a Guest,
    /// Name of the VM.
    pub(super) name: &'static str,
    /// Of its device.
    pub(super) socket: &'a Path,
    pub(super) device: Device,
}

impl Meter<'_> {
    /// Starts `policy` without any state.
    pub(super) fn set(&self, policy: &str) -> Result<(), AdpLiveError> {
        let words = ["vm", "protector", self.name, policy, "--json"];
        self.product.client(words)?.success()?;
        Ok(())
    }

    /// Measures for this long. `policy` is the one set, with its parameters.
    pub(super) fn measure(
        &self,
        policy: &'static str,
        time: Duration,
    ) -> Result<Turn, AdpLiveError> {
        let (before, device_before) = (self.product.show(self.name)?, self.device()?);
        let begun = Instant::now();
        let (mut resident, mut protected, mut looks) = (0.0, 0.0, 0.0);
        while begun.elapsed() < time {
            thread::sleep(LOOK);
            #[expect(clippy::cast_precision_loss, reason = "bytes far below 2^53")]
            let bytes = self.guest.resident_bytes()? as f64;
            resident += bytes;
            protected += figure(&self.product.show(self.name)?, "protected_sections")?;
            looks += 1.0;
        }
        let seconds = begun.elapsed().as_secs_f64();
        let after = self.product.show(self.name)?;
        let more = |name| Ok::<_, AdpLiveError>(figure(&after, name)? - figure(&before, name)?);
        let a_minute = |name| Ok::<_, AdpLiveError>(more(name)? / seconds * 60.0);
        let of_device = self.of_device(&device_before, seconds, more("absent_iopfs")?)?;
        Ok(Turn {
            policy: policy.split(':').next().unwrap_or(policy),
            iopfs_per_minute: a_minute("absent_iopfs")?,
            resident_bytes: resident / looks,
            protected_sections: protected / looks,
            dropped_sections_per_minute: a_minute("dropped_sections")?,
            evicted_protected_pages_per_minute: a_minute("evicted_protected_pages")?,
            promote_after_ms: figure(&after, "promote_after_ms")?,
            evicted_pages_per_minute: a_minute("evicted_pages")?,
            vcpu_faults_per_minute: a_minute("vcpu_faults")?,
            of_device,
        })
    }

    /// Figures of the device since `before`.
    fn of_device(
        &self,
        before: &Value,
        seconds: f64,
        iopfs: f64,
    ) -> Result<BTreeMap<&'static str, f64>, AdpLiveError> {
        let after = self.device()?;
        let more = |name| Ok::<_, AdpLiveError>(figure(&after, name)? - figure(before, name)?);
        let a_minute = |name| Ok::<_, AdpLiveError>(more(name)? / seconds * 60.0);
        let mut of_device = BTreeMap::new();
        match self.device {
            Device::Blk => {
                let done = more("requests")?;
                let account = self.product.client(["dpu", "slo", "--json"])?.json()?;
                let minute = &account["devices"][0]["windows"][0];
                of_device.insert(
                    "overwritten_pages_per_minute",
                    a_minute("overwritten_pages")?,
                );
                of_device.insert("iopfs_per_request", iopfs / done.max(1.0));
                of_device.insert("blk_p50_us", figure(minute, "p50_us")?);
                of_device.insert("blk_p99_us", figure(minute, "p99_us")?);
                of_device.insert("blk_p999_us", figure(minute, "p999_us")?);
                of_device.insert("blk_iops", done / seconds);
            }
            Device::Net => {
                let came = more("received_packets")?;
                of_device.insert("iopfs_per_packet", iopfs / came.max(1.0));
                of_device.insert("received_packets_per_s", came / seconds);
                of_device.insert("prefaults_per_minute", a_minute("prefaults")?);
                of_device.insert("stored_packets_per_minute", a_minute("stored_packets")?);
                of_device.insert(
                    "fault_dropped_packets_per_minute",
                    a_minute("fault_dropped_packets")?,
                );
            }
        }
        Ok(of_device)
    }

    fn device(&self) -> Result<Value, AdpLiveError> {
        Ok(self.product.device(self.socket)?)
    }
}

fn figure(report: &Value, name: &'static str) -> Result<f64, AdpLiveError> {
    report[name].as_f64().ok_or(AdpLiveError::NoFigure(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figure_that_is_not_told_is_named() {
        let report = serde_json::json!({"iopfs": 3});
        assert!(figure(&report, "iopfs").is_ok_and(|it| (it - 3.0).abs() < 1e-9));
        let error = figure(&report, "p999_us").expect_err("it is not there");
        assert!(error.to_string().contains("p999_us"));
    }
}
