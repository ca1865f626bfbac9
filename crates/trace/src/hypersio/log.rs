// SPDX-License-Identifier: Apache-2.0
//! The text log of the authors' patched QEMU, as their trace builder reads it.
//!
//! A line counts if it holds the name of one of four events and, after it, the event's fields in order,
//! each a name and a number, white space between (README.md of the release, `main.cpp` of its builder).
//! Everything else on the line or in the log is ignored.
//!
//! | event | fields | becomes |
//! |---|---|---|
//! | `vtd_iotlb_page_update` | sid, iova, slpte, level, domain | a request; page size from level |
//! | `vtd_iotlb_page_hit` | sid, iova, pmask, slpte, domain | a request; page size from mask |
//! | `vtd_iotlb_cc_update` | bus, devfn, high, low, gen | a source joins a domain |
//! | `vtd_slpte_fetch` | high, low, iova, level, addr, slpte | nothing: checked only |
//!
//! Hit and update are those of QEMU's own IOTLB, and each request is exactly one of them, so both together
//! are the request stream in front of any cache.
//!
//! Where we differ from the builder: a line with an event's name and other fields, or a number that does
//! not fit, is an error and not ignored (or truncated); a context entry without a change is no event. Ids
//! are those of the log: the builder of a hyper-trace numbers the tenants.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use pagetide_addr::Iova;

use super::size_of_mask;
use crate::event::{Event, EventKind, IOVA_BITS, IommuDomain, PageSize, SourceId, TraceAccess};
use crate::stream::{BATCH_EVENTS, EventSource};
use crate::text::{Lines, Radix, Shape, fields, find, id16};
use pagetide_access_log::TraceError;

const HIT: Shape<5> = [
    ("sid", Radix::PrefixedHex),
    ("iova", Radix::PrefixedHex),
    ("pmask", Radix::PrefixedHex),
    ("slpte", Radix::PrefixedHex),
    ("domain", Radix::PrefixedHex),
];
const UPDATE: Shape<5> = [
    ("sid", Radix::PrefixedHex),
    ("iova", Radix::PrefixedHex),
    ("slpte", Radix::PrefixedHex),
    ("level", Radix::PrefixedHex),
    ("domain", Radix::PrefixedHex),
];
const CONTEXT: Shape<5> = [
    ("bus", Radix::PrefixedHex),
    ("devfn", Radix::PrefixedHex),
    ("high", Radix::PrefixedHex),
    ("low", Radix::PrefixedHex),
    ("gen", Radix::Hex),
];
const FETCH: Shape<6> = [
    ("high", Radix::PrefixedHex),
    ("low", Radix::PrefixedHex),
    ("iova", Radix::PrefixedHex),
    ("level", Radix::PrefixedHex),
    ("addr", Radix::PrefixedHex),
    ("slpte", Radix::PrefixedHex),
];

/// Device number of a log's first device.
const FIRST_DEVICE: u32 = 2;

/// The sources of a log that are tenants.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LogSources {
    /// All.
    #[default]
    All,
    /// The builder's rule: bus 0, function 0, this many devices from number 2 on. Lines of others are
    /// ignored.
    Devices(u32),
}

impl LogSources {
    const fn has(self, source: u64) -> bool {
        match self {
            Self::All => true,
            Self::Devices(count) => {
                let device = source >> 3;
                source & 7 == 0
                    && device >= FIRST_DEVICE as u64
                    && device - (FIRST_DEVICE as u64) < count as u64
            }
        }
    }
}

/// Reads requests, and sources that join, from a log of the authors' patched QEMU.
#[derive(Debug)]
pub struct HypersioLogReader<R = File> {
    lines: Lines<R>,
    sources: LogSources,
    /// Domain of each source that has joined; at most one entry for each of 2^16 ids.
    joined: HashMap<SourceId, IommuDomain>,
    /// Lines with one of the four events.
    matched: u64,
    /// Lines with another event of the emulated VT-d.
    others: u64,
    broken: Option<TraceError>,
    ended: bool,
}

impl HypersioLogReader {
    /// Opens the log at `path`.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(path: &Path, sources: LogSources) -> Result<Self, TraceError> {
        let file = File::open(path).map_err(|source| TraceError::Io {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self::new(path, file, sources))
    }
}

impl<R: Read> HypersioLogReader<R> {
    /// Reads from `input`; errors name `path`.
    pub fn new(path: &Path, input: R, sources: LogSources) -> Self {
        Self {
            lines: Lines::new(path, input),
            sources,
            joined: HashMap::new(),
            matched: 0,
            others: 0,
            broken: None,
            ended: false,
        }
    }

    /// The next event, or `None` at the end.
    fn next_event(&mut self) -> Result<Option<Event>, TraceError> {
        loop {
            let Some(line) = self.lines.next()? else {
                return self.end();
            };
            let parsed = parse(line, self.sources).map_err(|reason| self.lines.error(reason))?;
            match parsed {
                Parsed::Nothing => {}
                Parsed::Other => self.others += 1,
                Parsed::Event(_) | Parsed::PassedOver => self.matched += 1,
            }
            match parsed {
                Parsed::Event(event) if event.kind == EventKind::Join => {
                    if self.joined.insert(event.source, event.domain) != Some(event.domain) {
                        return Ok(Some(event));
                    }
                }
                Parsed::Event(event) => return Ok(Some(event)),
                Parsed::Nothing | Parsed::Other | Parsed::PassedOver => {}
            }
        }
    }

