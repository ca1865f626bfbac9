// SPDX-License-Identifier: Apache-2.0
//! What engines tell the access log: the data of each transfer, and nothing while nobody listens.

mod support;

use pagetide_addr::Access;
use pagetide_dpu::Writes;
use pagetide_vpri::{AccessLog, AccessSource, LogRecord, Logging, Service};
use std::sync::Arc;
use support::*;

/// Whatever the log holds, once it holds `count` records.
fn records(log: &AccessLog, count: usize) -> Vec<LogRecord> {
    let mut records = Vec::new();
    eventually("records", || {
        log.take(100, &mut records);
        records.len() >= count
    });
    records
}

#[test]
fn data_of_transfers_is_told_in_joined_pieces_while_it_is_wanted() {
    let rig = Rig::new(1);
    let log = Arc::new(AccessLog::new(1));
    rig.dpu.set_access_log(&log).unwrap();
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, F_EVENT_IDX);
    let queue = &mut connection.queues[0];
    let request = BlkRequest::new(&mut guest, T_IN, 7, 8192);
    queue.submit(&guest, &request.parts(WRITE));
    queue.wait_used(&guest);
    assert!(!log.has_any(), "nobody wants to know");
    log.want(Logging::On);
    // A read into two pieces that follow one another and one that lies apart.
    let data = request.data;
    let [header, status] = [(request.header, 16, 0), (request.status, 1, WRITE)];
    let pieces = [
        header,
        (data, 1024, WRITE),
        (data + 1024, 512, WRITE),
        (data + 4096, 512, WRITE),
        status,
    ];
    queue.submit(&guest, &pieces);
    queue.wait_used(&guest);
    request.aim(&guest, T_OUT, 100);
    queue.submit(&guest, &request.parts(0));
    queue.wait_used(&guest);
    let told = records(&log, 3);
    let device = rig.report(&socket).id;
    let space = guest.domain(&rig).id();
    let base = told[0].address;
    let what = told
        .iter()
        .map(|r| (r.address - base, r.len_bytes, r.access));
    let expected = [
        (0, 1536, Access::Write),
        (4096, 512, Access::Write),
        (0, 8192, Access::Read),
    ];
    assert_eq!(what.collect::<Vec<_>>(), expected);
    for record in &told {
        assert_eq!((record.device, record.space), (device, space));
        assert_eq!(record.service, Service::Block);
        assert!(record.time_ns > 0);
    }
    assert!(
        told.windows(2)
            .all(|pair| pair[0].time_ns <= pair[1].time_ns)
    );
    let report = rig.report(&socket);
    assert_eq!((report.logged_accesses, report.lost_accesses), (3, 0));
}

#[test]
fn flush_and_a_request_without_data_are_no_accesses() {
    let rig = Rig::new(1);
    let log = Arc::new(AccessLog::new(1));
    rig.dpu.set_access_log(&log).unwrap();
    log.want(Logging::On);
    let socket = rig.add("disk", 1, Writes::Taken);
    let mut guest = Guest::new();
    let mut connection = Connection::open(&socket, &mut guest, 1, F_EVENT_IDX);
    let queue = &mut connection.queues[0];
    let flush = BlkRequest::new(&mut guest, T_FLUSH, 0, 0);
    queue.submit(&guest, &flush.parts(0));
    queue.wait_used(&guest);
    let read = BlkRequest::new(&mut guest, T_IN, 0, 512);
    queue.submit(&guest, &read.parts(WRITE));
    queue.wait_used(&guest);
    assert_eq!(records(&log, 1).len(), 1);
    assert_eq!(rig.report(&socket).logged_accesses, 1);
}
