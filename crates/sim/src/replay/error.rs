// SPDX-License-Identifier: Apache-2.0
//! Why a replay gives no result.

use pagetide_access_log::TraceError;
use pagetide_addr::DomainId;
use std::{
    path::{Path, PathBuf},
    time::Duration,
};

/// Why a replay gives no result.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// A trace is broken or cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// An access lies outside the VM.
    #[error(
        "{whence}: access {access} touches section {section}, but the VM has {sections} sections; \
         give it more memory"
    )]
    Outside {
        /// Origin of the access: [`super::AccessStream::whence`].
        whence: String,
        /// Number of the access in its stream, from 0.
        access: u64,
        /// The section it touches.
        section: u64,
        /// The VM's number of sections.
        sections: u64,
    },
    /// Time runs backwards.
    #[error(
        "{whence}: access {access} is at {at:?}, after one at {before:?}: times must not run backwards"
    )]
    Backwards {
        /// Origin of the access: [`super::AccessStream::whence`].
        whence: String,
        /// Number of the access in its stream, from 0.
        access: u64,
        /// Its time.
        at: Duration,
        /// Time of the one before.
        before: Duration,
    },
    /// A disk request that no guest would make.
    #[error(
        "{}record {record} asks for {len_bytes} bytes at byte {offset_bytes} of disk {disk}; \
         a replay takes at most {max_bytes} bytes at once",
        named(file.as_deref())
    )]
    Request {
        /// The trace's file, if it is known.
        file: Option<PathBuf>,
        /// Number of its record, as in [`TraceError::Record`].
        record: u64,
        /// The disk.
        disk: u32,
        /// Its offset.
        offset_bytes: u64,
        /// Its length.
        len_bytes: u64,
        /// The longest that is accepted.
        max_bytes: u64,
    },
    /// An access log touches memory that its VM does not have.
    #[error(
        "record {record} of the log of {vm} touches {len_bytes} bytes at {address:#x}, but the VM has \
         {memory_bytes} bytes of memory; give it more"
    )]
    Address {
        /// The VM.
        vm: String,
        /// Number of the record in the log, from 0.
        record: u64,
        /// Its address.
        address: u64,
        /// Its length.
        len_bytes: u64,
        /// The VM's memory.
        memory_bytes: u64,
    },
    /// An access log has other address spaces than the selected one, or more than one.
    #[error("{}", of_spaces(vm, *asked, spaces, *named_max))]
    Space {
        /// The VM.
        vm: String,
        /// The selected one.
        asked: Option<DomainId>,
        /// The log's spaces, perhaps not all.
        spaces: Vec<DomainId>,
        /// How many of them the message names.
        named_max: usize,
    },
    /// A time that no trace can have: the replay would have to run each second up to it.
    #[error(
        "{whence} is {seconds} s after the first one, and a replay takes at most {max_seconds} s; \
         mend the record's time, or stretch times by less"
    )]
    TooLate {
        /// The record.
        whence: String,
        /// Its time in the replay.
        seconds: u64,
        /// The latest permitted time.
        max_seconds: u64,
    },
    /// A device number beyond those of any VM of this size.
    #[error(
        "{whence}: device {device} is one more than the {max} of one VM that a replay keeps apart"
    )]
    Devices {
        /// Origin of its access.
        whence: String,
        /// The device.
        device: u32,
        /// Largest permitted number.
        max: u64,
    },
    /// The request cannot be replayed.
    #[error("{0}")]
    Asked(String),
}

impl ReplayError {
    /// The same, for a trace whose file is known.
    #[must_use]
    pub(super) fn of_file(mut self, path: &Path) -> Self {
        if let Self::Request { file, .. } = &mut self {
            *file = Some(path.to_owned());
        }
        self
    }
}

fn of_spaces(vm: &str, asked: Option<DomainId>, spaces: &[DomainId], named_max: usize) -> String {
    let named = spaces.iter().take(named_max);
    let named: Vec<_> = named.map(|space| space.0.to_string()).collect();
    let more = match spaces.len() > named_max {
        true => " and others",
        false => "",
    };
    let named = format!("{}{more}", named.join(", "));
    match asked.map(|asked| asked.0) {
        Some(asked) if spaces.is_empty() => {
            format!("the log of {vm} has no access in address space {asked}, nor in any other")
        }
        Some(asked) => {
            format!("the log of {vm} has no access in address space {asked}; it has {named}")
        }
        None => format!(
            "the log of {vm} has accesses in several address spaces ({named}), which are not one memory: \
             say which is to be replayed by --space"
        ),
    }
}

fn named(file: Option<&Path>) -> String {
    file.map_or_else(String::new, |file| format!("{}, ", file.display()))
}
