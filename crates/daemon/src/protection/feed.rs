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

/// What the log has brought, over all VMs.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct FeedCounts {
    /// Records that were of no attached VM's memory.
    pub(crate) foreign_records: u64,
    /// Records lost on the way here.
    pub(crate) lost_records: u64,
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

    /// What came of the log.
    pub(crate) fn counts(&self) -> FeedCounts {
        FeedCounts {
            foreign_records: self.shared.foreign.load(Relaxed),
            lost_records: self.shared.source.lost(),
        }
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
            let records = self.is_recording();
            let wanted = match records || self.vms.iter().any(|fed| fed.protection.is_active()) {
                true => Wanted::Yes,
                false => Wanted::No,
            };
            self.shared.source.want(wanted);
            for fed in &self.vms {
                fed.protection.hear_fates(now());
            }
            if wanted == Wanted::Yes {
                self.take(records);
            }
            self.pass_seconds();
            let wishes = self.bring_back();
            self.rest(match (wanted, records) {
                (Wanted::Yes, true) => TURN_RECORDING,
                (Wanted::Yes, false) => TURN,
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

    fn is_recording(&self) -> bool {
        let mut recording = self.shared.recording();
        recording.as_mut().is_some_and(|recording| {
            recording.end_if_due();
            recording.is_active()
        })
    }

    fn rest(&self, time: Duration) {
        let state = self.shared.lock();
        let news = |state: &mut State| state.generation == self.generation && !state.is_stopped;
        let rested = self.shared.changed.wait_timeout_while(state, time, news);
        drop(rested.unwrap_or_else(PoisonError::into_inner));
    }

    /// Takes as many records as the rate allows since the last time.
    fn take(&mut self, records: bool) {
        let passed = self.took_at.elapsed().min(2 * TURN);
        self.took_at = Instant::now();
        let allowed = u128::from(self.shared.rate) * passed.as_micros() / 1_000_000;
        let most = match records {
            true => usize::MAX / 2,
            false => usize::try_from(allowed).unwrap_or(usize::MAX / 2),
        };
        let mut taken = std::mem::take(&mut self.records);
        taken.clear();
        self.shared.source.take(most, &mut taken);
        self.hand_on(&taken, records);
        self.records = taken;
        if records {
            self.hand_batches_on();
        }
        self.lost_before = self.shared.source.lost();
    }

    fn hand_on(&mut self, taken: &[LogRecord], records: bool) {
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
            if records {
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
