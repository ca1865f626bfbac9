// SPDX-License-Identifier: Apache-2.0
//! The demo's findings, and the conditions that they must meet.

use serde::Serialize;
use serde_json::Value;

use crate::dense::DenseReport;

/// Share of the limit by which resident memory may pass it, in percent.
pub const TOLERANCE_PERCENT: u64 = 5;
/// Fewest vCPU faults and I/O page faults of a meaningful demo.
pub const LEAST_FAULTS: u64 = 1_000;
/// Longest stop of the VMM during the attach.
pub const LONGEST_ATTACH_PAUSE_US: f64 = 5_000.0;

/// Percentiles of a latency, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// Half are as fast as this.
    pub p50: f64,
    /// Nine of ten are as fast as this.
    pub p90: f64,
    /// All but one in a hundred are as fast as this.
    pub p99: f64,
}

impl Percentiles {
    /// Reads them from the object that a daemon reports; missing values read as 0.
    #[must_use]
    pub fn read(value: &Value) -> Self {
        let at = |name: &str| value[name].as_f64().unwrap_or_default();
        Self {
            p50: at("p50"),
            p90: at("p90"),
            p99: at("p99"),
        }
    }
}

/// The demo's report: what `target/demo/report.json` holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// What ran the guest's instructions: `kvm` or `tcg`.
    pub accel: String,
    /// Version of the stock QEMU.
    pub qemu_version: String,
    /// Release of the stock kernel in the guest.
    pub kernel: String,
    /// RAM of the guest.
    pub guest_ram_bytes: u64,
    /// Resident before the limit.
    pub resident_before_bytes: u64,
    /// The limit: half of it.
    pub limit_bytes: u64,
    /// Most resident while squeezed, sampled from outside.
    pub resident_max_after_bytes: u64,
    /// Most the metadata pool held.
    pub pool_bytes_max: u64,
    /// Seconds squeezed, by the samples.
    pub squeezed_seconds: f64,
    /// Time for which a thread of QEMU was stopped for the attach.
    pub attach_pause_us: f64,
    /// Faults of vCPUs.
    pub vcpu_faults: u64,
    /// How long they took.
    pub vcpu_fault_us: Percentiles,
    /// I/O page faults of the disk.
    pub iopfs: u64,
    /// How long they took.
    pub iopf_us: Percentiles,
    /// Pages evicted in total.
    pub evicted_pages: u64,
    /// Pages in the zero tier at the detach.
    pub zero_pages: u64,
    /// Pages in the lz4 tier at the detach.
    pub lz4_pages: u64,
    /// Bytes in the store at the detach.
    pub stored_bytes: u64,
    /// Restarts of the daemon.
    pub restarts: u64,
    /// Accesses past the leases: a bug if there is one.
    pub alias_faults: u64,
    /// Bytes of memory the guest verified since the attach.
    pub memory_bytes_verified: u64,
    /// Bytes of disk the guest verified since the attach.
    pub disk_bytes_verified: u64,
    /// Pages of memory found wrong.
    pub memory_errors: u64,
    /// Blocks of disk found wrong, and failed requests.
    pub disk_errors: u64,
    /// Guest memory pinned by any process.
    pub pinned_guest_bytes: u64,
    /// Whether the VM was detached, according to the kernel.
    pub detached: bool,
    /// Whether the guest then verified every byte once more.
    pub verified_after_detach: bool,
    /// The dense stand-in.
    pub dense: DenseReport,
}

/// The goals of a run of the demo.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DemoGoals {
    /// Seconds to be squeezed.
    pub squeezed_seconds: f64,
    /// Fewest I/O page faults; 0 without a device.
    pub iopfs: u64,
}

impl Report {
    /// Takes over the figures that the daemon reports for a VM.
    pub fn take_figures(&mut self, vm: &Value) {
        let number = |name: &str| vm[name].as_u64().unwrap_or_default();
        self.pool_bytes_max = self.pool_bytes_max.max(number("pool_bytes"));
        self.attach_pause_us = vm["attach_pause_us"].as_f64().unwrap_or_default();
        self.vcpu_faults = number("vcpu_faults");
        self.vcpu_fault_us = Percentiles::read(&vm["vcpu_fault_us"]);
        self.iopfs = number("iopfs");
        self.iopf_us = Percentiles::read(&vm["iopf_us"]);
        self.evicted_pages = number("evicted_pages");
        self.zero_pages = number("zero_pages");
        self.lz4_pages = number("lz4_pages");
        self.stored_bytes = number("stored_bytes");
        self.restarts = number("restarts");
        self.alias_faults = number("alias_faults");
        self.pinned_guest_bytes = number("pinned_guest_bytes");
    }

