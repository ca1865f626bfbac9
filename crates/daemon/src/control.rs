// SPDX-License-Identifier: Apache-2.0
//! What the daemon can be asked to do, as one trait, with the requests it takes
//! and the reports it gives.
//!
//! The HTTP API, the metrics and the command-line clients know the running
//! system only through [`Control`]; what runs behind it (VMs, tiers, devices)
//! is put together in `host`. Calls block (an attach stops a thread of the VMM,
//! a detach brings every page back), so the API makes them on threads of their
//! own; an implementation is called from several of them at once.
//!
//! A figure is declared once, as a field of a report: its name carries its
//! unit, its first documentation line is the help text of the metric, and the
//! kind beside it says how Prometheus is told. `/metrics`, the OpenAPI document
//! and `docs/metrics.md` are made from these declarations.

mod blk;
mod error;
mod net;
mod parts;
mod socket_mode;
mod state;

pub use blk::{BlkRequest, DEFAULT_BLK_QUEUES, OnFault, RamKind};
pub use error::{ControlError, ErrorKind};
pub use net::{DEFAULT_PAIRS, NetLink, NetRequest, OnReceiveFault, Wire};
pub use parts::{ReclaimReport, RegionReport, StayedReport};
pub use socket_mode::SocketMode;
pub use state::{DeviceState, VmState};

use std::path::Path;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::budget::{BudgetBody, HostReport, ShareChange};
use crate::figure::{LatencyUs, report};
use crate::injection::{InjectionReport, InjectionRequest};
use crate::pool::{NO_POOLS, NewCap, PoolReport};
use crate::protection::ProtectorChoice;
use crate::protection::recording::{RecordingReport, RecordingRequest};
use crate::scheduler::{ScheduleChange, SchedulerReport};
use crate::slo::SloList;
use pagetide_dpu::ParkedDevice;

