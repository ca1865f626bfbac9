// SPDX-License-Identifier: Apache-2.0
//! Settings of I/O page faults: memory that a device may find absent, and what happens then (VPRI 2.1, 3.2, 5.2
//! and 6.1). The model is described in `crate::faults`.

use serde::{Deserialize, Serialize};

use super::LATENCY_NS_MAX;
use crate::error::{SimError, impossible};
use crate::faults::{FAULT_NS_MAX, ServiceSamples};

/// Most page requests that may be outstanding; PCIe allows as many as a device asks for, and devices ask for
/// some hundred.
pub const PAGE_REQUESTS_MAX: u32 = 1 << 16;
/// Most requests that may be parked, half of all that may be under way.
pub const PARKED_MAX: u32 = 1 << 19;
/// Most CPUs of handlers.
pub const HANDLER_CPUS_MAX: u32 = 1 << 12;
/// All, in parts per million.
pub const PPM: u32 = 1_000_000;

/// How a device gets along with absent memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultDiscipline {
    /// It never meets any: all memory is pinned.
    #[default]
    Pinned,
    /// It looks into a bitmap of present pages before each DMA, and asks the host for absent ones by a queue of
    /// its own (VPRI 5).
    Vpri,
    /// It learns from the translation that a page is absent, sends a page request, and has the page translated
    /// again (PCIe's ATS and PRI, VPRI 2.1).
    AtsPri,
    /// Its engine is software that touches the page, and stands still until the page is there.
    Touch,
}

/// What becomes of a queue one of whose requests waits for a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnFault {
    /// It pauses: what comes after the request waits behind it (VPRI 5.2).
    #[default]
    Pause,
    /// It goes on, and the request ends out of order (VPRI 8).
    OutOfOrder,
}

/// What memory is absent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Absent {
    /// A constant share of the pages, which ones at random.
    #[default]
    Share,
    /// The pages used least recently, beyond a limit.
    Lru,
    /// What the page-out events of the trace name.
    Events,
}

/// Who handles page requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Handlers {
    /// One worker, in the order of arrival.
    Serialized,
    /// A worker on each CPU; a tenant's requests go to its CPU (VPRI 6.1).
    #[default]
    Affined,
}

/// I/O page faults.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FaultConfig {
    /// How the device gets along with absent memory; *pinned*: there is none, and nothing else here matters.
    pub discipline: FaultDiscipline,
    /// What becomes of the faulting request's queue (not with *touch*, whose engine stops as a whole).
    pub on_fault: OnFault,
    /// What memory is absent.
    pub absent: Absent,
    /// Absent pages of a million (*share* only).
    pub absent_ppm: u32,
    /// Most pages present (*lru* only), all tenants' together, of whatever size.
    pub limit_pages: u32,
    /// Tenants whose memory may be absent, the first ones of the trace; 0: all.
    pub tenants: u32,
    /// A look into the bitmap (*vpri* only), while the translation is under way.
    pub lookup_ns: u64,
    /// Page requests outstanding at a time; further ones wait in the device.
    pub queue_entries: u32,
    /// Requests that the device can keep while their queue waits for a page; with so many it takes no packet
    /// from the link.
    pub parked_requests: u32,
    /// Who handles page requests.
    pub handlers: Handlers,
    /// CPUs of affined handlers; tenant *n* has CPU *n* modulo these.
    pub cpus: u32,
    /// From a page request's arrival at the host until its handling begins, if the handler is free.
    pub pre_ns: u64,
    /// Handling, until the page is present.
    pub handling_ns: u64,
    /// From there until the answer leaves the host.
    pub post_ns: u64,
    /// File with measured times to be drawn from, in place of the three: the output of
    /// `bench iopf-rtt --json`.
    pub samples: String,
    /// Which of its samples: a way and a case, such as `vpri_in_process_idle_fill`.
    pub samples_of: String,
    /// Content of that file; filled in when it is read.
    pub samples_sha256: String,
    /// The times.
    #[serde(skip)]
    pub times: ServiceSamples,
}

impl Default for FaultConfig {
    fn default() -> Self {
        Self {
            discipline: FaultDiscipline::Pinned,
            on_fault: OnFault::Pause,
            absent: Absent::Share,
            absent_ppm: 0,
            limit_pages: 0,
            tenants: 0,
            // VPRI table 2: the mean.
            lookup_ns: 69,
            queue_entries: 128,
            parked_requests: 4096,
            handlers: Handlers::Affined,
            cpus: 16,
            // VPRI 3.2: 10 to 40 us before and after the handling, on an idle host, crossings included; the
            // handling of a fast tier, 20 us.
            pre_ns: 15_000,
            handling_ns: 20_000,
            post_ns: 5_000,
            samples: String::new(),
            samples_of: String::new(),
            samples_sha256: String::new(),
            times: ServiceSamples::default(),
        }
    }
}

impl FaultConfig {
    /// Checks for parameters that no run can have.
    pub(super) fn check(&self) -> Result<(), SimError> {
        for (name, value, min, max) in [
            ("faults.absent_ppm", self.absent_ppm, 0, PPM),
            (
                "faults.queue_entries",
                self.queue_entries,
                1,
                PAGE_REQUESTS_MAX,
            ),
            (
                "faults.parked_requests",
                self.parked_requests,
                1,
                PARKED_MAX,
            ),
            ("faults.cpus", self.cpus, 1, HANDLER_CPUS_MAX),
        ] {
            if !(min..=max).contains(&value) {
                let reason = format!("{min} to {max} can be modelled");
                return Err(impossible(name, value, &reason));
            }
        }
        for (name, value, max) in [
            ("faults.lookup_ns", self.lookup_ns, LATENCY_NS_MAX),
            ("faults.pre_ns", self.pre_ns, FAULT_NS_MAX),
            ("faults.handling_ns", self.handling_ns, FAULT_NS_MAX),
            ("faults.post_ns", self.post_ns, FAULT_NS_MAX),
        ] {
            if value > max {
                let reason = format!("at most {max} can be modelled");
                return Err(impossible(name, value, &reason));
            }
        }
        if self.discipline == FaultDiscipline::Pinned {
            return Ok(());
        }
        if self.absent == Absent::Lru && self.limit_pages == 0 {
            return Err(impossible(
                "faults.limit_pages",
                0,
                "a memory of no pages serves no DMA; give a limit of 1 at least",
            ));
        }
        if !self.samples.is_empty() && self.times.is_empty() {
            return Err(impossible(
                "faults.samples",
                &self.samples,
                "the file was not read; a study reads it",
            ));
        }
        Ok(())
    }
}
