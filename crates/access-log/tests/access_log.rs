// SPDX-License-Identifier: Apache-2.0
//! Access logs: what is written is read back, in order and in bounded files; what
//! is broken is told with the file and the record.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use pagetide_access_log::{
    AccessLog, AccessLogMeta, AccessLogReader, AccessLogWriter, AccessRecord, LOG_FILE_BYTES_MIN,
    LOG_FILES_MAX, LOG_GROUP_RECORDS, LOG_SLACK_RECORDS, LogLimits, LoggedDevice, RotatingLog,
    Service, TraceError,
};
use pagetide_addr::{Access, DeviceId, DomainId};

fn record(i: u64) -> AccessRecord {
    let network = i.is_multiple_of(3);
    AccessRecord {
        time_ns: 1_000_000 + i * 250,
        device: DeviceId(if network { 2 } else { 1 }),
        space: DomainId(0),
        // All bits of an address, in an order that does not compress to nothing.
        address: i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 1,
        len_bytes: 4096 * (1 + u32::try_from(i % 7).unwrap()),
        access: if i.is_multiple_of(2) {
            Access::Read
        } else {
            Access::Write
        },
        service: if network {
            Service::Network
        } else {
            Service::Block
        },
    }
}

fn meta() -> AccessLogMeta {
    let mut meta = AccessLogMeta::new("web", 8 << 30, 77);
    meta.enter(LoggedDevice {
        id: DeviceId(1),
        name: "disk.sock".to_owned(),
        service: Service::Block,
    });
    meta
}

fn write(path: &Path, meta: AccessLogMeta, records: &[AccessRecord]) {
    let mut writer = AccessLogWriter::create(path, meta).unwrap();
    writer.append(records).unwrap();
    writer.finish().unwrap();
}

fn read(files: &[PathBuf]) -> Result<Vec<AccessRecord>, TraceError> {
    AccessLog::open(files)?.collect()
}

#[test]
fn log_of_several_row_groups_is_read_back_as_it_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let count = (2 * LOG_GROUP_RECORDS + LOG_SLACK_RECORDS + 5) as u64;
    let records: Vec<_> = (0..count).map(record).collect();
    write(&path, meta(), &records);
    let reader = AccessLogReader::open(&path).unwrap();
    assert_eq!(reader.records(), count);
    assert_eq!(reader.meta(), &meta());
    assert!(read(&[path]).unwrap() == records);
}

#[test]
fn what_is_said_while_the_log_is_written_is_in_its_metadata() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let mut writer = AccessLogWriter::create(&path, meta()).unwrap();
    writer.append(&[record(0)]).unwrap();
    writer.meta_mut().lost_records = 12;
    writer.meta_mut().enter(LoggedDevice {
        id: DeviceId(1),
        name: "other.sock".to_owned(),
        service: Service::Block,
    });
    assert!(!path.exists(), "a file has its name when it is whole");
    writer.finish().unwrap();
    let log = AccessLog::open(&[path]).unwrap();
    assert_eq!(log.meta().lost_records, 12);
    assert_eq!(log.meta().devices.len(), 1);
    assert_eq!(log.meta().devices[0].name, "other.sock");
}

#[test]
fn records_that_come_a_little_late_are_sorted_and_very_late_ones_counted() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let mut records: Vec<_> = (0..(LOG_GROUP_RECORDS + LOG_SLACK_RECORDS) as u64)
        .map(record)
        .collect();
    records.swap(10, 5000);
    // The first row group is gone when this one comes.
    let very_late = record(3);
    records.push(very_late);
    write(&path, meta(), &records);
    let log = AccessLog::open(std::slice::from_ref(&path)).unwrap();
    assert_eq!(log.meta().late_records, 1);
    let got = read(&[path]).unwrap();
    assert_eq!(got.len(), records.len());
    assert!(got.is_sorted_by_key(|record| record.time_ns));
    assert_eq!(got[10], record(10));
    let moved = got
        .iter()
        .position(|r| r.address == very_late.address && r.time_ns > 1_500_000);
    assert_eq!(moved, Some(LOG_GROUP_RECORDS));
}

