// SPDX-License-Identifier: Apache-2.0
//! [`RemoteSpace`]: an I/O address space whose PA-bitmap is kept by a VPRI
//! function.
//!
//! The host knows it by a number of its own, which is fixed as long as the space
//! lives. With each connection the device gives it another. A space that was not
//! declared to the device of *this* connection has none, and every call on it
//! fails as if DMA were under way. A grant to such a space is dropped: the device
//! begins with everything unmapped, and sends requests.
//!
//! # Watched
//! A device watches its own mapping once INVALIDATE of the whole space has returned
//! OK. It returns BUSY as long as DMA is under way, and under load some always is,
//! somewhere. So the driver asks several times. If that fails, any later call on the
//! space (each round makes one) tries again now and then, until it is OK.

use super::{Shared, line::Gone, session::Session};
use crate::wire::{Code, Event, Farewell, Reply, feature};
use pagetide_addr::{
    Access, DomainId, FileKey, FilePage, FilePageSet, FileRange, FileSection, Marks, PAGE_BYTES,
};
use pagetide_vpri::{
    domain::DomainError,
    space::{IoSpace, LookError},
};
use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// How many times in a row a device is asked to watch a space.
const WATCH_TRIES: u32 = 8;
/// Least time between two later tries: each may take as long as the device waits for DMA.
const BETWEEN_TRIES: Duration = Duration::from_millis(100);

/// See the module.
#[derive(Debug)]
pub(crate) struct RemoteSpace {
    shared: Arc<Shared>,
    id: DomainId,
    key: FileKey,
    len_bytes: u64,
    /// Number of the connection in the upper half, the device's number of the space in the lower;
    /// 0 if there is none.
    remote: AtomicU64,
    /// The same number, for a space that its device should watch but does not yet; or 0.
    unwatched: AtomicU64,
    /// When that was last tried.
    tried: Mutex<Option<Instant>>,
}

/// The outcome of CREATE.
#[derive(Debug)]
pub(crate) enum Created {
    /// The space is there, unmapped.
    Yes,
    /// The device refuses it.
    Refused(DomainError),
    /// The device is gone; the space is declared to a later one.
    Gone,
}

/// A space of a connection, in one number that is not 0.
fn numbered(session: &Session, space: DomainId) -> u64 {
    u64::from(session.number()) << 32 | u64::from(space.0)
}

impl RemoteSpace {
    /// The space `id` of a file that was not declared to any device yet.
    pub(crate) fn new(shared: &Arc<Shared>, id: DomainId, key: FileKey, len_bytes: u64) -> Self {
        Self {
            shared: Arc::clone(shared),
            id,
            key,
            len_bytes,
            remote: AtomicU64::new(0),
            unwatched: AtomicU64::new(0),
            tried: Mutex::default(),
        }
    }

    /// Declares the space to the device of `session`: all its pages are then unmapped.
    pub(crate) fn create(&self, session: &Session) -> Created {
        let event = Event::Create {
            name: self.key,
            page_count: self.page_count(),
        };
        // Held until the numbers are where a fault and its grant look for them.
        let _creating = session.creating();
        let Ok(status) = session.tell(&event) else {
            return Created::Gone;
        };
        match (status.code, u32::try_from(status.value)) {
            (Code::Ok, Ok(remote)) => {
                session.know(DomainId(remote), self.id);
                let number = numbered(session, DomainId(remote));
                // Release: a thread that finds the number finds a device that knows it.
                self.remote.store(number, Ordering::Release);
                Created::Yes
            }
            (Code::Exists, _) => Created::Refused(DomainError::AttachedAlready(self.key)),
            (Code::Unsupported, _) => {
                let what = format!(
                    "uses RAM file {} without look-up: for a device that was started so, or for rings of a driver in \
                     this VM; its log says which",
                    self.key
                );
                Created::Refused(DomainError::Device(what))
            }
            (code, _) => {
                let what = format!("does not take RAM file {}: {code:?}", self.key);
                Created::Refused(DomainError::Device(what))
            }
        }
    }

