// SPDX-License-Identifier: Apache-2.0
//! Hardware beyond the paper: host pages, walkers, faster links.
//!
//! | question | what is run |
//! |---|---|
//! | what larger pages of the host save | accesses of a walk in full; share of the link at 1,024 tenants |
//! | how many walkers are enough | HyperTRIO at 1,024 tenants, from one walker to as many as there are walks |
//! | what is left at 400 and 800 Gb/s | the presets, whose values have a source or are marked as assumed |
//! | what devices behind one IOMMU take from one another | 1,024 tenants on one to eight devices, with 64 walkers and without a limit |
//! | what a nested TLB saves | accesses of a walk and share of the link, by its size |
//! | what PASIDs cost | one to sixteen address spaces a tenant, with and without a cache of PASID-table entries |
//!
//! A preset for a faster link is HyperTRIO with everything that holds translations, and the distance of its
//! prefetches, as many times larger as the link is faster, so that what scales is seen apart from what was left
//! as it is; `sources` says where each value is from that differs from HyperTRIO's.

use pagetide_trace::{HyperSpec, HyperTrace, TenantShape, Workload};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::config::{CacheConfig, Config, Flavour, HostPage, PtbUnit, Replacement};
use crate::error::SimError;
use crate::outcome::{Outcome, ratio};
use crate::run::{TraceInput, run};
use crate::run_all::run_all;
use crate::study::Preset;

/// Packets of a run.
const PACKETS: u64 = 102_400;
/// Tenants where not said otherwise.
const TENANTS: u32 = 1024;
/// Host pages, by name.
const HOST_PAGES: [(&str, HostPage); 3] = [
    ("host_4k", HostPage::Size4K),
    ("host_2m", HostPage::Size2M),
    ("host_1g", HostPage::Size1G),
];
/// Walkers that are tried; 0: no limit.
const WALKERS: [u32; 8] = [1, 2, 4, 8, 16, 32, 64, 0];
/// Presets that are compared.
const PRESETS: [(&str, Preset); 3] = [
    ("hypertrio_200", Preset::Hypertrio),
    ("hypertrio_400", Preset::Hypertrio400),
    ("hypertrio_800", Preset::Hypertrio800),
];
/// Devices behind the IOMMU.
const DEVICES: [u32; 4] = [1, 2, 4, 8];
/// Walkers that they share; 0: no limit.
const SHARED_WALKERS: [u32; 2] = [64, 0];
/// Entries of a nested TLB, 16 ways. Its sets are divided among the tenants: all tables of the host's pages of 1 GiB
/// would be in one set otherwise, whosever they are.
const NESTED_ENTRIES: [u32; 4] = [0, 512, 4096, 16_384];
const NESTED_WAYS: u32 = 16;
/// Tenants for which the accesses of a walk with a nested TLB of 1,024 entries are counted: a set each.
const NESTED_TENANTS: u32 = 64;
/// Address spaces of a tenant.
const SPACES: [u32; 3] = [1, 4, 16];
/// Entries of the PASID cache, 16 ways; as many as the context cache has, to the next power of two.
const PASID_ENTRIES: u32 = 2048;
const UNITS: [(&str, PtbUnit); 2] = [
    ("ptb_of_requests", PtbUnit::Requests),
    ("ptb_of_packets", PtbUnit::Packets),
];

/// Where a value of a preset is from.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct SourcedValue {
    /// Its key in a study.
    pub parameter: &'static str,
    /// The value.
    pub value: u64,
    /// A publication, or *assumed* with the rule.
    pub source: &'static str,
}

