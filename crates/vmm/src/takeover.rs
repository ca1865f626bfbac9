// SPDX-License-Identifier: Apache-2.0
//! Creates a userfaultfd inside a running VMM, resumes it later, and releases it.
//!
//! A userfaultfd watches the address space of the process that creates it. So the VMM creates it,
//! by a remote system call in one of its threads (see [`pagetide_sys::ptrace`]), and the descriptor
//! is fetched with `pidfd_getfd`. In a VMM without root's privileges that call fails with EPERM;
//! then `/dev/userfaultfd`, which needs no privileges once open, is passed to it over a socket pair
//! created for the purpose. `UFFD_USER_MODE_ONLY` is never used: KVM faults in kernel mode.
//!
//! The descriptor stays open in the VMM. If this process dies, faulting threads wait instead of
//! reading zeros, and a successor fetches the same userfaultfd by its number ([`resume`]).
//!
//! ```text
//!   take_over ──► served ──► (we die) ──► resume ──► served ──► let_go
//!       │ any failure: the descriptor is closed in the VMM again, which undoes all the rest
//!       └► (we die in the middle) ──► find_inside ──► abandon
//! ```

use crate::Refusal;
use crate::layout::{RamLayout, RecordedLayout};
use crate::process::{VmmIdentity, VmmProcess, in_proc};
use pagetide_sys::process::ProcessError;
use pagetide_sys::ptrace::{
    Pace, PauseLimits, PtraceError, StoppedThread, run_inside, run_inside_within,
};
use pagetide_sys::uffd::{Features, UffdError, Userfaultfd, Watch, is_userfaultfd};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Once;
use std::time::Duration;

/// How long a thread of a VMM may be stopped for a take-over: twenty times the usual time, and less than a
/// guest's timer tick. An attempt that takes longer is undone, and retried when the host may be less busy; a
/// VMM is refused after 5 tries within 0.3 s.
pub const PAUSE_LIMITS: PauseLimits = PauseLimits {
    pause_max: Duration::from_millis(5),
    tries_max: 5,
    backoff: Duration::from_millis(20),
};

/// Why a VMM could not be taken over, resumed or released.
#[derive(Debug, thiserror::Error)]
pub enum TakeOverError {
    /// Nothing could be run inside it.
    #[error(transparent)]
    Inside(#[from] PtraceError),
    /// The userfaultfd could not be used.
    #[error(transparent)]
    Uffd(#[from] UffdError),
    /// Its RAM could not be found again.
    #[error(transparent)]
    Ram(#[from] Refusal),
    /// Its descriptor could not be fetched.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The VMM may not create one, and neither may we create one for it.
    #[error(
        "the VMM may not create a userfaultfd ({refused}), and handing it /dev/userfaultfd failed: \
         {source}; Linux 6.1 or later is needed for a VMM that does not run as root"
    )]
    NotPermittedInside {
        /// The error of its own attempt.
        refused: Errno,
        /// Why the other way failed.
        source: Box<TakeOverError>,
    },
    /// The kernel cannot do what eviction needs.
    #[error(
        "this kernel's userfaultfd has features {found:#x} of the needed {needed:#x} (shared \
         memory with write protection): Linux 5.19 or later is needed"
    )]
    TooOld {
        /// Features found.
        found: u64,
        /// Features needed.
        needed: u64,
    },
    /// The userfaultfd left in the VMM no longer exists.
    #[error(
        "descriptor {number} of process {pid} is not the userfaultfd that was left there; its \
         evicted pages cannot be served any more"
    )]
    NotOurs {
        /// The pid.
        pid: u32,
        /// The descriptor's number in it.
        number: i32,
    },
}

/// A VMM that has been taken over.
#[derive(Debug)]
pub struct TakenOver {
    /// Our descriptor of its userfaultfd; all of its RAM is registered.
    pub userfaultfd: Userfaultfd,
    /// Its number in the VMM, to be recorded for [`resume`] and [`let_go`].
    pub number: i32,
    /// Its features, fixed for life.
    pub features: Features,
    /// How long one thread of the VMM was stopped, in microseconds.
    pub pause_us: u64,
    /// Which process it is; to be recorded too.
    pub identity: VmmIdentity,
}

/// Takes over the RAM of `vmm` as given by `layout`: from the return on, faults wait to be read.
///
/// # Errors
/// [`TakeOverError`]; everything is then as before.
pub fn take_over(vmm: &VmmProcess, layout: &RamLayout) -> Result<TakenOver, TakeOverError> {
    let undo = |thread: &mut StoppedThread<'_>, number: &i32| Ok(thread.close(*number)?);
    let ran = run_inside_within(vmm.fd(), PAUSE_LIMITS, create_inside, undo)?;
    say_once_how(ran.pace);
    let number = ran.value;
    match set_up(vmm, layout, number) {
        Ok((userfaultfd, features)) => Ok(TakenOver {
            userfaultfd,
            number,
            features,
            pause_us: ran.pause_us,
            identity: vmm.identity(),
        }),
        Err(error) => {
            // Our descriptor is closed already; closing the VMM's own ends the registrations.
            if let Err(e) = close_inside(vmm, number) {
                tracing::error!(
                    pid = vmm.pid(),
                    number,
                    error = %e,
                    "the userfaultfd of a failed take-over stays open in the VMM"
                );
            }
            Err(error)
        }
    }
}

