// SPDX-License-Identifier: Apache-2.0
//! [`VmmProcess`]: a running VMM, distinguished from a later process with the same pid.

use crate::Refusal;
use pagetide_sys::process::{ProcessError, ProcessFd};
use procfs::process::{FDTarget, Process};
use rustix::process::Signal;
use std::time::Duration;

/// Programs that are VMMs even without KVM, by the start of their names.
const EMULATORS: [&str; 6] = [
    "qemu",
    "kvm",
    "cloud-hypervisor",
    "firecracker",
    "crosvm",
    "openvmm",
];

/// Identifies one process among all until the next boot of the host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct VmmIdentity {
    /// Its pid.
    pub pid: u32,
    /// When it started, in clock ticks since the host was booted.
    pub start_time: u64,
}

/// A VMM, held by its pidfd.
#[derive(Debug)]
pub struct VmmProcess {
    process: ProcessFd,
    identity: VmmIdentity,
    name: String,
}

impl VmmProcess {
    /// The process `pid`, whatever it is.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn open(pid: u32) -> Result<Self, Refusal> {
        let process = ProcessFd::open(pid).map_err(|e| match e {
            ProcessError::NoSuchProcess { pid } => Refusal::NoSuchProcess { pid },
            ProcessError::NotPermitted { pid, .. } => Refusal::NotPermitted {
                pid,
                what: "open a descriptor",
            },
            // The number is a thread's, or out of range.
            ProcessError::Kernel { .. } => Refusal::NoSuchProcess { pid },
        })?;
        let stat = in_proc(pid)
            .and_then(|p| p.stat())
            .map_err(|e| Refusal::parsing(pid, "read the state", e))?;
        // Only now: a pid reused between the two would show here.
        if process.has_ended().unwrap_or(true) {
            return Err(Refusal::NoSuchProcess { pid });
        }
        Ok(Self {
            process,
            identity: VmmIdentity {
                pid,
                start_time: stat.starttime,
            },
            name: stat.comm,
        })
    }

    /// The process that had this identity, if it still runs.
    ///
    /// # Errors
    /// [`Refusal::NoSuchProcess`], [`Refusal::PidUsedAgain`].
    pub fn reopen(identity: VmmIdentity) -> Result<Self, Refusal> {
        let found = Self::open(identity.pid)?;
        if found.identity != identity {
            return Err(Refusal::PidUsedAgain {
                pid: identity.pid,
                name: found.name,
            });
        }
        Ok(found)
    }

    /// The same process, held once more: it can never become another.
    ///
    /// # Errors
    /// [`ProcessError::Kernel`] when this process has no descriptors left.
    pub fn try_clone(&self) -> Result<Self, ProcessError> {
        Ok(Self {
            process: self.process.try_clone()?,
            identity: self.identity,
            name: self.name.clone(),
        })
    }

    /// Sends it a signal; never to a process that got its pid later.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchProcess`] once it has ended, [`ProcessError::NotPermitted`].
    pub fn signal(&self, signal: Signal) -> Result<(), ProcessError> {
        self.process.signal(signal)
    }

    /// Waits for its end, `time` at most. True if it has ended.
    #[must_use]
    pub fn ends_within(&self, time: Duration) -> bool {
        // A process that cannot be queried is assumed to run.
        self.process.ends_within(time).unwrap_or(false)
    }

    /// To be called after something was read from `/proc` by pid: if the process still runs, the
    /// data was its own.
    ///
    /// # Errors
    /// [`Refusal::NoSuchProcess`] if it has ended.
    pub(crate) fn still_runs(&self) -> Result<(), Refusal> {
        match self.process.has_ended() {
            Ok(false) => Ok(()),
            Ok(true) | Err(_) => Err(Refusal::NoSuchProcess { pid: self.pid() }),
        }
    }

    /// Its pid.
    #[must_use]
    pub const fn pid(&self) -> u32 {
        self.identity.pid
    }

    /// Pid and start time.
    #[must_use]
    pub const fn identity(&self) -> VmmIdentity {
        self.identity
    }

    /// Its command name (up to 15 bytes).
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its pidfd.
    #[must_use]
    pub const fn fd(&self) -> &ProcessFd {
        &self.process
    }

    /// True if it has a KVM VM, or its program is a known emulator.
    ///
    /// # Errors
    /// [`Refusal`], mostly for lack of privilege.
    pub fn is_emulator(&self) -> Result<bool, Refusal> {
        let pid = self.pid();
        let process = in_proc(pid).map_err(|e| Refusal::parsing(pid, "look at /proc", e))?;
        let exe = process
            .exe()
            .map_err(|e| Refusal::parsing(pid, "read the program's name", e))?;
        let program = exe.file_name().unwrap_or_default().to_string_lossy();
        if EMULATORS.iter().any(|known| program.starts_with(known)) {
            return Ok(true);
        }
        let fds = process
            .fd()
            .map_err(|e| Refusal::parsing(pid, "list the descriptors", e))?;
        // Descriptors closed during the listing do not matter.
        Ok(fds.flatten().any(|fd| match fd.target {
            FDTarget::AnonInode(kind) => kind == "kvm-vm",
            FDTarget::Path(path) => path.as_os_str() == "anon_inode:kvm-vm",
            _ => false,
        }))
    }
}

/// The process in `/proc`.
pub(crate) fn in_proc(pid: u32) -> Result<Process, procfs::ProcError> {
    Process::new(pid.cast_signed())
}

/// Command name of any process, or a dash if it has ended.
pub(crate) fn name_of(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm"))
        .map_or_else(|_| "-".to_owned(), |comm| comm.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pid_used_again_is_not_the_process_that_had_it() {
        let own = VmmProcess::open(std::process::id()).unwrap();
        assert!(VmmProcess::reopen(own.identity()).is_ok());
        let earlier = VmmIdentity {
            start_time: own.identity().start_time - 1,
            ..own.identity()
        };
        assert!(matches!(
            VmmProcess::reopen(earlier),
            Err(Refusal::PidUsedAgain { .. })
        ));
    }

    #[test]
    fn a_pid_nobody_has_is_refused() {
        for pid in [0, u32::MAX, 0x7fff_fff0] {
            assert!(matches!(
                VmmProcess::open(pid),
                Err(Refusal::NoSuchProcess { .. })
            ));
        }
    }

    #[test]
    fn a_vmm_held_twice_is_one_process_and_is_told_when_it_has_ended() {
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .unwrap();
        let vmm = VmmProcess::open(child.id()).unwrap();
        let again = vmm.try_clone().unwrap();
        assert_eq!(again.identity(), vmm.identity());
        assert!(again.still_runs().is_ok());
        assert!(!again.ends_within(Duration::ZERO));
        vmm.signal(Signal::KILL).unwrap();
        assert!(again.ends_within(Duration::from_secs(60)));
        child.wait().unwrap();
        assert!(matches!(
            again.still_runs(),
            Err(Refusal::NoSuchProcess { .. })
        ));
        assert!(matches!(
            again.signal(Signal::STOP),
            Err(ProcessError::NoSuchProcess { .. })
        ));
    }

    #[test]
    fn a_test_program_is_no_emulator() {
        let own = VmmProcess::open(std::process::id()).unwrap();
        assert!(!own.is_emulator().unwrap());
    }
}
