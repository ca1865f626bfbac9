// SPDX-License-Identifier: Apache-2.0
//! The memory cgroup of the VMs, in the peer's arm their budget: below the bench's own group, version 1 or 2,
//! whichever has the memory controller here.

use pagetide_swap::cgroup::{MemoryGroups, Place, Version};
use rustix::io::Errno;
use std::path::{Path, PathBuf};

/// A group; removed on drop, when its processes have ended.
pub(super) struct Group {
    directory: PathBuf,
    version: Version,
}

/// What came of a new limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Limited {
    /// It is in force.
    InForce,
    /// More than that is in use, and could not be reclaimed in time. The limit before it holds.
    InUse,
}

impl Group {
    /// A group without a limit.
    ///
    /// # Errors
    /// A sentence with the reason why there can be none.
    pub(super) fn new() -> Result<Self, String> {
        let place = MemoryGroups::of_this_process()
            .place()
            .map_err(|error| format!("the memory cgroup of the bench: {error}"))?
            .ok_or("this host has no memory cgroups: mount /sys/fs/cgroup")?;
        let above = match place.version {
            Version::One => place.directory.clone(),
            Version::Two => passing_on(&place)?,
        };
        let directory = above.join(format!("pagetide-bench-{}", std::process::id()));
        std::fs::create_dir(&directory)
            .map_err(|error| format!("no cgroup {}: {error}", directory.display()))?;
        Ok(Self {
            directory,
            version: place.version,
        })
    }

    /// Its directory.
    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Sets its limit; what is in use beyond that is reclaimed first.
    pub(super) fn limit(&self, bytes: u64) -> Result<Limited, String> {
        let file = self.limit_file();
        match std::fs::write(&file, bytes.to_string()) {
            Ok(()) => Ok(Limited::InForce),
            Err(error) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => {
                Ok(Limited::InUse)
            }
            Err(error) => Err(format!("{}: {error}", file.display())),
        }
    }

    /// Lifts its limit.
    pub(super) fn lift(&self) -> Result<(), String> {
        let none = match self.version {
            Version::One => "-1",
            Version::Two => "max",
        };
        let file = self.limit_file();
        std::fs::write(&file, none).map_err(|error| format!("{}: {error}", file.display()))
    }

    fn limit_file(&self) -> PathBuf {
        self.directory.join(match self.version {
            Version::One => "memory.limit_in_bytes",
            Version::Two => "memory.max",
        })
    }

    /// What is charged to it.
    pub(super) fn charged_bytes(&self) -> Result<u64, String> {
        let name = match self.version {
            Version::One => "memory.usage_in_bytes",
            Version::Two => "memory.current",
        };
        let text = self.read(name)?;
        let number = text.trim().parse();
        number.map_err(|_| {
            format!(
                "{} says '{}'",
                self.directory.join(name).display(),
                text.trim()
            )
        })
    }

    /// Shared memory in that: RAM of the VMs.
    pub(super) fn shared_bytes(&self) -> Result<u64, String> {
        let stat = self.read("memory.stat")?;
        shared_in(&stat).ok_or_else(|| {
            let directory = self.directory.display();
            format!("memory.stat of {directory} does not tell shared memory")
        })
    }

    fn read(&self, name: &str) -> Result<String, String> {
        let file = self.directory.join(name);
        std::fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir(&self.directory) {
            tracing::error!(group = %self.directory.display(), %error, "the cgroup of the bench stays behind");
        }
    }
}

/// Shared memory by a `memory.stat`: version 1 has `shmem` of the group alone, which has none below it.
fn shared_in(stat: &str) -> Option<u64> {
    let line = stat.lines().find_map(|line| line.strip_prefix("shmem "));
    line.and_then(|bytes| bytes.trim().parse().ok())
}

/// The nearest group from the bench's own upwards whose children have the memory controller. (A group that has
/// processes cannot pass it on.)
fn passing_on(place: &Place) -> Result<PathBuf, String> {
    let mut upwards = place.directory.ancestors();
    let found = upwards.find(|group| {
        let passed = std::fs::read_to_string(group.join("cgroup.subtree_control"));
        group.starts_with(&place.mount)
            && passed.is_ok_and(|passed| passed.split_whitespace().any(|name| name == "memory"))
    });
    found.map(Path::to_owned).ok_or_else(|| {
        format!(
            "no group above {} passes the memory controller on: write +memory to its cgroup.subtree_control",
            place.directory.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_found_in_either_versions_statistics() {
        assert_eq!(
            shared_in("cache 9\nrss 1\nshmem 8192\ntotal_shmem 9\n"),
            Some(8192)
        );
        assert_eq!(
            shared_in("anon 1\nfile 2\nshmem 4096\nshmem_thp 0\n"),
            Some(4096)
        );
        assert_eq!(shared_in("shmem_thp 0\n"), None);
    }

    #[test]
    fn group_that_passes_the_controller_on_is_the_nearest() {
        let mount = tempfile::tempdir().unwrap();
        let directory = mount.path().join("a/b/c");
        std::fs::create_dir_all(&directory).unwrap();
        let place = Place {
            version: Version::Two,
            mount: mount.path().to_owned(),
            directory: directory.clone(),
        };
        let error = passing_on(&place).unwrap_err();
        assert!(error.contains("cgroup.subtree_control"), "{error}");
        for (group, passed) in [("", "cpu memory"), ("a", "cpu memory\n"), ("a/b", "cpu\n")] {
            let file = mount.path().join(group).join("cgroup.subtree_control");
            std::fs::write(file, passed).unwrap();
        }
        assert_eq!(passing_on(&place), Ok(mount.path().join("a")));
    }
}
