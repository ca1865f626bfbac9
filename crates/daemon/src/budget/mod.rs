// SPDX-License-Identifier: Apache-2.0
//! The host's budget as operators and programs see it: what they write, and what they are told.
//!
//! One budget covers the resident memory and the pools of all VMs. `pagetide host budget 48G` sets it,
//! `pagetide vm set` what each VM may have of it; [`crate::host`] puts it into force. What is written is
//! checked there as a whole, so that a refused change changes nothing. Here are only the forms: of settings
//! ([`BudgetSetting`], [`Amount`]), of requests ([`BudgetBody`], [`ShareChange`]) and of the report
//! ([`HostReport`]).

pub mod cli;
pub(crate) mod command;
pub(crate) mod metrics;
mod text;

use pagetide_report::size::ByteSize;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::{fmt, str::FromStr};
use utoipa::ToSchema;

/// A budget as a setting: a size, or none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum BudgetSetting {
    /// No budget: each VM by its own limit.
    Off,
    /// So many bytes.
    Size(ByteSize),
}

const OFF: &str = "off";

impl FromStr for BudgetSetting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == OFF {
            return Ok(Self::Off);
        }
        let size = text.parse().map(Self::Size);
        size.map_err(|error| format!("{error}; or write {OFF}"))
    }
}

impl fmt::Display for BudgetSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str(OFF),
            Self::Size(size) => size.fmt(f),
        }
    }
}

/// An amount of the budget: a share of it, or bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Amount {
    /// Thousandths of the budget.
    Permille(u16),
    /// Bytes.
    Bytes(ByteSize),
}

/// A whole, in thousandths.
const PERMILLE: u16 = 1000;

impl FromStr for Amount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(percent) = text.trim().strip_suffix('%') else {
            let size = text.parse().map(Self::Bytes);
            return size.map_err(|error| format!("{error}; or a share of the budget, such as 2%"));
        };
        let (whole, tenth) = percent.trim().split_once('.').unwrap_or((percent, "0"));
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let number = match (digits(whole.trim()), digits(tenth), tenth.len()) {
            (true, true, 1) => format!("{}{tenth}", whole.trim()).parse::<u16>(),
            _ => "".parse(),
        };
        match number {
            Ok(permille) if permille <= PERMILLE => Ok(Self::Permille(permille)),
            Ok(_) | Err(_) => Err(format!(
                "'{text}' is no share of the budget: write a percentage of at most 100 with one decimal, such as 2% \
                 or 0.5%"
            )),
        }
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Permille(share) if share.is_multiple_of(10) => write!(f, "{}%", share / 10),
            Self::Permille(share) => write!(f, "{}.{}%", share / 10, share % 10),
            Self::Bytes(size) => size.fmt(f),
        }
    }
}

macro_rules! written_as_text {
    ($($type:ident),*) => { $(
        impl TryFrom<String> for $type {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                text.parse()
            }
        }

        impl From<$type> for String {
            fn from(value: $type) -> Self {
                value.to_string()
            }
        }
    )* };
}

written_as_text!(BudgetSetting, Amount);

/// Set the host's budget, or change parts of what is set; what is absent stays as it is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BudgetBody {
    /// The most that all VMs may take together: resident memory, stored content and metadata.
    #[serde(default)]
    pub budget_bytes: Option<u64>,
    /// Free below this, a fill first evicts of its own VM: a share of the budget such as `1%`, or a size.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub min: Option<Amount>,
    /// Free below this, memory is reclaimed.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub low: Option<Amount>,
    /// From this on there is enough.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub high: Option<Amount>,
    /// Between low and high, cold memory of all VMs is reclaimed at this pace, in bytes a second.
    #[serde(default)]
    pub pace_bytes: Option<u64>,
}

/// Change what a VM may have of the budget; what is absent stays as it is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ShareChange {
    /// Its share beside the weights of other VMs when all want more, 1 to 10000.
    #[serde(default)]
    pub weight: Option<u32>,
    /// It may always have this much resident.
    #[serde(default)]
    pub floor_bytes: Option<u64>,
    /// It never has more resident, whatever is free: its limit; null lifts it.
    #[serde(default, skip_serializing_if = "CeilingChange::is_none")]
    #[schema(value_type = Option<u64>)]
    pub ceiling_bytes: CeilingChange,
}

/// What becomes of a ceiling. In JSON: absent, null, a number.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum CeilingChange {
    /// It stays.
    #[default]
    Keep,
    /// There is none any more.
    Lift,
    /// It is this, in bytes.
    Set(u64),
}

impl CeilingChange {
    /// To `limit_bytes`, where none means no ceiling.
    #[must_use]
    pub fn to(limit_bytes: Option<u64>) -> Self {
        limit_bytes.map_or(Self::Lift, Self::Set)
    }

