// SPDX-License-Identifier: Apache-2.0
//! Statements about HyperTRIO as a whole, its PTB and its partitions (II-A, III, V-B, V-D).

use pagetide_trace::{ThirdPage, Workload};

use super::{Statement, WORKLOADS, gbps, observe, of_orders, range, share};
use crate::config::{CacheConfig, Config, PtbUnit, Replacement, WalkCost};
use crate::findings::lab::{Interleaving, Lab, Present, Trace};
use crate::findings::report::Observation;
use crate::findings::setting::Setting;

/// Shares of the link of HyperTRIO at 1,024 tenants, by workload.
fn hypertrio_shares(lab: &mut Lab, setting: Setting, order: Interleaving) -> [f64; 3] {
    WORKLOADS.map(|workload| {
        let trace = Trace::new(workload, order, 1024, setting.third);
        share(lab, &trace, &setting.hypertrio())
    })
}

/// Bandwidth of the tenant in question, with each of the seven others at 1.
const HIGH_BANDWIDTH: u32 = 8;

/// Percent of the high-bandwidth tenant's requests that the DevTLB misses:
/// alone, and beside seven low-bandwidth tenants.
fn misses(lab: &mut Lab, config: &Config, third: ThirdPage) -> (f64, f64) {
    let mut trace = Trace::new(Workload::Iperf3, Interleaving::Rr1, 8, third);
    trace.weights = vec![1; 8];
    trace.weights[0] = HIGH_BANDWIDTH;
    let mut percent = |present| {
        trace.present = present;
        let outcome = lab.outcome(&trace, config);
        let tenant = outcome.tenants.first().cloned().unwrap_or_default();
        100.0 - 100.0 * crate::outcome::ratio(tenant.devtlb_hits, tenant.requests)
    };
    (percent(Present::FirstTenant), percent(Present::Everybody))
}

pub(super) const HYPERTRIO_SCALES: Statement = Statement {
    id: "hypertrio-above-90-percent",
    section: "V-B, VII",
    claim: "HyperTRIO utilizes more than 90% of the 200 Gb/s link with 1,024 tenants",
    expected: "more than 90.0% for every workload in RR1 and RR4 at 1,024 tenants; no tolerance",
    cause: "32 entries of one request each hold 11 packets, and with 24 accesses a walk takes as long \
            as 35 packets on the link, so most of the rate has to come from prefetching: sent for 48 \
            requests later, it comes too late for many of them. With a short walk and the ring as \
            third page, the two prefetched pages are all that a packet asks for, so a packet that \
            hits sends no prefetch (III: in the case of a miss) and its successor misses",
    look: hypertrio_scales,
};

fn hypertrio_scales(lab: &mut Lab) -> Vec<Observation> {
    observe(Setting::all(), |setting| {
        let rr1 = range(&hypertrio_shares(lab, setting, Interleaving::Rr1));
        let rr4 = range(&hypertrio_shares(lab, setting, Interleaving::Rr4));
        let by_order = [(Interleaving::Rr1, rr1), (Interleaving::Rr4, rr4)];
        (of_orders(&by_order), rr1.0 > 90.0 && rr4.0 > 90.0)
    })
}

pub(super) const RAND_ORDER: Statement = Statement {
    id: "rand1-80-percent",
    section: "V-B",
    claim: "in the least predictable RAND1 order HyperTRIO achieves up to 80% link utilization \
            with 1,024 tenants",
    expected: "80% of the link for the best workload, give or take 5 points; reported as it comes",
    cause: "in a random order the predictor has nothing to learn (the buffer supplies 0.2% of the \
            requests), and no structure but the oracle may know the future. What is left is the PTB: \
            32 requests in flight give 67 to 70% with a short walk and less with 24 accesses, 32 \
            packets in flight give more than 90% with either",
    look: rand_order,
};

fn rand_order(lab: &mut Lab) -> Vec<Observation> {
    observe(Setting::all(), |setting| {
        let shares = hypertrio_shares(lab, setting, Interleaving::Rand1);
        let most = range(&shares).1;
        (
            of_orders(&[(Interleaving::Rand1, range(&shares))]),
            (75.0..=85.0).contains(&most),
        )
    })
}

