// SPDX-License-Identifier: Apache-2.0
//! Each figure and table with measurements of VPRI, Taiji and 'Page Fault Support for Network Controllers' (its part
//! on Ethernet), what the paper says there, and which field of which bench answers it. What nothing answers is
//! absent, with the reason. Drawings of designs are left out.

use pagetide_bench::name::BenchName;

/// A paper.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Paper {
    /// SOSP 2024.
    Vpri,
    /// Elastic memory of a DPU.
    Taiji,
    /// 'Page Fault Support for Network Controllers', ASPLOS 2017.
    Npf,
}

impl Paper {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vpri => "VPRI",
            Self::Taiji => "Taiji",
            Self::Npf => "NPF",
        }
    }
}

/// What answers a figure here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ours {
    /// A field of a bench's report, as a path with dots.
    Field(BenchName, &'static str),
    /// Nothing yet, or nothing that could: why.
    Absent(&'static str),
}

/// A line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Line {
    /// The paper.
    pub paper: Paper,
    /// Which figure or table.
    pub item: &'static str,
    /// What is measured.
    pub what: &'static str,
    /// What the paper says, in its units.
    pub theirs: &'static str,
    /// What answers it here.
    pub ours: Ours,
}

const fn line(
    paper: Paper,
    item: &'static str,
    what: &'static str,
    theirs: &'static str,
    ours: Ours,
) -> Line {
    Line {
        paper,
        item,
        what,
        theirs,
        ours,
    }
}

use BenchName::{
    Adp, Burst, ColdRing, HeadOfLine, IopfDaily, IopfImpact, IopfRtt, IopfScale, MemoryMove,
    Neighbour, NicImpact, Overhead, PaBitmap, Pinning, Pool, RnpfRate, SingleFault, Upgrade,
};
use Ours::{Absent, Field};
use Paper::{Npf, Taiji, Vpri};

