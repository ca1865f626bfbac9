// SPDX-License-Identifier: Apache-2.0
//! Devices that one DPU parks and another goes on with, while their front end uses them.

mod support;

use pagetide_dpu::{DeviceState, Dpu, DpuConfig, DpuError, ParkedDevice, Writes};
use pagetide_vpri::{DomainTable, Doorbell, HostEnd};
use std::{
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};
use support::*;
use vhost::VhostBackend;

/// A DPU that comes after another one in the same directory.
struct Next {
    dpu: Dpu,
    /// Nobody asks at them: no page is absent.
    _ends: Vec<HostEnd>,
}

impl Next {
    fn after(dir: &Path) -> Self {
        let bell = Arc::new(Doorbell::new().unwrap());
        let config = DpuConfig::new(dir.to_owned());
        let domains = Arc::new(DomainTable::new(config.engine_count));
        let (dpu, ends) = Dpu::start(&config, domains, &bell).unwrap();
        Self { dpu, _ends: ends }
    }

    fn hold(&self, parked: Vec<ParkedDevice>, image: &Path, queues: u16) {
        for device in parked {
            let mut config = disk_of(device.socket.clone(), image.to_owned());
            config.queue_count = queues;
            let mut device = Some(device);
            self.dpu.add_parked_blk(config, &mut device).unwrap();
            assert!(device.is_none());
        }
    }
}

fn image_of(rig: &Rig) -> PathBuf {
    rig.dir.path().join("disk")
}

#[test]
fn front_end_notices_nothing_of_ten_dpus_that_follow_one_another() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 2, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 2, F_EVENT_IDX);
    let reads: Vec<BlkRequest> = (0..16)
        .map(|number| BlkRequest::new(&mut guest, T_IN, 8 * number, 4096))
        .collect();
    let mut parked = rig.dpu.park();
    for round in 0..10_u64 {
        // Made available while nobody serves it.
        for (number, read) in (0..).zip(&reads) {
            let sector = 8 * (number + 16 * round);
            read.aim(&guest, T_IN, sector);
            connection.queues[usize::from(number % 2 == 1)].submit(&guest, &read.parts(WRITE));
        }
        let next = Next::after(rig.dir.path());
        next.hold(parked, &image_of(&rig), 2);
        // Rings run before messages are read.
        for _ in 0..8 {
            connection.queues[0].wait_used(&guest);
            connection.queues[1].wait_used(&guest);
        }
        for (number, read) in (0..).zip(&reads) {
            let sector: u64 = 8 * (number + 16 * round);
            assert_eq!(read.status(&guest), 0);
            assert_eq!(guest.get(read.data, 8), sector.to_le_bytes());
        }
        next.dpu.admit();
        let capacity = connection.config();
        assert_eq!(&capacity[..8], &(4_u64 << 11).to_le_bytes());
        let report = next.dpu.devices().remove(0);
        assert_eq!(report.state, DeviceState::Connected);
        // And a message that changes something.
        let call = vmm_sys_util::eventfd::EventFd::new(libc::EFD_NONBLOCK).unwrap();
        connection.frontend.set_vring_call(0, &call).unwrap();
        connection.queues[0].call = call;
        parked = next.dpu.park();
        assert_eq!(parked.len(), 1);
    }
    let next = Next::after(rig.dir.path());
    next.hold(parked, &image_of(&rig), 2);
    next.dpu.admit();
    assert!(!connection.config().is_empty());
    let base = connection.frontend.get_vring_base(0).unwrap();
    assert_eq!(base, 80, "chains of queue 0 that were taken");
    drop(connection);
    eventually("it listens again", || {
        next.dpu.devices()[0].state == DeviceState::Listening
    });
    let mut other = Guest::new();
    let again = Connection::open(&socket, &mut other, 1, 0);
    drop(again);
    next.dpu.shut_down();
    assert!(!socket.exists(), "the last one removes it");
}

#[test]
fn requests_under_way_are_done_by_the_next_dpu_once() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let domain = guest.early_domain(&rig);
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    rig.host.hold();
    let parked_read = BlkRequest::new(&mut guest, T_IN, 8, 4096);
    // It waits for its page, which the host does not give: it is in flight.
    take_away(&domain, parked_read.data, 4096);
    let head = connection.queues[0].submit(&guest, &parked_read.parts(WRITE));
    eventually("it is taken", || connection.taken(0) == [head]);
    let parked = rig.dpu.park();
    assert_eq!(connection.taken(0), [head], "it stays in flight");
    let next = Next::after(rig.dir.path());
    next.hold(parked, &image_of(&rig), 1);
    assert_eq!(connection.queues[0].wait_used(&guest).0, head);
    assert_eq!(parked_read.status(&guest), 0);
    assert_eq!(guest.get(parked_read.data, 8), 8_u64.to_le_bytes());
    assert!(connection.taken(0).is_empty());
    next.dpu.admit();
    assert!(!connection.config().is_empty());
}

