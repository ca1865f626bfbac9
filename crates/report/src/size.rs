// SPDX-License-Identifier: Apache-2.0
//! Sizes in human form: `4096`, `256M`, `1G`; powers of 1024.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Letters of the powers of 1024, lowest first.
const UNITS: [char; 4] = ['K', 'M', 'G', 'T'];

/// A number of bytes, written with a unit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ByteSize(pub u64);

/// A text that is not a valid size.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SizeError {
    /// Not a number with an optional unit.
    #[error("'{0}' is no size: write bytes or a number with K, M, G or T, such as 4096 or 256M")]
    NoSize(String),
    /// More than 2^64 bytes.
    #[error("'{0}' is too large for a size: at most 16777215T")]
    TooLarge(String),
}

impl FromStr for ByteSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let upper = text.trim().to_ascii_uppercase();
        let bare = upper.strip_suffix("IB").or(upper.strip_suffix('B'));
        let body = bare.unwrap_or(&upper);
        let power = UNITS.iter().position(|unit| body.ends_with(*unit));
        let (digits, shift) = match power {
            Some(at) => (&body[..body.len() - 1], 10 * (at + 1)),
            None => (body, 0),
        };
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(SizeError::NoSize(text.to_owned()));
        }
        let too_large = || SizeError::TooLarge(text.to_owned());
        let number: u64 = digits.parse().map_err(|_| too_large())?;
        number
            .checked_mul(1 << shift)
            .map(Self)
            .ok_or_else(too_large)
    }
}

/// Shortest exact form: what [`FromStr`] reads back as the same number.
impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mut number, mut unit) = (self.0, None);
        for next in UNITS {
            if number == 0 || number % 1024 != 0 {
                break;
            }
            (number, unit) = (number / 1024, Some(next));
        }
        match unit {
            Some(unit) => write!(f, "{number}{unit}"),
            None => write!(f, "{number}"),
        }
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a size such as 4096 or \"256M\"")]
        enum Written {
            Bytes(u64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Bytes(bytes) => Ok(Self(bytes)),
            Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

/// Rounded for reading: `1.5 GiB`.
#[must_use]
pub fn readable(bytes: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "rounded to one decimal anyway")]
    let mut number = bytes as f64;
    let mut unit = None;
    for next in UNITS {
        if number < 1024.0 {
            break;
        }
        (number, unit) = (number / 1024.0, Some(next));
    }
    match unit {
        Some(unit) => format!("{number:.1} {unit}iB"),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_with_unit_is_read_as_power_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4k", 4096),
            ("256M", 256 << 20),
            ("256MiB", 256 << 20),
            ("256mb", 256 << 20),
            ("1G", 1 << 30),
            ("2T", 2 << 40),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn text_that_is_no_size_is_an_error() {
        for text in ["", "M", "1.5G", "-1", "50%", "1X", "1MM", "0x10", "ß"] {
            assert!(
                matches!(text.parse::<ByteSize>(), Err(SizeError::NoSize(_))),
                "{text}"
            );
        }
        for text in ["99999999999999999999", "16777216T"] {
            assert!(
                matches!(text.parse::<ByteSize>(), Err(SizeError::TooLarge(_))),
                "{text}"
            );
        }
    }

    #[test]
    fn displayed_size_reads_back_as_itself() {
        for bytes in [0, 1, 1023, 1024, 1536, 1 << 20, 3 << 30, u64::MAX] {
            let text = ByteSize(bytes).to_string();
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn readable_size_is_rounded() {
        assert_eq!(readable(512), "512 B");
        assert_eq!(readable(1536 << 20), "1.5 GiB");
    }
}
