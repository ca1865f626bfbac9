// SPDX-License-Identifier: Apache-2.0
//! A page that was evicted and then lost: whoever touches it dies, nobody reads zeros.
//!
//! The one who dies is this very test program, started once more with a variable
//! that tells it to do so.

use pagetide_addr::{Hva, PAGE_BYTES, PageNo, PageSet, SectionNo};
use pagetide_gmem::{Installed, Mmu, Place, PlaceError, Restrict, Restricted, TableId};
use pagetide_sys::mapping::SharedMapping;
use pagetide_sys::memory_file::GuestFile;
use pagetide_sys::uffd::{Features, Userfaultfd, Watch};
use pagetide_vmm::layout::{LiveLayout, RamLayout, RamMapping};
use pagetide_vmm::place::{VcpuMmu, VmPlace};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;

const PAGES: u64 = 16;
const LOST: PageNo = PageNo(5);
const TOUCH: &str = "PAGETIDE_TEST_TOUCH";
const SIGBUS: i32 = 7;

struct Watched {
    userfaultfd: Arc<Userfaultfd>,
    mapping: SharedMapping,
    place: VmPlace,
    mmu: VcpuMmu,
}

impl Watched {
    fn new() -> Option<Self> {
        let userfaultfd = match Userfaultfd::create_here() {
            Ok(userfaultfd) => Arc::new(userfaultfd),
            Err(e) => {
                eprintln!("SKIPPED: {e}");
                return None;
            }
        };
        if !userfaultfd
            .api(Features::WANTED)
            .unwrap()
            .contains(Features::POISON)
        {
            eprintln!("SKIPPED: this kernel has no UFFDIO_POISON");
            return None;
        }
        let len_bytes = PAGES * PAGE_BYTES;
        let file = GuestFile::new_memfd("poison", len_bytes).unwrap();
        let mapping = SharedMapping::new(file.as_fd(), len_bytes).unwrap();
        let hva = Hva(mapping.address() as u64);
        userfaultfd
            .register(hva, len_bytes, Watch::MissingAndWriteProtected)
            .unwrap();
        let mapped = RamMapping {
            hva,
            len_bytes,
            file: 0,
            file_offset: 0,
        };
        let layout = RamLayout::from_mappings(vec![file], &[mapped]).unwrap();
        let layout = Arc::new(LiveLayout::new(layout));
        Some(Self {
            place: VmPlace::new(Arc::clone(&userfaultfd), Arc::clone(&layout)),
            mmu: VcpuMmu::new(Arc::clone(&userfaultfd), layout),
            userfaultfd,
            mapping,
        })
    }

    /// As a reclaim does it: protect, read, punch.
    fn evict(&self, page: PageNo) {
        let installed = self.place.install(page, &[7; 4096]).unwrap();
        assert_eq!(installed, Installed::Installed);
        let set = PageSet::of_range(SectionNo(0), page.single());
        let restricted = self
            .mmu
            .restrict(TableId(0), SectionNo(0), &set, Restrict::ReadOnly);
        assert_eq!(restricted.unwrap(), Restricted::Done);
        self.place.discard(page.single()).unwrap();
    }

    fn touch(&self) -> u8 {
        let mut byte = [0];
        self.mapping
            .copy_from(LOST.byte_offset(), &mut byte)
            .unwrap();
        byte[0]
    }

    fn await_fault(&self) {
        let mut faults = Vec::new();
        while self.userfaultfd.read_faults(&mut faults).unwrap() == 0 {
            std::thread::yield_now();
        }
    }
}

/// Runs the test `name` once more in a process of its own; the signal that ended it.
fn signal_that_ends(name: &str) -> Option<i32> {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(TOUCH, "yes")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!said.contains("panicked"), "{said}");
    output.status.signal()
}

#[test]
fn who_touches_an_evicted_page_after_it_was_poisoned_gets_sigbus() {
    let Some(w) = Watched::new() else { return };
    if std::env::var_os(TOUCH).is_none() {
        let name = "who_touches_an_evicted_page_after_it_was_poisoned_gets_sigbus";
        assert_eq!(signal_that_ends(name), Some(SIGBUS));
        return;
    }
    w.evict(LOST);
    w.place.poison(LOST).unwrap();
    w.place.poison(LOST).unwrap();
    panic!("read {} from a page that is lost", w.touch());
}

#[test]
fn who_waits_for_an_evicted_page_while_it_is_poisoned_gets_sigbus() {
    let Some(w) = Watched::new() else { return };
    if std::env::var_os(TOUCH).is_none() {
        let name = "who_waits_for_an_evicted_page_while_it_is_poisoned_gets_sigbus";
        assert_eq!(signal_that_ends(name), Some(SIGBUS));
        return;
    }
    w.evict(LOST);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| w.touch());
        w.await_fault();
        w.place.poison(LOST).unwrap();
        panic!("read {} from a page that is lost", waiting.join().unwrap());
    });
}

#[test]
fn a_present_page_is_not_poisoned_and_its_neighbours_stay_protected() {
    let Some(w) = Watched::new() else { return };
    w.evict(LOST);
    w.evict(PageNo(6));
    assert_eq!(
        w.place.install(LOST, &[9; 4096]).unwrap(),
        Installed::Installed
    );
    let error = w.place.poison(LOST).unwrap_err();
    let PlaceError::Kernel { source, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(source.kind(), std::io::ErrorKind::AlreadyExists);
    assert_eq!(w.touch(), 9);
    let map = pagetide_sys::pagemap::Pagemap::of_self().unwrap();
    let at_next = Hva(w.mapping.address() as u64 + PageNo(6).byte_offset());
    map.visit(at_next, 1, |_, entry| assert!(entry.is_write_protected()))
        .unwrap();
}
