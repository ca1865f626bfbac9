// SPDX-License-Identifier: Apache-2.0
//! Where the calling thread runs, and may run; how long this process has run.

#![expect(unsafe_code, reason = "getrusage has no safe wrapper")]

use rustix::thread::CpuSet;
use std::{mem::MaybeUninit, time::Duration};

/// Why a thread could not be placed.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The kernel refused.
    #[error("placing this thread on CPUs {cpus:?} failed: {source}")]
    Kernel {
        /// CPUs asked for.
        cpus: Vec<usize>,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// Numbers beyond what the kernel's sets hold.
    #[error("CPU {cpu} is beyond the {most} CPUs an affinity set can name")]
    TooHigh {
        /// The number asked for.
        cpu: usize,
        /// One past the highest.
        most: usize,
    },
}

/// The CPU this thread runs on at this moment.
#[must_use]
pub fn current() -> usize {
    rustix::thread::sched_getcpu()
}

/// CPUs this thread may run on, ascending.
///
/// # Errors
/// What the kernel says.
pub fn affinity() -> Result<Vec<usize>, CpuError> {
    let set = rustix::thread::sched_getaffinity(None).map_err(|source| CpuError::Kernel {
        cpus: Vec::new(),
        source: source.into(),
    })?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|cpu| set.is_set(*cpu))
        .collect())
}

/// Lets this thread run on `cpus` only.
///
/// # Errors
/// A number too high, or what the kernel says (none of them online or allowed).
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

/// CPU time that all threads of this process have used so far, theirs and the kernel's for them.
#[must_use]
pub fn process_time() -> Duration {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` is writable memory of an `rusage`'s size; who is asked about is ourselves.
    let status = unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) };
    assert_eq!(
        status, 0,
        "getrusage of oneself fails for a bad address only"
    );
    // SAFETY: all of it is integers, zeroed above and then written by the kernel.
    let usage = unsafe { usage.assume_init() };
    let time = |part: libc::timeval| {
        let seconds = u64::try_from(part.tv_sec).unwrap_or(0);
        let micros = u64::try_from(part.tv_usec).unwrap_or(0);
        Duration::from_secs(seconds) + Duration::from_micros(micros)
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_of_the_process_grows_while_it_computes() {
        let before = process_time();
        while process_time() == before {
            std::hint::spin_loop();
        }
        assert!(process_time() > before);
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
    fn a_cpu_number_beyond_the_set_is_refused() {
        assert!(matches!(
            set_affinity(&[1 << 20]),
            Err(CpuError::TooHigh { .. })
        ));
    }
}
