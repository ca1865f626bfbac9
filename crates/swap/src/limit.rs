// SPDX-License-Identifier: Apache-2.0
//! [`Limit`]: how many pages of a VM may be present, with Taiji's three watermarks (4.2.2).
//!
//! ```text
//!   resident pages
//!   limit ────────── min watermark: a fill first has pages evicted, and waits for that
//!     │   ╲ 1.5 %
//!   low watermark ── reclaim begins
//!     │   ╲ 3 %
//!   high watermark ─ reclaim ends
//! ```
//! (The watermarks are named for *free* pages under the limit, as in Taiji and the kernel: free
//! falls below low, rises above high.) The headroom, limit less resident pages, is an estimate that
//! each fill takes from and each eviction adds to; [`Limit::correct`] resets it to the kernel's
//! count, since a guest may also discard pages without notice.
//!
//! A fill that finds no headroom makes room itself, from sections that are ready ([`MakeRoom`]). If
//! none is, it waits for the reclaimer, but not for ever: after [`ADMISSION_WAIT`] it goes ahead
//! over the limit and is counted. A stalled guest is of no use, and the next reclaim brings it back
//! under the limit.
//!
//! Faults seldom come to that: where little headroom is left, whoever has served a fault makes room for the next
//! ones, when nothing waits for it any more ([`Limit::make_room_ahead`]). So faults whose VM has all CPUs, and
//! gives the reclaimer none, pay for evictions between faults and not in them.
//!
//! While the store is full, the limit is *advisory* ([`Force`]): reclaim still tries to keep it, with
//! pages of zeros, but fills neither make room nor wait for any, since there may be none.
//!
//! Where the host has a budget for all its VMs, a fill is also measured by that ([`HostShare`]): when
//! the budget is short, the VM first evicts of its own memory, from ready sections. Where the budget is
//! spent even so, the fill waits for other VMs' reclaim, as long as it would for its own.

mod making_room;

use making_room::{HUGE_PAGE_TRIES, NO_PAGE_WAIT};

use crate::{
    host_share::HostShare, reserve::Reserve, scheduled::group::WorkGroup,
    together::FaultedSections, touched::TouchedSections,
};
use pagetide_addr::{DeviceId, SECTION_PAGES, SectionNo};
use pagetide_gmem::{Admission, Corrections};
use pagetide_policy::{
    scheduler::FaultClass,
    watermarks::{ADMISSION_WAIT, Headroom},
};
use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// Smallest limit that can work, in pages: a vCPU's instruction may need a handful of pages at
/// once, each device queue its rings and a chain, and eviction works by sections. 16 MiB.
pub const LIMIT_PAGES_MIN: u64 = 4096;
const UNLIMITED: i64 = i64::MAX / 4;

/// Evicts ready sections on the thread of a fill that needs room.
pub trait MakeRoom: Send + Sync {
    /// Evicts some pages, at least `pages` if that many may be evicted at once; returns the number
    /// evicted. Does not wait.
    fn make_room(&self, pages: u64) -> u64;

    /// Evicts a section that goes whole, if one may be evicted at once: a huge page comes free. Does not wait.
    fn make_huge_page(&self) -> bool;
}

/// What the limit means for fills.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Force {
    /// A fill that would exceed it makes room, or waits for some.
    Enforced,
    /// Fills exceed it, and are counted.
    Advisory,
}

/// What is to hold of a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ruling {
    /// The limit, or none.
    pub limit_pages: Option<u64>,
    /// The kernel's count of present pages.
    pub resident_pages: u64,
    /// What it means for fills.
    pub force: Force,
}

/// See the module.
pub struct Limit {
    /// As in the state: whoever only looks takes no lock that fills need.
    is_stopped: AtomicBool,
    is_advisory: AtomicBool,
    pages: AtomicI64,
    headroom: AtomicI64,
    /// How often the headroom was set by the kernel's count: with it, under the lock of the state.
    corrections: AtomicU64,
    over_limit_fills: AtomicU64,
    state: Mutex<State>,
    wanted: Condvar,
    freed: Condvar,
    /// Held while what is to hold is found out and put in force.
    ruling: Mutex<()>,
    reserve: Reserve,
    faulted: FaultedSections,
    touched: TouchedSections,
    /// Weak: it evicts the memory that this limit belongs to.
    direct: OnceLock<Weak<dyn MakeRoom>>,
    /// The VM's background work, which is told of faults and of the need for reclaim.
    work: OnceLock<WorkGroup>,
    /// The VM under a budget of the host.
    host: OnceLock<Arc<dyn HostShare>>,
}

