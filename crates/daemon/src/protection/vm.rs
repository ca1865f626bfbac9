// SPDX-License-Identifier: Apache-2.0
//! [`VmProtection`]: the protector of one VM, with its inputs and actions.
//!
//! It receives accesses only from the feed's thread, which also notifies it of the time. The VM's
//! reclaim thread reports evicted sections and RAM changes; both are queued until the feed's thread
//! comes, because a policy may take longer than reclaim should wait.
//!
//! # Time
//! Policies need times that never run backwards. Records of several engines arrive engine by engine, and
//! a device may write any time. A record's time is therefore clamped between that of the latest event
//! and now.

use super::{minute::Minute, recently::Recently};
use pagetide_addr::{DeviceId, FileRange, PAGE_BYTES, PageNo, PageRange, SECTION_PAGES, SectionNo};
use pagetide_policy::{
    protect::{Fate, PolicyChoice, PolicyReport, ProtectedSections, Protector, Touch},
    set_times::SetTimes,
};
use pagetide_vpri::{DmaMmu, LogRecord, Tenant};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// Most devices of a VM with a policy of their own: twice as many as a large guest has.
pub(crate) const DEVICES_MAX: usize = 64;
/// A device with no record for this long gives its place to another device if all are taken.
const DEVICE_SILENCE: Duration = Duration::from_secs(60);
/// A device with no record for this long is considered removed, and protects nothing any more: a DPU
/// process does not report removals. This is longer than any idle time after which a policy expects a
/// section's next touch; a device that does come back costs no more than a new one.
const DEVICE_GONE: Duration = Duration::from_secs(6 * 3600);
/// Longest access that is accepted: far above any request of a disk or a network interface.
const ACCESS_BYTES_MAX: u32 = 32 << 20;
/// Most evictions queued for the policies: 128 GiB, between two turns a twentieth of a second apart.
const FATES_MAX: usize = 65_536;

/// Bytes of a section.
const SECTION_BYTES: u64 = SECTION_PAGES * PAGE_BYTES;

/// See the module.
pub struct VmProtection {
    mmu: Arc<DmaMmu>,
    /// Who reports the faults of its devices. Absent in a benchmark.
    tenant: Option<Arc<Tenant>>,
    protected: Arc<ProtectedSections>,
    is_active: AtomicBool,
    inner: Mutex<Inner>,
    /// Reported by the reclaim thread, for the policies.
    fates: Mutex<Vec<(SectionNo, Fate)>>,
    /// The current RAM, if it has changed.
    ram: Mutex<Option<Vec<PageRange>>>,
    counts: Counts,
}

/// Counts of records and pages since the start.
#[derive(Default)]
struct Counts {
    taken: AtomicU64,
    refused: AtomicU64,
}

/// Records of a device in the log.
#[derive(Default, Clone, Copy)]
struct DeviceTally {
    records: u64,
    at: Duration,
}

struct Inner {
    protector: Protector,
    recently: Recently,
    heard: BTreeMap<DeviceId, DeviceTally>,
    at: Duration,
    ram: Vec<PageRange>,
    minute: Minute,
}

/// One device's share of a [`ProtectionReport`].
pub struct DeviceProtection {
    /// The device.
    pub device: DeviceId,
    /// Records of its accesses so far.
    pub records: u64,
    /// What its policy says.
    pub policy: PolicyReport,
}

/// State and counters of a VM's protection.
pub struct ProtectionReport {
    /// The policy, in text form.
    pub policy: String,
    /// Sections that are protected now.
    pub protected_sections: u64,
    /// Since the start, including devices and policies that no longer exist.
    pub dropped_sections: u64,
    /// Pages evicted although they were protected.
    pub evicted_pages: u64,
    /// By device.
    pub devices: Vec<DeviceProtection>,
    /// Records of accesses that were used.
    pub taken_records: u64,
    /// Records that named memory that is not the VM's, or a device too many.
    pub refused_records: u64,
    /// How long a device leaves a section alone before it is protected, by a policy that waits; in ms.
    pub promote_after_ms: u64,
    /// I/O page faults of the last whole minute.
    pub faults_a_minute: u64,
    /// I/O page faults in all.
    pub faults: u64,
}