pub(super) const PTB_OF_32: Statement = Statement {
    id: "ptb-32-gives-136-gbps",
    section: "V-D",
    claim: "a PTB of 32 entries achieves an aggregated 136 Gb/s for 1,024 tenants for all benchmarks",
    expected: "136 Gb/s for every workload in RR1, give or take 10%",
    cause: "32 entries of one request each hold 11 packets: 11 packets in the 1,000 ns of a short walk \
            are 136 Gb/s, in the 2,100 ns of 24 accesses 65. 32 entries of one packet each are 183 Gb/s \
            with 24 accesses and the whole link with a short walk",
    look: ptb_of_32,
};

fn ptb_of_32(lab: &mut Lab) -> Vec<Observation> {
    observe(Setting::all(), |setting| {
        let rates = WORKLOADS.map(|workload| {
            let trace = Trace::new(workload, Interleaving::Rr1, 1024, setting.third);
            gbps(lab, &trace, &setting.partitioned(32))
        });
        let (least, most) = range(&rates);
        (
            format!("{least:.1} to {most:.1} Gb/s"),
            least >= 122.4 && most <= 149.6,
        )
    })
}

pub(super) const ISOLATION: Statement = Statement {
    id: "partitions-isolate",
    section: "III",
    claim: "partitioning prevents a low-bandwidth tenant from evicting translations for \
            high-bandwidth tenants",
    expected: "iperf3, one tenant with 8 times the bandwidth of each of 7 others: beside them it \
               misses in the DevTLB as often as alone with 8 partitions (a tenth more at most), \
               and at least twice as often without",
    cause: "",
    look: isolation,
};

fn isolation(lab: &mut Lab) -> Vec<Observation> {
    observe(Setting::of_one_entry(), |setting| {
        let (own_alone, own_beside) = misses(lab, &setting.partitioned(1), setting.third);
        let (one_alone, one_beside) = misses(lab, &setting.base(), setting.third);
        (
            format!(
                "misses of the high-bandwidth tenant, alone and beside the others: \
                 {own_alone:.2} and {own_beside:.2}% with partitions, \
                 {one_alone:.2} and {one_beside:.2}% without"
            ),
            own_beside <= 1.1 * own_alone && one_beside >= 2.0 * one_alone,
        )
    })
}

/// No cache but the context cache, so that every request is walked in full.
fn without_caches(mut config: Config) -> Config {
    config.devtlb = CacheConfig::OFF;
    config.l2 = CacheConfig::OFF;
    config.l3 = CacheConfig::OFF;
    config.prefetch.enabled = false;
    config
}

pub(super) const WALK_ACCESSES: Statement = Statement {
    id: "walk-24-or-35-accesses",
    section: "II-A",
    claim: "a two-dimensional walk requires 24 or 35 memory accesses for 4-level or 5-level page tables",
    expected: "exactly as many a walk, with every request walked in full",
    cause: "",
    look: walk_accesses,
};

fn walk_accesses(lab: &mut Lab) -> Vec<Observation> {
    let settings = Setting::of_one_entry();
    // A short walk is another reading of just this.
    let nested = settings.into_iter().filter(|s| s.cost == WalkCost::Nested);
    observe(nested.collect(), |setting| {
        let trace = Trace::new(Workload::Iperf3, Interleaving::Rr1, 4, setting.third);
        let [four, five] = [4, 5].map(|levels| {
            let mut config = without_caches(setting.base());
            (config.walk.guest_levels, config.walk.host_levels) = (levels, levels);
            let outcome = lab.outcome(&trace, &config);
            crate::outcome::ratio(outcome.walk_accesses, outcome.walks)
        });
        let is = |got: f64, expected: f64| (got - expected).abs() < 1e-9;
        (
            format!("{four:.2} and {five:.2} accesses"),
            is(four, 24.0) && is(five, 35.0),
        )
    })
}

/// Outstanding requests that are tried.
const OUTSTANDING: [u32; 9] = [84, 90, 96, 102, 105, 108, 111, 114, 120];

pub(super) const OUTSTANDING_REQUESTS: Statement = Statement {
    id: "112-outstanding-requests",
    section: "III",
    claim: "when every translation of 1500 B packets is a full 4-level two-dimensional walk, the PTB has to keep track \
            of 112 outstanding requests",
    expected: "the least number with 99.9% of the link and no caches, of those that are multiples of a packet's three \
               requests, is 112, give or take a tenth",
    cause: "",
    look: outstanding_requests,
};

