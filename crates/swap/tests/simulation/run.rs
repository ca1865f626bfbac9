// SPDX-License-Identifier: Apache-2.0
//! One run: a VM, its daemons one after another, and what must hold at every rest.

use crate::{
    audit::audit,
    daemon::{Daemon, Task},
    device::{Phase, Request},
    dimm::PAGE_COUNT,
    guest::{Message, PageAccess},
    kernel::{Death, World},
    knobs::{Eviction, Far, Slow},
    state::{Coverage, State},
};
use pagetide_addr::{Access, PageNo};
use pagetide_gmem::ContentStore;
use pagetide_swap::{Pool, PoolStore, reclaim::Reach, slow::Which};
use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::PathBuf,
    sync::Arc,
};

/// Most turns in which what is under way must come to an end.
const TURNS_MAX: u32 = 20_000;
/// Turns in which each page request is surely taken.
const REQUESTS_TURNS: u32 = 200;
/// Steps between two audits.
const AUDIT_STEPS: u32 = 16;

/// See the module.
pub struct Run {
    pub world: Arc<World>,
    pub path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Drop for Run {
    fn drop(&mut self) {
        // The world holds the daemon and the daemon the world.
        self.world.set_daemon(None);
    }
}

/// Lives through the run of `seed`.
///
/// # Panics
/// If anything is not as it must be.
pub fn live(seed: u64) -> Coverage {
    let directory = tempfile::tempdir_in("/dev/shm").expect("a tmpfs at /dev/shm");
    let run = Run {
        world: World::new(seed),
        path: directory.path().join("vm.pool"),
        _directory: directory,
    };
    run.fill_some_pages();
    if run
        .survived(|| Daemon::found(&run.world, &run.path))
        .is_none()
    {
        run.follow();
    }
    let steps = run.world.lock().knobs.steps;
    for step in 0..steps {
        if run.is_vmm_dead() {
            break;
        }
        run.step();
        if step % AUDIT_STEPS == 0 && !run.is_vmm_dead() {
            run.audit_at_rest();
        }
    }
    if run.is_vmm_dead() {
        run.give_all_back();
    } else if run.world.lock().random.below(10) == 0 {
        run.end_vm();
    } else {
        run.settle();
        run.read_all_back();
        run.bring_all_back();
    }
    run.world.lock().coverage
}

impl Run {
    fn fill_some_pages(&self) {
        let mut state = self.world.lock();
        for page in state.knobs.active.clone() {
            if state.random.coin() {
                let content = crate::content::Stamps([state.stamp(); crate::content::SECTORS]);
                let page = state.page(page);
                page.content = Some(content);
                page.instance = 1;
                page.versions = vec![content];
                page.past.push(content);
                page.mapped = true;
            }
        }
    }

    /// `None` if the daemon died of it. Failures go on.
    fn survived<R>(&self, act: impl FnOnce() -> R) -> Option<R> {
        match catch_unwind(AssertUnwindSafe(act)) {
            Ok(done) => Some(done),
            Err(payload) if payload.is::<Death>() => None,
            Err(failure) => resume_unwind(failure),
        }
    }

    fn daemon(&self) -> Arc<Daemon> {
        self.world.daemon().expect("a daemon lives")
    }

    /// One step of the run; whatever dies has a successor when it ends.
    fn step(&self) {
        let task = {
            let mut state = self.world.lock();
            let time_ms = state.random.below(25);
            state.pass_time(time_ms);
            state.step();
            choose(&mut state)
        };
        self.flip_a_bit();
        if let Some(task) = task {
            self.perform(task);
        }
        let demotion = {
            let mut state = self.world.lock();
            let demotion = state.knobs.demotion;
            let section = state
                .happens(demotion)
                .then(|| state.active_page().section());
            section.map(|section| Task::Demote { section })
        };
        if let Some(task) = demotion
            && !self.is_vmm_dead()
        {
            self.perform(task);
        }
    }

    pub fn perform(&self, task: Task) {
        let daemon = self.daemon();
        let counters = |daemon: &Daemon| {
            use std::sync::atomic::Ordering::Relaxed;
            let counters = daemon.space.counters();
            [
                &counters.evicted_pages,
                &counters.cancelled_pages,
                &counters.joined_faults,
                &counters.readahead_pages,
                &counters.overwritten_pages,
                &counters.swapped_in_ahead_pages,
                &counters.slowly_filled_pages,
                &counters.relocated_pages,
            ]
            .map(|counter| counter.load(Relaxed))
        };
        let before = counters(&daemon);
        let survived = self.survived(|| daemon.perform(task)).is_some();
        let after = counters(&daemon);
        drop(daemon);
        {
            let mut state = self.world.lock();
            let coverage = &mut state.coverage;
            coverage.evicted_pages += after[0] - before[0];
            coverage.cancelled_pages += after[1] - before[1];
            coverage.joined_faults += after[2] - before[2];
            coverage.readahead_pages += after[3] - before[3];
            coverage.overwritten_pages += after[4] - before[4];
            coverage.swapped_in_ahead_pages += after[5] - before[5];
            coverage.slow_fills += after[6] - before[6];
            coverage.relocated_pages += after[7] - before[7];
        }
        if !survived {
            self.follow();
        }
    }

