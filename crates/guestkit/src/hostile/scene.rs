// SPDX-License-Identifier: Apache-2.0
//! A daemon with one engine, an attacked device, a victim, and the checks that all is well.
//!
//! All is well when the victim has verified more blocks, the daemon answers its API, another front
//! end can connect and is served, and the attacked device reacts as the attack permits. Once the
//! attacker has left, the attacked device must serve a well-behaved front end, and the daemon must
//! hold what it held before: descriptors, threads, mappings of files.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::front::{Front, Io, T_IN};
use super::victim::{Progress, Victim, content};
use super::{Attack, Failure, Held, Seen, Target};
use crate::product::Product;
use crate::stage::RunFolder;

/// Bytes of each disk.
pub const DISK_BYTES: u64 = 16 << 20;
/// Longest wait for what an attack must not delay.
pub const BOUND: Duration = Duration::from_secs(10);
/// Blocks that the victim has to verify to count as well.
const BLOCKS: u64 = 6;
/// Where a well-behaved front end writes on a device: behind the sectors that attacks write.
const CHECKED_SECTOR: u64 = DISK_BYTES / 512 - 256;
/// Argument of `dpu blk` that makes a device read-only.
const READ_ONLY: &str = "--read-only";
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The outcome of a case in which nothing was harmed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// What the attacked device did, which is permitted.
    Right(Seen),
    /// This machine lacks what the attack needs.
    Skipped(String),
}

/// See the module.
#[derive(Debug)]
pub struct Scene {
    product: Product,
    victim: Option<Victim>,
    attacked: PathBuf,
    bystander: PathBuf,
    before: Holdings,
    binary: PathBuf,
    folder: RunFolder,
}

/// The holdings of a process, by kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Holdings {
    counts: BTreeMap<String, u64>,
}

type Well<T = ()> = Result<T, String>;

impl Scene {
    /// Starts everything.
    ///
    /// # Errors
    /// What does not start.
    pub fn set(binary: &Path) -> Well<Self> {
        let folder = RunFolder::new().map_err(|error| format!("/dev/shm: {error}"))?;
        let (state, log) = (folder.path().join("state"), folder.path().join("log"));
        let product = Product::start(binary, &state, &log).map_err(|error| error.to_string())?;
        let mut scene = Self {
            product,
            victim: None,
            attacked: folder.path().join("attacked"),
            bystander: folder.path().join("bystander"),
            before: Holdings::default(),
            binary: binary.to_owned(),
            folder,
        };
        let victim = scene.folder.path().join("victim");
        for socket in [&victim, &scene.attacked, &scene.bystander] {
            scene.add_device(socket, &[])?;
        }
        let started = Victim::start(&victim, DISK_BYTES).map_err(|error| error.to_string())?;
        scene.victim = Some(started);
        scene.victim_goes_on("before any attack")?;
        // Objects that are created once and kept are created now.
        scene.is_served(&scene.attacked)?;
        scene.is_served(&scene.bystander)?;
        scene.before = scene.settled()?;
        Ok(scene)
    }

    /// The daemon's process id.
    ///
    /// # Errors
    /// It does not run.
    pub fn pid(&self) -> Well<u32> {
        self.product
            .pid()
            .ok_or("the daemon does not run".to_owned())
    }

    /// The end of the daemon's log.
    #[must_use]
    pub fn log_tail(&self) -> String {
        self.product.log_tail()
    }

    /// The victim's progress.
    #[must_use]
    pub fn victim(&self) -> Option<Progress> {
        self.victim.as_ref().map(Victim::progress)
    }

    /// The target of attacks.
    #[must_use]
    pub fn target(&self) -> Target {
        self.target_at(&self.attacked)
    }

    fn target_at(&self, socket: &Path) -> Target {
        Target {
            socket: socket.to_owned(),
            folder: self.folder.path().to_owned(),
        }
    }

    /// Attacks, and checks meanwhile and afterwards that all is well.
    ///
    /// # Errors
    /// What is not well. The scene must not be used any more then.
    pub fn play(&self, attack: &Attack) -> Well<Verdict> {
        let own = self.folder.path().join("own");
        let socket = if attack.options.is_empty() {
            &self.attacked
        } else {
            self.add_device(&own, &attack.options)?;
            &own
        };
        let outcome = attack.run(&self.target_at(socket));
        if matches!(outcome, Err(Failure::NotHere(_))) && !attack.options.is_empty() {
            self.remove_device(socket)?;
        }
        let held = match outcome {
            Ok(held) => held,
            Err(Failure::NotHere(why)) => return Ok(Verdict::Skipped(why)),
            Err(failure) => {
                self.well_meanwhile()
                    .map_err(|worse| format!("{failure}; and {worse}"))?;
                return Err(failure.to_string());
            }
        };
        let seen = held.seen;
        self.well_meanwhile()?;
        self.is_as_expected(attack, &held, socket)?;
        drop(held);
        self.victim_goes_on("after the attack")?;
        if attack.options.contains(&READ_ONLY) {
            self.is_read(socket)?;
        } else {
            self.is_served(socket)?;
        }
        if !attack.options.is_empty() {
            self.remove_device(socket)?;
        }
        self.holds_what_it_held()?;
        Ok(Verdict::Right(seen))
    }

