// SPDX-License-Identifier: Apache-2.0
//! A soak's findings, and the conditions that they must meet.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;

use pagetide_guest::wire::SoakProgress;
use serde::Serialize;

use super::Board;

/// Fewest deaths of the daemon within an hour.
pub const KILLS_AN_HOUR: f64 = 600.0;
/// Longest time for which the guest may make no progress.
pub const GAP_MAX_MS: u64 = 10_000;

/// Versions of the software used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Versions {
    /// Of the daemon.
    pub pagetide: String,
    /// Of the VMM.
    pub qemu: String,
    /// What ran the guest's instructions: `kvm` or `tcg`.
    pub accel: String,
    /// Release of the guest's kernel.
    pub guest_kernel: String,
    /// Release of this machine's kernel.
    pub host_kernel: String,
    /// Of stress-ng.
    pub stress_ng: String,
    /// Of fio.
    pub fio: String,
    /// Of redis.
    pub redis: String,
}

/// What happened to the tiers outside memory, and what was seen of the guest's memory in them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TiersSeen {
    /// Times the other host's server was killed, and started again.
    pub server_kills: u64,
    /// Times the wire to it was cut.
    pub wire_cuts: u64,
    /// Bits flipped on that wire.
    pub flipped_bits: u64,
    /// Times the disk's file system was filled up, and freed.
    pub disk_fills: u64,
    /// Most pages seen in each tier.
    pub most_pages: BTreeMap<String, u64>,
    /// Largest share of the guest's resident and stored memory, in percent, that was seen outside its RAM.
    pub most_stored_percent: u64,
    /// Answers that were not the page, as the daemons have counted them.
    pub wrong_answers: u64,
    /// Pages lost.
    pub lost_pages: u64,
}

impl TiersSeen {
    /// Tiers in which no page was seen.
    fn empty_tiers(&self) -> impl Iterator<Item = &'static str> {
        TIERS.into_iter().filter(|tier| {
            let most = self.most_pages.get(*tier);
            most.is_none_or(|most| *most == 0)
        })
    }

    /// What is to happen in any soak, and has not yet: it goes on until it has.
    pub(super) fn lacking(&self) -> Vec<String> {
        let done = [
            (
                "the server of the other host was never killed",
                self.server_kills,
            ),
            ("the wire to the other host was never cut", self.wire_cuts),
            ("no bit was flipped on the wire", self.flipped_bits),
            ("the disk was never filled up", self.disk_fills),
        ];
        let done = done.into_iter().filter(|(_, count)| *count == 0);
        let mut lacking: Vec<String> = done.map(|(sentence, _)| sentence.to_owned()).collect();
        let empty = self.empty_tiers();
        lacking.extend(empty.map(|tier| format!("no page was seen in {tier}")));
        lacking
    }

    fn failures(&self) -> Vec<String> {
        let mut failures = self.lacking();
        if self.lost_pages > 0 {
            failures.push(format!("{} pages were lost, not 0", self.lost_pages));
        }
        failures
    }
}

/// Tiers, by the figures of `vm show`.
pub(super) const TIERS: [&str; 4] = ["lz4_pages", "zstd_pages", "disk_pages", "remote_pages"];

