// SPDX-License-Identifier: Apache-2.0
//! `pagetide trace`: generates, builds, converts and counts traces, and analyzes DMA traces.
//!
//! [`pagetide_trace`] does the work; this module has the command line, the flags as figures of a recipe,
//! progress, and reports as text.

mod analyze;
mod analyze_plot;
mod analyze_report;
pub mod args;
mod collect;
pub mod collection;
mod report;

use std::path::Path;
use std::time::Instant;

use pagetide_access_log::{PartialFile, TraceError};
use pagetide_sim::study::Recipe;
use pagetide_trace::{
    Event, EventSink, EventSource, FormatChoice, HyperSpec, HyperTrace, HypersioWriter, Input,
    MAX_TENANTS, ParquetWriter, SourceRule, TraceMeta, TraceParams, build, convert, info, open,
    open_trace,
};
use serde_json::{Value, json};

use crate::sim::{of_study, of_trace};
use args::{BuildArgs, ConvertArgs, InfoArgs, MakeArgs, OutArgs, TraceCommand, WrittenFormat};
use pagetide_report::outcome::{CommandError, print_report, print_with};
use pagetide_report::progress::Progress;
use report::{WrittenReport, info_text};

/// The simulator can run every trace generated here: a tenant has one domain.
const _: () = assert!(MAX_TENANTS <= pagetide_sim::DOMAINS_MAX);

/// Executes the command.
pub fn execute(command: TraceCommand) -> Result<(), CommandError> {
    match command {
        TraceCommand::Make(args) => make(&args),
        TraceCommand::Build(args) => build_recipe(&args),
        TraceCommand::Convert(args) => convert_file(&args),
        TraceCommand::Collect(args) => collect::run(&args),
        TraceCommand::Info(args) => print_info(&args),
        TraceCommand::Analyze(args) => analyze::analyze(&args),
    }
}

fn make(args: &MakeArgs) -> Result<(), CommandError> {
    let mut recipe = Recipe::default();
    for (key, value) in figures(args)? {
        if let Some(value) = value {
            recipe.put(key, value);
        }
    }
    for assignment in &args.set {
        recipe.set(assignment).map_err(of_study)?;
    }
    let spec = recipe.spec().map_err(of_study)?;
    write_trace(&spec, &args.out)
}

