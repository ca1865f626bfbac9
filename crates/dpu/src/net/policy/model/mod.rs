// SPDX-License-Identifier: Apache-2.0
//! All policies under random orders of all that can happen, beside a ring that is a plain list; and what each is to do
//! in cases that are told apart ([`cases`]).

mod cases;

use super::*;
use pagetide_random::SplitMix64;
use std::collections::{BTreeMap, BTreeSet};

const ALL: [OnReceiveFault; 4] = [
    OnReceiveFault::Drop,
    OnReceiveFault::Pause,
    OnReceiveFault::BackupRing,
    OnReceiveFault::OutOfOrder,
];
const RING: u16 = 32;
const STORE_MAX: usize = 24;
/// More than a packet needs, unless some are unfit.
const LOOKS_MAX: usize = 12;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Is {
    Present,
    Absent,
    TableAbsent,
    Unfit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    Free,
    Filled,
    Used,
}

/// What a packet finds at the front of the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FrontOfRing {
    Present,
    /// Or not enough.
    Absent,
}

/// What the answers to page requests may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answers {
    Pages,
    /// Pages, too, but they may be lost, or taken away again at once.
    OfAnyKind,
}

#[derive(Debug)]
struct Chain {
    room: u32,
    is: Is,
    lost: bool,
    used: Use,
    wired: bool,
}

/// The naive ring: every chain that was ever posted.
#[derive(Debug, Default)]
struct NaiveRing {
    chains: Vec<Chain>,
    looked: BTreeSet<ChainNo>,
    /// Most chains that may be looked at in a step.
    looks_max: Option<usize>,
    /// More were to be looked at in this step.
    is_cut: bool,
}

impl Ring for NaiveRing {
    fn look(&mut self, no: ChainNo) -> Look {
        let Some(chain) = self.chains.get(usize::try_from(no.0).unwrap()) else {
            return Look::Unposted;
        };
        assert_eq!(chain.used, Use::Free, "{no:?} was looked at after its use");
        let is_new = !self.looked.contains(&no);
        if is_new && self.looks_max.is_some_and(|max| self.looked.len() >= max) {
            self.is_cut = true;
            return Look::Later;
        }
        self.looked.insert(no);
        let room = chain.room;
        match chain.is {
            Is::Present => Look::Present { room },
            Is::Absent => Look::Absent { room },
            Is::TableAbsent => Look::Unknown,
            Is::Unfit => Look::Unfit,
        }
    }

    fn size(&self) -> u16 {
        RING
    }
}

impl NaiveRing {
    fn at(&mut self, no: ChainNo) -> &mut Chain {
        &mut self.chains[usize::try_from(no.0).unwrap()]
    }

    fn begin_step(&mut self) {
        self.looked.clear();
        self.is_cut = false;
    }

    fn unused(&self) -> usize {
        self.chains.iter().filter(|c| c.used != Use::Used).count()
    }
}