/// Without real-time priority, a pause depends on the load of the host.
fn say_once_how(pace: Pace) {
    static SAID: Once = Once::new();
    if pace == Pace::Ordinary {
        SAID.call_once(|| {
            tracing::warn!(
                "take-overs run without real-time priority, so their pauses grow with the load of the host: \
                 that priority needs CAP_SYS_NICE (or RLIMIT_RTPRIO of 1), and under cgroup version 1 \
                 a cpu.rt_runtime_us above 0"
            );
        });
    }
}

/// A VMM that has been resumed.
#[derive(Debug)]
pub struct Resumed {
    /// Our descriptor of its userfaultfd; all of `layout` is registered.
    pub userfaultfd: Userfaultfd,
    /// Its RAM as recorded, without RAM unplugged meanwhile.
    pub layout: RamLayout,
}

/// Resumes a userfaultfd that an earlier process left in the VMM as descriptor `number`, for the
/// RAM that was `recorded`. RAM that it no longer watches was unplugged meanwhile: anything mapped
/// there now is left alone, as new RAM (see [`RamLayout::news`]). The caller must then wake all of
/// the RAM: faults that the dead process had read would otherwise be lost.
///
/// # Errors
/// [`TakeOverError::NotOurs`] if it is no longer there.
pub fn resume(
    vmm: &VmmProcess,
    recorded: &RecordedLayout,
    number: i32,
) -> Result<Resumed, TakeOverError> {
    let userfaultfd = take_inside(vmm, number)?;
    let layout = RamLayout::of_watched(vmm, recorded, &userfaultfd)?;
    // Changes nothing where it is registered already, and fails where another userfaultfd is.
    match watch(&userfaultfd, &layout) {
        Ok(()) => Ok(Resumed {
            userfaultfd,
            layout,
        }),
        Err(UffdError::Busy { .. }) => Err(TakeOverError::NotOurs {
            pid: vmm.pid(),
            number,
        }),
        Err(e) => Err(e.into()),
    }
}

/// Number of the userfaultfd in a VMM whose take-over was interrupted before the number was
/// recorded, if there is one. One that the VMM created for itself (postcopy, background snapshots)
/// has other features and is skipped.
///
/// # Errors
/// [`Refusal`] if its descriptors cannot be listed.
pub fn find_inside(vmm: &VmmProcess) -> Result<Option<i32>, Refusal> {
    let pid = vmm.pid();
    let list = in_proc(pid).and_then(|process| process.fd());
    let list = list.map_err(|e| Refusal::parsing(pid, "list the descriptors", e))?;
    vmm.still_runs()?;
    let is_userfaultfd = |target: &procfs::process::FDTarget| matches!(target, procfs::process::FDTarget::AnonInode(name) if name.contains("userfaultfd"));
    Ok(list
        .flatten()
        .filter(|fd| is_userfaultfd(&fd.target))
        .map(|fd| fd.fd)
        .find(|number| {
            std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}"))
                .is_ok_and(|details| may_be_ours(&details))
        }))
}

/// By the features in `/proc/PID/fdinfo` (`API: aa:FEATURES:…`): 0 before the handshake, then those
/// requested, by whatever version of this program. If they cannot be read, it may be ours.
fn may_be_ours(fdinfo: &str) -> bool {
    let features = fdinfo
        .lines()
        .find_map(|line| line.strip_prefix("API:"))
        .and_then(|fields| fields.split(':').nth(1))
        .and_then(|hex| match u64::from_str_radix(hex.trim(), 16) {
            Ok(bits) => Some(Features::from_bits(bits)),
            Err(_) => None,
        });
    features.is_none_or(|found| found == Features::NONE || found.contains(Features::EVICTION))
}

/// Releases the VMM: its RAM is no longer watched, and waiting threads continue. All pages must
/// have been filled before; absent ones read zeros from now on.
///
/// Either of two steps suffices: unregistering each mapping, or closing the descriptor in the VMM
/// (then the caller's own is the last, and the watch ends with it). Each is tried even if the other
/// fails: a mapping may be gone, and it may not be possible to stop a VMM.
///
/// # Errors
/// [`TakeOverError`] if both failed; the RAM may then still be watched.
pub fn let_go(
    vmm: &VmmProcess,
    layout: &RamLayout,
    userfaultfd: &Userfaultfd,
    number: i32,
) -> Result<(), TakeOverError> {
    let mut all = Unregistered::All;
    for mapping in layout.mappings() {
        if let Err(error) = userfaultfd.unregister(mapping.hva, mapping.len_bytes) {
            tracing::warn!(pid = vmm.pid(), %error, "a mapping was not watched, or is gone");
            all = Unregistered::NotAll;
        }
    }
    match (close_inside(vmm, number), all) {
        (Ok(()), _) => Ok(()),
        (Err(error), Unregistered::All) => {
            tracing::warn!(pid = vmm.pid(), number, %error, "the VMM keeps a descriptor of ours");
            Ok(())
        }
        (Err(error), Unregistered::NotAll) => Err(error),
    }
}

