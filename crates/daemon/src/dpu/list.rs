// SPDX-License-Identifier: Apache-2.0
//! `devices.json`: the list of devices that outlives the process, with a list for each kind.
//!
//! A version that does not know a kind refuses the list instead of dropping those devices. A kind
//! without devices is not written, so that such a version reads the list as long as it can serve all
//! of it.

use super::request::DeviceRequest;
use crate::control::{BlkRequest, ControlError, NetRequest};
use serde::{Deserialize, Serialize};
use std::{fs, path::Path};

/// The list as it is stored.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    blk: Vec<BlkRequest>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    net: Vec<NetRequest>,
}

/// Reads the list at `path`; none there means no devices.
///
/// # Errors
/// It cannot be read, or was written by another version.
pub(super) fn read(path: &Path) -> Result<Vec<DeviceRequest>, ControlError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => {
            let message = format!("cannot read {}: {error}", path.display());
            return Err(ControlError::failed(message));
        }
    };
    let stored: Stored = serde_json::from_slice(&bytes).map_err(|error| {
        ControlError::refused(format!(
            "{} cannot be read ({error}): it was written by another version of pagetide, or is damaged; no device was \
             restored. Start the version that wrote it, or remove the file and add the devices again",
            path.display()
        ))
    })?;
    let disks = stored.blk.into_iter().map(DeviceRequest::Blk);
    let nics = stored.net.into_iter().map(DeviceRequest::Net);
    Ok(disks.chain(nics).collect())
}

/// Writes a new file over the list at `path`.
///
/// # Errors
/// The kernel's; the old list is still there.
pub(super) fn write(path: &Path, list: &[DeviceRequest]) -> Result<(), ControlError> {
    let mut stored = Stored::default();
    for request in list {
        match request {
            DeviceRequest::Blk(request) => stored.blk.push(request.clone()),
            DeviceRequest::Net(request) => stored.net.push(request.clone()),
        }
    }
    let json = serde_json::to_vec_pretty(&stored)
        .map_err(|error| ControlError::failed(error.to_string()))?;
    let unfinished = path.with_extension("json.new");
    let saved = fs::write(&unfinished, json).and_then(|()| fs::rename(&unfinished, path));
    saved.map_err(|error| ControlError::failed(format!("cannot write {}: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::ErrorKind;
    use serde_json::json;

    #[test]
    fn list_of_both_kinds_comes_back_and_without_network_devices_is_what_it_was_before_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("devices.json");
        assert_eq!(read(&path).unwrap(), []);
        let disk = json!({
            "socket": "/d", "image": "/i", "queues": 8, "read_only": false, "lookup": true,
            "serial": null, "on_fault": "out-of-order",
        });
        let old = json!({ "blk": [disk] });
        fs::write(&path, old.to_string()).unwrap();
        let mut list = read(&path).unwrap();
        write(&path, &list).unwrap();
        let stored = |path| serde_json::from_slice::<serde_json::Value>(&fs::read(path).unwrap());
        assert_eq!(stored(&path).unwrap(), old);
        let nic = json!({"socket": "/n", "link": "null"});
        list.push(DeviceRequest::Net(serde_json::from_value(nic).unwrap()));
        write(&path, &list).unwrap();
        assert_eq!(read(&path).unwrap(), list);
        assert_eq!(list[1].kind(), "net");
    }

    #[test]
    fn kind_or_link_that_is_not_known_refuses_the_whole_list() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("devices.json");
        for stored in [
            json!({"blk": [], "rdma": []}),
            json!({"blk": [], "net": [{"socket": "/n"}]}),
            json!({"blk": [], "net": [{"socket": "/n", "link": "carrier-pigeon"}]}),
        ] {
            fs::write(&path, stored.to_string()).unwrap();
            let error = read(&path).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Refused);
            assert!(
                error.message.contains("another version"),
                "{}",
                error.message
            );
        }
    }
}
