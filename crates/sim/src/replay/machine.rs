// SPDX-License-Identifier: Apache-2.0
//! [`VmReplay`]: one VM in virtual time.

use super::{
    AccessStream, Actor, Capacity, DeviceAccount, Need, ReplayAccess, ReplayError, Service,
    VmAccount,
    bursts::FaultWindow,
    memory::{Ages, Found, Memory, Start, Trace},
};
use pagetide_addr::{DeviceId, SectionNo};
use pagetide_policy::{
    protect::{Fate, PolicyChoice, ProtectedSections, Protector, Touch},
    set_times::SetTimes,
};
use rustc_hash::FxHashMap;
use std::{sync::Arc, time::Duration};

/// Interval at which time passes for policies, as in the daemon.
const LOOK_ROUND: Duration = Duration::from_secs(1);
/// Touches of a section further apart than this would be a fault, by the paper's estimate (4.2.2).
pub(super) const LONG_REUSE: Duration = Duration::from_secs(300);
/// A VM is warmed up where it made one access for so many sections since the last time: it costs more than a few
/// misses.
const WARM_UP_PARTS: u64 = 64;
/// In which touched sections are counted.
const MINUTE_NS: u64 = 60_000_000_000;
/// Most sections of a VM: 8 TiB of 2 MiB each.
pub(super) const SECTIONS_MAX: u64 = 1 << 22;
/// Most sections times devices of a VM: each takes 8 bytes.
const KEPT_MAX: u64 = 1 << 28;
/// Devices that any VM may have, and the most that a VM may have.
const DEVICES: (u64, u64) = (64, 4096);

/// Whether the evictor hears of DMA.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DmaTouches {
    /// A touch by a device is one like another, as in the daemon: its leases and page requests are known.
    #[default]
    Seen,
    /// Only what CPUs touch is found by scans, as of the second-level page tables in the paper (VPRI 6.2).
    Unseen,
}

/// The parameters of a VM and its management.
#[derive(Clone, PartialEq, Debug)]
pub struct VmParams {
    /// Its memory, in sections.
    pub sections: u64,
    /// Bytes of a section: 2 MiB in the daemon, smaller for the small disks of old traces.
    pub section_bytes: u64,
    /// The initial content of its memory.
    pub start: Start,
    /// How the DMA of its devices is protected.
    pub policy: PolicyChoice,
    /// Whether the evictor hears of DMA.
    pub dma: DmaTouches,
    /// When a section is cold.
    pub set_times: SetTimes,
    /// Sections at the end of its memory that CPUs touch between any two scans, and nobody else: they are
    /// never cold, and no access to them is replayed.
    pub busy_sections: u64,
    /// How often to record what each device's policy holds (VPRI Fig 17), if at all.
    pub capacity_every: Option<Duration>,
    /// Sections in the order in which they were last used before the replay, the oldest first. Others were used
    /// before those.
    pub oldest_first: Vec<SectionNo>,
}

/// One device of the VM.
struct Device {
    account: DeviceAccount,
    /// Last touch of each section up to the highest, in nanoseconds and 1; 0 for never.
    touched_ns: Vec<u64>,
}

/// See the module. Without a limit nothing is evicted: [`Self::set_limit`].
pub struct VmReplay {
    params: VmParams,
    stream: Box<dyn AccessStream>,
    /// The next access, if it was fetched.
    waiting: Option<ReplayAccess>,
    is_ended: bool,
    accesses: u64,
    /// How many of them there were when it was warmed up last.
    warmed_at: u64,
    memory: Memory,
    protector: Protector,
    protected: Arc<ProtectedSections>,
    devices: Vec<Device>,
    devices_max: u64,
    index_of: FxHashMap<DeviceId, usize>,
    now: Duration,
    looked_at: Duration,
    noted_at: Option<Duration>,
    look_at: Duration,
    due: Duration,
    faults_told: u64,
    window: FaultWindow,
    account: VmAccount,
}

impl VmReplay {
    /// A VM at the beginning of its accesses.
    ///
    /// # Errors
    /// [`ReplayError::Asked`] if it has no memory, or more than can be modelled.
    pub fn new(params: VmParams, stream: Box<dyn AccessStream>) -> Result<Self, ReplayError> {
        if params.sections == 0 || params.sections > SECTIONS_MAX {
            return Err(ReplayError::Asked(format!(
                "a VM of {} sections cannot be replayed: it has 1 to {SECTIONS_MAX}",
                params.sections
            )));
        }
        let sections = params.sections;
        let mut protector = Protector::new(&params.policy, sections);
        protector.set_times(params.set_times);
        let account = VmAccount {
            sections: params.sections,
            section_bytes: params.section_bytes,
            ..VmAccount::default()
        };
        Ok(Self {
            memory: Memory::new(
                sections,
                params.section_bytes,
                params.start,
                Arc::clone(protector.protected()),
                params.set_times,
                Ages {
                    busy_sections: params.busy_sections,
                    oldest_first: &params.oldest_first,
                },
            ),
            protected: Arc::clone(protector.protected()),
            params,
            stream,
            waiting: None,
            is_ended: false,
            accesses: 0,
            warmed_at: 0,
            protector,
            devices: Vec::new(),
            devices_max: (KEPT_MAX / sections).clamp(DEVICES.0, DEVICES.1),
            index_of: FxHashMap::default(),
            now: Duration::ZERO,
            looked_at: Duration::ZERO,
            noted_at: None,
            look_at: Duration::ZERO,
            due: Duration::ZERO,
            faults_told: 0,
            window: FaultWindow::default(),
            account,
        })
    }

