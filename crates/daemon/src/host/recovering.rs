// SPDX-License-Identifier: Apache-2.0
//! What a dead daemon left, at startup: VMs that are recovered, and those that have to wait.

use super::{
    HandedOver, Host, attach,
    pools::{name_of, pools},
    shared::Shared,
    waiting::Expected,
};
use crate::{control::ControlError, dpu::Owed, steps::Steps};
use pagetide_vmm::{Refusal, process::VmmProcess};
use std::{path::Path, sync::Arc};

/// What is known about the VMs whose pools were found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    /// Each was recovered, or at least its RAM is known and kept from devices.
    AllKnown,
    /// The RAM of at least one is not known.
    SomeUnknown,
}

/// Every VM that has a pool. From now on what they take counts.
///
/// # Errors
/// The state directory cannot be listed.
pub(super) fn expect_all(state_dir: &Path, shared: &Shared) -> Result<Vec<Expected>, ControlError> {
    let paths = pools(state_dir)?.into_iter();
    Ok(paths.map(|path| Expected::of(path, shared)).collect())
}

impl Host {
    /// Recovers VMs and devices that a predecessor has left or handed over.
    pub(super) fn take_up(
        &self,
        expected: Vec<Expected>,
        handed: HandedOver,
        owed: Owed,
        steps: &mut Steps,
    ) -> Result<(), ControlError> {
        let taken = self.recover_all(expected);
        steps.done("VMs");
        match self.check_served(&handed.vms) {
            Err(error) if owed == Owed::AsAfterDeath => {
                tracing::error!(
                    error = error.message,
                    "a VM waits until it can be recovered"
                );
            }
            checked => checked?,
        }
        if taken == Taken::AllKnown {
            self.devices.restore(handed.devices, owed)?;
        }
        steps.done("disks");
        Ok(())
    }

    /// Recovers these VMs. If one cannot be recovered, this logs the reason and leaves the pool: it is the VM's
    /// memory.
    fn recover_all(&self, expected: Vec<Expected>) -> Taken {
        let mut taken = Taken::AllKnown;
        for mut vm in expected {
            match attach::recover(&mut vm, &self.shared) {
                Ok(attach::Found::Recovered(vm)) => self.put(Arc::new(*vm)),
                Ok(attach::Found::Removed) => {}
                Err(error) => {
                    tracing::error!(
                        pool = %vm.path.display(),
                        %error,
                        "a VM could not be recovered; it waits, and its pool is kept"
                    );
                    if self.leave_waiting(vm, &error) == Taken::SomeUnknown {
                        taken = Taken::SomeUnknown;
                    }
                }
            }
        }
        taken
    }

    /// Fails if one of these VMs waits: the daemon that has served it can recover it, and is still there.
    pub(super) fn check_served(&self, names: &[String]) -> Result<(), ControlError> {
        // One whose VMM has ended meanwhile is not known any more.
        match names.iter().find_map(|name| self.vms.waits(name)) {
            None => Ok(()),
            Some(why) => Err(ControlError::failed(format!(
                "a VM that was served cannot be recovered: {why}"
            ))),
        }
    }

    /// Reserves the name of a VM that could not be recovered, and keeps all devices off its RAM: their
    /// DMA would fill holes whose content is in the pool.
    fn leave_waiting(&self, mut vm: Expected, why: &ControlError) -> Taken {
        let name = name_of(&vm.path);
        vm.waits(&self.shared);
        match attach::identity_of(&vm.path) {
            Ok(identity) => {
                let vmm = match VmmProcess::reopen(identity.process()) {
                    Ok(vmm) => Some(vmm),
                    Err(Refusal::NoSuchProcess { .. } | Refusal::PidUsedAgain { .. }) => {
                        self.drop_waiting(&name);
                        return Taken::AllKnown;
                    }
                    Err(error) => {
                        tracing::warn!(vm = name, %error, "its VMM cannot be watched");
                        None
                    }
                };
                identity.files().for_each(|key| self.shared.spaces.bar(key));
                self.vms.put_waiting(vm, vmm, why.message.clone());
                Taken::AllKnown
            }
            Err(error) => {
                tracing::error!(
                    pool = %vm.path.display(),
                    %error,
                    "the pool does not tell whose RAM it is; no device is served until that pool is gone"
                );
                self.vms.put_waiting(vm, None, why.message.clone());
                Taken::SomeUnknown
            }
        }
    }

    /// The VMM of a VM that could not be recovered has ended: its pool is no longer needed.
    pub(super) fn drop_waiting(&self, name: &str) {
        tracing::info!(
            vm = name,
            "the VMM of a VM that could not be recovered has ended; its pool is removed"
        );
        if let Err(error) = attach::remove_pool(&self.state_dir, name, &self.shared) {
            tracing::warn!(vm = name, %error, "its pool stays behind");
        }
        self.shared.budget.leave(name);
    }
}
