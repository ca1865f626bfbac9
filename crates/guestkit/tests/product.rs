// SPDX-License-Identifier: Apache-2.0
//! The product with real guests: each test boots stock QEMU and asks the guest whether all is well.

use pagetide_guest::wire::Progress;
use pagetide_guestkit::product::is_listening;
use pagetide_guestkit::qemu::{Disk, GuestSpec};
use pagetide_guestkit::report::Report;
use pagetide_guestkit::stage::Stage;
use pagetide_guestkit::steps::{
    DISK_BYTES, PATIENCE, VM, let_go, number, small, sound_end, squeeze, take_turn, with_disk,
    work, working_guest,
};
use serde_json::{Value, json};

#[test]
fn guest_squeezed_to_half_daemon_killed_and_restarted_verifies_all() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let mut guest = stage.boot(&small()).expect("a guest");
    guest.wait_for_work(PATIENCE).expect("work");
    let limit = squeeze(&stage, &guest);
    work(&mut guest, 200 << 20);
    stage.product.kill();
    stage.product.run().expect("a successor");
    work(&mut guest, 200 << 20);
    assert!(guest.resident_bytes().expect("resident") <= Report::ceiling_bytes(limit));
    let vm = stage.product.show("vm").expect("show");
    assert_eq!(number(&vm, "restarts"), 1, "{vm}");
    assert!(number(&vm, "vcpu_faults") > 0, "{vm}");
    let_go(&stage, &mut guest);
    assert!(stage.product.stop().expect("an end").success());
}

#[test]
fn guest_with_disk_squeezed_daemon_killed_in_the_middle_verifies_all() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let (socket, image) = stage.new_disk(DISK_BYTES).expect("an image");
    stage.product.serve_disk(&socket, &image).expect("a disk");
    let mut guest = stage
        .boot(&with_disk(Disk::VhostUser(socket.clone())))
        .expect("a guest");
    guest.wait_for_work(PATIENCE).expect("work");
    squeeze(&stage, &guest);
    work(&mut guest, 200 << 20);
    stage.product.kill();
    stage.product.run().expect("a successor");
    let listening = || is_listening(&socket);
    stage
        .until("the disk's socket open again", PATIENCE, listening)
        .expect("a disk");
    let before = guest.progress().expect("reports").disk_bytes_verified;
    let more = |p: &Progress| p.disk_bytes_verified > before + (64 << 20);
    guest
        .wait_for("disk work after the restart", PATIENCE, more)
        .expect("work goes on");
    let_go(&stage, &mut guest);
}

#[test]
fn daemon_told_to_end_detaches_and_the_guest_verifies_all() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let mut guest = stage.boot(&small()).expect("a guest");
    guest.wait_for_work(PATIENCE).expect("work");
    squeeze(&stage, &guest);
    assert!(stage.product.stop().expect("an end").success());
    sound_end(&mut guest);
}

#[test]
fn qemu_not_root_and_sandboxed_is_taken_over_and_verifies_all() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let sandbox = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
    let spec = GuestSpec {
        // `-runas` itself is what elevateprivileges=deny forbids.
        extra: vec![
            "-sandbox".to_owned(),
            sandbox.replace("elevateprivileges=deny,", ""),
        ],
        run_as: Some("nobody".to_owned()),
        ..small()
    };
    let mut guest = stage.boot(&spec).expect("a guest");
    guest.wait_for_work(PATIENCE).expect("work");
    squeeze(&stage, &guest);
    work(&mut guest, 100 << 20);
    let_go(&stage, &mut guest);
}

#[test]
fn qemu_killed_while_attached_is_dropped_and_the_daemon_lives_on() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let mut guest = stage.boot(&small()).expect("a guest");
    guest.wait_for_work(PATIENCE).expect("work");
    squeeze(&stage, &guest);
    guest.kill();
    let gone = || Ok(!stage.product.client(["vm", "show", "vm"])?.status.success());
    stage
        .until("the dead VM dropped", PATIENCE, gone)
        .expect("dropped");
    stage
        .product
        .client(["vm", "list"])
        .expect("a client")
        .success()
        .expect("it lives");
}

#[test]
fn vmm_with_a_direct_io_image_is_served_but_not_evicted_and_says_so() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let (_socket, image) = stage.new_disk(DISK_BYTES).expect("an image");
    let mut guest = stage
        .boot(&with_disk(Disk::Image(image, ",cache=none")))
        .expect("a guest");
    guest.wait_for_work(PATIENCE).expect("work");
    let resident = guest.resident_bytes().expect("resident");
    stage.product.attach(guest.pid(), "vm").expect("attach");
    stage.product.limit("vm", resident / 2).expect("limit");
    work(&mut guest, 200 << 20);
    let vm = stage.product.show("vm").expect("show");
    assert!(
        vm["eviction_blockers"]
            .as_array()
            .is_some_and(|blockers| !blockers.is_empty()),
        "{vm}"
    );
    assert_eq!(number(&vm, "evicted_pages"), 0, "{vm}");
    let_go(&stage, &mut guest);
}

#[test]
fn direct_io_file_that_the_vmm_opens_later_bars_eviction_until_it_is_closed() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let (_socket, image) = stage.new_disk(DISK_BYTES).expect("an image");
    let mut guest = working_guest(&mut stage, &small());
    squeeze(&stage, &guest);
    // Eviction may rest for other reasons for a while, which are not what this is about.
    let barred = |vm: &Value| vm["eviction_blockers"].to_string().contains("direct I/O");
    let before = stage.product.show(VM).expect("show");
    assert!(!barred(&before), "{before}");
    let mut qmp = guest.qmp().expect("QMP");
    let node = json!({
        "driver": "file", "node-name": "direct", "filename": image, "cache": {"direct": true},
    });
    qmp.execute("blockdev-add", &node).expect("blockdev-add");
    stage
        .until("eviction barred", PATIENCE, || {
            Ok(barred(&stage.product.show(VM)?))
        })
        .expect("barred");
    let evicted = number(&stage.product.show(VM).expect("show"), "evicted_pages");
    work(&mut guest, 100 << 20);
    let vm = stage.product.show(VM).expect("show");
    assert!(barred(&vm), "{vm}");
    assert_eq!(number(&vm, "evicted_pages"), evicted, "{vm}");
    qmp.execute("blockdev-del", &json!({"node-name": "direct"}))
        .expect("blockdev-del");
    stage
        .until("eviction again", PATIENCE, || {
            let vm = stage.product.show(VM)?;
            Ok(!barred(&vm) && number(&vm, "evicted_pages") > evicted)
        })
        .expect("evicting");
    let_go(&stage, &mut guest);
}
