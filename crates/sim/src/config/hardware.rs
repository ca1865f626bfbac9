// SPDX-License-Identifier: Apache-2.0
//! Hardware that the paper does not have: several devices behind one IOMMU, and PASID.

use serde::{Deserialize, Serialize};

/// Devices behind one IOMMU, all alike. Each has a link, a PTB, a context cache, a DevTLB, a prefetch unit and a
/// PCIe port of its own; they share the IOMMU with its caches and walkers.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DevicesConfig {
    /// How many.
    pub count: u32,
    /// Lowest bit of a source id that chooses its device: the device is the number from this bit on, modulo the
    /// number of devices.
    pub source_low_bit: u32,
    /// Packets by which the trace may be read ahead for one device while another one waits for its next. A device
    /// whose next packet is further away has an idle link until the others have caught up.
    pub ahead_packets: u32,
}

impl Default for DevicesConfig {
    fn default() -> Self {
        Self {
            count: 1,
            source_low_bit: super::past_the_function(),
            ahead_packets: 1024,
        }
    }
}

/// Process address space ids: a source has several address spaces, one for each domain that its requests in the
/// trace have.
#[doc(alias = "PASID")]
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PasidConfig {
    /// Requests have one.
    pub enabled: bool,
    /// Memory accesses to read an entry of the PASID table; 2: directory and table (VT-d, scalable mode).
    pub table_accesses: u64,
}

impl Default for PasidConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            table_accesses: 2,
        }
    }
}
