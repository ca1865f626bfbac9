// SPDX-License-Identifier: Apache-2.0
//! Live upgrades of a daemon while a disk of its is written and read all the time, by a front end of our own whose
//! memory is that of an attached VM and is evicted between the requests. Every byte that is read is compared.

#[path = "../../dpu/tests/support/mod.rs"]
mod support;
mod upgrading;
mod vmm;

use pagetide_bench::upgrade::broken::Way;
use pagetide_random::SplitMix64;
use std::{
    fs,
    path::PathBuf,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::Instant,
};
use support::{BlkRequest, Connection, Guest, T_IN, T_OUT, TestQueue, WRITE};
use upgrading::{Daemon, PATIENCE, Programs};

const QUEUES: usize = 2;
/// Requests under way in each queue.
const SLOTS: u64 = 6;
const DATA_BYTES: u32 = 16 << 10;
const IMAGE_BYTES: u64 = 8 << 20;

fn is_skipped(test: &str) -> bool {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: take-over needs root");
        return true;
    }
    !vmm::is_this(test)
}

/// What is known of all requests.
#[derive(Default)]
struct Tally {
    ends: AtomicBool,
    done: AtomicU64,
    longest_us: AtomicU64,
}

/// A part of the disk that is written and read by turns, a request at a time.
struct Slot {
    request: BlkRequest,
    sector: u64,
    version: u64,
    reads: bool,
    under_way: Option<(u16, Instant)>,
}

fn content(sector: u64, version: u64) -> Vec<u8> {
    let mut random = SplitMix64::new(sector << 32 | version);
    (0..DATA_BYTES / 8)
        .flat_map(|_| random.next_u64().to_le_bytes())
        .collect()
}

impl Slot {
    fn new(guest: &mut Guest, number: u64) -> Self {
        let sector = number * u64::from(DATA_BYTES) / 512;
        Self {
            request: BlkRequest::new(guest, T_OUT, sector, DATA_BYTES),
            sector,
            version: 0,
            reads: false,
            under_way: None,
        }
    }

    fn begin(&mut self, guest: &Guest, queue: &mut TestQueue) {
        let request = &self.request;
        let (kind, flag) = match self.reads {
            true => (T_IN, WRITE),
            false => {
                self.version += 1;
                guest.put(request.data, &content(self.sector, self.version));
                (T_OUT, 0)
            }
        };
        request.aim(guest, kind, self.sector);
        let head = queue.submit(guest, &request.parts(flag));
        self.under_way = Some((head, Instant::now()));
    }

    fn ended(&mut self, guest: &Guest, begun: Instant, tally: &Tally) {
        let took = u64::try_from(begun.elapsed().as_micros()).unwrap();
        tally.longest_us.fetch_max(took, Relaxed);
        tally.done.fetch_add(1, Relaxed);
        assert_eq!(self.request.status(guest), 0, "a request has failed");
        if self.reads {
            let found = guest.get(self.request.data, DATA_BYTES as usize);
            assert!(
                found == content(self.sector, self.version),
                "sector {}",
                self.sector
            );
            // A page that is left as zeros would show the next time.
            guest.put(self.request.data, &[0; DATA_BYTES as usize]);
        }
        self.reads = !self.reads;
    }
}

/// Writes and reads until it is to end, and then until nothing is under way.
fn use_queue(guest: &Guest, queue: &mut TestQueue, slots: &mut [Slot], tally: &Tally) {
    let mut last = Instant::now();
    loop {
        let ends = tally.ends.load(Relaxed);
        for slot in slots.iter_mut().filter(|slot| slot.under_way.is_none()) {
            if !ends {
                slot.begin(guest, queue);
            }
        }
        while let Some((head, _)) = queue.poll_used(guest) {
            let is_it = |slot: &&mut Slot| matches!(slot.under_way, Some((its, _)) if its == head);
            let slot = slots.iter_mut().find(is_it);
            let slot = slot
                .unwrap_or_else(|| panic!("chain {head} is done twice, or was never asked for"));
            let (_, begun) = slot.under_way.take().unwrap();
            slot.ended(guest, begun, tally);
            last = Instant::now();
        }
        if ends && slots.iter().all(|slot| slot.under_way.is_none()) {
            return;
        }
        assert!(last.elapsed() < PATIENCE, "requests are not done");
        std::thread::yield_now();
    }
}

struct Ending<'a>(&'a Tally);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.ends.store(true, Relaxed);
    }
}

/// A daemon with this process attached and a disk, whose front end is connected.
struct Scene {
    programs: Programs,
    names: [PathBuf; 2],
    daemon: Daemon,
    socket: PathBuf,
    guest: Guest,
}

