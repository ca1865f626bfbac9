// SPDX-License-Identifier: Apache-2.0
//! Front ends that misbehave, leave, come back, or die with requests under way.

mod support;

use pagetide_addr::{PAGE_BYTES, ResponseCode};
use pagetide_dpu::{DeviceState, Dpu, DpuConfig, Writes, wait_for_dead_engines};
use pagetide_random::SplitMix64;
use pagetide_vpri::{DomainTable, Doorbell};
use std::{
    io::{BufRead, BufReader, Read},
    os::unix::net::UnixStream,
    process::{Command, Stdio},
    sync::Arc,
};
use support::*;
use vhost::{VhostBackend, vhost_user::VhostUserFrontend};

#[test]
fn nonsense_in_a_ring_stops_that_device_and_no_other() {
    let rig = Rig::new(1);
    let (bad, good) = (
        rig.add("bad", 1, Writes::Taken),
        rig.add("good", 1, Writes::Taken),
    );
    let (mut liar, mut guest) = (Guest::new(), Guest::new());
    let mut to_good = Connection::open(&good, &mut guest, 1, 0);
    let request = BlkRequest::new(&mut guest, T_IN, 8, 512);
    // Each lie on a connection of its own: a new front end begins afresh.
    for lie in 0..5 {
        let mut to_bad = Connection::open(&bad, &mut liar, 1, 0);
        let queue = &mut to_bad.queues[0];
        let at = liar.room(4096);
        match lie {
            // No status byte.
            0 => drop(queue.submit(&liar, &[(at, 16, 0)])),
            // A head that is none.
            1 => queue.publish(&liar, 999),
            // A chain that loops.
            2 => {
                queue.descriptor(&liar, queue.desc, 0, (GPA, 16, NEXT, 0));
                queue.publish(&liar, 0);
            }
            // A buffer outside memory.
            3 => drop(queue.submit(&liar, &[(at, 16, 0), (RAM_BYTES, 4096, WRITE)])),
            // An avail index that is too far on.
            _ => {
                liar.put(queue.avail + 2, &1000_u16.to_le_bytes());
                queue.kick.write(1).unwrap();
            }
        }
        eventually("the liar's device stops", || {
            rig.report(&bad).state == DeviceState::Stopped
        });
        assert!(rig.report(&bad).stopped_because.is_some());
        eventually("its front end is told", || queue.error.read().is_ok());
        to_good.queues[0].submit(&guest, &request.parts(WRITE));
        to_good.queues[0].wait_used(&guest);
        assert_eq!(request.status(&guest), 0);
        drop(to_bad);
        eventually("the device listens again", || {
            rig.report(&bad).state != DeviceState::Connected
        });
        liar = Guest::new();
    }
}

#[test]
fn random_bytes_all_over_the_rings_are_survived() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Refused);
    let mut random = SplitMix64::new(3);
    for _ in 0..60 {
        let mut guest = Guest::new();
        let mut connection = Connection::open(&socket, &mut guest, 1, F_INDIRECT);
        let queue = &mut connection.queues[0];
        let mut noise = vec![0_u8; usize::try_from(queue.used - queue.desc).unwrap()];
        for byte in &mut noise {
            *byte = random.next_u64().to_le_bytes()[0];
        }
        // Half the time with addresses that are in memory.
        if random.below(2) == 0 {
            for descriptor in noise[..1024].chunks_mut(16) {
                descriptor[..8].copy_from_slice(&(GPA + 0x10_0000).to_le_bytes());
                descriptor[10..12].copy_from_slice(&[0, 0]);
                descriptor[14] &= 63;
                descriptor[15] = 0;
            }
        }
        guest.put(queue.desc, &noise);
        guest.put(queue.avail + 2, &(QUEUE_SIZE / 2).to_le_bytes());
        queue.kick.write(1).unwrap();
        // Stopping waits for whatever the noise has begun.
        connection.frontend.get_vring_base(0).unwrap();
    }
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let request = BlkRequest::new(&mut guest, T_IN, 4, 512);
    connection.queues[0].submit(&guest, &request.parts(WRITE));
    connection.queues[0].wait_used(&guest);
    assert_eq!(guest.get(request.data, 8), 4_u64.to_le_bytes());
}

