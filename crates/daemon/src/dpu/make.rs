// SPDX-License-Identifier: Apache-2.0
//! Creates devices from requests, whatever their kind.

use super::{
    access::{access, look_up, ram_policy},
    disk,
    request::DeviceRequest,
};
use crate::control::{ControlError, NetLink, NetRequest, OnReceiveFault, Wire};
use pagetide_addr::DeviceId;
use pagetide_dpu::{
    Dpu, DpuError, ImageError, LinkConfig, NicConfig, ParkedDevice, Prefault, ReceiveConfig,
    Wiring, check_weight,
};

/// Why a device was not created.
#[derive(Debug)]
pub(super) enum MakeError {
    /// The request makes no sense here.
    Request(ControlError),
    /// The DPU's answer.
    Dpu(DpuError),
}

impl MakeError {
    /// Whether it may work in a moment: a predecessor's last descriptors are closed, and its locks
    /// given back, a moment after its end.
    pub(super) fn again(&self) -> Again {
        match self {
            Self::Dpu(DpuError::Image(ImageError::InUse { .. } | ImageError::Busy(_))) => {
                Again::Later
            }
            Self::Dpu(DpuError::Link(error)) if error.is_busy() => Again::Later,
            Self::Dpu(_) | Self::Request(_) => Again::Never,
        }
    }
}

impl From<DpuError> for MakeError {
    fn from(error: DpuError) -> Self {
        Self::Dpu(error)
    }
}

impl From<ControlError> for MakeError {
    fn from(error: ControlError) -> Self {
        Self::Request(error)
    }
}

impl std::fmt::Display for MakeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Request(error) => f.write_str(&error.message),
            Self::Dpu(error) => error.fmt(f),
        }
    }
}

impl From<MakeError> for ControlError {
    fn from(error: MakeError) -> Self {
        match error {
            MakeError::Request(error) => error,
            MakeError::Dpu(error) => wrong_or_failed(&error),
        }
    }
}

/// Whether to try once more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Again {
    Later,
    Never,
}

/// Creates a device, which starts listening; fails without one if its weight is invalid.
pub(super) fn make(dpu: &Dpu, request: &DeviceRequest) -> Result<DeviceId, MakeError> {
    check_weight(request.common().weight)?;
    let id = match request {
        DeviceRequest::Blk(blk) => dpu.add_blk(disk::config_of(blk, request.common())?)?,
        DeviceRequest::Net(net) => dpu.add_nic(&nic_config(net, request)?)?,
    };
    dpu.set_weight(id, request.common().weight)?;
    Ok(id)
}

/// Creates a device that was handed over; takes it out of `parked` only once what is behind it is ours.
pub(super) fn go_on(
    dpu: &Dpu,
    request: &DeviceRequest,
    parked: &mut Option<ParkedDevice>,
) -> Result<DeviceId, MakeError> {
    let id = match request {
        DeviceRequest::Blk(blk) => {
            dpu.add_parked_blk(disk::config_of(blk, request.common())?, parked)?
        }
        DeviceRequest::Net(net) => dpu.add_parked_nic(&nic_config(net, request)?, parked)?,
    };
    dpu.set_weight(id, request.common().weight)?;
    Ok(id)
}

fn nic_config(net: &NetRequest, request: &DeviceRequest) -> Result<NicConfig, ControlError> {
    let common = request.common();
    Ok(NicConfig {
        socket: net.socket.clone(),
        link: link_of(&net.link),
        pairs: net.queues,
        receive: receive_config(net),
        look_up: look_up(common),
        ram: ram_policy(common),
        access: access(common)?,
    })
}

fn receive_config(net: &NetRequest) -> ReceiveConfig {
    ReceiveConfig {
        on_fault: match net.on_receive_fault {
            OnReceiveFault::Drop => pagetide_dpu::OnReceiveFault::Drop,
            OnReceiveFault::Pause => pagetide_dpu::OnReceiveFault::Pause,
            OnReceiveFault::BackupRing => pagetide_dpu::OnReceiveFault::BackupRing,
            OnReceiveFault::OutOfOrder => pagetide_dpu::OnReceiveFault::OutOfOrder,
        },
        prefault: match net.prefault {
            true => Prefault::Posted,
            false => Prefault::Off,
        },
        wiring: match net.wire {
            Wire::None => Wiring::None,
            Wire::Fine => Wiring::Fine,
            Wire::Floor(buffers) => Wiring::Floor { buffers },
            Wire::Coarse(bytes) => Wiring::Coarse { bytes },
            Wire::Static => Wiring::Static,
        },
        store_bytes: net.backup_bytes,
    }
}

fn link_of(link: &NetLink) -> LinkConfig {
    match link {
        NetLink::Null => LinkConfig::Null,
        NetLink::Loop => LinkConfig::Loop,
        NetLink::Pair(name) => LinkConfig::Pair { name: name.clone() },
        NetLink::Tap(name) => LinkConfig::Tap { name: name.clone() },
        NetLink::Packet(name) => LinkConfig::Packet { name: name.clone() },
    }
}

/// The answer to a caller for an error of the DPU.
pub(super) fn wrong_or_failed(error: &DpuError) -> ControlError {
    match error {
        DpuError::Setting { .. } | DpuError::Serial(_) | DpuError::Injection(_) => {
            ControlError::wrong_use(error.to_string())
        }
        DpuError::Image(_) | DpuError::Link(_) | DpuError::Socket(_) | DpuError::TooManyDevices => {
            ControlError::refused(error.to_string())
        }
        _ => ControlError::failed(error.to_string()),
    }
}
