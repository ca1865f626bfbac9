// SPDX-License-Identifier: Apache-2.0
//! The fuzz targets of measured times and of studies, over random and changed bytes, with the stable compiler.

mod bodies;
#[path = "../../../trace/tests/formats_fuzz/seeds.rs"]
mod seeds;

use proptest::prelude::*;
use proptest::sample::Index;

const SAMPLES: &str = r#"{"name": "iopf-rtt", "figures": {"x": 1.5}, "samples":
{"a": [[8123, 2210, 4020], [7999, 1, 0], [0, 10000000000, 5]], "b": []}}"#;

/// Something of each kind that a study can have.
const STUDIES: [&str; 3] = [
    r#"preset = ["base", "hypertrio"]
flavour = "paper"
seed = [1, 2]
ptb.entries = 32
devtlb = { entries = [64, 128], partitions = [1, 8], replacement = ["lru", "oracle"] }
faults = { discipline = "vpri", absent = "share", absent_ppm = [0, 1000] }
devices.count = 2
[[trace]]
tenants = [8, 16]
packets = 100_000
order = ["rr", "rand"]
input.synthetic.workload = ["iperf3", "websearch"]
[[trace]]
tenants = 4
input.recorded.logs = ["a.log"]
"#,
    r#"skip_impossible = true
[[variant]]
name = "one"
devtlb.entries = 64
[[variant]]
name = "other"
preset = "hypertrio"
walk.host_page = "2m"
[[trace]]
tenants = 16
seed = 7
burst_packets = 1
weights = [1, 1, 1, 4]
membership = "announced"
lengths = { min_packets = 1_840, max_packets = 24_552 }
input.synthetic = { workload = "mediastream", unmap = "when-left" }
"#,
    r#"preset = "base"
[[trace]]
file = "a.parquet"
"#,
];

/// `text` with some of its bytes changed.
fn changed(text: &str, changes: &[(Index, u8)]) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    for (at, byte) in changes {
        let at = at.index(bytes.len());
        bytes[at] = *byte;
    }
    bytes
}

/// Some changes of bytes, and a length to which the rest is cut.
fn changes() -> impl Strategy<Value = (Vec<(Index, u8)>, Index)> {
    let changes = prop::collection::vec((any::<Index>(), any::<u8>()), 0..5);
    (changes, any::<Index>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn changed_samples_are_safe_to_read((changes, length) in changes()) {
        let bytes = changed(SAMPLES, &changes);
        bodies::latency_samples(&bytes);
        bodies::latency_samples(&bytes[..length.index(bytes.len())]);
    }

    #[test]
    fn changed_studies_are_safe_to_read(
        study in prop::sample::select(STUDIES.to_vec()),
        (changes, length) in changes(),
    ) {
        let bytes = changed(study, &changes);
        bodies::study(&bytes);
        bodies::study(&bytes[..length.index(bytes.len())]);
    }
}

#[test]
fn seeds_of_the_targets_are_read() {
    let studies = STUDIES.map(|study| study.as_bytes().to_vec()).to_vec();
    seeds::check(&[
        (
            "latency_samples",
            bodies::latency_samples,
            vec![SAMPLES.as_bytes().to_vec()],
        ),
        ("study", bodies::study, studies),
    ]);
}

#[test]
fn samples_of_the_tests_are_whole() {
    let samples = pagetide_sim::parse_samples(SAMPLES.as_bytes(), "a").unwrap();
    assert_eq!(samples.all().len(), 3);
}

#[test]
fn studies_of_the_tests_are_whole() {
    let directory = std::path::Path::new("/nowhere");
    let points = STUDIES.map(|study| {
        let draft = pagetide_sim::study::Draft::parse(study, directory).unwrap();
        draft.study().unwrap().points.len()
    });
    // Their files are opened when they are run.
    assert_eq!(points, [2 * 2 * 2 * 2 * 2 * 2 * (2 * 2 * 2 + 1), 2, 1]);
}
