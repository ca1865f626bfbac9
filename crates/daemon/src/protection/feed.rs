// SPDX-License-Identifier: Apache-2.0
//! [`Feed`]: the thread that takes records from the access log and distributes them.
//!
//! # A turn
//! ```text
//!   evictions, faults ─► records, as many as the rate allows ─► wait
//!                        └─ to the VM's policies, to the recording
//!   once a second: time passes for the policies
//! ```
//! Turns are [`TURN`] apart while records are wanted, and one second apart otherwise. One turn can take
//! at most as many records as an engine's ring or the buffers of a function hold, so the rate is bounded
//! even if the setting is not.

use super::{
    recording::{Batch, Recording, RecordingReport, RecordingRequest},
    vm::{Believed, VmProtection},
};
use crate::control::ControlError;
use pagetide_access_log::{AccessRecord, Service as RecordedService};
use pagetide_addr::{DeviceId, DomainId};
use pagetide_policy::protect::PolicyChoice;
use pagetide_sys::clock::{self, now};
use pagetide_vpri::{AccessSource, LogRecord, Logging, Service};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Time between two turns while records are wanted: engines have room for more than that.
const TURN: Duration = Duration::from_millis(50);
/// The same during a recording, which should miss nothing.
const TURN_RECORDING: Duration = Duration::from_millis(10);
/// Time between two turns while no records are wanted.
const TURN_IDLE: Duration = Duration::from_secs(1);
/// Records taken at once: few enough that they are still in the L1 cache when they are handed on, and do
/// not evict the working set of an engine on the same CPU from it.
const TAKE_RECORDS: usize = 256;
/// Policies are notified of the passing time this often.
const SECOND: Duration = Duration::from_secs(1);
/// A VM as the feed knows it.
#[derive(Clone)]
struct FedVm {
    name: Arc<str>,
    protection: Arc<VmProtection>,
}

/// Configuration of a feed.
pub struct FeedConfig {
    /// Most records per second while nothing is recorded.
    pub rate: u32,
}

struct State {
    vms: Vec<FedVm>,
    /// Incremented with each change of `vms`.
    generation: u64,
    /// Removed devices that the thread has not processed yet.
    leaving: Vec<DeviceId>,
    is_stopped: bool,
    /// The thread has panicked.
    is_broken: bool,
}

struct Shared {
    source: Arc<dyn AccessSource>,
    rate: u32,
    state: Mutex<State>,
    changed: Condvar,
    recording: Mutex<Option<Recording>>,
    foreign: AtomicU64,
}

/// See the module.
pub struct Feed {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Held while a recording begins or ends, which may wait for a writer's thread.
    recorder: Mutex<()>,
}

impl Feed {
    /// Starts the thread, with no VM yet.
    ///
    /// # Errors
    /// An error message: no thread.
    pub fn start(source: Arc<dyn AccessSource>, config: &FeedConfig) -> Result<Self, ControlError> {
        let shared = Arc::new(Shared {
            source,
            rate: config.rate,
            state: Mutex::new(State {
                vms: Vec::new(),
                generation: 1,
                leaving: Vec::new(),
                is_stopped: false,
                is_broken: false,
            }),
            changed: Condvar::new(),
            recording: Mutex::new(None),
            foreign: AtomicU64::new(0),
        });
        let its = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("pt-access-log".into())
            .spawn(move || {
                let run = || FeedThread::new(Arc::clone(&its)).run();
                if catch_unwind(AssertUnwindSafe(run)).is_err() {
                    its.give_up();
                }
            })
            .map_err(|error| {
                ControlError::failed(format!("no thread for the access log: {error}"))
            })?;
        Ok(Self {
            shared,
            thread: Mutex::new(Some(thread)),
            recorder: Mutex::default(),
        })
    }

