// SPDX-License-Identifier: Apache-2.0
//! VMs that are not to be taken over, or not by this daemon: a sentence, status 2, and no harm done.

use std::fs;
use std::path::Path;

use pagetide_guestkit::guest::Guest;
use pagetide_guestkit::peer::StorageDaemon;
use pagetide_guestkit::product::{NOBODY, Product};
use pagetide_guestkit::qemu::{Disk, GuestSpec, Ram};
use pagetide_guestkit::qmp::Qmp;
use pagetide_guestkit::stage::Stage;
use pagetide_guestkit::steps::{
    DISK_BYTES, PATIENCE, VM, attach_refused, let_go, refused, small, sound_end, squeeze,
    take_turn, with_disk, work, working_guest,
};
use serde_json::json;

/// The product again, with a state directory of its own below `folder`.
fn second_daemon(folder: &Path) -> Product {
    let binary = Product::binary().expect("built");
    Product::start(&binary, &folder.join("second"), &folder.join("second.log")).expect("a daemon")
}

#[test]
fn wrong_attaches_are_refused_with_status_2_and_the_vm_is_unharmed() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let mut guest = working_guest(&mut stage, &small());
    let pid = guest.pid().to_string();
    let this = std::process::id().to_string();
    let product = &stage.product;
    refused(product, &["attach", "--pid", "4194303"]);
    refused(product, &["attach", "--pid", &this]);
    refused(product, &["attach", "--pid", &pid, "--limit", "4K"]);
    refused(product, &["vm", "detach", "nobody"]);
    product.attach(guest.pid(), VM).expect("attach");
    refused(product, &["attach", "--pid", &pid, "--name", "again"]);
    refused(product, &["vm", "limit", VM, "4K"]);
    let_go(&stage, &mut guest);
}

#[test]
fn ram_that_is_not_shared_is_refused_and_the_vm_is_unharmed() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    for ram in [Ram::PrivateMemfd, Ram::Anonymous] {
        let mut guest = working_guest(&mut stage, &GuestSpec { ram, ..small() });
        attach_refused(&stage.product, &mut guest, "share=on");
        sound_end(&mut guest);
    }
}

#[test]
fn ram_that_a_third_process_maps_is_refused_and_the_process_named() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let (socket, image) = stage.new_disk(DISK_BYTES).expect("an image");
    let daemon = match StorageDaemon::start(&image, &socket, 2) {
        Ok(daemon) => daemon,
        Err(error) => {
            eprintln!("SKIPPED: qemu-storage-daemon: {error}");
            return;
        }
    };
    let mut guest = working_guest(&mut stage, &with_disk(Disk::VhostUser(socket)));
    attach_refused(&stage.product, &mut guest, &daemon.pid().to_string());
    sound_end(&mut guest);
}

#[test]
fn daemon_without_privilege_is_refused_and_the_vm_is_unharmed() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let mut guest = working_guest(&mut stage, &small());
    let folder = stage.folder().to_owned();
    // The build's own folder may be one that nobody may enter.
    let binary = folder.join("pagetide");
    fs::copy(Product::binary().expect("built"), &binary).expect("a copy");
    let (state, log) = (folder.join("nobody"), folder.join("nobody.log"));
    let nobody = Product::start_as(NOBODY, &binary, &state, &log).expect("a daemon");
    attach_refused(&nobody, &mut guest, "root");
    drop(nobody);
    // And by who has the rights it is served as ever.
    squeeze(&stage, &guest);
    let_go(&stage, &mut guest);
}

#[test]
fn vm_of_another_daemon_is_refused_and_goes_on_with_its_own() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let mut guest = working_guest(&mut stage, &small());
    squeeze(&stage, &guest);
    let second = second_daemon(stage.folder());
    let owner = stage.product.pid().expect("it runs").to_string();
    attach_refused(&second, &mut guest, &owner);
    drop(second);
    work(&mut guest, 100 << 20);
    let_go(&stage, &mut guest);
}

/// Has QEMU write a background snapshot, which watches guest RAM by a userfaultfd of QEMU's own.
fn begin_snapshot(qmp: &mut Qmp) -> Result<(), pagetide_guestkit::qmp::QmpError> {
    let capability = json!({"capability": "background-snapshot", "state": true});
    let capabilities = json!({ "capabilities": [capability] });
    qmp.execute("migrate-set-capabilities", &capabilities)?;
    qmp.execute("migrate-set-parameters", &json!({"max-bandwidth": 65_536}))?;
    qmp.execute("migrate", &json!({"uri": "exec:cat >/dev/null"}))?;
    Ok(())
}

fn snapshot_is(qmp: &mut Qmp, wanted: &[&str]) -> bool {
    let answer = qmp.execute("query-migrate", &json!({})).expect("QMP");
    wanted.contains(&answer["status"].as_str().unwrap_or_default())
}

#[test]
fn vm_in_a_snapshot_with_its_own_userfaultfd_is_refused_until_that_is_over() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let mut guest = working_guest(&mut stage, &small());
    let mut qmp = guest.qmp().expect("QMP");
    begin_snapshot(&mut qmp).expect("a snapshot");
    stage
        .until("the snapshot under way", PATIENCE, || {
            Ok(snapshot_is(&mut qmp, &["active"]))
        })
        .expect("under way");
    let pid = guest.pid().to_string();
    let said = refused(&stage.product, &["attach", "--pid", &pid]);
    assert!(said.contains("snapshot"), "{said}");
    let fast = json!({"max-bandwidth": 1_u64 << 40});
    qmp.execute("migrate-set-parameters", &fast).expect("fast");
    stage
        .until("the snapshot over", PATIENCE, || {
            Ok(snapshot_is(&mut qmp, &["completed"]))
        })
        .expect("over");
    // QEMU may say so a moment before it has let go of the RAM.
    let attached = || {
        let answer = stage
            .product
            .client(["attach", "--pid", &pid, "--name", VM])?;
        Ok(answer.status.success())
    };
    stage
        .until("the VM taken over after the snapshot", PATIENCE, attached)
        .expect("taken over");
    drop(qmp);
    snapshot_fails_and_harms_nothing(&stage, &mut guest);
    let_go(&stage, &mut guest);
}

/// While attached it is QEMU's turn to be refused: by the kernel.
fn snapshot_fails_and_harms_nothing(stage: &Stage, guest: &mut Guest) {
    let mut qmp = guest.qmp().expect("QMP");
    let begun = begin_snapshot(&mut qmp);
    if begun.is_ok() {
        stage
            .until("the snapshot failed", PATIENCE, || {
                Ok(snapshot_is(&mut qmp, &["failed"]))
            })
            .expect("failed");
    }
    work(guest, 64 << 20);
}