impl VmProtection {
    /// The protection of a VM whose DMA domains are those of `mmu` and whose RAM is `ram`. Nothing is
    /// protected yet.
    pub fn new(
        choice: &PolicyChoice,
        mmu: Arc<DmaMmu>,
        ram: Vec<PageRange>,
        tenant: Option<Arc<Tenant>>,
    ) -> Self {
        let protector = Protector::new(choice, sections_of(&ram));
        let before = tenant.as_ref().map_or(0, |it| it.absent_faults());
        Self {
            mmu,
            tenant,
            protected: Arc::clone(protector.protected()),
            is_active: AtomicBool::new(*choice != PolicyChoice::None),
            inner: Mutex::new(Inner {
                protector,
                recently: Recently::default(),
                heard: BTreeMap::new(),
                at: Duration::ZERO,
                ram,
                minute: Minute::beginning_at(before),
            }),
            fates: Mutex::default(),
            ram: Mutex::default(),
            counts: Counts::default(),
        }
    }

    /// The same beside an evictor with these times.
    pub(crate) fn beside(self, times: SetTimes) -> Self {
        self.lock().protector.set_times(times);
        self
    }

    /// The protected sections, for the evictor.
    pub(crate) fn protected(&self) -> &Arc<ProtectedSections> {
        &self.protected
    }

    /// True if a policy needs accesses.
    pub(crate) fn is_active(&self) -> bool {
        self.is_active.load(Relaxed)
    }

    /// The DMA domains whose accesses it needs.
    pub(crate) fn mmu(&self) -> &Arc<DmaMmu> {
        &self.mmu
    }

    /// End of the VM's last RAM, in bytes: the range of addresses.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let inner = self.lock();
        let ends = inner.ram.iter().map(|part| part.end.byte_offset());
        ends.max().unwrap_or(0)
    }

    /// Switches to another policy; forgets all state.
    pub(crate) fn choose(&self, choice: &PolicyChoice) {
        let mut inner = self.lock();
        inner.protector.choose(choice);
        inner.recently.forget();
        inner.heard.clear();
        self.is_active.store(*choice != PolicyChoice::None, Relaxed);
    }

    /// The evictor has evicted pages of `section`.
    pub(crate) fn evicted(&self, section: SectionNo) {
        let mut fates = self.fates.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_active() && fates.len() < FATES_MAX {
            fates.push((section, Fate::Evicted));
        }
    }

    /// RAM was plugged or unplugged: it is `ram` now.
    pub fn ram_changed(&self, ram: Vec<PageRange>) {
        *self.ram.lock().unwrap_or_else(PoisonError::into_inner) = Some(ram);
    }

    /// A device was removed. Later records of it create it again.
    pub(crate) fn device_left(&self, device: DeviceId) {
        self.lock().release(device);
    }

    /// All known devices were removed, or have other numbers now.
    pub(crate) fn all_devices_left(&self) {
        let mut inner = self.lock();
        let devices: Vec<_> = inner.heard.keys().copied().collect();
        for device in devices {
            inner.release(device);
        }
    }

    /// A guard to hold over consecutive records of this VM.
    pub(crate) fn listen(&self) -> Listening<'_> {
        Listening {
            inner: self.lock(),
            protection: self,
            taken: 0,
            refused: 0,
        }
    }

    /// Passes events other than accesses to the policies.
    pub(crate) fn hear_fates(&self, now: Duration) {
        let mut inner = self.lock();
        let now = inner.step(now);
        let fates = std::mem::take(&mut *self.fates.lock().unwrap_or_else(PoisonError::into_inner));
        let faulted = self.tenant.iter().flat_map(|tenant| {
            let next = || tenant.next_absent_section();
            std::iter::from_fn(next).take(FATES_MAX)
        });
        let faulted = faulted.map(|section| (section, Fate::Faulted));
        for (section, fate) in fates.into_iter().chain(faulted) {
            inner.protector.fate(section, fate, now);
        }
        let ram = self
            .ram
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(ram) = ram {
            inner.follow_ram(ram, now);
        }
    }

    /// A second has passed.
    pub(crate) fn second_ends(&self, now: Duration) {
        let mut inner = self.lock();
        let now = inner.step(now);
        if self.is_active() {
            inner.protector.passed(now);
        }
        inner.release_the_silent(now);
        if let Some(tenant) = &self.tenant {
            inner.minute.second_ends(tenant.absent_faults());
        }
    }

    /// A snapshot of the state.
    pub fn report(&self) -> ProtectionReport {
        let inner = self.lock();
        let device = |(device, policy)| DeviceProtection {
            device,
            records: inner.heard.get(&device).map_or(0, |heard| heard.records),
            policy,
        };
        let reports = inner.protector.reports();
        ProtectionReport {
            policy: inner.protector.choice().to_string(),
            protected_sections: self.protected.len(),
            dropped_sections: inner.protector.dropped_sections(),
            evicted_pages: self.protected.taken_pages(),
            devices: reports.map(device).collect(),
            taken_records: self.counts.taken.load(Relaxed),
            refused_records: self.counts.refused.load(Relaxed),
            promote_after_ms: u64::try_from(inner.protector.promotion_age().as_millis())
                .unwrap_or(u64::MAX),
            faults_a_minute: inner.minute.total(),
            faults: self.tenant.as_ref().map_or(0, |it| it.absent_faults()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A VM's protection while it receives accesses.
pub(crate) struct Listening<'a> {
    inner: MutexGuard<'a, Inner>,
    protection: &'a VmProtection,
    /// Counted here and added to the totals on drop.
    taken: u64,
    refused: u64,
}

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        let counts = &self.protection.counts;
        counts.taken.fetch_add(self.taken, Relaxed);
        counts.refused.fetch_add(self.refused, Relaxed);
    }
}

