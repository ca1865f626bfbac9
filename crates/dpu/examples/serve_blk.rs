// SPDX-License-Identifier: Apache-2.0
//! The smallest program around the DPU: one engine, one block device, no VM attached.
//!
//! `serve_blk SOCKET IMAGE STATE_DIR [POLL_US]`; ends with its input.

use pagetide_dpu::{BlkConfig, DirectIo, Dpu, DpuConfig, ImageUse, OnFault, SocketAccess, Writes};
use pagetide_vpri::{DomainTable, Doorbell, LookUp};
use std::{error::Error, io::Read as _, sync::Arc, time::Duration};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, image, state_dir, rest @ ..] = &arguments[..] else {
        return Err("usage: serve_blk SOCKET IMAGE STATE_DIR [POLL_US]".into());
    };
    let mut config = DpuConfig::new(state_dir.into());
    if let Some(poll_us) = rest.first() {
        config.poll_max = Duration::from_micros(poll_us.parse()?);
    }
    let domains = Arc::new(DomainTable::new(config.engine_count));
    let (dpu, _host_ends) = Dpu::start(&config, domains, &Arc::new(Doorbell::new()?))?;
    dpu.add_blk(BlkConfig {
        socket: socket.into(),
        image: image.into(),
        queue_count: 4,
        writes: Writes::Taken,
        look_up: LookUp::On,
        serial: "example".into(),
        direct_io: DirectIo::Auto,
        on_fault: OnFault::default(),
        ram: pagetide_dpu::RamPolicy::default(),
        image_use: ImageUse::default(),
        access: SocketAccess::default(),
    })?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    for device in dpu.devices() {
        eprintln!(
            "{device:#?}, look-up {:.0} ns a request",
            device.lookup_ns_per_request()
        );
    }
    Ok(())
}