struct Run {
    policy: Policy,
    on_fault: OnReceiveFault,
    random: SplitMix64,
    ring: NaiveRing,
    asked: Vec<(ChainNo, Need)>,
    store: BTreeMap<PacketId, (u64, u32)>,
    next_id: u32,
    /// Packets that were offered, their lengths by number.
    arrived: Vec<u32>,
    kept: Option<u64>,
    filled: BTreeMap<u64, Vec<ChainNo>>,
    reported: Vec<u64>,
    lost: BTreeSet<u64>,
    merging: Merging,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut random = SplitMix64::new(seed);
        let on_fault = ALL[usize::try_from(seed % 4).unwrap()];
        let prefault = match random.below(2) {
            0 => Prefault::Off,
            _ => Prefault::Posted,
        };
        let wiring = match random.below(5) {
            0 => Wiring::Floor { buffers: 5 },
            1 => Wiring::Fine,
            2 => Wiring::Coarse { bytes: 1 << 20 },
            _ => Wiring::None,
        };
        let merging = match random.below(3) {
            0 => Merging::Single,
            _ => Merging::Mergeable,
        };
        Self {
            policy: Policy::new(
                &ReceiveConfig {
                    on_fault,
                    prefault,
                    wiring,
                    ..ReceiveConfig::default()
                },
                merging,
            ),
            on_fault,
            random,
            ring: NaiveRing {
                looks_max: seed.is_multiple_of(5).then_some(LOOKS_MAX),
                ..NaiveRing::default()
            },
            asked: Vec::new(),
            store: BTreeMap::new(),
            next_id: 0,
            arrived: Vec::new(),
            kept: None,
            filled: BTreeMap::new(),
            reported: Vec::new(),
            lost: BTreeSet::new(),
            merging,
        }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    fn post(&mut self) {
        if self.ring.unused() >= usize::from(RING) {
            return;
        }
        let is = match self.below(10) {
            0..=4 => Is::Present,
            5..=7 => Is::Absent,
            8 => Is::TableAbsent,
            _ => Is::Unfit,
        };
        let room = match (self.merging, self.below(8)) {
            (Merging::Mergeable, 0..=5) => 20 + u32::try_from(self.below(100)).unwrap(),
            _ => 200,
        };
        self.ring.chains.push(Chain {
            room,
            is,
            lost: false,
            used: Use::Free,
            wired: false,
        });
    }

    /// The chosen chains get packet `number`.
    fn fill(&mut self, number: u64, report: Report) {
        let chosen = self.policy.chosen().to_vec();
        let mut room = 0;
        for no in &chosen {
            assert!(self.ring.looked.contains(no), "{no:?} is not leased");
            let chain = self.ring.at(*no);
            assert_eq!((chain.is, chain.used), (Is::Present, Use::Free));
            chain.used = Use::Filled;
            room += chain.room;
        }
        assert!(room >= self.arrived[usize::try_from(number).unwrap()]);
        assert!(self.merging == Merging::Mergeable || chosen.len() == 1);
        if self.on_fault == OnReceiveFault::Pause || self.on_fault == OnReceiveFault::Drop {
            assert!(chosen.is_sorted());
        }
        match report {
            Report::Now => self.report(number, &chosen),
            Report::Later => assert!(self.filled.insert(number, chosen).is_none()),
        }
    }

    fn report(&mut self, number: u64, chains: &[ChainNo]) {
        for no in chains {
            let chain = self.ring.at(*no);
            assert_eq!(chain.used, Use::Filled);
            chain.used = Use::Used;
        }
        assert!(self.reported.last().is_none_or(|last| *last < number));
        self.reported.push(number);
    }

    fn lose(&mut self, number: u64) {
        assert!(self.lost.insert(number));
    }

    fn arrive(&mut self) {
        let number = match self.kept.take() {
            Some(number) => number,
            None => {
                let bytes = 14 + u32::try_from(self.below(180)).unwrap();
                self.arrived.push(bytes);
                self.arrived.len() as u64 - 1
            }
        };
        let bytes = self.arrived[usize::try_from(number).unwrap()];
        self.ring.begin_step();
        let front = self.front_of_ring(bytes);
        let arrival = self.policy.arrive(bytes, &mut self.ring);
        match arrival {
            Arrival::Fill(report) => {
                if matches!(self.on_fault, OnReceiveFault::Drop | OnReceiveFault::Pause) {
                    assert_eq!(front, FrontOfRing::Present);
                }
                self.fill(number, report);
            }
            Arrival::Store => {
                assert!(self.on_fault != OnReceiveFault::Drop);
                self.check_store_was_needed(bytes, front);
                if self.store.len() == STORE_MAX {
                    self.policy.refused();
                    self.lose(number);
                } else {
                    let id = PacketId(self.next_id);
                    self.next_id += 1;
                    self.store.insert(id, (number, bytes));
                    self.policy.stored(id, bytes);
                }
            }
            Arrival::Drop(Loss::Fault) => {
                assert!(matches!(
                    self.on_fault,
                    OnReceiveFault::Drop | OnReceiveFault::BackupRing
                ));
                assert!(front == FrontOfRing::Absent || self.ring.is_cut);
                self.lose(number);
            }
            Arrival::Drop(Loss::TooLong) => self.lose(number),
            Arrival::Keep => self.kept = Some(number),
        }
    }