#[test]
fn second_front_end_is_turned_away_and_a_later_one_served() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let first = Connection::open(&socket, &mut guest, 1, 0);
    let mut second = UnixStream::connect(&socket).unwrap();
    assert_eq!(second.read(&mut [0]).unwrap(), 0, "hung up on at once");
    drop(first);
    let mut guest = Guest::new();
    let mut third = Connection::open(&socket, &mut guest, 1, 0);
    let request = BlkRequest::new(&mut guest, T_IN, 4, 512);
    third.queues[0].submit(&guest, &request.parts(WRITE));
    third.queues[0].wait_used(&guest);
}

#[test]
fn stopped_ring_tells_where_it_was_and_goes_on_from_there() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let request = BlkRequest::new(&mut guest, T_IN, 4, 512);
    for round in 1..4_u32 {
        for _ in 0..5 {
            connection.queues[0].submit(&guest, &request.parts(WRITE));
            connection.queues[0].wait_used(&guest);
        }
        assert_eq!(connection.frontend.get_vring_base(0).unwrap(), 5 * round);
        assert_eq!(rig.report(&socket).wired_bytes, 0);
        connection.start_queues();
    }
}

#[test]
fn request_of_the_largest_size_and_one_of_most_buffers_are_served_and_larger_ones_answered() {
    const PART: u32 = 4 << 20;
    let rig = Rig::new(1);
    let socket = rig.add_of("disk", 64 << 20);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, F_INDIRECT);
    let data = guest.room(u64::from(PART));
    let table = guest.room(16 * 1024);
    let request = BlkRequest::new(&mut guest, T_IN, 0, 0);
    let ends = request.parts(WRITE);
    let mut served = |data: &[(u64, u32, u16)]| {
        request.aim(&guest, T_IN, 0);
        let parts = [&ends[..1], data, &ends[1..]].concat();
        connection.queues[0].submit_indirect(&guest, table, &parts);
        let (_, written) = connection.queues[0].wait_used(&guest);
        (request.status(&guest), written)
    };
    // 64 MiB, all into one buffer: the last part stays.
    let whole = vec![(data, PART, WRITE); 16];
    assert_eq!(served(&whole), (0, (64 << 20) + 1));
    let sector = guest.get(data, 8);
    assert_eq!(sector, (60_u64 << 20 >> 9).to_le_bytes());
    let beyond = [&whole[..], &[(data, 512, WRITE)]].concat();
    assert_eq!(served(&beyond), (S_IOERR, 1));
    // A table of 1,024 entries, which is as long as one may be.
    let most = vec![(data, 512, WRITE); 1022];
    assert_eq!(served(&most), (0, 1022 * 512 + 1));
    assert_eq!(guest.get(data, 8), 1021_u64.to_le_bytes());
    let report = rig.report(&socket);
    assert_eq!(report.state, DeviceState::Connected);
    assert_eq!((report.malformed_requests, report.failed_requests), (0, 1));
}

#[test]
fn memory_added_and_removed_while_a_ring_runs_changes_what_it_reaches() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let more = Guest::new();
    let mut region = region(&more);
    region.guest_phys_addr += RAM_BYTES;
    region.userspace_addr += RAM_BYTES;
    connection.frontend.add_mem_region(&region).unwrap();
    let request = BlkRequest::new(&mut guest, T_IN, 21, 512);
    let mut parts = request.parts(WRITE);
    parts[1].0 = RAM_BYTES + 8192;
    connection.queues[0].submit(&guest, &parts);
    connection.queues[0].wait_used(&guest);
    assert_eq!(request.status(&guest), 0);
    assert_eq!(more.get(8192, 8), 21_u64.to_le_bytes());
    assert!(
        connection.frontend.add_mem_region(&region).is_err(),
        "twice"
    );
    connection.frontend.remove_mem_region(&region).unwrap();
    more.put(8192, &[0x5a; 512]);
    request.aim(&guest, T_IN, 21);
    connection.queues[0].submit(&guest, &parts);
    connection.queues[0].wait_used(&guest);
    assert_eq!(request.status(&guest), S_IOERR);
    assert_eq!(more.get(8192, 512), [0x5a; 512], "nothing is reached");
    let report = rig.report(&socket);
    assert_eq!((report.outside_requests, report.malformed_requests), (1, 0));
    // The header may be gone as well; what is needed is a place for the status.
    parts[0].0 = RAM_BYTES;
    request.aim(&guest, T_IN, 21);
    connection.queues[0].submit(&guest, &parts);
    connection.queues[0].wait_used(&guest);
    assert_eq!(request.status(&guest), S_IOERR);
    parts[2].0 = RAM_BYTES;
    connection.queues[0].submit(&guest, &parts);
    eventually("a status that is gone stops the device", || {
        rig.report(&socket).state == DeviceState::Stopped
    });
}

