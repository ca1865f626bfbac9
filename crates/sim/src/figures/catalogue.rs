// SPDX-License-Identifier: Apache-2.0
//! The paper's figures as data: for each the study, its axes, and the numbers that the paper's text has.

use std::fmt::Write as _;

use super::paper::{Ours, Quantity, Stated, Where};
use super::rows::{
    Name, buffer, design, entries, history, many_tenants, order, pages, partitions, ptb,
    replacement, shape, sources, tenants, variant, workload,
};

/// The readings that matter to a figure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Readings {
    /// Cost of a walk, unit of the PTB, third page.
    All,
    /// Cost and third page: with a PTB of one entry a packet is in flight either way.
    OfOneEntry,
}

/// The traces of a figure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traces {
    /// Order and packets in a row.
    pub(super) orders: &'static [(&'static str, u32)],
    pub(super) tenants: &'static [u32],
    pub(super) workloads: &'static [&'static str],
    /// Further settings of each trace.
    pub(super) settings: &'static str,
}

/// One figure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figure {
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    pub(super) section: &'static str,
    /// What is computed, and where it differs from the paper's.
    pub(super) about: &'static str,
    /// Settings of the study.
    pub(super) settings: &'static str,
    /// Its variants.
    pub(super) variants: &'static str,
    pub(super) traces: Traces,
    pub(super) readings: Readings,
    /// What has a panel of its own.
    pub(super) panel: Option<Name>,
    /// What has a line of its own.
    pub(super) series: &'static [Name],
    pub(super) x: Name,
    pub(super) x_name: &'static str,
    pub(super) y: Quantity,
    pub(super) y_name: &'static str,
    pub(super) paper: &'static [Stated],
}

impl Figure {
    /// Its study as a file.
    pub(super) fn toml(&self, packets: u64) -> String {
        let mut text = format!(
            "# {}, after HyperTRIO {}, figure {}.\n# pagetide sim sweep FILE --out RESULTS.parquet\n",
            self.title, self.section, self.id
        );
        text += "walk.cost = [\"nested\", \"short\"]\n";
        if self.readings == Readings::All {
            text += "ptb.unit = [\"requests\", \"packets\"]\n";
        }
        for part in [self.settings, self.variants] {
            if !part.is_empty() {
                text += part;
                text.push('\n');
            }
        }
        let Traces {
            orders,
            tenants,
            workloads,
            settings,
        } = self.traces;
        for (order, burst) in orders {
            // Formatting into a string cannot fail.
            let written = write!(
                text,
                "\n[[trace]]\ntenants = {tenants:?}\npackets = {packets}\norder = \"{order}\"\n\
                 burst_packets = {burst}\ninput.synthetic.workload = {workloads:?}\n\
                 input.synthetic.third = [\"mailbox\", \"ring\"]\n{settings}"
            );
            debug_assert!(written.is_ok());
        }
        text
    }
}

/// All figures, in the paper's order; those that are no study of the model among them.
const ORDER: [&str; 18] = [
    "4",
    "5",
    "8a",
    "8b",
    "9",
    "table-3",
    "10",
    "11a",
    "11b",
    "11c",
    "12a",
    "12b",
    "12c",
    "buffer-size",
    "history-length",
    "prefetched-pages",
    "partitions",
    "tenants-a-partition",
];

/// Place of a figure in the paper.
pub(super) fn place(name: &str) -> usize {
    let at = ORDER.iter().position(|other| *other == name);
    at.unwrap_or(ORDER.len())
}

/// The paper's ladder.
const TENANTS: &[u32] = &[4, 8, 16, 32, 64, 128, 256, 512, 1024];
const WORKLOADS: &[&str] = &["iperf3", "mediastream", "websearch"];
const RR1: &[(&str, u32)] = &[("rr", 1)];
const ORDERS: &[(&str, u32)] = &[("rr", 1), ("rr", 4), ("rand", 1)];

const PAPERS: Traces = Traces {
    orders: RR1,
    tenants: TENANTS,
    workloads: WORKLOADS,
    settings: "",
};
const OF_ALL_ORDERS: Traces = Traces {
    orders: ORDERS,
    ..PAPERS
};
const OF_SOME_TENANTS: Traces = Traces {
    tenants: &[64, 256, 1024],
    ..PAPERS
};

const GBPS: Quantity = Quantity::Of("gbps");
const LINK: Quantity = Quantity::Of("link_share");
const BUFFER: Quantity = Quantity::Share(
    "caches_prefetch_buffer_hits",
    "caches_prefetch_buffer_lookups",
);
const IOTLB_MISSES: Quantity = Quantity::Misses("caches_iotlb_hits", "caches_iotlb_lookups");

