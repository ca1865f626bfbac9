// SPDX-License-Identifier: Apache-2.0
//! Feature bits and configuration space of virtio-blk (virtio 1.2, 5.2.3 and 5.2.4).

use crate::blk::image::{Image, Writes};

/// Bytes of a sector, the unit of virtio-blk whatever the image's block size is.
pub const SECTOR_BYTES: u64 = 512;
/// Data segments a request may have (`VIRTIO_BLK_F_SEG_MAX`): a chain of 128, less header and
/// status.
pub const SEGMENTS_MAX: u32 = 126;
/// Most sectors of one discard or write-zeroes: 2 GiB, below all limits of `fallocate`.
pub const DISCARD_SECTORS_MAX: u32 = 1 << 22;

const F_SEG_MAX: u64 = 1 << 2;
const F_RO: u64 = 1 << 5;
const F_BLK_SIZE: u64 = 1 << 6;
const F_FLUSH: u64 = 1 << 9;
const F_TOPOLOGY: u64 = 1 << 10;
const F_MQ: u64 = 1 << 12;
const F_DISCARD: u64 = 1 << 13;
const F_WRITE_ZEROES: u64 = 1 << 14;

/// Bytes of `struct virtio_blk_config` up to `write_zeroes_may_unmap` and its padding.
const CONFIG_BYTES: usize = 60;
/// Largest configuration space a front end may read (`VHOST_USER_MAX_CONFIG_SIZE`).
const CONFIG_SPACE_BYTES: usize = 256;

/// Feature bits of a block device.
pub(crate) fn features(image: &Image) -> u64 {
    let always = F_SEG_MAX | F_BLK_SIZE | F_FLUSH | F_TOPOLOGY | F_MQ;
    match image.writes {
        Writes::Refused => always | F_RO,
        Writes::Taken => always | F_DISCARD | F_WRITE_ZEROES,
    }
}

/// `len` bytes of the configuration space from `offset`; `None` outside of it.
pub(crate) fn read(image: &Image, queue_count: u16, offset: u32, len: u32) -> Option<Vec<u8>> {
    let mut space = vec![0; CONFIG_SPACE_BYTES];
    let fields = fields(image, queue_count);
    space[..CONFIG_BYTES].copy_from_slice(&fields);
    let end = offset.checked_add(len)?;
    space.get(offset as usize..end as usize).map(<[u8]>::to_vec)
}

fn fields(image: &Image, queue_count: u16) -> [u8; CONFIG_BYTES] {
    let mut bytes = Vec::with_capacity(CONFIG_BYTES);
    let block = image.block_bytes.max(512);
    bytes.extend(image.sectors.to_le_bytes());
    bytes.extend(0_u32.to_le_bytes()); // size_max: no limit
    bytes.extend(SEGMENTS_MAX.to_le_bytes());
    bytes.extend([0; 4]); // geometry
    bytes.extend(512_u32.to_le_bytes()); // blk_size: any sector may be addressed
    // Topology: the unit that direct I/O transfers.
    bytes.push(u8::try_from((block / 512).trailing_zeros()).unwrap_or(0));
    bytes.push(0);
    bytes.extend(u16::try_from(block / 512).unwrap_or(1).to_le_bytes());
    bytes.extend(0_u32.to_le_bytes());
    bytes.extend([1, 0]); // writeback, unused
    bytes.extend(queue_count.to_le_bytes());
    for _ in 0..2 {
        // Discard, then write zeroes: sectors, ranges in a request, and alignment or may_unmap.
        bytes.extend(DISCARD_SECTORS_MAX.to_le_bytes());
        bytes.extend(1_u32.to_le_bytes());
        if bytes.len() < 48 {
            bytes.extend((block / 512).to_le_bytes());
        }
    }
    bytes.extend([1, 0, 0, 0]);
    let mut fields = [0; CONFIG_BYTES];
    fields.copy_from_slice(&bytes[..CONFIG_BYTES]);
    fields
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blk::image::{DirectIo, Image};

    fn image() -> Image {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(10 << 20).unwrap();
        Image::open(file.path(), Writes::Taken, DirectIo::Off).unwrap()
    }

    #[test]
    fn configuration_space_has_its_fields_where_the_specification_puts_them() {
        let space = read(&image(), 3, 0, 60).unwrap();
        let word = |at: usize| u32::from_le_bytes(space[at..at + 4].try_into().unwrap());
        assert_eq!(u64::from_le_bytes(space[..8].try_into().unwrap()), 20 << 10);
        assert_eq!(word(12), SEGMENTS_MAX);
        assert_eq!(word(20), 512);
        assert_eq!(space[34..36], [3, 0]);
        assert_eq!(word(36), DISCARD_SECTORS_MAX);
        assert_eq!(word(40), 1);
        assert_eq!(word(44), 1);
        assert_eq!(word(48), DISCARD_SECTORS_MAX);
        assert_eq!(word(52), 1);
        assert_eq!(space[56], 1);
    }

    #[test]
    fn bytes_outside_the_configuration_space_are_refused() {
        assert_eq!(read(&image(), 1, 56, 8).unwrap().len(), 8);
        assert!(read(&image(), 1, 250, 8).is_none());
        assert!(read(&image(), 1, u32::MAX, 8).is_none());
    }
}
