// SPDX-License-Identifier: Apache-2.0
//! [`TracedVm`]: a VM derived from a trace, which may be replayed any number of times.
//!
//! A trace is read once before it is replayed ([`survey`]): for its end, and for the properties of a VM
//! that the trace fits. The assumptions are part of the result and must be reported with it:
//! ```text
//!   access log    memory as in the log; DMA where it went. Nothing is known of the CPUs
//!   block trace   a guest is modelled. By default its page cache holds half of the blocks that the trace
//!                 ever requests, so that memory is reused, and the cache is three quarters of its memory
//! ```
//! A VM has one memory, and equal section numbers in two address spaces are not the same memory. So of an
//! access log with several spaces one is replayed, which must be selected.
//!
//! In both cases CPUs keep a share of the other memory in use; else all of it would be cold, and nothing
//! that devices touch would ever be evicted.

use super::{
    AccessStream, Actor, Beside, CachedReads, DirectPool, DiskPath, DiskRequest, DiskStream,
    GuestPageCache, NicRing, PageCacheParams, ReplayError, TimedRequest, footprint::Footprint,
    log_stream::LogStream, machine::SECTIONS_MAX, spread, working_set,
};
use pagetide_access_log::{AccessLog, open_regular};
use pagetide_addr::{Access, DeviceId, DomainId, PAGE_BYTES, SectionNo};
use pagetide_trace::{BlockAbout, BlockOptions, BlockRequest, BlockTrace, open_block_trace};
use rustc_hash::FxHashSet;
use serde::Serialize;
use std::{
    io::Read,
    path::{Path, PathBuf},
    time::Duration,
};

/// Where the DMA of a block trace goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Through {
    /// To a page cache of this many bytes, or one that suits the trace.
    PageCache(Option<u64>),
    /// To a pool of this many bytes.
    Direct(u64),
}

/// How traces become VMs.
#[derive(Clone, PartialEq, Debug)]
pub struct TraceOptions {
    /// How block traces are read.
    pub block: BlockOptions,
    /// Where their DMA goes.
    pub through: Through,
    /// The address space of access logs to replay; by default the only one.
    pub space: Option<DomainId>,
    /// Memory of each VM; by default from the log, or as suits the trace.
    pub memory_bytes: Option<u64>,
    /// Bytes of a section, a power of two of at least 4096.
    pub section_bytes: u64,
    /// Factor by which times of the trace are stretched.
    pub time_scale: f64,
    /// Share of the memory untouched by devices that CPUs keep in use, in thousandths.
    pub cpu_permille: u64,
    /// Other properties of the guest.
    pub guest: Guest,
}

/// Properties of a guest that replays a trace.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Guest {
    /// The effect of reads of cached blocks.
    pub reads: CachedReads,
    /// Its page cache gets memory in shuffled runs of this many bytes; by default in order.
    pub run_bytes: Option<u64>,
    /// Receive buffers of a synthetic NIC; by default there is none.
    pub nic_bytes: Option<u64>,
}

/// The origin of a VM, and the assumptions for it.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct VmOrigin {
    /// The trace's file, or the VM's name in an access log.
    pub name: String,
    /// The kind of trace, and the model applied to it.
    #[serde(flatten)]
    pub kind: OriginKind,
    /// Records that are replayed.
    pub records: u64,
    /// Time from the first to the last, in seconds of the replay.
    pub span_seconds: f64,
    /// Memory of the VM.
    pub memory_bytes: u64,
    /// Memory that CPUs keep in use.
    pub cpu_bytes: u64,
    /// Receive buffers of the synthetic NIC: the requested size, as far as there is memory for it.
    pub nic_bytes: u64,
    /// The properties of the guest.
    pub guest: Guest,
}

/// The kind of trace that a VM was derived from.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum OriginKind {
    /// Recorded DMA.
    AccessLog {
        /// Records that the log has lost, in any address space.
        lost_records: u64,
        /// The address space that is replayed; `None` for a log without records.
        space: Option<DomainId>,
    },
    /// Requests to disks, through a modelled page cache.
    PageCache {
        /// How the trace was read.
        about: BlockAbout,
        /// Bytes of the cache.
        cache_bytes: u64,
        /// Bytes of all blocks that were ever requested.
        footprint_bytes: u64,
    },
    /// Requests to disks, through buffers used in turn.
    Direct {
        /// How the trace was read.
        about: BlockAbout,
        /// Bytes of the buffers.
        pool_bytes: u64,
    },
}