const BEYOND_32: Where = (tenants, &["64", "128", "256", "512", "1024"]);
const AT_1024: Where = (tenants, &["1024"]);
const IPERF3: Where = (workload, &["iperf3"]);
const WEBSEARCH: Where = (workload, &["websearch"]);
const HYPERTRIO: Where = (design, &["HyperTRIO"]);
const BASE: Where = (design, &["Base"]);
const IN_RR1: Where = (order, &["RR1"]);
const IN_RR: Where = (order, &["RR1", "RR4"]);

/// What most figures have in common.
const GROUND: Figure = Figure {
    id: "",
    title: "",
    section: "V",
    about: "",
    settings: "preset = \"base\"",
    variants: "",
    traces: PAPERS,
    readings: Readings::OfOneEntry,
    panel: None,
    series: &[workload],
    x: tenants,
    x_name: "tenants",
    y: GBPS,
    y_name: "Gb/s",
    paper: &[],
};

/// Figures that are studies.
pub(super) const FIGURES: &[Figure] = &[
    FIGURE_4,
    FIGURE_5,
    FIGURE_9,
    FIGURE_10,
    FIGURE_11A,
    FIGURE_11B,
    FIGURE_11C,
    FIGURE_12A,
    FIGURE_12B,
    FIGURE_12C,
    BUFFER_SIZE,
    HISTORY_LENGTH,
    PREFETCHED_PAGES,
    PARTITIONS,
    TENANTS_A_PARTITION,
];

