// SPDX-License-Identifier: Apache-2.0
//! [`Room`]: whether the daemon's memory cgroup has room for more content of evicted pages.
//!
//! Evicting makes room in the VMM's group and takes some in the daemon's, for the stored content. When the
//! daemon's group is nearly full, eviction must stop **before** the kernel has to kill: a killed daemon
//! would be restarted, evict again and be killed again.
//!
//! ```text
//!   limit of the group ─────────────────────────────
//!     │  margin     for the daemon itself, and for what is charged between two looks
//!   closed below ───────────────────────────────────
//!     │  half as much again
//!   open again above, after CLOSED_MIN at least ────
//! ```
//! Each margin is a part of its own limit. A group and all its ancestors are charged; so the limit
//! reached first is not the one with the least free, but the one with the least beyond its margin.
//!
//! All VMs of the daemon share one `Room`, since they share the group. Between two reads of the
//! group `Room` counts what is taken, and reads it again after a part of the margin.
//!
//! The gate is for content, which comes in small pieces without end ([`Room::take`]). A single large
//! request, such as the words of a VM that is attached ([`Room::take_once`]), may be refused while there
//! is still room for much content: that does not close the gate.

use crate::cgroup::{Level, MemoryGroups};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Part of a limit that is left free.
const MARGIN_PART: u64 = 16;
/// Smallest margin: what the daemon's own threads, page tables and replies may take suddenly.
const MARGIN_BYTES_MIN: u64 = 16 << 20;
/// Largest margin: more would only be wasted.
const MARGIN_BYTES_MAX: u64 = 256 << 20;
const _: () = assert!(MARGIN_BYTES_MIN <= MARGIN_BYTES_MAX);
/// Part of the margin that may be taken without another read.
const UNSEEN_PART: u64 = 8;
/// A read is valid for this long.
const LOOK_HOLDS: Duration = Duration::from_millis(100);
/// A closed gate stays closed for at least this long, so that changes do not fill the log.
const CLOSED_MIN: Duration = Duration::from_secs(5);

/// Bytes of a limit that stay free.
#[must_use]
pub fn margin_bytes(limit_bytes: u64) -> u64 {
    (limit_bytes / MARGIN_PART).clamp(MARGIN_BYTES_MIN, MARGIN_BYTES_MAX)
}

/// Bytes that must be free for eviction to begin again.
#[must_use]
pub fn resume_bytes(limit_bytes: u64) -> u64 {
    margin_bytes(limit_bytes) / 2 * 3
}

/// Why no more content can be stored.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the daemon's memory cgroup {group} has too little room: of its {limit_bytes} bytes ({file}) {margin_bytes} must stay \
     free; raise {file}, or the limits of VMs, or detach one; eviction goes on when {resume_bytes} bytes are free"
)]
pub struct Shortage {
    /// Directory of the group.
    pub group: String,
    /// The file that sets its limit.
    pub file: &'static str,
    /// The limit.
    pub limit_bytes: u64,
    /// What must stay free.
    pub margin_bytes: u64,
    /// What must be free for eviction to resume.
    pub resume_bytes: u64,
}

impl Shortage {
    fn of(level: &Level) -> Self {
        Self {
            group: level.group.display().to_string(),
            file: level.file,
            limit_bytes: level.limit_bytes,
            margin_bytes: margin_bytes(level.limit_bytes),
            resume_bytes: resume_bytes(level.limit_bytes),
        }
    }
}

/// Whether content may be stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Gate {
    Open,
    /// Since then.
    Closed(Duration),
}

impl Gate {
    /// The gate after a read at `now` that found these levels.
    fn after(self, levels: &[Level], now: Duration) -> Self {
        let is_below = |needed: fn(u64) -> u64| {
            let mut levels = levels.iter();
            levels.any(|level| level.free_bytes() < needed(level.limit_bytes))
        };
        match self {
            Self::Open if is_below(margin_bytes) => Self::Closed(now),
            Self::Closed(since)
                if !is_below(resume_bytes) && now.saturating_sub(since) >= CLOSED_MIN =>
            {
                Self::Open
            }
            // A limit that was lifted is no reason to wait.
            Self::Closed(_) if levels.is_empty() => Self::Open,
            same => same,
        }
    }
}

/// The level with the least free beyond what `needed` requires for its limit.
fn shortest(levels: &[Level], needed: fn(u64) -> u64) -> Option<&Level> {
    let beyond =
        |level: &&Level| i128::from(level.free_bytes()) - i128::from(needed(level.limit_bytes));
    levels.iter().min_by_key(beyond)
}

/// How the limits are read.
pub(crate) type Read = Box<dyn Fn() -> io::Result<Vec<Level>> + Send + Sync>;

