// SPDX-License-Identifier: Apache-2.0
//! The fuzz target of measured times, over random and changed bytes, with the stable compiler.

mod bodies;
#[path = "../../../trace/tests/formats_fuzz/seeds.rs"]
mod seeds;

use proptest::prelude::*;
use proptest::sample::Index;

const SAMPLES: &str = r#"{"name": "iopf-rtt", "figures": {"x": 1.5}, "samples":
{"a": [[8123, 2210, 4020], [7999, 1, 0], [0, 10000000000, 5]], "b": []}}"#;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn changed_samples_are_safe_to_read(
        changes in prop::collection::vec((any::<Index>(), any::<u8>()), 0..5),
        length in any::<Index>(),
    ) {
        let mut bytes = SAMPLES.as_bytes().to_vec();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bodies::latency_samples(&bytes);
        bodies::latency_samples(&bytes[..length.index(bytes.len())]);
    }
}

#[test]
fn seeds_of_the_target_are_read() {
    seeds::check(&[(
        "latency_samples",
        bodies::latency_samples,
        vec![SAMPLES.as_bytes().to_vec()],
    )]);
}

#[test]
fn samples_of_the_tests_are_whole() {
    assert_eq!(
        pagetide_sim::parse_samples(SAMPLES.as_bytes(), "a")
            .unwrap()
            .all()
            .len(),
        3
    );
}
