// SPDX-License-Identifier: Apache-2.0
//! The host's side of a VPRI function in another process: its driver (VPRI 5).
//!
//! ```text
//!   faults, rounds ─ RemoteSpace ─┐
//!   fault service ── Source ──────┼─► Session ─ event queue, page fault queue ══► function
//!   start and stop ─ IoSpaces ────┘      ▲
//!                                  link: connects again whenever the socket answers
//! ```
//! [`Driver`] is [`IoSpaces`] and provides a [`FaultSource`], so to the host a
//! DPU in its own process and this one look the same.
//!
//! # When the device goes
//! A thread notices the hang-up. From then on every restriction reports that DMA is under way,
//! grants are dropped, and requests taken from the device are forgotten: their answers are
//! dropped when they come, and content that arrived in a bounce buffer for them is no longer
//! installed, since the device reads it again. [`IoSpaces::eviction_blocker`] gives the reason
//! why nothing is evicted: I/O of the dead device may still write. The thread connects again
//! whenever the socket answers. It declares all spaces to the device before the device is used;
//! each begins unmapped, and the device requests its pages one by one.
//!
//! # What is not trusted
//! The device is another process. [`ring`](crate::frontend::ring) checks what it writes into the rings,
//! [`faults`] what it requests, [`events`] how long it takes. At worst it is
//! disconnected, after one wait of [`credit::PATIENCE`]; if it comes back and is slow
//! again, the next wait is shorter ([`credit`]). There is no defence against a device
//! that changes the flags of the eventfds it was given: a user who may run a device
//! may also stop this daemon.
//!
//! # Locks, outermost first
//! section's lock (callers) → registry → a session's `creating` → its spaces, its fault queue → its event queue;
//! the access log queue by itself. None is held while waiting for a page. `creating` is held over a CREATE and its
//! status. A thread that takes requests and meets an unknown space waits for `creating`, with no other lock of the
//! driver held: the device may request pages of a space before we have read its number. The holder of `creating`
//! waits only for the device, so that wait ends after its patience.

pub(crate) mod counts;
pub(crate) mod credit;
pub(crate) mod events;
mod faults;
pub(crate) mod line;
mod link;
pub(crate) mod log;
pub(crate) mod session;
mod space;
#[cfg(test)]
mod tests;

pub use crate::frontend::connect::ConnectError;
pub use counts::DriverCounts;

use crate::frontend::event;
use crate::wire::{Answer, Event, Farewell, LogRecord};
use arc_swap::ArcSwapOption;
use counts::Counts;
use faults::Taken;
use log::Taking;
use pagetide_addr::{DomainId, FileKey, PageRequest, PageResponse};
use pagetide_vpri::{
    access_log::{AccessSource, Logging},
    domain::{DOMAIN_BYTES_MAX, DomainError},
    queue::Doorbell,
    source::FaultSource,
    space::{IoSpace, IoSpaces},
};
use session::Session;
use space::{Created, RemoteSpace};
use std::{
    collections::{HashMap, HashSet},
    io,
    os::fd::{BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Why a driver cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The kernel refused.
    #[error("the driver of the DPU at {socket} cannot be started: {source}")]
    Kernel {
        /// Socket of the function.
        socket: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// No device connected in time.
    #[error("no DPU at {socket} after {waited:?}: {why}; start it with 'pagetide dpu'")]
    NotConnected {
        /// Socket of the function.
        socket: PathBuf,
        /// How long the caller waited.
        waited: Duration,
        /// How the last try failed.
        why: String,
    },
}

/// Whether a device is in use.
#[derive(Debug)]
enum Presence {
    Here,
    /// There is none: why.
    Away(String),
}

impl Presence {
    /// Why there is no device.
    fn why(&self) -> &str {
        match self {
            Self::Away(why) => why,
            // Its thread has not cleaned up yet.
            Self::Here => "it has just gone",
        }
    }
}

/// What the host has declared, and declares again to every new device.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    next_id: u32,
    known: HashMap<FileKey, Weak<RemoteSpace>>,
    attached: Vec<Arc<RemoteSpace>>,
    barred: HashSet<FileKey>,
    /// Retired while there was no device: the file and its length in pages.
    retired: Vec<(FileKey, u64)>,
    /// Attached spaces that the device does not take, and why.
    refused: Vec<(DomainId, String)>,
    all_known: bool,
}

impl Registry {
    /// Has a new device retire what was retired while there was no device.
    fn retire_again(&mut self, session: &Session) -> Result<(), ConnectError> {
        while let Some(&(name, page_count)) = self.retired.last() {
            let status = session
                .tell(&Event::Create { name, page_count })
                .map_err(|line::Gone| ConnectError::Lost)?;
            let space = u32::try_from(status.value).unwrap_or(u32::MAX);
            let event = Event::Destroy {
                space: DomainId(space),
                farewell: Farewell::Retire,
            };
            // A device that refuses has no such memory, or the memory now belongs to another VM.
            if status.code == crate::wire::Code::Ok {
                session.demand(&event, "DESTROY")?;
            }
            self.retired.pop();
        }
        Ok(())
    }
}

/// What the driver, its spaces and its thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    socket: PathBuf,
    bell: Arc<Doorbell>,
    /// The device in use.
    current: ArcSwapOption<Session>,
    registry: Mutex<Registry>,
    presence: Mutex<Presence>,
    changed: Condvar,
    counts: Arc<Counts>,
    next_request: Arc<AtomicU64>,
    log_wanted: AtomicBool,
    stop: OwnedFd,
    stopped: AtomicBool,
}

