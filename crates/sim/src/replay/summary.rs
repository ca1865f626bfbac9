// SPDX-License-Identifier: Apache-2.0
//! Accounts of many VMs, reduced to the paper's figures (VPRI 4.2.2, 7.3).

use super::{DeviceAccount, FaultAges, Service, VmAccount};
use pagetide_addr::DeviceId;
use serde::Serialize;

/// The effect of one policy on one set of VMs. Shares are of the VM's memory, as fractions.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Summary {
    /// VMs.
    pub vms: u64,
    /// Memory protected for any device: mean over time, then over VMs.
    pub vm_pinned_share: f64,
    /// The most of one VM in any sample.
    pub vm_pinned_max_share: f64,
    /// Resident memory: mean over time, then over VMs.
    pub resident_share: f64,
    /// The limit, likewise.
    pub limit_share: f64,
    /// Sections evicted.
    pub evicted_sections: u64,
    /// Of those, protected ones: a limit could not be kept otherwise.
    pub evicted_protected: u64,
    /// CPU accesses to an evicted section.
    pub cpu_faults: u64,
    /// Fills that went over the limit.
    pub over_limit_fills: u64,
    /// Sections swapped in though nothing had asked for them.
    pub swapped_in_ahead: u64,
    /// By kind of device; kinds without devices are omitted.
    pub services: Vec<ServiceSummary>,
}

/// The devices of one kind.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ServiceSummary {
    /// Their kind.
    pub service: Service,
    /// How many.
    pub devices: u64,
    /// DMA accesses.
    pub touches: u64,
    /// I/O page faults.
    pub faults: u64,
    /// Of those, faults on sections that no device had touched before.
    pub first_faults: u64,
    /// The others by the time since the device's last touch of the section.
    pub fault_ages: FaultAges,
    /// Consecutive touches of one section more than 300 s apart.
    pub long_reuses: u64,
    /// Memory ever touched, mean over devices.
    pub footprint_share: f64,
    /// Memory protected for one device: mean over time, then over devices.
    pub pinned_share: f64,
    /// The most of one device in any sample.
    pub pinned_max_share: f64,
    /// Sections that left protection because there were too many.
    pub dropped_sections: u64,
    /// Share of the faults without protection that no longer occur; if known, and if there were any.
    pub reduction: Option<f64>,
    /// [`Self::reduction`] over [`Self::pinned_share`].
    pub rpr: Option<f64>,
}

/// The figures of one device.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct DeviceSummary {
    /// Its VM, by index.
    pub vm: usize,
    /// The device.
    pub device: DeviceId,
    /// The same figures as for a group.
    #[serde(flatten)]
    pub figures: ServiceSummary,
}

impl Summary {
    /// The figures of `accounts`; reductions are against `base`, the same VMs without protection.
    #[must_use]
    pub fn of(accounts: &[VmAccount], base: Option<&[VmAccount]>) -> Self {
        let sum = |of: fn(&VmAccount) -> u64| accounts.iter().map(of).sum::<u64>();
        let mean = |of: fn(&VmAccount) -> f64| mean(accounts.iter().map(of));
        let protected_max = |vm: &VmAccount| ratio(vm.protected.max_sections, vm.sections);
        let services = Service::ALL.into_iter().filter_map(|service| {
            let mut figures = ServiceSummary::of(service, &devices(accounts, service))?;
            if let Some(base) = base {
                figures.compare(base.iter().map(|vm| vm.faults(service)).sum());
            }
            Some(figures)
        });
        Self {
            vms: accounts.len() as u64,
            vm_pinned_share: mean(|vm| vm.protected.mean_sections(vm.time) / number(vm.sections)),
            vm_pinned_max_share: accounts.iter().map(protected_max).fold(0.0, f64::max),
            resident_share: mean(|vm| vm.resident.mean_sections(vm.time) / number(vm.sections)),
            limit_share: mean(|vm| vm.limit.mean_sections(vm.time) / number(vm.sections)),
            evicted_sections: sum(|vm| vm.evicted_sections),
            evicted_protected: sum(|vm| vm.evicted_protected),
            cpu_faults: sum(|vm| vm.cpu_faults),
            over_limit_fills: sum(|vm| vm.over_limit_fills),
            swapped_in_ahead: sum(|vm| vm.swapped_in_ahead),
            services: services.collect(),
        }
    }

    /// The devices of one kind.
    #[must_use]
    pub fn service(&self, service: Service) -> Option<&ServiceSummary> {
        self.services.iter().find(|of| of.service == service)
    }

