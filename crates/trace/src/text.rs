// SPDX-License-Identifier: Apache-2.0
//! Lines of text logs: read one at a time into one buffer, and matched by hand.
//!
//! A log has millions of lines in a few shapes, so a search for the event's name and a walk over its fields
//! replace regular expressions.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use pagetide_access_log::TraceError;

/// Longest line that is read: the events' lines are below 200 bytes, and other lines of a log (messages of
/// a guest's firmware, say) are far shorter than this.
const LINE_BYTES_MAX: u64 = 64 << 10;

/// Bytes read at once.
const READ_BYTES: usize = 256 << 10;

/// Lines of a file, numbered from 1.
#[derive(Debug)]
pub struct Lines<R> {
    path: PathBuf,
    input: BufReader<R>,
    line: Vec<u8>,
    number: u64,
}

impl<R: Read> Lines<R> {
    /// Lines of `input`; errors name `path`.
    pub fn new(path: &Path, input: R) -> Self {
        Self {
            path: path.to_owned(),
            input: BufReader::with_capacity(READ_BYTES, input),
            line: Vec::new(),
            number: 0,
        }
    }

    /// The next line without its end, or `None` after the last.
    pub fn next(&mut self) -> Result<Option<&[u8]>, TraceError> {
        self.line.clear();
        let read = (&mut self.input)
            .take(LINE_BYTES_MAX)
            .read_until(b'\n', &mut self.line)
            .map_err(|source| TraceError::Io {
                path: self.path.clone(),
                source,
            })?;
        if read == 0 {
            return Ok(None);
        }
        self.number += 1;
        if self.line.last() == Some(&b'\n') {
            self.line.pop();
        } else if read as u64 == LINE_BYTES_MAX {
            return Err(self.error(format!(
                "the line is longer than {LINE_BYTES_MAX} bytes; this is no log of trace events"
            )));
        }
        Ok(Some(&self.line))
    }

    /// An error about the line read last.
    pub fn error(&self, reason: String) -> TraceError {
        TraceError::Record {
            path: self.path.clone(),
            record: self.number,
            reason,
        }
    }

    /// An error about the file.
    pub fn file_error(&self, reason: &str) -> TraceError {
        TraceError::File {
            path: self.path.clone(),
            reason: reason.to_owned(),
        }
    }
}

/// The first position of `needle` in `haystack`.
pub fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    let first = *needle.first()?;
    let last_start = haystack.len().checked_sub(needle.len())?;
    let mut from = 0;
    while let Some(at) = haystack
        .get(from..=last_start)?
        .iter()
        .position(|byte| *byte == first)
    {
        let at = from + at;
        if haystack[at..].starts_with(needle) {
            return Some(at);
        }
        from = at + 1;
        if from > last_start {
            return None;
        }
    }
    None
}

/// An invalid field of a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FieldError {
    /// It is not there, or not in this place.
    Missing(&'static str),
    /// It has more than 64 bits.
    TooLarge(&'static str),
}

impl std::fmt::Display for FieldError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Missing(name) => write!(f, "no field `{name}` with a number, in its place"),
            Self::TooLarge(name) => write!(f, "the number of `{name}` has more than 64 bits"),
        }
    }
}

/// How a number is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Radix {
    /// `0x` and hexadecimal digits.
    PrefixedHex,
    /// Hexadecimal digits.
    Hex,
}

/// Reads a line from left to right.
#[derive(Clone, Copy, Debug)]
pub struct Cursor<'a>(pub &'a [u8]);

impl<'a> Cursor<'a> {
    /// Consumes `text`, if it comes next.
    pub fn literal(&mut self, text: &str) -> Option<()> {
        self.0 = self.0.strip_prefix(text.as_bytes())?;
        Some(())
    }

    /// Consumes white space; returns whether there was any.
    pub fn space(&mut self) -> bool {
        let rest = self.0.trim_ascii_start();
        let any = rest.len() != self.0.len();
        self.0 = rest;
        any
    }

    /// Consumes the digits of a number of base 10 or 16, at least one. Returns how many, and the number,
    /// `None` if it is past 64 bits.
    pub fn digits(&mut self, base: u32) -> Option<(usize, Option<u64>)> {
        let mut value = Some(0u64);
        let mut count = 0;
        while let Some(digit) = self
            .0
            .first()
            .and_then(|byte| char::from(*byte).to_digit(base))
        {
            value = value
                .and_then(|value| value.checked_mul(u64::from(base)))
                .and_then(|value| value.checked_add(u64::from(digit)));
            count += 1;
            self.0 = &self.0[1..];
        }
        (count != 0).then_some((count, value))
    }