/// See the module.
#[derive(Debug)]
pub struct Driver {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Driver {
    /// Starts a driver for the function at `socket`, which need not be there yet. `bell` is the
    /// doorbell of the fault service, which the device rings itself.
    ///
    /// # Errors
    /// [`DriverError::Kernel`].
    pub fn start(socket: &Path, bell: Arc<Doorbell>) -> Result<Arc<Self>, DriverError> {
        let failed = |source| DriverError::Kernel {
            socket: socket.to_owned(),
            source,
        };
        let shared = Arc::new(Shared {
            socket: socket.to_owned(),
            bell,
            current: ArcSwapOption::empty(),
            registry: Mutex::default(),
            presence: Mutex::new(Presence::Away("not tried yet".to_owned())),
            changed: Condvar::new(),
            counts: Arc::default(),
            next_request: Arc::new(AtomicU64::new(1)),
            log_wanted: AtomicBool::new(false),
            stop: event::event().map_err(failed)?,
            stopped: AtomicBool::new(false),
        });
        let its = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("pt-vpri-link".into())
            .spawn(move || link::run(&its))
            .map_err(failed)?;
        Ok(Arc::new(Self {
            shared,
            thread: Mutex::new(Some(thread)),
        }))
    }

    /// Waits until a device is in use.
    ///
    /// # Errors
    /// [`DriverError::NotConnected`]. The driver keeps trying.
    pub fn wait_connected(&self, patience: Duration) -> Result<(), DriverError> {
        let deadline = Instant::now() + patience;
        let mut presence = self.shared.presence();
        while !self.is_connected() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(DriverError::NotConnected {
                    socket: self.shared.socket.clone(),
                    waited: patience,
                    why: presence.why().to_owned(),
                });
            }
            let waited = self.shared.changed.wait_timeout(presence, left);
            (presence, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    /// True while a device is in use.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.shared.session().is_some()
    }

    /// Where page requests of the device come from.
    #[must_use]
    pub fn source(&self) -> Arc<dyn FaultSource> {
        Arc::new(Source(Arc::clone(&self.shared)))
    }

    /// Where records of DMA accesses come from.
    #[must_use]
    pub fn access_log(&self) -> Arc<dyn AccessSource> {
        Arc::new(Records(Arc::clone(&self.shared)))
    }

    /// The counters so far.
    #[must_use]
    pub fn counts(&self) -> DriverCounts {
        self.shared.counts.look()
    }

