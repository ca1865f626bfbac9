// SPDX-License-Identifier: Apache-2.0
//! Who may connect to a device's socket, as permission bits.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Permission bits of a socket; written in octal, as chmod(1) takes them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SocketMode(u32);

impl SocketMode {
    /// The bits.
    pub(crate) fn bits(self) -> u32 {
        self.0
    }
}

impl FromStr for SocketMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_octal = !text.is_empty() && text.bytes().all(|c| (b'0'..=b'7').contains(&c));
        u32::from_str_radix(text, 8)
            .ok()
            .filter(|bits| is_octal && *bits <= 0o777)
            .map(Self)
            .ok_or_else(|| format!("'{text}' is no mode: give octal digits from 0 to 0777"))
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl TryFrom<String> for SocketMode {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<SocketMode> for String {
    fn from(mode: SocketMode) -> Self {
        mode.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn modes_are_octal_and_nothing_else() {
        for (text, shown) in [
            ("660", "0660"),
            ("0600", "0600"),
            ("0", "0000"),
            ("777", "0777"),
        ] {
            let mode: SocketMode = text.parse().unwrap();
            assert_eq!(mode.to_string(), shown);
            assert_eq!(serde_json::to_value(mode).unwrap(), json!(shown));
        }
        for text in ["", "8", "+660", "1777", "0o660", "rw", "-1", " 660"] {
            assert!(text.parse::<SocketMode>().is_err(), "{text:?}");
        }
    }
}
