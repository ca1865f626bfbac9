// SPDX-License-Identifier: Apache-2.0
//! The orders in which a VM may come to its end: detached, killed, its daemon told to end, at any moment
//! and several at once.
//!
//! The VMs are [stand-ins](pagetide_guestkit::stand_in), so a life takes a fraction of a second and each
//! order is tried many times, killed at a random moment of it. Whatever the order: the
//! client gets one answer, which is no failure of the daemon's; the name is free again; the daemon holds
//! what it held before its first VM; no pool is left.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_guestkit::leaks::{Snapshot, wait_for_release};
use pagetide_guestkit::product::{Answer, Product};
use pagetide_guestkit::stage::RunFolder;
use pagetide_guestkit::stand_in::{RamPages, StandIn, StandInSpec};
use pagetide_random::SplitMix64;
use rustix::process::Signal;

/// RAM of a VM.
const RAM_MIB: u64 = 24;
/// Of that, what is evicted before its end.
const EVICTED: &str = "16M";
/// A VM's name.
const VM: &str = "vm";
/// Longest wait for what takes milliseconds on a machine that is not busy: that the daemon notices and
/// lets go.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest time that the daemon may take to end.
const END_PATIENCE: Duration = Duration::from_secs(120);
const LOOK_AGAIN: Duration = Duration::from_millis(5);
const SEED: u64 = 0x5eed_0fde_ad4d;

static TURN: Mutex<()> = Mutex::new(());

/// A daemon and the means to have VMs.
struct Yard {
    _turn: MutexGuard<'static, ()>,
    product: Option<Product>,
    program: PathBuf,
    image: PathBuf,
    /// What the daemon held when its device was there, and its first front end had come and gone: a
    /// device keeps the ends of its last connection until there is another.
    with_device: Option<Snapshot>,
    random: SplitMix64,
    findings: Vec<String>,
    daemons: u32,
    folder: RunFolder,
}

/// Whether a VM has a device of the daemon's.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Device {
    None,
    Disk,
}

/// Who is killed, and when, once the act has begun.
#[derive(Clone, Copy)]
enum Kill {
    At(Duration),
    Never,
}

