// SPDX-License-Identifier: Apache-2.0
//! The report of a bench, and why there is none.

use std::fmt::Display;

use pagetide_report::text::{Text, fields};
use serde::Serialize;
use serde_json::{Map, Value};

/// The result of a bench.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct BenchReport {
    /// Name of the bench.
    pub name: String,
    /// Where it ran.
    pub host: BenchHost,
    /// Our figures, units at the end of their names.
    pub figures: Map<String, Value>,
    /// The peers' figures; for an unavailable peer a sentence with the reason.
    pub peers: Map<String, Value>,
    /// Ours over the peer's.
    pub ratios: Map<String, Value>,
    /// Each measurement, of benches whose samples others use; not in the text.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub samples: Map<String, Value>,
}

/// The machine a bench ran on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct BenchHost {
    /// Kernel release.
    pub kernel: String,
    /// CPU model.
    pub cpu: String,
    /// CPUs online.
    pub cpus: usize,
    /// RAM of the host.
    pub memory_bytes: u64,
    /// Whether this machine is itself a VM.
    pub virtualized: bool,
}

/// Why a bench gave no result. Its name is added by whoever ran it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BenchError {
    /// The machine lacks something.
    #[error("cannot run here: {reason}")]
    Unable {
        /// What is missing and how to get it.
        reason: String,
    },
    /// It failed during the run.
    #[error("failed: {reason}")]
    Failed {
        /// What broke.
        reason: String,
    },
}

/// It failed during the run.
pub(crate) fn failed(reason: impl Display) -> BenchError {
    BenchError::Failed {
        reason: reason.to_string(),
    }
}

/// The machine lacks something.
pub(crate) fn unable(reason: impl Display) -> BenchError {
    BenchError::Unable {
        reason: reason.to_string(),
    }
}

impl BenchReport {
    /// An empty report of this machine.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            host: BenchHost::here(),
            figures: Map::new(),
            peers: Map::new(),
            ratios: Map::new(),
            samples: Map::new(),
        }
    }
}

impl BenchHost {
    /// This machine.
    #[must_use]
    pub fn here() -> Self {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let info = rustix::system::sysinfo();
        let field = |name: &str| {
            cpuinfo
                .lines()
                .find_map(|line| line.strip_prefix(name)?.split_once(": ").map(|(_, v)| v))
        };
        Self {
            kernel: rustix::system::uname().release().to_string_lossy().into(),
            cpu: field("model name").unwrap_or("unknown").to_owned(),
            cpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            memory_bytes: info.totalram * u64::from(info.mem_unit),
            virtualized: field("flags").is_some_and(|f| f.split(' ').any(|f| f == "hypervisor")),
        }
    }
}

impl Text for BenchReport {
    fn text(&self) -> String {
        let mut text = format!(
            "bench {} on {} ({} CPUs), Linux {}\n",
            self.name, self.host.cpu, self.host.cpus, self.host.kernel
        );
        for (title, part) in [
            ("ours", &self.figures),
            ("peers", &self.peers),
            ("ratios, ours over the peer's", &self.ratios),
        ] {
            text += &format!("\n{title}\n");
            for line in fields(part).lines() {
                text += &format!("  {line}\n");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_as_text_holds_each_figure_with_its_unit() {
        let mut report = BenchReport::new("fault");
        report.figures.insert("cpu_p90_us".into(), 12.5.into());
        report
            .ratios
            .insert("cpu_over_zram_p90".into(), 0.75.into());
        let text = report.text();
        assert!(text.contains("cpu p90  12.5 us"), "{text}");
        assert!(text.contains("cpu over zram p90  0.750"), "{text}");
    }
}
