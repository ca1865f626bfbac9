// SPDX-License-Identifier: Apache-2.0
//! Interfaces of the host: opened by name, lost when somebody deletes them, and opened again when
//! they are back.
//!
//! Opening and closing an interface waits for a lock of the kernel's that others may hold for long.
//! So engines do neither: a thread of the device does, and engines see only whether there is
//! something to use.
//!
//! ```text
//!           engine: an error                keeper: another index, or none
//!   there ───────────────────► suspected ─────────────────────────────────► lost
//!     ▲                            │ still there                              │ opened by name,
//!     └────────────────────────────┴──────────────────────────────────────────┘ tried every 250 ms
//! ```
//! Each loss and each return is a new generation. Engines compare it before each packet, which is a
//! plain load. What an engine polls is a set ([`ReadySet`]) that stays the same, and has in it
//! whatever is open now.

use super::state::{LinkError, LinkState, Offloads, kernel};
use rustix::{event::epoll, io::Errno};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

/// Time between two attempts to open an interface that was lost.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// What a kind of interface must know.
pub(crate) trait Interface: Send + Sync + 'static {
    /// What is opened for one pair, or for all.
    type Part: Send + Sync + 'static;

    /// Its name, for people.
    fn name(&self) -> &str;
    /// Opens all its parts.
    fn open(&self) -> Result<Vec<Self::Part>, LinkError>;
    /// Whether the interface that was opened is not there any more.
    fn is_gone(&self) -> bool;
    /// Tells its parts which pairs receive, and what the driver takes undone, and puts each into the
    /// set of the engine that is to read it.
    fn apply(&self, parts: &[Arc<Self::Part>], receiving: &[Receives]) -> io::Result<()>;
    /// Its number, as it was opened last.
    fn index(&self) -> u32;
    /// A copy of a part's descriptor.
    fn copy(part: &Self::Part) -> io::Result<OwnedFd>;
}

/// Whether a pair receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Receives {
    /// Its part was handed over, and nobody has said anything about the pair yet: what another process has set
    /// stays. A queue of a TAP that is detached loses the packets in it.
    AsBefore,
    /// It does not.
    No,
    /// It does, and its driver takes that undone.
    Yes(Offloads),
}

impl Receives {
    /// What its driver takes undone.
    pub fn offloads(self) -> Option<Offloads> {
        match self {
            Self::Yes(offloads) => Some(offloads),
            Self::AsBefore | Self::No => None,
        }
    }
}

/// Keeps an interface open. The last one who has it need not close it, but only [`Self::close`]
/// returns when that is done.
pub(crate) struct Keeper<I: Interface> {
    shared: Arc<Shared<I>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared<I: Interface> {
    interface: I,
    generation: AtomicU64,
    now: Mutex<Now<I::Part>>,
    changed: Condvar,
    state: Arc<LinkState>,
}

type Locked<'a, I> = MutexGuard<'a, Now<<I as Interface>::Part>>;

struct Now<P> {
    parts: Vec<Arc<P>>,
    /// By pair.
    receiving: Vec<Receives>,
    /// What engines have given back, to be closed.
    spent: Vec<Arc<P>>,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    There,
    Suspected,
    Lost,
    Over,
}

impl<I: Interface> std::fmt::Debug for Keeper<I> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Keeper")
            .field(&self.shared.interface.name())
            .finish()
    }
}

