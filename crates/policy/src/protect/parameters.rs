// SPDX-License-Identifier: Apache-2.0
//! Parameters of policies: names, values, and error messages.
//!
//! A policy declares each parameter once, in [`Parameters::fields`]; reading, printing and the list
//! in an error message come from that.

use std::{fmt, str::FromStr, time::Duration};

/// The parameters of a policy.
pub trait Parameters: Clone + Default + PartialEq {
    /// Every parameter with its name, words joined by hyphens.
    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)>;

    /// Checks that the values are consistent.
    ///
    /// # Errors
    /// Why not, as a sentence without a full stop.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    /// Name and value of the parameters that differ from their defaults.
    fn changed(&self) -> Vec<(&'static str, String)> {
        let (mut mine, mut default) = (self.clone(), Self::default());
        let texts = |fields: Vec<(&'static str, Field<'_>)>| -> Vec<(&'static str, String)> {
            fields
                .into_iter()
                .map(|(name, field)| (name, field.text()))
                .collect()
        };
        let default = texts(default.fields());
        texts(mine.fields())
            .into_iter()
            .zip(default)
            .filter(|(mine, default)| mine != default)
            .map(|(mine, _)| mine)
            .collect()
    }
}

/// One parameter, to be read or set.
#[derive(Debug)]
pub enum Field<'a> {
    /// A share of something.
    Share(&'a mut Share),
    /// A time.
    Time(&'a mut Duration),
    /// A number.
    Count(&'a mut u64),
    /// A number, or none: what is right is found out.
    CountOrAuto(&'a mut Option<u64>),
}

/// Text of a number that is found out.
const AUTO: &str = "auto";

impl Field<'_> {
    /// Sets it from `text`.
    ///
    /// # Errors
    /// A description of valid values.
    pub fn set(self, text: &str) -> Result<(), &'static str> {
        match self {
            Self::Share(share) => *share = text.parse()?,
            Self::Time(time) => *time = parse_time(text)?,
            Self::Count(count) => *count = text.parse().map_err(|_| "a whole number")?,
            Self::CountOrAuto(count) => {
                let number = |_| "a whole number, or auto";
                *count = match text {
                    AUTO => None,
                    text => Some(text.parse().map_err(number)?),
                };
            }
        }
        Ok(())
    }

    /// Its value as text, as accepted by [`Self::set`].
    #[must_use]
    pub fn text(&self) -> String {
        match self {
            Self::Share(share) => share.to_string(),
            Self::Time(time) => time_text(**time),
            Self::Count(count) => count.to_string(),
            Self::CountOrAuto(count) => {
                count.map_or_else(|| AUTO.to_owned(), |count| count.to_string())
            }
        }
    }
}

/// A share, from nothing to all, in millionths.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub struct Share(u32);

const ALL: u32 = 1_000_000;
const SHARE_DIGITS: usize = 6;
const SHARE_WANTED: &str = "a share from 0 to 1 with up to six decimals, such as 0.05";
const TIME_WANTED: &str = "a time such as 500ms, 30s, 3min or 1h, up to a year";

impl Share {
    /// `millionths` of a whole, at most the whole.
    #[must_use]
    pub const fn millionths(millionths: u32) -> Self {
        Self(if millionths < ALL { millionths } else { ALL })
    }

    /// `percent` hundredths, at most the whole.
    #[must_use]
    pub const fn percent(percent: u32) -> Self {
        Self::millionths(percent.saturating_mul(ALL / 100))
    }

    /// This share of `whole`, rounded down.
    #[must_use]
    pub fn of(self, whole: u64) -> u64 {
        let part = u128::from(whole) * u128::from(self.0) / u128::from(ALL);
        u64::try_from(part).unwrap_or(whole)
    }
}

impl FromStr for Share {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (whole, decimals) = text.split_once('.').unwrap_or((text, "0"));
        let digits_only = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        if decimals.is_empty() || decimals.len() > SHARE_DIGITS || !digits_only(decimals) {
            return Err(SHARE_WANTED);
        }
        let decimals: u32 = format!("{decimals:0<SHARE_DIGITS$}")
            .parse()
            .map_err(|_| SHARE_WANTED)?;
        match (whole, decimals) {
            ("0", _) => Ok(Self(decimals)),
            ("1", 0) => Ok(Self(ALL)),
            _ => Err(SHARE_WANTED),
        }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == ALL {
            return f.write_str("1");
        }
        let decimals = format!("{:0SHARE_DIGITS$}", self.0);
        let shown = decimals.trim_end_matches('0');
        write!(f, "0.{}", if shown.is_empty() { "0" } else { shown })
    }
}

