// SPDX-License-Identifier: Apache-2.0
//! Service-level accounts and fault injection, for devices named by socket or serial number.

use super::{make::wrong_or_failed, set::DeviceSet};
use crate::{
    control::ControlError,
    injection::{InjectionReport, InjectionRequest},
    slo::{PairSloReport, SloReport, SloWindowReport, SlowCauseReport, SlowRequestReport},
};
use pagetide_addr::DeviceId;
use pagetide_dpu::{
    DeviceReport, DpuError, NicReport, PairReport,
    inject::{self, Injection},
};
use std::{path::Path, time::Duration};

impl DeviceSet {
    /// Accounts of one device, or of all devices sorted by socket.
    pub(crate) fn slo(&self, device: Option<&str>) -> Result<Vec<SloReport>, ControlError> {
        let mut devices = match device {
            Some(name) => vec![self.named(name)?],
            None => self.dpu().devices(),
        };
        devices.sort_by(|one, other| one.socket.cmp(&other.socket));
        let mut reports = Vec::with_capacity(devices.len());
        for device in &devices {
            match self.dpu().slo(device.id) {
                Ok(account) => reports.push(report_of(device, &account)),
                // Removed in the meantime.
                Err(DpuError::NoSuchDevice(_)) => {}
                Err(error) => return Err(wrong_or_failed(&error)),
            }
        }
        Ok(reports)
    }

    /// Starts to inject faults.
    pub(crate) fn inject(
        &self,
        request: &InjectionRequest,
    ) -> Result<InjectionReport, ControlError> {
        let injection = Injection {
            rate: request.rate,
            latency: Duration::from_micros(request.latency_us),
            burst: request.burst,
            seconds: request.seconds,
        };
        injection
            .check()
            .map_err(|error| ControlError::wrong_use(error.to_string()))?;
        let device = self.named(&request.device)?;
        let begun = self.dpu().inject(device.id, injection);
        begun.map_err(|error| wrong_or_failed(&error))?;
        self.injection_of(&device)
    }

    /// Progress of the last injection into a device.
    pub(crate) fn injection(&self, device: &str) -> Result<InjectionReport, ControlError> {
        self.injection_of(&self.named(device)?)
    }

    /// Ends the injection into a device.
    pub(crate) fn stop_injection(&self, device: &str) -> Result<InjectionReport, ControlError> {
        let device = self.named(device)?;
        let stopped = self.dpu().stop_injection(device.id);
        stopped.map_err(|error| wrong_or_failed(&error))?;
        self.injection_of(&device)
    }

    /// The number of the device with this name: a socket, a unique serial number, or else the number
    /// itself.
    pub(crate) fn number_of(&self, name: &str) -> Result<DeviceId, ControlError> {
        let devices = self.dpu().devices();
        let is_named = |device: &DeviceReport| {
            device.socket == Path::new(name) || device.serial() == Some(name)
        };
        if devices.iter().any(is_named) {
            return self.named(name).map(|device| device.id);
        }
        let number = name.parse().ok().map(DeviceId);
        let known = devices.iter().find(|device| Some(device.id) == number);
        known.map(|device| device.id).ok_or_else(|| {
            ControlError::not_found(format!(
                "no device has the socket, the serial number or the number '{name}': see `pagetide dpu list --json`"
            ))
        })
    }

    fn injection_of(&self, device: &DeviceReport) -> Result<InjectionReport, ControlError> {
        let report = self.dpu().injection(device.id);
        let report = report.map_err(|error| wrong_or_failed(&error))?;
        report
            .map(|report| injection_report(device, &report))
            .ok_or_else(|| {
                ControlError::not_found(format!(
                    "no faults were ever injected into {}: see `pagetide iopf inject`",
                    device.socket.display()
                ))
            })
    }

