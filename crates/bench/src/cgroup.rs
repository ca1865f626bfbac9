// SPDX-License-Identifier: Apache-2.0
//! A memory cgroup for the stand-ins: what keeps them within the budget while the kernel's swap serves them.
//!
//! Memory is charged to the group of whoever touches it first. So the stand-ins are started in the group:
//! the bench goes there for that moment ([`Group::within`]), and back.

use pagetide_swap::cgroup::MemoryGroups;
use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

const PROCESSES: &str = "cgroup.procs";
/// Longest time for the kernel to get a group below its limit, and to let go of one.
const OBEY_WAIT: Duration = Duration::from_secs(60);
const RETRY: Duration = Duration::from_millis(20);

/// Files of a version of cgroups.
#[derive(Clone, Copy)]
struct Files {
    limit: &'static str,
    unlimited: &'static str,
    charged: &'static str,
    /// Below it the kernel reclaims, and kills nobody.
    soft: &'static str,
    /// What it writes there is reclaimed, or all that can be.
    reclaim: &'static str,
}

const VERSIONS: [Files; 2] = [
    Files {
        limit: "memory.limit_in_bytes",
        unlimited: "-1",
        charged: "memory.usage_in_bytes",
        soft: "memory.limit_in_bytes",
        reclaim: "memory.force_empty",
    },
    Files {
        limit: "memory.max",
        unlimited: "max",
        charged: "memory.current",
        soft: "memory.high",
        reclaim: "memory.reclaim",
    },
];

/// Such a group, removed on drop.
pub(crate) struct Group {
    directory: PathBuf,
    files: Files,
    /// Where the bench itself belongs.
    own: PathBuf,
}

impl Group {
    /// A group beside or below the bench's own, without a limit.
    ///
    /// # Errors
    /// Why there is none, in a sentence.
    pub(crate) fn create() -> Result<Self, String> {
        let own = MemoryGroups::of_this_process().directory();
        let own = own.map_err(|error| format!("memory cgroups: {error}"))?;
        let own = own.ok_or("this machine shows no memory cgroup")?;
        // Version 2 has the controller only in groups whose parent has no process.
        let parents = [Some(own.as_path()), own.parent()];
        let mut last = String::new();
        for parent in parents.into_iter().flatten() {
            match Self::create_in(parent, &own) {
                Ok(group) => return Ok(group),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn create_in(parent: &Path, own: &Path) -> Result<Self, String> {
        let directory = parent.join(format!("pagetide-bench-{}", std::process::id()));
        fs::create_dir(&directory)
            .map_err(|error| format!("no cgroup {}: {error}", directory.display()))?;
        let has = |files: &Files| directory.join(files.limit).exists();
        if let Some(files) = VERSIONS.into_iter().find(has) {
            return Ok(Self {
                directory,
                files,
                own: own.to_owned(),
            });
        }
        let reason = format!("{} has no memory controller", directory.display());
        match fs::remove_dir(&directory) {
            Ok(()) => Err(reason),
            Err(error) => Err(format!("{reason}, and stays behind: {error}")),
        }
    }

    /// What `work` starts is in the group.
    ///
    /// # Errors
    /// Those of `work`, and of going there and back.
    pub(crate) fn within<T>(&self, work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        let pid = std::process::id().to_string();
        write(&self.directory.join(PROCESSES), &pid)?;
        let outcome = work();
        write(&self.own.join(PROCESSES), &pid)?;
        outcome
    }

    /// Has the kernel reclaim until `bytes` or less are charged, and lets it grow again.
    ///
    /// # Errors
    /// If it does not get there.
    pub(crate) fn shrink_to(&self, bytes: u64) -> Result<(), String> {
        self.obey(self.files.soft, bytes)?;
        write(&self.directory.join(self.files.soft), self.files.unlimited)
    }

    /// Has the kernel reclaim all that it can.
    ///
    /// # Errors
    /// The kernel's, except that it could not reclaim everything.
    pub(crate) fn reclaim_all(&self) -> Result<(), String> {
        let path = self.directory.join(self.files.reclaim);
        let charged = self.charged_bytes()?.to_string();
        match fs::write(&path, &charged) {
            Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => {
                Err(format!("writing {charged} to {}: {error}", path.display()))
            }
            _ => Ok(()),
        }
    }

    /// From now on `bytes` may be charged.
    ///
    /// # Errors
    /// If the kernel cannot get it down to that.
    pub(crate) fn limit(&self, bytes: u64) -> Result<(), String> {
        // A hard limit of version 2 below what is charged kills; so it is reclaimed first.
        self.shrink_to(bytes)?;
        self.obey(self.files.limit, bytes)
    }

    /// There is no limit any more.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn lift(&self) -> Result<(), String> {
        write(&self.directory.join(self.files.limit), self.files.unlimited)
    }

    /// The file that says what is charged.
    pub(crate) fn charged_file(&self) -> PathBuf {
        self.directory.join(self.files.charged)
    }

    /// What is charged now.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn charged_bytes(&self) -> Result<u64, String> {
        bytes_in(&self.charged_file())
    }

    /// Sets `file` to `bytes` until that is kept: pages in use are passed over at first.
    fn obey(&self, file: &str, bytes: u64) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            let set = write(&self.directory.join(file), &bytes.to_string());
            if set.is_ok() && self.charged_bytes()? <= bytes {
                return Ok(());
            }
            if begun.elapsed() > OBEY_WAIT {
                let charged = self.charged_bytes()?;
                set?;
                return Err(format!(
                    "the kernel leaves {charged} bytes where {bytes} are allowed"
                ));
            }
            std::thread::sleep(RETRY);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let begun = Instant::now();
        loop {
            let Err(error) = fs::remove_dir(&self.directory) else {
                return;
            };
            // Processes that have just ended are in it for a moment.
            if begun.elapsed() > OBEY_WAIT {
                tracing::error!(group = %self.directory.display(), %error, "the cgroup of the bench stays behind");
                return;
            }
            std::thread::sleep(RETRY);
        }
    }
}

/// The number in a file of a group.
///
/// # Errors
/// If it cannot be read.
pub(crate) fn bytes_in(path: &Path) -> Result<u64, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let bytes = text.trim().parse::<u64>();
    bytes.map_err(|_| format!("{} is not understood: {text}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|error| format!("writing {text} to {}: {error}", path.display()))
}
