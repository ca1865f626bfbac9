// SPDX-License-Identifier: Apache-2.0
//! The daemon's reports as text.

use crate::api::{DeviceList, DeviceSocket, VmList};
use crate::control::{DetachEnd, DetachReport, DeviceReport, ReclaimReport, VmReport};
use crate::pool::PoolReport;
use pagetide_report::size::readable;
use pagetide_report::text::{Text, fields, table, word};

impl Text for VmList {
    fn text(&self) -> String {
        let mut rows = vec![
            [
                "NAME", "PID", "STATE", "RAM", "RESIDENT", "LIMIT", "STORED", "FAULTS", "IOPFS",
            ]
            .map(String::from),
        ];
        rows.extend(self.vms.iter().map(|vm| {
            [
                vm.name.clone(),
                vm.pid.to_string(),
                word(&vm.state),
                readable(vm.ram_bytes),
                readable(vm.resident_bytes),
                vm.limit_bytes.map_or_else(|| "none".into(), readable),
                readable(vm.stored_bytes),
                vm.vcpu_faults.to_string(),
                vm.iopfs.to_string(),
            ]
        }));
        let mut text = table(&rows);
        for vm in &self.vms {
            for bar in &vm.eviction_blockers {
                text += &format!("{}: not evicted: {bar}\n", vm.name);
            }
            for warning in &vm.warnings {
                text += &format!("{}: {warning}\n", vm.name);
            }
        }
        text
    }
}

impl Text for DeviceList {
    fn text(&self) -> String {
        let mut rows = vec![
            [
                "SOCKET", "KIND", "STATE", "VM", "BACKING", "WEIGHT", "REQUESTS", "IOPFS",
            ]
            .map(String::from),
        ];
        rows.extend(self.devices.iter().map(|device| {
            [
                device.socket.clone(),
                device.kind.clone(),
                word(&device.state),
                device.vm.clone().unwrap_or_else(|| "-".into()),
                (device.image.as_ref().or(device.link.as_ref()))
                    .map_or_else(|| "-".into(), Clone::clone),
                device.weight.to_string(),
                device.requests.to_string(),
                device.iopfs.to_string(),
            ]
        }));
        let mut text = table(&rows);
        for device in &self.devices {
            if let Some(error) = &device.error {
                text += &format!("{}: {error}\n", device.socket);
            }
        }
        text
    }
}

impl Text for VmReport {
    fn text(&self) -> String {
        fields(self)
    }
}

impl Text for PoolReport {
    fn text(&self) -> String {
        fields(self)
    }
}

impl Text for DeviceReport {
    fn text(&self) -> String {
        fields(self)
    }
}

impl Text for ReclaimReport {
    fn text(&self) -> String {
        let mut fields_of = serde_json::to_value(self).unwrap_or_default();
        if let Some(stayed) = &self.stayed {
            fields_of["stayed"] = stayed.to_string().into();
        }
        fields(&fields_of)
    }
}

impl Text for DetachReport {
    fn text(&self) -> String {
        if self.end == DetachEnd::VmmEnded {
            return format!(
                "{}: process {} ended before it was detached; nothing is kept for it any more\n",
                self.name, self.pid
            );
        }
        format!(
            "{}: detached from process {} in {:.1} s, {} pages swapped in, {} resident\n",
            self.name,
            self.pid,
            self.seconds,
            self.filled_pages,
            readable(self.resident_bytes)
        )
    }
}

impl Text for DeviceSocket {
    fn text(&self) -> String {
        format!("{}: removed\n", self.socket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{SetReport, VmState};
    use crate::figure::LatencyUs;
    use pagetide_report::text::json;
    use serde_json::Value;

    fn vm() -> VmReport {
        VmReport {
            name: "web".into(),
            pid: 4711,
            state: VmState::ServingOnly,
            ram_bytes: 1 << 30,
            resident_bytes: 300 << 20,
            limit_bytes: Some(256 << 20),
            stored_bytes: 1500,
            vcpu_faults: 12,
            vcpu_fault_us: LatencyUs {
                p50: 8.25,
                p90: 11.0,
                p99: 40.0,
                ..LatencyUs::default()
            },
            eviction_blockers: vec!["the VMM has an O_DIRECT file open".into()],
            sections: vec![SetReport {
                set: "cold".into(),
                sections: 3,
            }],
            ..VmReport::default()
        }
    }

    #[test]
    fn list_of_vms_is_aligned_and_says_what_bars_eviction() {
        let text = VmList { vms: vec![vm()] }.text();
        assert_eq!(
            text,
            "NAME  PID   STATE         RAM      RESIDENT   LIMIT      STORED   FAULTS  IOPFS\n\
             web   4711  serving-only  1.0 GiB  300.0 MiB  256.0 MiB  1.5 KiB  12      0\n\
             web: not evicted: the VMM has an O_DIRECT file open\n"
        );
    }

    #[test]
    fn fields_of_a_vm_are_printed_with_their_units_and_absent_ones_left_out() {
        let text = vm().text();
        for line in [
            "state                serving-only",
            "resident             300.0 MiB",
            "vcpu fault           p50 8.2 us, p90 11.0 us, p99 40.0 us",
            "sections             set cold, sections 3",
            "eviction blockers    the VMM has an O_DIRECT file open",
        ] {
            let squeezed = |l: &str| l.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(
                text.lines().any(|l| squeezed(l) == squeezed(line)),
                "no {line} in\n{text}"
            );
        }
        let without = VmReport {
            limit_bytes: None,
            ..vm()
        }
        .text();
        assert!(!without.lines().any(|l| l.starts_with("limit ")));
    }

    #[test]
    fn detach_is_told_in_one_line() {
        let report = DetachReport {
            name: "web".into(),
            pid: 4711,
            filled_pages: 5,
            resident_bytes: 8192,
            seconds: 1.25,
            ..DetachReport::default()
        };
        assert_eq!(
            report.text(),
            "web: detached from process 4711 in 1.2 s, 5 pages swapped in, 8.0 KiB resident\n"
        );
        let ended = DetachReport {
            end: DetachEnd::VmmEnded,
            ..report
        };
        assert_eq!(
            ended.text(),
            "web: process 4711 ended before it was detached; nothing is kept for it any more\n"
        );
    }

    #[test]
    fn json_is_one_object_with_units_in_its_names() {
        let text = json(&vm()).unwrap();
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["vcpu_fault_us"]["p50"], 8.25);
        assert_eq!(value["limit_bytes"], 256 << 20);
    }
}
