// SPDX-License-Identifier: Apache-2.0
//! The death of the VMM, at any call of the daemon.
//!
//! Its threads are gone, and with them every access, every message and every
//! system call. Calls by its userfaultfd say that nobody is there (`ESRCH`). Its
//! RAM file lives on, because the daemon has it open: reading, punching and
//! looking work as before. So does DMA of devices of this host, for a moment.
//!
//! What is under way then must come to an end, and everybody who waits for an
//! answer gets one. Afterwards nothing may keep the VM: no fault, no round, no waiter.

use crate::{
    daemon::Task,
    device::{Phase, Request},
    kernel::Life,
    run::Run,
    state::{Frame, State},
};
use pagetide_addr::{Access, DeviceId, PageNo};
use pagetide_gmem::{Cause, Fault, FaultOutcome, Wait};
use pagetide_swap::{Pool, reclaim::Reach};
use std::sync::{Arc, mpsc};

/// Turns in which what is under way must have come to an end.
const TURNS_MAX: u32 = 2_000;

impl State {
    /// The process of the VMM ends.
    pub fn vmm_dies(&mut self) {
        self.tell_all("the VMM is dead");
        self.gone = true;
        self.coverage.vmm_deaths += 1;
        self.coverage.vmm_deaths_under_way += u64::from(!self.frames.is_empty());
        for vcpu in &mut self.vcpus {
            vcpu.pending = None;
            vcpu.asleep = false;
        }
        self.messages.clear();
        self.kernel_pins.clear();
    }

    /// True while a device that still has its front end waits for an answer.
    fn does_anybody_wait(&self) -> bool {
        let waits = |request: &Request| {
            let asks = matches!(
                request.phase,
                Phase::Parked | Phase::Faulted | Phase::Bounced
            );
            asks && !self.devices[request.device].cut_off
        };
        self.requests.iter().any(waits)
    }

    /// Every request goes on as far as it can now.
    pub fn advance_all(&mut self) {
        for at in (0..self.requests.len()).rev() {
            self.advance(at);
        }
    }
}

impl Run {
    pub fn is_vmm_dead(&self) -> bool {
        self.world.lock().gone
    }

    /// As a daemon does that starts and finds nobody.
    pub fn remove_pool(&self) {
        let pool = Pool::open(&self.path).expect("the lock falls with its holder");
        pool.remove().expect("it is removed once");
        assert!(!self.path.exists());
        self.world.lock().coverage.pools_of_dead_vmms += 1;
    }

    /// The VMM is dead, and whoever owns the VM's end gives all back. (A daemon that died, too, has left
    /// that to its successor, which has removed the pool.)
    pub fn give_all_back(&self) {
        self.world.lock().knobs.calm();
        let Some(daemon) = self.world.daemon() else {
            return;
        };
        self.answer_all();
        self.try_all();
        let (memory, store) = (Arc::downgrade(&daemon.space), Arc::downgrade(&daemon.store));
        let pool = Arc::downgrade(daemon.store.pool());
        self.world.set_daemon(None);
        drop(daemon);
        assert!(memory.upgrade().is_none(), "somebody keeps the page table");
        assert!(store.upgrade().is_none(), "somebody keeps the store");
        assert!(pool.upgrade().is_none(), "somebody keeps the pool open");
        self.remove_pool();
    }

    /// Every device that waits gets its answer.
    fn answer_all(&self) {
        for _ in 0..TURNS_MAX {
            let task = {
                let mut state = self.world.lock();
                state.advance_all();
                Task::next_fault(&mut state).or_else(|| Task::next_load(&mut state))
            };
            match task {
                Some(task) => self.perform(task),
                None if !self.does_anybody_wait() => break,
                None => {}
            }
        }
        let state = self.world.lock();
        assert!(state.unanswered.is_empty(), "page requests stay unanswered");
        assert!(!state.does_anybody_wait(), "{}", state.describe());
    }

    fn does_anybody_wait(&self) -> bool {
        self.world.lock().does_anybody_wait()
    }

    /// Whatever is tried with a VM whose VMM is dead ends: a detach that brings pages back, a
    /// round, a look.
    fn try_all(&self) {
        let pages = self.world.lock().pages_ever_used();
        for page in pages {
            self.bring_back(page);
        }
        let eviction = Task::random_eviction(&mut self.world.lock());
        let reclaim = Task::Reclaim {
            pages: 512,
            reach: Reach::AllResting,
        };
        let others = [Task::Scan, reclaim, Task::Trim, Task::CorrectLimit];
        for task in others.into_iter().chain(eviction) {
            self.perform(task);
        }
    }

    fn bring_back(&self, page: PageNo) {
        let daemon = self.world.daemon().expect("a daemon lives");
        let life: Life = daemon.life();
        let _frame = life.frame(Frame::DeviceFault);
        let fault = Fault {
            device: DeviceId::VCPUS,
            pages: page.single(),
            access: Access::Write,
        };
        let (reply, outcome) = mpsc::channel();
        let told = Box::new(move |outcome| reply.send(outcome).expect("somebody hears"));
        daemon.space.fault(&Cause::Fault(fault), Wait::Reply(told));
        self.end_loads();
        let outcome = outcome.try_recv().expect("an answer, and at once");
        let damaged = self.world.lock().page(page).damaged;
        // Whoever asks learns that nobody is there; nothing comes to be taken for lost by it.
        let right = match outcome {
            FaultOutcome::Present | FaultOutcome::Gone | FaultOutcome::OutOfRange => true,
            FaultOutcome::Lost => damaged,
        };
        assert!(right, "{page:?}: {outcome:?}");
    }
}