    /// Tells the device, if it knows the space, that the host no longer has it. False if there is
    /// no device.
    pub(crate) fn destroy(&self, farewell: Farewell) -> bool {
        let told = self.ask(|space| Event::Destroy { space, farewell });
        self.remote.store(0, Ordering::Release);
        match told {
            Some(reply) if reply.status.code == Code::Ok => true,
            Some(reply) => {
                let code = reply.status.code;
                tracing::error!(key = %self.key, ?code, "the DPU does not give back a space");
                true
            }
            None => false,
        }
    }

    /// Has the device of `session` watch the space. It does so as soon as no DMA is left from
    /// before the space was created; from then on it notices DMA into absent pages.
    /// [`Code::Unsupported`]: it cannot. [`Code::Busy`]: not yet, but it will be asked again.
    pub(crate) fn settle(&self, session: &Session) -> Code {
        let Some(space) = self.number_in(session) else {
            return Code::Busy;
        };
        let mut tries = (0..WATCH_TRIES).map(|_| self.invalidate(session, space));
        let last = tries.find(|code| *code != Code::Busy).unwrap_or(Code::Busy);
        match last {
            // The next device is asked when it is set up.
            _ if session.line().check().is_err() => {}
            Code::Ok => {}
            Code::Unsupported => {
                tracing::warn!(key = %self.key, "the DPU cannot notice DMA into absent pages");
            }
            code => {
                let number = numbered(session, space);
                self.unwatched.store(number, Ordering::Relaxed);
                tracing::warn!(key = %self.key, ?code, "the DPU does not notice DMA into absent pages as long as earlier DMA is under way");
            }
        }
        last
    }

    /// Asks `session` whether DMA is under way.
    fn invalidate(&self, session: &Session, space: DomainId) -> Code {
        let event = Event::Invalidate {
            space,
            ranges: [].as_slice().into(),
        };
        let code = match session.tell(&event) {
            Ok(status) => status.code,
            Err(Gone) => Code::Busy,
        };
        if matches!(code, Code::Ok | Code::Unsupported) {
            let number = numbered(session, space);
            let watched =
                (self.unwatched).compare_exchange(number, 0, Ordering::Relaxed, Ordering::Relaxed);
            if watched.is_ok() {
                tracing::info!(key = %self.key, ?code, "the DPU was asked again to notice DMA into absent pages");
            }
        }
        code
    }

    /// Retries what [`Self::settle`] did not achieve, if that is so and the last try was not a
    /// moment ago.
    fn settle_late(&self, session: &Session, space: DomainId) {
        if self.unwatched.load(Ordering::Relaxed) != numbered(session, space) {
            return;
        }
        let mut tried = self.tried.lock().unwrap_or_else(PoisonError::into_inner);
        if tried.is_some_and(|last| last.elapsed() < BETWEEN_TRIES) {
            return;
        }
        *tried = Some(Instant::now());
        drop(tried);
        self.invalidate(session, space);
    }

    /// The number of the space on the device of `session`.
    fn number_in(&self, session: &Session) -> Option<DomainId> {
        let number = self.remote.load(Ordering::Acquire);
        let (of, remote) = (number >> 32, number & u64::from(u32::MAX));
        let remote = u32::try_from(remote).ok().map(DomainId)?;
        (of == u64::from(session.number())).then_some(remote)
    }

    /// Its length, in pages.
    pub(crate) fn page_count(&self) -> u64 {
        self.len_bytes.div_ceil(PAGE_BYTES)
    }

    /// The device's number of the space, if there is a device that knows it.
    fn reach(&self) -> Option<(Arc<Session>, DomainId)> {
        let session = self.shared.session()?;
        let space = self.number_in(&session)?;
        Some((session, space))
    }

    /// Sends an event and waits; `None` if there is no device, or it does not answer as it should.
    fn ask<'a>(&self, event: impl FnOnce(DomainId) -> Event<'a>) -> Option<Reply> {
        let (session, space) = self.reach()?;
        // A failure is logged and counted where it is detected.
        session.events.call(&event(space)).ok()
    }

    /// Has the device restrict `pages`; true if it did.
    fn restrict<'a>(&self, event: impl FnOnce(DomainId) -> Event<'a>) -> bool {
        self.ask(event)
            .is_some_and(|reply| reply.status.code == Code::Ok)
    }
}

