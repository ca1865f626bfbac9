// SPDX-License-Identifier: Apache-2.0
//! Whether the kernel may swap a process's shared memory out behind our back.
//!
//! Two things would go wrong: a page in swap is absent from its file's memory but not from its
//! file, so any access reads it back without our notice; and the tracker's page-out, which only
//! unmaps while there is no swap, would really evict.
//!
//! Safe are: no swap at all; cgroup v2 with `memory.swap.max` 0 at the process's group or above it;
//! and RAM in files on a tmpfs that is mounted with `noswap` (Linux 6.4), whatever the cgroups.
//! Under cgroup v1 nothing else is safe: neither `memory.swappiness` 0 nor a
//! `memory.memsw.limit_in_bytes` equal to `memory.limit_in_bytes` keeps `MADV_PAGEOUT` or global
//! reclaim from swapping (both tested on Linux 6.18; only the reclaim that the group's own limit
//! starts checks the limits).
//!
//! Pages of a `noswap` tmpfs are unevictable, so the tracker must unmap them in another way: see
//! [`crate::tracker`].

use pagetide_addr::FileKey;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

/// How pages could go to swap, and what to do about it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SwapReach {
    /// Its cgroup does not forbid it.
    #[error(
        "swap is on and its cgroup {group} does not forbid it: echo 0 > {group}/memory.swap.max, \
         or start the VMM by `systemd-run --scope -p MemorySwapMax=0 …`, or switch swap off \
         (swapoff -a)"
    )]
    Allowed {
        /// The group's directory.
        group: String,
    },
    /// Its cgroup cannot forbid it.
    #[error(
        "swap is on and its memory cgroup is of version 1, where no setting forbids it (neither \
         memory.swappiness nor memory.memsw.limit_in_bytes does): start it with its RAM on a tmpfs \
         that never swaps (Linux 6.4: mount -t tmpfs -o noswap,size=SIZE tmpfs DIR; QEMU: \
         memory-backend-file,mem-path=DIR,share=on), switch swap off (swapoff -a), or use cgroup \
         version 2 with memory.swap.max = 0"
    )]
    Version1,
    /// It is in no group that could forbid it.
    #[error(
        "swap is on and no memory cgroup forbids it: start it with its RAM on a tmpfs that never \
         swaps (Linux 6.4: mount -t tmpfs -o noswap,size=SIZE tmpfs DIR; QEMU: \
         memory-backend-file,mem-path=DIR,share=on), or switch swap off (swapoff -a)"
    )]
    NoGroup,
}

/// How pages of the files `ram`, the RAM of process `pid`, could go to swap; `None` if they cannot.
///
/// # Errors
/// The error of reading `/proc`.
pub fn in_reach(pid: u32, mut ram: impl Iterator<Item = FileKey>) -> io::Result<Option<SwapReach>> {
    if !is_on(&std::fs::read_to_string("/proc/swaps")?) {
        return Ok(None);
    }
    let never = file_systems_without_swap(pid)?;
    if ram.all(|file| never.contains(&file.dev)) {
        return Ok(None);
    }
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    Ok(reach(
        &groups,
        version_2_mount(&mounts).as_deref(),
        |file| std::fs::read_to_string(file),
    ))
}

/// Device numbers of the tmpfs mounted with `noswap`, as far as this process or process `pid`
/// sees them: they may have different mounts.
///
/// # Errors
/// The error of reading `/proc`.
pub(crate) fn file_systems_without_swap(pid: u32) -> io::Result<BTreeSet<u64>> {
    let mut devices = BTreeSet::new();
    for whose in ["self".to_owned(), pid.to_string()] {
        let mounts = std::fs::read_to_string(format!("/proc/{whose}/mountinfo"))?;
        devices.extend(mounts.lines().filter_map(without_swap));
    }
    Ok(devices)
}

/// The device number of a mount that is a tmpfs with `noswap`.
fn without_swap(line: &str) -> Option<u64> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut kind = kind.split(' ');
    // File system, source, options of the file system (those of the mount are in the other half).
    if kind.next() != Some("tmpfs") || !kind.nth(1)?.split(',').any(|word| word == "noswap") {
        return None;
    }
    let (major, minor) = mount.split(' ').nth(2)?.split_once(':')?;
    match (major.parse(), minor.parse()) {
        (Ok(major), Ok(minor)) => Some(rustix::fs::makedev(major, minor)),
        _ => None,
    }
}

/// True if `/proc/swaps` names a swap area below its heading.
fn is_on(swaps: &str) -> bool {
    swaps.lines().nth(1).is_some()
}

