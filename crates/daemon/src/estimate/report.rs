// SPDX-License-Identifier: Apache-2.0
//! The report of an estimate.

use serde::Serialize;

use pagetide_report::size::readable;
use pagetide_report::text::{Text, fields, table};

/// An estimate of what taking over a VM would save.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct EstimateReport {
    /// Process id of the VMM.
    pub pid: u32,
    /// Command of the VMM.
    pub vmm: String,
    /// Time over which the VM was observed.
    pub observed_seconds: f64,
    /// Time between two looks.
    pub interval_seconds: u64,
    /// Looks taken.
    pub looks: u32,
    /// How touches were detected.
    pub tracker: String,
    /// RAM of the VM.
    pub ram_bytes: u64,
    /// RAM of the VM that is present.
    pub resident_bytes: u64,
    /// RAM of the VM that has no memory: never touched, or given up by the guest.
    pub free_bytes: u64,
    /// The same as a share of the RAM. What the guest's kernel holds free without reporting it is not known.
    pub free_share: f64,
    /// Share of the resident RAM that was watched.
    pub watched_share: f64,
    /// Pages whose content was read.
    pub read_pages: u64,
    /// Resident pages that are all zero.
    pub zero_share: f64,
    /// Resident pages that are not zero and that lz4 makes smaller.
    pub compressible_share: f64,
    /// Compressed size of these over their size.
    pub lz4_ratio: f64,
    /// Duration of the longest look.
    pub look_max_seconds: f64,
    /// By idle time; as far as the observed time reaches.
    pub cold: Vec<ColdReport>,
    /// Reasons for which `pagetide attach` would refuse the VM, as sentences.
    pub refusals: Vec<String>,
    /// Eviction blockers, as sentences.
    pub eviction_blockers: Vec<String>,
    /// Other warnings for an operator, as sentences.
    pub warnings: Vec<String>,
}

/// Pages not touched for some time.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ColdReport {
    /// The idle time.
    pub minutes: f64,
    /// Share of the resident pages that were idle for it.
    pub cold_share: f64,
    /// Share of the 2 MiB sections in use of which all pages were idle for it.
    pub cold_section_share: f64,
    /// Cold pages, in bytes.
    pub cold_bytes: u64,
    /// Share of the cold pages that are all zero.
    pub zero_share: f64,
    /// Share of the cold pages that are not zero and that lz4 makes smaller.
    pub compressible_share: f64,
    /// Bytes that the content of the cold pages would take in the store.
    pub stored_bytes: u64,
    /// Bytes saved by evicting them: less the store, less the page words of the whole RAM.
    pub saved_bytes: u64,
    /// Touches per second of pages evicted this cold, in the whole VM; absent before one was possible.
    pub faults_per_second: Option<f64>,
}

impl Text for EstimateReport {
    fn text(&self) -> String {
        let heads = [
            "NOT TOUCHED FOR",
            "COLD",
            "COLD SECTIONS",
            "SAVED",
            "OF WHICH ZERO",
            "FAULTS/S",
        ];
        let mut rows = vec![heads.map(String::from)];
        rows.extend(self.cold.iter().map(|cold| {
            [
                format!("{} min", cold.minutes),
                format!("{:.1} %", cold.cold_share * 100.0),
                format!("{:.1} %", cold.cold_section_share * 100.0),
                readable(cold.saved_bytes),
                format!("{:.1} %", cold.zero_share * 100.0),
                cold.faults_per_second
                    .map_or_else(|| "-".into(), |faults| format!("{faults:.1}")),
            ]
        }));
        let mut head = self.clone();
        head.cold.clear();
        format!("{}\n{}", fields(&head), table(&rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimate_as_text_has_a_row_for_each_threshold_and_every_sentence() {
        let report = EstimateReport {
            pid: 4711,
            vmm: "qemu".into(),
            observed_seconds: 300.0,
            interval_seconds: 10,
            looks: 31,
            tracker: "unmap-and-look".into(),
            ram_bytes: 1 << 30,
            resident_bytes: 1 << 29,
            free_bytes: 1 << 29,
            free_share: 0.5,
            watched_share: 0.5,
            read_pages: 2_500,
            zero_share: 0.25,
            compressible_share: 0.5,
            lz4_ratio: 0.4,
            look_max_seconds: 0.01,
            cold: vec![ColdReport {
                minutes: 2.0,
                cold_share: 0.5,
                cold_section_share: 0.25,
                cold_bytes: 1 << 28,
                zero_share: 0.3,
                compressible_share: 0.5,
                stored_bytes: 1 << 27,
                saved_bytes: 1 << 27,
                faults_per_second: None,
            }],
            refusals: vec![],
            eviction_blockers: vec!["first blocker".into(), "second blocker".into()],
            warnings: vec![],
        };
        let text = report.text();
        for part in [
            "resident           512.0 MiB\n",
            "zero               25.0 %\n",
            "eviction blockers  first blocker\n                   second blocker\n",
            "\nNOT TOUCHED FOR  COLD    COLD SECTIONS  SAVED      OF WHICH ZERO  FAULTS/S\n\
             2 min            50.0 %  25.0 %         128.0 MiB  30.0 %         -\n",
        ] {
            assert!(text.contains(part), "no {part} in\n{text}");
        }
    }
}
