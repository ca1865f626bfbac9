// SPDX-License-Identifier: Apache-2.0
//! The pools of a daemon as an operator sees them: their cap, and what they take.
//!
//! The setting `pool-max` gives the cap. `pagetide pool cap` changes it while VMs run, and what was set
//! that way is kept in a file of the state directory: a successor starts with it, whatever its setting,
//! until `pagetide pool cap default` removes it.

use crate::{control::ControlError, figure::report};
use pagetide_report::size::ByteSize;
use pagetide_swap::{PoolCap, pool::CAP_BYTES_MIN};
use serde::{Deserialize, Serialize};
use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};
use utoipa::ToSchema;

/// File of the cap that was set last, in the state directory.
const CAP_FILE: &str = "pool-cap";
const NONE: &str = "none";

report! {
    /// What the pools of all VMs of a daemon take.
    pub struct PoolReport in "pagetide_pool" {
        /// Directory of the pools.
        state_dir: String => label "state_dir",
        /// Most that all pools may take; absent without a cap.
        cap_bytes: Option<u64> => gauge,
        /// Memory that all pools take.
        used_bytes: u64 => gauge,
        /// The most that they took since this daemon began.
        peak_bytes: u64 => gauge,
        /// Free memory of the tmpfs that they are on.
        tmpfs_free_bytes: u64 => gauge,
        /// Content of evicted pages.
        stored_bytes: u64 => gauge,
        /// Of it, content in the tier zstd.
        zstd_bytes: u64 => gauge,
        /// Evicted pages that consist of one repeated 32-bit word other than 0, and take no pool.
        same_filled_pages: u64 => gauge,
        /// Memory of the pools that is taken for content and holds none.
        fragmented_bytes: u64 => gauge,
        /// Memory that the record of all pages takes, in the pools and in the daemon.
        metadata_bytes: u64 => gauge,
        /// The same as a share of the RAM of all VMs.
        metadata_share: f64 => gauge,
        /// VMs of which only pages of zeros are evicted, because there is no room for content.
        full_vms: u64 => gauge,
        /// The tiers outside memory.
        tiers: Vec<TierReport> => skip,
    }
}

report! {
    /// State and figures of a tier outside memory, since the daemon began.
    pub struct TierReport in "pagetide_tier" {
        /// Its kind: disk or remote.
        tier: String => label "tier",
        /// How it stands: working, slow, full or gone.
        standing: String => skip,
        /// Why, if it is slow or gone.
        reason: Option<String> => skip,
        /// Of a remote tier: what its server keeps if it ends, by its settings: all, lagging (all but the last seconds), nothing, or unknown.
        keeps: Option<String> => skip,
        /// For how long it has stood so.
        standing_seconds: f64 => gauge,
        /// 1 if it takes and returns pages, else 0.
        is_working: u64 => gauge,
        /// Most bytes that it may hold.
        limit_bytes: u64 => gauge,
        /// Bytes that stored pages take.
        stored_bytes: u64 => gauge,
        /// Pages read.
        pages_read: u64 => counter,
        /// Bytes read for them.
        read_bytes: u64 => counter,
        /// Pages written.
        pages_written: u64 => counter,
        /// Batches that they were in.
        batches_written: u64 => counter,
        /// Bytes written.
        written_bytes: u64 => counter,
        /// Reads that failed.
        read_errors: u64 => counter,
        /// Batches that could not be written.
        write_errors: u64 => counter,
        /// Requests that took longer than their bound.
        overdue_requests: u64 => counter,
        /// Requests refused because there were too many, or the tier did not work.
        refused_requests: u64 => counter,
        /// How often a server was found to have lost what it was given.
        losses: u64 => counter,
        /// Pages that were read and not there.
        pages_not_there: u64 => counter,
        /// Half of the reads took no longer.
        read_p50_us: u64 => gauge,
        /// All but one in a hundred reads took no longer.
        read_p99_us: u64 => gauge,
        /// Half of the batches were written in this time.
        write_p50_us: u64 => gauge,
        /// All but one in a hundred batches were written in this time.
        write_p99_us: u64 => gauge,
    }
}

/// Said of a DPU process.
pub const NO_POOLS: &str = "this process has no VMs, and so no pools: ask the daemon";

/// A change of the cap of the pools.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NewCap {
    /// No cap.
    None,
    /// This much.
    Bytes(u64),
    /// That of the setting.
    Default,
}

/// The setting `pool-max`: a size, or none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PoolMax(pub Option<u64>);

impl std::str::FromStr for PoolMax {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == NONE {
            return Ok(Self(None));
        }
        let size: ByteSize = text
            .parse()
            .map_err(|error| format!("{error}; or '{NONE}'"))?;
        check_cap(Some(size.0))?;
        Ok(Self(Some(size.0)))
    }
}