/// The report: what `target/soak/report.json` holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Times the daemon was killed, and started again.
    pub kills: u64,
    /// Fewest deaths required.
    pub kills_wanted: u64,
    /// Wrong bytes, found by any checker.
    pub wrong_bytes: u64,
    /// Failed operations in the guest, lines about them in its kernel log, and failed requests of its disk.
    pub io_errors: u64,
    /// Longest time without progress of the guest, on its disk or in its memory.
    pub longest_gap_ms: u64,
    /// Likewise, on the disk.
    pub longest_disk_gap_ms: u64,
    /// Likewise, in memory.
    pub longest_memory_gap_ms: u64,
    /// How long a thread of QEMU waited for a CPU of this machine around the longest gap; it is not subtracted.
    pub stolen_in_longest_gap_ms: u64,
    /// Longest such wait within a second.
    pub longest_host_wait_ms: u64,
    /// Descriptors that the last daemon holds at the end beyond those of a fresh one.
    pub leaked_descriptors: u64,
    /// Likewise, threads.
    pub leaked_threads: u64,
    /// Likewise, bytes of memory that files hold for it.
    pub leaked_bytes: u64,
    /// Times the daemon ended without being killed.
    pub daemon_deaths: u64,
    /// Panics in its log.
    pub daemon_panics: u64,
    /// Longest time from the start of the daemon until it answered, with the guest recovered.
    pub longest_recovery_ms: u64,
    /// How long deaths and calls went on.
    pub minutes: f64,
    /// Bytes that fio wrote and read back.
    pub fio_bytes: u64,
    /// Values written to redis and read from it.
    pub redis_operations: u64,
    /// Times redis was killed and its log was verified.
    pub redis_restarts: u64,
    /// File trees made, verified and deleted.
    pub trees: u64,
    /// Operations of stress-ng, all verified.
    pub stress_ng_bogo_ops: u64,
    /// Bytes of patterned memory compared.
    pub memory_bytes_verified: u64,
    /// Pages that went to the guest's swap and came from it.
    pub swapped_pages: u64,
    /// Beats of the heartbeats.
    pub beats: u64,
    /// Calls of the API, wrong ones included.
    pub api_calls: u64,
    /// Wrong calls that were not refused.
    pub api_surprises: u64,
    /// Times the guest was attached.
    pub attaches: u64,
    /// Attacks of other tenants.
    pub attacks: u64,
    /// Likewise, each kind.
    pub attacks_by_name: BTreeMap<String, u64>,
    /// What became of the tiers outside memory, if there were any.
    pub tiers: Option<TiersSeen>,
    /// Resident bytes of the guest before it was attached.
    pub guest_touched_bytes: u64,
    /// The limit that the random limits are around.
    pub limit_bytes: u64,
    /// The seed of everything random.
    pub seed: u64,
    /// Versions of the software used.
    pub versions: Versions,
}

impl Report {
    /// The conditions that do not hold, a sentence each.
    #[must_use]
    pub fn failures(&self) -> Vec<String> {
        let mut failures = Vec::new();
        let mut want = |holds: bool, sentence: String| {
            if !holds {
                failures.push(sentence);
            }
        };
        let (kills, wanted) = (self.kills, self.kills_wanted);
        want(
            kills >= wanted,
            format!("the daemon was killed {kills} times, not {wanted} times"),
        );
        let gap = self.longest_gap_ms;
        want(
            gap <= GAP_MAX_MS,
            format!(
                "the guest did not get on for {gap} ms, more than {GAP_MAX_MS} ms (QEMU waited {} ms \
                 for a CPU of this machine around then)",
                self.stolen_in_longest_gap_ms
            ),
        );
        for (name, count) in [
            ("bytes were wrong", self.wrong_bytes),
            ("I/O errors were seen", self.io_errors),
            (
                "descriptors were left in the daemon",
                self.leaked_descriptors,
            ),
            ("threads were left in the daemon", self.leaked_threads),
            ("bytes were left mapped or stored", self.leaked_bytes),
            ("times the daemon ended by itself", self.daemon_deaths),
            ("panics are in the daemon's log", self.daemon_panics),
            (
                "wrong calls of the API were not refused",
                self.api_surprises,
            ),
        ] {
            want(count == 0, format!("{count} {name}, not 0"));
        }
        for (name, count) in [
            ("fio", self.fio_bytes),
            ("redis", self.redis_operations),
            ("stress-ng", self.stress_ng_bogo_ops),
            ("the patterned memory", self.memory_bytes_verified),
            ("swap", self.swapped_pages),
            ("the file trees", self.trees),
            ("the API calls", self.api_calls),
            ("the other tenants", self.attacks),
        ] {
            want(
                count > 0,
                format!("{name} did nothing, so nothing is shown"),
            );
        }
        failures.extend(self.tiers.iter().flat_map(TiersSeen::failures));
        failures
    }

