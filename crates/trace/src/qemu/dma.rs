// SPDX-License-Identifier: Apache-2.0
//! The log once more, with what a comparison with the guest's own records needs and a trace does not have: the
//! page-table entry of each request.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use pagetide_access_log::TraceError;
use pagetide_addr::Iova;

use super::line::{self, Said};
use crate::event::{EventKind, IommuDomain, PageSize, SourceId};
use crate::text::Lines;

/// A line of the log about one translation or its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DmaRecord {
    /// A request was translated.
    Request {
        /// The device.
        source: SourceId,
        /// Its address space.
        domain: IommuDomain,
        /// What it asked for.
        iova: Iova,
        /// The last entry of the page table on its way.
        entry: u64,
    },
    /// Translations in the naturally aligned span around an address are void.
    InvalidatePages {
        /// The address space.
        domain: IommuDomain,
        /// An address in the span.
        iova: Iova,
        /// Bytes of the span.
        span: PageSize,
    },
}

/// Reads requests and invalidations of pages from a log of stock QEMU, one after the other. After an error there is
/// nothing more.
#[derive(Debug)]
pub struct QemuDmaReader<R = File> {
    lines: Lines<R>,
    ended: bool,
}

impl QemuDmaReader {
    /// Opens the log at `path`.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let file = File::open(path).map_err(|source| TraceError::Io {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self::new(path, file))
    }
}

impl<R: Read> QemuDmaReader<R> {
    /// Reads from `input`; errors name `path`.
    pub fn new(path: &Path, input: R) -> Self {
        Self {
            lines: Lines::new(path, input),
            ended: false,
        }
    }

    fn next_record(&mut self) -> Result<Option<DmaRecord>, TraceError> {
        while let Some(line) = self.lines.next()? {
            let said = match line::parse(line) {
                Ok(None) => continue,
                Ok(Some((_, said))) => said,
                Err(reason) => return Err(self.lines.error(reason)),
            };
            match said {
                Said::Request { event, entry } => {
                    return Ok(Some(DmaRecord::Request {
                        source: event.source,
                        domain: event.domain,
                        iova: event.iova,
                        entry,
                    }));
                }
                Said::Invalidated(event) if event.kind == EventKind::InvalidatePages => {
                    return Ok(Some(DmaRecord::InvalidatePages {
                        domain: event.domain,
                        iova: event.iova,
                        // An invalidation of pages has a span.
                        span: event.page_size.unwrap_or(PageSize::SIZE_4K),
                    }));
                }
                _ => {}
            }
        }
        Ok(None)
    }
}

impl<R: Read> Iterator for QemuDmaReader<R> {
    type Item = Result<DmaRecord, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.next_record().transpose();
        self.ended = !matches!(next, Some(Ok(_)));
        next
    }
}