impl<I: Interface> Keeper<I> {
    /// Opens an interface for a device of so many pairs, none of which receives yet.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn open(interface: I, pairs: u16, state: Arc<LinkState>) -> Result<Arc<Self>, LinkError> {
        let parts = interface.open()?;
        Self::keep(
            interface,
            parts,
            vec![Receives::No; usize::from(pairs)],
            state,
        )
    }

    /// Goes on with parts that another process has opened; without any, the interface is lost, and is opened once it
    /// is back.
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn adopt(
        interface: I,
        parts: Vec<I::Part>,
        pairs: u16,
        state: Arc<LinkState>,
    ) -> Result<Arc<Self>, LinkError> {
        let receiving = vec![Receives::AsBefore; usize::from(pairs)];
        Self::keep(interface, parts, receiving, state)
    }

    fn keep(
        interface: I,
        parts: Vec<I::Part>,
        receiving: Vec<Receives>,
        state: Arc<LinkState>,
    ) -> Result<Arc<Self>, LinkError> {
        let stage = match parts.is_empty() {
            true => Stage::Lost,
            false => Stage::There,
        };
        let now = Now {
            parts: parts.into_iter().map(Arc::new).collect(),
            receiving,
            spent: Vec::new(),
            stage,
        };
        let failed = |source| LinkError::Kernel {
            name: interface.name().to_owned(),
            source,
        };
        (interface.apply(&now.parts, &now.receiving)).map_err(failed)?;
        let shared = Arc::new(Shared {
            interface,
            generation: AtomicU64::new(0),
            now: Mutex::new(now),
            changed: Condvar::new(),
            state,
        });
        let keeping = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("link".to_owned());
        let thread = thread.spawn(move || keeping.keep());
        let thread = thread.map_err(|source| LinkError::Kernel {
            name: shared.interface.name().to_owned(),
            source,
        })?;
        Ok(Arc::new(Self {
            shared,
            thread: Mutex::new(Some(thread)),
        }))
    }

    /// The interface.
    pub fn interface(&self) -> &I {
        &self.shared.interface
    }

    /// A pair's driver has begun to receive, and takes that undone; or it receives no more.
    pub fn set_receiving(&self, pair: u16, receiving: Receives) {
        let mut now = self.shared.lock();
        let Some(place) = now.receiving.get_mut(usize::from(pair)) else {
            return;
        };
        *place = receiving;
        self.tell(&now);
    }

    fn tell(&self, now: &Now<I::Part>) {
        if let Err(error) = self.shared.interface.apply(&now.parts, &now.receiving) {
            // It was deleted: it is told again when it is back.
            tracing::debug!(%error, name = self.shared.interface.name(), "an interface is not told what is received");
        }
    }

    /// Of pairs that nobody has said anything about: they do not receive.
    pub fn settle(&self) {
        let mut now = self.shared.lock();
        let mut unsaid = (now.receiving.iter_mut()).filter(|its| **its == Receives::AsBefore);
        if unsaid.by_ref().map(|its| *its = Receives::No).count() > 0 {
            self.tell(&now);
        }
    }

    /// Copies of the descriptors of all parts, and the number of the interface; none if it is lost.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn hand_over(&self) -> io::Result<(Vec<OwnedFd>, u32)> {
        let now = self.shared.lock();
        let copies = now.parts.iter().map(|part| I::copy(part));
        Ok((
            copies.collect::<io::Result<_>>()?,
            self.shared.interface.index(),
        ))
    }

    /// Closes the interface. Nobody uses it any more.
    pub fn close(&self) {
        self.shared.end();
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of a link panicked");
        }
    }

    fn generation(&self) -> u64 {
        // Pairs with the Release in `begin_generation`: whoever sees a generation finds its parts.
        self.shared.generation.load(Ordering::Acquire)
    }
}

impl<I: Interface> Drop for Keeper<I> {
    fn drop(&mut self) {
        // Perhaps on an engine, which waits for nobody.
        self.shared.end();
    }
}

