// SPDX-License-Identifier: Apache-2.0
//! One image and who else has it; an image that is not what it was.

mod support;

use pagetide_dpu::{
    BlkConfig, Content, DirectIo, DpuError, ImageError, ImageUse, OnFault, Sharing, SocketAccess,
    Writes,
};
use pagetide_vpri::LookUp;
use std::path::Path;
use support::*;

const SECTORS: u64 = 8192;
const T_WRITE_ZEROES: u32 = 13;

fn config(rig: &Rig, name: &str, image: &Path) -> BlkConfig {
    BlkConfig {
        socket: rig.dir.path().join(format!("{name}.sock")),
        image: image.to_owned(),
        queue_count: 1,
        writes: Writes::Taken,
        look_up: LookUp::On,
        serial: name.into(),
        direct_io: DirectIo::Auto,
        on_fault: OnFault::OutOfOrder,
        ram: pagetide_dpu::RamPolicy::default(),
        image_use: ImageUse::default(),
        access: SocketAccess::default(),
    }
}

fn shared() -> ImageUse {
    ImageUse {
        sharing: Sharing::Shared,
        ..ImageUse::default()
    }
}

/// The status of a request for 8 sectors.
fn status(queue: &mut TestQueue, guest: &mut Guest, kind: u32, sector: u64) -> u8 {
    let request = BlkRequest::new(guest, kind, sector, 4096);
    let data_flag = if kind == T_IN { WRITE } else { 0 };
    queue.submit(guest, &request.parts(data_flag));
    queue.wait_used(guest);
    request.status(guest)
}

#[test]
fn image_cut_short_does_not_grow_again_and_what_lies_beyond_its_end_is_an_error() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let path = rig.dir.path().join("disk");
    let image = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let queue = &mut connection.queues[0];
    assert_eq!(status(queue, &mut guest, T_OUT, 4096), 0);
    assert!(rig.report(&socket).backing_error.is_none());

    image.set_len(4096 * 512).unwrap();
    assert_eq!(status(queue, &mut guest, T_OUT, 4096), 1);
    assert_eq!(status(queue, &mut guest, T_OUT, 4095), 1);
    assert_eq!(status(queue, &mut guest, T_IN, 4096), 1);
    assert_eq!(status(queue, &mut guest, T_IN, 4095), 1);
    assert_eq!(status(queue, &mut guest, T_OUT, SECTORS - 8), 1);
    let zeroes = BlkRequest::new(&mut guest, T_WRITE_ZEROES, 0, 16);
    let mut range = [0; 16];
    range[..8].copy_from_slice(&4096_u64.to_le_bytes());
    range[8..12].copy_from_slice(&8_u32.to_le_bytes());
    guest.put(zeroes.data, &range);
    queue.submit(&guest, &zeroes.parts(0));
    queue.wait_used(&guest);
    assert_eq!(zeroes.status(&guest), 1);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 4096 * 512);
    // What is still there is served as ever, and the report says what is the matter.
    assert_eq!(status(queue, &mut guest, T_OUT, 4088), 0);
    assert_eq!(status(queue, &mut guest, T_IN, 4088), 0);
    let report = rig.report(&socket);
    let said = report.backing_error.unwrap();
    assert!(
        said.contains("cut short") && said.contains("2097152"),
        "{said}"
    );
    assert_eq!(report.backing.disk().unwrap().capacity_bytes, SECTORS * 512);
    assert_eq!(report.failed_requests, 6);

    image.set_len(SECTORS * 512).unwrap();
    assert_eq!(status(queue, &mut guest, T_OUT, 4096), 0);
    assert!(rig.report(&socket).backing_error.is_none());
}

#[test]
fn image_that_grows_keeps_the_capacity_it_had() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let path = rig.dir.path().join("disk");
    let image = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    image.set_len(2 * SECTORS * 512).unwrap();
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let queue = &mut connection.queues[0];
    assert_eq!(status(queue, &mut guest, T_OUT, SECTORS), 1);
    assert_eq!(status(queue, &mut guest, T_OUT, SECTORS - 8), 0);
    let report = rig.report(&socket);
    assert_eq!(report.backing.disk().unwrap().capacity_bytes, SECTORS * 512);
    assert!(report.backing_error.is_none());
}

