// SPDX-License-Identifier: Apache-2.0
//! Random calls of the API, valid and invalid, through the command line and raw HTTP.
//!
//! A valid call may fail, since the daemon may be down or in the middle of anything. An invalid one must
//! never be accepted. The VM is detached now and then, and this thread, the only one that detaches,
//! attaches it again.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use pagetide_random::SplitMix64;

use super::stand::{Device, Stand};
use super::{Board, NAME, http, say};
use crate::product::Clients;

/// Pause between two calls.
const REST_MS: (u64, u64) = (50, 900);
/// Pause between two attempts to attach.
const ATTACH_AGAIN: Duration = Duration::from_millis(200);
/// Attempts after which failure to attach is reported.
const ATTACH_ATTEMPTS: u32 = 50;
/// One call in this many detaches the VM.
const DETACH_ONE_IN: u64 = 40;
const MIB: u64 = 1 << 20;

/// Makes the calls.
pub struct Caller {
    clients: Clients,
    qemu: u32,
    disk: Device,
    /// A device that no guest uses, and that comes and goes.
    spare: Device,
    recordings: PathBuf,
    limit_bytes: u64,
    random: Mutex<SplitMix64>,
}

/// The required outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    /// May succeed or fail.
    Right,
    /// Must not succeed.
    Wrong,
}

impl Caller {
    /// For a running stand; random limits are around `limit_bytes`.
    pub fn new(stand: &Stand, seed: u64, limit_bytes: u64) -> Self {
        let spare = stand.tenants.last().unwrap_or(&stand.disk).clone();
        Self {
            clients: stand.product.clients(),
            qemu: stand.guest.pid(),
            disk: stand.disk.clone(),
            spare,
            recordings: stand.folder().to_owned(),
            limit_bytes,
            random: Mutex::new(SplitMix64::stream(seed, 2)),
        }
    }

    /// Attaches the VM if it is not attached, and sets the limit that the random limits are around.
    pub fn attach_with_limit(&self, board: &Board) {
        let mut attempts = 0;
        while !self.ok(board, &["vm", "show", NAME, "--json"]) {
            attempts += 1;
            let pid = self.qemu.to_string();
            if self.ok(board, &["attach", "--pid", &pid, "--name", NAME, "--json"]) {
                Board::count(&board.attaches);
                break;
            }
            if attempts % ATTACH_ATTEMPTS == 0 {
                say(&format!(
                    "the guest is still not attached after {attempts} attempts"
                ));
            }
            if board.is_over() && attempts > ATTACH_ATTEMPTS {
                return;
            }
            std::thread::sleep(ATTACH_AGAIN);
        }
        let limit = self.limit_bytes.to_string();
        self.ok(board, &["vm", "limit", NAME, &limit]);
    }

    /// Calls until the soak is over.
    pub fn run(&self, board: &Board) {
        while !board.is_over() {
            let (choice, rest) = self.with_random(|random| {
                let rest = random.between(REST_MS.0, REST_MS.1);
                (random.between(0, DETACH_ONE_IN), rest)
            });
            if choice == 0 {
                self.let_go_and_attach_again(board);
            } else {
                self.call(board, choice);
            }
            board.rest(Duration::from_millis(rest));
        }
    }

    fn let_go_and_attach_again(&self, board: &Board) {
        // Whether it was detached or the daemon died meanwhile: below it is attached again.
        self.ok(board, &["vm", "detach", NAME]);
        let away = self.with_random(|random| random.between(0, 2_000));
        board.rest(Duration::from_millis(away));
        self.attach_with_limit(board);
    }

    fn call(&self, board: &Board, choice: u64) {
        match choice {
            1..=8 => self.limit(board),
            9..=10 => {
                let bytes = self
                    .with_random(|random| random.between(1, 64) * MIB)
                    .to_string();
                self.ok(board, &["vm", "reclaim", NAME, "--bytes", &bytes]);
            }
            11..=18 => self.look(board, choice),
            19..=21 => self.record(board, choice),
            22..=24 => self.inject(board, choice),
            25..=26 => self.protect(board),
            27..=28 => self.spare(board, choice),
            29..=33 => self.raw(board, choice),
            _ => self.wrong(board),
        }
    }

    fn limit(&self, board: &Board) {
        let share = self.with_random(|random| random.between(60, 160));
        let limit = if share > 150 {
            "none".to_owned()
        } else {
            (self.limit_bytes / 100 * share).to_string()
        };
        self.ok(board, &["vm", "limit", NAME, &limit]);
    }

    fn look(&self, board: &Board, choice: u64) {
        let words: &[&str] = match choice {
            11 => &["vm", "list", "--json"],
            12 | 13 => &["vm", "show", NAME, "--json"],
            14 | 15 => &["dpu", "list", "--json"],
            16 => &["dpu", "slo", "--json"],
            17 => &["dpu", "log", "status", "--json"],
            _ => return self.get(board, "/metrics"),
        };
        self.ok(board, words);
    }