impl<I: Interface> Shared<I> {
    fn lock(&self) -> MutexGuard<'_, Now<I::Part>> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) {
        self.lock().stage = Stage::Over;
        self.changed.notify_all();
    }

    /// Opens the interface again whenever it is lost, until all is over.
    fn keep(&self) {
        let mut now = self.lock();
        loop {
            let spent = std::mem::take(&mut now.spent);
            if !spent.is_empty() {
                // Closing waits, so not under the lock.
                drop(now);
                drop(spent);
                now = self.lock();
                continue;
            }
            now = match now.stage {
                Stage::There => {
                    let waited = self.changed.wait(now);
                    waited.unwrap_or_else(PoisonError::into_inner)
                }
                Stage::Suspected => self.examine(now),
                Stage::Lost => self.open_again(now),
                Stage::Over => {
                    let parts = std::mem::take(&mut now.parts);
                    drop(now);
                    drop(parts);
                    return;
                }
            }
        }
    }

    fn examine<'a>(&'a self, now: Locked<'a, I>) -> Locked<'a, I> {
        drop(now);
        let is_gone = self.interface.is_gone();
        let mut now = self.lock();
        if now.stage != Stage::Suspected {
            return now;
        }
        if !is_gone {
            // One that is only down answers each packet so. It is not looked up for each.
            let is_suspected = |now: &mut Now<I::Part>| now.stage == Stage::Suspected;
            let waited = self
                .changed
                .wait_timeout_while(now, LOOK_EVERY, is_suspected);
            now = waited.unwrap_or_else(PoisonError::into_inner).0;
            if now.stage == Stage::Suspected {
                now.stage = Stage::There;
            }
            return now;
        }
        now.stage = Stage::Lost;
        let name = self.interface.name();
        tracing::warn!(
            name,
            "an interface was deleted: packets are lost until it is back"
        );
        self.state.set_error(Some(format!(
            "the interface {name} was deleted: packets are lost until it is back"
        )));
        let parts = std::mem::take(&mut now.parts);
        self.begin_generation();
        drop(now);
        drop(parts);
        self.lock()
    }

    fn open_again<'a>(&'a self, now: Locked<'a, I>) -> Locked<'a, I> {
        drop(now);
        let opened = self.interface.open();
        let mut now = self.lock();
        if now.stage != Stage::Lost {
            return now;
        }
        match opened {
            Ok(parts) => {
                self.use_parts(&mut now, parts);
                now
            }
            Err(error) => {
                tracing::debug!(%error, "an interface is not back");
                let is_lost = |now: &mut Now<I::Part>| now.stage == Stage::Lost;
                let waited = self.changed.wait_timeout_while(now, LOOK_EVERY, is_lost);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }

    fn begin_generation(&self) {
        // Pairs with the Acquire in `generation`.
        self.generation.fetch_add(1, Ordering::Release);
    }

    fn use_parts(&self, now: &mut Now<I::Part>, parts: Vec<I::Part>) {
        let parts: Vec<_> = parts.into_iter().map(Arc::new).collect();
        now.parts = parts;
        // First, so that whoever finds a part readable finds the part.
        self.begin_generation();
        now.stage = Stage::There;
        if let Err(error) = self.interface.apply(&now.parts, &now.receiving) {
            tracing::debug!(%error, name = self.interface.name(), "an interface went away again");
            now.stage = Stage::Suspected;
            return;
        }
        tracing::info!(name = self.interface.name(), "an interface is back");
        self.state.set_error(None);
    }
}

/// What an engine polls for one pair: readable while any descriptor in it is.
#[derive(Debug)]
pub(super) struct ReadySet(OwnedFd);

impl ReadySet {
    /// An empty one.
    ///
    /// # Errors
    /// The kernel's: too many descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Puts a descriptor into it. One that is closed leaves it by itself.
    pub fn add(&self, fd: impl AsFd) -> io::Result<()> {
        let data = epoll::EventData::new_u64(0);
        match epoll::add(&self.0, fd, data, epoll::EventFlags::IN) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes a descriptor out of it.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        match epoll::delete(&self.0, fd) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for ReadySet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A part of an interface, as the engine that uses it sees it.
#[derive(Debug)]
pub(super) struct Port<I: Interface> {
    keeper: Arc<Keeper<I>>,
    index: usize,
    /// `None` while it is lost.
    part: Option<Arc<I::Part>>,
    generation: u64,
}

impl<I: Interface> Port<I> {
    /// Part number `index`.
    pub fn new(keeper: &Arc<Keeper<I>>, index: usize) -> Self {
        let part = keeper.shared.lock().parts.get(index).cloned();
        Self {
            keeper: Arc::clone(keeper),
            index,
            part,
            generation: keeper.generation(),
        }
    }

    pub fn keeper(&self) -> &Arc<Keeper<I>> {
        &self.keeper
    }

    /// The part, if the interface is there.
    #[inline]
    pub fn part(&mut self) -> Option<&Arc<I::Part>> {
        if self.is_stale() {
            self.look_again();
        }
        self.part.as_ref()
    }

    #[inline]
    fn is_stale(&self) -> bool {
        self.keeper.generation() != self.generation
    }

    #[cold]
    fn look_again(&mut self) {
        let shared = &self.keeper.shared;
        let mut now = shared.lock();
        let old = std::mem::replace(&mut self.part, now.parts.get(self.index).cloned());
        self.generation = self.keeper.generation();
        if let Some(old) = old {
            now.spent.push(old);
            shared.changed.notify_all();
        }
    }

    /// Its part has answered with an error as if the interface had been deleted. The keeper finds
    /// out.
    #[cold]
    pub fn suspect(&self) {
        let shared = &self.keeper.shared;
        let mut now = shared.lock();
        if self.keeper.generation() == self.generation && now.stage == Stage::There {
            now.stage = Stage::Suspected;
            shared.changed.notify_all();
        }
    }
}

/// A set of what is to be polled for each pair.
pub(super) fn ready_sets(name: &str, pairs: u16) -> Result<Box<[ReadySet]>, LinkError> {
    let sets = (0..pairs).map(|_| ReadySet::new());
    sets.collect::<io::Result<_>>()
        .map_err(|source| kernel(name, source))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    /// An interface that is there while a flag is set, and hands out numbers.
    struct Fake(Mutex<(bool, u32, Vec<Receives>)>);

    impl Interface for Arc<Fake> {
        type Part = u32;

        fn name(&self) -> &str {
            "fake"
        }

        fn open(&self) -> Result<Vec<u32>, LinkError> {
            let mut fake = self.0.lock().unwrap();
            if !fake.0 {
                return Err(LinkError::Kernel {
                    name: "fake".into(),
                    source: io::ErrorKind::NotFound.into(),
                });
            }
            fake.1 += 1;
            Ok(vec![fake.1, 100 + fake.1])
        }

        fn is_gone(&self) -> bool {
            !self.0.lock().unwrap().0
        }

        fn index(&self) -> u32 {
            0
        }

        fn copy(_: &u32) -> io::Result<OwnedFd> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn apply(&self, _: &[Arc<u32>], receiving: &[Receives]) -> io::Result<()> {
            self.0.lock().unwrap().2 = receiving.to_vec();
            Ok(())
        }
    }

    fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !condition() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn interface_that_is_lost_is_opened_again_and_told_what_is_received() {
        let fake = Arc::new(Fake(Mutex::new((true, 0, Vec::new()))));
        let state = Arc::new(LinkState::default());
        let keeper = Keeper::open(Arc::clone(&fake), 2, Arc::clone(&state)).unwrap();
        keeper.set_receiving(1, Receives::Yes(Offloads::default()));
        let mut ports = [Port::new(&keeper, 0), Port::new(&keeper, 1)];
        assert_eq!(
            ports.each_mut().map(|port| port.part().map(|part| **part)),
            [Some(1), Some(101)]
        );
        // A suspicion that is wrong changes nothing.
        ports[0].suspect();
        eventually("it was looked for", || {
            keeper.shared.lock().stage == Stage::There
        });
        assert!(!ports[0].is_stale() && state.error().is_none());
        fake.0.lock().unwrap().0 = false;
        // Both notice.
        ports[0].suspect();
        ports[1].suspect();
        eventually("it is lost", || {
            ports[0].part().is_none() && ports[1].part().is_none()
        });
        assert!(state.error().unwrap().contains("fake"));
        fake.0.lock().unwrap().2.clear();
        fake.0.lock().unwrap().0 = true;
        eventually("it is back", || ports[0].part().is_some());
        assert_eq!(
            ports.each_mut().map(|port| port.part().map(|part| **part)),
            [Some(2), Some(102)]
        );
        assert_eq!(state.error(), None);
        let told = fake.0.lock().unwrap().2.clone();
        assert_eq!(told, [Receives::No, Receives::Yes(Offloads::default())]);
        // A suspicion of an earlier generation means nothing.
        ports[0].generation = 0;
        fake.0.lock().unwrap().0 = false;
        ports[0].suspect();
        assert_eq!(keeper.shared.lock().stage, Stage::There);
        keeper.close();
        assert!(keeper.shared.lock().parts.is_empty());
    }

    #[test]
    fn parts_that_were_handed_over_stay_as_they_are_until_something_is_said_about_their_pairs() {
        let fake = Arc::new(Fake(Mutex::new((true, 0, Vec::new()))));
        let state = Arc::new(LinkState::default());
        let keeper = Keeper::adopt(Arc::clone(&fake), vec![7, 8], 2, state).unwrap();
        let told = || fake.0.lock().unwrap().2.clone();
        assert_eq!(told(), [Receives::AsBefore; 2]);
        let on = Receives::Yes(Offloads::default());
        keeper.set_receiving(1, on);
        assert_eq!(told(), [Receives::AsBefore, on]);
        keeper.settle();
        assert_eq!(told(), [Receives::No, on]);
        assert_eq!(Port::new(&keeper, 1).part().map(|part| **part), Some(8));
        // Opened by nobody, and lost at once if there are none.
        assert_eq!(fake.0.lock().unwrap().1, 0);
        keeper.close();
        let state = Arc::new(LinkState::default());
        let keeper = Keeper::adopt(Arc::clone(&fake), Vec::new(), 2, state).unwrap();
        let mut port = Port::new(&keeper, 0);
        eventually("it is opened", || port.part().is_some());
        keeper.close();
    }
}
