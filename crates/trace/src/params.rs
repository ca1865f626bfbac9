// SPDX-License-Identifier: Apache-2.0
//! The side file `…_params.json` of a trace in the authors' format: the parameters of the trace, which the
//! format itself does not hold.
//!
//! A table of results has the same figures as columns. A row describes a trace if all thirteen agree; so,
//! as in such tables, `stagger` is 0 or 1 and `run` and `live` are 0 where the workload's own figure was
//! used. Two generators may make different traces from the same figures: `generator` names the one used.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::hypertrace::{HyperSpec, Input, Order, SourceRule};
use crate::tenant::{Stagger, TenantShape, ThirdPage, Workload};
use pagetide_access_log::PartialFile;
use pagetide_access_log::TraceError;

/// Suffix of the name of a trace in the authors' format.
const TRACE_SUFFIX: &str = "iotlb_trace.bin";
/// Suffix of the name of its side file.
const PARAMS_SUFFIX: &str = "params.json";
/// Largest size of a side file; a typical one has some three hundred bytes.
const PARAMS_BYTES_MAX: u64 = 1 << 16;
/// Our value of `generator`.
const GENERATOR: &str = "pagetide";

/// The parameters of a trace.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TraceParams {
    /// Name of the workload.
    pub workload: String,
    /// Tenants.
    pub tenants: u32,
    /// `rr` or `rand`.
    pub order: String,
    /// Packets of a turn.
    pub burst: u32,
    /// Packets of the trace.
    pub total_pkts: u64,
    /// Seed of random choices.
    pub seed: u64,
    /// `mailbox`, `ring` or `data`.
    pub third: String,
    /// `unique`, or `logN` for the authors' rule with N devices a log.
    pub sids: String,
    /// Packets until the window moves on.
    pub uses: u32,
    /// Share of packets to the init pages.
    pub init_frac: f64,
    /// 1 if tenants begin at random places, 0 if all at the same.
    pub stagger: u32,
    /// Packets of a run; 0: as the workload has it.
    pub run: u32,
    /// Live data pages; 0: as the workload has it.
    pub live: u32,
    /// The program that made the trace, if the file names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generator: Option<String>,
}

impl TraceParams {
    /// The figures' names, in files and as columns.
    pub const COLUMNS: [&str; 13] = [
        "workload",
        "tenants",
        "order",
        "burst",
        "total_pkts",
        "seed",
        "third",
        "sids",
        "uses",
        "init_frac",
        "stagger",
        "run",
        "live",
    ];

    /// The side file of the trace at `trace`; `None` if that name is not of the authors' format.
    #[must_use]
    pub fn path_beside(trace: &Path) -> Option<PathBuf> {
        let prefix = trace.file_name()?.to_str()?.strip_suffix(TRACE_SUFFIX)?;
        Some(trace.with_file_name(format!("{prefix}{PARAMS_SUFFIX}")))
    }

