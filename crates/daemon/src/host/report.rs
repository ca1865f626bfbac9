// SPDX-License-Identifier: Apache-2.0
//! The report of a VM.

use super::{
    budget::{self, VmSeat},
    core::{Heat, VmCore},
    holds::Holds,
    lock::lock,
    vm::Vm,
};
use crate::{
    control::{DeviceProtectionReport, RegionReport, SetReport, VmReport},
    figure::LatencyUs,
    protection::vm::{DeviceProtection, ProtectionReport},
};
use pagetide_addr::{PAGE_BYTES, PageRange, SectionNo};
use pagetide_gmem::PageState;
use pagetide_policy::sets::Level;
use pagetide_swap::{Counter, slow::SlowCounts};
use pagetide_vmm::layout::RamFile;
use pagetide_vpri::Latencies;
use std::sync::atomic::Ordering::Relaxed;

impl Vm {
    /// The VM's current state and figures.
    pub(super) fn report(&self) -> VmReport {
        let core = &self.core;
        core.counters.sync();
        let count = |counter| core.pool.counter(counter).load(Relaxed);
        let layout = core.layout.now();
        let regions: Vec<_> = layout.files().iter().map(|f| self.region(f)).collect();
        let stored_pages = regions
            .iter()
            .map(|region| region.stored_pages)
            .sum::<u64>();
        let heat = lock(&core.heat.last).clone();
        let iopfs = core.dma.tenant.account();
        let report = VmReport {
            name: core.name.clone(),
            pid: core.vmm.pid(),
            vmm: core.identity.vmm.clone(),
            state: self.state(),
            ram_bytes: layout.len_bytes(),
            resident_bytes: layout.allocated_bytes().unwrap_or(0),
            limit_bytes: core.pool.limit_bytes(),
            pool_bytes: core.pool.allocated_bytes().unwrap_or(0),
            stored_pages,
            evicted_pages: count(Counter::EvictedPages),
            vcpu_faults: count(Counter::VcpuFaults),
            vcpu_fault_us: latency_us(&core.faults.latencies),
            iopfs: count(Counter::DeviceFaults),
            iopf_us: latency_us(&iopfs.iopf),
            iopf_waited_us: latency_us(&iopfs.waited),
            iopf_preempt_us: latency_us(&iopfs.preempt),
            readahead_pages: count(Counter::NeighbourPages),
            swapped_in_ahead_pages: count(Counter::SwappedInAheadPages),
            blanked_pages: core.space.memory.counters().blanked_pages.load(Relaxed),
            discarded_pages: count(Counter::DiscardedPages),
            over_limit_fills: count(Counter::OverLimitFills),
            directly_evicted_pages: core.limit.reserve().direct_pages(),
            handed_on_faults: self.handed_on_faults(),
            wp_cancels: count(Counter::CancelledPages),
            alias_faults: count(Counter::AliasFaults),
            poisoned_pages: count(Counter::PoisonedPages),
            hugetlb_bytes: layout.huge_bytes(),
            huge_page_waits: (core.space.memory.counters().waits_for_huge_page).load(Relaxed),
            pinned_guest_bytes: core.pinned_bytes(),
            wired_bytes: core
                .dma
                .mmu
                .domains()
                .iter()
                .map(|d| d.standing_pages() * PAGE_BYTES)
                .sum(),
            #[expect(
                clippy::cast_precision_loss,
                reason = "a pause far below 2^53 microseconds"
            )]
            attach_pause_us: core.pool.pause_us() as f64,
            eviction_blockers: eviction_blockers(core),
            warnings: core.gate.warnings(),
            restarts: core.pool.restarts(),
            reader_cpu_seconds: self.reader_cpu_seconds(),
            tracker: core.heat.method.name().to_owned(),
            regions,
            ..VmReport::default()
        };
        let report = with_tiers(with_pool(with_heat(report, heat), core), core);
        let report = with_protection(report, core.protection.report());
        with_holds(with_seat(report, &core.seat), &core.holds)
    }

    fn region(&self, file: &RamFile) -> RegionReport {
        let table = self.core.space.memory.table();
        let stored = |(section, pages): (SectionNo, PageRange)| {
            if table.pages_of(section) == pages {
                return table.stored_pages(section);
            }
            // Files of a VM that was attached before RAM hotplug was supported may share a section.
            let set = table.pages_in_state(section, |state| matches!(state, PageState::Stored(_)));
            let within = set.pages(section).filter(|page| pages.contains(*page));
            within.count() as u64
        };
        RegionReport {
            file: file.key().to_string(),
            first_page: file.pages().start.0,
            pages: file.pages().len(),
            resident_bytes: file.file().allocated_bytes().unwrap_or(0),
            stored_pages: file.pages().by_section().map(stored).sum(),
        }
    }
}

/// Why nothing of the VM is evicted now, as sentences.
fn eviction_blockers(core: &VmCore) -> Vec<String> {
    let blockers = core.gate.blockers();
    let blockers = blockers.iter().map(ToString::to_string);
    let stopped = core.faults.incidents.stopped();
    blockers
        .chain(stopped)
        .chain(core.store.full().map(|why| why.to_string()))
        .chain(core.gate.suspension())
        .collect()
}