    /// The daemon is dead: what it left must be whole, and a successor goes on with it.
    fn follow(&self) {
        loop {
            self.world.set_daemon(None);
            self.world.lock().die();
            let loads = {
                let mut state = self.world.lock();
                state.coverage.loads_of_the_dead += state.loads.len() as u64;
                std::mem::take(&mut state.loads)
            };
            let requests = {
                let mut state = self.world.lock();
                let disk = Arc::clone(&state.disk);
                let requests = disk.forsake(|| state.random.coin());
                state.coverage.slow_requests_of_the_dead += requests.len() as u64;
                requests
            };
            // Their daemon is dead: they do nothing.
            drop((loads, requests));
            if self.is_vmm_dead() {
                self.remove_pool();
                return;
            }
            let pool = Arc::new(Pool::open(&self.path).expect("the lock falls with its holder"));
            audit(&self.world.lock(), &PoolStore::new(pool));
            self.outage();
            match self.survived(|| Daemon::succeed(&self.world, &self.path)) {
                Some(Some(_)) => break,
                Some(None) => {}
                None => self.world.lock().coverage.deaths_in_recovery += 1,
            }
        }
        // Messages that the dead had read are lost; who sleeps must look again.
        let mut state = self.world.lock();
        state.deaths_left = crate::state::DEATHS_MAX;
        let all = pagetide_addr::PageNo(0).run(PAGE_COUNT);
        state.wake(all);
    }

    /// The VM runs without a daemon for a while. What the dead had submitted lands; a successor
    /// waits for the rest of it before it does anything.
    fn outage(&self) {
        let mut state = self.world.lock();
        for _ in 0..state.random.below(20) {
            state.vcpu_step();
            if state.random.below(4) == 0 {
                state.land_dead_io();
            }
            state.change_memory();
        }
        let time_ms = state.random.below(40);
        state.pass_time(time_ms);
        while !state.dead_io.is_empty() {
            state.land_dead_io();
        }
    }

    fn flip_a_bit(&self) {
        let daemon = self.daemon();
        let mut state = self.world.lock();
        let flips = state.knobs.flips;
        if !state.happens(flips) {
            return;
        }
        let page = state.active_page();
        if crate::audit::flip_stored_bit(&daemon.store, page, &mut state.random) {
            state.page(page).damaged = true;
            state.coverage.damaged_pages += 1;
        }
    }

    /// Present pages of all sections are granted; whoever dies of it leaves that to a successor.
    fn grant_all(&self) {
        while !self.is_vmm_dead() {
            let before = self.world.lock().incarnation;
            let sections: Vec<_> = self.daemon().space.table().sections().collect();
            for section in sections {
                self.perform(Task::Grant { section });
                if self.is_vmm_dead() {
                    return;
                }
            }
            if self.world.lock().incarnation == before {
                return;
            }
        }
    }

    /// What a recovery left for later has come to its end, too.
    fn audit_at_rest(&self) {
        self.grant_all();
        if self.is_vmm_dead() {
            return;
        }
        let daemon = self.daemon();
        crate::audit::audit_at_rest(&self.world.lock(), &daemon);
    }

    /// The VM's process ends, whatever is under way: no device waits for an answer then.
    fn end_vm(&self) {
        {
            let mut state = self.world.lock();
            state.knobs.calm();
            state.gone = true;
            state.coverage.vm_ends += 1;
        }
        for _ in 0..REQUESTS_TURNS {
            let task = {
                let mut state = self.world.lock();
                Task::next_fault(&mut state).or_else(|| Task::next_load(&mut state))
            };
            if let Some(task) = task {
                self.perform(task);
            }
        }
        self.end_loads();
        let state = self.world.lock();
        assert!(state.unanswered.is_empty(), "page requests stay unanswered");
        let waits = |request: &Request| {
            matches!(
                request.phase,
                Phase::Parked | Phase::Faulted | Phase::Bounced
            )
        };
        assert!(!state.requests.iter().any(waits), "{}", state.describe());
    }