/// See the module.
pub struct Room {
    read: Read,
    begun: Instant,
    state: Mutex<State>,
}

struct State {
    gate: Gate,
    levels: Vec<Level>,
    looked_at: Option<Duration>,
    /// Taken since that read.
    taken_bytes: u64,
    /// The last read failed, and that was logged.
    is_blind: bool,
}

impl std::fmt::Debug for Room {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Room")
            .field("levels", &self.lock().levels)
            .finish_non_exhaustive()
    }
}

impl Room {
    /// The room in the cgroups of this process.
    #[must_use]
    pub fn of_this_process() -> Self {
        let groups = MemoryGroups::of_this_process();
        Self::with(Box::new(move || groups.levels()))
    }

    /// Room without any limit.
    #[must_use]
    pub fn unlimited() -> Self {
        Self::with(Box::new(|| Ok(Vec::new())))
    }

    pub(crate) fn with(read: Read) -> Self {
        Self {
            read,
            begun: Instant::now(),
            state: Mutex::new(State {
                gate: Gate::Open,
                levels: Vec::new(),
                looked_at: None,
                taken_bytes: 0,
                is_blind: false,
            }),
        }
    }

    /// Takes room for `bytes` of content that are about to be charged.
    ///
    /// # Errors
    /// [`Shortage`]: there is not enough, and nothing was taken. No content can then be stored for a
    /// while.
    pub fn take(&self, bytes: u64) -> Result<(), Shortage> {
        let now = self.begun.elapsed();
        let mut state = self.look(bytes, now);
        let taken = state.take(bytes);
        if taken.is_err() && state.gate == Gate::Open {
            state.gate = Gate::Closed(now);
        }
        taken
    }

    /// Takes room for `bytes` that are charged once, for a request that can be refused on its own.
    ///
    /// # Errors
    /// [`Shortage`]: there is not enough, and nothing was taken. Other requests may still find
    /// room.
    pub fn take_once(&self, bytes: u64) -> Result<(), Shortage> {
        let now = self.begun.elapsed();
        self.look(bytes, now).take(bytes)
    }

