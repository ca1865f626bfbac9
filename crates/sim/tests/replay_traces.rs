// SPDX-License-Identifier: Apache-2.0
//! VMs that are made from files, and what is said of files that are odd.

use pagetide_access_log::{AccessLogMeta, AccessLogWriter, AccessRecord};
use pagetide_addr::{Access, DeviceId, DomainId};
use pagetide_sim::replay::{Guest, ReplayError, Service, Through, TraceOptions, survey};
use pagetide_trace::BlockOptions;
use std::{
    fs,
    path::{Path, PathBuf},
};

const SECTION: u64 = 2 << 20;

fn options() -> TraceOptions {
    TraceOptions {
        block: BlockOptions::default(),
        through: Through::PageCache(None),
        space: None,
        memory_bytes: None,
        section_bytes: SECTION,
        time_scale: 1.0,
        cpu_permille: 0,
        guest: Guest::default(),
    }
}

fn record(time_ns: u64, address: u64) -> AccessRecord {
    AccessRecord {
        time_ns,
        device: DeviceId(1),
        space: DomainId(0),
        address,
        len_bytes: 4096,
        access: Access::Write,
        service: Service::Block,
    }
}

fn log(path: &Path, memory_bytes: u64, started: u64, records: &[AccessRecord]) -> PathBuf {
    let meta = AccessLogMeta::new("vm", memory_bytes, started);
    let mut writer = AccessLogWriter::create(path, meta).unwrap();
    writer.append(records).unwrap();
    writer.finish().unwrap();
    path.to_owned()
}

/// A block trace with a line for each time and length, all at one place.
fn oracle(path: &Path, requests: &[(u32, u32)]) -> PathBuf {
    let mut bytes = Vec::new();
    for (at, len) in requests {
        bytes.extend(at.to_le_bytes());
        bytes.extend(7_u64.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend((-1_i64).to_le_bytes());
    }
    fs::write(path, bytes).unwrap();
    path.to_owned()
}

fn oracle_options() -> TraceOptions {
    let mut options = options();
    options.block.format = Some("oracle-general".parse().unwrap());
    options
}

#[test]
fn two_logs_of_one_vm_are_replayed_each_once() {
    let dir = tempfile::tempdir().unwrap();
    let one = |name: &str, started, sections: &[u64]| {
        let records: Vec<_> = sections.iter().map(|s| record(*s, s * SECTION)).collect();
        log(&dir.path().join(name), 16 * SECTION, started, &records)
    };
    let files = [one("a", 1, &[1, 2]), one("b", 2, &[3, 4, 5])];
    let vms = survey(&files, &options()).unwrap();
    let seen = |vm: &pagetide_sim::replay::TracedVm| {
        let mut stream = vm.stream().unwrap();
        let next = || stream.next().unwrap().map(|access| access.section.0);
        std::iter::from_fn(next).collect::<Vec<_>>()
    };
    let sections: Vec<_> = vms.iter().map(seen).collect();
    assert_eq!(sections, [vec![1, 2], vec![3, 4, 5]]);
}

#[test]
fn memory_that_cannot_be_is_refused_before_it_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    for memory in [u64::MAX, u64::MAX / 2, 1 << 50] {
        let file = log(&dir.path().join("log"), memory, 1, &[record(0, 0)]);
        let error = survey(std::slice::from_ref(&file), &options()).unwrap_err();
        assert!(
            error.to_string().contains("at most 4194304 sections"),
            "{error}"
        );
        let small = TraceOptions {
            memory_bytes: Some(16 * SECTION),
            ..options()
        };
        assert_eq!(survey(&[file], &small).unwrap()[0].sections, 16);
        let trace = oracle(&dir.path().join("trace"), &[(0, 4096)]);
        let large = TraceOptions {
            memory_bytes: Some(memory),
            through: Through::PageCache(Some(1 << 20)),
            ..oracle_options()
        };
        let error = survey(&[trace], &large).unwrap_err();
        assert!(
            error.to_string().contains("at most 4194304 sections"),
            "{error}"
        );
    }
}

