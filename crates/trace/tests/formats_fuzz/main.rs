// SPDX-License-Identifier: Apache-2.0
//! The fuzz targets' functions over random and mutated bytes, with the stable compiler.

mod bodies;

use std::sync::LazyLock;

use pagetide_access_log::{AccessLogMeta, AccessLogWriter, AccessRecord, Service};
use pagetide_addr::{Access, DeviceId, DomainId, Iova};
use pagetide_trace::{
    Event, EventKind, EventSink, HypersioWriter, IommuDomain, PageSize, ParquetWriter, SourceId,
    TraceMeta,
};
use proptest::prelude::*;
use proptest::sample::Index;

const QEMU_LOG: &str = "\
894@1795307720.527040:vtd_inv_desc_cc_global context invalidate globally
894@1795307720.527108:vtd_inv_desc_iotlb_global iotlb invalidate global
879@1795307721.509660:vtd_iotlb_cc_update IOTLB context update bus 0x0 devfn 0x8 high 0x302 low 0x1162001 gen 0 -> gen 2
879@1795307721.509678:vtd_iotlb_page_update IOTLB page update sid 0x8 iova 0xfffff002 slpte 0x1d400083 domain 0x3
879@1795307721.509685:vtd_dmar_translate dev 00:01.00 iova 0xffe00000 -> gpa 0x1d400000 mask 0x1fffff
2026-11-22T00:33:47.568135Z vtd_iotlb_page_hit IOTLB page hit sid 0x8 iova 0xfffff002 slpte 0x1d5ac003 domain 0x3
894@1795307721.526288:vtd_inv_desc_iotlb_pages iotlb invalidate domain 0x3 addr 0xffffa000 mask 0x0
894@1795307721.526288:vtd_inv_desc_cc_device context invalidate device 00:01.00
";
const HYPERSIO_LOG: &str = "\
1@2.000003:vtd_iotlb_cc_update IOTLB context update bus 0x0 devfn 0x10 high 0x101 low 0x1001 gen 0 -> gen 1
1@2.000003:vtd_slpte_fetch SLPTE fetch: high 0x101 low 0x1001 iova 0x34800000 level 0x4 addr 0x40000000 slpte 0x1
1@2.000003:vtd_iotlb_page_update IOTLB page update sid 0x10 iova 0x34800040 slpte 0x100000083 level 0x2 domain 0x1
1@2.000003:vtd_iotlb_page_hit IOTLB page hit sid 0x18 iova 0xfee00000 pmask 0xfffffffffffff000 slpte 0x2 domain 0x1
";

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

/// Events of every shape.
fn some_events() -> Vec<Event> {
    (0..60u32)
        .map(|i| {
            let mut event = Event::translate(
                SourceId(i % 7),
                IommuDomain(i % 5),
                Iova(u64::from(i % 11) << 21),
                (i % 4 != 0).then_some(PageSize::SIZE_2M),
            );
            event.time_ns = (i % 3 != 0).then_some(u64::from(i) * 61);
            if i % 13 == 0 {
                event.kind = EventKind::InvalidatePages;
            }
            event
        })
        .collect()
}

fn parquet_file() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    let mut writer = Box::new(ParquetWriter::create(&path, &TraceMeta::default()).unwrap());
    writer.write(&some_events()).unwrap();
    writer.finish().unwrap();
    std::fs::read(path).unwrap()
}

fn binary_file() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t_iotlb_trace.bin");
    let mut writer = Box::new(HypersioWriter::create(&path).unwrap());
    for mut event in some_events() {
        event.kind = EventKind::Translate;
        event.page_size = Some(PageSize::SIZE_2M);
        writer.write(&[event]).unwrap();
    }
    writer.finish().unwrap();
    std::fs::read(path).unwrap()
}

/// Written once: a file is on disk before it is complete, and that takes its time.
static ACCESS_LOG: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    let mut writer = AccessLogWriter::create(&path, AccessLogMeta::new("vm", 1 << 30, 7)).unwrap();
    let records: Vec<_> = (0..60u32)
        .map(|i| AccessRecord {
            time_ns: u64::from(i) * 977,
            device: DeviceId(i % 3),
            space: DomainId(i % 2),
            address: u64::from(i % 11) << 21,
            len_bytes: 512 << (i % 4),
            access: if i % 2 == 0 {
                Access::Read
            } else {
                Access::Write
            },
            service: if i % 3 == 0 {
                Service::Network
            } else {
                Service::Block
            },
        })
        .collect();
    writer.append(&records).unwrap();
    writer.finish().unwrap();
    std::fs::read(path).unwrap()
});

/// A small block trace of each format but the plain list, which any bytes are.
fn block_trace(which: usize) -> Vec<u8> {
    let numbers = 0..20u32;
    match which {
        0 => numbers
            .flat_map(|i| {
                let words = [i, 4096, 1, 0x0100_0028, i * 8, 0, i * 1000, 0];
                words.into_iter().flat_map(u32::to_le_bytes)
            })
            .collect(),
        1 => numbers
            .flat_map(|i| {
                let words = [i, i * 8, 0, 4096, u32::MAX, u32::MAX];
                words.into_iter().flat_map(u32::to_le_bytes)
            })
            .collect(),
        2 => numbers
            .flat_map(|i| format!("{} {} {} 8 {}\n", i * 500, i % 3, i * 8, i % 2).into_bytes())
            .collect(),
        _ => {
            let records = numbers.flat_map(|i| {
                let words = [
                    56,
                    0x0004_0001,
                    i,
                    i,
                    1,
                    2,
                    4096,
                    i * 16,
                    0x0800_0008,
                    4,
                    0,
                    i,
                    0,
                    0,
                ];
                words.into_iter().flat_map(u32::to_be_bytes)
            });
            let header = b"$$TR_IOREC-1.3\nsectorsize = 256,\n\x0c";
            header.iter().copied().chain(records).collect()
        }
    }
}

#[test]
fn block_traces_to_be_changed_are_whole_ones() {
    for which in 0..4 {
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
        bodies::parquet(&bytes);
        bodies::open(&bytes);
        bodies::access_log(&bytes);
        bodies::block(&bytes);
    }

    #[test]
    fn changed_block_trace_is_safe_to_read(which in 0..4usize, changes in changes()) {
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
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn changed_parquet_is_safe_to_read(changes in changes()) {
        bodies::parquet(&changed(parquet_file(), &changes));
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
