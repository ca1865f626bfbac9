// SPDX-License-Identifier: Apache-2.0
//! [`Expected`]: a VM that a dead daemon left, until it is recovered.
//!
//! Its pool and its RAM take memory before it is recovered, and if it cannot be recovered for as long as its
//! VMM runs. So both count from the start: the pool in the cap of all pools, and pool and RAM in the host's
//! budget, where its memory counts as memory that cannot be evicted.

use super::{
    budget::{Governed, Newcomer, Seat, VmSeat},
    failure::failed,
    identity,
    pools::name_of,
    shared::Shared,
    vm::put_into,
};
use crate::control::ControlError;
use pagetide_policy::budget::{Bytes, Eviction, VmReport};
use pagetide_swap::{
    Pool,
    pool::{LeftPool, Phase, bytes_at},
};
use pagetide_vmm::{Refusal, layout::RamLayout, process::VmmProcess};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Weak},
};

/// See the module.
pub(super) struct Expected {
    pub(super) path: PathBuf,
    pool: Option<LeftPool>,
    /// `None` where it is not known whose RAM it is.
    seat: Option<Seat>,
    /// Measured as long as it is here.
    vm: Option<Arc<WaitingVm>>,
}

impl Expected {
    /// The VM of the pool at `path`.
    pub(super) fn of(path: PathBuf, shared: &Shared) -> Self {
        let pool = left_pool(&path, shared);
        let found = find(&path, shared).unwrap_or_else(|error| {
            // Its recovery meets the same, and tells it.
            tracing::debug!(pool = %path.display(), %error, "what the VM of a pool takes is unknown");
            None
        });
        let (seat, vm) = found.unzip();
        Self {
            path,
            pool,
            seat,
            vm,
        }
    }

    /// Its pool is opened now, and counts as such.
    pub(super) fn pool_is_opened(&mut self) {
        self.pool = None;
    }

    /// Its recovery has failed: from now on it waits.
    pub(super) fn waits(&mut self, shared: &Shared) {
        if self.pool.is_none() {
            self.pool = left_pool(&self.path, shared);
        }
    }

    /// Its place under the host's budget. What is written down of it was there first, so it holds, also where the
    /// daemon died before its pool had it.
    pub(super) fn seat_of(
        &mut self,
        vm: &Newcomer<'_>,
        pool: &Pool,
        shared: &Shared,
    ) -> Arc<VmSeat> {
        let budget = &shared.budget;
        let seat = self
            .seat
            .get_or_insert_with(|| budget.welcome_back(vm, pool.limit_bytes()));
        let seat = seat.share();
        put_into(pool, &seat.standing().share);
        seat
    }

    /// It is served, as `vm`.
    pub(super) fn is_served_as(&mut self, vm: Weak<dyn Governed>) {
        if let Some(seat) = self.seat.take() {
            seat.keep(vm);
        }
        drop(self.vm.take());
    }
}

fn left_pool(path: &Path, shared: &Shared) -> Option<LeftPool> {
    match LeftPool::at(path, &shared.pool_cap) {
        Ok(pool) => Some(pool),
        Err(error) => {
            tracing::warn!(pool = %path.display(), %error, "what the pool takes is unknown, and does not count");
            None
        }
    }
}

/// The place under the budget of the VM of a pool; `None` if it is not to be recovered.
fn find(path: &Path, shared: &Shared) -> Result<Option<(Seat, Arc<WaitingVm>)>, ControlError> {
    let pool = Pool::open(path).map_err(failed)?;
    let identity = identity::of_pool(&pool)?;
    let vmm = match VmmProcess::reopen(identity.process()) {
        Err(Refusal::NoSuchProcess { .. } | Refusal::PidUsedAgain { .. }) => return Ok(None),
        vmm => vmm.map_err(failed)?,
    };
    if pool.phase() != Phase::Attached {
        return Ok(None);
    }
    let layout = RamLayout::of_recorded(&vmm, &identity.recorded()).map_err(failed)?;
    let newcomer = Newcomer {
        name: &name_of(path),
        pid: identity.pid,
        ram_bytes: layout.len_bytes(),
        resident_bytes: layout.allocated_bytes().map_err(failed)?,
        hugetlb_bytes: layout.huge_bytes(),
    };
    let seat = shared.budget.welcome_back(&newcomer, pool.limit_bytes());
    let vm = Arc::new(WaitingVm {
        pool: path.to_owned(),
        layout,
    });
    let watched: Weak<WaitingVm> = Arc::downgrade(&vm);
    seat.watch(watched);
    Ok(Some((seat, vm)))
}

/// What such a VM takes.
struct WaitingVm {
    pool: PathBuf,
    layout: RamLayout,
}

impl Governed for WaitingVm {
    fn measure(&self) -> Option<VmReport> {
        let (resident, stored) = match (self.layout.allocated_bytes(), bytes_at(&self.pool)) {
            (Ok(resident), Ok(stored)) => (resident, stored),
            (resident, stored) => {
                tracing::debug!(pool = %self.pool.display(), ?resident, ?stored, "what a waiting VM takes is unknown");
                return None;
            }
        };
        Some(VmReport {
            ram: Bytes(self.layout.len_bytes()),
            resident: Bytes(resident),
            stored: Bytes(stored),
            eviction: Eviction::Blocked,
            ..VmReport::default()
        })
    }

    /// Nothing of it can be evicted.
    fn enforce(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::Hva;
    use pagetide_sys::memory_file::GuestFile;
    use pagetide_vmm::layout::RamMapping;

    #[test]
    fn waiting_vm_takes_what_its_files_take_and_nothing_of_it_can_be_evicted() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let file = GuestFile::new_memfd("ram", 4 << 20).unwrap();
        file.allocate(0, 1 << 20).unwrap();
        let mapping = RamMapping {
            hva: Hva(0),
            len_bytes: 4 << 20,
            file: 0,
            file_offset: 0,
        };
        let vm = WaitingVm {
            pool: dir.path().join("a.pool"),
            layout: RamLayout::from_mappings(vec![file], &[mapping]).unwrap(),
        };
        assert_eq!(vm.measure(), None, "its pool cannot be read");
        std::fs::write(&vm.pool, vec![1; 64 << 10]).unwrap();
        let report = VmReport {
            ram: Bytes::mib(4),
            resident: Bytes::mib(1),
            stored: Bytes(64 << 10),
            eviction: Eviction::Blocked,
            ..VmReport::default()
        };
        assert_eq!(vm.measure(), Some(report));
    }
}