/// An accepted access: all of it is in the VM's memory, and its device has a place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Believed {
    /// Its time, never later than now.
    pub(crate) at: Duration,
    /// Its address, in the VM's memory.
    pub(crate) address: u64,
}

impl Listening<'_> {
    /// Handles a device's claim to have touched memory of the VM. The claim is validated both for the
    /// policies and for a recording: `None` if it is impossible or its device is one too many.
    pub(crate) fn record(&mut self, record: &LogRecord, now: Duration) -> Option<Believed> {
        let believed = self.believe(record, now);
        match believed {
            Some(_) => self.taken += 1,
            None => self.refused += 1,
        }
        believed
    }

    fn believe(&mut self, record: &LogRecord, now: Duration) -> Option<Believed> {
        let address = self.address(record)?;
        // A device without a clock writes 0.
        let at = match record.time_ns {
            0 => now,
            time_ns => Duration::from_nanos(time_ns).min(now),
        };
        let told_at = self.inner.step(at);
        if !self.inner.admit(record.device, told_at) {
            return None;
        }
        if self.protection.is_active() {
            for (section, bytes) in touches(address, record.len_bytes) {
                if !self
                    .inner
                    .recently
                    .is_first(record.device, section, told_at)
                {
                    continue;
                }
                let touch = Touch {
                    section,
                    at: told_at,
                    access: record.access,
                    bytes,
                };
                self.inner.protector.touched(record.device, touch);
            }
        }
        Some(Believed { at, address })
    }

    /// Where an access begins in the VM's memory; `None` if part of it is outside, or its length is
    /// invalid.
    fn address(&self, record: &LogRecord) -> Option<u64> {
        let len = record.len_bytes;
        let sound = len > 0 && len <= ACCESS_BYTES_MAX;
        let own = FileRange::covering(record.address, u64::from(len)).filter(|_| sound)?;
        let pages = self.protection.mmu.in_space(record.space, own)?;
        Some(pages.start.byte_offset() + record.address % PAGE_BYTES)
    }
}

