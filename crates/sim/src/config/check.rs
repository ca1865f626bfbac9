// SPDX-License-Identifier: Apache-2.0
//! Limits of a configuration, within which a run ends in a bounded time and its times are meaningful; and
//! settings that would be silently ignored.
//!
//! The two checks are separate, since the second applies to settings that a person wrote
//! ([`Config::check_heeded`], at each point of a study): a configuration from a table of the authors'
//! program has columns that the program ignores.
//!
//! A setting of a part that is switched off, or of a rule that is not chosen, is no error, as the lists of
//! a study cross such settings with others: `ways` of a cache of 0 entries, `sources_per_partition` without
//! full match.

use super::{
    CacheConfig, Config, DevicesConfig, FaultDiscipline, Flavour, HistoryLength, HostPage,
    LatencyConfig, LinkConfig, PartitionBy, Replacement, WalkConfig, partition_rule,
};
use crate::error::{SimError, impossible};

/// Largest latency: a millisecond, a thousand times what any of these parts takes. A request has some ten
/// of them, so the number of link slots that pass meanwhile stays countable.
pub const LATENCY_NS_MAX: u64 = 1_000_000;
/// Most memory accesses for reading one entry.
pub const ACCESSES_MAX: u64 = 1_000;
/// Most entries of the PTB; the largest of the paper has 32.
pub const PTB_ENTRIES_MAX: u32 = 1 << 16;
/// Most pages that a prefetch fetches: the history of each tenant holds as many.
pub const PAGES_PER_TENANT_MAX: u32 = 64;
/// Most entries of the prefetch buffer, which are searched as one set.
pub const BUFFER_ENTRIES_MAX: u32 = 1 << 16;
/// Longest history, in requests: 4 GiB of source ids.
pub const HISTORY_LENGTH_MAX: u32 = 1 << 30;
/// Most devices behind one IOMMU.
pub const DEVICES_MAX: u32 = 64;
/// Most packets by which a trace is read ahead for one of several devices: 8 MB for each device.
pub const AHEAD_PACKETS_MAX: u32 = 1 << 16;
/// Most walkers; published IOMMUs have some ten.
pub const WALKERS_MAX: u32 = 1 << 16;
/// Highest bit of a source id.
pub const SOURCE_LOW_BIT_MAX: u32 = 31;
/// Most entries of a cache.
const CACHE_ENTRIES_MAX: u32 = 1 << 24;

impl Config {
    /// Checks for parameters that no run can have.
    ///
    /// # Errors
    /// The first that is impossible, with what would be possible.
    pub fn check(&self) -> Result<(), SimError> {
        self.check_link()?;
        for (name, cache) in self.caches() {
            cache.check(name, self.flavour)?;
        }
        self.check_walk()?;
        self.check_devices()?;
        self.check_pasid()?;
        self.faults.check()?;
        self.latency.check(self.flavour)?;
        if self.context_cache.replacement == Replacement::Oracle {
            return Err(impossible(
                "context_cache",
                "oracle",
                "the oracle knows the future of pages, not of sources; use lru or lfu",
            ));
        }
        self.check_prefetch()
    }

    /// Checks for settings that the flavour, or the part that they belong to, would ignore: they would have
    /// no effect on the results.
    ///
    /// # Errors
    /// The first such setting that is not at its default.
    pub fn check_heeded(&self) -> Result<(), SimError> {
        self.check_context_cache_heeded()?;
        for (name, cache) in self.caches() {
            if cache.entries > 0 && cache.ways == 0 {
                return Err(impossible(
                    name,
                    format!("{} entries, 0 ways", cache.entries),
                    "a set of no entries keeps nothing; set entries = 0 to switch the cache off",
                ));
            }
        }
        if self.l4.entries > 0 && self.walk.guest_levels < 4 {
            return Err(impossible(
                "l4.entries",
                self.l4.entries,
                "a guest's table of 3 levels has no entries of level 4; set 0",
            ));
        }
        match self.flavour {
            Flavour::Paper => Ok(()),
            Flavour::Hypersio => self.check_heeded_by_hypersio(),
        }
    }