/// The running system behind the API.
///
/// *Invariant:* a call that returns an error has changed nothing that the VM or
/// the device can notice, save where the message says otherwise.
pub trait Control: Send + Sync {
    /// Takes over the RAM of a running VMM.
    fn attach(&self, request: AttachRequest) -> Result<VmReport, ControlError>;
    /// Every VM known, by name.
    fn vms(&self) -> Vec<VmReport>;
    /// One VM.
    fn vm(&self, name: &str) -> Result<VmReport, ControlError>;
    /// Sets or (`None`) lifts the limit of a VM, in bytes of resident RAM.
    ///
    /// Returns when the limit is in force, not when the VM has shrunk to it.
    fn set_limit(&self, name: &str, limit_bytes: Option<u64>) -> Result<VmReport, ControlError>;
    /// The host's memory, its budget and how that is divided.
    fn host(&self) -> Result<HostReport, ControlError>;
    /// Sets the host's budget, or changes parts of what is set.
    fn set_budget(&self, change: &BudgetBody) -> Result<HostReport, ControlError>;
    /// Lifts the host's budget.
    fn lift_budget(&self) -> Result<HostReport, ControlError>;
    /// Changes what a VM may have of the host's budget; its ceiling is its limit.
    fn set_share(&self, name: &str, change: &ShareChange) -> Result<VmReport, ControlError>;
    /// Has another policy protect what devices of a VM are about to touch; what the one before knew is
    /// forgotten.
    fn set_protector(&self, name: &str, choice: ProtectorChoice) -> Result<VmReport, ControlError>;
    /// Evicts up to `bytes` now, coldest first; `None` means all that can go.
    fn reclaim(&self, name: &str, bytes: Option<u64>) -> Result<ReclaimReport, ControlError>;
    /// What the pools of all VMs take; `None` from a process that has none.
    fn pool(&self) -> Option<PoolReport> {
        None
    }
    /// Changes the cap of the pools, for successors too.
    fn set_pool_cap(&self, _cap: NewCap) -> Result<PoolReport, ControlError> {
        Err(ControlError::not_found(NO_POOLS.to_owned()))
    }
    /// Brings every page back, then lets go of the VM.
    fn detach(&self, name: &str) -> Result<DetachReport, ControlError>;
    /// Stops a detach that is under way: it ends as refused, and the VM is served and evicted from as
    /// before. One that has brought every page back is not stopped any more.
    fn stop_detach(&self, name: &str) -> Result<VmReport, ControlError>;
    /// Creates a vhost-user-blk device that listens on its socket.
    fn add_blk(&self, request: BlkRequest) -> Result<DeviceReport, ControlError>;
    /// Creates a vhost-user-net device that listens on its socket.
    fn add_net(&self, request: NetRequest) -> Result<DeviceReport, ControlError>;
    /// Every device, by socket.
    fn devices(&self) -> Vec<DeviceReport>;
    /// Changes the weight of the device that listens on `socket`, by which it shares engines.
    fn set_weight(&self, socket: &Path, weight: u32) -> Result<DeviceReport, ControlError>;
    /// Drains and removes the device that listens on `socket`.
    fn remove_device(&self, socket: &Path) -> Result<(), ControlError>;
    /// Accounts of service levels, by socket; of one device, named by socket or serial, or of all.
    fn slo(&self, device: Option<&str>) -> Result<SloList, ControlError>;
    /// Lets requests of a live device fault from now on; replaces an injection that goes on there.
    fn inject(&self, request: InjectionRequest) -> Result<InjectionReport, ControlError>;
    /// How far the last injection into a device is.
    fn injection(&self, device: &str) -> Result<InjectionReport, ControlError>;
    /// Ends the injection into a device.
    fn stop_injection(&self, device: &str) -> Result<InjectionReport, ControlError>;
    /// Records what DMA of attached VMs touches, from now on.
    fn start_recording(&self, request: RecordingRequest) -> Result<RecordingReport, ControlError>;
    /// How far the last recording is.
    fn recording(&self) -> Result<RecordingReport, ControlError>;
    /// Ends the recording and completes its files.
    fn stop_recording(&self) -> Result<RecordingReport, ControlError>;
    /// The scheduler of background work: its settings, and what each class has got.
    fn scheduler(&self) -> Result<SchedulerReport, ControlError> {
        Err(no_scheduler())
    }
    /// Changes its settings from the next cycle on; they are kept over restarts.
    fn change_scheduler(&self, change: &ScheduleChange) -> Result<SchedulerReport, ControlError> {
        let _unused = change;
        Err(no_scheduler())
    }
    /// Returns to the settings of the start.
    fn reset_scheduler(&self) -> Result<SchedulerReport, ControlError> {
        Err(no_scheduler())
    }
    /// Whether its work could be handed over to a successor now.
    ///
    /// # Errors
    /// Why not, as a sentence.
    fn may_hand_over(&self) -> Result<(), ControlError> {
        Err(ControlError::refused(
            "this process is not upgraded while it runs: name the socket of a `pagetide run` with --api",
        ))
    }
    /// Ends its background work and its devices, so that nothing is half done; the faults of VMs are served on. Once
    /// this has succeeded, the process must not go on: its successor recovers everything.
    ///
    /// # Errors
    /// A disk does not answer. Nothing has happened.
    fn hand_over(&self) -> Result<Vec<ParkedDevice>, ControlError> {
        Ok(Vec::new())
    }
    /// Front ends that were handed over may go on: this process is the daemon now.
    fn admit(&self) {}
    /// Detaches every VM and stops every device; called once, last.
    fn shut_down(&self) -> Result<(), ControlError>;
}

fn no_scheduler() -> ControlError {
    ControlError::refused(
        "this process has no background work to schedule: name the socket of a `pagetide run` with --api",
    )
}

