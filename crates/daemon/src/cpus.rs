// SPDX-License-Identifier: Apache-2.0
//! [`CpuList`]: a list of CPUs in the kernel's notation, such as `0,2-5`, or `any`.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// One past the highest CPU number that an affinity set can name.
const CPUS_MAX: usize = 1024;
const ANY: &str = "any";

/// A set of CPUs, ascending; empty means any.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CpuList(Vec<usize>);

impl CpuList {
    /// The CPU numbers; empty for any.
    #[must_use]
    pub fn numbers(&self) -> &[usize] {
        &self.0
    }
}

impl FromStr for CpuList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == ANY {
            return Ok(Self::default());
        }
        let wrong = || format!("'{text}' is no list of CPUs: write such as 0,2-5, or {ANY}");
        let number = |text: &str| match text.parse::<usize>() {
            Ok(number) if number < CPUS_MAX => Ok(number),
            _ => Err(wrong()),
        };
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(wrong());
            }
            cpus.extend(first..=last);
        }
        cpus.sort_unstable();
        cpus.dedup();
        Ok(Self(cpus))
    }
}

impl TryFrom<String> for CpuList {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str(ANY);
        }
        let numbers: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&numbers.join(","))
    }
}

impl From<CpuList> for String {
    fn from(list: CpuList) -> Self {
        list.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_reads_back_as_written_and_any_is_empty() {
        let list: CpuList = "4,0,2-3,3".parse().unwrap();
        assert_eq!(list.numbers(), [0, 2, 3, 4]);
        assert_eq!(list.to_string().parse(), Ok(list));
        let any: CpuList = "any".parse().unwrap();
        assert!(any.numbers().is_empty());
        assert_eq!(any.to_string(), "any");
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for text in ["", "a", "1,", "3-1", "-1", "0-4096", "1024"] {
            assert!(text.parse::<CpuList>().is_err(), "{text}");
        }
    }
}
