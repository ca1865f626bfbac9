// SPDX-License-Identifier: Apache-2.0
//! Logs of stock QEMU's emulated VT-d.

use std::path::Path;

use pagetide_access_log::TraceError;
use pagetide_addr::Iova;
use pagetide_trace::{
    Event, EventKind, EventSource, IommuDomain, PageSize, QemuLogReader, SourceId,
};
use proptest::prelude::*;

fn read_bytes(bytes: &[u8]) -> (Vec<Event>, Option<TraceError>) {
    let mut reader = QemuLogReader::new(Path::new("a_log"), bytes);
    let mut events = Vec::new();
    loop {
        match reader.next_batch(&mut events) {
            Ok(0) => return (events, None),
            Ok(_) => {}
            Err(error) => return (events, Some(error)),
        }
    }
}

fn read(text: &str) -> Vec<Event> {
    let (events, error) = read_bytes(text.as_bytes());
    assert!(error.is_none(), "{error:?}");
    events
}

fn event(kind: EventKind, source: u32, domain: u32, iova: u64, size: Option<PageSize>) -> Event {
    Event {
        kind,
        ..Event::translate(SourceId(source), IommuDomain(domain), Iova(iova), size)
    }
}

const HEAD: &str = "vtd_dmar_enable enable 1\n";
const UPDATE: &str = "vtd_iotlb_page_update IOTLB page update sid 0x18 iova 0xffffe040 slpte 0x10a7b003 domain 0x1\n";

#[test]
fn hits_and_updates_are_requests_and_the_translation_after_them_is_not() {
    let text = format!(
        "{HEAD}\
         vtd_dmar_translate dev 00:02.00 iova 0x7000 -> gpa 0x7000 mask 0xfff\n\
         vtd_iotlb_cc_update IOTLB context update bus 0x0 devfn 0x18 high 0x102 low 0x1001 gen 0 -> gen 1\n\
         {UPDATE}\
         vtd_dmar_translate dev 00:03.00 iova 0xffffe000 -> gpa 0x10a7b000 mask 0xfff\n\
         vtd_iotlb_page_hit IOTLB page hit sid 0x18 iova 0xffffe050 slpte 0x10a7b003 domain 0x1\n\
         vtd_dmar_translate dev 00:03.00 iova 0xffffe000 -> gpa 0x10a7b000 mask 0xfff\n"
    );
    let size = Some(PageSize::SIZE_4K);
    assert_eq!(
        read(&text),
        [
            event(EventKind::Join, 0x18, 1, 0, None),
            event(EventKind::Translate, 0x18, 1, 0xffff_e040, size),
            event(EventKind::Translate, 0x18, 1, 0xffff_e050, size),
        ]
    );
}

#[test]
fn size_that_the_entry_leaves_open_is_that_of_the_translation_after_it() {
    let hit =
        "vtd_iotlb_page_hit IOTLB page hit sid 0x18 iova 0x40000123 slpte 0x80000083 domain 0x1\n";
    let size = |after: &str| {
        let events = read(&format!("{hit}{after}"));
        assert_eq!(
            events.len(),
            2 + usize::from(after.starts_with("vtd_iotlb"))
        );
        events[1].page_size
    };
    let translated = "vtd_dmar_translate dev 00:03.00 iova 0x40000000 -> gpa 0x80000000 mask";
    assert_eq!(
        size(&format!("{translated} 0x1fffff\n")),
        Some(PageSize::SIZE_2M)
    );
    assert_eq!(
        size(&format!("{translated} 0x3fffffff\n")),
        Some(PageSize::SIZE_1G)
    );
    assert_eq!(size(""), None);
    assert_eq!(size(UPDATE), None);
    let other = translated.replace("00:03.00", "00:04.00");
    assert_eq!(size(&format!("{other} 0x1fffff\n")), None);
}

#[test]
fn invalidations_are_events() {
    let text = format!(
        "{UPDATE}\
         vtd_inv_desc_iotlb_global iotlb invalidate global\n\
         vtd_inv_desc_iotlb_domain iotlb invalidate whole domain 0x5\n\
         vtd_inv_desc_iotlb_pages iotlb invalidate domain 0x1 addr 0xffffe000 mask 0x3\n\
         vtd_inv_desc_iotlb_pasid_pages iotlb invalidate domain 0x1 addr 0x2000 mask 0x0 pasid 0x7\n\
         vtd_inv_desc_iotlb_pasid iotlb invalidate domain 0x6 pasid 0x7\n\
         vtd_inv_desc_cc_devices context invalidate devices sid 0x18 fmask 0x0\n\
         vtd_inv_desc_cc_device context invalidate device 00:03.00\n\
         vtd_inv_desc_cc_device context invalidate device 00:04.00\n\
         vtd_inv_desc_cc_domain context invalidate domain 0x1\n\
         vtd_inv_desc_cc_global context invalidate globally\n\
         vtd_inv_desc_cc_global context invalidate globally\n"
    );
    let pages = |iova, shift| {
        let size = PageSize::from_shift(shift);
        event(EventKind::InvalidatePages, 0, 1, iova, size)
    };
    assert_eq!(
        read(&text)[2..],
        [
            event(EventKind::InvalidateAll, 0, 0, 0, None),
            event(EventKind::InvalidateDomain, 0, 5, 0, None),
            pages(0xffff_e000, 15),
            pages(0x2000, 12),
            event(EventKind::InvalidateDomain, 0, 6, 0, None),
            event(EventKind::InvalidateSource, 0x18, 1, 0, None),
            event(EventKind::InvalidateContextsOfDomain, 0, 1, 0, None),
            event(EventKind::InvalidateContexts, 0, 0, 0, None),
        ]
    );
}