impl Scene {
    fn new(settings: &[&str]) -> Self {
        let programs = Programs::new();
        let names = ["pagetide-0", "pagetide-1"].map(|name| programs.pagetide(name));
        let guest = Guest::new();
        let daemon = Daemon::start(&names[0], settings, None);
        let own = std::process::id().to_string();
        daemon.json(&["attach", "--pid", &own, "--name", "a", "--json"]);
        let place = programs.dir();
        let (socket, image) = (place.join("disk.sock"), place.join("image"));
        let file = fs::File::create(&image).unwrap();
        file.set_len(IMAGE_BYTES).unwrap();
        let (at, of) = (socket.to_str().unwrap(), image.to_str().unwrap());
        daemon.json(&["dpu", "blk", "--socket", at, "--image", of, "--json"]);
        Self {
            programs,
            names,
            daemon,
            socket,
            guest,
        }
    }

    /// Does `work` while all queues are in use; returns what it returns.
    fn in_use<T>(
        &mut self,
        work: impl FnOnce(&mut Daemon, &[PathBuf; 2], &Programs, &mut Used<'_>) -> T,
    ) -> T {
        let connection =
            Connection::open(&self.socket, &mut self.guest, QUEUES, support::F_EVENT_IDX);
        let Connection {
            mut frontend,
            mut queues,
            ..
        } = connection;
        let mut numbers = 0..;
        let mut slots: Vec<Vec<Slot>> = (queues.iter())
            .map(|_| {
                let number = |_| Slot::new(&mut self.guest, numbers.next().unwrap());
                (0..SLOTS).map(number).collect()
            })
            .collect();
        let (tally, guest) = (Tally::default(), &self.guest);
        std::thread::scope(|scope| {
            let _ending = Ending(&tally);
            for (queue, slots) in queues.iter_mut().zip(&mut slots) {
                let tally = &tally;
                scope.spawn(move || use_queue(guest, queue, slots, tally));
            }
            let mut used = Used {
                tally: &tally,
                frontend: &mut frontend,
            };
            used.on();
            work(&mut self.daemon, &self.names, &self.programs, &mut used)
        })
    }
}

/// A disk in use.
struct Used<'a> {
    tally: &'a Tally,
    frontend: &'a mut vhost::vhost_user::Frontend,
}

impl Used<'_> {
    /// Waits until many more requests are done, and a message is answered.
    fn on(&mut self) {
        use vhost::vhost_user::{VhostUserFrontend as _, message::VhostUserConfigFlags};
        let before = self.tally.done.load(Relaxed);
        let begun = Instant::now();
        while self.tally.done.load(Relaxed) < before + 200 {
            assert!(begun.elapsed() < PATIENCE, "the disk is not served");
            std::thread::yield_now();
        }
        let flags = VhostUserConfigFlags::empty();
        let config = self.frontend.get_config(0, 60, flags, &[0; 60]);
        assert_eq!(config.unwrap().1[..8], (IMAGE_BYTES / 512).to_le_bytes());
    }
}

fn evict(daemon: &Daemon) {
    daemon.json(&["vm", "reclaim", "a", "--json"]);
}

#[test]
fn disk_in_use_is_right_over_ten_upgrades_and_no_request_fails() {
    if is_skipped("disk_in_use_is_right_over_ten_upgrades_and_no_request_fails") {
        return;
    }
    let mut scene = Scene::new(&[]);
    let stalls = scene.in_use(|daemon, names, _, used| {
        let mut stalls = Vec::new();
        for number in 0..10 {
            evict(daemon);
            let before = daemon.pid();
            used.tally.longest_us.store(0, Relaxed);
            let report = daemon.upgrade(&names[(number + 1) % 2]);
            used.on();
            assert_eq!(report["state"], "done", "{report}");
            assert_ne!(daemon.pid(), before);
            stalls.push((
                used.tally.longest_us.load(Relaxed),
                report["pause_us"].clone(),
            ));
        }
        stalls
    });
    eprintln!("longest request in us, and pause in us, by upgrade: {stalls:?}");
    let daemon = &scene.daemon;
    let list = daemon.json(&["dpu", "list", "--json"]);
    assert_eq!(list["devices"][0]["failed_requests"], 0, "{list}");
    assert_eq!(daemon.figure("restarts"), 10);
    assert!(!daemon.log().contains("ERROR"), "{}", daemon.log());
    daemon.json(&["vm", "detach", "a", "--json"]);
    let image = fs::read(scene.programs.dir().join("image")).unwrap();
    assert!(image[..512].iter().any(|byte| *byte != 0));
}

