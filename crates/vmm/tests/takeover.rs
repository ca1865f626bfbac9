// SPDX-License-Identifier: Apache-2.0
//! Takes over stock QEMU, evicts and brings back its RAM by hand, lets it go; and all refusals.
//!
//! What gmem and swap do with care is done here in the simplest way that is
//! right for one reader and one evictor: a lock around everything.

mod huge;
mod qemu;

use pagetide_addr::{
    Access, FileKey, FilePage, FileRange, Hva, Marks, PAGE_BYTES, PageNo, PageRange, PageSet,
    SectionNo,
};
use pagetide_gmem::{Backing, Installed, Mmu, Place, PlaceError, Restrict, Restricted, TableId};
use pagetide_sys::mapping::SharedMapping;
use pagetide_sys::memory_file::GuestFile;
use pagetide_sys::page_idle::IdleBitmap;
use pagetide_sys::pagemap::Pagemap;
use pagetide_sys::ptrace::{PtraceError, run_inside};
use pagetide_sys::uffd::{Features, UffdError, Userfaultfd};
use pagetide_vmm::Refusal;
use pagetide_vmm::hazards::{self, EvictionBlocker};
use pagetide_vmm::layout::{LiveLayout, MapsChange, RamLayout, RamMapping, Strangers};
use pagetide_vmm::place::{VcpuMmu, VmPlace};
use pagetide_vmm::process::VmmProcess;
use pagetide_vmm::reader::{
    FaultKind, FaultReader, FaultSink, ReaderConfig, ReaderError, Served, VcpuFault,
};
use pagetide_vmm::takeover::{
    TakeOverError, TakenOver, abandon, find_inside, let_go, resume, take_over, watch,
};
use pagetide_vmm::tracker::{
    AccessTracker, DmaLook, IdlePages, Look, NoDma, UnmapAndLook, WholeSections, refault_cost,
};
use qemu::{Qemu, RAM_MIB, can_run};
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Guest memory that firmware does not touch, filled with a pattern.
const PATTERN: std::ops::Range<u64> = 32 * MIB..48 * MIB;

/// Keeps evicted pages in a map and serves faults from it.
struct Store {
    place: VmPlace,
    mmu: VcpuMmu,
    stored: Mutex<HashMap<PageNo, Box<[u8; 4096]>>>,
    missing: AtomicU64,
    protected: AtomicU64,
    gone: Mutex<bool>,
    went: Condvar,
    failed: AtomicBool,
}

impl FaultSink for Store {
    /// Every other page is left to the servers.
    fn fault_at_once(&self, fault: VcpuFault) -> Served {
        if fault.page.0.is_multiple_of(2) {
            return Served::WouldWait;
        }
        self.fault(fault);
        Served::Yes
    }

    fn served(&self, fault: VcpuFault) -> Option<PageRange> {
        Some(fault.page.single())
    }

    fn bring_along(&self, _pages: PageRange) {}

    fn fault(&self, fault: VcpuFault) {
        let mut stored = self.stored.lock().unwrap();
        match fault.kind {
            FaultKind::WriteProtected => {
                self.protected.fetch_add(1, Ordering::Relaxed);
                self.mmu
                    .grant(
                        TableId(0),
                        fault.page.single(),
                        Access::Write,
                        Backing::Home,
                    )
                    .unwrap();
            }
            FaultKind::Missing => {
                self.missing.fetch_add(1, Ordering::Relaxed);
                let outcome = match stored.get(&fault.page) {
                    Some(content) => self.place.install(fault.page, content),
                    None => self.place.install_zero(fault.page),
                };
                match outcome {
                    Ok(Installed::Installed) => {
                        stored.remove(&fault.page);
                    }
                    Ok(Installed::AlreadyThere) | Err(PlaceError::Gone) => {}
                    Err(e) => panic!("{e}"),
                }
            }
        }
    }

    fn vmm_gone(&self) {
        *self.gone.lock().unwrap() = true;
        self.went.notify_all();
    }

    fn reader_failed(&self, error: &ReaderError) {
        eprintln!("reader: {error}");
        self.failed.store(true, Ordering::Relaxed);
    }
}

/// A layout that stays as it is.
fn live(layout: &Arc<RamLayout>) -> Arc<LiveLayout> {
    Arc::new(LiveLayout::new(RamLayout::clone(layout)))
}

impl Store {
    fn new(userfaultfd: &Arc<pagetide_sys::uffd::Userfaultfd>, layout: &Arc<RamLayout>) -> Self {
        Self {
            place: VmPlace::new(Arc::clone(userfaultfd), live(layout)),
            mmu: VcpuMmu::new(Arc::clone(userfaultfd), live(layout)),
            stored: Mutex::default(),
            missing: AtomicU64::new(0),
            protected: AtomicU64::new(0),
            gone: Mutex::new(false),
            went: Condvar::new(),
            failed: AtomicBool::new(false),
        }
    }

