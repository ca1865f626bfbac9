// SPDX-License-Identifier: Apache-2.0
//! What the readers of samples and studies are held to, whatever the bytes: no panic, only what the model takes, an
//! error that says what is wrong.

use std::path::Path;

use pagetide_sim::config::FAULT_NS_MAX;
use pagetide_sim::parse_samples;
use pagetide_sim::study::Draft;

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

/// A study, whose files are not there.
pub fn study(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let study = Draft::parse(text, Path::new("/nowhere")).and_then(|draft| draft.study());
    match study {
        Ok(study) => {
            let traces = study.traces.len();
            assert!(study.points.iter().all(|point| point.trace < traces));
        }
        Err(reason) => assert!(!reason.to_string().is_empty()),
    }
}