/// See the module.
#[derive(Clone, Debug)]
pub struct TracedVm {
    /// Its origin.
    pub origin: VmOrigin,
    /// Its memory, in sections.
    pub sections: u64,
    /// Time of the last access, since the first.
    pub end: Duration,
    files: Vec<PathBuf>,
    /// Start of an access log: names do not identify logs, since one VM may have many.
    started_unix_ns: u64,
    options: TraceOptions,
    others: Others,
}

/// Memory that the trace's devices do not touch.
#[derive(Clone, Debug)]
struct Others {
    working_set: Vec<SectionNo>,
    nic_pool: Vec<SectionNo>,
    /// Above all devices of the trace.
    nic: DeviceId,
}

impl Others {
    fn new(mut sections: Vec<SectionNo>, last_device: DeviceId, options: &TraceOptions) -> Self {
        let pool = options.guest.nic_bytes.unwrap_or(0);
        let pool = usize::try_from(pool.div_ceil(options.section_bytes)).unwrap_or(usize::MAX);
        let rest = sections.split_off(pool.min(sections.len()));
        Self {
            working_set: spread(&rest, options.cpu_permille),
            nic_pool: sections,
            nic: DeviceId(last_device.0.saturating_add(1)),
        }
    }

    fn cpu_bytes(&self, options: &TraceOptions) -> u64 {
        self.working_set.len() as u64 * options.section_bytes
    }

    fn nic_bytes(&self, options: &TraceOptions) -> u64 {
        self.nic_pool.len() as u64 * options.section_bytes
    }
}

/// Least sections of a VM modelled for a trace: less has no room for its watermarks.
const SECTIONS_MIN: u64 = 64;
/// Longest replay: somewhat more than a year. The replay runs each of its seconds.
const SPAN_MAX: Duration = Duration::from_secs(400 * 24 * 3600);
/// First bytes of a Parquet file.
const PARQUET: [u8; 4] = *b"PAR1";

/// Reads traces to their ends and derives the VMs: one for each block trace, one for each access log, whose
/// files may be given in any order.
///
/// # Errors
/// [`ReplayError::Trace`] with the record if a trace is broken or truncated; others as the streams' own.
pub fn survey(files: &[PathBuf], options: &TraceOptions) -> Result<Vec<TracedVm>, ReplayError> {
    check(options)?;
    let (mut logs, mut vms) = (Vec::new(), Vec::new());
    for file in files {
        if is_parquet(file)? {
            logs.push(file.clone());
        } else {
            vms.push(survey_block(file, options)?);
        }
    }
    for log in AccessLog::open_all(&logs)? {
        vms.push(survey_log(log, &logs, options)?);
    }
    Ok(vms)
}

fn check(options: &TraceOptions) -> Result<(), ReplayError> {
    let section_bytes = options.section_bytes;
    if !section_bytes.is_power_of_two() || section_bytes < PAGE_BYTES {
        return Err(ReplayError::Asked(format!(
            "sections of {section_bytes} bytes cannot be: give a power of two of at least {PAGE_BYTES}"
        )));
    }
    if options.guest.run_bytes.is_some_and(|run| run < PAGE_BYTES) {
        return Err(ReplayError::Asked(format!(
            "memory cannot be handed out in runs of less than {PAGE_BYTES} bytes"
        )));
    }
    if !(options.time_scale > 0.0 && options.time_scale <= 1e6) {
        return Err(ReplayError::Asked(format!(
            "times cannot be stretched by {}: give a number above 0, at most 1000000",
            options.time_scale
        )));
    }
    Ok(())
}

/// Whether a file looks like an access log. An unreadable file is reported when it is read in full; a pipe,
/// which may never get a writer, is refused here.
fn is_parquet(file: &Path) -> Result<bool, ReplayError> {
    let mut head = [0; 4];
    let read = open_regular(file)?.read_exact(&mut head);
    Ok(read.is_ok() && head == PARQUET)
}

impl TracedVm {
    /// Its accesses, from the first.
    ///
    /// # Errors
    /// If the trace can no longer be opened.
    pub fn stream(&self) -> Result<Box<dyn AccessStream>, ReplayError> {
        let section_bytes = self.options.section_bytes;
        let Some(file) = self.files.first() else {
            return Err(ReplayError::Asked("a VM without a trace".to_owned()));
        };
        let memory_bytes = self.sections * section_bytes;
        let path = match self.origin.kind {
            OriginKind::AccessLog { .. } => {
                let log = self.open_log()?;
                let stream = LogStream::new(log, memory_bytes, &self.options);
                return Ok(self.with_others(stream));
            }
            OriginKind::PageCache { cache_bytes, .. } => {
                let params =
                    PageCacheParams::at_the_end_of(memory_bytes, cache_bytes, section_bytes);
                let cache = GuestPageCache::new(PageCacheParams {
                    reads: self.options.guest.reads,
                    run_bytes: self.options.guest.run_bytes,
                    ..params
                })?;
                DiskPath::Cached(Box::new(cache))
            }
            OriginKind::Direct { pool_bytes, .. } => {
                let base = memory_bytes - pool_bytes;
                DiskPath::Direct(DirectPool::new(base, pool_bytes, section_bytes)?)
            }
        };
        let requests = Requests::open(file, &self.options)?;
        Ok(self.with_others(DiskStream::new(file, requests, path)))
    }

