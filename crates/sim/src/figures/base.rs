// SPDX-License-Identifier: Apache-2.0
//! Figures of II to V-C: what was measured, Base and HyperTRIO as wholes, and Base with changes.

use super::figure::{
    AT_1024, BASE, BEYOND_32, BUFFER, Figure, GBPS, GROUND, HYPERTRIO, IN_RR, IN_RR1, IOTLB_MISSES,
    IPERF3, LINK, OF_ALL_ORDERS, PAPERS, Readings, Traces, WEBSEARCH,
};
use super::paper::{Ours, Quantity, Stated};
use super::rows::{design, entries, order, replacement, shape, tenants, workload};

pub(super) const FIGURE_4: Figure = Figure {
    id: "4",
    title: "Miss rate of the IOMMU's TLB by connections (AMD)",
    section: "II-B",
    about: "A measurement in the paper; this is what the model has in its place: a device without a DevTLB \
            on 20 Gb/s, and an IOTLB of 640 entries, fully associative, LRU. Its size is assumed: the processor's \
            is not published, and 640 is where 80 connections of 8 active pages fit. The driver's start is left \
            out. The model's rate jumps where the pages no longer fit; the paper's grows over 40 connections",
    settings: "preset = \"base\"\nlink.gbps = 20\nptb.entries = 32\ndevtlb.entries = 0\n\
               iotlb.entries = 640\niotlb.ways = 640\niotlb.replacement = \"lru\"",
    traces: Traces {
        tenants: &[2, 40, 60, 70, 80, 90, 100, 110, 120],
        workloads: &["iperf3"],
        settings: "input.synthetic.init.share = 0.0\n",
        ..PAPERS
    },
    x_name: "connections",
    y: IOTLB_MISSES,
    y_name: "IOTLB misses",
    paper: &[
        Stated {
            what: "miss rate below 80 connections",
            paper: "less than 0.1%",
            ours: Ours::Percent(&[(tenants, &["2", "40", "60", "70"])], IOTLB_MISSES),
        },
        Stated {
            what: "miss rate at 120 connections",
            paper: "4.3%",
            ours: Ours::Percent(&[(tenants, &["120"])], IOTLB_MISSES),
        },
        Stated {
            what: "page-table reads at 120 connections over those at 80",
            paper: "more than 400 times",
            ours: Ours::Ratio(
                &[(tenants, &["120"])],
                &[(tenants, &["80"])],
                Quantity::Of("walk_accesses"),
            ),
        },
    ],
    ..GROUND
};

pub(super) const FIGURE_5: Figure = Figure {
    id: "5",
    title: "Bandwidth by pairs of client and server (Intel)",
    section: "II-B",
    about: "A measurement in the paper; here Base on a link of 10 Gb/s. With 24 accesses a walk the knee is at 8 \
            pairs in both, but the floor is not the paper's: a walk with its two crossings of PCIe takes 2.1 us, in which a \
            packet of 1542 bytes cannot come to less than 5 Gb/s. What the machine loses beyond that is not the latency \
            of translation alone. With a short walk nothing is lost at this rate",
    settings: "preset = \"base\"\nlink.gbps = 10",
    traces: Traces {
        tenants: &[1, 2, 4, 8, 12, 16, 24, 32, 40],
        workloads: &["iperf3"],
        ..PAPERS
    },
    x_name: "pairs",
    paper: &[
        Stated {
            what: "use of the link, two to eight pairs",
            paper: "99%",
            ours: Ours::Percent(&[(tenants, &["2", "4", "8"])], LINK),
        },
        Stated {
            what: "Gb/s with more than 16 pairs",
            paper: "around 0.5",
            ours: Ours::Range(&[(tenants, &["24", "32", "40"])], GBPS),
        },
    ],
    ..GROUND
};

pub(super) const FIGURE_9: Figure = Figure {
    id: "9",
    title: "Bandwidth by shape of the DevTLB and connections",
    section: "IV-D",
    about: "Base with a DevTLB of 64 entries, of 8 ways and fully associative, RR1",
    settings: "preset = \"base\"\ndevtlb.ways = [8, 64]",
    traces: Traces {
        tenants: &[1, 2, 4, 8, 16, 32, 64, 128],
        ..PAPERS
    },
    panel: Some(workload),
    series: &[shape],
    x_name: "connections",
    paper: &[
        Stated {
            what: "8 ways, iperf3: use of the link up to four connections",
            paper: "full",
            ours: Ours::Percent(
                &[IPERF3, (shape, &["8 ways"]), (tenants, &["1", "2", "4"])],
                LINK,
            ),
        },
        Stated {
            what: "the same with more than four",
            paper: "entries of others are evicted",
            ours: Ours::Percent(
                &[IPERF3, (shape, &["8 ways"]), (tenants, &["8", "16", "32"])],
                LINK,
            ),
        },
    ],
    ..GROUND
};

pub(super) const FIGURE_10: Figure = Figure {
    id: "10",
    title: "Scalability of HyperTRIO and Base",
    section: "V-B",
    about: "Table IV, all three orders",
    settings: "preset = [\"base\", \"hypertrio\"]",
    traces: OF_ALL_ORDERS,
    readings: Readings::All,
    panel: Some(order),
    series: &[design, workload],
    paper: &[
        Stated {
            what: "Base with more than 32 tenants, Gb/s",
            paper: "12 to 30",
            ours: Ours::Range(&[BASE, BEYOND_32], GBPS),
        },
        Stated {
            what: "Base with 1,024 tenants, use of the link",
            paper: "6% (VII)",
            ours: Ours::Percent(&[BASE, AT_1024], LINK),
        },
        Stated {
            what: "HyperTRIO with 1,024 tenants in RR1 and RR4, use of the link",
            paper: "up to 100%, more than 90% (VII)",
            ours: Ours::Percent(&[HYPERTRIO, AT_1024, IN_RR], LINK),
        },
        Stated {
            what: "HyperTRIO with 1,024 tenants in RAND1, use of the link",
            paper: "up to 80%",
            ours: Ours::Percent(&[HYPERTRIO, AT_1024, (order, &["RAND1"])], LINK),
        },
        Stated {
            what: "websearch, 1,024 tenants, RR1: requests that the prefetch buffer supplies",
            paper: "45%",
            ours: Ours::Percent(&[HYPERTRIO, AT_1024, IN_RR1, WEBSEARCH], BUFFER),
        },
    ],
    ..GROUND
};

