// SPDX-License-Identifier: Apache-2.0
//! Pools in the state directory: which there are, whose, and whether this version can read them.

use super::failure::failed;
use crate::control::ControlError;
use std::path::{Path, PathBuf};

/// The name of the VM of a pool.
pub(super) fn name_of(pool: &Path) -> String {
    let stem = pool.file_stem().unwrap_or_default();
    stem.to_string_lossy().into_owned()
}

/// All pools.
pub(super) fn pools(state_dir: &Path) -> Result<Vec<PathBuf>, ControlError> {
    let listing = std::fs::read_dir(state_dir)
        .map_err(|error| failed(format!("cannot list {}: {error}", state_dir.display())))?;
    let mut pools = Vec::new();
    for entry in listing {
        let path = entry.map_err(failed)?.path();
        let is_pool = |suffix| suffix == pagetide_swap::pool::POOL_SUFFIX;
        if path.extension().is_some_and(is_pool) {
            pools.push(path);
        }
    }
    Ok(pools)
}

/// Checks that this version can read every pool before any VM is recovered: a version mismatch is best
/// found while nothing has been touched.
pub(super) fn refuse_other_versions(state_dir: &Path) -> Result<(), ControlError> {
    let own = pagetide_swap::pool::VERSION;
    for path in pools(state_dir)? {
        // A file that is no pool, or is damaged, concerns only its VM; recovery reports it.
        if let Ok(Some(found)) = pagetide_swap::pool::version_at(&path)
            && found != own
        {
            return Err(ControlError::refused(format!(
                "pool {} was made by another version of pagetide (it has format {found}, this program reads format \
                 {own}): no VM was recovered; start that version, or remove the pool when its VM is gone",
                path.display(),
            )));
        }
    }
    Ok(())
}
