// SPDX-License-Identifier: Apache-2.0
//! The fuzz targets' functions over random and mutated bytes, with the stable compiler.

mod bodies;
mod samples;
mod seeds;

use proptest::prelude::*;
use proptest::sample::Index;
use samples::{
    ACCESS_LOG, BLOCK_TRACES, HYPERSIO_LOG, QEMU_LOG, TRACEPOINTS, binary_file, block_trace,
    parquet_file, pyarrow_files,
};

/// A change of bytes, as a fuzzer makes them.
#[derive(Clone, Debug)]
enum Change {
    Flip(Index, u32),
    Set(Index, u8),
    /// Cuts the end off.
    Truncate(Index),
    /// Takes some bytes out.
    Remove(Index, usize),
    /// Puts some bytes from elsewhere in front.
    Repeat(Index, Index, usize),
}

fn change() -> impl Strategy<Value = Change> {
    // Bytes that mean much somewhere: ends of ranges, signs, large counts.
    let telling = prop::sample::select(vec![0, 1, 0x7f, 0x80, 0xff, b'\n', b' ', b'0', b'f']);
    prop_oneof![
        4 => (any::<Index>(), 0..8u32).prop_map(|(at, bit)| Change::Flip(at, bit)),
        4 => (any::<Index>(), prop_oneof![telling, any::<u8>()])
            .prop_map(|(at, byte)| Change::Set(at, byte)),
        1 => any::<Index>().prop_map(Change::Truncate),
        1 => (any::<Index>(), 1..40usize).prop_map(|(at, count)| Change::Remove(at, count)),
        1 => (any::<Index>(), any::<Index>(), 1..40usize)
            .prop_map(|(from, to, count)| Change::Repeat(from, to, count)),
    ]
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    prop::collection::vec(change(), 1..6)
}

fn changed(mut bytes: Vec<u8>, changes: &[Change]) -> Vec<u8> {
    for change in changes {
        if bytes.is_empty() {
            break;
        }
        let length = bytes.len();
        match change {
            Change::Flip(at, bit) => bytes[at.index(length)] ^= 1 << bit,
            Change::Set(at, byte) => bytes[at.index(length)] = *byte,
            Change::Truncate(at) => bytes.truncate(at.index(length)),
            Change::Remove(at, count) => {
                let at = at.index(length);
                bytes.drain(at..(at + count).min(length));
            }
            Change::Repeat(from, to, count) => {
                let from = from.index(length);
                let piece = bytes[from..(from + count).min(length)].to_vec();
                let to = to.index(length);
                bytes.splice(to..to, piece);
            }
        }
    }
    bytes
}

#[test]
fn block_traces_to_be_changed_are_whole_ones() {
    for which in 0..BLOCK_TRACES {
        let input = std::io::Cursor::new(block_trace(which));
        let path = std::path::Path::new("t");
        let trace = pagetide_trace::BlockTrace::new(path, input, &Default::default()).unwrap();
        assert_eq!(trace.filter(Result::is_ok).count(), 20, "{which}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_bytes_are_safe_to_read(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        bodies::hypersio_binary(&bytes);
        bodies::hypersio_log(&bytes);
        bodies::qemu_log(&bytes);
        bodies::tracepoints(&bytes);
        bodies::parquet(&bytes);
        bodies::open(&bytes);
        bodies::access_log(&bytes);
        bodies::block(&bytes);
    }

    #[test]
    fn changed_block_trace_is_safe_to_read(which in 0..BLOCK_TRACES, changes in changes()) {
        bodies::block(&changed(block_trace(which), &changes));
    }

    #[test]
    fn changed_binary_trace_is_safe_to_read(changes in changes()) {
        let bytes = changed(binary_file(), &changes);
        bodies::hypersio_binary(&bytes);
        bodies::open(&bytes);
    }

    #[test]
    fn changed_log_of_patched_qemu_is_safe_to_read(changes in changes()) {
        let bytes = changed(HYPERSIO_LOG.into(), &changes);
        bodies::hypersio_log(&bytes);
        bodies::open(&bytes);
    }

    #[test]
    fn changed_log_of_stock_qemu_is_safe_to_read(changes in changes()) {
        let bytes = changed(QEMU_LOG.into(), &changes);
        bodies::qemu_log(&bytes);
        bodies::open(&bytes);
    }

    #[test]
    fn changed_records_of_tracepoints_are_safe_to_read(changes in changes()) {
        bodies::tracepoints(&changed(TRACEPOINTS.into(), &changes));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn changed_parquet_is_safe_to_read(changes in changes()) {
        bodies::parquet(&changed(parquet_file(), &changes));
    }

    #[test]
    fn changed_parquet_of_pyarrow_is_safe_to_read(which in 0..3usize, changes in changes()) {
        bodies::parquet(&changed(pyarrow_files().swap_remove(which), &changes));
    }

    #[test]
    fn changed_access_log_is_safe_to_read(changes in changes()) {
        bodies::access_log(&changed(ACCESS_LOG.clone(), &changes));
    }
}

#[test]
fn parquet_with_any_one_byte_changed_is_safe_to_read() {
    for (whole, body) in [
        (parquet_file(), bodies::parquet as fn(&[u8])),
        (ACCESS_LOG.clone(), bodies::access_log),
    ] {
        for at in 0..whole.len() {
            for change in [0x01, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] ^= change;
                body(&bytes);
            }
        }
    }
}

#[test]
fn seeds_of_every_target_are_read() {
    let whole = |bytes: &[u8]| vec![bytes.to_vec()];
    let all = [
        parquet_file(),
        binary_file(),
        QEMU_LOG.into(),
        HYPERSIO_LOG.into(),
    ];
    let targets: &[seeds::Target] = &[
        (
            "hypersio_binary",
            bodies::hypersio_binary,
            whole(&binary_file()),
        ),
        (
            "hypersio_log",
            bodies::hypersio_log,
            whole(HYPERSIO_LOG.as_bytes()),
        ),
        ("qemu_log", bodies::qemu_log, whole(QEMU_LOG.as_bytes())),
        (
            "tracepoints",
            bodies::tracepoints,
            whole(TRACEPOINTS.as_bytes()),
        ),
        (
            "parquet",
            bodies::parquet,
            [vec![parquet_file()], pyarrow_files()].concat(),
        ),
        ("open", bodies::open, all.into()),
        ("access_log", bodies::access_log, whole(&ACCESS_LOG)),
        (
            "block_trace",
            bodies::block,
            (0..BLOCK_TRACES).map(block_trace).collect(),
        ),
    ];
    seeds::check(targets);
}
