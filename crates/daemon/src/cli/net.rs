// SPDX-License-Identifier: Apache-2.0
//! Arguments of `dpu net`.

use super::shared::{ClientArgs, DeviceArgs};
use crate::control::{DEFAULT_PAIRS, NetLink, OnReceiveFault, Wire};
use clap::Args;
use pagetide_dpu::{PAIRS_MAX, STORE_BYTES};
use pagetide_report::size::ByteSize;
use pagetide_sys::net::interface::{NAME_BYTES_MAX, is_name};
use std::path::PathBuf;

/// Arguments of `dpu net`.
#[derive(Args, Debug)]
pub struct NetArgs {
    /// Unix socket to listen on
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// Where packets go.
    #[command(flatten)]
    pub link: LinkArgs,
    /// Queue pairs offered to the guest
    #[arg(long, value_name = "N", default_value_t = DEFAULT_PAIRS,
          value_parser = clap::value_parser!(u16).range(1..=i64::from(PAIRS_MAX)))]
    pub queues: u16,
    /// What becomes of a packet that comes for buffers whose pages are absent
    #[arg(long, value_enum, value_name = "HOW", default_value_t)]
    pub on_receive_fault: OnReceiveFault,
    /// Do not ask for pages of posted buffers before there are packets for them
    #[arg(long)]
    pub no_prefault: bool,
    /// Which pages stay present: none, floor:N (the next N posted buffers of each ring), fine (all posted
    /// buffers), coarse:SIZE (used ones, too, up to that size), or static (all memory of the guest)
    #[arg(
        long,
        value_name = "none|floor:N|fine|coarse:SIZE|static",
        default_value_t
    )]
    pub wire: Wire,
    /// Most memory for packets that wait for their buffers, all queues together
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(STORE_BYTES))]
    pub backup_bytes: ByteSize,
    /// Of every device.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Of every client.
    #[command(flatten)]
    pub client: ClientArgs,
}

/// The link of a network device: exactly one.
#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
pub struct LinkArgs {
    /// A TAP of the host, which exists: `ip tuntap add dev T mode tap multi_queue`
    #[arg(long, value_name = "T", value_parser = interface)]
    pub tap: Option<String>,
    /// An interface of the host, whose packets it takes and gives: a veth, say
    #[arg(long, value_name = "IF", value_parser = interface)]
    pub packet: Option<String>,
    /// Another device of this process that names the same pair: guest to guest
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub pair: Option<String>,
    /// Packets that are sent come back
    #[arg(long = "loop")]
    pub loopback: bool,
    /// Count packets that are sent, and drop them; none ever comes
    #[arg(long)]
    pub null: bool,
}

impl LinkArgs {
    /// What was chosen.
    #[must_use]
    pub fn link(self) -> NetLink {
        // The group has exactly one.
        let tap = self.tap.map(NetLink::Tap);
        let packet = self.packet.map(NetLink::Packet);
        let pair = self.pair.map(NetLink::Pair);
        let other = match self.loopback {
            true => NetLink::Loop,
            false => NetLink::Null,
        };
        tap.or(packet).or(pair).unwrap_or(other)
    }
}

fn interface(name: &str) -> Result<String, String> {
    match is_name(name) {
        true => Ok(name.to_owned()),
        false => Err(format!(
            "write the name of an interface: 1 to {NAME_BYTES_MAX} bytes without blanks, '/' and ':'"
        )),
    }
}
