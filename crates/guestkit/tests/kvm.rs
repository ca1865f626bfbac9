// SPDX-License-Identifier: Apache-2.0
//! Guests under KVM, also where it has no hardware behind it: faults, eviction, the daemon's deaths.
//!
//! The guest is [bare](pagetide_guestkit::bare): it has no operating system, checks each page it touches,
//! and sweeps through its cold ones. What it says is its own; what is in the file of its RAM in the end is
//! compared from outside, each byte.

use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pagetide_guestkit::bare::{BareError, BareGuest, BareSpec, Counted, PAGE_BYTES};
use pagetide_guestkit::product::Product;
use pagetide_guestkit::qemu::Accel;
use pagetide_guestkit::report::Report;
use pagetide_guestkit::stage::RunFolder;
use pagetide_guestkit::steps::number;
use serde_json::Value;

const VM: &str = "vm";
/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(120);
/// Deaths of the daemon in one life of the guest.
const KILLS: u64 = 4;
/// What the guest does between two deaths, at least.
const WORK: Counted = Counted {
    touched: 2_000,
    swept: 100,
};

static TURN: Mutex<()> = Mutex::new(());

/// A guest, a daemon, and the turn to have them. Dropped in this order.
struct Scene {
    guest: BareGuest,
    product: Product,
    _folder: RunFolder,
    _turn: MutexGuard<'static, ()>,
}

fn spec(accel: Accel) -> BareSpec {
    BareSpec {
        ram_bytes: 64 << 20,
        hot_permille: 200,
        sweep_every: 16,
        accel,
    }
}

impl Scene {
    /// `None` where the guest or the product cannot be tried, after saying why.
    fn set() -> Option<Self> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let binary = Product::to_take_over()?;
        let folder = RunFolder::new().expect("a folder on /dev/shm");
        let guest = started(&spec(Accel::Kvm), &folder)?;
        let (state, log) = (folder.path().join("state"), folder.path().join("log"));
        let product = Product::start(&binary, &state, &log).unwrap_or_else(|e| panic!("{e}"));
        Some(Self {
            guest,
            product,
            _folder: folder,
            _turn: turn,
        })
    }

    fn show(&self) -> Value {
        self.product.show(VM).expect("show")
    }

    fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = std::time::Instant::now() + PATIENCE;
        while !holds() {
            assert!(
                std::time::Instant::now() < deadline,
                "{what} is not so after {PATIENCE:?}:\n{}",
                self.product.log_tail()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Attaches the guest and limits it to half of what is resident: to more than its hot part.
    fn squeeze(&self) {
        self.product.attach(self.guest.pid(), VM).expect("attach");
        let limit = self.guest.resident_bytes().expect("resident") / 2;
        self.product.limit(VM, limit).expect("limit");
        let ceiling = Report::ceiling_bytes(limit);
        self.until("resident below the limit", || {
            self.guest.resident_bytes().expect("resident") <= ceiling
        });
    }

    fn work(&mut self) {
        let before = self.guest.count().expect("it works");
        self.guest.wait_for_more(before, WORK).expect("it goes on");
    }
}

/// `None` where it cannot be, after saying why.
fn started(spec: &BareSpec, folder: &RunFolder) -> Option<BareGuest> {
    match BareGuest::start(spec, &folder.path().join("guest")) {
        Ok(guest) => Some(guest),
        Err(BareError::Unable(reason)) => {
            eprintln!("SKIPPED: {reason}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn guest_under_kvm_squeezed_while_daemons_die_reads_no_wrong_word() {
    let Some(mut scene) = Scene::set() else {
        return;
    };
    scene.guest.compare_all().expect("right from the start");
    scene.squeeze();
    scene.work();
    for death in 1..=KILLS {
        let before = scene.show();
        scene.product.kill();
        scene.product.run().expect("a successor");
        let vm = scene.show();
        assert_eq!(number(&vm, "restarts"), death, "{vm}");
        // The sweep has pages brought back, and others evicted for them, by this daemon, too.
        scene.until("faults and eviction after the restart", || {
            let vm = scene.show();
            ["vcpu_faults", "evicted_pages"]
                .iter()
                .all(|name| number(&vm, name) > number(&before, name))
        });
        scene.work();
    }
    let pages = scene.guest.verify().expect("sound under the limit");
    assert_eq!(pages, u64::from(scene.guest.pages()));
    let vm = scene.show();
    assert!(number(&vm, "vcpu_faults") > 0, "{vm}");
    assert!(number(&vm, "evicted_pages") > 0, "{vm}");
    assert_eq!(number(&vm, "alias_faults"), 0, "{vm}");
    scene.product.detach(VM).expect("detach");
    scene.guest.compare_all().expect("each byte is right");
    scene.work();
}

#[test]
fn guest_under_kvm_killed_while_squeezed_leaves_nothing() {
    let Some(mut scene) = Scene::set() else {
        return;
    };
    scene.squeeze();
    scene.work();
    scene.guest.kill();
    scene.until("the VM is forgotten", || {
        scene.product.vms().expect("a list").is_empty()
    });
    scene.product.released().expect("it holds nothing of it");
}

/// Writes into the file of its RAM, behind its back.
fn overwrite(guest: &BareGuest, offset: u64, bytes: &[u8]) {
    let path = guest.ram_file().expect("a file");
    let file = std::fs::File::options().write(true).open(path);
    file.and_then(|file| file.write_all_at(bytes, offset))
        .expect("written");
}

fn read(guest: &BareGuest, offset: u64) -> [u8; PAGE_BYTES] {
    let mut bytes = [0; PAGE_BYTES];
    let file = std::fs::File::open(guest.ram_file().expect("a file"));
    file.and_then(|file| file.read_exact_at(&mut bytes, offset))
        .expect("read");
    bytes
}

#[test]
fn wrong_word_of_a_bare_guest_is_told_from_inside_and_from_outside() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = RunFolder::new().expect("a folder on /dev/shm");
    let spec = BareSpec {
        hot_permille: 1000,
        ..spec(Accel::Tcg)
    };
    let Some(mut guest) = started(&spec, &folder) else {
        return;
    };
    let places = guest.rest().expect("it rests");
    let earlier = read(&guest, places.page(0));
    guest.compare_all().expect("sound");
    // Between stamps of a page without noise the guest does not look.
    overwrite(&guest, places.page(2) + 8, &[1]);
    guest.verify().expect("it cannot know");
    let error = guest.compare_all().expect_err("a wrong byte");
    assert!(matches!(error, BareError::Wrong { page: 2, .. }), "{error}");
    overwrite(&guest, places.page(2) + 8, &[0]);

    // Content that it had once is wrong now.
    let before = guest.count().expect("it works");
    let more = Counted {
        touched: 100 * u64::from(guest.pages()),
        swept: 0,
    };
    guest.wait_for_more(before, more).expect("it goes on");
    guest.compare_all().expect("sound");
    guest.rest().expect("it rests");
    overwrite(&guest, places.page(0), &earlier);
    let error = guest.verify().expect_err("an old page");
    assert!(error.to_string().contains("'wrong 0 "), "{error}");
}