/// Values of a preset with their sources: all that differ from HyperTRIO's, and the latencies that were left.
#[must_use]
pub fn sources(preset: Preset) -> Vec<SourcedValue> {
    let config = preset.config(Flavour::Paper);
    let link = match config.link.gbps {
        400 => "IEEE 802.3bs-2017, 400 Gb/s Ethernet",
        800 => "IEEE 802.3df-2024, 800 Gb/s Ethernet",
        _ => "HyperTRIO table II",
    };
    let grown = match preset {
        Preset::Base | Preset::Hypertrio => "HyperTRIO table IV",
        _ => "assumed: grows with the rate of the link",
    };
    let kept = match preset {
        Preset::Base | Preset::Hypertrio => "HyperTRIO table II",
        _ => "assumed: as in HyperTRIO table II, measured on PCIe 3.0",
    };
    let of = |parameter, value, source| SourcedValue {
        parameter,
        value,
        source,
    };
    vec![
        of("link.gbps", config.link.gbps, link),
        of(
            "link.packet_bytes",
            config.link.packet_bytes,
            "HyperTRIO table II",
        ),
        of("ptb.entries", config.ptb.entries.into(), grown),
        of("devtlb.entries", config.devtlb.entries.into(), grown),
        of("devtlb.partitions", config.devtlb.partitions.into(), grown),
        of("l2.entries", config.l2.entries.into(), grown),
        of("l2.partitions", config.l2.partitions.into(), grown),
        of("l3.entries", config.l3.entries.into(), grown),
        of("l3.partitions", config.l3.partitions.into(), grown),
        of(
            "prefetch.buffer_entries",
            config.prefetch.buffer_entries.into(),
            grown,
        ),
        of(
            "prefetch.history_length",
            config.prefetch.history_length.into(),
            grown,
        ),
        of("latency.pcie_ns", config.latency.pcie_ns, kept),
        of("latency.dram_ns", config.latency.dram_ns, kept),
        of(
            "walk.walkers",
            config.walk.walkers.into(),
            "assumed: no limit, as in HyperTRIO",
        ),
    ]
}

/// One run: where its result goes, and what is run.
struct Job {
    /// Names of the tables around the result, and its own.
    path: Vec<String>,
    what: Figure,
    config: Config,
    tenants: u32,
    /// Address spaces of each.
    spaces: u32,
}

/// What of a run is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Figure {
    AccessesAWalk,
    LinkShare,
}

/// Runs the study on `threads` threads; `told` receives how many runs of how many are done.
///
/// # Errors
/// If a run fails.
pub fn run_hardware_study(
    threads: usize,
    told: &(dyn Fn(u64, u64) + Sync),
) -> Result<Map<String, Value>, SimError> {
    study(PACKETS, threads, told)
}

fn study(
    packets: u64,
    threads: usize,
    told: &(dyn Fn(u64, u64) + Sync),
) -> Result<Map<String, Value>, SimError> {
    let jobs = jobs();
    let outcomes = run_all(&jobs, threads, told, |job| job.run(packets))?;
    let mut figures = Map::new();
    for (job, outcome) in jobs.iter().zip(&outcomes) {
        let value = match job.what {
            Figure::AccessesAWalk => ratio(outcome.walk_accesses, outcome.walks),
            Figure::LinkShare => outcome.link_share,
        };
        put(&mut figures, &job.path, whole(value));
    }
    let presets = PRESETS.map(|(name, preset)| (name.to_owned(), json!(sources(preset))));
    figures.insert(
        "presets".to_owned(),
        Value::Object(presets.into_iter().collect()),
    );
    figures.insert("runs".to_owned(), jobs.len().into());
    figures.insert("packets".to_owned(), packets.into());
    Ok(figures)
}

/// A number without a fraction as one: 24 and not 24.0.
fn whole(value: f64) -> Value {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a whole number, 0 and more, is written as one"
    )]
    match value.fract() == 0.0 && value > 1.0 {
        true => json!(value as u64),
        false => json!(value),
    }
}

fn jobs() -> Vec<Job> {
    let mut jobs = Vec::new();
    accesses(&mut jobs);
    for (unit_name, unit) in UNITS {
        let mut hypertrio = Config::hypertrio(Flavour::Paper);
        hypertrio.ptb.unit = unit;
        host(&mut jobs, &hypertrio, unit_name);
        devices(&mut jobs, &hypertrio, unit_name);
        spaces(&mut jobs, &hypertrio, unit_name);
        for (name, preset) in PRESETS {
            for tenants in [64, TENANTS] {
                let mut config = preset.config(Flavour::Paper);
                config.ptb.unit = unit;
                let many = format!("tenants_{tenants}");
                let path = ["link_share", "preset", name, unit_name, &many];
                jobs.push(Job {
                    tenants,
                    ..Job::share(&path, config)
                });
            }
        }
    }
    jobs
}

