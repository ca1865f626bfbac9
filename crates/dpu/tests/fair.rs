// SPDX-License-Identifier: Apache-2.0
//! What tenants of one engine owe one another.

mod support;

use pagetide_dpu::{BlkConfig, DeviceState, DirectIo, OnFault, Writes};
use pagetide_vpri::LookUp;
use std::path::PathBuf;
use support::*;
use vhost::VhostBackend as _;
use vmm_sys_util::eventfd::EventFd;

const IMAGE_BYTES: u64 = 4 << 20;
const LARGE: u32 = 2 << 20;

/// A disk through the page cache, whose reads the engine's own thread copies.
fn add(rig: &Rig, name: &str) -> PathBuf {
    let socket = rig.dir.path().join(format!("{name}.sock"));
    let config = BlkConfig {
        socket: socket.clone(),
        image: rig.image(name, IMAGE_BYTES),
        queue_count: 1,
        writes: Writes::Taken,
        look_up: LookUp::On,
        serial: name.into(),
        direct_io: DirectIo::Off,
        on_fault: OnFault::OutOfOrder,
        ram: pagetide_dpu::RamPolicy::default(),
        image_use: pagetide_dpu::ImageUse::default(),
        access: pagetide_dpu::SocketAccess::default(),
    };
    rig.dpu.add_blk(config).unwrap();
    socket
}

/// Makes chains available and tells nobody; the kick that is due.
fn quietly(queue: &mut TestQueue, work: impl FnOnce(&mut TestQueue)) {
    let silent = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    let kick = std::mem::replace(&mut queue.kick, silent);
    work(queue);
    queue.kick = kick;
}

#[test]
fn small_read_is_done_before_the_flood_of_large_ones_that_came_first() {
    const FLOOD: usize = 60;
    let rig = Rig::new(1);
    let sockets = ["hostile", "steady"].map(|name| add(&rig, name));
    let mut guests = [Guest::new(), Guest::new()];
    let features = F_EVENT_IDX | F_INDIRECT;
    let [mut hostile, mut steady] =
        [0, 1].map(|at| Connection::open(&sockets[at], &mut guests[at], 1, features));
    let large = BlkRequest::new(&mut guests[0], T_IN, 0, LARGE);
    let table = guests[0].room(4096);
    let small = BlkRequest::new(&mut guests[1], T_IN, 8, 4096);
    let (hostile, steady) = (&mut hostile.queues[0], &mut steady.queues[0]);
    // This thread may be kept from looking until the flood is over; but not each time.
    let found = (0..20).any(|_| {
        quietly(hostile, |queue| {
            for _ in 0..FLOOD {
                queue.submit_indirect(&guests[0], table, &large.parts(WRITE));
            }
        });
        quietly(steady, |queue| {
            queue.submit(&guests[1], &small.parts(WRITE));
        });
        hostile.kick.write(1).unwrap();
        steady.kick.write(1).unwrap();
        steady.wait_used(&guests[1]);
        let mut before = 0;
        while hostile.poll_used(&guests[0]).is_some() {
            before += 1;
        }
        for _ in before..FLOOD {
            hostile.wait_used(&guests[0]);
        }
        assert_eq!(guests[1].get(small.data, 8), 8_u64.to_le_bytes());
        assert_eq!(large.status(&guests[0]), 0);
        assert_eq!(guests[0].get(large.data + 512, 8), 1_u64.to_le_bytes());
        before < FLOOD / 2
    });
    assert!(found, "the small read never came before half of the flood");
}

#[test]
fn transfer_in_steps_moves_each_byte_to_its_place_whatever_the_pieces() {
    let rig = Rig::new(1);
    let sockets = ["large", "beside"].map(|name| add(&rig, name));
    let mut guests = [Guest::new(), Guest::new()];
    let [mut large, mut beside] =
        [0, 1].map(|at| Connection::open(&sockets[at], &mut guests[at], 1, F_EVENT_IDX));
    let request = BlkRequest::new(&mut guests[0], T_IN, 3, 512);
    let room = guests[0].room(u64::from(LARGE) + 8192);
    // Pieces that end anywhere, most of them across the border of a step; 2 MiB in all.
    let lens = [4095, 131_073, 1, 262_144, 700_000, 65_535, 3, 900_000];
    let rest = LARGE - lens.iter().sum::<u32>();
    let (mut parts, mut at) = (vec![(request.header, 16, 0)], room + 7);
    for len in lens.into_iter().chain([rest]) {
        parts.push((at, len, WRITE));
        at += u64::from(len);
    }
    parts.push((request.status, 1, WRITE));
    let small = BlkRequest::new(&mut guests[1], T_IN, 0, 4096);
    let image = std::fs::read(rig.dir.path().join("large")).unwrap();
    let (large, beside) = (&mut large.queues[0], &mut beside.queues[0]);
    for round in 0..20_u64 {
        // The other one's request just before has the large one cut.
        beside.submit(&guests[1], &small.parts(WRITE));
        beside.wait_used(&guests[1]);
        let sector = 3 + round * 50;
        request.aim(&guests[0], T_IN, sector);
        large.submit(&guests[0], &parts);
        assert_eq!(large.wait_used(&guests[0]).1, LARGE + 1);
        let from = usize::try_from(sector).unwrap() * 512;
        let got = guests[0].get(room + 7, LARGE as usize);
        assert!(got == image[from..from + LARGE as usize], "round {round}");
    }
    // The same memory as one write elsewhere.
    let sector = 4000;
    request.aim(&guests[0], T_OUT, sector);
    let written = guests[0].get(room + 7, LARGE as usize);
    let readable =
        |(at, len, flag): &(u64, u32, u16)| (*at, *len, if *len == 1 { *flag } else { 0 });
    let mut parts: Vec<_> = parts.iter().map(readable).collect();
    // The one data piece of one byte is readable, too.
    parts[3].2 = 0;
    beside.submit(&guests[1], &small.parts(WRITE));
    beside.wait_used(&guests[1]);
    large.submit(&guests[0], &parts);
    large.wait_used(&guests[0]);
    assert_eq!(request.status(&guests[0]), 0);
    let image = std::fs::read(rig.dir.path().join("large")).unwrap();
    assert!(image[4000 * 512..][..LARGE as usize] == written[..]);
}

