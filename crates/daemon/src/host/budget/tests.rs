// SPDX-License-Identifier: Apache-2.0
//! The budget with VMs that are only figures: they evict to their limit at once, and fill up to it.

use super::*;
use crate::{
    budget::{BudgetSetting, CeilingChange, WaterState},
    control::ErrorKind,
    settings::{GivenSettings, RunSettings, Settings},
};
use pagetide_policy::{
    budget::{Eviction, Heat},
    sets::Level,
};
use pagetide_report::size::ByteSize;
use pagetide_swap::HostShare;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const MIB: u64 = 1 << 20;

/// A VM of figures.
struct Figures {
    ram: u64,
    resident: AtomicU64,
    /// Of the resident memory.
    cold: AtomicU64,
    seat: Arc<VmSeat>,
    enforced: AtomicU64,
    eviction: Eviction,
}

impl Figures {
    fn new(seat: &Seat, ram_mib: u64, cold_mib: u64) -> Arc<Self> {
        Arc::new(Self {
            ram: ram_mib * MIB,
            resident: AtomicU64::new(ram_mib * MIB),
            cold: AtomicU64::new(cold_mib * MIB),
            seat: seat.share(),
            enforced: AtomicU64::new(0),
            eviction: Eviction::Possible,
        })
    }

    /// One that waits to be recovered.
    fn waiting(seat: &Seat, ram_mib: u64) -> Arc<Self> {
        Arc::new(Self {
            ram: ram_mib * MIB,
            resident: AtomicU64::new(ram_mib * MIB),
            cold: AtomicU64::new(0),
            seat: seat.share(),
            enforced: AtomicU64::new(0),
            eviction: Eviction::Blocked,
        })
    }

    fn target_mib(&self) -> u64 {
        self.seat.standing().target.expect("a target").0 / MIB
    }
}

impl Governed for Figures {
    fn measure(&self) -> Option<VmReport> {
        let resident = Bytes(self.resident.load(Relaxed));
        let cold = Bytes(self.cold.load(Relaxed)).min(resident);
        let heat = Heat::default()
            .with(Level::Hot, resident.less(cold))
            .with(Level::Cold, cold);
        Some(VmReport {
            ram: Bytes(self.ram),
            resident,
            heat,
            eviction: self.eviction,
            ..VmReport::default()
        })
    }

    fn enforce(&self) {
        self.enforced.fetch_add(1, Relaxed);
        if self.eviction == Eviction::Possible
            && let Some(limit) = self.seat.limit(None)
        {
            let over = self.resident.load(Relaxed).saturating_sub(limit);
            self.resident.fetch_sub(over, Relaxed);
            let cold = self.cold.load(Relaxed);
            self.cold.fetch_sub(over.min(cold), Relaxed);
        }
    }
}

/// A host of 16 GiB, and a daemon's state directory on it.
struct Rig {
    root: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let rig = Self {
            root: tempfile::tempdir().unwrap(),
        };
        rig.put("proc/meminfo", "MemTotal:  16777216 kB\n");
        rig.put("proc/self/cgroup", "0::/daemon\n");
        let mounts = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        rig.put("proc/self/mountinfo", mounts);
        std::fs::create_dir(rig.root.path().join("state")).unwrap();
        rig
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn try_open(&self, host_budget: &str, known: &[&str]) -> Result<Arc<Budget>, ControlError> {
        let flags = GivenSettings {
            host_budget: Some(host_budget.parse().unwrap()),
            budget_lock: Some(self.root.path().join("run/budget.lock")),
            ..GivenSettings::default()
        };
        let settings = RunSettings::merge(flags, GivenSettings::default());
        let needed = match known {
            [] => Needed::ByNobody,
            _ => Needed::BySomebody,
        };
        let known: Vec<String> = known.iter().map(|name| (*name).to_owned()).collect();
        let groups = Groups::below(self.root.path());
        Budget::open_with(
            &settings,
            &self.root.path().join("state"),
            &known,
            needed,
            groups,
            LOCK_WAIT,
        )
    }

