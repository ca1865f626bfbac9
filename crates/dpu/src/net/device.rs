// SPDX-License-Identifier: Apache-2.0
//! The device itself, as all its threads see it.

use super::{
    account::{PairAccount, PairReport},
    config::ReceiveConfig,
    handed::{ByPair, HandedPacket, ParkedNic},
    link::{Kept, Link, LinkConfig, LinkError, LinkState, Offloads, Opened, pair::Pairs},
    nic,
    store::StoreBound,
};
use crate::kind::work::QueueRole;
use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// The network interface of a device.
#[derive(Debug, Clone)]
pub struct NicReport {
    /// Queue pairs offered.
    pub pairs: u16,
    /// What it is linked to.
    pub link: LinkConfig,
    /// How it receives.
    pub receive: ReceiveConfig,
    /// Packets that were given to the link.
    pub sent_packets: u64,
    /// Packets that the link had no room for.
    pub send_drops: u64,
    /// Packets that came from the link.
    pub received_packets: u64,
    /// Packets that the link has lost before they came, as far as it knows.
    pub link_drops: u64,
    /// Packets that were lost because their buffers were absent.
    pub fault_drops: u64,
    /// Packets that were lost because they were longer than the driver's buffers.
    pub unfit_drops: u64,
    /// Packets that waited and were lost: in the store when their queue stopped, or in the link when their front end
    /// went.
    pub stop_drops: u64,
    /// Buffers that went back to the driver empty, because their content was lost or they could
    /// not be used.
    pub returned_buffers: u64,
    /// Packets that have waited in the store.
    pub stored_packets: u64,
    /// Bytes in the store now.
    pub stored_bytes: u64,
    /// The most bytes that were ever in the store at a time.
    pub stored_peak_bytes: u64,
    /// What faults have cost, by queue pair.
    pub accounts: Vec<PairReport>,
}

/// What becomes of packets that a device receives.
#[derive(Debug, Default)]
pub(crate) struct ReceiveCounters {
    pub fault_drops: AtomicU64,
    pub unfit_drops: AtomicU64,
    pub stop_drops: AtomicU64,
    pub returned_buffers: AtomicU64,
}

