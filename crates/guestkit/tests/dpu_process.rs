// SPDX-License-Identifier: Apache-2.0
//! The software DPU in a process of its own: the same guests, the same bytes, and either process
//! may die.

use pagetide_guest::wire::Progress;
use pagetide_guestkit::guest::Guest;
use pagetide_guestkit::product::is_listening;
use pagetide_guestkit::qemu::Disk;
use pagetide_guestkit::stage::Stage;
use pagetide_guestkit::steps::{
    DISK_BYTES, PATIENCE, VM, let_go, number, refused, squeeze, take_turn, with_disk, work,
};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A squeezed guest whose disk the DPU process serves; the disk's socket.
fn squeezed(stage: &mut Stage) -> (Guest, PathBuf) {
    let (socket, image) = stage.new_disk(DISK_BYTES).expect("an image");
    stage.devices().serve_disk(&socket, &image).expect("a disk");
    let spec = with_disk(Disk::VhostUser(socket.clone()));
    let mut guest = stage.boot(&spec).expect("a guest");
    guest.wait_for_work(PATIENCE).expect("work");
    squeeze(stage, &guest);
    (guest, socket)
}

/// Waits until so much more of the disk has been compared.
fn disk_work(guest: &mut Guest, bytes: u64) {
    let goal = guest.progress().map_or(0, |p| p.disk_bytes_verified) + bytes;
    guest
        .wait_for("disk work", PATIENCE, |p: &Progress| {
            p.disk_bytes_verified >= goal
        })
        .expect("disk work goes on");
}

fn device(stage: &Stage, socket: &Path) -> Value {
    stage.devices().device(socket).expect("the device")
}

#[test]
fn guest_with_its_disk_in_a_dpu_process_is_squeezed_and_verifies_all() {
    let Some((_turn, mut stage)) = take_turn(Stage::set_with_dpu_process) else {
        return;
    };
    let (mut guest, socket) = squeezed(&mut stage);
    work(&mut guest, 300 << 20);
    disk_work(&mut guest, 32 << 20);
    let disk = device(&stage, &socket);
    assert!(number(&disk, "iopfs") > 0, "{disk}");
    assert!(number(&disk, "wired_bytes") > 0, "{disk}");
    let vm = stage.product.show(VM).expect("show");
    assert!(number(&vm, "iopfs") > 0, "{vm}");
    assert!(number(&vm, "evicted_pages") > 0, "{vm}");
    assert_eq!(number(&vm, "wired_bytes"), number(&disk, "wired_bytes"));
    let_go(&stage, &mut guest);
    assert!(stage.product.stop().expect("an end").success());
    let dpu = stage.dpu.as_mut().expect("a DPU process");
    assert!(dpu.stop().expect("an end").success());
}

#[test]
fn dpu_process_killed_in_the_middle_is_replaced_and_no_request_is_lost() {
    let Some((_turn, mut stage)) = take_turn(Stage::set_with_dpu_process) else {
        return;
    };
    let (mut guest, socket) = squeezed(&mut stage);
    for _ in 0..2 {
        disk_work(&mut guest, 8 << 20);
        stage.dpu.as_mut().expect("a DPU process").kill();
        let barred = || {
            let vm = stage.product.show(VM)?;
            Ok(vm["eviction_blockers"].to_string().contains("DPU"))
        };
        stage
            .until("eviction to rest without the DPU", PATIENCE, barred)
            .expect("a bar");
        let dpu = stage.dpu.as_mut().expect("a DPU process");
        dpu.run().expect("a successor");
        let listening = || is_listening(&socket);
        stage
            .until("the disk's socket open again", PATIENCE, listening)
            .expect("a disk");
        let evicting = || Ok(stage.product.show(VM)?["eviction_blockers"] == serde_json::json!([]));
        stage
            .until("eviction to go on", PATIENCE, evicting)
            .expect("no bar");
    }
    disk_work(&mut guest, 32 << 20);
    work(&mut guest, 100 << 20);
    let_go(&stage, &mut guest);
}

#[test]
fn daemon_killed_in_the_middle_the_dpu_parks_what_faults_and_goes_on_when_it_is_back() {
    let Some((_turn, mut stage)) = take_turn(Stage::set_with_dpu_process) else {
        return;
    };
    let (mut guest, socket) = squeezed(&mut stage);
    disk_work(&mut guest, 8 << 20);
    // The daemon holds faults of the disk for so long that some are with it when it dies.
    let device = socket.to_string_lossy();
    let words = ["iopf", "inject", "--device", &device, "--rate", "10"];
    let words = words
        .into_iter()
        .chain(["--latency", "5s", "--seconds", "300"]);
    let injected = stage.devices().client(words).expect("a client");
    injected.success().expect("an injection");
    let parked = |stage: &Stage| number(&self::device(stage, &socket), "parked_chains");
    stage
        .until("a chain to be parked", PATIENCE, || Ok(parked(&stage) > 0))
        .expect("a parked chain");
    stage.product.kill();
    assert!(parked(&stage) > 0, "it waits for the next daemon");
    stage.product.run().expect("a successor");
    let words = ["iopf", "stop", "--device", &device];
    let stopped = stage.devices().client(words).expect("a client");
    stopped.success().expect("no more injected faults");
    disk_work(&mut guest, 32 << 20);
    work(&mut guest, 100 << 20);
    let vm = stage.product.show(VM).expect("show");
    assert_eq!(number(&vm, "restarts"), 1, "{vm}");
    let disk = self::device(&stage, &socket);
    assert_eq!(number(&disk, "failed_requests"), 0, "{disk}");
    let_go(&stage, &mut guest);
}

