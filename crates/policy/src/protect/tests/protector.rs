// SPDX-License-Identifier: Apache-2.0
//! The protector of a VM against its devices' policies, each on its own.

use crate::protect::{
    Change, Fate, PolicyChoice, ProtectedSections, ProtectionPolicy, Protector, Touch, together_max,
};
use pagetide_addr::{Access, DeviceId, PAGE_BYTES, SectionNo};
use pagetide_random::SplitMix64;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

const VM_SECTIONS: u64 = 160;

const FATES: [Fate; 3] = [Fate::Evicted, Fate::Faulted, Fate::Gone];

fn touch(section: u64, at: Duration) -> Touch {
    Touch {
        section: SectionNo(section),
        at,
        access: Access::Write,
        bytes: PAGE_BYTES,
    }
}

/// A device's policy, and what it protects.
struct Alone {
    policy: Box<dyn ProtectionPolicy>,
    held: BTreeSet<SectionNo>,
}

impl Alone {
    fn tell(&mut self, tell: impl FnOnce(&mut dyn ProtectionPolicy, &mut Vec<Change>)) {
        let mut changes = Vec::new();
        tell(self.policy.as_mut(), &mut changes);
        for change in changes {
            match change {
                Change::Protect(section) => {
                    self.held.insert(section);
                }
                Change::Release(section) => {
                    self.held.remove(&section);
                }
            }
        }
    }
}

fn assert_union(protected: &ProtectedSections, devices: &BTreeMap<DeviceId, Alone>) {
    let held = devices.values().flat_map(|alone| &alone.held);
    let union: BTreeSet<SectionNo> = held.copied().collect();
    assert_eq!(protected.len(), union.len() as u64);
    assert_eq!(protected.is_empty(), union.is_empty());
    for section in (0..VM_SECTIONS).map(SectionNo) {
        let expected = union.contains(&section);
        assert_eq!(protected.contains(section), expected, "{section:?}");
    }
}

#[test]
fn vm_protects_what_any_of_its_devices_does() {
    // Three devices with 3 % each stay below the bound for all together.
    let choices = [
        "none",
        "lru:share=0.03",
        "adp:protected-max=0.03",
        "adp:protected-max=0.03,follow=1",
    ];
    let choices = choices.map(|choice| choice.parse::<PolicyChoice>().expect("a policy"));
    for (seed, choice) in (0..20).zip(choices.iter().cycle()) {
        let mut random = SplitMix64::new(seed);
        let mut protector = Protector::new(choice, VM_SECTIONS);
        let protected = Arc::clone(protector.protected());
        let mut devices: BTreeMap<DeviceId, Alone> = BTreeMap::new();
        let age = choice.promotion_age();
        let mut sections = VM_SECTIONS;
        let mut now = Duration::ZERO;
        for _ in 0..3_000 {
            now += Duration::from_millis(random.below(3_000));
            let section = random.below(VM_SECTIONS);
            let device = DeviceId(u32::try_from(1 + random.below(3)).unwrap());
            match random.below(100) {
                0 => {
                    protector.device_left(device);
                    devices.remove(&device);
                }
                1 => {
                    sections = 1 + random.below(VM_SECTIONS);
                    protector.resized(sections);
                    for alone in devices.values_mut() {
                        alone.tell(|policy, changes| policy.resized(sections, changes));
                    }
                }
                2..=5 => {
                    let fate = FATES[random.index(FATES.len())];
                    protector.fate(SectionNo(section), fate, now);
                    for alone in devices.values_mut() {
                        alone.tell(|policy, changes| {
                            policy.fate(SectionNo(section), fate, now, changes);
                        });
                    }
                }
                6..=25 => {
                    protector.passed(now);
                    for alone in devices.values_mut() {
                        alone.tell(|policy, changes| policy.passed(now, changes));
                    }
                }
                _ => {
                    protector.touched(device, touch(section, now));
                    let alone = devices.entry(device).or_insert_with(|| Alone {
                        policy: choice.policy(sections, &age),
                        held: BTreeSet::new(),
                    });
                    alone.tell(|policy, changes| policy.touched(touch(section, now), changes));
                }
            }
            assert_union(&protected, &devices);
            assert_eq!(protector.reports().count(), devices.len());
        }
    }
}

fn lru_protector() -> Protector {
    Protector::new(&"lru:share=0.5".parse().expect("a policy"), 8)
}

#[test]
fn section_stays_protected_until_the_last_device_releases_it() {
    let mut protector = lru_protector();
    let protected = Arc::clone(protector.protected());
    for device in [1, 2] {
        protector.touched(DeviceId(device), touch(3, Duration::ZERO));
    }
    protector.device_left(DeviceId(1));
    assert!(protected.contains(SectionNo(3)));
    protector.device_left(DeviceId(2));
    assert!(!protected.contains(SectionNo(3)));
}

