// SPDX-License-Identifier: Apache-2.0
//! [`Roster`]: which names are in use, and for what.
//!
//! A name is reserved before its attach begins and freed after its detach has ended, so that no two
//! calls ever work on one VM or one pool. A VM whose pool could not be recovered keeps its name too: the
//! pool holds the only copy of its evicted pages.

use super::{janitor_bell::JanitorBell, lock::lock, pools::name_of, vm::Vm, waiting::Expected};
use crate::control::{AttachRequest, ControlError};
use pagetide_vmm::process::{VmmIdentity, VmmProcess};
use std::{
    collections::BTreeMap,
    sync::{Arc, Condvar, Mutex, PoisonError},
};

/// A name in use.
enum Slot {
    /// Its attach is under way.
    Attaching {
        pid: u32,
        /// Why its fault reader failed, if it failed this early.
        reader_failed: Option<String>,
    },
    /// The VM.
    There(Arc<Vm>),
    /// Its pool exists but could not be recovered, for the reason `why`.
    Waiting {
        /// Its VMM, if known.
        vmm: Option<Arc<VmmProcess>>,
        why: String,
        /// What it takes counts as long as it waits.
        _counted: Option<Box<Expected>>,
    },
}

impl Slot {
    fn pid(&self) -> Option<u32> {
        match self {
            Self::Attaching { pid, .. } => Some(*pid),
            Self::There(vm) => Some(vm.core.vmm.pid()),
            Self::Waiting { vmm, .. } => vmm.as_ref().map(|vmm| vmm.pid()),
        }
    }
}

/// A VM whose VMM may end at any time.
pub(super) enum Watched {
    /// A VM that is attached.
    Vm(Arc<Vm>),
    /// The VMM of a VM of this name that could not be recovered.
    Waiting(String, Arc<VmmProcess>),
}

impl Watched {
    pub(super) fn vmm(&self) -> &VmmProcess {
        match self {
            Self::Vm(vm) => &vm.core.vmm,
            Self::Waiting(_, vmm) => vmm,
        }
    }
}

/// See the module.
pub(super) struct Roster {
    list: Mutex<List>,
    /// Rung when a VMM is to be watched or no longer watched.
    janitor: JanitorBell,
    /// An attach has ended.
    settled: Condvar,
}

#[derive(Default)]
struct List {
    slots: BTreeMap<String, Slot>,
    closed: bool,
}

impl Drop for Roster {
    fn drop(&mut self) {
        self.janitor.ring();
    }
}

impl Roster {
    pub(super) fn new(janitor: JanitorBell) -> Self {
        Self {
            list: Mutex::default(),
            janitor,
            settled: Condvar::new(),
        }
    }

    /// True once the daemon is shutting down.
    pub(super) fn is_closed(&self) -> bool {
        lock(&self.list).closed
    }

    /// Why the VM of this name could not be recovered, if it could not.
    pub(super) fn waits(&self, name: &str) -> Option<String> {
        match lock(&self.list).slots.get(name) {
            Some(Slot::Waiting { why, .. }) => Some(format!("{name}: {why}")),
            Some(Slot::Attaching { .. } | Slot::There(_)) | None => None,
        }
    }

    /// Reserves name and pid for an attach, which ends with [`Self::put`] or [`Self::remove`].
    pub(super) fn reserve(&self, request: &AttachRequest) -> Result<(), ControlError> {
        let mut list = lock(&self.list);
        if list.closed {
            return Err(ControlError::refused(
                "the daemon is shutting down: restart it, then attach",
            ));
        }
        for (name, slot) in &list.slots {
            let waits = matches!(slot, Slot::Waiting { .. });
            if slot.pid() == Some(request.pid) && waits {
                return Err(ControlError::refused(format!(
                    "process {} was attached as VM '{name}' and waits for a daemon that can recover its pool: see \
                     `pagetide vm show {name}`",
                    request.pid
                )));
            }
            if slot.pid() == Some(request.pid) {
                return Err(ControlError::refused(format!(
                    "process {} is attached already, as VM '{name}'",
                    request.pid
                )));
            }
            if *name == request.name {
                return Err(ControlError::refused(format!(
                    "there is a VM '{name}' already: give another name by --name"
                )));
            }
        }
        let attaching = Slot::Attaching {
            pid: request.pid,
            reader_failed: None,
        };
        list.slots.insert(request.name.clone(), attaching);
        Ok(())
    }

    /// Enters the VM under its name. Returns the reason if its fault reader failed during the attach.
    #[must_use]
    pub(super) fn put(&self, name: String, vm: Arc<Vm>) -> Option<String> {
        let before = self.settle(name, Slot::There(vm));
        match before {
            Some(Slot::Attaching { reader_failed, .. }) => reader_failed,
            Some(Slot::There(_) | Slot::Waiting { .. }) | None => None,
        }
    }

