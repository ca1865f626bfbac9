// SPDX-License-Identifier: Apache-2.0
//! A guest that reports free pages: what it gives up leaves memory and store, and reads zeros.

use pagetide_guest::params::Params;
use pagetide_guest::wire::{Command, Progress};
use pagetide_guestkit::guest::Guest;
use pagetide_guestkit::qemu::{Disk, GuestSpec};
use pagetide_guestkit::stage::Stage;
use pagetide_guestkit::steps::{
    DISK_BYTES, PATIENCE, VM, let_go, number, small, sound_end, squeeze, take_turn, with_disk,
    work, working_guest,
};
use serde_json::Value;

const MEMORY_BYTES: u64 = 160 << 20;

fn reporting_spec() -> GuestSpec {
    GuestSpec {
        free_page_reporting: true,
        work: Params {
            mem_bytes: MEMORY_BYTES,
            active_bytes: MEMORY_BYTES / 2,
            ..small().work
        },
        ..small()
    }
}

fn show(stage: &Stage) -> Value {
    stage.product.show(VM).expect("show")
}

/// Has the guest give or take memory, and waits until `bytes` of it are under work.
fn resize(guest: &mut Guest, command: Command, bytes: u64) {
    guest.send(command).expect("a command");
    let resized = |p: &Progress| p.memory_bytes == bytes;
    guest
        .wait_for("memory given or taken", PATIENCE, resized)
        .expect("resized");
}

/// Lets the guest look at all its memory once.
fn look_at_all(guest: &mut Guest) {
    let rounds = guest.progress().map_or(0, |p| p.memory_rounds);
    let goal = |p: &Progress| p.memory_rounds >= rounds + 2;
    guest
        .wait_for("memory looked at", PATIENCE, goal)
        .expect("looked at");
}

#[test]
fn memory_given_up_leaves_and_its_stored_copies_go_when_it_is_used_again() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let mut guest = working_guest(&mut stage, &reporting_spec());
    stage.product.attach(guest.pid(), VM).expect("attach");

    // Present pages: QEMU punches them behind our back.
    let before = guest.resident_bytes().expect("resident");
    resize(&mut guest, Command::Give, MEMORY_BYTES / 2);
    let fallen = || {
        let now = guest.resident_bytes().unwrap_or(u64::MAX);
        Ok(now + MEMORY_BYTES / 4 <= before)
    };
    stage
        .until("resident memory fallen", PATIENCE, fallen)
        .expect("free pages reported");
    resize(&mut guest, Command::Take, MEMORY_BYTES);
    let vm = show(&stage);
    assert!(number(&vm, "discarded_pages") >= 5_000, "{vm}");
    look_at_all(&mut guest);

    // Stored pages: their copies stay until the guest uses the pages again. What a client has had evicted comes
    // back for nothing else, and the guest gives up the half that it looks at seldom.
    let evicted = stage.product.reclaim(VM, MEMORY_BYTES).expect("reclaim");
    assert!(number(&evicted, "reclaimed_bytes") > 0, "{evicted}");
    resize(&mut guest, Command::Give, MEMORY_BYTES / 2);
    look_at_all(&mut guest);
    let stored_before = number(&show(&stage), "stored_pages");
    resize(&mut guest, Command::Take, MEMORY_BYTES);
    let vm = show(&stage);
    let stored = number(&vm, "stored_pages");
    assert!(
        stored + 1_000 <= stored_before,
        "{stored_before} before: {vm}"
    );
    look_at_all(&mut guest);
    let_go(&stage, &mut guest);
}

#[test]
fn guest_with_disk_that_gives_and_takes_memory_while_squeezed_verifies_all() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let (socket, image) = stage.new_disk(DISK_BYTES).expect("an image");
    stage.product.serve_disk(&socket, &image).expect("a disk");
    let spec = GuestSpec {
        free_page_reporting: true,
        ..with_disk(Disk::VhostUser(socket))
    };
    let mut guest = working_guest(&mut stage, &spec);
    squeeze(&stage, &guest);
    let bytes = spec.work.mem_bytes;
    for _ in 0..2 {
        resize(&mut guest, Command::Give, bytes / 2);
        work(&mut guest, 64 << 20);
        resize(&mut guest, Command::Take, bytes);
        work(&mut guest, 64 << 20);
    }
    // DMA into a page that the guest had given up counts as an alias fault here, and is none.
    stage.product.detach(VM).expect("detach");
    sound_end(&mut guest);
}