    fn caches(&self) -> [(&'static str, &CacheConfig); 9] {
        [
            ("context_cache", &self.context_cache),
            ("devtlb", &self.devtlb),
            ("iotlb", &self.iotlb),
            ("l1", &self.l1),
            ("l2", &self.l2),
            ("l3", &self.l3),
            ("l4", &self.l4),
            ("nested_tlb", &self.nested_tlb),
            ("pasid_cache", &self.pasid_cache),
        ]
    }

    fn check_context_cache_heeded(&self) -> Result<(), SimError> {
        let cache = &self.context_cache;
        if cache.entries == 0 {
            return Ok(());
        }
        let like = CacheConfig::new(cache.entries, cache.entries, cache.replacement)
            .by(partition_rule(self.flavour));
        let (parameter, value) = if cache.ways != like.ways {
            ("context_cache.ways", cache.ways.to_string())
        } else if cache.partitions != like.partitions {
            ("context_cache.partitions", cache.partitions.to_string())
        } else if cache.partition_by != like.partition_by {
            ("context_cache.partition_by", word(cache.partition_by))
        } else {
            return Ok(());
        };
        Err(impossible(
            parameter,
            value,
            "the context cache is fully associative and has no partitions; \
             leave this out and set entries and replacement",
        ))
    }

    fn check_heeded_by_hypersio(&self) -> Result<(), SimError> {
        let default = Self::base(Flavour::Hypersio);
        let (walk, prefetch) = (&self.walk, &self.prefetch);
        let parts = [
            ("walk.cost", walk.cost != default.walk.cost),
            (
                "walk.guest_levels",
                walk.guest_levels != default.walk.guest_levels,
            ),
            (
                "walk.host_levels",
                walk.host_levels != default.walk.host_levels,
            ),
            ("walk.host_page", walk.host_page != default.walk.host_page),
            ("walk.walkers", walk.walkers != default.walk.walkers),
            (
                "walk.large_pages_shorten",
                walk.large_pages_shorten != default.walk.large_pages_shorten,
            ),
            (
                "prefetch.predictor",
                prefetch.enabled && prefetch.predictor != default.prefetch.predictor,
            ),
            (
                "prefetch.register",
                prefetch.enabled && prefetch.register != HistoryLength::Fixed,
            ),
            (
                "faults.discipline",
                self.faults.discipline != FaultDiscipline::Pinned,
            ),
            ("iotlb.entries", self.iotlb.entries > 0),
            ("l1.entries", self.l1.entries > 0),
            ("l4.entries", self.l4.entries > 0),
            ("nested_tlb.entries", self.nested_tlb.entries > 0),
            ("pasid.enabled", self.pasid.enabled),
            ("devices.count", self.devices.count != 1),
        ];
        match parts.into_iter().find(|(_, differs)| *differs) {
            None => Ok(()),
            Some((parameter, _)) => Err(SimError::NotHeeded { parameter }),
        }
    }

    fn check_prefetch(&self) -> Result<(), SimError> {
        let unit = &self.prefetch;
        // The buffer uses its room also where the unit is off.
        at_most(
            "prefetch.buffer_entries",
            unit.buffer_entries,
            BUFFER_ENTRIES_MAX,
        )?;
        if !unit.enabled {
            return Ok(());
        }
        for (name, value, max) in [
            (
                "prefetch.pages_per_tenant",
                unit.pages_per_tenant,
                PAGES_PER_TENANT_MAX,
            ),
            (
                "prefetch.history_length",
                unit.history_length,
                HISTORY_LENGTH_MAX,
            ),
        ] {
            if value == 0 {
                return Err(impossible(
                    name,
                    0,
                    "prefetching needs at least one page a tenant and a history length of 1; \
                     switch it off with prefetch.enabled = false",
                ));
            }
            at_most(name, value, max)?;
        }
        Ok(())
    }

    fn check_walk(&self) -> Result<(), SimError> {
        let WalkConfig {
            guest_levels,
            host_levels,
            host_page,
            walkers,
            ..
        } = self.walk;
        if !(3..=5).contains(&guest_levels) {
            return Err(impossible(
                "walk.guest_levels",
                guest_levels,
                "pages of 1 GiB are mapped at level 3, and no IOMMU walks more than 5 levels",
            ));
        }
        if host_levels > 5 {
            return Err(impossible(
                "walk.host_levels",
                host_levels,
                "0 (not nested) to 5 levels can be modelled",
            ));
        }
        if host_page != HostPage::Size4K && host_levels <= host_page.saved_levels() {
            return Err(impossible(
                "walk.host_page",
                match host_page {
                    HostPage::Size1G => "1g",
                    _ => "2m",
                },
                "a host's table of so few levels has no entries for such pages; use 4k, or more host_levels",
            ));
        }
        at_most("walk.walkers", walkers, WALKERS_MAX)
    }

    fn check_devices(&self) -> Result<(), SimError> {
        let DevicesConfig {
            count,
            source_low_bit,
            ahead_packets,
        } = self.devices;
        for (name, value, max) in [
            ("devices.count", count, DEVICES_MAX),
            ("devices.ahead_packets", ahead_packets, AHEAD_PACKETS_MAX),
        ] {
            if value == 0 {
                return Err(impossible(name, 0, "at least 1 is needed"));
            }
            at_most(name, value, max)?;
        }
        at_most("devices.source_low_bit", source_low_bit, SOURCE_LOW_BIT_MAX)
    }

    fn check_pasid(&self) -> Result<(), SimError> {
        if self.pasid.table_accesses > ACCESSES_MAX {
            return Err(impossible(
                "pasid.table_accesses",
                self.pasid.table_accesses,
                &format!("at most {ACCESSES_MAX} can be modelled"),
            ));
        }
        for (name, cache) in [
            ("nested_tlb", &self.nested_tlb),
            ("pasid_cache", &self.pasid_cache),
        ] {
            if cache.entries > 0 && cache.replacement == Replacement::Oracle {
                return Err(impossible(
                    name,
                    "oracle",
                    "the oracle knows the future of a device's pages, not of tables; use lru or lfu",
                ));
            }
        }
        Ok(())
    }

    fn check_link(&self) -> Result<(), SimError> {
        let LinkConfig {
            gbps,
            packet_bytes,
            requests_per_packet,
        } = self.link;
        if gbps == 0 || gbps > 100_000 {
            return Err(impossible(
                "link.gbps",
                gbps,
                "1 to 100,000 Gb/s can be modelled",
            ));
        }
        if !(64..=1 << 20).contains(&packet_bytes) || packet_bytes * 8 < gbps {
            return Err(impossible(
                "link.packet_bytes",
                packet_bytes,
                "a packet has 64 B to 1 MiB and takes at least a nanosecond on the link",
            ));
        }
        if !(1..=64).contains(&requests_per_packet) {
            return Err(impossible(
                "link.requests_per_packet",
                requests_per_packet,
                "a packet issues 1 to 64 requests",
            ));
        }
        if self.ptb.entries == 0 {
            return Err(impossible(
                "ptb.entries",
                0,
                "without an entry no packet is ever taken",
            ));
        }
        at_most("ptb.entries", self.ptb.entries, PTB_ENTRIES_MAX)
    }
}

impl LatencyConfig {
    fn check(&self, flavour: Flavour) -> Result<(), SimError> {
        // The authors' program ends some steps a nanosecond early.
        let at_least = match flavour {
            Flavour::Paper => 0,
            Flavour::Hypersio => 1,
        };
        for (name, value, min, max) in [
            ("latency.pcie_ns", self.pcie_ns, 0, LATENCY_NS_MAX),
            ("latency.dram_ns", self.dram_ns, at_least, LATENCY_NS_MAX),
            (
                "latency.devtlb_hit_ns",
                self.devtlb_hit_ns,
                at_least,
                LATENCY_NS_MAX,
            ),
            (
                "latency.prefetch_hit_ns",
                self.prefetch_hit_ns,
                at_least,
                LATENCY_NS_MAX,
            ),
            (
                "latency.context_hit_ns",
                self.context_hit_ns,
                0,
                LATENCY_NS_MAX,
            ),
            (
                "latency.walk_cache_hit_ns",
                self.walk_cache_hit_ns,
                at_least,
                LATENCY_NS_MAX,
            ),
            (
                "latency.context_accesses",
                self.context_accesses,
                0,
                ACCESSES_MAX,
            ),
            (
                "latency.history_accesses",
                self.history_accesses,
                0,
                ACCESSES_MAX,
            ),
        ] {
            if !(min..=max).contains(&value) {
                let reason = format!("{min} to {max} can be modelled with this flavour");
                return Err(impossible(name, value, &reason));
            }
        }
        Ok(())
    }
}

/// The word for `rule` in a study.
fn word(rule: PartitionBy) -> String {
    let word = match rule {
        PartitionBy::SourceBits => "source-bits",
        PartitionBy::FullMatch => "full-match",
        PartitionBy::DomainBits => "domain-bits",
    };
    word.to_owned()
}

fn at_most(parameter: &'static str, value: u32, max: u32) -> Result<(), SimError> {
    if value > max {
        return Err(impossible(
            parameter,
            value,
            &format!("at most {max} can be modelled"),
        ));
    }
    Ok(())
}

impl CacheConfig {
    fn check(&self, name: &'static str, flavour: Flavour) -> Result<(), SimError> {
        if self.entries == 0 || self.ways == 0 {
            return Ok(());
        }
        let sets = self.entries / self.ways;
        if sets == 0 || self.entries > CACHE_ENTRIES_MAX {
            return Err(impossible(
                name,
                format!("{} entries, {} ways", self.entries, self.ways),
                "a cache has at least as many entries as ways, and at most 16,777,216",
            ));
        }
        if self.partitions == 0 || self.partitions > sets {
            return Err(impossible(
                name,
                format!("{} partitions of {sets} sets", self.partitions),
                "each partition needs a set of its own",
            ));
        }
        if self.sources_per_partition == 0 {
            return Err(impossible(
                name,
                "0 sources_per_partition",
                "a partition that no source may be tagged with is never used; set 1 or more",
            ));
        }
        if self.source_low_bit > SOURCE_LOW_BIT_MAX {
            return Err(impossible(
                name,
                format!("source_low_bit {}", self.source_low_bit),
                "source ids have bits 0 to 31",
            ));
        }
        // The authors' program silently uses the next lower power of two.
        let whole = sets.is_power_of_two() && self.partitions.is_power_of_two();
        if flavour == Flavour::Paper && (!whole || !self.entries.is_multiple_of(self.ways)) {
            return Err(impossible(
                name,
                format!("{sets} sets in {} partitions", self.partitions),
                "sets and partitions are chosen by address and id bits: use powers of two",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Predictor, WalkCost};

    type Change = fn(&mut Config);

    /// The messages of `check` and `check_heeded` about HyperTRIO with `change`.
    fn told(flavour: Flavour, change: Change) -> String {
        let mut config = Config::hypertrio(flavour);
        change(&mut config);
        match config.check_heeded().and_then(|()| config.check()) {
            Ok(()) => "fine".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn presets_are_possible_and_heeded_in_whole() {
        for flavour in [Flavour::Paper, Flavour::Hypersio] {
            for config in [Config::base(flavour), Config::hypertrio(flavour)] {
                config.check().unwrap();
                config.check_heeded().unwrap();
            }
        }
    }

    #[test]
    fn times_counts_and_sizes_beyond_their_limits_are_refused_and_at_them_are_not() {
        let limits: [(Change, Change, &str); 9] = [
            (
                |c| c.latency.pcie_ns = LATENCY_NS_MAX,
                |c| c.latency.pcie_ns = u64::MAX,
                "latency.pcie_ns",
            ),
            (
                |c| c.latency.dram_ns = LATENCY_NS_MAX,
                |c| c.latency.dram_ns = LATENCY_NS_MAX + 1,
                "latency.dram_ns",
            ),
            (
                |c| c.latency.context_accesses = ACCESSES_MAX,
                |c| c.latency.context_accesses = ACCESSES_MAX + 1,
                "latency.context_accesses",
            ),
            (
                |c| c.latency.history_accesses = ACCESSES_MAX,
                |c| c.latency.history_accesses = u64::MAX,
                "latency.history_accesses",
            ),
            (
                |c| c.prefetch.pages_per_tenant = PAGES_PER_TENANT_MAX,
                |c| c.prefetch.pages_per_tenant = u32::MAX,
                "prefetch.pages_per_tenant",
            ),
            (
                |c| c.prefetch.buffer_entries = BUFFER_ENTRIES_MAX,
                |c| c.prefetch.buffer_entries = u32::MAX,
                "prefetch.buffer_entries",
            ),
            (
                |c| c.prefetch.history_length = HISTORY_LENGTH_MAX,
                |c| c.prefetch.history_length = u32::MAX,
                "prefetch.history_length",
            ),
            (
                |c| c.ptb.entries = PTB_ENTRIES_MAX,
                |c| c.ptb.entries = u32::MAX,
                "ptb.entries",
            ),
            (
                |c| c.devtlb.source_low_bit = SOURCE_LOW_BIT_MAX,
                |c| c.devtlb.source_low_bit = 32,
                "devtlb",
            ),
        ];
        for flavour in [Flavour::Paper, Flavour::Hypersio] {
            for (at, beyond, name) in limits {
                assert_eq!(told(flavour, at), "fine");
                let refused = told(flavour, beyond);
                assert!(refused.starts_with(name), "{refused}");
            }
        }
    }

    #[test]
    fn times_of_0_are_refused_where_the_program_takes_a_nanosecond_off() {
        let changes: [Change; 4] = [
            |c| c.latency.dram_ns = 0,
            |c| c.latency.devtlb_hit_ns = 0,
            |c| c.latency.prefetch_hit_ns = 0,
            |c| c.latency.walk_cache_hit_ns = 0,
        ];
        for change in changes {
            assert_eq!(told(Flavour::Paper, change), "fine");
            let refused = told(Flavour::Hypersio, change);
            assert!(refused.contains(" = 0: 1 to 1000000"), "{refused}");
        }
    }

    #[test]
    fn hardware_beyond_its_limits_is_refused_with_the_name_of_the_setting() {
        let changes: [(Change, &str); 8] = [
            (|c| c.devices.count = 0, "devices.count = 0"),
            (|c| c.devices.count = 65, "devices.count"),
            (|c| c.devices.ahead_packets = 0, "devices.ahead_packets = 0"),
            (|c| c.devices.ahead_packets = u32::MAX, "devices.ahead"),
            (|c| c.devices.source_low_bit = 32, "devices.source_low_bit"),
            (|c| c.pasid.table_accesses = 1001, "pasid.table_accesses"),
            (
                |c| c.nested_tlb = CacheConfig::new(8, 8, Replacement::Oracle),
                "nested_tlb",
            ),
            (
                |c| c.pasid_cache = CacheConfig::new(12, 4, Replacement::Lru),
                "pasid_cache",
            ),
        ];
        for (change, name) in changes {
            let refused = told(Flavour::Paper, change);
            assert!(refused.starts_with(name), "{refused}");
        }
    }

    #[test]
    fn settings_that_hypersio_does_not_heed_are_refused_there_only() {
        let changes: [(Change, &str); 14] = [
            (|c| c.devices.count = 2, "devices.count"),
            (|c| c.pasid.enabled = true, "pasid.enabled"),
            (
                |c| c.nested_tlb = CacheConfig::new(8, 8, Replacement::Lru),
                "nested_tlb.entries",
            ),
            (|c| c.walk.host_page = HostPage::Size2M, "walk.host_page"),
            (|c| c.walk.walkers = 3, "walk.walkers"),
            (|c| c.walk.cost = WalkCost::Nested, "walk.cost"),
            (|c| c.walk.guest_levels = 5, "walk.guest_levels"),
            (|c| c.walk.host_levels = 0, "walk.host_levels"),
            (
                |c| c.walk.large_pages_shorten = true,
                "walk.large_pages_shorten",
            ),
            (
                |c| c.prefetch.predictor = Predictor::Latest,
                "prefetch.predictor",
            ),
            (
                |c| c.prefetch.register = HistoryLength::Host,
                "prefetch.register",
            ),
            (
                |c| c.iotlb = CacheConfig::new(8, 8, Replacement::Lru),
                "iotlb.entries",
            ),
            (
                |c| c.l1 = CacheConfig::new(8, 8, Replacement::Lru),
                "l1.entries",
            ),
            (
                |c| c.l4 = CacheConfig::new(8, 8, Replacement::Lru),
                "l4.entries",
            ),
        ];
        for (change, name) in changes {
            assert_eq!(told(Flavour::Paper, change), "fine");
            let refused = told(Flavour::Hypersio, change);
            assert!(
                refused.starts_with(name) && refused.contains("hypersio"),
                "{refused}"
            );
        }
    }

    #[test]
    fn settings_that_nothing_heeds_are_refused_and_those_of_parts_that_are_off_are_not() {
        let refused: [(Change, &str); 6] = [
            (|c| c.context_cache.ways = 8, "context_cache.ways"),
            (|c| c.context_cache.partitions = 2, "context_cache"),
            (
                |c| c.context_cache.partition_by = PartitionBy::FullMatch,
                "context_cache.partition_by",
            ),
            (|c| c.devtlb.sources_per_partition = 0, "devtlb"),
            (|c| (c.devtlb.ways, c.devtlb.partitions) = (0, 1), "devtlb"),
            (|c| c.prefetch.history_length = 0, "prefetch.history_length"),
        ];
        let fine: [Change; 4] = [
            |c| c.iotlb.ways = 8,
            |c| c.devtlb.sources_per_partition = 3,
            |c| (c.prefetch.enabled, c.prefetch.history_length) = (false, 0),
            |c| (c.context_cache.entries, c.context_cache.partitions) = (0, 4),
        ];
        for flavour in [Flavour::Paper, Flavour::Hypersio] {
            for (change, name) in refused {
                let told = told(flavour, change);
                assert!(told.starts_with(name), "{told}");
            }
            for change in fine {
                assert_eq!(told(flavour, change), "fine");
            }
        }
        let refused = told(Flavour::Paper, |c| {
            c.walk.guest_levels = 3;
            c.l4 = CacheConfig::new(8, 8, Replacement::Lru);
        });
        assert!(refused.starts_with("l4.entries"), "{refused}");
    }
}