    fn open(&self, host_budget: &str) -> Arc<Budget> {
        self.try_open(host_budget, &[]).unwrap()
    }
}

fn size(mib: u64) -> BudgetBody {
    BudgetBody {
        budget_bytes: Some(mib * MIB),
        ..BudgetBody::default()
    }
}

fn newcomer(name: &str, ram_mib: u64) -> Newcomer<'_> {
    Newcomer {
        name,
        pid: 77,
        ram_bytes: ram_mib * MIB,
        resident_bytes: ram_mib * MIB,
        hugetlb_bytes: 0,
    }
}

fn floor(mib: u64) -> ShareChange {
    ShareChange {
        floor_bytes: Some(mib * MIB),
        ..ShareChange::default()
    }
}

/// A VM of which all is resident, and `cold_mib` cold.
fn served(budget: &Arc<Budget>, name: &str, ram_mib: u64, cold_mib: u64) -> Arc<Figures> {
    let seat = budget
        .admit(&newcomer(name, ram_mib), &ShareChange::default())
        .unwrap();
    let vm = Figures::new(&seat, ram_mib, cold_mib);
    let weak: Weak<Figures> = Arc::downgrade(&vm);
    seat.keep(weak);
    vm
}

/// For a change that is refused.
fn unreached(share: VmShare) {
    panic!("{share:?} was put in force");
}

fn refused<T>(outcome: Result<T, ControlError>, part: &str) {
    let Err(error) = outcome else {
        panic!("not refused: {part}");
    };
    assert_eq!(error.kind, ErrorKind::WrongUse, "{error}");
    assert!(error.message.contains(part), "{part}: {error}");
}

#[test]
fn budget_set_by_command_is_put_in_force_as_targets_whose_sum_holds() {
    let rig = Rig::new();
    let budget = rig.open("off");
    let (idle, busy) = (
        served(&budget, "idle", 1000, 900),
        served(&budget, "busy", 1000, 0),
    );
    assert_eq!(budget.report().used_bytes, 2000 * MIB);
    assert!(idle.seat.limit(None).is_none());
    budget.set(&size(1500)).unwrap();
    // Nothing is known of what they need: all but the high watermark, in equal parts.
    assert_eq!((idle.target_mib(), busy.target_mib()), (720, 720));
    assert_eq!(idle.resident.load(Relaxed), 720 * MIB);
    let report = budget.report();
    assert_eq!(report.budget_bytes, Some(1500 * MIB));
    assert_eq!(report.over_bytes, Some(0));
    assert!(report.used_bytes <= 1500 * MIB - report.low_bytes.unwrap());
    let told: Vec<_> = report.vms.iter().map(|vm| vm.name.as_str()).collect();
    assert_eq!(told, ["busy", "idle"]);
    assert_eq!(report.vms[1].target_bytes, Some(idle.target_mib() * MIB));
    assert_eq!(report.vms[0].reason.as_deref(), Some("joined"));
    budget.lift().unwrap();
    assert!(idle.seat.limit(None).is_none() && busy.seat.limit(None).is_none());
    assert_eq!(budget.report().budget_bytes, None);
}

#[test]
fn refaults_of_the_busy_vm_move_memory_from_the_idle_one_while_the_sum_holds() {
    let rig = Rig::new();
    let budget = rig.open("1G");
    let (idle, busy) = (
        served(&budget, "idle", 800, 0),
        served(&budget, "busy", 800, 0),
    );
    budget.step();
    let before = busy.target_mib();
    assert!(before < 700, "{before}");
    idle.cold.store(700 * MIB, Relaxed);
    for second in 1..=60 {
        // Sections evicted one after another and needed again.
        for section in 0..50 {
            busy.seat.evicted(pagetide_addr::SectionNo(section), 512);
        }
        for section in 0..50 {
            busy.seat.refilled(pagetide_addr::SectionNo(section), 512);
        }
        budget.step_at(Duration::from_secs(second));
        let sum = idle.target_mib() + busy.target_mib();
        assert!(sum <= 1024, "{sum} in second {second}");
        let filled = busy
            .seat
            .limit(None)
            .map_or(busy.ram, |limit| limit.min(busy.ram));
        busy.resident.store(filled, Relaxed);
    }
    assert!(busy.target_mib() > before + 100, "{}", busy.target_mib());
    assert!(idle.target_mib() < 500, "{}", idle.target_mib());
    let report = budget.report();
    let told = report.vms[0].reason.as_deref();
    assert_eq!(
        told,
        Some(reason(pagetide_policy::budget::Reason::Refaults).as_str())
    );
}

