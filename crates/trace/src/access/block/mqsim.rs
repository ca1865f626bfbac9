// SPDX-License-Identifier: Apache-2.0
//! Text of MQSim: five whole numbers a line.

use std::path::Path;

use pagetide_addr::Access;

use super::binary::{SECTOR_BYTES, offset};
use super::{BlockRequest, Decoder, Input, Wrong};
use crate::text::Lines;
use pagetide_access_log::TraceError;

/// Fields of a line, by their names in messages.
const FIELDS: [&str; 5] = ["time", "disk", "sector", "sectors", "operation"];

pub(super) struct Mqsim {
    lines: Lines<Input>,
    /// Lines that were begun.
    number: u64,
}

impl Mqsim {
    pub(super) fn new(input: Input) -> Self {
        Self {
            // Its errors are taken apart again: the caller adds the path.
            lines: Lines::new(Path::new(""), input),
            number: 0,
        }
    }
}

impl Decoder for Mqsim {
    fn next(&mut self) -> Result<Option<BlockRequest>, Wrong> {
        loop {
            self.number += 1;
            let line = match self.lines.next() {
                Ok(Some(line)) => line,
                Ok(None) => return Ok(None),
                Err(TraceError::Io { source, .. }) => return Err(Wrong::Io(source)),
                Err(TraceError::Record { reason, .. } | TraceError::File { reason, .. }) => {
                    return Err(Wrong::Record(reason));
                }
                Err(other) => return Err(Wrong::Record(other.to_string())),
            };
            if !line.trim_ascii().is_empty() {
                return request(line).map(Some);
            }
        }
    }

    fn record(&self) -> u64 {
        self.number
    }
}

/// The numbers of a line.
pub(super) fn numbers(line: &[u8]) -> Result<[u64; 5], String> {
    let mut fields = line
        .split(u8::is_ascii_whitespace)
        .filter(|field| !field.is_empty());
    let mut numbers = [0; 5];
    for (number, name) in numbers.iter_mut().zip(FIELDS) {
        let field = fields.next().ok_or_else(|| {
            format!("it has no {name}; a line is time, disk, sector, sectors, 1 or 0")
        })?;
        *number = std::str::from_utf8(field)
            .ok()
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| {
                format!(
                    "its {name} is `{}`, no whole number below 2^64",
                    field.escape_ascii()
                )
            })?;
    }
    match fields.next() {
        None => Ok(numbers),
        Some(more) => Err(format!(
            "`{}` comes after the operation, where a line ends",
            more.escape_ascii()
        )),
    }
}

fn request(line: &[u8]) -> Result<BlockRequest, Wrong> {
    let [time_ns, disk, sector, sectors, operation] = numbers(line).map_err(Wrong::Record)?;
    let wrong = |reason: String| Err(Wrong::Record(reason));
    let access = match operation {
        1 => Access::Read,
        0 => Access::Write,
        other => {
            return wrong(format!(
                "its operation is {other}; 1 is to read, 0 to write"
            ));
        }
    };
    let Ok(device) = u32::try_from(disk) else {
        return wrong(format!("its disk is number {disk}, past 2^32"));
    };
    let Some(len_bytes) = sectors
        .checked_mul(SECTOR_BYTES)
        .and_then(|bytes| u32::try_from(bytes).ok())
    else {
        return wrong(format!("its {sectors} sectors are past 2^32 bytes"));
    };
    Ok(BlockRequest {
        time_ns: Some(time_ns),
        device,
        offset_bytes: offset(sector, SECTOR_BYTES)?,
        len_bytes,
        access: Some(access),
    })
}
