// SPDX-License-Identifier: Apache-2.0
//! An event as a row of a table: the columns' values, and what they may be.

use pagetide_addr::Iova;

use super::codes::{ACCESSES, KINDS, access_code, decoded, kind_code};
use crate::event::{Event, EventKind, IOVA_BITS, IommuDomain, PageSize, SourceId};

/// One row of a trace's table, value by value.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EventRow {
    /// Column `time_ns`.
    pub time_ns: Option<i64>,
    /// Column `source`.
    pub source: u32,
    /// Column `domain`.
    pub domain: u32,
    /// Column `iova`.
    pub iova: u64,
    /// Column `page_size_bytes`.
    pub page_size_bytes: Option<i64>,
    /// Column `access`.
    pub access: i32,
    /// Column `kind`.
    pub kind: i32,
}

impl EventRow {
    /// The row of `event`.
    #[must_use]
    pub fn of(event: &Event) -> Self {
        Self {
            time_ns: event.time_ns.map(u64::cast_signed),
            source: event.source.0,
            domain: event.domain.0,
            iova: event.iova.0,
            page_size_bytes: event.page_size.map(|size| size.bytes().cast_signed()),
            access: access_code(event.access),
            kind: kind_code(event.kind),
        }
    }

    /// The event of the row. `last_time_ns` is the time of the last event that had one.
    ///
    /// # Errors
    /// Which value is impossible, and why.
    pub fn event(&self, last_time_ns: &mut u64) -> Result<Event, String> {
        let iova = self.iova;
        if iova >> IOVA_BITS != 0 {
            return Err(format!("iova {iova:#x} has more than {IOVA_BITS} bits"));
        }
        let kind =
            decoded(&KINDS, self.kind).ok_or_else(|| format!("kind {} is not known", self.kind))?;
        let access = decoded(&ACCESSES, self.access)
            .ok_or_else(|| format!("access {} is not known", self.access))?;
        let page_size = match self.page_size_bytes {
            Some(bytes) => Some(page_size(bytes, kind)?),
            None => None,
        };
        let time_ns = match self.time_ns {
            Some(time) => Some(checked_time(time, last_time_ns)?),
            None => None,
        };
        Ok(Event {
            time_ns,
            source: SourceId(self.source),
            domain: IommuDomain(self.domain),
            iova: Iova(iova),
            page_size,
            access,
            kind,
        })
    }
}

fn page_size(bytes: i64, kind: EventKind) -> Result<PageSize, String> {
    let size = u64::try_from(bytes)
        .ok()
        .and_then(PageSize::from_bytes)
        .ok_or_else(|| {
            format!(
                "page_size_bytes is {bytes}, which is no power of two from 4096 to 2^{IOVA_BITS}"
            )
        })?;
    if kind == EventKind::Translate && size.level().is_none() {
        return Err(format!(
            "page_size_bytes is {bytes}; a request is for a page of 4 KiB, 2 MiB or 1 GiB"
        ));
    }
    Ok(size)
}

fn checked_time(time_ns: i64, last_ns: &mut u64) -> Result<u64, String> {
    let time = u64::try_from(time_ns).map_err(|_| format!("time_ns is {time_ns}, below zero"))?;
    if time < *last_ns {
        return Err(format!(
            "time_ns is {time}, before the {last_ns} of an event above"
        ));
    }
    *last_ns = time;
    Ok(time)
}
