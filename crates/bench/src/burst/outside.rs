// SPDX-License-Identifier: Apache-2.0
//! What VMs take, seen from outside of the daemon: blocks of their RAM files and of the pools.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Bytes of a block in `stat`.
const BLOCK_BYTES: u64 = 512;
/// What the stand-in's RAM file is called.
const RAM: &str = "/memfd:guest-ram";
/// Time between two looks.
const PERIOD: Duration = Duration::from_millis(10);

/// Files whose blocks count.
#[derive(Clone, Debug)]
pub(super) struct Outside {
    /// RAM of each guest, in their order.
    rams: Vec<PathBuf>,
    pools: PathBuf,
}

impl Outside {
    /// The RAM of the processes `pids`, and the pools in `state_dir`.
    ///
    /// # Errors
    /// If a RAM is not found.
    pub(super) fn of(pids: &[u32], state_dir: &Path) -> Result<Self, String> {
        Ok(Self {
            rams: pids
                .iter()
                .map(|pid| ram_of(*pid))
                .collect::<Result<_, _>>()?,
            pools: state_dir.to_owned(),
        })
    }

    /// What is present of each guest's RAM.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn resident_bytes(&self) -> Result<Vec<u64>, String> {
        self.rams.iter().map(|ram| blocks_of(ram)).collect()
    }

    /// What the pools take.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn pool_bytes(&self) -> Result<u64, String> {
        let failed = |error: std::io::Error| format!("{}: {error}", self.pools.display());
        let mut sum = 0;
        for entry in fs::read_dir(&self.pools).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path
                .extension()
                .is_some_and(|extension| extension == "pool")
            {
                sum += blocks_of(&path)?;
            }
        }
        Ok(sum)
    }

    /// All of it.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn used_bytes(&self) -> Result<u64, String> {
        Ok(self.resident_bytes()?.iter().sum::<u64>() + self.pool_bytes()?)
    }
}

fn ram_of(pid: u32) -> Result<PathBuf, String> {
    let descriptors = PathBuf::from(format!("/proc/{pid}/fd"));
    let failed = |error: std::io::Error| format!("{}: {error}", descriptors.display());
    for entry in fs::read_dir(&descriptors).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let target = fs::read_link(&path).map_err(failed)?;
        if target.to_string_lossy().starts_with(RAM) {
            return Ok(path);
        }
    }
    Err(format!("{} has no {RAM}", descriptors.display()))
}

fn blocks_of(path: &Path) -> Result<u64, String> {
    let metadata = fs::metadata(path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(metadata.blocks() * BLOCK_BYTES)
}

/// What was used at what time.
pub(super) type Used = Vec<(Instant, u64)>;

/// A thread that looks all the time: between two samples a hundredth of a second passes.
pub(super) struct Look {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Used, String>>,
}

impl Look {
    /// Begins to look; `used_bytes` says what is used.
    pub(super) fn begin(used_bytes: impl Fn() -> Result<u64, String> + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut used = Used::new();
            while !told.load(Relaxed) {
                used.push((Instant::now(), used_bytes()?));
                std::thread::sleep(PERIOD);
            }
            Ok(used)
        });
        Self { stop, thread }
    }

    /// What it has seen.
    ///
    /// # Errors
    /// Why it could not look.
    pub(super) fn end(self) -> Result<Used, String> {
        self.stop.store(true, Relaxed);
        let seen = self.thread.join();
        seen.unwrap_or_else(|_| Err("the thread that looks has panicked".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn pools_count_by_their_blocks_and_other_files_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let outside = Outside::of(&[], dir.path()).unwrap();
        for name in ["a.pool", "b.pool", "devices.json"] {
            let mut file = fs::File::create(dir.path().join(name)).unwrap();
            file.write_all(&[1; 8192]).unwrap();
            file.sync_all().unwrap();
        }
        assert_eq!(outside.used_bytes(), Ok(16384));
        assert!(Outside::of(&[std::process::id()], dir.path()).is_err());
    }
}
