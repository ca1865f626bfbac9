// SPDX-License-Identifier: Apache-2.0
//! Every kind of block request, through a real socket, real rings and a real image.

mod support;

use pagetide_dpu::Writes;
use std::os::unix::fs::FileExt;
use support::*;

fn one(queue: &mut TestQueue, guest: &Guest, request: &BlkRequest, data_flag: u16) -> u32 {
    let head = queue.submit(guest, &request.parts(data_flag));
    let (done, len) = queue.wait_used(guest);
    assert_eq!(done, head);
    len
}

#[test]
fn read_gives_the_image_and_write_changes_it() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, F_EVENT_IDX | F_INDIRECT);
    let queue = &mut connection.queues[0];
    let request = BlkRequest::new(&mut guest, T_IN, 7, 8192);
    assert_eq!(one(queue, &guest, &request, WRITE), 8193);
    assert_eq!(request.status(&guest), 0);
    let data = guest.get(request.data, 8192);
    for sector in 0..16_u64 {
        let at = usize::try_from(sector).unwrap() * 512;
        assert_eq!(data[at..at + 8], (7 + sector).to_le_bytes());
    }
    request.aim(&guest, T_OUT, 100);
    guest.put(request.data, &[0x77; 8192]);
    assert_eq!(one(queue, &guest, &request, 0), 1);
    let flush = BlkRequest::new(&mut guest, T_FLUSH, 0, 0);
    one(queue, &guest, &flush, 0);
    assert_eq!(flush.status(&guest), 0);
    let image = std::fs::read(rig.dir.path().join("disk")).unwrap();
    assert_eq!(image[100 * 512..116 * 512], [0x77; 8192]);
    let report = rig.report(&socket);
    assert_eq!((report.requests, report.failed_requests), (3, 0));
    assert_eq!((report.read_bytes, report.written_bytes), (8192, 8192));
    assert!(report.wired_bytes > 0);
    drop(connection);
    eventually("rings unwired", || rig.report(&socket).wired_bytes == 0);
}

#[test]
fn data_in_odd_pieces_at_odd_places_is_moved_whole() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let queue = &mut connection.queues[0];
    let request = BlkRequest::new(&mut guest, T_IN, 3, 4096);
    // 1 + 1000 + 23 bytes, none of it aligned to a sector.
    let data = request.data;
    queue.submit(
        &guest,
        &[
            (request.header, 5, 0),
            (request.header + 5, 11, 0),
            (data + 3, 1, WRITE),
            (data + 700, 1000, WRITE),
            (data + 2001, 23, WRITE),
            (request.status, 1, WRITE),
        ],
    );
    queue.wait_used(&guest);
    assert_eq!(request.status(&guest), 0);
    let mut bytes = guest.get(data + 3, 1);
    bytes.extend(guest.get(data + 700, 1000));
    bytes.extend(guest.get(data + 2001, 23));
    let image = std::fs::read(rig.dir.path().join("disk")).unwrap();
    assert_eq!(bytes, image[3 * 512..5 * 512]);
}

#[test]
fn indirect_table_is_followed() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, F_INDIRECT);
    let queue = &mut connection.queues[0];
    let table = guest.room(4096);
    let request = BlkRequest::new(&mut guest, T_IN, 9, 512);
    queue.submit_indirect(&guest, table, &request.parts(WRITE));
    queue.wait_used(&guest);
    assert_eq!(guest.get(request.data, 8), 9_u64.to_le_bytes());
}

#[test]
fn serial_number_is_told() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let request = BlkRequest::new(&mut guest, T_GET_ID, 0, 20);
    one(&mut connection.queues[0], &guest, &request, WRITE);
    assert_eq!(&guest.get(request.data, 7), b"tide-1\0");
    let config = connection.config();
    assert_eq!(u64::from_le_bytes(config[..8].try_into().unwrap()), 8192);
}

#[test]
fn discarded_and_zeroed_ranges_read_as_zeros_and_their_neighbours_stay() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let queue = &mut connection.queues[0];
    let image = std::fs::File::open(rig.dir.path().join("disk")).unwrap();
    for (kind, flags, sector) in [
        (T_DISCARD, 0_u32, 16_u64),
        (T_WRITE_ZEROES, 1, 64),
        (T_WRITE_ZEROES, 0, 128),
    ] {
        let request = BlkRequest::new(&mut guest, kind, 0, 16);
        let range = [
            &sector.to_le_bytes()[..],
            &16_u32.to_le_bytes(),
            &flags.to_le_bytes(),
        ]
        .concat();
        guest.put(request.data, &range);
        one(queue, &guest, &request, 0);
        assert_eq!(request.status(&guest), 0, "kind {kind} flags {flags}");
        let mut bytes = vec![1; 18 * 512];
        image.read_exact_at(&mut bytes, (sector - 1) * 512).unwrap();
        assert_eq!(bytes[..8], (sector - 1).to_le_bytes());
        assert!(bytes[512..17 * 512].iter().all(|b| *b == 0));
        assert_eq!(bytes[17 * 512..17 * 512 + 8], (sector + 16).to_le_bytes());
    }
}

#[test]
fn read_only_device_says_so_and_refuses_writes() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Refused);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    assert!(connection.features & (1 << 5) != 0);
    let request = BlkRequest::new(&mut guest, T_OUT, 0, 512);
    one(&mut connection.queues[0], &guest, &request, 0);
    assert_eq!(request.status(&guest), 1);
    let unknown = BlkRequest::new(&mut guest, 99, 0, 0);
    one(&mut connection.queues[0], &guest, &unknown, 0);
    assert_eq!(unknown.status(&guest), 2);
    assert_eq!(rig.report(&socket).failed_requests, 1);
}

#[test]
fn queues_on_two_engines_serve_many_requests_at_once() {
    let rig = Rig::new(2);
    let socket = rig.add("disk", 4, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 4, F_EVENT_IDX);
    let requests: Vec<Vec<BlkRequest>> = (0..4)
        .map(|_| {
            (0..20)
                .map(|_| BlkRequest::new(&mut guest, T_IN, 0, 4096))
                .collect()
        })
        .collect();
    for round in 0..10_u64 {
        for (q, queue) in (0..).zip(&mut connection.queues) {
            for (r, request) in (0..).zip(&requests[usize::try_from(q).unwrap()]) {
                request.aim(&guest, T_IN, round * 640 + q * 160 + r * 8);
                queue.submit(&guest, &request.parts(WRITE));
            }
        }
        for (q, queue) in (0..).zip(&mut connection.queues) {
            for _ in 0..20 {
                queue.wait_used(&guest);
            }
            for (r, request) in (0..).zip(&requests[usize::try_from(q).unwrap()]) {
                let sector: u64 = round * 640 + q * 160 + r * 8;
                assert_eq!(guest.get(request.data, 8), sector.to_le_bytes());
                assert_eq!(request.status(&guest), 0);
            }
        }
    }
    assert_eq!(rig.report(&socket).requests, 800);
}

#[test]
fn idle_engine_sleeps_and_is_woken_by_a_kick() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, F_EVENT_IDX);
    let request = BlkRequest::new(&mut guest, T_IN, 0, 512);
    for _ in 0..50 {
        let before = rig.dpu.engine_sleeps();
        one(&mut connection.queues[0], &guest, &request, WRITE);
        eventually("the engine sleeps", || rig.dpu.engine_sleeps() > before);
    }
}
