// SPDX-License-Identifier: Apache-2.0
//! All settings of a run of the model, with the paper's settings as presets (HyperTRIO tables II and IV).
//!
//! A size of 0 entries switches a cache off. Times are whole nanoseconds.

use serde::{Deserialize, Serialize};

use crate::observe::Step;

mod check;
mod faults;
mod hardware;

pub use crate::faults::FAULT_NS_MAX;
pub use check::{
    ACCESSES_MAX, AHEAD_PACKETS_MAX, BUFFER_ENTRIES_MAX, DEVICES_MAX, HISTORY_LENGTH_MAX,
    LATENCY_NS_MAX, PAGES_PER_TENANT_MAX, PTB_ENTRIES_MAX, SOURCE_LOW_BIT_MAX, WALKERS_MAX,
};
pub use faults::{
    Absent, FaultConfig, FaultDiscipline, HANDLER_CPUS_MAX, Handlers, OnFault, PAGE_REQUESTS_MAX,
    PARKED_MAX, PPM,
};
pub use hardware::{DevicesConfig, PasidConfig};

/// The rules that the model follows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Flavour {
    /// The paper's text.
    #[default]
    Paper,
    /// The authors' public program where it differs from the text.
    Hypersio,
}

/// The victim of a cache when a set is full.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replacement {
    /// The entry not used for the longest time.
    Lru,
    /// The entry with the least 4-bit use count; the counts of a set are halved
    /// when one saturates, ties are broken by the seed (V-C).
    #[default]
    Lfu,
    /// The entry used furthest in the future (Belady): needs the whole trace.
    Oracle,
}

/// The rule for the partition that a request's translations may be kept in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PartitionBy {
    /// Low bits of the source id, from [`CacheConfig::source_low_bit`] on (III).
    #[default]
    SourceBits,
    /// A complete match: a partition belongs to the sources that the host has tagged it with, in order of
    /// their first request; sources that find no free partition are not cached (III).
    FullMatch,
    /// Low bits of the domain id: what the authors' program does.
    DomainBits,
}

/// Shape and policy of one cache.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheConfig {
    /// Entries in total; 0: there is no such cache.
    pub entries: u32,
    /// Entries a set; equal to `entries`: fully associative, as the context cache always is.
    pub ways: u32,
    /// Number of partitions that share the sets.
    #[serde(default = "one")]
    pub partitions: u32,
    /// The rule for the partition.
    #[serde(default)]
    pub partition_by: PartitionBy,
    /// Sources that may be tagged with one partition (full match only).
    #[serde(default = "one")]
    pub sources_per_partition: u32,
    /// Lowest bit of the source id that selects a partition (source bits only). 3 excludes the PCIe
    /// function number, which is right for one function a device; 0 is for virtual functions numbered one
    /// by one.
    #[serde(default = "past_the_function")]
    pub source_low_bit: u32,
    /// The replacement policy.
    #[serde(default)]
    pub replacement: Replacement,
}

const fn one() -> u32 {
    1
}

const fn off() -> CacheConfig {
    CacheConfig::OFF
}

/// Bits of a source id that are the function's number within its device.
const fn past_the_function() -> u32 {
    3
}

impl CacheConfig {
    /// A cache that does not exist.
    pub const OFF: Self = Self::new(0, 0, Replacement::Lru);

    /// A cache with one partition.
    #[must_use]
    pub const fn new(entries: u32, ways: u32, replacement: Replacement) -> Self {
        Self {
            entries,
            ways,
            partitions: 1,
            partition_by: PartitionBy::SourceBits,
            sources_per_partition: 1,
            source_low_bit: past_the_function(),
            replacement,
        }
    }

    /// The same in `partitions` partitions.
    #[must_use]
    pub const fn partitioned(mut self, partitions: u32) -> Self {
        self.partitions = partitions;
        self
    }

    /// The same with partitions chosen by `rule`.
    #[must_use]
    pub const fn by(mut self, rule: PartitionBy) -> Self {
        self.partition_by = rule;
        self
    }
}

/// The I/O link that packets arrive on; it is always full (IV-C).
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkConfig {
    /// Rate in gigabits a second.
    pub gbps: u64,
    /// Bytes a packet occupies on the link, including the gap between packets; 64 B and up.
    pub packet_bytes: u64,
    /// Translation requests that a packet issues. A trace that records it overrides this.
    pub requests_per_packet: u32,
}

/// The content of an entry of the pending translation buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PtbUnit {
    /// One translation in flight.
    #[default]
    Requests,
    /// One packet with all its translations.
    Packets,
}

/// Pending translation buffer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PtbConfig {
    /// Entries.
    pub entries: u32,
    /// The content of one entry.
    pub unit: PtbUnit,
}

/// How many memory accesses a page walk takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WalkCost {
    /// Two-dimensional: `(g + 1)(h + 1) - 1` accesses for g guest and h host
    /// levels still to walk (II-A).
    #[default]
    Nested,
    /// The authors' program: one access a level, counted from the wrong end
    /// (level 1 costs one access).
    Short,
}

