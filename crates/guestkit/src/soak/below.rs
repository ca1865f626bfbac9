// SPDX-License-Identifier: Apache-2.0
//! The tiers outside memory of a soak, which fail all the time: a disk whose file system fills up, a server of another
//! host that is killed, a wire to it that is cut and flips bits.
//!
//! Memory goes down soon: to zstd after a moment, below it after a second. It goes to the other host as
//! far as there is room, and to the disk else. The server syncs its log for each batch, so it loses nothing when it is killed; a
//! bit that flips on the wire spoils an answer and not what the server has. So no page may be lost, whatever
//! happens here.

use std::io;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use pagetide_random::SplitMix64;
use serde_json::Value;

use super::report::{TIERS, TiersSeen};
use super::{Board, NAME, SoakError, file_error, say};
use crate::far::{FarServer, Wire};
use crate::product::Clients;
use crate::small_disk::SmallDisk;

/// The file system of the disk tier.
const DISK_BYTES: u64 = 160 << 20;
/// What the tier may take of it.
const DISK_LIMIT: &str = "64M";
/// Less than goes down, so that the rest goes to the disk.
const REMOTE_LIMIT: &str = "12M";
const DEMOTE_AFTER: &str = "500ms";
const SINK_AFTER: &str = "1500ms";
/// Between two failures.
const REST_MS: (u64, u64) = (300, 1_500);
/// How long something is gone: the guest may wait for it meanwhile.
const GONE_MS: (u64, u64) = (100, 2_000);
/// Bits that are flipped at a time.
const FLIPS: (u64, u64) = (1, 30);

/// See the module.
pub struct Below {
    server: FarServer,
    wire: Wire,
    disk: SmallDisk,
    clients: Option<Clients>,
    seen: TiersSeen,
    random: SplitMix64,
    /// Counted by the daemon that was looked at last.
    wrong_answers: u64,
}

impl Below {
    /// Makes the disk's image in `folder` and starts the server with its files in `run_folder`.
    ///
    /// # Errors
    /// [`SoakError::Missing`] where there can be no disk or no server.
    pub fn set(seed: u64, folder: &Path, run_folder: &Path) -> Result<Self, SoakError> {
        let program = FarServer::program()
            .ok_or_else(|| SoakError::Missing("there is no redis server".to_owned()))?;
        let image = folder.join("tier.img");
        let disk = SmallDisk::mount(&image, &run_folder.join("disk"), DISK_BYTES)
            .map_err(|error| SoakError::Missing(format!("no file system for a disk: {error}")))?;
        let files = run_folder.join("far");
        let failed = |source: io::Error| file_error(&files, source);
        let server = FarServer::that_keeps_all(program, &files).map_err(failed)?;
        Ok(Self {
            wire: Wire::to(server.port()).map_err(failed)?,
            server,
            disk,
            clients: None,
            seen: TiersSeen::default(),
            random: SplitMix64::stream(seed, 200),
            wrong_answers: 0,
        })
    }

    /// The daemon's settings.
    #[must_use]
    pub fn flags(&self) -> Vec<String> {
        let (disk, port) = (self.disk.path().join("tier"), self.wire.port());
        let tiers = format!(
            "zero,same,lz4,zstd,remote:redis://127.0.0.1:{port}={REMOTE_LIMIT},disk:{}={DISK_LIMIT}",
            disk.display()
        );
        let flags = [
            ("--tiers", tiers.as_str()),
            ("--demote-after", DEMOTE_AFTER),
            ("--sink-after", SINK_AFTER),
        ];
        flags
            .into_iter()
            .flat_map(|(flag, value)| [flag.to_owned(), value.to_owned()])
            .collect()
    }

    /// From now on these clients ask the daemon what is where.
    pub fn ask(&mut self, clients: Clients) {
        self.clients = Some(clients);
    }

    /// What has happened so far.
    #[must_use]
    pub const fn seen(&self) -> &TiersSeen {
        &self.seen
    }

    /// Fails in all ways until the soak is over; in the end everything works.
    pub fn run(&mut self, board: &Board) {
        for turn in 0_u64.. {
            if board.is_over() {
                break;
            }
            let gone = Duration::from_millis(self.random.between(GONE_MS.0, GONE_MS.1));
            // Each at least once, even in a short soak.
            let choice = match turn {
                0..4 => turn,
                _ => self.random.below(4),
            };
            let failed = match choice {
                0 => self.kill_server(board, gone),
                1 => self.fill_disk(board, gone),
                2 => {
                    self.wire.flip(self.random.between(FLIPS.0, FLIPS.1));
                    Ok(())
                }
                _ => {
                    self.wire.cut();
                    board.rest(gone);
                    self.wire.mend();
                    self.seen.wire_cuts += 1;
                    Ok(())
                }
            };
            if let Err(error) = failed {
                say(&format!("a tier cannot be made to fail: {error}"));
            }
            self.look();
            let is_awaited = !self.seen.lacking().is_empty();
            board.tier_is_awaited.store(is_awaited, Relaxed);
            board.rest(Duration::from_millis(
                self.random.between(REST_MS.0, REST_MS.1),
            ));
        }
        self.wire.flip(0);
    }

    fn kill_server(&mut self, board: &Board, gone: Duration) -> io::Result<()> {
        self.server.kill()?;
        board.rest(gone);
        self.server.start_again()?;
        self.seen.server_kills += 1;
        Ok(())
    }

    fn fill_disk(&mut self, board: &Board, gone: Duration) -> io::Result<()> {
        self.disk.fill()?;
        board.rest(gone);
        self.disk.free()?;
        self.seen.disk_fills += 1;
        Ok(())
    }

    /// Notes what the daemon says of the guest's memory now, if there is a daemon and it has the guest.
    pub fn look(&mut self) {
        self.seen.flipped_bits = self.wire.flipped();
        let asked = self.clients.as_ref().map(|clients| {
            let answer = clients.run(["vm", "show", NAME, "--json"]);
            answer.and_then(|answer| answer.json())
        });
        if let Some(Ok(vm)) = asked {
            self.note(&vm);
        }
    }

    fn note(&mut self, vm: &Value) {
        let figure = |name: &str| vm[name].as_u64().unwrap_or(0);
        for tier in TIERS {
            let most = self.seen.most_pages.entry(tier.to_owned()).or_default();
            *most = figure(tier).max(*most);
        }
        let (stored, resident) = (figure("stored_pages"), figure("resident_bytes") / 4096);
        let percent = stored * 100 / (stored + resident).max(1);
        self.seen.most_stored_percent = percent.max(self.seen.most_stored_percent);
        self.seen.lost_pages = figure("poisoned_pages").max(self.seen.lost_pages);
        let wrong_answers = figure("wrong_answers");
        // Another daemon begins at 0.
        let before = match wrong_answers >= self.wrong_answers {
            true => self.wrong_answers,
            false => 0,
        };
        self.seen.wrong_answers += wrong_answers - before;
        self.wrong_answers = wrong_answers;
    }
}
