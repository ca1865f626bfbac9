// SPDX-License-Identifier: Apache-2.0
//! Performance model of I/O address translation for a thousand tenants
//! (HyperTRIO III and IV-C).
//!
//! A [`Config`] and a trace go in, an [`Outcome`] comes out: [`run()`]. The
//! pipeline is one ([`machine`]); the paper's text and the authors' public
//! program are two sets of rules for it ([`flavour`]).

mod cache;
pub mod config;
mod context;
mod error;
mod fault_study;
mod faults;
pub mod figures;
pub mod findings;
mod flavour;
pub mod fleet;
mod hardware_study;
mod hints;
mod host;
mod hypersio;
mod latency;
mod link;
mod machine;
mod next_use;
mod observe;
mod outcome;
mod paper;
pub mod policy;
mod prefetch;
mod recorded_study;
pub mod replay;
mod request;
mod run;
mod run_all;
mod stop;
pub mod study;
mod table;
mod tenants;
mod ties;
pub mod verify;

pub use config::Config;
pub use error::SimError;
pub use fault_study::{FaultStudy, run_fault_study, storm_mean_ms};
pub use faults::{SamplesError, ServiceSamples, ServiceTime, parse_samples, read_samples};
pub use hardware_study::{SourcedValue, run_hardware_study, sources};
pub use next_use::NextUses;
pub use observe::{Step, StepRecord};
pub use outcome::{
    AllCounts, CacheCounts, DeviceOutcome, FaultOutcome, LatencySummary, Outcome, PrefetchCounts,
    TenantOutcome,
};
pub use recorded_study::{RecordedLogs, run_recorded_study};
pub use request::DOMAINS_MAX;
pub use run::{TraceInput, run, run_own, run_told};
pub use stop::{Stop, UntilStopped};