    fn with_others(&self, stream: impl AccessStream + 'static) -> Box<dyn AccessStream> {
        let Others {
            working_set: set,
            nic_pool,
            nic,
        } = self.others.clone();
        let stream = Beside::new(stream, working_set(set));
        let ring = NicRing::new(nic, nic_pool, self.options.section_bytes);
        Box::new(Beside::new(stream, ring))
    }

    fn open_log(&self) -> Result<AccessLog, ReplayError> {
        let is_this = |log: &AccessLog| {
            let meta = log.meta();
            meta.vm == self.origin.name && meta.started_unix_ns == self.started_unix_ns
        };
        let logs = AccessLog::open_all(&self.files)?;
        let log = logs.into_iter().find(is_this);
        log.ok_or_else(|| {
            ReplayError::Asked(format!(
                "the log of {} is not there any more",
                self.origin.name
            ))
        })
    }
}

/// The requests of a block trace, with times in the replay.
struct Requests {
    trace: BlockTrace,
    file: PathBuf,
    scale: f64,
}

impl Requests {
    fn open(file: &Path, options: &TraceOptions) -> Result<Self, ReplayError> {
        Ok(Self {
            trace: open_block_trace(file, &options.block)?,
            file: file.to_owned(),
            scale: options.time_scale,
        })
    }
}

impl Iterator for Requests {
    type Item = Result<TimedRequest, ReplayError>;

    fn next(&mut self) -> Option<Self::Item> {
        let request = match self.trace.next()? {
            Ok(request) => request,
            Err(error) => return Some(Err(error.into())),
        };
        let record = self.trace.record();
        if request.time_ns.is_none() {
            return Some(Err(ReplayError::Asked(format!(
                "{} has no times; say how long it is from one request to the next",
                self.file.display()
            ))));
        }
        let timed = disk_request(record, request, self.scale);
        let whence = || format!("{}, record {record}", self.file.display());
        Some(check_span(timed.0, whence).map(|()| timed))
    }
}

pub(super) fn check_span(at: Duration, whence: impl Fn() -> String) -> Result<(), ReplayError> {
    if at <= SPAN_MAX {
        return Ok(());
    }
    Err(ReplayError::TooLate {
        whence: whence(),
        seconds: at.as_secs(),
        max_seconds: SPAN_MAX.as_secs(),
    })
}

/// A request of a trace for a disk of the VM. One without a direction counts as a read.
fn disk_request(number: u64, request: BlockRequest, scale: f64) -> TimedRequest {
    let disk = DiskRequest {
        number,
        // 0 is the CPUs.
        disk: DeviceId(request.device.saturating_add(1)),
        offset_bytes: request.offset_bytes,
        len_bytes: request.len_bytes.into(),
        access: request.access.unwrap_or(Access::Read),
    };
    (stretched(request.time_ns.unwrap_or(0), scale), disk)
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a day in nanoseconds is exact in 53 bits; longer times lose nanoseconds, not their order"
)]
pub(super) fn stretched(time_ns: u64, scale: f64) -> Duration {
    if scale == 1.0 {
        return Duration::from_nanos(time_ns);
    }
    Duration::from_nanos((time_ns as f64 * scale) as u64)
}

