// SPDX-License-Identifier: Apache-2.0
//! What is only seen of a VM that is dense and busy: that the first limit finds what is cold, and that a
//! detach, which takes a while, shows how far it is and can be stopped.

use pagetide_guestkit::dense::Dense;
use pagetide_guestkit::product::{Product, Role};
use pagetide_guestkit::stage::RunFolder;
use pagetide_guestkit::steps::number;
use serde_json::Value;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const VM: &str = "vm";
const RAM_BYTES: u64 = 512 << 20;
const PAGE_BYTES: u64 = 4096;
/// Of its RAM, what its vCPU touches, in thousandths.
const HOT_PERMILLE: u64 = 125;
/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(120);

static TURN: Mutex<()> = Mutex::new(());

/// A guest, a daemon, and the turn to have them. Dropped in this order.
struct Scene {
    guest: Dense,
    product: Product,
    _folder: RunFolder,
    _turn: MutexGuard<'static, ()>,
}

impl Scene {
    /// With these settings of the daemon; `None` where it cannot be tried, after saying why.
    fn set(settings: &[&str]) -> Option<Self> {
        Self::of(HOT_PERMILLE, settings)
    }

    /// The same with a guest that uses so much of its RAM, in thousandths.
    fn of(hot_permille: u64, settings: &[&str]) -> Option<Self> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let binary = Product::to_take_over()?;
        let folder = RunFolder::new().expect("a folder on /dev/shm");
        let guest = Dense::start(folder.path(), RAM_BYTES, 1, hot_permille).expect("a stand-in");
        let (state, log) = (folder.path().join("state"), folder.path().join("log"));
        let settings = settings.iter().map(|word| (*word).to_owned()).collect();
        let product = Product::start_in(Role::DaemonWith(settings), &binary, &state, &log);
        let product = product.unwrap_or_else(|e| panic!("{e}"));
        product.attach(guest.pid(), VM).expect("attach");
        Some(Self {
            guest,
            product,
            _folder: folder,
            _turn: turn,
        })
    }

    fn show(&self) -> Value {
        self.product.show(VM).expect("show")
    }

    /// How many threads are evicting beside the VM's own just now.
    fn helpers(&self) -> usize {
        let threads = format!("/proc/{}/task", self.product.pid().expect("it runs"));
        let threads = std::fs::read_dir(threads).expect("its threads");
        let name = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("comm"));
        threads
            .flatten()
            .filter_map(|thread| name(thread).ok())
            .filter(|name| name.starts_with("pt-evict-"))
            .count()
    }

    fn until(&self, what: &str, mut holds: impl FnMut(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let vm = self.show();
            if holds(&vm) {
                return vm;
            }
            assert!(
                Instant::now() < deadline,
                "{what} is not so after {PATIENCE:?}: {vm}\n{}",
                self.product.log_tail()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn first_reclaim_of_a_vm_that_was_only_watched_takes_what_is_cold() {
    // So that a sweep takes seconds, which takes minutes at the default cost and without a limit. This
    // one never presses.
    let Some(scene) = Scene::set(&["--tracker-cost", "20%"]) else {
        return;
    };
    scene.product.limit(VM, 2 * RAM_BYTES).expect("limit");
    // Two sweeps tell hot from cold; nobody has asked for anything until then.
    scene.until("two sweeps", |vm| number(vm, "sweeps") >= 2);
    let before = scene.show();
    assert_eq!(number(&before, "evicted_pages"), 0, "{before}");
    let pages = RAM_BYTES / PAGE_BYTES;
    let evicted = scene.product.reclaim(VM, RAM_BYTES / 2).expect("reclaim");
    assert!(
        number(&evicted, "reclaimed_bytes") >= RAM_BYTES / 2,
        "{evicted}"
    );
    let vm = scene.show();
    // An eighth is hot. Of victims by chance every fourth page would be it, and come back at once.
    let came_back = number(&vm, "vcpu_faults") - number(&before, "vcpu_faults");
    assert!(came_back < pages / 2 / 20, "{came_back} faults: {vm}");
}

#[test]
fn first_limit_of_a_busy_vm_takes_what_is_cold_although_nobody_knew() {
    let hot_permille = 750;
    let Some(scene) = Scene::of(hot_permille, &[]) else {
        return;
    };
    let hot_bytes = RAM_BYTES / 1000 * hot_permille;
    let limit = hot_bytes + (RAM_BYTES - hot_bytes) / 2;
    scene.product.limit(VM, limit).expect("limit");
    let vm = scene.until("a squeezed VM", |vm| number(vm, "resident_bytes") <= limit);
    // What goes by guess comes back, and something else goes for it: eight times as much did.
    let needed = (RAM_BYTES - limit) / PAGE_BYTES;
    assert!(number(&vm, "evicted_pages") < 2 * needed, "{vm}");
    assert!(number(&vm, "vcpu_faults") < needed / 4, "{vm}");
}

#[test]
fn several_threads_evict_from_one_vm_and_lose_nothing() {
    let Some(mut scene) = Scene::set(&["--evict-threads", "4"]) else {
        return;
    };
    let limit = RAM_BYTES / 4;
    let mut most_helpers = 0;
    for _ in 0..3 {
        scene.product.limit(VM, limit).expect("limit");
        scene.until("a squeezed VM", |vm| {
            most_helpers = most_helpers.max(scene.helpers());
            number(vm, "resident_bytes") <= limit
        });
        scene.guest.verify().expect("each byte is right");
        scene.product.limit(VM, RAM_BYTES).expect("limit");
    }
    assert!(most_helpers > 1, "{most_helpers} threads have helped");
    let vm = scene.show();
    assert_eq!(number(&vm, "alias_faults"), 0, "{vm}");
    assert!(
        number(&vm, "evicted_pages") >= 3 * RAM_BYTES / 2 / PAGE_BYTES,
        "{vm}"
    );
    scene.product.detach(VM).expect("detach");
    scene.guest.verify().expect("each byte is right");
}

#[test]
fn detach_that_is_interrupted_stops_and_the_vm_is_served_and_squeezed_as_before() {
    let Some(mut scene) = Scene::set(&[]) else {
        return;
    };
    let hot_pages = RAM_BYTES / PAGE_BYTES * HOT_PERMILLE / 1000;
    let cold_pages = RAM_BYTES / PAGE_BYTES - hot_pages;
    let evict = |scene: &Scene| {
        let limit = (hot_pages + cold_pages / 8) * PAGE_BYTES;
        scene.product.limit(VM, limit).expect("limit");
        scene.until("a squeezed VM", |vm| number(vm, "resident_bytes") <= limit)
    };
    // One may be through before it is told to stop.
    let stopped = (0..5).any(|_| {
        evict(&scene);
        let mut detach = Command::new(Product::binary().expect("it was there"))
            .args(["vm", "detach", VM, "--json", "--api"])
            .arg(scene.product.api())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the client starts");
        // Until it is under way, or through.
        let is_under_way = loop {
            match scene.product.show(VM) {
                Ok(vm) if vm["state"] == "detaching" => break true,
                Ok(_) => std::thread::yield_now(),
                Err(_gone) => break false,
            }
            if detach.try_wait().expect("it is ours").is_some() {
                break false;
            }
        };
        if is_under_way {
            let pid = rustix::process::Pid::from_child(&detach);
            rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it is told");
        }
        let ended = detach.wait_with_output().expect("it ends");
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        match ended.status.code() {
            Some(2) => assert!(said.contains("was stopped"), "{said}"),
            Some(0) => {
                scene.product.attach(scene.guest.pid(), VM).expect("attach");
            }
            other => panic!("{other:?}: {said}"),
        }
        ended.status.code() == Some(2)
    });
    assert!(stopped, "no detach took long enough to be stopped");
    let vm = scene.show();
    assert_eq!(vm["state"], "attached", "{vm}");
    assert!(
        vm["eviction_blockers"]
            .as_array()
            .expect("a list")
            .is_empty()
    );
    evict(&scene);
    scene.product.detach(VM).expect("detach");
    scene.guest.verify().expect("each byte is right");
}
