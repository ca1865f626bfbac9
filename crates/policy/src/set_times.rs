// SPDX-License-Identifier: Apache-2.0
//! [`SetTimes`]: how long a section stays in each of the hot and cold sets (Taiji 4.2.1).
//!
//! The paper says that sections are scanned periodically and move *gradually*, but prints no times. What it
//! does print is that cold memory is measured over ten minutes (2.1.3, Fig 3a). Hence the two presets:
//!
//! | preset | time between two scans | untouched in a set for | from Hot to Cold |
//! |---|---|---|---|
//! | `quick` | 5 s | 1 s: one set colder at each scan | five scans: 25 s |
//! | `paper` | 60 s | 2 min | 10 min |
//!
//! As text: `quick`, `paper`, or either with times of its own, such as `paper:hot=5min,scan=30s`.

use crate::protect::parameters::Field;
use std::{fmt, str::FromStr, time::Duration};

/// Shortest time of any kind. Pages that are to be evicted are untouched for some ten milliseconds only;
/// heat is about longer times.
pub const TIME_MIN: Duration = Duration::from_secs(1);
/// Longest time of a set.
pub const AGE_MAX: Duration = Duration::from_secs(24 * 3600);
/// Longest time between two scans while cold memory is wanted: the time between two that are not wanted.
pub const SCAN_MAX: Duration = crate::sampling::SWEEP_IDLE;

/// See the module. There is no time for Cold, since no set is colder.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SetTimes {
    /// Least time from one scan to the next, while cold memory is wanted. A section rises by one set per scan
    /// that finds it touched.
    pub scan: Duration,
    /// A section sinks from Hot to Warm when it was not touched for this time; and so on.
    pub hot: Duration,
    /// From Warm to Active.
    pub warm: Duration,
    /// From Active to Inactive.
    pub active: Duration,
    /// From Inactive to Cool.
    pub inactive: Duration,
    /// From Cool to Cold.
    pub cool: Duration,
}

const PRESETS: [(&str, SetTimes); 2] = [("quick", SetTimes::QUICK), ("paper", SetTimes::PAPER)];

impl SetTimes {
    /// Each scan moves a section by one set: what is cold is known within a minute.
    pub const QUICK: Self = Self::even(crate::sampling::SWEEP_WANTED, TIME_MIN);
    /// Ten minutes from Hot to Cold.
    pub const PAPER: Self = Self::even(Duration::from_secs(60), Duration::from_secs(120));

    const fn even(scan: Duration, age: Duration) -> Self {
        Self {
            scan,
            hot: age,
            warm: age,
            active: age,
            inactive: age,
            cool: age,
        }
    }

    /// A section that was just used is not Cold before so much time has passed. One that was Cold and stayed in
    /// memory, because it was protected or nothing was wanted, is only Cool after one touch; the others take longer,
    /// and so do all where scans are rarer than that.
    #[must_use]
    pub const fn cold_after(&self) -> Duration {
        self.cool
    }

    fn fields(&mut self) -> [(&'static str, &mut Duration, Duration); 6] {
        [
            ("scan", &mut self.scan, SCAN_MAX),
            ("hot", &mut self.hot, AGE_MAX),
            ("warm", &mut self.warm, AGE_MAX),
            ("active", &mut self.active, AGE_MAX),
            ("inactive", &mut self.inactive, AGE_MAX),
            ("cool", &mut self.cool, AGE_MAX),
        ]
    }

    fn texts(mut self) -> [(&'static str, String); 6] {
        self.fields()
            .map(|(name, time, _)| (name, Field::Time(time).text()))
    }
}

impl Default for SetTimes {
    fn default() -> Self {
        Self::QUICK
    }
}

/// Why a text gives no times of the sets.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SetTimesError {
    /// There is no such preset.
    #[error(
        "there are no times of the sets named {name:?}; write quick or paper, or such as paper:hot=5min"
    )]
    UnknownPreset {
        /// As it was written.
        name: String,
    },
    /// There is no such time, or it has no value.
    #[error(
        "{text:?} is no time of the sets; write NAME=TIME with one of scan, hot, warm, active, inactive, cool"
    )]
    UnknownTime {
        /// As it was written.
        text: String,
    },
    /// A time was given twice.
    #[error("the time of the sets {name} is given twice")]
    Twice {
        /// Its name.
        name: &'static str,
    },
    /// A value that is no time.
    #[error("the time of the sets {name} is {value:?}, but must be {wanted}")]
    NoTime {
        /// Its name.
        name: &'static str,
        /// As it was written.
        value: String,
        /// What it should be.
        wanted: &'static str,
    },
    /// A time that is too short or too long.
    #[error(
        "the time of the sets {name} is {value:?}, but must be between {} s and {} s",
        TIME_MIN.as_secs(), max.as_secs()
    )]
    OutOfRange {
        /// Its name.
        name: &'static str,
        /// As it was written.
        value: String,
        /// The longest.
        max: Duration,
    },
}

impl FromStr for SetTimes {
    type Err = SetTimesError;