#[test]
fn requests_in_flight_when_the_front_end_leaves_are_done_after_it_comes_back() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, F_EVENT_IDX);
    let domain = guest.domain(&rig);
    let requests: Vec<BlkRequest> = (0..6)
        .map(|i| BlkRequest::new(&mut guest, T_IN, 100 + i, 512))
        .collect();
    rig.host.hold();
    for request in requests.iter().step_by(2) {
        take_away(&domain, request.data, PAGE_BYTES);
    }
    for request in &requests {
        connection.queues[0].submit(&guest, &request.parts(WRITE));
    }
    for _ in 0..3 {
        connection.queues[0].wait_used(&guest);
    }
    eventually("three are parked", || {
        rig.report(&socket).parked_chains == 3
    });
    let (queues, inflight) = connection.hang_up();
    eventually("the parked are let go", || {
        rig.report(&socket).parked_chains == 0
    });
    // Their page requests are answered to nobody.
    rig.host.answer(ResponseCode::Success, 3);
    rig.host.let_go();
    let mut connection = Connection::open_with(&socket, &guest, queues, F_EVENT_IDX, inflight);
    let queue = &mut connection.queues[0];
    for _ in 0..3 {
        queue.wait_used(&guest);
    }
    for (i, request) in (100..).zip(&requests) {
        assert_eq!(request.status(&guest), 0);
        let sector: u64 = i;
        assert_eq!(guest.get(request.data, 8), sector.to_le_bytes());
    }
    // And new ones go on behind them.
    requests[0].aim(&guest, T_IN, 300);
    queue.submit(&guest, &requests[0].parts(WRITE));
    queue.wait_used(&guest);
    assert_eq!(guest.get(requests[0].data, 8), 300_u64.to_le_bytes());
    assert_eq!(queue.poll_used(&guest), None, "nothing was done twice");
}

#[test]
fn devices_come_and_go_and_leave_no_socket() {
    let rig = Rig::new(1);
    for _ in 0..5 {
        let socket = rig.add("disk", 2, Writes::Taken);
        let mut guest = Guest::new();
        let mut connection = Connection::open(&socket, &mut guest, 2, 0);
        let request = BlkRequest::new(&mut guest, T_IN, 4, 512);
        connection.queues[1].submit(&guest, &request.parts(WRITE));
        connection.queues[1].wait_used(&guest);
        let id = rig.report(&socket).id;
        rig.dpu.remove(id).unwrap();
        assert!(!socket.exists());
        assert!(rig.dpu.remove(id).is_err());
        assert!(
            rig.domains.find(guest.file.key().unwrap()).is_none(),
            "RAM is let go"
        );
    }
}

/// Not a test by itself: the process that the next one kills.
#[test]
fn child_that_serves_until_it_is_killed() {
    let Ok(dir) = std::env::var("PAGETIDE_TEST_CHILD_DIR") else {
        return;
    };
    let domains = Arc::new(DomainTable::new(1));
    let bell = Arc::new(Doorbell::new().unwrap());
    let (_dpu, _ends) = Dpu::start(&DpuConfig::new(dir.into()), domains, &bell).unwrap();
    println!("serving");
    loop {
        std::thread::park();
    }
}

#[test]
fn successor_waits_for_the_lock_of_a_killed_process() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "child_that_serves_until_it_is_killed",
            "--nocapture",
        ])
        .env("PAGETIDE_TEST_CHILD_DIR", dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("serving")));
    let mut waits = 0;
    wait_for_dead_engines(dir.path(), None, |_| {
        waits += 1;
        child.kill().unwrap();
    })
    .unwrap();
    assert_eq!(waits, 1, "the lock was held while the process lived");
    child.wait().unwrap();
    let domains = Arc::new(DomainTable::new(1));
    let bell = Arc::new(Doorbell::new().unwrap());
    Dpu::start(&DpuConfig::new(dir.path().to_owned()), domains, &bell).unwrap();
}
