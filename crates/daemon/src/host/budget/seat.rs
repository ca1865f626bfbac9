// SPDX-License-Identifier: Apache-2.0
//! [`VmSeat`]: one VM under the budget, where its faults and evictions meet it; [`HostRoom`]: what all of
//! them use up together.
//!
//! The driver decides once a period. In between, fills and evictions of all VMs change one number: how many
//! bytes are free above min. While that suffices, a fill costs one atomic load more than without a budget.
//! Only below it a fill asks the VM's [`Gate`]. Both are corrected by the kernel's count each period, so a
//! count that is lost between two looks does no harm. Where not even min is left, a fill waits until other VMs
//! have evicted.
//!
//! Lock order: `gate`, `workingset` and `state` are taken one at a time, by whoever has a section's lock or
//! the driver's; nothing is called with one of them held.

use super::super::lock::lock;
use pagetide_addr::{PAGE_BYTES, SectionNo};
use pagetide_policy::budget::{
    Admission, Bytes, FLOOR_MIN, Fill, Gate, Permille, Refaults, VmShare, Workingset,
};
use pagetide_swap::{HostShare, cgroup::MemoryGroups};
use std::{
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{
            AtomicBool, AtomicI64, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::{Duration, Instant},
};

/// No target.
const NONE: u64 = u64::MAX;

/// What the VMs under the budget use up together.
#[derive(Debug, Default)]
pub(in crate::host) struct HostRoom {
    in_force: AtomicBool,
    /// Free beyond min, in bytes; negative below it.
    above_min: AtomicI64,
    /// Fills that wait for more.
    waiting: AtomicU64,
    /// Held between a look at what is free and a wait for more.
    look: Mutex<()>,
    freed: Condvar,
    bell: Mutex<bool>,
    rung: Condvar,
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

impl HostRoom {
    /// From now on so much is free: `left` of the budget without min, less `used`.
    pub(super) fn correct(&self, left: Bytes, used: Bytes) {
        self.above_min
            .store(signed(left.0).saturating_sub(signed(used.0)), SeqCst);
        self.in_force.store(true, SeqCst);
        self.tell_waiting();
    }

    /// There is no budget any more.
    pub(super) fn lift(&self) {
        self.in_force.store(false, SeqCst);
        self.tell_waiting();
    }

    fn is_in_force(&self) -> bool {
        self.in_force.load(SeqCst)
    }

    fn add(&self, bytes: i64) {
        if self.is_in_force() {
            // Whoever began to wait before it sees it, or is told.
            self.above_min.fetch_add(bytes, SeqCst);
            if bytes > 0 {
                self.tell_waiting();
            }
        }
    }

    fn tell_waiting(&self) {
        if self.waiting.load(SeqCst) > 0 {
            drop(lock(&self.look));
            self.freed.notify_all();
        }
    }

    /// Waits while `is_spent`, which looks at what is free, for `time` at most. Returns whether there is room.
    fn wait_while(&self, time: Duration, is_spent: impl Fn() -> bool) -> bool {
        self.waiting.fetch_add(1, SeqCst);
        let look = lock(&self.look);
        let waited = self.freed.wait_timeout_while(look, time, |()| is_spent());
        let (look, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(look);
        self.waiting.fetch_sub(1, SeqCst);
        !timeout.timed_out()
    }

    /// Has the driver decide soon.
    pub(super) fn ring(&self) {
        *lock(&self.bell) = true;
        self.rung.notify_all();
    }

    /// Waits until the bell is rung, or for `time`; without end if there is none.
    pub(super) fn wait(&self, time: Option<Duration>) {
        let bell = lock(&self.bell);
        let mut bell = match time {
            Some(time) => {
                let waited = self.rung.wait_timeout_while(bell, time, |rung| !*rung);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            None => {
                let waited = self.rung.wait_while(bell, |rung| !*rung);
                waited.unwrap_or_else(PoisonError::into_inner)
            }
        };
        *bell = false;
    }
}

/// How a VM stands, for reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::host) struct Standing {
    pub(in crate::host) share: VmShare,
    pub(in crate::host) target: Option<Bytes>,
    pub(in crate::host) need: Option<Bytes>,
    pub(in crate::host) reason: Option<pagetide_policy::budget::Reason>,
    pub(in crate::host) stalled: Option<Permille>,
}

/// See the module.
pub(in crate::host) struct VmSeat {
    room: Arc<HostRoom>,
    /// In bytes, or [`NONE`].
    target: AtomicU64,
    /// What is freed by evicting, in thousandths of what is evicted.
    saving: AtomicU64,
    /// Fills that were to evict first.
    short_fills: AtomicU64,
    gate: Mutex<Option<Gate>>,
    workingset: Mutex<Workingset>,
    standing: Mutex<Standing>,
    stalls: Mutex<Stalls>,
}

/// Stalls of the VMM's memory cgroup (PSI), as far as they are known.
struct Stalls {
    groups: MemoryGroups,
    last: Option<(Instant, u64)>,
}

impl VmSeat {
    pub(super) fn new(room: Arc<HostRoom>, share: VmShare, groups: MemoryGroups) -> Self {
        Self {
            room,
            target: AtomicU64::new(NONE),
            saving: AtomicU64::new(0),
            short_fills: AtomicU64::new(0),
            gate: Mutex::default(),
            workingset: Mutex::default(),
            standing: Mutex::new(Standing {
                share,
                target: None,
                need: None,
                reason: None,
                stalled: None,
            }),
            stalls: Mutex::new(Stalls { groups, last: None }),
        }
    }

    /// The limit that holds: the least of the VM's own and its target.
    pub(in crate::host) fn limit(&self, own: Option<u64>) -> Option<u64> {
        match self.target.load(Relaxed) {
            NONE => own,
            // With less a VM does not work at all, and its faults would wait for ever.
            target => Some(own.unwrap_or(NONE).min(target.max(FLOOR_MIN.0))),
        }
    }

    /// How it stands.
    pub(in crate::host) fn standing(&self) -> Standing {
        *lock(&self.standing)
    }

    /// Fills before which the VM was to evict because the budget was short.
    pub(in crate::host) fn short_fills(&self) -> u64 {
        self.short_fills.load(Relaxed)
    }

    /// Another share is set.
    pub(super) fn set_share(&self, share: VmShare) {
        lock(&self.standing).share = share;
    }

    /// What was decided. Returns true if the limit that follows from it is another than before.
    pub(super) fn decided(&self, gate: Option<Gate>, standing: Standing) -> bool {
        let saving = gate.map_or(0, |gate| gate.saving.0);
        self.saving.store(saving.into(), Relaxed);
        *lock(&self.gate) = gate;
        *lock(&self.standing) = standing;
        let target = standing.target.map_or(NONE, |target| target.0);
        self.target.swap(target, Relaxed) != target
    }

    /// There is no budget any more. Returns true if there was a target.
    pub(super) fn lift(&self) -> bool {
        *lock(&self.workingset) = Workingset::default();
        let standing = Standing {
            target: None,
            need: None,
            reason: None,
            ..self.standing()
        };
        self.decided(None, standing)
    }

    /// What was refaulted since the last call.
    pub(super) fn take_refaults(&self) -> Refaults {
        lock(&self.workingset).take_refaults()
    }

    /// Share of the time since the last call for which the VMM's memory cgroup was stalled; `None` if that
    /// is not known.
    pub(super) fn stalled(&self, now: Instant) -> Option<Permille> {
        let mut stalls = lock(&self.stalls);
        let total = match stalls.groups.stalled_us() {
            Ok(total) => total,
            Err(error) => {
                tracing::debug!(%error, "the stalls of a VMM cannot be read");
                None
            }
        };
        let before = std::mem::replace(&mut stalls.last, total.map(|total| (now, total)));
        let ((then, before), total) = before.zip(total)?;
        let elapsed = now.saturating_duration_since(then).as_micros().max(1);
        let share = u128::from(total.saturating_sub(before)) * 1000 / elapsed;
        Some(Permille(u16::try_from(share.min(1000)).unwrap_or(1000)))
    }
}

fn bytes_of(pages: u64) -> u64 {
    pages.saturating_mul(PAGE_BYTES)
}

impl VmSeat {
    /// A fill for which min does not stay free, with the gate that it has to pass.
    fn short(&self, pages: u64, resident_pages: u64) -> Option<(Gate, Fill)> {
        let above_min = self.room.above_min.load(SeqCst);
        if !self.room.is_in_force() || above_min >= signed(bytes_of(pages)) {
            return None;
        }
        let gate = (*lock(&self.gate))?;
        let left = signed(gate.budget.less(gate.min).0);
        let used = left.saturating_sub(above_min);
        let fill = Fill {
            bytes: Bytes::of_pages(pages),
            resident: Bytes::of_pages(resident_pages),
            host_used: Bytes(u64::try_from(used).unwrap_or(0)),
        };
        Some((gate, fill))
    }
}

impl HostShare for VmSeat {
    fn pages_first(&self, pages: u64, resident_pages: u64) -> u64 {
        let Some((gate, fill)) = self.short(pages, resident_pages) else {
            return 0;
        };
        match gate.admit(&fill) {
            Admission::Proceed => 0,
            Admission::ProceedOnFloor => {
                self.room.ring();
                0
            }
            Admission::ReclaimFirst(bytes) => {
                self.short_fills.fetch_add(1, Relaxed);
                self.room.ring();
                bytes.0.div_ceil(PAGE_BYTES)
            }
        }
    }

    fn is_spent(&self, pages: u64, resident_pages: u64) -> bool {
        self.short(pages, resident_pages)
            .is_some_and(|(gate, fill)| gate.is_spent(&fill))
    }

    fn wait_for_room(&self, pages: u64, resident_pages: u64, time: Duration) -> bool {
        self.room
            .wait_while(time, || self.is_spent(pages, resident_pages))
    }

    fn took(&self, pages: u64) {
        self.room.add(-signed(bytes_of(pages)));
    }

    fn gave_back(&self, pages: u64) {
        self.room.add(signed(bytes_of(pages)));
    }

    fn evicted(&self, section: SectionNo, pages: u64) {
        if !self.room.is_in_force() {
            return;
        }
        let saving = Permille(u16::try_from(self.saving.load(Relaxed)).unwrap_or(0));
        self.room.add(signed(saving.of(Bytes::of_pages(pages)).0));
        lock(&self.workingset).evicted(section, pages);
    }

    fn refilled(&self, section: SectionNo, pages: u64) {
        if self.room.is_in_force() {
            lock(&self.workingset).refaulted(section, pages);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const GATE: Gate = Gate {
        budget: Bytes::mib(100),
        min: Bytes::mib(10),
        target: Bytes::mib(50),
        floor: Bytes::mib(16),
        saving: Permille(500),
    };

    fn seat() -> VmSeat {
        let groups = MemoryGroups::below(Path::new("/nowhere"));
        let seat = VmSeat::new(Arc::default(), VmShare::default(), groups);
        let standing = Standing {
            target: Some(GATE.target),
            ..seat.standing()
        };
        assert!(seat.decided(Some(GATE), standing));
        assert!(!seat.decided(Some(GATE), standing));
        seat
    }

    fn pages(bytes: Bytes) -> u64 {
        bytes.pages()
    }

    #[test]
    fn fill_is_asked_to_evict_first_only_below_min_and_never_within_its_floor() {
        let seat = seat();
        let resident = pages(Bytes::mib(40));
        assert_eq!(seat.pages_first(1, resident), 0, "no budget is in force");
        let left = GATE.budget.less(GATE.min);
        seat.room.correct(left, Bytes::mib(89));
        assert_eq!(seat.pages_first(1, resident), 0);
        seat.took(pages(Bytes::mib(1)));
        // Half of what is evicted is freed.
        assert_eq!(seat.pages_first(1, resident), 2);
        assert_eq!(seat.pages_first(1, pages(Bytes::mib(15))), 0);
        seat.evicted(SectionNo(3), 4);
        assert_eq!(seat.pages_first(1, resident), 0, "four pages freed two");
        seat.took(2);
        assert_eq!(seat.pages_first(1, resident), 2);
        seat.gave_back(1);
        assert_eq!(seat.pages_first(1, resident), 0);
        assert_eq!(seat.short_fills(), 2);
        // However far below, a fill's own work is bounded.
        seat.room.correct(left, Bytes::mib(99));
        assert_eq!(seat.pages_first(1, resident), 65);
    }

    #[test]
    fn fill_beyond_the_budget_waits_until_another_vm_evicts_or_the_budget_is_lifted() {
        let left = GATE.budget.less(GATE.min);
        let resident = pages(Bytes::mib(40));
        let never = Duration::from_millis(1);
        let long = Duration::from_secs(60);
        let waited = |frees: &dyn Fn(&VmSeat)| {
            let seat = seat();
            seat.room.correct(left, GATE.budget.less(Bytes(PAGE_BYTES)));
            assert!(!seat.is_spent(1, resident), "the last page of min");
            seat.took(1);
            assert!(seat.is_spent(1, resident));
            assert!(!seat.wait_for_room(1, resident, never));
            assert!(!seat.is_spent(1, pages(Bytes::mib(15))), "within its floor");
            std::thread::scope(|scope| {
                let fill = scope.spawn(|| seat.wait_for_room(1, resident, long));
                while seat.room.waiting.load(SeqCst) == 0 {
                    std::thread::yield_now();
                }
                frees(&seat);
                fill.join().unwrap()
            })
        };
        assert!(waited(&|seat| seat.gave_back(1)));
        // Half of it is free.
        assert!(waited(&|seat| seat.evicted(SectionNo(1), 2)));
        assert!(waited(&|seat| seat.room.correct(left, left)));
        assert!(waited(&|seat| seat.room.lift()));
    }

    #[test]
    fn refaults_count_by_what_was_evicted_since_and_only_under_a_budget() {
        let seat = seat();
        seat.evicted(SectionNo(1), 512);
        seat.refilled(SectionNo(1), 1);
        assert_eq!(seat.take_refaults(), Refaults::default());
        seat.room.correct(Bytes::mib(90), Bytes::ZERO);
        seat.evicted(SectionNo(1), 512);
        seat.evicted(SectionNo(2), 512);
        seat.refilled(SectionNo(1), 3);
        seat.refilled(SectionNo(9), 2);
        let refaults = seat.take_refaults();
        assert_eq!(refaults.filled(), Bytes::of_pages(5));
        assert_eq!(refaults.unknown, Bytes::of_pages(2));
    }

    #[test]
    fn limit_is_the_least_of_target_and_own_and_the_own_one_again_without_a_budget() {
        let seat = seat();
        assert_eq!(seat.limit(None), Some(50 << 20));
        assert_eq!(seat.limit(Some(20 << 20)), Some(20 << 20));
        assert_eq!(seat.limit(Some(90 << 20)), Some(50 << 20));
        let little = Standing {
            target: Some(FLOOR_MIN.less(Bytes(PAGE_BYTES))),
            ..seat.standing()
        };
        assert!(seat.decided(Some(GATE), little));
        assert_eq!(
            seat.limit(None),
            Some(FLOOR_MIN.0),
            "with less no VM works, however short the budget"
        );
        assert!(seat.lift());
        assert_eq!(seat.limit(Some(90 << 20)), Some(90 << 20));
        assert_eq!(seat.limit(None), None);
        assert!(!seat.lift());
    }

    #[test]
    fn stalls_are_a_share_of_the_time_since_the_last_look() {
        let dir = tempfile::tempdir().unwrap();
        let put = |path: &str, text: String| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("proc/5/cgroup", "0::/vm\n".into());
        let mounts = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        put("proc/self/mountinfo", mounts.into());
        let total = |us: u64| {
            put(
                "sys/fs/cgroup/vm/memory.pressure",
                format!("some avg10=0.00 total={us}\n"),
            );
        };
        let groups = MemoryGroups::below(dir.path()).of_process(5);
        let seat = VmSeat::new(Arc::default(), VmShare::default(), groups);
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        assert_eq!(seat.stalled(at(0)), None);
        total(1_000);
        assert_eq!(seat.stalled(at(500)), None, "one figure is no share");
        total(26_000);
        assert_eq!(seat.stalled(at(1000)), Some(Permille(50)));
        assert_eq!(seat.stalled(at(1500)), Some(Permille(0)));
        total(9_000_000);
        assert_eq!(seat.stalled(at(2000)), Some(Permille(1000)));
    }

    #[test]
    fn bell_that_was_rung_before_the_wait_ends_it() {
        let room = HostRoom::default();
        room.ring();
        room.wait(None);
        room.wait(Some(Duration::ZERO));
    }
}