/// Pages that the host maps a guest's memory with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum HostPage {
    /// 4 KiB: the host's table is walked to its end.
    #[default]
    #[serde(rename = "4k")]
    Size4K,
    /// 2 MiB: a host walk ends a level earlier.
    #[serde(rename = "2m")]
    Size2M,
    /// 1 GiB: it ends two levels earlier.
    #[serde(rename = "1g")]
    Size1G,
}

impl HostPage {
    /// Levels of the host's table that are not walked.
    #[must_use]
    pub const fn saved_levels(self) -> u32 {
        match self {
            Self::Size4K => 0,
            Self::Size2M => 1,
            Self::Size1G => 2,
        }
    }

    /// log2 of its bytes.
    #[must_use]
    pub const fn shift(self) -> u8 {
        match self {
            Self::Size4K => 12,
            Self::Size2M => 21,
            Self::Size1G => 30,
        }
    }
}

/// Page walks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WalkConfig {
    /// Accesses a walk.
    pub cost: WalkCost,
    /// Levels of the guest's table: 4 (24 accesses with 4 host levels) or 5 (35 with 5).
    pub guest_levels: u32,
    /// Levels of the host's table; 0: not nested.
    pub host_levels: u32,
    /// Pages of the host's table.
    pub host_page: HostPage,
    /// Walks at a time, further ones wait in the order of arrival; 0: as many as there are.
    pub walkers: u32,
    /// A larger page ends the guest's walk earlier. The paper counts 24 accesses
    /// for every page (table II).
    pub large_pages_shorten: bool,
}

impl PrefetchConfig {
    /// The prefetch buffer as a cache.
    #[must_use]
    pub const fn buffer(&self) -> CacheConfig {
        CacheConfig::new(self.buffer_entries, self.buffer_entries, Replacement::Lru)
    }
}

impl PrefetchTrigger {
    /// True if a request that took `step` at the device sends a prefetch.
    #[must_use]
    pub const fn fires(self, step: Step) -> bool {
        match self {
            Self::EveryRequest => true,
            Self::BufferMiss => matches!(step, Step::Miss),
        }
    }
}

/// When the prefetch unit sends a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PrefetchTrigger {
    /// When neither prefetch buffer nor DevTLB has the translation (III).
    #[default]
    BufferMiss,
    /// On every request, hit or miss: the authors' program.
    EveryRequest,
}

/// How the source-id predictor learns.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Predictor {
    /// The successor is what followed last time: it follows the traffic (III:
    /// 'updated on every incoming packet').
    #[default]
    Latest,
    /// The successor is the first that was ever seen: the authors' program.
    FirstSeen,
}

/// Whether the host sets the history-length register.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HistoryLength {
    /// It stays as configured.
    #[default]
    Fixed,
    /// The host rewrites it when a tenant joins or leaves or its bandwidth changes (III), so that a
    /// prefetch is just in time.
    Host,
}

/// Prefetch unit.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefetchConfig {
    /// There is one.
    pub enabled: bool,
    /// Entries of the prefetch buffer, fully associative, LRU.
    pub buffer_entries: u32,
    /// Pages of a tenant's history that one prefetch fetches.
    pub pages_per_tenant: u32,
    /// History-length register: distance in requests between the source seen and
    /// the source predicted from it (the paper's stride).
    pub history_length: u32,
    /// Whether the host sets that register.
    pub register: HistoryLength,
    /// When a prefetch is sent.
    pub trigger: PrefetchTrigger,
    /// How successors are learnt.
    pub predictor: Predictor,
}

/// Latencies, in nanoseconds.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatencyConfig {
    /// PCIe, one way.
    pub pcie_ns: u64,
    /// One access to memory.
    pub dram_ns: u64,
    /// A hit in the DevTLB.
    pub devtlb_hit_ns: u64,
    /// A hit in the prefetch buffer.
    pub prefetch_hit_ns: u64,
    /// A hit in the context cache.
    pub context_hit_ns: u64,
    /// A hit in the IOTLB or in a page-walk cache.
    pub walk_cache_hit_ns: u64,
    /// Memory accesses to read a context entry.
    pub context_accesses: u64,
    /// Memory accesses to read a tenant's page history.
    pub history_accesses: u64,
}

/// How the stages' queues order ready requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Completion {
    /// The request that is ready first is served first.
    #[default]
    OutOfOrder,
    /// Each stage serves in the order of arrival, ready or not.
    InOrder,
}

