// SPDX-License-Identifier: Apache-2.0
//! The thread of a disk tier, `pt-tier-disk`, from the opening of its disk to the end of the tier.
//!
//! ```text
//!   disk opened before ───────────────────────────────┐
//!   disk awaited: opened? ─ no: a pause, once more    ├─► space given back, ring made ─► engine ─► end
//!                   └ yes: what is held moves to it ──┘
//! ```
//! A tier whose disk is awaited stands as gone. Once it has the disk it comes back as any other tier that was
//! gone: by probes.

use super::engine::{ENTRIES, Engine};
use super::identity::Identity;
use super::io::{Geometry, Tag};
use super::open::{DiskError, OpenDisk, Source, Wanted, disown, open};
use super::request::Bounds;
use super::shared::Shared;
use super::space::{self, Space};
use crate::Standing;
use crate::extent::SEGMENT_BYTES;
use pagetide_sys::file_ring::FileRing;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

/// Time between two attempts to open a disk that is awaited.
const REOPEN_PAUSE: Duration = Duration::from_secs(1);

/// Held by each thread of a tier until it has let go of the disk.
pub(super) type Ends = SyncSender<()>;

/// What becomes of a tier whose disk was opened and then does not work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum IfRefused {
    /// There is none.
    Fail,
    /// Its disk is awaited.
    Await,
}

/// See the module documentation.
pub(super) struct Attendant {
    pub shared: Arc<Shared>,
    pub space: Arc<Space>,
    pub source: Source,
    pub wanted: Wanted,
    pub bounds: Bounds,
    pub ends: Ends,
}

/// A disk that can be worked on.
struct Started {
    ring: FileRing<Tag>,
    geometry: Geometry,
    file: OwnedFd,
}

impl Attendant {
    /// Serves a disk that is open; `told` hears first whether that has begun.
    pub fn serve(
        self,
        disk: OpenDisk,
        if_refused: IfRefused,
        told: impl FnOnce(Result<(), DiskError>),
    ) {
        match (self.start(disk), if_refused) {
            (Err(error), IfRefused::Fail) => told(Err(error)),
            (Err(error), IfRefused::Await) => {
                self.shared.begin_gone(error.to_string(), Instant::now());
                told(Ok(()));
                self.await_and_serve();
            }
            (Ok(started), _) => {
                told(Ok(()));
                self.work(started);
            }
        }
    }

    /// Serves a disk once it can be opened.
    pub fn await_and_serve(self) {
        let mut last = String::new();
        while !self.shared.is_over_within(REOPEN_PAUSE) {
            // It is tried again, so nobody is waited for.
            let opened = open(&self.source, self.wanted, Duration::ZERO);
            match opened.and_then(|disk| self.take_over(disk)) {
                Ok(started) => {
                    tracing::info!(path = %self.source.path.display(), "the disk of the disk tier is there");
                    return self.work(started);
                }
                Err(error) => {
                    let why = error.to_string();
                    if why != last {
                        tracing::warn!(why, "the disk tier does not work yet");
                        self.shared.begin_gone(why.clone(), Instant::now());
                    }
                    last = why;
                }
            }
        }
    }

    /// What was held before the disk was known is on it.
    fn take_over(&self, disk: OpenDisk) -> Result<Started, DiskError> {
        let mut sectors = self.shared.sectors();
        let moved = sectors.moved_to(disk.segments, disk.limit, disk.block);
        *sectors = moved.map_err(|_| DiskError::Shorter(self.source.path.clone()))?;
        let beyond = sectors.beyond_end();
        drop(sectors);
        let started = self.start(disk)?;
        if beyond > 0 {
            tracing::error!(
                segments = beyond,
                "VMs have pages beyond the end of the disk tier: their tables of extents are damaged, or the disk \
                 has become shorter; those pages are not there, the others are"
            );
        }
        Ok(started)
    }

    fn start(&self, disk: OpenDisk) -> Result<Started, DiskError> {
        let failed = |operation| {
            let path = self.source.path.clone();
            move |source| DiskError::Kernel {
                path,
                operation,
                source,
            }
        };
        let free_runs = self.shared.sectors().free_runs();
        for run in free_runs {
            let bytes = u64::from(run.end.0 - run.start.0) * SEGMENT_BYTES;
            let punched = disk.punch(run.start.start().byte_offset(), bytes);
            punched.map_err(failed("fallocate(PUNCH_HOLE)"))?;
        }
        let geometry = Geometry {
            block: disk.block,
            segments: disk.segments,
            discard: disk.discard,
        };
        let limit_bytes = u64::from(disk.limit.0.saturating_sub(1)) * SEGMENT_BYTES;
        let identity = Identity::of_open(&disk.file).map_err(failed("fstat"))?;
        let copy = || disk.file.try_clone().map_err(failed("dup"));
        let (file, in_ring) = (copy()?, copy()?);
        // The thread that makes a ring is the one that uses it.
        let ring = FileRing::new(ENTRIES, in_ring).map_err(failed("io_uring"))?;
        let ends = self.ends.clone();
        space::start(&self.space, &self.shared, Box::new(disk), ends)
            .map_err(failed("a thread"))?;
        self.shared.identity.get_or_init(|| identity);
        self.shared.opened(geometry, ring.waker(), limit_bytes);
        Ok(Started {
            ring,
            geometry,
            file,
        })
    }

    fn work(self, started: Started) {
        let shared = Arc::clone(&self.shared);
        Engine::new(started.ring, self.shared, started.geometry, self.bounds).run();
        // The segments that it allocates must not come after the end.
        self.space.end();
        let is_well = matches!(
            shared.health(Instant::now()).standing,
            Standing::Working | Standing::Full
        );
        if is_well && shared.sectors().is_unused() {
            told_or_logged(disown(&started.file));
        }
    }
}

fn told_or_logged(disowned: io::Result<()>) {
    if let Err(error) = disowned {
        tracing::warn!(%error, "the disk of the disk tier still says whose it was");
    }
}