    /// From now on `protection` receives the accesses of its VM.
    pub fn add(&self, name: &str, protection: &Arc<VmProtection>) {
        self.change(|vms| {
            vms.push(FedVm {
                name: name.into(),
                protection: Arc::clone(protection),
            });
        });
    }

    /// `protection` receives nothing any more.
    pub fn remove(&self, protection: &Arc<VmProtection>) {
        self.change(|vms| vms.retain(|fed| !Arc::ptr_eq(&fed.protection, protection)));
    }

    /// A VM's policy or RAM has changed: records may be wanted now.
    pub(crate) fn look_again(&self) {
        self.change(|_| ());
    }

    /// A device was removed, and its number is not reused. Engines may still hold records of it; they do
    /// not add it again.
    pub(crate) fn device_left(&self, device: DeviceId) {
        self.change_state(|state| state.leaving.push(device));
    }

    fn change(&self, change: impl FnOnce(&mut Vec<FedVm>)) {
        self.change_state(|state| change(&mut state.vms));
    }

    fn change_state(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.shared.lock();
        change(&mut state);
        state.generation += 1;
        self.shared.changed.notify_all();
    }

    /// Records of memory that belongs to no attached VM.
    pub fn foreign_records(&self) -> u64 {
        self.shared.foreign.load(Relaxed)
    }

    /// Starts a recording.
    ///
    /// # Errors
    /// An error message: the request is invalid, or another recording is active.
    pub(crate) fn start_recording(
        &self,
        request: RecordingRequest,
        device: Option<DeviceId>,
        names: BTreeMap<DeviceId, String>,
    ) -> Result<RecordingReport, ControlError> {
        request.check()?;
        let one_at_a_time = self.recorder.lock();
        let _one_at_a_time = one_at_a_time.unwrap_or_else(PoisonError::into_inner);
        if self.shared.lock().is_broken {
            return Err(ControlError::failed(
                "the thread of the access log has panicked (see the log): restart the daemon",
            ));
        }
        let mut last = self.shared.recording();
        if last.as_ref().is_some_and(Recording::takes_records) {
            return Err(ControlError::refused(
                "accesses are being recorded already: end that by `pagetide dpu log stop` first",
            ));
        }
        // The last recording has ended, but may still be writing; the next would reuse its files'
        // numbers.
        let thread = last.as_mut().and_then(Recording::take_thread);
        drop(last);
        wait_for_writer(thread);
        let started = Recording::start(request, device, names)?;
        let report = started.report();
        *self.shared.recording() = Some(started);
        self.look_again();
        Ok(report)
    }

    /// Progress of the last recording.
    ///
    /// # Errors
    /// There was none.
    pub(crate) fn recording(&self) -> Result<RecordingReport, ControlError> {
        let recording = self.shared.recording();
        let report = recording.as_ref().map(Recording::report);
        report.ok_or_else(|| {
            ControlError::not_found("nothing was ever recorded: see `pagetide dpu log start`")
        })
    }

    /// Ends the recording, if one is active, and waits until its files are complete.
    ///
    /// # Errors
    /// There was none.
    pub(crate) fn stop_recording(&self) -> Result<RecordingReport, ControlError> {
        let one_at_a_time = self.recorder.lock();
        let _one_at_a_time = one_at_a_time.unwrap_or_else(PoisonError::into_inner);
        let thread = self.shared.recording().as_mut().and_then(|recording| {
            recording.end();
            recording.take_thread()
        });
        wait_for_writer(thread);
        self.look_again();
        self.recording()
    }

    /// Ends the thread and the recording.
    pub(crate) fn stop(&self) {
        self.shared.lock().is_stopped = true;
        self.shared.changed.notify_all();
        let thread = self.thread.lock();
        let thread = thread.unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of the access log ended by a panic");
        }
        if self.shared.recording().is_some()
            && let Err(error) = self.stop_recording()
        {
            tracing::error!(%error, "the recording of accesses does not end well");
        }
    }
}

