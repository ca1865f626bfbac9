// SPDX-License-Identifier: Apache-2.0
//! Our own function passes the tester.

use pagetide_conformance::{CheckOptions, CheckOutcome, Verdict, run};
use pagetide_vpri::{DomainTable, Doorbell, fault_queue};
use pagetide_vpri_function::function::{FunctionParts, FunctionServer};
use std::{path::Path, sync::Arc};

/// A function of a DPU without disks.
fn start(dir: &Path) -> FunctionServer {
    let bell = || Arc::new(Doorbell::new().unwrap());
    let host_bell = bell();
    let (_engine, host) = fault_queue(64, bell(), Arc::clone(&host_bell));
    let server = FunctionServer::start(FunctionParts {
        socket: dir.join("vpri.sock"),
        domains: Arc::new(DomainTable::new(1)),
        hosts: vec![host],
        engine_count: 1,
        bell: host_bell,
    });
    server.unwrap()
}

#[test]
fn our_function_passes_the_conformance_tester() {
    let dir = tempfile::tempdir().unwrap();
    let function = start(dir.path());
    let options = CheckOptions {
        socket: dir.path().join("vpri.sock"),
        disk: None,
    };
    let report = run(&options, &mut |_| ()).unwrap();
    let wrong = |check: &&CheckOutcome| matches!(check.verdict, Verdict::Failed(_));
    let wrong: Vec<_> = report.checks.iter().filter(wrong).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(report.failed(), 0);
    let passed = |check: &&CheckOutcome| check.verdict == Verdict::Passed;
    assert!(report.checks.iter().filter(passed).count() >= 35);
    drop(function);
}

#[test]
fn tester_without_a_function_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let options = CheckOptions {
        socket: dir.path().join("nobody"),
        disk: None,
    };
    let error = run(&options, &mut |_| ()).unwrap_err();
    assert!(error.to_string().contains("no process listens"), "{error}");
}