    fn evict_all(&self, page_count: u64) -> u64 {
        let mut evicted = 0;
        for section in (0..SectionNo::count_for(page_count)).map(SectionNo) {
            let mut stored = self.stored.lock().unwrap();
            let runs = self.place.present_runs(section.pages(page_count)).unwrap();
            for run in &runs {
                let set = PageSet::of_range(section, *run);
                let restricted = self
                    .mmu
                    .restrict(TableId(0), section, &set, Restrict::ReadOnly);
                assert_eq!(restricted.unwrap(), Restricted::Done);
                for page in run.iter() {
                    let mut content = Box::new([0; 4096]);
                    self.place.read(page.single(), content.as_mut()).unwrap();
                    stored.insert(page, content);
                }
                self.place.discard(*run).unwrap();
                // Writers that met the protection look again and find the page missing.
                self.place.wake(*run).unwrap();
                evicted += run.len();
            }
        }
        evicted
    }

    fn bring_all_back(&self) {
        let mut stored = self.stored.lock().unwrap();
        for (page, content) in stored.drain() {
            let installed = self.place.install(page, &content).unwrap();
            assert_eq!(installed, Installed::Installed);
        }
    }
}

struct Attached {
    qemu: Qemu,
    vmm: VmmProcess,
    layout: Arc<RamLayout>,
    userfaultfd: Arc<pagetide_sys::uffd::Userfaultfd>,
    number: i32,
    store: Arc<Store>,
    reader: FaultReader,
}

fn write_pattern(layout: &RamLayout) {
    let bytes: Vec<u8> = (PATTERN.start / 4..PATTERN.end / 4)
        .flat_map(|word| u32::try_from(word).unwrap().to_le_bytes())
        .collect();
    let file = layout.files()[0].file();
    file.write_at(PATTERN.start, &bytes).unwrap();
}

fn attach(qemu: Qemu) -> Attached {
    let vmm = VmmProcess::open(qemu.pid()).unwrap();
    let layout = Arc::new(RamLayout::of_process(&vmm).unwrap());
    assert_eq!(layout.len_bytes(), RAM_MIB * MIB);
    hazards::refuse_if_shared(&vmm, &layout, &[]).unwrap();
    assert_eq!(hazards::check(&vmm, &layout, &[]).unwrap(), []);
    write_pattern(&layout);
    let TakenOver {
        userfaultfd,
        number,
        pause_us,
        ..
    } = take_over(&vmm, &layout).unwrap();
    eprintln!("attach pause: {pause_us} us");
    let userfaultfd = Arc::new(userfaultfd);
    let store = Arc::new(Store::new(&userfaultfd, &layout));
    let reader = start_reader(&vmm, &userfaultfd, &layout, &store);
    Attached {
        qemu,
        vmm,
        layout,
        userfaultfd,
        number,
        store,
        reader,
    }
}

fn start_reader(
    vmm: &VmmProcess,
    userfaultfd: &Arc<pagetide_sys::uffd::Userfaultfd>,
    layout: &Arc<RamLayout>,
    store: &Arc<Store>,
) -> FaultReader {
    FaultReader::start(
        vmm,
        Arc::clone(userfaultfd),
        live(layout),
        Arc::<Store>::clone(store),
        ReaderConfig::default(),
        &Arc::default(),
    )
    .unwrap()
}

/// Waits until the firmware has copied itself into RAM. One that is reset in the middle of that runs into the
/// part that is not there yet.
fn wait_for_firmware(qemu: &Qemu) {
    /// Where the processor begins, in the firmware's place below 1 MiB.
    const RESET_VECTOR: u64 = 0xf_fff0;
    let vmm = VmmProcess::open(qemu.pid()).unwrap();
    let layout = RamLayout::of_process(&vmm).unwrap();
    wait_until("the firmware has copied itself", || {
        let mut code = [0; 16];
        let file = layout.files()[0].file();
        file.read_at(RESET_VECTOR, &mut code).unwrap();
        code != [0; 16]
    });
}

