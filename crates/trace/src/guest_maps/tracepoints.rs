// SPDX-License-Identifier: Apache-2.0
//! Reads what Linux' tracepoints `iommu:map` and `iommu:unmap` recorded, as the files `trace` and `trace_pipe` of
//! tracefs show it.
//!
//! ```text
//!   <idle>-0 [001] ..s1. 27.130290: map: IOMMU: iova=0x…ff104000 - 0x…ff106000 paddr=0x…055ac000 size=8192
//!   <idle>-0 [001] ..s1. 27.130297: unmap: IOMMU: iova=0x…ffbf1000 - 0x…ffbf2000 size=4096 unmapped_size=4096
//! ```
//! Comments and other events are skipped. A gap (`[LOST 12 EVENTS]`, or a comment that more entries were written
//! than the buffer still has) is an error: with it nothing can be said about what is missing.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use pagetide_access_log::TraceError;
use pagetide_addr::Iova;

use crate::event::IOVA_BITS;
use crate::text::{Cursor, Lines, find};

/// Bytes of the smallest page that an IOMMU maps.
const PAGE_BYTES: u64 = 4096;

/// What a guest's kernel did to one of its I/O page tables. Linux does not record to which.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MapChange {
    /// A range was mapped.
    Map {
        /// Its first address; aligned to pages.
        iova: Iova,
        /// The physical address that it leads to; aligned to pages.
        physical: u64,
        /// Its bytes, whole pages; not 0.
        bytes: u64,
    },
    /// A range was unmapped.
    Unmap {
        /// Its first address; aligned to pages.
        iova: Iova,
        /// Its bytes, whole pages; not 0.
        bytes: u64,
    },
}

/// Reads records of `iommu:map` and `iommu:unmap`, one after the other. After an error there is nothing more.
#[derive(Debug)]
pub struct TracepointReader<R = File> {
    lines: Lines<R>,
    ended: bool,
}

impl TracepointReader {
    /// Opens the file at `path`.
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

impl<R: Read> TracepointReader<R> {
    /// Reads from `input`; errors name `path`.
    pub fn new(path: &Path, input: R) -> Self {
        Self {
            lines: Lines::new(path, input),
            ended: false,
        }
    }

    fn next_change(&mut self) -> Result<Option<MapChange>, TraceError> {
        while let Some(line) = self.lines.next()? {
            match parse(line) {
                Ok(None) => {}
                Ok(Some(change)) => return Ok(Some(change)),
                Err(reason) => return Err(self.lines.error(reason)),
            }
        }
        Ok(None)
    }
}

impl<R: Read> Iterator for TracepointReader<R> {
    type Item = Result<MapChange, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.next_change().transpose();
        self.ended = !matches!(next, Some(Ok(_)));
        next
    }
}

/// The content of a line; `None` for one without meaning here.
fn parse(line: &[u8]) -> Result<Option<MapChange>, String> {
    if line.first() == Some(&b'#') {
        return entries(line).map(|()| None);
    }
    if let Some(at) = find(line, b" [LOST ") {
        let lost = String::from_utf8_lossy(&line[at..]);
        return Err(format!(
            "{}: the kernel's trace buffer was too small, so it is not known what was mapped",
            lost.trim()
        ));
    }
    // The name of the event stands behind the time; the name of a task in front of it may be anything.
    for (name, read) in [
        (&b": map: IOMMU: "[..], map as fn(&[u8]) -> _),
        (&b": unmap: IOMMU: "[..], unmap),
    ] {
        if let Some(at) = find(line, name) {
            let text = line.get(at + name.len()..).unwrap_or_default();
            let told = String::from_utf8_lossy(name);
            let told = told.trim_matches([':', ' ']);
            return read(text)
                .map(Some)
                .map_err(|reason| format!("{told}: {reason}"));
        }
    }
    Ok(None)
}

/// A comment must not say that the buffer has less than was written.
fn entries(line: &[u8]) -> Result<(), String> {
    const NAME: &[u8] = b"entries-in-buffer/entries-written:";
    let Some(at) = find(line, NAME) else {
        return Ok(());
    };
    let mut cursor = Cursor(line.get(at + NAME.len()..).unwrap_or_default());
    cursor.space();
    let kept = cursor.digits(10).and_then(|(_, count)| count);
    let slash = cursor.literal("/");
    let written = cursor.digits(10).and_then(|(_, count)| count);
    match (kept, slash, written) {
        (Some(kept), Some(()), Some(written)) if kept == written => Ok(()),
        (Some(kept), Some(()), Some(written)) => Err(format!(
            "{kept} of {written} entries are left: the kernel's trace buffer was too small, so it is not known what \
             was mapped"
        )),
        _ => Err("no two counts behind `entries-written:`".to_owned()),
    }
}

fn map(text: &[u8]) -> Result<MapChange, String> {
    let mut cursor = Cursor(text);
    let (iova, end) = span(&mut cursor)?;
    let physical = number(&mut cursor, " paddr=0x", 16)?;
    let bytes = number(&mut cursor, " size=", 10)?;
    range(iova, end, bytes)?;
    if physical % PAGE_BYTES != 0 || physical.checked_add(bytes).is_none() {
        return Err(format!("paddr {physical:#x} is no place for {bytes} bytes"));
    }
    Ok(MapChange::Map {
        iova: Iova(iova),
        physical,
        bytes,
    })
}

fn unmap(text: &[u8]) -> Result<MapChange, String> {
    let mut cursor = Cursor(text);
    let (iova, end) = span(&mut cursor)?;
    let asked = number(&mut cursor, " size=", 10)?;
    // Zero if nothing was mapped there; then no record would have been written.
    let bytes = number(&mut cursor, " unmapped_size=", 10)?;
    range(iova, end, asked)?;
    range(iova, iova.saturating_add(bytes), bytes)?;
    Ok(MapChange::Unmap {
        iova: Iova(iova),
        bytes,
    })
}

/// First address and the one past the last.
fn span(cursor: &mut Cursor<'_>) -> Result<(u64, u64), String> {
    let iova = number(cursor, "iova=0x", 16)?;
    let end = number(cursor, " - 0x", 16)?;
    Ok((iova, end))
}

fn number(cursor: &mut Cursor<'_>, after: &'static str, base: u32) -> Result<u64, String> {
    let name = after.trim_matches([' ', '-', '=']);
    let missing = || format!("no number behind `{name}`, in its place");
    cursor.literal(after).ok_or_else(missing)?;
    let (_, value) = cursor.digits(base).ok_or_else(missing)?;
    value.ok_or_else(|| format!("the number behind `{name}` has more than 64 bits"))
}

/// Whole pages of an address space, from `iova` on.
fn range(iova: u64, end: u64, bytes: u64) -> Result<(), String> {
    if bytes == 0 || !(iova | bytes).is_multiple_of(PAGE_BYTES) {
        return Err(format!("{bytes} bytes from {iova:#x} on are no pages"));
    }
    match iova.checked_add(bytes) {
        Some(past) if past == end && (past - 1) >> IOVA_BITS == 0 => Ok(()),
        _ => Err(format!(
            "{bytes} bytes from {iova:#x} on do not end at {end:#x}, below {IOVA_BITS} bits"
        )),
    }
}
