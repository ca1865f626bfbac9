// SPDX-License-Identifier: Apache-2.0
//! Traces of I/O address translation: their events, their file formats, synthetic tenants, and hyper-traces
//! of any number of tenants (HyperTRIO IV); and traces of DMA to guest memory (VPRI 4.2, 5.3).

mod access;
mod event;
mod guest_maps;
mod hypersio;
mod hypertrace;
mod info;
mod open;
mod params;
mod parquet;
mod qemu;
mod stream;
mod tenant;
mod text;

pub use access::analysis::{
    AccessAnalysis, Analysis, AnalysisError, AnalysisParams, CURVE_POINTS_MAX, CountRow,
    DEVICES_MAX, DeviceAnalysis, FAULT_INTERVAL, FootprintShares, GrowthCurve, Locality, PAIRS_MAX,
    ReuseRow, SectionTouch, ServiceAnalysis, Tallies,
};
pub use access::block::{
    BlockAbout, BlockFormat, BlockOptions, BlockRequest, BlockTrace, ByteOrder, open_block_trace,
};
pub use event::{Event, EventKind, IOVA_BITS, IommuDomain, PageSize, SourceId, TraceAccess};
pub use guest_maps::{GuestMaps, MapChange, MapCheck, TracepointReader};
pub use hypersio::{HypersioLogReader, HypersioReader, HypersioWriter, LogSources};
pub use hypertrace::{
    Built, End, HyperSpec, HyperTrace, Input, Lengths, MAX_BURST_PACKETS, MAX_DOMAINS_PER_SOURCE,
    MAX_RECORDS_PER_EVENT, MAX_REQUESTS_PER_PACKET, MAX_SOURCES_PER_LOG, MAX_SPACES, MAX_TENANTS,
    MAX_WEIGHT, Membership, OpenLog, Order, Progress, RecordedInput, RecordedSource, Recordings,
    Reuse, SourceRule, build,
};
pub use info::{Distinct, PageSizes, RequestsPerSource, TraceInfo, convert, info, info_of};
pub use open::{FormatChoice, OpenTrace, TraceFormat, detect, open, open_trace};
pub use pagetide_access_log::TraceError;
pub use params::TraceParams;
pub use parquet::{
    EventRow, ParquetReader, ParquetWriter, REQUESTS_PER_PACKET, ROW_GROUP_EVENTS, TraceMeta,
};
pub use qemu::{DmaRecord, QemuDmaReader, QemuLogReader};
pub use stream::{BATCH_EVENTS, EventSink, EventSource, Events};
pub use tenant::{
    DataPages, GroupAccess, InitPages, MAX_GROUP_PAGES, PageChoice, RunLengths, SinglePage,
    Stagger, SyntheticTenant, TenantShape, ThirdPage, Timing, Unmap, Workload,
};