#[test]
fn what_was_set_is_in_force_again_after_a_restart_and_settings_that_change_win() {
    let rig = Rig::new();
    let first = rig.open("off");
    let vm = served(&first, "a", 1000, 0);
    let change = ShareChange {
        weight: Some(200),
        ceiling_bytes: CeilingChange::Set(600 * MIB),
        ..floor(100)
    };
    let mut put = VmShare::default();
    first
        .change_share("a", &change, |share| put = share)
        .unwrap();
    assert_eq!(
        (put.ceiling, put.weight.get()),
        (Some(Bytes::mib(600)), 200)
    );
    let marks = BudgetBody {
        low: Some("5%".parse().unwrap()),
        high: Some("100M".parse().unwrap()),
        pace_bytes: Some(MIB),
        ..size(900)
    };
    first.set(&marks).unwrap();
    assert!(vm.target_mib() <= 600);
    // As if it had been killed: nobody leaves.
    drop(first);
    let second = rig.try_open("off", &["a", "gone"]).unwrap();
    let seat = second.welcome_back(&newcomer("a", 1000), Some(3));
    let share = seat.share().standing().share;
    assert_eq!((share.weight.get(), share.floor), (200, Bytes::mib(100)));
    assert_eq!(
        share.ceiling,
        Some(Bytes::mib(600)),
        "the file's, which was written first"
    );
    let report = second.report();
    assert_eq!(report.budget_bytes, Some(900 * MIB));
    assert_eq!(report.low_bytes, Some(45 * MIB));
    assert_eq!(report.high_bytes, Some(100 * MIB));
    assert_eq!(report.pace_bytes, Some(MIB));
    // Its recovery has failed: what was set for it stays.
    drop(seat);
    drop(second);
    let third = rig.try_open("2G", &["a"]).unwrap();
    assert_eq!(third.report().budget_bytes, Some(2048 * MIB));
    assert!(lock(&third.state).saved.vms.contains_key("a"));
    drop(third);
    let fourth = rig.try_open("2G", &[]).unwrap();
    assert!(lock(&fourth.state).saved.vms.is_empty(), "its pool is gone");
}

#[test]
fn vm_that_waits_to_be_recovered_counts_as_memory_that_stays_until_it_is_served_or_gone() {
    let rig = Rig::new();
    let budget = rig.try_open("1G", &["waits"]).unwrap();
    let seat = budget.welcome_back(&newcomer("waits", 600), None);
    let waiting = Figures::waiting(&seat, 600);
    let weak: Weak<Figures> = Arc::downgrade(&waiting);
    seat.watch(weak);
    let other = served(&budget, "other", 800, 0);
    for second in 0..10 {
        budget.step_at(Duration::from_secs(second));
    }
    assert!(other.target_mib() <= 1024 - 600, "{}", other.target_mib());
    let report = budget.report();
    assert_eq!(
        report.vms[1].resident_bytes,
        600 * MIB,
        "nothing of it is evicted"
    );
    assert_eq!(
        report.used_bytes,
        600 * MIB + other.resident.load(Relaxed),
        "both count"
    );
    // Its recovery succeeds later on: it gives what it does not need.
    let vm = Figures::new(&seat, 600, 500);
    let weak: Weak<Figures> = Arc::downgrade(&vm);
    seat.keep(weak);
    drop(waiting);
    budget.set(&size(700)).unwrap();
    for second in 10..20 {
        budget.step_at(Duration::from_secs(second));
    }
    assert!(vm.resident.load(Relaxed) < 600 * MIB);
    assert_eq!(budget.report().vms.len(), 2);
    // Another one's VMM ends while it waits.
    let seat = budget.welcome_back(&newcomer("gone", 100), None);
    assert_eq!(budget.report().vms.len(), 3);
    drop(seat);
    assert_eq!(budget.report().vms.len(), 2);
}