/// The sections of an access that begins at `begin`, with the bytes in each.
fn touches(begin: u64, len_bytes: u32) -> impl Iterator<Item = (SectionNo, u64)> {
    let end = begin + u64::from(len_bytes);
    (begin / SECTION_BYTES..end.div_ceil(SECTION_BYTES)).map(move |section| {
        let (from, to) = (section * SECTION_BYTES, (section + 1) * SECTION_BYTES);
        (SectionNo(section), end.min(to) - begin.max(from))
    })
}

impl Inner {
    /// Advances time to `at` unless it is later already; returns the time.
    fn step(&mut self, at: Duration) -> Duration {
        self.at = self.at.max(at);
        self.at
    }

    /// True if the device has or gets a place.
    fn admit(&mut self, device: DeviceId, at: Duration) -> bool {
        if let Some(heard) = self.heard.get_mut(&device) {
            heard.records += 1;
            heard.at = at;
            return true;
        }
        if self.heard.len() >= DEVICES_MAX {
            let longest_ago = self.heard.iter().min_by_key(|(_, heard)| heard.at);
            let silent = longest_ago
                .filter(|(_, heard)| at.saturating_sub(heard.at) >= DEVICE_SILENCE)
                .map(|(device, _)| *device);
            let Some(silent) = silent else {
                return false;
            };
            self.release(silent);
        }
        self.heard.insert(device, DeviceTally { records: 1, at });
        true
    }

    /// Frees the device's place and drops its protection.
    fn release(&mut self, device: DeviceId) {
        self.heard.remove(&device);
        self.recently.forget();
        self.protector.device_left(device);
    }

    fn release_the_silent(&mut self, now: Duration) {
        let is_gone = |heard: &DeviceTally| now.saturating_sub(heard.at) >= DEVICE_GONE;
        let gone: Vec<_> = (self.heard.iter())
            .filter(|(_, heard)| is_gone(heard))
            .map(|(device, _)| *device)
            .collect();
        for device in gone {
            self.release(device);
        }
    }

    fn follow_ram(&mut self, ram: Vec<PageRange>, now: Duration) {
        let is_there = |page: PageNo| ram.iter().any(|part| part.contains(page));
        let gone: Vec<SectionNo> = self
            .ram
            .iter()
            .flat_map(|part| part.sections())
            .filter(|section| !is_there(section.first_page()))
            .collect();
        for section in gone {
            self.protector.fate(section, Fate::Gone, now);
        }
        self.protector.resized(sections_of(&ram));
        self.recently.forget();
        self.ram = ram;
    }
}

