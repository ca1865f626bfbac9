// SPDX-License-Identifier: Apache-2.0
//! The report of `pagetide replay`.

use pagetide_policy::protect::PolicyChoice;
use pagetide_sim::replay::{
    CachedReads, DeviceSummary, OriginKind, Service, ServiceSummary, Start, Summary, TracedVm,
    VmAccount, VmOrigin,
};
use serde::Serialize;

use pagetide_report::size::readable;
use pagetide_report::text::{Text, table};

/// Devices that are printed individually; the JSON has all of them.
const DEVICES_SHOWN: usize = 16;

/// How the VMs were limited.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
#[serde(untagged)]
pub enum Host {
    /// By a host that has promised more memory than it has.
    Overcommit {
        /// How much more, as a share of the memory it has.
        overcommit_share: f64,
    },
    /// Each on its own.
    Limit {
        /// The limit of each VM.
        limit_bytes: u64,
    },
}

/// Conditions common to all runs.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Conditions {
    /// How the VMs were limited.
    #[serde(flatten)]
    pub host: Host,
    /// Initial content of their memory.
    pub start: Start,
    /// Factor by which times were stretched.
    pub time_scale: f64,
}

/// One policy on all VMs.
pub struct PolicyRun {
    /// The policy.
    pub policy: PolicyChoice,
    /// What happened in each VM.
    pub accounts: Vec<VmAccount>,
}

/// The whole report.
#[derive(Debug, Serialize)]
pub struct ReplayReport {
    /// Sources of the VMs.
    vms: Vec<VmOrigin>,
    /// Conditions of the runs.
    #[serde(flatten)]
    conditions: Conditions,
    /// Bytes of a section.
    section_bytes: u64,
    /// Results of each policy, the one without protection first.
    policies: Vec<PolicyReport>,
    /// Figures from the paper for its own traces.
    paper: PaperFigures,
}

/// Results of one policy.
#[derive(Debug, Serialize)]
struct PolicyReport {
    policy: PolicyChoice,
    #[serde(flatten)]
    figures: Summary,
    by_device: Vec<DeviceSummary>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    capacity: Vec<DeviceCapacity>,
}

/// What a policy held for one device over time.
#[derive(Debug, Serialize)]
struct DeviceCapacity {
    vm: usize,
    device: u32,
    at_seconds: Vec<f64>,
    watched_sections: Vec<u64>,
    protected_sections: Vec<u64>,
}

/// Figures of VPRI 7.3, where VMs were overcommitted by 10 to 30 %.
#[derive(Debug, Serialize)]
struct PaperFigures {
    adp_nic_reduction: [f64; 2],
    adp_block_reduction: [f64; 2],
    adp_vm_pinned_share: f64,
    lru_block_reduction: [f64; 2],
    lru_vm_pinned_share: f64,
}

const PAPER: PaperFigures = PaperFigures {
    adp_nic_reduction: [0.95, 0.97],
    adp_block_reduction: [0.36, 0.49],
    adp_vm_pinned_share: 0.043,
    lru_block_reduction: [0.12, 0.15],
    lru_vm_pinned_share: 0.12,
};

impl ReplayReport {
    /// The report of `runs`, the one without protection first.
    pub fn of(vms: Vec<TracedVm>, conditions: Conditions, runs: Vec<PolicyRun>) -> Self {
        let base: Vec<VmAccount> = runs
            .first()
            .map_or_else(Vec::new, |run| run.accounts.clone());
        let section_bytes = base.first().map_or(0, |vm| vm.section_bytes);
        let report = |run: PolicyRun| PolicyReport {
            figures: Summary::of(&run.accounts, Some(&base)),
            by_device: Summary::of_devices(&run.accounts, Some(&base)),
            capacity: capacity(&run.accounts),
            policy: run.policy,
        };
        Self {
            vms: vms.into_iter().map(|vm| vm.origin).collect(),
            conditions,
            section_bytes,
            policies: runs.into_iter().map(report).collect(),
            paper: PAPER,
        }
    }
}

fn capacity(accounts: &[VmAccount]) -> Vec<DeviceCapacity> {
    let devices = accounts
        .iter()
        .enumerate()
        .flat_map(|(vm, account)| account.devices.iter().map(move |device| (vm, device)));
    devices
        .filter(|(_, device)| !device.capacity.is_empty())
        .map(|(vm, device)| DeviceCapacity {
            vm,
            device: device.device.0,
            at_seconds: device.capacity.iter().map(|c| c.at.as_secs_f64()).collect(),
            watched_sections: device.capacity.iter().map(|c| c.watched_sections).collect(),
            protected_sections: device
                .capacity
                .iter()
                .map(|c| c.protected_sections)
                .collect(),
        })
        .collect()
}

impl Text for ReplayReport {
    fn text(&self) -> String {
        let mut text = String::new();
        for vm in &self.vms {
            text += &origin(vm);
        }
        let Conditions {
            host,
            start,
            time_scale,
        } = self.conditions;
        text += &match host {
            Host::Overcommit { overcommit_share } => format!(
                "host: overcommitted by {:.0} %, limits set by need every minute, at most half of a VM taken\n",
                overcommit_share * 100.0
            ),
            Host::Limit { limit_bytes } => {
                format!("limit of each VM: {}\n", readable(limit_bytes))
            }
        };
        text += &format!("sections: {}\n", readable(self.section_bytes));
        text += match start {
            Start::AllPresent => {
                "at the start: all memory present, so that devices fault on most of what they fill first\n"
            }
            Start::Untouched => "at the start: untouched memory\n",
        };
        if (time_scale - 1.0).abs() > f64::EPSILON {
            text += &format!(
                "times of the traces are stretched by {}; those of the policies are not\n",
                time_scale
            );
        }
        text.push('\n');
        text += &table(&self.rows());
        text.push('\n');
        text += &self.machine_rows();
        text += "FIRST: faults on sections that no device had touched before. BROUGHT BACK/VM: memory brought \
                 back and not touched since; PINNED and RPR leave it out.\n\n";
        text += &self.device_rows();
        text += &format!(
            "\nThe paper, on its own VMs: ADP avoids {} of the faults of NICs and {} of those of disks, \
             with {} of memory pinned; LRU {} of those of disks, with {}.\n",
            span(PAPER.adp_nic_reduction),
            span(PAPER.adp_block_reduction),
            percent(PAPER.adp_vm_pinned_share),
            span(PAPER.lru_block_reduction),
            percent(PAPER.lru_vm_pinned_share),
        );
        text
    }
}