    /// Whether a packet finds present chains at the front of the ring.
    fn front_of_ring(&self, bytes: u32) -> FrontOfRing {
        let mut room = 0;
        for chain in &self.ring.chains {
            match (chain.used, chain.is) {
                // It is on its way back to the driver.
                (Use::Free, _) if chain.lost => {}
                (Use::Free, Is::Present) => room += chain.room,
                (Use::Free, Is::Absent | Is::TableAbsent) => return FrontOfRing::Absent,
                _ => {}
            }
            if room >= bytes {
                return FrontOfRing::Present;
            }
        }
        FrontOfRing::Absent
    }

    /// A packet is stored only if there is a reason to.
    fn check_store_was_needed(&self, bytes: u32, front: FrontOfRing) {
        if !self.store.is_empty() || self.ring.is_cut {
            return;
        }
        match self.on_fault {
            OnReceiveFault::OutOfOrder if self.asked.len() < ASKED_MAX => {
                let is_asked = |no: usize| self.asked.iter().any(|(a, _)| a.0 == no as u64);
                let free = self.ring.chains.iter().enumerate();
                let free = free
                    .filter(|(no, c)| c.used == Use::Free && c.is == Is::Present && !is_asked(*no));
                let room: u32 = free.map(|(_, chain)| chain.room).sum();
                assert!(room < bytes, "present buffers were passed over");
            }
            _ => assert_eq!(front, FrontOfRing::Absent),
        }
    }

    /// Carries out what is to be done next; false if nothing is.
    fn step(&mut self) -> bool {
        self.ring.begin_step();
        let Some(order) = self.policy.next(&mut self.ring) else {
            return false;
        };
        match order {
            Order::Ask(no, need) => {
                assert!(!self.asked.iter().any(|(asked, _)| *asked == no));
                assert_eq!(self.ring.at(no).used, Use::Free);
                self.asked.push((no, need));
            }
            Order::Wire(no) => {
                assert!(self.ring.looked.contains(&no));
                let chain = self.ring.at(no);
                assert_eq!((chain.is, chain.used), (Is::Present, Use::Free));
                chain.wired = true;
            }
            Order::GiveBack(no) => {
                let is_backup = self.on_fault == OnReceiveFault::BackupRing;
                // Out of order does not wait for one for ever.
                let may_give_up = self.on_fault == OnReceiveFault::OutOfOrder
                    && self.ring.chains.len() > 16 * usize::from(RING)
                    && self.asked.iter().any(|(asked, _)| *asked == no);
                let chain = self.ring.at(no);
                // A backup ring gives back all buffers of a packet of which it has lost one.
                assert!(chain.lost || chain.is == Is::Unfit || is_backup || may_give_up);
                assert_eq!(chain.used, Use::Free);
                chain.used = Use::Used;
            }
            Order::Fill(id, report) => {
                let (number, _) = self.store.remove(&id).expect("it is in the store");
                self.fill(number, report);
            }
            Order::Report => {
                let (number, chains) = self.filled.pop_first().expect("one is filled");
                assert_eq!(self.policy.chosen(), chains);
                self.report(number, &chains);
            }
            Order::Forget(id, loss) => {
                assert_eq!(loss, Loss::TooLong);
                let (number, _) = self.store.remove(&id).expect("it is in the store");
                self.lose(number);
            }
        }
        true
    }

    fn answer(&mut self, answers: Answers) {
        if self.asked.is_empty() {
            return;
        }
        let at = usize::try_from(self.below(self.asked.len() as u64)).unwrap();
        let (no, _) = self.asked.swap_remove(at);
        let dice = self.below(12);
        let chain = self.ring.at(no);
        if chain.used != Use::Free {
            self.policy.answered(no, Answered::Present);
            return;
        }
        match dice {
            0 if answers == Answers::OfAnyKind => {
                chain.lost = true;
                self.policy.answered(no, Answered::Lost);
                return;
            }
            // It was taken away again at once.
            1 if answers == Answers::OfAnyKind => {}
            _ => {
                if chain.is != Is::Unfit {
                    chain.is = Is::Present;
                }
            }
        }
        self.policy.answered(no, Answered::Present);
    }

