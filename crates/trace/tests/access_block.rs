// SPDX-License-Identifier: Apache-2.0
//! Block traces of all formats, made here: what is read from them, how their
//! format is told, and what is said of those that are broken.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pagetide_access_log::TraceError;
use pagetide_addr::Access;
use pagetide_trace::{
    BlockFormat, BlockOptions, BlockRequest, BlockTrace, ByteOrder, open_block_trace,
};

/// A request as the tests write it: time, disk, byte, bytes, what it does.
type Row = (u64, u32, u64, u32, Access);

/// Times in whole seconds and places in whole blocks, which all formats have.
const ROWS: [Row; 4] = [
    (2_000_000_000, 0, 512 * 1000, 4096, Access::Read),
    (2_000_000_000, 0, 512 * 1008, 8192, Access::Write),
    (7_000_000_000, 0, 0, 512, Access::Write),
    (9_000_000_000, 0, 512 << 32, 512 * 128, Access::Read),
];

fn vscsi(rows: &[Row]) -> Vec<u8> {
    rows.iter()
        .flat_map(|(time_ns, _, byte, bytes, access)| {
            let command: u16 = if *access == Access::Read { 0x28 } else { 0x2a };
            [
                &7u32.to_le_bytes()[..],
                &bytes.to_le_bytes(),
                &1u32.to_le_bytes(),
                &command.to_le_bytes(),
                &0x100u16.to_le_bytes(),
                &(byte / 512).to_le_bytes(),
                &(time_ns / 1000).to_le_bytes(),
            ]
            .concat()
        })
        .collect()
}

fn oracle(rows: &[Row]) -> Vec<u8> {
    rows.iter()
        .flat_map(|(time_ns, _, byte, bytes, _)| {
            [
                &u32::try_from(time_ns / 1_000_000_000)
                    .unwrap()
                    .to_le_bytes()[..],
                &(byte / 512).to_le_bytes(),
                &bytes.to_le_bytes(),
                &(-1i64).to_le_bytes(),
            ]
            .concat()
        })
        .collect()
}

fn mqsim(rows: &[Row]) -> Vec<u8> {
    rows.iter()
        .map(|(time_ns, disk, byte, bytes, access)| {
            let operation = u8::from(*access == Access::Read);
            format!(
                "{time_ns} {disk} {} {} {operation}\n",
                byte / 512,
                bytes / 512
            )
        })
        .collect::<String>()
        .into_bytes()
}

const SRT_HEADER: &str = "$$TR_IOREC-1.3\nversion = 1.3;\ndisks = { 0 -> {\n\
    \tsectorsize  = 512,\n\tinterleave = 1 } };\n\x0c";

fn srt_record(row: &Row, id: u32) -> Vec<u8> {
    let (time_ns, disk, byte, bytes, access) = row;
    let extra = usize::from(id >> 16 == 4) + usize::from(id & 0xffff == 2);
    let mut words = vec![
        u32::try_from(4 * (13 + extra)).unwrap(),
        id,
        u32::try_from(time_ns / 1_000_000_000).unwrap(),
        u32::try_from(time_ns % 1_000_000_000 / 1000).unwrap(),
        10,
        20,
        *bytes,
        // Sectors are words of 32 bits here: what does not fit is not tested.
        u32::try_from(byte / 512).unwrap_or(1 << 31),
        0x0800_0008 | disk << 8,
        4,
        0,
        u32::from(*access == Access::Read) | 0xa,
        0,
    ];
    words.resize(13 + extra, 1);
    words.into_iter().flat_map(u32::to_be_bytes).collect()
}

fn srt(rows: &[Row]) -> Vec<u8> {
    let records = rows.iter().flat_map(|row| srt_record(row, 0x0004_0001));
    SRT_HEADER.bytes().chain(records).collect()
}

/// A list of blocks that is read in runs, as disks are.
fn ids(order: ByteOrder) -> Vec<u8> {
    (0..600u32)
        .map(|i| (i % 50) + i / 50 * 7777)
        .flat_map(|id| match order {
            ByteOrder::BigEnd => id.to_be_bytes(),
            ByteOrder::LittleEnd => id.to_le_bytes(),
        })
        .collect()
}