    fn record(&self, board: &Board, choice: u64) {
        let folder = self.recordings.to_string_lossy();
        if choice == 21 {
            self.ok(board, &["dpu", "log", "stop"]);
        } else {
            let words = ["dpu", "log", "start", "--dir", &folder, "--seconds", "5"];
            let bounds = ["--max-file-bytes", "1M", "--max-files", "2"];
            self.ok(board, &[&words[..], &bounds].concat());
        }
    }

    fn inject(&self, board: &Board, choice: u64) {
        let device = self.disk.socket.to_string_lossy();
        if choice == 24 {
            self.ok(board, &["iopf", "stop", "--device", &device]);
            return;
        }
        let (rate, ms) = self.with_random(|random| (random.between(1, 100), random.between(1, 20)));
        let (rate, latency) = (rate.to_string(), format!("{ms}ms"));
        let words = ["iopf", "inject", "--device", &device, "--seconds", "3"];
        let how = ["--rate", &rate, "--latency", &latency];
        self.ok(board, &[&words[..], &how].concat());
    }

    fn protect(&self, board: &Board) {
        let policies = ["none", "lru", "adp"];
        let choice = self.with_random(|random| random.between(0, policies.len() as u64));
        let policy = policies[usize::try_from(choice).unwrap_or(0)];
        self.ok(board, &["vm", "protector", NAME, policy]);
    }

    fn spare(&self, board: &Board, choice: u64) {
        let socket = self.spare.socket.to_string_lossy();
        if choice == 27 {
            self.ok(board, &["dpu", "remove", "--socket", &socket]);
        } else {
            let image = self.spare.image.to_string_lossy();
            self.ok(
                board,
                &["dpu", "blk", "--socket", &socket, "--image", &image],
            );
        }
    }

    fn raw(&self, board: &Board, choice: u64) {
        let long = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(100_000));
        let words: &[u8] = match choice {
            29 => b"POST /v1/vms HTTP/1.1\r\ncontent-length: 9\r\n\r\n{\"pid\":-1",
            30 => b"DELETE /v1/vms/none HTTP/1.1\r\n\r\n",
            31 => b"GET /v1/vms HTTP/1.1\r\nconte",
            32 => long.as_bytes(),
            _ => b"\0\xff\x16\x03\x01\x02\0\x01\0",
        };
        Board::count(&board.api_calls);
        // The daemon may be down or close early; it must not die, which is checked elsewhere.
        if let Err(error) = http::leave(self.clients.api(), words) {
            tolerate(&error);
        }
    }

    fn get(&self, board: &Board, path: &str) {
        Board::count(&board.api_calls);
        let request = format!("GET {path} HTTP/1.1\r\nhost: pagetide\r\nconnection: close\r\n\r\n");
        if let Err(error) = http::exchange(self.clients.api(), request.as_bytes()) {
            tolerate(&error);
        }
    }

    fn wrong(&self, board: &Board) {
        let (own, qemu) = (std::process::id().to_string(), self.qemu.to_string());
        let (disk, image) = (
            self.disk.socket.to_string_lossy(),
            self.disk.image.to_string_lossy(),
        );
        let calls: [&[&str]; 11] = [
            &["vm", "limit", NAME, "lots"],
            &["vm", "limit", NAME, "4096"],
            &["vm", "limit", "nobody", "256M"],
            &["vm", "detach", "nobody"],
            &["vm", "protector", NAME, "adp:promote-after=never"],
            &["attach", "--pid", "4194305"],
            &["attach", "--pid", &own],
            &["attach", "--pid", &qemu, "--name", "again"],
            &["dpu", "blk", "--socket", &disk, "--image", &image],
            &["dpu", "remove", "--socket", "/nowhere"],
            &["dpu", "log", "start", "--dir", "/nowhere"],
        ];
        let choice = self.with_random(|random| random.between(0, calls.len() as u64));
        let words = calls[usize::try_from(choice).unwrap_or(0)];
        self.make(board, words, Call::Wrong);
    }

    /// Makes a valid call; returns whether it succeeded.
    fn ok(&self, board: &Board, words: &[&str]) -> bool {
        self.make(board, words, Call::Right)
    }

    fn make(&self, board: &Board, words: &[&str], call: Call) -> bool {
        Board::count(&board.api_calls);
        match self.clients.run(words) {
            Ok(answer) => {
                let done = answer.status.success();
                if done && call == Call::Wrong {
                    say(&format!(
                        "A WRONG CALL WAS ACCEPTED: {words:?}: {}",
                        answer.printed
                    ));
                    Board::count(&board.api_surprises);
                }
                done
            }
            Err(error) => {
                say(&format!("a client could not be started: {error}"));
                false
            }
        }
    }

    fn with_random<T>(&self, use_it: impl FnOnce(&mut SplitMix64) -> T) -> T {
        let mut random = self
            .random
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        use_it(&mut random)
    }
}

/// Reports errors other than the end of a connection.
fn tolerate(error: &std::io::Error) {
    use std::io::ErrorKind::{
        BrokenPipe, ConnectionRefused, ConnectionReset, NotFound, TimedOut, WouldBlock,
    };
    let ended = [
        BrokenPipe,
        ConnectionRefused,
        ConnectionReset,
        NotFound,
        TimedOut,
        WouldBlock,
    ];
    if !ended.contains(&error.kind()) {
        say(&format!("raw words to the API: {error}"));
    }
}
