// SPDX-License-Identifier: Apache-2.0
//! fio of this machine in a guest, with its job files.

use crate::image::Addition;
use crate::programs::{FIO, ProgramError};

/// Program and shared objects, as additions to a guest's initramfs, and these job files.
///
/// # Errors
/// fio is not installed, or a shared object it needs is not there.
pub fn additions(jobs: &[(&str, String)]) -> Result<Vec<Addition>, ProgramError> {
    let mut additions = FIO.additions()?;
    for (name, job) in jobs {
        additions.push(Addition::text(&format!("fio/{name}.fio"), job));
    }
    Ok(additions)
}