    /// Most bytes that may be resident under `limit_bytes`.
    #[must_use]
    pub const fn ceiling_bytes(limit_bytes: u64) -> u64 {
        limit_bytes + limit_bytes / 100 * TOLERANCE_PERCENT
    }

    /// Each condition that does not hold, as a sentence.
    #[must_use]
    pub fn failures(&self, wanted: &DemoGoals) -> Vec<String> {
        self.amounts(wanted)
            .into_iter()
            .chain(self.soundness())
            .filter(|(holds, _)| !holds)
            .map(|(_, sentence)| sentence)
            .collect()
    }

    /// Whether the counts are high enough.
    fn amounts(&self, wanted: &DemoGoals) -> [(bool, String); 6] {
        let (limit, most) = (self.limit_bytes, self.resident_max_after_bytes);
        let (seconds, enough) = (self.squeezed_seconds, wanted.squeezed_seconds);
        let (faults, iopfs) = (self.vcpu_faults, self.iopfs);
        let verified = self.memory_bytes_verified + self.disk_bytes_verified;
        let within = limit > 0 && most <= Self::ceiling_bytes(limit);
        [
            (
                within,
                format!(
                    "{most} bytes were resident at a limit of {limit}, more than {TOLERANCE_PERCENT}% past it."
                ),
            ),
            (
                seconds >= enough,
                format!("The guest was squeezed for {seconds:.1} s only, not {enough} s."),
            ),
            (
                faults >= LEAST_FAULTS,
                format!("There were {faults} vCPU faults only, not {LEAST_FAULTS}."),
            ),
            (
                iopfs >= wanted.iopfs,
                format!(
                    "There were {iopfs} I/O page faults only, not {}.",
                    wanted.iopfs
                ),
            ),
            (
                self.restarts == 1,
                format!(
                    "The daemon was restarted {} times, not once.",
                    self.restarts
                ),
            ),
            (
                verified >= 2 * self.guest_ram_bytes,
                format!("The guest verified {verified} bytes only, less than twice its RAM."),
            ),
        ]
    }

    /// Whether there was no damage.
    fn soundness(&self) -> [(bool, String); 8] {
        let pause_us = self.attach_pause_us;
        let none = |count: u64, what: &str| (count == 0, format!("{count} {what}."));
        [
            none(self.memory_errors, "pages of memory were wrong"),
            none(
                self.disk_errors,
                "blocks of the disk were wrong or requests failed",
            ),
            none(
                self.alias_faults,
                "accesses went past the leases (alias faults)",
            ),
            none(self.pinned_guest_bytes, "bytes of guest memory were pinned"),
            (
                pause_us > 0.0 && pause_us < LONGEST_ATTACH_PAUSE_US,
                format!(
                    "The attach stopped QEMU for {pause_us} us, not for less than {LONGEST_ATTACH_PAUSE_US} us."
                ),
            ),
            (self.detached, "The VM was not detached.".to_owned()),
            (
                self.verified_after_detach,
                "The guest did not verify every byte after the detach.".to_owned(),
            ),
            (
                self.dense.ram_bytes > 0 && self.dense.verified_bytes == self.dense.ram_bytes,
                "The dense stand-in did not verify every byte after the detach.".to_owned(),
            ),
        ]
    }