const TIME_MAX_MS: u64 = 365 * 24 * 3_600_000;

/// Units of time in milliseconds, longest first. Minutes are `min`, as in systemd.
const UNITS: [(&str, u64); 4] = [("h", 3_600_000), ("min", 60_000), ("s", 1_000), ("ms", 1)];

fn parse_time(text: &str) -> Result<Duration, &'static str> {
    let is_digit = |letter: char| letter.is_ascii_digit();
    let number = text.trim_end_matches(|letter| !is_digit(letter));
    let unit = &text[number.len()..];
    let (_, unit_ms) = UNITS
        .iter()
        .find(|(name, _)| *name == unit)
        .ok_or(TIME_WANTED)?;
    if !number.chars().all(is_digit) {
        return Err(TIME_WANTED);
    }
    let number: u64 = number.parse().map_err(|_| TIME_WANTED)?;
    match number.checked_mul(*unit_ms) {
        Some(ms) if ms <= TIME_MAX_MS => Ok(Duration::from_millis(ms)),
        _ => Err(TIME_WANTED),
    }
}

/// In seconds, which are easiest to compare; in milliseconds if there is a fraction.
fn time_text(time: Duration) -> String {
    if time.subsec_millis() == 0 {
        format!("{}s", time.as_secs())
    } else {
        format!("{}ms", time.as_millis())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_read_what_they_print_and_refuse_what_is_no_share() {
        for (text, millionths) in [
            ("0.05", 50_000),
            ("0.0", 0),
            ("1", ALL),
            ("0.123456", 123_456),
        ] {
            let share: Share = text.parse().expect(text);
            assert_eq!(share, Share(millionths), "{text}");
            assert_eq!(share.to_string().parse(), Ok(share), "{text}");
            assert_eq!(share.to_string(), text);
        }
        for text in [
            "",
            ".",
            "0.",
            "1.1",
            "2",
            "-0.1",
            "0.1234567",
            "5%",
            "0.+1",
            "00.1",
            "1e-1",
        ] {
            assert_eq!(text.parse::<Share>(), Err(SHARE_WANTED), "{text}");
        }
    }

    #[test]
    fn share_of_a_whole_is_rounded_down_and_never_more_than_the_whole() {
        assert_eq!(Share::percent(5).of(39), 1);
        assert_eq!(Share::percent(30).of(10_240), 3_072);
        assert_eq!(Share::percent(100).of(u64::MAX), u64::MAX);
        assert_eq!(Share::percent(500), Share::percent(100));
    }

    #[test]
    fn times_read_what_they_print_and_refuse_what_is_no_time() {
        for (text, ms) in [("180s", 180_000), ("1500ms", 1_500), ("3min", 180_000)] {
            let time = Duration::from_millis(ms);
            assert_eq!(parse_time(text), Ok(time), "{text}");
            assert_eq!(parse_time(&time_text(time)), Ok(time), "{text}");
        }
        for text in [
            "",
            "s",
            "5",
            "5 s",
            "1d",
            "-1s",
            "9000h",
            "99999999999999999999s",
        ] {
            assert_eq!(parse_time(text), Err(TIME_WANTED), "{text}");
        }
    }
}
