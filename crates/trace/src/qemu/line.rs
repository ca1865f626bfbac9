// SPDX-License-Identifier: Apache-2.0
//! One line of QEMU's log: its time, and its content about the emulated VT-d. Formats are those of QEMU's
//! `hw/i386/trace-events`, the same in versions 2.8 to 10.

use pagetide_addr::Iova;

use crate::event::{Event, EventKind, IOVA_BITS, IommuDomain, PageSize, SourceId};
use crate::text::{Cursor, Radix, Shape, fields, find, id16};

/// The content of a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Said {
    /// A request was translated.
    Request {
        event: Event,
        /// The last entry of the page table on its way.
        entry: u64,
    },
    /// The repetition in the next line, with the size of the page.
    Translated {
        source: SourceId,
        /// First address of the page.
        iova: u64,
        size: Option<PageSize>,
    },
    /// The context entry of the source was read from memory.
    ContextUpdated(SourceId),
    /// Cached data is void; the domain of a source is not known yet.
    Invalidated(Event),
    /// An event of the emulated VT-d that is none of the above.
    Other,
}

const REQUEST: Shape<4> = [
    ("sid", Radix::PrefixedHex),
    ("iova", Radix::PrefixedHex),
    ("slpte", Radix::PrefixedHex),
    ("domain", Radix::PrefixedHex),
];
const CONTEXT: Shape<2> = [("bus", Radix::PrefixedHex), ("devfn", Radix::PrefixedHex)];
const DOMAIN: Shape<1> = [("domain", Radix::PrefixedHex)];
const PAGES: Shape<3> = [
    ("domain", Radix::PrefixedHex),
    ("addr", Radix::PrefixedHex),
    ("mask", Radix::PrefixedHex),
];
const GPA: Shape<2> = [("gpa", Radix::PrefixedHex), ("mask", Radix::PrefixedHex)];
const IOVA: Shape<1> = [("iova", Radix::PrefixedHex)];

/// Bit 7 of a page-table entry above level 1: it maps a page.
const PAGE_SIZE_BIT: u64 = 1 << 7;

