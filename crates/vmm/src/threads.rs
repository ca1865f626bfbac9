// SPDX-License-Identifier: Apache-2.0
//! Where a VMM's threads run and may run: the fault reader and the I/O page fault service run there too.

use crate::process::in_proc;
use pagetide_sys::cpu;
use pagetide_sys::process::ProcessFd;
use pagetide_sys::ptrace::{Held, HoldLimits, PtraceError, hold};
use procfs::process::Process;
use std::time::Duration;

/// A vCPU thread and where it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VcpuThread {
    /// The thread.
    pub thread: u32,
    /// Number of the vCPU, by the thread's name.
    pub number: u32,
    /// CPUs that it may run on, ascending.
    pub allowed: Vec<usize>,
    /// CPU on which it last ran; `None` if it has ended since.
    pub last: Option<usize>,
}

/// CPU on which thread `thread` of process `pid` last ran; `None` if it has ended.
#[must_use]
pub fn last_cpu(pid: u32, thread: u32) -> Option<usize> {
    let stat = in_proc(pid)
        .and_then(|p| p.task_from_tid(thread.cast_signed()))
        .and_then(|t| t.stat());
    match stat {
        Ok(stat) => stat.processor.and_then(|cpu| usize::try_from(cpu).ok()),
        Err(_) => None,
    }
}

/// The VMM's vCPU threads by number, recognized by the names that QEMU and others give them; empty if
/// they have none (QEMU names them only with `-name …,debug-threads=on`).
#[must_use]
pub fn vcpus(pid: u32) -> Vec<VcpuThread> {
    let Ok(tasks) = in_proc(pid).and_then(|p: Process| p.tasks()) else {
        return Vec::new();
    };
    let vcpu = |task: procfs::process::Task| {
        let thread = task.tid.cast_unsigned();
        let name = std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/comm"));
        Some(VcpuThread {
            thread,
            number: name.as_deref().map_or(None, vcpu_number)?,
            allowed: cpu::affinity_of(thread)?,
            last: last_cpu(pid, thread),
        })
    };
    let mut vcpus: Vec<_> = tasks.flatten().filter_map(vcpu).collect();
    vcpus.sort_unstable_by_key(|vcpu| vcpu.number);
    vcpus
}

/// How long a thread may take to stop. A vCPU takes microseconds; one that waits for a fill has it first.
const STOP_WAIT: Duration = Duration::from_millis(20);
/// Beyond this multiple of the time that a hold may last, threads go on whatever the caller does.
const HOLD_FACTOR: u32 = 2;

/// Stops the vCPUs of `vmm` for `time`; if they cannot be told from other threads, all of its threads but
/// the first, which may be needed for remote calls. They go on when the result is dropped.
///
/// # Errors
/// Tracing is not permitted (a debugger is attached), or the VMM has ended.
pub fn hold_vcpus(vmm: &ProcessFd, time: Duration) -> Result<Held, PtraceError> {
    let pid = vmm.pid();
    let mut threads: Vec<u32> = vcpus(pid).iter().map(|vcpu| vcpu.thread).collect();
    if threads.is_empty() {
        let tasks = in_proc(pid).and_then(|p: Process| p.tasks());
        let tasks = tasks.map_err(|_| PtraceError::Gone { pid })?;
        threads.extend(tasks.flatten().map(|task| task.tid.cast_unsigned()));
        if threads.len() > 1 {
            threads.retain(|thread| *thread != pid);
        }
    }
    let limits = HoldLimits {
        stop_wait: STOP_WAIT,
        hold_max: time * HOLD_FACTOR,
    };
    hold(vmm, &threads, limits)
}

/// Of `CPU 0/KVM`, `CPU 0/TCG` (QEMU), `vcpu0` (Cloud Hypervisor), `fc_vcpu 0` (Firecracker),
/// `crosvm_vcpu0`. `None` for the name of another thread.
fn vcpu_number(name: &str) -> Option<u32> {
    let after = match name.strip_prefix("CPU ") {
        Some(after) => after,
        None => name.split_once("vcpu")?.1.trim_start(),
    };
    let digits = after.find(|c: char| !c.is_ascii_digit());
    after[..digits.unwrap_or(after.len())].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_thread_last_ran_on_a_cpu_of_this_host_and_an_unknown_one_on_none() {
        let own = std::process::id();
        assert!(last_cpu(own, own).is_some());
        assert_eq!(last_cpu(own, 1), None);
    }

    #[test]
    fn vcpus_of_a_process_are_its_threads_with_such_names_in_the_order_of_their_numbers() {
        let (tell, told) = std::sync::mpsc::channel();
        let start = |name: &str| {
            let tell = tell.clone();
            let (end, ended) = std::sync::mpsc::channel::<()>();
            let run = move || {
                tell.send(cpu::affinity().unwrap()).unwrap();
                assert!(ended.recv().is_err(), "nothing is sent");
            };
            let thread = std::thread::Builder::new().name(name.to_owned());
            (thread.spawn(run).unwrap(), end)
        };
        let threads = ["CPU 10/KVM", "CPU 2/KVM", "IO iothread"].map(start);
        let allowed = threads.each_ref().map(|_| told.recv().unwrap());
        let own = std::process::id();
        let found = vcpus(own);
        assert_eq!(found.iter().map(|v| v.number).collect::<Vec<_>>(), [2, 10]);
        for vcpu in found {
            assert_eq!(vcpu.allowed, allowed[0]);
            assert!(vcpu.allowed.contains(&vcpu.last.unwrap()));
        }
        for (thread, end) in threads {
            drop(end);
            thread.join().unwrap();
        }
        assert_eq!(vcpus(own), []);
    }

    #[test]
    fn vcpu_numbers_are_read_from_the_names_of_four_vmms_and_from_no_others() {
        for (name, number) in [
            ("CPU 3/KVM\n", Some(3)),
            ("CPU 12/TCG\n", Some(12)),
            ("fc_vcpu 0\n", Some(0)),
            ("vcpu7", Some(7)),
            ("crosvm_vcpu15\n", Some(15)),
            ("qemu-system-x86\n", None),
            ("CPU x/KVM", None),
            ("vcpu", None),
            ("", None),
        ] {
            assert_eq!(vcpu_number(name), number, "{name}");
        }
    }
}
