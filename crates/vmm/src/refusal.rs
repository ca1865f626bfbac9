// SPDX-License-Identifier: Apache-2.0
//! [`Refusal`]: why a VMM is not taken over, and what to do about it.

use crate::layout::{LayoutError, RecordedMapping};
use crate::swap::SwapReach;
use std::io;

/// Why RAM in huge pages cannot be evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HugetlbFault {
    /// Each fault would fill a whole page.
    #[error(
        "of {0} MiB each, and a fault would have to fill all of one: more than a third of a second for 1 GiB"
    )]
    TooLarge(u64),
    /// They are in no file that other processes can open.
    #[error("that are private memory, which cannot be evicted from outside")]
    Private,
}

/// Why a VMM cannot be taken over. Nothing about it has been changed.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// No such process.
    #[error("there is no process {pid}: give the pid of a running VMM (pgrep -a qemu)")]
    NoSuchProcess {
        /// The pid given.
        pid: u32,
    },
    /// It was this process once, but its pid has been used again since.
    #[error("process {pid} ({name}) is not the VMM that had this pid before; that one has ended")]
    PidUsedAgain {
        /// The pid.
        pid: u32,
        /// Name of the process that has it now.
        name: String,
    },
    /// It is no VMM.
    #[error(
        "process {pid} ({name}) is not a VMM: it has no KVM VM and is no known emulator; give the \
         pid of the VMM itself, not of a wrapper around it"
    )]
    NotAVmm {
        /// The pid.
        pid: u32,
        /// Its program.
        name: String,
    },
    /// Its RAM is not in a file that other processes can open.
    #[error(
        "the RAM of VMM {pid} ({name}) is private memory, which cannot be evicted from outside: \
         start it with shared file memory (QEMU: -object \
         memory-backend-memfd,id=ram,size=SIZE,share=on -machine memory-backend=ram)"
    )]
    PrivateRam {
        /// The pid.
        pid: u32,
        /// Its program.
        name: String,
    },
    /// Its RAM is in huge pages of a kind that cannot be evicted.
    #[error(
        "the RAM of VMM {pid} ({name}) is in hugetlb pages {what}: start it with shared pages of 2 MiB (QEMU: \
         memory-backend-memfd,share=on,hugetlb=on,hugetlbsize=2M), or without hugetlb"
    )]
    HugetlbRam {
        /// The pid.
        pid: u32,
        /// Its program.
        name: String,
        /// What is wrong with them.
        what: HugetlbFault,
    },
    /// Its RAM is in a file on a disk.
    #[error(
        "the RAM of VMM {pid} ({name}) is a file that is not in memory ({path}): put it on tmpfs, \
         or use a memfd"
    )]
    FileNotInMemory {
        /// The pid.
        pid: u32,
        /// Its program.
        name: String,
        /// The file.
        path: String,
    },
    /// A child of the VMM would get the RAM too.
    #[error(
        "the RAM of VMM {pid} ({name}) at {address:#x} would be inherited by a forked child (no \
         DONTFORK), which would read zeros in place of evicted pages: use a VMM that sets \
         MADV_DONTFORK on guest RAM, as QEMU does"
    )]
    Forkable {
        /// The pid.
        pid: u32,
        /// Its program.
        name: String,
        /// Where.
        address: u64,
    },
    /// Part of the RAM file is mapped in another way.
    #[error(
        "VMM {pid} ({name}) maps its RAM file at {address:#x} other than shared and writable; such \
         a VMM is not supported"
    )]
    OddMapping {
        /// The pid.
        pid: u32,
        /// Its program.
        name: String,
        /// Where.
        address: u64,
    },
    /// Another process maps the RAM.
    #[error(
        "the RAM of VMM {pid} ({name}) is also mapped by process {other_pid} ({other_name}), {}",
        if other_name == DAEMON {
            "which has taken it over already: have that daemon detach it first"
        } else {
            "which would read zeros in place of evicted pages: stop it, or serve its device by \
             `pagetide dpu`"
        }
    )]
    SharedRam {
        /// The pid.
        pid: u32,
        /// Its program.
        name: String,
        /// The other process.
        other_pid: u32,
        /// Its name.
        other_name: String,
    },
    /// Another process cannot be looked into.
    #[error(
        "whether process {other_pid} ({other_name}) maps the RAM of VMM {pid} cannot be told: we \
         lack a capability that it has; run as root with all capabilities"
    )]
    CannotLookInto {
        /// The pid.
        pid: u32,
        /// The process that may map it.
        other_pid: u32,
        /// Its name.
        other_name: String,
    },
    /// The kernel may swap the RAM out.
    #[error("the RAM of VMM {pid} ({name}) can go to kernel swap: {reach}")]
    SwapInReach {
        /// The pid.
        pid: u32,
        /// Its program.
        name: String,
        /// How, and what to do.
        reach: SwapReach,
    },
    /// The mappings do not cover the files.
    #[error("the RAM of VMM {pid} ({name}) is laid out in a way that is not supported: {source}")]
    Layout {
        /// The pid.
        pid: u32,
        /// Its program.
        name: String,
        /// How.
        source: LayoutError,
    },
    /// RAM that it had when it was taken over is no longer mapped.
    #[error(
        "VMM {pid} ({name}) no longer maps RAM that it was taken over with ({mapping}): that RAM \
         was unplugged, or the program was replaced by exec; what was evicted of it cannot be \
         brought back, so restart the VM"
    )]
    RamGone {
        /// The pid.
        pid: u32,
        /// Its program.
        name: String,
        /// What is gone.
        mapping: RecordedMapping,
    },
    /// We lack the permission to look.
    #[error("not permitted to {what} of process {pid}: run as root (or with CAP_SYS_PTRACE)")]
    NotPermitted {
        /// The pid.
        pid: u32,
        /// What was tried.
        what: &'static str,
    },
    /// Something about the process could not be found out.
    #[error("cannot {what} of process {pid}: {source}")]
    Unreadable {
        /// The pid.
        pid: u32,
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl Refusal {
    /// From an error of looking into `/proc`.
    pub(crate) fn looking(pid: u32, what: &'static str, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound => Self::NoSuchProcess { pid },
            io::ErrorKind::PermissionDenied => Self::NotPermitted { pid, what },
            _ if source.raw_os_error() == Some(NO_SUCH_PROCESS) => Self::NoSuchProcess { pid },
            _ => Self::Unreadable { pid, what, source },
        }
    }

    /// From an error of the procfs crate.
    pub(crate) fn parsing(pid: u32, what: &'static str, error: procfs::ProcError) -> Self {
        use procfs::ProcError;
        match error {
            ProcError::NotFound(_) => Self::NoSuchProcess { pid },
            ProcError::PermissionDenied(_) => Self::NotPermitted { pid, what },
            ProcError::Io(source, _) => Self::looking(pid, what, source),
            other => Self::Unreadable {
                pid,
                what,
                source: io::Error::other(other.to_string()),
            },
        }
    }
}

/// Name of our own daemon.
const DAEMON: &str = "pagetide";

/// `ESRCH`: the error of `/proc` when the process ends while it is read.
pub(crate) const NO_SUCH_PROCESS: i32 = 3;