#[test]
fn nothing_is_evicted_for_the_sake_of_others_once_the_daemon_ends() {
    let rig = Rig::new();
    let budget = rig.open("1G");
    let (first, last) = (
        served(&budget, "first", 800, 0),
        served(&budget, "last", 800, 0),
    );
    budget.set(&size(900)).unwrap();
    let kept = last.resident.load(Relaxed);
    assert!(kept < 800 * MIB);
    budget.stop();
    assert!(first.seat.limit(None).is_none() && last.seat.limit(None).is_none());
    // All of the first one comes back.
    first.resident.store(800 * MIB, Relaxed);
    budget.step_at(Duration::from_secs(9));
    assert_eq!(last.resident.load(Relaxed), kept);
    assert_eq!(last.seat.pages_first(1, kept / 4096), 0);
    assert!(
        budget.file.read().unwrap().unwrap().plan.is_some(),
        "for the next daemon"
    );
}

#[test]
fn group_of_a_vmm_must_allow_the_ram_that_was_plugged_in_since_the_vm_came() {
    let rig = Rig::new();
    rig.put("proc/77/cgroup", "0::/vms\n");
    rig.put("sys/fs/cgroup/vms/memory.max", "2147483648\n");
    rig.put("sys/fs/cgroup/vms/memory.current", "1\n");
    let budget = rig.open("off");
    let seat = budget
        .admit(&newcomer("a", 1000), &ShareChange::default())
        .unwrap();
    budget.set(&size(4000)).unwrap();
    let grown = Figures::new(&seat, 3000, 0);
    let weak: Weak<Figures> = Arc::downgrade(&grown);
    seat.keep(weak);
    refused(budget.set(&size(4001)), "lets it have 2.9 GiB");
    budget.set(&size(1500)).unwrap();
}

#[test]
fn live_off_outlives_the_daemon_though_its_settings_name_a_budget() {
    let rig = Rig::new();
    let first = rig.open("1G");
    first.lift().unwrap();
    drop(first);
    assert_eq!(rig.open("1G").report().budget_bytes, None);
    assert_eq!(rig.open("2G").report().budget_bytes, Some(2048 * MIB));
}

#[test]
fn second_daemon_with_a_budget_is_refused_and_one_without_is_not() {
    let rig = Rig::new();
    let (one, other) = (rig.open("off"), rig.open("off"));
    one.set(&size(1000)).unwrap();
    let error = other.set(&size(500)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Refused);
    assert!(error.message.contains("another pagetide"), "{error}");
    assert_eq!(other.report().budget_bytes, None);
    one.lift().unwrap();
    other.set(&size(500)).unwrap();
}