fn wait_for_writer(thread: Option<JoinHandle<()>>) {
    if thread.is_some_and(|thread| thread.join().is_err()) {
        tracing::error!("the thread that wrote the access log ended by a panic");
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recording(&self) -> MutexGuard<'_, Option<Recording>> {
        self.recording
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread has panicked. Protected sections would never be released, so all protection ends.
    fn give_up(&self) {
        tracing::error!(
            "the thread of the access log ended by a panic: no VM's DMA is protected from eviction any more, and \
             nothing is recorded; VMs run on, restart the daemon to have that again"
        );
        let vms = {
            let mut state = self.lock();
            state.is_broken = true;
            state.vms.clone()
        };
        for fed in vms {
            fed.protection.choose(&PolicyChoice::None);
        }
        if let Some(recording) = self.recording().as_mut() {
            recording.end();
        }
        self.source.want(Logging::Off);
    }
}

/// Receivers of records.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hearers {
    /// The policies.
    Policies,
    /// The policies and a recording, of one device or of all.
    RecordingToo(Option<DeviceId>),
}

impl Hearers {
    /// True if the accesses of `device` are recorded.
    fn record(self, device: DeviceId) -> bool {
        match self {
            Self::Policies => false,
            Self::RecordingToo(only) => only.is_none_or(|only| only == device),
        }
    }
}

/// Rate limit for taking records.
struct Allowance {
    /// Records a second.
    rate: u32,
    /// Unused millionths of a record.
    rest: u128,
}

impl Allowance {
    /// Records allowed for the time passed. A fraction of a record carries over to the next call.
    fn of(&mut self, passed: Duration) -> usize {
        let parts = u128::from(self.rate) * passed.as_micros() + self.rest;
        self.rest = parts % 1_000_000;
        usize::try_from(parts / 1_000_000).unwrap_or(usize::MAX / 2)
    }
}

/// State of the feed thread.
struct FeedThread {
    shared: Arc<Shared>,
    generation: u64,
    vms: Vec<FedVm>,
    /// Index into `vms` by space.
    spaces: HashMap<DomainId, usize>,
    /// Devices that were removed. Their numbers are not reused, so this grows by a word with each
    /// removed device.
    left: HashSet<DeviceId>,
    /// The source's epoch at the last check.
    epoch: u64,
    allowance: Allowance,
    records: Vec<LogRecord>,
    /// Records on their way to the recording, by index into `vms`.
    batches: BTreeMap<usize, Vec<AccessRecord>>,
    /// Records that should be recorded but are invalid.
    refused: u64,
    lost_before: u64,
    took_at: Instant,
    second_at: Instant,
}

impl FeedThread {
    fn new(shared: Arc<Shared>) -> Self {
        let (rate, epoch) = (shared.rate, shared.source.epoch());
        Self {
            shared,
            generation: 0,
            vms: Vec::new(),
            spaces: HashMap::new(),
            left: HashSet::new(),
            epoch,
            allowance: Allowance { rate, rest: 0 },
            refused: 0,
            records: Vec::new(),
            batches: BTreeMap::new(),
            lost_before: 0,
            took_at: Instant::now(),
            second_at: Instant::now(),
        }
    }

    fn run(mut self) {
        while self.follow() {
            let hearers = self.hearers();
            let is_recorded = hearers != Hearers::Policies;
            let wanted = match is_recorded || self.vms.iter().any(|fed| fed.protection.is_active())
            {
                true => Logging::On,
                false => Logging::Off,
            };
            self.shared.source.want(wanted);
            for fed in &self.vms {
                fed.protection.hear_fates(now());
            }
            if wanted == Logging::On {
                self.take(hearers);
            }
            self.pass_seconds();
            self.rest(match (wanted, hearers) {
                (Logging::On, Hearers::RecordingToo(_)) => TURN_RECORDING,
                (Logging::On, Hearers::Policies) => TURN,
                (Logging::Off, _) => TURN_IDLE,
            });
        }
        self.shared.source.want(Logging::Off);
    }

