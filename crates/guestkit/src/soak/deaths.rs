// SPDX-License-Identifier: Apache-2.0
//! Deaths of the daemon: SIGKILL at random, a new daemon on the same state, again and again.
//!
//! Deaths come at any moment but one: while the guest's QEMU performs the handshake with a new daemon. A
//! QEMU before 9.1 whose back end hangs up then connects once more and sends nothing for ever; no back end
//! can fix that (see 'As a service' in docs/operations.md). So no daemon dies before the rings of the
//! guest's disk run.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use pagetide_random::SplitMix64;

use super::report::{KILLS_AN_HOUR, longest_gap_ms};
use super::stand::Stand;
use super::{Board, LINE_EVERY, Options, SILENCE_MAX, SoakError, say};
use crate::product::is_listening;

/// Shortest and longest life of a daemon that answers.
const LIFE_MS: (u64, u64) = (500, 8_000);
/// Longest life while there are too few deaths.
const LIFE_IN_HASTE_MS: u64 = 2_500;
/// Factor over the wanted rate.
const MARGIN: f64 = 1.1;
/// Longest time between a death and the next start.
const AWAY_MS: u64 = 300;
/// Time to the next look at rings that did not run when a daemon was to die.
const LOOK_AGAIN: Duration = Duration::from_millis(300);
/// Time for a restarted daemon to reopen its disks, and for a front end to start with them.
const DISK_TIMEOUT: Duration = Duration::from_secs(30);
/// A longer gap of the guest ends the soak: more deaths would show nothing.
const GAP_MAX_MS: u64 = 60_000;

/// The course of deaths.
pub struct Deaths {
    began: Instant,
    length: Duration,
    next: Instant,
    line: Instant,
    random: SplitMix64,
    /// Failed requests of the guest's disk that this daemon has reported.
    failed: BTreeMap<&'static str, u64>,
}

impl Deaths {
    /// For a soak of `length`, starting now.
    #[must_use]
    pub fn new(options: &Options, length: Duration) -> Self {
        let now = Instant::now();
        Self {
            began: now,
            length,
            next: now + Duration::from_millis(LIFE_MS.1),
            line: now,
            random: SplitMix64::stream(options.seed, 1),
            failed: BTreeMap::new(),
        }
    }

    /// Kills and restarts if it is time; checks that guest and daemon are alive.
    ///
    /// # Errors
    /// The guest is gone or silent, or the daemon does not come back.
    pub fn turn(&mut self, stand: &mut Stand, board: &Board) -> Result<(), SoakError> {
        let now = Instant::now();
        let ended = stand.product.ended();
        if let Some(status) = stand.told(ended)? {
            say(&format!(
                "THE DAEMON ENDED BY ITSELF ({status}); its log:\n{}",
                stand.product.log_tail()
            ));
            Board::count(&board.own_deaths);
            self.restart(stand, board)?;
        }
        // A QEMU that was busy may begin with its disk twice.
        if now >= self.next && !rings_run(stand)? {
            self.next = now + LOOK_AGAIN;
        } else if now >= self.next {
            self.count_failed_requests(stand, board);
            stand.product.kill();
            Board::count(&board.kills);
            let away = self.random.between(0, AWAY_MS);
            thread::sleep(Duration::from_millis(away));
            self.restart(stand, board)?;
        }
        if stand.guest.ended()?.is_some() {
            let what = "the guest's work".to_owned();
            return Err(stand.guest.late(what, self.length).into());
        }
        let report = stand.guest.soak_report();
        let gap_ms = report
            .as_ref()
            .map_or(0, |report| longest_gap_ms(&report.progress));
        if gap_ms > GAP_MAX_MS {
            let what = format!("a heartbeat of the guest: none for {gap_ms} ms");
            return Err(stand
                .guest
                .late(what, Duration::from_millis(GAP_MAX_MS))
                .into());
        }
        let silent = report.is_none_or(|report| report.at.elapsed() > SILENCE_MAX);
        if silent {
            let what = "a report of the guest".to_owned();
            return Err(stand.guest.late(what, SILENCE_MAX).into());
        }
        if self.line.elapsed() >= LINE_EVERY {
            self.line = Instant::now();
            self.tell(stand, board);
        }
        Ok(())
    }

