// SPDX-License-Identifier: Apache-2.0
//! Reports of devices: of those in service, and of those that are only on the list.

use super::request::DeviceRequest;
use crate::control::{BlkRequest, DeviceReport, DeviceState, NetRequest, OnFault, OnReceiveFault};
use pagetide_addr::FileKey;
use pagetide_dpu::{NicReport, Sharing, Writes};
use pagetide_sys::guest_ram::Sealed;
use pagetide_vpri::LookUp;

/// The report of a device, of which `request` is kept.
pub(super) fn report_of(
    device: pagetide_dpu::DeviceReport,
    request: Option<&DeviceRequest>,
    vms: &[(FileKey, String)],
) -> DeviceReport {
    let vm = vms
        .iter()
        .find(|(key, _)| device.files.contains(key))
        .map(|(_, name)| name.clone());
    let backing = device.backing.clone();
    let (disk, nic) = (backing.disk(), backing.nic());
    let wire = request.and_then(DeviceRequest::wire);
    let request = request.map(DeviceRequest::common);
    DeviceReport {
        id: device.id.0,
        socket: device.socket.display().to_string(),
        kind: device.backing.kind().to_owned(),
        image: disk.map(|disk| disk.image.display().to_string()),
        link: nic.map(|nic| nic.link.to_string()),
        on_receive_fault: nic.map(on_receive_fault),
        wire,
        state: match device.state {
            pagetide_dpu::DeviceState::Listening => DeviceState::Listening,
            pagetide_dpu::DeviceState::Connected => DeviceState::Connected,
            pagetide_dpu::DeviceState::Stopped => DeviceState::Stopped,
        },
        error: device.stopped_because.or(device.backing_error),
        ram_sealed: device.ram_sealed.map(|sealed| sealed == Sealed::Yes),
        vm,
        queues: match nic {
            Some(nic) => nic.pairs,
            None => device.queue_count,
        },
        read_only: disk.is_some_and(|disk| disk.writes == Writes::Refused),
        lookup: device.look_up == LookUp::On,
        on_fault: match device.on_fault {
            pagetide_dpu::OnFault::Pause => OnFault::Pause,
            pagetide_dpu::OnFault::OutOfOrder => OnFault::OutOfOrder,
        },
        weight: device.weight,
        serial: disk.map(|disk| disk.serial.clone()),
        shared: disk.is_some_and(|disk| disk.sharing == Sharing::Shared),
        owner: request.and_then(|request| request.owner.map(str::to_owned)),
        group: request.and_then(|request| request.group.map(str::to_owned)),
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
        sent_packets: nic.map(|nic| nic.sent_packets),
        send_dropped_packets: nic.map(|nic| nic.send_drops),
        received_packets: nic.map(|nic| nic.received_packets),
        link_dropped_packets: nic.map(|nic| nic.link_drops),
        fault_dropped_packets: nic.map(|nic| nic.fault_drops),
        unfit_dropped_packets: nic.map(|nic| nic.unfit_drops),
        stop_dropped_packets: nic.map(|nic| nic.stop_drops),
        returned_buffers: nic.map(|nic| nic.returned_buffers),
        stored_packets: nic.map(|nic| nic.stored_packets),
        stored_bytes: nic.map(|nic| nic.stored_bytes),
        stored_peak_bytes: nic.map(|nic| nic.stored_peak_bytes),
        malformed_requests: device.malformed_requests,
        outside_requests: device.outside_requests,
    }
}

fn on_receive_fault(nic: &NicReport) -> OnReceiveFault {
    match nic.receive.on_fault {
        pagetide_dpu::OnReceiveFault::Drop => OnReceiveFault::Drop,
        pagetide_dpu::OnReceiveFault::Pause => OnReceiveFault::Pause,
        pagetide_dpu::OnReceiveFault::BackupRing => OnReceiveFault::BackupRing,
        pagetide_dpu::OnReceiveFault::OutOfOrder => OnReceiveFault::OutOfOrder,
    }
}

/// A device that is on the list and out of service.
pub(super) fn report_of_missing(request: &DeviceRequest, error: &str) -> DeviceReport {
    let common = request.common();
    let report = DeviceReport {
        socket: common.socket.display().to_string(),
        kind: request.kind().to_owned(),
        state: DeviceState::Stopped,
        error: Some(format!(
            "it could not be made again after a restart: {error} (then remove the device and add it again, or restart the daemon)"
        )),
        lookup: common.lookup,
        weight: common.weight,
        owner: common.owner.map(str::to_owned),
        group: common.group.map(str::to_owned),
        mode: common.mode.map(String::from),
        ..DeviceReport::default()
    };
    match request {
        DeviceRequest::Blk(request) => with_disk(report, request),
        DeviceRequest::Net(request) => with_nic(report, request),
    }
}

fn with_disk(report: DeviceReport, request: &BlkRequest) -> DeviceReport {
    DeviceReport {
        image: Some(request.image.display().to_string()),
        queues: request.queues,
        read_only: request.read_only,
        on_fault: request.on_fault,
        serial: request.serial.clone(),
        shared: request.shared,
        ..report
    }
}

fn with_nic(report: DeviceReport, request: &NetRequest) -> DeviceReport {
    DeviceReport {
        link: Some(request.link.to_string()),
        queues: request.queues,
        on_fault: OnFault::Pause,
        on_receive_fault: Some(request.on_receive_fault),
        wire: Some(request.wire.to_string()),
        ..report
    }
}
