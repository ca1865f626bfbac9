// SPDX-License-Identifier: Apache-2.0
//! [`Share`] and [`ShareList`]: shares of CPU time as they are written.

use pagetide_policy::scheduler::Shares;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Names of the classes, in order of priority.
pub(super) const CLASSES: [&str; 5] = ["vcpu-faults", "io-faults", "reclaim", "scan", "background"];

/// A share of a whole: 0 to 100 percent, in tenths of a percent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Share {
    /// In thousandths.
    pub permille: u32,
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("'{text}' is no share between 0% and 100% in steps of 0.1%, such as 2.5%");
        let number = text.strip_suffix('%').unwrap_or(text).trim();
        let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
        let is_digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        if !is_digits(whole) || !is_digits(tenths) || tenths.len() > 1 || whole.len() > 3 {
            return Err(wrong());
        }
        let parse = |part: &str| part.parse::<u32>().map_err(|_| wrong());
        match parse(whole)? * 10 + parse(tenths)? {
            permille @ 0..=1000 => Ok(Self { permille }),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.permille / 10, self.permille % 10) {
            (whole, 0) => write!(f, "{whole}%"),
            (whole, tenths) => write!(f, "{whole}.{tenths}%"),
        }
    }
}

/// Shares of the classes as one text, such as `reclaim=30%,scan=5%`; those that are not named have their
/// defaults.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ShareList(pub Shares);

impl FromStr for ShareList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut shares = Shares::default();
        let mut named = Vec::new();
        for part in text.split(',') {
            let Some((class, share)) = part.split_once('=') else {
                return Err(format!("'{part}' is no share: write such as reclaim=25%"));
            };
            let Share { permille } = share.parse()?;
            let field = match class.trim() {
                "vcpu-faults" => &mut shares.vcpu_faults,
                "io-faults" => &mut shares.io_faults,
                "reclaim" => &mut shares.reclaim,
                "scan" => &mut shares.scan,
                "background" => &mut shares.background,
                other => {
                    let classes = CLASSES.join(", ");
                    return Err(format!("'{other}' is no class: there are {classes}"));
                }
            };
            *field = permille;
            if named.contains(&class.trim()) {
                return Err(format!("the share of '{}' is given twice", class.trim()));
            }
            named.push(class.trim());
        }
        Ok(Self(shares))
    }
}

impl fmt::Display for ShareList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = CLASSES
            .iter()
            .zip(permilles(self.0))
            .map(|(class, permille)| format!("{class}={}", Share { permille }));
        f.write_str(&parts.collect::<Vec<_>>().join(","))
    }
}

/// In the order of [`CLASSES`].
pub(super) fn permilles(shares: Shares) -> [u32; CLASSES.len()] {
    let Shares {
        vcpu_faults,
        io_faults,
        reclaim,
        scan,
        background,
    } = shares;
    [vcpu_faults, io_faults, reclaim, scan, background]
}

impl TryFrom<String> for ShareList {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<ShareList> for String {
    fn from(list: ShareList) -> Self {
        list.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_is_read_and_written_as_people_write_it() {
        for (text, permille, told) in [
            ("25%", 250, "25%"),
            ("2.5", 25, "2.5%"),
            ("0%", 0, "0%"),
            ("100 %", 1000, "100%"),
        ] {
            let share: Share = text.parse().unwrap();
            assert_eq!(share.permille, permille, "{text}");
            assert_eq!(share.to_string(), told);
        }
        for wrong in [
            "",
            "%",
            "-1%",
            "100.1%",
            "0.25%",
            "1e2",
            "nan",
            ".5",
            "5.",
            "9999999999%",
        ] {
            assert!(wrong.parse::<Share>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn shares_not_named_have_their_defaults_and_wrong_ones_are_refused_by_name() {
        let list: ShareList = "reclaim=30%, scan=5%".parse().unwrap();
        let expected = Shares {
            reclaim: 300,
            scan: 50,
            ..Shares::default()
        };
        assert_eq!(list.0, expected);
        assert_eq!(list.to_string().parse(), Ok(list));
        for (wrong, part) in [
            ("", "is no share"),
            ("reclaim", "'reclaim' is no share"),
            ("swap=1%", "'swap' is no class"),
            ("scan=1%,scan=2%", "'scan' is given twice"),
            ("scan=200%", "'200%'"),
        ] {
            let said = wrong.parse::<ShareList>().unwrap_err();
            assert!(said.contains(part), "{said}");
        }
    }
}