#[test]
fn budget_that_cannot_be_is_refused_and_changes_nothing() {
    let rig = Rig::new();
    let budget = rig.open("off");
    let none = budget.set(&BudgetBody {
        low: Some("3%".parse().unwrap()),
        ..BudgetBody::default()
    });
    assert_eq!(none.unwrap_err().kind, ErrorKind::Refused);
    refused(
        budget.set(&size(16 << 10 | 1)),
        "more than the host's memory of 16 GiB",
    );
    let seat = budget.admit(&newcomer("a", 2000), &floor(1000)).unwrap();
    refused(
        budget.set(&size(500)),
        "the floors of its 1 VMs add up to 1000 MiB",
    );
    assert_eq!(budget.report().budget_bytes, None);
    budget.set(&size(4000)).unwrap();
    let before = (budget.report(), budget.file.read().unwrap());
    refused(budget.set(&size(900)), "the floors of its 1 VMs");
    let marks = |min: &str, low: &str, high: &str| BudgetBody {
        min: Some(min.parse().unwrap()),
        low: Some(low.parse().unwrap()),
        high: Some(high.parse().unwrap()),
        ..BudgetBody::default()
    };
    refused(budget.set(&marks("3%", "2%", "4%")), "out of order");
    refused(budget.set(&marks("0%", "2%", "4%")), "out of order");
    refused(
        budget.set(&marks("1%", "2%", "60%")),
        "more than half the budget",
    );
    rig.put("sys/fs/cgroup/daemon/memory.max", "1073741824\n");
    rig.put("sys/fs/cgroup/daemon/memory.current", "1\n");
    refused(budget.set(&size(4001)), "limit of 1 GiB of a memory cgroup");
    std::fs::remove_file(rig.root.path().join("sys/fs/cgroup/daemon/memory.max")).unwrap();
    rig.put("proc/77/cgroup", "0::/vms\n");
    rig.put("sys/fs/cgroup/vms/memory.max", "1073741824\n");
    rig.put("sys/fs/cgroup/vms/memory.current", "1\n");
    refused(
        budget.set(&size(4001)),
        "the memory cgroup /sys/fs/cgroup/vms of the VMM of 'a'",
    );
    assert_eq!((budget.report(), budget.file.read().unwrap()), before);
    drop(seat);
    assert!(budget.report().vms.is_empty());
}

#[test]
fn share_that_cannot_be_is_refused_and_changes_nothing() {
    let rig = Rig::new();
    let budget = rig.open("1G");
    let seat = budget.admit(&newcomer("a", 2000), &floor(100)).unwrap();
    let standing = seat.share().standing();
    let before = (budget.report(), budget.file.read().unwrap());
    let weight = |weight| ShareChange {
        weight: Some(weight),
        ..ShareChange::default()
    };
    let ceiling = |mib| ShareChange {
        ceiling_bytes: CeilingChange::Set(mib * MIB),
        ..ShareChange::default()
    };
    for (change, part) in [
        (weight(0), "weight 0 is not possible"),
        (weight(10_001), "use 1 to 10000"),
        (
            floor(2001),
            "the floor of VM 'a', 1.9 GiB, is more than its RAM",
        ),
        (
            floor(15),
            "the floor of VM 'a', 15 MiB, is less than 16 MiB",
        ),
        (floor(1024), "the floors of its 1 VMs"),
        (
            ceiling(99),
            "the ceiling of VM 'a', 99 MiB, is less than its floor of 100 MiB",
        ),
    ] {
        refused(budget.change_share("a", &change, unreached), part);
    }
    let nobody = budget.change_share("b", &weight(1), unreached).unwrap_err();
    assert_eq!(nobody.kind, ErrorKind::NotFound);
    refused(
        budget.admit(&newcomer("b", 2000), &floor(1000)).map(drop),
        "the floors of its 2 VMs",
    );
    refused(
        budget.admit(&newcomer("b", 50), &floor(60)).map(drop),
        "VM 'b'",
    );
    assert_eq!(seat.share().standing(), standing);
    assert_eq!((budget.report(), budget.file.read().unwrap()), before);
    budget.change_share("a", &weight(50), drop).unwrap();
    assert_eq!(budget.report().vms[0].weight, 50);
    // All its RAM, for a VM that is smaller than the least floor.
    let tiny = budget.admit(&newcomer("tiny", 8), &ShareChange::default());
    assert_eq!(tiny.unwrap().share().standing().share.floor, Bytes::mib(8));
}

#[test]
fn start_with_a_budget_that_cannot_be_is_refused_with_what_helps() {
    let rig = Rig::new();
    refused(rig.try_open("17G", &[]).map(drop), "--host-budget off");
    let holder = rig.open("1G");
    assert_eq!(
        BudgetSetting::Size(ByteSize(1 << 30)),
        "1G".parse().unwrap()
    );
    holder.lift().unwrap();
}

