// SPDX-License-Identifier: Apache-2.0
//! Which tracker this host has, and what it may cost.

use super::failure::failed;
use crate::control::ControlError;
use crate::percent::Percent;
use crate::settings::TrackerChoice;
use pagetide_addr::{FileKey, FilePage, FileRange, Marks};
use pagetide_policy::tracker::{AccessTracker, TrackerError};
use pagetide_swap::HeatCost;
use pagetide_sys::{page_idle::IdleBitmap, pagemap::PagemapWay};
use pagetide_vmm::layout::LiveLayout;
use pagetide_vmm::process::VmmProcess;
use pagetide_vmm::tracker::{DmaLook, IdlePages, UnmapAndLook, WholeSections, idle};
use pagetide_vpri::DmaMmu;
use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

/// How samples are taken on this host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SampleMethod {
    Unmap,
    Idle,
    Whole,
}

impl SampleMethod {
    /// Chooses the way by the setting.
    ///
    /// # Errors
    /// The kernel does not support it.
    pub(super) fn choose(choice: TrackerChoice) -> Result<Self, ControlError> {
        let (way, why) = decide(choice, idle::is_available)?;
        tracing::info!(
            tracker = way.name(),
            page_tables = PagemapWay::of_this_kernel().name(),
            why,
            "tracker chosen"
        );
        Ok(way)
    }

    /// Its name.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Unmap => "unmap-and-look, sampled",
            Self::Idle => "idle page tracking, sampled",
            Self::Whole => "unmap-and-look at whole sections",
        }
    }

    /// The tracker of a VM.
    pub(super) fn tracker(
        self,
        vmm: &VmmProcess,
        layout: Arc<LiveLayout>,
        mmu: &Arc<DmaMmu>,
    ) -> Result<Arc<dyn AccessTracker>, TrackerError> {
        let devices = Arc::new(Dma(Arc::clone(mmu)));
        let whole = UnmapAndLook::new(vmm, layout, devices)?;
        Ok(match self {
            Self::Unmap => Arc::new(whole),
            Self::Idle => Arc::new(IdlePages::new(whole, IdleBitmap::open()?)?),
            Self::Whole => Arc::new(WholeSections::new(whole)),
        })
    }
}

/// The way to take, and why.
fn decide(
    choice: TrackerChoice,
    idle: impl Fn() -> Result<(), String>,
) -> Result<(SampleMethod, String), ControlError> {
    match choice {
        TrackerChoice::Unmap => Ok((SampleMethod::Unmap, "it is set".to_owned())),
        TrackerChoice::Whole => Ok((SampleMethod::Whole, "it is set, for comparison".to_owned())),
        TrackerChoice::Idle => match idle() {
            Ok(()) => Ok((SampleMethod::Idle, "it is set".to_owned())),
            Err(reason) => Err(failed(format!(
                "the setting tracker is idle, and {reason}; auto or unmap works on every kernel"
            ))),
        },
        TrackerChoice::Auto => Ok(match idle() {
            Ok(()) => (
                SampleMethod::Idle,
                "its samples cost the guest no faults".to_owned(),
            ),
            Err(reason) => (SampleMethod::Unmap, reason),
        }),
    }
}

/// DMA accesses of the devices of a VM.
pub(super) struct Dma(pub(super) Arc<DmaMmu>);

impl DmaLook for Dma {
    fn touched(
        &self,
        file: FileKey,
        pages: FileRange,
        marks: Marks,
        visit: &mut dyn FnMut(FilePage),
    ) -> Result<(), String> {
        let domains = self.0.domains();
        let Some(domain) = domains.iter().find(|domain| domain.key() == file) else {
            return Ok(());
        };
        domain
            .touched(pages, marks, visit)
            .map_err(|error| error.to_string())
    }
}

/// What a minor fault costs on this host; measured at the first call only.
pub(super) fn refault() -> Duration {
    static MEASURED: OnceLock<Duration> = OnceLock::new();
    *MEASURED.get_or_init(|| {
        pagetide_vmm::tracker::refault_cost().unwrap_or_else(|error| {
            tracing::warn!(%error, "what a small fault costs cannot be measured; 2 us are assumed");
            HeatCost::default().refault
        })
    })
}

/// How much heat tracking may cost a VM, with the cost of a minor fault on this host.
pub(super) fn heat_cost(way: SampleMethod, share: Percent) -> HeatCost {
    let refault = match way {
        SampleMethod::Unmap | SampleMethod::Whole => refault(),
        // Samples unmap nothing.
        SampleMethod::Idle => Duration::ZERO,
    };
    tracing::info!(
        tracker = way.name(),
        refault_ns = refault.as_nanos(),
        cost = %share,
        "heat is estimated from samples"
    );
    HeatCost {
        share_ppm: share.ppm(),
        refault,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tracker_is_the_one_that_is_set_or_the_cheapest_there_is() {
        let there = || Ok(());
        let absent = || Err("this kernel has none".to_owned());
        let way = |choice, idle: &dyn Fn() -> Result<(), String>| {
            decide(choice, idle).map(|(way, why)| (way, why.contains("kernel has none")))
        };
        let unmap = Some((SampleMethod::Unmap, false));
        assert_eq!(way(TrackerChoice::Unmap, &there).ok(), unmap);
        assert_eq!(way(TrackerChoice::Unmap, &absent).ok(), unmap);
        assert_eq!(
            way(TrackerChoice::Whole, &absent).ok(),
            Some((SampleMethod::Whole, false))
        );
        assert_eq!(
            way(TrackerChoice::Idle, &there).ok(),
            Some((SampleMethod::Idle, false))
        );
        assert_eq!(
            way(TrackerChoice::Auto, &there).ok(),
            Some((SampleMethod::Idle, false))
        );
        assert_eq!(
            way(TrackerChoice::Auto, &absent).ok(),
            Some((SampleMethod::Unmap, true))
        );
        let refused = decide(TrackerChoice::Idle, absent).unwrap_err().to_string();
        assert!(refused.contains("this kernel has none"), "{refused}");
    }
}