impl Yard {
    /// `None` where the product cannot be tried, after saying why.
    fn open() -> Option<Self> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        Product::to_take_over()?;
        let folder = RunFolder::new().expect("a folder on /dev/shm");
        let built = Path::new(env!("CARGO_BIN_EXE_stand-in"));
        let program = StandIn::program(built, folder.path()).expect("a program");
        let image = folder.path().join("disk.raw");
        fs::File::create(&image)
            .and_then(|image| image.set_len(1 << 20))
            .expect("an image");
        let mut yard = Self {
            _turn: turn,
            product: None,
            program,
            image,
            with_device: None,
            random: SplitMix64::new(SEED),
            findings: Vec::new(),
            daemons: 0,
            folder,
        };
        yard.new_daemon();
        Some(yard)
    }

    fn product(&self) -> &Product {
        self.product.as_ref().expect("a daemon")
    }

    /// Another daemon, with state of its own.
    fn new_daemon(&mut self) {
        self.daemons += 1;
        self.with_device = None;
        let state = self.state_dir();
        let log = self.folder.path().join(format!("log{}", self.daemons));
        let binary = Product::binary().expect("built");
        let product = Product::start(&binary, &state, &log);
        self.product = Some(product.unwrap_or_else(|error| panic!("{error}")));
    }

    fn state_dir(&self) -> PathBuf {
        self.folder.path().join(format!("state{}", self.daemons))
    }

    fn random_below(&mut self, bound: Duration) -> Duration {
        let micros = u64::try_from(bound.as_micros())
            .expect("a short time")
            .max(1);
        Duration::from_micros(self.random.below(micros))
    }

    fn socket(&self) -> PathBuf {
        self.folder
            .path()
            .join(format!("disk{}.sock", self.daemons))
    }

    /// The daemon's device, made if there is none.
    fn device(&mut self) -> PathBuf {
        let socket = self.socket();
        if self.product().device(&socket).is_err() {
            let product = self.product();
            product.serve_disk(&socket, &self.image).expect("a disk");
        }
        if self.with_device.is_none() {
            self.with_device = Some(self.after_first_front_end(&socket));
        }
        socket
    }

    fn after_first_front_end(&self, socket: &Path) -> Snapshot {
        let spec = StandInSpec {
            ram_mib: RAM_MIB,
            threads: 2,
            pages: RamPages::Usual,
            disk: Some(socket.to_owned()),
        };
        let mut first = StandIn::start(&self.program, &spec).expect("a stand-in");
        first.kill().expect("an end");
        let deadline = Instant::now() + PATIENCE;
        while self.product().device(socket).expect("a device")["state"] != "listening" {
            assert!(Instant::now() < deadline, "the front end is there still");
            thread::sleep(LOOK_AGAIN);
        }
        let pid = self.product().pid().expect("it runs");
        Snapshot::settled(pid, PATIENCE).expect("it runs")
    }

    fn new_vm(&mut self, device: Device) -> StandIn {
        let disk = (device == Device::Disk).then(|| self.device());
        let spec = StandInSpec {
            ram_mib: RAM_MIB,
            threads: 2,
            pages: RamPages::Usual,
            disk,
        };
        StandIn::start(&self.program, &spec).expect("a stand-in")
    }

    /// Attaches it; a host under load may have to be asked again.
    fn attach(&self, vm: &StandIn) {
        let deadline = Instant::now() + PATIENCE;
        while let Err(error) = self.product().attach(vm.pid(), VM) {
            let again = error.to_string().contains("try again") && Instant::now() < deadline;
            assert!(again, "{error}");
            thread::sleep(LOOK_AGAIN);
        }
    }

    /// A VM that is attached, most of it evicted.
    fn squeezed_vm(&mut self, device: Device) -> StandIn {
        let vm = self.new_vm(device);
        self.attach(&vm);
        let words = ["vm", "reclaim", VM, "--bytes", EVICTED];
        let answer = self.product().client(words).expect("a client");
        answer.success().expect("reclaim");
        vm
    }

    /// Has a client do `words` while the VM is killed as `kill` says. Returns the answer.
    fn act(&self, vm: &StandIn, kill: Kill, words: &[&str]) -> Answer {
        thread::scope(|scope| {
            let client = scope.spawn(|| self.product().client(words).expect("a client"));
            if let Kill::At(moment) = kill {
                thread::sleep(moment);
                vm.signal(Signal::KILL).expect("it is not waited for yet");
            }
            client.join().expect("no panic")
        })
    }

    fn complain(&mut self, what: impl Into<String>) {
        self.findings.push(what.into());
    }

    /// The answer to a call about a VM that may have died meanwhile: it was done, or there is no such VM,
    /// or it is about to end.
    fn expect_no_failure(&mut self, answer: &Answer) {
        if !matches!(answer.status.code(), Some(0 | 2)) {
            self.complain(format!("{}: {}", answer.status, answer.said.trim()));
        }
    }

    /// The VM is dead, or detached: nothing is left of it. If something is, another daemon takes over, so that
    /// each finding is one of its own.
    fn expect_nothing_left(&mut self) {
        let before = self.findings.len();
        let deadline = Instant::now() + PATIENCE;
        while !self.product().vms().expect("a list").is_empty() {
            if Instant::now() > deadline {
                self.complain("the VM is still listed");
                break;
            }
            thread::sleep(LOOK_AGAIN);
        }
        self.expect_released();
        self.expect_no_pool();
        if self.findings.len() > before {
            self.product.as_mut().expect("a daemon").kill();
            self.new_daemon();
        }
    }

    /// It holds what it held before its first VM; with a device, what it held when that was made.
    fn expect_released(&mut self) {
        let product = self.product();
        let has_device = !product.devices().expect("a list").is_empty();
        let growth = match &self.with_device {
            Some(before) if has_device => {
                let pid = product.pid().expect("it runs");
                wait_for_release(pid, before, PATIENCE).expect("it runs")
            }
            _ => product.growth(PATIENCE).expect("it runs"),
        };
        if !growth.is_empty() {
            self.complain(format!("it holds {growth}"));
        }
    }

    fn expect_no_pool(&mut self) {
        let listing = fs::read_dir(self.state_dir()).expect("a state directory");
        let pools: Vec<_> = listing
            .map(|entry| entry.expect("an entry").path())
            .filter(|path| path.extension().is_some_and(|end| end == "pool"))
            .collect();
        if !pools.is_empty() {
            self.complain(format!("left behind: {pools:?}"));
        }
    }

    /// Ends the test: says how often something was wrong in how many rounds.
    fn close(mut self, rounds: u32) {
        let findings = std::mem::take(&mut self.findings);
        // Its own last look must find nothing, too; but what was found is told first.
        if !findings.is_empty()
            && let Some(product) = &mut self.product
        {
            product.kill();
        }
        assert!(
            findings.is_empty(),
            "{} findings in {rounds} rounds: {findings:#?}",
            findings.len()
        );
    }
}

