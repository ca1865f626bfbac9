// SPDX-License-Identifier: Apache-2.0
//! Kernel swap: a VM in its reach is refused, and there is a way to be out of it on any host.

use pagetide_guestkit::borrowed::{Tmpfs, ZramSwap};
use pagetide_guestkit::qemu::{GuestSpec, Ram};
use pagetide_guestkit::stage::Stage;
use pagetide_guestkit::steps::{
    PATIENCE, VM, attach_refused, let_go, number, small, squeeze, take_turn, work, working_guest,
};

#[test]
fn guest_with_ram_on_a_tmpfs_that_never_swaps_squeezed_verifies_all() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let tmpfs = match Tmpfs::mount(&stage.folder().join("ram"), "noswap,mode=0700") {
        Ok(tmpfs) => tmpfs,
        Err(error) => {
            eprintln!("SKIPPED: {error}");
            return;
        }
    };
    let spec = GuestSpec {
        ram: Ram::SharedFile(tmpfs.path().to_owned()),
        ..small()
    };
    let mut guest = working_guest(&mut stage, &spec);
    squeeze(&stage, &guest);
    work(&mut guest, 200 << 20);
    let vm = stage.product.show(VM).expect("show");
    assert!(number(&vm, "vcpu_faults") > 0, "{vm}");
    let_go(&stage, &mut guest);
}

#[test]
fn swap_switched_on_bars_and_refuses_a_vm_in_its_reach_and_serves_one_that_is_not() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let mut guest = working_guest(&mut stage, &small());
    squeeze(&stage, &guest);
    let swap = match ZramSwap::of_bytes(64 << 20) {
        Ok(swap) => swap,
        Err(error) => {
            eprintln!("SKIPPED: {error}");
            return;
        }
    };
    let barred = || {
        let blockers = stage.product.show(VM)?["eviction_blockers"].to_string();
        Ok(blockers.contains("swap is on"))
    };
    stage
        .until("eviction barred by swap", PATIENCE, barred)
        .expect("barred");
    work(&mut guest, 32 << 20);
    stage.product.detach(VM).expect("detach");
    attach_refused(&stage.product, &mut guest, "swap is on");
    drop(guest);

    // Started with swap on, guests of this kit are out of its reach.
    let mut guest = working_guest(&mut stage, &small());
    squeeze(&stage, &guest);
    work(&mut guest, 100 << 20);
    drop(swap);
    let_go(&stage, &mut guest);
}