fn outstanding_requests(lab: &mut Lab) -> Vec<Observation> {
    let settings = Setting::all().into_iter();
    let nested = settings.filter(|s| s.cost == WalkCost::Nested);
    observe(nested.collect(), |setting| {
        let trace = Trace::new(Workload::Iperf3, Interleaving::Rr1, 4, setting.third);
        let shares = OUTSTANDING.map(|requests| {
            let mut config = without_caches(setting.hypertrio());
            config.ptb.entries = match setting.unit {
                PtbUnit::Requests => requests,
                PtbUnit::Packets => requests / 3,
            };
            (requests, share(lab, &trace, &config))
        });
        match shares.iter().find(|(_, share)| *share >= 99.9) {
            Some((requests, _)) => (
                format!("{requests} requests"),
                (101..=123).contains(requests),
            ),
            None => (format!("more than {}", OUTSTANDING[8]), false),
        }
    })
}

pub(super) const HYPERTRIO_FILLS_THE_LINK: Statement = Statement {
    id: "hypertrio-up-to-100-percent",
    section: "V-B",
    claim: "HyperTRIO enables the use of up to 100% of the total link bandwidth with 1,024 tenants",
    expected: "at least 99% for the best of the workloads in RR1 and RR4",
    cause: "as for the 90% of hypertrio-above-90-percent: what 32 entries of one request each, and prefetches that come \
            too late, leave open",
    look: hypertrio_fills_the_link,
};

fn hypertrio_fills_the_link(lab: &mut Lab) -> Vec<Observation> {
    observe(Setting::all(), |setting| {
        let mut shares = hypertrio_shares(lab, setting, Interleaving::Rr1).to_vec();
        shares.extend(hypertrio_shares(lab, setting, Interleaving::Rr4));
        let most = range(&shares).1;
        (format!("{most:.1}% at most"), most >= 99.0)
    })
}

pub(super) const INTERLEAVING: Statement = Statement {
    id: "interleaving-little-effect",
    section: "V-B",
    claim: "tenant interleaving has little effect on HyperTRIO",
    expected: "at 1,024 tenants RR4's share of the link is within 10 points of RR1's for every workload (for RAND1, \
               which the paper excepts, see rand1-80-percent)",
    cause: "where misses limit the link, a burst saves up to three of four of them. That is most with the \
            ring as third page, where prefetching gives less in RR1 (see hypertrio-above-90-percent), so RR4 \
            gains up to 13 points",
    look: interleaving,
};

fn interleaving(lab: &mut Lab) -> Vec<Observation> {
    observe(Setting::all(), |setting| {
        let rr1 = hypertrio_shares(lab, setting, Interleaving::Rr1);
        let rr4 = hypertrio_shares(lab, setting, Interleaving::Rr4);
        let differences: Vec<f64> = rr1.iter().zip(&rr4).map(|(one, four)| four - one).collect();
        let (least, most) = range(&differences);
        (
            format!("RR4 is {least:+.1} to {most:+.1} points from RR1"),
            least >= -10.0 && most <= 10.0,
        )
    })
}

pub(super) const PARTITIONS_UNTIL_SHARED: Statement = Statement {
    id: "partitions-until-shared",
    section: "V-D",
    claim: "with partitions link utilization stays high until multiple devices start using the same partition",
    expected: "PTB of 1, 8 partitions, RR1, iperf3, whose active set a partition holds: at least 90% of the link at 4 and \
               8 tenants, and at 16 less than nine tenths of that at 8",
    cause: "",
    look: partitions_until_shared,
};

fn partitions_until_shared(lab: &mut Lab) -> Vec<Observation> {
    observe(Setting::of_one_entry(), |setting| {
        let [four, eight, sixteen] = [4, 8, 16].map(|tenants| {
            let trace = Trace::new(Workload::Iperf3, Interleaving::Rr1, tenants, setting.third);
            share(lab, &trace, &setting.partitioned(1))
        });
        (
            format!("{four:.1}% at 4 tenants, {eight:.1}% at 8, {sixteen:.1}% at 16"),
            four >= 90.0 && eight >= 90.0 && sixteen < 0.9 * eight,
        )
    })
}

pub(super) const PARTITIONS_OVER_ASSOCIATIVITY: Statement = Statement {
    id: "partitions-better-than-associativity-or-policy",
    section: "V-D",
    claim: "partitioning improves utilization better than simply increasing associativity or changing the replacement \
            policy of the DevTLB",
    expected: "mean over the workloads at 8 tenants in RR1: partitions have at least the bandwidth of Base, of Base with \
               LRU, and of Base with a fully associative DevTLB",
    cause: "mediastream and websearch have four times as many active pages as a partition has entries. A \
            fully associative DevTLB keeps ring and mailbox of all eight tenants and has the rest for data \
            pages; where a miss costs a full walk, that is worth 7% more than partitions. Against Base and \
            LRU partitions win four times over under every reading",
    look: partitions_over_associativity,
};

