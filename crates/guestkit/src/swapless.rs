// SPDX-License-Identifier: Apache-2.0
//! Starts a program where kernel swap cannot reach its memory.
//!
//! Without swap on the machine there is nothing to do. With swap and cgroup v2 the program starts in its
//! own cgroup with `memory.swap.max = 0`. cgroup v1 has no such setting (neither `memory.swappiness` nor
//! `memory.memsw.limit_in_bytes` keeps shared memory in place), so there the program gets a tmpfs mounted
//! with `noswap` (Linux 6.4) for its guest's RAM. It is mounted in the program's own mount namespace: no
//! other process sees it, and it disappears when the program ends.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Kernel swap could not be excluded.
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    /// A file could not be used.
    #[error("keeping kernel swap away from the guest, {path}: {source}; `swapoff -a` is another way", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// cgroup v1, and no tmpfs that never swaps.
    #[error(
        "swap is on, the memory cgroup is of version 1, and a tmpfs that never swaps cannot be had \
         ({said}; it needs root and Linux 6.4): switch swap off (swapoff -a)"
    )]
    NoTmpfs {
        /// The output of the attempt.
        said: String,
    },
}

/// How memory stays out of kernel swap.
#[derive(Debug)]
pub enum Swapless {
    /// The machine has no swap.
    NoSwap,
    /// A cgroup that may not swap, removed on drop.
    Cgroup(PathBuf),
    /// A tmpfs that never swaps, to be mounted here for the program alone.
    Tmpfs {
        /// Where.
        path: PathBuf,
        /// How large.
        bytes: u64,
    },
}

impl Swapless {
    /// Checks for swap. If there is any, makes a cgroup called `name`, or a folder in `folder` for a tmpfs
    /// of `ram_bytes`.
    ///
    /// # Errors
    /// There is swap and neither can be made: usually for lack of root.
    pub fn prepare(name: &str, folder: &Path, ram_bytes: u64) -> Result<Self, SwapError> {
        let swaps_path = Path::new("/proc/swaps");
        let swaps = fs::read_to_string(swaps_path).map_err(|source| error(swaps_path, source))?;
        if swaps.lines().count() <= 1 {
            return Ok(Self::NoSwap);
        }
        let ram = folder.join("ram");
        let version_2 = Path::new("/sys/fs/cgroup");
        if !version_2.join("cgroup.controllers").exists() {
            return Self::tmpfs(ram, ram_bytes);
        }
        // In a container we may not be permitted to make cgroups.
        Self::cgroup(version_2, name)
            .or_else(|error| Self::tmpfs(ram, ram_bytes).map_err(|_second_choice| error))
    }

    fn cgroup(version_2: &Path, name: &str) -> Result<Self, SwapError> {
        let controllers = version_2.join("cgroup.subtree_control");
        fs::write(&controllers, "+memory").map_err(|source| error(&controllers, source))?;
        let path = version_2.join(name);
        if !path.is_dir() {
            fs::create_dir(&path).map_err(|source| error(&path, source))?;
        }
        let file = path.join("memory.swap.max");
        let group = Self::Cgroup(path);
        fs::write(&file, "0").map_err(|source| error(&file, source))?;
        Ok(group)
    }

    fn tmpfs(path: PathBuf, ram_bytes: u64) -> Result<Self, SwapError> {
        fs::create_dir_all(&path).map_err(|source| error(&path, source))?;
        // Room for the file system's metadata.
        let bytes = ram_bytes + (4 << 20);
        let tmpfs = Self::Tmpfs { path, bytes };
        // A trial mount in a short-lived namespace shows whether the kernel supports the option.
        let said = match tmpfs.command("true").output() {
            Ok(output) if output.status.success() => return Ok(tmpfs),
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => error.to_string(),
        };
        Err(SwapError::NoTmpfs { said })
    }

    /// Where the program must put its guest's RAM, if it matters.
    #[must_use]
    pub fn ram_folder(&self) -> Option<&Path> {
        match self {
            Self::Tmpfs { path, .. } => Some(path),
            Self::NoSwap | Self::Cgroup(_) => None,
        }
    }

    /// A command that starts `program` there.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        match self {
            Self::NoSwap => Command::new(program),
            Self::Cgroup(path) => {
                // A shell moves itself and then executes the program: no page is charged elsewhere.
                let mut command = Command::new("/bin/sh");
                command.args(["-c", "echo $$ >\"$0\" && exec \"$@\""]);
                command.arg(path.join("cgroup.procs")).arg(program);
                command
            }
            Self::Tmpfs { path, bytes } => {
                let options = format!("noswap,mode=0700,size={bytes}");
                let mount =
                    "mount -t tmpfs -o \"$0\" pagetide-guestkit \"$1\" && shift && exec \"$@\"";
                let mut command = Command::new("unshare");
                command.args(["--mount", "/bin/sh", "-c", mount, &options]);
                command.arg(path).arg(program);
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

fn error(path: &Path, source: io::Error) -> SwapError {
    SwapError::File {
        path: path.to_owned(),
        source,
    }
}