    /// Checks at the end of a log that it is of this kind.
    fn end(&self) -> Result<Option<Event>, TraceError> {
        match (self.matched, self.others) {
            (0, 0) => Err(self
                .lines
                .file_error("it has no trace event of HyperSIO's patched QEMU (`vtd_…`)")),
            (0, others) => Err(self.lines.file_error(&format!(
                "none of its {others} trace events of an emulated VT-d counts: requests are \
                 `vtd_iotlb_page_hit` and `vtd_iotlb_page_update`"
            ))),
            _ => Ok(None),
        }
    }
}

/// The content of a line.
enum Parsed {
    /// No event of the emulated VT-d.
    Nothing,
    /// One that is none of the four.
    Other,
    /// One that is checked and not used, or of a source that is not selected.
    PassedOver,
    Event(Event),
}

impl<R: Read + Send> EventSource for HypersioLogReader<R> {
    fn next_batch(&mut self, batch: &mut Vec<Event>) -> Result<usize, TraceError> {
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        let mut count = 0;
        while count < BATCH_EVENTS && !self.ended {
            match self.next_event() {
                Ok(Some(event)) => {
                    batch.push(event);
                    count += 1;
                }
                Ok(None) => self.ended = true,
                Err(error) => {
                    self.ended = true;
                    if count == 0 {
                        return Err(error);
                    }
                    self.broken = Some(error);
                }
            }
        }
        Ok(count)
    }
}

/// The content of a line, or the error in it.
fn parse(line: &[u8], sources: LogSources) -> Result<Parsed, String> {
    // All four names begin so; most other lines do not.
    let Some(at) = find(line, b"vtd_") else {
        return Ok(Parsed::Nothing);
    };
    let line = &line[at..];
    if let Some(rest) = after(line, "vtd_iotlb_page_update") {
        let [source, iova, _, level, domain] = named("vtd_iotlb_page_update", rest, &UPDATE)?;
        if !sources.has(source) {
            return Ok(Parsed::PassedOver);
        }
        let size = PageSize::from_level(level)
            .ok_or_else(|| format!("level is {level}; pages are mapped at level 1, 2 or 3"))?;
        request(source, domain, iova, size).map(Parsed::Event)
    } else if let Some(rest) = after(line, "vtd_iotlb_page_hit") {
        let [source, iova, mask, _, domain] = named("vtd_iotlb_page_hit", rest, &HIT)?;
        if !sources.has(source) {
            return Ok(Parsed::PassedOver);
        }
        let size = size_of_mask(mask).ok_or_else(|| {
            format!("pmask {mask:#x} is not that of a page of 4 KiB, 2 MiB or 1 GiB")
        })?;
        request(source, domain, iova, size).map(Parsed::Event)
    } else if let Some(rest) = after(line, "vtd_iotlb_cc_update") {
        let [bus, devfn, high, ..] = named("vtd_iotlb_cc_update", rest, &CONTEXT)?;
        if bus > 0xff || devfn > 0xff {
            return Err(format!("bus {bus:#x}, devfn {devfn:#x}: each has 8 bits"));
        }
        let source = bus << 8 | devfn;
        if !sources.has(source) {
            return Ok(Parsed::PassedOver);
        }
        let mut event = Event::translate(
            SourceId(id16("sid", source)?),
            IommuDomain(id16("domain", high >> 8 & 0xffff)?),
            Iova(0),
            None,
        );
        event.kind = EventKind::Join;
        Ok(Parsed::Event(event))
    } else if let Some(rest) = after(line, "vtd_slpte_fetch") {
        named("vtd_slpte_fetch", rest, &FETCH).map(|_| Parsed::PassedOver)
    } else {
        Ok(Parsed::Other)
    }
}

/// The text after `name`, if the line has it.
fn after<'a>(line: &'a [u8], name: &str) -> Option<&'a [u8]> {
    find(line, name.as_bytes()).map(|at| &line[at + name.len()..])
}

fn named<const N: usize>(name: &str, rest: &[u8], shape: &Shape<N>) -> Result<[u64; N], String> {
    fields(rest, shape).map_err(|error| format!("{name}: {error}"))
}

fn request(source: u64, domain: u64, iova: u64, size: PageSize) -> Result<Event, String> {
    if iova >> IOVA_BITS != 0 {
        return Err(format!("iova {iova:#x} has more than {IOVA_BITS} bits"));
    }
    Ok(Event {
        time_ns: None,
        source: SourceId(id16("sid", source)?),
        domain: IommuDomain(id16("domain", domain)?),
        iova: Iova(iova),
        page_size: Some(size),
        access: TraceAccess::Unknown,
        kind: EventKind::Translate,
    })
}
