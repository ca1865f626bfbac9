// SPDX-License-Identifier: Apache-2.0
//! The access log as files (VPRI 5.3): requests, reports, and the thread that writes.
//!
//! ```text
//!   pt-access-log ── bounded queue ──► pt-log-writer ──► DIR/VM-000001.parquet, …
//! ```
//! Each VM has its own log, with addresses relative to the VM's memory. The thread that feeds the
//! policies never waits for the disk: when the queue is full, records are lost and counted. Files are
//! rotated and the oldest are removed, so a forgotten recording cannot fill the disk. Only one recording
//! at a time uses a directory ([`super::log_dir`]).

use super::log_dir::LogDir;
use crate::control::ControlError;
use pagetide_access_log::{
    AccessLogMeta, AccessRecord, LOG_FILE_BYTES_MIN, LOG_FILES_MAX, LogLimits, LoggedDevice,
    RotatingLog, TraceError,
};
use pagetide_addr::DeviceId;
use pagetide_report::text::Text;
use pagetide_sys::clock::{self, now};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, HashSet, btree_map::Entry},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime},
};
use utoipa::ToSchema;

/// Default size of a file, in bytes.
pub const DEFAULT_FILE_BYTES: u64 = 64 << 20;
/// Default number of files kept per VM.
pub const DEFAULT_FILES: u32 = 16;
/// Longest recording, in seconds: a week.
const SECONDS_MAX: u64 = 7 * 24 * 3600;
/// Most batches that wait for the disk: each covers a twentieth of a second, a few megabytes at most in
/// all.
const BATCHES_MAX: usize = 64;
/// Most devices of a VM in one recording: each place reused sixteen times. Every device is named in the
/// footer of each file, and the source of the log chooses the device numbers.
const LOGGED_DEVICES_MAX: usize = 1024;

fn default_file_bytes() -> u64 {
    DEFAULT_FILE_BYTES
}

fn default_files() -> u32 {
    DEFAULT_FILES
}

/// Record what DMA of attached VMs touches.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RecordingRequest {
    /// Directory for the files, absolute; it must be there.
    #[schema(value_type = String)]
    pub dir: PathBuf,
    /// Only this device: its socket, its serial number if no other has that, or its number; all
    /// without one.
    #[serde(default)]
    pub device: Option<String>,
    /// Bytes a file may have before the next is begun.
    #[serde(default = "default_file_bytes")]
    pub max_file_bytes: u64,
    /// Files of each VM that are kept; the oldest go.
    #[serde(default = "default_files")]
    pub max_files: u32,
    /// How long, in seconds; until it is stopped without it.
    #[serde(default)]
    pub seconds: Option<u64>,
}

impl RecordingRequest {
    /// Refuses an invalid request.
    ///
    /// # Errors
    /// An error message.
    pub fn check(&self) -> Result<(), ControlError> {
        let wrong = |what: String| Err(ControlError::wrong_use(what));
        if !self.dir.is_absolute() {
            return wrong(format!(
                "the directory '{}' is not an absolute path: write it from /",
                self.dir.display()
            ));
        }
        if self.max_file_bytes < LOG_FILE_BYTES_MIN {
            return wrong(format!(
                "max-file-bytes is {}; a file needs {LOG_FILE_BYTES_MIN} at least",
                self.max_file_bytes
            ));
        }
        if !(1..=LOG_FILES_MAX).contains(&self.max_files) {
            return wrong(format!(
                "max-files is {}; it must be from 1 to {LOG_FILES_MAX}",
                self.max_files
            ));
        }
        match self.seconds {
            Some(0) => wrong("seconds is 0; it must be 1 at least".to_owned()),
            Some(seconds) if seconds > SECONDS_MAX => wrong(format!(
                "seconds is {seconds}; it must be at most {SECONDS_MAX}, a week"
            )),
            _ if !self.dir.is_dir() => Err(ControlError::refused(format!(
                "there is no directory '{}': make it first",
                self.dir.display()
            ))),
            _ => Ok(()),
        }
    }
}

/// How far a recording is.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct RecordingReport {
    /// Directory of the files.
    pub dir: String,
    /// The only device that is recorded, by its number; absent if all are.
    pub device: Option<u32>,
    /// It goes on, or its last files are being completed; they are all there when it is not.
    pub active: bool,
    /// Time since it began, or that it took.
    pub seconds: f64,
    /// Time left of what was asked for; absent without an end.
    pub left_seconds: Option<f64>,
    /// Records handed to the files.
    pub records: u64,
    /// Records lost since it began: by engines without credits, or because the disk was too slow.
    pub lost_records: u64,
    /// VMs of which there is a log.
    pub vms: Vec<String>,
    /// Why it ended before its time.
    pub error: Option<String>,
}