/// The protector of the paper, but in seconds and not in minutes.
const QUICK: &str =
    "adp:promote-after=2s,scan-every=1s,demote-after=1s,active-max=0.5,protected-max=0.2";

/// Waits until more than `heard` accesses were heard of and sections are protected; how many were.
fn protected(stage: &Stage, heard: u64) -> u64 {
    let is_so = || {
        let vm = stage.product.show(VM)?;
        Ok(number(&vm, "heard_accesses") > heard && number(&vm, "protected_sections") > 0)
    };
    stage
        .until("the disk's sections to be protected", PATIENCE, is_so)
        .expect("protection");
    number(&stage.product.show(VM).expect("show"), "heard_accesses")
}

#[test]
fn disk_of_a_dpu_process_is_protected_live_and_again_by_that_processs_successor() {
    let Some((_turn, mut stage)) = take_turn(Stage::set_with_dpu_process) else {
        return;
    };
    let (mut guest, socket) = squeezed(&mut stage);
    let words = ["vm", "protector", VM, QUICK];
    let chosen = stage.product.client(words).expect("a client");
    chosen.success().expect("a policy");
    disk_work(&mut guest, 8 << 20);
    protected(&stage, 0);
    stage.dpu.as_mut().expect("a DPU process").kill();
    let released = || Ok(number(&stage.product.show(VM)?, "protected_sections") == 0);
    stage
        .until("release of a dead device's sections", PATIENCE, released)
        .expect("release");
    let heard = number(&stage.product.show(VM).expect("show"), "heard_accesses");
    let dpu = stage.dpu.as_mut().expect("a DPU process");
    dpu.run().expect("a successor");
    let listening = || is_listening(&socket);
    stage
        .until("the disk's socket open again", PATIENCE, listening)
        .expect("a disk");
    disk_work(&mut guest, 8 << 20);
    protected(&stage, heard);
    let vm = stage.product.show(VM).expect("show");
    let devices = vm["protected_devices"].as_array().expect("devices");
    assert_eq!(devices.len(), 1, "the dead one's place is free: {vm}");
    assert_eq!(number(&vm, "refused_accesses"), 0, "{vm}");
    let_go(&stage, &mut guest);
}

/// Which of the two starts first after both were killed.
#[derive(Debug, Clone, Copy)]
enum First {
    Daemon,
    Dpu,
}

#[test]
fn both_killed_and_started_again_in_either_order_go_on_and_no_request_is_lost() {
    let Some((_turn, mut stage)) = take_turn(Stage::set_with_dpu_process) else {
        return;
    };
    let (mut guest, socket) = squeezed(&mut stage);
    for first in [First::Daemon, First::Dpu] {
        disk_work(&mut guest, 8 << 20);
        stage.product.kill();
        stage.dpu.as_mut().expect("a DPU process").kill();
        if matches!(first, First::Daemon) {
            stage.product.run().expect("a daemon");
            let barred = || {
                Ok(stage.product.show(VM)?["eviction_blockers"]
                    .to_string()
                    .contains("DPU"))
            };
            stage
                .until("eviction barred by the DPU that is away", PATIENCE, barred)
                .expect("a bar");
        }
        let dpu = stage.dpu.as_mut().expect("a DPU process");
        dpu.run().expect("a DPU process");
        if matches!(first, First::Dpu) {
            stage.product.run().expect("a daemon");
        }
        let listening = || is_listening(&socket);
        stage
            .until("the disk's socket open again", PATIENCE, listening)
            .expect("a disk");
        let evicting = || Ok(stage.product.show(VM)?["eviction_blockers"] == serde_json::json!([]));
        stage
            .until("eviction to go on", PATIENCE, evicting)
            .expect("no bar");
    }
    disk_work(&mut guest, 32 << 20);
    work(&mut guest, 100 << 20);
    let disk = device(&stage, &socket);
    assert_eq!(number(&disk, "failed_requests"), 0, "{disk}");
    let_go(&stage, &mut guest);
}

#[test]
fn what_the_other_process_does_is_refused_with_its_name() {
    let Some((_turn, stage)) = take_turn(Stage::set_with_dpu_process) else {
        return;
    };
    let dpu = stage.dpu.as_ref().expect("a DPU process");
    let said = refused(dpu, &["attach", "--pid", "1", "--name", "x"]);
    assert!(said.contains("--dpu"), "{said}");
    let blk = ["dpu", "blk", "--socket", "/tmp/x.sock", "--image", "/tmp/x"];
    let said = refused(&stage.product, &blk);
    let vpri = dpu.vpri();
    assert!(said.contains(&*vpri.to_string_lossy()), "{said}");
}
