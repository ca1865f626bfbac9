// SPDX-License-Identifier: Apache-2.0
//! The request for a disk, and what requests for devices of all kinds have in common.

use super::socket_mode::SocketMode;
use clap::ValueEnum;
use pagetide_dpu::WEIGHT_DEFAULT;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;

/// Serve an image as a vhost-user-blk device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BlkRequest {
    /// Unix socket to listen on, absolute.
    #[schema(value_type = String)]
    pub socket: PathBuf,
    /// Image file or block device, absolute.
    #[schema(value_type = String)]
    pub image: PathBuf,
    /// Request queues offered to the guest.
    #[serde(default = "default_queues")]
    pub queues: u16,
    /// Refuse writes.
    #[serde(default)]
    pub read_only: bool,
    /// Look each page up before DMA; `false` only for VMs that are not attached.
    #[serde(default = "default_lookup")]
    pub lookup: bool,
    /// Serial number shown to the guest, at most 20 bytes; one made of the socket's path without it.
    #[serde(default)]
    pub serial: Option<String>,
    /// What a queue does while one of its requests waits for pages.
    #[serde(default)]
    pub on_fault: OnFault,
    /// Share of the engines beside the weights of other devices that have work, 1 to 1000.
    #[serde(default = "default_weight", skip_serializing_if = "is_default_weight")]
    pub weight: u32,
    /// Refuse guest RAM that is not sealed against shrinking.
    #[serde(default, skip_serializing_if = "is_false")]
    pub require_sealed: bool,
    /// Guest RAM to be taken besides memfds of ordinary pages.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow_ram: Vec<RamKind>,
    /// Most guest RAM, in bytes, that the front end may have mapped.
    #[serde(
        default = "default_ram_max",
        skip_serializing_if = "is_default_ram_max"
    )]
    pub ram_max_bytes: u64,
    /// Others may write the image meanwhile, and know of one another (a cluster file system, say).
    #[serde(default, skip_serializing_if = "is_false")]
    pub shared: bool,
    /// The image's bytes are the disk's, whatever format they look like.
    #[serde(default, skip_serializing_if = "is_false")]
    pub raw: bool,
    /// User to whom the socket belongs, by name or number; whom the daemon runs as, without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Group to which the socket belongs, by name or number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Permission bits of the socket in octal, as `0660`; without them 0660 if an owner or a group is
    /// given, else as the umask of the daemon has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub mode: Option<SocketMode>,
}

/// A kind of file that is guest RAM only by the operator's word: it can lose memory while a device
/// uses it, which ends that device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RamKind {
    /// A file on a mounted tmpfs.
    Tmpfs,
    /// Huge pages: a file on hugetlbfs, or a memfd of them.
    Hugetlbfs,
}

/// What a queue does while one of its requests waits for pages.
#[derive(
    Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum OnFault {
    /// It begins no later request until that one has its pages.
    Pause,
    /// It goes on with later requests.
    #[default]
    OutOfOrder,
}

/// Queues a block device offers unless told otherwise: QEMU asks for one a vCPU
/// and fails where a back end has fewer.
pub const DEFAULT_BLK_QUEUES: u16 = 8;

fn default_queues() -> u16 {
    DEFAULT_BLK_QUEUES
}

pub(super) fn default_weight() -> u32 {
    WEIGHT_DEFAULT
}

pub(super) fn default_lookup() -> bool {
    true
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
pub(super) fn is_default_weight(weight: &u32) -> bool {
    *weight == WEIGHT_DEFAULT
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
pub(super) fn is_default_ram_max(bytes: &u64) -> bool {
    *bytes == pagetide_dpu::RAM_BYTES_MAX
}

pub(super) fn default_ram_max() -> u64 {
    pagetide_dpu::RAM_BYTES_MAX
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
pub(super) fn is_false(value: &bool) -> bool {
    !*value
}
