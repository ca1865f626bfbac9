// SPDX-License-Identifier: Apache-2.0
//! [`Footprint`]: how much of its disks a trace ever requests.
//!
//! Kept as runs of contiguous blocks, so that memory grows with the number of records and not with their
//! sizes: one record of 32 bytes may request 16,384 blocks, and adds one run at most.

use pagetide_addr::DeviceId;
use std::{collections::BTreeMap, ops::Range};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Footprint {
    /// End of each run by its beginning. Runs neither overlap nor touch.
    runs: BTreeMap<(DeviceId, u64), u64>,
    blocks: u64,
}

impl Footprint {
    /// A request for `blocks` of `disk`.
    pub(super) fn add(&mut self, disk: DeviceId, blocks: Range<u64>) {
        let Range { mut start, mut end } = blocks;
        if start >= end {
            return;
        }
        // The last run that begins at or before the end is the only one that can reach beyond it.
        let reaching = |runs: &BTreeMap<(DeviceId, u64), u64>, end| {
            let (key, to) = runs.range((disk, 0)..=(disk, end)).next_back()?;
            Some((key.1, *to))
        };
        while let Some((from, to)) = reaching(&self.runs, end).filter(|(_, to)| *to >= start) {
            if from <= start && to >= end {
                return;
            }
            self.runs.remove(&(disk, from));
            self.blocks -= to - from;
            start = start.min(from);
            end = end.max(to);
        }
        self.runs.insert((disk, start), end);
        self.blocks += end - start;
    }

    /// Blocks that were ever requested.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn footprint_has_each_block_once_in_runs_with_gaps_between(
            asked in proptest::collection::vec((0_u32..2, 0_u64..60, 0_u64..12), 0..60),
        ) {
            let mut footprint = Footprint::default();
            let mut blocks = BTreeSet::new();
            for (disk, start, len) in asked {
                footprint.add(DeviceId(disk), start..start + len);
                blocks.extend((start..start + len).map(|block| (disk, block)));
                prop_assert_eq!(footprint.blocks(), blocks.len() as u64);
            }
            let begins = |&&(disk, block): &&(u32, u64)| {
                block == 0 || !blocks.contains(&(disk, block - 1))
            };
            prop_assert_eq!(footprint.runs.len(), blocks.iter().filter(begins).count());
        }
    }

    #[test]
    fn one_long_request_takes_one_run() {
        let mut footprint = Footprint::default();
        for number in 0..1000 {
            footprint.add(DeviceId(1), number * 20_000..number * 20_000 + 16_384);
        }
        assert_eq!(
            (footprint.runs.len(), footprint.blocks()),
            (1000, 16_384_000)
        );
    }
}
