// SPDX-License-Identifier: Apache-2.0
//! Statistics of the DMA of a VM's devices: how much memory they touch, how often, and at which intervals
//! (VPRI 4.2; Fig 9, 10 and 11).
//!
//! The trace is read once. For each pair of device and section the analysis keeps the time of the last
//! touch, the number of touches, and the number of touches after longer than the *fault interval*. Such a
//! touch is a **simulated fault** (4.2.2): whatever the host's reclaim policy, a section untouched for that
//! long may well be evicted. A first touch has no interval and is not counted: no policy could have helped
//! there. Other devices and the CPU are ignored, as in the paper.
//!
//! ```text
//!   section 7 of device 3:   t=0    t=4   t=310        t=900
//!                             │  4 s │ 306 s │  590 s    │      3 intervals
//!                           first         fault        fault    4 accesses, 2 faults
//! ```
//! Sections of the same number in different spaces are different sections. Memory is bounded: by
//! [`PAIRS_MAX`], which documents the cost, and by curves of at most [`CURVE_POINTS_MAX`] points, whose
//! step doubles when they are full. Faults are kept by section and not in one sum, because a section is
//! counted by its *final* number of accesses.

mod curve;
mod report;

pub use curve::{CURVE_POINTS_MAX, GrowthCurve};
pub use report::{
    AccessAnalysis, CountRow, DeviceAnalysis, FootprintShares, Locality, ReuseRow, ServiceAnalysis,
    Tallies,
};

use std::collections::HashMap;
use std::time::Duration;

use pagetide_addr::{DeviceId, DomainId, SECTION_BYTES, SectionNo};

use pagetide_access_log::Service;
use report::{count_row, reuse_row};

/// Most pairs of device and section: at 2 MiB that is 7 TiB of memory touched by one device.
///
/// Each device has a table, which doubles when it is full to 7/8. A place in it takes 41 bytes (the hash
/// table's own one included). So this many pairs of one device just fill a table of 2^22 places, 172 MB,
/// which takes 258 MB during the last doubling, when the old one still exists. The tables of many devices
/// may all have doubled just before: 344 MB together.
pub const PAIRS_MAX: usize = 7 << 19;

/// Most devices; each has its own curve.
pub const DEVICES_MAX: usize = 1 << 12;

/// The paper's time after which a section may have been reclaimed (4.2.2).
pub const FAULT_INTERVAL: Duration = Duration::from_secs(300);

/// The parameters of an analysis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AnalysisParams {
    /// The VM's memory, in bytes, of which footprints are shares; `None` if it is not known.
    pub memory_bytes: Option<u64>,
    /// Size of a section, in bytes; only reported, since touches come by section.
    pub section_bytes: u64,
    /// A section that was not touched for longer may have been reclaimed.
    pub fault_interval: Duration,
}

impl Default for AnalysisParams {
    fn default() -> Self {
        Self {
            memory_bytes: None,
            section_bytes: SECTION_BYTES,
            fault_interval: FAULT_INTERVAL,
        }
    }
}

/// A DMA access to one section. One that spans sections is several.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SectionTouch {
    /// Time, since any fixed moment; never before the previous touch.
    pub at: Duration,
    /// The device.
    pub device: DeviceId,
    /// The kind of device.
    pub service: Service,
    /// The section of its space.
    pub section: SectionNo,
}

/// Why an analysis cannot continue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AnalysisError {
    /// Too many sections.
    #[error(
        "devices touch more than {PAIRS_MAX} sections of {section_bytes} bytes; \
         look at larger sections, or at one device"
    )]
    TooManySections {
        /// Size of a section, in bytes.
        section_bytes: u64,
    },
    /// Too many devices.
    #[error("there are more than {DEVICES_MAX} devices; look at one VM at a time")]
    TooManyDevices,
    /// A touch earlier than the previous one.
    #[error(
        "a touch at {} ns after one at {} ns; times never run backwards",
        at.as_nanos(), last.as_nanos()
    )]
    Backwards {
        /// Time of this touch.
        at: Duration,
        /// Time of the previous one.
        last: Duration,
    },
}

/// The analysis: touches go in, figures come out.
#[derive(Debug)]
pub struct Analysis {
    params: AnalysisParams,
    first: Option<Duration>,
    last: Duration,
    pairs: usize,
    numbers: HashMap<DeviceId, usize>,
    devices: Vec<DeviceState>,
}

#[derive(Debug)]
struct DeviceState {
    device: DeviceId,
    service: Service,
    sections: HashMap<Section, SectionState>,
    footprint: GrowthCurve,
    minutes: Minutes,
    /// Only the reuse intervals and the number of accesses until the end.
    tallies: Tallies,
}

/// A section, by its space and by its number there.
type Section = (DomainId, SectionNo);

