// SPDX-License-Identifier: Apache-2.0
//! CPU placement, priority and CPU time of the calling thread; CPU time of processes, and idle time of
//! CPUs.

#![expect(
    unsafe_code,
    reason = "getrusage and sched_setscheduler have no safe wrapper"
)]

use rustix::{process::Pid, thread::CpuSet};
use std::{io, mem::MaybeUninit, time::Duration};

/// Milliseconds of one tick of `/proc/stat`: `USER_HZ` is 100 on every architecture we run on.
const TICK_MS: u64 = 10;
/// The highest pid that the kernel assigns (`PID_MAX_LIMIT`).
const PID_MAX: u32 = 4 << 20;
/// The niceness with the highest priority.
const LEAST_NICE: i32 = -20;

/// Why a thread could not be placed.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The kernel refused.
    #[error("placing this thread on CPUs {cpus:?} failed: {source}")]
    Kernel {
        /// The requested CPUs.
        cpus: Vec<usize>,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// A CPU number beyond what the kernel's sets hold.
    #[error("CPU {cpu} is beyond the {most} CPUs an affinity set can name")]
    TooHigh {
        /// The requested number.
        cpu: usize,
        /// One more than the highest allowed.
        most: usize,
    },
}

/// The threads over which a thread has priority on its CPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Urgency {
    /// None: it gets CPUs that no other thread wants (`SCHED_IDLE`), so it may be without one for long, also
    /// while it holds a lock. Threads that it starts are the same.
    Idle,
    /// Fewer than ordinary: the ordinary class, this niceness, 1 to 19. Threads that it starts are the same.
    Yielding(u8),
    /// None in particular: the ordinary class, niceness 0.
    Ordinary,
    /// Most others: the ordinary class, niceness -20.
    Eager,
    /// All of the ordinary class, at once (`SCHED_FIFO`), and those with a lower priority: 1 to 99.
    /// Threads that it starts are ordinary.
    Preempting(u8),
}

/// Real-time priorities of the daemon's threads. They stand here together because only their order matters.
pub mod priority {
    /// Runs of reclaim, which nobody waits for.
    pub const RECLAIM: u8 = 1;
    /// Workers of I/O page faults.
    pub const IOPF_WORKER: u8 = 2;
    /// Their dispatcher: an interrupt goes before the work that it starts.
    pub const IOPF_DISPATCHER: u8 = 3;
    /// A thread that keeps a VMM's thread stopped for remote system calls.
    pub const REMOTE_CALL: u8 = 4;
    /// Everything that a process does while guests wait for all of it: see [`crate::hurry`].
    pub const HURRY: u8 = 5;
    /// A bench that is to disturb those in a hurry.
    pub const DISTURBER: u8 = 6;
    const _: () = assert!(0 < RECLAIM && RECLAIM < IOPF_WORKER && IOPF_WORKER < IOPF_DISPATCHER);
    const _: () =
        assert!(IOPF_DISPATCHER < REMOTE_CALL && REMOTE_CALL < HURRY && HURRY < DISTURBER);
}

/// The CPU this thread runs on at this moment.
#[must_use]
pub fn current() -> usize {
    rustix::thread::sched_getcpu()
}

/// CPUs this thread may run on, ascending.
///
/// # Errors
/// The kernel's error.
pub fn affinity() -> Result<Vec<usize>, CpuError> {
    allowed(None)
}

/// CPUs that thread `thread` of any process may run on, ascending; `None` if there is no such thread.
#[must_use]
pub fn affinity_of(thread: u32) -> Option<Vec<usize>> {
    let thread = Pid::from_raw(thread.cast_signed())?;
    allowed(Some(thread)).ok()
}

fn allowed(thread: Option<Pid>) -> Result<Vec<usize>, CpuError> {
    let set = rustix::thread::sched_getaffinity(thread).map_err(|source| CpuError::Kernel {
        cpus: Vec::new(),
        source: source.into(),
    })?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|cpu| set.is_set(*cpu))
        .collect())
}

/// Restricts this thread to `cpus`.
///
/// # Errors
/// A number that is too high, or the kernel's error (none of them online or allowed).
pub fn set_affinity(cpus: &[usize]) -> Result<(), CpuError> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        if *cpu >= CpuSet::MAX_CPU {
            return Err(CpuError::TooHigh {
                cpu: *cpu,
                most: CpuSet::MAX_CPU,
            });
        }
        set.set(*cpu);
    }
    rustix::thread::sched_setaffinity(None, &set).map_err(|source| CpuError::Kernel {
        cpus: cpus.to_vec(),
        source: source.into(),
    })
}

