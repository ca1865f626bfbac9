// SPDX-License-Identifier: Apache-2.0
//! Benches: each measures our product and a peer in alternation within one run, since absolute figures
//! drift between machines and minutes while ratios are stable.
//!
//! A bench is a folder here with `run() -> Result<BenchReport, BenchError>` and one line in [`run`].

pub mod access_log;
pub mod adp;
pub mod adp_live;
pub mod blk;
pub mod busy;
pub mod command;
mod daemon;
pub mod fairness;
pub mod fault;
pub mod fault_parallel;
mod figures;
pub mod gmem_async;
pub mod gmem_va;
pub mod guest_cost;
pub mod head_of_line;
mod interrupt;
pub mod iopf_impact;
pub mod iopf_rtt;
pub mod iopf_scale;
mod memory;
pub mod name;
mod options;
mod orders;
pub mod pa_bitmap;
mod random;
pub mod real_size;
pub mod sim;
pub mod tracker;

use pagetide_dpu::{Content, ImageUse, Sharing};
use serde::Serialize;
use serde_json::{Map, Value};

pub use options::SizeOptions;
use pagetide_report::text::{Text, fields};

use name::BenchName;

/// How benches use images, which belong to them: back ends under comparison serve the same one.
pub(crate) const SHARED_IMAGE: ImageUse = ImageUse {
    sharing: Sharing::Shared,
    content: Content::Raw,
};

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

/// Why a bench gave no result.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BenchError {
    /// The machine lacks something.
    #[error("bench {name} cannot run here: {reason}")]
    Unable {
        /// The bench.
        name: &'static str,
        /// What is missing and how to get it.
        reason: String,
    },
    /// It failed during the run.
    #[error("bench {name} failed: {reason}")]
    Failed {
        /// The bench.
        name: &'static str,
        /// What broke.
        reason: String,
    },
}

/// Runs the bench `name`; `sizes` must be for it ([`SizeOptions::check`]).
pub fn run(name: BenchName, sizes: &SizeOptions) -> Result<BenchReport, BenchError> {
    match name {
        BenchName::AccessLog => access_log::run(&access_log::AccessLogBenchOptions::default()),
        BenchName::Adp => adp::run(&adp::AdpBenchOptions::default()),
        BenchName::AdpLive => adp_live::run(),
        BenchName::Fairness => fairness::run(&fairness::FairnessOptions::default()),
        BenchName::Fault => fault::run(&fault::FaultBenchOptions::of_rounds(sizes.pairs)),
        BenchName::FaultParallel => fault_parallel::run(
            &fault_parallel::FaultParallelOptions::of_rounds(sizes.pairs),
        ),
        BenchName::Blk => blk::run(),
        BenchName::GmemAsync => gmem_async::run(&gmem_async::GmemAsyncBenchOptions::default()),
        BenchName::GmemVa => gmem_va::run(&gmem_va::GmemVaBenchOptions::default()),
        BenchName::IopfImpact => iopf_impact::run(&iopf_impact::IopfImpactOptions::default()),
        BenchName::PaBitmap => pa_bitmap::run(&pa_bitmap::PaBitmapBenchOptions::default()),
        BenchName::HeadOfLine => head_of_line::run(&head_of_line::HeadOfLineOptions::default()),
        BenchName::IopfRtt => iopf_rtt::run(&iopf_rtt::IopfRttBenchOptions::default()),
        BenchName::IopfScale => iopf_scale::run(&iopf_scale::IopfScaleOptions::default()),
        BenchName::Sim => sim::run(),
        BenchName::RealSize => real_size::run(sizes),
        BenchName::GuestCost => guest_cost::run(sizes),
        BenchName::Tracker => tracker::run(sizes),
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