#[test]
fn tracked_section_takes_at_most_64_bytes_with_all_that_is_kept_for_it() {
    // A VM of 64 GiB whose disk fills both blocks.
    let mut protector = Protector::new(&"adp".parse().expect("a policy"), 32_768);
    for section in 0..20_000_u64 {
        let at = Duration::from_millis(section);
        protector.touched(DeviceId(1), touch(section, at));
    }
    let (_, report) = protector.reports().next().unwrap();
    assert_eq!(report.protected_sections, 1_638);
    assert_eq!(report.tracked_sections, 9_830 + 1_638);
    let bytes_per_section = report.bytes / report.tracked_sections;
    assert!(
        (33..=64).contains(&bytes_per_section),
        "{bytes_per_section}"
    );
    eprintln!("{bytes_per_section} bytes a tracked section");
}

#[test]
fn section_that_is_gone_is_protected_by_nobody() {
    let mut protector = lru_protector();
    for device in [1, 2] {
        protector.touched(DeviceId(device), touch(3, Duration::ZERO));
    }
    protector.fate(SectionNo(3), Fate::Gone, Duration::ZERO);
    assert!(protector.protected().is_empty());
}

#[test]
fn nothing_is_protected_after_another_choice_and_after_the_protector() {
    let mut protector = lru_protector();
    let protected = Arc::clone(protector.protected());
    protector.touched(DeviceId(1), touch(3, Duration::ZERO));
    protector.choose(&PolicyChoice::None);
    assert!(protected.is_empty());
    protector.touched(DeviceId(1), touch(3, Duration::ZERO));
    assert!(protected.is_empty());
    protector.choose(&"lru:share=1".parse().expect("a policy"));
    protector.touched(DeviceId(1), touch(3, Duration::ZERO));
    assert_eq!(protected.len(), 1);
    drop(protector);
    assert!(protected.is_empty());
}

#[test]
fn devices_protect_no_more_together_than_their_vm_allows_however_many_they_are() {
    for (choice, sections, most) in [
        ("adp", 1_000, 100),
        ("lru", 1_000, 200),
        ("lru:share=0.01", 1_000, 100),
        ("lru:share=0.7", 1_000, 1_000),
        ("adp", 9, 0),
        ("none", 1_000, 100),
    ] {
        let choice = choice.parse().expect("a policy");
        assert_eq!(together_max(&choice, sections), most, "{choice}");
    }
    let choice = "lru:share=0.05".parse().expect("a policy");
    let mut protector = Protector::new(&choice, 1_000);
    for section in 0..2_000 {
        let device = DeviceId(1 + u32::try_from(section / 31).expect("few"));
        protector.touched(
            device,
            touch(section % 1_000, Duration::from_millis(section)),
        );
        assert!(protector.protected().len() <= 100);
    }
    assert_eq!(protector.protected().len(), 100);
    let reports: Vec<_> = protector.reports().collect();
    assert_eq!(reports.len(), 65);
    let held: u64 = reports.iter().map(|(_, it)| it.protected_sections).sum();
    assert!(held >= 100, "only what is protected is told: {held}");
    let dropped: u64 = reports.iter().map(|(_, it)| it.dropped_sections).sum();
    assert_eq!(
        held + dropped,
        2_000,
        "each touch is of a section new to its device"
    );
}

#[test]
fn section_too_many_is_refused_until_a_device_releases_another() {
    // A device protects four of 80, and all of them eight.
    let choice = "lru:share=0.05".parse().expect("a policy");
    let mut protector = Protector::new(&choice, 80);
    let protected = Arc::clone(protector.protected());
    for section in 0..8_u64 {
        let device = DeviceId(u32::try_from(1 + section / 4).expect("few"));
        protector.touched(device, touch(section, Duration::ZERO));
    }
    let third = DeviceId(3);
    protector.touched(third, touch(50, Duration::ZERO));
    protector.touched(third, touch(7, Duration::ZERO));
    let expected = |sections: &[u64]| sections.iter().all(|it| protected.contains(SectionNo(*it)));
    assert!(expected(&[0, 1, 2, 3, 4, 5, 6, 7]));
    assert_eq!(protected.len(), 8, "section 7 is another's already");
    let reports: Vec<_> = protector.reports().collect();
    assert_eq!(reports[2].1.protected_sections, 1);
    assert_eq!(
        (reports[2].1.dropped_sections, protector.dropped_sections()),
        (1, 1)
    );

    // A device that is full takes a new section in before it releases its oldest.
    protector.touched(DeviceId(1), touch(60, Duration::ZERO));
    assert!(expected(&[1, 2, 3, 60]) && !protected.contains(SectionNo(0)));

    protector.device_left(DeviceId(1));
    protector.touched(third, touch(51, Duration::ZERO));
    assert!(expected(&[51]) && !protected.contains(SectionNo(50)));
    // Its policy releases a refused section: nothing happens.
    for section in 52..55 {
        protector.touched(third, touch(section, Duration::ZERO));
    }
    assert_eq!(protected.len(), 8);
    assert!(expected(&[4, 5, 6, 7, 51, 52, 53, 54]));
}