fn partitions_over_associativity(lab: &mut Lab) -> Vec<Observation> {
    observe(Setting::of_one_entry(), |setting| {
        let mut lru = setting.base();
        lru.devtlb.replacement = Replacement::Lru;
        let mut associative = setting.base();
        associative.devtlb.ways = associative.devtlb.entries;
        let configs = [setting.partitioned(1), setting.base(), lru, associative];
        let [own, base, lru, associative] = configs.map(|config| {
            let rates = WORKLOADS.map(|workload| {
                let trace = Trace::new(workload, Interleaving::Rr1, 8, setting.third);
                gbps(lab, &trace, &config)
            });
            rates.iter().sum::<f64>() / 3.0
        });
        (
            format!(
                "{own:.1} Gb/s; Base {base:.1}, LRU {lru:.1}, fully associative {associative:.1}"
            ),
            own >= base && own >= lru && own >= associative,
        )
    })
}

pub(super) const PARTITIONS_DO_NOT_SCALE: Statement = Statement {
    id: "partitions-alone-do-not-scale",
    section: "V-D",
    claim: "partitioning still does not solve the scalability challenge in hyper-tenant environments",
    expected: "PTB of 1: below a quarter of the link for every workload in RR1 at 256 and 1,024 tenants",
    cause: "",
    look: partitions_do_not_scale,
};

fn partitions_do_not_scale(lab: &mut Lab) -> Vec<Observation> {
    observe(Setting::of_one_entry(), |setting| {
        let mut shares = Vec::new();
        for workload in WORKLOADS {
            for tenants in [256, 1024] {
                let trace = Trace::new(workload, Interleaving::Rr1, tenants, setting.third);
                shares.push(share(lab, &trace, &setting.partitioned(1)));
            }
        }
        let (least, most) = range(&shares);
        (format!("{least:.1} to {most:.1}%"), most < 25.0)
    })
}

/// A PTB of eight entries; each workload is a statement of its own.
const PTB_OF_8: Statement = Statement {
    id: "",
    section: "V-D",
    claim: "with eight PTB entries the partitioned design reaches full I/O bandwidth with up to \
            16 tenants",
    expected: "at least 95% of the link in RR1 at 4, 8 and 16 tenants",
    cause: "",
    look: ptb_of_8_iperf3,
};

pub(super) const PTB_OF_8_IPERF3: Statement = Statement {
    id: "ptb-8-enough-for-16-iperf3",
    ..PTB_OF_8
};

/// Of the workloads whose active set is larger than a partition.
const LARGE_SET_CAUSE: &str = "the live pages of a tenant are four times the 8 entries of its partition, so misses are \
     frequent even for a tenant alone; with four tenants only four of the eight partitions are used";

pub(super) const PTB_OF_8_MEDIASTREAM: Statement = Statement {
    id: "ptb-8-enough-for-16-mediastream",
    cause: LARGE_SET_CAUSE,
    look: ptb_of_8_mediastream,
    ..PTB_OF_8
};

pub(super) const PTB_OF_8_WEBSEARCH: Statement = Statement {
    id: "ptb-8-enough-for-16-websearch",
    cause: LARGE_SET_CAUSE,
    look: ptb_of_8_websearch,
    ..PTB_OF_8
};

fn ptb_of_8_iperf3(lab: &mut Lab) -> Vec<Observation> {
    ptb_of_8(lab, Workload::Iperf3)
}

fn ptb_of_8_mediastream(lab: &mut Lab) -> Vec<Observation> {
    ptb_of_8(lab, Workload::Mediastream)
}

fn ptb_of_8_websearch(lab: &mut Lab) -> Vec<Observation> {
    ptb_of_8(lab, Workload::Websearch)
}

fn ptb_of_8(lab: &mut Lab, workload: Workload) -> Vec<Observation> {
    observe(Setting::all(), |setting| {
        let shares = [4, 8, 16].map(|tenants| {
            let trace = Trace::new(workload, Interleaving::Rr1, tenants, setting.third);
            share(lab, &trace, &setting.partitioned(8))
        });
        let [four, eight, sixteen] = shares;
        (
            format!("{four:.1}% at 4 tenants, {eight:.1}% at 8, {sixteen:.1}% at 16"),
            range(&shares).0 >= 95.0,
        )
    })
}
