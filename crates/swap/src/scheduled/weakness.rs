// SPDX-License-Identifier: Apache-2.0
//! [`Weakness`]: how a thread of a class yields to others on this host; and [`Placed`], where the calling
//! thread was put last.
//!
//! To leave `SCHED_IDLE`, and to lower a niceness, takes `CAP_SYS_NICE` or a limit (`RLIMIT_NICE`). A thread
//! that may not do that must not be made weak in the first place: it would stay so for ever, also while it
//! does more urgent work or holds a lock that faults wait for. So this is tried once, on a thread of its own,
//! before any other is made weak.

use pagetide_policy::scheduler::{Basis, WorkClass};
use pagetide_sys::cpu::{self, Urgency, priority};
use std::{
    cell::RefCell,
    io,
    sync::{Arc, OnceLock},
};

/// Niceness of reclaim that is lent idle time, or may not preempt: about a third of the weight of an ordinary
/// thread.
pub(super) const RECLAIM_NICENESS: u8 = 5;
/// Niceness of background work: the highest.
pub(super) const BACKGROUND_NICENESS: u8 = 19;

/// Which priorities a thread can leave again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Weakness {
    /// All of them.
    Full,
    /// Niceness, but not `SCHED_IDLE`.
    Niceness,
    /// None: all threads stay ordinary.
    None,
}

impl Weakness {
    /// What this process may do; tried at the first call only.
    #[must_use]
    pub fn of_this_process() -> Self {
        static TRIED: OnceLock<Weakness> = OnceLock::new();
        *TRIED.get_or_init(Self::try_on_a_thread)
    }

    fn try_on_a_thread() -> Self {
        let probe = std::thread::Builder::new().name("pt-probe".into());
        let probed = probe.spawn(|| Self::probe(cpu::set_urgency));
        match probed.map(std::thread::JoinHandle::join) {
            Ok(Ok(weakness)) => weakness,
            Ok(Err(_)) | Err(_) => Self::None,
        }
    }

    /// What `set`, which changes one thread's priority, can undo. That thread may stay weak.
    fn probe(set: impl Fn(Urgency) -> io::Result<()>) -> Self {
        let is_undone = |weak| set(weak).and_then(|()| set(Urgency::Ordinary)).is_ok();
        if !is_undone(Urgency::Yielding(1)) {
            return Self::None;
        }
        match is_undone(Urgency::Idle) {
            true => Self::Full,
            false => Self::Niceness,
        }
    }

    /// Priority of a run.
    #[must_use]
    pub fn urgency_of(self, class: WorkClass, basis: Basis) -> Urgency {
        match (self, class, basis) {
            (Self::Full, WorkClass::Reclaim, Basis::Entitled | Basis::Inherited) => {
                Urgency::Preempting(priority::RECLAIM)
            }
            (Self::None, ..) | (_, _, Basis::Inherited) => Urgency::Ordinary,
            (_, WorkClass::Reclaim, _) => Urgency::Yielding(RECLAIM_NICENESS),
            (Self::Full, WorkClass::Scan, _) => Urgency::Idle,
            (_, WorkClass::Scan | WorkClass::Background, _) => {
                Urgency::Yielding(BACKGROUND_NICENESS)
            }
        }
    }

    /// Priority of a thread that waits for a run: it takes the scheduler's lock now and then, so it is not as weak
    /// as scans.
    #[must_use]
    pub fn waiting(self) -> Urgency {
        self.urgency_of(WorkClass::Reclaim, Basis::Idle)
    }

    /// Priority with which a thread whose run has `urgency` takes the scheduler's lock.
    #[must_use]
    pub fn locking(urgency: Urgency) -> Urgency {
        match urgency {
            Urgency::Idle | Urgency::Yielding(_) => Urgency::Ordinary,
            Urgency::Ordinary | Urgency::Eager | Urgency::Preempting(_) => urgency,
        }
    }

    /// Priority of the parts of a run that hold what faults wait for: not as weak as scans.
    #[must_use]
    pub fn firm(self, urgency: Urgency) -> Urgency {
        match urgency {
            Urgency::Idle | Urgency::Yielding(_) => Urgency::Yielding(RECLAIM_NICENESS),
            Urgency::Ordinary | Urgency::Eager | Urgency::Preempting(_) => urgency,
        }
    }

    /// Priority of work that is not part of a run with `urgency`, and not at its expense: it preempts nobody.
    #[must_use]
    pub fn aside(self, urgency: Urgency) -> Urgency {
        match self.firm(urgency) {
            Urgency::Preempting(_) => Urgency::Ordinary,
            firm => firm,
        }
    }
}