const FIGURE_4: Figure = Figure {
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

const FIGURE_5: Figure = Figure {
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

const FIGURE_9: Figure = Figure {
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

const FIGURE_10: Figure = Figure {
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

const FIGURE_11A: Figure = Figure {
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

const FIGURE_11B: Figure = Figure {
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

const FIGURE_11C: Figure = Figure {
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

const FIGURE_12A: Figure = Figure {
    id: "12a",
    title: "Partitions alone",
    section: "V-D",
    about: "Base, and Base with the partitions of table IV",
    settings: "",
    variants: "[[variant]]\nname = \"Base\"\npreset = \"base\"\n\
               [[variant]]\nname = \"partitions\"\npreset = \"hypertrio\"\nprefetch.enabled = false\n\
               ptb.entries = 1",
    series: &[variant, workload],
    paper: &[
        Stated {
            what: "iperf3 with partitions, use of the link at 4 and 8 tenants",
            paper: "high until several tenants share a partition",
            ours: Ours::Percent(
                &[IPERF3, (variant, &["partitions"]), (tenants, &["4", "8"])],
                LINK,
            ),
        },
        Stated {
            what: "the same at 16 and 32",
            paper: "lower",
            ours: Ours::Percent(
                &[IPERF3, (variant, &["partitions"]), (tenants, &["16", "32"])],
                LINK,
            ),
        },
        Stated {
            what: "partitions at 1,024 tenants, use of the link",
            paper: "still does not solve it",
            ours: Ours::Percent(&[(variant, &["partitions"]), AT_1024], LINK),
        },
    ],
    ..GROUND
};

const FIGURE_12B: Figure = Figure {
    id: "12b",
    title: "Partitions and the pending translation buffer",
    section: "V-D",
    about: "The partitions of table IV and a PTB of 1, 8, 32 and 128 entries",
    settings: "preset = \"hypertrio\"\nprefetch.enabled = false\nptb.entries = [1, 8, 32, 128]",
    readings: Readings::All,
    panel: Some(workload),
    series: &[ptb],
    paper: &[
        Stated {
            what: "PTB of 8 up to 16 tenants, use of the link",
            paper: "full",
            ours: Ours::Percent(&[(ptb, &["PTB of 8"]), (tenants, &["4", "8", "16"])], LINK),
        },
        Stated {
            what: "PTB of 32 at 1,024 tenants, Gb/s",
            paper: "136",
            ours: Ours::Range(&[(ptb, &["PTB of 32"]), AT_1024], GBPS),
        },
        Stated {
            what: "PTB of 128 at 1,024 tenants, Gb/s",
            paper: "more entries improve it further; 112 requests outstanding (III)",
            ours: Ours::Range(&[(ptb, &["PTB of 128"]), AT_1024], GBPS),
        },
    ],
    ..GROUND
};

const FIGURE_12C: Figure = Figure {
    id: "12c",
    title: "Partitions, a PTB of 32, and prefetching",
    section: "V-D",
    about: "HyperTRIO without and with its prefetch unit",
    settings: "preset = \"hypertrio\"",
    variants: "[[variant]]\nname = \"without\"\nprefetch.enabled = false\n\
               [[variant]]\nname = \"prefetching\"",
    readings: Readings::All,
    series: &[variant, workload],
    paper: &[
        Stated {
            what: "websearch, 1,024 tenants: with prefetching over without",
            paper: "up to 30% more",
            ours: Ours::Ratio(
                &[WEBSEARCH, AT_1024, (variant, &["prefetching"])],
                &[WEBSEARCH, AT_1024, (variant, &["without"])],
                GBPS,
            ),
        },
        Stated {
            what: "the same, every workload, 256 tenants and more",
            paper: "improves hyper-tenant configurations",
            ours: Ours::Ratio(
                &[
                    (tenants, &["256", "512", "1024"]),
                    (variant, &["prefetching"]),
                ],
                &[(tenants, &["256", "512", "1024"]), (variant, &["without"])],
                GBPS,
            ),
        },
    ],
    ..GROUND
};

const BUFFER_SIZE: Figure = Figure {
    id: "buffer-size",
    title: "Entries of the prefetch buffer",
    section: "V-D",
    about: "The paper gives its choice and no figure",
    settings: "preset = \"hypertrio\"\nprefetch.buffer_entries = [2, 4, 8, 16, 32, 64]",
    traces: OF_SOME_TENANTS,
    readings: Readings::All,
    panel: Some(workload),
    series: &[many_tenants],
    x: buffer,
    x_name: "entries of the buffer",
    paper: &[Stated {
        what: "entries with the most bandwidth at 1,024 tenants (give or take 0.5%)",
        paper: "8 are a good trade-off",
        ours: Ours::Best(&[AT_1024], buffer, GBPS),
    }],
    ..GROUND
};

const HISTORY_LENGTH: Figure = Figure {
    id: "history-length",
    title: "Length of the history",
    section: "V-D",
    about: "The paper gives its choice and no figure",
    settings: "preset = \"hypertrio\"\nprefetch.history_length = [12, 24, 36, 48, 60, 72, 96, 144]",
    traces: OF_SOME_TENANTS,
    readings: Readings::All,
    panel: Some(workload),
    series: &[many_tenants],
    x: history,
    x_name: "requests ahead",
    paper: &[
        Stated {
            what: "length with the most bandwidth, 64 to 1,024 tenants",
            paper: "48 across numbers of tenants",
            ours: Ours::Best(&[], history, GBPS),
        },
        Stated {
            what: "the same at 1,024 tenants",
            paper: "48",
            ours: Ours::Best(&[AT_1024], history, GBPS),
        },
    ],
    ..GROUND
};

const PREFETCHED_PAGES: Figure = Figure {
    id: "prefetched-pages",
    title: "Pages of a prefetch",
    section: "V-D",
    about: "The paper gives its choice and no figure",
    settings: "preset = \"hypertrio\"\nprefetch.pages_per_tenant = [1, 2, 3, 4]",
    traces: OF_SOME_TENANTS,
    readings: Readings::All,
    panel: Some(workload),
    series: &[many_tenants],
    x: pages,
    x_name: "pages a tenant",
    paper: &[Stated {
        what: "pages with the most bandwidth at 1,024 tenants",
        paper: "2 are chosen",
        ours: Ours::Best(&[AT_1024], pages, GBPS),
    }],
    ..GROUND
};

const PARTITIONS: Figure = Figure {
    id: "partitions",
    title: "Number of partitions",
    section: "V-D",
    about: "Left out by the paper. A DevTLB of 64 entries, PTB of 1; more partitions than sets are impossible \
            and left out",
    settings: "preset = \"hypertrio\"\nskip_impossible = true\nprefetch.enabled = false\nptb.entries = 1\n\
               devtlb.partitions = [1, 8, 16]\ndevtlb.ways = [8, 4]",
    traces: Traces {
        tenants: &[4, 8, 16, 32, 64, 128],
        ..PAPERS
    },
    panel: Some(workload),
    series: &[partitions],
    paper: &[Stated {
        what: "iperf3, 16 tenants: 16 partitions of 4 ways over 8 of 8",
        paper: "left open",
        ours: Ours::Ratio(
            &[IPERF3, (tenants, &["16"]), (partitions, &["16 of 4 ways"])],
            &[IPERF3, (tenants, &["16"]), (partitions, &["8 of 8 ways"])],
            GBPS,
        ),
    }],
    ..GROUND
};

const TENANTS_A_PARTITION: Figure = Figure {
    id: "tenants-a-partition",
    title: "Tenants that share a partition",
    section: "V-D",
    about: "Left out by the paper. Partitions by full match: those tenants that find no partition are not cached. \
            PTB of 1",
    settings: "preset = \"hypertrio\"\nprefetch.enabled = false\nptb.entries = 1\n\
               devtlb.partition_by = \"full-match\"\ndevtlb.sources_per_partition = [1, 2, 4, 8, 16]",
    traces: Traces {
        tenants: &[8, 16, 32, 64, 128],
        ..PAPERS
    },
    panel: Some(workload),
    series: &[sources],
    paper: &[Stated {
        what: "iperf3, 32 tenants: 4 tenants a partition over 1",
        paper: "left open",
        ours: Ours::Ratio(
            &[IPERF3, (tenants, &["32"]), (sources, &["4 a partition"])],
            &[IPERF3, (tenants, &["32"]), (sources, &["1 a partition"])],
            GBPS,
        ),
    }],
    ..GROUND
};
