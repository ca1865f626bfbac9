// SPDX-License-Identifier: Apache-2.0
//! [`PolicyChoice`]: which policy protects, and its parameters, as text.
//!
//! ```text
//!   adp
//!   adp:promote-after=120s,protected-max=0.04
//! ```
//! A new policy is a file, a variant here, and a line in each `match` of this file.

use super::{
    PromotionAge, ProtectionPolicy,
    adp::{Adp, AdpParams},
    lru::{Lru, LruParams},
    none::Nothing,
    parameters::{Parameters, Share},
};
use crate::set_times::SetTimes;
use std::{fmt, str::FromStr, sync::Arc, time::Duration};

/// The policy of a VM's devices.
#[derive(Clone, PartialEq, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum PolicyChoice {
    /// Nothing is protected.
    #[default]
    None,
    /// The sections touched last. See [`super::lru`].
    Lru(LruParams),
    /// The paper's policy. See [`super::adp`].
    Adp(AdpParams),
}

/// Why a text does not name a policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// There is no such policy.
    #[error("there is no policy {name:?}; there are {}", PolicyChoice::NAMES.join(", "))]
    UnknownPolicy {
        /// As it was written.
        name: String,
    },
    /// The policy has no such parameter.
    #[error(
        "policy {policy} has no parameter {name:?}; it has {}",
        if known.is_empty() { "none".to_owned() } else { known.join(", ") }
    )]
    UnknownParameter {
        /// The policy.
        policy: &'static str,
        /// As it was written.
        name: String,
        /// Those it has.
        known: Vec<&'static str>,
    },
    /// A parameter without its value.
    #[error("parameter {text:?} of policy {policy} has no value; write NAME=VALUE")]
    NoValue {
        /// The policy.
        policy: &'static str,
        /// The text in place of a parameter.
        text: String,
    },
    /// A parameter was given twice.
    #[error("parameter {name} of policy {policy} is given twice")]
    Twice {
        /// The policy.
        policy: &'static str,
        /// The parameter.
        name: &'static str,
    },
    /// A value the parameter cannot have.
    #[error("parameter {name} of policy {policy} is {value:?}, but must be {wanted}")]
    BadValue {
        /// The policy.
        policy: &'static str,
        /// The parameter.
        name: &'static str,
        /// As it was written.
        value: String,
        /// What it should be.
        wanted: &'static str,
    },
    /// Values that contradict each other.
    #[error("parameters of policy {policy} do not go together: {why}")]
    Contradiction {
        /// The policy.
        policy: &'static str,
        /// Why not.
        why: String,
    },
}

impl PolicyChoice {
    /// Names of all policies.
    pub const NAMES: [&str; 3] = ["none", "lru", "adp"];

    /// Every policy, with the parameters it has by default.
    #[must_use]
    pub fn all() -> [Self; 3] {
        [
            Self::None,
            Self::Lru(LruParams::default()),
            Self::Adp(AdpParams::default()),
        ]
    }

    /// Its name, without parameters.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Lru(_) => "lru",
            Self::Adp(_) => "adp",
        }
    }

    /// Most that one device protects, as a share of its VM's sections.
    #[must_use]
    pub fn protected_max(&self) -> Share {
        match self {
            Self::None => Share::default(),
            Self::Lru(params) => params.share,
            Self::Adp(params) => params.protected_max,
        }
    }

    /// The age after which sections of a VM's devices are promoted, before anything is learnt.
    #[must_use]
    pub fn promotion_start(&self) -> Duration {
        match self {
            Self::Adp(params) => params.promote_after,
            Self::None | Self::Lru(_) => AdpParams::default().promote_after,
        }
    }

    /// That age, for all devices of a VM.
    #[must_use]
    pub fn promotion_age(&self) -> Arc<PromotionAge> {
        Arc::new(PromotionAge::starting_at(self.promotion_start()))
    }

    /// The same beside an evictor with these times, where what is right depends on them ([`AdpParams::beside`]).
    #[must_use]
    pub fn beside(&self, times: &SetTimes) -> Self {
        match self {
            Self::Adp(params) => Self::Adp(params.beside(times)),
            Self::None | Self::Lru(_) => self.clone(),
        }
    }

    /// The policy for one device of a VM with `sections` sections, whose devices share `age`.
    #[must_use]
    pub fn policy(&self, sections: u64, age: &Arc<PromotionAge>) -> Box<dyn ProtectionPolicy> {
        match self {
            Self::None => Box::new(Nothing),
            Self::Lru(params) => Box::new(Lru::new(*params, sections)),
            Self::Adp(params) => Box::new(Adp::new(*params, sections, age)),
        }
    }

    fn set(&mut self, text: &str) -> Result<(), PolicyError> {
        let policy = self.name();
        match self {
            Self::None => read(policy, &mut NoParams, text),
            Self::Lru(params) => read(policy, params, text),
            Self::Adp(params) => read(policy, params, text),
        }
    }

    fn changed(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::None => Vec::new(),
            Self::Lru(params) => params.changed(),
            Self::Adp(params) => params.changed(),
        }
    }
}