/// Time of a line, in ns of its clock, and its content; `None` for a line without meaning here.
pub(super) fn parse(line: &[u8]) -> Result<Option<(Option<u64>, Said)>, String> {
    let Some(at) = find(line, b"vtd_") else {
        return Ok(None);
    };
    let (prefix, rest) = line.split_at(at);
    let length = rest
        .iter()
        .position(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_')
        .unwrap_or(rest.len());
    let (name, text) = rest.split_at(length);
    let Ok(name) = std::str::from_utf8(name) else {
        return Ok(None);
    };
    let said = said(name, text).map_err(|reason| format!("{name}: {reason}"))?;
    // The clock of the trace begins with the first event of it.
    let time = match said {
        Said::Other => None,
        _ => time(prefix),
    };
    Ok(Some((time, said)))
}

/// The content of event `name` with the text after it.
fn said(name: &str, text: &[u8]) -> Result<Said, String> {
    Ok(match name {
        "vtd_iotlb_page_hit" | "vtd_iotlb_page_update" => request(text)?,
        "vtd_dmar_translate" => translated(text)?,
        "vtd_iotlb_cc_update" => {
            let [bus, devfn] = numbers(text, &CONTEXT)?;
            Said::ContextUpdated(source(bus, devfn)?)
        }
        "vtd_inv_desc_iotlb_global" => invalidated(EventKind::InvalidateAll, 0)?,
        "vtd_inv_desc_iotlb_domain" | "vtd_inv_desc_iotlb_pasid" => {
            let [domain] = numbers(text, &DOMAIN)?;
            invalidated(EventKind::InvalidateDomain, domain)?
        }
        "vtd_inv_desc_iotlb_pages" | "vtd_inv_desc_iotlb_pasid_pages" => pages(text)?,
        "vtd_inv_desc_cc_global" => invalidated(EventKind::InvalidateContexts, 0)?,
        "vtd_inv_desc_cc_domain" => {
            let [domain] = numbers(text, &DOMAIN)?;
            invalidated(EventKind::InvalidateContextsOfDomain, domain)?
        }
        "vtd_inv_desc_cc_device" => Said::Invalidated(Event {
            source: device(text)?,
            kind: EventKind::InvalidateSource,
            ..Event::default()
        }),
        _ => Said::Other,
    })
}

fn numbers<const N: usize>(text: &[u8], shape: &Shape<N>) -> Result<[u64; N], String> {
    fields(text, shape).map_err(|error| error.to_string())
}

fn request(text: &[u8]) -> Result<Said, String> {
    let [sid, iova, entry, domain] = numbers(text, &REQUEST).map_err(|reason| {
        // The patch of HyperSIO's authors adds a field to either line.
        if find(text, b"pmask").is_some() || find(text, b"level").is_some() {
            format!("{reason}; with `pmask` and `level` this is a log of HyperSIO's patched QEMU")
        } else {
            reason
        }
    })?;
    let event = Event::translate(
        SourceId(id16("sid", sid)?),
        IommuDomain(id16("domain", domain)?),
        Iova(address("iova", iova)?),
        size_of_entry(entry),
    );
    Ok(Said::Request { event, entry })
}

/// Page size that a last entry maps, if it can be determined without its level.
fn size_of_entry(entry: u64) -> Option<PageSize> {
    let unaligned = |size: PageSize| entry & (size.bytes() - 1) >> 12 << 12 != 0;
    if entry & PAGE_SIZE_BIT == 0 || unaligned(PageSize::SIZE_2M) {
        Some(PageSize::SIZE_4K)
    } else if unaligned(PageSize::SIZE_1G) {
        Some(PageSize::SIZE_2M)
    } else {
        None
    }
}

fn translated(text: &[u8]) -> Result<Said, String> {
    let [iova] = numbers(text, &IOVA)?;
    let [_, mask] = numbers(text, &GPA)?;
    let size = mask
        .checked_add(1)
        .and_then(PageSize::from_bytes)
        .filter(|size| size.level().is_some());
    Ok(Said::Translated {
        source: device(text)?,
        iova,
        size,
    })
}

fn invalidated(kind: EventKind, domain: u64) -> Result<Said, String> {
    Ok(Said::Invalidated(Event {
        domain: IommuDomain(id16("domain", domain)?),
        kind,
        ..Event::default()
    }))
}

fn pages(text: &[u8]) -> Result<Said, String> {
    let [domain, iova, mask] = numbers(text, &PAGES)?;
    let span = u32::try_from(mask)
        .ok()
        .and_then(|mask| mask.checked_add(12))
        .and_then(PageSize::from_shift)
        .ok_or_else(|| format!("mask {mask:#x}: 4 KiB shifted by that is past {IOVA_BITS} bits"))?;
    Ok(Said::Invalidated(Event {
        domain: IommuDomain(id16("domain", domain)?),
        iova: Iova(address("addr", iova)?),
        page_size: Some(span),
        kind: EventKind::InvalidatePages,
        ..Event::default()
    }))
}

fn address(what: &str, iova: u64) -> Result<u64, String> {
    if iova >> IOVA_BITS != 0 {
        return Err(format!("{what} {iova:#x} has more than {IOVA_BITS} bits"));
    }
    Ok(iova)
}

/// Id of a function from its bus and `devfn`.
fn source(bus: u64, devfn: u64) -> Result<SourceId, String> {
    match (u8::try_from(bus), u8::try_from(devfn)) {
        (Ok(bus), Ok(devfn)) => Ok(SourceId(u32::from(bus) << 8 | u32::from(devfn))),
        _ => Err(format!("bus {bus:#x}, devfn {devfn:#x}: each has 8 bits")),
    }
}

/// Id of the function that the text names as `bus:device.function`, in hexadecimal.
fn device(text: &[u8]) -> Result<SourceId, String> {
    const WORDS: [&[u8]; 2] = [b"device ", b"dev "];
    let none = || "no `bus:device.function` in its place".to_owned();
    let start = WORDS
        .iter()
        .find_map(|word| find(text, word).map(|at| at + word.len()))
        .ok_or_else(none)?;
    let mut cursor = Cursor(text.get(start..).unwrap_or_default());
    let mut number = |after: &str| {
        let value = cursor.digits(16).and_then(|(_, value)| value)?;
        cursor.literal(after).map(|()| value)
    };
    let (Some(bus), Some(slot), Some(function)) = (number(":"), number("."), number("")) else {
        return Err(none());
    };
    if slot > 31 || function > 7 {
        return Err(format!(
            "device {slot:#x}, function {function:#x}: they have 5 and 3 bits"
        ));
    }
    source(bus, slot << 3 | function)
}

/// The time at the beginning of a line, in ns, if it has one of the two forms.
fn time(prefix: &[u8]) -> Option<u64> {
    time_after_pid(prefix).or_else(|| time_iso8601(prefix))
}

/// `PID@SECONDS.MICROSECONDS:`.
fn time_after_pid(prefix: &[u8]) -> Option<u64> {
    let mut cursor = Cursor(prefix);
    cursor.digits(10)?;
    cursor.literal("@")?;
    let (_, seconds) = cursor.digits(10)?;
    cursor.literal(".")?;
    let fraction_ns = fraction(&mut cursor)?;
    cursor.literal(":")?;
    seconds?
        .checked_mul(1_000_000_000)?
        .checked_add(fraction_ns)
}

/// `YYYY-MM-DDTHH:MM:SS.ffffffZ `, the fraction optional.
fn time_iso8601(prefix: &[u8]) -> Option<u64> {
    let mut cursor = Cursor(prefix);
    let mut number = |after: &str| {
        let (_, value) = cursor.digits(10)?;
        cursor.literal(after)?;
        value.filter(|value| *value < 10_000)
    };
    let (year, month, day) = (number("-")?, number("-")?, number("T")?);
    let (hour, minute, second) = (number(":")?, number(":")?, number("")?);
    let fraction_ns = match cursor.literal(".") {
        Some(()) => fraction(&mut cursor)?,
        None => 0,
    };
    cursor.literal("Z")?;
    let days = days_from_civil(year, month, day)?;
    let seconds = ((days * 24 + hour) * 60 + minute) * 60 + second;
    seconds.checked_mul(1_000_000_000)?.checked_add(fraction_ns)
}

/// Digits after the point of seconds, at most nine, in ns.
fn fraction(cursor: &mut Cursor<'_>) -> Option<u64> {
    let (count, value) = cursor.digits(10)?;
    let scale = (0..9usize.checked_sub(count)?).fold(1, |scale, _| scale * 10);
    value?.checked_mul(scale)
}

/// Days since 1970 of a date in the Gregorian calendar; `None` if it is no date or earlier.
fn days_from_civil(year: u64, month: u64, day: u64) -> Option<u64> {
    const BEFORE_MONTH: [u64; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    if year < 1970 || !(1..=31).contains(&day) {
        return None;
    }
    let (_, before) = (1..)
        .zip(BEFORE_MONTH)
        .find(|(number, _)| *number == month)?;
    let leap_days = |year: u64| year / 4 - year / 100 + year / 400;
    // The leap day of this very year counts from March on.
    let last = if month > 2 { year } else { year - 1 };
    Some((year - 1970) * 365 + leap_days(last) - leap_days(1969) + before + day - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_follows_from_bit_7_and_alignment() {
        assert_eq!(size_of_entry(0x4000_0003), Some(PageSize::SIZE_4K));
        assert_eq!(size_of_entry(0x4000_1083), Some(PageSize::SIZE_4K));
        assert_eq!(size_of_entry(0x4020_0083), Some(PageSize::SIZE_2M));
        assert_eq!(size_of_entry(0x4000_0083), None);
    }

    #[test]
    fn time_is_read_in_either_form() {
        assert_eq!(time(b"77@12.000345:"), Some(12_000_345_000));
        assert_eq!(time(b"1970-01-02T00:00:01.5Z "), Some(86_401_500_000_000));
        assert_eq!(
            time(b"2024-03-01T00:00:00Z "),
            Some(1_709_251_200_000_000_000)
        );
        assert_eq!(time(b"2024-13-01T00:00:00Z "), None);
        assert_eq!(time(b"77@12.0003450000:"), None);
        assert_eq!(time(b""), None);
    }

    #[test]
    fn device_is_read_in_hexadecimal() {
        assert_eq!(device(b" dev 01:1f.07 iova"), Ok(SourceId(0x1ff)));
        assert!(device(b" dev 01:20.00 iova").is_err());
        assert!(device(b" dev 01.00 iova").is_err());
        assert!(device(b"").is_err());
    }
}
