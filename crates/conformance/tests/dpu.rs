// SPDX-License-Identifier: Apache-2.0
//! The VPRI function of a software DPU with a disk, under the conformance tester: what DMA does.

use pagetide_conformance::{CheckOptions, CheckOutcome, Verdict, run};
use pagetide_dpu::{BlkConfig, DirectIo, Dpu, DpuConfig, ImageUse, OnFault, SocketAccess, Writes};
use pagetide_vpri::{DomainTable, Doorbell, LookUp};
use pagetide_vpri_function::function::{FunctionParts, FunctionServer};
use std::sync::Arc;

#[test]
fn function_with_a_disk_passes_every_check_of_the_conformance_tester() {
    passes(OnFault::OutOfOrder, 0);
}

#[test]
fn function_with_a_disk_that_pauses_and_lands_reads_passes_as_well() {
    passes(OnFault::Pause, 64);
}

fn passes(on_fault: OnFault, bounce_buffers: u32) {
    let dir = tempfile::tempdir().unwrap();
    let domains = Arc::new(DomainTable::new(1));
    let bell = Arc::new(Doorbell::new().unwrap());
    let mut config = DpuConfig::new(dir.path().to_owned());
    config.bounce_buffers = bounce_buffers;
    let (dpu, hosts) = Dpu::start(&config, Arc::clone(&domains), &bell).unwrap();
    let function = FunctionServer::start(FunctionParts {
        socket: dir.path().join("vpri.sock"),
        domains,
        hosts,
        engine_count: 1,
        bell,
    });
    let function = function.unwrap();
    dpu.set_assist(&function.assist()).unwrap();
    dpu.set_access_log(function.access_log()).unwrap();
    let image = dir.path().join("image");
    std::fs::write(&image, vec![0x5a; 4 << 20]).unwrap();
    let disk = dir.path().join("disk.sock");
    let added = dpu.add_blk(BlkConfig {
        socket: disk.clone(),
        image,
        queue_count: 1,
        writes: Writes::Refused,
        look_up: LookUp::On,
        on_fault,
        ram: pagetide_dpu::RamPolicy::default(),
        image_use: ImageUse::default(),
        access: SocketAccess::default(),
        serial: "check".into(),
        direct_io: DirectIo::Auto,
    });
    added.unwrap();
    let options = CheckOptions {
        socket: dir.path().join("vpri.sock"),
        disk: Some(disk),
    };
    let report = run(&options, &mut |_| ()).unwrap();
    let wrong = |check: &&CheckOutcome| check.verdict != Verdict::Passed;
    let wrong: Vec<_> = report.checks.iter().filter(wrong).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    dpu.shut_down();
    drop(function);
}