pub(super) const FIGURE_11A: Figure = Figure {
    id: "11a",
    title: "Base with a larger DevTLB",
    section: "V-C",
    about: "Base with 64 and with 1,024 entries of 8 ways",
    settings: "preset = \"base\"\ndevtlb.entries = [64, 1024]",
    traces: OF_ALL_ORDERS,
    panel: Some(order),
    series: &[entries, workload],
    paper: &[
        Stated {
            what: "RR1, 1,024 entries over 64, at 16 to 64 tenants",
            paper: "higher bandwidth for up to 64 tenants",
            ours: Ours::Ratio(
                &[
                    IN_RR1,
                    (entries, &["1024 entries"]),
                    (tenants, &["16", "32", "64"]),
                ],
                &[
                    IN_RR1,
                    (entries, &["64 entries"]),
                    (tenants, &["16", "32", "64"]),
                ],
                GBPS,
            ),
        },
        Stated {
            what: "the same at 256 and more, RR1 and RAND1",
            paper: "the same beyond 128",
            ours: Ours::Ratio(
                &[
                    (order, &["RR1", "RAND1"]),
                    (entries, &["1024 entries"]),
                    (tenants, &["256", "512", "1024"]),
                ],
                &[
                    (order, &["RR1", "RAND1"]),
                    (entries, &["64 entries"]),
                    (tenants, &["256", "512", "1024"]),
                ],
                GBPS,
            ),
        },
        Stated {
            what: "websearch, 16 tenants: 64 entries in RR4 over 1,024 entries in RR1",
            paper: "3 times",
            ours: Ours::Ratio(
                &[
                    (order, &["RR4"]),
                    (entries, &["64 entries"]),
                    (tenants, &["16"]),
                    WEBSEARCH,
                ],
                &[
                    IN_RR1,
                    (entries, &["1024 entries"]),
                    (tenants, &["16"]),
                    WEBSEARCH,
                ],
                GBPS,
            ),
        },
    ],
    ..GROUND
};

pub(super) const FIGURE_11B: Figure = Figure {
    id: "11b",
    title: "Base by replacement of the DevTLB",
    section: "V-C",
    about: "Base with LRU, LFU and the oracle, RR1",
    settings: "preset = \"base\"\ndevtlb.replacement = [\"lru\", \"lfu\", \"oracle\"]",
    panel: Some(workload),
    series: &[replacement],
    paper: &[
        Stated {
            what: "iperf3, 16 tenants: LFU over LRU",
            paper: "up to two times",
            ours: Ours::Ratio(
                &[IPERF3, (tenants, &["16"]), (replacement, &["LFU"])],
                &[IPERF3, (tenants, &["16"]), (replacement, &["LRU"])],
                GBPS,
            ),
        },
        Stated {
            what: "the same at 8 to 32 tenants",
            paper: "LFU outperforms LRU between few and many",
            ours: Ours::Ratio(
                &[
                    IPERF3,
                    (tenants, &["8", "16", "32"]),
                    (replacement, &["LFU"]),
                ],
                &[
                    IPERF3,
                    (tenants, &["8", "16", "32"]),
                    (replacement, &["LRU"]),
                ],
                GBPS,
            ),
        },
        Stated {
            what: "oracle at 1,024 tenants, use of the link",
            paper: "does not scale either",
            ours: Ours::Percent(&[AT_1024, (replacement, &["oracle"])], LINK),
        },
    ],
    ..GROUND
};

pub(super) const FIGURE_11C: Figure = Figure {
    id: "11c",
    title: "Base with fully associative DevTLBs and the oracle",
    section: "V-C",
    about: "The paper does not say how many entries its lines have; these are the active sets of its three \
            workloads (8, 32, 36), and the 64 of Base",
    settings: "preset = \"base\"\ndevtlb.replacement = \"oracle\"",
    variants: "[[variant]]\nname = \"8\"\ndevtlb.entries = 8\ndevtlb.ways = 8\n\
               [[variant]]\nname = \"32\"\ndevtlb.entries = 32\ndevtlb.ways = 32\n\
               [[variant]]\nname = \"36\"\ndevtlb.entries = 36\ndevtlb.ways = 36\n\
               [[variant]]\nname = \"64\"\ndevtlb.entries = 64\ndevtlb.ways = 64",
    panel: Some(workload),
    series: &[entries],
    y: LINK,
    y_name: "use of the link",
    paper: &[
        Stated {
            what: "use of the link with more than eight tenants, active set of the workload",
            paper: "low",
            ours: Ours::Percent(
                &[
                    (entries, &["8 entries"]),
                    (tenants, &["16", "32", "64"]),
                    IPERF3,
                ],
                LINK,
            ),
        },
        Stated {
            what: "use of the link with 64 entries, at 4 and 8 tenants",
            paper: "high",
            ours: Ours::Percent(&[(entries, &["64 entries"]), (tenants, &["4", "8"])], LINK),
        },
    ],
    ..GROUND
};