#[test]
fn change_that_cannot_be_written_is_not_in_force() {
    let rig = Rig::new();
    let budget = rig.open("1G");
    let seat = budget.admit(&newcomer("a", 2000), &floor(100)).unwrap();
    std::fs::create_dir(rig.root.path().join("state/budget.json.new")).unwrap();
    let before = budget.report();
    for outcome in [
        budget.set(&size(2000)),
        budget.lift(),
        budget.change_share("a", &floor(200), unreached),
        budget.admit(&newcomer("b", 100), &floor(50)).map(drop),
    ] {
        let error = outcome.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Failed);
        assert!(error.message.contains("nothing has changed"), "{error}");
    }
    assert_eq!(budget.report(), before);
    drop(seat);
}

#[test]
fn vm_whose_floor_is_not_possible_any_more_comes_back_with_the_least_one() {
    let rig = Rig::new();
    let first = rig.open("4G");
    let seat = first.admit(&newcomer("a", 2000), &floor(1500)).unwrap();
    let vm = Figures::new(&seat, 2000, 0);
    let weak: Weak<Figures> = Arc::downgrade(&vm);
    seat.keep(weak);
    drop(first);
    // RAM was unplugged while no daemon ran.
    let second = rig.try_open("4G", &["a"]).unwrap();
    let seat = second.welcome_back(&newcomer("a", 1000), None);
    assert_eq!(seat.share().standing().share.floor, Bytes::mib(16));
    assert_eq!(lock(&second.state).saved.vms["a"].floor, Bytes::mib(1500));
}

#[test]
fn thread_steps_by_itself_when_a_vm_comes_and_ends_when_told() {
    let rig = Rig::new();
    let budget = rig.open("1G");
    budget.start().unwrap();
    let vm = served(&budget, "a", 2000, 1500);
    let begin = Instant::now();
    while vm.resident.load(Relaxed) > 1024 * MIB {
        assert!(begin.elapsed() < Duration::from_secs(60), "no target comes");
        std::thread::yield_now();
    }
    assert!(vm.enforced.load(Relaxed) > 0);
    budget.leave("a");
    assert!(budget.report().vms.is_empty());
    budget.stop();
    while Arc::strong_count(&budget) > 1 {
        assert!(
            begin.elapsed() < Duration::from_secs(60),
            "the thread stays"
        );
        std::thread::yield_now();
    }
}

#[test]
fn vms_are_served_without_a_budget_that_is_not_possible_and_it_comes_when_it_is() {
    let rig = Rig::new();
    let first = rig.open("off");
    first.set(&size(2000)).unwrap();
    let seat = first.admit(&newcomer("a", 1000), &floor(100)).unwrap();
    let vm = Figures::new(&seat, 1000, 0);
    let weak: Weak<Figures> = Arc::downgrade(&vm);
    seat.keep(weak);
    drop(first);
    // Without VMs a start is refused, and the way out is one.
    rig.put("proc/meminfo", "MemTotal:  1048576 kB\n");
    refused(rig.try_open("off", &[]).map(drop), "budget.json");
    let second = rig.try_open("off", &["a"]).unwrap();
    let back = second.welcome_back(&newcomer("a", 1000), None);
    assert_eq!(back.share().standing().share.floor, Bytes::mib(100));
    assert_eq!(second.report().budget_bytes, None);
    assert!(second.try_again(), "there is something to try");
    assert_eq!(second.report().budget_bytes, None);
    rig.put("proc/meminfo", "MemTotal:  16777216 kB\n");
    assert!(second.try_again());
    assert_eq!(second.report().budget_bytes, Some(2000 * MIB));
    assert!(!second.try_again());
    drop(back);
}

#[test]
fn file_that_cannot_be_read_is_kept_and_keeps_no_vm_from_being_served() {
    let rig = Rig::new();
    rig.put("state/budget.json", "{");
    let error = rig.try_open("1G", &[]).map(drop).unwrap_err();
    assert!(error.message.contains("budget.json"), "{error}");
    let budget = rig.try_open("1G", &["a"]).unwrap();
    assert_eq!(budget.report().budget_bytes, Some(1 << 30));
    let aside = rig.root.path().join("state/budget.json.unreadable");
    assert_eq!(std::fs::read(aside).unwrap(), b"{");
}

