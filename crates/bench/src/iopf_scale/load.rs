// SPDX-License-Identifier: Apache-2.0
//! When tenants fault, and how long each fault takes, seen from the device.

use pagetide_random::SplitMix64;
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::rig::{Broken, Rig, time_left};
use pagetide_sys::clock::now_ns;

/// The relation of several tenants' faults in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Arrivals {
    /// All tenants fault at the same instants, evenly spaced.
    Aligned,
    /// Each tenant independently, at exponentially distributed intervals.
    Poisson,
    /// Each tenant independently, [`BURST`] at a time.
    Bursts,
}

/// Faults of a burst.
const BURST: u32 = 10;
/// Longest wait for the last answers.
const PATIENCE: Duration = Duration::from_secs(30);

/// A scheduled fault.
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug)]
pub(super) struct Fault {
    pub(super) at: Duration,
    pub(super) tenant: usize,
}

/// A run of a rig.
#[derive(Clone, Debug)]
pub(super) struct Load {
    /// In the order of time.
    pub(super) faults: Vec<Fault>,
    /// Hold time of each.
    pub(super) hold_us: u32,
    /// Further load beside them.
    pub(super) storm: Option<Storm>,
}

/// A load of one tenant that may hurt others: as many faults at once as a device may have outstanding, each
/// answered at once, over and over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Storm {
    pub(super) tenant: usize,
    pub(super) faults: u64,
    pub(super) every: Duration,
}

/// The faults of `tenants` tenants, `per_second` each on average, over `time`.
pub(super) fn faults(
    arrivals: Arrivals,
    tenants: usize,
    per_second: u32,
    time: Duration,
) -> Vec<Fault> {
    let gap = Duration::from_secs(1) / per_second;
    let mut random = SplitMix64::new(0x0009_a6e7_1de0 + tenants as u64);
    let mut faults = Vec::new();
    for tenant in 0..tenants {
        let mut at = match arrivals {
            Arrivals::Aligned => Duration::ZERO,
            Arrivals::Poisson => gap.mul_f64(random.exponential()),
            // Somewhere in the first period.
            Arrivals::Bursts => (gap * BURST).min(time).mul_f64(random.unit()),
        };
        while at < time {
            let count = if arrivals == Arrivals::Bursts {
                BURST
            } else {
                1
            };
            faults.extend((0..count).map(|_| Fault { at, tenant }));
            at += match arrivals {
                Arrivals::Aligned => gap,
                Arrivals::Poisson => gap.mul_f64(random.exponential()),
                Arrivals::Bursts => gap * BURST,
            };
        }
    }
    faults.sort_by_key(|fault| fault.at);
    faults
}

/// A run under way.
struct Running<'a> {
    rig: &'a Rig,
    load: &'a Load,
    /// Requests by number, in the order of sending, with their times; those of the storm are only counted.
    sent: BTreeMap<u64, (u64, Instant)>,
    storming: u64,
    next_id: u64,
    latencies_ns: Vec<u64>,
}

/// Runs `load`; returns how long each of its faults took, without the storm's.
pub(super) fn run(rig: &Rig, load: &Load) -> Result<Vec<u64>, Broken> {
    let mut running = Running {
        rig,
        load,
        sent: BTreeMap::new(),
        storming: 0,
        next_id: 0,
        latencies_ns: Vec::new(),
    };
    let begun = Instant::now();
    let mut faults = load.faults.iter().peekable();
    let mut next_storm = begun;
    while let Some(next) = faults.peek() {
        let due = begun + next.at;
        let mut wake = due;
        if let Some(storm) = load.storm {
            if Instant::now() >= next_storm {
                running.storm(storm)?;
                next_storm += storm.every;
            }
            wake = wake.min(next_storm);
        }
        while let Some(fault) = faults.next_if(|fault| begun + fault.at <= Instant::now()) {
            running.fault(fault.tenant)?;
        }
        rig.kick();
        running.take_answers();
        running.sleep(wake)?;
        running.take_answers();
    }
    let end = Instant::now() + PATIENCE;
    while !running.sent.is_empty() || running.storming > 0 {
        if time_left(end).is_zero() {
            return Err("page requests are not answered".into());
        }
        running.sleep(end)?;
        running.take_answers();
    }
    Ok(running.latencies_ns)
}

/// Time that a wave may take before it is checked.
const STORM_LASTS: Duration = Duration::from_millis(1);

/// Numbers of the storm's requests have this bit.
const STORM: u64 = 1 << 63;

impl Running<'_> {
    fn fault(&mut self, tenant: usize) -> Result<(), Broken> {
        let sent_ns = self.rig.send(self.next_id, tenant, self.load.hold_us)?;
        self.sent.insert(self.next_id, (sent_ns, Instant::now()));
        self.next_id += 1;
        Ok(())
    }

    /// Sends the next wave, if the last one is answered.
    fn storm(&mut self, storm: Storm) -> Result<(), Broken> {
        if self.storming == 0 {
            for id in 0..storm.faults {
                self.rig.send(STORM | id, storm.tenant, 0)?;
            }
            self.storming = storm.faults;
        }
        Ok(())
    }

    /// Sleeps until `wake`, or an answer. Before the oldest fault can be answered there is no need to wake:
    /// else each answer to the storm would cost the device's CPU more than its fault.
    fn sleep(&self, wake: Instant) -> Result<(), Broken> {
        let hold = Duration::from_micros(self.load.hold_us.into());
        let oldest = self.sent.first_key_value();
        let first_answer = match oldest {
            Some((_, (_, sent))) => *sent + hold,
            None if self.storming > 0 => Instant::now() + STORM_LASTS,
            None => wake,
        };
        if first_answer > Instant::now() {
            std::thread::sleep(time_left(first_answer.min(wake)));
            return Ok(());
        }
        self.rig.sleep(time_left(wake))
    }

    fn take_answers(&mut self) {
        while let Some(id) = self.rig.answered() {
            match self.sent.remove(&id) {
                Some((sent_ns, _)) => self.latencies_ns.push(now_ns().saturating_sub(sent_ns)),
                None => self.storming = self.storming.saturating_sub(1),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_arrivals_has_the_rate_asked_for_in_the_order_of_time() {
        let time = Duration::from_secs(200);
        for arrivals in [Arrivals::Aligned, Arrivals::Poisson, Arrivals::Bursts] {
            let faults = faults(arrivals, 4, 10, time);
            let count = faults.len();
            assert!((7_600..=8_400).contains(&count), "{arrivals:?}: {count}");
            assert!(faults.is_sorted_by_key(|fault| fault.at));
            assert!((0..4).all(|tenant| faults.iter().any(|f| f.tenant == tenant)));
        }
        let aligned = faults(Arrivals::Aligned, 3, 10, Duration::from_millis(250));
        let instants: Vec<_> = aligned.iter().map(|fault| fault.at.as_millis()).collect();
        assert_eq!(instants, [0, 0, 0, 100, 100, 100, 200, 200, 200]);
    }
}
