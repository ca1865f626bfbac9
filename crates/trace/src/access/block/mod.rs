// SPDX-License-Identifier: Apache-2.0
//! Block traces from other tools: which blocks of a disk were requested.
//!
//! They have addresses **on a disk**, not in memory: only a model of the guest's page cache can derive the
//! memory of a request's DMA. The formats:
//!
//! | name | one record |
//! |---|---|
//! | `vscsi` | 32 bytes: `u32` serial, `u32` bytes, `u32` segments, `u16` SCSI command, `u16` version (0x100), `u64` sector of 512 bytes, `u64` time in us |
//! | `oracle-general` | 24 bytes: `u32` time in s, `u64` block, `u32` bytes, `i64` index of the block's next request; reads and writes are not told apart |
//! | `mqsim` | a line: time in ns, disk, sector of 512 bytes, sectors, 1 to read or 0 to write |
//! | `hp-srt` | after a text header up to a form feed, 13 to 15 `i32`, big end first: size, id, s, us, start, stop, bytes, sector, device, driver, cylinder, flags, info … |
//! | `block-ids` | `u32`: the number of a block; neither time nor length nor direction |
//!
//! The binary ones are little endian except `hp-srt`. Times count from the first request. Times never run
//! backwards in the traces examined of each format; a trace where they do is refused, since it is a mixture
//! of several or broken.
//!
//! *Sectors of `hp-srt`* have the size in the header (`sectorsize`, 256 bytes there). Readers that
//! assume 512 get addresses past the end of the disk.
//!
//! *Bytes of `block-ids`* come in either order, and the file does not record which. Read the wrong way,
//! neighbours are far apart; so the order in which more requests follow their neighbour is used.
//!
//! Errors name the record, from 0, or the line, from 1.
//!
//! *Pipes are refused*, with a message: their bytes can be read only once, and a model of a guest reads a
//! trace twice, first for the part of the disk that it touches. A caller that needs only one pass, over
//! input other than a file, uses [`BlockTrace::new`].

mod request;

pub use request::{BlockFormat, BlockOptions, BlockRequest, ByteOrder};
use request::{Decoder, Input, Wrong};

mod binary;
mod detect;
mod ids;
mod mqsim;
mod srt;

use std::fmt;
use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};

use detect::{compression, detect, head_of};
use pagetide_access_log::TraceError;
use pagetide_access_log::open_regular;

/// Assumptions about a trace, to be reported with the results.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
pub struct BlockAbout {
    /// Format it is read as.
    pub format: BlockFormat,
    /// Bytes of a block or sector, the unit of its addresses.
    pub block_bytes: u32,
    /// Byte order, where it had to be guessed.
    pub byte_order: Option<ByteOrder>,
    /// Time from one request to the next, in nanoseconds, where the trace has none and an interval was set.
    pub interval_ns: Option<u64>,
}

/// A block trace that was opened. Iterates over its requests; after an error
/// there are none.
pub struct BlockTrace {
    path: PathBuf,
    about: BlockAbout,
    /// `None` once the end or an error was reached.
    decoder: Option<Box<dyn Decoder>>,
    /// Requests returned so far.
    done: u64,
    first_ns: Option<u64>,
    last_ns: u64,
}

/// Opens the block trace at `path`, which may be done again for another pass.
///
/// # Errors
/// If it cannot be opened, is a pipe or a device, which cannot be read again, is compressed, or is of no
/// known format and none was named.
pub fn open_block_trace(path: &Path, options: &BlockOptions) -> Result<BlockTrace, TraceError> {
    BlockTrace::new(path, open_regular(path)?, options)
}

impl BlockTrace {
    /// Reads a trace from `input`, once, so that it may be a pipe; `path` is used for errors, and for a
    /// format that only the name shows.
    ///
    /// # Errors
    /// If it cannot be read, is compressed, or is of no known format and none was named.
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

    /// The assumptions made.
    #[must_use]
    pub const fn about(&self) -> BlockAbout {
        self.about
    }

    /// Number of the record read last, as errors give it; 0 at the end.
    #[must_use]
    pub fn record(&self) -> u64 {
        self.decoder.as_ref().map_or(0, |decoder| decoder.record())
    }

    /// Requests returned so far.
    #[must_use]
    pub const fn requests(&self) -> u64 {
        self.done
    }

    /// Checks that apply to requests of all formats.
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