    /// The device with this socket, or else with this serial number if it is unique.
    pub(super) fn named(&self, name: &str) -> Result<DeviceReport, ControlError> {
        let mut devices = self.dpu().devices();
        let by_socket = devices.iter().position(|d| d.socket == Path::new(name));
        if let Some(at) = by_socket {
            return Ok(devices.swap_remove(at));
        }
        devices.retain(|device| device.serial() == Some(name));
        match (devices.pop(), devices.len()) {
            (Some(device), 0) => Ok(device),
            (Some(_), others) => Err(ControlError::wrong_use(format!(
                "{} devices have the serial number '{name}': name one by its socket",
                others + 1
            ))),
            (None, _) => Err(ControlError::not_found(format!(
                "no device has the socket or serial number '{name}': see `pagetide dpu list`"
            ))),
        }
    }
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn report_of(device: &DeviceReport, account: &pagetide_dpu::SloReport) -> SloReport {
    let windows = [
        ("minute", &account.minute),
        ("hour", &account.hour),
        ("day", &account.day),
    ];
    SloReport {
        device: device.socket.display().to_string(),
        serial: device.serial().map(str::to_owned),
        windows: windows.map(|(name, w)| window_report(name, w)).into(),
        slow_threshold_us: us(account.slow_threshold),
        slow_requests: account.slow_requests,
        slow: account.slow.iter().map(slow_report).collect(),
        memory_bytes: account.memory_bytes,
        pairs: device.backing.nic().map(pairs_of).unwrap_or_default(),
    }
}

fn pairs_of(nic: &NicReport) -> Vec<PairSloReport> {
    let report = |(pair, its): (u16, &PairReport)| {
        let of_some = |time: Duration| (its.parked_packets > 0).then(|| us(time));
        PairSloReport {
            pair,
            fault_dropped_packets: its.fault_drops,
            parked_packets: its.parked_packets,
            parked_p50_us: of_some(its.parked_p50),
            parked_p99_us: of_some(its.parked_p99),
            parked_max_us: of_some(its.parked_max),
            parked_total_us: us(its.parked_total),
        }
    };
    (0..).zip(&nic.accounts).map(report).collect()
}

fn window_report(name: &str, window: &pagetide_dpu::SloWindow) -> SloWindowReport {
    let of_some = |time: Duration| (window.requests > 0).then(|| us(time));
    let slow = window.slow.iter().map(|(cause, requests)| SlowCauseReport {
        cause: cause.to_string(),
        requests: u64::from(*requests),
    });
    SloWindowReport {
        window: name.to_owned(),
        covers_seconds: window.covers.as_secs_f64(),
        requests: window.requests,
        bytes: window.bytes,
        p50_us: of_some(window.p50),
        p99_us: of_some(window.p99),
        p999_us: of_some(window.p999),
        p9999_us: of_some(window.p9999),
        worst_us: of_some(window.worst),
        demand_seconds: window.demand.as_secs_f64(),
        least_iops: window.least_iops,
        least_bytes_per_second: window.least_bytes_per_second,
        iopfs: window.iopfs,
        injected_iopfs: window.injected_iopfs,
        iopf_peak_per_second: u64::from(window.iopf_peak_per_second),
        iopf_bursts: u64::from(window.iopf_bursts),
        slow_requests: window.slow.iter().map(|(_, n)| u64::from(*n)).sum(),
        slow_causes: slow.collect(),
    }
}

fn slow_report(slow: &pagetide_dpu::SlowRequest) -> SlowRequestReport {
    SlowRequestReport {
        ago_seconds: slow.ago.as_secs_f64(),
        queue: slow.queue,
        bytes: u64::from(slow.bytes),
        latency_us: us(slow.latency),
        cause: slow.cause.to_string(),
        held_us: us(slow.held),
        injected: slow.injected,
    }
}

fn injection_report(device: &DeviceReport, report: &inject::InjectionReport) -> InjectionReport {
    let injection = &report.injection;
    InjectionReport {
        device: device.socket.display().to_string(),
        rate: injection.rate,
        latency_us: us(injection.latency),
        burst: injection.burst,
        seconds: injection.seconds,
        left_seconds: report.left.as_secs_f64(),
        injected_iopfs: report.injected,
        resumed: report.resumed,
        skipped: report.skipped,
        parked_p50_us: us(report.parked_p50),
        parked_p99_us: us(report.parked_p99),
        parked_max_us: us(report.parked_max),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        control::{BlkRequest, ErrorKind, OnFault},
        dpu::{DeviceRequest, Owed},
        settings::EngineSettings,
    };
    use pagetide_vpri::DomainTable;
    use std::sync::Arc;

    #[test]
    fn device_is_named_by_its_serial_before_another_s_number_and_only_while_it_is_there() {
        pagetide_sys::membarrier::register().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let engines = EngineSettings {
            count: "1".parse().unwrap(),
            cpus: "any".parse().unwrap(),
            poll_us: 0,
            iopf_timeout_ms: 0,
        };
        let table = Arc::new(DomainTable::new(1));
        let (set, _hosts) =
            DeviceSet::start(dir.path(), &engines, &table, Owed::AsAfterDeath).unwrap();
        set.restore(Vec::new(), Owed::AsAfterDeath).unwrap();
        let image = dir.path().join("image");
        std::fs::write(&image, vec![0; 1 << 20]).unwrap();
        let add = |name: &str, serial: &str| {
            let request = BlkRequest {
                socket: dir.path().join(name),
                image: image.clone(),
                queues: 1,
                read_only: true,
                lookup: true,
                serial: Some(serial.to_owned()),
                on_fault: OnFault::default(),
                require_sealed: false,
                allow_ram: Vec::new(),
                ram_max_bytes: pagetide_dpu::RAM_BYTES_MAX,
                shared: false,
                raw: false,
                owner: None,
                group: None,
                mode: None,
                weight: 100,
            };
            DeviceId(set.add(DeviceRequest::Blk(request), &[]).unwrap().id)
        };
        let first = add("a", "disk");
        let second = add("b", &first.0.to_string());
        assert_eq!(set.number_of(&first.0.to_string()).unwrap(), second);
        assert_eq!(set.number_of(&second.0.to_string()).unwrap(), second);
        assert_eq!(set.number_of("disk").unwrap(), first);
        let socket = dir.path().join("a");
        assert_eq!(set.number_of(&socket.display().to_string()).unwrap(), first);
        for absent in ["777", "nobody", "-1"] {
            let error = set.number_of(absent).unwrap_err();
            assert_eq!(error.kind, ErrorKind::NotFound, "{absent}");
        }
        let third = add("c", "disk");
        let error = set.number_of("disk").unwrap_err();
        assert_eq!(error.kind, ErrorKind::WrongUse);
        assert_eq!(set.number_of(&third.0.to_string()).unwrap(), third);
        set.shut_down();
    }

    #[test]
    fn list_of_a_predecessor_is_not_written_over_before_it_was_read() {
        pagetide_sys::membarrier::register().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let engines = EngineSettings {
            count: "1".parse().unwrap(),
            cpus: "any".parse().unwrap(),
            poll_us: 0,
            iopf_timeout_ms: 0,
        };
        let table = Arc::new(DomainTable::new(1));
        let image = dir.path().join("image");
        std::fs::write(&image, vec![0; 1 << 20]).unwrap();
        let fields = |name: &str| {
            serde_json::json!({
                "socket": dir.path().join(name), "image": image, "read_only": true,
            })
        };
        let request =
            |name: &str| DeviceRequest::Blk(serde_json::from_value(fields(name)).unwrap());
        let list = dir.path().join("devices.json");
        let old = serde_json::json!({ "blk": [fields("old")] }).to_string();
        std::fs::write(&list, &old).unwrap();
        let (set, _hosts) =
            DeviceSet::start(dir.path(), &engines, &table, Owed::AsAfterDeath).unwrap();
        let error = set.add(request("new"), &[]).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Refused);
        assert_eq!(std::fs::read_to_string(&list).unwrap(), old);
        set.restore(Vec::new(), Owed::AsAfterDeath).unwrap();
        set.add(request("new"), &[]).unwrap();
        assert_eq!(set.reports(&[]).len(), 2);
        set.shut_down();
    }
}