    /// Hangs up, and does not connect again. From now on the device parks chains that fault.
    pub fn stop(&self) {
        self.shared.stopped.store(true, Ordering::Release);
        event::ring_event(&self.shared.stop);
        let thread = self.thread.lock();
        let thread = thread.unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of the DPU's driver ended by a panic");
        }
        // Break the reference cycle: spaces hold the driver, and it holds them.
        self.shared.registry().attached.clear();
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    /// The device in use.
    pub(crate) fn session(&self) -> Option<Arc<Session>> {
        self.current
            .load_full()
            .filter(|session| session.line().check().is_ok())
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn presence(&self) -> MutexGuard<'_, Presence> {
        self.presence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put_in_use(&self, session: Arc<Session>) {
        self.current.store(Some(session));
        *self.presence() = Presence::Here;
        self.changed.notify_all();
        // Requests may have come before the service could take them.
        self.bell.ring_anyway();
    }

    fn set_away(&self, why: String) {
        *self.presence() = Presence::Away(why);
    }

    /// Takes a space for a VM: declares it to the device, or to the next one.
    fn attach(&self, id: DomainId) -> Result<(), DomainError> {
        let mut registry = self.registry();
        let space = registry.by_id(id).ok_or_else(|| {
            let why = "no longer has such a space";
            DomainError::Device(why.to_owned())
        })?;
        let key = space.key();
        if (registry.attached.iter()).any(|attached| attached.key() == key) {
            return Err(DomainError::AttachedAlready(key));
        }
        if let Some(session) = self.session()
            && let Created::Refused(error) = space.create(&session)
        {
            return Err(error);
        }
        registry.attached.push(space);
        Ok(())
    }

    /// Gives a space back.
    fn detach(&self, id: DomainId, farewell: Farewell) {
        let mut registry = self.registry();
        let Some(at) = (registry.attached.iter()).position(|space| space.id() == id) else {
            return;
        };
        let space = registry.attached.swap_remove(at);
        registry.refused.retain(|(refused, _)| *refused != id);
        let told = space.destroy(farewell);
        if farewell == Farewell::Retire {
            // If the file comes back, it is another space.
            registry.known.remove(&space.key());
            if !told {
                registry.retired.push((space.key(), space.page_count()));
            }
        } else if !told {
            self.lift_bars("a VM whose RAM file it refused is gone");
        }
    }
}

/// Bars.
impl Shared {
    /// Bars the device in use, if there is one, from the memory `key`.
    fn keep_from_device(&self, key: FileKey) -> Result<(), ConnectError> {
        // Without a device, or if it goes meanwhile, the next one is barred.
        self.session().map_or(Ok(()), |session| session.bar(key))
    }

    /// Begins another session because of `why`: barred files stay barred until a session ends.
    fn lift_bars(&self, why: &str) {
        if let Some(session) = self.session() {
            tracing::info!("reconnecting to the DPU: {why}");
            session.line().ended(why);
        }
    }
}

impl Registry {
    fn by_id(&self, id: DomainId) -> Option<Arc<RemoteSpace>> {
        let mut known = self.known.values().filter_map(Weak::upgrade);
        known.find(|space| space.id() == id)
    }
}

impl IoSpaces for Driver {
    /// The space exists only on our side until it is attached.
    fn open(
        &self,
        _file: BorrowedFd<'_>,
        key: FileKey,
        bytes: u64,
    ) -> Result<Arc<dyn IoSpace>, DomainError> {
        if bytes == 0 || bytes > DOMAIN_BYTES_MAX {
            return Err(DomainError::TooLarge(bytes));
        }
        let mut registry = self.shared.registry();
        if registry.barred.contains(&key) {
            return Err(DomainError::Barred(key));
        }
        if let Some(space) = registry.known.get(&key).and_then(Weak::upgrade)
            && space.len_bytes() == bytes
        {
            return Ok(space);
        }
        let id = DomainId(registry.next_id);
        registry.next_id += 1;
        let space = Arc::new(RemoteSpace::new(&self.shared, id, key, bytes));
        registry.known.retain(|_, known| known.strong_count() > 0);
        registry.known.insert(key, Arc::downgrade(&space));
        Ok(space)
    }

    fn bar(&self, key: FileKey) {
        let mut registry = self.shared.registry();
        if !registry.barred.insert(key) {
            return;
        }
        if let Err(error) = self.shared.keep_from_device(key) {
            tracing::error!(%key, "cannot bar devices from RAM: {error}");
        }
    }

    fn retire(&self, space: &dyn IoSpace) {
        self.shared.detach(space.id(), Farewell::Retire);
    }