/// Sets the priority of this thread. To raise it again takes the same rights as to raise it at all.
///
/// # Errors
/// `EPERM` without `CAP_SYS_NICE` and beyond the process's limits (`RLIMIT_RTPRIO`, `RLIMIT_NICE`).
pub fn set_urgency(urgency: Urgency) -> io::Result<()> {
    set_urgency_of(0, None, urgency)
}

/// Id of this thread.
#[must_use]
pub fn thread_id() -> u32 {
    rustix::thread::gettid().as_raw_pid().cast_unsigned()
}

/// Makes `thread` of this process ordinary. It must not end meanwhile: its id may be another process's
/// thread afterwards.
///
/// # Errors
/// As for [`set_urgency`], or there is no such thread.
pub fn make_ordinary(thread: u32) -> io::Result<()> {
    let known = Pid::from_raw(thread.cast_signed());
    let known = known.ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
    set_urgency_of(thread.cast_signed(), Some(known), Urgency::Ordinary)
}

/// Of the thread `id`, where 0 is the calling one, as `thread` says to other calls.
fn set_urgency_of(id: libc::pid_t, thread: Option<Pid>, urgency: Urgency) -> io::Result<()> {
    let (policy, priority, nice) = match urgency {
        Urgency::Idle => (libc::SCHED_IDLE, 0, None),
        Urgency::Yielding(nice) => (libc::SCHED_OTHER, 0, Some(i32::from(nice))),
        Urgency::Ordinary => (libc::SCHED_OTHER, 0, Some(0)),
        Urgency::Eager => (libc::SCHED_OTHER, 0, Some(LEAST_NICE)),
        Urgency::Preempting(priority) => (libc::SCHED_FIFO, i32::from(priority), None),
    };
    let parameters = libc::sched_param {
        sched_priority: priority,
    };
    // Threads that this one starts must not inherit the priority. The flag is never cleared,
    // because that requires a privilege.
    let policy = policy | libc::SCHED_RESET_ON_FORK;
    // SAFETY: the call changes no memory, and the parameters are read during it only.
    let status = unsafe { libc::sched_setscheduler(id, policy, &raw const parameters) };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    match nice {
        // Without a pid this means the calling thread on Linux, not its process; with one, that thread.
        Some(nice) => Ok(rustix::process::setpriority_process(thread, nice)?),
        None => Ok(()),
    }
}

/// Number of CPUs that are online, whether or not this process may use them.
///
/// # Errors
/// The error of reading `/sys/devices/system/cpu/online`, or that its content is invalid.
pub fn online_count() -> io::Result<usize> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/online")?;
    count_of_list(text.trim_end()).ok_or_else(|| {
        let why = format!("'{}' is no list of CPUs", text.trim_end());
        io::Error::new(io::ErrorKind::InvalidData, why)
    })
}

/// The count of a list such as `0-3,8`.
fn count_of_list(list: &str) -> Option<usize> {
    let count = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) else {
            return None;
        };
        last.checked_sub(first)?.checked_add(1)
    };
    list.split(',').map(count).sum()
}

/// How long each online CPU has been idle since the system started, in steps of 10 ms.
///
/// # Errors
/// The error of reading `/proc/stat`.
pub fn idle_times() -> io::Result<Vec<(usize, Duration)>> {
    let text = std::fs::read_to_string("/proc/stat")?;
    Ok(text.lines().filter_map(idle_time_of_line).collect())
}

/// The idle time of a line `cpu3 user nice system idle iowait …`; `None` for all other lines.
fn idle_time_of_line(line: &str) -> Option<(usize, Duration)> {
    let (number, fields) = line.strip_prefix("cpu")?.split_once(' ')?;
    let Ok(cpu) = number.parse() else {
        return None;
    };
    let mut fields = fields.split_ascii_whitespace().skip(3);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    let idle = ticks()?.checked_add(ticks()?)?;
    Some((cpu, Duration::from_millis(idle.checked_mul(TICK_MS)?)))
}

/// CPU time that this thread has used so far, in user mode and in the kernel.
#[must_use]
pub fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    Duration::from_secs(seconds) + Duration::from_nanos(nanos)
}