#[test]
fn front_end_that_floods_flushes_and_leaves_is_stopped_and_others_go_on() {
    let rig = Rig::new(1);
    let sockets = ["hostile", "steady"].map(|name| add(&rig, name));
    let mut guests = [Guest::new(), Guest::new()];
    let [mut hostile, mut steady] =
        [0, 1].map(|at| Connection::open(&sockets[at], &mut guests[at], 1, F_EVENT_IDX));
    let flush = BlkRequest::new(&mut guests[0], T_FLUSH, 0, 0);
    let small = BlkRequest::new(&mut guests[1], T_IN, 8, 4096);
    for _ in 0..30 {
        let parts = [(flush.header, 16, 0), (flush.status, 1, WRITE)];
        hostile.queues[0].submit(&guests[0], &parts);
    }
    steady.queues[0].submit(&guests[1], &small.parts(WRITE));
    steady.queues[0].wait_used(&guests[1]);
    // All that were taken are answered, though they wait for one another.
    let taken = hostile.frontend.get_vring_base(0).unwrap();
    let mut done = 0;
    while hostile.queues[0].poll_used(&guests[0]).is_some() {
        done += 1;
    }
    assert_eq!(done, taken);
}

#[test]
fn weight_is_kept_within_its_bounds_and_told() {
    let rig = Rig::new(1);
    let socket = add(&rig, "disk");
    let device = rig.report(&socket);
    assert_eq!(device.weight, 100);
    rig.dpu.set_weight(device.id, 1000).unwrap();
    assert_eq!(rig.report(&socket).weight, 1000);
    for wrong in [0, 1001] {
        let error = rig.dpu.set_weight(device.id, wrong).unwrap_err();
        assert!(error.to_string().contains("from 1 to 1000"), "{error}");
    }
    assert_eq!(rig.report(&socket).weight, 1000);
}

#[test]
fn queue_that_was_kicked_in_vain_a_thousand_times_still_hears_the_next_chain() {
    let rig = Rig::new(1);
    let socket = add(&rig, "disk");
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, F_EVENT_IDX);
    let queue = &mut connection.queues[0];
    let request = BlkRequest::new(&mut guest, T_IN, 8, 4096);
    for _ in 0..20 {
        for _ in 0..1000 {
            queue.kick.write(1).unwrap();
        }
        let slept = rig.dpu.engine_sleeps();
        eventually("the engine sleeps", || rig.dpu.engine_sleeps() > slept);
        queue.submit(&guest, &request.parts(WRITE));
        queue.wait_used(&guest);
        assert_eq!(request.status(&guest), 0);
    }
    // Its rings and descriptors can be let go as ever.
    assert_eq!(connection.frontend.get_vring_base(0).unwrap(), 20);
}

#[test]
fn what_a_front_end_has_asked_for_and_left_behind_is_not_done() {
    const FLOOD: u64 = 60;
    let rig = Rig::new(1);
    let socket = add(&rig, "hostile");
    // The engine may be quick, or this thread slow; but not each time.
    let dropped = (0..20).any(|_| {
        let before = rig.report(&socket).requests;
        let mut guest = Guest::new();
        let mut hostile = Connection::open(&socket, &mut guest, 1, F_EVENT_IDX | F_INDIRECT);
        let large = BlkRequest::new(&mut guest, T_IN, 0, LARGE);
        let table = guest.room(4096);
        let queue = &mut hostile.queues[0];
        quietly(queue, |queue| {
            for _ in 0..FLOOD {
                queue.submit_indirect(&guest, table, &large.parts(WRITE));
            }
        });
        queue.kick.write(1).unwrap();
        queue.wait_used(&guest);
        drop(hostile);
        eventually("its front end is gone", || {
            rig.report(&socket).state == DeviceState::Listening
        });
        let report = rig.report(&socket);
        report.requests - before < FLOOD
    });
    assert!(dropped, "each time all of the flood was done");
    // And the next one finds a device as new.
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, F_EVENT_IDX);
    let small = BlkRequest::new(&mut guest, T_IN, 8, 4096);
    connection.queues[0].submit(&guest, &small.parts(WRITE));
    connection.queues[0].wait_used(&guest);
    assert_eq!(small.status(&guest), 0);
    assert_eq!(guest.get(small.data, 8), 8_u64.to_le_bytes());
}