#[test]
fn times_count_from_the_first_line_and_never_run_backwards() {
    let line = |time: &str| format!("4711@{time}:{UPDATE}");
    let text = [
        "4711@1700000000.000001:vtd_dmar_enable enable 1\n".to_owned(),
        line("1700000000.000005"),
        line("1700000001.000003"),
        line("1700000000.999999"),
        line("1700000001.000009"),
    ]
    .concat();
    let times: Vec<_> = read(&text).iter().map(|event| event.time_ns).collect();
    assert_eq!(
        times,
        [0, 0, 999_998_000, 999_998_000, 1_000_004_000].map(Some)
    );
}

#[test]
fn source_joins_again_when_its_new_context_has_another_domain() {
    let moved = UPDATE.replace("domain 0x1", "domain 0x2");
    let context = "vtd_iotlb_cc_update IOTLB context update bus 0x0 devfn 0x18 high 0x202 low 0x1 gen 1 -> gen 2\n";
    let kinds =
        |text: String| -> Vec<EventKind> { read(&text).iter().map(|event| event.kind).collect() };
    use EventKind::{Join, Translate};
    assert_eq!(
        kinds(format!("{UPDATE}{context}{moved}")),
        [Join, Translate, Join, Translate]
    );
    assert_eq!(
        kinds(format!("{UPDATE}{context}{UPDATE}")),
        [Join, Translate, Translate]
    );
    assert_eq!(
        kinds(format!("{UPDATE}{moved}")),
        [Join, Translate, Translate]
    );
}

#[test]
fn broken_line_is_named_after_the_events_before_it() {
    let cases = [
        "vtd_iotlb_page_hit IOTLB page hit sid 0x18 iova 0xff",
        "vtd_iotlb_page_hit IOTLB page hit sid 0x1 iova 0x0 pmask 0xfffffffffffff000 slpte 0x1 domain 0x1",
        "vtd_iotlb_page_hit IOTLB page hit sid 0x1 iova 0x200000000000000 slpte 0x1 domain 0x1",
        "vtd_inv_desc_iotlb_pages iotlb invalidate domain 0x1 addr 0x0 mask 0x40",
        "vtd_inv_desc_iotlb_domain iotlb invalidate whole domain",
        "vtd_inv_desc_cc_device context invalidate device 00:03",
        "vtd_dmar_translate dev 00:03.00",
    ];
    for case in cases {
        let (events, error) = read_bytes(format!("{HEAD}{UPDATE}{case}").as_bytes());
        assert_eq!(events.len(), 2, "{case}");
        let text = error.unwrap().to_string();
        assert!(text.starts_with("a_log, record 3: vtd_"), "{text}");
    }
}

#[test]
fn log_of_nothing_we_know_says_what_to_record() {
    let (_, error) = read_bytes(b"hello\n");
    assert!(error.unwrap().to_string().contains("no trace event"));
    let (_, error) =
        read_bytes(b"vtd_dmar_translate dev 00:03.00 iova 0x0 -> gpa 0x0 mask 0xfff\n");
    assert!(error.unwrap().to_string().contains("vtd_iotlb_page_hit"));
}

#[test]
fn log_whose_events_all_do_not_count_says_how_many_they_are() {
    let (events, error) = read_bytes(
        b"vtd_inv_desc_wait_sw wait invalidate status write addr 0x1 data 0x2\n\
          a line of the guest\nvtd_iotlb_reset IOTLB reset (reason: table full)\n",
    );
    assert!(events.is_empty());
    let text = error.unwrap().to_string();
    assert!(text.contains("none of its 2 trace events"), "{text}");
}

proptest! {
    #[test]
    fn log_with_any_change_is_events_or_an_error_with_its_line(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
    ) {
        let mut bytes = format!(
            "1@2.3:{UPDATE}2024-03-01T00:00:00.5Z {UPDATE}\
             vtd_dmar_translate dev 00:03.00 iova 0xffffe000 -> gpa 0x10a7b000 mask 0xfff\n\
             vtd_inv_desc_iotlb_pages iotlb invalidate domain 0x1 addr 0xffffe000 mask 0x3\n\
             vtd_inv_desc_cc_device context invalidate device 00:03.00\n"
        )
        .into_bytes();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let (_, error) = read_bytes(&bytes);
        if let Some(error) = error {
            prop_assert!(error.to_string().starts_with("a_log"), "{}", error);
        }
    }
}