#[derive(Debug, Default)]
struct State {
    reclaim_wanted: bool,
    swap_in_wanted: bool,
    stopped: bool,
}

impl State {
    fn wants_anything(&self) -> bool {
        self.reclaim_wanted || self.swap_in_wanted || self.stopped
    }
}

/// Why the reclaimer woke.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wake {
    /// The low watermark was passed, a reclaim was requested, or a fault has led to memory that is wanted back.
    Wanted,
    /// The timeout has expired.
    Timer,
    /// The VM is being detached.
    Stopped,
}

impl Limit {
    /// No limit yet.
    #[must_use]
    pub fn new() -> Self {
        Self {
            is_advisory: AtomicBool::new(false),
            is_stopped: AtomicBool::new(false),
            pages: AtomicI64::new(UNLIMITED),
            headroom: AtomicI64::new(UNLIMITED),
            corrections: AtomicU64::new(0),
            over_limit_fills: AtomicU64::new(0),
            state: Mutex::default(),
            wanted: Condvar::new(),
            freed: Condvar::new(),
            ruling: Mutex::default(),
            reserve: Reserve::default(),
            faulted: FaultedSections::default(),
            touched: TouchedSections::default(),
            direct: OnceLock::new(),
            work: OnceLock::new(),
            host: OnceLock::new(),
        }
    }

    /// Sections ready for fills that need room.
    #[must_use]
    pub fn reserve(&self) -> &Reserve {
        &self.reserve
    }

    /// Sections that faults have led back to.
    #[must_use]
    pub fn faulted(&self) -> &FaultedSections {
        &self.faulted
    }

    /// Sections of which stored pages were needed.
    #[must_use]
    pub fn touched(&self) -> &TouchedSections {
        &self.touched
    }

    /// From now on `direct` makes room for fills that need it, as long as it lives. Only the first call
    /// has an effect.
    pub fn make_room_by(&self, direct: Weak<dyn MakeRoom>) {
        self.direct.get_or_init(|| direct);
    }

    /// From now on the limit means this for fills; those that wait are released by [`Force::Advisory`].
    pub fn set_force(&self, force: Force) {
        let is_advisory = force == Force::Advisory;
        if self.is_advisory.swap(is_advisory, Relaxed) != is_advisory {
            // Under the lock, so that no thread is between its check and its wait.
            let _state = self.lock();
            self.freed.notify_all();
        }
    }

    fn is_advisory(&self) -> bool {
        self.is_advisory.load(Relaxed)
    }

    /// From now on faults and the need for reclaim are told to `work`, the VM's background work. Only the first
    /// call has an effect.
    pub fn tell_work(&self, work: WorkGroup) {
        self.work.get_or_init(|| work);
    }

    /// From now on `host` is asked before a fill, and told of fills and evictions. Only the first call has
    /// an effect.
    pub fn share_host(&self, host: Arc<dyn HostShare>) {
        self.host.get_or_init(|| host);
    }

    /// Sets the limit, in pages, given how many are present now; `None` lifts it.
    pub fn set(&self, limit_pages: Option<u64>, resident_pages: u64) {
        let limit = limit_pages
            .and_then(|pages| i64::try_from(pages).ok())
            .unwrap_or(UNLIMITED);
        self.pages.store(limit, Relaxed);
        self.correct(resident_pages);
        self.want_reclaim();
    }

    /// Sets the limit, and the headroom from the kernel's count of present pages, without
    /// requesting a reclaim.
    pub fn put_right(&self, limit_pages: Option<u64>, resident_pages: u64) {
        let limit = limit_pages
            .and_then(|pages| i64::try_from(pages).ok())
            .unwrap_or(UNLIMITED);
        self.pages.store(limit, Relaxed);
        self.correct(resident_pages);
    }

