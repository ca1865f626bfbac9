// SPDX-License-Identifier: Apache-2.0
//! The report of the host as text.

use super::HostReport;
use pagetide_report::size::readable;
use pagetide_report::text::{Text, table, word};

impl Text for HostReport {
    fn text(&self) -> String {
        let mut rows: Vec<[String; 2]> = vec![["ram".into(), readable(self.ram_bytes)]];
        match self.budget_bytes {
            None => rows.push(["budget".into(), "off".into()]),
            Some(budget) => rows.push(["budget".into(), readable(budget)]),
        }
        for (name, bytes) in [
            ("used", Some(self.used_bytes)),
            ("free", self.free_bytes),
            ("over", self.over_bytes.filter(|over| *over > 0)),
            ("min", self.min_bytes),
            ("low", self.low_bytes),
            ("high", self.high_bytes),
        ] {
            rows.extend(bytes.map(|bytes| [name.into(), readable(bytes)]));
        }
        rows.extend(
            self.pace_bytes
                .map(|pace| ["pace".into(), readable(pace) + "/s"]),
        );
        rows.extend(self.water.map(|water| ["water".into(), word(&water)]));
        let mut text = table(&rows);
        if self.vms.is_empty() {
            return text;
        }
        let head = [
            "NAME", "WEIGHT", "FLOOR", "CEILING", "TARGET", "RESIDENT", "STORED", "NEED", "REASON",
        ];
        let mut rows = vec![head.map(String::from)];
        let or_none = |bytes: Option<u64>| bytes.map_or_else(|| "-".into(), readable);
        rows.extend(self.vms.iter().map(|vm| {
            [
                vm.name.clone(),
                vm.weight.to_string(),
                readable(vm.floor_bytes),
                vm.ceiling_bytes.map_or_else(|| "none".into(), readable),
                or_none(vm.target_bytes),
                readable(vm.resident_bytes),
                readable(vm.stored_bytes),
                or_none(vm.need_bytes),
                vm.reason.clone().unwrap_or_else(|| "-".into()),
            ]
        }));
        text.push('\n');
        text + &table(&rows)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{HostVmReport, WaterState};
    use super::*;

    #[test]
    fn host_is_told_with_a_line_for_each_vm() {
        let vm = HostVmReport {
            name: "web".into(),
            weight: 100,
            floor_bytes: 16 << 20,
            target_bytes: Some(1 << 30),
            reason: Some("refaults".into()),
            resident_bytes: 900 << 20,
            stored_bytes: 2 << 20,
            ..HostVmReport::default()
        };
        let report = HostReport {
            ram_bytes: 4 << 30,
            budget_bytes: Some(2 << 30),
            used_bytes: 902 << 20,
            free_bytes: Some(1146 << 20),
            over_bytes: Some(0),
            min_bytes: Some(20 << 20),
            water: Some(WaterState::AboveHigh),
            vms: vec![vm],
            ..HostReport::default()
        };
        assert_eq!(
            report.text(),
            "ram     4.0 GiB\n\
             budget  2.0 GiB\n\
             used    902.0 MiB\n\
             free    1.1 GiB\n\
             min     20.0 MiB\n\
             water   above-high\n\
             \n\
             NAME  WEIGHT  FLOOR     CEILING  TARGET   RESIDENT   STORED   NEED  REASON\n\
             web   100     16.0 MiB  none     1.0 GiB  900.0 MiB  2.0 MiB  -     refaults\n"
        );
        let none = HostReport::default().text();
        assert!(none.contains("budget  off"), "{none}");
    }
}