/// Where cgroup version 2 is mounted, by `/proc/self/mountinfo`.
fn version_2_mount(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        if !kind.starts_with("cgroup2 ") {
            return None;
        }
        mount.split(' ').nth(4).map(PathBuf::from)
    })
}

/// `groups` is the content of `/proc/PID/cgroup`: lines `number:controllers:path`, version 2 being
/// `0::path`.
fn reach(
    groups: &str,
    version_2: Option<&Path>,
    read: impl Fn(&Path) -> io::Result<String>,
) -> Option<SwapReach> {
    let fields = |line: &'_ str| -> Option<(String, String)> {
        let mut parts = line.splitn(3, ':').skip(1);
        Some((parts.next()?.to_owned(), parts.next()?.to_owned()))
    };
    let groups: Vec<_> = groups.lines().filter_map(fields).collect();
    if groups
        .iter()
        .any(|(controllers, _)| controllers.split(',').any(|c| c == "memory"))
    {
        return Some(SwapReach::Version1);
    }
    let unified = groups
        .iter()
        .find(|(controllers, _)| controllers.is_empty());
    let (Some(mount), Some((_, path))) = (version_2, unified) else {
        return Some(SwapReach::NoGroup);
    };
    let group = mount.join(path.trim_start_matches('/'));
    let forbidden = group
        .ancestors()
        .take_while(|dir| dir.starts_with(mount))
        .any(|dir| read(&dir.join("memory.swap.max")).is_ok_and(|max| max.trim() == "0"));
    (!forbidden).then(|| SwapReach::Allowed {
        group: group.display().to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files<'a>(zero: &'a [&'a str]) -> impl Fn(&Path) -> io::Result<String> + 'a {
        move |file| {
            if zero.iter().any(|z| Path::new(z) == file) {
                Ok("0\n".to_owned())
            } else {
                Ok("max\n".to_owned())
            }
        }
    }

    const MOUNT: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n";

    #[test]
    fn a_group_with_swap_max_zero_or_below_one_is_out_of_reach() {
        let mount = version_2_mount(MOUNT).unwrap();
        let of = |zero: &[&str]| reach("0::/vms/a.scope\n", Some(&mount), files(zero));
        assert_eq!(of(&["/sys/fs/cgroup/vms/a.scope/memory.swap.max"]), None);
        assert_eq!(of(&["/sys/fs/cgroup/vms/memory.swap.max"]), None);
        assert_eq!(
            of(&["/sys/fs/cgroup/others/memory.swap.max"]),
            Some(SwapReach::Allowed {
                group: "/sys/fs/cgroup/vms/a.scope".to_owned()
            })
        );
    }

    #[test]
    fn a_group_of_version_1_is_never_out_of_reach() {
        let groups = "4:cpu,memory:/a\n0::/\n";
        let mount = version_2_mount(MOUNT).unwrap();
        assert_eq!(
            reach(
                groups,
                Some(&mount),
                files(&["/sys/fs/cgroup/memory.swap.max"])
            ),
            Some(SwapReach::Version1)
        );
    }

    #[test]
    fn a_tmpfs_without_swap_is_known_by_its_own_options_only() {
        let line = |id: &str, of_mount: &str, kind: &str| {
            format!("42 27 {id} / /srv/a\\040b {of_mount} shared:7 - {kind}")
        };
        let never = line("0:39", "rw", "tmpfs my\\040ram rw,size=65536k,noswap");
        assert_eq!(without_swap(&never), Some(rustix::fs::makedev(0, 39)));
        for other in [
            line("0:39", "rw", "tmpfs tmpfs rw,size=65536k"),
            line("0:39", "rw,noswap", "tmpfs noswap rw"),
            line("0:39", "rw", "tmpfs tmpfs rw,noswapper"),
            line("0:39", "rw", "ext4 /dev/vda rw,noswap"),
            line("0:x", "rw", "tmpfs tmpfs rw,noswap"),
            "42 27 0:39 tmpfs tmpfs noswap".to_owned(),
        ] {
            assert_eq!(without_swap(&other), None, "{other}");
        }
    }

    #[test]
    fn a_host_without_groups_is_in_reach_when_swap_is_on() {
        assert_eq!(reach("", None, files(&[])), Some(SwapReach::NoGroup));
        assert!(!is_on("Filename Type Size Used Priority\n"));
        assert!(is_on("Filename Type\n/swapfile file 1 0 -2\n"));
    }
}
