// SPDX-License-Identifier: Apache-2.0
//! The ptrace requests themselves, and bounded waits for a stop.

use super::{
    error::{PtraceError, kernel},
    threads::is_under_seccomp,
};
use std::io;
use std::time::{Duration, Instant};

/// A small signed argument as a register value.
pub(super) const fn descriptor(number: i32) -> u64 {
    (number as i64).cast_unsigned()
}

/// How long a thread may take to stop before the next one is tried. A thread in uninterruptible
/// sleep does not stop before the sleep ends.
const STOP_WAIT: Duration = Duration::from_millis(50);
/// Most other stops (for intervening signals) before the awaited one.
const MOST_STOPS: u32 = 64;
/// Number of polls with a yield in between, before it sleeps in between.
const YIELDS: u32 = 20;
const SLEEP_BETWEEN_LOOKS: Duration = Duration::from_micros(10);

const PTRACE_O_SUSPEND_SECCOMP: u64 = 1 << 21;
const PTRACE_EVENT_STOP: i32 = 128;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// The stop requested by INTERRUPT.
    Trap,
    /// The end of a single step.
    Step,
}

pub(super) enum Waited {
    Reached { signal: i32 },
    TimedOut,
    Gone,
}

pub(super) enum Seized {
    Stopped { since: Instant },
    DoesNotStop,
    GoneAway,
}

/// Seizes `thread` and stops it.
pub(super) fn seize(pid: u32, thread: u32) -> Result<Seized, PtraceError> {
    let with = |options| request(libc::PTRACE_SEIZE, thread, 0, options);
    let seized = with(PTRACE_O_SUSPEND_SECCOMP).or_else(|refused| {
        if refused.raw_os_error() != Some(libc::ESRCH) && is_under_seccomp(pid, thread) {
            return Err(Err(PtraceError::Seccomp {
                pid,
                source: refused,
            }));
        }
        with(0).map_err(Ok)
    });
    match seized {
        Ok(()) => {}
        Err(Err(refusal)) => return Err(refusal),
        Err(Ok(e)) => {
            return match e.raw_os_error() {
                // The thread has ended; another one may do.
                Some(libc::ESRCH) => Ok(Seized::GoneAway),
                Some(libc::EPERM) => Err(PtraceError::NotPermitted { pid }),
                _ => Err(kernel("PTRACE_SEIZE", thread, e)),
            };
        }
    }
    let since = Instant::now();
    interrupt(thread)?;
    match wait_for(thread, Stop::Trap, STOP_WAIT)? {
        Waited::Reached {
            signal: libc::SIGTRAP,
        } => Ok(Seized::Stopped { since }),
        Waited::Reached { signal } => {
            detach(thread)?;
            Err(PtraceError::Stopped { pid, signal })
        }
        Waited::TimedOut => Ok(Seized::DoesNotStop),
        Waited::Gone => Ok(Seized::GoneAway),
    }
}

/// Waits for the wanted stop, and passes on signals that come first.
pub(super) fn wait_for(thread: u32, wanted: Stop, limit: Duration) -> Result<Waited, PtraceError> {
    let started = Instant::now();
    let mut looks = 0;
    let mut stops = 0;
    while stops < MOST_STOPS {
        let Some(status) = look(thread)? else {
            if started.elapsed() > limit {
                return Ok(Waited::TimedOut);
            }
            looks += 1;
            if looks < YIELDS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(SLEEP_BETWEEN_LOOKS);
            }
            continue;
        };
        stops += 1;
        if !libc::WIFSTOPPED(status) {
            return Ok(Waited::Gone);
        }
        let signal = libc::WSTOPSIG(status);
        let is_trap = status >> 16 == PTRACE_EVENT_STOP;
        let reached = match wanted {
            Stop::Trap => is_trap,
            Stop::Step => !is_trap && signal == libc::SIGTRAP,
        };
        if reached {
            return Ok(Waited::Reached { signal });
        }
        // Not ours: a signal is delivered as it would have been, anything else is just resumed.
        let passed_on = if is_trap { 0 } else { signal };
        let how = match wanted {
            Stop::Trap => libc::PTRACE_CONT,
            Stop::Step => libc::PTRACE_SINGLESTEP,
        };
        resume(how, thread, passed_on)?;
    }
    Ok(Waited::TimedOut)
}

