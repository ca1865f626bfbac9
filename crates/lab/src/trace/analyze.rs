// SPDX-License-Identifier: Apache-2.0
//! `pagetide trace analyze`: characterizes the DMA in access logs and block traces (VPRI 4.2).
//!
//! ```text
//!   access logs    addresses in the VM's memory: as logged
//!   block traces   addresses on a disk: as they are, and reported as such, or
//!                  with --page-cache where a modelled guest's DMA would go
//! ```

use std::io::Read as _;
use std::path::Path;
use std::time::Duration;

use pagetide_access_log::{AccessLog, LoggedDevice, Service, TraceError, open_regular};
use pagetide_addr::{DeviceId, DomainId, SectionNo};
use pagetide_sim::replay::{Actor, Guest, ReplayError, Through, TraceOptions, TracedVm, survey};
use pagetide_trace::{
    AccessAnalysis, Analysis, AnalysisError, AnalysisParams, BlockOptions, SectionTouch,
    open_block_trace,
};

use super::analyze_plot::plot;
use super::analyze_report::{Addresses, AnalyzeReport, TraceAnalysis};
use super::args::{AnalyzeArgs, CacheSize};
use crate::sim::of_trace;
use pagetide_report::outcome::{CommandError, print_report};
use pagetide_report::progress::Progress;

/// Smallest section: a page.
const SECTION_BYTES_MIN: u64 = 4096;

/// First bytes of a Parquet file.
const PARQUET_MAGIC: [u8; 4] = *b"PAR1";

/// Records between two progress updates.
const PROGRESS_RECORDS: u64 = 1 << 14;

/// Analyzes the traces and prints the report.
pub fn analyze(args: &AnalyzeArgs) -> Result<(), CommandError> {
    if args.section.0 < SECTION_BYTES_MIN {
        return Err(CommandError::refused(format!(
            "--section {}: a section is a page of {SECTION_BYTES_MIN} bytes at least",
            args.section
        )));
    }
    let (mut logs, mut blocks) = (Vec::new(), Vec::new());
    for file in &args.files {
        let is_log = is_parquet(file).map_err(of_trace)? && args.format.is_none();
        let kind = if is_log { &mut logs } else { &mut blocks };
        kind.push(file.clone());
    }
    let progress = Progress::new("analyze", "records");
    let mut look = Look {
        args,
        progress: &progress,
        done: 0,
    };
    let mut traces = Vec::new();
    for log in AccessLog::open_all(&logs).map_err(of_trace)? {
        traces.push(look.log(log)?);
    }
    if let (Some(cache), false) = (args.page_cache, blocks.is_empty()) {
        for vm in survey(&blocks, &trace_options(args, cache)).map_err(of_replay)? {
            traces.push(look.guest(&vm)?);
        }
    } else {
        for file in &blocks {
            traces.push(look.disk(file)?);
        }
    }
    drop(progress);
    let mut report = AnalyzeReport::of(traces);
    if let Some(dir) = &args.plots {
        report.plots = plot(&report, dir).map_err(of_trace)?;
    }
    print_report(&report, args.json.into())
}

/// Whether a file is one of our access logs. Other read errors are reported when the file is read in
/// full; a pipe is refused here, before anything is consumed from it.
fn is_parquet(file: &Path) -> Result<bool, TraceError> {
    let mut head = [0; 4];
    let read = open_regular(file)?.read_exact(&mut head);
    Ok(read.is_ok() && head == PARQUET_MAGIC)
}

fn block_options(args: &AnalyzeArgs) -> BlockOptions {
    BlockOptions {
        format: args.format,
        block_bytes: args.block_bytes,
        interval: args.request_interval,
    }
}

fn trace_options(args: &AnalyzeArgs, cache: CacheSize) -> TraceOptions {
    TraceOptions {
        block: block_options(args),
        through: Through::PageCache(match cache {
            CacheSize::Suits => None,
            CacheSize::Is(size) => Some(size.0),
        }),
        space: None,
        memory_bytes: args.memory.map(|size| size.0),
        section_bytes: args.section.0,
        time_scale: 1.0,
        // The analysis ignores CPUs.
        cpu_permille: 0,
        guest: Guest::default(),
    }
}

/// Like [`of_trace`], for a trace that is read into a modelled guest.
fn of_replay(error: ReplayError) -> CommandError {
    match error {
        ReplayError::Trace(error) => of_trace(error),
        other => CommandError::refused(other),
    }
}

/// Reads one trace after the other.
struct Look<'a> {
    args: &'a AnalyzeArgs,
    progress: &'a Progress,
    done: u64,
}

/// A range of bytes that a device touched.
struct Stretch {
    at: Duration,
    device: DeviceId,
    service: Service,
    space: DomainId,
    address: u64,
    len_bytes: u64,
}

