// SPDX-License-Identifier: Apache-2.0
//! Spaces and their page attributes: what each message does to them.

use super::{FunctionCore, Phase, Space, invalid, offset, pages_of, status_of};
use crate::wire::{Code, Farewell, HEADER_BYTES, RANGE_BYTES, Reply, Status};
use pagetide_addr::{
    Access, DomainId, FileKey, FilePage, FilePageSet, FileRange, Marks, PAGE_BYTES,
};
use pagetide_vpri::{
    domain::{DOMAIN_BYTES_MAX, DmaDomain, DomainError},
    lease::Busy,
    space::IoSpace,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// Offset of the length of CREATE's range.
const LENGTH_AT: u32 = 40;

impl FunctionCore {
    pub(super) fn create(&mut self, name: FileKey, page_count: u64) -> Result<Status, Status> {
        const LENGTH: Status = invalid(LENGTH_AT);
        if self.barred.get(&name) == Some(&self.session) {
            return Err(Status::of(Code::Exists));
        }
        let bytes = page_count.checked_mul(PAGE_BYTES).ok_or(LENGTH)?;
        if bytes > DOMAIN_BYTES_MAX {
            return Err(LENGTH);
        }
        let known = self.spaces.values_mut().find(|s| s.domain.key() == name);
        let taken_over = match known {
            Some(space) if space.session == self.session => {
                return Err(Status::of(Code::Exists));
            }
            Some(space) if pages_of(&space.domain) == page_count => {
                space.session = self.session;
                Some(Arc::clone(&space.domain))
            }
            Some(space) if space.domain.is_mapped() => return Err(LENGTH),
            // No device has it, and its memory is gone: the name now belongs to another file.
            Some(space) => {
                let id = space.domain.id();
                self.spaces.remove(&id);
                None
            }
            None => None,
        };
        let domain = match taken_over {
            Some(domain) => domain,
            None => self.declare(name, bytes)?,
        };
        // A bar of an earlier session.
        if self.barred.remove(&name).is_some() {
            self.domains.lift_bar(name);
        }
        domain.attributes().unmap_all();
        Ok(Status::with_value(domain.id().0.into()))
    }

    fn declare(&mut self, name: FileKey, bytes: u64) -> Result<Arc<DmaDomain>, Status> {
        if self.spaces.len() >= self.limits.spaces_max as usize {
            return Err(Status::of(Code::Full));
        }
        let refused = |error: DomainError| {
            tracing::warn!(%error, "the driver cannot have a space");
            match error {
                DomainError::LookUpOff { .. } | DomainError::OwnMemory(_) => {
                    Status::of(Code::Unsupported)
                }
                DomainError::AttachedAlready(_) => Status::of(Code::Exists),
                _ => invalid(LENGTH_AT),
            }
        };
        let domain = self.domains.declare(name, bytes).map_err(refused)?;
        if domain.len_bytes() != bytes {
            return Err(refused(DomainError::Length {
                key: name,
                bytes,
                declared_bytes: domain.len_bytes(),
            }));
        }
        domain.attach().map_err(refused)?;
        let space = Space {
            domain: Arc::clone(&domain),
            session: self.session,
        };
        self.spaces.insert(domain.id(), space);
        Ok(domain)
    }

    pub(super) fn destroy(
        &mut self,
        space: DomainId,
        farewell: Farewell,
    ) -> Result<Status, Status> {
        let domain = Arc::clone(self.domain(space)?);
        self.spaces.remove(&space);
        match farewell {
            Farewell::Release if self.phase == Phase::Ready => domain.detach(),
            // It was not recovered: pages of it may be absent. A bar or READY decides what happens
            // to it.
            Farewell::Release => domain.disown(),
            Farewell::Retire => self.domains.retire(&domain),
        }
        Ok(Status::OK)
    }

    pub(super) fn map(
        &self,
        space: DomainId,
        access: Access,
        ranges: &[FileRange],
    ) -> Result<Status, Status> {
        let domain = self.domain_with(space, ranges)?;
        for range in ranges {
            domain.attributes().grant(*range, access);
        }
        Ok(Status::OK)
    }

    pub(super) fn unmap(&self, space: DomainId, ranges: &[FileRange]) -> Result<Status, Status> {
        let domain = self.domain_with(space, ranges)?;
        Ok(restricted(&domain.attributes().unmap_ranges(ranges)))
    }

    pub(super) fn protect(&self, space: DomainId, ranges: &[FileRange]) -> Result<Status, Status> {
        let domain = self.domain_with(space, ranges)?;
        let busy = domain.attributes().forbid_writes_ranges(ranges);
        Ok(restricted(&busy))
    }

    pub(super) fn invalidate(
        &self,
        space: DomainId,
        ranges: &[FileRange],
    ) -> Result<Status, Status> {
        let domain = self.domain_with(space, ranges)?;
        let whole = [FileRange::new(FilePage(0), FilePage(pages_of(domain)))];
        let ranges = if ranges.is_empty() { &whole } else { ranges };
        let until = Instant::now() + Duration::from_micros(self.limits.lease_wait_us.into());
        loop {
            let leased = domain.attributes().leased_in(ranges);
            if leased.is_empty() {
                break;
            }
            if Instant::now() >= until {
                return Ok(status_of(Code::Busy, &leased));
            }
            std::hint::spin_loop();
        }
        if *ranges == whole {
            // No DMA is under way that began before the space was created: from now on an access to
            // an absent page is an alias fault.
            domain.watch().map_err(|error| {
                tracing::warn!(%error, "the space is not watched");
                Status::of(Code::Unsupported)
            })?;
        }
        Ok(Status::OK)
    }

    pub(super) fn standing(
        &self,
        space: DomainId,
        pages: Option<FileRange>,
    ) -> Result<Reply, Status> {
        let Some(pages) = pages else {
            let count = self.domain(space)?.attributes().wired_pages();
            return Ok(Status::with_value(count).into());
        };
        let domain = self.domain_with(space, &[pages])?;
        let section = pages.start.section();
        let wired = domain.attributes().wired_in(section);
        let mut mask = FilePageSet::EMPTY;
        for page in wired.pages(section).filter(|page| pages.contains(*page)) {
            mask.insert(page);
        }
        Ok(masked(mask))
    }

    pub(super) fn touched(
        &self,
        space: DomainId,
        pages: FileRange,
        marks: Marks,
    ) -> Result<Reply, Status> {
        let domain = self.domain_with(space, &[pages])?;
        let mut mask = FilePageSet::EMPTY;
        let looked = domain.touched(pages, marks, &mut |page| mask.insert(page));
        looked.map_err(|error| {
            tracing::warn!(%error, "cannot tell a driver what was touched");
            Status::of(Code::Unsupported)
        })?;
        Ok(masked(mask))
    }

    /// The domain of a space that this driver has created.
    pub(super) fn domain(&self, space: DomainId) -> Result<&Arc<DmaDomain>, Status> {
        let known = self.spaces.get(&space);
        let own = known.filter(|space| space.session == self.session);
        own.map(|space| &space.domain)
            .ok_or(Status::of(Code::NoSpace))
    }

    /// The same, checking that it holds all of `ranges`.
    fn domain_with(
        &self,
        space: DomainId,
        ranges: &[FileRange],
    ) -> Result<&Arc<DmaDomain>, Status> {
        let domain = self.domain(space)?;
        let page_count = pages_of(domain);
        match ranges.iter().position(|range| range.end.0 > page_count) {
            None => Ok(domain),
            Some(index) => Err(invalid(offset(HEADER_BYTES + index * RANGE_BYTES))),
        }
    }
}

fn masked(mask: FilePageSet) -> Reply {
    Reply {
        status: Status::OK,
        mask: Some(mask),
    }
}

/// How a restriction ended. Standing goes before busy: otherwise the driver would wait in vain.
fn restricted(busy: &[Busy]) -> Status {
    let (mut standing, mut leased) = (Vec::new(), Vec::new());
    for why in busy {
        match why {
            Busy::Wired(section) => standing.push(*section),
            Busy::Leased(section) => leased.push(*section),
        }
    }
    if !standing.is_empty() {
        status_of(Code::Standing, &standing)
    } else if !leased.is_empty() {
        status_of(Code::Busy, &leased)
    } else {
        Status::OK
    }
}