/// Parameters of a policy that has none.
#[derive(Clone, Default, PartialEq)]
struct NoParams;

impl Parameters for NoParams {
    fn fields(&mut self) -> Vec<(&'static str, super::parameters::Field<'_>)> {
        Vec::new()
    }
}

/// Sets the parameters in `text`: `NAME=VALUE`, separated by commas.
fn read(policy: &'static str, params: &mut impl Parameters, text: &str) -> Result<(), PolicyError> {
    let mut given = Vec::new();
    for pair in text.split(',') {
        let Some((wanted, value)) = pair.split_once('=') else {
            let text = pair.to_owned();
            return Err(PolicyError::NoValue { policy, text });
        };
        let fields = params.fields();
        let known: Vec<&'static str> = fields.iter().map(|(name, _)| *name).collect();
        let Some((name, field)) = fields.into_iter().find(|(name, _)| *name == wanted) else {
            return Err(PolicyError::UnknownParameter {
                policy,
                name: wanted.to_owned(),
                known,
            });
        };
        if given.contains(&name) {
            return Err(PolicyError::Twice { policy, name });
        }
        given.push(name);
        field.set(value).map_err(|wanted| PolicyError::BadValue {
            policy,
            name,
            value: value.to_owned(),
            wanted,
        })?;
    }
    params
        .check()
        .map_err(|why| PolicyError::Contradiction { policy, why })
}

impl FromStr for PolicyChoice {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, parameters) = match text.split_once(':') {
            Some((name, parameters)) => (name, Some(parameters)),
            None => (text, None),
        };
        let mut choice = Self::all()
            .into_iter()
            .find(|choice| choice.name() == name)
            .ok_or_else(|| PolicyError::UnknownPolicy {
                name: name.to_owned(),
            })?;
        if let Some(parameters) = parameters {
            choice.set(parameters)?;
        }
        Ok(choice)
    }
}

impl fmt::Display for PolicyChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        for (place, (name, value)) in self.changed().into_iter().enumerate() {
            let before = if place == 0 { ':' } else { ',' };
            write!(f, "{before}{name}={value}")?;
        }
        Ok(())
    }
}

impl TryFrom<String> for PolicyChoice {
    type Error = PolicyError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<PolicyChoice> for String {
    fn from(choice: PolicyChoice) -> Self {
        choice.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_reads_its_name_and_what_it_prints() {
        for (choice, name) in PolicyChoice::all().into_iter().zip(PolicyChoice::NAMES) {
            assert_eq!(choice.to_string(), name);
            assert_eq!(name.parse(), Ok(choice));
        }
        let choice = PolicyChoice::Adp(AdpParams {
            promote_after: Duration::from_secs(120),
            protected_max: Share::percent(4),
            ..AdpParams::default()
        });
        assert_eq!(
            choice.to_string(),
            "adp:protected-max=0.04,promote-after=120s"
        );
        assert_eq!(
            "adp:promote-after=2min,protected-max=0.040".parse(),
            Ok(choice)
        );
    }

    #[test]
    fn what_is_wrong_with_a_text_is_told_by_name() {
        for (text, message) in [
            (
                "arc",
                "there is no policy \"arc\"; there are none, lru, adp",
            ),
            ("", "there is no policy \"\"; there are none, lru, adp"),
            (
                "lru:size=3",
                "policy lru has no parameter \"size\"; it has share",
            ),
            (
                "none:share=1",
                "policy none has no parameter \"share\"; it has none",
            ),
            (
                "lru:share=0.1,share=0.2",
                "parameter share of policy lru is given twice",
            ),
            (
                "lru:",
                "parameter \"\" of policy lru has no value; write NAME=VALUE",
            ),
            (
                "lru:share=10%",
                "parameter share of policy lru is \"10%\", but must be a share from 0 to 1 with \
                 up to six decimals, such as 0.05",
            ),
            (
                "adp:scan-every=20",
                "parameter scan-every of policy adp is \"20\", but must be a time such as 500ms, \
                 30s, 3min or 1h, up to a year",
            ),
            (
                "adp:demote-after=180s",
                "parameters of policy adp do not go together: demote-after (180000 ms) must be \
                 shorter than promote-after (180000 ms), or a section would be promoted again \
                 before it is demoted",
            ),
        ] {
            let error = text.parse::<PolicyChoice>().expect_err(text);
            assert_eq!(error.to_string(), message, "{text}");
        }
    }
}
