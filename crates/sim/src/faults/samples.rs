// SPDX-License-Identifier: Apache-2.0
//! Measured times of page faults, from the output of `pagetide bench iopf-rtt --json`.
//!
//! ```json
//! {"name": "iopf-rtt", "samples": {"vpri_in_process_idle": [[8123, 2210, 4020], …], …}, …}
//! ```
//! Each sample has three parts in nanoseconds: from the moment the device sees that the page is absent until
//! the handling begins, the handling, and from there until the device may touch the page.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pagetide_access_log::{TraceError, open_regular};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

/// Longest part of a fault: ten seconds, longer than any tier of memory takes.
pub const FAULT_NS_MAX: u64 = 10_000_000_000;

/// Largest file: the bench's own has less than a megabyte.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Most samples of a way.
const SAMPLES_MAX: usize = 1 << 20;

/// The three parts of a fault's time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ServiceTime {
    /// Before the handling.
    pub pre_ns: u64,
    /// The handling.
    pub handling_ns: u64,
    /// After it.
    pub post_ns: u64,
}

/// Times to be drawn from.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ServiceSamples(Arc<[ServiceTime]>);

impl ServiceSamples {
    /// These times.
    #[must_use]
    pub fn new(times: Vec<ServiceTime>) -> Self {
        Self(times.into())
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All of them.
    #[must_use]
    pub fn all(&self) -> &[ServiceTime] {
        &self.0
    }
}

/// Why samples cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SamplesError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] TraceError),
    /// It is not what the bench writes.
    #[error("{path}: {reason}")]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the number of the sample.
        reason: String,
    },
}

/// Reads the samples `of` a way and case from the file at `path`; also returns the SHA-256 of the file.
///
/// # Errors
/// If it cannot be read, or has no such samples, or a broken one.
pub fn read_samples(path: &Path, of: &str) -> Result<(ServiceSamples, String), SamplesError> {
    let wrong = |reason: String| SamplesError::Content {
        path: path.to_owned(),
        reason,
    };
    let mut bytes = Vec::new();
    open_regular(path)?
        .take(FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(|source| TraceError::Io {
            path: path.to_owned(),
            source,
        })?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(wrong(format!(
            "it has more than {FILE_BYTES_MAX} bytes; the output of the bench has less"
        )));
    }
    let samples = parse_samples(&bytes, of).map_err(wrong)?;
    let digest = Sha256::digest(&bytes);
    let sha256 = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok((samples, sha256))
}

/// The samples `of` a way and case in the bench's output.
///
/// # Errors
/// What is wrong with them, with the number of the first broken one.
pub fn parse_samples(bytes: &[u8], of: &str) -> Result<ServiceSamples, String> {
    let report: Value = serde_json::from_slice(bytes)
        .map_err(|error| format!("it is not the output of `bench iopf-rtt --json`: {error}"))?;
    let Some(ways) = report.get("samples").and_then(Value::as_object) else {
        return Err("it has no `samples`: run `pagetide bench iopf-rtt --json`".to_owned());
    };
    let Some(samples) = ways.get(of) else {
        let names: Vec<&str> = ways.keys().take(64).map(String::as_str).collect();
        return Err(format!(
            "it has no samples of `{of}`; there are those of {}",
            names.join(", ")
        ));
    };
    let Some(samples) = samples.as_array() else {
        return Err(format!("samples.{of} is not a list"));
    };
    if samples.is_empty() || samples.len() > SAMPLES_MAX {
        return Err(format!(
            "samples.{of} has {} samples; 1 to {SAMPLES_MAX} can be drawn from",
            samples.len()
        ));
    }
    let times = samples.iter().enumerate().map(|(number, sample)| {
        time(sample).map_err(|reason| format!("samples.{of}[{number}]: {reason}"))
    });
    Ok(ServiceSamples::new(times.collect::<Result<_, _>>()?))
}

fn time(sample: &Value) -> Result<ServiceTime, String> {
    let Some([pre, handling, post]) = sample.as_array().map(Vec::as_slice) else {
        return Err("a sample is a list of three times: before, handling, after".to_owned());
    };
    let part = |name: &str, value: &Value| {
        value
            .as_u64()
            .filter(|ns| *ns <= FAULT_NS_MAX)
            .ok_or_else(|| format!("{name} is not 0 to {FAULT_NS_MAX} nanoseconds"))
    };
    Ok(ServiceTime {
        pre_ns: part("the time before the handling", pre)?,
        handling_ns: part("the handling", handling)?,
        post_ns: part("the time after the handling", post)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_the_way_asked_for_are_read_in_order() {
        let text = br#"{"samples": {"a": [[1, 2, 3], [4, 5, 6]], "b": []}}"#;
        let samples = parse_samples(text, "a").unwrap();
        let [first, second] = samples.all() else {
            panic!("two samples")
        };
        assert_eq!((first.pre_ns, first.handling_ns, first.post_ns), (1, 2, 3));
        assert_eq!(second.post_ns, 6);
    }

    #[test]
    fn broken_sample_is_named() {
        let cases: [(&str, &str); 7] = [
            ("", "not the output"),
            ("{}", "has no `samples`"),
            (
                r#"{"samples": {"b": []}}"#,
                "no samples of `a`; there are those of b",
            ),
            (r#"{"samples": {"a": 1}}"#, "samples.a is not a list"),
            (r#"{"samples": {"a": []}}"#, "0 samples"),
            (
                r#"{"samples": {"a": [[1, 2, 3], [1, 2]]}}"#,
                "samples.a[1]: a sample",
            ),
            (
                r#"{"samples": {"a": [[1, -2, 3]]}}"#,
                "samples.a[0]: the handling is not 0 to",
            ),
        ];
        for (text, told) in cases {
            let error = parse_samples(text.as_bytes(), "a").unwrap_err();
            assert!(error.contains(told), "{error}");
        }
    }
}