    fn evict(&mut self) {
        let free: Vec<usize> = (0..self.ring.chains.len())
            .filter(|at| {
                let chain = &self.ring.chains[*at];
                chain.used == Use::Free && chain.is == Is::Present && !chain.wired
            })
            .collect();
        if !free.is_empty() {
            let at = usize::try_from(self.below(free.len() as u64)).unwrap();
            self.ring.chains[free[at]].is = Is::Absent;
        }
    }

    /// The driver changes a buffer after it has posted it, which it must not.
    fn lie(&mut self) {
        let free: Vec<usize> = (0..self.ring.chains.len())
            .filter(|at| self.ring.chains[*at].used == Use::Free)
            .collect();
        if !free.is_empty() {
            let at = usize::try_from(self.below(free.len() as u64)).unwrap();
            self.ring.chains[free[at]].room = 12 + u32::try_from(self.below(60)).unwrap();
        }
    }

    fn check(&self) {
        assert!(self.store.len() <= STORE_MAX);
        assert!(self.asked.len() <= ASKED_MAX + self.ring.chains.len());
        let all = self.reported.len() + self.lost.len() + self.store.len() + self.filled.len();
        assert_eq!(all + usize::from(self.kept.is_some()), self.arrived.len());
        assert!(
            self.reported
                .iter()
                .all(|number| !self.lost.contains(number))
        );
    }

    /// Everything is answered and enough is posted: nothing may be left.
    fn settle(&mut self) {
        self.ring.looks_max = None;
        for round in 0..10_000 {
            while self.step() {}
            self.answer(Answers::Pages);
            self.post();
            for chain in &mut self.ring.chains {
                if chain.used == Use::Free && chain.is == Is::Absent {
                    chain.room = chain.room.max(20);
                }
            }
            if self.kept.is_some() {
                self.arrive();
            }
            self.check();
            if self.kept.is_none() && self.store.is_empty() && self.filled.is_empty() {
                return;
            }
            assert!(
                round < 9_999,
                "packets are left for ever: {:?}",
                self.on_fault
            );
        }
    }

    fn stop(&mut self) {
        let mut last = None;
        while let Some(left) = self.policy.stop() {
            let number = match left {
                Left::Filled => {
                    let (number, chains) = self.filled.pop_first().expect("one is filled");
                    assert_eq!(self.policy.chosen(), chains);
                    self.report(number, &chains);
                    number
                }
                Left::Stored(packet) => self.store.remove(&packet).expect("it is stored").0,
            };
            assert!(last < Some(number), "packet {number} is not the oldest");
            last = Some(number);
        }
        assert!(self.filled.is_empty() && self.store.is_empty());
    }
}

#[test]
fn no_packet_is_lost_uncounted_or_out_of_order_whatever_happens() {
    let mut stored = [0_u32; 4];
    let mut reported = [0_u32; 4];
    for seed in 0..4_000 {
        let mut run = Run::new(seed);
        for _ in 0..220 {
            match run.below(16) {
                0..=3 => run.post(),
                4..=7 => run.arrive(),
                8..=10 => run.answer(Answers::OfAnyKind),
                11 => run.evict(),
                12 if seed % 3 == 0 => run.lie(),
                _ => while run.below(4) > 0 && run.step() {},
            }
            run.check();
        }
        let kind = usize::try_from(seed % 4).unwrap();
        stored[kind] += run.next_id;
        match run.below(2) {
            0 => run.stop(),
            _ => run.settle(),
        }
        reported[kind] += u32::try_from(run.reported.len()).unwrap();
    }
    // Each of them has seen what it is for.
    assert_eq!(stored[0], 0);
    assert!(stored[1..].iter().all(|count| *count > 1000), "{stored:?}");
    assert!(reported.iter().all(|count| *count > 10_000), "{reported:?}");
}