/// Adds to a counter that several engines write, rarely.
pub(crate) fn count_up(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

/// A network device.
#[derive(Debug)]
pub(crate) struct Nic {
    pairs: u16,
    link: LinkConfig,
    receive: ReceiveConfig,
    /// By pair; taken by the engine that serves it.
    links: Mutex<Vec<Option<Link>>>,
    states: Box<[Arc<LinkState>]>,
    kept: Kept,
    /// By pair: which of its queues run.
    running: Mutex<Vec<[bool; 2]>>,
    store: Arc<StoreBound>,
    pub counters: ReceiveCounters,
    /// By pair.
    accounts: Box<[PairAccount]>,
    /// Packets that another process has left, until the queues of their pairs run.
    handed: Mutex<ByPair>,
    /// Front ends that have gone.
    front_ends_gone: AtomicU64,
    /// Nothing is received yet: another process may go on with the device after all.
    is_held: AtomicBool,
    /// Packets for another process, once that goes on with the device.
    leaving: Mutex<Option<ByPair>>,
}

impl Nic {
    /// Makes its links. `known` are the pairs of devices of its DPU. With what another process has `handed` over it
    /// receives nothing before it is [admitted](Self::admit).
    ///
    /// # Errors
    /// [`LinkError`].
    pub fn open(
        pairs: u16,
        link: &LinkConfig,
        receive: ReceiveConfig,
        known: &Pairs,
        handed: Option<&ParkedNic>,
    ) -> Result<Self, LinkError> {
        let Opened { links, kept } = Link::open(link, pairs, known, handed)?;
        debug_assert_eq!(links.len(), usize::from(pairs));
        Ok(Self {
            pairs,
            link: link.clone(),
            receive,
            states: links.iter().map(|link| link.state().clone()).collect(),
            store: Arc::new(StoreBound::new(receive.store_bytes)),
            counters: ReceiveCounters::default(),
            accounts: (0..pairs).map(|_| PairAccount::default()).collect(),
            links: Mutex::new(links.into_iter().map(Some).collect()),
            kept,
            running: Mutex::new(vec![[false; 2]; usize::from(pairs)]),
            handed: Mutex::new(ByPair::new(
                pairs,
                handed
                    .map(|handed| handed.packets.clone())
                    .unwrap_or_default(),
            )),
            front_ends_gone: AtomicU64::new(0),
            is_held: AtomicBool::new(handed.is_some()),
            leaving: Mutex::new(None),
        })
    }

    /// See [`Kind::role_of`](crate::kind::Kind::role_of).
    pub fn role_of(&self, queue: u16, features: u64) -> QueueRole {
        QueueRole {
            keeping: nic::keeping_of(queue, self.receive.wiring, self.pairs),
            ..nic::role_of(queue, features)
        }
    }

    /// Queue pairs offered.
    pub fn pairs(&self) -> u16 {
        self.pairs
    }

    /// How it receives.
    pub fn receive(&self) -> ReceiveConfig {
        self.receive
    }

    /// The bound of its stored packets.
    pub fn store(&self) -> &Arc<StoreBound> {
        &self.store
    }

    /// The link of a pair, for the engine that serves it from now on.
    pub fn take_link(&self, pair: u16) -> Option<Link> {
        self.links().get_mut(usize::from(pair))?.take()
    }

    /// The account of a pair, which is one of the device's.
    pub fn account(&self, pair: u16) -> &PairAccount {
        &self.accounts[usize::from(pair)]
    }

    /// Packets of a pair that another process has left.
    pub fn take_handed(&self, pair: u16) -> VecDeque<HandedPacket> {
        lock(&self.handed).take(pair)
    }

    /// The front end has gone. Packets that another process has left for it are lost.
    pub fn front_end_gone(&self) {
        self.front_ends_gone.fetch_add(1, Ordering::Release);
        let gone = lock(&self.handed).take_all();
        self.count_stop_drops(gone.len() as u64);
    }

    /// Number of the front end, from 0.
    pub fn front_end(&self) -> u64 {
        self.front_ends_gone.load(Ordering::Acquire)
    }

    /// So many packets were lost because a queue has stopped, or its front end has gone.
    pub fn count_stop_drops(&self, packets: u64) {
        count_up(&self.counters.stop_drops, packets);
    }

    /// True while nothing may be received.
    pub fn is_held(&self) -> bool {
        self.is_held.load(Ordering::Acquire)
    }

    /// No other process goes on with it any more: it receives.
    pub fn admit(&self) {
        self.kept.settle();
        self.is_held.store(false, Ordering::Release);
    }

    /// Another process goes on with it: what its queues have of packets is kept for that from now on.
    pub fn begin_leaving(&self) {
        let handed = lock(&self.handed).take_all();
        *lock(&self.leaving) = Some(ByPair::new(self.pairs, handed));
    }

    /// True if another process goes on with it if this one stops now: one that it is left to, or the one that it comes
    /// from, which has not been told to end. Nothing may be given back to the driver, or closed for good, then.
    pub fn is_anothers(&self) -> bool {
        self.is_held() || lock(&self.leaving).is_some()
    }

    /// Keeps packets of a pair for that process, behind those that it has.
    pub fn leave(&self, pair: u16, packets: Vec<HandedPacket>) {
        if let Some(leaving) = lock(&self.leaving).as_mut() {
            leaving.add(pair, packets);
        }
    }

    /// What the other process gets. No queue runs any more.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn hand_over(&self) -> io::Result<ParkedNic> {
        let (descriptors, interface) = self.kept.hand_over()?;
        let packets = lock(&self.leaving).as_mut().map(ByPair::take_all);
        Ok(ParkedNic {
            descriptors,
            interface,
            packets: packets.unwrap_or_default(),
        })
    }

    /// Gives up what it holds of the host. No engine has it any more.
    pub fn release(&self) {
        self.links().clear();
        self.kept.close();
    }

    /// A queue is about to run for a driver that has accepted `features`, or has ended. A pair runs
    /// while one of its queues does.
    pub fn set_running(&self, queue: u16, features: Option<u64>) {
        if features.is_none() && self.is_anothers() {
            // The kernel keeps what comes for the process that goes on: a queue of a TAP that is detached loses it.
            return;
        }
        let pair = queue / 2;
        let mut running = lock(&self.running);
        let Some(its) = running.get_mut(usize::from(pair)) else {
            return;
        };
        let before = its.contains(&true);
        its[usize::from(queue % 2)] = features.is_some();
        match (before, its.contains(&true), features) {
            (false, true, Some(features)) => {
                let offloads = Offloads::of_features(features);
                self.kept.set_running(pair, Some(offloads));
            }
            (true, false, _) => self.kept.set_running(pair, None),
            _ => {}
        }
    }

    /// What is wrong with its links, as a sentence.
    pub fn error(&self) -> Option<String> {
        self.states.iter().find_map(|state| state.error())
    }

    /// For a report.
    pub fn report(&self) -> NicReport {
        let sum = |counter: fn(&LinkState) -> &AtomicU64| {
            let each = self.states.iter().map(|state| counter(state));
            each.map(|count| count.load(Ordering::Relaxed)).sum()
        };
        NicReport {
            pairs: self.pairs,
            link: self.link.clone(),
            receive: self.receive,
            sent_packets: sum(|state| &state.sent),
            send_drops: sum(|state| &state.send_drops),
            received_packets: sum(|state| &state.received),
            link_drops: sum(|state| &state.receive_drops),
            fault_drops: self.counters.fault_drops.load(Ordering::Relaxed),
            unfit_drops: self.counters.unfit_drops.load(Ordering::Relaxed),
            stop_drops: self.counters.stop_drops.load(Ordering::Relaxed),
            returned_buffers: self.counters.returned_buffers.load(Ordering::Relaxed),
            stored_packets: self.store.packets(),
            stored_bytes: self.store.bytes(),
            stored_peak_bytes: self.store.peak_bytes(),
            accounts: self.accounts.iter().map(PairAccount::report).collect(),
        }
    }

    fn links(&self) -> MutexGuard<'_, Vec<Option<Link>>> {
        lock(&self.links)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
