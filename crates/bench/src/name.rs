// SPDX-License-Identifier: Apache-2.0
//! The benches by name.

use clap::ValueEnum;

/// Benches by name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum BenchName {
    /// What the access log and a DMA protector cost a disk, switched on and off in turns
    AccessLog,
    /// Page faults of devices under no protector, a simple LRU, the paper's and ours, of synthetic guests
    Adp,
    /// The disk, or the network interface, of a squeezed guest with a DMA protector and without, in turns
    AdpLive,
    /// Time to get an evicted page back, by CPU and by device, beside kernel zram
    Fault,
    /// Faults of 1 to 8 threads at a time beside kernel zram, and beside a fault that is held
    FaultParallel,
    /// What a hostile tenant takes from a steady one on the same engine, beside one of its own
    Fairness,
    /// 4 KiB I/O of vhost-user-blk, beside qemu-storage-daemon
    Blk,
    /// A hundred days of fifty VMs under one budget, in virtual time, beside a fixed split of it
    Budget,
    /// A tenant whose working set doubles, under a budget, beside kernel zram under a memory cgroup
    Burst,
    /// A thousand SIGKILLs of daemon and DPU process at random instants, under stand-ins and a stock guest that check all
    /// that they read: what is wrong afterwards, and how long they stood still
    Crash,
    /// Unmaps a second that are queued, beside unmaps that wait for their invalidation
    GmemAsync,
    /// Allocations and frees a second of virtual addresses, beside three other allocators
    GmemVa,
    /// Page faults of devices over days of production, of 800 and of 5,000 VMs, without a protector and with ours
    IopfDaily,
    /// What page faults do to the throughput and the tail of a disk, pause against out of order
    IopfImpact,
    /// What programs in a stock guest lose by its being attached, while nothing is evicted: CPU, memory, disk, redis
    Overhead,
    /// Look-ups and updates of the PA-bitmap of a terabyte, and what look-ups cost a disk
    PaBitmap,
    /// What one tenant's page faults do to another's requests on the same engine
    HeadOfLine,
    /// Round trip of an I/O page fault, idle and busy, by VPRI and by a model of ATS and PRI
    IopfRtt,
    /// Page faults of 1 to 16 tenants at a time, serialized and on the tenants' CPUs; and beside a storm
    IopfScale,
    /// Faults of two busy VMs that are scanned and evicted from meanwhile, over the same without
    Schedule,
    /// Requests of VMs that demand half again their budget, over those with all memory and over kernel zram; and
    /// two VMs whose working sets change, over a static split
    Overcommit,
    /// Translation requests per second of the performance model
    Sim,
    /// What evicted memory costs, in memory, with the paper's mix of pages: content, fragmentation, metadata
    Pool,
    /// Attach, squeeze, recovery and detach of dense VMs of 1, 4 and 16 GiB, and which costs grow faster than RAM
    RealSize,
    /// Pages that go to another host's memory and come back, its link or server being lost meanwhile
    Remote,
    /// Packets a second of the network device beside DPDK's, with testpmd as the front end of both
    NetPps,
    /// Operations of a server whose receive ring is cold, by the policy for receive faults, over the same with a warm one
    ColdRing,
    /// What a tenant whose receive ring is cold costs another one on the same engine
    Neighbour,
    /// How long one absent page interrupts a stream of packets, by the policy for receive faults
    SingleFault,
    /// Throughput of a stream of messages at each rate of receive faults, by the policy for them
    RnpfRate,
    /// Throughput, memory that stays, and what a neighbour can have, by which buffers of a network device are wired
    Pinning,
    /// What receive faults do to redis, memcached and UDP in a stock guest, dropped against out of order
    NicImpact,
    /// Guests with network devices whose memory moves between them, beside guests whose memory is pinned
    MemoryMove,
    /// iperf3 in a stock guest by our network device, beside QEMU's own
    NetGuest,
    /// Throughput of a busy guest attached over released, in turns, with and without a limit
    GuestCost,
    /// Swap-in by CPU and by device, swap-out and bytes a page of each tier, beside kernel swap on zram and on the same
    /// disk
    Swap,
    /// How much cold memory is found, how soon, and what evicting it costs
    Tracker,
    /// Live upgrades of the daemon of guests in use, and attempts with programs that are broken in twenty ways
    Upgrade,
}

impl std::fmt::Display for BenchName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn make_bench_runs_every_bench() {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/bench");
        let script = std::fs::read_to_string(script).unwrap();
        let (_, list) = script.split_once("all=(").unwrap();
        let (list, _) = list.split_once(')').unwrap();
        let mut run: Vec<_> = list.split_whitespace().map(str::to_owned).collect();
        let mut all: Vec<_> =
            (BenchName::value_variants().iter().map(ToString::to_string)).collect();
        run.sort_unstable();
        all.sort_unstable();
        assert_eq!(run, all);
    }
}