/// How a thread was placed last. Several tasks may take turns on one thread.
#[derive(Debug)]
struct Placed {
    cpus: Option<Arc<[usize]>>,
    /// `None`: as it was when the thread began, which inherits it.
    urgency: Option<Urgency>,
}

thread_local! {
    static PLACED: RefCell<Placed> = const {
        RefCell::new(Placed { cpus: None, urgency: None })
    };
}

/// Puts the calling thread on `cpus`.
///
/// # Errors
/// Why it is not there; it is not tried again until they change.
pub(super) fn take_cpus(cpus: &Arc<[usize]>) -> Result<(), cpu::CpuError> {
    PLACED.with_borrow_mut(|placed| {
        if placed.cpus.as_ref() == Some(cpus) {
            return Ok(());
        }
        placed.cpus = Some(Arc::clone(cpus));
        cpu::set_affinity(cpus)
    })
}

/// Gives the calling thread this priority.
///
/// # Errors
/// The kernel's: the thread keeps the one it has.
pub(super) fn take_urgency(urgency: Urgency) -> io::Result<()> {
    PLACED.with_borrow_mut(|placed| {
        if placed.urgency == Some(urgency) {
            return Ok(());
        }
        cpu::set_urgency(urgency)?;
        placed.urgency = Some(urgency);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// A thread that may not return to ordinary from what `is_final` says.
    fn probed(is_final: impl Fn(Urgency) -> bool) -> Weakness {
        let now = Cell::new(Urgency::Ordinary);
        Weakness::probe(|urgency| {
            if urgency == Urgency::Ordinary && is_final(now.get()) {
                return Err(io::Error::from_raw_os_error(1));
            }
            now.set(urgency);
            Ok(())
        })
    }

    #[test]
    fn a_thread_is_made_weak_only_in_ways_that_it_can_leave() {
        assert_eq!(probed(|_| false), Weakness::Full);
        assert_eq!(
            probed(|urgency| urgency == Urgency::Idle),
            Weakness::Niceness
        );
        assert_eq!(probed(|_| true), Weakness::None);
        let of = |weakness: Weakness| {
            WorkClass::ALL.map(|class| weakness.urgency_of(class, Basis::Entitled))
        };
        let (nice, whole) = (Urgency::Yielding, Urgency::Preempting(priority::RECLAIM));
        assert_eq!(of(Weakness::Full), [whole, Urgency::Idle, nice(19)]);
        assert_eq!(of(Weakness::Niceness), [nice(5), nice(19), nice(19)]);
        assert_eq!(of(Weakness::None), [Urgency::Ordinary; 3]);
        for weakness in [Weakness::Full, Weakness::Niceness, Weakness::None] {
            for class in WorkClass::ALL {
                let inherited = weakness.urgency_of(class, Basis::Inherited);
                let is_whole = (weakness, class) == (Weakness::Full, WorkClass::Reclaim);
                let expected = if is_whole { whole } else { Urgency::Ordinary };
                assert_eq!(inherited, expected);
                // Whoever takes the lock is not weak meanwhile.
                let of_run = weakness.urgency_of(class, Basis::Entitled);
                let locking = Weakness::locking(of_run);
                assert!(matches!(
                    locking,
                    Urgency::Ordinary | Urgency::Preempting(_)
                ));
                assert_eq!(
                    locking == of_run,
                    of_run == whole || weakness == Weakness::None
                );
            }
            let lent = weakness.urgency_of(WorkClass::Reclaim, Basis::Idle);
            assert_eq!(lent, weakness.waiting());
            assert!(matches!(
                lent,
                Urgency::Ordinary | Urgency::Yielding(RECLAIM_NICENESS)
            ));
        }
    }

    /// Capabilities belong to a thread, and those that it starts have the same.
    #[test]
    fn without_the_capability_no_thread_is_made_weak_for_ever() {
        let found = std::thread::spawn(|| {
            let own = rustix::thread::capabilities(None).unwrap();
            let nice = rustix::thread::CapabilitySet::SYS_NICE;
            let less = rustix::thread::CapabilitySets {
                effective: own.effective - nice,
                permitted: own.permitted - nice,
                inheritable: own.inheritable - nice,
            };
            rustix::thread::set_capabilities(None, less).unwrap();
            let limit = rustix::process::getrlimit(rustix::process::Resource::Nice);
            // From this limit on, niceness 0 may be taken without it.
            let may_anyway = limit.current.is_none_or(|current| current >= 20);
            (Weakness::try_on_a_thread(), may_anyway)
        });
        let (weakness, may_anyway) = found.join().unwrap();
        assert_eq!(weakness == Weakness::None, !may_anyway);
    }
}