    /// The state, read again if `bytes` more would be too much since the last read.
    fn look(&self, bytes: u64, now: Duration) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        let is_unseen = |level: &Level| {
            state.taken_bytes.saturating_add(bytes) > margin_bytes(level.limit_bytes) / UNSEEN_PART
        };
        if state.is_due(now) || state.levels.iter().any(is_unseen) {
            self.look_again(&mut state, now);
        }
        state
    }

    /// Why nothing can be stored now, if so.
    pub fn shortage(&self) -> Option<Shortage> {
        let now = self.begun.elapsed();
        let mut state = self.lock();
        if state.is_due(now) {
            self.look_again(&mut state, now);
        }
        state.shortage()
    }

    /// The limit whose margin is reached first, as of now.
    pub fn tightest(&self) -> Option<Level> {
        let now = self.begun.elapsed();
        let mut state = self.lock();
        if state.is_due(now) {
            self.look_again(&mut state, now);
        }
        shortest(&state.levels, margin_bytes).cloned()
    }

    fn look_again(&self, state: &mut State, now: Duration) {
        state.looked_at = Some(now);
        match (self.read)() {
            Ok(levels) => {
                state.gate = state.gate.after(&levels, now);
                state.levels = levels;
                state.taken_bytes = 0;
                state.is_blind = false;
            }
            // The last values stay in force, with what was taken since.
            Err(error) => {
                if !std::mem::replace(&mut state.is_blind, true) {
                    tracing::warn!(%error, "the daemon's memory cgroups cannot be read: their free room is unknown");
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Why the gate is closed, if it is.
    fn shortage(&self) -> Option<Shortage> {
        match self.gate {
            Gate::Open => None,
            Gate::Closed(_) => shortest(&self.levels, resume_bytes).map(Shortage::of),
        }
    }

    fn take(&mut self, bytes: u64) -> Result<(), Shortage> {
        if let Some(shortage) = self.shortage() {
            return Err(shortage);
        }
        if let Some(level) = shortest(&self.levels, margin_bytes) {
            let needed = margin_bytes(level.limit_bytes).saturating_add(bytes);
            if level.free_bytes().saturating_sub(self.taken_bytes) < needed {
                return Err(Shortage::of(level));
            }
        }
        self.taken_bytes = self.taken_bytes.saturating_add(bytes);
        Ok(())
    }

    fn is_due(&self, now: Duration) -> bool {
        self.looked_at
            .is_none_or(|at| now.saturating_sub(at) >= LOOK_HOLDS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    };

    const MIB: u64 = 1 << 20;

    fn level(limit_bytes: u64, charged_bytes: u64) -> Level {
        Level {
            group: PathBuf::from("/g"),
            file: "memory.max",
            limit_bytes,
            charged_bytes,
            cache_bytes: 0,
        }
    }

    #[test]
    fn margin_is_a_part_of_the_limit_within_bounds() {
        assert_eq!(margin_bytes(0), MARGIN_BYTES_MIN);
        assert_eq!(margin_bytes(64 * MIB), MARGIN_BYTES_MIN);
        assert_eq!(margin_bytes(1024 * MIB), 64 * MIB);
        assert_eq!(margin_bytes(u64::MAX), MARGIN_BYTES_MAX);
        assert_eq!(resume_bytes(1024 * MIB), 96 * MIB);
    }

    #[test]
    fn gate_closes_below_the_margin_and_opens_again_above_more_than_that_and_after_a_while() {
        let after = |gate: Gate, free: u64, at_s: u64| {
            let level = level(1024 * MIB, (1024 - free) * MIB);
            gate.after(&[level], Duration::from_secs(at_s))
        };
        let closed = Gate::Closed(Duration::from_secs(7));
        assert_eq!(after(Gate::Open, 64, 7), Gate::Open);
        assert_eq!(after(Gate::Open, 63, 7), closed);
        assert_eq!(after(closed, 0, 70), closed);
        assert_eq!(after(closed, 95, 70), closed);
        assert_eq!(after(closed, 96, 11), closed);
        assert_eq!(after(closed, 96, 12), Gate::Open);
        assert_eq!(closed.after(&[], Duration::from_secs(8)), Gate::Open);
    }

    /// A room whose group is charged with what was taken from it.
    fn charging(limit: u64) -> (Room, Arc<AtomicU64>) {
        let charged = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&charged);
        let read = move || Ok(vec![level(limit, seen.load(Relaxed))]);
        (Room::with(Box::new(read)), charged)
    }

    #[test]
    fn chunks_are_given_until_the_margin_and_never_beyond_whatever_was_last_seen() {
        const CHUNK: u64 = 64 << 10;
        let (room, charged) = charging(256 * MIB);
        let mut given = 0;
        let shortage = loop {
            match room.take(CHUNK) {
                Ok(()) => {
                    charged.fetch_add(CHUNK, Relaxed);
                    given += CHUNK;
                }
                Err(shortage) => break shortage,
            }
        };
        assert_eq!(given, 240 * MIB);
        assert_eq!(shortage.margin_bytes, 16 * MIB);
        assert_eq!(room.shortage(), Some(shortage.clone()));
        let text = shortage.to_string();
        assert!(text.contains("/g") && text.contains("memory.max"), "{text}");
        assert_eq!(room.take(1), Err(shortage));
    }

    #[test]
    fn one_large_wish_is_refused_at_once_and_without_a_limit_nothing_is() {
        let (room, _charged) = charging(256 * MIB);
        assert!(room.take(241 * MIB).is_err());
        assert!(Room::unlimited().take(u64::MAX / 2).is_ok());
        assert_eq!(Room::unlimited().tightest(), None);
    }

    #[test]
    fn wish_that_is_refused_by_itself_leaves_room_for_content_as_before() {
        let (room, _charged) = charging(256 * MIB);
        let refused = room.take_once(241 * MIB).unwrap_err();
        assert_eq!(refused.margin_bytes, 16 * MIB);
        assert_eq!(room.shortage(), None);
        assert_eq!(room.take(64 << 10), Ok(()));
        assert_eq!(room.take_once(100 * MIB), Ok(()));
        // Content that is refused is refused to all.
        assert!(room.take(241 * MIB).is_err());
        assert!(room.shortage().is_some());
        assert!(room.take_once(1).is_err());
    }

    #[test]
    fn level_that_is_reached_first_is_the_one_with_the_least_beyond_its_margin() {
        let (large, small) = (
            level(64 << 30, (64 << 30) - 250 * MIB),
            level(128 * MIB, 28 * MIB),
        );
        let both = [large.clone(), small.clone()];
        // One has 250 MiB left of a margin of 256; the other has 100 where 16 are needed.
        assert_eq!(shortest(&both, margin_bytes), Some(&large));
        let room = Room::with(Box::new(move || Ok(vec![large.clone(), small.clone()])));
        let shortage = room.take(1).unwrap_err();
        assert_eq!(shortage.limit_bytes, 64 << 30);
        assert_eq!(
            room.tightest().map(|level| level.limit_bytes),
            Some(64 << 30)
        );
        assert_eq!(shortest(&[], margin_bytes), None);
    }

    #[test]
    fn groups_that_cannot_be_read_leave_what_was_known() {
        let blind = Room::with(Box::new(|| Err(io::Error::other("no"))));
        assert_eq!(blind.take(MIB), Ok(()));
        assert_eq!(blind.shortage(), None);
    }
}
