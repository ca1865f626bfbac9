// SPDX-License-Identifier: Apache-2.0
//! The rows of the bench: tiers and mixes.

use crate::fault::content::Kind;
use pagetide_daemon::control::VmReport;
use std::path::Path;

/// A tier or a mix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Row {
    Zero,
    Same,
    Lz4,
    Zstd,
    Disk,
    Remote,
    Paper,
    PaperInTiers,
}

/// How long a section of a row in slower tiers is left alone before it goes there.
const SOON: &str = "100ms";
/// The same where what is evicted is counted before it goes on: an eviction takes less.
const COUNTED: &str = "1s";
/// How long a section of [`Row::PaperInTiers`] is left alone before it goes to the disk: what is to stay in zstd and
/// in lz4 is evicted and measured in less.
const LATER: &str = "4s";

impl Row {
    pub(super) const ALL: [Self; 8] = [
        Self::Zero,
        Self::Same,
        Self::Lz4,
        Self::Paper,
        Self::Zstd,
        Self::Disk,
        Self::Remote,
        Self::PaperInTiers,
    ];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Zero => "zero",
            Self::Same => "same",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
            Self::Disk => "disk",
            Self::Remote => "remote",
            Self::Paper => "paper",
            Self::PaperInTiers => "paper_in_tiers",
        }
    }

    pub(super) const fn content(self) -> Kind {
        match self {
            Self::Zero => Kind::Zero,
            Self::Same => Kind::Same,
            Self::Lz4 | Self::Zstd | Self::Disk | Self::Remote => Kind::Records,
            Self::Paper | Self::PaperInTiers => Kind::Paper,
        }
    }

    /// Settings of its daemon; `disk` is where a disk tier may be, `port` that of a server on the loopback.
    pub(super) fn settings(self, disk: &Path, port: u16) -> Vec<String> {
        let disk = format!("disk:{}", disk.join(self.name()).display());
        let (tiers, after) = match self {
            Self::Zero | Self::Same | Self::Lz4 | Self::Paper => {
                ("zero,same,lz4".to_owned(), [SOON, SOON])
            }
            Self::Zstd => ("zero,same,lz4,zstd".to_owned(), [COUNTED, SOON]),
            // In the form that lz4 gave it: what the disk takes is measured, and not what zstd does.
            Self::Disk => (format!("zero,same,lz4,{disk}=1G"), [SOON, SOON]),
            Self::Remote => (
                format!("zero,same,lz4,remote:redis://127.0.0.1:{port}=1G"),
                [SOON, SOON],
            ),
            Self::PaperInTiers => (format!("zero,same,lz4,zstd,{disk}=1G"), [SOON, LATER]),
        };
        let [demote, sink] = after;
        let flags = [
            "--tiers",
            &tiers,
            "--demote-after",
            demote,
            "--sink-after",
            sink,
        ];
        flags.map(str::to_owned).into()
    }
}

/// Where the pages of a VM lie.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Lie {
    pub(super) zero_pages: u64,
    pub(super) same_pages: u64,
    pub(super) lz4_pages: u64,
    pub(super) zstd_pages: u64,
    pub(super) disk_pages: u64,
    pub(super) remote_pages: u64,
    pub(super) uncompressed_pages: u64,
    /// Memory of the pool for their content, fragmentation included.
    pub(super) memory_bytes: u64,
    pub(super) disk_bytes: u64,
    pub(super) remote_bytes: u64,
}

impl Lie {
    pub(super) fn of(vm: &VmReport) -> Self {
        Self {
            zero_pages: vm.zero_pages,
            same_pages: vm.same_filled_pages,
            lz4_pages: vm.lz4_pages,
            zstd_pages: vm.zstd_pages,
            disk_pages: vm.disk_pages,
            remote_pages: vm.remote_pages,
            uncompressed_pages: vm.uncompressed_pages,
            memory_bytes: vm.stored_bytes + vm.fragmented_bytes,
            disk_bytes: vm.disk_bytes,
            remote_bytes: vm.remote_bytes,
        }
    }

    /// Pages with content in slots of the pool.
    pub(super) const fn pool_pages(&self) -> u64 {
        self.lz4_pages + self.zstd_pages + self.uncompressed_pages
    }

    /// Pages with content that is stored anywhere.
    pub(super) const fn stored_pages(&self) -> u64 {
        self.pool_pages() + self.disk_pages + self.remote_pages
    }
}