/// Adds what the VM's pool takes to the report.
fn with_pool(report: VmReport, core: &VmCore) -> VmReport {
    VmReport {
        pool_peak_bytes: core.pool.peak_bytes(),
        fragmented_bytes: core.store.bytes().fragmented_bytes(),
        metadata_bytes: core.metadata_bytes(),
        pool_full: core.store.full().is_some().into(),
        ..report
    }
}

/// Adds what is in which tier to the report.
fn with_tiers(report: VmReport, core: &VmCore) -> VmReport {
    let tiers = core.store.counts();
    let count = |counter| core.pool.counter(counter).load(Relaxed);
    let none = SlowCounts::default();
    let slow = core.slow.as_ref().map_or(&none, |slow| slow.counts());
    let with_content = tiers.pages() + slow.pages();
    VmReport {
        disk_pages: slow.disk_pages.load(Relaxed),
        disk_bytes: slow.disk_bytes.load(Relaxed),
        remote_pages: slow.remote_pages.load(Relaxed),
        remote_bytes: slow.remote_bytes.load(Relaxed),
        sunk_pages: count(Counter::SunkPages),
        slowly_loaded_pages: slow.loaded_pages.load(Relaxed),
        retried_loads: slow.retried_loads.load(Relaxed),
        wrong_answers: slow.wrong_answers.load(Relaxed),
        missing_pages: slow.missing_pages.load(Relaxed),
        zero_pages: report.stored_pages.saturating_sub(with_content),
        same_filled_pages: tiers.same_filled_pages.load(Relaxed),
        lz4_pages: tiers.lz4_pages.load(Relaxed),
        uncompressed_pages: tiers.uncompressed_pages.load(Relaxed),
        zstd_pages: tiers.zstd_pages.load(Relaxed),
        stored_bytes: tiers.stored_bytes.load(Relaxed),
        zstd_bytes: tiers.zstd_bytes.load(Relaxed),
        demoted_pages: count(Counter::DemotedPages),
        demotion_saved_bytes: count(Counter::DemotionSavedBytes),
        ..report
    }
}

/// Adds how often and how long the VM's vCPUs were stopped.
fn with_holds(report: VmReport, holds: &Holds) -> VmReport {
    VmReport {
        holds: holds.count(),
        held_seconds: holds.time().as_secs_f64(),
        ..report
    }
}

/// Adds the VM's place under the host's budget to the report.
fn with_seat(report: VmReport, seat: &VmSeat) -> VmReport {
    let standing = seat.standing();
    VmReport {
        weight: standing.share.weight.get().into(),
        floor_bytes: standing.share.floor.0,
        target_bytes: standing.target.map(|bytes| bytes.0),
        need_bytes: standing.need.map(|bytes| bytes.0),
        target_reason: standing.reason.map(budget::reason),
        short_fills: seat.short_fills(),
        ..report
    }
}

/// Adds the heat of the VM's memory to the report.
fn with_heat(report: VmReport, heat: Heat) -> VmReport {
    VmReport {
        sections: set_reports(heat.sets),
        heat_age_seconds: heat.swept_at.map(|at| at.elapsed().as_secs_f64()),
        sweeps: heat.report.sweeps,
        sampled_sections: heat.report.sampled_sections,
        sampled_pages: heat.report.unmapped_pages,
        refaulted_pages: heat.report.refaulted_pages,
        heat_guest_seconds: heat.report.guest_cost.as_secs_f64(),
        heat_own_seconds: heat.report.own_cost.as_secs_f64(),
        reserve_sections: heat.reserve_sections,
        ..report
    }
}

/// Adds the protection of the VM's memory to the report.
fn with_protection(report: VmReport, protection: ProtectionReport) -> VmReport {
    let devices: Vec<_> = protection.devices.iter().map(device_report).collect();
    let policy_bytes = devices.iter().map(|d| d.policy_bytes).sum();
    VmReport {
        absent_iopfs: protection.faults,
        absent_iopfs_per_minute: protection.faults_a_minute,
        dma_protector: protection.policy,
        protected_sections: protection.protected_sections,
        tracked_sections: devices.iter().map(|d| d.tracked_sections).sum(),
        dropped_sections: protection.dropped_sections,
        evicted_protected_pages: protection.evicted_pages,
        metadata_bytes: report.metadata_bytes + policy_bytes,
        policy_bytes,
        heard_accesses: protection.taken_records,
        refused_accesses: protection.refused_records,
        promote_after_ms: protection.promote_after_ms,
        protected_devices: devices,
        ..report
    }
}

fn device_report(device: &DeviceProtection) -> DeviceProtectionReport {
    DeviceProtectionReport {
        device: device.device.0,
        heard_accesses: device.records,
        tracked_sections: device.policy.tracked_sections,
        protected_sections: device.policy.protected_sections,
        dropped_sections: device.policy.dropped_sections,
        policy_bytes: device.policy.bytes,
    }
}

fn latency_us(latencies: &Latencies) -> LatencyUs {
    LatencyUs::from_ns(&latencies.histogram_ns())
}

fn set_reports(sets: Vec<(Level, u64)>) -> Vec<SetReport> {
    let report = |(level, sections)| SetReport {
        set: format!("{level:?}").to_lowercase(),
        sections,
    };
    sets.into_iter().map(report).collect()
}