    /// Reads a side file. Unknown keys are ignored.
    ///
    /// # Errors
    /// If it cannot be read, is too large to be one, or lacks a figure.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        let io = |source| TraceError::Io {
            path: path.to_owned(),
            source,
        };
        let mut text = Vec::new();
        File::open(path)
            .and_then(|file| file.take(PARAMS_BYTES_MAX + 1).read_to_end(&mut text))
            .map_err(io)?;
        let broken = |reason| TraceError::File {
            path: path.to_owned(),
            reason,
        };
        if text.len() as u64 > PARAMS_BYTES_MAX {
            return Err(broken(format!(
                "more than {PARAMS_BYTES_MAX} bytes: not the figures of a trace"
            )));
        }
        serde_json::from_slice(&text)
            .map_err(|error| broken(format!("not the figures of a trace: {error}")))
    }

    /// Writes a side file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), TraceError> {
        let io = |source| TraceError::Io {
            path: path.to_owned(),
            source,
        };
        let mut text =
            serde_json::to_vec_pretty(self).map_err(|error| io(std::io::Error::other(error)))?;
        text.push(b'\n');
        let (partial, mut file) = PartialFile::create(path)?;
        file.write_all(&text).map_err(io)?;
        partial.complete(&file)
    }

    /// The figure of column `name`, as text.
    #[must_use]
    pub fn column(&self, name: &str) -> Option<String> {
        Some(match name {
            "workload" => self.workload.clone(),
            "tenants" => self.tenants.to_string(),
            "order" => self.order.clone(),
            "burst" => self.burst.to_string(),
            "total_pkts" => self.total_pkts.to_string(),
            "seed" => self.seed.to_string(),
            "third" => self.third.clone(),
            "sids" => self.sids.clone(),
            "uses" => self.uses.to_string(),
            "init_frac" => self.init_frac.to_string(),
            "stagger" => self.stagger.to_string(),
            "run" => self.run.to_string(),
            "live" => self.live.to_string(),
            _ => return None,
        })
    }

    /// Whether a table's row describes this trace: `row` has every column, with an equal value. Numbers are
    /// compared as numbers.
    #[must_use]
    pub fn matches<'r>(&self, row: impl Fn(&str) -> Option<&'r str>) -> bool {
        Self::COLUMNS.into_iter().all(|name| {
            row(name)
                .zip(self.column(name))
                .is_some_and(|(theirs, ours)| same(theirs.trim(), &ours))
        })
    }

    /// The figures of `spec`, or `None` if it has a setting that no figure covers (weights, lengths, other
    /// addresses, …): then no row can describe it.
    #[must_use]
    pub fn of(spec: &HyperSpec) -> Option<Self> {
        let Input::Synthetic(shape) = &spec.input else {
            return None;
        };
        let params = Self {
            workload: shape.workload.name().to_owned(),
            tenants: spec.tenants,
            order: spec.order.name().to_owned(),
            burst: spec.burst_packets,
            total_pkts: spec.packets?,
            seed: spec.seed,
            third: shape.third.name().to_owned(),
            sids: spec.sources.name(),
            uses: shape.uses_per_page,
            init_frac: shape.init.share,
            stagger: u32::from(shape.stagger == Stagger::Random),
            run: shape.run_packets.unwrap_or(0),
            live: shape.live_pages.unwrap_or(0),
            generator: Some(GENERATOR.to_owned()),
        };
        let told = params.spec().is_ok_and(|told| {
            // The authors' format has no place for joins and leaves anyway.
            let membership = spec.membership;
            HyperSpec { membership, ..told } == *spec
        });
        told.then_some(params)
    }

    /// The hyper-trace of these figures, as this program makes it.
    ///
    /// # Errors
    /// [`TraceError::Asked`] if a name among them is unknown here.
    pub fn spec(&self) -> Result<HyperSpec, TraceError> {
        let unknown = |name: &str, value: &str| {
            TraceError::Asked(format!("{name} = \"{value}\" is not known"))
        };
        let mut shape = TenantShape::of(
            Workload::from_name(&self.workload)
                .ok_or_else(|| unknown("workload", &self.workload))?,
        );
        shape.third = [ThirdPage::Mailbox, ThirdPage::Ring, ThirdPage::Data]
            .into_iter()
            .find(|third| third.name() == self.third)
            .ok_or_else(|| unknown("third", &self.third))?;
        shape.uses_per_page = self.uses;
        shape.init.share = self.init_frac;
        shape.stagger = match self.stagger {
            0 => Stagger::None,
            _ => Stagger::Random,
        };
        shape.run_packets = Some(self.run).filter(|run| *run != 0);
        shape.live_pages = Some(self.live).filter(|live| *live != 0);
        let mut spec = HyperSpec::synthetic(shape, self.tenants);
        spec.order = [Order::Rr, Order::Rand]
            .into_iter()
            .find(|order| order.name() == self.order)
            .ok_or_else(|| unknown("order", &self.order))?;
        spec.burst_packets = self.burst;
        spec.packets = Some(self.total_pkts);
        spec.seed = self.seed;
        spec.sources =
            SourceRule::from_name(&self.sids).ok_or_else(|| unknown("sids", &self.sids))?;
        Ok(spec)
    }
}

/// Whether two figures are the same, as text or as numbers.
fn same(a: &str, b: &str) -> bool {
    if let (Ok(a), Ok(b)) = (a.parse::<u64>(), b.parse::<u64>()) {
        return a == b;
    }
    match (a.parse::<f64>(), b.parse::<f64>()) {
        // The same decimal gives the same number.
        (Ok(a), Ok(b)) => a.total_cmp(&b).is_eq(),
        _ => a == b,
    }
}