fn survey_block(file: &Path, options: &TraceOptions) -> Result<TracedVm, ReplayError> {
    let mut requests = Requests::open(file, options)?;
    let mut footprint = Footprint::default();
    let (mut records, mut end, mut last) = (0, Duration::ZERO, DeviceId(0));
    while let Some((at, request)) = requests.next().transpose()? {
        let blocks = request.blocks().map_err(|error| error.of_file(file))?;
        footprint.add(request.disk, blocks);
        records += 1;
        end = at;
        last = last.max(request.disk);
    }
    let about = requests.trace.about();
    let footprint_bytes = footprint.blocks().saturating_mul(PAGE_BYTES);
    let (cache_bytes, memory_bytes) = sizes(footprint_bytes, options)?;
    let kind = match options.through {
        Through::PageCache(_) => OriginKind::PageCache {
            about,
            cache_bytes,
            footprint_bytes,
        },
        Through::Direct(pool_bytes) => OriginKind::Direct { about, pool_bytes },
    };
    let sections = memory_bytes / options.section_bytes;
    let others = (memory_bytes - cache_bytes) / options.section_bytes;
    let others = Others::new((0..others).map(SectionNo).collect(), last, options);
    Ok(TracedVm {
        origin: VmOrigin {
            name: file.display().to_string(),
            kind,
            records,
            span_seconds: end.as_secs_f64(),
            memory_bytes,
            cpu_bytes: others.cpu_bytes(options),
            nic_bytes: others.nic_bytes(options),
            guest: options.guest,
        },
        sections,
        end,
        files: vec![file.to_owned()],
        started_unix_ns: 0,
        options: options.clone(),
        others,
    })
}

/// Bytes of page cache or pool, and of all memory, in whole sections.
fn sizes(footprint_bytes: u64, options: &TraceOptions) -> Result<(u64, u64), ReplayError> {
    let section = options.section_bytes;
    let least = SECTIONS_MIN.saturating_mul(section);
    let (used, memory) = match (options.through, options.memory_bytes) {
        (Through::PageCache(Some(used)) | Through::Direct(used), Some(memory)) => (used, memory),
        (Through::PageCache(None), Some(memory)) => (memory / 4 * 3, memory),
        (Through::PageCache(Some(used)) | Through::Direct(used), None) => {
            (used, (used / 3).saturating_mul(4).max(least))
        }
        (Through::PageCache(None), None) => {
            let memory = (footprint_bytes / 2 / 3).saturating_mul(4).max(least);
            let memory = memory.next_multiple_of(section);
            (memory / 4 * 3, memory)
        }
    };
    let used = used / PAGE_BYTES * PAGE_BYTES;
    let memory = sections_of(memory, section)? * section;
    if used > memory || used == 0 {
        return Err(ReplayError::Asked(format!(
            "{used} bytes of page cache or buffers do not fit into {memory} bytes of memory; \
             give less of the one or more of the other, and at least 4096"
        )));
    }
    Ok((used, memory))
}

/// Whole sections of a VM with this much memory; at most as many as can be replayed.
fn sections_of(memory_bytes: u64, section_bytes: u64) -> Result<u64, ReplayError> {
    let sections = memory_bytes.div_ceil(section_bytes).max(1);
    if sections > SECTIONS_MAX || sections.checked_mul(section_bytes).is_none() {
        return Err(ReplayError::Asked(format!(
            "a VM with {memory_bytes} bytes of memory in sections of {section_bytes} bytes cannot be \
             replayed: it has at most {SECTIONS_MAX} sections, and less than 2^64 bytes; give its memory"
        )));
    }
    Ok(sections)
}

fn survey_log(
    log: AccessLog,
    files: &[PathBuf],
    options: &TraceOptions,
) -> Result<TracedVm, ReplayError> {
    let meta = log.meta().clone();
    let memory = options.memory_bytes.unwrap_or(meta.memory_bytes);
    let section = options.section_bytes;
    let sections = sections_of(memory, section)
        .map_err(|error| ReplayError::Asked(format!("the log of {}: {error}", meta.vm)))?;
    let mut stream = LogStream::new(log, sections * section, options);
    let mut options = options.clone();
    let mut touched: FxHashSet<SectionNo> = FxHashSet::default();
    let (mut end, mut last) = (Duration::ZERO, DeviceId(0));
    while let Some(access) = stream.next()? {
        touched.insert(access.section);
        end = access.at;
        if let Actor::Device(device, _) = access.actor {
            last = last.max(device);
        }
    }
    stream.check_spaces(&options)?;
    options.space = stream.space;
    let others = (0..sections)
        .map(SectionNo)
        .filter(|section| !touched.contains(section));
    let others = Others::new(others.collect(), last, &options);
    Ok(TracedVm {
        origin: VmOrigin {
            name: meta.vm,
            kind: OriginKind::AccessLog {
                lost_records: meta.lost_records,
                space: stream.space,
            },
            records: stream.replayed,
            span_seconds: end.as_secs_f64(),
            memory_bytes: sections * section,
            cpu_bytes: others.cpu_bytes(&options),
            nic_bytes: others.nic_bytes(&options),
            guest: options.guest,
        },
        sections,
        end,
        files: files.to_vec(),
        started_unix_ns: meta.started_unix_ns,
        options,
        others,
    })
}
