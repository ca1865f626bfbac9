// SPDX-License-Identifier: Apache-2.0
//! Reports of devices: of those in service, and of those that are only on the list.

use crate::control::{BlkRequest, DeviceReport, DeviceState, OnFault};
use pagetide_addr::FileKey;
use pagetide_dpu::{Sharing, Writes};
use pagetide_sys::guest_ram::Sealed;
use pagetide_vpri::LookUp;

/// The report of a device, of which `request` is kept.
pub(super) fn report_of(
    device: pagetide_dpu::DeviceReport,
    request: Option<&BlkRequest>,
    vms: &[(FileKey, String)],
) -> DeviceReport {
    let vm = vms
        .iter()
        .find(|(key, _)| device.files.contains(key))
        .map(|(_, name)| name.clone());
    let disk = device.backing.disk();
    DeviceReport {
        id: device.id.0,
        socket: device.socket.display().to_string(),
        kind: device.backing.kind().to_owned(),
        image: disk.map(|disk| disk.image.display().to_string()),
        state: match device.state {
            pagetide_dpu::DeviceState::Listening => DeviceState::Listening,
            pagetide_dpu::DeviceState::Connected => DeviceState::Connected,
            pagetide_dpu::DeviceState::Stopped => DeviceState::Stopped,
        },
        error: device.stopped_because.or(device.backing_error),
        ram_sealed: device.ram_sealed.map(|sealed| sealed == Sealed::Yes),
        vm,
        queues: device.queue_count,
        read_only: disk.is_some_and(|disk| disk.writes == Writes::Refused),
        lookup: device.look_up == LookUp::On,
        on_fault: match device.on_fault {
            pagetide_dpu::OnFault::Pause => OnFault::Pause,
            pagetide_dpu::OnFault::OutOfOrder => OnFault::OutOfOrder,
        },
        weight: device.weight,
        serial: disk.map(|disk| disk.serial.clone()),
        shared: disk.is_some_and(|disk| disk.sharing == Sharing::Shared),
        owner: request.and_then(|request| request.owner.clone()),
        group: request.and_then(|request| request.group.clone()),
        mode: request.and_then(|request| request.mode).map(String::from),
        capacity_bytes: disk.map_or(0, |disk| disk.capacity_bytes),
        requests: device.requests,
        read_bytes: device.read_bytes,
        written_bytes: device.written_bytes,
        inflight_requests: device.inflight_requests,
        failed_requests: device.failed_requests,
        iopfs: device.iopfs,
        injected_iopfs: device.injected_iopfs,
        prefaults: device.prefaults,
        overwritten_pages: device.overwritten_pages,
        timed_out_requests: device.timed_out_requests,
        parked_chains: device.parked_chains,
        logged_accesses: device.logged_accesses,
        lost_accesses: device.lost_accesses,
        wired_bytes: device.wired_bytes,
        malformed_requests: device.malformed_requests,
        outside_requests: device.outside_requests,
    }
}

/// A device that is on the list and out of service.
pub(super) fn report_of_missing(request: &BlkRequest, error: &str) -> DeviceReport {
    DeviceReport {
        socket: request.socket.display().to_string(),
        kind: "blk".to_owned(),
        image: Some(request.image.display().to_string()),
        state: DeviceState::Stopped,
        error: Some(format!(
            "it could not be made again after a restart: {error} (then remove the device and add it again, or restart the daemon)"
        )),
        queues: request.queues,
        read_only: request.read_only,
        lookup: request.lookup,
        on_fault: request.on_fault,
        serial: request.serial.clone(),
        shared: request.shared,
        owner: request.owner.clone(),
        group: request.group.clone(),
        mode: request.mode.map(String::from),
        ..DeviceReport::default()
    }
}