    /// The figures of each device, in the order of VMs and of first touches.
    #[must_use]
    pub fn of_devices(accounts: &[VmAccount], base: Option<&[VmAccount]>) -> Vec<DeviceSummary> {
        let mut all = Vec::new();
        for (number, vm) in accounts.iter().enumerate() {
            let base = base.and_then(|base| base.get(number));
            for device in &vm.devices {
                let one = [(vm, device)];
                let Some(mut figures) = ServiceSummary::of(device.service, &one) else {
                    continue;
                };
                let unprotected = base.and_then(|vm| {
                    let same = |of: &&DeviceAccount| of.device == device.device;
                    vm.devices.iter().find(same)
                });
                if let Some(unprotected) = unprotected {
                    figures.compare(unprotected.faults);
                }
                all.push(DeviceSummary {
                    vm: number,
                    device: device.device,
                    figures,
                });
            }
        }
        all
    }
}

impl ServiceSummary {
    fn of(service: Service, devices: &[(&VmAccount, &DeviceAccount)]) -> Option<Self> {
        if devices.is_empty() {
            return None;
        }
        let sum = |of: fn(&DeviceAccount) -> u64| devices.iter().map(|(_, d)| of(d)).sum::<u64>();
        let pinned = devices
            .iter()
            .map(|(vm, device)| device.protected.mean_sections(vm.time) / number(vm.sections));
        let pinned_max = devices
            .iter()
            .map(|(vm, device)| ratio(device.protected.max_sections, vm.sections));
        let footprint = devices
            .iter()
            .map(|(vm, device)| ratio(device.footprint_sections, vm.sections));
        Some(Self {
            service,
            devices: devices.len() as u64,
            touches: sum(|device| device.touches),
            faults: sum(|device| device.faults),
            first_faults: sum(|device| device.first_faults),
            fault_ages: devices
                .iter()
                .fold(FaultAges::default(), |sum, (_, device)| {
                    sum.sum(device.fault_ages)
                }),
            long_reuses: sum(|device| device.long_reuses),
            footprint_share: mean(footprint),
            pinned_share: mean(pinned),
            pinned_max_share: pinned_max.fold(0.0, f64::max),
            dropped_sections: sum(|device| device.dropped_sections),
            reduction: None,
            rpr: None,
        })
    }

    /// Sets reduction and RPR, where there were `unprotected` faults without protection.
    fn compare(&mut self, unprotected: u64) {
        if unprotected == 0 {
            return;
        }
        let reduction = 1.0 - ratio(self.faults, unprotected);
        self.reduction = Some(reduction);
        self.rpr = (self.pinned_share > 0.0).then(|| reduction / self.pinned_share);
    }
}

fn devices(accounts: &[VmAccount], service: Service) -> Vec<(&VmAccount, &DeviceAccount)> {
    let all = accounts
        .iter()
        .flat_map(|vm| vm.devices.iter().map(move |device| (vm, device)));
    all.filter(|(_, device)| device.service == service)
        .collect()
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let len = values.len();
    if len == 0 {
        return 0.0;
    }
    values.sum::<f64>() / number(len as u64)
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        return 0.0;
    }
    number(part) / number(whole)
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn number(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn vm(faults: u64, protected: u64) -> VmAccount {
        let mut device = DeviceAccount::new(DeviceId(1), Service::Block);
        device.faults = faults;
        device.footprint_sections = 50;
        let time = Duration::from_secs(10);
        device.protected.add(protected, time / 2);
        let mut vm = VmAccount {
            time,
            sections: 100,
            devices: vec![device],
            ..VmAccount::default()
        };
        vm.protected.add(protected, time / 2);
        vm
    }

    #[test]
    fn reduction_and_rpr_are_against_the_same_vms_without_protection() {
        let base = [vm(60, 0), vm(40, 0)];
        let with = [vm(20, 10), vm(5, 30)];
        let summary = Summary::of(&with, Some(&base));
        let block = summary.service(Service::Block).unwrap();
        assert_eq!((block.devices, block.faults), (2, 25));
        let close = |a: Option<f64>, b: f64| a.is_some_and(|a| (a - b).abs() < 1e-9);
        assert!(close(block.reduction, 0.75), "{block:?}");
        // Half the time 10 and 30 of 100 sections: 5 % and 15 %, 10 % on average.
        assert!(close(Some(block.pinned_share), 0.1), "{block:?}");
        assert!(close(block.rpr, 7.5), "{block:?}");
        assert!(close(Some(summary.vm_pinned_max_share), 0.3));
        assert!(summary.service(Service::Network).is_none());
        let devices = Summary::of_devices(&with, Some(&base));
        assert!(close(devices[1].figures.reduction, 0.875), "{devices:?}");
    }

    #[test]
    fn nothing_to_reduce_gives_no_reduction() {
        let summary = Summary::of(&[vm(0, 1)], Some(&[vm(0, 0)]));
        assert_eq!(summary.service(Service::Block).unwrap().rpr, None);
        assert_eq!(Summary::of(&[], None).vm_pinned_share, 0.0);
    }
}
