// SPDX-License-Identifier: Apache-2.0
//! Figures of V-D: the parts of HyperTRIO, and what the section leaves out.

use super::figure::{
    AT_1024, Figure, GBPS, GROUND, IPERF3, LINK, OF_SOME_TENANTS, PAPERS, Readings, Traces,
    WEBSEARCH,
};
use super::paper::{Ours, Stated};
use super::rows::{
    buffer, history, many_tenants, pages, partitions, ptb, sources, tenants, variant, workload,
};

pub(super) const FIGURE_12A: Figure = Figure {
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

pub(super) const FIGURE_12B: Figure = Figure {
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

pub(super) const FIGURE_12C: Figure = Figure {
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

pub(super) const BUFFER_SIZE: Figure = Figure {
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

pub(super) const HISTORY_LENGTH: Figure = Figure {
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

pub(super) const PREFETCHED_PAGES: Figure = Figure {
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

pub(super) const PARTITIONS: Figure = Figure {
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

pub(super) const TENANTS_A_PARTITION: Figure = Figure {
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