impl Look<'_> {
    fn log(&mut self, mut log: AccessLog) -> Result<TraceAnalysis, CommandError> {
        let meta = log.meta().clone();
        let memory = self.args.memory.map_or(meta.memory_bytes, |size| size.0);
        let mut window = self.window(Some(memory));
        while let Some(record) = log.next().transpose().map_err(of_trace)? {
            self.step();
            let more = window.stretch(&Stretch {
                at: Duration::from_nanos(record.time_ns),
                device: record.device,
                service: record.service,
                space: record.space,
                address: record.address,
                len_bytes: record.len_bytes.into(),
            });
            if !more.map_err(|error| refused(&meta.vm, error))? {
                break;
            }
        }
        let mut trace = window.finish(meta.vm, Addresses::Memory);
        trace.lost_records = meta.lost_records;
        name(&mut trace.analysis, &meta.devices);
        Ok(trace)
    }

    fn disk(&mut self, file: &Path) -> Result<TraceAnalysis, CommandError> {
        let mut requests = open_block_trace(file, &block_options(self.args)).map_err(of_trace)?;
        let mut window = self.window(self.args.memory.map(|size| size.0));
        while let Some(request) = requests.next().transpose().map_err(of_trace)? {
            self.step();
            let Some(time_ns) = request.time_ns else {
                return Err(without_times(file));
            };
            let more = window.stretch(&Stretch {
                at: Duration::from_nanos(time_ns),
                // Device 0 is the CPUs.
                device: DeviceId(request.device.saturating_add(1)),
                service: Service::Block,
                // The device already distinguishes disks.
                space: DomainId(0),
                address: request.offset_bytes,
                len_bytes: request.len_bytes.into(),
            });
            if !more.map_err(|error| refused(&file.display(), error))? {
                break;
            }
        }
        let mut trace = window.finish(file.display().to_string(), Addresses::Disk);
        trace.about = Some(requests.about());
        name_disks(&mut trace.analysis);
        Ok(trace)
    }

    fn guest(&mut self, vm: &TracedVm) -> Result<TraceAnalysis, CommandError> {
        let mut stream = vm.stream().map_err(of_replay)?;
        let mut window = self.window(Some(vm.origin.memory_bytes));
        // Times count from the trace's first record, which may be a write that a device sees only at
        // writeback.
        window.first = Some(Duration::ZERO);
        while let Some(access) = stream.next().map_err(of_replay)? {
            self.step();
            match (window.part(access.at), access.actor) {
                (Part::After, _) => break,
                (Part::Within, Actor::Device(device, service)) => {
                    let touch = SectionTouch {
                        at: access.at,
                        device,
                        service,
                        section: access.section,
                    };
                    let touched = window.analysis.touch(touch);
                    touched.map_err(|error| refused(&vm.origin.name, error))?;
                }
                (Part::Before, _) | (Part::Within, Actor::Cpu) => {}
            }
        }
        let mut trace = window.finish(vm.origin.name.clone(), Addresses::PageCache);
        trace.origin = Some(vm.origin.clone());
        name_disks(&mut trace.analysis);
        Ok(trace)
    }

    fn window(&self, memory_bytes: Option<u64>) -> Window {
        Window {
            from: self.args.from,
            until: self.args.until,
            section_bytes: self.args.section.0,
            first: None,
            analysis: Analysis::new(AnalysisParams {
                memory_bytes,
                section_bytes: self.args.section.0,
                fault_interval: self.args.interval,
            }),
        }
    }

    fn step(&mut self) {
        self.done += 1;
        if self.done.is_multiple_of(PROGRESS_RECORDS) {
            self.progress.at(self.done, None);
        }
    }
}

/// The part of a trace to analyze, by times since its first record.
struct Window {
    from: Duration,
    until: Option<Duration>,
    section_bytes: u64,
    /// Time of the trace's first record, of any kind.
    first: Option<Duration>,
    analysis: Analysis,
}

/// Position of a time relative to the window.
enum Part {
    /// Before the window.
    Before,
    /// Inside it.
    Within,
    /// After it; the rest of the trace can be skipped.
    After,
}

impl Window {
    /// Position of `at`; calls must be in order of time.
    fn part(&mut self, at: Duration) -> Part {
        let since = at.saturating_sub(*self.first.get_or_insert(at));
        if self.until.is_some_and(|until| since >= until) {
            Part::After
        } else if since < self.from {
            Part::Before
        } else {
            Part::Within
        }
    }

    /// Adds each section of a range; returns false once the window is over.
    fn stretch(&mut self, stretch: &Stretch) -> Result<bool, AnalysisError> {
        match self.part(stretch.at) {
            Part::Before => return Ok(true),
            Part::Within => {}
            Part::After => return Ok(false),
        }
        let Some(last) = stretch.len_bytes.checked_sub(1) else {
            return Ok(true);
        };
        let first = stretch.address / self.section_bytes;
        let last = stretch.address.saturating_add(last) / self.section_bytes;
        for section in first..=last {
            let touch = SectionTouch {
                at: stretch.at,
                device: stretch.device,
                service: stretch.service,
                section: SectionNo(section),
            };
            self.analysis.touch_in(stretch.space, touch)?;
        }
        Ok(true)
    }

    fn finish(self, name: String, addresses: Addresses) -> TraceAnalysis {
        TraceAnalysis {
            name,
            addresses,
            about: None,
            origin: None,
            lost_records: 0,
            analysis: self.analysis.finish(),
        }
    }
}

/// Sets the device names that the log knows.
fn name(analysis: &mut AccessAnalysis, devices: &[LoggedDevice]) {
    for device in &mut analysis.devices {
        device.name = devices
            .iter()
            .find(|known| known.id == device.device)
            .map(|known| known.name.clone());
    }
}

/// Names the devices of a block trace by their disk numbers in it.
fn name_disks(analysis: &mut AccessAnalysis) {
    for device in &mut analysis.devices {
        device.name = Some(format!("disk {}", device.device.0.saturating_sub(1)));
    }
}

fn refused(trace: &dyn std::fmt::Display, error: AnalysisError) -> CommandError {
    CommandError::refused(format!("{trace}: {error}"))
}

fn without_times(file: &Path) -> CommandError {
    of_trace(TraceError::File {
        path: file.to_owned(),
        reason: "its requests have no times; say how long it is from one to the next, such as \
                 --request-interval 100ms"
            .to_owned(),
    })
}