    /// Updates the lists of VMs and devices; returns false once the feed is stopped.
    fn follow(&mut self) -> bool {
        let mut state = self.shared.lock();
        if state.generation != self.generation {
            self.generation = state.generation;
            self.vms.clone_from(&state.vms);
            self.spaces.clear();
        }
        let leaving = std::mem::take(&mut state.leaving);
        let is_stopped = state.is_stopped;
        drop(state);
        for fed in &self.vms {
            for device in &leaving {
                fed.protection.device_left(*device);
            }
        }
        self.left.extend(leaving);
        let epoch = self.shared.source.epoch();
        if epoch != self.epoch {
            self.epoch = epoch;
            for fed in &self.vms {
                fed.protection.all_devices_left();
            }
        }
        !is_stopped
    }

    fn hearers(&self) -> Hearers {
        let mut recording = self.shared.recording();
        match recording.as_mut() {
            Some(recording) => {
                recording.end_if_due();
                match recording.takes_records() {
                    true => Hearers::RecordingToo(recording.only()),
                    false => Hearers::Policies,
                }
            }
            None => Hearers::Policies,
        }
    }

    fn rest(&self, time: Duration) {
        let state = self.shared.lock();
        let news = |state: &mut State| state.generation == self.generation && !state.is_stopped;
        let rested = self.shared.changed.wait_timeout_while(state, time, news);
        drop(rested.unwrap_or_else(PoisonError::into_inner));
    }

    /// Takes as many records as the rate allows since the last call.
    fn take(&mut self, hearers: Hearers) {
        let passed = self.took_at.elapsed().min(2 * TURN);
        self.took_at = Instant::now();
        let allowed = self.allowance.of(passed);
        let mut left = match hearers {
            Hearers::RecordingToo(_) => usize::MAX / 2,
            Hearers::Policies => allowed,
        };
        let mut taken = std::mem::take(&mut self.records);
        loop {
            let asked = left.min(TAKE_RECORDS);
            taken.clear();
            self.shared.source.take(asked, &mut taken);
            self.hand_on(&taken, hearers);
            left = left.saturating_sub(taken.len());
            if taken.len() < asked || left == 0 {
                break;
            }
        }
        self.records = taken;
        if hearers != Hearers::Policies {
            self.hand_batches_on();
        }
        self.lost_before = self.shared.source.lost();
    }

    fn hand_on(&mut self, taken: &[LogRecord], hearers: Hearers) {
        let now = now();
        let mut looked = false;
        let mut rest = taken;
        while let Some(first) = rest.first() {
            let same = rest.iter().take_while(|record| record.space == first.space);
            let (of_space, behind) = rest.split_at(same.count());
            rest = behind;
            let Some(place) = self.place_of(first.space, &mut looked) else {
                self.shared
                    .foreign
                    .fetch_add(of_space.len() as u64, Relaxed);
                continue;
            };
            let Some(fed) = self.vms.get(place) else {
                continue;
            };
            if hearers == Hearers::Policies && !fed.protection.is_active() {
                continue;
            }
            let batch = self.batches.entry(place).or_default();
            let mut listening = fed.protection.listen();
            for record in of_space {
                let has_left = self.left.contains(&record.device);
                let believed = (!has_left).then(|| listening.record(record, now));
                if hearers.record(record.device) {
                    match believed.flatten() {
                        Some(believed) => batch.push(as_recorded(believed, record)),
                        None => self.refused = self.refused.saturating_add(1),
                    }
                }
            }
        }
    }

