// SPDX-License-Identifier: Apache-2.0
//! [`AddressSpace::fault`]: where every fault of CPU and devices enters (GMEM 3).
//!
//! A page is in a region of paged memory, of frames, or in none. Of paged memory,
//! [`PagedMemory::fault`](crate::PagedMemory::fault) makes it present; of frames, [`super::demand`].
//! Outside all regions the fault is refused.

use super::{address_space::AddressSpace, demand::may_fault};
use crate::{
    device::Device,
    error::GmError,
    paging::{Blank, Cause, Fault, FaultOutcome, Served, Wait},
    region::Kind,
    sync::Arc,
};
use pagetide_addr::{Access, PageNo, Va};

impl AddressSpace {
    /// Makes the pages of `cause` present and grants them, or reports why it cannot: see
    /// [`PagedMemory::fault`](crate::PagedMemory::fault), also for the result. All faults come here.
    ///
    /// Pages of frames are filled with zeros by the first fault on them. They are never written
    /// over or read ahead: an overwrite leaves them to its device. A fault on them may wait for an
    /// invalidation, so with [`Wait::Never`] and [`Wait::Begin`] it is not served.
    pub fn fault(&self, cause: &Cause<'_>, wait: Wait) -> Option<Served> {
        let outcome = match (self.region_over(cause.pages()), &self.memory) {
            (Some(region), Some(memory)) if region.kind == Kind::Paged => {
                return memory.fault(cause, wait);
            }
            (Some(region), _) => match cause {
                Cause::Fault(_) | Cause::Blank(_) if matches!(wait, Wait::Never | Wait::Begin) => {
                    return None;
                }
                Cause::Fault(fault) | Cause::Blank(Blank { fault, .. }) => {
                    self.fault_on_frames(&region, fault)
                }
                Cause::Overwrite(_) | Cause::Readahead(_) => FaultOutcome::Present,
            },
            (None, _) => FaultOutcome::OutOfRange,
        };
        wait.answer(Served::nothing(outcome))
    }

    /// See [`Device::fault`].
    pub(super) fn fault_of_device(
        &self,
        device: &Arc<Device>,
        addr: Va,
        access: Access,
    ) -> Result<(), GmError> {
        let page = addr.page();
        let Some(core) = self.region_over(page.single()) else {
            return Err(GmError::NotAllocated { va: addr });
        };
        match core.kind {
            Kind::Paged => self.fault_on_paged(device, page, access),
            Kind::Frames => self.fault_on_frame(&core, device, addr, access),
        }
    }

    fn fault_on_paged(
        &self,
        device: &Arc<Device>,
        page: PageNo,
        access: Access,
    ) -> Result<(), GmError> {
        let list = self.devices.share();
        may_fault(list.find_same(device), device.id(), page.va())?;
        drop(list);
        let (reply, outcome) = std::sync::mpsc::channel();
        let fault = Fault {
            device: device.id(),
            pages: page.single(),
            access,
        };
        let told = Box::new(move |outcome| {
            // Sending fails only if the receiver below is gone, and it waits for just this.
            let sent = reply.send(outcome);
            debug_assert!(sent.is_ok(), "the receiver was dropped");
        });
        let over = self.fault(&Cause::Fault(fault), Wait::Reply(told));
        debug_assert_eq!(over, None, "the reply has the outcome");
        match outcome.recv() {
            Ok(FaultOutcome::Present) => Ok(()),
            Ok(FaultOutcome::OutOfRange) => Err(GmError::NotAllocated { va: page.va() }),
            Ok(FaultOutcome::Lost | FaultOutcome::Gone) | Err(_) => {
                Err(GmError::Lost { va: page.va() })
            }
        }
    }
}
