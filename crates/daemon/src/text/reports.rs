// SPDX-License-Identifier: Apache-2.0
//! The daemon's reports as text.

use super::{Text, fields, table, word};
use crate::api::{DeviceList, DeviceSocket, VmList};
use crate::control::{DetachEnd, DetachReport, DeviceReport, ReclaimReport, VmReport};
use crate::size::readable;

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
                "SOCKET", "KIND", "STATE", "VM", "IMAGE", "WEIGHT", "REQUESTS", "IOPFS",
            ]
            .map(String::from),
        ];
        rows.extend(self.devices.iter().map(|device| {
            [
                device.socket.clone(),
                device.kind.clone(),
                word(&device.state),
                device.vm.clone().unwrap_or_else(|| "-".into()),
                device.image.clone().unwrap_or_else(|| "-".into()),
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

impl Text for DeviceReport {
    fn text(&self) -> String {
        fields(self)
    }
}

impl Text for ReclaimReport {
    fn text(&self) -> String {
        fields(self)
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
            "{}: detached from process {} in {:.1} s, {} pages brought back, {} resident\n",
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