#[test]
fn disk_in_use_goes_on_with_the_old_program_whatever_becomes_of_the_new_one() {
    if is_skipped("disk_in_use_goes_on_with_the_old_program_whatever_becomes_of_the_new_one") {
        return;
    }
    let mut scene = Scene::new(&["--upgrade-ready-ms", "1500", "--upgrade-serving-ms", "1500"]);
    scene.in_use(|daemon, names, programs, used| {
        let pid = daemon.pid();
        for way in Way::BEFORE {
            let told = daemon.no_upgrade(&programs.broken(way));
            used.on();
            assert_eq!(daemon.pid(), pid, "{way:?}: {told}");
        }
        for way in Way::AFTER {
            evict(daemon);
            let told = daemon.no_upgrade(&programs.broken(way));
            used.on();
            assert_eq!(daemon.pid(), pid, "{way:?}: {told}");
            let report = daemon.asked("/v1/upgrade");
            assert_eq!(report["state"], "rolled-back", "{report}");
        }
        assert_eq!(daemon.upgrade(&names[1])["state"], "done");
        used.on();
    });
    let list = scene.daemon.json(&["dpu", "list", "--json"]);
    assert_eq!(list["devices"][0]["failed_requests"], 0, "{list}");
    scene.daemon.json(&["vm", "detach", "a", "--json"]);
}

#[test]
fn front_end_without_a_record_of_its_requests_stands_against_an_upgrade() {
    if is_skipped("front_end_without_a_record_of_its_requests_stands_against_an_upgrade") {
        return;
    }
    let mut scene = Scene::new(&[]);
    let mut connection = Connection::open_untracked(&scene.socket, &mut scene.guest, 1, 0);
    let mut slot = Slot::new(&mut scene.guest, 0);
    let tally = Tally::default();
    let mut once = |scene: &Scene| {
        slot.begin(&scene.guest, &mut connection.queues[0]);
        connection.queues[0].wait_used(&scene.guest);
        let (_, begun) = slot.under_way.take().unwrap();
        slot.ended(&scene.guest, begun, &tally);
    };
    once(&scene);
    let pid = scene.daemon.pid();
    let told = scene.daemon.no_upgrade(&scene.names[1]);
    assert!(
        told.contains("keeps no record") && told.contains("disk.sock"),
        "{told}"
    );
    assert_eq!(scene.daemon.pid(), pid);
    once(&scene);
    scene.daemon.json(&["vm", "detach", "a", "--json"]);
}

/// A front end with memory in a file that takes no seals, which it cuts short afterwards.
fn connect_and_cut_memory_short(socket: &std::path::Path) -> vhost::vhost_user::Frontend {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsRawFd as _;
    use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, vhost_user::Frontend};
    const BYTES: u64 = 16 << 20;
    let file = memfd_create("short", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, BYTES).unwrap();
    let frontend = Frontend::connect(socket, 2).unwrap();
    frontend.set_owner().unwrap();
    let features = frontend.get_features().unwrap();
    frontend.set_features(features).unwrap();
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: BYTES,
        userspace_addr: 0x7000_0000,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    frontend.set_mem_table(&[region]).unwrap();
    // It is answered when all before it was obeyed.
    assert_eq!(frontend.get_features().unwrap(), features);
    ftruncate(&file, 4096).unwrap();
    frontend
}

#[test]
fn front_end_whose_session_cannot_go_on_is_hung_up_on_and_no_other_one_notices() {
    if is_skipped("front_end_whose_session_cannot_go_on_is_hung_up_on_and_no_other_one_notices") {
        return;
    }
    let mut scene = Scene::new(&[]);
    let place = scene.programs.dir().to_owned();
    let (socket, image) = (place.join("bad.sock"), place.join("bad"));
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    let words = [
        "--socket",
        socket.to_str().unwrap(),
        "--image",
        image.to_str().unwrap(),
    ];
    scene
        .daemon
        .json(&[&["dpu", "blk"][..], &words, &["--json"]].concat());
    let hostile = connect_and_cut_memory_short(&socket);
    scene.in_use(|daemon, names, _, used| {
        assert_eq!(daemon.upgrade(&names[1])["state"], "done");
        used.on();
    });
    use vhost::VhostBackend as _;
    assert!(hostile.get_features().is_err(), "it is hung up on");
    drop(hostile);
    drop(connect_and_cut_memory_short(&socket));
    scene.daemon.json(&["vm", "detach", "a", "--json"]);
}
