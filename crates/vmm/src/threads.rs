// SPDX-License-Identifier: Apache-2.0
//! Where a VMM's threads run: the fault reader and the I/O page fault service go there too.

use crate::process::in_proc;
use procfs::process::Process;

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

/// The VMM's vCPU threads, by the names QEMU and others give them; empty when they have none
/// (QEMU names them only with `-name …,debug-threads=on`).
#[must_use]
pub fn vcpu_threads(pid: u32) -> Vec<u32> {
    let Ok(tasks) = in_proc(pid).and_then(|p: Process| p.tasks()) else {
        return Vec::new();
    };
    tasks
        .flatten()
        .filter(|task| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/task/{}/comm", task.tid));
            name.is_ok_and(|n| is_vcpu_name(&n))
        })
        .map(|task| task.tid.cast_unsigned())
        .collect()
}

/// CPUs on which the given threads last ran, ascending, each once.
#[must_use]
pub fn cpus_of(pid: u32, threads: &[u32]) -> Vec<usize> {
    let mut cpus: Vec<_> = threads.iter().filter_map(|t| last_cpu(pid, *t)).collect();
    cpus.sort_unstable();
    cpus.dedup();
    cpus
}

/// `CPU 0/KVM`, `CPU 0/TCG` (QEMU), `vcpu0` (Cloud Hypervisor), `fc_vcpu 0` (Firecracker),
/// `crosvm_vcpu0`.
fn is_vcpu_name(name: &str) -> bool {
    name.starts_with("CPU ") || name.contains("vcpu")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_thread_last_ran_on_a_cpu_of_this_host_and_an_unknown_one_on_none() {
        let own = std::process::id();
        assert!(last_cpu(own, own).is_some());
        assert_eq!(last_cpu(own, 1), None);
        assert_eq!(cpus_of(own, &[own, own]).len(), 1);
    }

    #[test]
    fn names_of_vcpu_threads_are_known_and_others_are_not() {
        assert!(is_vcpu_name("CPU 3/KVM\n") && is_vcpu_name("fc_vcpu 0"));
        assert!(!is_vcpu_name("qemu-system-x86\n"));
    }
}