    /// The table for people.
    #[must_use]
    pub fn table(&self) -> String {
        let mut table = String::new();
        let mut line = |name: &str, value: String| table += &format!("  {name:<34}{value}\n");
        let us = |p: &Percentiles| format!("{:.0} / {:.0} / {:.0}", p.p50, p.p90, p.p99);
        line(
            "guest",
            format!(
                "{} under QEMU {} ({})",
                self.kernel, self.qemu_version, self.accel
            ),
        );
        line("guest RAM", mib(self.guest_ram_bytes));
        line("resident before", mib(self.resident_before_bytes));
        line("limit", mib(self.limit_bytes));
        line(
            "resident at most, squeezed",
            mib(self.resident_max_after_bytes),
        );
        line("squeezed for", format!("{:.1} s", self.squeezed_seconds));
        line("metadata pool at most", mib(self.pool_bytes_max));
        line(
            "attach stopped QEMU for",
            format!("{:.0} us", self.attach_pause_us),
        );
        line("vCPU faults", self.vcpu_faults.to_string());
        line("  p50 / p90 / p99 us", us(&self.vcpu_fault_us));
        line("I/O page faults", self.iopfs.to_string());
        line("  p50 / p90 / p99 us", us(&self.iopf_us));
        line("pages evicted", self.evicted_pages.to_string());
        line(
            "  of them absent now: zero, lz4",
            format!("{}, {}", self.zero_pages, self.lz4_pages),
        );
        line("  their stored bytes", mib(self.stored_bytes));
        line("daemon killed and restarted", self.restarts.to_string());
        line(
            "memory verified, errors",
            format!(
                "{}, {}",
                mib(self.memory_bytes_verified),
                self.memory_errors
            ),
        );
        line(
            "disk verified, errors",
            format!("{}, {}", mib(self.disk_bytes_verified), self.disk_errors),
        );
        line(
            "alias faults, pinned bytes",
            format!("{}, {}", self.alias_faults, self.pinned_guest_bytes),
        );
        line(
            "detached, then verified again",
            format!("{}, {}", self.detached, self.verified_after_detach),
        );
        let dense = &self.dense;
        line("dense stand-in", mib(dense.ram_bytes));
        line("  attach, squeeze", {
            let (time, rate) = (dense.attach_s, dense.squeeze_mib_per_s);
            format!("{time:.2} s, {rate:.0} MiB/s")
        });
        line("  touches a second, then attached", {
            let (before, attached) = (dense.counts_per_s_before, dense.counts_per_s_attached);
            let less = dense.slow_down_percent;
            format!("{before:.0}, {attached:.0}: slow-down {less:.1} %")
        });
        line("  verified after the detach", mib(dense.verified_bytes));
        table
    }
}

/// Bytes as MiB, for people.
#[must_use]
pub fn mib(bytes: u64) -> String {
    format!("{}.{} MiB", bytes >> 20, ((bytes % (1 << 20)) * 10) >> 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sound() -> Report {
        Report {
            guest_ram_bytes: 1 << 29,
            limit_bytes: 100_000,
            resident_max_after_bytes: 105_000,
            squeezed_seconds: 30.1,
            attach_pause_us: 200.0,
            vcpu_faults: 1_000,
            iopfs: 1_000,
            restarts: 1,
            memory_bytes_verified: 1 << 30,
            detached: true,
            verified_after_detach: true,
            dense: DenseReport {
                ram_bytes: 1 << 30,
                verified_bytes: 1 << 30,
                ..DenseReport::default()
            },
            ..Report::default()
        }
    }

    const WANTED: DemoGoals = DemoGoals {
        squeezed_seconds: 30.0,
        iopfs: 1_000,
    };

    #[test]
    fn sound_report_has_no_failures() {
        assert_eq!(sound().failures(&WANTED), Vec::<String>::new());
    }

    #[test]
    fn every_condition_broken_alone_is_one_sentence() {
        let breaks: [fn(&mut Report); 14] = [
            |report| report.resident_max_after_bytes += 1,
            |report| report.squeezed_seconds = 29.9,
            |report| report.vcpu_faults -= 1,
            |report| report.iopfs -= 1,
            |report| report.restarts = 0,
            |report| report.memory_bytes_verified -= 1,
            |report| report.memory_errors = 1,
            |report| report.disk_errors = 1,
            |report| report.alias_faults = 1,
            |report| report.pinned_guest_bytes = 1,
            |report| report.attach_pause_us = 5_000.0,
            |report| report.detached = false,
            |report| report.verified_after_detach = false,
            |report| report.dense.verified_bytes -= 1,
        ];
        for (index, harm) in breaks.into_iter().enumerate() {
            let mut report = sound();
            harm(&mut report);
            assert_eq!(report.failures(&WANTED).len(), 1, "condition {index}");
        }
    }

    #[test]
    fn figures_of_a_daemon_are_taken_over_and_the_pool_keeps_its_maximum() {
        let mut report = Report {
            pool_bytes_max: 50,
            ..Report::default()
        };
        let vm = serde_json::json!({
            "pool_bytes": 40, "vcpu_faults": 7, "vcpu_fault_us": {"p50": 1.5, "p90": 2, "p99": 3},
        });
        report.take_figures(&vm);
        assert_eq!((report.pool_bytes_max, report.vcpu_faults), (50, 7));
        assert_eq!(
            report.vcpu_fault_us,
            Percentiles {
                p50: 1.5,
                p90: 2.0,
                p99: 3.0
            }
        );
    }
}
