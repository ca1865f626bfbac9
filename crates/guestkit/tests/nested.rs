// SPDX-License-Identifier: Apache-2.0
//! Pagetide in a guest of Pagetide's: a VM whose RAM, rings and stored pages lie in the RAM of a guest that is itself
//! squeezed, with a device of the inner daemon doing DMA into it.
//!
//! ```text
//!   here    daemon ──── pages the RAM of ───► QEMU
//!                                              │ guest: daemon ──── pages the RAM of ───► stand-in, with a disk
//!                                              │            └── pool, on a tmpfs
//! ```
//! The [stand-in](pagetide_guestkit::stand_in) compares each page that it touches, and all of them when it is told
//! to; the guest's own work compares its memory meanwhile. Neither daemon knows of the other.

use std::path::{Path, PathBuf};

use pagetide_guest::params::Params;
use pagetide_guestkit::guest::Guest;
use pagetide_guestkit::image::{Addition, Extras};
use pagetide_guestkit::product::Product;
use pagetide_guestkit::programs::with_objects;
use pagetide_guestkit::qemu::GuestSpec;
use pagetide_guestkit::stage::Stage;
use pagetide_guestkit::steps::{
    PATIENCE, VM, let_go, number, small, squeeze, take_turn, working_guest,
};

/// Starts a daemon, and a stand-in of 24 MiB with a disk of its; takes it over with a limit of 16 MiB, has it compare
/// all of its pages again and again, and says how often it was sound, with what the daemon has done.
const SCRIPT: &str = r#"
b=/bin/busybox
$b mkdir -p /dev/shm
$b mount -t tmpfs tmpfs /dev/shm
cd /dev/shm
$b mkdir pt
say() { echo "nested: $*"; }
export PAGETIDE_API=/dev/shm/pt/api.sock
/bin/pagetide run --state-dir /dev/shm/pt --api $PAGETIDE_API 2>log >log &
until /bin/pagetide vm list >said 2>&1; do
    $b sleep 0.2
done
$b dd if=/dev/zero of=disk bs=1M count=1 2>said
/bin/pagetide dpu blk --socket /dev/shm/d.sock --image /dev/shm/disk >said 2>&1 || say "no disk: $($b cat said)"
$b mkfifo orders
/bin/qemu-stand-in 24 2 usual /dev/shm/d.sock <orders >answers &
vm=$!
exec 3>orders
until $b grep -q ready answers; do
    $b sleep 0.2
done
/bin/pagetide attach --pid $vm --name inner --limit 16M >said 2>&1 || say "refused: $($b cat said)"
figure() { $b sed -n "s/.*\"$1\": *\([0-9]*\).*/\1/p" said | $b head -n 1; }
rounds=0
while :; do
    echo verify >&3
    until [ "$($b grep -c sound answers)" -gt $rounds ]; do
        $b kill -0 $vm || { say "wrong: the stand-in has ended"; $b tail -n 5 log; exit; }
        $b sleep 0.2
    done
    rounds=$((rounds + 1))
    /bin/pagetide vm show inner --json >said 2>&1
    say "sound $rounds, $(figure evicted_pages) evicted, $(figure vcpu_faults) and $(figure iopfs) faults, \
$(figure alias_faults) past"
done
"#;

/// What the guest has said of its own VM, last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Said {
    rounds: u64,
    evicted: u64,
    faults: u64,
    device_faults: u64,
    past_leases: u64,
}

fn said(guest: &Guest) -> Option<Said> {
    let console = guest.console().expect("a console");
    let wrong = |line: &&str| line.contains("nested: wrong") || line.contains("nested: refused");
    let found = console.lines().find(wrong);
    assert!(found.is_none(), "{console}");
    let last = console
        .lines()
        .rev()
        .find_map(|line| line.split("nested: sound ").nth(1))?;
    let numbers = last.split(|c: char| !c.is_ascii_digit());
    let numbers: Vec<u64> = numbers.filter_map(|number| number.parse().ok()).collect();
    // The line may not be whole yet.
    let [rounds, evicted, faults, device_faults, past_leases] = numbers[..] else {
        return None;
    };
    Some(Said {
        rounds,
        evicted,
        faults,
        device_faults,
        past_leases,
    })
}

fn additions(binary: &Path, stand_in: &Path) -> Vec<Addition> {
    let mut all = with_objects(binary, "bin/pagetide").expect("the product's objects");
    let known: Vec<String> = all.iter().map(|it| it.name().to_owned()).collect();
    let more = with_objects(stand_in, "bin/qemu-stand-in").expect("the stand-in's objects");
    all.extend(
        more.into_iter()
            .filter(|it| !known.iter().any(|name| name == it.name())),
    );
    all.push(Addition::text("nested", SCRIPT));
    all
}

#[test]
fn vm_of_a_squeezed_guest_is_squeezed_itself_and_keeps_every_byte() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let binary = Product::binary().expect("a stage has one");
    let stand_in = PathBuf::from(env!("CARGO_BIN_EXE_stand-in"));
    let extras = Extras {
        suffix: "-nested",
        additions: &additions(&binary, &stand_in),
        ..Extras::default()
    };
    stage.add_to_image(&extras).expect("an image");
    let spec = GuestSpec {
        ram_bytes: 640 << 20,
        work: Params {
            mem_bytes: 32 << 20,
            ..small().work
        },
        ..small()
    };
    let mut guest = working_guest(&mut stage, &spec);
    let wait = |guest: &Guest, what: &str, holds: &dyn Fn(&Said) -> bool| {
        let found = stage.until(what, PATIENCE, || {
            Ok(said(guest).is_some_and(|it| holds(&it)))
        });
        found.unwrap_or_else(|error| panic!("{error}\n{}", guest.log_tails()));
        said(guest).expect("it was said")
    };
    wait(&guest, "the inner VM is there", &|it| it.rounds > 0);
    squeeze(&stage, &guest);
    let before = said(&guest).expect("it was said");
    let faults_before = number(&stage.product.show(VM).expect("show"), "vcpu_faults");
    // What the inner daemon fills then, it fills into memory of which half is away, and reads out of such memory.
    let after = wait(&guest, "three more sound rounds", &|it| {
        it.rounds >= before.rounds + 3
    });
    assert!(after.evicted > before.evicted, "{before:?} {after:?}");
    assert!(after.faults > before.faults, "{before:?} {after:?}");
    assert!(
        after.device_faults > 0 && after.past_leases == 0,
        "{after:?}"
    );
    let vm = stage.product.show(VM).expect("show");
    assert!(number(&vm, "vcpu_faults") > faults_before, "{vm}");
    let_go(&stage, &mut guest);
}
