// SPDX-License-Identifier: Apache-2.0
//! One run: a configuration, a trace, a result.

use pagetide_trace::EventSource;

use crate::config::{Completion, Config, Flavour, Replacement};
use crate::error::SimError;
use crate::hypersio::{Hypersio, ProgramFifo, ProgramHeap};
use crate::machine::Machine;
use crate::next_use::NextUses;
use crate::observe::{CallbackObserver, Nobody, Observer, StepRecord};
use crate::outcome::Outcome;
use crate::paper::{Paper, PaperOfMany};
use crate::policy::OwnPolicies;

/// A trace to be run.
pub struct TraceInput<'a> {
    /// Its events.
    pub events: &'a mut dyn EventSource,
    /// Its future; needed if a cache is replaced by the oracle.
    pub next_uses: Option<&'a NextUses>,
}

/// Runs `config` over a trace.
///
/// # Errors
/// If the configuration is impossible, the trace is broken, or an oracle lacks
/// the future.
pub fn run(config: &Config, trace: TraceInput<'_>) -> Result<Outcome, SimError> {
    dispatch(config, trace, OwnPolicies::default(), Nobody)
}

/// The same with policies of one's own.
///
/// # Errors
/// As [`run`], and if a policy is for a part that the configuration does not have, or does what it may not.
pub fn run_own(
    config: &Config,
    trace: TraceInput<'_>,
    own: OwnPolicies,
) -> Result<Outcome, SimError> {
    dispatch(config, trace, own, Nobody)
}

/// The same, with `told` called for every step of a request.
///
/// # Errors
/// As [`run`].
pub fn run_told(
    config: &Config,
    trace: TraceInput<'_>,
    told: &mut dyn FnMut(StepRecord),
) -> Result<Outcome, SimError> {
    dispatch(
        config,
        trace,
        OwnPolicies::default(),
        CallbackObserver(told),
    )
}

fn dispatch<O: Observer>(
    config: &Config,
    trace: TraceInput<'_>,
    own: OwnPolicies,
    observer: O,
) -> Result<Outcome, SimError> {
    config.check()?;
    if config.needs_future() && trace.next_uses.is_none() {
        return Err(crate::error::impossible(
            "replacement",
            "oracle",
            "the oracle needs the trace's future, which was not given",
        ));
    }
    let TraceInput { events, next_uses } = trace;
    match config.flavour {
        Flavour::Hypersio => match config.completion {
            Completion::OutOfOrder => {
                Machine::<Hypersio<ProgramHeap>, O>::new(config, events, next_uses, observer)
                    .with_own(own)?
                    .run()
            }
            Completion::InOrder => {
                Machine::<Hypersio<ProgramFifo>, O>::new(config, events, next_uses, observer)
                    .with_own(own)?
                    .run()
            }
        },
        Flavour::Paper if config.devices.count > 1 => {
            Machine::<PaperOfMany, O>::new(config, events, next_uses, observer)
                .with_own(own)?
                .run()
        }
        Flavour::Paper => Machine::<Paper, O>::new(config, events, next_uses, observer)
            .with_own(own)?
            .run(),
    }
}

impl Config {
    /// True if some cache is replaced by the oracle: the run needs [`NextUses`].
    #[must_use]
    pub fn needs_future(&self) -> bool {
        [
            &self.devtlb,
            &self.iotlb,
            &self.l1,
            &self.l2,
            &self.l3,
            &self.l4,
        ]
        .iter()
        .any(|cache| cache.entries > 0 && cache.replacement == Replacement::Oracle)
    }
}