/// Number of sections that have a page in `ram`.
fn sections_of(ram: &[PageRange]) -> u64 {
    let mut sections: Vec<SectionNo> = ram.iter().flat_map(|part| part.sections()).collect();
    sections.sort_unstable();
    sections.dedup();
    sections.len() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::Access;
    use pagetide_sys::memory_file::GuestFile;
    use pagetide_vpri::{DomainTable, IoSpace, Service};

    const SECTIONS: u64 = 8;
    const NOW: Duration = Duration::from_secs(1000);

    /// A VM whose RAM is two files: one of 1000 pages, and one with the rest of eight sections.
    struct Rig {
        protection: VmProtection,
        domains: Vec<Arc<dyn IoSpace>>,
    }

    fn pages(from: u64, to: u64) -> PageRange {
        PageRange::new(PageNo(from), PageNo(to))
    }

    impl Rig {
        fn new(policy: &str) -> Self {
            let table = DomainTable::new(1);
            let end = SECTIONS * SECTION_PAGES;
            let parts = [pages(0, 1000), pages(1000, end)].map(|part| {
                let file = GuestFile::new_memfd("part", part.bytes()).unwrap();
                let domain = table.open(file.key().unwrap(), part.bytes());
                (domain.unwrap() as Arc<dyn IoSpace>, part)
            });
            let domains = parts.iter().map(|(domain, _)| Arc::clone(domain)).collect();
            let mmu = Arc::new(DmaMmu::new(parts));
            let choice = policy.parse().unwrap();
            let protection = VmProtection::new(&choice, mmu, vec![pages(0, end)], None);
            Self {
                protection,
                domains,
            }
        }

        fn record(&self, part: usize, address: u64, len_bytes: u32) -> LogRecord {
            LogRecord {
                time_ns: 5,
                device: DeviceId(1),
                space: self.domains[part].id(),
                address,
                len_bytes,
                access: Access::Write,
                service: Service::Block,
            }
        }

        fn hear(&self, record: &LogRecord) {
            self.protection.listen().record(record, NOW);
        }

        fn protected(&self) -> Vec<u64> {
            let sections = 0..SECTIONS;
            let is_protected = |at: &u64| self.protection.protected().contains(SectionNo(*at));
            sections.filter(is_protected).collect()
        }
    }

    #[test]
    fn access_is_heard_of_in_each_section_of_the_vm_that_it_touches() {
        let rig = Rig::new("lru:share=1");
        // Page 23 of the second file is page 1023 of the VM: the last of section 1.
        rig.hear(&rig.record(1, 23 * PAGE_BYTES + 100, 5000));
        assert_eq!(rig.protected(), [1, 2]);
        rig.hear(&rig.record(0, 0, 1));
        assert_eq!(rig.protected(), [0, 1, 2]);
        let record = rig.record(1, 23 * PAGE_BYTES + 100, 5000);
        let believed = rig.protection.listen().record(&record, NOW).unwrap();
        let parts: Vec<_> = touches(believed.address, record.len_bytes).collect();
        assert_eq!(parts, [(SectionNo(1), 3996), (SectionNo(2), 1004)]);
    }

    #[test]
    fn records_that_cannot_be_are_counted_and_protect_nothing() {
        let rig = Rig::new("lru:share=1");
        let end = 1000 * PAGE_BYTES;
        let unknown = LogRecord {
            space: pagetide_addr::DomainId(99),
            ..rig.record(0, 0, 512)
        };
        let wrong = [
            rig.record(0, end, 512),
            rig.record(0, end - 511, 512),
            rig.record(0, u64::MAX, 512),
            rig.record(0, 0, 0),
            rig.record(1, 0, ACCESS_BYTES_MAX + 1),
            unknown,
        ];
        for record in &wrong {
            rig.hear(record);
        }
        let report = rig.protection.report();
        assert_eq!(report.refused_records, wrong.len() as u64);
        assert_eq!((report.taken_records, report.protected_sections), (0, 0));
    }

    #[test]
    fn pages_that_went_although_protected_are_told_whatever_the_policy_is_then() {
        let rig = Rig::new("lru:share=1");
        rig.protection.protected.count_taken(3);
        rig.protection.choose(&PolicyChoice::None);
        assert_eq!(rig.protection.report().evicted_pages, 3);
    }

    #[test]
    fn device_that_claims_to_be_many_gets_no_more_places_and_drives_nobody_out() {
        let rig = Rig::new("lru:share=1");
        rig.hear(&rig.record(0, 0, 512));
        for device in 2..1000 {
            rig.hear(&LogRecord {
                device: DeviceId(device),
                ..rig.record(0, 0, 512)
            });
        }
        let report = rig.protection.report();
        assert_eq!(report.devices.len(), DEVICES_MAX);
        assert_eq!(report.devices[0].device, DeviceId(1));
        assert_eq!(report.refused_records, 999 - DEVICES_MAX as u64);
        // Much later, the device with the oldest record makes room.
        let late = NOW + DEVICE_SILENCE;
        let newcomer = LogRecord {
            device: DeviceId(5000),
            time_ns: u64::MAX,
            ..rig.record(0, 0, 512)
        };
        rig.protection.listen().record(&newcomer, late);
        let report = rig.protection.report();
        assert_eq!(report.devices.len(), DEVICES_MAX);
        assert!(report.devices.iter().any(|d| d.device == DeviceId(5000)));
    }

    #[test]
    fn time_of_a_record_is_never_later_than_now_and_never_runs_back() {
        let rig = Rig::new(
            "adp:protected-max=1,promote-after=10s,demote-after=1s,scan-every=1s,follow=0",
        );
        let at = |time_ns| LogRecord {
            time_ns,
            ..rig.record(0, 0, 512)
        };
        rig.hear(&at(u64::MAX));
        assert_eq!(rig.protection.lock().at, NOW);
        rig.hear(&at(3));
        assert_eq!(rig.protection.lock().at, NOW);
        // The false time made nothing look old.
        rig.protection.second_ends(NOW + Duration::from_secs(5));
        assert!(rig.protected().is_empty());
        rig.protection.second_ends(NOW + Duration::from_secs(11));
        assert_eq!(rig.protected(), [0]);
    }

    #[test]
    fn what_is_recorded_is_believed_as_policies_believe_it_even_without_one() {
        let rig = Rig::new("none");
        let at = |time_ns| LogRecord {
            time_ns,
            ..rig.record(1, 100, 512)
        };
        let hear = |record: &LogRecord| rig.protection.listen().record(record, NOW);
        let address = 1000 * PAGE_BYTES + 100;
        let believed = |at| Some(Believed { at, address });
        assert_eq!(hear(&at(u64::MAX)), believed(NOW));
        assert_eq!(hear(&at(0)), believed(NOW));
        // Earlier than another engine's record, and true: files are sorted later, policies do not
        // receive it.
        assert_eq!(hear(&at(7)), believed(Duration::from_nanos(7)));
        assert_eq!(hear(&rig.record(0, 0, 0)), None);
        assert_eq!(hear(&rig.record(1, 0, ACCESS_BYTES_MAX + 1)), None);
        let many = (0..1000).filter_map(|device| {
            hear(&LogRecord {
                device: DeviceId(device),
                ..at(0)
            })
        });
        assert_eq!(many.count(), DEVICES_MAX);
        assert!(rig.protected().is_empty());
    }

    #[test]
    fn device_that_is_silent_for_hours_protects_nothing_any_more() {
        let rig = Rig::new("lru:share=1");
        rig.hear(&LogRecord {
            time_ns: 0,
            ..rig.record(0, 0, 512)
        });
        rig.protection
            .second_ends(NOW + DEVICE_GONE - Duration::from_secs(1));
        assert_eq!(rig.protected(), [0]);
        rig.protection.second_ends(NOW + DEVICE_GONE);
        assert!(rig.protected().is_empty());
        assert!(rig.protection.report().devices.is_empty());
    }

    #[test]
    fn unplugged_ram_and_devices_that_left_are_protected_no_more() {
        let rig = Rig::new("lru:share=1");
        rig.hear(&rig.record(0, 0, 512));
        rig.hear(&LogRecord {
            device: DeviceId(2),
            ..rig.record(1, 2000 * PAGE_BYTES, 512)
        });
        assert_eq!(rig.protected(), [0, 5]);
        rig.protection
            .ram_changed(vec![pages(0, 2 * SECTION_PAGES)]);
        rig.protection.hear_fates(NOW);
        assert_eq!(rig.protected(), [0]);
        assert_eq!(rig.protection.memory_bytes(), 2 * SECTION_BYTES);
        rig.protection.device_left(DeviceId(1));
        assert!(rig.protected().is_empty());
    }

    #[test]
    fn another_policy_begins_with_nothing_and_none_wants_no_records() {
        let rig = Rig::new("lru:share=1");
        rig.hear(&rig.record(0, 0, 512));
        assert!(rig.protection.is_active());
        rig.protection.choose(&PolicyChoice::None);
        assert!(rig.protected().is_empty());
        assert!(!rig.protection.is_active());
        assert_eq!(rig.protection.report().policy, "none");
        rig.protection.choose(&"lru:share=1".parse().unwrap());
        assert!(rig.protected().is_empty());
        rig.hear(&rig.record(0, 0, 512));
        assert_eq!(rig.protected(), [0]);
    }
}
