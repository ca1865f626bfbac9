// SPDX-License-Identifier: Apache-2.0
//! Block traces that others have made: which blocks of a disk were asked for.
//!
//! They carry addresses **on a disk**, not in memory: which memory a request's DMA
//! went to follows only from a model of the guest's page cache. The formats:
//!
//! | name | one record |
//! |---|---|
//! | `vscsi` | 32 bytes: `u32` serial, `u32` bytes, `u32` segments, `u16` SCSI command, `u16` version (0x100), `u64` sector of 512 bytes, `u64` time in us |
//! | `oracle-general` | 24 bytes: `u32` time in s, `u64` block, `u32` bytes, `i64` index of the block's next request; reads and writes are not told apart |
//! | `mqsim` | a line: time in ns, disk, sector of 512 bytes, sectors, 1 to read or 0 to write |
//! | `hp-srt` | after a text header up to a form feed, 13 to 15 `i32`, big end first: size, id, s, us, start, stop, bytes, sector, device, driver, cylinder, flags, info … |
//! | `block-ids` | `u32`: the number of a block; neither time nor length nor direction |
//!
//! The binary ones are little end first but for `hp-srt`. Times count from the
//! first request. In none of these formats times run backwards, in the traces of
//! each that were looked at; a trace where they do is refused, for then it is
//! mixed of several or broken.
//!
//! *Sectors of `hp-srt`* are as large as the header says (`sectorsize`, 256 bytes
//! there). Readers that take 512 get addresses past the end of the disk.
//!
//! *Bytes of `block-ids`* come in either order, and nothing in the file tells.
//! Read the wrong way, neighbours are far apart; so the order is taken in which
//! more requests follow their neighbour.
//!
//! What is wrong with a trace names the record, from 0, or the line, from 1.
//!
//! *Pipes are refused*, with a sentence: their bytes come once, and who models a
//! guest reads a trace twice, first for how much of the disk it touches. Who needs
//! one pass only, and has other input than a file, gives it to [`BlockTrace::new`].

mod binary;
mod detect;
mod ids;
mod mqsim;
mod srt;

use std::fmt;
use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use pagetide_addr::Access;

use crate::error::TraceError;
use crate::open::open_regular;
use detect::{compression, detect, head_of};

/// One request for blocks of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockRequest {
    /// When, in nanoseconds since the trace's first request; `None` if the trace
    /// does not tell.
    pub time_ns: Option<u64>,
    /// Number of the disk.
    pub device: u32,
    /// First byte on the disk.
    pub offset_bytes: u64,
    /// Length, in bytes.
    pub len_bytes: u32,
    /// What it does to the disk; `None` if the trace does not tell. (Memory sees the
    /// opposite: a disk that is read writes to memory.)
    pub access: Option<Access>,
}

/// A format of block traces. See the module.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum BlockFormat {
    /// VMware's virtual disks, as the CloudPhysics traces have it.
    Vscsi,
    /// What libCacheSim reads; disks' traces are in it among others.
    OracleGeneral,
    /// Text of the SSD simulator MQSim.
    Mqsim,
    /// HP Labs' standard records of disk traces, version 1.3.
    HpSrt,
    /// Numbers of blocks.
    BlockIds,
}

impl BlockFormat {
    /// All formats, in the order of their names in documents.
    pub const ALL: [Self; 5] = [
        Self::Vscsi,
        Self::OracleGeneral,
        Self::Mqsim,
        Self::HpSrt,
        Self::BlockIds,
    ];

    /// Name on the command line and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vscsi => "vscsi",
            Self::OracleGeneral => "oracle-general",
            Self::Mqsim => "mqsim",
            Self::HpSrt => "hp-srt",
            Self::BlockIds => "block-ids",
        }
    }

    /// All names, for messages.
    fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

impl fmt::Display for BlockFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for BlockFormat {
    type Err = TraceError;