    /// The ceiling that there was, changed.
    #[must_use]
    pub fn of(self, before: Option<u64>) -> Option<u64> {
        match self {
            Self::Keep => before,
            Self::Lift => None,
            Self::Set(bytes) => Some(bytes),
        }
    }

    fn is_none(&self) -> bool {
        *self == Self::Keep
    }
}

impl Serialize for CeilingChange {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.of(None).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for CeilingChange {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Option::deserialize(deserializer).map(Self::to)
    }
}

/// Free memory of the budget against its watermarks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WaterState {
    /// Fills first evict of their own VM.
    BelowMin,
    /// Memory is reclaimed, up to high.
    BelowLow,
    /// Cold memory is reclaimed at a pace, if there is any.
    Between,
    /// There is enough.
    AboveHigh,
}

/// The host's memory, its budget and how that is divided.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct HostReport {
    /// RAM of the host.
    pub ram_bytes: u64,
    /// The most that all VMs may take; absent without a budget.
    pub budget_bytes: Option<u64>,
    /// Free memory of the budget below which a fill first evicts of its own VM.
    pub min_bytes: Option<u64>,
    /// Free memory of the budget below which memory is reclaimed.
    pub low_bytes: Option<u64>,
    /// Free memory of the budget from which on there is enough.
    pub high_bytes: Option<u64>,
    /// Between low and high, cold memory is reclaimed at this pace, in bytes a second.
    pub pace_bytes: Option<u64>,
    /// What all VMs take now: resident memory, stored content and metadata.
    pub used_bytes: u64,
    /// What is free of the budget.
    pub free_bytes: Option<u64>,
    /// What is used beyond the budget.
    pub over_bytes: Option<u64>,
    /// Free memory against the watermarks; absent without a budget.
    pub water: Option<WaterState>,
    /// The VMs, by name.
    pub vms: Vec<HostVmReport>,
}

/// A VM under the budget.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct HostVmReport {
    /// Name of the VM.
    pub name: String,
    /// Its share beside the weights of other VMs when all want more.
    pub weight: u32,
    /// It may always have this much resident.
    pub floor_bytes: u64,
    /// It never has more resident; absent without a ceiling.
    pub ceiling_bytes: Option<u64>,
    /// The most that may be resident now; absent without a budget.
    pub target_bytes: Option<u64>,
    /// Why its target changed last.
    pub reason: Option<String>,
    /// What it is taken to need.
    pub need_bytes: Option<u64>,
    /// RAM of the VM.
    pub ram_bytes: u64,
    /// RAM of the VM that is present.
    pub resident_bytes: u64,
    /// Its pool: stored content and metadata.
    pub stored_bytes: u64,
    /// Share of time for which its VMM's memory cgroup stalled, in thousandths; absent where that is not known.
    pub stalled_permille: Option<u16>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amount_is_a_share_with_one_decimal_or_a_size_and_is_written_as_it_was() {
        for (text, amount, told) in [
            ("2%", Amount::Permille(20), "2%"),
            ("0.5 %", Amount::Permille(5), "0.5%"),
            ("100%", Amount::Permille(1000), "100%"),
            ("512M", Amount::Bytes(ByteSize(512 << 20)), "512M"),
            ("4096", Amount::Bytes(ByteSize(4096)), "4K"),
        ] {
            assert_eq!(text.parse(), Ok(amount), "{text}");
            assert_eq!(amount.to_string(), told);
            assert_eq!(told.parse(), Ok(amount));
        }
        for wrong in [
            "",
            "%",
            "0.25%",
            "101%",
            "-1%",
            "2.%",
            ".5%",
            "many",
            "99999999%",
        ] {
            assert!(wrong.parse::<Amount>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn budget_is_a_size_or_off() {
        assert_eq!("off".parse(), Ok(BudgetSetting::Off));
        assert_eq!("48G".parse(), Ok(BudgetSetting::Size(ByteSize(48 << 30))));
        let error = "much".parse::<BudgetSetting>().unwrap_err();
        assert!(error.contains("'much'") && error.contains("off"), "{error}");
    }

    #[test]
    fn absent_ceiling_stays_and_null_lifts_it() {
        for (json, change) in [
            ("{}", CeilingChange::Keep),
            ("{\"ceiling_bytes\":null}", CeilingChange::Lift),
            ("{\"ceiling_bytes\":7}", CeilingChange::Set(7)),
        ] {
            let read: ShareChange = serde_json::from_str(json).unwrap();
            assert_eq!(read.ceiling_bytes, change);
            let written = serde_json::to_value(read).unwrap();
            let again: ShareChange = serde_json::from_value(written).unwrap();
            assert_eq!(again, read);
        }
        assert_eq!(CeilingChange::Keep.of(Some(3)), Some(3));
        assert!(serde_json::from_str::<ShareChange>("{\"ceiling\":7}").is_err());
    }
}