/// What `who`, this process or this thread, has used so far.
fn usage_of(who: libc::c_int) -> libc::rusage {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` is writable memory of an `rusage`'s size; the call queries this process.
    let status = unsafe { libc::getrusage(who, usage.as_mut_ptr()) };
    assert_eq!(
        status, 0,
        "getrusage of oneself fails for a bad address only"
    );
    // SAFETY: all of it is integers, zeroed above and then written by the kernel.
    unsafe { usage.assume_init() }
}

/// Page faults of this thread so far, of any kind. Takes a third of a microsecond.
#[must_use]
pub fn thread_faults() -> u64 {
    let usage = usage_of(libc::RUSAGE_THREAD);
    let count = |faults: libc::c_long| u64::try_from(faults).unwrap_or(0);
    count(usage.ru_minflt) + count(usage.ru_majflt)
}

/// CPU time that all threads of this process have used so far, in user mode and in the kernel.
#[must_use]
pub fn process_time() -> Duration {
    cpu_time_in(&usage_of(libc::RUSAGE_SELF))
}

/// CPU time of the processes that this one has started, and their descendants, once they have been waited for.
#[must_use]
pub fn children_time() -> Duration {
    cpu_time_in(&usage_of(libc::RUSAGE_CHILDREN))
}

fn cpu_time_in(usage: &libc::rusage) -> Duration {
    let time = |part: libc::timeval| {
        let seconds = u64::try_from(part.tv_sec).unwrap_or(0);
        let micros = u64::try_from(part.tv_usec).unwrap_or(0);
        Duration::from_secs(seconds) + Duration::from_micros(micros)
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// CPU time that all threads of process `pid` have used so far.
///
/// # Errors
/// The process has ended.
pub fn time_of(pid: u32) -> io::Result<Duration> {
    // A clock id has 29 bits for the process: a larger pid would name the clock of another one.
    if pid == 0 || pid > PID_MAX {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    let mut clock = 0;
    // SAFETY: `clock` is writable and lives longer than the call.
    let status = unsafe { libc::clock_getcpuclockid(pid.cast_signed(), &raw mut clock) };
    if status != 0 {
        return Err(io::Error::from_raw_os_error(status));
    }
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: as for `clock`.
    let status = unsafe { libc::clock_gettime(clock, &raw mut time) };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    Ok(Duration::from_secs(seconds) + Duration::from_nanos(nanos))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_of_another_process_is_what_it_has_used() {
        let own = std::process::id();
        let before = time_of(own).unwrap();
        while time_of(own).unwrap() < before + Duration::from_millis(1) {
            std::hint::spin_loop();
        }
        for nobody in [0, PID_MAX, u32::MAX / 2, u32::MAX] {
            assert!(time_of(nobody).is_err(), "{nobody}");
        }
    }

    #[test]
    fn faults_of_a_thread_are_counted_when_it_touches_new_pages() {
        const PAGES: usize = 64;
        let mut pages = vec![0_u8; PAGES << 12];
        let before = thread_faults();
        // Never written, so each page is mapped by its first use.
        pages.iter_mut().step_by(1 << 12).for_each(|byte| *byte = 1);
        assert!(std::hint::black_box(&pages)[0] == 1 && thread_faults() > before);
    }

    #[test]
    fn cpu_time_of_the_process_grows_while_it_computes() {
        let before = process_time();
        while process_time() == before {
            std::hint::spin_loop();
        }
        assert!(process_time() > before);
    }

    #[test]
    fn cpu_time_of_a_thread_grows_by_its_own_work_only() {
        let before = thread_time();
        let worker = std::thread::spawn(|| {
            while thread_time() < Duration::from_millis(20) {
                std::hint::spin_loop();
            }
        });
        worker.join().unwrap();
        let waited = thread_time() - before;
        assert!(waited < Duration::from_millis(20), "{waited:?}");
        let before = thread_time();
        while thread_time() == before {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn a_weak_thread_is_of_the_class_and_niceness_asked_for() {
        std::thread::spawn(|| {
            // Lower priorities need no privilege.
            set_urgency(Urgency::Yielding(7)).unwrap();
            assert_eq!(policy_and_niceness(), (0, 7));
            set_urgency(Urgency::Yielding(19)).unwrap();
            assert_eq!(policy_and_niceness(), (0, 19));
            set_urgency(Urgency::Idle).unwrap();
            assert_eq!(policy_and_niceness().0, 5);
            match set_urgency(Urgency::Ordinary) {
                Ok(()) => assert_eq!(policy_and_niceness(), (0, 0)),
                Err(error) => eprintln!("SKIPPED the way back: {error}"),
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_weak_thread_is_made_ordinary_by_another_one_and_a_thread_that_is_none_is_refused() {
        let (tell, told) = std::sync::mpsc::channel();
        let (go_on, wait) = std::sync::mpsc::channel();
        let weak = std::thread::spawn(move || {
            set_urgency(Urgency::Idle).unwrap();
            tell.send(thread_id()).unwrap();
            wait.recv().unwrap();
            policy_and_niceness()
        });
        let made = make_ordinary(told.recv().unwrap());
        go_on.send(()).unwrap();
        let found = weak.join().unwrap();
        match made {
            Ok(()) => assert_eq!(found, (0, 0)),
            Err(error) => eprintln!("SKIPPED: {error}"),
        }
        assert!(make_ordinary(0).is_err() && make_ordinary(u32::MAX / 2).is_err());
    }

    /// Of this thread: fields 41 and 19 of its `stat`, counted after the name, which may have blanks.
    fn policy_and_niceness() -> (i32, i32) {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let (_, fields) = stat.rsplit_once(')').unwrap();
        let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
        (fields[38].parse().unwrap(), fields[16].parse().unwrap())
    }

    #[test]
    fn a_thread_placed_on_one_cpu_runs_there() {
        let last = *affinity().unwrap().last().unwrap();
        std::thread::spawn(move || {
            set_affinity(&[last]).unwrap();
            assert_eq!(current(), last);
            assert_eq!(affinity().unwrap(), [last]);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_thread_of_this_process_may_run_where_it_says_itself_and_no_thread_nowhere() {
        let own = rustix::thread::gettid().as_raw_pid().cast_unsigned();
        assert_eq!(affinity_of(own), Some(affinity().unwrap()));
        assert_eq!(affinity_of(0), None);
        assert_eq!(affinity_of(u32::MAX / 2), None);
    }

    #[test]
    fn idle_time_is_told_of_lines_of_one_cpu_only() {
        let line = "cpu12 100 2 30 4000 50 6 7 8 0 0";
        let time = Duration::from_millis(40_500);
        assert_eq!(idle_time_of_line(line), Some((12, time)));
        for other in [
            "cpu  1 2 3 4 5",
            "intr 9 8 7 6 5",
            "cpu1 1 2 3",
            "cpux 1 2 3 4 5",
        ] {
            assert_eq!(idle_time_of_line(other), None, "{other}");
        }
        assert!(!idle_times().unwrap().is_empty());
    }

    #[test]
    fn cpus_of_a_list_are_counted_and_what_is_no_list_has_none() {
        for (list, count) in [("0", 1), ("0-3", 4), ("0-3,8,10-11", 7)] {
            assert_eq!(count_of_list(list), Some(count), "{list}");
        }
        for wrong in ["", "3-1", "a", "1,,2", "1-"] {
            assert_eq!(count_of_list(wrong), None, "{wrong}");
        }
        assert!(online_count().unwrap() >= affinity().unwrap().len());
    }

    #[test]
    fn an_urgent_thread_is_urgent_until_it_says_otherwise_and_starts_ordinary_ones() {
        std::thread::spawn(|| {
            if set_urgency(Urgency::Preempting(1)).is_err() {
                eprintln!("SKIPPED: no CAP_SYS_NICE");
                return;
            }
            let policy = || std::fs::read_to_string("/proc/thread-self/sched").unwrap();
            let is_ordinary = |text: String| {
                text.lines()
                    .any(|line| line.starts_with("policy") && line.ends_with(" 0"))
            };
            assert!(!is_ordinary(policy()));
            let child = std::thread::spawn(move || is_ordinary(policy()));
            assert!(child.join().unwrap());
            set_urgency(Urgency::Eager).unwrap();
            set_urgency(Urgency::Ordinary).unwrap();
            assert!(is_ordinary(policy()));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_cpu_number_beyond_the_set_is_refused() {
        assert!(matches!(
            set_affinity(&[1 << 20]),
            Err(CpuError::TooHigh { .. })
        ));
    }
}
