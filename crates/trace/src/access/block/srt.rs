// SPDX-License-Identifier: Apache-2.0
//! HP Labs' disk traces, version 1.3: a text header that describes the machine, then records of 13 to 15
//! words, big endian.
//!
//! ```text
//!  0 size of the record in bytes      7 sector on the disk, from the disk's beginning
//!  1 version << 16 | kind             8 device; bits 8 to 15 are the disk
//!  2 seconds   3 microseconds         9 driver   10 cylinder
//!  4 start, after that, us           11 flags, bit 0: a read
//!  5 stop, after that, us            12 info
//!  6 bytes                           13 length of the queue (version 4)   then: why it is suspect
//! ```
//! Version is 1 to 4. Kind 1 is a request; kind 2 is one whose record is suspect (DiskSim skips those, and
//! so do we); there are no others.

use std::io::{BufRead, BufReader, Read};

use pagetide_addr::Access;

use super::binary::{cut_off, fill, offset};
use super::{BlockRequest, Decoder, Input, Wrong};

/// First bytes of the file.
pub(super) const MAGIC: &[u8] = b"$$TR_IOREC-";

/// What the header ends with.
const FORM_FEED: u8 = 0x0c;

/// Longest header that is read: that of a machine with two disks has 2 KB.
const HEADER_BYTES_MAX: u64 = 1 << 20;

/// Bytes of a sector, if the header has no value.
const SECTOR_BYTES: u32 = 256;

/// Words that each record has.
const WORDS: usize = 13;

/// Words of the longest record.
const WORDS_MAX: usize = 15;

/// A request.
const SHORT_IO: u32 = 1;
/// A request whose record is suspect.
const SUSPECT_IO: u32 = 2;
/// Flag of a read.
const READ_FLAG: u32 = 1;

pub(super) struct HpSrt {
    input: BufReader<Input>,
    sector_bytes: u32,
    begun: u64,
}

impl HpSrt {
    /// Reads the header.
    pub(super) fn new(input: Input) -> Result<Self, String> {
        let mut input = BufReader::with_capacity(256 << 10, input);
        let mut header = Vec::new();
        (&mut input)
            .take(HEADER_BYTES_MAX)
            .read_until(FORM_FEED, &mut header)
            .map_err(|error| error.to_string())?;
        if !header.starts_with(MAGIC) || header.last() != Some(&FORM_FEED) {
            return Err(format!(
                "it has no header from `{}` to a form feed",
                MAGIC.escape_ascii()
            ));
        }
        Ok(Self {
            input,
            sector_bytes: sector_bytes(&String::from_utf8_lossy(&header))?,
            begun: 0,
        })
    }

    pub(super) const fn sector_bytes(&self) -> u32 {
        self.sector_bytes
    }

    /// The next record's words, missing ones as 0; `None` at the end.
    fn record_words(&mut self) -> Result<Option<[u32; WORDS_MAX]>, Wrong> {
        let mut bytes = [0; WORDS_MAX * 4];
        self.begun += 1;
        let (size, rest) = bytes.split_at_mut(4);
        match fill(&mut self.input, size)? {
            0 => return Ok(None),
            4 => {}
            read => return Err(cut_off(read, 4)),
        }
        let (size, _) = size.as_chunks::<4>();
        let size = size.first().map_or(0, |word| u32::from_be_bytes(*word));
        let whole = usize::try_from(size).unwrap_or(usize::MAX);
        let rest = whole
            .checked_sub(4)
            .filter(|_| whole >= WORDS * 4)
            .and_then(|length| rest.get_mut(..length))
            .ok_or_else(|| {
                Wrong::Record(format!(
                    "it is {size} bytes long; a record has {} to {}",
                    WORDS * 4,
                    WORDS_MAX * 4
                ))
            })?;
        let read = fill(&mut self.input, rest)?;
        if read < rest.len() {
            return Err(cut_off(4 + read, whole));
        }
        let (words, _) = bytes.as_chunks::<4>();
        let mut numbers = [0; WORDS_MAX];
        for (number, word) in numbers.iter_mut().zip(words) {
            *number = u32::from_be_bytes(*word);
        }
        Ok(Some(numbers))
    }
}

impl Decoder for HpSrt {
    fn next(&mut self) -> Result<Option<BlockRequest>, Wrong> {
        loop {
            let Some(words) = self.record_words()? else {
                return Ok(None);
            };
            if kind(&words).map_err(Wrong::Record)? == SHORT_IO {
                return request(&words, self.sector_bytes).map(Some);
            }
        }
    }

    fn record(&self) -> u64 {
        self.begun.saturating_sub(1)
    }
}

/// The kind of a record, if its version is known and its size is that of both.
fn kind(words: &[u32; WORDS_MAX]) -> Result<u32, String> {
    let [size, id, ..] = *words;
    let (version, kind) = (id >> 16, id & 0xffff);
    if !(1..=4).contains(&version) || !(SHORT_IO..=SUSPECT_IO).contains(&kind) {
        return Err(format!(
            "its id is {id:#x}; versions are 1 to 4, kinds {SHORT_IO} and {SUSPECT_IO}"
        ));
    }
    let words = WORDS + usize::from(version == 4) + usize::from(kind == SUSPECT_IO);
    if size as usize != 4 * words {
        return Err(format!(
            "it is {size} bytes long; one of id {id:#x} has {}",
            4 * words
        ));
    }
    Ok(kind)
}

fn request(words: &[u32; WORDS_MAX], sector_bytes: u32) -> Result<BlockRequest, Wrong> {
    let [
        _,
        _,
        seconds,
        us,
        _,
        _,
        len_bytes,
        sector,
        device,
        _,
        _,
        flags,
        ..,
    ] = *words;
    if us >= 1_000_000 {
        return Err(Wrong::Record(format!("it has {us} us in a second")));
    }
    Ok(BlockRequest {
        time_ns: Some(u64::from(seconds) * 1_000_000_000 + u64::from(us) * 1000),
        device: device >> 8 & 0xff,
        offset_bytes: offset(sector.into(), sector_bytes.into())?,
        len_bytes,
        access: Some(if flags & READ_FLAG == 0 {
            Access::Write
        } else {
            Access::Read
        }),
    })
}

/// Bytes of a sector by the header, the same for all disks.
fn sector_bytes(header: &str) -> Result<u32, String> {
    let mut found = None;
    for line in header.lines() {
        let Some((name, value)) = line.split_once('=') else {
            continue;
        };
        if name.trim() != "sectorsize" {
            continue;
        }
        let value = value.trim().trim_end_matches([',', ';']).trim_end();
        let bytes = value
            .parse::<u32>()
            .ok()
            .filter(|bytes| *bytes > 0)
            .ok_or_else(|| format!("its header has sectors of `{value}` bytes"))?;
        if found.is_some_and(|other| other != bytes) {
            return Err("its disks have sectors of different sizes, which is not read".to_owned());
        }
        found = Some(bytes);
    }
    Ok(found.unwrap_or(SECTOR_BYTES))
}
