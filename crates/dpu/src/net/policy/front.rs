// SPDX-License-Identifier: Apache-2.0
//! Choosing the chains of a packet in the order of the ring.

use super::{ChainNo, Chains, Look, Merging, Need, Ring};

/// The chains that a packet gets if it takes the next ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Front {
    /// All are present; they are chosen.
    Present,
    /// Some are absent, and their pages were requested; all are chosen.
    Absent,
    /// They are not known before an answer comes: the table that describes one is absent, or no
    /// more pages may be requested now.
    Unknown,
    /// They are not known in this step.
    Later,
    /// Not enough is posted.
    Short,
    /// The packet does not fit, whatever else is posted.
    TooLong,
}

impl Chains {
    /// Chooses the chains that a packet of `bytes` gets in the order of the ring.
    pub(super) fn choose(&mut self, bytes: u32, ring: &mut impl Ring) -> Front {
        self.chosen.clear();
        let orders = self.orders.len();
        let (mut chain, mut left, mut is_absent) = (self.next, bytes, false);
        loop {
            if self.is_taken(chain) {
                chain = chain.next();
                continue;
            }
            let room = match ring.look(chain) {
                Look::Present { room } => room,
                Look::Absent { room } if self.ask(chain, Need::Now) => {
                    is_absent = true;
                    room
                }
                Look::Absent { .. } => return Front::Unknown,
                Look::Unknown => {
                    self.ask(chain, Need::Now);
                    return Front::Unknown;
                }
                Look::Unfit => {
                    self.give_back(chain);
                    continue;
                }
                // All that a step may look at is not enough for this packet.
                Look::Later if self.orders.len() == orders => return Front::TooLong,
                Look::Later => return Front::Later,
                // A driver that has posted all it can will not post more.
                Look::Unposted if self.chosen.len() >= usize::from(ring.size()) => {
                    return Front::TooLong;
                }
                Look::Unposted => return Front::Short,
            };
            self.chosen.push(chain);
            left = left.saturating_sub(room);
            if left == 0 {
                break;
            }
            if self.merging == Merging::Single {
                return Front::TooLong;
            }
            chain = chain.next();
        }
        match is_absent {
            true => Front::Absent,
            false => Front::Present,
        }
    }

    /// Looks again at chains that were chosen for a packet of `bytes`.
    pub(super) fn look_again(
        &mut self,
        chains: &[ChainNo],
        bytes: u32,
        ring: &mut impl Ring,
    ) -> Front {
        let (mut left, mut found) = (bytes, Front::Present);
        for chain in chains {
            match ring.look(*chain) {
                Look::Present { room } => left = left.saturating_sub(room),
                Look::Absent { room } => {
                    left = left.saturating_sub(room);
                    if !self.ask(*chain, Need::Now) {
                        return Front::Unknown;
                    }
                    found = Front::Absent;
                }
                Look::Unknown => {
                    return match self.ask(*chain, Need::Now) {
                        true => Front::Absent,
                        false => Front::Unknown,
                    };
                }
                Look::Unfit | Look::Unposted | Look::Later => return Front::TooLong,
            }
        }
        match left {
            0 => found,
            _ => Front::TooLong,
        }
    }
}
