// SPDX-License-Identifier: Apache-2.0
//! [`Steps`]: how long each step of a start, or of an end for a successor, has taken. The log has them in one line,
//! since VMs wait for all of them.

use std::{fmt, time::Instant};

/// See the module.
pub(crate) struct Steps {
    last: Instant,
    done: Vec<(&'static str, u128)>,
}

impl Steps {
    /// Of what begins now.
    pub(crate) fn begin() -> Self {
        Self {
            last: Instant::now(),
            done: Vec::new(),
        }
    }

    /// The step that has just ended.
    pub(crate) fn done(&mut self, step: &'static str) {
        let now = Instant::now();
        let took = now.saturating_duration_since(self.last).as_micros();
        self.done.push((step, took));
        self.last = now;
    }
}

impl fmt::Display for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (step, us)) in self.done.iter().enumerate() {
            let comma = if number == 0 { "" } else { ", " };
            write!(f, "{comma}{step} {us}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_told_in_their_order_with_microseconds() {
        let mut steps = Steps::begin();
        assert_eq!(steps.to_string(), "");
        steps.done("pools");
        steps.done("disks");
        let told = steps.to_string();
        let parts: Vec<&str> = told.split(", ").collect();
        let [pools, disks] = parts[..] else {
            panic!("{told}")
        };
        let us = |part: &str, name: &str| part.strip_prefix(name)?.trim().parse::<u128>().ok();
        assert!(us(pools, "pools").is_some() && us(disks, "disks").is_some());
    }
}
