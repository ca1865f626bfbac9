// SPDX-License-Identifier: Apache-2.0
//! Packets that wait for their buffers.
//!
//! A device has one bound for all its queues, on whichever engines they are ([`StoreBound`]). Each
//! engine has a [`Store`] of its own for its part. What is stored is memory of ours: no VM's budget
//! and no eviction applies to it, so the bound counts against the host.

use super::policy::PacketId;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// What a stored packet costs besides its bytes.
const PACKET_COST_BYTES: u64 = 64;

/// The bound of a device's store, and what it holds.
#[derive(Debug)]
pub(crate) struct StoreBound {
    bytes_max: u64,
    bytes: AtomicU64,
    peak_bytes: AtomicU64,
    packets: AtomicU64,
}

impl StoreBound {
    /// A bound of so many bytes.
    pub fn new(bytes_max: u64) -> Self {
        Self {
            bytes_max,
            bytes: AtomicU64::new(0),
            peak_bytes: AtomicU64::new(0),
            packets: AtomicU64::new(0),
        }
    }

    /// Bytes stored now.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The most bytes that were ever stored at a time.
    pub fn peak_bytes(&self) -> u64 {
        self.peak_bytes.load(Ordering::Relaxed)
    }

    /// Packets stored up to now, all together.
    pub fn packets(&self) -> u64 {
        self.packets.load(Ordering::Relaxed)
    }

    /// Takes `cost` of it; false if it is not left.
    fn take(&self, cost: u64) -> bool {
        let (order, bytes_max) = (Ordering::Relaxed, self.bytes_max);
        let more = |bytes: u64| bytes.checked_add(cost).filter(|sum| *sum <= bytes_max);
        let Ok(before) = self.bytes.fetch_update(order, order, more) else {
            return false;
        };
        self.peak_bytes.fetch_max(before + cost, order);
        self.packets.fetch_add(1, order);
        true
    }

    fn give(&self, cost: u64) {
        let before = self.bytes.fetch_sub(cost, Ordering::Relaxed);
        debug_assert!(before >= cost, "more given than taken");
    }
}

#[derive(Debug)]
struct Stored {
    packet: Box<[u8]>,
    since_ns: u64,
}

/// Stored packets of a device on one engine.
#[derive(Debug)]
pub(crate) struct Store {
    bound: Arc<StoreBound>,
    packets: Vec<Option<Stored>>,
    free: Vec<u32>,
}

impl Store {
    /// An empty one.
    pub fn new(bound: Arc<StoreBound>) -> Self {
        Self {
            bound,
            packets: Vec::new(),
            free: Vec::new(),
        }
    }

    /// Stores a packet with its header, `now_ns`; `None` if there is no room.
    pub fn put(&mut self, packet: &[u8], now_ns: u64) -> Option<PacketId> {
        if !self.bound.take(cost(packet)) {
            return None;
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.packets.push(None);
            u32::try_from(self.packets.len() - 1).unwrap_or(u32::MAX)
        });
        self.packets[index as usize] = Some(Stored {
            packet: packet.into(),
            since_ns: now_ns,
        });
        Some(PacketId(index))
    }

    /// Takes a packet out.
    pub fn take(&mut self, id: PacketId) -> Option<Box<[u8]>> {
        let Stored { packet, .. } = self.packets.get_mut(id.0 as usize)?.take()?;
        self.free.push(id.0);
        self.bound.give(cost(&packet));
        Some(packet)
    }

    /// When a packet was stored.
    pub fn since_ns(&self, id: PacketId) -> Option<u64> {
        let stored = self.packets.get(id.0 as usize)?.as_ref()?;
        Some(stored.since_ns)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        for stored in self.packets.iter().flatten() {
            self.bound.give(cost(&stored.packet));
        }
    }
}

fn cost(packet: &[u8]) -> u64 {
    packet.len() as u64 + PACKET_COST_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_random::SplitMix64;
    use std::collections::BTreeMap;

    #[test]
    fn stores_of_one_bound_never_exceed_it_and_give_back_what_they_took() {
        for seed in 0..200 {
            let mut random = SplitMix64::new(seed);
            let bound = Arc::new(StoreBound::new(10_000));
            let mut stores = [Store::new(bound.clone()), Store::new(bound.clone())];
            let mut model: [BTreeMap<PacketId, Vec<u8>>; 2] = Default::default();
            for _ in 0..500 {
                let at = usize::from(random.below(2) == 1);
                let used = |model: &[BTreeMap<PacketId, Vec<u8>>; 2]| -> u64 {
                    model
                        .iter()
                        .flat_map(BTreeMap::values)
                        .map(|p| cost(p))
                        .sum()
                };
                if random.below(2) == 0 {
                    let bytes = usize::try_from(random.below(3000)).unwrap();
                    let packet = vec![u8::try_from(random.below(256)).unwrap(); bytes];
                    let fits = used(&model) + cost(&packet) <= 10_000;
                    let id = stores[at].put(&packet, 7);
                    assert_eq!(id.is_some(), fits);
                    if let Some(id) = id {
                        assert!(model[at].insert(id, packet).is_none(), "in use");
                    }
                } else if let Some((id, packet)) = model[at].pop_first() {
                    assert_eq!(stores[at].since_ns(id), Some(7));
                    assert_eq!(stores[at].take(id).as_deref(), Some(&packet[..]));
                    assert_eq!(stores[at].take(id), None);
                }
                assert_eq!(bound.bytes(), used(&model));
                assert!(bound.peak_bytes() <= 10_000);
            }
            drop(stores);
            assert_eq!(bound.bytes(), 0);
        }
    }
}
