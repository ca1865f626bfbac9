// SPDX-License-Identifier: Apache-2.0
//! [`DmaMmu`]: the DMA domains of a VM as one GMEM device.
//!
//! A VM's RAM may be several files, each a domain with a bitmap of its own and
//! page numbers that begin at 0. In the address space each file has its own
//! range of pages. Only this module knows both numberings.
//!
//! Domains come and go with the VM's RAM. A call works on the domains that
//! existed when it began. The section's lock, under which it is made, prevents
//! that a domain is removed while pages of it are granted.

use crate::space::IoSpace;
use arc_swap::ArcSwap;
use pagetide_addr::{
    Access, DomainId, FilePage, FilePageSet, FileRange, PageNo, PageRange, PageSet, SectionNo,
};
use pagetide_gmem::{Backing, Mmu, MmuError, MmuLimits, Restrict, Restricted, TableId};
use std::sync::Arc;

/// A domain and where it lies in the address space.
#[derive(Debug, Clone)]
struct Part {
    pages: PageRange,
    domain: Arc<dyn IoSpace>,
}

impl Part {
    /// A page of the address space as a page of the domain.
    const fn own(&self, page: PageNo) -> FilePage {
        FilePage(page.since(self.pages.start))
    }

    /// A page of the domain as a page of the address space.
    const fn in_space(&self, own: FilePage) -> PageNo {
        self.pages.start.plus(own.0)
    }
}

/// All DMA domains of one VM.
#[derive(Debug)]
pub struct DmaMmu {
    parts: ArcSwap<Vec<Part>>,
}

impl DmaMmu {
    /// The domains of a VM, each with the pages it has in the address space.
    #[must_use]
    pub fn new(domains: impl IntoIterator<Item = (Arc<dyn IoSpace>, PageRange)>) -> Self {
        let part = |(domain, pages)| Part { pages, domain };
        let parts: Vec<Part> = domains.into_iter().map(part).collect();
        Self {
            parts: ArcSwap::from_pointee(parts),
        }
    }

    /// Adds a domain, whose pages are `pages` of the address space. Nothing is granted yet.
    pub fn add(&self, domain: &Arc<dyn IoSpace>, pages: PageRange) {
        self.parts.rcu(|parts| {
            let mut parts = Vec::clone(parts);
            parts.push(Part {
                pages,
                domain: Arc::clone(domain),
            });
            parts
        });
    }

    /// Removes the domain `id`: its pages are no longer in the address space.
    pub fn remove(&self, id: DomainId) {
        self.parts.rcu(|parts| {
            let mut parts = Vec::clone(parts);
            parts.retain(|part| part.domain.id() != id);
            parts
        });
    }

    /// The current domains.
    #[must_use]
    pub fn domains(&self) -> Vec<Arc<dyn IoSpace>> {
        let parts = self.parts.load();
        parts.iter().map(|part| Arc::clone(&part.domain)).collect()
    }

    /// Pages of a domain as pages of the address space; `None` if not all of them are in it.
    #[must_use]
    pub fn in_space(&self, domain: DomainId, pages: FileRange) -> Option<PageRange> {
        let parts = self.parts.load();
        let part = parts.iter().find(|part| part.domain.id() == domain)?;
        let in_part = pages.end.0 <= part.pages.len();
        in_part.then(|| PageRange::new(part.in_space(pages.start), part.in_space(pages.end)))
    }
}

/// The parts of `pages`, each as pages of its domain.
fn pieces(parts: &[Part], pages: PageRange) -> impl Iterator<Item = (&Part, FileRange)> {
    parts.iter().filter_map(move |part| {
        let mine = part.pages.intersect(pages);
        (!mine.is_empty()).then(|| {
            (
                part,
                FileRange::new(part.own(mine.start), part.own(mine.end)),
            )
        })
    })
}

impl Mmu for DmaMmu {
    fn limits(&self) -> MmuLimits {
        MmuLimits::PAGED
    }