#[test]
fn budget_is_raised_as_far_as_the_host_allows_now() {
    let rig = Rig::new();
    rig.put("proc/meminfo", "MemTotal:  2097152 kB\n");
    let budget = rig.open("1G");
    refused(budget.set(&size(3000)), "");
    rig.put("proc/meminfo", "MemTotal:  16777216 kB\n");
    budget.set(&size(3000)).unwrap();
    assert_eq!(budget.report().budget_bytes, Some(3000 * MIB));
    budget.set(&size(4000)).unwrap();
}

#[test]
fn vm_that_had_no_room_under_the_budget_comes_when_there_is_some() {
    let rig = Rig::new();
    let first = rig.open("4G");
    let seats: Vec<_> = ["a", "b"]
        .map(|name| first.admit(&newcomer(name, 1000), &floor(900)).unwrap())
        .into();
    let vms = ["a", "b"].map(String::from);
    for (seat, name) in seats.into_iter().zip(&vms) {
        let vm = Figures::new(&seat, 1000, 0);
        let weak: Weak<Figures> = Arc::downgrade(&vm);
        seat.keep(weak);
        assert!(first.report().vms.iter().any(|vm| vm.name == *name));
    }
    drop(first);
    let second = rig.try_open("24M", &["a", "b"]).unwrap();
    let back = vms
        .each_ref()
        .map(|name| second.welcome_back(&newcomer(name, 1000), None));
    let under = |budget: &Budget| {
        let state = lock(&budget.state);
        let force = state.force.as_ref().unwrap();
        let members = state.members.values();
        members
            .filter(|member| force.budget.vm(member.id).is_some())
            .count()
    };
    assert_eq!(under(&second), 1);
    second.set(&size(4096)).unwrap();
    assert_eq!(under(&second), 2);
    drop(back);
}

#[test]
fn vm_in_huge_pages_that_comes_with_a_restart_stays_apart_from_the_budget() {
    let rig = Rig::new();
    let huge = Newcomer {
        hugetlb_bytes: 4096 * MIB,
        ..newcomer("huge", 4096)
    };
    // The settings have got a budget meanwhile.
    let budget = rig.try_open("1G", &["huge"]).unwrap();
    let seat = budget.welcome_back(&huge, None);
    let vm = Figures::new(&seat, 4096, 4096);
    let weak: Weak<Figures> = Arc::downgrade(&vm);
    seat.keep(weak);
    let other = served(&budget, "other", 512, 256);
    for second in 1..20 {
        budget.step_at(Duration::from_secs(second));
    }
    assert_eq!(vm.seat.standing().target, None);
    assert_eq!(
        vm.resident.load(Relaxed),
        4096 * MIB,
        "it is not evicted from"
    );
    assert!(other.seat.standing().target.is_some());
    let report = budget.report();
    assert_eq!(
        (report.over_bytes, report.water),
        (Some(0), Some(WaterState::AboveHigh)),
        "{report:?}"
    );
    // Nothing that is set is refused for its sake.
    budget.set(&size(2048)).unwrap();
    budget
        .change_share("huge", &ShareChange::default(), |_| {})
        .unwrap();
    budget.step_at(Duration::from_secs(20));
    assert_eq!(vm.seat.standing().target, None);
}

#[test]
fn vm_in_huge_pages_and_a_budget_exclude_each_other() {
    let rig = Rig::new();
    let budget = rig.open("off");
    let huge = Newcomer {
        hugetlb_bytes: 64 * MIB,
        ..newcomer("huge", 64)
    };
    let seat = budget.admit(&huge, &ShareChange::default()).unwrap();
    let refused = budget.set(&size(1500)).unwrap_err();
    assert!(refused.message.contains("hugetlbfs"), "{}", refused.message);
    drop(seat);
    budget.set(&size(1500)).unwrap();
    let refused = budget.admit(&huge, &ShareChange::default());
    assert!(refused.err().unwrap().message.contains("'huge'"));
}