/// All of it, in the papers' order.
#[rustfmt::skip]
pub const TABLE: &[Line] = &[
    line(Vpri, "Fig 2", "before the handler of a device's fault, p50, µs", "tens to hundreds", Field(IopfRtt, "figures.vpri_in_process_idle_us.pre.p50")),
    line(Vpri, "Fig 3", "round trip of a fault, idle, p50, µs", "10 to 40", Field(IopfRtt, "figures.vpri_in_process_idle_us.total.p50")),
    line(Vpri, "Fig 3", "the same where the engine serves itself", "-", Field(IopfRtt, "figures.vpri_engine_itself_idle_us.total.p50")),
    line(Vpri, "Fig 3", "round trip of a fault, busy host, p99, µs", "427", Field(IopfRtt, "figures.vpri_in_process_busy_us.total.p99")),
    line(Vpri, "3.2", "one tenant's faults and another's p99.9, engine that touches", "blocked", Field(HeadOfLine, "ratios.touching_p999_over_quiet")),
    line(Vpri, "3.2", "the same, qemu-storage-daemon", "blocked", Field(HeadOfLine, "ratios.stock_p999_over_quiet")),
    line(Vpri, "3.2", "the same, engine that looks up", "-", Field(HeadOfLine, "ratios.ours_p999_over_quiet")),
    line(Vpri, "3.2", "the same, p99", "-", Field(HeadOfLine, "ratios.ours_p99_over_quiet")),
    line(Vpri, "Fig 4", "throughput of a disk, 4 KiB, 10 faults of 5 ms a second, paused", "falls with rate and time", Field(IopfImpact, "ratios.4k_pause_10_per_s_throughput_over_quiet")),
    line(Vpri, "Fig 4", "the same, 20 ms", "falls with rate and time", Field(IopfImpact, "ratios.4k_pause_10_per_s_20ms_throughput_over_quiet")),
    line(Vpri, "Fig 4", "throughput of redis, 2 faults of 5 ms a second, dropped", "0.85", Field(NicImpact, "ratios.drop_redis_2_over_quiet")),
    line(Vpri, "Fig 4", "the same, out of order", "-", Field(NicImpact, "ratios.out_of_order_redis_2_over_quiet")),
    line(Vpri, "Fig 4", "throughput of memcached, 2 faults of 5 ms a second, dropped", "0.85", Field(NicImpact, "ratios.drop_memcached_2_over_quiet")),
    line(Vpri, "Fig 5", "network outage by one fault of 5 ms, dropped, µs", "300,000, of TCP", Field(SingleFault, "figures.drop_outage_us")),
    line(Vpri, "Fig 5", "the same, out of order", "-", Field(SingleFault, "figures.out_of_order_outage_us")),
    line(Vpri, "Fig 6", "p99.9 of a disk over quiet, 4 KiB, 10 faults a second, paused", "2 to 11", Field(IopfImpact, "ratios.4k_pause_10_per_s_p999_over_quiet")),
    line(Vpri, "Fig 6", "the same, out of order", "-", Field(IopfImpact, "ratios.4k_out_of_order_10_per_s_p999_over_quiet")),
    line(Vpri, "Fig 6", "p99.9, 2 MiB, 1 fault a second, paused", "seen", Field(IopfImpact, "ratios.2m_pause_1_per_s_p999_over_quiet")),
    line(Vpri, "Fig 6", "p99.99, 4 KiB, 1 fault a second, paused", "seen", Field(IopfImpact, "ratios.4k_pause_1_per_s_p9999_over_quiet")),
    line(Vpri, "Fig 7", "daily faults of 800 VMs, mean of a NIC (fitted)", "38", Field(IopfDaily, "figures.fig7.nic_faults_mean.made.mean")),
    line(Vpri, "Fig 7", "the same, p99 (fitted)", "576", Field(IopfDaily, "figures.fig7.nic_faults_p99.made.mean")),
    line(Vpri, "Fig 7", "daily faults of 800 VMs, mean of a disk (fitted)", "66", Field(IopfDaily, "figures.fig7.block_faults_mean.made.mean")),
    line(Vpri, "Fig 7", "the same, p99 (fitted)", "983", Field(IopfDaily, "figures.fig7.block_faults_p99.made.mean")),
    line(Vpri, "3.4", "VMs with a burst in a day", "> 0.10", Field(IopfDaily, "figures.fig7.burst_share.made.mean")),
    line(Vpri, "3.4", "most faults in a second of a VM with bursts, p50", "23 to 40", Field(IopfDaily, "figures.fig7.burst_peak_p50.made.mean")),
    line(Vpri, "Fig 9", "footprint of a disk in 30 minutes, share of the VM", "0.28", Field(Adp, "figures.generator.block_footprint_share.made")),
    line(Vpri, "Fig 10", "sections that a disk touches less than ten times, share", "0.873", Field(Adp, "figures.generator.block_sections_under_10_share.made")),
    line(Vpri, "Fig 11", "locality of a NIC in 30 minutes", "3 % of the VM", Absent("part of the generator, not a figure of its own")),
    line(Vpri, "Table 2", "look-up, cold, mean, ns", "69", Field(PaBitmap, "figures.lookup_cold_ns.mean")),
    line(Vpri, "Table 2", "look-up, cold, p99, ns", "92", Field(PaBitmap, "figures.lookup_cold_ns.p99")),
    line(Vpri, "Table 2", "update by the event queue, 4 KiB, mean, µs", "1.742", Field(PaBitmap, "figures.update_round_trip_4kib_us.mean")),
    line(Vpri, "Table 2", "the same, p99, µs", "2.341", Field(PaBitmap, "figures.update_round_trip_4kib_us.p99")),
    line(Vpri, "7.1", "IOPS with 100 ns more for each look-up, lower bound", "> 0.999", Field(PaBitmap, "ratios.lookup_plus_100ns_over_off_low95")),
    line(Vpri, "Fig 15a", "16 tenants over 1, one worker, at the same instants", "10.4", Field(IopfScale, "ratios.serialized_16_over_1")),
    line(Vpri, "Fig 15a", "the same, Poisson arrivals", "-", Field(IopfScale, "ratios.poisson_serialized_16_over_1")),
    line(Vpri, "Fig 15b", "16 tenants over 1, on their own CPUs, Poisson", "stable", Field(IopfScale, "ratios.poisson_affined_16_over_1")),
    line(Vpri, "Fig 16", "faults of NICs avoided by ADP", "0.95 to 0.97", Field(Adp, "figures.adp.nic_reduction")),
    line(Vpri, "Fig 16", "faults of disks avoided by ADP", "0.36 to 0.49", Field(Adp, "figures.adp.block_reduction")),
    line(Vpri, "Fig 16", "memory pinned by ADP", "0.043", Field(Adp, "figures.adp.vm_pinned_share")),
    line(Vpri, "Fig 16", "faults of disks avoided by an LRU", "0.12 to 0.15", Field(Adp, "figures.lru.block_reduction")),
    line(Vpri, "Fig 16", "RPR of ADP over an LRU's, NICs", "6.28", Field(Adp, "ratios.rpr_nic_adp_over_lru")),
    line(Vpri, "Fig 16", "RPR of ADP over an LRU's, disks", "10.56", Field(Adp, "ratios.rpr_block_adp_over_lru")),
    line(Vpri, "Fig 17", "active and inactive blocks of a NIC over an hour", "a picture", Field(Adp, "figures.adp_nic_capacity")),
    line(Vpri, "Fig 17", "the same of a VM in production", "a picture", Field(IopfDaily, "figures.adp_nic_capacity")),
    line(Vpri, "Fig 18", "daily faults of 5,000 VMs avoided, NICs", "0.99", Field(IopfDaily, "figures.fig18.nic_reduction.made.mean")),
    line(Vpri, "Fig 18", "daily faults of 5,000 VMs avoided, disks", "0.51", Field(IopfDaily, "figures.fig18.block_reduction.made.mean")),
    line(Vpri, "Fig 18", "memory pinned for that", "0.052", Field(IopfDaily, "figures.fig18.vm_pinned_share.made.mean")),
    line(Vpri, "8", "lines of the PA-bitmap touched in a minute, share", "< 0.05", Field(IopfDaily, "figures.pa_bitmap_lines_touched_a_minute.mean")),
    line(Taiji, "Fig 1, 2, 3", "use of a DPU's CPUs and memory in production", "a study", Absent("there is no fleet of DPUs here")),
    line(Taiji, "Fig 11", "sysbench CPU, attached over released", "≥ 0.97", Field(Overhead, "ratios.cpu")),
    line(Taiji, "Fig 11", "sysbench memory, attached over released", "≥ 0.97", Field(Overhead, "ratios.memory")),
    line(Taiji, "Fig 11", "fio IOPS, attached over released", "≥ 0.97", Field(Overhead, "ratios.fio")),
    line(Taiji, "Fig 12", "redis, attached over released", "≥ 0.95", Field(Overhead, "ratios.redis")),
    line(Taiji, "Fig 13a", "metadata, share of the memory", "0.0038", Field(Pool, "figures.metadata_share")),
    line(Taiji, "Fig 13b", "memory freed over memory spent on it", "9", Field(Pool, "ratios.freed_over_spent")),
    line(Taiji, "Fig 14a", "free memory in a burst, least, over the lowest watermark", "> 1", Field(Burst, "figures.free_min_over_min")),
    line(Taiji, "Fig 14b", "time slices of vCPUs and of swapping", "as set", Absent("bench schedule measures faults beside work, not slices")),
    line(Taiji, "Fig 14c", "hot sections of a steady tenant in a burst, fewest over most", "stable", Field(Burst, "figures.hot_steady_share")),
    line(Taiji, "Fig 14e", "longest stall of requests in a live upgrade, µs", "within limits", Field(Upgrade, "figures.stall_max_us")),
    line(Taiji, "Fig 14f", "faults served within 10 µs in a burst", "0.925, 0.955", Field(Burst, "figures.served_within_10us_share")),
    line(Taiji, "Fig 15a", "water levels over an hour, least free", "> min", Field(Burst, "figures.online.free_min_bytes")),
    line(Taiji, "Fig 15b", "cold share over days", "0.5279", Absent("bench budget has it in virtual time, of made demands")),
    line(Taiji, "Fig 15c", "swapped pages that are zeros", "0.7679", Absent("an input of bench pool, not a result")),
    line(Taiji, "Fig 15d", "faults served within 10 µs online", "0.9357", Field(Burst, "figures.online.served_within_10us_share")),
    line(Taiji, "Fig 15d", "faults served within 15 µs online", "0.99", Field(Burst, "figures.online.served_within_15us_share")),
    line(Npf, "3", "packets of a tenant beside one whose ring is cold, over quiet", "-", Field(Neighbour, "ratios.b_pps_over_quiet")),
    line(Npf, "Table 3", "throughput without wiring over all RAM wired", "performant", Field(Pinning, "ratios.none_over_static")),
    line(Npf, "Table 3", "the next buffers of each ring wired over all RAM", "-", Field(Pinning, "ratios.floor_over_static")),
    line(Npf, "Table 3", "share of RAM that either of them wires", "none", Field(Pinning, "figures.wired_share_of_ram")),
    line(Npf, "Fig 4a", "time that a cold ring takes to recover, dropped, s", "tens", Field(ColdRing, "figures.drop_recovery_s")),
    line(Npf, "Fig 4a", "the same, backup ring", "like pinned", Field(ColdRing, "figures.backup_ring_recovery_s")),
    line(Npf, "Fig 4a", "the same, out of order", "-", Field(ColdRing, "figures.out_of_order_recovery_s")),
    line(Npf, "Fig 4b", "throughput of a ring that was cold over pinned, backup ring", "like pinned", Field(ColdRing, "ratios.backup_ring_steady_over_pinned")),
    line(Npf, "Fig 4b", "a stock guest that was evicted, recovery over one whose ring is wired", "-", Field(ColdRing, "ratios.out_of_order_recovery_over_wired_ring")),
    line(Npf, "Table 5", "throughput of memcached in four VMs over two that are pinned", "1.56", Field(MemoryMove, "ratios.npf_4_over_pinning_2")),
    line(Npf, "Fig 7", "working sets that change over, hits over a fixed split", "seen", Field(MemoryMove, "ratios.hits_over_split")),
    line(Npf, "Fig 10", "stream with a minor fault in 10,000 packets over the optimum, backup ring", "seen", Field(RnpfRate, "ratios.backup_ring_minor_1e4")),
    line(Npf, "Fig 10", "the same, out of order", "-", Field(RnpfRate, "ratios.out_of_order_minor_1e4")),
    line(Npf, "Fig 10", "major faults, backup ring", "seen", Field(RnpfRate, "ratios.backup_ring_major_1e4")),
    line(Npf, "Fig 10", "InfiniBand, notified of faults", "seen", Absent("an Ethernet device has no such notice")),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, path::Path};

    /// String literals of a bench's sources, and of what all have in common.
    fn literals(name: BenchName) -> Vec<String> {
        let benches = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/src");
        let folder = benches.join(name.to_string().replace('-', "_"));
        assert!(folder.join("mod.rs").exists(), "there is no bench {name}");
        let mut all = Vec::new();
        for folder in [folder, benches.join("harness")] {
            for file in fs::read_dir(folder).unwrap() {
                let text = fs::read_to_string(file.unwrap().path()).unwrap();
                let text = text.split("#[cfg(test)]\nmod tests").next().unwrap();
                let quoted = text
                    .lines()
                    .flat_map(|line| line.split('"').skip(1).step_by(2));
                all.extend(quoted.map(str::to_owned));
            }
        }
        all
    }

    /// True if `name` can come of `literal`, a name or a format of one.
    fn makes(literal: &str, name: &str) -> bool {
        let mut pieces = literal.split('{');
        let first = pieces.next().unwrap_or_default();
        let Some(mut rest) = name.strip_prefix(first) else {
            return false;
        };
        let fixed: Option<Vec<&str>> = pieces
            .map(|piece| piece.split_once('}').map(|(_, fixed)| fixed))
            .collect();
        let Some(fixed) = fixed else {
            return false;
        };
        if first.is_empty() && fixed.iter().all(|piece| piece.is_empty()) {
            return false;
        }
        let Some((last, middle)) = fixed.split_last() else {
            return rest.is_empty();
        };
        for piece in middle {
            match rest.find(piece) {
                Some(at) => rest = &rest[at + piece.len()..],
                None => return false,
            }
        }
        rest.ends_with(last)
    }

    #[test]
    fn names_are_told_from_formats() {
        assert!(makes("p50", "p50") && !makes("p50", "p500"));
        assert!(makes("{way}_{case}_us", "vpri_idle_us"));
        assert!(!makes("{way}_{case}_us", "vpri_idle_ms") && !makes("{name}", "anything"));
    }

    #[test]
    fn every_bench_and_field_exists() {
        for line in TABLE {
            let Field(name, path) = line.ours else {
                continue;
            };
            let mut parts = path.split('.');
            let section = parts.next().unwrap();
            assert!(["figures", "ratios", "peers"].contains(&section), "{path}");
            let known = literals(name);
            for part in parts {
                let exists = known.iter().any(|literal| makes(literal, part));
                assert!(exists, "bench {name} has no {part} ({path})");
            }
        }
    }

    #[test]
    fn lines_say_what_they_are_and_each_is_there_once() {
        for (at, line) in TABLE.iter().enumerate() {
            assert!(!line.item.is_empty() && !line.what.is_empty() && !line.theirs.is_empty());
            if let Absent(why) = line.ours {
                assert!(!why.is_empty(), "{}", line.item);
            }
            assert!(!TABLE[..at].contains(line), "{} twice", line.item);
        }
    }
}
