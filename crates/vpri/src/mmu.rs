// SPDX-License-Identifier: Apache-2.0
//! [`DmaMmu`]: the DMA domains of a VM as one GMEM device.
//!
//! A VM's RAM may be several files, each a domain with a bitmap of its own and
//! page numbers that begin at 0. The address space counts along all of them.
//! This is the one place that knows both.

use crate::domain::DmaDomain;
use pagetide_addr::{Access, DomainId, PageNo, PageRange, PageSet, SectionNo};
use pagetide_gmem::{Mmu, MmuError, MmuLimits, OnAbsent, Restrict, Restricted};
use std::sync::Arc;

/// A domain and where it lies in the address space.
#[derive(Debug, Clone)]
struct Part {
    first: PageNo,
    pages: u64,
    domain: Arc<DmaDomain>,
}

/// All DMA domains of one VM.
#[derive(Debug, Clone)]
pub struct DmaMmu {
    parts: Vec<Part>,
}

impl DmaMmu {
    /// The domains of a VM in the order of its page numbers, each with its number of pages.
    #[must_use]
    pub fn new(domains: impl IntoIterator<Item = (Arc<DmaDomain>, u64)>) -> Self {
        let mut first = PageNo(0);
        let part = |(domain, pages): (Arc<DmaDomain>, u64)| {
            let part = Part {
                first,
                pages,
                domain,
            };
            first = PageNo(first.0 + pages);
            part
        };
        Self {
            parts: domains.into_iter().map(part).collect(),
        }
    }

    /// The domains.
    pub fn domains(&self) -> impl Iterator<Item = &Arc<DmaDomain>> {
        self.parts.iter().map(|part| &part.domain)
    }

    /// Pages of a domain as pages of the address space; `None` if they are not all there.
    #[must_use]
    pub fn in_space(&self, domain: DomainId, pages: PageRange) -> Option<PageRange> {
        let part = self.parts.iter().find(|part| part.domain.id() == domain)?;
        let in_part = pages.end.0 <= part.pages;
        in_part.then(|| {
            PageRange::new(
                PageNo(part.first.0 + pages.start.0),
                PageNo(part.first.0 + pages.end.0),
            )
        })
    }

    /// The parts of `pages`, each as pages of its domain.
    fn pieces(&self, pages: PageRange) -> impl Iterator<Item = (&Part, PageRange)> {
        self.parts.iter().filter_map(move |part| {
            let whole = PageRange::new(part.first, PageNo(part.first.0 + part.pages));
            let mine = pages.intersect(whole);
            let own = |page: PageNo| PageNo(page.0 - part.first.0);
            (mine.start >= part.first && !mine.is_empty())
                .then(|| (part, PageRange::new(own(mine.start), own(mine.end))))
        })
    }
}

impl Mmu for DmaMmu {
    fn limits(&self) -> MmuLimits {
        MmuLimits {
            granularity_pages: 1,
            strongest: Restrict::NoAccess,
            on_absent: OnAbsent::Recovers,
        }
    }

    fn wired(&self, section: SectionNo) -> PageSet {
        let mut set = PageSet::EMPTY;
        for (part, own) in self.pieces(section.pages(u64::MAX / 2)) {
            for (own_section, _) in own.by_section() {
                for page in part
                    .domain
                    .attributes()
                    .wired_in(own_section)
                    .pages(own_section)
                {
                    let page = PageNo(page.0 + part.first.0);
                    if page.section() == section {
                        set.insert(page);
                    }
                }
            }
        }
        set
    }

    fn restrict(
        &self,
        section: SectionNo,
        pages: &PageSet,
        to: Restrict,
    ) -> Result<Restricted, MmuError> {
        for (part, own) in self.pieces(section.pages(u64::MAX / 2)) {
            for (own_section, range) in own.by_section() {
                let mut set = PageSet::EMPTY;
                for page in range
                    .iter()
                    .filter(|page| pages.contains(PageNo(page.0 + part.first.0)))
                {
                    set.insert(page);
                }
                let attributes = part.domain.attributes();
                let done = set.is_empty()
                    || match to {
                        Restrict::NoAccess => attributes.unmap(own_section, &set),
                        Restrict::ReadOnly => attributes.forbid_writes(own_section, &set),
                    };
                if !done {
                    return Ok(Restricted::Busy);
                }
            }
        }
        Ok(Restricted::Done)
    }

    fn grant(&self, pages: PageRange, access: Access) -> Result<(), MmuError> {
        for (part, own) in self.pieces(pages) {
            part.domain.attributes().grant(own, access);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attribute, domain::DomainTable};
    use pagetide_addr::PAGE_BYTES;
    use pagetide_sys::memory_file::GuestFile;
    use std::os::fd::AsFd;

    fn mmu(sizes: &[u64]) -> DmaMmu {
        let table = DomainTable::new(1);
        DmaMmu::new(sizes.iter().map(|pages| {
            let file = GuestFile::new_memfd("part", pages * PAGE_BYTES).unwrap();
            let domain = table
                .open(file.as_fd(), file.key().unwrap(), pages * PAGE_BYTES)
                .unwrap();
            (domain, *pages)
        }))
    }

    fn attributes(mmu: &DmaMmu) -> Vec<Attribute> {
        let of = |part: &Part| {
            let bitmap = part.domain.attributes().bitmap();
            (0..part.pages)
                .map(|page| bitmap.attribute(PageNo(page)))
                .collect::<Vec<_>>()
        };
        mmu.parts.iter().flat_map(of).collect()
    }

    #[test]
    fn restriction_and_grant_reach_just_the_pages_meant_across_unaligned_files() {
        let mmu = mmu(&[700, 300, 1000]);
        let section = SectionNo(1);
        let range = PageRange::new(PageNo(690), PageNo(1010));
        let set = PageSet::of_range(section, range);
        assert_eq!(
            mmu.restrict(section, &set, Restrict::NoAccess).unwrap(),
            Restricted::Done
        );
        let expected = |page: u64| range.contains(PageNo(page)) && page < 1024;
        for (page, attribute) in attributes(&mmu).iter().enumerate() {
            assert_eq!(
                *attribute == Attribute::Unmapped,
                expected(page as u64),
                "page {page}"
            );
        }
        mmu.grant(range, Access::Write).unwrap();
        assert!(attributes(&mmu).iter().all(|a| *a == Attribute::ReadWrite));
    }

    #[test]
    fn wired_pages_are_found_by_their_numbers_in_the_space() {
        let mmu = mmu(&[700, 600]);
        assert!(mmu.parts[1].domain.attributes().wire(PageNo(10).single()));
        assert_eq!(
            mmu.wired(SectionNo(1))
                .pages(SectionNo(1))
                .collect::<Vec<_>>(),
            [PageNo(710)]
        );
        assert!(mmu.wired(SectionNo(0)).is_empty());
    }

    #[test]
    fn pages_outside_their_domain_are_not_in_the_space() {
        let mmu = mmu(&[700, 600]);
        let second = mmu.parts[1].domain.id();
        let range = PageRange::new(PageNo(1), PageNo(600));
        assert_eq!(
            mmu.in_space(second, range),
            Some(PageRange::new(PageNo(701), PageNo(1300)))
        );
        assert_eq!(
            mmu.in_space(second, PageRange::new(PageNo(1), PageNo(601))),
            None
        );
        assert_eq!(mmu.in_space(DomainId(99), range), None);
    }
}