#[test]
fn device_without_a_front_end_is_parked_and_takes_one_afterwards() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let parked = rig.dpu.park();
    assert!(parked[0].front_end.is_none());
    // It connects while nobody accepts.
    let waiting = {
        let socket = socket.clone();
        std::thread::spawn(move || {
            let mut guest = Guest::new();
            let mut connection = Connection::open(&socket, &mut guest, 1, 0);
            connection.config()
        })
    };
    let next = Next::after(rig.dir.path());
    next.hold(parked, &image_of(&rig), 1);
    next.dpu.admit();
    assert!(!waiting.join().unwrap().is_empty());
}

/// A process that was told to give up has taken nothing: the socket stays, and so does the connection.
#[test]
fn dpu_that_gives_up_before_it_is_admitted_leaves_the_front_end_to_another() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    let copy =
        |parked: &[ParkedDevice]| -> Vec<ParkedDevice> { parked.iter().map(copy_of).collect() };
    let parked = rig.dpu.park();
    let given_up = Next::after(rig.dir.path());
    given_up.hold(copy(&parked), &image_of(&rig), 1);
    let request = BlkRequest::new(&mut guest, T_IN, 16, 4096);
    connection.queues[0].submit(&guest, &request.parts(WRITE));
    connection.queues[0].wait_used(&guest);
    drop(given_up);
    assert!(socket.exists());
    let next = Next::after(rig.dir.path());
    next.hold(parked, &image_of(&rig), 1);
    next.dpu.admit();
    request.aim(&guest, T_IN, 24);
    connection.queues[0].submit(&guest, &request.parts(WRITE));
    connection.queues[0].wait_used(&guest);
    assert_eq!(guest.get(request.data, 8), 24_u64.to_le_bytes());
    assert!(!connection.config().is_empty());
}

#[test]
fn front_end_without_a_record_of_its_requests_is_named() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    assert_eq!(rig.dpu.unrecorded(), None);
    let mut guest = Guest::new();
    let connection = Connection::open_untracked(&socket, &mut guest, 1, 0);
    eventually("its ring runs", || {
        rig.dpu.unrecorded() == Some((socket.clone(), 0))
    });
    drop(connection);
    eventually("it has gone", || rig.dpu.unrecorded().is_none());
}

#[test]
fn hushed_engines_begin_nothing_and_what_comes_is_done_by_the_next_dpu() {
    let rig = Rig::new(2);
    let socket = rig.add("disk", 2, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 2, F_EVENT_IDX);
    let read = BlkRequest::new(&mut guest, T_IN, 8, 4096);
    connection.queues[1].submit(&guest, &read.parts(WRITE));
    connection.queues[1].wait_used(&guest);
    rig.dpu.hush(Duration::from_secs(20)).unwrap();
    read.aim(&guest, T_IN, 16);
    connection.queues[1].submit(&guest, &read.parts(WRITE));
    let parked = rig.dpu.park();
    assert_eq!(connection.queues[1].poll_used(&guest), None);
    let next = Next::after(rig.dir.path());
    next.hold(parked, &image_of(&rig), 2);
    connection.queues[1].wait_used(&guest);
    assert_eq!(guest.get(read.data, 8), 16_u64.to_le_bytes());
}

/// Asks for the base of a ring, which stops it; returns once the answer is waited for.
fn asking_for_base(connection: &Connection) -> JoinHandle<u32> {
    let frontend = connection.frontend.clone();
    let (tell, told) = std::sync::mpsc::channel();
    let asking = std::thread::spawn(move || {
        tell.send(rustix::thread::gettid().as_raw_nonzero())
            .unwrap();
        frontend.get_vring_base(0).unwrap()
    });
    let task = format!("/proc/self/task/{}", told.recv().unwrap());
    eventually("it waits for the answer", || {
        calls(&task, libc::SYS_recvmsg)
    });
    asking
}

/// Whether a thread is in this call of the kernel.
fn calls(task: &str, number: i64) -> bool {
    let call = std::fs::read_to_string(format!("{task}/syscall")).unwrap_or_default();
    call.split(' ').next() == Some(&number.to_string())
}

/// It would wait for a request that no engine goes on with.
#[test]
fn message_that_comes_while_engines_are_hushed_is_answered_by_the_next_dpu() {
    let rig = Rig::new(1);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let domain = guest.early_domain(&rig);
    let mut connection = Connection::open(&socket, &mut guest, 1, 0);
    rig.host.hold();
    let read = BlkRequest::new(&mut guest, T_IN, 8, 4096);
    take_away(&domain, read.data, 4096);
    let head = connection.queues[0].submit(&guest, &read.parts(WRITE));
    eventually("it is taken", || connection.taken(0) == [head]);
    rig.dpu.hush(Duration::from_secs(20)).unwrap();
    let asking = asking_for_base(&connection);
    let parked = rig.dpu.park();
    assert!(parked[0].front_end.is_some(), "it was hung up on");
    let next = Next::after(rig.dir.path());
    next.hold(parked, &image_of(&rig), 1);
    next.dpu.admit();
    assert_eq!(asking.join().unwrap(), 1);
    connection.queues[0].wait_used(&guest);
    assert_eq!(guest.get(read.data, 8), 8_u64.to_le_bytes());
}