/// How long `words` take when nobody dies, for a VM as they find it.
fn undisturbed(yard: &mut Yard, device: Device, words: &[&str]) -> Duration {
    let mut vm = yard.squeezed_vm(device);
    let begun = Instant::now();
    yard.act(&vm, Kill::Never, words)
        .success()
        .expect("nothing disturbs it");
    let took = begun.elapsed();
    vm.kill().expect("an end");
    yard.expect_nothing_left();
    took
}

fn killed_in_detach(device: Device, rounds: u32) {
    let Some(mut yard) = Yard::open() else { return };
    let words = ["vm", "detach", VM];
    let took = undisturbed(&mut yard, device, &words);
    for _ in 0..rounds {
        let mut vm = yard.squeezed_vm(device);
        let moment = yard.random_below(took * 5 / 4);
        let answer = yard.act(&vm, Kill::At(moment), &words);
        yard.expect_no_failure(&answer);
        vm.kill().expect("an end");
        yard.expect_nothing_left();
    }
    yard.close(rounds);
}

#[test]
fn vmm_killed_at_any_moment_of_a_detach_leaves_nothing() {
    killed_in_detach(Device::None, 100);
}

#[test]
fn vmm_with_a_device_killed_at_any_moment_of_a_detach_leaves_nothing() {
    killed_in_detach(Device::Disk, 30);
}

#[test]
fn vmm_killed_at_any_moment_of_an_attach_leaves_nothing() {
    let Some(mut yard) = Yard::open() else { return };
    let begun = Instant::now();
    let mut vm = yard.new_vm(Device::None);
    yard.attach(&vm);
    let took = begun.elapsed();
    vm.kill().expect("an end");
    yard.expect_nothing_left();
    let rounds = 60;
    for round in 0..rounds {
        let device = if round % 3 == 0 {
            Device::Disk
        } else {
            Device::None
        };
        let mut vm = yard.new_vm(device);
        let moment = yard.random_below(took);
        let pid = vm.pid().to_string();
        let answer = yard.act(
            &vm,
            Kill::At(moment),
            &["attach", "--pid", &pid, "--name", VM],
        );
        yard.expect_no_failure(&answer);
        vm.kill().expect("an end");
        yard.expect_nothing_left();
    }
    yard.close(rounds);
}

#[test]
fn vmm_killed_at_any_moment_of_a_reclaim_or_under_a_limit_leaves_nothing() {
    let Some(mut yard) = Yard::open() else { return };
    let rounds = 30;
    let acts: [&[&str]; 2] = [
        &["vm", "reclaim", VM, "--bytes", EVICTED],
        &["vm", "limit", VM, "16M"],
    ];
    for round in 0..rounds {
        let mut vm = yard.new_vm(Device::None);
        yard.attach(&vm);
        let moment = yard.random_below(Duration::from_millis(200));
        let words = acts[usize::from(round % 2 == 1)];
        let answer = yard.act(&vm, Kill::At(moment), words);
        yard.expect_no_failure(&answer);
        vm.kill().expect("an end");
        yard.expect_nothing_left();
    }
    yard.close(rounds);
}

