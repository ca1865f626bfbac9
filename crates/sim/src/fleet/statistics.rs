// SPDX-License-Identifier: Apache-2.0
//! Statistics of the synthetic guests, for comparison with what the paper says of production: DMA by the
//! analysis for real logs (VPRI 4.2, figures 9 to 11), and cold memory (1).

use super::{
    guest::GuestRecipe,
    production::ProductionGuest,
    stream::{GuestStream, PROLOGUE},
};
use crate::replay::{AccessStream, Actor, ReplayError};
use pagetide_addr::SECTION_BYTES;
use pagetide_trace::{AccessAnalysis, Analysis, AnalysisParams, SectionTouch};
use std::time::Duration;

/// Time between two counts of cold memory.
const COUNT_EVERY: Duration = Duration::from_secs(60);

/// Shares of a guest's memory that no CPU touched for so long: means over time.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct ColdShares(pub [f64; Self::AFTER_S.len()]);

impl ColdShares {
    /// The paper's intervals: 2, 5 and 7 minutes.
    pub const AFTER_S: [u64; 3] = [120, 300, 420];
}

/// The statistics of one guest.
#[derive(Clone, PartialEq, Debug)]
pub struct GuestStatistics {
    /// The DMA of its devices.
    pub dma: AccessAnalysis,
    /// Its cold memory.
    pub cold: ColdShares,
}

/// Counts of cold memory.
struct Cold {
    /// When CPUs touched each section last, and one second; 0 for never.
    touched_s: Vec<u64>,
    sums: [u64; ColdShares::AFTER_S.len()],
    counts: u64,
    next: Duration,
}

impl Cold {
    fn new(sections: u64) -> Self {
        let sections = usize::try_from(sections).unwrap_or(0);
        Self {
            touched_s: vec![0; sections],
            sums: [0; ColdShares::AFTER_S.len()],
            counts: 0,
            next: PROLOGUE,
        }
    }

    fn count_until(&mut self, now: Duration) {
        while self.next <= now {
            let now_s = self.next.as_secs();
            for (sum, after_s) in self.sums.iter_mut().zip(ColdShares::AFTER_S) {
                let is_cold = |last: &&u64| **last == 0 || now_s + 1 - **last >= after_s;
                *sum += self.touched_s.iter().filter(is_cold).count() as u64;
            }
            self.counts += 1;
            self.next += COUNT_EVERY;
        }
    }

    /// Of a guest with so many sections, of which the last were in use all the time.
    fn shares(&self, sections: u64) -> ColdShares {
        let all = super::random::number(self.counts.max(1) * sections);
        ColdShares(self.sums.map(|sum| super::random::number(sum) / all))
    }
}

/// What one guest does in the first `seconds` after its prologue. Accesses to one section within a second
/// count as one.
///
/// # Errors
/// None that a recipe can cause except by too many sections.
pub fn statistics(guest: &GuestRecipe, seconds: u64) -> Result<GuestStatistics, ReplayError> {
    let stream = GuestStream::new(guest, seconds);
    statistics_of(stream, guest.sections, guest.busy_sections(), seconds)
}

/// The same of a VM in production.
///
/// # Errors
/// As of [`statistics`].
pub fn production_statistics(
    guest: &ProductionGuest,
    seconds: u64,
) -> Result<GuestStatistics, ReplayError> {
    let stream = guest.stream(seconds);
    statistics_of(stream, guest.sections, guest.busy_sections(), seconds)
}