#[test]
fn record_that_can_be_no_access_is_refused_by_its_number() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    for (broken, told) in [
        (
            AccessRecord {
                address: u64::MAX,
                ..record(1)
            },
            "end past 2^64",
        ),
        (
            AccessRecord {
                time_ns: 1 << 63,
                ..record(1)
            },
            "past 2^63",
        ),
    ] {
        let mut writer = AccessLogWriter::create(&path, meta()).unwrap();
        let error = writer.append(&[record(0), broken]).unwrap_err().to_string();
        assert!(
            error.contains("record 1") && error.contains(told),
            "{error}"
        );
    }
}

#[test]
fn log_that_is_cut_off_anywhere_is_an_error_that_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cut-log");
    write(&path, meta(), &(0..500).map(record).collect::<Vec<_>>());
    let whole = fs::read(&path).unwrap();
    for end in (0..whole.len()).step_by(97).chain([whole.len() - 1]) {
        fs::write(&path, &whole[..end]).unwrap();
        let error = read(std::slice::from_ref(&path)).unwrap_err().to_string();
        assert!(error.contains("cut-log"), "{error}");
    }
}

fn rotating(dir: &Path, max_files: u32) -> RotatingLog {
    let limits = LogLimits {
        dir: dir.to_owned(),
        max_file_bytes: LOG_FILE_BYTES_MIN,
        max_files,
    };
    RotatingLog::create(limits, meta()).unwrap()
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    files
}

#[test]
fn log_that_rotates_has_all_records_in_files_of_bounded_size() {
    let dir = tempfile::tempdir().unwrap();
    let records: Vec<_> = (0..40_000).map(record).collect();
    let mut log = rotating(dir.path(), 100);
    for part in records.chunks(333) {
        log.append(part).unwrap();
        log.meta_mut().lost_records += 2;
    }
    assert_eq!(log.records(), 40_000);
    log.finish().unwrap();
    let mut files = files(dir.path());
    assert!(files.len() > 3, "{files:?}");
    for file in &files {
        let bytes = fs::metadata(file).unwrap().len();
        assert!(bytes < LOG_FILE_BYTES_MIN + (8 << 10), "{bytes}");
    }
    assert!(files[0].ends_with("web-000001.parquet"));
    files.reverse();
    let log = AccessLog::open(&files).unwrap();
    assert_eq!(
        log.meta().lost_records,
        2 * records.chunks(333).len() as u64
    );
    assert_eq!(log.records(), 40_000);
    assert!(read(&files).unwrap() == records);
}

#[test]
fn oldest_files_go_and_a_later_log_goes_on_with_the_numbers() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("web-notes.parquet"), "not ours").unwrap();
    for (life, expected) in [(0, [3, 4]), (1, [6, 7])] {
        let mut log = rotating(dir.path(), 2);
        for i in 0..3 + (1 - life) {
            log.append(&[record(i)]).unwrap();
            assert!(log.rotate().unwrap().is_some());
            assert_eq!(log.rotate().unwrap(), None, "nothing to complete");
        }
        let names = expected.map(|number| format!("web-{number:06}.parquet"));
        let present = files(dir.path());
        assert_eq!(present.len(), 3);
        assert!(present[0].ends_with(&names[0]) && present[1].ends_with(&names[1]));
        assert!(present[2].ends_with("web-notes.parquet"));
    }
}

#[test]
fn files_of_a_log_are_for_their_owner_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("web-000001.parquet");
    let writer = AccessLogWriter::create(&path, meta()).unwrap();
    writer.finish().unwrap();
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn nonsense_in_a_rotating_log_is_counted_as_lost() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = rotating(dir.path(), 2);
    let nonsense = AccessRecord {
        address: u64::MAX,
        ..record(1)
    };
    log.append(&[record(0), nonsense, record(2)]).unwrap();
    let file = log.finish().unwrap().unwrap();
    let log = AccessLog::open(std::slice::from_ref(&file)).unwrap();
    assert_eq!((log.records(), log.meta().lost_records), (2, 1));
}

