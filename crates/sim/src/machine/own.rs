// SPDX-License-Identifier: Apache-2.0
//! Policies of the caller's own in the pipeline: where they go, and what they may not do.

use super::{DeviceSet as _, Machine};
use crate::cache::Cache;
use crate::error::SimError;
use crate::flavour::{Flavour, TranslationAgent as _};
use crate::observe::Observer;
use crate::policy::prefetch::{AnyPrefetcher, Prefetcher as _};
use crate::policy::{OwnPolicies, Page, ReplacementPolicy};
use crate::prefetch::PrefetchUnit;
use crate::request::DOMAINS_MAX;
use pagetide_trace::IOVA_BITS;

/// Gives `cache` a policy, if there is one for it.
///
/// # Errors
/// If there is no such cache.
pub(crate) fn give(
    cache: &mut Option<Cache>,
    name: &'static str,
    policy: Option<Box<dyn ReplacementPolicy>>,
) -> Result<(), SimError> {
    match (policy, cache) {
        (None, _) => Ok(()),
        (Some(policy), Some(cache)) => {
            cache.set_policy(policy);
            Ok(())
        }
        (Some(_), None) => Err(no_part(name)),
    }
}

/// The error for a policy of a part that this configuration or flavour does not have.
pub(crate) fn no_part(name: &'static str) -> SimError {
    wrong(
        name,
        "the configuration has no such part, or the flavour none".to_owned(),
    )
}

fn wrong(part: &'static str, reason: String) -> SimError {
    SimError::Policy { part, reason }
}

impl<F: Flavour, O: Observer> Machine<'_, F, O> {
    /// The same with the caller's own policies.
    ///
    /// # Errors
    /// If one is for a part that does not exist.
    pub(crate) fn with_own(mut self, mut own: OwnPolicies) -> Result<Self, SimError> {
        self.has_own = !own.is_empty();
        self.agent.take_policies(&mut own)?;
        let is_for_device =
            own.devtlb.is_some() || own.predictor.is_some() || own.prefetcher.is_some();
        if is_for_device && self.devices.count() > 1 {
            let reason = "a policy of a device is for one device, and there are several";
            let name = match own.devtlb {
                Some(_) => "devtlb",
                None => "prefetch",
            };
            return Err(wrong(name, reason.to_owned()));
        }
        let device = self.devices.get_mut(0);
        give(&mut device.devtlb, "devtlb", own.devtlb.take())?;
        if (own.predictor.is_some() || own.prefetcher.is_some()) && device.prefetch.is_none() {
            return Err(no_part("prefetch"));
        }
        if let Some(predictor) = own.predictor {
            let unit = PrefetchUnit::with(&self.config.prefetch, predictor);
            device.prefetch = Some(AnyPrefetcher::OwnPredictor(unit));
        }
        if let Some(prefetcher) = own.prefetcher {
            device.prefetch = Some(AnyPrefetcher::Own(prefetcher));
        }
        Ok(self)
    }

    /// Checks that no policy of the caller's has failed.
    ///
    /// # Errors
    /// The first failure.
    #[cold]
    pub(super) fn check_own(&mut self) -> Result<(), SimError> {
        // Policies of a device are for one device.
        let device = self.devices.get_mut(0);
        if let Some(devtlb) = &mut device.devtlb
            && let Some(reason) = devtlb.failure()
        {
            return Err(wrong("devtlb", reason));
        }
        if let Some((part, reason)) = self.agent.failure() {
            return Err(wrong(part, reason));
        }
        if let Some(prefetch) = &mut self.devices.get_mut(0).prefetch
            && let Some(reason) = prefetch.failure()
        {
            return Err(wrong("prefetch", reason));
        }
        if let Some(page) = self.bad_guess {
            return Err(wrong(
                "prefetch",
                format!("no request can be for the page it has guessed: {page:?}"),
            ));
        }
        Ok(())
    }

    /// Drops guesses that no request can be for, and notes one.
    #[cold]
    pub(super) fn sift_guesses(&mut self) {
        let tenants = self.tenants.tallies.len();
        let bad_guess = &mut self.bad_guess;
        self.guesses.retain(|page: &Page| {
            let is_page = [12, 21, 30].contains(&page.shift) && page.iova >> IOVA_BITS == 0;
            let is_known = (page.tenant as usize) < tenants && page.domain < DOMAINS_MAX;
            if !(is_page && is_known) {
                *bad_guess = Some(*page);
            }
            is_page && is_known
        });
    }
}