/// Sends the daemon SIGTERM, `act` going on at the same time; it must end well, and in time, and leave no
/// pool. Starts another.
fn expect_end(yard: &mut Yard, act: impl FnOnce(&Yard) + Send) {
    let pid = yard.product().pid().expect("it runs");
    let daemon = i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    rustix::process::kill_process(daemon.expect("a pid"), Signal::TERM).expect("a signal");
    act(yard);
    let deadline = Instant::now() + END_PATIENCE;
    let ended = loop {
        match yard.product.as_mut().expect("a daemon").ended() {
            Ok(Some(status)) => break Some(status),
            Ok(None) if Instant::now() < deadline => thread::sleep(LOOK_AGAIN),
            Ok(None) | Err(_) => break None,
        }
    };
    match ended {
        Some(status) if status.success() => {}
        Some(status) => {
            let log = yard.product().log_tail();
            yard.complain(format!("it ended with {status}:\n{log}"));
        }
        None => yard.complain("it does not end"),
    }
    yard.expect_no_pool();
    yard.product.as_mut().expect("a daemon").kill();
    yard.new_daemon();
}

#[test]
fn vmm_killed_at_any_moment_of_the_daemons_end_leaves_nothing() {
    let Some(mut yard) = Yard::open() else { return };
    let rounds = 20;
    for round in 0..rounds {
        let device = if round % 2 == 0 {
            Device::Disk
        } else {
            Device::None
        };
        let mut vm = yard.squeezed_vm(device);
        let moment = yard.random_below(Duration::from_millis(100));
        expect_end(&mut yard, |_| {
            thread::sleep(moment);
            vm.signal(Signal::KILL).expect("it is not waited for yet");
        });
        vm.kill().expect("an end");
    }
    yard.close(rounds);
}

#[test]
fn daemon_that_ends_during_a_detach_waits_for_it_and_the_vm_is_whole() {
    let Some(mut yard) = Yard::open() else { return };
    let rounds = 10;
    for _ in 0..rounds {
        let mut vm = yard.squeezed_vm(Device::None);
        let is_detaching = |yard: &Yard| {
            let vms = yard.product().vms().expect("a list");
            vms.first().is_none_or(|vm| vm["state"] == "detaching")
        };
        let client = {
            let binary = Product::binary().expect("built");
            std::process::Command::new(binary)
                .args(["vm", "detach", VM, "--api"])
                .arg(yard.product().api())
                .output_in_background()
        };
        let deadline = Instant::now() + PATIENCE;
        while !is_detaching(&yard) && Instant::now() < deadline {
            thread::yield_now();
        }
        expect_end(&mut yard, |_| ());
        let answer = client.join().expect("no panic");
        if !answer.status.success() {
            let said = String::from_utf8_lossy(&answer.stderr).into_owned();
            yard.complain(format!("{}: {said}", answer.status));
        }
        if let Err(error) = vm.verify() {
            yard.complain(error.to_string());
        }
    }
    yard.close(rounds);
}

trait InBackground {
    fn output_in_background(&mut self) -> thread::JoinHandle<std::process::Output>;
}

impl InBackground for std::process::Command {
    fn output_in_background(&mut self) -> thread::JoinHandle<std::process::Output> {
        use std::process::Stdio;
        let child = self.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let child = child.expect("a client");
        thread::spawn(move || child.wait_with_output().expect("a client's end"))
    }
}

#[test]
fn detach_asked_for_twice_at_once_is_done_once_and_each_client_is_answered() {
    let Some(mut yard) = Yard::open() else { return };
    let rounds = 10;
    for _ in 0..rounds {
        let mut vm = yard.squeezed_vm(Device::Disk);
        let words = ["vm", "detach", VM];
        let answers = thread::scope(|scope| {
            let detach = || yard.act(&vm, Kill::Never, &words);
            let both = [scope.spawn(detach), scope.spawn(detach)];
            both.map(|client| client.join().expect("no panic"))
        });
        let mut codes = answers.map(|answer| answer.status.code());
        codes.sort_unstable();
        if codes != [Some(0), Some(2)] {
            yard.complain(format!("two clients ended with {codes:?}"));
        }
        if let Err(error) = vm.verify() {
            yard.complain(error.to_string());
        }
        vm.kill().expect("an end");
        yard.expect_nothing_left();
    }
    yard.close(rounds);
}

