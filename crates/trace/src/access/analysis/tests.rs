// SPDX-License-Identifier: Apache-2.0
//! Figures against counts by hand and against a naive analysis.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const DISK: DeviceId = DeviceId(1);
const NIC: DeviceId = DeviceId(2);

fn touch(seconds: u64, device: DeviceId, section: u64) -> SectionTouch {
    SectionTouch {
        at: Duration::from_secs(seconds),
        device,
        service: if device == NIC {
            Service::Network
        } else {
            Service::Block
        },
        section: SectionNo(section),
    }
}

fn analysed(touches: &[SectionTouch], memory_bytes: Option<u64>) -> AccessAnalysis {
    let mut analysis = Analysis::new(AnalysisParams {
        memory_bytes,
        ..AnalysisParams::default()
    });
    for touch in touches {
        analysis.touch(*touch).unwrap();
    }
    analysis.finish()
}

#[test]
fn example_of_the_module_has_three_intervals_and_two_faults() {
    let times = [1000, 1004, 1310, 1900];
    let report = analysed(&times.map(|at| touch(at, DISK, 7)), None);
    let device = &report.devices[0];
    assert_eq!(device.locality.accesses, 4);
    assert_eq!(device.locality.simulated_faults, 2);
    assert_eq!(device.tallies.reuse.iter().sum::<u64>(), 3);
    assert_eq!(report.span_seconds, 900.0);
    assert_eq!(device.footprint_share, None);
}

#[test]
fn interval_of_exactly_the_limit_is_no_fault_and_one_longer_is() {
    for (interval_ns, faults) in [(300_000_000_000, 0), (300_000_000_001, 1)] {
        let mut analysis = Analysis::new(AnalysisParams::default());
        for at in [Duration::ZERO, Duration::from_nanos(interval_ns)] {
            analysis
                .touch(SectionTouch {
                    at,
                    ..touch(0, DISK, 0)
                })
                .unwrap();
        }
        let report = analysis.finish();
        assert_eq!(report.devices[0].locality.simulated_faults, faults);
        let long: u64 = report.devices[0]
            .locality
            .reuse_intervals
            .iter()
            .filter(|row| row.from_seconds >= 300)
            .map(|row| row.intervals)
            .sum();
        assert_eq!(long, faults);
    }
}

#[test]
fn shares_are_of_the_sections_and_of_their_faults_by_final_count() {
    let mut touches = Vec::new();
    // Ten sections touched once, two three times with faults, one twelve times with a fault.
    touches.extend((0..10).map(|section| touch(0, DISK, section)));
    for at in [10, 500, 1000] {
        touches.extend([touch(at, DISK, 20), touch(at, DISK, 21)]);
    }
    touches.extend((1001..1012).map(|at| touch(at, DISK, 30)));
    touches.push(touch(2000, DISK, 30));
    let report = analysed(&touches, Some(26 * SECTION_BYTES));
    let locality = &report.service(Service::Block).unwrap().locality;
    assert_eq!(locality.sections, 13);
    assert_eq!(locality.simulated_faults, 5);
    assert_eq!(locality.sections_under_10_share, Some(12.0 / 13.0));
    assert_eq!(locality.faults_under_10_share, Some(4.0 / 5.0));
    assert_eq!(locality.faults_under_50_share, Some(1.0));
    let over_2 = locality.sections_over_2_share.unwrap();
    assert!((over_2 - 3.0 / 13.0).abs() < 1e-12);
    assert_eq!(report.devices[0].footprint_share, Some(0.5));
    assert_eq!(report.service(Service::Network), None);
}

#[test]
fn devices_are_counted_apart_though_they_touch_the_same_section() {
    let report = analysed(
        &[touch(0, NIC, 5), touch(1, DISK, 5), touch(400, NIC, 5)],
        None,
    );
    assert_eq!(report.devices[0].locality.simulated_faults, 0);
    assert_eq!(report.devices[1].locality.simulated_faults, 1);
    assert_eq!(report.devices[1].service, Service::Network);
}

#[test]
fn sections_of_one_number_in_two_spaces_are_two_sections() {
    let mut analysis = Analysis::new(AnalysisParams::default());
    for (seconds, space) in [(0, 1), (1, 2), (400, 2)] {
        analysis
            .touch_in(DomainId(space), touch(seconds, DISK, 5))
            .unwrap();
    }
    let report = analysis.finish();
    let disk = &report.devices[0];
    assert_eq!(disk.footprint_bytes, 2 * SECTION_BYTES);
    assert_eq!(disk.locality.sections, 2);
    assert_eq!(disk.locality.simulated_faults, 1, "space 1 never came back");
}

#[test]
fn pairs_take_what_is_said_of_them_and_no_more_of_them_would_fit() {
    assert_eq!(size_of::<(Section, SectionState)>(), 40);
    let full = HashMap::<Section, SectionState>::with_capacity(PAIRS_MAX);
    assert_eq!(full.capacity(), PAIRS_MAX);
}

