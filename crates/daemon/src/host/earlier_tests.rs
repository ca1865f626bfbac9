// SPDX-License-Identifier: Apache-2.0
//! Recovery of pools that earlier versions left, without a VM to serve.

use super::{
    attach::{forget_what_went, leave_out_misfits},
    identity::Identity,
    sink::VmIncidents,
    space::VmSpace,
};
use pagetide_addr::{FileKey, Hva, PAGE_BYTES, PageNo, PageRange, SECTION_PAGES, to_usize};
use pagetide_gmem::{
    Content, MemoryParts, PageState, PageTable, PageWord, PagedMemory, Unlimited, recovery,
};
use pagetide_swap::{Pool, PoolStore, PoolWords};
use pagetide_sys::{mapping::SharedMapping, memory_file::GuestFile, uffd::Userfaultfd};
use pagetide_vmm::{
    layout::{LiveLayout, RamLayout},
    place::{VcpuMmu, VmPlace},
    process::VmmProcess,
};
use pagetide_vpri::DmaMmu;
use std::{os::fd::AsFd, path::Path, sync::Arc};

/// Half a section more than a whole number of sections.
const FILE_PAGES: u64 = 2 * SECTION_PAGES + SECTION_PAGES / 2;

fn own() -> VmmProcess {
    VmmProcess::open(std::process::id()).unwrap()
}

/// `None`, with a message, if this process may not create one.
fn userfaultfd() -> Option<Arc<Userfaultfd>> {
    match Userfaultfd::create_here() {
        Ok(userfaultfd) => Some(Arc::new(userfaultfd)),
        Err(error) => {
            eprintln!("SKIPPED: {error}");
            None
        }
    }
}

/// A RAM file that this process has mapped. Its first page is present.
fn ram() -> (FileKey, SharedMapping) {
    let bytes = FILE_PAGES * PAGE_BYTES;
    let file = GuestFile::new_memfd("earlier", bytes).unwrap();
    file.write_at(0, &[7; 4096]).unwrap();
    let key = file.key().unwrap();
    (key, SharedMapping::new(file.as_fd(), bytes).unwrap())
}

/// The identity as it was written before files had first pages.
fn identity(files: &[(FileKey, SharedMapping)]) -> Vec<u8> {
    let mapping = |(key, mapping): &(FileKey, SharedMapping)| {
        serde_json::json!({
            "hva": Hva(mapping.address() as u64), "len_bytes": mapping.len_bytes(),
            "file": key, "file_offset": 0,
        })
    };
    let mappings: Vec<_> = files.iter().map(mapping).collect();
    let identity = serde_json::json!({
        "name": "a", "pid": std::process::id(), "start_time": 0, "vmm": "qemu", "mappings": mappings,
    });
    serde_json::to_vec(&identity).unwrap()
}

