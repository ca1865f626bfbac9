// SPDX-License-Identifier: Apache-2.0
//! [`Groups`]: what the host has, and whether memory cgroups leave room for what the budget promises.
//!
//! A VM's resident memory is charged to its VMM's groups, the pools to the daemon's. A group that is smaller
//! than what its VMs may have would reclaim or kill before the budget says anything. So the daemon's own
//! groups must allow the whole budget, and a VMM's group what its VMs may have: the least of RAM and ceiling
//! of each, and of the budget.

use super::super::failure::failed;
use crate::control::ControlError;
use pagetide_policy::budget::{Bytes, HostMemory};
use pagetide_swap::cgroup::MemoryGroups;
use std::{collections::BTreeMap, path::PathBuf};

/// What a VM may have at most.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand<'a> {
    pub(super) name: &'a str,
    pub(super) pid: u32,
    pub(super) most: Bytes,
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Groups {
    root: PathBuf,
    own: MemoryGroups,
}

/// A limit of a group, and what is asked of it.
#[derive(Default)]
struct Load {
    limit: u64,
    most: Bytes,
    names: Vec<String>,
}

impl Groups {
    pub(super) fn of_this_host() -> Self {
        Self {
            root: PathBuf::from("/"),
            own: MemoryGroups::of_this_process(),
        }
    }

    /// The same with `/proc` and all mounts below `root`.
    #[cfg(test)]
    pub(super) fn below(root: &std::path::Path) -> Self {
        Self {
            root: root.to_owned(),
            own: MemoryGroups::below(root),
        }
    }

    /// The groups of a VMM.
    pub(super) fn of_process(&self, pid: u32) -> MemoryGroups {
        self.own.clone().of_process(pid)
    }

    /// RAM of the host, and the least limit of the daemon's groups.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn host(&self) -> Result<HostMemory, ControlError> {
        let path = self.root.join("proc/meminfo");
        let text = std::fs::read_to_string(&path)
            .map_err(|error| failed(format!("cannot read {}: {error}", path.display())))?;
        let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
        let kib = total.and_then(|total| total.trim().strip_suffix("kB"));
        let Some(Ok(kib)) = kib.map(|kib| kib.trim().parse::<u64>()) else {
            return Err(failed(format!(
                "{} does not tell the host's memory",
                path.display()
            )));
        };
        let levels = self.own.levels().map_err(|error| {
            failed(format!(
                "the memory cgroups of the daemon cannot be read: {error}"
            ))
        })?;
        let least = levels.iter().map(|level| Bytes(level.limit_bytes)).min();
        Ok(HostMemory {
            ram: Bytes(kib.saturating_mul(1024)),
            cgroup_limit: least,
        })
    }

    /// Refuses a budget that promises VMs more than a group of their VMMs allows.
    ///
    /// # Errors
    /// A sentence that names the group.
    pub(super) fn refuse_small<'a>(
        &self,
        budget: Bytes,
        demands: impl IntoIterator<Item = Demand<'a>>,
    ) -> Result<(), ControlError> {
        let mut loads: BTreeMap<(PathBuf, &'static str), Load> = BTreeMap::new();
        for demand in demands {
            let levels = match self.of_process(demand.pid).levels() {
                Ok(levels) => levels,
                Err(error) => {
                    tracing::warn!(vm = demand.name, %error, "the memory cgroups of its VMM cannot be read");
                    continue;
                }
            };
            for level in levels {
                let load = loads.entry((level.group, level.file)).or_default();
                load.limit = level.limit_bytes;
                load.most += demand.most;
                load.names.push(format!("'{}'", demand.name));
            }
        }
        for ((group, file), load) in loads {
            let most = load.most.min(budget);
            if most > Bytes(load.limit) {
                return Err(ControlError::wrong_use(format!(
                    "the memory cgroup {} of the VMM of {} allows {} ({file}), and the budget of {budget} lets it have \
                     {most}: raise that limit, or give the VM a lower --ceiling",
                    group.display(),
                    load.names.join(", "),
                    Bytes(load.limit),
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIFIED: &str = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";

    fn host(files: &[(&str, &str)]) -> (tempfile::TempDir, Groups) {
        let dir = tempfile::tempdir().unwrap();
        let usual = [
            (
                "proc/meminfo",
                "MemTotal:       16777216 kB\nMemFree: 1 kB\n",
            ),
            ("proc/self/mountinfo", UNIFIED),
            ("proc/self/cgroup", "0::/daemon\n"),
        ];
        for (path, text) in usual.iter().chain(files) {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let groups = Groups::below(dir.path());
        (dir, groups)
    }

    #[test]
    fn host_has_its_ram_and_the_least_limit_of_the_daemons_groups() {
        let (_dir, groups) = host(&[]);
        let found = groups.host().unwrap();
        assert_eq!((found.ram, found.cgroup_limit), (Bytes::gib(16), None));
        let (_dir, groups) = host(&[
            ("sys/fs/cgroup/daemon/memory.max", "1073741824\n"),
            ("sys/fs/cgroup/daemon/memory.high", "536870912\n"),
            ("sys/fs/cgroup/daemon/memory.current", "1\n"),
        ]);
        assert_eq!(groups.host().unwrap().cgroup_limit, Some(Bytes::mib(512)));
        let (_dir, groups) = host(&[("proc/meminfo", "MemFree: 1 kB\n")]);
        let error = groups.host().unwrap_err();
        assert!(error.message.contains("meminfo"), "{error}");
    }

    #[test]
    fn group_of_vmms_must_allow_what_its_vms_may_have_together_but_no_more_than_the_budget() {
        let (_dir, groups) = host(&[
            ("proc/5/cgroup", "0::/vms/a\n"),
            ("proc/6/cgroup", "0::/vms/b\n"),
            ("sys/fs/cgroup/vms/memory.max", "3221225472\n"),
            ("sys/fs/cgroup/vms/memory.current", "1\n"),
            ("sys/fs/cgroup/vms/a/memory.max", "2147483648\n"),
            ("sys/fs/cgroup/vms/a/memory.current", "1\n"),
        ]);
        let demand = |name, pid, most| Demand { name, pid, most };
        let (two, one) = (Bytes::gib(2), Bytes::gib(1));
        let of = |budget, demands: &[Demand<'_>]| groups.refuse_small(budget, demands.to_vec());
        let both = [demand("a", 5, two), demand("b", 6, one)];
        assert_eq!(of(Bytes::gib(8), &both), Ok(()));
        let more = [demand("a", 5, two), demand("b", 6, two)];
        let error = of(Bytes::gib(8), &more).unwrap_err();
        for part in ["/sys/fs/cgroup/vms ", "'a', 'b'", "3 GiB", "4 GiB"] {
            assert!(error.message.contains(part), "{error}");
        }
        assert_eq!(
            of(Bytes::gib(3), &more),
            Ok(()),
            "the budget holds them back"
        );
        let own = of(Bytes::gib(8), &[demand("a", 5, Bytes::gib(3))]).unwrap_err();
        assert!(own.message.contains("/sys/fs/cgroup/vms/a"), "{own}");
        // A VMM without a group, and one that has ended.
        assert_eq!(of(Bytes::gib(8), &[demand("c", 7, Bytes::gib(9))]), Ok(()));
    }
}
