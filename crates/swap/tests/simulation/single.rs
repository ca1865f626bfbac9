// SPDX-License-Identifier: Apache-2.0
//! What no run at random can have: somebody who writes to the VM's memory behind everybody's back.

use crate::{
    content::{SECTORS, Stamps},
    daemon::{Daemon, Task},
    guest::Message,
    kernel::World,
    knobs::{Eviction, Far, Room, Slow},
};
use pagetide_addr::{Access, PageNo, PageSet};
use pagetide_gmem::{
    ContentStore, PageState, PageWord, WordArray,
    recovery::{RecoveryError, recover_words},
};
use pagetide_swap::{
    PoolWords,
    reclaim::{Reach, UNMAPPED_MIN},
};
use std::{path::PathBuf, sync::Arc};

const PAGE: PageNo = PageNo(7);
const OLD: Stamps = Stamps([11; SECTORS]);
const FOREIGN_PAGES: Stamps = Stamps([13; SECTORS]);

struct Stage {
    world: Arc<World>,
    daemon: Arc<Daemon>,
    _directory: tempfile::TempDir,
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.world.set_daemon(None);
    }
}

impl Stage {
    /// A VM without any trouble, whose one page is evicted.
    fn with_an_evicted_page() -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path: PathBuf = directory.path().join("vm.pool");
        let world = World::new(1);
        {
            let mut state = world.lock();
            state.knobs.calm();
            state.knobs.bustle = 0;
            state.knobs.limit_pages = None;
            state.knobs.neighbours_max = 0;
            state.knobs.room = Room::Ample;
            state.knobs.far = Far::Nothing;
            state.knobs.slow = Slow::Nothing;
            state.knobs.eviction = Eviction::AtRandom;
            let page = state.page(PAGE);
            page.content = Some(OLD);
            page.versions = vec![OLD];
        }
        let daemon = Daemon::found(&world, &path);
        daemon.perform(Task::Evict {
            section: PAGE.section(),
            wanted: PageSet::of_range(PAGE.section(), PAGE.single()),
            pages_max: 1,
        });
        assert_eq!(world.lock().page(PAGE).content, None);
        Self {
            world,
            daemon,
            _directory: directory,
        }
    }

    fn intrude(&self) {
        self.world.lock().page(PAGE).content = Some(FOREIGN_PAGES);
    }

    /// The stored copy is kept, and whole.
    fn assert_copy_is_kept(&self) {
        let words = PoolWords::of(self.daemon.store.pool().clone());
        let bits = words.cell(PAGE).load(std::sync::atomic::Ordering::Relaxed);
        let PageState::Stored(content) = PageWord::from_bits(bits).unwrap().state() else {
            panic!("the word is {bits:#x}");
        };
        let mut bytes = [0; 4096];
        self.daemon.store.load(PAGE, content, &mut bytes).unwrap();
        assert_eq!(Stamps::parse(&bytes), Some(OLD));
    }
}

#[test]
fn fault_on_a_stored_page_that_is_present_is_a_foreign_page_and_keeps_the_copy() {
    let stage = Stage::with_an_evicted_page();
    stage.intrude();
    let access = Access::Read;
    stage
        .daemon
        .perform(Task::Vcpu(Message { page: PAGE, access }));
    assert!(stage.world.lock().foreign_pages.contains(&PAGE));
    assert_eq!(stage.world.lock().page(PAGE).content, Some(FOREIGN_PAGES));
    stage.assert_copy_is_kept();
}

#[test]
fn successor_that_finds_a_stored_page_present_refuses_and_changes_nothing() {
    let stage = Stage::with_an_evicted_page();
    stage.intrude();
    let life = stage.daemon.life();
    let table = crate::audit::words(&stage.daemon.store);
    let found = recover_words(&table, &life, |_, _| {});
    assert!(matches!(
        found,
        Err(RecoveryError::ForeignPage {
            first: PAGE,
            count: 1
        })
    ));
    stage.assert_copy_is_kept();
}

#[test]
fn evicted_page_comes_back_as_it_was() {
    let stage = Stage::with_an_evicted_page();
    let access = Access::Read;
    stage
        .daemon
        .perform(Task::Vcpu(Message { page: PAGE, access }));
    assert_eq!(stage.world.lock().page(PAGE).content, Some(OLD));
}

#[test]
fn page_that_came_back_untouched_to_an_emptied_section_goes_before_another_pass_is_needed() {
    let stage = Stage::with_an_evicted_page();
    let elsewhere = PageNo(PAGE.section().all_pages().end.0);
    stage.world.lock().knobs.active = vec![elsewhere];
    let rest = |task| {
        stage.daemon.perform(task);
        let ms = UNMAPPED_MIN.as_millis();
        let ms = u64::try_from(ms).expect("some milliseconds");
        stage.world.lock().pass_time(ms);
    };
    let reclaim = || Task::Reclaim {
        pages: 1,
        reach: Reach::AllResting,
    };
    rest(Task::Scan);
    rest(reclaim());
    stage.daemon.perform(reclaim());
    rest(Task::Scan);
    // The scan has seen nothing of it: a device asked for it, and did not use it.
    let access = Access::Read;
    stage
        .daemon
        .perform(Task::Vcpu(Message { page: PAGE, access }));
    stage.world.lock().page(PAGE).mapped = false;
    assert_eq!(stage.world.lock().page(PAGE).content, Some(OLD));
    // It is found and goes without another scan, once the others have had their turn.
    let is_gone = |reach| {
        stage.daemon.perform(Task::Reclaim { pages: 1, reach });
        stage.world.lock().page(PAGE).content.is_none()
    };
    // The simulation protects a section now and then: it may be that one.
    let reaches = [Reach::AllResting, Reach::Protected].into_iter().cycle();
    assert!(reaches.take(8).any(is_gone), "nobody looked for it");
}