    /// The VM that a space belongs to. Hotplugged RAM adds domains: an unknown one is searched for once
    /// per turn.
    fn place_of(&mut self, space: DomainId, looked: &mut bool) -> Option<usize> {
        if let Some(place) = self.spaces.get(&space) {
            return Some(*place);
        }
        if !std::mem::replace(looked, true) {
            self.spaces.clear();
            for (place, fed) in self.vms.iter().enumerate() {
                let domains = fed.protection.mmu().domains();
                self.spaces
                    .extend(domains.iter().map(|domain| (domain.id(), place)));
            }
        }
        self.spaces.get(&space).copied()
    }

    fn hand_batches_on(&mut self) {
        let lost = self.shared.source.lost().saturating_sub(self.lost_before);
        let lost = lost.saturating_add(std::mem::take(&mut self.refused));
        let mut recording = self.shared.recording();
        let Some(recording) = recording.as_mut() else {
            self.batches.clear();
            return;
        };
        for (place, records) in std::mem::take(&mut self.batches) {
            if let Some(fed) = self.vms.get(place)
                && !records.is_empty()
            {
                recording.record(Batch {
                    vm: Arc::clone(&fed.name),
                    memory_bytes: fed.protection.memory_bytes(),
                    records,
                });
            }
        }
        if lost > 0 {
            recording.lost(lost);
        }
    }

    fn pass_seconds(&mut self) {
        if self.second_at.elapsed() < SECOND {
            return;
        }
        self.second_at = Instant::now();
        for fed in &self.vms {
            fed.protection.second_ends(now());
        }
    }
}

