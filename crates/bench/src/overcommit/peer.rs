// SPDX-License-Identifier: Apache-2.0
//! The peer: kernel swap on zram for the same VMs, in a memory cgroup whose limit is the budget less what zram
//! takes.
//!
//! Both sides pay for what is stored. The daemon's budget counts its pools; a cgroup does not count zram's
//! memory, so its limit follows that, again and again: `budget - mem_used_total`. What the group is charged
//! with beside RAM (the VMMs' own memory, page tables) is granted on top of it, since the daemon's budget does
//! not count that either. zram's own table of pages is not counted.
//!
//! Swap is on only in the peer's arm. RAM of VMs that another daemon serves would be within its reach, so it
//! is not switched on beside one.

use super::group::{Group, Limited};
use crate::kernel_swap::{Compressor, KernelSwap};
use std::{
    path::Path,
    time::{Duration, Instant},
};

/// The limit falls by this much at a time, for the kernel gives up on what it cannot reclaim at once.
const STEP_BYTES: u64 = 16 << 20;
/// The limit follows zram's memory by no less than this.
const FOLLOWED_BYTES: u64 = 1 << 20;
/// Longest wait for memory to be swapped out.
const PATIENCE: Duration = Duration::from_secs(180);
/// Between two tries of a limit that could not be kept.
const PAUSE: Duration = Duration::from_millis(20);
/// A file descriptor of a VM's faults, by its link.
const USERFAULTFD: &str = "anon_inode:[userfaultfd]";
const DAEMON: &str = "pagetide";

/// See the module.
pub(super) struct Peer {
    zram: KernelSwap,
    group: Group,
    budget_bytes: u64,
    /// What is charged to the group beside RAM.
    beside_bytes: u64,
    limit_bytes: u64,
}

impl Peer {
    /// A group, and a device for all RAM.
    ///
    /// # Errors
    /// A sentence with the reason why there is no peer.
    pub(super) fn prepare(ram_bytes: u64, budget_bytes: u64) -> Result<Self, String> {
        Ok(Self {
            group: Group::new()?,
            zram: KernelSwap::on_zram(ram_bytes, Compressor::Lz4)?,
            budget_bytes,
            beside_bytes: 0,
            limit_bytes: u64::MAX,
        })
    }

    /// The group for the VMs.
    pub(super) fn group(&self) -> &Path {
        self.group.directory()
    }

    /// The limit in force.
    pub(super) fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// RAM of the VMs that is present.
    pub(super) fn resident_bytes(&self) -> Result<u64, String> {
        self.group.shared_bytes()
    }

    /// What is stored, with zram's fragmentation.
    pub(super) fn stored_bytes(&self) -> Result<u64, String> {
        self.zram.memory_bytes()
    }

    /// Switches swap on, and squeezes the VMs into the budget; returns how long that took. `own` is the bench's
    /// own daemon, which has no VM.
    pub(super) fn begin(&mut self, own: u32) -> Result<Duration, String> {
        if let Some(pid) = serving_daemons(Path::new("/proc"))?
            .into_iter()
            .find(|pid| *pid != own)
        {
            return Err(format!(
                "swap is not switched on beside the daemon {pid}, which serves VMs: their RAM would be within \
                 its reach. End that daemon, or detach its VMs, and run this again"
            ));
        }
        let charged = self.group.charged_bytes()?;
        self.beside_bytes = charged.saturating_sub(self.group.shared_bytes()?);
        self.zram.switch_on()?;
        let begun = Instant::now();
        match self.squeeze(begun + PATIENCE) {
            Ok(()) => Ok(begun.elapsed()),
            Err(reason) => {
                self.end()?;
                Err(reason)
            }
        }
    }

    fn squeeze(&mut self, until: Instant) -> Result<(), String> {
        while Instant::now() < until {
            let wanted = self.wanted_bytes()?;
            let limit = wanted.max(self.group.charged_bytes()?.saturating_sub(STEP_BYTES));
            match self.group.limit(limit)? {
                Limited::InForce if limit == wanted => {
                    self.limit_bytes = limit;
                    return Ok(());
                }
                Limited::InForce => {}
                Limited::InUse => std::thread::sleep(PAUSE),
            }
        }
        Err(format!(
            "after {} s {} bytes are charged to the cgroup instead of {}",
            PATIENCE.as_secs(),
            self.group.charged_bytes()?,
            self.wanted_bytes()?
        ))
    }