    fn from_str(name: &str) -> Result<Self, TraceError> {
        Self::ALL
            .into_iter()
            .find(|format| format.name() == name)
            .ok_or_else(|| {
                TraceError::Asked(format!(
                    "`{name}` is no format of block traces; there are {}",
                    Self::names()
                ))
            })
    }
}

/// How a block trace is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockOptions {
    /// Its format; `None`: as its content shows, or its name.
    pub format: Option<BlockFormat>,
    /// Bytes of a block, where the trace counts in blocks of a size that it does
    /// not tell; `None`: 512 in `oracle-general`, 4096 in `block-ids`.
    pub block_bytes: Option<u32>,
    /// Time from one request to the next in a trace that has no times; `None`: it
    /// stays without.
    pub interval: Option<Duration>,
}

/// Bytes of an integer, which come first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ByteOrder {
    /// The most significant.
    BigEnd,
    /// The least significant.
    LittleEnd,
}

/// What was taken for granted about a trace, to be said beside what came of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub struct BlockAbout {
    /// Format that it is read as.
    pub format: BlockFormat,
    /// Bytes of a block or sector, by which its addresses are counted.
    pub block_bytes: u32,
    /// Order of its bytes, where that had to be guessed.
    pub byte_order: Option<ByteOrder>,
    /// Time from one request to the next, in nanoseconds, where it has no times
    /// and some were asked for.
    pub interval_ns: Option<u64>,
}

/// A block trace that was opened. Iterates over its requests; after an error
/// there are none.
pub struct BlockTrace {
    path: PathBuf,
    about: BlockAbout,
    /// `None` once the end or an error was reached.
    decoder: Option<Box<dyn Decoder>>,
    /// Requests handed out.
    done: u64,
    first_ns: Option<u64>,
    last_ns: u64,
}

/// What tells requests of one format apart, in the order of the file.
trait Decoder: Send {
    /// The next request, its time as the file has it; `None` at the end.
    fn next(&mut self) -> Result<Option<BlockRequest>, Wrong>;

    /// Number of the record that was read last, as messages have it.
    fn record(&self) -> u64;
}

/// Why there is no next request.
#[derive(Debug)]
enum Wrong {
    /// The system's fault.
    Io(std::io::Error),
    /// The record's.
    Record(String),
}

impl From<std::io::Error> for Wrong {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

/// Opens the block trace at `path`, which may be done again for another pass.
///
/// # Errors
/// If it cannot be opened, is a pipe or a device, which another pass would find
/// empty, is compressed, or is of no format that is known and none was named.
pub fn open_block_trace(path: &Path, options: &BlockOptions) -> Result<BlockTrace, TraceError> {
    BlockTrace::new(path, open_regular(path)?, options)
}

impl BlockTrace {
    /// Reads a trace from `input`, once, so that it may be a pipe; errors, and a
    /// format that only its name tells, go by `path`.
    ///
    /// # Errors
    /// If it cannot be read, is compressed, or is of no format that is known and
    /// none was named.
    pub fn new(
        path: &Path,
        mut input: impl Read + Send + 'static,
        options: &BlockOptions,
    ) -> Result<Self, TraceError> {
        let wrong = |reason: String| TraceError::File {
            path: path.to_owned(),
            reason,
        };
        let io = |source| TraceError::Io {
            path: path.to_owned(),
            source,
        };
        let head = head_of(&mut input).map_err(io)?;
        if let Some((name, command)) = compression(&head) {
            return Err(wrong(format!(
                "is compressed by {name}; unpack it first: {command}"
            )));
        }
        let format = match options.format {
            Some(format) => format,
            None => detect(path, &head).ok_or_else(|| {
                wrong(format!(
                    "its content is of no format of block traces that is known ({}); \
                     if it is one of them all the same, name it",
                    BlockFormat::names()
                ))
            })?,
        };
        let order = ids::order_of(&head);
        let input: Input = Box::new(Cursor::new(head).chain(input));
        let (decoder, about) = decoder(format, input, options, order).map_err(wrong)?;
        Ok(Self {
            path: path.to_owned(),
            about,
            decoder: Some(decoder),
            done: 0,
            first_ns: None,
            last_ns: 0,
        })
    }

