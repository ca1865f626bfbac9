// SPDX-License-Identifier: Apache-2.0
//! [`Roster`]: which names are in use, and by what.
//!
//! A name is taken before its attach begins and given back after its detach has
//! ended, so that no two calls ever work on one VM or one pool. A VM whose pool
//! could not be taken up keeps its name too: its pool is its only memory.

use super::{core::lock, vm::Vm};
use crate::control::{AttachRequest, ControlError};
use pagetide_vmm::process::VmmIdentity;
use std::{
    collections::BTreeMap,
    sync::{Arc, Condvar, Mutex, PoisonError},
};

/// A name in use.
enum Slot {
    /// Its attach is under way.
    Attaching(u32),
    /// The VM.
    There(Arc<Vm>),
    /// Its pool is there, but could not be taken up: why.
    Waiting { pid: Option<u32>, why: String },
}

impl Slot {
    fn pid(&self) -> Option<u32> {
        match self {
            Self::Attaching(pid) => Some(*pid),
            Self::There(vm) => Some(vm.core.vmm.pid()),
            Self::Waiting { pid, .. } => *pid,
        }
    }
}

/// See the module.
#[derive(Default)]
pub(super) struct Roster {
    list: Mutex<List>,
    /// An attach has ended.
    settled: Condvar,
}

#[derive(Default)]
struct List {
    slots: BTreeMap<String, Slot>,
    closed: bool,
}

impl Roster {
    /// Keeps name and pid for an attach, which ends by [`Self::put`] or [`Self::remove`].
    pub(super) fn reserve(&self, request: &AttachRequest) -> Result<(), ControlError> {
        let mut list = lock(&self.list);
        if list.closed {
            return Err(ControlError::refused(
                "the daemon is ending: start it anew, then attach",
            ));
        }
        for (name, slot) in &list.slots {
            let waits = matches!(slot, Slot::Waiting { .. });
            if slot.pid() == Some(request.pid) && waits {
                return Err(ControlError::refused(format!(
                    "process {} was attached as VM '{name}' and waits for a daemon that can take its pool up: see \
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
        list.slots
            .insert(request.name.clone(), Slot::Attaching(request.pid));
        Ok(())
    }

    /// The VM of a name is there.
    pub(super) fn put(&self, name: String, vm: Arc<Vm>) {
        lock(&self.list).slots.insert(name, Slot::There(vm));
        self.settled.notify_all();
    }

    /// The pool of this name could not be taken up.
    pub(super) fn put_waiting(&self, name: String, pid: Option<u32>, why: String) {
        lock(&self.list)
            .slots
            .insert(name, Slot::Waiting { pid, why });
    }

    /// A name is free again.
    pub(super) fn remove(&self, name: &str) {
        lock(&self.list).slots.remove(name);
        self.settled.notify_all();
    }

    /// The VM of a name.
    pub(super) fn get(&self, name: &str) -> Result<Arc<Vm>, ControlError> {
        match lock(&self.list).slots.get(name) {
            Some(Slot::There(vm)) => Ok(Arc::clone(vm)),
            Some(Slot::Attaching(_)) => Err(ControlError::refused(format!(
                "VM '{name}' is just being attached"
            ))),
            Some(Slot::Waiting { why, .. }) => Err(ControlError::failed(format!(
                "VM '{name}' could not be taken up when the daemon started: {why}; its pool is kept, and the next \
                 start tries again"
            ))),
            None => Err(ControlError::not_found(format!(
                "there is no VM '{name}' here: see `pagetide vm list`, or attach it by \
                 `pagetide attach --pid N --name {name}`"
            ))),
        }
    }

    /// The VM of a process, and its name.
    pub(super) fn of_process(&self, process: VmmIdentity) -> Option<(String, Arc<Vm>)> {
        let list = lock(&self.list);
        list.slots.iter().find_map(|(name, slot)| match slot {
            Slot::There(vm) if vm.core.identity.process() == process => {
                Some((name.clone(), Arc::clone(vm)))
            }
            _ => None,
        })
    }

    /// Every VM that is there, by name.
    pub(super) fn all(&self) -> Vec<Arc<Vm>> {
        let there = |slot: &Slot| match slot {
            Slot::There(vm) => Some(Arc::clone(vm)),
            Slot::Attaching(_) | Slot::Waiting { .. } => None,
        };
        lock(&self.list).slots.values().filter_map(there).collect()
    }

    /// Lets no attach begin any more, and waits for those under way.
    pub(super) fn close(&self) {
        let mut list = lock(&self.list);
        list.closed = true;
        let attaching = |list: &mut List| {
            list.slots
                .values()
                .any(|slot| matches!(slot, Slot::Attaching(_)))
        };
        drop(
            self.settled
                .wait_while(list, attaching)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }
}
