// SPDX-License-Identifier: Apache-2.0
//! Settings that were made while the daemon ran, as a file in the state directory.
//!
//! The file is replaced as a whole, so a daemon that dies meanwhile leaves the old one or the new one. One that
//! cannot be read, or that does not suit this host any more, must not keep VMs from being recovered: that is
//! logged, and the settings of the start hold.

use super::ScheduleSettings;
use std::{
    fs::{self, OpenOptions},
    io::{self, ErrorKind, Read as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

const FILE: &str = "scheduler.json";
/// Larger than the file of a host with as many CPUs as can be named.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// Where settings are kept.
#[derive(Clone, Debug)]
pub struct KeptSettings {
    path: PathBuf,
}

impl KeptSettings {
    /// In `state_dir`.
    #[must_use]
    pub fn in_dir(state_dir: &Path) -> Self {
        Self {
            path: state_dir.join(FILE),
        }
    }

    /// Those that were kept; `None` if there are none.
    ///
    /// # Errors
    /// Why the file cannot be used, as a sentence.
    pub fn read(&self) -> Result<Option<ScheduleSettings>, String> {
        let said = |error: &dyn std::fmt::Display| format!("{}: {error}", self.path.display());
        let file = match fs::File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(said(&error)),
        };
        let mut text = Vec::new();
        let read = file.take(FILE_BYTES_MAX).read_to_end(&mut text);
        read.map_err(|error| said(&error))?;
        let settings = serde_json::from_slice(&text).map_err(|error| said(&error))?;
        Ok(Some(settings))
    }

    /// Keeps `settings` from now on.
    ///
    /// # Errors
    /// The kernel's; what was kept before is.
    pub fn write(&self, settings: &ScheduleSettings) -> io::Result<()> {
        let next = self.path.with_extension("json.next");
        let text = serde_json::to_vec_pretty(settings)?;
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.open(&next)?;
        file.write_all(&text)?;
        fs::rename(&next, &self.path)
    }

    /// Keeps none from now on.
    ///
    /// # Errors
    /// The kernel's.
    pub fn forget(&self) -> io::Result<()> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}