    /// Replays everything before `end`: accesses, and the daemon's work in between.
    ///
    /// # Errors
    /// The stream's; an access outside the VM or before the previous one.
    pub fn run_until(&mut self, end: Duration) -> Result<(), ReplayError> {
        let since = self.accesses - std::mem::replace(&mut self.warmed_at, self.accesses);
        if since * WARM_UP_PARTS >= self.params.sections {
            self.warm_up();
        }
        while let Some(access) = self.next_access()? {
            if access.at >= end {
                self.waiting = Some(access);
                break;
            }
            self.pass_to(access.at);
            self.now = access.at;
            self.touch(access);
        }
        self.pass_to(end);
        self.now = self.now.max(end);
        Ok(())
    }

    /// Before one of many VMs runs, its data that will be touched at random is read in order, which is many
    /// times faster.
    fn warm_up(&self) {
        self.memory.warm_up();
        self.protector.warm_up();
        for device in &self.devices {
            // A cache line has eight.
            for touched_ns in device.touched_ns.iter().step_by(8) {
                std::hint::black_box(*touched_ns);
            }
        }
    }

    /// Most sections that may be present from now on; `None` for any number.
    pub fn set_limit(&mut self, sections: Option<u64>) {
        self.count_time(self.now);
        self.memory.set_limit(sections);
        self.memory.wake(self.now);
        self.tell_fates();
        self.find_due();
    }

