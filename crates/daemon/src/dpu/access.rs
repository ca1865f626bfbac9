// SPDX-License-Identifier: Apache-2.0
//! What requests for devices of all kinds decide alike: who may connect to the socket, and what guest
//! RAM the device takes.

use super::request::Common;
use crate::control::{ControlError, RamKind, SocketMode};
use pagetide_dpu::{RamAllowed, RamPolicy, Sealing, SocketAccess};
use pagetide_sys::accounts::{AccountError, group_id, user_id};
use pagetide_vpri::LookUp;

/// Access to the socket. Names are resolved each time: a number may change, the meaning does not.
pub(super) fn access(request: Common<'_>) -> Result<SocketAccess, ControlError> {
    let wrong = |error: AccountError| ControlError::wrong_use(error.to_string());
    let owner = request.owner.map(user_id);
    let group = request.group.map(group_id);
    Ok(SocketAccess {
        owner: owner.transpose().map_err(wrong)?,
        group: group.transpose().map_err(wrong)?,
        mode: request.mode.map(SocketMode::bits),
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