fn open(name: &str, bytes: &[u8], options: &BlockOptions) -> Result<BlockTrace, TraceError> {
    let input = std::io::Cursor::new(bytes.to_vec());
    BlockTrace::new(Path::new(name), input, options)
}

fn read(bytes: &[u8]) -> (BlockFormat, Vec<BlockRequest>) {
    let mut trace = open("a", bytes, &BlockOptions::default()).unwrap();
    let requests = trace.by_ref().map(Result::unwrap).collect();
    (trace.about().format, requests)
}

/// What was read before the error, and the error.
fn broken(name: &str, bytes: &[u8]) -> (usize, String) {
    let mut trace = match open(name, bytes, &BlockOptions::default()) {
        Ok(trace) => trace,
        Err(error) => return (0, error.to_string()),
    };
    let good = trace.by_ref().take_while(Result::is_ok).count();
    assert!(trace.next().is_none(), "nothing comes after an error");
    let mut again = open(name, bytes, &BlockOptions::default()).unwrap();
    (good, again.nth(good).unwrap().unwrap_err().to_string())
}

fn expected(row: &Row) -> BlockRequest {
    BlockRequest {
        time_ns: Some(row.0 - ROWS[0].0),
        device: row.1,
        offset_bytes: row.2,
        len_bytes: row.3,
        access: Some(row.4),
    }
}

#[test]
fn requests_of_formats_with_everything_are_read_as_they_are() {
    for (bytes, format) in [
        (vscsi(&ROWS), BlockFormat::Vscsi),
        (mqsim(&ROWS), BlockFormat::Mqsim),
    ] {
        assert_eq!(read(&bytes), (format, ROWS.iter().map(expected).collect()));
    }
}

#[test]
fn oracle_general_tells_no_direction_and_counts_blocks_as_told() {
    let (format, requests) = read(&oracle(&ROWS));
    assert_eq!(format, BlockFormat::OracleGeneral);
    for (request, row) in requests.iter().zip(&ROWS) {
        let access = None;
        assert_eq!(
            *request,
            BlockRequest {
                access,
                ..expected(row)
            }
        );
    }
    let options = BlockOptions {
        block_bytes: Some(4096),
        ..BlockOptions::default()
    };
    let mut trace = open("a", &oracle(&ROWS), &options).unwrap();
    assert_eq!(trace.next().unwrap().unwrap().offset_bytes, 4096 * 1000);
}

#[test]
fn oracle_general_that_announces_more_than_it_has_is_cut_off() {
    let announcing = |next: i64| {
        let mut bytes = oracle(&ROWS);
        bytes[24 + 16..48].copy_from_slice(&next.to_le_bytes());
        bytes
    };
    for sound in [3, 4] {
        assert_eq!(read(&announcing(sound)).1.len(), 4);
    }
    let (good, told) = broken("a.oracleGeneral", &announcing(5));
    assert_eq!(good, 4);
    assert!(
        told.contains("record 4: ") && told.contains("request 5"),
        "{told}"
    );
    let (good, told) = broken("a.oracleGeneral", &announcing(-2));
    assert_eq!(good, 1);
    assert!(
        told.contains("record 1: ") && told.contains("below zero"),
        "{told}"
    );
}

#[test]
fn hp_srt_has_sectors_of_its_header_and_leaves_suspect_records_out() {
    let mut rows = ROWS;
    rows[1].1 = 3;
    let (format, requests) = read(&srt(&rows[..3]));
    assert_eq!(format, BlockFormat::HpSrt);
    assert_eq!(requests, rows[..3].iter().map(expected).collect::<Vec<_>>());

    let small = SRT_HEADER.replace("512", "256");
    let mut bytes = small.clone().into_bytes();
    bytes.extend(srt_record(&ROWS[0], 0x0004_0002));
    bytes.extend(srt_record(&ROWS[0], 0x0001_0001));
    let (_, requests) = read(&bytes);
    assert_eq!(requests.len(), 1);
    assert_eq!(requests[0].offset_bytes, 256 * 1000);

    let mixed = small + SRT_HEADER;
    let header = mixed.replacen('\x0c', "", 1);
    let (_, told) = broken("a", header.as_bytes());
    assert!(told.contains("different sizes"), "{told}");
}

