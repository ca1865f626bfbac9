// SPDX-License-Identifier: Apache-2.0
//! [`Percent`]: a share given by an operator, such as `0.5%`.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Resolution of a percent: millionths of the whole.
const PPM_PER_PERCENT: f64 = 10_000.0;

/// A share of a whole, of 0.01 to 100 percent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Percent {
    ppm: u32,
}

impl Percent {
    /// In millionths.
    #[must_use]
    pub const fn ppm(self) -> u32 {
        self.ppm
    }
}

impl FromStr for Percent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is no share between 0.01% and 100%, such as 0.5%");
        let number = text.strip_suffix('%').unwrap_or(text).trim();
        let percent: f64 = number.parse().map_err(|_| wrong())?;
        if !(0.01..=100.0).contains(&percent) {
            return Err(wrong());
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 100 and a million"
        )]
        let ppm = (percent * PPM_PER_PERCENT).round() as u32;
        Ok(Self { ppm })
    }
}

impl TryFrom<String> for Percent {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Percent> for String {
    fn from(percent: Percent) -> Self {
        percent.to_string()
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", f64::from(self.ppm) / PPM_PER_PERCENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_is_read_and_written_as_people_write_it() {
        for (text, ppm, told) in [
            ("0.5%", 5_000, "0.5%"),
            ("0.5", 5_000, "0.5%"),
            ("100 %", 1_000_000, "100%"),
            ("0.01%", 100, "0.01%"),
        ] {
            let percent: Percent = text.parse().unwrap();
            assert_eq!(percent.ppm(), ppm, "{text}");
            assert_eq!(percent.to_string(), told);
        }
        for wrong in ["", "%", "0", "0.001%", "101%", "-1%", "nan", "half"] {
            assert!(wrong.parse::<Percent>().is_err(), "{wrong}");
        }
    }
}
