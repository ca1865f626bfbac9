// SPDX-License-Identifier: Apache-2.0
//! [`Identity`]: the pool's record of the VM it belongs to, as JSON in its header.

use super::failure::failed;
use crate::control::ControlError;
use pagetide_addr::{FileKey, Hva, PageNo};
use pagetide_swap::Pool;
use pagetide_vmm::{
    layout::{RamFile, RamLayout, RecordedLayout, RecordedMapping},
    process::VmmIdentity,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Identifies the pool's VM. Fields may be added; unknown ones are ignored.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Identity {
    pub(super) name: String,
    pub(super) pid: u32,
    /// Start time of the process, in clock ticks since boot: a pid alone may be reused.
    pub(super) start_time: u64,
    pub(super) vmm: String,
    pub(super) mappings: Vec<MappingIdentity>,
}

/// One mapping of the RAM, as it was when its words were created.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct MappingIdentity {
    hva: Hva,
    len_bytes: u64,
    file: FileKey,
    file_offset: u64,
    /// First page of the file. Without it files lie end to end, as they did before RAM hotplug was
    /// supported.
    #[serde(default)]
    first_page: Option<PageNo>,
}

impl Identity {
    pub(super) fn process(&self) -> VmmIdentity {
        VmmIdentity {
            pid: self.pid,
            start_time: self.start_time,
        }
    }

    /// The layout for which the words were created.
    pub(super) fn recorded(&self) -> RecordedLayout {
        let of = |mapping: &MappingIdentity| RecordedMapping {
            hva: mapping.hva,
            len_bytes: mapping.len_bytes,
            key: mapping.file,
            file_offset: mapping.file_offset,
        };
        let first = |mapping: &MappingIdentity| Some((mapping.file, mapping.first_page?));
        RecordedLayout {
            mappings: self.mappings.iter().map(of).collect(),
            first_pages: self.mappings.iter().filter_map(first).collect(),
        }
    }

    /// The same VM with the RAM of `layout`.
    pub(super) fn with_ram(&self, layout: &RamLayout) -> Self {
        Self {
            mappings: mappings_of(layout),
            ..self.clone()
        }
    }

    /// True if its RAM files are those of `layout`.
    pub(super) fn has_files_of(&self, layout: &RamLayout) -> bool {
        let of_layout: BTreeSet<_> = layout.files().iter().map(RamFile::key).collect();
        self.files().collect::<BTreeSet<_>>() == of_layout
    }

    /// The RAM files.
    pub(super) fn files(&self) -> impl Iterator<Item = FileKey> + '_ {
        self.mappings.iter().map(|mapping| mapping.file)
    }
}

/// The identity in `pool`.
///
/// # Errors
/// An error message: it cannot be read.
pub(super) fn of_pool(pool: &Pool) -> Result<Identity, ControlError> {
    serde_json::from_slice(&pool.identity().map_err(failed)?).map_err(|error| {
        failed(format!(
            "pool {}: its identity cannot be read: {error}",
            pool.path().display()
        ))
    })
}

/// Writes `identity` into the pool atomically.
pub(super) fn remember(pool: &Pool, identity: &Identity) -> Result<(), ControlError> {
    let json = serde_json::to_vec(identity).map_err(failed)?;
    pool.set_identity(&json).map_err(failed)
}

pub(super) fn mappings_of(layout: &RamLayout) -> Vec<MappingIdentity> {
    let of = |mapping: RecordedMapping| MappingIdentity {
        hva: mapping.hva,
        len_bytes: mapping.len_bytes,
        file: mapping.key,
        file_offset: mapping.file_offset,
        first_page: layout.file(mapping.key).map(|file| file.pages().start),
    };
    layout.recorded().mappings.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As daemons wrote it before RAM hotplug was supported.
    const EARLIER: &str = r#"{"name":"a","pid":7,"start_time":9,"vmm":"qemu","mappings":[
        {"hva":4096,"len_bytes":8192,"file":{"dev":1,"ino":2},"file_offset":0}]}"#;

    #[test]
    fn identity_without_first_pages_is_of_files_that_lie_end_to_end() {
        let mut identity: Identity = serde_json::from_str(EARLIER).unwrap();
        assert_eq!(identity.recorded().mappings.len(), 1);
        assert_eq!(identity.recorded().first_pages, []);
        identity.mappings[0].first_page = Some(PageNo(512));
        let json = serde_json::to_string(&identity).unwrap();
        let again: Identity = serde_json::from_str(&json).unwrap();
        let key = FileKey { dev: 1, ino: 2 };
        assert_eq!(again.recorded().first_pages, [(key, PageNo(512))]);
    }
}