/// One configuration of the model.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The rules.
    pub flavour: Flavour,
    /// Breaks ties of the LFU policy; nothing else uses it.
    pub seed: u64,
    /// The link.
    pub link: LinkConfig,
    /// Devices behind the IOMMU.
    #[serde(default)]
    pub devices: DevicesConfig,
    /// Pending translation buffer of the device.
    pub ptb: PtbConfig,
    /// Order of service.
    pub completion: Completion,
    /// Context cache: source to domain.
    pub context_cache: CacheConfig,
    /// The device's own TLB.
    pub devtlb: CacheConfig,
    /// The chipset's TLB; flavour hypersio has none.
    pub iotlb: CacheConfig,
    /// Page-walk cache of level 1 entries; flavour hypersio has none.
    pub l1: CacheConfig,
    /// Page-walk cache of level 2 entries (2 MiB each).
    pub l2: CacheConfig,
    /// Page-walk cache of level 3 entries (1 GiB each).
    pub l3: CacheConfig,
    /// Page-walk cache of level 4 entries; flavour hypersio has none.
    pub l4: CacheConfig,
    /// TLB of host translations that walks need; flavour hypersio has none.
    #[serde(default = "off")]
    pub nested_tlb: CacheConfig,
    /// Requests name an address space of their source.
    #[serde(default)]
    pub pasid: PasidConfig,
    /// Cache of the entries of PASID tables.
    #[serde(default = "off")]
    pub pasid_cache: CacheConfig,
    /// Page walks.
    pub walk: WalkConfig,
    /// Prefetch unit.
    pub prefetch: PrefetchConfig,
    /// Latencies.
    pub latency: LatencyConfig,
    /// I/O page faults; without them all memory is pinned.
    #[serde(default)]
    pub faults: FaultConfig,
}

impl Config {
    /// Table IV, *Base*.
    #[must_use]
    pub fn base(flavour: Flavour) -> Self {
        // The program keeps L2 and L3 by LRU, whatever table IV says.
        let walk_caches = match flavour {
            Flavour::Paper => Replacement::Lfu,
            Flavour::Hypersio => Replacement::Lru,
        };
        let (cost, trigger, predictor) = match flavour {
            Flavour::Paper => (
                WalkCost::Nested,
                PrefetchTrigger::BufferMiss,
                Predictor::Latest,
            ),
            Flavour::Hypersio => (
                WalkCost::Short,
                PrefetchTrigger::EveryRequest,
                Predictor::FirstSeen,
            ),
        };
        let rule = partition_rule(flavour);
        Self {
            flavour,
            seed: 0,
            link: LinkConfig {
                gbps: 200,
                packet_bytes: 1542,
                requests_per_packet: 3,
            },
            devices: DevicesConfig::default(),
            ptb: PtbConfig {
                entries: 1,
                unit: PtbUnit::Requests,
            },
            completion: Completion::OutOfOrder,
            context_cache: CacheConfig::new(1536, 1536, Replacement::Lfu).by(rule),
            devtlb: CacheConfig::new(64, 8, Replacement::Lfu).by(rule),
            iotlb: CacheConfig::OFF.by(rule),
            l1: CacheConfig::OFF.by(rule),
            l2: CacheConfig::new(512, 16, walk_caches).by(rule),
            l3: CacheConfig::new(1024, 16, walk_caches).by(rule),
            l4: CacheConfig::OFF.by(rule),
            nested_tlb: CacheConfig::OFF.by(rule),
            pasid: PasidConfig::default(),
            pasid_cache: CacheConfig::OFF.by(rule),
            walk: WalkConfig {
                cost,
                guest_levels: 4,
                host_levels: 4,
                host_page: HostPage::Size4K,
                walkers: 0,
                large_pages_shorten: false,
            },
            prefetch: PrefetchConfig {
                enabled: false,
                buffer_entries: 0,
                pages_per_tenant: 2,
                history_length: 48,
                register: HistoryLength::Fixed,
                trigger,
                predictor,
            },
            latency: LatencyConfig {
                pcie_ns: 450,
                dram_ns: 50,
                devtlb_hit_ns: 2,
                prefetch_hit_ns: 2,
                context_hit_ns: 1,
                walk_cache_hit_ns: 5,
                context_accesses: 2,
                history_accesses: 1,
            },
            faults: FaultConfig::default(),
        }
    }

    /// Table IV, *HyperTRIO*: base with partitions, a PTB of 32 and prefetching.
    #[must_use]
    pub fn hypertrio(flavour: Flavour) -> Self {
        let mut config = Self::base(flavour);
        config.ptb.entries = 32;
        config.devtlb.partitions = 8;
        config.l2.partitions = 32;
        config.l3.partitions = 64;
        config.prefetch.enabled = true;
        config.prefetch.buffer_entries = 8;
        config
    }

    /// HyperTRIO on a link of `times` the paper's 200 Gb/s: what holds translations and the distance of
    /// prefetches are as many times larger. Where each value is from is said by `crate::sources`.
    #[must_use]
    pub(crate) fn hypertrio_times(flavour: Flavour, times: u32) -> Self {
        let mut config = Self::hypertrio(flavour);
        config.link.gbps *= u64::from(times);
        config.ptb.entries *= times;
        for cache in [&mut config.devtlb, &mut config.l2, &mut config.l3] {
            cache.entries *= times;
            cache.partitions *= times;
        }
        config.prefetch.buffer_entries *= times;
        config.prefetch.history_length *= times;
        config
    }
}

const fn partition_rule(flavour: Flavour) -> PartitionBy {
    match flavour {
        Flavour::Paper => PartitionBy::SourceBits,
        Flavour::Hypersio => PartitionBy::DomainBits,
    }
}