impl TryFrom<String> for PoolMax {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<PoolMax> for String {
    fn from(max: PoolMax) -> Self {
        max.0
            .map_or_else(|| NONE.to_owned(), |bytes| ByteSize(bytes).to_string())
    }
}

fn check_cap(cap_bytes: Option<u64>) -> Result<(), String> {
    match cap_bytes {
        Some(bytes) if bytes < CAP_BYTES_MIN => Err(format!(
            "a cap of {bytes} bytes cannot work: the words of a VM and some content need {}; give more, or '{NONE}'",
            ByteSize(CAP_BYTES_MIN)
        )),
        _ => Ok(()),
    }
}

/// The cap of a daemon's pools, with its file.
#[derive(Debug)]
pub struct KeptCap {
    file: PathBuf,
    setting: PoolMax,
    cap: Arc<PoolCap>,
    /// Held while file and cap change together.
    changing: Mutex<()>,
}

impl KeptCap {
    /// The cap that was set last in `state_dir`, or else that of the setting.
    #[must_use]
    pub fn open(state_dir: &Path, setting: PoolMax) -> Self {
        let file = state_dir.join(CAP_FILE);
        let kept = match std::fs::read_to_string(&file) {
            Ok(text) => text.trim().parse(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(setting),
            Err(error) => Err(error.to_string()),
        };
        // VMs must be served whatever was set: without a daemon they wait at their next fault.
        let PoolMax(cap_bytes) = kept.unwrap_or_else(|why| {
            tracing::error!(
                file = %file.display(),
                why,
                "what was set as the cap of the pools is lost: the setting pool-max holds"
            );
            setting
        });
        if cap_bytes != setting.0 {
            tracing::info!(
                ?cap_bytes,
                "the pools have the cap that was set last, not that of the setting"
            );
        }
        Self {
            file,
            setting,
            cap: PoolCap::new(cap_bytes),
            changing: Mutex::new(()),
        }
    }

    /// The cap itself.
    #[must_use]
    pub fn cap(&self) -> &Arc<PoolCap> {
        &self.cap
    }

    /// Sets or (`None`) lifts the cap, for successors too.
    ///
    /// # Errors
    /// The cap is too small, or cannot be kept; nothing has changed.
    pub fn set(&self, cap_bytes: Option<u64>) -> Result<(), ControlError> {
        check_cap(cap_bytes).map_err(ControlError::wrong_use)?;
        let _changing = (self.changing.lock()).unwrap_or_else(PoisonError::into_inner);
        let text = String::from(PoolMax(cap_bytes));
        let unfinished = self.file.with_extension("new");
        std::fs::write(&unfinished, text + "\n")
            .and_then(|()| std::fs::rename(&unfinished, &self.file))
            .map_err(|error| broken(&self.file, &error))?;
        self.cap.set(cap_bytes);
        Ok(())
    }

    /// From now on the setting holds again.
    ///
    /// # Errors
    /// What was set cannot be removed; nothing has changed.
    pub fn reset(&self) -> Result<(), ControlError> {
        let _changing = (self.changing.lock()).unwrap_or_else(PoisonError::into_inner);
        match std::fs::remove_file(&self.file) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(broken(&self.file, &error)),
        }
        self.cap.set(self.setting.0);
        Ok(())
    }
}

fn broken(file: &Path, error: &io::Error) -> ControlError {
    ControlError::failed(format!(
        "the cap of the pools is kept in {}, which fails: {error}",
        file.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::ErrorKind;

    #[test]
    fn cap_that_was_set_outlives_the_daemon_and_its_setting_until_it_is_reset() {
        let dir = tempfile::tempdir().unwrap();
        let open = |setting: &str| KeptCap::open(dir.path(), setting.parse().unwrap());
        assert_eq!(open("1G").cap().cap_bytes(), Some(1 << 30));
        let kept = open("none");
        assert_eq!(kept.cap().cap_bytes(), None);
        kept.set(Some(64 << 20)).unwrap();
        assert_eq!(kept.cap().cap_bytes(), Some(64 << 20));
        assert_eq!(open("1G").cap().cap_bytes(), Some(64 << 20));
        kept.set(None).unwrap();
        let other = open("1G");
        assert_eq!(other.cap().cap_bytes(), None);
        other.reset().unwrap();
        assert_eq!(other.cap().cap_bytes(), Some(1 << 30));
        other.reset().unwrap();
        assert_eq!(open("none").cap().cap_bytes(), None);
    }

    #[test]
    fn cap_that_cannot_work_is_refused_and_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let kept = KeptCap::open(dir.path(), PoolMax(Some(8 << 20)));
        let error = kept.set(Some(CAP_BYTES_MIN - 1)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::WrongUse);
        assert!(error.message.contains("4M"), "{}", error.message);
        assert_eq!(kept.cap().cap_bytes(), Some(8 << 20));
        assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());
        for text in ["", "-1", "3M", "much", "1e9"] {
            text.parse::<PoolMax>().unwrap_err();
        }
    }

    #[test]
    fn damaged_file_keeps_no_vm_from_being_served() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(CAP_FILE), "a lot\n").unwrap();
        let kept = KeptCap::open(dir.path(), PoolMax(Some(8 << 20)));
        assert_eq!(kept.cap().cap_bytes(), Some(8 << 20));
        kept.set(Some(16 << 20)).unwrap();
        let again = KeptCap::open(dir.path(), PoolMax(None));
        assert_eq!(again.cap().cap_bytes(), Some(16 << 20));
    }
}
