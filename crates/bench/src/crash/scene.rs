// SPDX-License-Identifier: Apache-2.0
//! What is killed, and the VMs that must not notice more than a pause.
//!
//! ```text
//!   stand-in "main", with a disk ─┐
//!   stand-in "small" ─────────────┼─ daemon ─ tiers: memory, a file on disk, a Redis server
//!   or a stock guest as "main" ───┘     └──── DPU process with the disk, or the disk is in the daemon
//! ```
//! *main* is served all the time. *small* is the one that is attached and detached, so that it takes no longer than
//! the other acts. A budget of four fifths of their RAM, for what is resident and
//! what is stored, keeps both squeezed; the hot part of *main* moves on, so that pages go
//! down all tiers and come back. With the disk in the daemon, pages go to the file first, else to the server; to the
//! other one while the first has no room. The server is not killed: it is another host's.

use super::{
    guests::VerifiedGuest,
    plan::Cast,
    process::{PATIENCE, Role, Served},
};
use crate::{
    busy::{
        disk::{DiskCounted, IMAGE_BYTES},
        guest::{BusyGuestOptions, Order, RamSize},
        process::BusyGuest,
        ram::HugePages,
    },
    daemon::directory_in,
    options::{GivenSetting, flags},
    orders::daemon_program,
    programs::Programs,
    redis::RedisServer,
};
use hyper::Method;
use pagetide_addr::SECTION_BYTES;
use serde_json::{Value, json};
use std::{
    ffi::OsString,
    fs::File,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Names of the VMs.
pub(super) const MAIN: &str = "main";
pub(super) const SMALL: &str = "small";
/// RAM of the second VM.
const SMALL_BYTES: u64 = 64 << 20;
/// vCPUs of *main*. Each VM has one, which rests: where both took all of two CPUs, no background work would get any.
const VCPUS: u32 = 1;
/// Pause of a vCPU between two touches, in microseconds.
const REST_US: u64 = 20;
/// Hot part of *main*, in thousandths of its RAM.
const HOT_PERMILLE: u32 = 250;
/// Most sections that it moves on in a minute: 40 MiB a second.
const SECTIONS_A_MINUTE_MAX: u64 = 1200;
/// The budget, in thousandths of the RAM of both, and when it is to be kept while it is smaller.
const BUDGET_PERMILLE: u64 = 800;
const SMALL_BUDGET_PERMILLE: u64 = 700;
/// When cold memory goes to zstd, and to the disk: pages of the moving part come back after some seconds.
const SETTINGS: [&str; 2] = ["--demote-after=300ms", "--sink-after=1s"];
/// Limit of the slow tier that pages go to first; where more is cold than that, the other one is used, too.
const FIRST_TIER_BYTES: u64 = 128 << 20;
/// Limit of the other one, and of the disk if it is alone.
const TIER_BYTES: u64 = 8 << 30;
/// File systems on disk hold these.
const ON_DISK: &str = "/var/tmp";
/// Requests of the disk after which it is taken to be served again: more than are under way at a time.
const REQUESTS_SERVED: u64 = 8;
/// Between two looks.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// The VM that is served all the time.
pub(super) enum Main {
    StandIn(BusyGuest),
    Stock(Box<VerifiedGuest>),
}

/// See the module.
pub(super) struct Scene {
    pub daemon: Served,
    pub dpu: Option<Served>,
    pub main: Main,
    pub small: BusyGuest,
    pub program: PathBuf,
    /// Why there is no remote tier.
    pub without_remote: Option<String>,
    /// Work on the disk that no death has to do with.
    pub disk_before: DiskCounted,
    budget_bytes: [u64; 2],
    /// Dropped last: everything lies there.
    _places: Places,
}

struct Places {
    /// Must be there until the daemon has ended.
    server: Result<RedisServer, String>,
    pagetide: PathBuf,
    _programs: Programs,
    in_memory: tempfile::TempDir,
    on_disk: tempfile::TempDir,
}

impl Places {
    fn new() -> Result<Self, String> {
        let programs = Programs::new()?;
        let in_memory = directory_in(Path::new("/dev/shm"))?;
        Ok(Self {
            server: RedisServer::start(in_memory.path()),
            pagetide: programs.put(&daemon_program()?, "pagetide")?,
            _programs: programs,
            in_memory,
            on_disk: directory_in(Path::new(ON_DISK))?,
        })
    }

    fn state(&self, name: &str) -> PathBuf {
        self.in_memory.path().join(name)
    }

    /// An image for the disk, and the socket that it is served at.
    fn image(&self) -> Result<(PathBuf, PathBuf), String> {
        let image = self.on_disk.path().join("image");
        let made = File::create(&image).and_then(|file| file.set_len(IMAGE_BYTES));
        made.map_err(|error| format!("{}: {error}", image.display()))?;
        Ok((self.state("disk.sock"), image))
    }
}

/// The slow tiers of the daemon, in their order.
fn slow_tiers(cast: Cast, places: &Places) -> String {
    let disk = places.on_disk.path().join("tier");
    let disk = |bytes: u64| format!("disk:{}={bytes}", disk.display());
    let Ok(server) = &places.server else {
        return disk(TIER_BYTES);
    };
    let remote = |bytes: u64| format!("remote:redis://127.0.0.1:{}={bytes}", server.port());
    match cast {
        Cast::Daemon => format!("{},{}", disk(FIRST_TIER_BYTES), remote(TIER_BYTES)),
        Cast::WithDpu | Cast::Guest => {
            format!("{},{}", remote(FIRST_TIER_BYTES), disk(TIER_BYTES))
        }
    }
}

fn daemon_role(cast: Cast, places: &Places, budget_bytes: u64, settings: &[GivenSetting]) -> Role {
    let mut arguments: Vec<OsString> = vec![
        "run".into(),
        format!("--tiers=zero,same,lz4,zstd,{}", slow_tiers(cast, places)).into(),
        format!("--host-budget={budget_bytes}").into(),
        format!("--budget-lock={}", places.state("budget.lock").display()).into(),
    ];
    arguments.extend(SETTINGS.map(OsString::from));
    arguments.extend(flags(settings).into_iter().map(OsString::from));
    Role {
        program: places.pagetide.clone(),
        arguments,
        state_dir: places.state("daemon"),
    }
}

impl Scene {
    /// Starts everything and squeezes it.
    pub(super) fn open(
        cast: Cast,
        ram_bytes: u64,
        settings: &[GivenSetting],
    ) -> Result<Self, String> {
        let places = Places::new()?;
        let (socket, image) = places.image()?;
        let program = places.pagetide.clone();
        let of_both = ram_bytes + SMALL_BYTES;
        let budget_bytes =
            [BUDGET_PERMILLE, SMALL_BUDGET_PERMILLE].map(|permille| of_both / 1000 * permille);
        let mut role = daemon_role(cast, &places, budget_bytes[0], settings);
        let dpu = match cast {
            Cast::Daemon => None,
            Cast::WithDpu | Cast::Guest => Some(Served::start(Role {
                program: program.clone(),
                arguments: vec!["dpu".into()],
                state_dir: places.state("dpu"),
            })?),
        };
        if dpu.is_some() {
            role.arguments.push("--dpu".into());
            role.arguments
                .push(places.state("dpu").join("vpri.sock").into());
        }
        let daemon = Served::start(role)?;
        let device = json!({"socket": socket, "image": image, "raw": true});
        let devices = dpu.as_ref().unwrap_or(&daemon);
        devices.order(Method::POST, "/v1/devices", &device)?;
        let main = match cast {
            Cast::Daemon | Cast::WithDpu => Main::StandIn(BusyGuest::start(
                places.on_disk.path(),
                &main_options(ram_bytes, &socket)?,
            )?),
            Cast::Guest => Main::Stock(Box::new(VerifiedGuest::boot(
                places.in_memory.path(),
                ram_bytes,
                &socket,
            )?)),
        };
        let small = BusyGuest::start(places.on_disk.path(), &small_options()?)?;
        let scene = Self {
            daemon,
            dpu,
            main,
            small,
            program,
            without_remote: places.server.as_ref().err().cloned(),
            disk_before: DiskCounted::default(),
            budget_bytes,
            _places: places,
        };
        scene.attach(MAIN)?;
        scene.attach(SMALL)?;
        Ok(scene)
    }

    /// The process in which the devices are.
    pub(super) fn devices(&self) -> &Served {
        self.dpu.as_ref().unwrap_or(&self.daemon)
    }

    /// The request to attach a VM.
    pub(super) fn attach_body(&self, name: &str) -> Value {
        let pid = match (name == SMALL, &self.main) {
            (true, _) => self.small.pid(),
            (false, Main::StandIn(guest)) => guest.pid(),
            (false, Main::Stock(guest)) => guest.pid(),
        };
        json!({"pid": pid, "name": name})
    }

    /// Attaches a VM.
    pub(super) fn attach(&self, name: &str) -> Result<(), String> {
        let body = self.attach_body(name);
        self.daemon
            .order(Method::POST, "/v1/vms", &body)
            .map(|_| ())
    }

    /// A VM's figures.
    pub(super) fn vm(&self, name: &str) -> Result<Value, String> {
        self.daemon.ask(&format!("/v1/vms/{name}"))
    }

    /// The state of a VM; `None` if it is not attached.
    pub(super) fn state(&self, name: &str) -> Result<Option<String>, String> {
        let list: Value = self.daemon.ask("/v1/vms")?;
        let vms = list["vms"].as_array().map_or(&[][..], Vec::as_slice);
        let vm = vms.iter().find(|vm| vm["name"] == name);
        Ok(vm.map(|vm| vm["state"].as_str().unwrap_or_default().to_owned()))
    }

    /// Makes the budget smaller, or as it was.
    pub(super) fn set_budget(&self, is_small: Squeeze) -> Result<(), String> {
        let bytes = match is_small {
            Squeeze::Usual => self.budget_bytes[0],
            Squeeze::Strong => self.budget_bytes[1],
        };
        let body = json!({"budget_bytes": bytes});
        self.daemon
            .order(Method::PUT, "/v1/host/budget", &body)
            .map(|_| ())
    }

    /// Whether a VM has more than it may have now.
    pub(super) fn is_over_budget(&self) -> Result<bool, String> {
        let host: Value = self.daemon.ask("/v1/host")?;
        let is_over = |vm: &Value| vm["resident_bytes"].as_u64() > vm["target_bytes"].as_u64();
        let vms = host["vms"].as_array();
        Ok(host["over_bytes"].as_u64() > Some(0) || vms.is_some_and(|vms| vms.iter().any(is_over)))
    }

    /// Waits until *small* is attached and nothing is half done; attaches it if it is not.
    pub(super) fn mend(&self) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            let late = begun.elapsed() > PATIENCE;
            match self.state(SMALL)?.as_deref() {
                Some("attached" | "serving-only") => return Ok(()),
                Some(_) => {}
                None => match self.attach(SMALL) {
                    Ok(()) => return Ok(()),
                    Err(error) if late => return Err(error),
                    // The DPU process may be away from the daemon for a moment longer.
                    Err(_) => {}
                },
            }
            if late {
                return Err(self.daemon.with_log("a VM is not served again"));
            }
            std::thread::sleep(10 * LOOK_AGAIN);
        }
    }

    /// Detaches *small*.
    pub(super) fn detach_small(&self) -> Result<(), String> {
        let path = format!("/v1/vms/{SMALL}");
        let asked = self.daemon.order_aside(Method::DELETE, &path, None)?;
        asked.answer().map(|_| ())
    }

    /// Begins a new count of stalls; the longest since the last death, which no death has to do with.
    pub(super) fn begin_watch(&mut self) -> Result<u64, String> {
        let of_small = self.small.count()?.longest_gap_ns;
        match &mut self.main {
            Main::StandIn(guest) => Ok(of_small.max(guest.count()?.longest_gap_ns)),
            Main::Stock(_) => Ok(of_small),
        }
    }

    /// Whether a stand-in has found a page wrong.
    pub(super) fn has_wrong_page(&self) -> bool {
        let of_main = match &self.main {
            Main::StandIn(guest) => guest.wrong(),
            Main::Stock(_) => None,
        };
        of_main.or(self.small.wrong()).is_some()
    }

    /// Begins a new count of the disk's work.
    pub(super) fn drain_disk(&mut self) -> Result<(), String> {
        if let Main::StandIn(guest) = &mut self.main {
            let counted = guest.disk(&Order::Disk)?;
            add(&mut self.disk_before, counted);
        }
        Ok(())
    }

    /// Waits until all vCPUs have gone on after `since_ns`; the longest time that one of them did not, as far as
    /// the VMs tell.
    pub(super) fn wait_for_vcpus(&mut self, since_ns: u64) -> Result<u64, String> {
        let begun = Instant::now();
        let mut longest_ns = 0;
        for guest in [Some(&mut self.small), self.main.stand_in()] {
            let Some(guest) = guest else { continue };
            while guest.laggards(since_ns)? > 0 {
                if begun.elapsed() > PATIENCE {
                    return Err(self.daemon.with_log("a vCPU does not go on"));
                }
                std::thread::sleep(LOOK_AGAIN);
            }
            longest_ns = longest_ns.max(guest.count()?.longest_gap_ns);
        }
        if let Main::Stock(guest) = &mut self.main {
            guest.wait_for_memory(PATIENCE)?;
        }
        Ok(longest_ns)
    }

    /// Waits until the disk is served again, and says what was done on it since the last time.
    pub(super) fn wait_for_disk(&mut self) -> Result<DiskCounted, String> {
        let begun = Instant::now();
        let mut all = DiskCounted::default();
        loop {
            match &mut self.main {
                Main::StandIn(guest) => {
                    let counted = guest.disk(&Order::Disk)?;
                    let goes_on = counted.requests;
                    add(&mut all, counted);
                    if goes_on >= REQUESTS_SERVED || all.first_wrong.is_some() {
                        return Ok(all);
                    }
                }
                Main::Stock(_) => {
                    // QEMU's handshake is over when the rings of its disk run.
                    let devices: Value = self.devices().ask("/v1/devices")?;
                    if devices["devices"][0]["wired_bytes"].as_u64() > Some(0) {
                        return Ok(all);
                    }
                }
            }
            if begun.elapsed() > PATIENCE {
                return Err(self.devices().with_log("the disk is not served"));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}

/// How much the budget leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Squeeze {
    Usual,
    Strong,
}

impl Main {
    fn stand_in(&mut self) -> Option<&mut BusyGuest> {
        match self {
            Self::StandIn(guest) => Some(guest),
            Self::Stock(_) => None,
        }
    }
}

/// Adds what was counted later.
pub(super) fn add(all: &mut DiskCounted, later: DiskCounted) {
    all.requests += later.requests;
    all.failed_requests += later.failed_requests;
    all.compared_blocks += later.compared_blocks;
    all.wrong_blocks += later.wrong_blocks;
    all.wrong_bytes += later.wrong_bytes;
    all.longest_ns = all.longest_ns.max(later.longest_ns);
    all.hang_ups += later.hang_ups;
    all.under_way_at_hang_up += later.under_way_at_hang_up;
    all.under_way = later.under_way;
    if all.first_wrong.is_none() {
        all.first_wrong = later.first_wrong;
    }
}

fn options_of(ram_bytes: u64, vcpus: u32, pattern: &str) -> Result<BusyGuestOptions, String> {
    Ok(BusyGuestOptions {
        ram_mib: ram_bytes >> 20,
        size: RamSize::Exact,
        vcpus,
        first_cpu: 0,
        disk: None,
        // Each touch is a sign of life.
        batch: 1,
        rest_us: REST_US,
        time_faults: false,
        pattern: pattern.parse().map_err(|error| format!("{error}"))?,
        huge_pages: HugePages::NotAdvised,
    })
}

fn main_options(ram_bytes: u64, disk: &Path) -> Result<BusyGuestOptions, String> {
    let speed = (ram_bytes / SECTION_BYTES * 5).min(SECTIONS_A_MINUTE_MAX);
    let pattern = format!("moving:{HOT_PERMILLE}:{speed}");
    Ok(BusyGuestOptions {
        disk: Some(disk.to_owned()),
        ..options_of(ram_bytes, VCPUS, &pattern)?
    })
}

fn small_options() -> Result<BusyGuestOptions, String> {
    options_of(SMALL_BYTES, 1, "moving:400:120")
}
