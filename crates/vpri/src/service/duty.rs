// SPDX-License-Identifier: Apache-2.0
//! [`Duty`]: a page request that must be answered, as a value.
//!
//! The holder of a duty answers it, hands it on or keeps it. It cannot be
//! copied, and one that is dropped (by a panic, or with its waiters) answers
//! itself with a failure. So every request gets exactly one response.

use super::{account::Took, vm::TenantVm};
use crate::source::FaultSource;
use pagetide_addr::{PageRequest, PageResponse, ResponseCode, Tier};
use pagetide_gmem::FaultOutcome;
use pagetide_sys::clock::now_ns;
use std::sync::Arc;

/// See the module.
pub(super) struct Duty {
    request: PageRequest,
    source: Arc<dyn FaultSource>,
    taken_ns: u64,
    began_ns: Option<u64>,
    tier: Tier,
    /// The tenant in whose account it is open.
    tenant: Option<Arc<TenantVm>>,
    answered: bool,
}

impl Duty {
    /// A request that was just taken from `source`.
    pub(super) fn new(request: PageRequest, source: &Arc<dyn FaultSource>) -> Self {
        Self {
            request,
            source: Arc::clone(source),
            taken_ns: now_ns(),
            began_ns: None,
            tier: Tier::default(),
            tenant: None,
            answered: false,
        }
    }

    pub(super) fn request(&self) -> &PageRequest {
        &self.request
    }

    pub(super) fn source(&self) -> &dyn FaultSource {
        &*self.source
    }

    /// The tenant that it belongs to.
    pub(super) fn tenant(&self) -> Option<&Arc<TenantVm>> {
        self.tenant.as_ref()
    }

    /// Opens it in the account of `tenant`.
    pub(super) fn open_for(&mut self, tenant: &Arc<TenantVm>) {
        self.close_account(None);
        tenant.account.open(&self.request);
        self.tenant = Some(Arc::clone(tenant));
    }

    /// It no longer belongs to a tenant; its handling counts as not begun.
    pub(super) fn disown(&mut self) {
        self.close_account(None);
        self.began_ns = None;
    }

    /// Marks its handling as begun, if it is not yet.
    pub(super) fn begin(&mut self) {
        self.began_ns.get_or_insert_with(now_ns);
    }

    /// Its handling begins later, in another place.
    pub(super) fn put_off(&mut self) {
        self.began_ns = None;
    }

    /// Sets the tier from which the slowest of its pages comes.
    pub(super) fn set_tier(&mut self, tier: Tier) {
        self.tier = tier;
    }

    /// The tier from which they came at the last check.
    pub(super) fn tier(&self) -> Tier {
        self.tier
    }

    /// Answers it.
    pub(super) fn answer(self, outcome: FaultOutcome) {
        self.answer_overwrite(outcome, 0);
    }

    /// Answers it, and reports which pages were installed with the device's content.
    pub(super) fn answer_overwrite(mut self, outcome: FaultOutcome, installed: u64) {
        let code = match outcome {
            FaultOutcome::Present => ResponseCode::Success,
            FaultOutcome::OutOfRange => ResponseCode::InvalidRequest,
            FaultOutcome::Lost | FaultOutcome::Gone => ResponseCode::ResponseFailure,
        };
        self.respond(code, installed);
    }

    /// Leaves it unanswered: the service ends, and its device ends with it or asks again.
    pub(super) fn abandon(mut self) {
        self.disown();
        self.answered = true;
    }

    fn respond(&mut self, code: ResponseCode, installed: u64) {
        self.answered = true;
        let took = self.took(now_ns());
        self.close_account(Some(took));
        self.source.respond(PageResponse {
            tier: self.tier,
            installed,
            waited_ns: took.waited_ns,
            handling_ns: took.handling_ns,
            ..PageResponse::to(&self.request, code)
        });
    }

    fn took(&self, answered_ns: u64) -> Took {
        let sent_ns = match self.request.sent_ns {
            0 => self.taken_ns,
            sent_ns => sent_ns,
        };
        let began_ns = self.began_ns.unwrap_or(answered_ns);
        Took {
            waited_ns: began_ns.saturating_sub(sent_ns),
            handling_ns: answered_ns.saturating_sub(began_ns),
        }
    }

    fn close_account(&mut self, took: Option<Took>) {
        if let Some(tenant) = self.tenant.take() {
            tenant.account.close(took);
        }
    }
}

impl Drop for Duty {
    fn drop(&mut self) {
        if !self.answered {
            tracing::error!(request = ?self.request, "a page request was forgotten; it fails");
            self.respond(ResponseCode::ResponseFailure, 0);
        }
    }
}
