// SPDX-License-Identifier: Apache-2.0
//! Devices behind the IOMMU: each has a link, a PTB, a context cache, a DevTLB and a prefetch unit of its own.
//!
//! Most runs have one device, and pay nothing for the possibility of several: how many there may be is a type.
//!
//! Tables of a device have a row for each of its tenants. With several devices these rows are numbered in each
//! device for itself ([`Device::tenants`]), so that memory does not grow with the number of devices.

use crate::cache::Cache;
use crate::config::Config;
use crate::context::ContextCache;
use crate::flavour::{Flavour, StageQueue as _};
use crate::host::Host;
use crate::link::Link;
use crate::policy::prefetch::AnyPrefetcher;
use crate::prefetch::PrefetchUnit;
use crate::ties::TieBreak;

/// Address bits of a DevTLB's set begin here, as pages of 2 MiB are the common ones.
const DEVTLB_SHIFT: u32 = 21;

/// One device.
pub(crate) struct Device<F: Flavour> {
    pub(super) link: Link,
    /// Entries of the PTB in use.
    pub(super) pending: u32,
    /// When the next packet is admitted; `u64::MAX` while the PTB has no room.
    pub(super) admits_ns: u64,
    /// When the next packet was first tried.
    pub(super) tried_ns: u64,
    /// No further packet is admitted.
    pub(super) trace_ended: bool,
    /// Slots of the link in which a packet found no room.
    pub(super) dropped_slots: u64,
    /// Slots of the link without a packet, as the trace could not be read further ahead.
    pub(super) idle_slots: u64,
    pub(super) to_device: F::Queue,
    pub(super) returning: F::Queue,
    pub(super) context_cache: ContextCache,
    pub(super) devtlb: Option<Cache>,
    pub(super) buffer: Option<Cache>,
    pub(super) prefetch: Option<AnyPrefetcher<F::Predictor>>,
    /// The host that writes the history-length register, if it is not fixed.
    pub(super) host: Option<Host>,
    /// Its tenants' numbers in the run, by row of its tables; empty if it is the only device.
    pub(super) tenants: Vec<u32>,
}

impl<F: Flavour> Device<F> {
    /// An idle device.
    pub(super) fn new(config: &Config, ties: &TieBreak) -> Self {
        let prefetch = &config.prefetch;
        Self {
            link: F::link(config),
            pending: 0,
            admits_ns: 0,
            tried_ns: 0,
            trace_ended: false,
            dropped_slots: 0,
            idle_slots: 0,
            to_device: F::Queue::new(config.completion),
            returning: F::Queue::new(config.completion),
            context_cache: ContextCache::new(&config.context_cache, ties),
            devtlb: Cache::new(&config.devtlb, DEVTLB_SHIFT, ties),
            buffer: Cache::new(&prefetch.buffer(), DEVTLB_SHIFT, ties).filter(|_| prefetch.enabled),
            prefetch: prefetch
                .enabled
                .then(|| AnyPrefetcher::BuiltIn(PrefetchUnit::new(prefetch))),
            host: Host::new(config),
            tenants: Vec::new(),
        }
    }

    /// The link's next slot is used, for a packet that is first tried now.
    pub(super) const fn skip_slots(&mut self, now_ns: u64) {
        self.dropped_slots += self.link.skip_to(now_ns);
        self.admits_ns = self.link.next_ns();
    }
}

/// The devices of a run.
pub(crate) trait DeviceSet<F: Flavour> {
    /// True if there may be several.
    const MANY: bool;
    /// Idle devices, as many as `config` says.
    fn new(config: &Config, ties: &TieBreak) -> Self;
    /// How many there are.
    fn count(&self) -> usize;
    /// The device of a source.
    fn of(&self, source: u32) -> usize;
    /// Device number `at`, which exists.
    fn get(&self, at: usize) -> &Device<F>;
    /// The same.
    fn get_mut(&mut self, at: usize) -> &mut Device<F>;
}

/// One device.
pub(crate) struct OneDevice<F: Flavour>(Device<F>);

impl<F: Flavour> DeviceSet<F> for OneDevice<F> {
    const MANY: bool = false;

    fn new(config: &Config, ties: &TieBreak) -> Self {
        Self(Device::new(config, ties))
    }

    #[inline(always)]
    fn count(&self) -> usize {
        1
    }

    #[inline(always)]
    fn of(&self, _source: u32) -> usize {
        0
    }

    #[inline(always)]
    fn get(&self, _at: usize) -> &Device<F> {
        &self.0
    }

    #[inline(always)]
    fn get_mut(&mut self, _at: usize) -> &mut Device<F> {
        &mut self.0
    }
}

/// Several devices, chosen by bits of the source.
pub(crate) struct ManyDevices<F: Flavour> {
    devices: Vec<Device<F>>,
    source_low_bit: u32,
}

impl<F: Flavour> DeviceSet<F> for ManyDevices<F> {
    const MANY: bool = true;

    fn new(config: &Config, ties: &TieBreak) -> Self {
        Self {
            devices: (0..config.devices.count)
                .map(|_| Device::new(config, ties))
                .collect(),
            source_low_bit: config.devices.source_low_bit,
        }
    }

    fn count(&self) -> usize {
        self.devices.len()
    }

    fn of(&self, source: u32) -> usize {
        (source >> self.source_low_bit) as usize % self.devices.len()
    }

    fn get(&self, at: usize) -> &Device<F> {
        &self.devices[at]
    }

    fn get_mut(&mut self, at: usize) -> &mut Device<F> {
        &mut self.devices[at]
    }
}
