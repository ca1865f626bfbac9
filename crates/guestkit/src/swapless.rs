// SPDX-License-Identifier: Apache-2.0
//! Starting a program where kernel swap cannot reach its memory.
//!
//! Without swap on the machine there is nothing to do. With it, the program
//! starts in a cgroup of its own that may not swap: `memory.swap.max = 0` on
//! cgroup v2, and on v1, which counts memory and swap together,
//! `memory.swappiness = 0` with `memory.memsw.limit_in_bytes` equal to
//! `memory.limit_in_bytes`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Kernel swap could not be kept away.
#[derive(Debug, thiserror::Error)]
#[error("keeping kernel swap away from the guest, {path}: {source}; `swapoff -a` is another way", path = path.display())]
pub struct SwapError {
    path: PathBuf,
    source: io::Error,
}

/// How memory stays out of kernel swap.
#[derive(Debug)]
pub enum Swapless {
    /// The machine has no swap.
    NoSwap,
    /// A cgroup that may not swap, removed on drop.
    Cgroup(PathBuf),
}

impl Swapless {
    /// Looks whether there is swap, and makes a cgroup called `name` if so.
    ///
    /// `limit_bytes` is the cgroup's memory limit on cgroup v1; choose it well
    /// above what the program may ever use.
    ///
    /// # Errors
    /// There is swap and the cgroup cannot be made: usually for want of root.
    pub fn prepare(name: &str, limit_bytes: u64) -> Result<Self, SwapError> {
        let swaps_path = Path::new("/proc/swaps");
        let swaps = fs::read_to_string(swaps_path).map_err(|source| error(swaps_path, source))?;
        if swaps.lines().count() <= 1 {
            return Ok(Self::NoSwap);
        }
        let (root, settings) = settings(limit_bytes);
        let controllers = root.join("cgroup.subtree_control");
        if controllers.exists() {
            fs::write(&controllers, "+memory").map_err(|source| error(&controllers, source))?;
        }
        let group = Self::Cgroup(root.join(name));
        if let Self::Cgroup(path) = &group {
            if !path.is_dir() {
                fs::create_dir(path).map_err(|source| error(path, source))?;
            }
            for (file, value) in settings {
                let file = path.join(file);
                fs::write(&file, value).map_err(|source| error(&file, source))?;
            }
        }
        Ok(group)
    }

    /// A command that starts `program` there.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        match self {
            Self::NoSwap => Command::new(program),
            Self::Cgroup(path) => {
                // A shell moves itself and becomes the program: no page is charged elsewhere.
                let mut command = Command::new("/bin/sh");
                command.args(["-c", "echo $$ >\"$0\" && exec \"$@\""]);
                command.arg(path.join("cgroup.procs")).arg(program);
                command
            }
        }
    }
}

impl Drop for Swapless {
    fn drop(&mut self) {
        if let Self::Cgroup(path) = self
            && let Err(error) = fs::remove_dir(&*path)
        {
            eprintln!("guestkit: {} stays: {error}", path.display());
        }
    }
}

fn settings(limit_bytes: u64) -> (PathBuf, Vec<(&'static str, String)>) {
    let v2 = Path::new("/sys/fs/cgroup");
    if v2.join("cgroup.controllers").exists() {
        return (v2.to_owned(), vec![("memory.swap.max", "0".to_owned())]);
    }
    let limit = limit_bytes.to_string();
    // The limit of both together may not be below that of memory: memory first.
    let values = vec![
        ("memory.swappiness", "0".to_owned()),
        ("memory.limit_in_bytes", limit.clone()),
        ("memory.memsw.limit_in_bytes", limit),
    ];
    (v2.join("memory"), values)
}

fn error(path: &Path, source: io::Error) -> SwapError {
    SwapError {
        path: path.to_owned(),
        source,
    }
}