    fn all_known(&self) {
        let mut registry = self.shared.registry();
        if std::mem::replace(&mut registry.all_known, true) {
            return;
        }
        let told = (self.shared.session()).map(|session| session.demand(&Event::Ready, "READY"));
        if let Some(Err(error)) = told {
            tracing::error!("the DPU's devices stay restricted: {error}");
        }
    }

    fn processes(&self) -> Vec<u32> {
        let session = self.shared.session();
        session
            .and_then(|session| session.process())
            .into_iter()
            .collect()
    }

    fn eviction_blocker(&self) -> Option<String> {
        if self.shared.session().is_some() {
            let registry = self.shared.registry();
            return registry.refused.first().map(|(_, why)| why.clone());
        }
        let why = self.shared.presence().why().to_owned();
        let socket = self.shared.socket.display();
        Some(format!(
            "the DPU at {socket} is not connected ({why}), and DMA that it started last may still be under way"
        ))
    }
}

/// The page fault queue of the device in use.
struct Source(Arc<Shared>);

impl Source {
    fn answer(session: &Session, answer: Answer) {
        let answers = [answer];
        let event = Event::Respond {
            answers: answers.as_slice().into(),
        };
        if session.events.post(&event).is_err() {
            tracing::trace!("an answer to a DPU that is gone");
        }
    }
}

impl FaultSource for Source {
    fn next(&self) -> Option<PageRequest> {
        let session = self.0.session()?;
        loop {
            match session.faults.next(|space| session.known(space)) {
                Ok(Taken::Request(request)) => return Some(request),
                Ok(Taken::Refused(answer)) => Self::answer(&session, answer),
                Ok(Taken::Nothing) | Err(line::Gone) => return None,
            }
        }
    }

    fn arm(&self) -> bool {
        (self.0.session()).is_some_and(|session| session.faults.arm())
    }

    fn disarm(&self) {
        if let Some(session) = self.0.session() {
            session.faults.disarm();
        }
    }

    fn respond(&self, response: PageResponse) {
        let session = self.0.session();
        let answer = session
            .as_ref()
            .and_then(|session| session.faults.answer_to(&response));
        match (session, answer) {
            (Some(session), Some(answer)) => Self::answer(&session, answer),
            _ => self.0.counts.late_answers.add(),
        }
    }

    fn read_bounced(&self, slot: u32, count: u64, into: &mut Vec<u8>) -> bool {
        (self.0.session()).is_some_and(|session| session.faults.read_bounced(slot, count, into))
    }

    /// True as long as the connection is in use: a device gives an overwrite up only when that has ended.
    /// From then on no page is evicted, since no device answers UNMAP, until a later connection is set
    /// up; and that happens after this one was removed.
    fn still_wants(&self, slot: u32) -> bool {
        (self.0.session()).is_some_and(|session| session.faults.owns_slot(slot))
    }
}

/// The access log queue of the device in use.
struct Records(Arc<Shared>);

impl Records {
    fn take(&self, taking: Taking, most: usize, into: &mut Vec<LogRecord>) {
        let session = self.0.session();
        let Some((session, log)) = session.as_ref().and_then(|it| Some((it, it.log.as_ref()?)))
        else {
            return;
        };
        // A thread that takes a page request reads them, too: it must not wait for records.
        let spaces = session.spaces().clone();
        if log.take(taking, most, &spaces, into).is_err() {
            tracing::trace!("records of a DPU that is gone");
        }
    }
}

impl AccessSource for Records {
    /// Without credits the device soon stops logging.
    fn want(&self, wanted: Logging) {
        let is_wanted = wanted == Logging::On;
        if self.0.log_wanted.swap(is_wanted, Ordering::Relaxed) != is_wanted && is_wanted {
            self.take(Taking::Stale, usize::MAX, &mut Vec::new());
        }
    }

    fn take(&self, most: usize, into: &mut Vec<LogRecord>) {
        if self.0.log_wanted.load(Ordering::Relaxed) {
            self.take(Taking::Wanted, most, into);
        }
    }

    fn lost(&self) -> u64 {
        self.0.counts.look().lost_records
    }

    /// Sessions so far, and whether the last one is still open.
    fn epoch(&self) -> u64 {
        2 * self.0.counts.look().sessions + u64::from(self.0.session().is_some())
    }
}