impl IoSpace for RemoteSpace {
    fn id(&self) -> DomainId {
        self.id
    }

    fn key(&self) -> FileKey {
        self.key
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn attach(&self) -> Result<(), DomainError> {
        self.shared.attach(self.id)
    }

    /// The device watches its own mapping once no DMA is left that began before; alias faults then
    /// arrive as page requests. It is no error if that takes long: see the module.
    fn watch(&self) -> Result<(), DomainError> {
        let code = self.reach().map(|(session, _)| self.settle(&session));
        if code == Some(Code::Unsupported) {
            let why = format!(
                "cannot notice DMA into absent pages of RAM file {}",
                self.key
            );
            return Err(DomainError::Device(why));
        }
        Ok(())
    }

    fn detach(&self) {
        self.shared.detach(self.id, Farewell::Release);
    }

    fn unmap_all(&self) {
        // Without a device there is nothing to do: the next one begins with everything unmapped.
        let told = self.ask(|space| Event::UnmapAll { space });
        if told.is_some_and(|reply| reply.status.code != Code::Ok) {
            tracing::error!(key = %self.key, "the DPU does not unmap a space");
        }
    }

    fn is_any_leased(&self) -> bool {
        let code = self
            .reach()
            .map(|(session, space)| self.invalidate(&session, space));
        !matches!(code, Some(Code::Ok | Code::Unsupported))
    }

    fn unmap(&self, section: FileSection, pages: &FilePageSet) -> bool {
        let ranges = pages.runs(section);
        ranges.is_empty()
            || self.restrict(|space| Event::Unmap {
                space,
                ranges: ranges.into(),
            })
    }

    fn forbid_writes(&self, section: FileSection, pages: &FilePageSet) -> bool {
        let ranges = pages.runs(section);
        ranges.is_empty()
            || self.restrict(|space| Event::Protect {
                space,
                ranges: ranges.into(),
            })
    }

    fn grant(&self, range: FileRange, access: Access) {
        let Some((session, space)) = self.reach() else {
            return;
        };
        if range.is_empty() {
            return;
        }
        let ranges = [range];
        let event = Event::Map {
            space,
            access,
            ranges: ranges.as_slice().into(),
        };
        if session.events.post(&event).is_err() {
            // The next device requests the page.
            tracing::trace!(?range, "a grant to a DPU that is gone");
        }
    }

    /// Without a device this is not known; unmapping the pages would find it out, and fails without
    /// a device.
    fn standing_in(&self, section: FileSection) -> FilePageSet {
        let pages = section.pages(self.page_count());
        if pages.is_empty() {
            return FilePageSet::EMPTY;
        }
        if let Some((session, space)) = self.reach() {
            self.settle_late(&session, space);
        }
        let pages = Some(pages);
        self.ask(|space| Event::Standing { space, pages })
            .and_then(|reply| reply.mask)
            .unwrap_or(FilePageSet::EMPTY)
    }

    fn standing_pages(&self) -> u64 {
        let pages = None;
        let reply = self.ask(|space| Event::Standing { space, pages });
        reply.map_or(0, |reply| match reply.status.code {
            Code::Ok => reply.status.value.min(self.page_count()),
            _ => 0,
        })
    }

    fn touched(
        &self,
        pages: FileRange,
        marks: Marks,
        visit: &mut dyn FnMut(FilePage),
    ) -> Result<(), LookError> {
        let failed = |why: &str| LookError(why.to_owned());
        let (session, space) = self.reach().ok_or_else(|| failed("it is not there"))?;
        if !session.has(feature::TOUCHED) {
            return Err(failed("it cannot"));
        }
        self.settle_late(&session, space);
        for (section, pages) in pages.by_section() {
            let event = Event::Touched {
                space,
                pages,
                marks,
            };
            let reply = session.events.call(&event);
            let reply = reply.map_err(|error| LookError(error.to_string()))?;
            let Some(mask) = reply.mask.filter(|_| reply.status.code == Code::Ok) else {
                return Err(LookError(format!("{:?}", reply.status.code)));
            };
            mask.pages(section)
                .filter(|page| pages.contains(*page))
                .for_each(&mut *visit);
        }
        Ok(())
    }
}
