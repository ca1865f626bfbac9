// SPDX-License-Identifier: Apache-2.0
//! The guest as the bench controls it, and requests to daemons beyond those that all benches make.

use super::{
    content::Kind,
    guest::{Answer, Order},
};
use crate::{
    daemon::Daemon,
    orders::{Ordered, vmm_program},
};
use hyper::Method;
use pagetide_addr::Hva;
use pagetide_daemon::{
    client::device_path,
    control::{BlkRequest, DeviceReport, OnFault, VmReport},
};
use pagetide_sys::process::ProcessFd;
use std::{path::Path, process::Command};

/// The guest.
pub(crate) struct Guest {
    process: Ordered,
    address: Hva,
    bytes: u64,
}

impl Guest {
    /// Starts it with `pages` filled pages of `kind`, its vCPU on `cpu`. `dir` takes its program.
    pub(crate) fn start(dir: &Path, kind: Kind, pages: u64, cpu: usize) -> Result<Self, String> {
        let mut command = Command::new(vmm_program(dir)?);
        command.args(["bench-part", "fault-guest"]).args([
            "--content",
            &kind.to_string(),
            "--pages",
            &pages.to_string(),
            "--cpu",
            &cpu.to_string(),
        ]);
        let mut process = Ordered::start(&mut command)?;
        match process.answer()? {
            Answer::Ready { address } => Ok(Self {
                process,
                address: Hva(address),
                bytes: pages * pagetide_addr::PAGE_BYTES,
            }),
            other => Err(format!("the guest began with {other:?}")),
        }
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Makes it execute `order`.
    pub(crate) fn obey(&mut self, order: &Order) -> Result<Answer, String> {
        self.begin(order)?;
        self.answer()
    }

    /// Makes it start `order`.
    pub(crate) fn begin(&mut self, order: &Order) -> Result<(), String> {
        self.process.order(order)
    }

    /// Waits for its next answer.
    pub(crate) fn answer(&mut self) -> Result<Answer, String> {
        match self.process.answer()? {
            Answer::Failed { reason } => Err(format!("the guest: {reason}")),
            answer => Ok(answer),
        }
    }

    /// Makes it execute `order`, which is timed.
    pub(crate) fn time(&mut self, order: &Order) -> Result<Vec<u32>, String> {
        match self.obey(order)? {
            Answer::Took { ns } => Ok(ns),
            other => Err(format!("the guest answered {other:?} to {order:?}")),
        }
    }

    /// Makes it execute `order`, which has no other answer than that it is done.
    pub(crate) fn have_done(&mut self, order: &Order) -> Result<(), String> {
        match self.obey(order)? {
            Answer::Done => Ok(()),
            other => Err(format!("the guest answered {other:?} to {order:?}")),
        }
    }

    /// Makes the kernel swap its memory out.
    pub(crate) fn page_out(&self) -> Result<(), String> {
        let process = ProcessFd::open(self.pid()).map_err(|error| error.to_string())?;
        process
            .page_out(&[(self.address, self.bytes)])
            .map(|_advised| ())
            .map_err(|error| error.to_string())
    }
}

/// Evicts all of the guest; returns its figures then, with every page stored by lz4.
pub(crate) fn evict_all(daemon: &Daemon, pages: u64) -> Result<VmReport, String> {
    let vm = daemon.evict_whole()?;
    if vm.lz4_pages == pages {
        return Ok(vm);
    }
    Err(daemon.with_log(format!(
        "of {pages} pages {} are stored by lz4",
        vm.lz4_pages
    )))
}

/// Adds a block device.
pub(crate) fn add_blk(daemon: &Daemon, socket: &Path, image: &Path) -> Result<(), String> {
    add_blk_of(daemon, socket, image, 1)
}

/// The same with so many queues.
pub(crate) fn add_blk_of(
    daemon: &Daemon,
    socket: &Path,
    image: &Path,
    queues: u16,
) -> Result<(), String> {
    let body = BlkRequest {
        socket: socket.to_owned(),
        image: image.to_owned(),
        queues,
        read_only: false,
        weight: pagetide_dpu::WEIGHT_DEFAULT,
        lookup: true,
        serial: None,
        on_fault: OnFault::OutOfOrder,
        require_sealed: false,
        allow_ram: Vec::new(),
        ram_max_bytes: pagetide_dpu::RAM_BYTES_MAX,
        shared: true,
        raw: true,
        owner: None,
        group: None,
        mode: None,
    };
    daemon
        .send::<_, DeviceReport>("/v1/devices", &body)
        .map(|_| ())
}

/// Removes a block device.
pub(crate) fn remove_blk(daemon: &Daemon, socket: &Path) -> Result<(), String> {
    let path = device_path(&socket.to_string_lossy());
    daemon
        .ask::<serde_json::Value>(Method::DELETE, &path)
        .map(|_| ())
}