    /// Consumes `name`, white space and its number.
    pub fn field(&mut self, name: &'static str, radix: Radix) -> Result<u64, FieldError> {
        let missing = FieldError::Missing(name);
        self.literal(name).ok_or(missing)?;
        if !self.space() {
            return Err(missing);
        }
        if radix == Radix::PrefixedHex {
            self.literal("0x").ok_or(missing)?;
        }
        let (_, value) = self.digits(16).ok_or(missing)?;
        value.ok_or(FieldError::TooLarge(name))
    }
}

/// Consecutive fields, separated by white space.
pub type Shape<const N: usize> = [(&'static str, Radix); N];

/// Numbers of the fields of `shape`, from the last place in `text` where they are all consecutive, as a
/// greedy expression `.*` in front would find them.
///
/// The error is that of the place where most fields were found.
pub fn fields<const N: usize>(text: &[u8], shape: &Shape<N>) -> Result<[u64; N], FieldError> {
    let first = shape.first().map_or("", |(name, _)| name);
    let mut nearest = (0, FieldError::Missing(first));
    let mut end = text.len();
    while let Some(at) = rfind(&text[..end], first.as_bytes()) {
        let mut cursor = Cursor(&text[at..]);
        let mut numbers = [0; N];
        let mut outcome = Ok(());
        for (index, (number, (name, radix))) in numbers.iter_mut().zip(shape).enumerate() {
            let separated = index == 0 || cursor.space();
            let read = cursor.field(name, *radix);
            match read {
                Ok(value) if separated => *number = value,
                Ok(_) => outcome = Err((index, FieldError::Missing(name))),
                Err(error) => outcome = Err((index, error)),
            }
            if outcome.is_err() {
                break;
            }
        }
        match outcome {
            Ok(()) => return Ok(numbers),
            Err((_, error @ FieldError::TooLarge(_))) => return Err(error),
            Err((index, error)) if index >= nearest.0 => nearest = (index, error),
            Err(_) => {}
        }
        // The next place begins before this one; the two may overlap.
        end = (at + first.len()).saturating_sub(1);
    }
    Err(nearest.1)
}

/// An id of 16 bits.
pub fn id16(what: &str, id: u64) -> Result<u32, String> {
    u16::try_from(id)
        .map(u32::from)
        .map_err(|_| format!("{what} {id:#x} has more than 16 bits"))
}

/// The last position of `needle` in `haystack`.
fn rfind(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    let (first, rest) = needle.split_first()?;
    let mut end = haystack.len().checked_sub(rest.len())?;
    while let Some(at) = haystack[..end].iter().rposition(|byte| byte == first) {
        if haystack[at + 1..].starts_with(rest) {
            return Some(at);
        }
        end = at;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape<2> = [("sid", Radix::PrefixedHex), ("gen", Radix::Hex)];

    #[test]
    fn fields_are_found_at_the_last_place_where_all_are() {
        let text = b"sid 0x1 gen 2 sid \t0xfF  gen 1f -> gen 9 sid 0x3";
        assert_eq!(fields(text, &SHAPE), Ok([0xff, 0x1f]));
    }

    #[test]
    fn missing_field_is_named() {
        assert_eq!(
            fields(b"sid 0x1 gem 2", &SHAPE),
            Err(FieldError::Missing("gen"))
        );
        assert_eq!(fields(b"sid 1", &SHAPE), Err(FieldError::Missing("sid")));
        assert_eq!(fields(b"", &SHAPE), Err(FieldError::Missing("sid")));
        assert_eq!(
            fields(b"sid 0x1gen 2", &SHAPE),
            Err(FieldError::Missing("gen"))
        );
    }

    #[test]
    fn number_past_64_bits_is_too_large() {
        assert_eq!(
            fields(b"sid 0x10000000000000000 gen 0", &SHAPE),
            Err(FieldError::TooLarge("sid"))
        );
    }

    #[test]
    fn needle_is_found_first_or_not_at_all() {
        assert_eq!(find(b"ababac", b"abac"), Some(2));
        assert_eq!(find(b"aba", b"abac"), None);
        assert_eq!(find(b"xxa", b"ab"), None);
        assert_eq!(find(b"", b"a"), None);
    }

    #[test]
    fn needle_is_found_last_or_not_at_all() {
        assert_eq!(rfind(b"ab ab a", b"ab"), Some(3));
        assert_eq!(rfind(b"ab", b"ab"), Some(0));
        assert_eq!(rfind(b"b", b"ab"), None);
        assert_eq!(rfind(b"aaa", b""), None);
    }

    #[test]
    fn line_beyond_the_limit_is_an_error() {
        let long = vec![b'x'; 70 << 10];
        let mut lines = Lines::new(Path::new("log"), long.as_slice());
        assert!(lines.next().is_err());
    }
}