    fn restart(&mut self, stand: &mut Stand, board: &Board) -> Result<(), SoakError> {
        let begin = Instant::now();
        let ran = stand.product.run();
        stand.told(ran)?;
        let socket = stand.disk.socket.clone();
        loop {
            let listening = is_listening(&socket);
            if stand.told(listening)? {
                break;
            }
            if begin.elapsed() > DISK_TIMEOUT {
                // Not served again: the daemon has lost its device, and its log has the reason.
                let device = stand.product.device(&socket);
                stand.told(device)?;
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
        let ms = u64::try_from(begin.elapsed().as_millis()).unwrap_or(u64::MAX);
        board.longest_recovery_ms.fetch_max(ms, Relaxed);
        self.wait_for_rings(stand, begin)?;
        self.failed.clear();
        self.next = Instant::now() + self.life(board);
        Ok(())
    }

    /// Waits until the rings of the guest's disk run.
    fn wait_for_rings(&self, stand: &mut Stand, begin: Instant) -> Result<(), SoakError> {
        loop {
            if rings_run(stand)? {
                return Ok(());
            }
            if begin.elapsed() > 2 * DISK_TIMEOUT {
                let what = "begin with its disk again".to_owned();
                return Err(stand.guest.late(what, DISK_TIMEOUT).into());
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn life(&mut self, board: &Board) -> Duration {
        let wanted = self.began.elapsed().as_secs_f64() / 3600.0 * KILLS_AN_HOUR * MARGIN;
        let behind = (board.kills.load(Relaxed) as f64) < wanted;
        let longest = if behind { LIFE_IN_HASTE_MS } else { LIFE_MS.1 };
        Duration::from_millis(self.random.between(LIFE_MS.0, longest))
    }

    /// Counts requests of the guest's disk that failed under this daemon, by its own reports.
    fn count_failed_requests(&mut self, stand: &Stand, board: &Board) {
        // The daemon may be in the middle of anything; the guest's kernel reports failures, too.
        let Ok(device) = stand.product.device(&stand.disk.socket) else {
            return;
        };
        for name in [
            "failed_requests",
            "timed_out_requests",
            "malformed_requests",
        ] {
            let count = device[name].as_u64().unwrap_or_default();
            let before = self.failed.insert(name, count).unwrap_or_default();
            if count > before {
                say(&format!(
                    "{} {name} of the guest's disk: {device}",
                    count - before
                ));
                board.failed_requests.fetch_add(count - before, Relaxed);
            }
        }
    }

    fn tell(&self, stand: &Stand, board: &Board) {
        let Some(report) = stand.guest.soak_report() else {
            return;
        };
        let guest = report.progress;
        let resident = stand.guest.resident_bytes().unwrap_or_default();
        say(&format!(
            "{:>4} of {} s: {} kills, gap {} ms ({} disk, {} memory), wrong bytes {}, I/O errors {}; \
             resident {}; fio {}, redis {} ({} restarts), trees {}, stress-ng {}, swapped {}; \
             API {}, attaches {}, attacks {}",
            self.began.elapsed().as_secs(),
            self.length.as_secs(),
            board.kills.load(Relaxed),
            longest_gap_ms(&guest),
            guest.longest_disk_gap_ms,
            guest.longest_memory_gap_ms,
            guest.wrong_bytes,
            guest.io_errors + board.failed_requests.load(Relaxed),
            crate::report::mib(resident),
            crate::report::mib(guest.fio_bytes),
            guest.redis_operations,
            guest.redis_restarts,
            guest.trees,
            guest.stress_ng_bogo_ops,
            crate::report::mib(guest.swapped_pages * 4096),
            board.api_calls.load(Relaxed),
            board.attaches.load(Relaxed),
            board.attacks.load(Relaxed),
        ));
    }
}

/// Whether the rings of the guest's disk run.
fn rings_run(stand: &Stand) -> Result<bool, SoakError> {
    let device = stand.product.device(&stand.disk.socket);
    let device = stand.told(device)?;
    Ok(device["wired_bytes"].as_u64().unwrap_or_default() > 0)
}