    pub(super) fn take_board(&mut self, board: &Board) {
        self.kills = board.kills.load(Relaxed);
        self.daemon_deaths = board.own_deaths.load(Relaxed);
        self.api_calls = board.api_calls.load(Relaxed);
        self.api_surprises = board.api_surprises.load(Relaxed);
        self.attaches = board.attaches.load(Relaxed);
        self.attacks = board.attacks.load(Relaxed);
        let names = board.attacks_by_name.lock();
        self.attacks_by_name = names.unwrap_or_else(PoisonError::into_inner).clone();
        self.io_errors += board.failed_requests.load(Relaxed);
        self.longest_recovery_ms = board.longest_recovery_ms.load(Relaxed);
    }

    pub(super) fn take_guest(&mut self, guest: &SoakProgress) {
        self.wrong_bytes += guest.wrong_bytes;
        self.io_errors += guest.io_errors;
        self.longest_disk_gap_ms = guest.longest_disk_gap_ms;
        self.longest_memory_gap_ms = guest.longest_memory_gap_ms;
        self.longest_gap_ms = longest_gap_ms(guest);
        self.fio_bytes = guest.fio_bytes;
        self.redis_operations = guest.redis_operations;
        self.redis_restarts = guest.redis_restarts;
        self.trees = guest.trees;
        self.stress_ng_bogo_ops = guest.stress_ng_bogo_ops;
        self.memory_bytes_verified = guest.memory_bytes_verified;
        self.swapped_pages = guest.swapped_pages;
        self.beats = guest.beats;
    }
}

/// Whether one of the loads in the guest has done nothing yet, of which a report says that it shows nothing. fio
/// is not among them: it tells what it did when it ends.
pub(super) fn is_a_load_idle(guest: &SoakProgress) -> bool {
    let done = [
        guest.redis_operations,
        guest.stress_ng_bogo_ops,
        guest.memory_bytes_verified,
        guest.swapped_pages,
        guest.trees,
    ];
    done.contains(&0)
}

/// The longer of the two gaps of a guest.
pub(super) fn longest_gap_ms(guest: &SoakProgress) -> u64 {
    guest.longest_disk_gap_ms.max(guest.longest_memory_gap_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Report {
        Report {
            kills: 12,
            kills_wanted: 10,
            longest_gap_ms: GAP_MAX_MS,
            fio_bytes: 1,
            redis_operations: 1,
            stress_ng_bogo_ops: 1,
            memory_bytes_verified: 1,
            swapped_pages: 1,
            trees: 1,
            api_calls: 1,
            attacks: 1,
            ..Report::default()
        }
    }

    #[test]
    fn each_bound_that_does_not_hold_is_one_sentence() {
        assert_eq!(good().failures(), Vec::<String>::new());
        type Spoilt = (&'static str, fn(&mut Report));
        let spoilt: [Spoilt; 9] = [
            ("killed 9 times", |r| r.kills = 9),
            ("not get on for 10001 ms", |r| r.longest_gap_ms += 1),
            ("1 bytes were wrong", |r| r.wrong_bytes = 1),
            ("1 I/O errors", |r| r.io_errors = 1),
            ("1 descriptors", |r| r.leaked_descriptors = 1),
            ("1 bytes were left", |r| r.leaked_bytes = 1),
            ("1 times the daemon", |r| r.daemon_deaths = 1),
            ("1 wrong calls", |r| r.api_surprises = 1),
            ("redis did nothing", |r| r.redis_operations = 0),
        ];
        for (sentence, spoil) in spoilt {
            let mut report = good();
            spoil(&mut report);
            let failures = report.failures();
            assert_eq!(failures.len(), 1, "{failures:?}");
            assert!(failures[0].contains(sentence), "{failures:?}");
        }
    }
}