#[test]
fn block_ids_are_read_in_the_order_that_has_neighbours_and_timed_when_asked() {
    for order in [ByteOrder::BigEnd, ByteOrder::LittleEnd] {
        let (format, requests) = read(&ids(order));
        assert_eq!((format, requests.len()), (BlockFormat::BlockIds, 600));
        assert_eq!(requests[51].offset_bytes, 4096 * 7778);
        assert!(requests.iter().all(|request| request.time_ns.is_none()));
        let options = BlockOptions {
            block_bytes: Some(512),
            interval: Some(Duration::from_millis(100)),
            ..BlockOptions::default()
        };
        let trace = open("a", &ids(order), &options).unwrap();
        assert_eq!(trace.about().byte_order, Some(order));
        let last = trace.map(Result::unwrap).last().unwrap();
        assert_eq!(last.time_ns, Some(59_900_000_000));
        assert_eq!(
            (last.len_bytes, last.offset_bytes),
            (512, 512 * (49 + 11 * 7777))
        );
    }
}

#[test]
fn trace_that_is_cut_off_is_an_error_with_the_record_it_ends_in() {
    for (bytes, size, header, name) in [
        (vscsi(&ROWS), 32, 0, "a.vscsi"),
        (srt(&ROWS), 56, SRT_HEADER.len(), "a.srt"),
        (oracle(&ROWS), 24, 0, "a.oracleGeneral.bin"),
    ] {
        for end in header + 1..bytes.len() {
            let (whole, rest) = ((end - header) / size, (end - header) % size);
            if rest == 0 {
                continue;
            }
            let (good, told) = broken(name, &bytes[..end]);
            assert_eq!(good, whole, "{told}");
            let begin = format!("{name}, record {whole}: the file ends within it");
            assert!(told.starts_with(&begin), "{told}");
        }
    }
    let text = mqsim(&ROWS);
    let (good, told) = broken("a", &text[..text.len() - 3]);
    assert_eq!(good, 3);
    assert!(told.contains("a, record 4: it has no operation"), "{told}");
    let mut list = ids(ByteOrder::LittleEnd);
    list.pop();
    let (good, told) = broken("a", &list);
    assert_eq!(good, 599);
    assert!(
        told.contains("record 599: the file ends within it"),
        "{told}"
    );
}

#[test]
fn times_that_run_backwards_are_an_error_with_the_record() {
    let mut rows = ROWS;
    rows[2].0 = 1_000_000_000;
    for (bytes, record) in [
        (vscsi(&rows), "record 2"),
        (mqsim(&rows), "record 3"),
        (srt(&rows), "record 2"),
    ] {
        let (good, told) = broken("a", &bytes);
        assert_eq!(good, 2);
        assert!(
            told.contains(record) && told.contains("backwards"),
            "{told}"
        );
    }
    let options = BlockOptions {
        format: Some(BlockFormat::OracleGeneral),
        ..BlockOptions::default()
    };
    let error = open("a", &oracle(&rows), &options).unwrap().nth(2).unwrap();
    assert!(error.unwrap_err().to_string().contains("record 2"));
}

#[test]
fn record_that_makes_no_sense_is_told_by_its_number() {
    let with = |mut bytes: Vec<u8>, at: usize, value: &[u8]| {
        bytes.splice(at..at + value.len(), value.iter().copied());
        bytes
    };
    // Far enough behind the beginning that the format is still plain.
    let many: Vec<_> = (0..300).map(|_| ROWS[0]).collect();
    let srt_at = |record: usize, word: usize| SRT_HEADER.len() + 56 * record + 4 * word;
    let line = |text: &str| [mqsim(&ROWS[..1]), text.as_bytes().to_vec()].concat();
    for (bytes, told) in [
        (
            with(vscsi(&many), 299 * 32 + 12, &[0x77]),
            "record 299: its SCSI command 0x77",
        ),
        (
            with(vscsi(&many), 299 * 32 + 14, &[0, 2]),
            "record 299: its version is 0x0200",
        ),
        (
            with(vscsi(&many), 299 * 32 + 23, &[0xff]),
            "record 299: block",
        ),
        (
            with(vscsi(&many), 299 * 32 + 31, &[0xff]),
            "record 299: its time",
        ),
        (with(srt(&many), srt_at(5, 0), &[0xff]), "record 5: it is"),
        (
            with(srt(&many), srt_at(5, 0) + 3, &[60]),
            "record 5: it is 60 bytes long; one of",
        ),
        (
            with(srt(&many), srt_at(5, 1) + 3, &[9]),
            "record 5: its id is 0x40009",
        ),
        (with(srt(&many), srt_at(5, 3), &[1]), "record 5: it has"),
        (line("3000000000 0 8 8 2\n"), "record 2: its operation is 2"),
        (line("3000000000 0 8 8 1 5\n"), "record 2: `5` comes after"),
        (
            line("3000000000 0 -8 8 1\n"),
            "record 2: its sector is `-8`",
        ),
        (
            line("3000000000 0 8 8388608 1\n"),
            "record 2: its 8388608 sectors",
        ),
        (line("3000000000 4294967296 8 8 1\n"), "record 2: its disk"),
        (
            line("\n3000000000 0 8 x 1\n"),
            "record 3: its sectors is `x`",
        ),
    ] {
        let (_, error) = broken("a", &bytes);
        assert!(error.contains(told), "{error}, not {told}");
    }
}

