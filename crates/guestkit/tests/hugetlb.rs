// SPDX-License-Identifier: Apache-2.0
//! VMs whose RAM is in huge pages of hugetlbfs: evicted and filled 2 MiB at a time, with DMA, over deaths of the
//! daemon, and while nobody else leaves them a huge page.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_guestkit::borrowed::HugePages;
use pagetide_guestkit::product::Product;
use pagetide_guestkit::qemu::{GuestSpec, Ram};
use pagetide_guestkit::stage::{RunFolder, Stage};
use pagetide_guestkit::stand_in::{RamPages, StandIn, StandInSpec};
use pagetide_guestkit::steps::{
    PATIENCE, VM, let_go, number, refused, small, take_turn, work, working_guest,
};
use pagetide_sys::mapping::SharedMapping;
use pagetide_sys::memory_file::GuestFile;

/// RAM that a stand-in fills.
const RAM_MIB: u64 = 48;
/// Huge pages of its RAM, with those of its disk.
const RAM_PAGES: u64 = RAM_MIB / 2 + 1;
const LIMIT_BYTES: u64 = 24 << 20;
const HUGE_BYTES: u64 = 2 << 20;
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Fields are dropped in this order.
struct Yard {
    product: Product,
    program: PathBuf,
    folder: RunFolder,
    _pages: HugePages,
}

impl Yard {
    /// `None` where it cannot be tried, after saying why.
    fn open(pages: u64) -> Option<Self> {
        let binary = Product::to_take_over()?;
        let pages = match HugePages::of_2_mib(pages) {
            Ok(pages) => pages,
            Err(error) => {
                eprintln!("SKIPPED: {error}");
                return None;
            }
        };
        let folder = RunFolder::new().expect("a folder on /dev/shm");
        let built = Path::new(env!("CARGO_BIN_EXE_stand-in"));
        let program = StandIn::program(built, folder.path()).expect("a program");
        let (state, log) = (folder.path().join("state"), folder.path().join("log"));
        let product = Product::start(&binary, &state, &log).expect("a daemon");
        Some(Self {
            product,
            program,
            folder,
            _pages: pages,
        })
    }

    fn stand_in(&self, disk: Option<PathBuf>) -> StandIn {
        let spec = StandInSpec {
            ram_mib: RAM_MIB,
            threads: 2,
            pages: RamPages::Hugetlb,
            disk,
        };
        StandIn::start(&self.program, &spec).expect("a stand-in")
    }

    fn disk(&self) -> PathBuf {
        let socket = self.folder.path().join("disk.sock");
        let image = self.folder.path().join("disk.raw");
        fs::File::create(&image)
            .and_then(|image| image.set_len(1 << 20))
            .expect("an image");
        let allowed = ["--allow-ram", "hugetlbfs"];
        let served = self.product.serve_disk_with(&socket, &image, &allowed);
        served.expect("a disk");
        socket
    }

    fn figure(&self, name: &str) -> u64 {
        number(&self.product.show(VM).expect("show"), name)
    }

    fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds(self) {
            let vm = self.product.show(VM);
            let log = self.product.log_tail();
            assert!(Instant::now() < deadline, "not {what}: {vm:?}\n{log}");
            thread::sleep(LOOK_AGAIN);
        }
    }

    /// Attached, and within its limit.
    fn squeeze(&self, vm: &StandIn) {
        self.product.attach(vm.pid(), VM).expect("attach");
        assert!(self.figure("hugetlb_bytes") >= RAM_MIB << 20);
        self.product.limit(VM, LIMIT_BYTES).expect("limit");
        self.until("within its limit", |yard| {
            yard.figure("resident_bytes") <= LIMIT_BYTES + HUGE_BYTES
        });
    }
}

#[test]
fn vm_in_hugetlb_pages_pages_by_sections_with_dma_and_is_sound() {
    let Some(yard) = Yard::open(RAM_PAGES + 2) else {
        return;
    };
    let socket = yard.disk();
    let mut vm = yard.stand_in(Some(socket));
    yard.squeeze(&vm);
    let evicted = yard.figure("evicted_pages");
    assert!(evicted >= (RAM_MIB << 20).saturating_sub(LIMIT_BYTES) / 4096 / 2);
    assert_eq!(evicted % 512, 0, "parts of huge pages went");
    for _ in 0..3 {
        vm.verify().expect("each page as it was");
    }
    assert!(yard.figure("evicted_pages") > evicted);
    yard.until("filled for devices", |yard| yard.figure("iopfs") > 0);
    assert_eq!(yard.figure("alias_faults"), 0);
    yard.product.detach(VM).expect("detach");
    vm.verify().expect("each page as it was");
    vm.kill().expect("an end");
}