#[test]
fn times_do_not_run_backwards_from_file_to_file() {
    let dir = tempfile::tempdir().unwrap();
    let mut log = rotating(dir.path(), 9);
    log.append(&[record(10)]).unwrap();
    log.rotate().unwrap();
    log.append(&[record(4), record(11)]).unwrap();
    log.finish().unwrap();
    let files = files(dir.path());
    assert_eq!(AccessLog::open(&files).unwrap().meta().late_records, 1);
    let times: Vec<_> = read(&files).unwrap().iter().map(|r| r.time_ns).collect();
    assert_eq!(times, [10, 10, 11].map(|i| record(i).time_ns));
}

#[test]
fn files_that_are_not_one_log_or_leave_one_out_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, meta: AccessLogMeta, times: [u64; 2]| {
        let path = dir.path().join(name);
        write(&path, meta, &times.map(record));
        path
    };
    let of = |sequence| AccessLogMeta { sequence, ..meta() };
    let one = file("one", of(1), [0, 1]);
    let two = file("two", of(2), [2, 3]);
    let early = file("early", of(2), [0, 3]);
    let three = file("three", of(3), [4, 5]);
    let other = file("other", AccessLogMeta::new("db", 1, 77), [0, 1]);
    for (files, told) in [
        (vec![one.clone(), three.clone()], "give those in between"),
        (vec![two.clone(), early.clone()], "give it once"),
        (vec![one.clone(), other.clone()], "more than one log"),
        (vec![one.clone(), early], "before the"),
        (vec![], "no file"),
    ] {
        let error = read(&files).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    }
    let logs = AccessLog::open_all(&[three, other, one, two]).unwrap();
    let found: Vec<_> = logs
        .iter()
        .map(|log| (log.meta().vm.as_str(), log.records()))
        .collect();
    assert_eq!(found, [("db", 2), ("web", 6)]);
}

/// Lets the file at `path`, which has one record, say that it has 2^63 - 1.
fn boast(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let tail = bytes.split_off(bytes.len() - 8);
    let footer_bytes = u32::from_le_bytes(tail[..4].try_into().unwrap());
    // In Thrift's compact form: an i64 that is 1, then a list, of row groups.
    let begin = bytes.len() - usize::try_from(footer_bytes).unwrap();
    let found = bytes[begin..].windows(3).position(|w| w == [0x16, 2, 0x19]);
    let at = begin + found.unwrap() + 1;
    let most = [0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1];
    bytes.splice(at..=at, most);
    bytes.extend((footer_bytes + 9).to_le_bytes());
    bytes.extend(b"PAR1");
    fs::write(path, bytes).unwrap();
}

#[test]
fn files_that_say_they_hold_2_64_records_together_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let files = [1, 2, 3].map(|sequence| {
        let path = dir.path().join(format!("file-{sequence}"));
        write(&path, AccessLogMeta { sequence, ..meta() }, &[record(0)]);
        boast(&path);
        path
    });
    let two = AccessLog::open(&files[..2]).unwrap();
    assert_eq!(two.records(), u64::MAX - 1);
    let error = AccessLog::open(&files).unwrap_err().to_string();
    assert!(error.contains("file-3: says it has"), "{error}");
    let error = read(&files[..1]).unwrap_err().to_string();
    assert!(error.contains("the file says it has"), "{error}");
}

#[test]
fn limits_that_allow_no_file_and_names_that_are_none_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let limits = |max_file_bytes, max_files| LogLimits {
        dir: dir.path().to_owned(),
        max_file_bytes,
        max_files,
    };
    for (limits, vm) in [
        (limits(LOG_FILE_BYTES_MIN, 0), "web"),
        (limits(LOG_FILE_BYTES_MIN - 1, 1), "web"),
        (limits(LOG_FILE_BYTES_MIN, LOG_FILES_MAX + 1), "web"),
        (limits(LOG_FILE_BYTES_MIN, 1), "a/b"),
        (limits(LOG_FILE_BYTES_MIN, 1), ""),
    ] {
        let meta = AccessLogMeta::new(vm, 1, 0);
        assert!(RotatingLog::create(limits, meta).is_err());
    }
    let most = limits(LOG_FILE_BYTES_MIN, LOG_FILES_MAX);
    assert!(RotatingLog::create(most, meta()).is_ok());
}
