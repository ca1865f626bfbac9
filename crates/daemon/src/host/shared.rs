// SPDX-License-Identifier: Apache-2.0
//! [`Shared`]: what all VMs of the daemon share.

use super::{budget::Budget, janitor_bell::JanitorBell, tracker::SampleMethod};
use crate::protection::{ProtectorChoice, feed::Feed};
use pagetide_policy::{set_times::SetTimes, swap_in::Together};
use pagetide_swap::{
    HeatCost, PoolCap, Room, SlowTiers, scheduled::HostScheduler, store::PoolTiers,
};
use pagetide_vpri::{FaultService, IoSpaces};
use std::{sync::Arc, time::Duration};

/// How long a process may take to end after the first sign of its end: its memory is freed first, which
/// takes a while for a large VMM.
pub(super) const ENDING_WAIT: Duration = Duration::from_secs(2);

/// What all VMs of the daemon share.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) service: Arc<FaultService>,
    pub(super) spaces: Arc<dyn IoSpaces>,
    pub(super) janitor: JanitorBell,
    pub(super) reader_poll_us: u64,
    /// Most pages that are read ahead with a vCPU's fault (see `pagetide bench fault`).
    pub(super) neighbours_max: u32,
    /// Feeds policies with records of DMA accesses.
    pub(super) feed: Arc<Feed>,
    /// The initial policy of a VM.
    pub(super) protector: ProtectorChoice,
    /// What the memory cgroup leaves for pools.
    pub(super) room: Arc<Room>,
    /// What all pools may take together.
    pub(super) pool_cap: Arc<PoolCap>,
    /// How a VM's heat is measured.
    pub(super) tracker: SampleMethod,
    /// Most threads that evict from a VM beside its reclaim thread.
    pub(super) evict_helpers: u64,
    /// How much heat tracking may cost.
    pub(super) heat_cost: HeatCost,
    /// How long a section stays in each of the hot and cold sets.
    pub(super) set_times: SetTimes,
    /// Whether a fault brings back what was evicted with its page.
    pub(super) together: Together,
    /// In which forms pages are kept.
    pub(super) tiers: Arc<PoolTiers>,
    /// How long a section is left alone until its pages are demoted.
    pub(super) demote_after: Duration,
    /// The tiers outside memory.
    pub(super) slow: Arc<SlowTiers>,
    /// How long a section is left alone until its stored pages go there.
    pub(super) sink_after: Duration,
    /// When background work may use CPU time.
    pub(super) scheduler: Arc<HostScheduler>,
    /// What divides the host's memory among VMs.
    pub(super) budget: Arc<Budget>,
}