#[test]
fn detach_while_a_limit_is_enforced_or_a_reclaim_under_way_leaves_the_vm_whole() {
    let Some(mut yard) = Yard::open() else { return };
    let rounds = 12;
    for round in 0..rounds {
        let mut vm = yard.new_vm(Device::None);
        yard.attach(&vm);
        yard.product().limit(VM, 16 << 20).expect("limit");
        let moment = yard.random_below(Duration::from_millis(150));
        let reclaim = ["vm", "reclaim", VM, "--bytes", EVICTED];
        let reclaimed = thread::scope(|scope| {
            let other =
                (round % 2 == 0).then(|| scope.spawn(|| yard.act(&vm, Kill::Never, &reclaim)));
            thread::sleep(moment);
            yard.product().detach(VM).expect("detach");
            other.map(|client| client.join().expect("no panic"))
        });
        if let Some(answer) = reclaimed {
            yard.expect_no_failure(&answer);
        }
        if let Err(error) = vm.verify() {
            yard.complain(error.to_string());
        }
        yard.expect_nothing_left();
        vm.kill().expect("an end");
    }
    yard.close(rounds);
}

#[test]
fn vmm_that_dies_while_no_daemon_runs_or_as_one_starts_leaves_nothing() {
    let Some(mut yard) = Yard::open() else { return };
    let rounds = 20;
    for round in 0..rounds {
        let device = if round % 4 == 3 {
            Device::Disk
        } else {
            Device::None
        };
        let mut vm = yard.squeezed_vm(device);
        yard.product.as_mut().expect("a daemon").kill();
        if round % 2 == 0 {
            vm.kill().expect("an end");
            let before = yard.product().log_end().expect("a log");
            yard.product
                .as_mut()
                .expect("a daemon")
                .run()
                .expect("a successor");
            let log = yard.product().log_since(before).expect("a log");
            if !log.contains("the VM ended while no daemon ran") {
                yard.complain(format!("not a word of the VM that ended:\n{log}"));
            }
        } else {
            let moment = yard.random_below(Duration::from_millis(60));
            thread::scope(|scope| {
                let product = yard.product.as_mut().expect("a daemon");
                let start = scope.spawn(|| product.run());
                thread::sleep(moment);
                vm.signal(Signal::KILL).expect("it is not waited for yet");
                start.join().expect("no panic").expect("a successor");
            });
            vm.kill().expect("an end");
        }
        yard.expect_nothing_left();
    }
    yard.close(rounds);
}

#[test]
fn daemon_that_ends_lets_a_vm_go_that_stands_still_and_says_what_it_leaves_there() {
    let Some(mut yard) = Yard::open() else { return };
    let mut vm = yard.squeezed_vm(Device::None);
    vm.signal(Signal::STOP).expect("it lives");
    let before = yard.product().log_end().expect("a log");
    let status = yard.product.as_mut().expect("a daemon").stop();
    let status = status.expect("it ends whatever its VMs do");
    let log = yard.product().log_since(before).expect("a log");
    assert!(status.success(), "{status}: {log}");
    // No thread of it can be borrowed: our descriptor stays there, closed on our side and of no effect.
    for words in ["the VMM keeps a descriptor of ours", "stopped by signal"] {
        assert!(log.contains(words), "not a word of '{words}': {log}");
    }
    yard.expect_no_pool();
    vm.signal(Signal::CONT).expect("it lives");
    vm.verify().expect("whole");
    yard.product
        .as_mut()
        .expect("a daemon")
        .run()
        .expect("a successor");
    let vms = yard.product().vms().expect("a list");
    assert!(vms.is_empty(), "{vms:?}");
    vm.kill().expect("an end");
    yard.expect_nothing_left();
    yard.close(1);
}
