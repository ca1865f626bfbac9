// SPDX-License-Identifier: Apache-2.0
//! A state directory with too little room: said in words, never by a signal, and the guest is whole.

use pagetide_guestkit::stage::Stage;
use pagetide_guestkit::steps::{
    PATIENCE, VM, attach_refused, limit_to_half, number, small, sound_end, take_turn, work,
    working_guest,
};

#[test]
fn tmpfs_without_room_for_the_words_no_attach_and_the_vm_is_unharmed() {
    let Some((_turn, mut stage)) = take_turn(|| Stage::set_on_tmpfs_of(256 << 10)) else {
        return;
    };
    let mut guest = working_guest(&mut stage, &small());
    attach_refused(&stage.product, &mut guest, "tmpfs");
    let list = stage.product.client(["vm", "list", "--json"]);
    let list = list.and_then(|answer| answer.json()).expect("it lives");
    assert_eq!(list["vms"].as_array().map(Vec::len), Some(0), "{list}");
    sound_end(&mut guest);
}

#[test]
fn tmpfs_that_fills_up_ends_eviction_with_a_word_and_the_guest_verifies_all() {
    let Some((_turn, mut stage)) = take_turn(|| Stage::set_on_tmpfs_of(4 << 20)) else {
        return;
    };
    let mut guest = working_guest(&mut stage, &small());
    stage.product.attach(guest.pid(), VM).expect("attach");
    let limit = limit_to_half(&stage, &guest);
    let full = || {
        let blockers = stage.product.show(VM)?["eviction_blockers"].to_string();
        Ok(blockers.contains("full"))
    };
    stage
        .until("the pool's being full told", PATIENCE, full)
        .expect("told");
    work(&mut guest, 200 << 20);
    let vm = stage.product.show(VM).expect("show");
    assert!(number(&vm, "evicted_pages") > 0, "{vm}");
    assert!(number(&vm, "pool_bytes") <= 4 << 20, "{vm}");
    assert!(number(&vm, "resident_bytes") > limit, "{vm}");
    assert_eq!(number(&vm, "alias_faults"), 0, "{vm}");
    stage.product.detach(VM).expect("detach");
    sound_end(&mut guest);
}
