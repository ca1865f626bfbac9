// SPDX-License-Identifier: Apache-2.0
//! The zstd form of stored content.
//!
//! A page that stayed cold is kept smaller, and takes longer to load: see [`crate::demoter`]. Of the frame's
//! header only what differs from page to page is kept: neither magic number nor size of the content (both are
//! the same for all), and no check sum (there is a CRC in front of it).

use super::crc::{CRC_BYTES, PAGE, STORED_BYTES_MAX, Seed, seal};
use pagetide_addr::PageNo;
use std::alloc::{Layout, handle_alloc_error};
use std::cell::RefCell;
use zstd_safe::{CCtx, CParameter, DCtx, DParameter, FrameFormat};

/// Level of compression. On memory of programs it saves two per cent more than level 1 at a tenth more time;
/// the next ones that save more take three times as long (`docs/adr/0032-tiers-of-the-pool.md`).
const LEVEL: i32 = 3;

/// Turns pages into their zstd form; keeps its buffers.
pub struct ZstdPacker {
    stored: Box<[u8]>,
    context: CCtx<'static>,
}

/// The zstd library has no memory, or does not know a parameter.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("zstd cannot be used: {0}")]
pub struct ZstdUnusable(&'static str);

const NO_MEMORY: ZstdUnusable = ZstdUnusable("it gets no memory");

impl ZstdPacker {
    /// A packer.
    ///
    /// # Errors
    /// [`ZstdUnusable`].
    pub fn new() -> Result<Self, ZstdUnusable> {
        let mut context = CCtx::try_create().ok_or(NO_MEMORY)?;
        for parameter in [
            CParameter::CompressionLevel(LEVEL),
            CParameter::Format(FrameFormat::Magicless),
            CParameter::ContentSizeFlag(false),
            CParameter::ChecksumFlag(false),
            CParameter::DictIdFlag(false),
        ] {
            let set = context.set_parameter(parameter);
            set.map_err(|code| ZstdUnusable(zstd_safe::get_error_name(code)))?;
        }
        Ok(Self {
            stored: vec![0; STORED_BYTES_MAX].into(),
            context,
        })
    }

    /// The stored form of `page`'s content, or `None` if it takes more than `bytes_max` with its CRC.
    pub fn pack(
        &mut self,
        seed: Seed,
        page: PageNo,
        content: &[u8; PAGE],
        bytes_max: usize,
    ) -> Option<&[u8]> {
        let end = bytes_max.min(STORED_BYTES_MAX);
        let room = self.stored.get_mut(CRC_BYTES..end)?;
        // An error is that there is too little room.
        let Ok(length) = self.context.compress2(room, content) else {
            return None;
        };
        let stored = &mut self.stored[..CRC_BYTES + length];
        seal(seed, page, stored);
        Some(stored)
    }
}

/// The page in `frame`.
pub(super) fn decompress(frame: &[u8], into: &mut [u8; PAGE]) -> Result<(), &'static str> {
    thread_local! {
        static CONTEXT: RefCell<DCtx<'static>> = RefCell::new(new_context());
    }
    CONTEXT.with_borrow_mut(|context| match context.decompress(&mut into[..], frame) {
        Ok(PAGE) => Ok(()),
        Ok(_) | Err(_) => Err("it does not decompress to a page"),
    })
}

/// Bytes of a context for decompression, about.
const CONTEXT_BYTES: usize = 128 << 10;

/// No memory for it says nothing of a page, which must not be taken for damaged. It ends the process, as any
/// allocation that fails does: a successor loses nothing.
fn new_context() -> DCtx<'static> {
    let format = DParameter::Format(FrameFormat::Magicless);
    let made = DCtx::try_create().and_then(|mut context| {
        let is_set = context.set_parameter(format).is_ok();
        is_set.then_some(context)
    });
    made.unwrap_or_else(|| handle_alloc_error(Layout::new::<[u8; CONTEXT_BYTES]>()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::{Form, unpack};
    use pagetide_random::SplitMix64;

    const SEED: Seed = Seed(0xfeed);

    fn text() -> [u8; PAGE] {
        let mut random = SplitMix64::new(1);
        let words: [&[u8]; 4] = [b"tide ", b"comes ", b"in, ", b"out; "];
        let mut bytes = Vec::new();
        while bytes.len() < PAGE {
            bytes.extend_from_slice(words[random.index(4)]);
        }
        bytes.truncate(PAGE);
        bytes.try_into().unwrap()
    }

    #[test]
    fn page_comes_back_and_any_flipped_bit_is_noticed() {
        let mut packer = ZstdPacker::new().unwrap();
        let (page, content) = (PageNo(5), text());
        let stored = packer.pack(SEED, page, &content, PAGE).unwrap().to_vec();
        assert!(stored.len() < PAGE / 3, "{}", stored.len());
        let mut back = [0; PAGE];
        unpack(SEED, page, Form::Zstd, &stored, &mut back).unwrap();
        assert!(back == content);
        for bit in 0..stored.len() * 8 {
            let mut damaged = stored.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(unpack(SEED, page, Form::Zstd, &damaged, &mut back).is_err());
        }
        assert!(unpack(SEED, PageNo(6), Form::Zstd, &stored, &mut back).is_err());
    }

    #[test]
    fn what_takes_too_much_is_not_packed() {
        let mut packer = ZstdPacker::new().unwrap();
        let mut random = SplitMix64::new(2);
        let noise: [u8; PAGE] = std::array::from_fn(|_| random.next_u64().to_le_bytes()[0]);
        for bytes_max in [0, 3, 4, 5, 1_000, PAGE, STORED_BYTES_MAX, usize::MAX] {
            let packed = packer.pack(SEED, PageNo(0), &noise, bytes_max);
            assert!(packed.is_none(), "{bytes_max}");
        }
        // It packs the next page all the same.
        let length = packer.pack(SEED, PageNo(0), &text(), PAGE).unwrap().len();
        assert!(packer.pack(SEED, PageNo(0), &text(), length - 1).is_none());
    }

    /// Whatever a slot holds, its CRC right or not.
    #[test]
    fn bytes_that_are_no_frame_are_an_error_and_nothing_else() {
        let mut random = SplitMix64::new(4);
        let mut packer = ZstdPacker::new().unwrap();
        let good = packer
            .pack(SEED, PageNo(0), &text(), PAGE)
            .unwrap()
            .to_vec();
        let mut into = [0; PAGE];
        for round in 0..20_000 {
            let mut frame = good[CRC_BYTES..].to_vec();
            if round % 2 == 0 {
                let at = random.index(frame.len());
                frame[at] = random.next_u64().to_le_bytes()[0];
            } else {
                frame.truncate(random.index(frame.len()));
            }
            if decompress(&frame, &mut into).is_ok() {
                assert_eq!(frame.len(), good.len() - CRC_BYTES);
            }
        }
    }
}
