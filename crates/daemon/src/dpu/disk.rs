// SPDX-License-Identifier: Apache-2.0
//! The decisions in a [`BlkRequest`]: use of the image, the disk's serial number.

use super::{
    access::{access, look_up, ram_policy},
    request::{Common, DeviceRequest},
};
use crate::control::{BlkRequest, ControlError, OnFault};
use pagetide_dpu::{BlkConfig, Content, DirectIo, ImageUse, Sharing, Writes};
use std::{os::unix::ffi::OsStrExt, path::Path};

/// Serial number of a device that has none on the list: an earlier version created it, and its guest
/// identifies it by this number.
const SERIAL_OF_OLD: &str = "pagetide";

/// The disk that was requested.
pub(super) fn config_of(
    request: &BlkRequest,
    common: Common<'_>,
) -> Result<BlkConfig, ControlError> {
    Ok(BlkConfig {
        socket: request.socket.clone(),
        image: request.image.clone(),
        queue_count: request.queues,
        writes: if request.read_only {
            Writes::Refused
        } else {
            Writes::Taken
        },
        look_up: look_up(common),
        serial: request
            .serial
            .clone()
            .unwrap_or_else(|| SERIAL_OF_OLD.to_owned()),
        direct_io: DirectIo::Auto,
        on_fault: match request.on_fault {
            OnFault::Pause => pagetide_dpu::OnFault::Pause,
            OnFault::OutOfOrder => pagetide_dpu::OnFault::OutOfOrder,
        },
        ram: ram_policy(common),
        image_use: image_use(request),
        access: access(common)?,
    })
}

/// How the image is used.
fn image_use(request: &BlkRequest) -> ImageUse {
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

/// A device that is restored: an image's format was decided when it was added. The guest may have
/// written anything since.
pub(super) fn coming_back(request: &DeviceRequest) -> DeviceRequest {
    let mut request = request.clone();
    if let DeviceRequest::Blk(blk) = &mut request {
        blk.raw = true;
    }
    request
}

/// Default serial number of a disk: derived from its socket's path, so that it stays the same when the
/// disk is removed and added again, and differs between devices of a daemon.
pub(super) fn default_serial(socket: &Path, others: &[DeviceRequest]) -> String {
    let is_taken = |serial: &String| {
        let mut serials = others.iter().filter_map(DeviceRequest::serial);
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
    fn request_of_an_earlier_version_is_read_and_written_as_it_was() {
        let old = json!({
            "socket": "/run/a.sock", "image": "/srv/a.raw", "queues": 2, "read_only": false,
            "lookup": true, "serial": null, "on_fault": "pause",
        });
        let read: BlkRequest = serde_json::from_value(old.clone()).unwrap();
        assert_eq!(image_use(&read), ImageUse::default());
        assert_eq!(serde_json::to_value(&read).unwrap(), old);
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
        let other = default_serial(socket, &[DeviceRequest::Blk(rival)]);
        assert_ne!(other, serial);
        assert!(other.len() <= 20);
    }

    #[test]
    fn device_that_comes_back_is_not_judged_by_what_its_guest_wrote() {
        let added = request(json!({"shared": true}));
        let DeviceRequest::Blk(back) = coming_back(&DeviceRequest::Blk(added)) else {
            panic!("it is another kind");
        };
        let back = image_use(&back);
        assert_eq!(back.content, Content::Raw);
        assert_eq!(back.sharing, Sharing::Shared);
    }
}