#[test]
fn time_centuries_away_is_an_error_with_its_file_and_record() {
    let dir = tempfile::tempdir().unwrap();
    let trace = oracle(
        &dir.path().join("trace"),
        &[(0, 4096), (5, 4096), (u32::MAX, 4096)],
    );
    let error = survey(std::slice::from_ref(&trace), &oracle_options()).unwrap_err();
    let ReplayError::TooLate { ref whence, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(*whence, format!("{}, record 2", trace.display()));
    let records = [record(0, 0), record(u64::MAX / 2, 0)];
    let file = log(&dir.path().join("log"), 16 * SECTION, 1, &records);
    let error = survey(&[file], &options()).unwrap_err();
    assert!(matches!(error, ReplayError::TooLate { .. }), "{error}");
    let vms = survey(
        &[trace],
        &TraceOptions {
            time_scale: 1e-3,
            ..oracle_options()
        },
    );
    assert_eq!(vms.unwrap()[0].origin.records, 3);
}

#[test]
fn request_that_is_too_long_is_an_error_with_its_file_and_record() {
    let dir = tempfile::tempdir().unwrap();
    let trace = oracle(&dir.path().join("trace"), &[(0, 4096), (1, 65 << 20)]);
    let error = survey(std::slice::from_ref(&trace), &oracle_options()).unwrap_err();
    let told = format!("{}, record 1 asks for 68157440 bytes", trace.display());
    assert!(error.to_string().starts_with(&told), "{error}");
}

#[test]
fn nic_is_told_with_the_memory_that_it_got() {
    let dir = tempfile::tempdir().unwrap();
    let file = log(&dir.path().join("log"), 16 * SECTION, 1, &[record(0, 0)]);
    let mut options = options();
    options.guest.nic_bytes = Some(100 * SECTION);
    let vms = survey(&[file], &options).unwrap();
    assert_eq!(vms[0].origin.nic_bytes, 15 * SECTION);
}

#[test]
fn log_of_several_address_spaces_is_replayed_one_at_a_time_and_never_mixed() {
    let dir = tempfile::tempdir().unwrap();
    let within = |space, record: AccessRecord| AccessRecord {
        space: DomainId(space),
        ..record
    };
    // Of space 9 an address that the VM does not have: it is not its memory's.
    let records = [
        within(3, record(1, SECTION)),
        within(9, record(2, 99 * SECTION)),
        within(3, record(3, 2 * SECTION)),
        within(4, record(4, SECTION)),
    ];
    let file = [log(&dir.path().join("a"), 16 * SECTION, 1, &records)];
    let of = |space| TraceOptions { space, ..options() };
    let said = |space| survey(&file, &of(space)).unwrap_err().to_string();
    let several = said(None);
    assert!(several.contains("(3, 4, 9)"), "{several}");
    assert!(several.contains("--space"), "{several}");
    let none = said(Some(DomainId(7)));
    assert!(none.contains("space 7; it has 3, 4, 9"), "{none}");
    let vms = survey(&file, &of(Some(DomainId(3)))).unwrap();
    assert_eq!(vms[0].origin.records, 2);
    let mut stream = vms[0].stream().unwrap();
    let next = || stream.next().unwrap().map(|access| access.section.0);
    assert_eq!(std::iter::from_fn(next).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn log_of_more_address_spaces_than_a_sentence_holds_names_some_and_says_that_there_are_others() {
    let dir = tempfile::tempdir().unwrap();
    let of_space = |space| AccessRecord {
        space: DomainId(space),
        ..record(u64::from(space), 0)
    };
    let records: Vec<_> = (0..5000).map(of_space).collect();
    let file = [log(&dir.path().join("a"), 16 * SECTION, 1, &records)];
    let said = survey(&file, &options()).unwrap_err().to_string();
    assert!(
        said.contains("(0, 1, 2, 3, 4, 5, 6, 7 and others)"),
        "{said}"
    );
}

#[test]
fn pipe_that_nobody_writes_to_is_refused_and_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
    let (told, answer) = std::sync::mpsc::channel();
    let reader = pipe.clone();
    std::thread::spawn(move || told.send(survey(&[reader], &options()).map(drop)));
    let answered = answer.recv_timeout(std::time::Duration::from_secs(60));
    let said = answered
        .expect("it waits for the pipe")
        .unwrap_err()
        .to_string();
    assert!(said.contains(&*pipe.to_string_lossy()), "{said}");
    assert!(said.contains("is a pipe"), "{said}");
}