    /// Puts in force what `find` finds, if it finds anything, without requesting a reclaim. Several threads may
    /// do this: each finds what was set before its call, so the last one's ruling has everything.
    pub fn rule(&self, find: impl FnOnce() -> Option<Ruling>) {
        let _ruling = self.ruling.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ruling) = find() {
            self.set_force(ruling.force);
            self.put_right(ruling.limit_pages, ruling.resident_pages);
        }
    }

    /// Sets the headroom from the kernel's count of present pages.
    pub fn correct(&self, resident_pages: u64) {
        let limit = self.pages.load(Relaxed);
        let resident = i64::try_from(resident_pages).unwrap_or(UNLIMITED);
        let headroom = if limit == UNLIMITED {
            UNLIMITED
        } else {
            limit - resident
        };
        let state = self.lock();
        self.corrections.fetch_add(1, Relaxed);
        self.headroom.store(headroom, Relaxed);
        drop(state);
        self.notify_freed(headroom);
    }

    fn corrections(&self) -> Corrections {
        Corrections(self.corrections.load(Relaxed))
    }

    /// Pages were evicted.
    pub fn evicted(&self, pages: u64) {
        if self.pages.load(Relaxed) == UNLIMITED {
            return;
        }
        let pages = i64::try_from(pages).unwrap_or(0);
        let headroom = self.headroom.fetch_add(pages, Relaxed) + pages;
        self.notify_freed(headroom);
    }

    /// Pages of `section` were evicted.
    pub fn evicted_from(&self, section: SectionNo, pages: u64) {
        self.evicted(pages);
        if pages > 0 {
            self.touched.note_stored(section);
        }
        if let Some(host) = self.host.get()
            && pages > 0
        {
            host.evicted(section, pages);
        }
    }

    fn notify_freed(&self, headroom: i64) {
        if headroom > 0 {
            // Under the lock, so that no thread is between its check and its wait.
            let _state = self.lock();
            self.freed.notify_all();
        }
    }

    /// How far the VM is from its limit.
    #[must_use]
    pub fn headroom(&self) -> Headroom {
        match self.pages.load(Relaxed) {
            UNLIMITED => Headroom::Unlimited,
            limit_pages => Headroom::Limited {
                limit_pages,
                free_pages: self.headroom.load(Relaxed),
            },
        }
    }

    /// Fills that went over the limit because no page could be evicted in time.
    #[must_use]
    pub fn over_limit_fills(&self) -> u64 {
        self.over_limit_fills.load(Relaxed)
    }

    /// Requests a reclaim now.
    pub fn want_reclaim(&self) {
        let mut state = self.lock();
        if state.reclaim_wanted {
            return;
        }
        state.reclaim_wanted = true;
        self.wanted.notify_all();
        drop(state);
        if let Some(work) = self.work.get() {
            work.hurry();
        }
    }

    /// Ends every wait, now and later, until [`Self::go_on`].
    pub fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        self.is_stopped.store(true, Relaxed);
        drop(state);
        self.wanted.notify_all();
        self.freed.notify_all();
        if let Some(work) = self.work.get() {
            work.stop();
        }
    }

    /// Undoes [`Self::stop`]: the VM is not detached after all.
    pub fn go_on(&self) {
        let mut state = self.lock();
        state.stopped = false;
        self.is_stopped.store(false, Relaxed);
        drop(state);
        if let Some(work) = self.work.get() {
            work.go_on();
        }
    }

    /// The reclaimer's wait: until the low watermark is passed, a reclaim is requested, or
    /// `timeout`.
    pub fn wait_for_work(&self, timeout: Duration) -> Wake {
        let state = self.lock();
        // Before the wait: a request is served, and other work stands back, until the next one. Under the
        // lock: a request that comes now hurries after this.
        if let (false, Some(work)) = (state.reclaim_wanted, self.work.get()) {
            work.calm();
        }
        let waited = self
            .wanted
            .wait_timeout_while(state, timeout, |s| !s.wants_anything());
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let swap_in = std::mem::take(&mut state.swap_in_wanted);
        let wanted = std::mem::take(&mut state.reclaim_wanted) || swap_in;
        match (state.stopped, wanted) {
            (true, _) => Wake::Stopped,
            (false, true) => Wake::Wanted,
            (false, false) => Wake::Timer,
        }
    }

    /// Other work of the VM need not stand back any more, if there is room again.
    pub fn calm_if_there_is_room(&self) {
        if let Some(work) = self.work.get()
            && !self.headroom().is_below_low()
        {
            work.calm();
        }
    }

    /// The reclaimer's pause: lasts `time` regardless of requests; only a stop ends it.
    pub fn rest(&self, time: Duration) -> Wake {
        let waited = self
            .wanted
            .wait_timeout_while(self.lock(), time, |state| !state.stopped);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.stopped {
            Wake::Stopped
        } else {
            Wake::Timer
        }
    }

    /// True from [`Self::stop`] until [`Self::go_on`].
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.is_stopped.load(Relaxed)
    }

    /// A fill goes ahead whatever the headroom. The reclaimer is not called: it searches at its own
    /// pace.
    fn exceed(&self, count: u64) {
        self.took(count);
        let pages = i64::try_from(count).unwrap_or(0);
        let before = self.headroom.fetch_sub(pages, Relaxed);
        if before < pages {
            self.over_limit_fills.fetch_add(count, Relaxed);
        }
    }

    /// Runs `wait`, in which this thread waits for room: reclaim goes first meanwhile.
    fn sleep<T>(&self, wait: impl FnOnce() -> T) -> T {
        match self.work.get() {
            Some(work) => work.wait_for_room(wait),
            None => wait(),
        }
    }

    /// So many pages more are present, or will be.
    fn took(&self, pages: u64) {
        if let Some(host) = self.host.get() {
            host.took(pages);
        }
    }

    /// Has the reclaim thread bring back what was evicted with a page of `section`, if there is room for that.
    fn note_faulted(&self, section: SectionNo) {
        let has_room = self.headroom().pages_above_low() >= SECTION_PAGES;
        if has_room && self.faulted.note(section) {
            self.lock().swap_in_wanted = true;
            self.wanted.notify_all();
        }
    }

    fn wait_for_headroom(&self, pages: i64) {
        self.want_reclaim();
        let wait = || {
            let state = self.lock();
            let short = |state: &mut State| {
                !state.stopped && !self.is_advisory() && self.headroom.load(Relaxed) < pages
            };
            let waited = self.freed.wait_timeout_while(state, ADMISSION_WAIT, short);
            let (_state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            timeout.timed_out()
        };
        if self.sleep(wait) {
            self.over_limit_fills
                .fetch_add(pages.cast_unsigned(), Relaxed);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (pages, headroom) = (self.pages.load(Relaxed), self.headroom.load(Relaxed));
        write!(f, "Limit({pages} pages, room for {headroom})")
    }
}

impl Default for Limit {
    fn default() -> Self {
        Self::new()
    }
}

impl Admission for Limit {
    fn clock_ns(&self) -> u64 {
        pagetide_sys::clock::now_ns()
    }

    fn fault_begins(&self, device: DeviceId) {
        if let Some(work) = self.work.get() {
            work.fault_begins(match device {
                DeviceId::VCPUS => FaultClass::Vcpu,
                _ => FaultClass::Io,
            });
        }
    }

    fn fault_ends(&self) {
        if let Some(work) = self.work.get() {
            work.fault_ends();
        }
    }

    fn admit(&self, count: u64) -> Corrections {
        if self.is_advisory() {
            let corrections = self.corrections();
            self.exceed(count);
            return corrections;
        }
        let pages = i64::try_from(count).unwrap_or(0);
        if self.headroom.load(Relaxed) < pages {
            // More will be needed soon.
            self.want_reclaim();
            self.make_headroom(pages);
        }
        if self.headroom.load(Relaxed) < pages {
            self.wait_for_headroom(pages);
        }
        self.make_room_on_host(count);
        // Before the room is taken: one that comes in between leaves it taken.
        let corrections = self.corrections();
        self.took(count);
        self.headroom.fetch_sub(pages, Relaxed);
        if self.headroom().is_below_low() {
            self.want_reclaim();
        }
        corrections
    }

    fn try_admit(&self, pages: u64) -> bool {
        let wanted = i64::try_from(pages).unwrap_or(UNLIMITED);
        if self.is_advisory() {
            self.exceed(pages);
            return true;
        }
        let there = self.headroom.load(Relaxed) >= wanted && self.pages_first(pages) == 0;
        if there {
            self.took(pages);
            self.headroom.fetch_sub(wanted, Relaxed);
            if self.headroom().is_below_low() {
                self.want_reclaim();
            }
        }
        there
    }

    fn give_back(&self, pages: u64) {
        if let Some(host) = self.host.get() {
            host.gave_back(pages);
        }
        let short = self.headroom().is_below_low();
        let pages = i64::try_from(pages).unwrap_or(0);
        let headroom = self.headroom.fetch_add(pages, Relaxed) + pages;
        // A fill may be waiting for the room of removed memory; a fill's own surplus is given back
        // here too often to take the lock each time.
        if short && pages > 0 {
            self.notify_freed(headroom);
        }
    }

    fn give_back_unless_corrected(&self, pages: u64, since: Corrections) {
        let state = self.lock();
        if self.corrections() != since {
            return;
        }
        let pages = i64::try_from(pages).unwrap_or(0);
        let headroom = self.headroom.fetch_add(pages, Relaxed) + pages;
        drop(state);
        self.notify_freed(headroom);
        // The host's budget is corrected at times of its own, and so has given the room back, or will.
    }

    fn count_in(&self, pages: u64) {
        self.took(pages);
        let pages = i64::try_from(pages).unwrap_or(0);
        self.headroom.fetch_sub(pages, Relaxed);
        if self.headroom().is_below_low() {
            self.want_reclaim();
        }
    }

    fn no_page_free(&self, _pages: u64, in_vain: u32) {
        // Others on the host took the huge pages that came free: more of this VM would go for nothing.
        let may_help = in_vain < HUGE_PAGE_TRIES;
        if !may_help || !self.make_huge_page() {
            self.want_reclaim();
            self.sleep(|| std::thread::sleep(NO_PAGE_WAIT));
        }
    }

    fn refilled(&self, section: SectionNo, pages: u64) {
        // What a VM that is being detached brings back tells nothing of what it needs.
        if let Some(host) = self.host.get()
            && !self.is_stopped()
        {
            host.refilled(section, pages);
        }
        self.touched.note(section);
        if self.faulted.is_on() {
            self.note_faulted(section);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_policy::{candidates::Ready, swap_in::Together};
    use std::sync::Arc;

    #[test]
    fn fill_below_the_limit_goes_ahead_and_wakes_the_reclaimer_at_the_low_watermark() {
        let limit = Limit::new();
        limit.set(Some(10_000), 9_000);
        assert_eq!(limit.wait_for_work(Duration::ZERO), Wake::Wanted);
        limit.admit(800);
        assert_eq!(limit.wait_for_work(Duration::ZERO), Wake::Timer);
        limit.admit(100);
        assert!(limit.headroom().is_below_low());
        assert_eq!(limit.wait_for_work(Duration::ZERO), Wake::Wanted);
        assert_eq!(limit.headroom().pages_to_high(), 200);
        limit.evicted(200);
        assert_eq!(limit.headroom().pages_to_high(), 0);
    }

    #[test]
    fn fill_at_the_limit_waits_until_pages_are_evicted() {
        let limit = Arc::new(Limit::new());
        limit.set(Some(5_000), 5_000);
        let reclaimer = {
            let limit = limit.clone();
            std::thread::spawn(move || {
                while limit.wait_for_work(Duration::from_secs(10)) != Wake::Wanted
                    || limit.try_admit(1)
                {}
                limit.evicted(64);
            })
        };
        limit.admit(1);
        reclaimer.join().unwrap();
        assert_eq!(limit.over_limit_fills(), 0);
        assert!(!limit.try_admit(64) && limit.try_admit(63) && !limit.try_admit(1));
    }

    #[test]
    fn room_is_given_back_by_its_owner_or_by_a_correction_and_never_by_both() {
        let limit = Limit::new();
        let free = |limit: &Limit| match limit.headroom() {
            Headroom::Limited { free_pages, .. } => free_pages,
            Headroom::Unlimited => panic!("it has a limit"),
        };
        limit.put_right(Some(10_000), 2_000);
        let since = limit.admit(512);
        assert_eq!(free(&limit), 7_488);
        limit.give_back_unless_corrected(512, since);
        assert_eq!(free(&limit), 8_000);
        let since = limit.admit(512);
        limit.correct(2_000);
        limit.give_back_unless_corrected(512, since);
        assert_eq!(free(&limit), 8_000);
    }

    #[test]
    fn limit_that_goes_on_after_a_stop_is_waited_for_again() {
        let limit = Limit::new();
        limit.put_right(Some(5_000), 5_000);
        limit.stop();
        limit.admit(1);
        assert_eq!(limit.wait_for_work(Duration::MAX), Wake::Stopped);
        assert_eq!(limit.over_limit_fills(), 0);
        limit.go_on();
        assert!(!limit.is_stopped());
        limit.admit(1);
        assert_eq!(limit.over_limit_fills(), 1);
        assert_eq!(limit.wait_for_work(Duration::ZERO), Wake::Wanted);
        assert_eq!(limit.rest(Duration::ZERO), Wake::Timer);
    }

    #[test]
    fn memory_that_comes_with_pages_uses_the_limit_up_and_its_removal_gives_them_back() {
        let limit = Limit::new();
        limit.put_right(Some(10_000), 9_000);
        limit.count_in(3_000);
        assert_eq!(limit.wait_for_work(Duration::ZERO), Wake::Wanted);
        assert_eq!(limit.headroom().pages_to_high(), 2_300);
        assert!(!limit.try_admit(1));
        limit.give_back(3_000);
        assert!(limit.try_admit(1_000) && !limit.try_admit(1));
    }

    #[test]
    fn fill_without_a_reclaimer_goes_over_the_limit_and_is_counted() {
        let limit = Limit::new();
        limit.set(Some(5_000), 5_000);
        limit.admit(3);
        assert_eq!(limit.over_limit_fills(), 3);
    }

    /// Stands for pages that can be evicted at once.
    struct Stock {
        limit: Arc<Limit>,
        pages: AtomicU64,
    }

    impl MakeRoom for Stock {
        fn make_room(&self, pages: u64) -> u64 {
            let there = self.pages.load(Relaxed);
            // One page more than requested, as long as there is one.
            let made = there.min(pages + 1);
            self.pages.store(there - made, Relaxed);
            self.limit.evicted(made);
            made
        }

        fn make_huge_page(&self) -> bool {
            self.make_room(SECTION_PAGES - 1) > 0
        }
    }

    #[test]
    fn fill_without_a_huge_page_evicts_two_sections_at_most_and_then_only_waits() {
        let limit = Arc::new(Limit::new());
        limit.put_right(Some(50_000), 5_000);
        let stock = Arc::new(Stock {
            limit: Arc::clone(&limit),
            pages: AtomicU64::new(10 * SECTION_PAGES),
        });
        let weak: Weak<Stock> = Arc::downgrade(&stock);
        limit.make_room_by(weak);
        for in_vain in 0..5 {
            limit.no_page_free(SECTION_PAGES, in_vain);
        }
        assert_eq!(stock.pages.load(Relaxed), 8 * SECTION_PAGES);
        assert_eq!(limit.wait_for_work(Duration::ZERO), Wake::Wanted);
        // Another fill.
        limit.no_page_free(SECTION_PAGES, 0);
        assert_eq!(stock.pages.load(Relaxed), 7 * SECTION_PAGES);
        // Of a VM without a limit nothing is evicted.
        limit.put_right(None, 5_000);
        limit.no_page_free(SECTION_PAGES, 0);
        assert_eq!(stock.pages.load(Relaxed), 7 * SECTION_PAGES);
    }

    #[test]
    fn fill_at_the_limit_makes_room_itself_and_goes_over_it_only_when_nothing_stands_ready() {
        let limit = Arc::new(Limit::new());
        limit.set(Some(5_000), 5_000);
        let stock = Arc::new(Stock {
            limit: Arc::clone(&limit),
            pages: AtomicU64::new(4),
        });
        let weak: Weak<Stock> = Arc::downgrade(&stock);
        limit.make_room_by(weak);
        limit.admit(1);
        assert_eq!(stock.pages.load(Relaxed), 2);
        // Room for one of the two evicted pages is left.
        limit.admit(1);
        assert_eq!(
            (stock.pages.load(Relaxed), limit.over_limit_fills()),
            (2, 0)
        );
        limit.admit(2);
        assert_eq!(
            (stock.pages.load(Relaxed), limit.over_limit_fills()),
            (0, 0)
        );
        limit.admit(1);
        assert_eq!(limit.over_limit_fills(), 1);
        // A VM that is being detached evicts nothing.
        stock.pages.store(9, Relaxed);
        limit.stop();
        limit.admit(1);
        assert_eq!(stock.pages.load(Relaxed), 9);
    }

    #[test]
    fn little_headroom_is_told_and_room_made_ahead_while_sections_are_ready() {
        let limit = Arc::new(Limit::new());
        let stock = Arc::new(Stock {
            limit: Arc::clone(&limit),
            pages: AtomicU64::new(100),
        });
        let weak: Weak<Stock> = Arc::downgrade(&stock);
        limit.make_room_by(weak);
        // Low is 150 pages free, a quarter of it 37.
        limit.put_right(Some(10_000), 9_963);
        let section = SectionNo(1);
        let ready = Ready {
            section,
            within: Duration::ZERO..Duration::MAX,
        };
        limit.reserve().offer(vec![ready]);
        assert!(!limit.is_short_of_room());
        assert!(limit.try_admit(17) && limit.is_short_of_room());
        limit.make_room_ahead();
        assert_eq!(stock.pages.load(Relaxed), 82, "17, and one more");
        assert!(!limit.is_short_of_room());
        limit.make_room_ahead();
        assert_eq!(stock.pages.load(Relaxed), 82);
        // A limit that was lowered by much is up to the reclaimer.
        limit.put_right(Some(10_000), 10_500);
        limit.make_room_ahead();
        assert_eq!(stock.pages.load(Relaxed), 82 - 65);
        let ends: [fn(&Limit); 2] = [Limit::stop, |limit| limit.set_force(Force::Advisory)];
        for end in ends {
            assert!(limit.is_short_of_room());
            end(&limit);
            assert!(!limit.is_short_of_room());
            limit.go_on();
        }
        limit.set_force(Force::Enforced);
        assert!(limit.reserve().withdraw(section) && !limit.is_short_of_room());
    }

    #[test]
    fn ruling_that_began_earlier_never_ends_up_in_force_over_a_later_one() {
        let limit = Arc::new(Limit::new());
        let set = Arc::new(AtomicU64::new(5_000));
        let found = |set: &AtomicU64| {
            Some(Ruling {
                limit_pages: Some(set.load(Relaxed)),
                resident_pages: 0,
                force: Force::Enforced,
            })
        };
        let (over, is_over) = std::sync::mpsc::channel();
        let mut later = None;
        limit.rule(|| {
            let ruling = found(&set);
            // Another thread sets another limit and wants it in force.
            let (limit, set) = (Arc::clone(&limit), Arc::clone(&set));
            later = Some(std::thread::spawn(move || {
                set.store(9_000, Relaxed);
                limit.rule(|| found(&set));
                over.send(()).unwrap();
            }));
            let waited = is_over.recv_timeout(Duration::from_millis(50));
            assert!(waited.is_err(), "it did not wait for this one");
            ruling
        });
        later.unwrap().join().unwrap();
        assert!(matches!(
            limit.headroom(),
            Headroom::Limited {
                limit_pages: 9_000,
                ..
            }
        ));
    }

    /// A host that wants `first` pages evicted before each fill, has no room for more than `room` pages at a
    /// time, and counts what it is told.
    #[derive(Default)]
    struct Short {
        first: AtomicU64,
        room: Option<u64>,
        waits: AtomicU64,
        resident: AtomicU64,
        taken: AtomicI64,
        evicted: AtomicU64,
        refilled: AtomicU64,
    }

    impl HostShare for Short {
        fn pages_first(&self, _pages: u64, resident_pages: u64) -> u64 {
            self.resident.store(resident_pages, Relaxed);
            self.first.load(Relaxed)
        }
        fn is_spent(&self, pages: u64, _resident_pages: u64) -> bool {
            self.room.is_some_and(|room| room < pages)
        }
        fn wait_for_room(&self, pages: u64, _resident_pages: u64, time: Duration) -> bool {
            assert_eq!((pages, time), (9, ADMISSION_WAIT));
            self.waits.fetch_add(1, Relaxed);
            false
        }
        fn took(&self, pages: u64) {
            self.taken.fetch_add(pages.cast_signed(), Relaxed);
        }
        fn gave_back(&self, pages: u64) {
            self.taken.fetch_sub(pages.cast_signed(), Relaxed);
        }
        fn evicted(&self, _section: SectionNo, pages: u64) {
            self.evicted.fetch_add(pages, Relaxed);
        }
        fn refilled(&self, _section: SectionNo, pages: u64) {
            self.refilled.fetch_add(pages, Relaxed);
        }
    }

    #[test]
    fn fill_on_a_host_that_is_spent_waits_for_it_once_and_goes_ahead() {
        let limit = Limit::new();
        let host = Arc::new(Short {
            first: AtomicU64::new(1),
            room: Some(8),
            ..Short::default()
        });
        limit.share_host(Arc::clone(&host) as _);
        limit.set(Some(10_000), 6_000);
        limit.admit(8);
        assert_eq!(host.waits.load(Relaxed), 0);
        limit.admit(9);
        assert_eq!(host.waits.load(Relaxed), 1);
        assert_eq!(host.taken.load(Relaxed), 17);
        assert!(!limit.try_admit(9), "who must not wait is sent away");
        // One that is being detached waits for nothing.
        limit.stop();
        limit.admit(9);
        assert_eq!(host.waits.load(Relaxed), 1);
    }

    #[test]
    fn fill_on_a_host_that_is_short_evicts_first_within_its_own_limit_and_does_not_wait() {
        let limit = Arc::new(Limit::new());
        let (host, stock) = (
            Arc::new(Short::default()),
            Arc::new(Stock {
                limit: Arc::clone(&limit),
                pages: AtomicU64::new(10),
            }),
        );
        limit.share_host(Arc::clone(&host) as _);
        let weak: Weak<Stock> = Arc::downgrade(&stock);
        limit.make_room_by(weak);
        host.first.store(3, Relaxed);
        // Without a limit nothing may be evicted.
        limit.admit(1);
        assert_eq!(stock.pages.load(Relaxed), 10);
        limit.set(Some(10_000), 6_000);
        assert_eq!(limit.wait_for_work(Duration::ZERO), Wake::Wanted);
        limit.admit(1);
        assert_eq!(host.resident.load(Relaxed), 6_000);
        assert_eq!(stock.pages.load(Relaxed), 6, "three, and one more");
        assert_eq!(limit.wait_for_work(Duration::ZERO), Wake::Timer);
        assert!(!limit.try_admit(1), "who must not wait is sent away");
        // What stands ready is not enough: the fill goes ahead, and the reclaimer is woken.
        host.first.store(20, Relaxed);
        limit.admit(1);
        assert_eq!(
            (stock.pages.load(Relaxed), limit.over_limit_fills()),
            (0, 0)
        );
        assert_eq!(limit.wait_for_work(Duration::ZERO), Wake::Wanted);
        host.first.store(0, Relaxed);
        assert!(limit.try_admit(2));
        limit.count_in(5);
        limit.give_back(4);
        assert_eq!(host.taken.load(Relaxed), 1 + 1 + 1 + 2 + 5 - 4);
        limit.evicted_from(SectionNo(1), 7);
        limit.evicted_from(SectionNo(1), 0);
        limit.refilled(SectionNo(1), 2);
        let told = (host.evicted.load(Relaxed), host.refilled.load(Relaxed));
        assert_eq!(told, (7, 2));
        // One that is being detached evicts nothing for others.
        host.first.store(3, Relaxed);
        stock.pages.store(9, Relaxed);
        limit.stop();
        limit.admit(1);
        assert_eq!(stock.pages.load(Relaxed), 9);
        // Nor does it need what it brings back.
        limit.refilled(SectionNo(1), 2);
        assert_eq!(host.refilled.load(Relaxed), 2);
    }

    #[test]
    fn advisory_limit_is_exceeded_at_once_and_counted_and_the_reclaimer_still_sees_it() {
        let limit = Limit::new();
        limit.put_right(Some(5_000), 4_999);
        limit.set_force(Force::Advisory);
        assert!(limit.try_admit(1));
        assert_eq!(limit.over_limit_fills(), 0);
        limit.admit(3);
        assert!(limit.try_admit(4));
        assert_eq!(limit.over_limit_fills(), 7);
        assert_eq!(limit.wait_for_work(Duration::ZERO), Wake::Timer);
        assert_eq!(limit.headroom().pages_to_high(), 157);
        limit.set_force(Force::Enforced);
        assert!(!limit.try_admit(1));
    }

    #[test]
    fn fill_that_waits_goes_ahead_when_the_limit_becomes_advisory() {
        let limit = Arc::new(Limit::new());
        limit.set(Some(5_000), 5_000);
        let filler = {
            let limit = limit.clone();
            std::thread::spawn(move || limit.admit(1))
        };
        while limit.wait_for_work(Duration::from_secs(10)) != Wake::Wanted {}
        limit.set_force(Force::Advisory);
        filler.join().unwrap();
    }

    #[test]
    fn refill_wakes_the_reclaimer_once_if_its_neighbours_are_wanted_and_have_room() {
        let limit = Limit::new();
        limit.put_right(Some(100_000), 50_000);
        limit.refilled(SectionNo(3), 1);
        assert_eq!(limit.wait_for_work(Duration::ZERO), Wake::Timer);
        limit.faulted().set(Together::On);
        limit.refilled(SectionNo(3), 1);
        limit.refilled(SectionNo(3), 1);
        assert_eq!(limit.wait_for_work(Duration::ZERO), Wake::Wanted);
        assert_eq!(limit.wait_for_work(Duration::ZERO), Wake::Timer);
        assert_eq!(limit.faulted().take(), [SectionNo(3)]);
        limit.put_right(Some(100_000), 98_200);
        limit.refilled(SectionNo(4), 1);
        assert_eq!(limit.wait_for_work(Duration::ZERO), Wake::Timer);
        assert_eq!(limit.faulted().take(), []);
    }

    #[test]
    fn lifted_limit_leaves_nothing_to_evict() {
        let limit = Limit::new();
        limit.set(Some(5_000), 9_000);
        assert_eq!(limit.headroom().pages_to_high(), 4_150);
        limit.set(None, 9_000);
        assert_eq!(limit.headroom().pages_to_high(), 0);
        assert!(limit.try_admit(1 << 40));
    }
}
