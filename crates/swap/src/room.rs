// SPDX-License-Identifier: Apache-2.0
//! [`Room`]: whether the daemon's memory cgroup has room for more content of evicted pages.
//!
//! Evicting makes room in the VMM's group and takes some in the daemon's, for what is stored. Where the
//! daemon's is nearly full, eviction must stop **before** the kernel has to kill: a daemon that is killed is
//! started anew, evicts again and is killed again.
//!
//! ```text
//!   limit of the group ─────────────────────────────
//!     │  margin     for the daemon itself, and for what is charged between two looks
//!   closed below ───────────────────────────────────
//!     │  half as much again
//!   open again above, after CLOSED_MIN at least ────
//! ```
//! All VMs of the daemon share one `Room`, since they share the group. What is taken is counted
//! between two looks at the group, and after a part of the margin there is another look.

use crate::cgroup::{Level, MemoryGroups, tightest};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Part of a limit that is left free.
const MARGIN_PART: u64 = 16;
/// Least margin: what the daemon's own threads, page tables and answers may come to take suddenly.
const MARGIN_BYTES_MIN: u64 = 16 << 20;
/// Most: more would only lie idle.
const MARGIN_BYTES_MAX: u64 = 256 << 20;
/// Part of the margin that may be taken without another look.
const UNSEEN_PART: u64 = 8;
/// A look holds this long.
const LOOK_HOLDS: Duration = Duration::from_millis(100);
/// What is closed stays so for this long at least, so that a log is not filled by turns.
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
    "the daemon's memory cgroup {group} is nearly full: of its {limit_bytes} bytes ({file}) {margin_bytes} must stay \
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
    /// What must be free again.
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
    /// The gate after a look at `now`, which found this level the tightest.
    fn after(self, level: Option<&Level>, now: Duration) -> Self {
        let Some(level) = level else {
            return Self::Open;
        };
        let free = level.free_bytes();
        match self {
            Self::Open if free < margin_bytes(level.limit_bytes) => Self::Closed(now),
            Self::Closed(since)
                if free >= resume_bytes(level.limit_bytes)
                    && now.saturating_sub(since) >= CLOSED_MIN =>
            {
                Self::Open
            }
            same => same,
        }
    }
}

/// How the limits are read.
type Read = Box<dyn Fn() -> io::Result<Vec<Level>> + Send + Sync>;

/// See the module.
pub struct Room {
    read: Read,
    begun: Instant,
    state: Mutex<State>,
}

struct State {
    gate: Gate,
    tightest: Option<Level>,
    looked_at: Option<Duration>,
    /// Taken since that look.
    taken_bytes: u64,
    /// The last look failed, which was said.
    is_blind: bool,
}

impl std::fmt::Debug for Room {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Room")
            .field("tightest", &self.lock().tightest)
            .finish_non_exhaustive()
    }
}

impl Room {
    /// That of the cgroups that this process is in.
    #[must_use]
    pub fn of_this_process() -> Self {
        let groups = MemoryGroups::of_this_process();
        Self::with(Box::new(move || groups.levels()))
    }

    /// Without any limit.
    #[must_use]
    pub fn unlimited() -> Self {
        Self::with(Box::new(|| Ok(Vec::new())))
    }

    fn with(read: Read) -> Self {
        Self {
            read,
            begun: Instant::now(),
            state: Mutex::new(State {
                gate: Gate::Open,
                tightest: None,
                looked_at: None,
                taken_bytes: 0,
                is_blind: false,
            }),
        }
    }

    /// Takes room for `bytes` that are about to be charged.
    ///
    /// # Errors
    /// [`Shortage`]: there is not enough, and nothing was taken.
    pub fn take(&self, bytes: u64) -> Result<(), Shortage> {
        let now = self.begun.elapsed();
        let mut state = self.lock();
        let unseen = |state: &State| match &state.tightest {
            Some(level) => {
                state.taken_bytes + bytes > margin_bytes(level.limit_bytes) / UNSEEN_PART
            }
            None => false,
        };
        if state.is_due(now) || unseen(&state) {
            self.look_again(&mut state, now);
        }
        match (&state.tightest, state.gate) {
            (Some(level), Gate::Closed(_)) => Err(Shortage::of(level)),
            (Some(level), Gate::Open)
                if level.free_bytes().saturating_sub(state.taken_bytes)
                    < bytes.saturating_add(margin_bytes(level.limit_bytes)) =>
            {
                let shortage = Shortage::of(level);
                state.gate = Gate::Closed(now);
                Err(shortage)
            }
            _ => {
                state.taken_bytes += bytes;
                Ok(())
            }
        }
    }

    /// Why nothing can be stored now, if that is so.
    pub fn shortage(&self) -> Option<Shortage> {
        let now = self.begun.elapsed();
        let mut state = self.lock();
        if state.is_due(now) {
            self.look_again(&mut state, now);
        }
        match (&state.tightest, state.gate) {
            (Some(level), Gate::Closed(_)) => Some(Shortage::of(level)),
            _ => None,
        }
    }

    /// The limit that is reached first, as of now.
    pub fn tightest(&self) -> Option<Level> {
        let now = self.begun.elapsed();
        let mut state = self.lock();
        if state.is_due(now) {
            self.look_again(&mut state, now);
        }
        state.tightest.clone()
    }

    fn look_again(&self, state: &mut State, now: Duration) {
        state.looked_at = Some(now);
        match (self.read)() {
            Ok(levels) => {
                state.tightest = tightest(levels);
                state.taken_bytes = 0;
                state.gate = state.gate.after(state.tightest.as_ref(), now);
                state.is_blind = false;
            }
            // What was last known holds, with what was taken since.
            Err(error) => {
                if !std::mem::replace(&mut state.is_blind, true) {
                    tracing::warn!(%error, "the daemon's memory cgroups cannot be read: what they leave is not known");
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
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
            gate.after(Some(&level), Duration::from_secs(at_s))
        };
        let closed = Gate::Closed(Duration::from_secs(7));
        assert_eq!(after(Gate::Open, 64, 7), Gate::Open);
        assert_eq!(after(Gate::Open, 63, 7), closed);
        assert_eq!(after(closed, 0, 70), closed);
        assert_eq!(after(closed, 95, 70), closed);
        assert_eq!(after(closed, 96, 11), closed);
        assert_eq!(after(closed, 96, 12), Gate::Open);
        assert_eq!(closed.after(None, Duration::from_secs(8)), Gate::Open);
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
    fn groups_that_cannot_be_read_leave_what_was_known() {
        let blind = Room::with(Box::new(|| Err(io::Error::other("no"))));
        assert_eq!(blind.take(MIB), Ok(()));
        assert_eq!(blind.shortage(), None);
    }
}