    /// Checks that all but the attacked device is well.
    ///
    /// # Errors
    /// What is not.
    pub fn well_meanwhile(&self) -> Well {
        self.lives()?;
        self.victim_goes_on("during the attack")?;
        self.devices()?;
        self.is_served(&self.bystander)
    }

    fn lives(&self) -> Well {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid()?));
        match stat {
            Ok(stat) if !stat.contains(") Z ") => Ok(()),
            _ => Err("the daemon has died".to_owned()),
        }
    }

    fn victim_goes_on(&self, when: &str) -> Well {
        let Some(victim) = &self.victim else {
            return Err("there is no victim".to_owned());
        };
        let outcome = victim.advance(BLOCKS, BOUND);
        outcome.map_err(|failure| {
            self.lives()
                .err()
                .unwrap_or_else(|| format!("{when}: {failure}"))
        })
    }

    fn is_as_expected(&self, attack: &Attack, held: &Held, socket: &Path) -> Well {
        if !attack.expected.contains(&held.seen) {
            let (seen, right) = (held.seen, &attack.expected);
            return Err(format!("the device {seen:?}; right is one of {right:?}"));
        }
        if held.seen == Seen::Stopped {
            self.until("the device is listed as stopped", || {
                Ok(self.device(socket)?["state"] == "stopped")
            })?;
        }
        if let Some((field, value)) = &attack.listed {
            let device = self.device(socket)?;
            if device[*field] != *value {
                let listed = &device[*field];
                return Err(format!(
                    "its \"{field}\" is listed as {listed}, not {value}"
                ));
            }
        }
        Ok(())
    }

    /// Connects as any front end would, once the device has released the previous one.
    fn is_served(&self, socket: &Path) -> Well {
        let bytes = content(CHECKED_SECTOR, u64::from(std::process::id()), 64 << 10);
        self.is_served_by(socket, |front| front.check(CHECKED_SECTOR, &bytes))
    }

    /// As [`Scene::is_served`], without a write.
    fn is_read(&self, socket: &Path) -> Well {
        let io = Io::of_slot(0, T_IN, CHECKED_SECTOR, 64 << 10);
        self.is_served_by(socket, |front| front.do_io(0, io))
    }

    fn is_served_by(
        &self,
        socket: &Path,
        check: impl Fn(&mut Front) -> Result<(), Failure>,
    ) -> Well {
        let deadline = Instant::now() + BOUND;
        let name = socket.file_name().unwrap_or_default().to_string_lossy();
        loop {
            let checked = Front::start(socket).and_then(|mut front| check(&mut front));
            match checked {
                Ok(()) => return Ok(()),
                Err(failure) if Instant::now() > deadline => {
                    return Err(format!(
                        "a front end of device `{name}` is not served: {failure}"
                    ));
                }
                Err(_) => thread::sleep(LOOK_EVERY),
            }
        }
    }

    /// Serves a new disk on `socket`, with further arguments for `dpu blk`.
    ///
    /// # Errors
    /// The daemon refuses, or does not answer.
    pub fn add_device(&self, socket: &Path, options: &[&str]) -> Well {
        let image = socket.with_extension("raw");
        let made = File::create(&image).and_then(|file| file.set_len(DISK_BYTES));
        made.map_err(|error| format!("{}: {error}", image.display()))?;
        let mut words: Vec<&OsStr> = ["dpu", "blk", "--socket"].map(OsStr::new).to_vec();
        words.extend([socket.as_os_str(), "--image".as_ref(), image.as_os_str()]);
        words.extend(options.iter().map(OsStr::new));
        self.client(&words).map(drop)
    }

    /// Removes the device at `socket`.
    ///
    /// # Errors
    /// The daemon refuses, or does not answer.
    pub fn remove_device(&self, socket: &Path) -> Well {
        let words: Vec<&OsStr> = ["dpu", "remove", "--socket"].map(OsStr::new).to_vec();
        self.client(&[&words[..], &[socket.as_os_str()]].concat())
            .map(drop)
    }

    fn devices(&self) -> Well<Vec<Value>> {
        let printed = self.client(&["dpu", "list", "--json"].map(OsStr::new))?;
        let mut list: Value =
            serde_json::from_str(&printed).map_err(|error| format!("dpu list: {error}"))?;
        match list["devices"].take() {
            Value::Array(devices) => Ok(devices),
            other => Err(format!("dpu list has {other} for devices")),
        }
    }

    fn device(&self, socket: &Path) -> Well<Value> {
        let name = socket.to_string_lossy();
        let devices = self.devices()?;
        let found = devices.into_iter().find(|device| device["socket"] == *name);
        found.ok_or_else(|| format!("dpu list has no device at {name}"))
    }

    /// Runs a client, which has to end within [`BOUND`]; returns its output.
    fn client(&self, words: &[&OsStr]) -> Well<String> {
        let name = words.iter().take(2).map(|word| word.to_string_lossy());
        let name = name.collect::<Vec<_>>().join(" ");
        let failed = |error: io::Error| format!("`{name}`: {error}");
        let mut child = Command::new(&self.binary)
            .args(words)
            .arg("--api")
            .arg(self.product.api())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let deadline = Instant::now() + BOUND;
        while child.try_wait().map_err(failed)?.is_none() {
            if Instant::now() > deadline {
                child.kill().map_err(failed)?;
                child.wait().map_err(failed)?;
                return Err(format!("`{name}` is not answered within {BOUND:?}"));
            }
            thread::sleep(Duration::from_millis(1));
        }
        let output = child.wait_with_output().map_err(failed)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(format!("`{name}`: {}", said.trim()))
    }

    fn until(&self, what: &str, mut holds: impl FnMut() -> Well<bool>) -> Well {
        let deadline = Instant::now() + BOUND;
        while !holds()? {
            if Instant::now() > deadline {
                return Err(format!("not within {BOUND:?}: {what}"));
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// The daemon's holdings once they no longer change.
    fn settled(&self) -> Well<Holdings> {
        let mut last = Holdings::of(self.pid()?)?;
        let mut same = 0;
        self.until("the daemon holds the same for a while", || {
            let now = Holdings::of(self.pid()?)?;
            same = if now == last { same + 1 } else { 0 };
            last = now;
            Ok(same > 10)
        })?;
        Ok(last)
    }

    fn holds_what_it_held(&self) -> Well {
        let deadline = Instant::now() + BOUND;
        loop {
            let now = Holdings::of(self.pid()?)?;
            let more = now.beyond(&self.before);
            if more.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("the daemon still holds {}", more.join(", ")));
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Checks that the attacked device serves a well-behaved front end again.
    ///
    /// # Errors
    /// It does not, or the daemon holds more than it did.
    pub fn well_afterwards(&self) -> Well {
        self.victim_goes_on("after the attack")?;
        self.is_served(&self.attacked)?;
        self.holds_what_it_held()
    }

    /// Sends SIGTERM to the daemon, which has to end within [`BOUND`].
    ///
    /// # Errors
    /// It does not end; the error has what its threads wait for, and the daemon is killed.
    pub fn end(mut self) -> Well {
        self.lives()?;
        let pid = self.pid()?;
        let asked = i32::try_from(pid)
            .ok()
            .and_then(rustix::process::Pid::from_raw);
        let asked = asked.ok_or("the daemon has no process id")?;
        rustix::process::kill_process(asked, rustix::process::Signal::TERM)
            .map_err(|error| format!("SIGTERM: {error}"))?;
        let ended = self.until("the daemon ends on SIGTERM", || Ok(self.lives().is_err()));
        let ended = ended.map_err(|why| format!("{why}; its threads: {}", threads_of(pid)));
        self.product.kill();
        ended
    }
}

impl Holdings {
    fn of(pid: u32) -> Well<Self> {
        let mut counts: BTreeMap<String, u64> = BTreeMap::new();
        let mut count = |kind: String| *counts.entry(kind).or_default() += 1;
        let folder = |name: &str| {
            let path = format!("/proc/{pid}/{name}");
            fs::read_dir(&path).map_err(|error| format!("{path}: {error}"))
        };
        for entry in folder("fd")?.flatten() {
            if let Ok(link) = fs::read_link(entry.path()) {
                let name = link.to_string_lossy();
                // Inodes differ from one socket to the next.
                let name = name.split('[').next().unwrap_or_default();
                count(format!("descriptors of {name}"));
            }
        }
        for entry in folder("task")?.flatten() {
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            // The API's runtime and the kernel's io_uring keep threads for a while.
            let is_kept = name.starts_with("tokio") || name.starts_with("iou-");
            if !is_kept && !name.is_empty() {
                count(format!("threads named {}", name.trim()));
            }
        }
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"));
        for line in maps.map_err(|error| error.to_string())?.lines() {
            let file = line.split_whitespace().nth(5).unwrap_or_default();
            if file.starts_with('/') {
                count(format!("mappings of {file}"));
            }
        }
        Ok(Self { counts })
    }

    /// Holdings in excess of `before`.
    fn beyond(&self, before: &Self) -> Vec<String> {
        let more = |(kind, count): (&String, &u64)| {
            let had = before.counts.get(kind).copied().unwrap_or_default();
            (*count > had).then(|| format!("{} more {kind}", count - had))
        };
        self.counts.iter().filter_map(more).collect()
    }
}

/// The threads of a process and where in the kernel they are, to help find the cause.
fn threads_of(pid: u32) -> String {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return "none".to_owned();
    };
    let lines = tasks.flatten().map(|task| {
        let read = |name| fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let (comm, waits, call) = (read("comm"), read("wchan"), read("syscall"));
        let call = call
            .split_whitespace()
            .take(3)
            .collect::<Vec<_>>()
            .join(" ");
        format!("{} in {} ({call})", comm.trim(), waits.trim())
    });
    lines.collect::<Vec<_>>().join("; ")
}
