// SPDX-License-Identifier: Apache-2.0
//! Fault injection in the API and `pagetide iopf`: requests and reports (VPRI 3.3).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::slo::latency;
use pagetide_report::text::Text;

/// Default duration of an injection.
pub const DEFAULT_SECONDS: u64 = 10;
/// Default number of faults per arrival.
pub const DEFAULT_BURST: u32 = 1;

fn default_seconds() -> u64 {
    DEFAULT_SECONDS
}

fn default_burst() -> u32 {
    DEFAULT_BURST
}

/// Let requests of a live device fault.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InjectionRequest {
    /// The device, by its socket, or by its serial number if no other has that.
    pub device: String,
    /// Arrivals a second, evenly spaced; above 0, at most 10000.
    pub rate: f64,
    /// How long the host holds each fault, in microseconds; at most 10 s, and a third of `iopf-timeout-ms`.
    pub latency_us: u64,
    /// Faults back to back at each arrival; from 1 to 128.
    #[serde(default = "default_burst")]
    pub burst: u32,
    /// How long the injection lasts, in seconds; from 1 to 3600.
    #[serde(default = "default_seconds")]
    pub seconds: u64,
}

/// How far an injection is.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct InjectionReport {
    /// Socket of the device.
    pub device: String,
    /// Arrivals a second.
    pub rate: f64,
    /// How long the host holds each fault.
    pub latency_us: f64,
    /// Faults back to back at each arrival.
    pub burst: u32,
    /// How long the injection was to last.
    pub seconds: u64,
    /// Time left; 0 when it is over.
    pub left_seconds: f64,
    /// Requests that were made to fault so far.
    pub injected_iopfs: u64,
    /// Of them, those that have gone on.
    pub resumed: u64,
    /// Arrivals that met no request before the next came, or came while too much was held already.
    pub skipped: u64,
    /// Half of those that went on were parked no longer than this.
    pub parked_p50_us: f64,
    /// All but one in a hundred.
    pub parked_p99_us: f64,
    /// The longest.
    pub parked_max_us: f64,
}

impl Text for InjectionReport {
    fn text(&self) -> String {
        let each = match self.burst {
            1 => "a fault".to_owned(),
            burst => format!("{burst} faults back to back"),
        };
        let mut text = format!(
            "{}: {each}, {} times a second, held for {} each, for {} s",
            self.device,
            self.rate,
            latency(self.latency_us),
            self.seconds
        );
        text += &match self.left_seconds {
            left if left > 0.0 => format!("; {left:.1} s left\n"),
            _ => "; over\n".to_owned(),
        };
        text += &format!("{} injected so far", self.injected_iopfs);
        if self.resumed > 0 {
            text += &format!(
                "; {} of them went on, after p50 {}, p99 {}, at most {}",
                self.resumed,
                latency(self.parked_p50_us),
                latency(self.parked_p99_us),
                latency(self.parked_max_us)
            );
        }
        text.push('\n');
        if self.skipped > 0 {
            text += &format!(
                "{} skipped: the device had no request, or too much was held already\n",
                self.skipped
            );
        }
        text
    }
}

/// A duration in human form: `5ms`, `800us`, `1.5s`; a plain number is milliseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct TimeUs(pub u64);

/// A text that is not a valid duration.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("'{0}' is no time: write a number with us, ms or s, such as 5ms")]
pub struct TimeError(String);

/// Units by their suffix, in microseconds. Longer suffixes first: `ms` also ends with `s`.
const UNITS: [(&str, f64); 3] = [("us", 1.0), ("ms", 1e3), ("s", 1e6)];

impl FromStr for TimeUs {
    type Err = TimeError;

    fn from_str(text: &str) -> Result<Self, TimeError> {
        let trimmed = text.trim();
        let unit = UNITS
            .iter()
            .find_map(|(suffix, us)| Some((trimmed.strip_suffix(suffix)?, *us)));
        let (number, unit_us) = unit.unwrap_or((trimmed, 1e3));
        let number = number.trim_end();
        if !number.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
            return Err(TimeError(text.to_owned()));
        }
        let value: f64 = number.parse().map_err(|_| TimeError(text.to_owned()))?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "not negative, and what is too large saturates, to be refused as absurd"
        )]
        let us = (value * unit_us).round() as u64;
        Ok(Self(us))
    }
}

impl fmt::Display for TimeUs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            us if us.is_multiple_of(1_000_000) => write!(f, "{}s", us / 1_000_000),
            us if us.is_multiple_of(1_000) => write!(f, "{}ms", us / 1_000),
            us => write!(f, "{us}us"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_with_their_units_and_told_back() {
        for (text, us, back) in [
            ("5ms", 5_000, "5ms"),
            ("5", 5_000, "5ms"),
            ("800us", 800, "800us"),
            ("1.5s", 1_500_000, "1500ms"),
            (" 2 s ", 2_000_000, "2s"),
            ("0", 0, "0s"),
            (
                "1000000000000000000000s",
                u64::MAX,
                "18446744073709551615us",
            ),
        ] {
            assert_eq!(text.parse(), Ok(TimeUs(us)), "{text}");
            assert_eq!(TimeUs(us).to_string(), back);
        }
        for text in ["", "ms", "-1ms", "5m", "1e3", "inf", "NaN", "1..2", "0x5"] {
            assert!(text.parse::<TimeUs>().is_err(), "{text}");
        }
    }

    #[test]
    fn injection_as_text_says_what_was_asked_for_and_what_came_of_it() {
        let mut report = InjectionReport {
            device: "/d".into(),
            rate: 10.0,
            latency_us: 5_000.0,
            burst: 1,
            seconds: 10,
            left_seconds: 9.96,
            ..InjectionReport::default()
        };
        assert_eq!(
            report.text(),
            "/d: a fault, 10 times a second, held for 5.0 ms each, for 10 s; 10.0 s left\n\
             0 injected so far\n"
        );
        report.left_seconds = 0.0;
        report.burst = 3;
        report.injected_iopfs = 90;
        report.resumed = 90;
        report.skipped = 70;
        report.parked_p50_us = 5_100.0;
        report.parked_p99_us = 5_900.0;
        report.parked_max_us = 6_000.0;
        assert_eq!(
            report.text(),
            "/d: 3 faults back to back, 10 times a second, held for 5.0 ms each, for 10 s; over\n\
             90 injected so far; 90 of them went on, after p50 5.1 ms, p99 5.9 ms, at most 6.0 ms\n\
             70 skipped: the device had no request, or too much was held already\n"
        );
    }
}