/// Take over a VM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AttachRequest {
    /// Process id of the VMM.
    pub pid: u32,
    /// Name for the VM, already chosen: by the caller, by the VMM's `-name`, or `vm-PID`.
    pub name: String,
    /// Limit on resident RAM in bytes; `None` means none.
    pub limit_bytes: Option<u64>,
    /// Its share of the host's budget; `None` means the default.
    pub weight: Option<u32>,
    /// What it may always have resident; `None` means the least possible.
    pub floor_bytes: Option<u64>,
}

/// Sections of one set of the hot and cold sets.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct SetReport {
    /// Name of the set, such as `hot` or `cold`.
    pub set: String,
    /// Sections of 2 MiB in it.
    pub sections: u64,
}

/// What is protected of the DMA of one device.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct DeviceProtectionReport {
    /// Number of the device, as `dpu list` has it.
    pub device: u32,
    /// Accesses it was heard to make.
    pub heard_accesses: u64,
    /// Sections that its policy remembers.
    pub tracked_sections: u64,
    /// Of them, those protected now.
    pub protected_sections: u64,
    /// Sections that left protection because there were too many.
    pub dropped_sections: u64,
    /// Memory that the policy takes.
    pub policy_bytes: u64,
}

report! {
    /// State and figures of one VM.
    pub struct VmReport in "pagetide_vm" {
        /// Name of the VM under Pagetide.
        name: String => label "vm",
        /// Process id of the VMM.
        pid: u32 => skip,
        /// Command of the VMM.
        vmm: String => skip,
        /// How far the VM is in its life under Pagetide.
        state: VmState => skip,
        /// RAM of the VM.
        ram_bytes: u64 => gauge,
        /// RAM of the VM that is present now.
        resident_bytes: u64 => gauge,
        /// Limit on resident RAM; absent without a limit.
        limit_bytes: Option<u64> => gauge,
        /// Share of the host's budget, beside the weights of other VMs.
        weight: u64 => gauge,
        /// What it may always have resident, whatever others want.
        floor_bytes: u64 => gauge,
        /// The most that may be resident now, as the host's budget is divided; absent without a budget.
        target_bytes: Option<u64> => gauge,
        /// What the VM is taken to need of the host's budget; absent without one.
        need_bytes: Option<u64> => gauge,
        /// Why the target changed last.
        target_reason: Option<String> => skip,
        /// Fills before which the VM was to evict of its own, because the budget was short.
        short_fills: u64 => counter,
        /// Bytes of the metadata pool that are in use, stored pages included.
        pool_bytes: u64 => gauge,
        /// The most bytes of the metadata pool that were in use since the attach.
        pool_peak_bytes: u64 => gauge,
        /// Memory of the pool that is taken for content and holds none: rest of slots, free slots, empty chunks.
        fragmented_bytes: u64 => gauge,
        /// Memory that the record of the VM's pages takes: page words, sections, slots, page attributes of devices, heat, policies.
        metadata_bytes: u64 => gauge,
        /// 1 while there is no room for content and only pages of zeros or of one repeated word are evicted, else 0.
        pool_full: u64 => gauge,
        /// Pages whose only content is a stored copy or known to be zero.
        stored_pages: u64 => gauge,
        /// Stored pages that are all zero and take no store.
        zero_pages: u64 => gauge,
        /// Stored pages that consist of one repeated 32-bit word other than 0, and take no store.
        same_filled_pages: u64 => gauge,
        /// Stored pages kept compressed by lz4.
        lz4_pages: u64 => gauge,
        /// Stored pages kept as they were, because they do not compress.
        uncompressed_pages: u64 => gauge,
        /// Stored pages kept compressed by zstd, because they stayed cold.
        zstd_pages: u64 => gauge,
        /// Bytes that the content of stored pages takes.
        stored_bytes: u64 => gauge,
        /// Of them, bytes of pages kept compressed by zstd.
        zstd_bytes: u64 => gauge,
        /// Stored pages that were packed anew by zstd since the attach.
        demoted_pages: u64 => counter,
        /// Bytes of the pool that this has freed.
        demotion_saved_bytes: u64 => counter,
        /// Stored pages on disk, sealed, because they stayed cold still longer.
        disk_pages: u64 => gauge,
        /// Bytes that they take there.
        disk_bytes: u64 => gauge,
        /// Stored pages in memory of another host, sealed, likewise.
        remote_pages: u64 => gauge,
        /// Bytes that they take there, rounded up to 512 each, beside what the server needs for itself.
        remote_bytes: u64 => gauge,
        /// Stored pages that went from memory to a slower tier since the attach.
        sunk_pages: u64 => counter,
        /// Pages that came back from such a tier since the daemon serves the VM.
        slowly_loaded_pages: u64 => counter,
        /// Loads that a tier did not answer, and that were tried again.
        retried_loads: u64 => counter,
        /// Answers of such a tier that were not the page as it was stored; it was asked for again.
        wrong_answers: u64 => counter,
        /// Loads of pages that the server of the tier remote does not have any more; what needs those pages waits, as is set by remote-when-gone. A page that is loaded again later counts again.
        missing_pages: u64 => counter,
        /// Pages evicted since the attach.
        evicted_pages: u64 => counter,
        /// Faults of vCPUs on absent pages.
        vcpu_faults: u64 => counter,
        /// Time from a vCPU's fault being read to its page being there.
        vcpu_fault_us: LatencyUs => histogram,
        /// I/O page faults: page requests of devices.
        iopfs: u64 => counter,
        /// Time from a device's page request to its response.
        iopf_us: LatencyUs => histogram,
        /// Time from a device's page request until its handling began.
        iopf_waited_us: LatencyUs => histogram,
        /// Time from handing a page request to a worker that slept until that ran on the CPU chosen for it.
        iopf_preempt_us: LatencyUs => histogram,
        /// I/O page faults that a request waited for and whose pages were away; the others found theirs present, or were asked for ahead.
        absent_iopfs: u64 => counter,
        /// I/O page faults on pages that were away, in the last minute.
        absent_iopfs_per_minute: u64 => gauge,
        /// Policy that protects what devices are about to touch.
        dma_protector: String => skip,
        /// Sections of 2 MiB that are not chosen for eviction, for a device is about to touch them.
        protected_sections: u64 => gauge,
        /// Sections that the policies of all devices remember.
        tracked_sections: u64 => gauge,
        /// Sections that left protection, or were refused it, because there were too many.
        dropped_sections: u64 => counter,
        /// Pages of protected sections evicted because the limit could not be kept by others that rested.
        evicted_protected_pages: u64 => counter,
        /// Memory that the policies of all devices take.
        policy_bytes: u64 => gauge,
        /// Accesses of devices that policies heard of.
        heard_accesses: u64 => counter,
        /// Records of the access log that were not believed: outside the VM's memory, or of too many devices.
        refused_accesses: u64 => counter,
        /// A section that a device left alone for so long is protected (policy adp; where it follows the evictor, it changes).
        promote_after_ms: u64 => gauge,
        /// What is protected of each device.
        protected_devices: Vec<DeviceProtectionReport> => skip,
        /// Pages swapped in along with a faulting neighbour.
        readahead_pages: u64 => counter,
        /// Pages swapped in before anything asked for them: they were in use when they were evicted, their section is in use again, or (swap-in-together) one that was evicted with them.
        swapped_in_ahead_pages: u64 => counter,
        /// Absent pages that lay wholly in posted receive buffers, since the daemon started: they became zeros, and their old content was dropped, not swapped in.
        blanked_pages: u64 => counter,
        /// Pages the VM discarded (balloon, free page reporting, virtio-mem).
        discarded_pages: u64 => counter,
        /// Fills that went over the limit because nothing could be evicted first.
        over_limit_fills: u64 => counter,
        /// Pages that fills evicted by themselves to have room, since this daemon began.
        directly_evicted_pages: u64 => counter,
        /// Times that vCPUs were stopped for reclaim, which found no page that rests; since this daemon began.
        holds: u64 => counter,
        /// How long they stood still for that in all.
        held_seconds: f64 => counter,
        /// Faults of vCPUs that had to wait, or came many together, and so were served beside the reader.
        handed_on_faults: u64 => counter,
        /// Evictions of a page cancelled by a write to it.
        wp_cancels: u64 => counter,
        /// Faults of our own mapping: pages the guest gave up, or, without a balloon, a bug.
        alias_faults: u64 => counter,
        /// Pages whose stored copy failed its check and that are lost.
        poisoned_pages: u64 => counter,
        /// Guest RAM in huge pages of hugetlbfs, evicted and filled 2 MiB at a time.
        hugetlb_bytes: u64 => gauge,
        /// Times that a fill found no huge page free and waited; since this daemon began.
        huge_page_waits: u64 => counter,
        /// Guest RAM pinned or locked by the VMM or a device.
        pinned_guest_bytes: u64 => gauge,
        /// Guest RAM under standing leases of rings.
        wired_bytes: u64 => gauge,
        /// Time a thread of the VMM stood still during the attach.
        attach_pause_us: f64 => gauge,
        /// What forbids eviction now, as sentences.
        eviction_blockers: Vec<String> => skip,
        /// What should be known though it forbids nothing, as sentences: RAM that is not managed, say.
        warnings: Vec<String> => skip,
        /// Daemons that took this VM up again after a predecessor died.
        restarts: u64 => counter,
        /// CPU time of the VM's fault reader.
        reader_cpu_seconds: f64 => counter,
        /// Sections in each of the hot and cold sets.
        sections: Vec<SetReport> => per_set,
        /// How accesses are told.
        tracker: String => skip,
        /// Time since every section was looked at, to tell the sets; absent before that.
        heat_age_seconds: Option<f64> => gauge,
        /// Times that every section was looked at.
        sweeps: u64 => counter,
        /// Sections of which a few pages were looked at.
        sampled_sections: u64 => counter,
        /// Pages that were unmapped for that.
        sampled_pages: u64 => counter,
        /// Of these, pages that the guest used again: a small fault each.
        refaulted_pages: u64 => counter,
        /// CPU time that the guest has lost by it: those faults, and waiting for its address space.
        heat_guest_seconds: f64 => counter,
        /// CPU time that the daemon has spent on looking.
        heat_own_seconds: f64 => counter,
        /// Sections that stand unmapped, to be evicted at once when memory is needed.
        reserve_sections: u64 => gauge,
        /// The RAM files, each a region of the address space.
        regions: Vec<RegionReport> => skip,
    }
}