/// The thread's state if it has changed.
pub(super) fn look(thread: u32) -> Result<Option<i32>, PtraceError> {
    let mut status = 0;
    // SAFETY: waitpid writes one int, to a live local.
    let found = unsafe {
        libc::waitpid(
            thread.cast_signed(),
            &raw mut status,
            libc::__WALL | libc::WNOHANG,
        )
    };
    match found {
        0 => Ok(None),
        -1 => {
            let source = io::Error::last_os_error();
            match source.raw_os_error() {
                Some(libc::EINTR) => Ok(None),
                // Reaped elsewhere, or never ours: it is gone.
                Some(libc::ECHILD) => Ok(Some(0)),
                _ => Err(kernel("waitpid", thread, source)),
            }
        }
        _ => Ok(Some(status)),
    }
}

/// A ptrace request whose address and data are plain numbers.
pub(super) fn request(what: libc::c_uint, thread: u32, address: u64, data: u64) -> io::Result<()> {
    // SAFETY: used only with requests that take numbers (SEIZE, INTERRUPT, CONT, SYSCALL,
    // DETACH): nothing in this process's memory is read or written.
    let answer = unsafe { libc::ptrace(what, thread.cast_signed(), address, data) };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

pub(super) fn interrupt(thread: u32) -> Result<(), PtraceError> {
    request(libc::PTRACE_INTERRUPT, thread, 0, 0).map_err(|e| kernel("PTRACE_INTERRUPT", thread, e))
}

pub(super) fn resume(how: libc::c_uint, thread: u32, signal: i32) -> Result<(), PtraceError> {
    request(how, thread, 0, descriptor(signal)).map_err(|e| kernel("resuming", thread, e))
}

pub(super) fn detach(thread: u32) -> Result<(), PtraceError> {
    request(libc::PTRACE_DETACH, thread, 0, 0).map_err(|e| kernel("PTRACE_DETACH", thread, e))
}

/// Address of the stopped thread's rseq area; `None` if it has none.
///
/// # Errors
/// `EIO` before Linux 5.13.
pub(super) fn rseq_area(thread: u32) -> io::Result<Option<u64>> {
    const PTRACE_GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;
    // struct ptrace_rseq_configuration: address, then size and signature, then flags and padding.
    let mut configuration = [0_u64; 3];
    // SAFETY: the kernel writes at most as many bytes as the address argument says, 24, to a live
    // array of that size.
    let answer = unsafe {
        libc::ptrace(
            PTRACE_GET_RSEQ_CONFIGURATION,
            thread.cast_signed(),
            size_of_val(&configuration),
            configuration.as_mut_ptr(),
        )
    };
    if answer < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Some(configuration[0]).filter(|area| *area != 0))
}

/// Masks all signals except that of a single step (the kernel would reset its disposition if it
/// were masked) and returns the previous mask. While a call like `ppoll` has a temporary mask in
/// place, the kernel returns the thread's own; the call sets its mask again when it is restarted.
pub(super) fn mask_signals(thread: u32) -> Result<u64, PtraceError> {
    let own = get_signal_mask(thread)?;
    set_signal_mask(thread, !(1 << (libc::SIGTRAP - 1)))?;
    Ok(own)
}

pub(super) fn get_signal_mask(thread: u32) -> Result<u64, PtraceError> {
    let mut mask = 0_u64;
    // SAFETY: GETSIGMASK writes as many bytes as the address argument says, eight, to a live u64.
    let answer = unsafe {
        libc::ptrace(
            libc::PTRACE_GETSIGMASK,
            thread.cast_signed(),
            size_of::<u64>(),
            &raw mut mask,
        )
    };
    if answer < 0 {
        return Err(kernel(
            "PTRACE_GETSIGMASK",
            thread,
            io::Error::last_os_error(),
        ));
    }
    Ok(mask)
}

pub(super) fn set_signal_mask(thread: u32, mask: u64) -> Result<(), PtraceError> {
    // SAFETY: SETSIGMASK reads as many bytes as the address argument says, eight, from a live u64.
    let answer = unsafe {
        libc::ptrace(
            libc::PTRACE_SETSIGMASK,
            thread.cast_signed(),
            size_of::<u64>(),
            &raw const mask,
        )
    };
    if answer < 0 {
        return Err(kernel(
            "PTRACE_SETSIGMASK",
            thread,
            io::Error::last_os_error(),
        ));
    }
    Ok(())
}
