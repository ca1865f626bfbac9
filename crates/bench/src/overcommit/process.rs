// SPDX-License-Identifier: Apache-2.0
//! VMs that serve requests, as the bench controls them.

use super::{
    guest::{Answer, Order, RequestGuestOptions, Served},
    vms::{Beside, Vms, while_measuring},
};
use crate::{
    harness::{figures::to_f64, latencies::Latencies},
    orders::{Ordered, vmm_program},
};
use clap::ValueEnum as _;
use std::{path::Path, process::Command, time::Duration};

/// Running VMs; ended on drop.
pub(super) struct Guests(Vec<Ordered>);

impl Guests {
    /// Starts one for each of `options`, and waits until all serve requests. Their program goes into `dir`.
    pub(super) fn start(
        dir: &Path,
        options: impl IntoIterator<Item = RequestGuestOptions>,
    ) -> Result<Self, String> {
        let mut guests = Vec::new();
        for options in options {
            guests.push(start(dir, &options)?);
        }
        let mut guests = Self(guests);
        for (vm, answer) in guests.answers()?.into_iter().enumerate() {
            if answer != Answer::Ready {
                return Err(format!("VM {vm} began with {answer:?}"));
            }
        }
        Ok(guests)
    }

    fn order_all(&mut self, order: &Order) -> Result<(), String> {
        self.0.iter_mut().try_for_each(|guest| guest.order(order))
    }

    fn answers(&mut self) -> Result<Vec<Answer>, String> {
        self.0.iter_mut().map(answer).collect()
    }

    /// Makes one use another part of its RAM, from now on.
    pub(super) fn resize(&mut self, vm: usize, used_permille: u32) -> Result<(), String> {
        self.0[vm].order(&Order::Resize { used_permille })?;
        done(answer(&mut self.0[vm])?)
    }
}

impl Vms for Guests {
    fn pids(&self) -> Vec<u32> {
        self.0.iter().map(Ordered::pid).collect()
    }

    fn measure(&mut self, time: Duration, beside: &mut Beside<'_>) -> Result<Vec<Served>, String> {
        let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.order_all(&Order::Measure { ms })?;
        while_measuring(time, beside)?;
        let served = self.answers()?.into_iter().map(|answer| match answer {
            Answer::Served(served) => Ok(served),
            other => Err(format!("a VM answered {other:?} when asked to measure")),
        });
        served.collect()
    }

    fn touch_all(&mut self) -> Result<(), String> {
        self.order_all(&Order::TouchAll)?;
        self.answers()?.into_iter().try_for_each(done)
    }

    fn verify_all(&mut self) -> Result<(), String> {
        self.order_all(&Order::VerifyAll)?;
        self.answers()?.into_iter().try_for_each(done)
    }
}

fn start(dir: &Path, options: &RequestGuestOptions) -> Result<Ordered, String> {
    let choice = options.choice.to_possible_value();
    let mut command = Command::new(vmm_program(dir)?);
    command
        .args(["bench-part", "request-guest"])
        .args(["--sections", &options.sections.to_string()])
        .args(["--cpu", &options.cpu.to_string()])
        .args(["--used-permille", &options.used_permille.to_string()])
        .args([
            "--choice",
            choice.as_ref().map_or("", |name| name.get_name()),
        ])
        .args(["--moves-permille", &options.moves_permille.to_string()])
        .args(["--seed", &options.seed.to_string()]);
    if let Some(rate) = options.rate {
        command.args(["--rate", &rate.to_string()]);
    }
    if let Some(group) = &options.group {
        command.arg("--group").arg(group);
    }
    Ordered::start(&mut command)
}

fn answer(guest: &mut Ordered) -> Result<Answer, String> {
    match guest.answer()? {
        Answer::Failed { reason } => Err(format!("a VM: {reason}")),
        answer => Ok(answer),
    }
}

fn done(answer: Answer) -> Result<(), String> {
    match answer {
        Answer::Done => Ok(()),
        other => Err(format!("a VM answered {other:?}")),
    }
}

/// What VMs have served together.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Requests {
    /// Requests a second, all VMs together.
    pub per_s: f64,
    /// The time of each.
    pub times: Latencies,
}

impl Requests {
    /// Of all VMs.
    pub(super) fn of(served: &[Served]) -> Self {
        let per_s = |served: &Served| to_f64(served.requests) * 1e9 / to_f64(served.wall_ns.max(1));
        Self {
            per_s: served.iter().map(per_s).sum(),
            times: served
                .iter()
                .flat_map(|served| served.ns.iter().copied())
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_all_vms_are_added_up_each_over_its_own_time() {
        let of = |requests, wall_ns, ns: &[u32]| Served {
            requests,
            wall_ns,
            ns: ns.to_vec(),
        };
        let all = Requests::of(&[of(10, 1_000_000_000, &[5, 7]), of(30, 2_000_000_000, &[1])]);
        assert!((all.per_s - 25.0).abs() < 1e-9);
        assert_eq!((all.times.count(), all.times.ns(1000)), (3, 7));
    }
}
