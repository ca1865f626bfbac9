// SPDX-License-Identifier: Apache-2.0
//! Statistics of the synthetic guests' DMA, by the analysis for real logs: for comparison with the paper's
//! data from production (VPRI 4.2, figures 9 to 11).

use super::{
    guest::GuestRecipe,
    stream::{GuestStream, PROLOGUE},
};
use crate::replay::{AccessStream, Actor, ReplayError};
use pagetide_addr::SECTION_BYTES;
use pagetide_trace::{AccessAnalysis, Analysis, AnalysisParams, SectionTouch};

/// The DMA of one guest in the first `seconds` after its prologue. Accesses to one section within a second
/// count as one.
///
/// # Errors
/// None that a recipe can cause except by too many sections.
pub fn statistics(guest: &GuestRecipe, seconds: u64) -> Result<AccessAnalysis, ReplayError> {
    let mut analysis = Analysis::new(AnalysisParams {
        memory_bytes: guest.sections.checked_mul(SECTION_BYTES),
        ..AnalysisParams::default()
    });
    let mut stream = GuestStream::new(guest, seconds);
    while let Some(access) = stream.next()? {
        if access.at < PROLOGUE {
            continue;
        }
        let Actor::Device(device, service) = access.actor else {
            continue;
        };
        analysis
            .touch(SectionTouch {
                at: access.at,
                device,
                service,
                section: access.section,
            })
            .map_err(|error| ReplayError::Asked(error.to_string()))?;
    }
    Ok(analysis.finish())
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
        for guest in [1, 2]
            .into_iter()
            .flat_map(|seed| paper_fleet(seed).into_iter().skip(11))
        {
            assert_eq!(guest.load, Load::Storage);
            let guest = GuestRecipe {
                sections: 6_144,
                ..guest
            };
            devices.extend(statistics(&guest, 1_800).unwrap().devices);
        }
        let disks = pagetide_trace::ServiceAnalysis::of(Service::Block, &devices);
        let footprint = disks.footprint_share.unwrap().mean;
        assert!((0.24..0.32).contains(&footprint), "{footprint}");
        let locality = disks.locality;
        let under_10 = locality.sections_under_10_share.unwrap();
        assert!((0.82..0.93).contains(&under_10), "{under_10}");
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
}