/// Converts a record: its address becomes relative to the VM's memory.
fn as_recorded(believed: Believed, record: &LogRecord) -> AccessRecord {
    AccessRecord {
        time_ns: clock::ns(believed.at),
        device: record.device,
        space: DomainId(0),
        address: believed.address,
        len_bytes: record.len_bytes,
        access: record.access,
        service: match record.service {
            Service::Block => RecordedService::Block,
            Service::Network => RecordedService::Network,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_access_log::AccessLogReader;
    use pagetide_addr::{Access, PAGE_BYTES, PageRange, SectionNo};
    use pagetide_sys::memory_file::GuestFile;
    use pagetide_vpri::{DmaMmu, DomainTable, IoSpace};
    use std::sync::atomic::AtomicBool;

    const PAGES: u64 = 2048;
    const PATIENCE: Duration = Duration::from_secs(30);

    /// A log that hands out records it was given, and remembers whether records are wanted.
    #[derive(Default)]
    struct Source {
        waiting: Mutex<Vec<LogRecord>>,
        wanted: Mutex<Option<Logging>>,
        lost: AtomicU64,
        epoch: AtomicU64,
        /// The next turn panics.
        is_cursed: AtomicBool,
    }

    impl AccessSource for Source {
        fn want(&self, wanted: Logging) {
            *self.wanted.lock().unwrap() = Some(wanted);
        }

        fn epoch(&self) -> u64 {
            self.epoch.load(Relaxed)
        }

        fn take(&self, most: usize, into: &mut Vec<LogRecord>) {
            assert!(!self.is_cursed.load(Relaxed), "as the test asked for");
            let mut waiting = self.waiting.lock().unwrap();
            let count = most.min(waiting.len());
            into.extend(waiting.drain(..count));
        }

        fn lost(&self) -> u64 {
            self.lost.load(Relaxed)
        }
    }

    struct Rig {
        feed: Feed,
        source: Arc<Source>,
        protection: Arc<VmProtection>,
        space: DomainId,
        _domain: Arc<dyn IoSpace>,
    }

    fn eventually(what: &str, condition: impl Fn() -> bool) {
        let began = Instant::now();
        while !condition() {
            assert!(began.elapsed() < PATIENCE, "waited in vain: {what}");
            std::thread::yield_now();
        }
    }

    impl Rig {
        fn new(policy: &str) -> Self {
            let source = Arc::new(Source::default());
            let config = FeedConfig { rate: 1000 };
            let feed = Feed::start(Arc::clone(&source) as _, &config).unwrap();
            let file = GuestFile::new_memfd("ram", PAGES * PAGE_BYTES).unwrap();
            let table = DomainTable::new(1);
            let domain = table.open(file.key().unwrap(), PAGES * PAGE_BYTES);
            let domain = domain.unwrap() as Arc<dyn IoSpace>;
            let ram = PageRange::new(pagetide_addr::PageNo(0), pagetide_addr::PageNo(PAGES));
            let mmu = Arc::new(DmaMmu::new([(Arc::clone(&domain), ram)]));
            let choice = policy.parse().unwrap();
            let protection = Arc::new(VmProtection::new(&choice, mmu, vec![ram], None));
            feed.add("vm", &protection);
            Self {
                feed,
                source,
                protection,
                space: domain.id(),
                _domain: domain,
            }
        }

        fn put(&self, space: DomainId, device: u32, page: u64) {
            self.source.waiting.lock().unwrap().push(LogRecord {
                time_ns: u64::try_from(now().as_nanos()).unwrap(),
                device: DeviceId(device),
                space,
                address: page * PAGE_BYTES,
                len_bytes: 4096,
                access: Access::Read,
                service: Service::Network,
            });
        }

        fn wanted(&self) -> Option<Logging> {
            *self.source.wanted.lock().unwrap()
        }
    }

    #[test]
    fn what_a_device_touches_is_protected_and_memory_of_no_vm_is_counted() {
        let rig = Rig::new("lru:share=1");
        rig.put(DomainId(77), 1, 0);
        rig.put(rig.space, 1, 600);
        eventually("the section to be protected", || {
            rig.protection.protected().contains(SectionNo(1))
        });
        assert_eq!(rig.feed.foreign_records(), 1);
        assert_eq!(rig.wanted(), Some(Logging::On));
    }

    #[test]
    fn log_is_wanted_as_long_as_a_vm_has_a_policy_or_something_is_recorded() {
        let rig = Rig::new("none");
        eventually("a first turn", || rig.wanted() == Some(Logging::Off));
        rig.protection.choose(&"adp".parse().unwrap());
        rig.feed.look_again();
        eventually("records to be wanted", || rig.wanted() == Some(Logging::On));
        rig.feed.remove(&rig.protection);
        eventually("nobody to want records", || {
            rig.wanted() == Some(Logging::Off)
        });
    }

    #[test]
    fn late_records_of_a_device_that_left_do_not_bring_it_back() {
        let rig = Rig::new("lru:share=1");
        rig.put(rig.space, 1, 0);
        eventually("protection", || rig.protection.protected().len() == 1);
        rig.feed.device_left(DeviceId(1));
        eventually("release", || rig.protection.protected().is_empty());
        rig.put(rig.space, 1, 0);
        rig.put(rig.space, 2, 600);
        eventually("the other device's", || {
            rig.protection.protected().contains(SectionNo(1))
        });
        let devices = rig.protection.report().devices;
        assert_eq!(devices.len(), 1);
        assert_eq!(devices[0].device, DeviceId(2));
    }

    #[test]
    fn devices_of_a_source_that_begins_anew_are_others_whatever_their_numbers() {
        let rig = Rig::new("lru:share=1");
        rig.put(rig.space, 1, 0);
        eventually("protection", || rig.protection.protected().len() == 1);
        rig.source.epoch.store(2, Relaxed);
        eventually("release", || rig.protection.protected().is_empty());
        rig.put(rig.space, 1, 600);
        eventually("protection", || rig.protection.protected().len() == 1);
        assert!(rig.protection.protected().contains(SectionNo(1)));
    }

    #[test]
    fn thread_that_panics_leaves_nothing_protected_and_ends_the_recording() {
        let rig = Rig::new("lru:share=1");
        let dir = tempfile::tempdir().unwrap();
        let begin = || {
            rig.feed
                .start_recording(request(dir.path()), None, BTreeMap::new())
        };
        begin().unwrap();
        rig.put(rig.space, 1, 0);
        eventually("protection", || rig.protection.protected().len() == 1);
        rig.source.is_cursed.store(true, Relaxed);
        eventually("the recording's end", || {
            !rig.feed.recording().unwrap().active
        });
        assert!(rig.protection.protected().is_empty());
        assert_eq!(rig.protection.report().policy, "none");
        assert!(begin().unwrap_err().message.contains("panic"));
    }

    #[test]
    fn allowance_below_one_record_a_turn_adds_up() {
        let mut allowance = Allowance { rate: 3, rest: 0 };
        let taken: usize = (0..200).map(|_| allowance.of(TURN)).sum();
        assert_eq!(taken, 30);
    }

    #[test]
    fn recording_loses_what_cannot_be_and_devices_beyond_the_places_and_believes_no_future() {
        let rig = Rig::new("none");
        let dir = tempfile::tempdir().unwrap();
        let before = u64::try_from(now().as_nanos()).unwrap();
        rig.feed
            .start_recording(request(dir.path()), None, BTreeMap::new())
            .unwrap();
        {
            let mut waiting = rig.source.waiting.lock().unwrap();
            let of = |device, time_ns| LogRecord {
                time_ns,
                device: DeviceId(device),
                space: rig.space,
                address: 0,
                len_bytes: 512,
                access: Access::Read,
                service: Service::Block,
            };
            waiting.extend((1..=1000).map(|device| of(device, u64::MAX / 2)));
            waiting.extend([of(1, 0), of(1, 1)]);
            waiting.push(LogRecord {
                len_bytes: u32::MAX,
                ..of(1, 0)
            });
        }
        let devices = super::super::vm::DEVICES_MAX as u64;
        eventually("the loss", || {
            rig.feed.recording().unwrap().lost_records == 1001 - devices
        });
        let report = rig.feed.stop_recording().unwrap();
        assert_eq!(report.records, devices + 2);
        let mut reader = AccessLogReader::open(&dir.path().join("vm-000001.parquet")).unwrap();
        assert_eq!(reader.meta().devices.len() as u64, devices);
        let mut records = Vec::new();
        while reader.next_batch(&mut records).unwrap() > 0 {}
        let after = u64::try_from(now().as_nanos()).unwrap();
        assert!(
            records
                .iter()
                .all(|it| (before..=after).contains(&it.time_ns))
        );
    }

    #[test]
    fn recording_that_begins_when_another_ends_shares_no_file_with_it() {
        let rig = Rig::new("none");
        let dir = tempfile::tempdir().unwrap();
        let begin = || {
            rig.feed
                .start_recording(request(dir.path()), None, BTreeMap::new())
        };
        for round in 1..=5_u64 {
            begin().unwrap();
            rig.put(rig.space, 1, round);
            eventually("the record", || rig.feed.recording().unwrap().records == 1);
            // As when its time is over: no caller waits for its files.
            rig.feed.shared.recording().as_mut().unwrap().end();
        }
        rig.feed.stop_recording().unwrap();
        // Two files are kept: none of the five recordings has replaced another's file.
        let last = dir.path().join("vm-000005.parquet");
        assert!(last.exists() && dir.path().join("vm-000004.parquet").exists());
    }

    #[test]
    fn two_daemons_that_record_into_one_directory_take_turns_and_lose_no_file() {
        let (one, other) = (Rig::new("none"), Rig::new("none"));
        let dir = tempfile::tempdir().unwrap();
        let begin = |rig: &Rig| {
            rig.feed
                .start_recording(request(dir.path()), None, BTreeMap::new())
        };
        let record = |rig: &Rig| {
            rig.put(rig.space, 1, 0);
            eventually("the record", || rig.feed.recording().unwrap().records == 1);
        };
        begin(&one).unwrap();
        record(&one);
        let refused = begin(&other).unwrap_err().message;
        assert!(refused.contains("another daemon"), "{refused}");
        assert!(other.feed.recording().is_err(), "it has not begun");
        // A daemon that ends, as in a restart, completes its file and releases the directory.
        drop(one);
        begin(&other).unwrap();
        record(&other);
        other.feed.stop_recording().unwrap();
        let log = |name: &str| AccessLogReader::open(&dir.path().join(name)).unwrap();
        let logs = ["vm-000001.parquet", "vm-000002.parquet"].map(log);
        assert!(logs.iter().all(|log| log.records() == 1));
        assert!(logs[0].meta().started_unix_ns < logs[1].meta().started_unix_ns);
    }

    fn request(dir: &std::path::Path) -> RecordingRequest {
        RecordingRequest {
            dir: dir.to_owned(),
            device: None,
            max_file_bytes: 1 << 20,
            max_files: 2,
            seconds: None,
        }
    }

    #[test]
    fn recording_holds_what_the_chosen_device_touched_and_what_was_lost_meanwhile() {
        let rig = Rig::new("none");
        let dir = tempfile::tempdir().unwrap();
        assert!(rig.feed.recording().is_err(), "nothing was recorded yet");
        let names = BTreeMap::from([(DeviceId(2), "/disk.sock".to_owned())]);
        let device = Some(DeviceId(2));
        rig.feed
            .start_recording(request(dir.path()), device, names)
            .unwrap();
        let again = rig
            .feed
            .start_recording(request(dir.path()), None, BTreeMap::new());
        assert!(again.unwrap_err().message.contains("already"));
        eventually("records to be wanted", || rig.wanted() == Some(Logging::On));
        rig.put(rig.space, 1, 5);
        rig.put(rig.space, 2, 6);
        rig.put(DomainId(99), 2, 7);
        eventually("the record", || rig.feed.recording().unwrap().records == 1);
        rig.source.lost.store(9, Relaxed);
        eventually("the loss", || {
            rig.feed.recording().unwrap().lost_records == 9
        });
        let report = rig.feed.stop_recording().unwrap();
        assert!(!report.active);
        assert_eq!(report.vms, ["vm"]);
        assert_eq!(report.error, None);
        let path = dir.path().join("vm-000001.parquet");
        let mut reader = AccessLogReader::open(&path).unwrap();
        assert_eq!(reader.meta().lost_records, 9);
        assert_eq!(reader.meta().devices[0].name, "/disk.sock");
        let mut records = Vec::new();
        assert_eq!(reader.next_batch(&mut records).unwrap(), 1);
        assert_eq!(records[0].address, 6 * PAGE_BYTES);
        eventually("nobody to want records", || {
            rig.wanted() == Some(Logging::Off)
        });
    }

    #[test]
    fn recording_that_cannot_be_is_refused_with_what_is_wrong() {
        let rig = Rig::new("none");
        let dir = tempfile::tempdir().unwrap();
        let good = request(dir.path());
        for (wrong, word) in [
            (
                RecordingRequest {
                    dir: "here".into(),
                    ..good.clone()
                },
                "absolute",
            ),
            (
                RecordingRequest {
                    dir: dir.path().join("missing"),
                    ..good.clone()
                },
                "no directory",
            ),
            (
                RecordingRequest {
                    max_files: 0,
                    ..good.clone()
                },
                "max-files",
            ),
            (
                RecordingRequest {
                    max_files: u32::MAX,
                    ..good.clone()
                },
                "max-files",
            ),
            (
                RecordingRequest {
                    max_file_bytes: 5,
                    ..good.clone()
                },
                "max-file-bytes",
            ),
            (
                RecordingRequest {
                    seconds: Some(u64::MAX),
                    ..good
                },
                "seconds",
            ),
        ] {
            let refused = rig.feed.start_recording(wrong, None, BTreeMap::new());
            let message = refused.unwrap_err().message;
            assert!(message.contains(word), "{message}");
        }
    }
}