    fn wanted_bytes(&self) -> Result<u64, String> {
        let stored = self.zram.memory_bytes()?;
        Ok((self.budget_bytes + self.beside_bytes).saturating_sub(stored))
    }

    /// Lets the limit follow what zram takes.
    pub(super) fn follow(&mut self) -> Result<(), String> {
        let wanted = self.wanted_bytes()?;
        if wanted.abs_diff(self.limit_bytes) < FOLLOWED_BYTES {
            return Ok(());
        }
        // What could not be reclaimed now is tried again at the next look.
        if self.group.limit(wanted)? == Limited::InForce {
            self.limit_bytes = wanted;
        }
        Ok(())
    }

    /// Lifts the limit and switches swap off: all memory is present again.
    pub(super) fn end(&mut self) -> Result<(), String> {
        self.group.lift()?;
        self.zram.switch_off()
    }
}

/// Pages that were swapped in on this host until now.
pub(super) fn swapped_in_pages() -> Result<u64, String> {
    let vmstat = std::fs::read_to_string("/proc/vmstat")
        .map_err(|error| format!("/proc/vmstat: {error}"))?;
    Ok(swapped_in(&vmstat))
}

/// Pages of zeros are counted apart where the kernel does not store them.
fn swapped_in(vmstat: &str) -> u64 {
    let lines = vmstat.lines().filter_map(|line| line.split_once(' '));
    let counted = lines.filter(|(name, _)| matches!(*name, "pswpin" | "swpin_zero"));
    counted
        .filter_map(|(_, pages)| pages.trim().parse::<u64>().ok())
        .sum()
}

/// Daemons that serve a VM: they have its userfaultfd open.
fn serving_daemons(proc: &Path) -> Result<Vec<u32>, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", proc.display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir(proc).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        // A process may end while it is looked at.
        let program = std::fs::read_link(entry.path().join("exe")).unwrap_or_default();
        if is_daemon(&program) && has_userfaultfd(&entry.path().join("fd")) {
            found.push(pid);
        }
    }
    Ok(found)
}

/// One that was replaced meanwhile is still one.
fn is_daemon(program: &Path) -> bool {
    let name = program.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.strip_suffix(" (deleted)").unwrap_or(name) == DAEMON)
}

fn has_userfaultfd(descriptors: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(descriptors) else {
        return false;
    };
    let mut links = entries
        .flatten()
        .map(|entry| std::fs::read_link(entry.path()));
    links.any(|link| link.is_ok_and(|link| link == Path::new(USERFAULTFD)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn daemon_that_serves_vms_is_found_and_others_are_not() {
        let proc = tempfile::tempdir().unwrap();
        let process = |pid: &str, program: &str, opened: &str| {
            let dir = proc.path().join(pid);
            std::fs::create_dir_all(dir.join("fd")).unwrap();
            symlink(program, dir.join("exe")).unwrap();
            symlink(opened, dir.join("fd/3")).unwrap();
        };
        process("7", "/usr/bin/pagetide", "/dev/null");
        process("8", "/usr/bin/pagetide", USERFAULTFD);
        process("9", "/usr/bin/qemu-system-x86_64", USERFAULTFD);
        process("11", "/usr/bin/pagetide (deleted)", USERFAULTFD);
        std::fs::create_dir(proc.path().join("sys")).unwrap();
        let mut found = serving_daemons(proc.path()).unwrap();
        found.sort_unstable();
        assert_eq!(found, [8, 11]);
    }

    #[test]
    fn pages_swapped_in_are_those_of_zeros_too() {
        assert_eq!(
            swapped_in("pgpgin 5\npswpin 7\npswpout 9\nswpin_zero 30\n"),
            37
        );
        assert_eq!(swapped_in("pswpin 7\n"), 7);
    }
}