impl Text for RecordingReport {
    fn text(&self) -> String {
        let of = match self.device {
            Some(device) => format!("device {device}"),
            None => "all devices".to_owned(),
        };
        let state = match (self.active, self.left_seconds) {
            (true, Some(left)) => format!("for {:.0} s, {left:.0} s left", self.seconds),
            (true, None) => format!("for {:.0} s", self.seconds),
            (false, _) => format!("over after {:.0} s", self.seconds),
        };
        let mut text = format!(
            "accesses of {of} into {}: {state}; {} records, {} lost\n",
            self.dir, self.records, self.lost_records
        );
        if !self.vms.is_empty() {
            text += &format!("VMs: {}\n", self.vms.join(", "));
        }
        if let Some(error) = &self.error {
            text += &format!("ended early: {error}\n");
        }
        text
    }
}

/// Records of one VM on their way to its files.
pub(crate) struct Batch {
    pub(crate) vm: Arc<str>,
    pub(crate) memory_bytes: u64,
    pub(crate) records: Vec<AccessRecord>,
}

enum Letter {
    Records(Batch),
    /// This many records were lost on the way here, perhaps another VM's.
    Lost(u64),
}

#[derive(Default)]
struct Progress {
    records: AtomicU64,
    lost: AtomicU64,
    /// The writer has ended: its files are as complete as they will be.
    is_complete: AtomicBool,
    told: Mutex<RecordingStatus>,
}

#[derive(Default)]
struct RecordingStatus {
    vms: Vec<String>,
    error: Option<String>,
    ended: Option<Duration>,
}

/// A recording that is active, or has ended.
pub(crate) struct Recording {
    request: RecordingRequest,
    device: Option<DeviceId>,
    began: Instant,
    /// The same by the clock of the records.
    began_at: Duration,
    progress: Arc<Progress>,
    /// Lost records not yet reported to the writer.
    unsaid: u64,
    letters: Option<SyncSender<Letter>>,
    thread: Option<JoinHandle<()>>,
}

impl Recording {
    /// Starts a recording. `device` is the only one recorded; `names` are the devices' names.
    ///
    /// # Errors
    /// An error message: another recording writes to the directory, or no thread.
    pub(crate) fn start(
        request: RecordingRequest,
        device: Option<DeviceId>,
        names: BTreeMap<DeviceId, String>,
    ) -> Result<Self, ControlError> {
        let (letters, inbox) = sync_channel(BATCHES_MAX);
        let progress = Arc::new(Progress::default());
        let writer = Writer {
            _dir: LogDir::take(&request.dir)?,
            limits: LogLimits {
                dir: request.dir.clone(),
                max_file_bytes: request.max_file_bytes,
                max_files: request.max_files,
            },
            names,
            logs: BTreeMap::new(),
            progress: Arc::clone(&progress),
            started_unix_ns: unix_ns(),
        };
        let thread = std::thread::Builder::new()
            .name("pt-log-writer".into())
            .spawn(move || {
                let _ended = Ended(Arc::clone(&writer.progress));
                writer.run(&inbox);
            });
        let thread = thread.map_err(|error| {
            ControlError::failed(format!("no thread to write the access log: {error}"))
        })?;
        Ok(Self {
            request,
            device,
            began: Instant::now(),
            began_at: now(),
            progress,
            unsaid: 0,
            letters: Some(letters),
            thread: Some(thread),
        })
    }

    /// The only device that is recorded.
    pub(crate) fn only(&self) -> Option<DeviceId> {
        self.device
    }

    /// True until the recording was stopped, its time is over, or the disk failed. Its files may be
    /// incomplete even then: see [`Recording::take_thread`].
    pub(crate) fn takes_records(&self) -> bool {
        self.letters.is_some()
    }

    fn is_complete(&self) -> bool {
        // Pairs with the store of the writer's thread.
        self.progress.is_complete.load(Acquire)
    }