#[test]
fn vm_in_hugetlb_pages_survives_the_deaths_of_its_daemon() {
    let Some(mut yard) = Yard::open(RAM_PAGES + 2) else {
        return;
    };
    let mut vm = yard.stand_in(None);
    yard.squeeze(&vm);
    for _ in 0..8 {
        yard.product.kill();
        yard.product.run().expect("another daemon");
        yard.until("served again", |yard| yard.product.show(VM).is_ok());
        vm.verify().expect("each page as it was");
    }
    yard.product.detach(VM).expect("detach");
    vm.verify().expect("each page as it was");
    vm.kill().expect("an end");
}

/// Memory of somebody else, who takes every huge page that is free.
fn take_all_free() -> (GuestFile, SharedMapping, u64) {
    let path = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    let free = fs::read_to_string(path).expect("a number");
    let free: u64 = free.trim().parse().expect("a number");
    let file = GuestFile::new_huge_memfd("other", free.max(1) * HUGE_BYTES).expect("a file");
    let taken = (0..free).take_while(|page| file.allocate(page * HUGE_BYTES, HUGE_BYTES).is_ok());
    let taken = taken.count() as u64;
    let mapping = SharedMapping::new(file.as_fd(), free.max(1) * HUGE_BYTES).expect("a mapping");
    (file, mapping, taken)
}

#[test]
fn vm_whose_huge_pages_were_taken_by_others_waits_and_reads_nothing_wrong() {
    let Some(yard) = Yard::open(RAM_PAGES) else {
        return;
    };
    let mut vm = yard.stand_in(None);
    yard.squeeze(&vm);
    let (file, mapping, taken) = take_all_free();
    assert!(taken > 0, "eviction freed no huge page");
    // Without a limit nothing of it may go for what it needs.
    let lifted = yard.product.client(["vm", "limit", VM, "none"]);
    lifted.expect("a client").success().expect("no limit");
    thread::scope(|scope| {
        let verified = scope.spawn(|| vm.verify());
        yard.until("waiting", |yard| yard.figure("huge_page_waits") > 0);
        assert!(!verified.is_finished(), "all of its RAM cannot be there");
        let held = yard.product.client(["vm", "detach", VM]).expect("a client");
        assert!(!held.status.success(), "detached without its memory");
        drop((mapping, file));
        verified
            .join()
            .expect("no panic")
            .expect("each page as it was");
    });
    yard.product.detach(VM).expect("detach");
    vm.verify().expect("each page as it was");
    vm.kill().expect("an end");
}

#[test]
fn vm_in_pages_of_a_gib_is_refused_with_the_reason() {
    if !Path::new("/sys/kernel/mm/hugepages/hugepages-1048576kB").exists() {
        eprintln!("SKIPPED: no huge pages of 1 GiB here");
        return;
    }
    let Some(yard) = Yard::open(1) else { return };
    let spec = StandInSpec {
        ram_mib: 0,
        threads: 0,
        pages: RamPages::Giant,
        disk: None,
    };
    let mut vm = StandIn::start(&yard.program, &spec).expect("a stand-in");
    let pid = vm.pid().to_string();
    let said = refused(&yard.product, &["attach", "--pid", &pid]);
    assert!(said.contains("1024 MiB each"), "{said}");
    vm.kill().expect("an end");
}

#[test]
fn guest_in_hugetlb_pages_works_on_within_its_limit() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let spec = GuestSpec {
        ram: Ram::HugetlbMemfd,
        ..small()
    };
    let _pages = match HugePages::of_2_mib((spec.ram_bytes >> 21) + 2) {
        Ok(pages) => pages,
        Err(error) => {
            eprintln!("SKIPPED: {error}");
            return;
        }
    };
    let mut guest = working_guest(&mut stage, &spec);
    stage.product.attach(guest.pid(), VM).expect("attach");
    let resident = number(&stage.product.show(VM).expect("show"), "resident_bytes");
    stage.product.limit(VM, resident * 3 / 4).expect("limit");
    stage
        .until("evicted from", PATIENCE, || {
            Ok(number(&stage.product.show(VM)?, "evicted_pages") > 512)
        })
        .expect("evicted from");
    work(&mut guest, 32 << 20);
    let_go(&stage, &mut guest);
}
