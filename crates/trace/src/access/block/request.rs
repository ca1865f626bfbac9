// SPDX-License-Identifier: Apache-2.0
//! A request of a block trace, and what a decoder of one format is.

use pagetide_access_log::TraceError;
use pagetide_addr::Access;
use std::fmt;
use std::io::Read;
use std::str::FromStr;
use std::time::Duration;

/// One request for blocks of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockRequest {
    /// Time, in nanoseconds since the trace's first request; `None` if the trace has no times.
    pub time_ns: Option<u64>,
    /// Number of the disk.
    pub device: u32,
    /// First byte on the disk.
    pub offset_bytes: u64,
    /// Length, in bytes.
    pub len_bytes: u32,
    /// Its effect on the disk; `None` if the trace does not record it. (Memory sees the opposite: a disk
    /// that is read writes to memory.)
    pub access: Option<Access>,
}

/// A format of block traces. See the module.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum BlockFormat {
    /// VMware's virtual disks, as in the CloudPhysics traces.
    Vscsi,
    /// libCacheSim's format, which also holds traces of disks.
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
    pub(super) fn names() -> String {
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

/// How to read a block trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockOptions {
    /// Its format; `None`: detected by its content or its name.
    pub format: Option<BlockFormat>,
    /// Bytes of a block, where the trace counts in blocks of a size that it does not record; `None`: 512 in
    /// `oracle-general`, 4096 in `block-ids`.
    pub block_bytes: Option<u32>,
    /// Time from one request to the next in a trace that has no times; `None`: none are added.
    pub interval: Option<Duration>,
}

/// Byte order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ByteOrder {
    /// The most significant byte first.
    BigEnd,
    /// The least significant byte first.
    LittleEnd,
}

/// Decodes the requests of one format, in the order of the file.
pub(super) trait Decoder: Send {
    /// The next request, with the file's time; `None` at the end.
    fn next(&mut self) -> Result<Option<BlockRequest>, Wrong>;

    /// Number of the record read last, as messages give it.
    fn record(&self) -> u64;
}

/// Why there is no next request.
#[derive(Debug)]
pub(super) enum Wrong {
    /// An I/O error.
    Io(std::io::Error),
    /// An error in the record.
    Record(String),
}

impl From<std::io::Error> for Wrong {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

/// The input of a decoder, from the first byte.
pub(super) type Input = Box<dyn Read + Send>;
