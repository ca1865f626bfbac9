// SPDX-License-Identifier: Apache-2.0
//! Inspecting a process before it is touched: which thread to use, and where its code has a
//! `syscall` instruction.

use super::error::{PtraceError, kernel, open_failed};
use super::registers::{CLONES, EPOLLS, POLLS, syscall_instruction};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Which threads are considered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// Threads that are blocked in a system call.
    Blocked,
    /// Those first, then all that can stop.
    All,
}

/// Rank of a thread that runs, or is blocked outside of a call: after all blocked in one.
const RANK_OF_OTHERS: u32 = 5;
/// Rank of a thread in uninterruptible sleep: it does not stop before the sleep ends.
const RANK_OF_ASLEEP: u32 = 6;

/// Threads within `reach`, best first.
pub(super) fn threads(pid: u32, reach: Reach) -> Result<Vec<u32>, PtraceError> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"))
        .map_err(|source| open_failed(pid, source))?;
    let mut found = Vec::new();
    for task in tasks {
        let Ok(task) = task else { continue };
        let Some(thread) = task.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        // A thread that has just ended has no such file; it is not a candidate.
        let Ok(line) = std::fs::read_to_string(task.path().join("syscall")) else {
            continue;
        };
        let is_asleep = is_in_uninterruptible_sleep(&task.path());
        let rank = match (rank_of_blocked(&line), reach) {
            (Rank::Never, _) => continue,
            (_, Reach::All) if is_asleep => RANK_OF_ASLEEP,
            (_, Reach::Blocked) if is_asleep => continue,
            (Rank::Blocked(rank), _) => rank,
            (Rank::Other, Reach::All) => RANK_OF_OTHERS,
            (Rank::Other, Reach::Blocked) => continue,
        };
        found.push((rank, thread));
    }
    found.sort_unstable();
    Ok(found.into_iter().map(|(_, thread)| thread).collect())
}

/// True if the thread of this `/proc` directory is in uninterruptible sleep: its state, which
/// follows the name in parentheses, is `D`. A thread whose file is gone has ended, and is no
/// candidate later.
fn is_in_uninterruptible_sleep(task: &std::path::Path) -> bool {
    std::fs::read_to_string(task.join("stat")).is_ok_and(|stat| {
        stat.rsplit_once(") ")
            .is_some_and(|(_, rest)| rest.starts_with('D'))
    })
}

/// The thread that traces `thread`, if there is one.
pub(super) fn tracer_of(pid: u32, thread: u32) -> Option<u32> {
    // A thread that is gone has no tracer.
    let status =
        std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/status")).unwrap_or_default();
    let tracer = status
        .lines()
        .find_map(|line| line.strip_prefix("TracerPid:"))?;
    match tracer.trim().parse() {
        Ok(0) | Err(_) => None,
        Ok(tracer) => Some(tracer),
    }
}

/// True if a thread of this process traces `thread`.
pub(super) fn is_traced_by_us(pid: u32, thread: u32) -> bool {
    tracer_of(pid, thread).is_some_and(|tracer: u32| {
        std::fs::exists(format!("/proc/self/task/{tracer}")).is_ok_and(|is_ours| is_ours)
    })
}

/// How well a thread suits remote system calls.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Rank {
    /// It is blocked in a system call; smaller is better.
    Blocked(u32),
    /// It runs, or is blocked outside of a call (in a page fault).
    Other,
    /// It does not stop until another thread has continued.
    Never,
}

/// From the thread's `/proc/PID/task/TID/syscall`: a call's number and more, "running", or "-1 …".
pub(super) fn rank_of_blocked(line: &str) -> Rank {
    let number = line.split_ascii_whitespace().next().map(str::parse::<i64>);
    let Some(Ok(number)) = number else {
        return Rank::Other;
    };
    match number {
        ..0 => Rank::Other,
        poll if POLLS.contains(&poll) => Rank::Blocked(0),
        libc::SYS_futex | libc::SYS_clock_nanosleep | libc::SYS_nanosleep | libc::SYS_read => {
            Rank::Blocked(1)
        }
        // These do not stop until their child has continued.
        clone if CLONES.contains(&clone) => Rank::Never,
        // Returns EINTR instead of being restarted; KVM_RUN likewise.
        epoll if EPOLLS.contains(&epoll) => Rank::Blocked(3),
        libc::SYS_ioctl => Rank::Blocked(4),
        _ => Rank::Blocked(2),
    }
}

pub(super) fn is_under_seccomp(pid: u32, thread: u32) -> bool {
    // If it cannot be read, the worse case is assumed.
    std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/status")).map_or(true, |status| {
        !status
            .lines()
            .any(|l| l.strip_prefix("Seccomp:").is_some_and(|v| v.trim() == "0"))
    })
}

/// Address of a `syscall` instruction in the process's vDSO.
pub(super) fn find_syscall_instruction(pid: u32, memory: &File) -> Result<u64, PtraceError> {
    let not_found = || PtraceError::WrongArchitecture { pid };
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))
        .map_err(|source| open_failed(pid, source))?;
    if maps.is_empty() {
        return Err(PtraceError::Gone { pid });
    }
    let line = maps
        .lines()
        .find(|l| l.ends_with("[vdso]"))
        .ok_or_else(not_found)?;
    let range = line.split_ascii_whitespace().next().ok_or_else(not_found)?;
    let (start, end) = range.split_once('-').ok_or_else(not_found)?;
    let parse = |text| u64::from_str_radix(text, 16).map_err(|_| not_found());
    let (start, end) = (parse(start)?, parse(end)?);
    let mut code = vec![0; crate::to_usize(end.saturating_sub(start).min(1 << 16))];
    memory
        .read_exact_at(&mut code, start)
        .map_err(|e| kernel("reading the vDSO", pid, e))?;
    syscall_instruction(&code)
        .map(|at| start + at as u64)
        .ok_or_else(not_found)
}
