// SPDX-License-Identifier: Apache-2.0
//! A directory that is root's alone, for programs of a bench: only such a program may become the daemon.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

/// Where root's own directories are.
const PLACE: &str = "/var/lib";
/// Others may run what is there, and write nothing.
const MODE: u32 = 0o755;

/// The directory, removed on drop.
pub(crate) struct Programs(tempfile::TempDir);

impl Programs {
    /// An empty one.
    ///
    /// # Errors
    /// A message.
    pub(crate) fn new() -> Result<Self, String> {
        let made = tempfile::Builder::new()
            .prefix("pagetide-bench-")
            .permissions(Permissions::from_mode(MODE))
            .tempdir_in(PLACE);
        made.map(Self)
            .map_err(|error| format!("no directory in {PLACE}: {error}"))
    }

    /// Where a program of this name is, or would be.
    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A copy of `program` under this name.
    ///
    /// # Errors
    /// A message.
    pub(crate) fn put(&self, program: &Path, name: &str) -> Result<PathBuf, String> {
        let path = self.at(name);
        let put = fs::copy(program, &path)
            .and_then(|_| fs::set_permissions(&path, Permissions::from_mode(MODE)));
        put.map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(path)
    }
}
