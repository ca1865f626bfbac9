// SPDX-License-Identifier: Apache-2.0
//! The decisions in a [`BlkRequest`]: access to the socket, use of the image, the disk's serial number.

use crate::control::{BlkRequest, ControlError};
use pagetide_dpu::{Content, ImageUse, Sharing, SocketAccess};
use pagetide_sys::accounts::{AccountError, group_id, user_id};
use serde::{Deserialize, Serialize};
use std::{fmt, os::unix::ffi::OsStrExt, path::Path, str::FromStr};

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
pub(super) fn access(request: &BlkRequest) -> Result<SocketAccess, ControlError> {
    let wrong = |error: AccountError| ControlError::wrong_use(error.to_string());
    let owner = request.owner.as_deref().map(user_id);
    let group = request.group.as_deref().map(group_id);
    Ok(SocketAccess {
        owner: owner.transpose().map_err(wrong)?,
        group: group.transpose().map_err(wrong)?,
        mode: request.mode.map(|mode| mode.0),
    })
}

/// How the image is used.
pub(super) fn image_use(request: &BlkRequest) -> ImageUse {
    ImageUse {
        sharing: if request.shared {
            Sharing::Shared
        } else {
            Sharing::Alone
        },
        content: if request.raw {
            Content::Raw
        } else {
            Content::Probed
        },
    }
}

/// A device that is restored: the image's format was decided when it was added. The guest may have
/// written anything since.
pub(super) fn coming_back(request: &BlkRequest) -> BlkRequest {
    BlkRequest {
        raw: true,
        ..request.clone()
    }
}

/// Default serial number of a disk: derived from its socket's path, so that it stays the same when the
/// disk is removed and added again, and differs between devices of a daemon.
pub(super) fn default_serial(socket: &Path, others: &[BlkRequest]) -> String {
    let is_taken = |serial: &String| {
        let mut serials = others.iter().filter_map(|other| other.serial.as_ref());
        serials.any(|other| other == serial)
    };
    let serial = |round: u8| format!("pt-{:016x}", hash(socket, round));
    let mut candidates = (0..=u8::MAX).map(serial);
    let free = candidates.find(|candidate| !is_taken(candidate));
    // 256 devices whose serial numbers collide: more than there can be.
    free.unwrap_or_else(|| serial(0))
}

/// FNV-1a of 64 bits, which must never change: guests identify their disks by it.
fn hash(socket: &Path, round: u8) -> u64 {
    let bytes = socket.as_os_str().as_bytes().iter();
    let round = [round];
    let all = bytes.chain(round.iter().filter(|round| **round > 0));
    all.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn request(fields: serde_json::Value) -> BlkRequest {
        let mut all = json!({"socket": "/run/a.sock", "image": "/srv/a.raw"});
        let (known, more) = (all.as_object_mut().unwrap(), fields);
        known.extend(more.as_object().unwrap().clone());
        serde_json::from_value(all).unwrap()
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
    fn request_of_an_earlier_version_is_read_and_written_as_it_was() {
        let old = json!({
            "socket": "/run/a.sock", "image": "/srv/a.raw", "queues": 2, "read_only": false,
            "lookup": true, "serial": null, "on_fault": "pause",
        });
        let read: BlkRequest = serde_json::from_value(old.clone()).unwrap();
        assert_eq!(image_use(&read), ImageUse::default());
        assert_eq!(access(&read).unwrap(), SocketAccess::default());
        assert_eq!(serde_json::to_value(&read).unwrap(), old);
    }

    #[test]
    fn who_may_connect_is_looked_up_and_unknown_names_are_wrong_use() {
        let given = request(json!({"owner": "root", "group": "7", "mode": "0640"}));
        let access_of = access(&given).unwrap();
        assert_eq!((access_of.owner, access_of.group), (Some(0), Some(7)));
        assert_eq!(access_of.mode, Some(0o640));
        let unknown = request(json!({"group": "no-such-group"}));
        let error = access(&unknown).unwrap_err();
        assert_eq!(error.kind, crate::control::ErrorKind::WrongUse);
        assert!(error.message.contains("no-such-group"), "{}", error.message);
    }

    #[test]
    fn default_serials_are_stable_and_differ_even_where_hashes_collide() {
        let socket = Path::new("/run/web.sock");
        let serial = default_serial(socket, &[]);
        // Must not change: a guest may have it in its fstab.
        assert_eq!(serial, "pt-2b78234619c03c78");
        assert!(serial.len() <= 20);
        assert_ne!(serial, default_serial(Path::new("/run/db.sock"), &[]));
        let rival = request(json!({"serial": serial}));
        let other = default_serial(socket, &[rival]);
        assert_ne!(other, serial);
        assert!(other.len() <= 20);
    }

    #[test]
    fn device_that_comes_back_is_not_judged_by_what_its_guest_wrote() {
        let added = request(json!({"shared": true}));
        let back = image_use(&coming_back(&added));
        assert_eq!(back.content, Content::Raw);
        assert_eq!(back.sharing, Sharing::Shared);
    }
}
