// SPDX-License-Identifier: Apache-2.0
//! Taking write protection off: of the pages that have it, and of no others.

use pagetide_addr::{Access, Hva, PAGE_BYTES, PageNo, PageRange, PageSet, SectionNo};
use pagetide_gmem::{Backing, Mmu, Place, Restrict, Restricted, TableId};
use pagetide_sys::mapping::SharedMapping;
use pagetide_sys::memory_file::GuestFile;
use pagetide_sys::pagemap::Pagemap;
use pagetide_sys::uffd::{Features, Userfaultfd, Watch};
use pagetide_vmm::layout::{LiveLayout, RamLayout, RamMapping};
use pagetide_vmm::place::{VcpuMmu, VmPlace};
use std::os::fd::AsFd;
use std::sync::Arc;

const PAGES: u64 = 256;

/// Small faults of this thread so far.
fn faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let after_name = stat.rsplit(')').next().unwrap();
    after_name
        .split_whitespace()
        .nth(7)
        .unwrap()
        .parse()
        .unwrap()
}

fn written(mapping: &SharedMapping, pages: impl Iterator<Item = u64>) -> u64 {
    let before = faults();
    for page in pages {
        mapping.copy_to(PageNo(page).byte_offset(), &[1]).unwrap();
    }
    faults() - before
}

#[test]
fn pages_that_are_not_protected_stay_writable_without_a_fault() {
    let userfaultfd = match Userfaultfd::create_here() {
        Ok(userfaultfd) => Arc::new(userfaultfd),
        Err(e) => {
            eprintln!("SKIPPED: {e}");
            return;
        }
    };
    userfaultfd.api(Features::WANTED).unwrap();
    let bytes = PAGES * PAGE_BYTES;
    let file = GuestFile::new_memfd("protection", bytes).unwrap();
    let mapping = SharedMapping::new(file.as_fd(), bytes).unwrap();
    let hva = Hva(mapping.address() as u64);
    written(&mapping, 0..PAGES);
    let both = Watch::MissingAndWriteProtected;
    userfaultfd.register(hva, bytes, both).unwrap();
    let mapped = RamMapping {
        hva,
        len_bytes: bytes,
        file: 0,
        file_offset: 0,
    };
    let layout = RamLayout::from_mappings(vec![file], &[mapped]).unwrap();
    let layout = Arc::new(LiveLayout::new(layout));
    let place = VmPlace::new(Arc::clone(&userfaultfd), Arc::clone(&layout));
    let mmu = VcpuMmu::new(Arc::clone(&userfaultfd), layout);
    let mmu = mmu.seeing(std::process::id()).unwrap();
    let section = SectionNo(0);
    let mut protected = PageSet::of_range(section, PageRange::new(PageNo(3), PageNo(7)));
    protected.insert(PageNo(100));
    // One of which there is no page any more: a marker keeps its protection.
    protected.insert(PageNo(200));
    let restrict = |pages| mmu.restrict(TableId(0), section, pages, Restrict::ReadOnly);
    assert_eq!(restrict(&protected).unwrap(), Restricted::Done);
    place.discard(PageNo(200).single()).unwrap();
    let others = || (0..PAGES).filter(|page| !protected.contains(PageNo(*page)));
    assert_eq!(written(&mapping, others()), 0);
    let all = PageNo(0).run(PAGES);
    mmu.grant(TableId(0), all, Access::Write, Backing::Home)
        .unwrap();
    let mut left = 0;
    let map = Pagemap::of_self().unwrap();
    map.visit(hva, PAGES, |_, entry| {
        left += u64::from(entry.is_write_protected())
    })
    .unwrap();
    assert_eq!(left, 0);
    assert_eq!(written(&mapping, others()), 0);
    // These are writable: nobody is there to serve a fault.
    written(&mapping, [3, 4, 5, 6, 100].into_iter());
}
