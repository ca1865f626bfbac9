// SPDX-License-Identifier: Apache-2.0
//! The request for a network device.

use super::blk::{
    RamKind, default_lookup, default_ram_max, default_weight, is_default_ram_max,
    is_default_weight, is_false,
};
use super::socket_mode::SocketMode;
use clap::ValueEnum;
use pagetide_dpu::{COARSE_BYTES_RANGE, STORE_BYTES};
use pagetide_report::size::ByteSize;
use serde::{Deserialize, Serialize};
use std::{fmt, path::PathBuf, str::FromStr};
use utoipa::ToSchema;

/// Queue pairs of a network device unless told otherwise.
pub const DEFAULT_PAIRS: u16 = 1;
/// Buffers of the longest ring.
const BUFFERS_MAX: u16 = 1024;

/// Serve a vhost-user-net device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NetRequest {
    /// Unix socket to listen on, absolute.
    #[schema(value_type = String)]
    pub socket: PathBuf,
    /// Where packets go and come from.
    pub link: NetLink,
    /// Queue pairs offered to the guest.
    #[serde(default = "default_pairs")]
    pub queues: u16,
    /// What becomes of a packet that comes for buffers whose pages are absent.
    #[serde(default)]
    pub on_receive_fault: OnReceiveFault,
    /// Ask for pages of posted buffers before there are packets for them.
    #[serde(default = "default_prefault")]
    pub prefault: bool,
    /// Which pages stay present: `none`, `fine`, `floor:N`, `coarse:SIZE` or `static`.
    #[serde(default)]
    #[schema(value_type = String)]
    pub wire: Wire,
    /// Most bytes of packets that wait for their buffers, all queues together.
    #[serde(default = "default_backup_bytes")]
    pub backup_bytes: u64,
    /// Look each page up before DMA; `false` only for VMs that are not attached.
    #[serde(default = "default_lookup")]
    pub lookup: bool,
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

/// Where the packets of a network device go and come from.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum NetLink {
    /// Packets that are sent are counted and dropped, and none ever comes.
    Null,
    /// Packets that are sent come back.
    Loop,
    /// Another device of this process that names the same pair.
    Pair(String),
    /// A TAP of the host, which exists: what the device sends, the host receives there.
    Tap(String),
    /// An interface of the host: what the device sends, goes out there, and what comes in, it receives.
    Packet(String),
}

impl fmt::Display for NetLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Loop => f.write_str("loop"),
            Self::Pair(name) => write!(f, "pair {name}"),
            Self::Tap(name) => write!(f, "tap {name}"),
            Self::Packet(name) => write!(f, "packet {name}"),
        }
    }
}

/// What becomes of a packet that comes for buffers whose pages are absent.
#[derive(
    Clone, Copy, PartialEq, Eq, Default, Debug, ValueEnum, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum OnReceiveFault {
    /// It is lost.
    Drop,
    /// It waits in the store, and all later ones of its queue wait behind it.
    Pause,
    /// It waits in the store; later ones go into their buffers and are reported after it.
    BackupRing,
    /// It goes into the next posted buffers that are present.
    #[default]
    OutOfOrder,
}

/// Which pages stay present on behalf of a network device, besides its rings.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Wire {
    /// None.
    #[default]
    None,
    /// Each, from its post to its use.
    Fine,
    /// The next so many of each ring.
    Floor(u16),
    /// As `fine`, and after its use, too, as long as no more than so many bytes do.
    Coarse(u64),
    /// All memory of the guest.
    Static,
}

impl FromStr for Wire {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => return Ok(Self::None),
            "fine" => return Ok(Self::Fine),
            "static" => return Ok(Self::Static),
            _ => {}
        }
        if let Some(Ok(buffers @ 1..=BUFFERS_MAX)) = text.strip_prefix("floor:").map(str::parse) {
            return Ok(Self::Floor(buffers));
        }
        if let Some(Ok(ByteSize(bytes))) = text.strip_prefix("coarse:").map(str::parse)
            && COARSE_BYTES_RANGE.contains(&bytes)
        {
            return Ok(Self::Coarse(bytes));
        }
        Err(format!(
            "write none, fine, static, floor:N with a number of buffers from 1 to {BUFFERS_MAX}, or coarse:SIZE \
             with a size from {} to {}",
            ByteSize(*COARSE_BYTES_RANGE.start()),
            ByteSize(*COARSE_BYTES_RANGE.end()),
        ))
    }
}

impl fmt::Display for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Fine => f.write_str("fine"),
            Self::Floor(buffers) => write!(f, "floor:{buffers}"),
            Self::Coarse(bytes) => write!(f, "coarse:{}", ByteSize(*bytes)),
            Self::Static => f.write_str("static"),
        }
    }
}

impl TryFrom<String> for Wire {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Wire> for String {
    fn from(wire: Wire) -> Self {
        wire.to_string()
    }
}

fn default_prefault() -> bool {
    true
}

fn default_backup_bytes() -> u64 {
    STORE_BYTES
}

fn default_pairs() -> u16 {
    DEFAULT_PAIRS
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn wiring_is_read_as_it_is_written_and_nothing_else_is() {
        for text in [
            "none",
            "fine",
            "floor:1",
            "floor:1024",
            "coarse:64K",
            "coarse:16M",
            "coarse:1T",
            "static",
        ] {
            let wire: Wire = text.parse().unwrap();
            assert_eq!(wire.to_string(), text);
            assert_eq!(serde_json::to_value(wire).unwrap(), json!(text));
        }
        for text in [
            "",
            "floor",
            "floor:",
            "floor:0",
            "floor:1025",
            "floor:-1",
            "coarse",
            "coarse:",
            "coarse:63K",
            "coarse:2T",
            "coarse:-1",
            "static:1",
            "None",
        ] {
            assert!(text.parse::<Wire>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn request_with_the_least_that_is_needed_has_defaults_for_all_else() {
        let least = json!({"socket": "/run/n.sock", "link": {"pair": "p"}});
        let request: NetRequest = serde_json::from_value(least).unwrap();
        assert_eq!(request.link, NetLink::Pair("p".into()));
        assert_eq!((request.queues, request.prefault), (1, true));
        assert_eq!(request.on_receive_fault, OnReceiveFault::OutOfOrder);
        assert_eq!(
            (request.wire, request.backup_bytes),
            (Wire::None, STORE_BYTES)
        );
        let whole = serde_json::to_value(&request).unwrap();
        assert_eq!(
            serde_json::from_value::<NetRequest>(whole).unwrap(),
            request
        );
    }
}