#[derive(Debug)]
struct SectionState {
    /// In nanoseconds since the first touch of the trace; at most 584 years, since
    /// a `Duration` would make the pair a fifth larger.
    last_ns: u64,
    accesses: u64,
    faults: u64,
}

/// Sections touched within a minute: in the current minute, and the most in any.
#[derive(Debug, Default)]
struct Minutes {
    minute: u64,
    sections: u64,
    most: u64,
}

impl Analysis {
    /// Starts an analysis.
    #[must_use]
    pub fn new(params: AnalysisParams) -> Self {
        Self {
            params,
            first: None,
            last: Duration::ZERO,
            pairs: 0,
            numbers: HashMap::new(),
            devices: Vec::new(),
        }
    }

    /// A device has touched a section, in a trace that has one space.
    ///
    /// # Errors
    /// As [`Analysis::touch_in`].
    pub fn touch(&mut self, touch: SectionTouch) -> Result<(), AnalysisError> {
        self.touch_in(DomainId(0), touch)
    }

    /// A device has touched a section of `space`.
    ///
    /// # Errors
    /// [`AnalysisError`]; earlier touches are not lost.
    pub fn touch_in(&mut self, space: DomainId, touch: SectionTouch) -> Result<(), AnalysisError> {
        if touch.at < self.last {
            return Err(AnalysisError::Backwards {
                at: touch.at,
                last: self.last,
            });
        }
        let at = touch.at - *self.first.get_or_insert(touch.at);
        let number = self.number(&touch)?;
        self.last = touch.at;
        let device = &mut self.devices[number];
        let section = (space, touch.section);
        if self.pairs == PAIRS_MAX && !device.sections.contains_key(&section) {
            return Err(AnalysisError::TooManySections {
                section_bytes: self.params.section_bytes,
            });
        }
        self.pairs += device.touch(section, at, self.params.fault_interval);
        Ok(())
    }

    /// The device's index, a new one if necessary.
    fn number(&mut self, touch: &SectionTouch) -> Result<usize, AnalysisError> {
        if let Some(number) = self.numbers.get(&touch.device) {
            return Ok(*number);
        }
        if self.devices.len() == DEVICES_MAX {
            return Err(AnalysisError::TooManyDevices);
        }
        let number = self.devices.len();
        self.devices.push(DeviceState {
            device: touch.device,
            service: touch.service,
            sections: HashMap::new(),
            footprint: GrowthCurve::default(),
            minutes: Minutes::default(),
            tallies: Tallies::default(),
        });
        self.numbers.insert(touch.device, number);
        Ok(number)
    }

    /// The figures of all touches, devices by their numbers.
    #[must_use]
    pub fn finish(self) -> AccessAnalysis {
        let span = self.last.saturating_sub(self.first.unwrap_or_default());
        let mut devices: Vec<DeviceAnalysis> = self
            .devices
            .into_iter()
            .map(|device| device.finish(&self.params, span))
            .collect();
        devices.sort_by_key(|device| device.device);
        AccessAnalysis::of(&self.params, span, devices)
    }
}

impl DeviceState {
    /// Counts a touch; returns how many sections are new, none or one.
    fn touch(&mut self, section: Section, at: Duration, fault_interval: Duration) -> usize {
        self.tallies.accesses += 1;
        let minute = at.as_secs() / 60;
        let at_ns = u64::try_from(at.as_nanos()).unwrap_or(u64::MAX);
        self.minutes.begin(minute);
        let Some(state) = self.sections.get_mut(&section) else {
            self.sections.insert(
                section,
                SectionState {
                    last_ns: at_ns,
                    accesses: 1,
                    faults: 0,
                },
            );
            self.footprint.grow(at);
            self.minutes.count();
            return 1;
        };
        let last = Duration::from_nanos(state.last_ns);
        let interval = at.saturating_sub(last);
        self.tallies.reuse[reuse_row(interval)] += 1;
        if interval > fault_interval {
            state.faults += 1;
        }
        if last.as_secs() / 60 != minute {
            self.minutes.count();
        }
        state.accesses += 1;
        state.last_ns = at_ns;
        0
    }

    fn finish(mut self, params: &AnalysisParams, span: Duration) -> DeviceAnalysis {
        for section in self.sections.values() {
            let row = count_row(section.accesses);
            self.tallies.sections[row] += 1;
            self.tallies.faults[row] += section.faults;
        }
        self.footprint.until(span);
        DeviceAnalysis::of(
            self.device,
            self.service,
            params,
            self.tallies,
            &self.footprint,
            self.minutes.most,
        )
    }
}

impl Minutes {
    fn begin(&mut self, minute: u64) {
        if minute != self.minute {
            *self = Self {
                minute,
                sections: 0,
                most: self.most,
            };
        }
    }

    fn count(&mut self) {
        self.sections += 1;
        self.most = self.most.max(self.sections);
    }
}

#[cfg(test)]
mod tests;