#[test]
fn devices_of_a_vm_that_shrinks_give_back_what_is_too_much_together() {
    let choice = "lru:share=0.05".parse().expect("a policy");
    let mut protector = Protector::new(&choice, 1_000);
    for section in 0..100_u64 {
        let device = DeviceId(u32::try_from(1 + section / 25).expect("few"));
        protector.touched(device, touch(section, Duration::ZERO));
    }
    assert_eq!(protector.protected().len(), 100);
    protector.resized(500);
    assert_eq!(protector.protected().len(), 50);
    let held = |protector: &Protector| -> u64 {
        let reports: Vec<_> = protector.reports().collect();
        reports.iter().map(|(_, it)| it.protected_sections).sum()
    };
    assert_eq!(held(&protector), 50);
    protector.resized(9);
    assert_eq!((protector.protected().len(), held(&protector)), (0, 0));
}

#[test]
fn dropped_sections_never_grow_fewer_when_devices_and_policies_go() {
    let choice = "lru:share=0.05".parse().expect("a policy");
    let mut protector = Protector::new(&choice, 80);
    for section in 0..10 {
        protector.touched(DeviceId(1), touch(section, Duration::ZERO));
    }
    assert_eq!(protector.dropped_sections(), 6);
    protector.device_left(DeviceId(1));
    assert_eq!(protector.dropped_sections(), 6);
    for section in 0..7 {
        protector.touched(DeviceId(2), touch(section, Duration::ZERO));
    }
    assert_eq!(protector.dropped_sections(), 9);
    protector.choose(&PolicyChoice::None);
    assert_eq!(protector.dropped_sections(), 9);
}

#[test]
fn times_are_fixed_where_the_evictors_are_long_enough_and_follow_it_elsewhere_unless_it_is_said() {
    let beside = |choice: &str, times: &str| {
        let choice: PolicyChoice = choice.parse().expect("a policy");
        let times = times.parse().expect("times");
        choice.beside(&times).to_string()
    };
    assert_eq!(beside("adp", "quick"), "adp:follow=1");
    // A protected section is Cold in time, and one touch makes it Cool: two minutes later it may be taken.
    assert_eq!(beside("adp", "paper"), "adp:follow=1");
    // A scan after 180 s comes at 200 s at the latest.
    assert_eq!(beside("adp", "quick:cool=200s"), "adp:follow=0");
    assert_eq!(beside("adp", "paper:cool=200s"), "adp:follow=0");
    assert_eq!(beside("adp", "quick:cool=199s"), "adp:follow=1");
    let soon = "adp:promote-after=100s,demote-after=10s";
    assert_eq!(beside(soon, "quick:cool=120s"), format!("{soon},follow=0"));
    assert_eq!(beside("adp:follow=4", "paper:cool=200s"), "adp:follow=4");
    assert_eq!(beside("adp:follow=auto", "paper:cool=200s"), "adp:follow=0");
    assert_eq!(beside("lru", "quick"), "lru");
    let wrong = "adp:follow=often".parse::<PolicyChoice>();
    assert!(wrong.is_err_and(|error| error.to_string().contains("auto")));
}

#[test]
fn protector_beside_an_evictor_that_comes_early_learns_from_it_and_beside_another_does_not() {
    let age_beside = |times: &str| {
        let mut protector = Protector::new(&"adp".parse().expect("a policy"), 1_000);
        protector.set_times(times.parse().expect("times"));
        // Sections are evicted 30 s after their touch, again and again.
        for second in 0..600 {
            let now = Duration::from_secs(second);
            protector.touched(DeviceId(1), touch(second, now));
            if let Some(old) = second.checked_sub(30) {
                protector.fate(SectionNo(old), Fate::Evicted, now);
            }
            protector.passed(now);
        }
        protector.promotion_age()
    };
    assert!(age_beside("quick") < Duration::from_secs(40));
    assert_eq!(age_beside("paper:cool=200s"), Duration::from_secs(180));
}
