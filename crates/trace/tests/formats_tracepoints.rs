// SPDX-License-Identifier: Apache-2.0
//! The records of Linux' tracepoints about its I/O page tables, as tracefs shows them.

use std::path::Path;

use pagetide_access_log::TraceError;
use pagetide_addr::Iova;
use pagetide_trace::{GuestMaps, MapChange, MapCheck, QemuDmaReader, TracepointReader};

const MAP: &str = "          ip-102     [000] .....    10.338514: map: IOMMU: iova=0x00000000ffff2000 - \
                   0x00000000ffff4000 paddr=0x000000001ffd9000 size=8192\n";
const UNMAP: &str = "          <idle>-0       [001] ..s1.    27.130129: unmap: IOMMU: iova=0x00000000ffff2000 - \
                     0x00000000ffff4000 size=8192 unmapped_size=8192\n";

fn read(text: &str) -> Result<Vec<MapChange>, String> {
    TracepointReader::new(Path::new("maps"), text.as_bytes())
        .map(|change| change.map_err(|error: TraceError| error.to_string()))
        .collect()
}

#[test]
fn maps_and_unmaps_are_read_and_all_else_is_skipped() {
    let text = format!(
        "# tracer: nop\n# entries-in-buffer/entries-written: 3/3   #P:2\n{MAP}\
         x-1 [000] ..... 1.0: attach_device_to_domain: IOMMU: device=0000:00:01.0\n{UNMAP}\n"
    );
    let iova = Iova(0xffff_2000);
    assert_eq!(
        read(&text),
        Ok(vec![
            MapChange::Map {
                iova,
                physical: 0x1ffd_9000,
                bytes: 0x2000
            },
            MapChange::Unmap {
                iova,
                bytes: 0x2000
            },
        ])
    );
}

#[test]
fn gap_is_an_error_wherever_it_is_told() {
    for gap in [
        "CPU:1 [LOST 12 EVENTS]\n",
        "# entries-in-buffer/entries-written: 100/112   #P:2\n",
        "# entries-in-buffer/entries-written: some\n",
    ] {
        let error = read(&format!("{MAP}{gap}{UNMAP}")).unwrap_err();
        assert!(error.starts_with("maps, record 2: "), "{error}");
    }
}

#[test]
fn broken_record_is_named_by_its_line() {
    for (from, to) in [
        ("iova=0x", "iova="),
        ("iova=0x00000000ffff2000", "iova=0x00000000ffff2001"),
        ("0x00000000ffff4000", "0x00000000ffff5000"),
        ("paddr=0x", "paddr=0xfffffffffffff000ff"),
        ("paddr=0x000000001ffd9000", "paddr=0xfffffffffffff000"),
        ("paddr=0x000000001ffd9000", "paddr=0x10"),
        ("size=8192", "size=0"),
        ("size=8192", "size=x"),
        (" size=8192", ""),
    ] {
        let broken = MAP.replace(from, to);
        assert_ne!(broken, MAP);
        let error = read(&format!("{UNMAP}{broken}")).unwrap_err();
        assert!(error.starts_with("maps, record 2: map: "), "{to}: {error}");
    }
    let broken = UNMAP.replace(" unmapped_size=8192", "");
    let error = read(&broken).unwrap_err();
    assert!(error.starts_with("maps, record 1: unmap: "), "{error}");
}

#[test]
fn file_without_a_map_cannot_be_compared_with() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("maps.txt");
    std::fs::write(&path, UNMAP).unwrap();
    let error = GuestMaps::read(&path).unwrap_err().to_string();
    assert!(error.contains("iommu:map"), "{error}");
    std::fs::write(&path, MAP).unwrap();
    assert_eq!(GuestMaps::read(&path).unwrap().maps(), 1);
}

#[test]
fn log_is_compared_with_the_records() {
    let log = "1@1.0:vtd_iotlb_page_update IOTLB page update sid 0x8 iova 0xffff2ffe slpte 0x1ffd9003 domain 0x3\n\
               1@1.0:vtd_iotlb_page_hit IOTLB page hit sid 0x8 iova 0xffff3000 slpte 0x1ffda003 domain 0x3\n\
               1@1.0:vtd_iotlb_page_hit IOTLB page hit sid 0x8 iova 0xffff3000 slpte 0x1ffd9003 domain 0x3\n\
               1@1.0:vtd_inv_desc_iotlb_domain iotlb invalidate whole domain 0x3\n\
               1@1.0:vtd_inv_desc_iotlb_pages iotlb invalidate domain 0x3 addr 0xffff2000 mask 0x1\n\
               1@1.0:vtd_inv_desc_iotlb_pages iotlb invalidate domain 0x3 addr 0xffff2000 mask 0x0\n";
    let changes = read(&format!("{MAP}{UNMAP}")).unwrap();
    let maps = GuestMaps::collect(changes.into_iter().map(Ok)).unwrap();
    let records = QemuDmaReader::new(Path::new("log"), log.as_bytes());
    let check = MapCheck::compare(records, &maps).unwrap();
    assert_eq!((check.requests, check.requests_mapped), (3, 2));
    assert_eq!((check.invalidations, check.invalidations_unmapped), (2, 1));
    assert!(check.first_unmapped.unwrap().contains("0xffff3000"));
}