#[test]
fn footprint_grows_by_the_minute_and_the_busiest_minute_is_told() {
    let report = analysed(
        &[
            touch(0, NIC, 1),
            touch(59, NIC, 2),
            touch(60, NIC, 1),
            touch(61, NIC, 1),
            touch(200, NIC, 3),
        ],
        None,
    );
    let nic = &report.devices[0];
    assert_eq!(nic.footprint_points_sections, [2, 2, 2, 3]);
    assert_eq!(nic.footprint_step_seconds, 60);
    assert_eq!(nic.busiest_minute_bytes, 2 * SECTION_BYTES);
}

#[test]
fn touch_from_before_the_last_one_is_refused() {
    let mut analysis = Analysis::new(AnalysisParams::default());
    analysis.touch(touch(5, DISK, 0)).unwrap();
    let error = analysis.touch(touch(4, DISK, 0)).unwrap_err();
    assert!(error.to_string().contains("never run backwards"), "{error}");
    assert_eq!(analysis.finish().devices[0].locality.accesses, 1);
}

#[test]
fn footprints_of_several_devices_have_their_percentiles() {
    let shares = (1..=20).map(|hundredths| f64::from(hundredths) / 100.0);
    let shares = FootprintShares::of(shares.rev().collect()).unwrap();
    assert_eq!((shares.p50, shares.p95, shares.max), (0.10, 0.19, 0.20));
    assert!((shares.mean - 0.105).abs() < 1e-12);
    assert_eq!(FootprintShares::of(vec![]), None);
}

#[test]
fn rows_of_an_analysis_without_touches_have_no_shares() {
    let report = analysed(&[], Some(1));
    assert!(report.devices.is_empty() && report.services.is_empty());
    let none = Locality::of(&Tallies::default());
    assert_eq!(none.sections_over_2_share, None);
    assert!(none.by_access_count.iter().all(|row| row.sections == 0));
}

/// The same figures from the whole trace at once: accesses, sections, sections
/// under 10, faults, faults under 10, sections by the end of each minute.
fn naive(touches: &[SectionTouch], device: DeviceId) -> (u64, u64, u64, u64, u64, Vec<u64>) {
    let first = touches[0].at;
    let last = touches[touches.len() - 1].at;
    let mut by_section: BTreeMap<SectionNo, Vec<Duration>> = BTreeMap::new();
    for touch in touches.iter().filter(|touch| touch.device == device) {
        by_section.entry(touch.section).or_default().push(touch.at);
    }
    let faults = |times: &Vec<Duration>| {
        let long = |pair: &[Duration]| pair[1] - pair[0] > Duration::from_secs(300);
        times.windows(2).filter(|pair| long(pair)).count() as u64
    };
    let few: Vec<_> = by_section.values().filter(|t| t.len() < 10).collect();
    let minutes = (last - first).as_secs() / 60;
    let by_minute = (0..=minutes).map(|minute| {
        let end = first + Duration::from_secs(60 * (minute + 1));
        let so_far: BTreeSet<_> = touches
            .iter()
            .filter(|touch| touch.device == device && touch.at < end)
            .map(|touch| touch.section)
            .collect();
        so_far.len() as u64
    });
    (
        by_section.values().map(|times| times.len() as u64).sum(),
        by_section.len() as u64,
        few.len() as u64,
        by_section.values().map(faults).sum(),
        few.iter().map(|times| faults(times)).sum(),
        by_minute.collect(),
    )
}

proptest! {
    #[test]
    fn figures_are_those_of_a_naive_analysis(
        steps in prop::collection::vec((0..400u64, 1..3u32, 0..6u64), 1..120)
    ) {
        let mut now = 77;
        let touches: Vec<_> = steps
            .into_iter()
            .map(|(later, device, section)| {
                // Mostly small steps, so that sections are touched often too.
                now += if later < 300 { later / 60 } else { later };
                touch(now, DeviceId(device), section)
            })
            .collect();
        let report = analysed(&touches, None);
        for device in &report.devices {
            let (accesses, sections, few, faults, faults_of_few, by_minute) =
                naive(&touches, device.device);
            let told = &device.locality;
            prop_assert_eq!(told.accesses, accesses);
            prop_assert_eq!(told.sections, sections);
            prop_assert_eq!(told.simulated_faults, faults);
            let share = |part: u64, whole: u64| (whole > 0).then(|| part as f64 / whole as f64);
            prop_assert_eq!(told.sections_under_10_share, share(few, sections));
            prop_assert_eq!(told.faults_under_10_share, share(faults_of_few, faults));
            prop_assert_eq!(&device.footprint_points_sections, &by_minute);
        }
    }
}
