// SPDX-License-Identifier: Apache-2.0
//! Devices that come late, that may not come, and whose front end means no good.

use std::fs;
use std::path::Path;

use pagetide_guest::params::Params;
use pagetide_guest::wire::Progress;
use pagetide_guestkit::guest::Guest;
use pagetide_guestkit::product::is_listening;
use pagetide_guestkit::qemu::{Disk, GuestSpec, is_ram};
use pagetide_guestkit::stage::Stage;
use pagetide_guestkit::steps::{
    self, PATIENCE, VM, attach_refused, let_go, number, squeeze, take_turn, work, working_guest,
};
use serde_json::json;

use liar::{LIES, Liar};

mod liar;

const DISK_BYTES: u64 = 48 << 20;
const DISK_4_MIB: u64 = 4 << 20;

/// As in other tests, with a disk that is filled sooner.
fn with_disk(disk: Disk) -> GuestSpec {
    let spec = steps::with_disk(disk);
    let work = Params {
        file_bytes: DISK_BYTES,
        ..spec.work
    };
    GuestSpec { work, ..spec }
}

/// Plugs a vhost-user disk into the port `spare` of a running guest.
fn plug_in(guest: &Guest, socket: &Path) {
    let mut qmp = guest.qmp().expect("QMP");
    let (name, value) = guest.version().reconnect();
    let address = json!({"type": "unix", "data": {"path": socket}});
    let mut data = json!({"addr": address, "server": false});
    data[name] = value.into();
    let chardev = json!({"id": "later", "backend": {"type": "socket", "data": data}});
    qmp.execute("chardev-add", &chardev).expect("chardev-add");
    let device = json!({
        "driver": "vhost-user-blk-pci", "id": "later-disk", "bus": "spare", "chardev": "later",
        "num-queues": 2,
    });
    qmp.execute("device_add", &device).expect("device_add");
}

#[test]
fn disk_plugged_in_after_the_attach_serves_the_squeezed_guest() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let spec = GuestSpec {
        extra: ["-device", "pcie-root-port,id=spare,chassis=1,slot=1"]
            .map(str::to_owned)
            .to_vec(),
        ..with_disk(Disk::Absent)
    };
    let mut guest = stage.boot(&spec).expect("a guest");
    let memory_works = |p: &Progress| p.memory_rounds >= 1;
    guest
        .wait_for("work on memory", PATIENCE, memory_works)
        .expect("work");
    squeeze(&stage, &guest);
    let (socket, image) = stage.new_disk(DISK_BYTES).expect("an image");
    stage.product.serve_disk(&socket, &image).expect("a disk");
    plug_in(&guest, &socket);
    guest.wait_for_work(PATIENCE).expect("work on the disk");
    work(&mut guest, 200 << 20);
    let device = stage.product.device(&socket).expect("a device");
    assert_eq!(device["vm"], VM, "{device}");
    assert!(number(&device, "iopfs") > 0, "{device}");
    let_go(&stage, &mut guest);
}

#[test]
fn device_without_look_up_keeps_its_vm_from_being_attached_and_takes_no_attached_one() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let (socket, image) = stage.new_disk(DISK_BYTES).expect("an image");
    let serve_blindly = |stage: &Stage, socket: &Path, image: &Path| {
        let words = ["dpu", "blk", "--no-lookup", "--socket"].map(str::as_ref);
        let words = [
            &words[..],
            &[socket.as_os_str(), "--image".as_ref(), image.as_os_str()],
        ];
        let answer = stage.product.client(words.concat());
        answer
            .and_then(|answer| answer.success())
            .expect("a device");
    };
    serve_blindly(&stage, &socket, &image);
    let mut guest = working_guest(&mut stage, &with_disk(Disk::VhostUser(socket.clone())));
    attach_refused(&stage.product, &mut guest, "look-up");

    // As the sentence says: the device anew with look-up, then attach.
    let remove = [
        "dpu".as_ref(),
        "remove".as_ref(),
        "--socket".as_ref(),
        socket.as_os_str(),
    ];
    let removed = stage.product.client(remove).and_then(|a| a.success());
    removed.expect("removed");
    stage.product.serve_disk(&socket, &image).expect("a disk");
    stage
        .until("QEMU connected again", PATIENCE, || {
            Ok(stage.product.device(&socket)?["state"] == "connected")
        })
        .expect("connected");
    squeeze(&stage, &guest);
    work(&mut guest, 100 << 20);

    let (blind, image) = stage.new_disk(DISK_4_MIB).expect("an image");
    serve_blindly(&stage, &blind, &image);
    let refused = Liar::connect_with(&blind, &ram_of(&guest), 256 << 20);
    assert!(refused.is_err(), "RAM of an attached VM without look-up");
    let log = stage.product.log_tail();
    assert!(log.contains("look-up cannot be off"), "{log}");
    let_go(&stage, &mut guest);
}

/// The file of a guest's RAM.
fn ram_of(guest: &Guest) -> fs::File {
    let fds = fs::read_dir(format!("/proc/{}/fd", guest.pid())).expect("descriptors");
    let is_ram = |path: &std::path::PathBuf| {
        fs::read_link(path).is_ok_and(|to| is_ram(&to.to_string_lossy()))
    };
    let ram = fds.flatten().map(|entry| entry.path()).find(is_ram);
    let mut options = fs::OpenOptions::new();
    let file = options.read(true).write(true).open(ram.expect("a memfd"));
    file.expect("guest RAM")
}

#[test]
fn front_end_of_nonsense_stops_its_device_and_the_disk_of_another_guest_works_on() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let (socket, image) = stage.new_disk(DISK_BYTES).expect("an image");
    stage.product.serve_disk(&socket, &image).expect("a disk");
    let (bad, bad_image) = stage.new_disk(DISK_4_MIB).expect("an image");
    stage.product.serve_disk(&bad, &bad_image).expect("a disk");
    let mut guest = working_guest(&mut stage, &with_disk(Disk::VhostUser(socket.clone())));
    squeeze(&stage, &guest);
    for lie in LIES {
        assert!(is_listening(&bad).expect("a list"));
        let mut liar = Liar::connect(&bad).expect("a front end");
        liar.tell(lie);
        stage
            .until("the liar's device stopped", PATIENCE, || {
                let device = stage.product.device(&bad)?;
                let said = device["error"].as_str().unwrap_or_default();
                Ok(device["state"] == "stopped" && said.len() > 20)
            })
            .unwrap_or_else(|error| panic!("{lie:?}: {error}"));
        drop(liar);
        work(&mut guest, 16 << 20);
    }
    let device = stage.product.device(&socket).expect("a device");
    assert_eq!(device["state"], "connected", "{device}");
    let_go(&stage, &mut guest);
}