    fn wired(&self, section: SectionNo) -> PageSet {
        let mut set = PageSet::EMPTY;
        let parts = self.parts.load();
        for (part, own) in pieces(&parts, section.all_pages()) {
            for (own_section, _) in own.by_section() {
                for page in part.domain.standing_in(own_section).pages(own_section) {
                    let page = part.in_space(page);
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
        _table: TableId,
        section: SectionNo,
        pages: &PageSet,
        to: Restrict,
    ) -> Result<Restricted, MmuError> {
        let parts = self.parts.load();
        for (part, own) in pieces(&parts, section.all_pages()) {
            for (own_section, range) in own.by_section() {
                let mut set = FilePageSet::EMPTY;
                for page in range
                    .iter()
                    .filter(|page| pages.contains(part.in_space(*page)))
                {
                    set.insert(page);
                }
                let done = set.is_empty()
                    || match to {
                        Restrict::NoAccess => part.domain.unmap(own_section, &set),
                        Restrict::ReadOnly => part.domain.forbid_writes(own_section, &set),
                    };
                if !done {
                    return Ok(Restricted::Busy);
                }
            }
        }
        Ok(Restricted::Done)
    }

    fn grant(
        &self,
        _table: TableId,
        pages: PageRange,
        access: Access,
        _backing: Backing,
    ) -> Result<(), MmuError> {
        for (part, own) in pieces(&self.parts.load(), pages) {
            part.domain.grant(own, access);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Attribute,
        domain::{DmaDomain, DomainTable},
    };
    use pagetide_addr::PAGE_BYTES;
    use pagetide_sys::memory_file::GuestFile;

    fn mmu(sizes: &[u64]) -> (DmaMmu, Vec<Arc<DmaDomain>>) {
        let mut domains = Vec::new();
        let table = DomainTable::new(1);
        let mut first = 0;
        let mmu = DmaMmu::new(sizes.iter().map(|pages| {
            let range = PageRange::new(PageNo(first), PageNo(first + pages));
            first += pages;
            let file = GuestFile::new_memfd("part", pages * PAGE_BYTES).unwrap();
            let domain = table.open(file.key().unwrap(), pages * PAGE_BYTES).unwrap();
            domains.push(Arc::clone(&domain));
            (domain as Arc<dyn IoSpace>, range)
        }));
        (mmu, domains)
    }

    fn attributes(domains: &[Arc<DmaDomain>]) -> Vec<Attribute> {
        let of = |domain: &Arc<DmaDomain>| {
            let bitmap = domain.attributes().bitmap();
            (0..bitmap.page_count())
                .map(|page| bitmap.attribute(FilePage(page)))
                .collect::<Vec<_>>()
        };
        domains.iter().flat_map(of).collect()
    }

    #[test]
    fn restriction_and_grant_reach_just_the_pages_meant_across_unaligned_files() {
        let (mmu, domains) = mmu(&[700, 300, 1000]);
        let section = SectionNo(1);
        let range = PageRange::new(PageNo(690), PageNo(1010));
        let set = PageSet::of_range(section, range);
        assert_eq!(
            mmu.restrict(TableId(0), section, &set, Restrict::NoAccess)
                .unwrap(),
            Restricted::Done
        );
        let expected = |page: u64| range.contains(PageNo(page)) && page < 1024;
        for (page, attribute) in attributes(&domains).iter().enumerate() {
            assert_eq!(
                *attribute == Attribute::Unmapped,
                expected(page as u64),
                "page {page}"
            );
        }
        mmu.grant(TableId(0), range, Access::Write, Backing::Home)
            .unwrap();
        assert!(
            attributes(&domains)
                .iter()
                .all(|a| *a == Attribute::ReadWrite)
        );
    }

    #[test]
    fn wired_pages_are_found_by_their_numbers_in_the_space() {
        let (mmu, domains) = mmu(&[700, 600]);
        assert!(domains[1].attributes().wire(FilePage(10).single()));
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
        let (mmu, _) = mmu(&[700, 600]);
        let second = mmu.domains()[1].id();
        let range = FileRange::new(FilePage(1), FilePage(600));
        assert_eq!(
            mmu.in_space(second, range),
            Some(PageRange::new(PageNo(701), PageNo(1300)))
        );
        assert_eq!(
            mmu.in_space(second, FileRange::new(FilePage(1), FilePage(601))),
            None
        );
        assert_eq!(mmu.in_space(DomainId(99), range), None);
    }

    #[test]
    fn domain_that_came_is_reached_at_its_pages_and_one_that_went_is_not() {
        let (mmu, domains) = mmu(&[600, 40]);
        let more = mmu.domains().remove(1);
        mmu.remove(more.id());
        let at = PageRange::new(PageNo(2048), PageNo(2088));
        mmu.add(&more, at);
        let own = FilePage(0).run(40);
        assert_eq!(mmu.in_space(more.id(), own), Some(at));
        let all = PageSet::of_range(at.start.section(), at);
        let restrict = || mmu.restrict(TableId(0), at.start.section(), &all, Restrict::NoAccess);
        let attribute = || domains[1].attributes().bitmap().attribute(FilePage(39));
        assert_eq!(restrict().unwrap(), Restricted::Done);
        assert_eq!(attribute(), Attribute::Unmapped);
        // A gap belongs to no domain.
        let gap = PageRange::new(PageNo(600), PageNo(2048));
        mmu.grant(TableId(0), gap, Access::Write, Backing::Home)
            .unwrap();
        mmu.remove(more.id());
        mmu.grant(TableId(0), at, Access::Write, Backing::Home)
            .unwrap();
        assert_eq!(attribute(), Attribute::Unmapped);
        assert_eq!(mmu.in_space(more.id(), own), None);
        assert_eq!(mmu.domains().len(), 1);
    }
}