    /// True if every access has been made.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.is_ended && self.waiting.is_none()
    }

    /// What the VM needs, by the events since the last call.
    pub fn need(&mut self) -> Need {
        let devices: u64 = self.devices.iter().map(|d| d.account.faults).sum();
        let faults = self.account.cpu_faults + devices;
        let since = faults - std::mem::replace(&mut self.faults_told, faults);
        let sections = self.memory.len();
        Need {
            sections,
            taken_sections: sections - self.memory.limit().unwrap_or(sections).min(sections),
            cold_sections: self.memory.cold(),
            givable_sections: self.memory.givable(),
            faults: since,
        }
    }

    /// The counters so far.
    #[must_use]
    pub fn account(&mut self) -> VmAccount {
        self.count_time(self.now);
        let counts = self.memory.counts();
        VmAccount {
            time: self.now,
            evicted_sections: counts.evicted_sections,
            evicted_protected: counts.evicted_protected,
            scans: counts.sweeps,
            over_limit_fills: counts.over_limit_fills,
            swapped_in_ahead: counts.swapped_in_ahead,
            devices: self.devices.iter().map(|d| d.account.clone()).collect(),
            ..self.account.clone()
        }
    }

    fn next_access(&mut self) -> Result<Option<ReplayAccess>, ReplayError> {
        if let Some(access) = self.waiting.take() {
            return Ok(Some(access));
        }
        if self.is_ended {
            return Ok(None);
        }
        let Some(access) = self.stream.next()? else {
            self.is_ended = true;
            return Ok(None);
        };
        let number = self.accesses;
        self.accesses += 1;
        if access.section.0 >= self.params.sections {
            return Err(ReplayError::Outside {
                whence: self.stream.whence(),
                access: number,
                section: access.section.0,
                sections: self.params.sections,
            });
        }
        if access.at < self.now {
            return Err(ReplayError::Backwards {
                whence: self.stream.whence(),
                access: number,
                at: access.at,
                before: self.now,
            });
        }
        self.check_device(&access)?;
        Ok(Some(access))
    }

    fn check_device(&self, access: &ReplayAccess) -> Result<(), ReplayError> {
        let Actor::Device(device, _) = access.actor else {
            return Ok(());
        };
        let max = self.devices_max;
        if (self.devices.len() as u64) < max || self.index_of.contains_key(&device) {
            return Ok(());
        }
        Err(ReplayError::Devices {
            whence: self.stream.whence(),
            device: device.0,
            max,
        })
    }

    fn touch(&mut self, access: ReplayAccess) {
        let is_unseen =
            self.params.dma == DmaTouches::Unseen && matches!(access.actor, Actor::Device(..));
        let trace = if is_unseen { Trace::None } else { Trace::Left };
        let found = match trace {
            Trace::Left => self.memory.touch(access.section),
            Trace::None => self.memory.look(access.section),
        };
        let faulted = found == Found::Evicted;
        match access.actor {
            Actor::Cpu => {
                self.account.cpu_touches += 1;
                self.account.cpu_faults += u64::from(faulted);
            }
            Actor::Device(id, service) => {
                let is_first = self.memory.touch_by_device(access.section);
                let device = self.device(id, service);
                let age = device.touch(&access);
                if faulted {
                    if let Some(age) = age {
                        device.account.fault_ages.add(age);
                    }
                    device.account.faults += 1;
                    device.account.first_faults += u64::from(is_first);
                    self.window.fault(access.at, &mut self.account.bursts);
                    self.protector
                        .fate(access.section, Fate::Faulted, access.at);
                }
            }
        }
        if found != Found::Present {
            self.memory.fill(self.now, access.section, trace);
            if trace == Trace::Left {
                // The fill may have triggered a sweep; its requester touches the section after that.
                self.memory.touch(access.section);
            }
            self.tell_fates();
            self.find_due();
        }
        if let Actor::Device(id, _) = access.actor {
            let touch = Touch {
                section: access.section,
                at: access.at,
                access: access.access,
                bytes: access.bytes,
            };
            self.protector.touched(id, touch);
        }
    }

    fn device(&mut self, id: DeviceId, service: Service) -> &mut Device {
        let devices = &mut self.devices;
        let index = *self.index_of.entry(id).or_insert_with(|| {
            devices.push(Device {
                account: DeviceAccount::new(id, service),
                touched_ns: Vec::new(),
            });
            devices.len() - 1
        });
        &mut devices[index]
    }

    /// Does everything due up to `to`, in order.
    fn pass_to(&mut self, to: Duration) {
        while self.due <= to {
            self.now = self.due;
            if self.now >= self.look_at {
                self.look();
            }
            self.memory.pass(self.now);
            self.tell_fates();
            self.find_due();
        }
    }

    /// Once a second.
    fn look(&mut self) {
        self.look_at = self.now + LOOK_ROUND;
        self.count_time(self.now);
        self.protector.passed(self.now);
        self.memory.wake(self.now);
    }

    fn find_due(&mut self) {
        self.due = self.look_at.min(self.memory.due());
    }

    fn tell_fates(&mut self) {
        for section in self.memory.take_evicted() {
            let last_ns = self.devices.iter().map(|device| device.touched_at(section));
            if let Some(last_ns) = last_ns.max().filter(|last_ns| *last_ns > 0) {
                let age = self.now.saturating_sub(Duration::from_nanos(last_ns));
                self.account.eviction_ages.add(age);
            }
            self.protector.fate(section, Fate::Evicted, self.now);
        }
    }

    /// Adds the holdings since the last call to the account.
    fn count_time(&mut self, now: Duration) {
        let time = now.saturating_sub(self.looked_at);
        self.looked_at = now;
        let limit = self.memory.limit().unwrap_or(u64::MAX);
        self.account.limit.add(limit.min(self.memory.len()), time);
        self.account.resident.add(self.memory.present(), time);
        self.account.protected.add(self.protected.len(), time);
        self.account.absent.add(self.memory.absent(), time);
        let note = self.params.capacity_every.filter(|every| {
            self.noted_at
                .is_none_or(|at| now.saturating_sub(at) >= *every)
        });
        if note.is_some() {
            self.noted_at = Some(now);
        }
        for (id, report) in self.protector.reports() {
            let Some(device) = self
                .index_of
                .get(&id)
                .map(|i| &mut self.devices[*i].account)
            else {
                continue;
            };
            device.protected.add(report.protected_sections, time);
            device.dropped_sections = report.dropped_sections;
            device.policy_bytes_max = device.policy_bytes_max.max(report.bytes);
            if note.is_some() {
                device.capacity.push(Capacity {
                    at: now,
                    watched_sections: report
                        .tracked_sections
                        .saturating_sub(report.protected_sections),
                    protected_sections: report.protected_sections,
                });
            }
        }
    }
}

impl Device {
    /// When the device touched a section last, in nanoseconds and 1; 0 for never.
    fn touched_at(&self, section: SectionNo) -> u64 {
        self.touched_ns.get(section.index()).copied().unwrap_or(0)
    }

    /// Counts a touch. Returns the time since the previous one, if there was one.
    fn touch(&mut self, access: &ReplayAccess) -> Option<Duration> {
        let account = &mut self.account;
        account.touches += 1;
        account.bytes += access.bytes;
        let index = access.section.index();
        if self.touched_ns.len() <= index {
            self.touched_ns.resize(index + 1, 0);
        }
        let now = u64::try_from(access.at.as_nanos()).unwrap_or(u64::MAX - 1) + 1;
        let last = std::mem::replace(&mut self.touched_ns[index], now);
        // Of the minutes since 0, counted from 1.
        let minute_of = |at_ns: u64| at_ns.div_ceil(MINUTE_NS);
        account.minute_sections += u64::from(minute_of(last) != minute_of(now));
        if last == 0 {
            account.footprint_sections += 1;
            return None;
        }
        let age = Duration::from_nanos(now.saturating_sub(last));
        account.long_reuses += u64::from(age > LONG_REUSE);
        Some(age)
    }
}