    /// Records that this VM could not be recovered.
    pub(super) fn put_waiting(&self, vm: Expected, vmm: Option<VmmProcess>, why: String) {
        let name = name_of(&vm.path);
        let slot = Slot::Waiting {
            vmm: vmm.map(Arc::new),
            why,
            _counted: Some(Box::new(vm)),
        };
        drop(self.settle(name, slot));
    }

    fn settle(&self, name: String, slot: Slot) -> Option<Slot> {
        let before = lock(&self.list).slots.insert(name, slot);
        self.settled.notify_all();
        self.janitor.ring();
        before
    }

    /// Frees a name.
    pub(super) fn remove(&self, name: &str) {
        let removed = lock(&self.list).slots.remove(name);
        self.settled.notify_all();
        self.janitor.ring();
        // Dropped without the lock: it may be the last reference to a VM.
        drop(removed);
    }

    /// The VM of a name.
    pub(super) fn get(&self, name: &str) -> Result<Arc<Vm>, ControlError> {
        match lock(&self.list).slots.get(name) {
            Some(Slot::There(vm)) => Ok(Arc::clone(vm)),
            Some(Slot::Attaching { .. }) => Err(ControlError::refused(format!(
                "VM '{name}' is just being attached"
            ))),
            Some(Slot::Waiting { why, .. }) => Err(ControlError::failed(format!(
                "VM '{name}' could not be recovered when the daemon started: {why}; its pool is kept, and the next \
                 start tries again"
            ))),
            None => Err(ControlError::not_found(format!(
                "there is no VM '{name}' here: see `pagetide vm list`, or attach it by \
                 `pagetide attach --pid N --name {name}`"
            ))),
        }
    }

    /// The fault reader of a process has failed: returns its VM, if it is attached. If its attach is
    /// under way, [`Self::put`] returns the reason later.
    pub(super) fn reader_failed(&self, process: VmmIdentity, why: &str) -> Option<Arc<Vm>> {
        let mut list = lock(&self.list);
        list.slots.values_mut().find_map(|slot| match slot {
            Slot::There(vm) if vm.core.identity.process() == process => Some(Arc::clone(vm)),
            Slot::Attaching { pid, reader_failed } if *pid == process.pid => {
                reader_failed.get_or_insert_with(|| why.to_owned());
                None
            }
            _ => None,
        })
    }

    /// Every VMM whose exit must be noticed.
    pub(super) fn watched(&self) -> Vec<Watched> {
        let watched = |(name, slot): (&String, &Slot)| match slot {
            Slot::There(vm) if vm.life.awaits_end() => Some(Watched::Vm(Arc::clone(vm))),
            Slot::Waiting { vmm: Some(vmm), .. } => {
                Some(Watched::Waiting(name.clone(), Arc::clone(vmm)))
            }
            Slot::There(_) | Slot::Attaching { .. } | Slot::Waiting { .. } => None,
        };
        lock(&self.list).slots.iter().filter_map(watched).collect()
    }

    /// Every attached VM, by name.
    pub(super) fn all(&self) -> Vec<Arc<Vm>> {
        let there = |slot: &Slot| match slot {
            Slot::There(vm) => Some(Arc::clone(vm)),
            Slot::Attaching { .. } | Slot::Waiting { .. } => None,
        };
        lock(&self.list).slots.values().filter_map(there).collect()
    }

    /// Refuses new attaches and waits for those under way.
    pub(super) fn close(&self) {
        let mut list = lock(&self.list);
        list.closed = true;
        let attaching = |list: &mut List| {
            list.slots
                .values()
                .any(|slot| matches!(slot, Slot::Attaching { .. }))
        };
        drop(
            self.settled
                .wait_while(list, attaching)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reader_that_fails_during_the_attach_of_its_vm_is_told_when_that_is_done_and_to_no_other() {
        let (bell, _heard) = JanitorBell::new().unwrap();
        let roster = Roster::new(bell);
        for (name, pid) in [("a", 7), ("b", 8)] {
            let request = AttachRequest {
                name: name.to_owned(),
                pid,
                limit_bytes: None,
                weight: None,
                floor_bytes: None,
            };
            roster.reserve(&request).unwrap();
        }
        let of = |pid| VmmIdentity { pid, start_time: 1 };
        assert!(roster.reader_failed(of(7), "no memory").is_none());
        assert!(roster.reader_failed(of(9), "nobody's").is_none());
        let settled = |name: &str| {
            let slot = Slot::Waiting {
                vmm: None,
                why: String::new(),
                _counted: None,
            };
            match roster.settle(name.to_owned(), slot) {
                Some(Slot::Attaching { reader_failed, .. }) => reader_failed,
                _ => panic!("{name} is not being attached"),
            }
        };
        assert_eq!(settled("a").as_deref(), Some("no memory"));
        assert_eq!(settled("b"), None);
    }
}
