// SPDX-License-Identifier: Apache-2.0
//! Lists of block numbers.

use super::binary::{Records, offset};
use super::{BlockRequest, ByteOrder, Decoder, Input, Wrong};

/// Bytes of a number.
const ID_BYTES: usize = 4;

/// One in this many requests must follow its neighbour for a file to count as a list of blocks. Disks are
/// read in sequence far more often (4 of 10 in the list examined); random numbers never are.
const NEIGHBOURS_IN: u64 = 100;

/// Fewest numbers to judge by.
const IDS_MIN: u64 = 256;

pub(super) struct BlockIds {
    records: Records<ID_BYTES>,
    order: ByteOrder,
    block_bytes: u32,
}

impl BlockIds {
    pub(super) fn new(input: Input, order: ByteOrder, block_bytes: u32) -> Self {
        Self {
            records: Records::new(input),
            order,
            block_bytes,
        }
    }
}

impl Decoder for BlockIds {
    fn next(&mut self) -> Result<Option<BlockRequest>, Wrong> {
        let Some(record) = self.records.next()? else {
            return Ok(None);
        };
        Ok(Some(BlockRequest {
            time_ns: None,
            device: 0,
            offset_bytes: offset(id(record, self.order).into(), self.block_bytes.into())?,
            len_bytes: self.block_bytes,
            access: None,
        }))
    }

    fn record(&self) -> u64 {
        self.records.number()
    }
}

fn id(record: [u8; ID_BYTES], order: ByteOrder) -> u32 {
    match order {
        ByteOrder::BigEnd => u32::from_be_bytes(record),
        ByteOrder::LittleEnd => u32::from_le_bytes(record),
    }
}

/// The byte order in which a file that begins with `head` has more neighbours; if neither, big endian, as
/// tools that need no neighbours read it.
pub(super) fn order_of(head: &[u8]) -> ByteOrder {
    if neighbours(head, ByteOrder::LittleEnd) > neighbours(head, ByteOrder::BigEnd) {
        ByteOrder::LittleEnd
    } else {
        ByteOrder::BigEnd
    }
}

/// Whether a file that begins with `head` looks like a list of blocks.
pub(super) fn is_list(head: &[u8]) -> bool {
    let ids = (head.len() / ID_BYTES) as u64;
    let most = neighbours(head, ByteOrder::LittleEnd).max(neighbours(head, ByteOrder::BigEnd));
    ids >= IDS_MIN && most >= ids / NEIGHBOURS_IN
}

/// Numbers in `head` that are one more or less than the number before them.
fn neighbours(head: &[u8], order: ByteOrder) -> u64 {
    let (ids, _) = head.as_chunks::<ID_BYTES>();
    let ids = ids.iter().map(|record| id(*record, order));
    ids.clone()
        .zip(ids.skip(1))
        .filter(|(before, after)| before.abs_diff(*after) == 1)
        .count() as u64
}
