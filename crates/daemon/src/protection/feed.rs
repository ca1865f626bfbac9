// SPDX-License-Identifier: Apache-2.0
//! [`Feed`]: the thread that takes the access log and hands it on.
//!
//! # A turn
//! ```text
//!   what was evicted, who faulted ─► records, as many as the rate allows ─► wishes ─► rest
//!                                    └─ to the VM's policies, to the recording
//!   once a second: time passes for the policies
//! ```
//! It comes [`TURN`] apart while anybody wants records, and each second otherwise. What an
//! engine's ring, or the buffers of a function, hold is what can come in one turn; so the
//! rate is bounded even if the setting is not.

use super::{
    now,
    recording::{Batch, Recording, RecordingReport, RecordingRequest},
    vm::VmProtection,
};
use crate::control::ControlError;
use pagetide_addr::{DeviceId, DomainId, PAGE_BYTES, PageRange};
use pagetide_trace::{AccessRecord, Service as RecordedService};
use pagetide_vpri::{
    AccessSource, Wanted,
    wire::{LogRecord, Service},
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Time between two turns while records are wanted: engines have room for more than so much.
const TURN: Duration = Duration::from_millis(50);
/// The same while a recording goes on, which is to miss nothing.
const TURN_RECORDING: Duration = Duration::from_millis(10);
/// Time between two turns while nobody wants records.
const TURN_IDLE: Duration = Duration::from_secs(1);
/// Policies hear of the time this often.
const SECOND: Duration = Duration::from_secs(1);
/// Pages brought back in one turn of a VM: 20,000 a second, a few per cent of a CPU's time.
const BRING_BACK_PAGES: u64 = 1024;

/// A VM as the feed knows it.
#[derive(Clone)]
struct Fed {
    name: Arc<str>,
    protection: Arc<VmProtection>,
}

/// How a feed is to be.
pub(crate) struct FeedConfig {
    /// Records a second, at most, while nothing is recorded.
    pub(crate) rate: u32,
}

struct State {
    vms: Vec<Fed>,
    /// Grows with each change of `vms`.
    generation: u64,
    is_stopped: bool,
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
pub(crate) struct Feed {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Feed {
    /// Starts the thread, with no VM yet.
    ///
    /// # Errors
    /// A sentence: no thread.
    pub(crate) fn start(
        source: Arc<dyn AccessSource>,
        config: &FeedConfig,
    ) -> Result<Self, ControlError> {
        let shared = Arc::new(Shared {
            source,
            rate: config.rate,
            state: Mutex::new(State {
                vms: Vec::new(),
                generation: 1,
                is_stopped: false,
            }),
            changed: Condvar::new(),
            recording: Mutex::new(None),
            foreign: AtomicU64::new(0),
        });
        let its = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("pt-access-log".into())
            .spawn(move || Taker::new(its).run())
            .map_err(|error| {
                ControlError::failed(format!("no thread for the access log: {error}"))
            })?;
        Ok(Self {
            shared,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// From now on `protection` hears of accesses of its VM.
    pub(crate) fn add(&self, name: &str, protection: &Arc<VmProtection>) {
        self.change(|vms| {
            vms.push(Fed {
                name: name.into(),
                protection: Arc::clone(protection),
            });
        });
    }

    /// `protection` hears of nothing any more.
    pub(crate) fn remove(&self, protection: &Arc<VmProtection>) {
        self.change(|vms| vms.retain(|fed| !Arc::ptr_eq(&fed.protection, protection)));
    }

    /// A VM's policy, or its RAM, is another: perhaps records are wanted now.
    pub(crate) fn look_again(&self) {
        self.change(|_| ());
    }

    /// A device is no more.
    pub(crate) fn device_left(&self, device: DeviceId) {
        let vms = self.shared.lock().vms.clone();
        for fed in vms {
            fed.protection.device_left(device);
        }
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Fed>)) {
        let mut state = self.shared.lock();
        change(&mut state.vms);
        state.generation += 1;
        self.shared.changed.notify_all();
    }

    /// Records that were of no attached VM's memory.
    pub(crate) fn foreign_records(&self) -> u64 {
        self.shared.foreign.load(Relaxed)
    }

    /// Begins to record.
    ///
    /// # Errors
    /// A sentence: it makes no sense, or something is being recorded.
    pub(crate) fn start_recording(
        &self,
        request: RecordingRequest,
        device: Option<DeviceId>,
        names: BTreeMap<DeviceId, String>,
    ) -> Result<RecordingReport, ControlError> {
        request.check()?;
        let mut recording = self.shared.recording();
        if recording.as_ref().is_some_and(Recording::is_active) {
            return Err(ControlError::refused(
                "accesses are being recorded already: end that by `pagetide dpu log stop` first",
            ));
        }
        let started = Recording::start(request, device, names)?;
        let report = started.report();
        *recording = Some(started);
        drop(recording);
        self.look_again();
        Ok(report)
    }

    /// How far the last recording is.
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

    /// Ends the recording, if one goes on, and waits until its files are complete.
    ///
    /// # Errors
    /// There was none.
    pub(crate) fn stop_recording(&self) -> Result<RecordingReport, ControlError> {
        let thread = self.shared.recording().as_mut().and_then(|recording| {
            recording.end();
            recording.take_thread()
        });
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that wrote the access log ended by a panic");
        }
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
}

/// Who hears of records.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hearers {
    /// The policies.
    Policies,
    /// And a recording.
    RecordingToo,
}

/// What runs on the thread.
struct Taker {
    shared: Arc<Shared>,
    generation: u64,
    vms: Vec<Fed>,
    /// By space, the place in `vms`.
    spaces: HashMap<DomainId, usize>,
    records: Vec<LogRecord>,
    /// What is on its way to the recording, by place in `vms`.
    batches: BTreeMap<usize, Vec<AccessRecord>>,
    lost_before: u64,
    took_at: Instant,
    second_at: Instant,
}

impl Taker {
    fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            generation: 0,
            vms: Vec::new(),
            spaces: HashMap::new(),
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
            let is_recorded = hearers == Hearers::RecordingToo;
            let wanted = match is_recorded || self.vms.iter().any(|fed| fed.protection.is_active())
            {
                true => Wanted::Yes,
                false => Wanted::No,
            };
            self.shared.source.want(wanted);
            for fed in &self.vms {
                fed.protection.hear_fates(now());
            }
            if wanted == Wanted::Yes {
                self.take(hearers);
            }
            self.pass_seconds();
            let wishes = self.bring_back();
            self.rest(match (wanted, hearers) {
                (Wanted::Yes, Hearers::RecordingToo) => TURN_RECORDING,
                (Wanted::Yes, Hearers::Policies) => TURN,
                (Wanted::No, _) if wishes => TURN,
                (Wanted::No, _) => TURN_IDLE,
            });
        }
        self.shared.source.want(Wanted::No);
    }

    /// Takes note of what VMs there are; false once it is over.
    fn follow(&mut self) -> bool {
        let state = self.shared.lock();
        if state.generation != self.generation {
            self.generation = state.generation;
            self.vms.clone_from(&state.vms);
            self.spaces.clear();
        }
        !state.is_stopped
    }

    fn hearers(&self) -> Hearers {
        let mut recording = self.shared.recording();
        let is_active = recording.as_mut().is_some_and(|recording| {
            recording.end_if_due();
            recording.is_active()
        });
        match is_active {
            true => Hearers::RecordingToo,
            false => Hearers::Policies,
        }
    }

    fn rest(&self, time: Duration) {
        let state = self.shared.lock();
        let news = |state: &mut State| state.generation == self.generation && !state.is_stopped;
        let rested = self.shared.changed.wait_timeout_while(state, time, news);
        drop(rested.unwrap_or_else(PoisonError::into_inner));
    }

    /// Takes as many records as the rate allows since the last time.
    fn take(&mut self, hearers: Hearers) {
        let passed = self.took_at.elapsed().min(2 * TURN);
        self.took_at = Instant::now();
        let allowed = u128::from(self.shared.rate) * passed.as_micros() / 1_000_000;
        let most = match hearers {
            Hearers::RecordingToo => usize::MAX / 2,
            Hearers::Policies => usize::try_from(allowed).unwrap_or(usize::MAX / 2),
        };
        let mut taken = std::mem::take(&mut self.records);
        taken.clear();
        self.shared.source.take(most, &mut taken);
        self.hand_on(&taken, hearers);
        self.records = taken;
        if hearers == Hearers::RecordingToo {
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
            if fed.protection.is_active() {
                let mut listening = fed.protection.listen();
                for record in of_space {
                    listening.record(record, now);
                }
            }
            if hearers == Hearers::RecordingToo {
                let batch = self.batches.entry(place).or_default();
                let recording = self.shared.recording();
                let wanted = |record: &&LogRecord| {
                    (recording.as_ref()).is_some_and(|recording| recording.wants(record.device))
                };
                let counted = |record| as_recorded(fed, record);
                batch.extend(of_space.iter().filter(wanted).filter_map(counted));
            }
        }
    }

    /// The VM that a space belongs to. Domains come with RAM that is plugged in: one that is not known
    /// is looked for once a turn.
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

    /// True if there are more wishes.
    fn bring_back(&self) -> bool {
        let mut more = false;
        for fed in &self.vms {
            fed.protection.bring_back(BRING_BACK_PAGES);
            more |= fed.protection.has_wishes();
        }
        more
    }
}

/// A record with its address counted in the VM's memory; `None` if it is not all there.
fn as_recorded(fed: &Fed, record: &LogRecord) -> Option<AccessRecord> {
    let own = PageRange::covering(record.address, u64::from(record.len_bytes))?;
    let pages = fed.protection.mmu().in_space(record.space, own)?;
    Some(AccessRecord {
        time_ns: record.time_ns,
        device: record.device,
        space: DomainId(0),
        address: pages.start.byte_offset() + record.address % PAGE_BYTES,
        len_bytes: record.len_bytes,
        access: record.access,
        service: match record.service {
            Service::Block => RecordedService::Block,
            Service::Network => RecordedService::Network,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::{Access, SectionNo};
    use pagetide_sys::memory_file::GuestFile;
    use pagetide_trace::AccessLogReader;
    use pagetide_vpri::{DmaMmu, DomainTable, IoSpace};
    use std::os::fd::AsFd;

    const PAGES: u64 = 2048;
    const PATIENCE: Duration = Duration::from_secs(30);

    /// A log that hands out what it is given, and remembers whether it is wanted.
    #[derive(Default)]
    struct Source {
        waiting: Mutex<Vec<LogRecord>>,
        wanted: Mutex<Option<Wanted>>,
        lost: AtomicU64,
    }

    impl AccessSource for Source {
        fn want(&self, wanted: Wanted) {
            *self.wanted.lock().unwrap() = Some(wanted);
        }

        fn take(&self, most: usize, into: &mut Vec<LogRecord>) {
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
            let domain = table.open(file.as_fd(), file.key().unwrap(), PAGES * PAGE_BYTES);
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

        fn wanted(&self) -> Option<Wanted> {
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
        assert_eq!(rig.wanted(), Some(Wanted::Yes));
    }

    #[test]
    fn log_is_wanted_as_long_as_a_vm_has_a_policy_or_something_is_recorded() {
        let rig = Rig::new("none");
        eventually("a first turn", || rig.wanted() == Some(Wanted::No));
        rig.protection.choose(&"adp".parse().unwrap());
        rig.feed.look_again();
        eventually("records to be wanted", || rig.wanted() == Some(Wanted::Yes));
        rig.feed.remove(&rig.protection);
        eventually("nobody to want records", || {
            rig.wanted() == Some(Wanted::No)
        });
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
        eventually("records to be wanted", || rig.wanted() == Some(Wanted::Yes));
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
            rig.wanted() == Some(Wanted::No)
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
