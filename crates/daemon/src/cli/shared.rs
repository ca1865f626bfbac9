// SPDX-License-Identifier: Apache-2.0
//! Arguments that several commands take.

use crate::control::{RamKind, SocketMode};
use clap::Args;
use pagetide_dpu::WEIGHT_DEFAULT;
use pagetide_report::size::ByteSize;
use std::path::PathBuf;

/// Where the daemon is, and how to print its answer.
#[derive(Args, Clone, PartialEq, Eq, Debug)]
pub struct ClientArgs {
    /// Socket of the daemon's API
    #[arg(
        long,
        value_name = "PATH",
        env = "PAGETIDE_API",
        default_value = "/dev/shm/pagetide/api.sock"
    )]
    pub api: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `dpu blk` and `dpu net` on guest RAM, the engines, and the socket.
#[derive(Args, Debug)]
pub struct DeviceArgs {
    /// Do not look pages up before DMA; only for VMs that are not attached
    #[arg(long)]
    pub no_lookup: bool,
    /// Refuse guest RAM that is not sealed against shrinking
    #[arg(long)]
    pub require_sealed: bool,
    /// Take guest RAM of these kinds, too: it can be lost under the device, which then stops
    #[arg(long, value_enum, value_name = "KIND,…", value_delimiter = ',')]
    pub allow_ram: Vec<RamKind>,
    /// Most guest RAM that a front end may have mapped
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(pagetide_dpu::RAM_BYTES_MAX))]
    pub ram_max: ByteSize,
    /// Share of the engines beside the weights of other devices that have work, 1 to 1000
    #[arg(long, value_name = "N", default_value_t = WEIGHT_DEFAULT)]
    pub weight: u32,
    /// User to whom the socket is to belong, by name or number
    #[arg(long, value_name = "USER")]
    pub owner: Option<String>,
    /// Group to which the socket is to belong, by name or number
    #[arg(long, value_name = "GROUP")]
    pub group: Option<String>,
    /// Permission bits of the socket, in octal [default: 0660 with --owner or --group, else by the umask]
    #[arg(long, value_name = "OCTAL")]
    pub mode: Option<SocketMode>,
}

/// A limit as it is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    /// No limit.
    None,
    /// This much.
    Size(ByteSize),
}

impl std::str::FromStr for Limit {
    type Err = pagetide_report::size::SizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "none" {
            Ok(Self::None)
        } else {
            text.parse().map(Self::Size)
        }
    }
}
