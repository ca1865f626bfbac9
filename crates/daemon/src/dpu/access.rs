// SPDX-License-Identifier: Apache-2.0
//! What requests for devices of all kinds decide alike: who may connect to the socket, and what guest
//! RAM the device takes.

use super::request::Common;
use crate::control::{ControlError, RamKind};
use pagetide_dpu::{RamAllowed, RamPolicy, Sealing, SocketAccess};
use pagetide_sys::accounts::{AccountError, group_id, user_id};
use pagetide_vpri::LookUp;
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Permission bits of a socket; written in octal, as chmod(1) takes them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SocketMode(u32);

impl FromStr for SocketMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_octal = !text.is_empty() && text.bytes().all(|c| (b'0'..=b'7').contains(&c));
        u32::from_str_radix(text, 8)
            .ok()
            .filter(|bits| is_octal && *bits <= 0o777)
            .map(Self)
            .ok_or_else(|| format!("'{text}' is no mode: give octal digits from 0 to 0777"))
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl TryFrom<String> for SocketMode {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<SocketMode> for String {
    fn from(mode: SocketMode) -> Self {
        mode.to_string()
    }
}

/// Access to the socket. Names are resolved each time: a number may change, the meaning does not.
pub(super) fn access(request: Common<'_>) -> Result<SocketAccess, ControlError> {
    let wrong = |error: AccountError| ControlError::wrong_use(error.to_string());
    let owner = request.owner.map(user_id);
    let group = request.group.map(group_id);
    Ok(SocketAccess {
        owner: owner.transpose().map_err(wrong)?,
        group: group.transpose().map_err(wrong)?,
        mode: request.mode.map(|mode| mode.0),
    })
}

/// What guest RAM it takes.
pub(super) fn ram_policy(request: Common<'_>) -> RamPolicy {
    let allowed = |kind| match request.allow_ram.contains(&kind) {
        true => RamAllowed::Yes,
        false => RamAllowed::No,
    };
    RamPolicy {
        sealing: match request.require_sealed {
            true => Sealing::Required,
            false => Sealing::Preferred,
        },
        tmpfs: allowed(RamKind::Tmpfs),
        hugetlbfs: allowed(RamKind::Hugetlbfs),
        bytes_max: request.ram_max_bytes,
    }
}

/// Whether it looks pages up.
pub(super) fn look_up(request: Common<'_>) -> LookUp {
    match request.lookup {
        true => LookUp::On,
        false => LookUp::Off,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        control::{BlkRequest, ErrorKind},
        dpu::request::DeviceRequest,
    };
    use serde_json::json;

    fn access_of(fields: &serde_json::Value) -> Result<SocketAccess, ControlError> {
        let mut all = json!({"socket": "/run/a.sock", "image": "/srv/a.raw"});
        let known = all.as_object_mut().unwrap();
        known.extend(fields.as_object().unwrap().clone());
        let request: BlkRequest = serde_json::from_value(all).unwrap();
        access(DeviceRequest::Blk(request).common())
    }

    #[test]
    fn modes_are_octal_and_nothing_else() {
        for (text, shown) in [
            ("660", "0660"),
            ("0600", "0600"),
            ("0", "0000"),
            ("777", "0777"),
        ] {
            let mode: SocketMode = text.parse().unwrap();
            assert_eq!(mode.to_string(), shown);
            assert_eq!(serde_json::to_value(mode).unwrap(), json!(shown));
        }
        for text in ["", "8", "+660", "1777", "0o660", "rw", "-1", " 660"] {
            assert!(text.parse::<SocketMode>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn who_may_connect_is_looked_up_and_unknown_names_are_wrong_use() {
        assert_eq!(access_of(&json!({})).unwrap(), SocketAccess::default());
        let given = access_of(&json!({"owner": "root", "group": "7", "mode": "0640"})).unwrap();
        assert_eq!((given.owner, given.group), (Some(0), Some(7)));
        assert_eq!(given.mode, Some(0o640));
        let error = access_of(&json!({"group": "no-such-group"})).unwrap_err();
        assert_eq!(error.kind, ErrorKind::WrongUse);
        assert!(error.message.contains("no-such-group"), "{}", error.message);
    }
}
