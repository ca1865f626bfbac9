// SPDX-License-Identifier: Apache-2.0
//! What the reader of samples is held to, whatever the bytes: no panic, only times that the model takes, an
//! error that names the sample.

use pagetide_sim::config::FAULT_NS_MAX;
use pagetide_sim::parse_samples;

/// The output of `bench iopf-rtt --json`.
pub fn latency_samples(bytes: &[u8]) {
    match parse_samples(bytes, "a") {
        Ok(samples) => {
            assert!(!samples.is_empty());
            for time in samples.all() {
                let parts = [time.pre_ns, time.handling_ns, time.post_ns];
                assert!(parts.iter().all(|ns| *ns <= FAULT_NS_MAX), "{time:?}");
            }
        }
        Err(reason) => assert!(!reason.is_empty()),
    }
}