/// `name_7`, or the word for no limit.
fn with_number(name: &str, number: u32) -> String {
    match number {
        0 => "no_limit".to_owned(),
        some => format!("{name}_{some}"),
    }
}

/// A nested TLB with a partition for each set.
fn nested_tlb(entries: u32) -> CacheConfig {
    let sets = (entries / NESTED_WAYS).max(1);
    CacheConfig::new(entries, NESTED_WAYS, Replacement::Lru).partitioned(sets)
}

/// Accesses of a walk without any other cache.
fn accesses(jobs: &mut Vec<Job>) {
    let mut add = |path: &[&str], mut config: Config, tenants| {
        for cache in [&mut config.devtlb, &mut config.l2, &mut config.l3] {
            *cache = CacheConfig::OFF;
        }
        jobs.push(Job {
            what: Figure::AccessesAWalk,
            tenants,
            ..Job::share(path, config)
        });
    };
    for (name, page) in HOST_PAGES {
        let mut config = Config::base(Flavour::Paper);
        config.walk.host_page = page;
        add(&["walk_accesses", name], config.clone(), 4);
        config.nested_tlb = nested_tlb(1024);
        let path = ["walk_accesses_nested_tlb_1024", name];
        add(&path, config, NESTED_TENANTS);
    }
}

/// Host pages, walkers and the nested TLB.
fn host(jobs: &mut Vec<Job>, hypertrio: &Config, unit: &str) {
    for (name, page) in HOST_PAGES {
        let mut config = hypertrio.clone();
        config.walk.host_page = page;
        let path = ["link_share", "host_page", name, unit];
        jobs.push(Job::share(&path, config));
        if unit == UNITS[0].0 {
            let mut base = Config::base(Flavour::Paper);
            base.walk.host_page = page;
            jobs.push(Job::share(&["link_share", "host_page", name, "base"], base));
        }
    }
    for walkers in WALKERS {
        let mut config = hypertrio.clone();
        config.walk.walkers = walkers;
        let name = with_number("walkers", walkers);
        jobs.push(Job::share(&["link_share", "walkers", &name, unit], config));
    }
    for entries in NESTED_ENTRIES {
        let mut config = hypertrio.clone();
        config.nested_tlb = nested_tlb(entries);
        let name = format!("entries_{entries}");
        let path = ["link_share", "nested_tlb", &name, unit];
        jobs.push(Job::share(&path, config));
    }
}

/// Several devices that share walkers.
fn devices(jobs: &mut Vec<Job>, hypertrio: &Config, unit: &str) {
    for count in DEVICES {
        for walkers in SHARED_WALKERS {
            let mut config = hypertrio.clone();
            config.devices.count = count;
            config.walk.walkers = walkers;
            let devices = format!("devices_{count}");
            let walkers = with_number("walkers", walkers);
            let path = ["link_share", "devices", &devices, unit, &walkers];
            jobs.push(Job::share(&path, config));
        }
    }
}

/// PASIDs, with their cache and without.
fn spaces(jobs: &mut Vec<Job>, hypertrio: &Config, unit: &str) {
    let cache = CacheConfig::new(PASID_ENTRIES, 16, Replacement::Lru);
    for spaces in SPACES {
        for (name, enabled, cache) in [
            ("free", false, CacheConfig::OFF),
            ("cache", true, cache.clone()),
            ("no_cache", true, CacheConfig::OFF),
        ] {
            let mut config = hypertrio.clone();
            config.pasid.enabled = enabled;
            config.pasid_cache = cache;
            let of = format!("spaces_{spaces}");
            jobs.push(Job {
                spaces,
                ..Job::share(&["link_share", "pasid", &of, unit, name], config)
            });
        }
    }
}

