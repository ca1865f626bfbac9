// SPDX-License-Identifier: Apache-2.0
//! Small reports without figures.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A RAM file of a VM: a region of its address space.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct RegionReport {
    /// The file, by device and inode number.
    pub file: String,
    /// Its first page in the address space.
    pub first_page: u64,
    /// Number of its pages.
    pub pages: u64,
    /// Memory it takes up now.
    pub resident_bytes: u64,
    /// Pages of it that are away.
    pub stored_pages: u64,
}

/// What a reclaim did.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize, ToSchema)]
pub struct ReclaimReport {
    /// Name of the VM.
    pub name: String,
    /// Bytes asked for; absent when all was asked for.
    pub asked_bytes: Option<u64>,
    /// Bytes evicted by this call.
    pub reclaimed_bytes: u64,
    /// RAM of the VM that is present afterwards.
    pub resident_bytes: u64,
    /// Why less than asked for was evicted, as a sentence.
    pub shortfall: Option<String>,
}