#[test]
fn image_of_another_device_is_refused_by_every_name_until_that_one_is_removed() {
    let rig = Rig::new(2);
    let image = rig.image("image", 1 << 20);
    let (hard, soft) = (rig.dir.path().join("hard"), rig.dir.path().join("soft"));
    std::fs::hard_link(&image, &hard).unwrap();
    std::os::unix::fs::symlink(&image, &soft).unwrap();
    let first = rig.dpu.add_blk(config(&rig, "first", &image)).unwrap();
    // A second DPU stands for another process: it has open files of its own.
    let other = Rig::new(1);
    for name in [&image, &hard, &soft] {
        let refused = rig.dpu.add_blk(config(&rig, "second", name)).unwrap_err();
        let said = refused.to_string();
        assert!(said.contains("first.sock already"), "{said}");
        let refused = other.dpu.add_blk(config(&other, "second", name));
        assert!(
            matches!(refused, Err(DpuError::Image(ImageError::InUse { .. }))),
            "{refused:?}"
        );
    }
    // Nobody is left out by a refusal, and the image is free as soon as the device is gone.
    rig.dpu.remove(first).unwrap();
    let again = other.dpu.add_blk(config(&other, "second", &hard)).unwrap();
    other.dpu.remove(again).unwrap();
    rig.dpu.add_blk(config(&rig, "third", &soft)).unwrap();
}

#[test]
fn image_that_is_shared_is_served_more_than_once_and_readers_stand_side_by_side() {
    let rig = Rig::new(1);
    let image = rig.image("image", 1 << 20);
    let of = |name: &str, writes, image_use| BlkConfig {
        writes,
        image_use,
        ..config(&rig, name, &image)
    };
    let alone = ImageUse::default();
    let one = rig.dpu.add_blk(of("one", Writes::Taken, shared())).unwrap();
    let two = rig.dpu.add_blk(of("two", Writes::Taken, shared())).unwrap();
    assert!(rig.dpu.add_blk(of("three", Writes::Taken, alone)).is_err());
    assert!(
        rig.dpu
            .add_blk(of("three", Writes::Refused, alone))
            .is_err()
    );
    rig.dpu.remove(one).unwrap();
    rig.dpu.remove(two).unwrap();
    rig.dpu
        .add_blk(of("three", Writes::Refused, alone))
        .unwrap();
    rig.dpu.add_blk(of("four", Writes::Refused, alone)).unwrap();
    assert!(rig.dpu.add_blk(of("five", Writes::Taken, alone)).is_err());
    assert!(
        rig.dpu
            .add_blk(of("five", Writes::Taken, shared()))
            .is_err()
    );
}

#[test]
fn image_is_free_again_when_its_device_could_not_listen() {
    let rig = Rig::new(1);
    let image = rig.image("image", 1 << 20);
    let nowhere = BlkConfig {
        socket: rig.dir.path().join("no-such-folder/disk.sock"),
        ..config(&rig, "first", &image)
    };
    rig.dpu.add_blk(nowhere).unwrap_err();
    rig.dpu.add_blk(config(&rig, "second", &image)).unwrap();
}

#[test]
fn content_in_a_format_needs_the_operators_word() {
    let rig = Rig::new(1);
    let image = rig.image("image", 1 << 20);
    let mut content = std::fs::read(&image).unwrap();
    content[..4].copy_from_slice(b"QFI\xfb");
    std::fs::write(&image, content).unwrap();
    let refused = rig.dpu.add_blk(config(&rig, "disk", &image)).unwrap_err();
    let said = refused.to_string();
    assert!(said.contains("qcow2") && said.contains("--raw"), "{said}");
    let raw = BlkConfig {
        image_use: ImageUse {
            content: Content::Raw,
            ..ImageUse::default()
        },
        ..config(&rig, "disk", &image)
    };
    rig.dpu.add_blk(raw).unwrap();
}