    /// What was taken for granted.
    #[must_use]
    pub const fn about(&self) -> BlockAbout {
        self.about
    }

    /// Number of the record that was read last, as errors have it; 0 at the end.
    #[must_use]
    pub fn record(&self) -> u64 {
        self.decoder.as_ref().map_or(0, |decoder| decoder.record())
    }

    /// Requests handed out.
    #[must_use]
    pub const fn requests(&self) -> u64 {
        self.done
    }

    /// What holds for requests of all formats.
    fn check(&mut self, mut request: BlockRequest) -> Result<BlockRequest, String> {
        let BlockRequest {
            offset_bytes,
            len_bytes,
            ..
        } = request;
        if offset_bytes.checked_add(len_bytes.into()).is_none() {
            return Err(format!(
                "{len_bytes} bytes from byte {offset_bytes} of the disk end past 2^64"
            ));
        }
        let time = match (request.time_ns, self.about.interval_ns) {
            (None, Some(interval)) => Some(interval.saturating_mul(self.done)),
            (time, _) => time,
        };
        if let Some(time) = time {
            if time < self.last_ns {
                return Err(format!(
                    "its time is {} ns before that of a request above; times never run backwards",
                    self.last_ns - time
                ));
            }
            self.last_ns = time;
            request.time_ns = Some(time - *self.first_ns.get_or_insert(time));
        }
        Ok(request)
    }
}

/// Where a decoder reads from, from the first byte.
type Input = Box<dyn Read + Send>;

fn decoder(
    format: BlockFormat,
    input: Input,
    options: &BlockOptions,
    order: ByteOrder,
) -> Result<(Box<dyn Decoder>, BlockAbout), String> {
    let mut about = BlockAbout {
        format,
        block_bytes: 512,
        byte_order: None,
        interval_ns: None,
    };
    let decoder: Box<dyn Decoder> = match format {
        BlockFormat::Vscsi => Box::new(binary::Vscsi::new(input)),
        BlockFormat::OracleGeneral => {
            about.block_bytes = block_bytes(options, 512)?;
            Box::new(binary::OracleGeneral::new(input, about.block_bytes))
        }
        BlockFormat::Mqsim => Box::new(mqsim::Mqsim::new(input)),
        BlockFormat::HpSrt => {
            let srt = srt::HpSrt::new(input)?;
            about.block_bytes = srt.sector_bytes();
            Box::new(srt)
        }
        BlockFormat::BlockIds => {
            about.block_bytes = block_bytes(options, 4096)?;
            about.byte_order = Some(order);
            about.interval_ns = options
                .interval
                .map(|interval| u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX));
            Box::new(ids::BlockIds::new(input, order, about.block_bytes))
        }
    };
    Ok((decoder, about))
}

fn block_bytes(options: &BlockOptions, default: u32) -> Result<u32, String> {
    match options.block_bytes {
        Some(0) => Err("blocks of 0 bytes hold nothing".to_owned()),
        given => Ok(given.unwrap_or(default)),
    }
}

impl Iterator for BlockTrace {
    type Item = Result<BlockRequest, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        let decoder = self.decoder.as_mut()?;
        let outcome = decoder.next();
        let record = decoder.record();
        let checked = match outcome {
            Ok(Some(request)) => self.check(request).map_err(Wrong::Record),
            Ok(None) => {
                self.decoder = None;
                return None;
            }
            Err(wrong) => Err(wrong),
        };
        Some(match checked {
            Ok(request) => {
                self.done += 1;
                Ok(request)
            }
            Err(wrong) => {
                self.decoder = None;
                let path = self.path.clone();
                Err(match wrong {
                    Wrong::Io(source) => TraceError::Io { path, source },
                    Wrong::Record(reason) => TraceError::Record {
                        path,
                        record,
                        reason,
                    },
                })
            }
        })
    }
}

impl fmt::Debug for BlockTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockTrace")
            .field("path", &self.path)
            .field("about", &self.about)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}
