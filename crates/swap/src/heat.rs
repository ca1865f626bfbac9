// SPDX-License-Identifier: Apache-2.0
//! [`Heat`]: what is known of how hot a VM's memory is, how old that is, and what it has cost.
//!
//! [`pagetide_policy::sampling`] decides which pages are sampled, and how many sections at a time;
//! this module keeps the account.

use pagetide_policy::sampling::{COST_PPM, Cost, Look, Pace, Sampled, Sampler, Want};
use std::time::Duration;

/// Sections that are sampled together: some hundred pages, whose unmapping locks the VMM's address
/// space for less than a millisecond.
pub(crate) const SAMPLE_BATCH: u64 = 64;

/// What learning the heat may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeatCost {
    /// Share of the VMM's CPU time that its guest may lose by it, in millionths; and the same share
    /// of one of our CPUs.
    pub share_ppm: u32,
    /// What the guest pays for a page that it uses again; zero if samples unmap no pages.
    pub refault: Duration,
}

impl Default for HeatCost {
    fn default() -> Self {
        Self {
            share_ppm: COST_PPM,
            refault: Duration::from_micros(2),
        }
    }
}

/// What is known, and what it has cost since the VM was attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeatReport {
    /// Sections that were sampled.
    pub sampled_sections: u64,
    /// Pages that were unmapped for that.
    pub unmapped_pages: u64,
    /// Of these, pages that the guest used again, and paid for.
    pub refaulted_pages: u64,
    /// What the guest has lost: the cost of those pages, and the time that its address space was
    /// locked.
    pub guest_cost: Duration,
    /// Our own time.
    pub own_cost: Duration,
    /// Sweeps that covered every section.
    pub sweeps: u64,
    /// When the last of them ended: by the clock of [`crate::Reclaimer`].
    pub swept_at: Option<Duration>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Heat {
    pub sampler: Sampler,
    pace: Pace,
    refault: Duration,
    report: HeatReport,
}

impl Heat {
    pub fn new(cost: HeatCost) -> Self {
        Self {
            // Any seed will do: the choice need not be unpredictable to anyone.
            sampler: Sampler::new(0x5eed),
            pace: Pace::new(cost.share_ppm),
            refault: cost.refault,
            report: HeatReport::default(),
        }
    }

    pub fn report(&self) -> HeatReport {
        self.report
    }

    /// From now on a sweep takes at least `scan` while cold sections are wanted.
    pub fn set_scan(&mut self, scan: Duration) {
        self.pace.set_scan(scan);
    }

    /// Number of sections, out of `of`, that may be sampled now.
    pub fn sections(&mut self, now: Duration, cpu: Duration, of: u64, want: Want) -> u64 {
        self.pace.sections(now, cpu, of, want)
    }

    /// Accounts for a sample of `sections` sections that took `own` of our CPU time.
    pub fn sampled(&mut self, looks: &[Look], sampled: &Sampled, sections: u64, own: Duration) {
        let mut back = 0;
        for (look, touched) in looks.iter().zip(&sampled.touched) {
            if !touched.cpu.is_empty() || !touched.dma.is_empty() {
                self.sampler.touched(look.section);
            }
            // In the first sample, nothing had been unmapped before.
            if look.asked != look.next && !self.refault.is_zero() {
                back += touched.cpu.len();
            }
        }
        let refaults = self
            .refault
            .saturating_mul(u32::try_from(back).unwrap_or(u32::MAX));
        let cost = Cost {
            guest: refaults + sampled.unmapping,
            own,
        };
        self.pace.spend(sections, cost);
        let report = &mut self.report;
        report.sampled_sections += sections;
        report.unmapped_pages += sampled.unmapped_pages;
        report.refaulted_pages += back;
        report.guest_cost += cost.guest;
        report.own_cost += cost.own;
    }

    /// A sweep is over.
    pub fn swept(&mut self, now: Duration) {
        self.report.sweeps += 1;
        self.report.swept_at = Some(now);
    }
}