#[test]
fn commands_that_carry_no_blocks_are_passed_over() {
    let mut bytes = vscsi(&ROWS);
    bytes[32 + 12] = 0x35;
    let (_, requests) = read(&bytes);
    assert_eq!(requests.len(), 3);
    assert_eq!(requests[1], expected(&ROWS[2]));
}

#[test]
fn file_of_no_known_format_or_compressed_says_what_to_do() {
    for (bytes, told) in [
        (&b"\xfd7zXZ\0\0"[..], "xz -d"),
        (b"\x1f\x8b\x08", "gzip -d"),
        (b"\x28\xb5\x2f\xfd", "zstd -d"),
        (b"", "of no format"),
        (
            b"time,disk,sector\n",
            "vscsi, oracle-general, mqsim, hp-srt, block-ids",
        ),
        (&[0; 4096], "of no format"),
        (b"$$TR_IOREC-1.3 and no end", "no header"),
    ] {
        let error = open("a", bytes, &BlockOptions::default())
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("a: ") && error.contains(told), "{error}");
    }
    let error = open_block_trace(&PathBuf::from("/nonexistent"), &BlockOptions::default());
    assert!(error.unwrap_err().to_string().contains("check the name"));
    let none = BlockOptions {
        block_bytes: Some(0),
        ..BlockOptions::default()
    };
    assert!(open("a", &ids(ByteOrder::BigEnd), &none).is_err());
}

#[test]
fn format_that_is_named_is_taken_and_names_are_read_back() {
    let options = BlockOptions {
        format: Some(BlockFormat::BlockIds),
        ..BlockOptions::default()
    };
    let trace = open("a", &[0; 40], &options).unwrap();
    assert_eq!(trace.count(), 10);
    for format in BlockFormat::ALL {
        assert_eq!(format.name().parse::<BlockFormat>().unwrap(), format);
    }
    let error = "msr".parse::<BlockFormat>().unwrap_err().to_string();
    assert!(
        error.contains("`msr`") && error.contains("hp-srt"),
        "{error}"
    );
}

#[test]
fn trace_that_is_no_file_is_refused_and_read_from_any_input_once() {
    let named = BlockOptions {
        format: Some(BlockFormat::Vscsi),
        ..BlockOptions::default()
    };
    let error = open_block_trace(Path::new("/dev/null"), &named).unwrap_err();
    assert!(
        error.to_string().contains("is a pipe or a device"),
        "{error}"
    );
    let (input, mut output) = std::io::pipe().unwrap();
    std::io::Write::write_all(&mut output, &vscsi(&ROWS)).unwrap();
    drop(output);
    let trace = BlockTrace::new(Path::new("a pipe"), input, &BlockOptions::default()).unwrap();
    assert_eq!(trace.filter_map(Result::ok).count(), ROWS.len());
}

#[test]
fn trace_in_a_file_is_opened_by_its_path() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    fs::write(&path, vscsi(&ROWS)).unwrap();
    let mut trace = open_block_trace(&path, &BlockOptions::default()).unwrap();
    assert_eq!(trace.by_ref().count(), 4);
    assert_eq!(trace.requests(), 4);
}
