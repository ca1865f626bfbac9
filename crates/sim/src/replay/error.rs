// SPDX-License-Identifier: Apache-2.0
//! Why a replay gives no result.

use pagetide_addr::DomainId;
use pagetide_trace::TraceError;
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
        /// Where the access comes from: [`super::AccessStream::whence`].
        whence: String,
        /// Number of the access in its stream, from 0.
        access: u64,
        /// What it touches.
        section: u64,
        /// How many there are.
        sections: u64,
    },
    /// Time runs backwards.
    #[error(
        "{whence}: access {access} is at {at:?}, after one at {before:?}: times must not run backwards"
    )]
    Backwards {
        /// Where the access comes from: [`super::AccessStream::whence`].
        whence: String,
        /// Number of the access in its stream, from 0.
        access: u64,
        /// Its time.
        at: Duration,
        /// Time of the one before.
        before: Duration,
    },
    /// A request to a disk that no guest would make.
    #[error(
        "{}record {record} asks for {len_bytes} bytes at byte {offset_bytes} of disk {disk}; \
         a replay takes at most {max_bytes} bytes at once",
        named(file.as_deref())
    )]
    Request {
        /// The trace's file, if it is known.
        file: Option<PathBuf>,
        /// Number of its record, as [`TraceError::Record`] has it.
        record: u64,
        /// The disk.
        disk: u32,
        /// Where.
        offset_bytes: u64,
        /// How much.
        len_bytes: u64,
        /// The most that is taken.
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
        /// Where.
        address: u64,
        /// How much.
        len_bytes: u64,
        /// What there is.
        memory_bytes: u64,
    },
    /// An access log has other address spaces than one that was asked for, or than one.
    #[error("{}", of_spaces(vm, *asked, spaces, *named_max))]
    Space {
        /// The VM.
        vm: String,
        /// The one that was asked for.
        asked: Option<DomainId>,
        /// Those that the log has, perhaps not all.
        spaces: Vec<DomainId>,
        /// How many of them are told.
        named_max: usize,
    },
    /// A time that no trace can have: each second up to it would have to be lived through.
    #[error(
        "{whence} is {seconds} s after the first one, and a replay takes at most {max_seconds} s; \
         mend the record's time, or stretch times by less"
    )]
    TooLate {
        /// Which record.
        whence: String,
        /// Its time in the replay.
        seconds: u64,
        /// The latest there may be.
        max_seconds: u64,
    },
    /// Another device than any VM of this size may have.
    #[error(
        "{whence}: device {device} is one more than the {max} of one VM that a replay keeps apart"
    )]
    Devices {
        /// Where its access comes from.
        whence: String,
        /// The device.
        device: u32,
        /// How many there may be.
        max: u64,
    },
    /// What was asked for cannot be replayed.
    #[error("{0}")]
    Asked(String),
}

impl ReplayError {
    /// The same, of a trace whose file is known.
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
