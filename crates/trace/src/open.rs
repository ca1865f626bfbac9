// SPDX-License-Identifier: Apache-2.0
//! Opens a trace of any format. The content determines the format; the name may be anything.

use std::fmt;
use std::io::Read;
use std::path::Path;
use std::str::FromStr;

use crate::hypersio::{HypersioLogReader, HypersioReader, LogSources, is_record};
use crate::parquet::{ParquetReader, TraceMeta};
use crate::qemu::QemuLogReader;
use crate::stream::EventSource;
use crate::text::find;
use pagetide_access_log::{TraceError, open_regular};

/// Bytes of a file that are read to detect its format: the first events of a log may come after pages of
/// messages from a guest's firmware and kernel.
const HEAD_BYTES: u64 = 1 << 20;

/// First bytes of a Parquet file.
const PARQUET_MAGIC: &[u8] = b"PAR1";

/// A file format of traces.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum TraceFormat {
    /// The project's own, in Parquet.
    Parquet,
    /// `…iotlb_trace.bin` of the authors' simulator.
    HypersioBinary,
    /// Text log of the authors' patched QEMU.
    HypersioLog,
    /// `-trace` log of stock QEMU's emulated VT-d.
    QemuLog,
}

impl TraceFormat {
    /// All formats, in the order of their names in documents.
    pub const ALL: [Self; 4] = [
        Self::Parquet,
        Self::HypersioBinary,
        Self::HypersioLog,
        Self::QemuLog,
    ];

    /// Name on the command line and in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parquet => "parquet",
            Self::HypersioBinary => "hypersio-binary",
            Self::HypersioLog => "hypersio-log",
            Self::QemuLog => "qemu-log",
        }
    }
}

impl fmt::Display for TraceFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for TraceFormat {
    type Err = TraceError;

    fn from_str(name: &str) -> Result<Self, TraceError> {
        Self::ALL
            .into_iter()
            .find(|format| format.name() == name)
            .ok_or_else(|| {
                TraceError::Asked(format!(
                    "`{name}` is no trace format; there are {}",
                    Self::ALL.map(Self::name).join(", ")
                ))
            })
    }
}

/// The format to read a file as.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FormatChoice {
    /// The detected one.
    #[default]
    Detect,
    /// This one.
    Is(TraceFormat),
}

impl FromStr for FormatChoice {
    type Err = TraceError;

    /// `auto`, or the name of a format.
    fn from_str(name: &str) -> Result<Self, TraceError> {
        if name == "auto" {
            Ok(Self::Detect)
        } else {
            name.parse().map(Self::Is)
        }
    }
}

/// A trace that was opened.
pub struct OpenTrace {
    /// The format it is read as.
    pub format: TraceFormat,
    /// Its metadata; the default for formats without room for it.
    pub meta: TraceMeta,
    /// Its events.
    pub source: Box<dyn EventSource>,
}

impl fmt::Debug for OpenTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenTrace")
            .field("format", &self.format)
            .field("meta", &self.meta)
            .finish_non_exhaustive()
    }
}

/// Opens the trace at `path` for its events.
///
/// # Errors
/// If it cannot be opened, or is of no known format, or not of the chosen one.
pub fn open(path: &Path, choice: FormatChoice) -> Result<Box<dyn EventSource>, TraceError> {
    open_trace(path, choice).map(|trace| trace.source)
}

/// Opens the trace at `path`, and returns its format and metadata.
///
/// # Errors
/// As [`open`].
pub fn open_trace(path: &Path, choice: FormatChoice) -> Result<OpenTrace, TraceError> {
    let format = match choice {
        FormatChoice::Detect => detect(path)?,
        FormatChoice::Is(format) => format,
    };
    let mut meta = TraceMeta::default();
    let source: Box<dyn EventSource> = match format {
        TraceFormat::Parquet => {
            let reader = ParquetReader::open(path)?;
            meta = reader.meta().clone();
            Box::new(reader)
        }
        TraceFormat::HypersioBinary => Box::new(HypersioReader::open(path)?),
        TraceFormat::HypersioLog => Box::new(HypersioLogReader::open(path, LogSources::All)?),
        TraceFormat::QemuLog => Box::new(QemuLogReader::open(path)?),
    };
    Ok(OpenTrace {
        format,
        meta,
        source,
    })
}

/// Detects the format of the file at `path` by its content.
///
/// # Errors
/// If it cannot be read, or is of no known format.
pub fn detect(path: &Path) -> Result<TraceFormat, TraceError> {
    let head = head(path)?;
    detect_head(&head).ok_or_else(|| TraceError::File {
        path: path.to_owned(),
        reason: format!(
            "its content is of no trace format that is known ({}): it begins neither as Parquet \
             nor with a translation request, and its first MiB has no line of a trace event `vtd_…`",
            TraceFormat::ALL.map(TraceFormat::name).join(", ")
        ),
    })
}

fn head(path: &Path) -> Result<Vec<u8>, TraceError> {
    let mut head = Vec::new();
    open_regular(path)?
        .take(HEAD_BYTES)
        .read_to_end(&mut head)
        .map_err(|source| TraceError::Io {
            path: path.to_owned(),
            source,
        })?;
    Ok(head)
}

/// The format of a file that begins with `head`.
fn detect_head(head: &[u8]) -> Option<TraceFormat> {
    if head.starts_with(PARQUET_MAGIC) {
        return Some(TraceFormat::Parquet);
    }
    if is_record(head) {
        return Some(TraceFormat::HypersioBinary);
    }
    let mut vtd_lines = head
        .split(|byte| *byte == b'\n')
        .filter(|line| find(line, b"vtd_").is_some())
        .peekable();
    vtd_lines.peek()?;
    // Only the authors' patch adds the mask or level to a request, and the fetch.
    let patched = vtd_lines.any(|line| {
        find(line, b"vtd_slpte_fetch").is_some()
            || (find(line, b"vtd_iotlb_page_hit").is_some() && find(line, b" pmask ").is_some())
            || (find(line, b"vtd_iotlb_page_update").is_some() && find(line, b" level ").is_some())
    });
    Some(if patched {
        TraceFormat::HypersioLog
    } else {
        TraceFormat::QemuLog
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_is_told_by_content() {
        let cases: [(&[u8], Option<TraceFormat>); 6] = [
            (b"PAR1...", Some(TraceFormat::Parquet)),
            (
                b"x\nvtd_iotlb_page_hit IOTLB page hit sid 0x1 iova 0x0 pmask 0x1 slpte",
                Some(TraceFormat::HypersioLog),
            ),
            (
                b"1@2.3:vtd_iotlb_page_hit IOTLB page hit sid 0x1 iova 0x0 slpte",
                Some(TraceFormat::QemuLog),
            ),
            (b"", None),
            (b"time,source,domain", None),
            (&[0; 96], None),
        ];
        for (head, format) in cases {
            assert_eq!(detect_head(head), format, "{}", head.escape_ascii());
        }
    }

    #[test]
    fn name_of_each_format_is_read_back() {
        for format in TraceFormat::ALL {
            assert_eq!(format.name().parse::<TraceFormat>().unwrap(), format);
            let json = serde_json::to_string(&format).unwrap();
            assert_eq!(json, format!("\"{format}\""));
        }
        assert!("csv".parse::<TraceFormat>().is_err());
        assert_eq!(
            "auto".parse::<FormatChoice>().unwrap(),
            FormatChoice::Detect
        );
    }
}
