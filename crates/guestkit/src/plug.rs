// SPDX-License-Identifier: Apache-2.0
//! RAM plugged into a running guest, and unplugged again, through QEMU's monitor.
//!
//! A DIMM is two objects: a memory backend, which QEMU maps as it is created, and a device for it, which
//! notifies guest and vhost-user back ends. Unplugging reverses the order and needs the guest's consent: it
//! must first have moved its pages elsewhere. The guest's kernel uses such memory at once (see
//! [`crate::qemu`]).

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::guest::{Guest, GuestError};
use crate::qmp::{Qmp, QmpError};

/// How often QEMU is polled for the guest's release of a DIMM.
const ASK_EVERY: Duration = Duration::from_millis(50);

/// Names of a DIMM's two objects.
fn names(name: &str) -> (String, String) {
    (format!("{name}-dimm"), format!("{name}-ram"))
}

/// Plugs a DIMM of `bytes` in; the guest detects it in its own time.
///
/// # Errors
/// QEMU refuses.
pub fn plug(guest: &Guest, name: &str, bytes: u64) -> Result<(), GuestError> {
    let mut qmp = guest.qmp()?;
    add_backend(&mut qmp, name, bytes)?;
    add_dimm(&mut qmp, name)?;
    Ok(())
}

/// [`plug`] of a DIMM whose memory is `file`, of `bytes` bytes.
///
/// # Errors
/// QEMU refuses.
pub fn plug_file(guest: &Guest, name: &str, file: &Path, bytes: u64) -> Result<(), GuestError> {
    let mut qmp = guest.qmp()?;
    let backend = json!({
        "qom-type": "memory-backend-file", "id": names(name).1, "size": bytes, "share": true,
        "mem-path": file,
    });
    qmp.execute("object-add", &backend)?;
    add_dimm(&mut qmp, name)?;
    Ok(())
}

fn add_backend(qmp: &mut Qmp, name: &str, bytes: u64) -> Result<Value, QmpError> {
    let backend = json!({
        "qom-type": "memory-backend-memfd", "id": names(name).1, "size": bytes, "share": true,
    });
    qmp.execute("object-add", &backend)
}

fn add_dimm(qmp: &mut Qmp, name: &str) -> Result<Value, QmpError> {
    let (dimm, ram) = names(name);
    let device = json!({"driver": "pc-dimm", "id": dimm, "memdev": ram});
    qmp.execute("device_add", &device)
}

/// Requests that the guest release a DIMM, and waits until it has. Its memory is still mapped in QEMU.
///
/// # Errors
/// QEMU refuses, or the guest keeps it for longer than `timeout`.
pub fn eject(guest: &mut Guest, name: &str, timeout: Duration) -> Result<(), GuestError> {
    let mut qmp = guest.qmp()?;
    qmp.execute("device_del", &json!({"id": names(name).0}))?;
    let deadline = Instant::now() + timeout;
    while is_plugged(&mut qmp, name)? {
        if Instant::now() > deadline {
            let what = format!("the guest's letting go of {name}");
            return Err(guest.late(what, timeout));
        }
        std::thread::sleep(ASK_EVERY);
    }
    Ok(())
}

fn is_plugged(qmp: &mut Qmp, name: &str) -> Result<bool, QmpError> {
    let devices = qmp.execute("query-memory-devices", &json!({}))?;
    let id = names(name).0;
    let devices = devices.as_array().into_iter().flatten();
    Ok(devices
        .into_iter()
        .any(|device| device["data"]["id"] == *id))
}

/// Makes QEMU free the memory of an ejected DIMM.
///
/// # Errors
/// QEMU refuses.
pub fn drop_memory(guest: &Guest, name: &str) -> Result<(), GuestError> {
    let mut qmp = guest.qmp()?;
    qmp.execute("object-del", &json!({"id": names(name).1}))?;
    Ok(())
}

/// Arguments for QEMU: a device of up to `bytes` of RAM that is plugged in blocks (virtio-mem).
#[must_use]
pub fn virtio_mem(bytes: u64) -> Vec<String> {
    [
        "-object".to_owned(),
        format!("memory-backend-memfd,id=blocks-ram,size={bytes},share=on"),
        "-device".to_owned(),
        "virtio-mem-pci,id=blocks,memdev=blocks-ram,requested-size=0".to_owned(),
    ]
    .to_vec()
}

/// Requests that the guest use `bytes` of the RAM of [`virtio_mem`].
///
/// # Errors
/// QEMU refuses.
pub fn request(guest: &Guest, bytes: u64) -> Result<(), GuestError> {
    let wanted = json!({"path": "blocks", "property": "requested-size", "value": bytes});
    guest.qmp()?.execute("qom-set", &wanted)?;
    Ok(())
}

/// How much of it is plugged now.
///
/// # Errors
/// QEMU refuses.
pub fn plugged_bytes(guest: &Guest) -> Result<u64, GuestError> {
    let size = json!({"path": "blocks", "property": "size"});
    let answer = guest.qmp()?.execute("qom-get", &size)?;
    Ok(answer.as_u64().unwrap_or(0))
}