impl Job {
    /// The share of the link that 1,024 tenants get.
    fn share(path: &[&str], config: Config) -> Self {
        Self {
            path: path.iter().map(|name| (*name).to_owned()).collect(),
            what: Figure::LinkShare,
            config,
            tenants: TENANTS,
            spaces: 1,
        }
    }

    fn run(&self, packets: u64) -> Result<Outcome, SimError> {
        let mut spec = HyperSpec::synthetic(TenantShape::of(Workload::Websearch), self.tenants);
        spec.packets = Some(packets);
        spec.spaces = self.spaces;
        let input = TraceInput {
            events: &mut HyperTrace::synthetic(&spec)?,
            next_uses: None,
        };
        run(&self.config, input)
    }
}

/// Puts `value` at `path`, in tables that are made where they are missing.
fn put(table: &mut Map<String, Value>, path: &[String], value: Value) {
    match path {
        [] => {}
        [name] => {
            table.insert(name.clone(), value);
        }
        [name, rest @ ..] => {
            let inner = table.entry(name.clone()).or_insert_with(|| json!({}));
            if let Value::Object(inner) = inner {
                put(inner, rest, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_possible_and_every_value_has_a_source() {
        for (_, preset) in PRESETS {
            let config = preset.config(Flavour::Paper);
            config.check().unwrap();
            config.check_heeded().unwrap();
            let sources = sources(preset);
            let value = serde_json::to_value(&config).unwrap();
            for one in &sources {
                let pointer = format!("/{}", one.parameter.replace('.', "/"));
                let in_config = value.pointer(&pointer).and_then(Value::as_u64);
                assert_eq!(in_config, Some(one.value), "{}", one.parameter);
                assert!(!one.source.is_empty());
            }
            // What the preset changes is among them.
            let ours = serde_json::to_value(Config::hypertrio(Flavour::Paper)).unwrap();
            let mut same = value.clone();
            for one in &sources {
                let pointer = format!("/{}", one.parameter.replace('.', "/"));
                *same.pointer_mut(&pointer).unwrap() = ours.pointer(&pointer).unwrap().clone();
            }
            assert_eq!(same, ours, "a changed value has no source");
        }
    }

    #[test]
    fn study_has_the_accesses_of_host_pages_and_shares_that_grow_with_walkers() {
        let figures = study(4_000, 2, &|_, _| ()).unwrap();
        let accesses = &figures["walk_accesses"];
        assert_eq!(
            accesses,
            &json!({"host_4k": 24, "host_2m": 19, "host_1g": 14})
        );
        let share = |walkers: &str| {
            let of = &figures["link_share"]["walkers"][walkers];
            of["ptb_of_packets"].as_f64().unwrap()
        };
        assert!(share("walkers_1") < 0.5 * share("walkers_4"));
        assert!(share("walkers_4") < share("no_limit"));
        let share = |of: &str, which: &str, walkers: &str| {
            let share = &figures["link_share"][of][which]["ptb_of_packets"];
            share.get(walkers).unwrap_or(share).as_f64().unwrap()
        };
        // Devices with 64 walkers get in one another's way.
        let with_limit = |devices| share("devices", devices, "walkers_64");
        assert!(with_limit("devices_8") < 0.5 * with_limit("devices_1"));
        assert!(with_limit("devices_8") < share("devices", "devices_8", "no_limit"));
        let nested = |entries| share("nested_tlb", entries, "");
        assert!(nested("entries_16384") > nested("entries_0"));
        let pasid = |how| share("pasid", "spaces_4", how);
        assert!(pasid("no_cache") < pasid("free"));
        let nested = &figures["walk_accesses_nested_tlb_1024"]["host_1g"];
        assert!(nested.as_f64().unwrap() < 14.0);
        let preset = &figures["link_share"]["preset"]["hypertrio_800"];
        assert!(preset["ptb_of_requests"]["tenants_1024"].as_f64().unwrap() > 0.0);
    }
}
