// SPDX-License-Identifier: Apache-2.0
//! A small whole file of each format: what the tests damage, and what fuzzers begin with (`fuzz/seeds`).

use std::sync::LazyLock;

use pagetide_access_log::{AccessLogMeta, AccessLogWriter, AccessRecord, Service};
use pagetide_addr::{Access, DeviceId, DomainId, Iova};
use pagetide_trace::{
    Event, EventKind, EventSink, HypersioWriter, IommuDomain, PageSize, ParquetWriter, SourceId,
    TraceMeta,
};

pub const QEMU_LOG: &str = "\
894@1795307720.527040:vtd_inv_desc_cc_global context invalidate globally
894@1795307720.527108:vtd_inv_desc_iotlb_global iotlb invalidate global
879@1795307721.509660:vtd_iotlb_cc_update IOTLB context update bus 0x0 devfn 0x8 high 0x302 low 0x1162001 gen 0 -> gen 2
879@1795307721.509678:vtd_iotlb_page_update IOTLB page update sid 0x8 iova 0xfffff002 slpte 0x1d400083 domain 0x3
879@1795307721.509685:vtd_dmar_translate dev 00:01.00 iova 0xffe00000 -> gpa 0x1d400000 mask 0x1fffff
2026-11-22T00:33:47.568135Z vtd_iotlb_page_hit IOTLB page hit sid 0x8 iova 0xfffff002 slpte 0x1d5ac003 domain 0x3
894@1795307721.526288:vtd_inv_desc_iotlb_pages iotlb invalidate domain 0x3 addr 0xffffa000 mask 0x0
894@1795307721.526288:vtd_inv_desc_cc_device context invalidate device 00:01.00
";
pub const TRACEPOINTS: &str = "\
# tracer: nop
#
# entries-in-buffer/entries-written: 5/5   #P:2
#
#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION
#              | |         |   |||||     |         |
          insmod-96      [000] .....     9.604124: map: IOMMU: iova=0x00000000ffff8000 - 0x0000000100000000 paddr=0x000000001fe38000 size=32768
 qemu-system-x86-118     [000] .....    58.653727: map: IOMMU: iova=0x0000000000000000 - 0x0000000000200000 paddr=0x000000001ce00000 size=2097152
          <idle>-0       [001] ..s1.    27.130297: unmap: IOMMU: iova=0x00000000ffbf1000 - 0x00000000ffbf2000 size=4096 unmapped_size=4096
          <idle>-0       [001] ..s1.    27.148725: map: IOMMU: iova=0x00000000ffbf1000 - 0x00000000ffbf2000 paddr=0x00000000055ac000 size=4096
          insmod-96      [000] .....    29.604124: io_page_fault: IOMMU:DRIVER e1000e iova=0x1000 flags=0x0
";
pub const HYPERSIO_LOG: &str = "\
1@2.000003:vtd_iotlb_cc_update IOTLB context update bus 0x0 devfn 0x10 high 0x101 low 0x1001 gen 0 -> gen 1
1@2.000003:vtd_slpte_fetch SLPTE fetch: high 0x101 low 0x1001 iova 0x34800000 level 0x4 addr 0x40000000 slpte 0x1
1@2.000003:vtd_iotlb_page_update IOTLB page update sid 0x10 iova 0x34800040 slpte 0x100000083 level 0x2 domain 0x1
1@2.000003:vtd_iotlb_page_hit IOTLB page hit sid 0x18 iova 0xfee00000 pmask 0xfffffffffffff000 slpte 0x2 domain 0x1
";

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

pub fn parquet_file() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t");
    let mut writer = Box::new(ParquetWriter::create(&path, &TraceMeta::default()).unwrap());
    writer.write(&some_events()).unwrap();
    writer.finish().unwrap();
    std::fs::read(path).unwrap()
}

/// Files that pyarrow wrote, with the compressions that ours do not have.
pub fn pyarrow_files() -> Vec<Vec<u8>> {
    ["snappy", "zstd-v2", "gzip"]
        .map(|name| {
            let files = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/files");
            std::fs::read(files.join(format!("pyarrow-{name}.parquet"))).unwrap()
        })
        .into()
}

pub fn binary_file() -> Vec<u8> {
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
pub static ACCESS_LOG: LazyLock<Vec<u8>> = LazyLock::new(|| {
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

/// The number of [`block_trace`]s.
pub const BLOCK_TRACES: usize = 4;

/// A small block trace of each format but the plain list, which any bytes are.
pub fn block_trace(which: usize) -> Vec<u8> {
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