    fn from_str(text: &str) -> Result<Self, SetTimesError> {
        let (preset, changes) = match text.split_once(':') {
            Some((preset, changes)) => (preset, Some(changes)),
            None => (text, None),
        };
        let found = PRESETS.iter().find(|(name, _)| *name == preset.trim());
        let Some((_, mut times)) = found.copied() else {
            let name = preset.trim().to_owned();
            return Err(SetTimesError::UnknownPreset { name });
        };
        let mut given = Vec::new();
        for change in changes.into_iter().flat_map(|changes| changes.split(',')) {
            let name = change_one(&mut times, change.trim())?;
            if given.contains(&name) {
                return Err(SetTimesError::Twice { name });
            }
            given.push(name);
        }
        Ok(times)
    }
}

fn change_one(times: &mut SetTimes, text: &str) -> Result<&'static str, SetTimesError> {
    let unknown = || SetTimesError::UnknownTime {
        text: text.to_owned(),
    };
    let (name, value) = text.split_once('=').ok_or_else(unknown)?;
    let (name, value) = (name.trim(), value.trim());
    let field = times
        .fields()
        .into_iter()
        .find(|(known, ..)| *known == name);
    let (name, time, max) = field.ok_or_else(unknown)?;
    let value = || value.to_owned();
    (Field::Time(time).set(&value())).map_err(|wanted| SetTimesError::NoTime {
        name,
        value: value(),
        wanted,
    })?;
    match (TIME_MIN..=max).contains(time) {
        true => Ok(name),
        false => Err(SetTimesError::OutOfRange {
            name,
            value: value(),
            max,
        }),
    }
}

impl fmt::Display for SetTimes {
    /// The preset that has most of the times, and the others.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mine = self.texts();
        let changes = |preset: SetTimes| -> Vec<String> {
            let pairs = mine.iter().zip(preset.texts());
            pairs
                .filter(|(mine, preset)| *mine != preset)
                .map(|((name, time), _)| format!("{name}={time}"))
                .collect()
        };
        let described = PRESETS.map(|(name, preset)| (name, changes(preset)));
        let closest = described.iter().min_by_key(|(_, changes)| changes.len());
        match closest {
            Some((name, changes)) if changes.is_empty() => f.write_str(name),
            Some((name, changes)) => write!(f, "{name}:{}", changes.join(",")),
            None => unreachable!("there are presets"),
        }
    }
}

impl TryFrom<String> for SetTimes {
    type Error = SetTimesError;

    fn try_from(text: String) -> Result<Self, SetTimesError> {
        text.parse()
    }
}

impl From<SetTimes> for String {
    fn from(times: SetTimes) -> Self {
        times.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_what_they_print() {
        let seconds = Duration::from_secs;
        let own = SetTimes {
            hot: seconds(300),
            scan: seconds(30),
            ..SetTimes::PAPER
        };
        for (text, times, told) in [
            ("quick", SetTimes::QUICK, "quick"),
            ("paper", SetTimes::PAPER, "paper"),
            ("paper:hot=5min, scan=30s", own, "paper:scan=30s,hot=300s"),
            (
                "quick:cool=1500ms",
                SetTimes {
                    cool: Duration::from_millis(1500),
                    ..SetTimes::QUICK
                },
                "quick:cool=1500ms",
            ),
            (
                "quick:scan=1min,hot=2min,warm=2min,active=2min,inactive=2min",
                SetTimes {
                    cool: TIME_MIN,
                    ..SetTimes::PAPER
                },
                "paper:cool=1s",
            ),
        ] {
            assert_eq!(text.parse(), Ok(times), "{text}");
            assert_eq!(times.to_string(), told);
            assert_eq!(told.parse(), Ok(times), "{told}");
        }
        assert_eq!(SetTimes::default(), SetTimes::QUICK);
    }

    #[test]
    fn times_that_cannot_be_are_refused_with_what_can() {
        for (text, told) in [
            ("fast", "there are no times of the sets named \"fast\""),
            ("", "named \"\""),
            ("hot=5s", "named \"hot=5s\""),
            ("paper:", "\"\" is no time of the sets"),
            (
                "paper:hot",
                "\"hot\" is no time of the sets; write NAME=TIME",
            ),
            (
                "paper:cold=5s",
                "one of scan, hot, warm, active, inactive, cool",
            ),
            ("paper:hot=5s,hot=6s", "time of the sets hot is given twice"),
            ("paper:hot=5", "must be a time such as 500ms"),
            (
                "paper:hot=0s",
                "hot is \"0s\", but must be between 1 s and 86400 s",
            ),
            ("paper:cool=25h", "must be between 1 s and 86400 s"),
            ("quick:scan=241s", "must be between 1 s and 240 s"),
        ] {
            let error = text.parse::<SetTimes>().unwrap_err().to_string();
            assert!(error.contains(told), "{text}: {error}");
            assert!(!error.contains('\n') && !error.ends_with('.'), "{error}");
        }
    }
}