/// A pool as it was created before memory could grow: words for exactly these pages, one identity, the
/// capacity's cell 0. The first page of each file is present, the others are zeros.
fn make_pool(path: &Path, files: u64, identity: &[u8]) {
    let page_count = files * FILE_PAGES;
    let (header, chunk) = (64 << 10, 64 << 10);
    let content_at = (header + page_count * 8_u64).next_multiple_of(chunk);
    let mut bytes = vec![0; to_usize(content_at + chunk)];
    let mut put = |at: u64, value: u64| {
        let at = to_usize(at);
        bytes[at..at + 8].copy_from_slice(&value.to_ne_bytes());
    };
    let magic = u64::from_le_bytes(*b"PAGETIDE");
    let cells = [magic, 1, header, page_count, header, content_at, chunk];
    for (number, cell) in (0..).zip(cells) {
        put(number * 8, cell);
    }
    put(8 * 8, u64::MAX);
    put(10 * 8, identity.len() as u64);
    put(12 * 8, 1);
    for page in 0..page_count {
        let state = if page % FILE_PAGES == 0 {
            PageState::Present
        } else {
            PageState::Stored(Content::ZERO)
        };
        put(header + page * 8, PageWord::new(state).bits());
    }
    bytes[4096..4096 + identity.len()].copy_from_slice(identity);
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn files_that_share_a_section_become_one_region_that_neither_grows_nor_shrinks() {
    let Some(userfaultfd) = userfaultfd() else {
        return;
    };
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("a.pool");
    let files = [ram(), ram()];
    let written = identity(&files);
    make_pool(&path, 2, &written);

    let pool = Arc::new(Pool::open(&path).unwrap());
    let identity: Identity = serde_json::from_slice(&pool.identity().unwrap()).unwrap();
    let layout = RamLayout::of_recorded(&own(), &identity.recorded()).unwrap();
    let pages: Vec<_> = layout.files().iter().map(|file| file.pages()).collect();
    assert_eq!(pages[1].start, PageNo(FILE_PAGES));
    assert!(identity.has_files_of(&layout));

    let words = PoolWords::of(Arc::clone(&pool));
    let table = PageTable::reopen(Box::new(words.clone())).unwrap();
    let kept = leave_out_misfits(&layout, &table, &words, &userfaultfd);
    assert_eq!(kept.files().len(), 2);
    forget_what_went(&table, &layout);
    let live = Arc::new(LiveLayout::new(layout.clone()));
    let place = VmPlace::new(Arc::clone(&userfaultfd), Arc::clone(&live));
    let found = recovery::recover_words(&table, &place, |_, _| {}).unwrap();
    assert_eq!((found.present_pages, found.mended_words), (2, 0));
    let parts = MemoryParts {
        table,
        place: Arc::new(place),
        store: Arc::new(PoolStore::new(Arc::clone(&pool))),
        admission: Arc::new(Unlimited),
        incidents: Arc::new(VmIncidents::new("a", own())),
        neighbours_max: 0,
    };
    let vcpus = Arc::new(VcpuMmu::new(userfaultfd, live));
    let dpu = Arc::new(DmaMmu::new([]));
    let whole = VmSpace::new(PagedMemory::new(parts), [vcpus, dpu], &layout).unwrap();

    let all = PageRange::new(PageNo(0), PageNo(2 * FILE_PAGES));
    let regions: Vec<_> = whole.space.regions().iter().map(|r| r.pages()).collect();
    assert_eq!(regions, [all]);
    let more = PageRange::new(PageNo(3 * SECTION_PAGES), PageNo(4 * SECTION_PAGES));
    let grown = whole.make_room_for(more).unwrap_err();
    assert!(grown.message.contains("detach the VM"), "{}", grown.message);
    for pages in pages {
        let shrunk = whole.remove_ram(pages).unwrap_err();
        assert!(shrunk.message.contains("detach"), "{}", shrunk.message);
    }
    whole.remove_strays(&layout).unwrap();
    assert_eq!(whole.space.regions().len(), 1);
    // The earlier version could still recover it.
    assert_eq!(pool.identity().unwrap(), written);
}

#[test]
fn file_that_went_from_the_end_leaves_a_shorter_region_and_the_rest_of_its_section_free() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("a.pool");
    let mut files = vec![ram(), ram()];
    make_pool(&path, 2, &identity(&files));
    files.truncate(1);
    let pool = Arc::new(Pool::open(&path).unwrap());
    let identity: Identity = serde_json::from_slice(&pool.identity().unwrap()).unwrap();
    let layout = RamLayout::of_recorded(&own(), &identity.recorded()).unwrap();
    assert!(!identity.has_files_of(&layout));
    let table = PageTable::reopen(Box::new(PoolWords::of(pool))).unwrap();
    assert_eq!(table.page_count(), 2 * FILE_PAGES);
    forget_what_went(&table, &layout);
    assert_eq!(table.page_count(), FILE_PAGES);
}

#[test]
fn file_whose_words_find_no_room_is_left_out_and_one_with_words_stays() {
    let Some(userfaultfd) = userfaultfd() else {
        return;
    };
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("a.pool");
    let files = [ram(), ram()];
    make_pool(&path, 1, &identity(&files));
    let pool = Arc::new(Pool::open(&path).unwrap());
    let identity: Identity = serde_json::from_slice(&pool.identity().unwrap()).unwrap();
    let layout = RamLayout::of_recorded(&own(), &identity.recorded()).unwrap();
    let words = PoolWords::of(Arc::clone(&pool));
    let table = PageTable::reopen(Box::new(words.clone())).unwrap();
    // Placed as if it had been added later: from the border of the next section on.
    let second = layout.files()[1].key();
    let recorded = pagetide_vmm::layout::RecordedLayout {
        first_pages: vec![(second, PageNo(3 * SECTION_PAGES))],
        ..identity.recorded()
    };
    let layout = RamLayout::of_recorded(&own(), &recorded).unwrap();
    let left = leave_out_misfits(&layout, &table, &words, &userfaultfd);
    let keys: Vec<_> = left.files().iter().map(|file| file.key()).collect();
    assert_eq!(keys, [files[0].0]);
}