/// Whether all mappings were unregistered.
#[derive(Clone, Copy)]
enum Unregistered {
    All,
    NotAll,
}

/// Ends a take-over that was interrupted at any point: before the handshake, before or after RAM
/// was registered, or when the descriptor was closed already. Nothing may have been evicted.
///
/// # Errors
/// [`TakeOverError`]; the RAM may then still be watched.
pub fn abandon(vmm: &VmmProcess, layout: &RamLayout, number: i32) -> Result<(), TakeOverError> {
    match take_inside(vmm, number) {
        Ok(userfaultfd) => let_go(vmm, layout, &userfaultfd, number),
        Err(
            TakeOverError::NotOurs { .. }
            | TakeOverError::Process(ProcessError::NoSuchProcess { .. }),
        ) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Closes our descriptor in the VMM, if it still exists.
fn close_inside(vmm: &VmmProcess, number: i32) -> Result<(), TakeOverError> {
    if let Err(TakeOverError::NotOurs { .. }) = take_inside(vmm, number) {
        return Ok(());
    }
    let closed = run_inside(vmm.fd(), |thread| thread.close(number));
    match closed {
        Ok(_) => Ok(()),
        // All its descriptors were closed with it.
        Err(_) if matches!(vmm.fd().has_ended(), Ok(true)) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The userfaultfd that is descriptor `number` in the VMM.
fn take_inside(vmm: &VmmProcess, number: i32) -> Result<Userfaultfd, TakeOverError> {
    let not_ours = || TakeOverError::NotOurs {
        pid: vmm.pid(),
        number,
    };
    let descriptor = vmm.fd().take_descriptor(number).map_err(|e| match e {
        ProcessError::Kernel { source, .. }
            if Errno::from_io_error(&source) == Some(Errno::BADF) =>
        {
            not_ours()
        }
        other => other.into(),
    })?;
    if !is_userfaultfd(descriptor.as_fd()) {
        return Err(not_ours());
    }
    Ok(Userfaultfd::from(descriptor))
}

fn set_up(
    vmm: &VmmProcess,
    layout: &RamLayout,
    number: i32,
) -> Result<(Userfaultfd, Features), TakeOverError> {
    let descriptor: OwnedFd = vmm.fd().take_descriptor(number)?;
    let userfaultfd = Userfaultfd::from(descriptor);
    let features = userfaultfd.api(Features::WANTED)?;
    if !features.contains(Features::EVICTION) {
        return Err(TakeOverError::TooOld {
            found: features.bits(),
            needed: Features::EVICTION.bits(),
        });
    }
    watch(&userfaultfd, layout)?;
    Ok((userfaultfd, features))
}

/// Watches all of `layout` from now on; faults wait to be read. Mappings already watched stay so.
/// For RAM added later: no thread of the VMM is stopped for it.
///
/// # Errors
/// [`UffdError::Busy`] if another userfaultfd watches it.
pub fn watch(userfaultfd: &Userfaultfd, layout: &RamLayout) -> Result<(), UffdError> {
    for mapping in layout.mappings() {
        userfaultfd.register(
            mapping.hva,
            mapping.len_bytes,
            Watch::MissingAndWriteProtected,
        )?;
    }
    Ok(())
}

/// Runs with a thread of the VMM stopped: creates the userfaultfd there, returns its number.
fn create_inside(thread: &mut StoppedThread<'_>) -> Result<i32, TakeOverError> {
    match thread.make_userfaultfd() {
        Ok(number) => Ok(number),
        Err(PtraceError::Call {
            source: refused @ (Errno::PERM | Errno::ACCESS | Errno::NOSYS),
            ..
        }) => create_by_device(thread).map_err(|e| TakeOverError::NotPermittedInside {
            refused,
            source: Box::new(e),
        }),
        Err(e) => Err(e.into()),
    }
}

fn create_by_device(thread: &mut StoppedThread<'_>) -> Result<i32, TakeOverError> {
    let device = Userfaultfd::open_device()?;
    let inside = thread.give_descriptor(device.as_fd())?;
    let made = thread.make_userfaultfd_by(inside);
    thread.close(inside)?;
    Ok(made?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_userfaultfd_without_handshake_or_with_our_features_may_be_ours_and_others_are_not() {
        let details = |features: u64| {
            format!("pos:\t0\nflags:\t02004002\npending:\t0\ntotal:\t0\nAPI:\taa:{features:x}:7f\n")
        };
        const INITIALIZED: u64 = 1 << 31;
        assert!(may_be_ours(&details(0)));
        assert!(may_be_ours(&details(INITIALIZED | Features::WANTED.bits())));
        assert!(may_be_ours("pos:\t0\n"));
        let postcopy = Features::MISSING_SHMEM.bits() | Features::THREAD_ID.bits();
        assert!(!may_be_ours(&details(INITIALIZED | postcopy)));
        assert!(!may_be_ours(&details(INITIALIZED)));
    }
}