    /// Troubles end, and with them everything under way.
    fn settle(&self) {
        self.world.lock().knobs.calm();
        let daemon = self.daemon();
        let hogs = std::mem::take(&mut *daemon.hogs.lock().expect("nobody dies any more"));
        for hog in hogs {
            daemon.store.free(hog);
        }
        drop(daemon);
        self.quiesce();
        self.audit_at_rest();
    }

    /// Serves whatever waits until nobody does.
    fn quiesce(&self) {
        for _ in 0..TURNS_MAX {
            let task = {
                let mut state = self.world.lock();
                state.finish_accesses();
                for at in (0..state.requests.len()).rev() {
                    state.advance(at);
                }
                let about_memory = Task::about_memory(&state);
                if state.is_quiet() && about_memory.is_none() && !state.has_loads() {
                    return;
                }
                match about_memory.filter(|_| state.random.coin()) {
                    Some(task) => Some(task),
                    None => Task::next_fault(&mut state).or_else(|| Task::next_load(&mut state)),
                }
            };
            if let Some(task) = task {
                self.perform(task);
            }
        }
        panic!("somebody waits for ever: {}", self.world.lock().describe());
    }

    /// Every load under way ends.
    pub fn end_loads(&self) {
        loop {
            let task = Task::next_load(&mut self.world.lock());
            match task {
                Some(task) => self.perform(task),
                None => return,
            }
        }
    }

    /// The guest reads every page, while eviction goes on.
    fn read_all_back(&self) {
        let pages = self.world.lock().knobs.active.clone();
        for page in pages {
            self.read_back(page);
            let task = {
                let mut state = self.world.lock();
                state.pass_time(60);
                state.random.coin().then(|| choose(&mut state)).flatten()
            };
            if let Some(task) = task {
                self.perform(task);
                self.quiesce();
            }
        }
        self.audit_at_rest();
    }

    fn read_back(&self, page: PageNo) {
        self.world
            .lock()
            .access(0, PageAccess { page, write: None });
        self.quiesce();
    }

    /// As a detach does: every page comes back, and nothing stays in the store.
    fn bring_all_back(&self) {
        let daemon = self.daemon();
        {
            let mut state = self.world.lock();
            state.knobs.limit_pages = None;
            state.knobs.bustle = 0;
            let resident = state.resident_pages();
            daemon.limit.set(None, resident);
        }
        let pages = self.world.lock().pages_ever_used();
        for page in pages {
            let access = Access::Read;
            self.perform(Task::Vcpu(Message { page, access }));
            self.read_back(page);
        }
        let state = self.world.lock();
        crate::audit::audit_at_rest(&state, &daemon);
        crate::audit::audit_nothing_stored(&state, &daemon.store);
    }
}

/// What the daemon does next, if anything.
fn choose(state: &mut State) -> Option<Task> {
    if state.random.below(4) == 0
        && let Some(task) = Task::about_memory(state)
    {
        return Some(task);
    }
    if state.has_loads()
        && state.random.below(4) == 0
        && let Some(task) = Task::next_load(state)
    {
        return Some(task);
    }
    if state.knobs.slow != Slow::Nothing && state.random.below(6) == 0 {
        let section = state.active_page().section();
        let which = state
            .random
            .pick(&[Which::All, Which::All, Which::Uncompressed]);
        return Some(Task::Sink { section, which });
    }
    if state.knobs.far != Far::Nothing && state.random.below(4) == 0 {
        let page = state.active_page();
        return Some(Task::Relocate { page });
    }
    match state.random.below(22) {
        0..=10 => Task::next_fault(state),
        11..=14 if state.knobs.eviction == Eviction::AtRandom => Task::random_eviction(state),
        11 => Some(match state.random.below(3) {
            0 => Task::Scan,
            1 => Task::KeepReady {
                pages: state.random.pick(&[1, 512]),
            },
            _ => Task::MakeRoom {
                pages: state.random.pick(&[1, 8, 512]),
            },
        }),
        12..=14 => {
            let pages = state.random.pick(&[1, 8, 512]);
            let reaches = [Reach::ColdOnly, Reach::AllResting, Reach::Protected];
            let reach = state.random.pick(&reaches);
            Some(Task::Reclaim { pages, reach })
        }
        15 => Some(Task::Trim),
        16 => Some(Task::CorrectLimit),
        17 => Some(Task::SwapIn {
            section: state.active_page().section(),
        }),
        18 => Some(Task::Grant {
            section: state.active_page().section(),
        }),
        19 => {
            state.change_wiring();
            None
        }
        _ => {
            state.step();
            None
        }
    }
}