    /// Passes records to the writer, or drops and counts them.
    pub(crate) fn record(&mut self, mut batch: Batch) {
        let Some(letters) = &self.letters else {
            return;
        };
        // No record may predate the recording, whatever time a device writes.
        let began_ns = clock::ns(self.began_at);
        for record in &mut batch.records {
            record.time_ns = record.time_ns.max(began_ns);
        }
        let count = batch.records.len() as u64;
        match letters.try_send(Letter::Records(batch)) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => self.lost(count),
            // The writer has reported why.
            Err(TrySendError::Disconnected(_)) => self.end(),
        }
    }

    /// Counts records that were lost before they came here.
    pub(crate) fn lost(&mut self, count: u64) {
        self.progress.lose(count);
        self.unsaid = self.unsaid.saturating_add(count);
        if self.unsaid > 0
            && let Some(letters) = &self.letters
            && letters.try_send(Letter::Lost(self.unsaid)).is_ok()
        {
            self.unsaid = 0;
        }
    }

    /// Ends it if its time is over, or the writer has given up.
    pub(crate) fn end_if_due(&mut self) {
        let asked = self.request.seconds.map(Duration::from_secs);
        if asked.is_some_and(|time| self.began.elapsed() >= time) || self.is_complete() {
            self.end();
        }
    }

    /// Takes no more records; the writer completes its files.
    pub(crate) fn end(&mut self) {
        if self.letters.take().is_some() {
            let ended = self.began.elapsed();
            lock(&self.progress.told).ended = Some(ended);
        }
    }

    /// The writer's thread, to be joined without any lock held.
    pub(crate) fn take_thread(&mut self) -> Option<JoinHandle<()>> {
        self.thread.take()
    }

    /// Progress of the recording.
    pub(crate) fn report(&self) -> RecordingReport {
        let told = lock(&self.progress.told);
        let seconds = told
            .ended
            .unwrap_or_else(|| self.began.elapsed())
            .as_secs_f64();
        let asked = self
            .request
            .seconds
            .map(|it| Duration::from_secs(it).as_secs_f64());
        RecordingReport {
            dir: self.request.dir.display().to_string(),
            device: self.device.map(|device| device.0),
            active: !self.is_complete(),
            seconds,
            left_seconds: asked.map(|asked| (asked - seconds).max(0.0)),
            records: self.progress.records.load(Relaxed),
            lost_records: self.progress.lost.load(Relaxed),
            vms: told.vms.clone(),
            error: told.error.clone(),
        }
    }
}

impl Progress {
    /// Adds to the count of lost records, saturating: a device may forge the number.
    fn lose(&self, count: u64) {
        let more = |lost: u64| Some(lost.saturating_add(count));
        // The closure always returns a value to store.
        let (Ok(_) | Err(_)) = self.lost.fetch_update(Relaxed, Relaxed, more);
    }
}

/// Marks the writer as ended, even after a panic.
struct Ended(Arc<Progress>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.is_complete.store(true, Release);
    }
}

/// One VM's log, and the devices it names.
struct VmLog {
    log: RotatingLog,
    devices: HashSet<DeviceId>,
}

impl VmLog {
    /// Enters the device if it is new; returns false if there are too many.
    fn admit(&mut self, record: &AccessRecord, names: &BTreeMap<DeviceId, String>) -> bool {
        let id = record.device;
        if self.devices.contains(&id) {
            return true;
        }
        if self.devices.len() >= LOGGED_DEVICES_MAX {
            return false;
        }
        self.devices.insert(id);
        let name = names.get(&id).cloned();
        self.log.meta_mut().enter(LoggedDevice {
            id,
            name: name.unwrap_or_else(|| format!("device-{}", id.0)),
            service: record.service,
        });
        true
    }
}

/// State of the writer's thread.
struct Writer {
    /// Held until all files are complete.
    _dir: LogDir,
    limits: LogLimits,
    names: BTreeMap<DeviceId, String>,
    logs: BTreeMap<Arc<str>, VmLog>,
    progress: Arc<Progress>,
    started_unix_ns: u64,
}

impl Writer {
    fn run(mut self, inbox: &Receiver<Letter>) {
        while let Ok(letter) = inbox.recv() {
            let done = match letter {
                Letter::Records(batch) => self.write(batch),
                Letter::Lost(count) => {
                    for vm in self.logs.values_mut() {
                        let lost = &mut vm.log.meta_mut().lost_records;
                        *lost = lost.saturating_add(count);
                    }
                    Ok(())
                }
            };
            if let Err(error) = done {
                self.fail(&error);
                break;
            }
        }
        for (_, vm) in std::mem::take(&mut self.logs) {
            if let Err(error) = vm.log.finish() {
                self.fail(&error);
            }
        }
    }

    fn write(&mut self, mut batch: Batch) -> Result<(), TraceError> {
        let vm = match self.logs.entry(Arc::clone(&batch.vm)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let meta = AccessLogMeta::new(&batch.vm, batch.memory_bytes, self.started_unix_ns);
                let log = RotatingLog::create(self.limits.clone(), meta)?;
                lock(&self.progress.told).vms.push(batch.vm.to_string());
                let devices = HashSet::new();
                place.insert(VmLog { log, devices })
            }
        };
        let came = batch.records.len() as u64;
        batch.records.retain(|record| vm.admit(record, &self.names));
        let count = batch.records.len() as u64;
        let meta = vm.log.meta_mut();
        meta.memory_bytes = batch.memory_bytes;
        meta.lost_records = meta.lost_records.saturating_add(came - count);
        self.progress.lose(came - count);
        vm.log.append(&batch.records)?;
        self.progress.records.fetch_add(count, Relaxed);
        Ok(())
    }

    fn fail(&self, error: &TraceError) {
        tracing::error!(dir = %self.limits.dir.display(), %error, "the recording of accesses ends");
        lock(&self.progress.told)
            .error
            .get_or_insert(error.to_string());
    }
}

fn unix_ns() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