fn statistics_of(
    mut stream: GuestStream,
    sections: u64,
    busy_sections: u64,
    seconds: u64,
) -> Result<GuestStatistics, ReplayError> {
    let mut analysis = Analysis::new(AnalysisParams {
        memory_bytes: sections.checked_mul(SECTION_BYTES),
        ..AnalysisParams::default()
    });
    let mut cold = Cold::new(sections - busy_sections);
    while let Some(access) = stream.next()? {
        cold.count_until(access.at);
        let Actor::Device(device, service) = access.actor else {
            if let Some(touched_s) = cold.touched_s.get_mut(access.section.index()) {
                *touched_s = access.at.as_secs() + 1;
            }
            continue;
        };
        if access.at < PROLOGUE {
            continue;
        }
        analysis
            .touch(SectionTouch {
                at: access.at,
                device,
                service,
                section: access.section,
            })
            .map_err(|error| ReplayError::Asked(error.to_string()))?;
    }
    // A guest that sleeps touches nothing any more, and all of it is cold.
    cold.count_until(PROLOGUE + Duration::from_secs(seconds));
    Ok(GuestStatistics {
        dma: analysis.finish(),
        cold: cold.shares(sections),
    })
}

#[cfg(test)]
mod tests {
    use super::super::{Load, paper_fleet};
    use super::*;
    use pagetide_access_log::Service;

    /// The statistics of figure 10, from some storage-intensive guests of 12 GiB.
    #[test]
    fn disks_of_storage_guests_are_near_what_the_paper_saw() {
        let mut devices = Vec::new();
        let fleets = [1, 2].into_iter().flat_map(paper_fleet);
        let storage = fleets.filter(|guest| guest.load == Load::Storage);
        for guest in storage.step_by(4) {
            let guest = GuestRecipe {
                sections: 6_144,
                ..guest
            };
            devices.extend(statistics(&guest, 1_800).unwrap().dma.devices);
        }
        let disks = pagetide_trace::ServiceAnalysis::of(Service::Block, &devices);
        let footprint = disks.footprint_share.unwrap().mean;
        assert!((0.26..0.30).contains(&footprint), "{footprint}");
        let locality = disks.locality;
        let under_10 = locality.sections_under_10_share.unwrap();
        assert!((0.83..0.96).contains(&under_10), "{under_10}");
        let over_2 = locality.sections_over_2_share.unwrap();
        assert!((0.62..0.84).contains(&over_2), "{over_2}");
        let faults = locality.faults_under_10_share.unwrap();
        assert!(faults > 0.8, "{faults}");
        assert!(locality.faults_under_50_share.unwrap() > 0.99);
        let nics = pagetide_trace::ServiceAnalysis::of(Service::Network, &devices);
        let footprint = nics.footprint_share.unwrap();
        assert!(
            footprint.max < 0.06 && footprint.mean > 0.02,
            "{footprint:?}"
        );
    }

    /// The shares of cold memory of production (1), from all guests of one host, a sixteenth of their size.
    #[test]
    fn cold_memory_of_a_fleet_is_near_what_the_paper_saw() {
        let mut shares = [0.0; 3];
        for guest in paper_fleet(1) {
            let guest = GuestRecipe {
                sections: guest.sections / 16,
                ..guest
            };
            let cold = statistics(&guest, 1_800).unwrap().cold;
            for (sum, share) in shares.iter_mut().zip(cold.0) {
                *sum += share / 14.0;
            }
        }
        for (made, paper) in shares.into_iter().zip([0.45, 0.42, 0.39]) {
            assert!((made - paper).abs() < 0.025, "{shares:?}");
        }
    }

    /// The same of VMs in production, most of which do nothing in the time looked at.
    #[test]
    fn what_a_sleeping_vm_does_not_use_is_cold_also_if_it_does_nothing_at_all() {
        let fleet = super::super::Fleet {
            vm_sections: Some(1_024),
            sleeping_share: 1.0,
            ..Default::default()
        };
        let hosts = fleet.hosts(1, 20);
        let guests = &hosts[0].guests;
        for guest in guests {
            let cold = production_statistics(guest, 1_800).unwrap().cold;
            let not_busy = 1_024 - guest.busy_sections();
            let share = super::super::random::number(not_busy) / 1_024.0;
            for made in cold.0 {
                assert!(made <= share && made > share - 0.03, "{made} of {share}");
            }
        }
    }
}