/// The flags of `trace make`, by their keys in a recipe.
fn figures(args: &MakeArgs) -> Result<[(&'static str, Option<Value>); 18], CommandError> {
    let word = |given: &Option<String>| given.clone().map(Value::from);
    let count = |given: Option<u32>| given.map(Value::from);
    let (shortest, longest) = lengths(args.lengths.as_deref())?;
    let weights = (!args.weights.is_empty()).then(|| json!(args.weights));
    Ok([
        ("tenants", Some(args.tenants.into())),
        ("packets", args.packets.map(Value::from)),
        ("input.synthetic.workload", Some(json!(args.workload))),
        ("order", word(&args.order)),
        ("burst_packets", count(args.burst)),
        ("seed", args.seed.map(Value::from)),
        ("input.synthetic.third", word(&args.third)),
        ("sources", sources(args.sids.as_deref())?),
        ("input.synthetic.uses_per_page", count(args.uses)),
        ("input.synthetic.live_pages", count(args.live)),
        ("input.synthetic.run_packets", count(args.run)),
        (
            "input.synthetic.init.share",
            args.init_frac.map(Value::from),
        ),
        ("input.synthetic.stagger", word(&args.stagger)),
        ("input.synthetic.unmap", word(&args.unmap)),
        ("end", word(&args.end)),
        (
            "lengths",
            shortest
                .zip(longest)
                .map(|(min, max)| json!({ "min_packets": min, "max_packets": max })),
        ),
        ("weights", weights),
        ("membership", word(&args.membership)),
    ])
}

fn lengths(given: Option<&str>) -> Result<(Option<u64>, Option<u64>), CommandError> {
    let Some(text) = given else {
        return Ok((None, None));
    };
    let parts = text.split_once("..");
    match parts.map(|(min, max)| (min.parse::<u64>(), max.parse::<u64>())) {
        Some((Ok(min), Ok(max))) => Ok((Some(min), Some(max))),
        _ => Err(CommandError::refused(format!(
            "--lengths {text}: write two numbers of packets, such as 1000..4000"
        ))),
    }
}

fn sources(given: Option<&str>) -> Result<Option<Value>, CommandError> {
    let Some(name) = given else {
        return Ok(None);
    };
    match SourceRule::from_name(name) {
        Some(rule) => Ok(Some(json!(rule))),
        None => Err(CommandError::refused(format!(
            "--sids {name}: write unique, or log24 for the authors' rule with 24 devices a log"
        ))),
    }
}

fn build_recipe(args: &BuildArgs) -> Result<(), CommandError> {
    let mut recipe = Recipe::read(&args.spec).map_err(of_study)?;
    for assignment in &args.set {
        recipe.set(assignment).map_err(of_study)?;
    }
    let spec = recipe.spec().map_err(of_study)?;
    write_trace(&spec, &args.out)
}

/// Builds the trace of `spec` into a file; a trace in the authors' format gets a side file with its
/// figures.
fn write_trace(spec: &HyperSpec, out: &OutArgs) -> Result<(), CommandError> {
    let began = Instant::now();
    let mut open_log = |path: &Path| open(path, FormatChoice::Detect);
    let mut trace = HyperTrace::new(spec, &mut open_log).map_err(of_trace)?;
    let mut meta = TraceMeta {
        origin: json!({
            "recipe": spec,
            "pagetide_version": env!("CARGO_PKG_VERSION"),
        }),
        ..TraceMeta::default()
    };
    if let Input::Recorded(input) = &spec.input
        && let Some(requests) = std::num::NonZeroU32::new(input.requests_per_packet)
    {
        meta.requests_per_packet = requests;
    }
    let format = written_format(out);
    let sink = sink(&out.out, format, &meta).map_err(of_trace)?;
    if let (WrittenFormat::HypersioBinary, Some(params)) =
        (format, TraceParams::path_beside(&out.out))
    {
        PartialFile::check(&params).map_err(of_trace)?;
    }
    let progress = Progress::new("trace", "packets");
    let built = build(&mut trace, sink, &mut |at| {
        progress.at(at.packets, at.packets_expected);
    })
    .map_err(of_trace)?;
    drop(progress);
    let params = match format {
        WrittenFormat::HypersioBinary => write_params(spec, &out.out)?,
        WrittenFormat::Parquet => None,
    };
    let report = WrittenReport {
        out: out.out.clone(),
        format: format.into(),
        params,
        tenants: Some(built.tenants),
        packets: Some(built.packets),
        requests: Some(built.requests),
        events: built.events,
        elapsed_seconds: began.elapsed().as_secs_f64(),
    };
    print_report(&report, out.json.into())
}

/// Writes the side file of a trace in the authors' format, if its figures describe the trace completely.
fn write_params(spec: &HyperSpec, out: &Path) -> Result<Option<std::path::PathBuf>, CommandError> {
    match (TraceParams::of(spec), TraceParams::path_beside(out)) {
        (Some(params), Some(path)) => {
            params.write(&path).map_err(of_trace)?;
            Ok(Some(path))
        }
        _ => Ok(None),
    }
}

fn written_format(out: &OutArgs) -> WrittenFormat {
    let name = out.out.to_string_lossy();
    match out.to {
        Some(format) => format,
        None if name.ends_with("iotlb_trace.bin") => WrittenFormat::HypersioBinary,
        None => WrittenFormat::Parquet,
    }
}

fn sink(
    path: &Path,
    format: WrittenFormat,
    meta: &TraceMeta,
) -> Result<Box<dyn EventSink>, TraceError> {
    Ok(match format {
        WrittenFormat::Parquet => Box::new(ParquetWriter::create(path, meta)?),
        WrittenFormat::HypersioBinary => Box::new(HypersioWriter::create(path)?),
    })
}

/// A source that reports how much of it was read.
struct Counted<'a> {
    source: Box<dyn EventSource>,
    events: u64,
    progress: &'a Progress,
}

impl EventSource for Counted<'_> {
    fn next_batch(&mut self, batch: &mut Vec<Event>) -> Result<usize, TraceError> {
        let events = self.source.next_batch(batch)?;
        self.events += events as u64;
        self.progress.at(self.events, None);
        Ok(events)
    }
}

fn convert_file(args: &ConvertArgs) -> Result<(), CommandError> {
    let began = Instant::now();
    let opened = open_trace(&args.input, args.from).map_err(of_trace)?;
    let mut meta = opened.meta;
    if meta.origin.is_null() {
        meta.origin = json!({
            "converted_from": args.input.to_string_lossy(),
            "format": opened.format,
            "pagetide_version": env!("CARGO_PKG_VERSION"),
        });
    }
    let format = written_format(&args.out);
    let sink = sink(&args.out.out, format, &meta).map_err(of_trace)?;
    let progress = Progress::new("convert", "events");
    let mut source = Counted {
        source: opened.source,
        events: 0,
        progress: &progress,
    };
    let events = convert(&mut source, sink).map_err(of_trace)?;
    drop(progress);
    let report = WrittenReport {
        out: args.out.out.clone(),
        format: format.into(),
        params: None,
        tenants: None,
        packets: None,
        requests: None,
        events,
        elapsed_seconds: began.elapsed().as_secs_f64(),
    };
    print_report(&report, args.out.json.into())
}

fn print_info(args: &InfoArgs) -> Result<(), CommandError> {
    let info = info(&args.file, args.from).map_err(of_trace)?;
    print_with(&info, args.json.into(), info_text)
}