#[test]
fn half_a_message_keeps_no_other_devices_disk_waiting() {
    let rig = Rig::new(1);
    let works = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut fine = Connection::open(&works, &mut guest, 1, 0);
    let hostile = rig.add("other", 1, Writes::Taken);
    let mut half = std::os::unix::net::UnixStream::connect(&hostile).unwrap();
    half.write_all(&[1, 0, 0, 0, 1, 0]).unwrap();
    eventually("it is being read", || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let mut tasks = tasks.map(|task| task.path());
        tasks.any(|task| {
            let name = std::fs::read_to_string(task.join("comm")).unwrap_or_default();
            name.trim() == "blk-1-conn" && calls(task.to_str().unwrap(), libc::SYS_recvmsg)
        })
    });
    let read = BlkRequest::new(&mut guest, T_IN, 8, 4096);
    let mut done = 0;
    std::thread::scope(|scope| {
        let hushing = scope.spawn(|| rig.dpu.hush(Duration::from_secs(20)).unwrap());
        // Until it is hushed in the middle of one.
        while !hushing.is_finished() {
            fine.queues[0].submit(&guest, &read.parts(WRITE));
            eventually("done, or hushed", || {
                let used = fine.queues[0].poll_used(&guest).is_some();
                done += u64::from(used);
                used || hushing.is_finished()
            });
        }
        hushing.join().unwrap();
    });
    assert!(
        done >= 10,
        "{done} reads while half a message was waited for"
    );
    let parked = rig.dpu.park();
    let is_there = |socket: &Path| {
        let device = parked.iter().find(|device| device.socket == socket);
        device.unwrap().front_end.is_some()
    };
    assert!(is_there(&works) && !is_there(&hostile));
    assert_eq!(half.read(&mut [0]).unwrap(), 0, "it is hung up on");
}

/// A file system in a file, mounted, that can be frozen: writes to it are not done until it is thawed.
struct Frozen(PathBuf);

impl Frozen {
    fn mount(dir: &Path) -> Option<Self> {
        let (disk, at) = (dir.join("disk.ext4"), dir.join("mounted"));
        std::fs::File::create(&disk)
            .unwrap()
            .set_len(32 << 20)
            .unwrap();
        std::fs::create_dir(&at).unwrap();
        let (disk, at_name) = (disk.to_str().unwrap(), at.to_str().unwrap());
        let made =
            run("mkfs.ext4", &["-q", "-F", disk]) && run("mount", &["-o", "loop", disk, at_name]);
        if !made {
            eprintln!("SKIPPED: no file system can be mounted here");
            return None;
        }
        Some(Self(at))
    }

    fn set(&self, flag: &str) {
        assert!(run("fsfreeze", &[flag, self.0.to_str().unwrap()]));
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        run("fsfreeze", &["-u", self.0.to_str().unwrap()]);
        run("umount", &["-l", self.0.to_str().unwrap()]);
    }
}

fn run(program: &str, words: &[&str]) -> bool {
    let output = std::process::Command::new(program).args(words).output();
    output.is_ok_and(|output| output.status.success())
}

#[test]
fn disk_that_does_not_answer_stands_against_a_hand_over_and_all_devices_go_on() {
    let rig = Rig::new(1);
    let Some(frozen) = Frozen::mount(rig.dir.path()) else {
        return;
    };
    let image = frozen.0.join("image");
    std::fs::write(&image, vec![0; 4 << 20]).unwrap();
    let hangs = rig.dir.path().join("hangs.sock");
    rig.dpu.add_blk(disk_of(hangs.clone(), image)).unwrap();
    let works = rig.add("works", 1, Writes::Taken);
    let (mut one, mut other) = (Guest::new(), Guest::new());
    let mut stuck = Connection::open(&hangs, &mut one, 1, 0);
    let mut fine = Connection::open(&works, &mut other, 1, 0);
    let write = BlkRequest::new(&mut one, T_OUT, 0, 4096);
    let read = BlkRequest::new(&mut other, T_IN, 8, 4096);
    frozen.set("-f");
    let head = stuck.queues[0].submit(&one, &write.parts(0));
    eventually("it is taken", || stuck.taken(0) == [head]);
    let refused = rig.dpu.hush(Duration::from_millis(50));
    assert!(
        matches!(refused, Err(DpuError::Unanswered { .. })),
        "{refused:?}"
    );
    fine.queues[0].submit(&other, &read.parts(WRITE));
    fine.queues[0].wait_used(&other);
    assert_eq!(stuck.queues[0].poll_used(&one), None);
    frozen.set("-u");
    stuck.queues[0].wait_used(&one);
    assert_eq!(write.status(&one), 0);
    rig.dpu.hush(Duration::from_secs(20)).unwrap();
    assert_eq!(rig.dpu.park().len(), 2);
    drop((stuck, fine));
}
