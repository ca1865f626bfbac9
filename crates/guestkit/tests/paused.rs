// SPDX-License-Identifier: Apache-2.0
//! A VM that is paused while a process of ours is replaced, and then continues.
//!
//! QEMU before 9.1 does not notice that the back end of a paused VM goes away, and so continues without a
//! handshake (docs/operations.md, 'Upgrade'). What then must hold is that the log says so. Where QEMU does
//! notice, and where the process with the disk was not replaced, the disk must work.

use std::fs;
use std::path::{Path, PathBuf};

use pagetide_guest::wire::Progress;
use pagetide_guestkit::guest::Guest;
use pagetide_guestkit::product::is_listening;
use pagetide_guestkit::qemu::{Disk, Version};
use pagetide_guestkit::stage::Stage;
use pagetide_guestkit::steps::{DISK_BYTES, PATIENCE, let_go, squeeze, take_turn, with_disk, work};
use serde_json::json;

/// The first QEMU that notices.
const MENDED: Version = Version {
    major: 9,
    minor: 1,
    micro: 0,
};
const DEAD_DISK: &str = "the front end goes on without a handshake";

/// A squeezed guest with a disk; the disk's socket.
fn squeezed(stage: &mut Stage) -> (Guest, PathBuf) {
    let (socket, image) = stage.new_disk(DISK_BYTES).expect("an image");
    stage.devices().serve_disk(&socket, &image).expect("a disk");
    let spec = with_disk(Disk::VhostUser(socket.clone()));
    let mut guest = stage.boot(&spec).expect("a guest");
    guest.wait_for_work(PATIENCE).expect("work");
    squeeze(stage, &guest);
    (guest, socket)
}

fn tell(guest: &Guest, command: &str) {
    let mut qmp = guest.qmp().expect("a monitor");
    qmp.execute(command, &json!({})).expect("QEMU obeys");
}

fn disk_bytes(guest: &Guest) -> u64 {
    guest.progress().map_or(0, |p| p.disk_bytes_verified)
}

/// Waits until the new process serves the disk and QEMU has connected to it.
fn reconnected(stage: &Stage, socket: &Path) {
    let listening = || is_listening(socket);
    stage
        .until("the disk's socket open again", PATIENCE, listening)
        .expect("a disk");
    let connected = || Ok(stage.devices().device(socket)?["state"] == "connected");
    stage
        .until("QEMU at the disk's socket again", PATIENCE, connected)
        .expect("a front end");
}

#[test]
fn vm_paused_and_continued_works_on_its_disk() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let (mut guest, _socket) = squeezed(&mut stage);
    for _ in 0..2 {
        tell(&guest, "stop");
        tell(&guest, "cont");
        let goal = disk_bytes(&guest) + (8 << 20);
        guest
            .wait_for("disk work", PATIENCE, |p: &Progress| {
                p.disk_bytes_verified >= goal
            })
            .expect("disk work goes on");
    }
    let_go(&stage, &mut guest);
}

#[test]
fn daemon_replaced_while_the_vm_is_paused_disk_works_or_the_log_says_why_not() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let (mut guest, socket) = squeezed(&mut stage);
    tell(&guest, "stop");
    stage.product.kill();
    stage.product.run().expect("a successor");
    reconnected(&stage, &socket);
    let goal = disk_bytes(&guest) + (8 << 20);
    tell(&guest, "cont");
    let log = stage.folder().join("pagetide.log");
    let is_dead = || {
        fs::read_to_string(&log)
            .expect("the daemon's log")
            .contains(DEAD_DISK)
    };
    let goes_on_or_is_dead = || Ok(disk_bytes(&guest) >= goal || is_dead());
    stage
        .until(
            "disk work, or a word in the log",
            PATIENCE,
            goes_on_or_is_dead,
        )
        .expect("either");
    if is_dead() {
        let version = Version::installed().expect("QEMU");
        assert!(version < MENDED, "QEMU {version} should have noticed");
        // Memory is served as before; the disk is lost, and with it the guest.
        assert_eq!(stage.product.vms().expect("a list").len(), 1);
        guest.kill();
        return;
    }
    work(&mut guest, 64 << 20);
    let_go(&stage, &mut guest);
}

#[test]
fn daemon_alone_replaced_while_the_vm_is_paused_disk_in_the_dpu_process_works() {
    let Some((_turn, mut stage)) = take_turn(Stage::set_with_dpu_process) else {
        return;
    };
    let (mut guest, _socket) = squeezed(&mut stage);
    tell(&guest, "stop");
    stage.product.kill();
    stage.product.run().expect("a successor");
    tell(&guest, "cont");
    let goal = disk_bytes(&guest) + (16 << 20);
    guest
        .wait_for("disk work", PATIENCE, |p: &Progress| {
            p.disk_bytes_verified >= goal
        })
        .expect("disk work goes on");
    work(&mut guest, 64 << 20);
    let_go(&stage, &mut guest);
}