impl ReplayReport {
    fn rows(&self) -> Vec<[String; 10]> {
        let mut rows = vec![
            [
                "POLICY",
                "DEVICES",
                "DMA",
                "FAULTS",
                "FIRST",
                "REDUCED",
                "PINNED/DEVICE",
                "MOST",
                "PINNED/VM",
                "RPR",
            ]
            .map(String::from),
        ];
        for policy in &self.policies {
            for service in &policy.figures.services {
                rows.push([
                    policy.policy.to_string(),
                    format!("{} {}", service.devices, kind(service.service)),
                    service.touches.to_string(),
                    service.faults.to_string(),
                    service.first_faults.to_string(),
                    optional(service.reduction.map(percent)),
                    percent(service.pinned_share),
                    percent(service.pinned_max_share),
                    percent(policy.figures.vm_pinned_share),
                    optional(service.rpr.map(|rpr| format!("{rpr:.2}"))),
                ]);
            }
        }
        rows
    }

    fn machine_rows(&self) -> String {
        let mut rows = vec![
            [
                "POLICY",
                "EVICTED",
                "PROTECTED EVICTED",
                "CPU FAULTS",
                "OVER LIMIT",
            ]
            .map(String::from),
        ];
        rows.extend(self.policies.iter().map(|policy| {
            let figures = &policy.figures;
            [
                policy.policy.to_string(),
                figures.evicted_sections.to_string(),
                figures.evicted_protected.to_string(),
                figures.cpu_faults.to_string(),
                figures.over_limit_fills.to_string(),
            ]
        }));
        table(&rows)
    }

    /// One row per device, if they are few, next to the paper's estimate that needs no evictor.
    fn device_rows(&self) -> String {
        let Some(base) = self.policies.first() else {
            return String::new();
        };
        if base.by_device.len() > DEVICES_SHOWN {
            return format!("{} devices: --json lists each\n", base.by_device.len());
        }
        let mut rows = vec![
            [
                "VM",
                "DEVICE",
                "POLICY",
                "FOOTPRINT",
                "OVER 300 S",
                "FAULTS",
                "FIRST",
                "REDUCED",
                "PINNED",
            ]
            .map(String::from),
        ];
        for policy in &self.policies {
            for device in &policy.by_device {
                let ServiceSummary { service, .. } = device.figures;
                rows.push([
                    device.vm.to_string(),
                    format!("{} {}", kind(service), device.device.0),
                    policy.policy.to_string(),
                    percent(device.figures.footprint_share),
                    device.figures.long_reuses.to_string(),
                    device.figures.faults.to_string(),
                    device.figures.first_faults.to_string(),
                    optional(device.figures.reduction.map(percent)),
                    percent(device.figures.pinned_share),
                ]);
            }
        }
        table(&rows)
    }
}

/// The source of a VM, and the assumptions made.
fn origin(vm: &VmOrigin) -> String {
    let through = match &vm.kind {
        OriginKind::AccessLog { lost_records, .. } => {
            format!("DMA as logged, {lost_records} records lost")
        }
        OriginKind::PageCache {
            about,
            cache_bytes,
            footprint_bytes,
        } => format!(
            "{} through a modelled page cache of {} with memory {}, blocks of {} in all{}",
            about.format,
            readable(*cache_bytes),
            vm.guest.run_bytes.map_or_else(
                || "in order".to_owned(),
                |run| format!("in shuffled runs of {}", readable(run))
            ),
            readable(*footprint_bytes),
            match vm.guest.reads {
                CachedReads::Served => "",
                CachedReads::ReadAgain => ", what is read is always read from the disk",
            }
        ),
        OriginKind::Direct { about, pool_bytes } => format!(
            "{} past the page cache, through buffers of {} used in turn",
            about.format,
            readable(*pool_bytes)
        ),
    };
    let nic = vm.guest.nic_bytes.map_or_else(String::new, |asked| {
        let made = readable(vm.nic_bytes);
        let cut = match vm.nic_bytes < asked {
            true => format!(
                ", not {}: there is no more memory for them",
                readable(asked)
            ),
            false => String::new(),
        };
        format!("; a synthetic NIC, with buffers of {made}{cut}")
    });
    format!(
        "{}: {} records, {:.0} s; {through}; VM of {}, of which CPUs keep {} in use beside devices{nic}\n",
        vm.name,
        vm.records,
        vm.span_seconds,
        readable(vm.memory_bytes),
        readable(vm.cpu_bytes)
    )
}

fn kind(service: Service) -> &'static str {
    match service {
        Service::Block => "disk",
        Service::Network => "NIC",
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn span([from, to]: [f64; 2]) -> String {
    format!("{:.0} to {:.0} %", from * 100.0, to * 100.0)
}

fn optional(figure: Option<String>) -> String {
    figure.unwrap_or_else(|| "-".to_owned())
}