/// Waits for a minute at most.
fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "not within a minute: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Attach, verify, evict, verify, run on, detach, verify.
fn whole_way(more: &[&str]) {
    if !can_run() {
        return;
    }
    let qemu = Qemu::with_shared_ram(more);
    wait_for_firmware(&qemu);
    let descriptors = qemu.open_descriptors();
    let mut vm = attach(qemu);
    vm.qemu.ask(r#"{"execute":"stop"}"#);
    let all = (MIB, (RAM_MIB - 1) * MIB);
    let before = vm.qemu.guest_memory(all.0, all.1);
    let word = usize::try_from(PATTERN.start - MIB).unwrap();
    assert_eq!(
        before[word..word + 4],
        u32::try_from(PATTERN.start / 4).unwrap().to_le_bytes()
    );
    let evicted = vm.store.evict_all(vm.layout.page_count());
    assert!(evicted >= (PATTERN.end - PATTERN.start) >> 12);
    assert_eq!(vm.layout.allocated_bytes().unwrap(), 0);

    let after = vm.qemu.guest_memory(all.0, all.1);
    assert!(
        before == after,
        "guest memory came back another than it was"
    );
    assert!(vm.store.missing.load(Ordering::Relaxed) >= evicted - 256);

    // The firmware runs from the start again, on pages that are away.
    vm.store.evict_all(vm.layout.page_count());
    let missing = vm.store.missing.load(Ordering::Relaxed);
    vm.qemu.ask(r#"{"execute":"system_reset"}"#);
    vm.qemu.ask(r#"{"execute":"cont"}"#);
    wait_until("the firmware touches its memory", || {
        vm.store.missing.load(Ordering::Relaxed) >= missing + 20
    });
    assert!(vm.qemu.is_running());

    vm.store.bring_all_back();
    let counters = vm.reader.counters();
    assert_eq!(counters.strays.load(Ordering::Relaxed), 0);
    assert!(!vm.store.failed.load(Ordering::Relaxed));
    assert!(counters.moves.load(Ordering::Relaxed) >= 1);
    assert!(vm.reader.handed_on() > 0);
    let_go(&vm.vmm, &vm.layout, &vm.userfaultfd, vm.number).unwrap();
    vm.reader.stop();
    assert!(vm.qemu.is_running());
    let pattern = vm
        .qemu
        .guest_memory(PATTERN.start, PATTERN.end - PATTERN.start);
    let end = word + pattern.len();
    assert!(pattern == before[word..end], "content after letting go");
    // pmemsave has closed its file; the userfaultfd is closed too.
    assert_eq!(vm.qemu.open_descriptors(), descriptors);
}

#[test]
fn a_qemu_of_root_is_evicted_served_and_let_go_with_every_byte_in_place() {
    whole_way(&[]);
}

#[test]
fn a_qemu_without_privileges_is_taken_over_by_the_device() {
    whole_way(&["-runas", "nobody"]);
}

#[test]
fn a_qemu_under_its_seccomp_sandbox_is_taken_over() {
    whole_way(&[
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    ]);
}

#[test]
fn a_sandboxed_qemu_without_privileges_is_taken_over() {
    whole_way(&[
        "-runas",
        "nobody",
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=allow,spawn=deny,resourcecontrol=deny",
    ]);
}

#[test]
fn a_qemu_whose_ram_is_two_files_is_laid_out_end_to_end() {
    if !can_run() {
        return;
    }
    // Its vCPU does not run, so that it touches nothing on either side of the border.
    let mut qemu = Qemu::start(&[
        "-S",
        "-machine",
        "q35,accel=tcg",
        "-object",
        "memory-backend-memfd,id=a,size=64M,share=on",
        "-object",
        "memory-backend-memfd,id=b,size=64M,share=on",
        "-numa",
        "node,memdev=a",
        "-numa",
        "node,memdev=b",
    ]);
    let vmm = VmmProcess::open(qemu.pid()).unwrap();
    let layout = Arc::new(RamLayout::of_process(&vmm).unwrap());
    assert_eq!(layout.files().len(), 2);
    assert_eq!(layout.page_count(), RAM_MIB * 256);
    let taken = take_over(&vmm, &layout).unwrap();
    let userfaultfd = Arc::new(taken.userfaultfd);
    let store = Arc::new(Store::new(&userfaultfd, &layout));
    let reader = start_reader(&vmm, &userfaultfd, &layout, &store);
    let across = PageRange::new(PageNo(64 * 256 - 2), PageNo(64 * 256 + 2));
    let content: Vec<u8> = (0..4_u8).flat_map(|i| [i + 1; 4096]).collect();
    assert_eq!(store.place.install_run(across, &content).unwrap(), 4);
    let mut back = vec![0; content.len()];
    store.place.read(across, &mut back).unwrap();
    assert_eq!(back, content);
    assert_eq!(store.place.present_runs(across).unwrap(), [across]);
    assert_eq!(store.place.install_run(across, &content).unwrap(), 0);
    qemu.ask(r#"{"execute":"cont"}"#);
    assert!(qemu.is_running());
    reader.stop();
    let_go(&vmm, &layout, &userfaultfd, taken.number).unwrap();
}

#[test]
fn a_successor_takes_the_userfaultfd_again_and_serves_those_who_wait() {
    if !can_run() {
        return;
    }
    let mut vm = attach(Qemu::with_shared_ram(&[]));
    vm.qemu.ask(r#"{"execute":"stop"}"#);
    vm.store.evict_all(vm.layout.page_count());
    // The first process dies: its reader and its descriptors go.
    let stored = std::mem::take(&mut *vm.store.stored.lock().unwrap());
    vm.reader.stop();
    drop(vm.store);
    drop(vm.userfaultfd);
    let mut qemu = vm.qemu;
    let asking = std::thread::spawn(move || {
        let memory = qemu.guest_memory(PATTERN.start, MIB);
        (qemu, memory)
    });
    let again = VmmProcess::reopen(vm.vmm.identity()).unwrap();
    let recorded = RamLayout::of_process(&again).unwrap().recorded();
    let resumed = resume(&again, &recorded, vm.number).unwrap();
    let (layout, userfaultfd) = (Arc::new(resumed.layout), Arc::new(resumed.userfaultfd));
    let store = Arc::new(Store::new(&userfaultfd, &layout));
    *store.stored.lock().unwrap() = stored;
    let everything = PageNo(0).run(layout.page_count());
    store.place.wake(everything).unwrap();
    let reader = start_reader(&again, &userfaultfd, &layout, &store);
    let (mut qemu, memory) = asking.join().unwrap();
    let expected: Vec<u8> = (PATTERN.start / 4..(PATTERN.start + MIB) / 4)
        .flat_map(|word| u32::try_from(word).unwrap().to_le_bytes())
        .collect();
    assert!(memory == expected);
    assert!(matches!(
        resume(&again, &recorded, 0),
        Err(TakeOverError::NotOurs { .. })
    ));
    store.bring_all_back();
    reader.stop();
    let_go(&again, &layout, &userfaultfd, vm.number).unwrap();
    qemu.ask(r#"{"execute":"cont"}"#);
    assert!(qemu.is_running());
}

#[test]
fn a_successor_finds_the_pages_as_they_were_though_qemu_has_more_ram_by_then() {
    if !can_run() {
        return;
    }
    let mut vm = attach(Qemu::with_shared_ram(&[]));
    let recorded = vm.layout.recorded();
    assert_eq!(hazards::check(&vm.vmm, &vm.layout, &[]).unwrap(), []);
    let more = r#"{"execute":"object-add","arguments":{"qom-type":"memory-backend-memfd","id":"more","size":67108864,"share":true}}"#;
    vm.qemu.ask(more);
    let looked_for = RamLayout::of_process(&vm.vmm).unwrap();
    assert_eq!(looked_for.files().len(), 2);
    let layout = Arc::new(RamLayout::of_recorded(&vm.vmm, &recorded).unwrap());
    assert_eq!(layout.recorded(), recorded);
    assert_eq!(layout.page_count(), RAM_MIB * 256);
    assert_eq!(hazards::check(&vm.vmm, &layout, &[]).unwrap(), []);
    vm.reader.stop();
    let_go(&vm.vmm, &layout, &vm.userfaultfd, vm.number).unwrap();

    // Were the other backend ours, too, its end would show.
    vm.qemu
        .ask(r#"{"execute":"object-del","arguments":{"id":"more"}}"#);
    // QEMU unmaps it when its other threads have passed by.
    while looked_for.maps_change(&vm.vmm).unwrap().is_none() {
        std::thread::yield_now();
    }
    let bars = hazards::check(&vm.vmm, &looked_for, &[]).unwrap();
    let gone = bars.iter().any(|bar| {
        matches!(
            bar,
            EvictionBlocker::MapsChanged {
                change: MapsChange::Gone(_)
            }
        )
    });
    assert!(gone, "{bars:?}");
    let left = RamLayout::of_recorded(&vm.vmm, &looked_for.recorded()).unwrap();
    assert_eq!(left.recorded().mappings, recorded.mappings);
}

#[test]
fn ram_plugged_in_is_news_until_the_layout_has_it_and_unplugged_ram_until_it_has_not() {
    if !can_run() {
        return;
    }
    let mut vm = attach(Qemu::with_shared_ram(&[]));
    let mut strangers = Strangers::default();
    let news = vm
        .layout
        .news(&vm.vmm, &vm.userfaultfd, &mut strangers)
        .unwrap();
    assert!(news.gone.is_empty() && news.new.unwrap().is_empty());
    let more = r#"{"execute":"object-add","arguments":{"qom-type":"memory-backend-memfd","id":"more","size":67108864,"share":true}}"#;
    vm.qemu.ask(more);
    let news = vm
        .layout
        .news(&vm.vmm, &vm.userfaultfd, &mut strangers)
        .unwrap();
    let new = &news.new.unwrap()[0];
    let room = vm.layout.room_for(new.page_count());
    let grown = vm.layout.with(new, room).unwrap();
    assert_eq!(grown.len_bytes(), (RAM_MIB + 64) * MIB);
    watch(&vm.userfaultfd, &grown).unwrap();
    let live = Arc::new(LiveLayout::new(grown));
    let place = VmPlace::new(Arc::clone(&vm.userfaultfd), Arc::clone(&live));
    let pages = live.look().file(new.key()).unwrap().pages();
    let installed = place.install(pages.start, &[7; 4096]).unwrap();
    assert_eq!(installed, Installed::Installed);
    let grown = live.now();
    let news = grown
        .news(&vm.vmm, &vm.userfaultfd, &mut strangers)
        .unwrap();
    assert!(news.gone.is_empty() && news.new.unwrap().is_empty());
    vm.qemu
        .ask(r#"{"execute":"object-del","arguments":{"id":"more"}}"#);
    let mut news = grown
        .news(&vm.vmm, &vm.userfaultfd, &mut strangers)
        .unwrap();
    while news.gone.is_empty() {
        std::thread::yield_now();
        news = grown
            .news(&vm.vmm, &vm.userfaultfd, &mut strangers)
            .unwrap();
    }
    assert_eq!(news.gone, [new.key()]);
    live.set(grown.without(new.key()));
    let refused = place.install(pages.start, &[7; 4096]);
    assert!(matches!(refused, Err(PlaceError::Kernel { .. })));
    assert_eq!(live.look().recorded(), vm.layout.recorded());
    vm.reader.stop();
    let_go(&vm.vmm, &vm.layout, &vm.userfaultfd, vm.number).unwrap();
}

#[test]
fn a_vm_is_let_go_though_one_of_its_mappings_is_gone() {
    if !can_run() {
        return;
    }
    let mut qemu = Qemu::with_shared_ram(&[]);
    let descriptors = qemu.open_descriptors();
    let vmm = VmmProcess::open(qemu.pid()).unwrap();
    let layout = RamLayout::of_process(&vmm).unwrap();
    let taken = take_over(&vmm, &layout).unwrap();
    // As if it had had a page more, before the rest, that was unplugged.
    let ram = layout.files()[0].file().as_fd().try_clone_to_owned();
    let unplugged = RamMapping {
        hva: Hva(PAGE_BYTES),
        len_bytes: PAGE_BYTES,
        file: 0,
        file_offset: 0,
    };
    let mut mappings: Vec<_> = layout.mappings().copied().collect();
    mappings.iter_mut().for_each(|mapping| mapping.file = 1);
    mappings.insert(0, unplugged);
    let files = vec![
        GuestFile::new_memfd("unplugged", PAGE_BYTES).unwrap(),
        ram.unwrap().into(),
    ];
    let wider = RamLayout::from_mappings(files, &mappings).unwrap();
    let_go(&vmm, &wider, &taken.userfaultfd, taken.number).unwrap();
    assert_eq!(qemu.open_descriptors(), descriptors);
    // Our descriptor is open still, and yet nothing is registered with it.
    let again = take_over(&vmm, &layout).unwrap();
    drop(taken.userfaultfd);
    let_go(&vmm, &layout, &again.userfaultfd, again.number).unwrap();
    // Once more: the descriptor is closed already.
    let_go(&vmm, &layout, &again.userfaultfd, again.number).unwrap();
    assert!(qemu.is_running());
    qemu.kill();
    let_go(&vmm, &layout, &again.userfaultfd, again.number).unwrap();
}

#[test]
fn a_take_over_cut_off_at_any_point_is_abandoned_without_a_trace() {
    if !can_run() {
        return;
    }
    let mut qemu = Qemu::with_shared_ram(&[]);
    let descriptors = qemu.open_descriptors();
    let vmm = VmmProcess::open(qemu.pid()).unwrap();
    let layout = RamLayout::of_process(&vmm).unwrap();
    assert_eq!(find_inside(&vmm).unwrap(), None);
    let create = || {
        let ran = run_inside(vmm.fd(), |thread| thread.make_userfaultfd());
        let ran: Result<_, PtraceError> = ran;
        ran.unwrap().value
    };
    // Before the handshake.
    let number = create();
    assert_eq!(find_inside(&vmm).unwrap(), Some(number));
    assert!(matches!(
        resume(&vmm, &layout.recorded(), number),
        Err(TakeOverError::Uffd(UffdError::Kernel { .. }))
    ));
    abandon(&vmm, &layout, number).unwrap();
    assert_eq!(find_inside(&vmm).unwrap(), None);
    // Before anything is registered.
    let number = create();
    let ours = Userfaultfd::from(vmm.fd().take_descriptor(number).unwrap());
    ours.api(Features::WANTED).unwrap();
    drop(ours);
    assert_eq!(find_inside(&vmm).unwrap(), Some(number));
    abandon(&vmm, &layout, number).unwrap();
    // All registered; and once more, when the descriptor is closed already.
    let taken = take_over(&vmm, &layout).unwrap();
    assert_eq!(find_inside(&vmm).unwrap(), Some(taken.number));
    drop(taken.userfaultfd);
    abandon(&vmm, &layout, taken.number).unwrap();
    abandon(&vmm, &layout, taken.number).unwrap();
    // Nor is a descriptor closed that is none of ours.
    abandon(&vmm, &layout, 0).unwrap();
    assert_eq!(qemu.open_descriptors(), descriptors);
    assert!(qemu.is_running());
    qemu.kill();
    abandon(&vmm, &layout, taken.number).unwrap();
}

#[test]
fn a_qemu_killed_while_attached_is_reported_once_and_its_place_is_gone() {
    if !can_run() {
        return;
    }
    let mut vm = attach(Qemu::with_shared_ram(&[]));
    vm.qemu.kill();
    let mut gone = vm.store.gone.lock().unwrap();
    while !*gone {
        gone = vm.store.went.wait(gone).unwrap();
    }
    drop(gone);
    vm.store.place.discard(PageNo(0).single()).unwrap();
    assert!(matches!(
        vm.store.place.install_zero(PageNo(0)),
        Err(PlaceError::Gone)
    ));
    assert!(matches!(
        VmmProcess::reopen(vm.vmm.identity()),
        Err(Refusal::NoSuchProcess { .. })
    ));
}

/// Our mapping of one file.
struct Own(FileKey, Arc<SharedMapping>);

impl DmaLook for Own {
    fn touched(
        &self,
        file: FileKey,
        pages: FileRange,
        marks: Marks,
        visit: &mut dyn FnMut(FilePage),
    ) -> Result<(), String> {
        assert_eq!(file, self.0);
        let start = Hva(self.1.address() as u64 + pages.start.byte_offset());
        let map = Pagemap::of_self().unwrap();
        map.visit(start, pages.len(), |position, entry| {
            if entry.is_present() {
                visit(pages.start.plus(position));
            }
        })
        .unwrap();
        if marks == Marks::Forget {
            let (at, bytes) = (pages.start.byte_offset(), pages.bytes());
            self.1.drop_translations(at, bytes).unwrap();
        }
        Ok(())
    }
}

#[test]
fn pages_touched_since_the_last_look_are_seen_and_those_by_dma_told_apart() {
    if !can_run() {
        return;
    }
    let mut vm = attach(Qemu::with_shared_ram(&[]));
    vm.qemu.ask(r#"{"execute":"stop"}"#);
    let file = &vm.layout.files()[0];
    let alias = SharedMapping::new(file.file().as_fd(), RAM_MIB * MIB).unwrap();
    let alias = Arc::new(alias);
    let own = Arc::new(Own(file.key(), Arc::clone(&alias)));
    let tracker = UnmapAndLook::new(&vm.vmm, live(&vm.layout), own).unwrap();
    vm.qemu.guest_memory(PATTERN.start, 8 * MIB);
    let sections: Vec<_> = (16..20).map(SectionNo).collect();
    let first = tracker.look_many(&sections).unwrap();
    assert!(first.iter().all(|t| t.cpu.len() == 512 && t.dma.is_empty()));

    vm.qemu.guest_memory(PATTERN.start + 2 * MIB, MIB);
    let mut byte = [0];
    alias.copy_from(PATTERN.start + 4 * MIB, &mut byte).unwrap();
    let then = tracker.look_many(&sections).unwrap();
    // Some pages linger in per-CPU batches of the kernel.
    assert!(then[0].cpu.len() < 128, "{:?}", then[0]);
    let read = PageSet::of_range(
        SectionNo(17),
        PageRange::covering(PATTERN.start + 2 * MIB, MIB).unwrap(),
    );
    let mut not_seen = read;
    not_seen.subtract(&then[1].cpu);
    assert!(not_seen.is_empty(), "{not_seen:?}");
    assert!(then[1].cpu.len() < 256 + 128);
    assert!(
        then[2]
            .dma
            .contains(PageNo((PATTERN.start + 4 * MIB) >> 12))
    );
    assert!(then[1].dma.is_empty() && then[3].dma.is_empty());
    let still = tracker.mapped(SectionNo(18)).unwrap();
    assert!(still.len() < 128, "{still:?}");
}

#[test]
fn sample_tells_of_the_pages_it_asks_about_and_takes_only_the_next_ones_out() {
    if !can_run() {
        return;
    }
    let mut vm = attach(Qemu::with_shared_ram(&[]));
    vm.qemu.ask(r#"{"execute":"stop"}"#);
    let tracker = UnmapAndLook::new(&vm.vmm, live(&vm.layout), Arc::new(NoDma)).unwrap();
    vm.qemu.guest_memory(PATTERN.start, 2 * MIB);
    let section = SectionNo(16);
    let whole = section.all_pages();
    let first = whole.start.run(256);
    let second = PageRange::new(first.end, whole.end);
    let set = |pages| PageSet::of_range(section, pages);
    let sample = |asked, next| {
        let look = Look {
            section,
            asked: set(asked),
            next: set(next),
        };
        let sampled = tracker.sample(&[look]).unwrap();
        (sampled.touched[0].cpu, sampled.unmapped_pages)
    };
    // All of it is mapped, of which half is asked about and half is taken out.
    assert_eq!(sample(second, first), (set(second), 256));
    let mapped = tracker.mapped(section).unwrap();
    assert_eq!(mapped.intersection(&set(second)), set(second));
    // Some pages linger in per-CPU batches of the kernel.
    assert!(mapped.intersection(&set(first)).len() < 128, "{mapped:?}");
    // Those that are used again are seen.
    let used = first.start.run(64);
    let at = used.start.byte_offset();
    vm.qemu.guest_memory(at, used.bytes());
    let (touched, _) = sample(first, second);
    assert_eq!(touched.intersection(&set(used)), set(used));
    assert!(touched.len() < 64 + 128, "{touched:?}");
    let mapped = tracker.mapped(section).unwrap();
    assert!(mapped.intersection(&set(second)).len() < 128, "{mapped:?}");
    // And the content is what it was.
    vm.qemu.guest_memory(PATTERN.start, 2 * MIB);
    assert!(!refault_cost().unwrap().is_zero());
}

#[test]
fn sample_of_whole_sections_misses_no_page_and_unmaps_all() {
    if !can_run() {
        return;
    }
    let mut vm = attach(Qemu::with_shared_ram(&[]));
    vm.qemu.ask(r#"{"execute":"stop"}"#);
    let sampled = UnmapAndLook::new(&vm.vmm, live(&vm.layout), Arc::new(NoDma)).unwrap();
    let tracker = WholeSections::new(sampled);
    vm.qemu.guest_memory(PATTERN.start, 2 * MIB);
    let section = SectionNo(16);
    // Whatever page is asked about.
    let look = Look {
        section,
        asked: PageSet::EMPTY,
        next: PageSet::EMPTY,
    };
    let sampled = tracker.sample(&[look]).unwrap();
    assert_eq!(sampled.touched[0].cpu.len(), 512);
    assert_eq!(sampled.unmapped_pages, 512);
    // Some pages linger in per-CPU batches of the kernel.
    assert!(tracker.mapped(section).unwrap().len() < 128);
    let used = section.all_pages().start.run(64);
    vm.qemu.guest_memory(used.start.byte_offset(), used.bytes());
    let touched = tracker.sample(&[look]).unwrap().touched[0].cpu;
    let used = PageSet::of_range(section, used);
    assert_eq!(touched.intersection(&used), used);
    assert!(touched.len() < 64 + 128, "{touched:?}");
}

#[test]
fn idle_pages_are_told_by_the_marks_of_the_kernel_and_nothing_is_unmapped() {
    if !can_run() {
        return;
    }
    let mut vm = attach(Qemu::with_shared_ram(&[]));
    vm.qemu.ask(r#"{"execute":"stop"}"#);
    vm.qemu.guest_memory(PATTERN.start, 4 * MIB);
    let section = SectionNo(16);
    let pages = section.all_pages();
    let piece = vm.layout.pieces(pages).next().unwrap();
    let frames = || {
        let mut frames = Vec::new();
        let map = Pagemap::of_process(vm.vmm.pid()).unwrap();
        map.visit(piece.hva, 512, |_, entry| frames.push(entry.frame()))
            .unwrap();
        frames
    };
    // A file stands in for the kernel's bitmap: a bit that was set stays so until it is cleared here.
    let bitmap = tempfile::NamedTempFile::new().unwrap();
    let last = frames().into_iter().flatten().max().unwrap();
    bitmap.as_file().set_len(last.0 / 8 + 8).unwrap();
    let use_page = |page: usize| {
        let frame = frames()[page].unwrap();
        let (byte, bit) = (frame.0 / 8, 1_u8 << (frame.0 % 8));
        let mut entry = [0];
        bitmap.as_file().read_exact_at(&mut entry, byte).unwrap();
        assert_ne!(entry[0] & bit, 0, "page {page} was not marked");
        entry[0] &= !bit;
        bitmap.as_file().write_all_at(&entry, byte).unwrap();
    };
    let whole = UnmapAndLook::new(&vm.vmm, live(&vm.layout), Arc::new(NoDma)).unwrap();
    let bits = IdleBitmap::at(bitmap.path()).unwrap();
    let tracker = IdlePages::new(whole, bits).unwrap();
    let set = |of: &[u64]| {
        let mut set = PageSet::EMPTY;
        of.iter()
            .for_each(|page| set.insert(pages.start.plus(*page)));
        set
    };
    let sample = |asked, next| {
        let look = Look {
            section,
            asked,
            next,
        };
        let sampled = tracker.sample(&[look]).unwrap();
        assert_eq!(sampled.unmapped_pages, 0);
        sampled.touched[0].cpu
    };
    let (one, other) = (set(&[0, 5, 77, 300, 511]), set(&[1, 5, 500]));
    assert_eq!(sample(one, one), one, "nothing was marked yet");
    use_page(77);
    use_page(511);
    assert_eq!(sample(one, other), set(&[77, 511]));
    use_page(1);
    assert_eq!(sample(other, one), set(&[1]));
    assert_eq!(tracker.mapped(section).unwrap().len(), 512);
    // What is to go is unmapped, and what is not mapped was not used.
    tracker.take_out(&[section]).unwrap();
    assert!(tracker.mapped(section).unwrap().len() < 128);
    assert!(sample(one, one).len() < one.len());
}

#[test]
fn a_vm_that_is_attached_is_busy_and_unharmed() {
    if !can_run() {
        return;
    }
    let mut vm = attach(Qemu::with_shared_ram(&[]));
    let descriptors = vm.qemu.open_descriptors();
    assert!(matches!(
        take_over(&vm.vmm, &vm.layout),
        Err(TakeOverError::Uffd(UffdError::Busy { .. }))
    ));
    assert_eq!(vm.qemu.open_descriptors(), descriptors);
    vm.store.evict_all(vm.layout.page_count());
    vm.qemu.guest_memory(PATTERN.start, MIB);
    assert!(vm.qemu.is_running());
}

fn refusal(qemu: &Qemu) -> Refusal {
    let vmm = VmmProcess::open(qemu.pid()).unwrap();
    RamLayout::of_process(&vmm).unwrap_err()
}

#[test]
fn a_process_that_is_no_vmm_is_refused() {
    let mut child = std::process::Command::new("sleep")
        .arg("1000")
        .spawn()
        .unwrap();
    let vmm = VmmProcess::open(child.id()).unwrap();
    let refused = RamLayout::of_process(&vmm);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(matches!(refused, Err(Refusal::NotAVmm { .. })));
}

#[test]
fn private_ram_is_refused() {
    if !can_run() {
        return;
    }
    let anonymous = Qemu::start(&["-machine", "q35,accel=tcg"]);
    assert!(matches!(refusal(&anonymous), Refusal::PrivateRam { .. }));
    let not_shared = Qemu::with_ram_object(
        &format!("memory-backend-memfd,id=ram,size={RAM_MIB}M,share=off"),
        &[],
    );
    assert!(matches!(refusal(&not_shared), Refusal::PrivateRam { .. }));
}

#[test]
fn ram_in_a_file_on_disk_is_refused() {
    if !can_run() {
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("ram");
    let object = format!(
        "memory-backend-file,id=ram,size={RAM_MIB}M,share=on,mem-path={}",
        path.display()
    );
    let on_disk = Qemu::with_ram_object(&object, &[]);
    let refused = refusal(&on_disk);
    let file = std::fs::File::open(&path).unwrap();
    let file = pagetide_sys::memory_file::GuestFile::from(std::os::fd::OwnedFd::from(file));
    if file.is_tmpfs().unwrap() {
        eprintln!("SKIPPED: the target directory is on tmpfs");
        return;
    }
    assert!(
        matches!(refused, Refusal::FileNotInMemory { .. }),
        "{refused}"
    );
}

#[test]
fn ram_in_huge_pages_is_laid_out_as_such() {
    if !can_run() {
        return;
    }
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    let free: u64 = free.map_or(0, |text| text.trim().parse().unwrap_or(0));
    if free < RAM_MIB / 2 {
        eprintln!("SKIPPED: {free} free huge pages, {} needed", RAM_MIB / 2);
        return;
    }
    let object = format!("memory-backend-memfd,id=ram,size={RAM_MIB}M,share=on,hugetlb=on");
    let huge = Qemu::with_ram_object(&object, &[]);
    let vmm = VmmProcess::open(huge.pid()).unwrap();
    let layout = RamLayout::of_process(&vmm).unwrap();
    assert_eq!(layout.huge_bytes(), RAM_MIB << 20);
    assert_eq!(layout.swappable_keys().count(), 0);
}

/// Path by which another process can open the RAM file of `qemu`.
fn ram_path(qemu: &Qemu) -> String {
    let dir = format!("/proc/{}/fd", qemu.pid());
    std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| {
            std::fs::read_link(path).is_ok_and(|t| t.to_string_lossy().contains("memory-backend"))
        })
        .unwrap()
        .display()
        .to_string()
}

#[test]
fn ram_that_another_process_maps_is_refused_by_name_and_bars_eviction() {
    if !can_run() {
        return;
    }
    let qemu = Qemu::with_shared_ram(&[]);
    let vmm = VmmProcess::open(qemu.pid()).unwrap();
    let layout = RamLayout::of_process(&vmm).unwrap();
    hazards::refuse_if_shared(&vmm, &layout, &[]).unwrap();
    let object = format!(
        "memory-backend-file,id=ram,size={RAM_MIB}M,share=on,mem-path={}",
        ram_path(&qemu)
    );
    let mut other = Qemu::with_ram_object(&object, &["-S"]);
    let refused = hazards::refuse_if_shared(&vmm, &layout, &[]).unwrap_err();
    let Refusal::SharedRam { other_pid, .. } = refused else {
        panic!("{refused}");
    };
    assert_eq!(other_pid, other.pid());
    let bars = hazards::check(&vmm, &layout, &[]).unwrap();
    assert!(matches!(
        bars.as_slice(),
        [EvictionBlocker::MappedByAnother { .. }]
    ));
    other.kill();
    hazards::refuse_if_shared(&vmm, &layout, &[]).unwrap();
}

#[test]
fn a_child_on_the_same_address_space_is_no_stranger() {
    if !can_run() {
        return;
    }
    let qemu = Qemu::with_shared_ram(&["-async-teardown"]);
    let vmm = VmmProcess::open(qemu.pid()).unwrap();
    let layout = RamLayout::of_process(&vmm).unwrap();
    hazards::refuse_if_shared(&vmm, &layout, &[]).unwrap();
}

fn bars(more: &[&str]) -> Vec<EvictionBlocker> {
    let qemu = Qemu::with_shared_ram(more);
    let vmm = VmmProcess::open(qemu.pid()).unwrap();
    let layout = RamLayout::of_process(&vmm).unwrap();
    hazards::check(&vmm, &layout, &[]).unwrap()
}

#[test]
fn a_file_open_for_direct_io_bars_eviction() {
    if !can_run() {
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = dir.path().join("disk");
    std::fs::File::create(&image).unwrap().set_len(MIB).unwrap();
    let drive = |cache: &str| {
        format!(
            "if=none,id=d,format=raw,cache={cache},file={}",
            image.display()
        )
    };
    assert_eq!(bars(&["-drive", &drive("writeback")]), []);
    let direct = bars(&["-drive", &drive("none")]);
    let named = direct.iter().any(
        |bar| matches!(bar, EvictionBlocker::DirectFile { path, .. } if path.ends_with("/disk")),
    );
    assert!(named, "{direct:?}");
}

#[test]
fn locked_memory_bars_eviction() {
    if !can_run() {
        return;
    }
    let locked = bars(&["-overcommit", "mem-lock=on"]);
    assert!(matches!(
        locked.as_slice(),
        [EvictionBlocker::Locked { .. }]
    ));
}