report! {
    /// State and figures of one device.
    pub struct DeviceReport in "pagetide_device" {
        /// Socket the device listens on.
        socket: String => label "device",
        /// Number of the device, by which the access log names it; another with each start of the DPU.
        id: u32 => skip,
        /// Kind of the device, such as `blk`.
        kind: String => skip,
        /// Image behind a block device.
        image: Option<String> => skip,
        /// Link behind a network device, such as `tap tap0`.
        link: Option<String> => skip,
        /// What becomes of packets for a network device whose buffers are absent.
        on_receive_fault: Option<OnReceiveFault> => skip,
        /// Which posted buffers of a network device stay present.
        wire: Option<String> => skip,
        /// How far the device is.
        state: DeviceState => skip,
        /// Why the device stopped, could not be made again, or what is wrong with its image.
        error: Option<String> => skip,
        /// Whether the guest RAM it works on is sealed against shrinking; absent while it has none.
        ram_sealed: Option<bool> => skip,
        /// VM the device is matched to; absent while its RAM belongs to no attached VM.
        vm: Option<String> => skip,
        /// Request queues offered; of a network device, queue pairs.
        queues: u16 => skip,
        /// Writes are refused.
        read_only: bool => skip,
        /// Pages are looked up before DMA.
        lookup: bool => skip,
        /// What a queue does while one of its requests waits for pages.
        on_fault: OnFault => skip,
        /// Share of the engines beside the weights of other devices that have work.
        weight: u32 => skip,
        /// Serial number shown to the guest.
        serial: Option<String> => skip,
        /// Others may write the image meanwhile.
        shared: bool => skip,
        /// User to whom the socket belongs, as it was given.
        owner: Option<String> => skip,
        /// Group to which the socket belongs, as it was given.
        group: Option<String> => skip,
        /// Permission bits of the socket in octal, as they were given.
        mode: Option<String> => skip,
        /// Size of the image.
        capacity_bytes: u64 => gauge,
        /// Requests completed.
        requests: u64 => counter,
        /// Bytes read from the image.
        read_bytes: u64 => counter,
        /// Bytes written to the image.
        written_bytes: u64 => counter,
        /// Requests in flight now.
        inflight_requests: u64 => gauge,
        /// Requests that ended in an I/O error.
        failed_requests: u64 => counter,
        /// I/O page faults: page requests sent to the host.
        iopfs: u64 => counter,
        /// Requests made to fault by injection.
        injected_iopfs: u64 => counter,
        /// Page requests sent ahead of need, for requests that stood behind one that waited.
        prefaults: u64 => counter,
        /// Absent pages that reads covered whole: their old content was dropped, not swapped in.
        overwritten_pages: u64 => counter,
        /// Requests failed because their pages did not come in time (`iopf-timeout-ms`).
        timed_out_requests: u64 => counter,
        /// Descriptor chains parked now, until their pages are there.
        parked_chains: u64 => gauge,
        /// Accesses of its DMA told to the access log.
        logged_accesses: u64 => counter,
        /// Accesses lost to the access log, because nobody took them in time.
        lost_accesses: u64 => counter,
        /// Guest RAM under standing leases of this device's rings.
        wired_bytes: u64 => gauge,
        /// Packets that a network device has given to its link.
        sent_packets: Option<u64> => counter,
        /// Packets that its guest has sent and that the link had no room for.
        send_dropped_packets: Option<u64> => counter,
        /// Packets that have come from its link.
        received_packets: Option<u64> => counter,
        /// Packets lost in the link before they came, as far as it knows.
        link_dropped_packets: Option<u64> => counter,
        /// Packets lost because the pages of their buffers were absent and the store was full, or is not used.
        fault_dropped_packets: Option<u64> => counter,
        /// Packets lost because they were longer than the driver's buffers.
        unfit_dropped_packets: Option<u64> => counter,
        /// Packets that waited and were lost because their queue stopped, or their front end went.
        stop_dropped_packets: Option<u64> => counter,
        /// Buffers that went back to the driver empty.
        returned_buffers: Option<u64> => counter,
        /// Packets that have waited in the store.
        stored_packets: Option<u64> => counter,
        /// Bytes of packets in the store now.
        stored_bytes: Option<u64> => gauge,
        /// The most bytes that were in the store at a time.
        stored_peak_bytes: Option<u64> => gauge,
        /// Requests of the guest that made no sense.
        malformed_requests: u64 => counter,
        /// Requests answered with an error because part of them was not in guest memory (unplugged meanwhile, or never there).
        outside_requests: u64 => counter,
    }
}

/// How a VM came to its end under Pagetide.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DetachEnd {
    /// It was released, and continues to run.
    #[default]
    LetGo,
    /// The process of its VMM ended before it was released. Nothing is kept for it any more.
    VmmEnded,
}

/// What a detach did.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct DetachReport {
    /// Name of the VM.
    pub name: String,
    /// Process id of the VMM.
    pub pid: u32,
    /// How it ended.
    #[serde(default)]
    pub end: DetachEnd,
    /// Pages swapped in.
    pub filled_pages: u64,
    /// RAM of the VM that is present afterwards.
    pub resident_bytes: u64,
    /// Time the detach took.
    pub seconds: f64,
    /// The VM as it was last seen, with its figures over the whole attach.
    pub vm: VmReport,
}
