// SPDX-License-Identifier: Apache-2.0
//! The seams: every call of a daemon into the kernel, and into its own pool, goes through here.
//!
//! At each call, before it takes effect, guest and devices may take steps, other
//! faults may be served (on another thread if need be, which this one waits for:
//! so a run is deterministic), and the daemon may die. It dies by unwinding: whatever it
//! still calls on the way changes nothing.
//!
//! # Which calls let other faults in
//! A fault holds its section's lock shared, so others may be served meanwhile,
//! as when a device's service and the reader of a VM's faults work side by side.
//! An eviction holds it exclusively in all calls but `read`. A thread that looks
//! at a word for a device may have the list of waiters locked. Where a fault
//! cannot be let in, its message stays in the queue, as it would in the kernel.
//! A load of far content may end wherever a fault may be let in.

use crate::{
    aside::Aside,
    content::Stamps,
    daemon::{Daemon, Task},
    dimm::{PAGE_COUNT, SLOT},
    random::OneIn,
    state::{Frame, Page, State},
};
use pagetide_addr::{Access, PageNo, PageRange, PageSet, SectionNo};
use pagetide_gmem::{
    Backing, Installed, Mmu, MmuError, MmuLimits, NoRoom, Place, PlaceError, Restrict, Restricted,
    TableId, WordArray,
};
use pagetide_policy::{
    sampling::{Look, Sampled, Touched},
    tracker::{AccessTracker, TrackerError},
};
use pagetide_swap::PoolWords;
use std::{
    io,
    panic::resume_unwind,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// What a daemon dies of.
#[derive(Debug)]
pub struct Death;

/// What kind of call it is; see the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    /// A look at a page word, or a change of it.
    Word,
    /// Under a section's lock.
    Locked,
    /// Under no lock.
    Unlocked,
}

/// How many tasks of a daemon may be under way at once.
const FRAMES_MAX: usize = 3;
/// Page words are looked at much more often than the kernel is called.
const WORDS_PER_CALL: u64 = 16;

/// Everything there is: the state, and the daemon that lives.
pub struct World {
    state: Mutex<State>,
    daemon: Mutex<Option<Arc<Daemon>>>,
    aside: Aside,
}

impl World {
    pub fn new(seed: u64) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State::new(seed)),
            daemon: Mutex::new(None),
            aside: Aside::default(),
        })
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn daemon(&self) -> Option<Arc<Daemon>> {
        self.daemon
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub fn set_daemon(&self, daemon: Option<Arc<Daemon>>) {
        *self.daemon.lock().unwrap_or_else(PoisonError::into_inner) = daemon;
    }

    /// Guest, devices and other faults, between two calls of a task.
    fn interleave(&self, call: Call) {
        let (task, within_fault) = {
            let mut state = self.lock();
            state.step();
            if !may_nest(&state.frames, call) || state.random.coin() {
                return;
            }
            let within_fault = state.frames.iter().any(|frame| *frame != Frame::Evict);
            (nested_task(&mut state, call), within_fault)
        };
        let (Some(task), Some(daemon)) = (task, self.daemon()) else {
            return;
        };
        self.lock().coverage.nested_tasks += 1;
        if !within_fault {
            daemon.perform(task);
            return;
        }
        // A thread serves one fault at a time: it has one buffer for that.
        let done = self.aside.perform(move || daemon.perform(task));
        if let Err(death_or_failure) = done {
            resume_unwind(death_or_failure);
        }
    }
}

fn may_nest(frames: &[Frame], call: Call) -> bool {
    frames.len() < FRAMES_MAX
        && match (frames.last(), call) {
            (Some(Frame::Evict), call) => call == Call::Unlocked,
            (Some(Frame::VcpuFault(_)), _) => true,
            (Some(Frame::DeviceFault | Frame::Setup), call) => call != Call::Word,
            (Some(Frame::Grow) | None, _) => false,
        }
}

fn nested_task(state: &mut State, call: Call) -> Option<Task> {
    // The list of devices is locked in every call that has to do with one.
    let list_is_free = state.frames.iter().all(|frame| *frame == Frame::Evict);
    if list_is_free
        && state.random.below(20) == 0
        && let Some(device) = state.reset_an_idle_device()
    {
        state.coverage.attached_devices += 1;
        return Some(Task::Attach { device });
    }
    if call != Call::Word
        && state.random.below(4) == 0
        && let Some(task) = Task::about_memory(state)
        && may_grow(&state.frames)
    {
        return Some(task);
    }
    if call != Call::Word
        && state.has_loads()
        && state.random.below(3) == 0
        && let Some(task) = Task::next_load(state)
    {
        return Some(task);
    }
    if call != Call::Word
        && state.random.below(6) == 0
        && let Some(task) = Task::random_eviction(state)
        && may_evict(&state.frames, &task)
    {
        return Some(task);
    }
    Task::next_fault(state)
}

/// An eviction needs its section's lock for itself.
fn may_evict(frames: &[Frame], task: &Task) -> bool {
    frames.iter().all(|frame| match (frame, task) {
        (Frame::Evict, _) => true,
        (Frame::VcpuFault(shared), Task::Evict { section, .. }) => shared != section,
        _ => false,
    })
}

/// So does whoever changes what memory there is, for sections of the slot.
fn may_grow(frames: &[Frame]) -> bool {
    frames.iter().all(|frame| match frame {
        Frame::Evict => true,
        Frame::VcpuFault(shared) => SLOT.sections().all(|section| section != *shared),
        _ => false,
    })
}

/// The kernel as one incarnation of the daemon has it.
#[derive(Clone)]
pub struct Life {
    pub world: Arc<World>,
    pub number: u32,
}

impl Life {
    /// A call begins. `None` if this incarnation is dead: the call then does nothing.
    pub fn enter(&self, call: Call) -> Option<MutexGuard<'_, State>> {
        if std::thread::panicking() {
            return None;
        }
        let steps = {
            let mut state = self.lock_if_alive()?;
            state.coverage.calls += 1;
            let bustle = state.knobs.bustle;
            match call {
                Call::Word if state.random.below(WORDS_PER_CALL) != 0 => 0,
                _ => state.random.below(bustle + 1),
            }
        };
        for _ in 0..steps {
            self.world.interleave(call);
        }
        let mut state = self.lock_if_alive()?;
        let vmm_deaths = state.knobs.vmm_deaths;
        let may_come = vmm_deaths != OneIn(0) && !state.gone;
        if may_come
            && (call != Call::Word || state.random.below(WORDS_PER_CALL) == 0)
            && state.happens(vmm_deaths)
        {
            state.vmm_dies();
        }
        let deaths = state.knobs.deaths;
        let spared = call == Call::Word && state.random.below(WORDS_PER_CALL) != 0;
        if !spared && state.deaths_left > 0 && state.happens(deaths) {
            state.deaths_left -= 1;
            state.alive = false;
            state.coverage.deaths += 1;
            drop(state);
            resume_unwind(Box::new(Death));
        }
        Some(state)
    }

    /// True if this incarnation is not dead.
    pub fn lives(&self) -> bool {
        !std::thread::panicking() && self.lock_if_alive().is_some()
    }

    fn lock_if_alive(&self) -> Option<MutexGuard<'_, State>> {
        let state = self.world.lock();
        (state.alive && state.incarnation == self.number).then_some(state)
    }

    fn place_call(&self, call: Call) -> Result<MutexGuard<'_, State>, PlaceError> {
        self.enter(call)
            .filter(|state| !state.gone)
            .ok_or(PlaceError::Gone)
    }

    fn mmu_call(&self) -> Result<MutexGuard<'_, State>, MmuError> {
        self.enter(Call::Locked)
            .filter(|state| !state.gone)
            .ok_or(MmuError::Gone)
    }

    /// Everything the kernel says about memory that is unmapped is an error, but that nobody asks about
    /// memory that is out of the space.
    fn memory_call(
        &self,
        operation: &'static str,
        pages: PageRange,
    ) -> Result<MutexGuard<'_, State>, PlaceError> {
        let state = self.place_call(Call::Locked)?;
        Self::check_memory(state, operation, pages)
    }

    /// The same by the RAM file: it lives as long as anybody has it open, so after its VMM, too.
    fn file_call(
        &self,
        operation: &'static str,
        pages: PageRange,
    ) -> Result<MutexGuard<'_, State>, PlaceError> {
        let state = self.enter(Call::Locked).ok_or(PlaceError::Gone)?;
        Self::check_memory(state, operation, pages)
    }

    fn check_memory<'s>(
        state: MutexGuard<'s, State>,
        operation: &'static str,
        pages: PageRange,
    ) -> Result<MutexGuard<'s, State>, PlaceError> {
        let any = |is: fn(&Page) -> bool| pages.iter().any(|p| is(&state.pages[p.index()]));
        assert!(
            !any(|page| page.removed),
            "{operation} of removed {pages:?}"
        );
        if any(|page| page.unmapped) {
            return Err(place_error(operation, pages));
        }
        Ok(state)
    }

    /// A task begins; it ends when the value is dropped.
    pub fn frame(&self, frame: Frame) -> OpenFrame<'_> {
        self.world.lock().frames.push(frame);
        OpenFrame(&self.world)
    }
}

/// See [`Life::frame`].
pub struct OpenFrame<'world>(&'world World);

impl Drop for OpenFrame<'_> {
    fn drop(&mut self) {
        self.0.lock().frames.pop();
    }
}

fn refused() -> io::Error {
    io::Error::other("injected")
}

fn place_error(operation: &'static str, pages: PageRange) -> PlaceError {
    PlaceError::Kernel {
        operation,
        start: pages.start,
        end: pages.end,
        source: refused(),
    }
}

fn mmu_error(operation: &'static str) -> MmuError {
    MmuError::Kernel {
        operation,
        source: refused(),
    }
}

impl State {
    /// True if the section's first page is no memory any more.
    fn is_unmapped(&self, section: SectionNo) -> bool {
        let first = section.pages(PAGE_COUNT).start;
        self.pages[first.index()].unmapped
    }

    fn install(&mut self, number: PageNo, content: Stamps) -> Installed {
        if self.page(number).content.is_some() {
            return Installed::AlreadyThere;
        }
        let overwritten = self.note_installed(number, content);
        let page = self.page(number);
        assert!(
            overwritten || page.versions.contains(&content),
            "{content:?} is installed in {number:?}, which may hold {:?}",
            page.versions
        );
        if overwritten {
            page.versions = vec![content];
            page.past.push(content);
        }
        page.content = Some(content);
        page.instance += 1;
        page.protected = false;
        page.mapped = true;
        self.tell(number, "installed");
        self.wake(number.single());
        Installed::Installed
    }

    fn punch(&mut self, number: PageNo) {
        if self.pages[number.index()].content.is_none() {
            return;
        }
        if let Some(why) = self.held_by_a_device(number) {
            panic!("{number:?} is punched although {why}");
        }
        let instance = self.pages[number.index()].instance;
        let pinned = self
            .kernel_pins
            .iter()
            .any(|pin| (pin.page, pin.instance) == (number, instance));
        assert!(!pinned, "{number:?} is punched under a system call");
        let vmm_is_dead = self.gone;
        let page = self.page(number);
        assert!(
            page.protected || vmm_is_dead,
            "{number:?} is punched while vCPUs may write"
        );
        page.content = None;
        page.mapped = false;
        self.tell(number, "punched");
    }
}

fn parse(number: PageNo, bytes: &[u8]) -> Stamps {
    Stamps::parse(bytes).unwrap_or_else(|| panic!("nobody wrote what is installed in {number:?}"))
}

impl Place for Life {
    fn install(&self, page: PageNo, content: &[u8; 4096]) -> Result<Installed, PlaceError> {
        let mut state = self.memory_call("install", page.single())?;
        if state.fails() {
            return Err(place_error("install", page.single()));
        }
        Ok(state.install(page, parse(page, content)))
    }

    fn install_zero(&self, page: PageNo) -> Result<Installed, PlaceError> {
        let mut state = self.memory_call("install_zero", page.single())?;
        if state.fails() {
            return Err(place_error("install_zero", page.single()));
        }
        Ok(state.install(page, Stamps::ZERO))
    }

    fn install_run(&self, pages: PageRange, content: &[u8]) -> Result<u64, PlaceError> {
        let mut state = self.memory_call("install_run", pages)?;
        assert_eq!(content.len() as u64, pages.bytes());
        let mut installed = 0;
        for (page, bytes) in pages.iter().zip(content.chunks_exact(4096)) {
            if state.fails() {
                // What is there is there: the kernel then tells of a short run, not of an error.
                return if installed > 0 {
                    Ok(installed)
                } else {
                    Err(place_error("install_run", pages))
                };
            }
            if state.install(page, parse(page, bytes)) == Installed::AlreadyThere {
                break;
            }
            installed += 1;
        }
        Ok(installed)
    }

    fn read(&self, pages: PageRange, into: &mut [u8]) -> Result<(), PlaceError> {
        let mut state = self.enter(Call::Unlocked).ok_or(PlaceError::Gone)?;
        // A round may be reading when its memory goes.
        let unmapped = pages.iter().any(|p| state.pages[p.index()].unmapped);
        if unmapped || state.fails() {
            return Err(place_error("read", pages));
        }
        for (page, bytes) in pages.iter().zip(into.chunks_exact_mut(4096)) {
            let content = state.page(page).content;
            content.unwrap_or(Stamps::ZERO).render(bytes);
            state.tell(page, "read for eviction");
        }
        Ok(())
    }

    fn discard(&self, pages: PageRange) -> Result<(), PlaceError> {
        let mut state = self.file_call("discard", pages)?;
        for page in pages.iter() {
            if state.fails() {
                return Err(place_error("discard", pages));
            }
            state.punch(page);
        }
        Ok(())
    }

    fn is_present(&self, page: PageNo) -> Result<bool, PlaceError> {
        let mut state = self.file_call("is_present", page.single())?;
        if state.fails() {
            return Err(place_error("is_present", page.single()));
        }
        Ok(state.page(page).content.is_some())
    }

    fn present_runs(&self, pages: PageRange) -> Result<Vec<PageRange>, PlaceError> {
        let mut state = self.file_call("present_runs", pages)?;
        if state.fails() {
            return Err(place_error("present_runs", pages));
        }
        let mut runs: Vec<PageRange> = Vec::new();
        for page in pages
            .iter()
            .filter(|p| state.pages[p.index()].content.is_some())
        {
            match runs.last_mut() {
                Some(run) if run.end == page => run.end = page.next(),
                _ => runs.push(page.single()),
            }
        }
        Ok(runs)
    }

    fn wake(&self, pages: PageRange) -> Result<(), PlaceError> {
        self.memory_call("wake", pages)?.wake(pages);
        Ok(())
    }

    fn poison(&self, page: PageNo) -> Result<(), PlaceError> {
        let mut state = self.memory_call("poison", page.single())?;
        let found = state.page(page);
        assert!(found.damaged, "{page:?} is poisoned but was never damaged");
        found.poisoned = true;
        state.wake(page.single());
        Ok(())
    }
}

/// The VMM's userfaultfd as an MMU.
pub struct VcpuMmu(pub Life);

impl Mmu for VcpuMmu {
    fn limits(&self) -> MmuLimits {
        MmuLimits {
            strongest: Restrict::ReadOnly,
            ..MmuLimits::PAGED
        }
    }

    fn restrict(
        &self,
        _table: TableId,
        section: SectionNo,
        pages: &PageSet,
        to: Restrict,
    ) -> Result<Restricted, MmuError> {
        assert_eq!(to, Restrict::ReadOnly, "vCPUs can always read");
        let mut state = self.0.mmu_call()?;
        for page in pages.pages(section) {
            let found = state.page(page);
            assert!(!found.removed, "{page:?} is protected though it is removed");
            if found.unmapped || state.fails() {
                return Err(mmu_error("protect"));
            }
            state.page(page).protected = true;
            state.tell(page, "protected");
        }
        Ok(Restricted::Done)
    }

    fn grant(
        &self,
        _table: TableId,
        pages: PageRange,
        _access: Access,
        _backing: Backing,
    ) -> Result<(), MmuError> {
        let mut state = self.0.mmu_call()?;
        let unmapped = pages.iter().any(|page| state.page(page).unmapped);
        if unmapped || state.fails() {
            return Err(mmu_error("unprotect"));
        }
        for page in pages.iter() {
            state.page(page).protected = false;
        }
        state.tell_range(pages, "unprotected");
        state.wake(pages);
        Ok(())
    }
}

/// A device's bits as an MMU.
pub struct DeviceMmu {
    pub life: Life,
    pub device: usize,
}

impl Mmu for DeviceMmu {
    fn limits(&self) -> MmuLimits {
        MmuLimits::PAGED
    }

    /// Its bits are gone with it. (The list of devices is locked: no other fault can be let in.)
    fn destroy_table(&self, _table: TableId) {
        if let Some(mut state) = self.life.lock_if_alive() {
            state.devices[self.device].may.fill(false);
        }
    }

    /// From now on it does DMA. (As above.)
    fn activate(&self, _table: TableId) -> Result<(), MmuError> {
        let mut state = self.life.lock_if_alive().ok_or(MmuError::Gone)?;
        state.devices[self.device].active = true;
        Ok(())
    }

    fn deactivate(&self, _table: TableId) -> Result<(), MmuError> {
        if let Some(mut state) = self.life.lock_if_alive() {
            state.devices[self.device].active = false;
        }
        Ok(())
    }

    fn wired(&self, section: SectionNo) -> PageSet {
        self.life
            .enter(Call::Locked)
            .map_or(PageSet::EMPTY, |state| state.wired_in(self.device, section))
    }

    fn restrict(
        &self,
        _table: TableId,
        section: SectionNo,
        pages: &PageSet,
        to: Restrict,
    ) -> Result<Restricted, MmuError> {
        assert_eq!(to, Restrict::NoAccess);
        let mut state = self.life.enter(Call::Locked).ok_or(MmuError::Gone)?;
        if state.fails() {
            return Err(mmu_error("clear bits"));
        }
        Ok(state.restrict_device(self.device, section, pages))
    }

    fn grant(
        &self,
        _table: TableId,
        pages: PageRange,
        _access: Access,
        _backing: Backing,
    ) -> Result<(), MmuError> {
        let mut state = self.life.enter(Call::Locked).ok_or(MmuError::Gone)?;
        if state.fails() {
            return Err(mmu_error("set bits"));
        }
        for page in pages.iter() {
            let there = state.page(page).content.is_some();
            let removed = state.page(page).removed;
            assert!(!removed, "{page:?} is granted though it is removed");
            assert!(
                there || state.coverage.discards + state.coverage.unplugs > 0,
                "{page:?} is granted to device {} although it is absent",
                self.device
            );
            state.devices[self.device].may[page.index()] = true;
            state.tell(page, format_args!("granted to device {}", self.device));
        }
        Ok(())
    }
}

/// The VMM's page table, seen from outside.
pub struct Tracker(pub Life);

impl AccessTracker for Tracker {
    fn sample(&self, looks: &[Look]) -> Result<Sampled, TrackerError> {
        let mut state = self.0.enter(Call::Unlocked).ok_or("dead")?;
        if state.fails() {
            return Err("injected".into());
        }
        if looks.iter().any(|look| state.is_unmapped(look.section)) {
            return Err("unmapped".into());
        }
        let mut sampled = Sampled::default();
        for look in looks {
            let mut touched = Touched::default();
            for number in look.section.pages(PAGE_COUNT).iter() {
                let page = state.page(number);
                if page.mapped && look.asked.contains(number) {
                    touched.cpu.insert(number);
                }
                if look.next.contains(number) && std::mem::take(&mut page.mapped) {
                    sampled.unmapped_pages += 1;
                }
                if std::mem::take(&mut page.dma) {
                    touched.dma.insert(number);
                }
            }
            sampled.touched.push(touched);
        }
        Ok(sampled)
    }

    fn take_out(&self, sections: &[SectionNo]) -> Result<Vec<Touched>, TrackerError> {
        let mut state = self.0.enter(Call::Unlocked).ok_or("dead")?;
        if state.fails() {
            return Err("injected".into());
        }
        if sections.iter().any(|section| state.is_unmapped(*section)) {
            return Err("unmapped".into());
        }
        let mut all = Vec::new();
        for section in sections {
            let mut touched = Touched::default();
            for number in section.pages(PAGE_COUNT).iter() {
                let page = state.page(number);
                if std::mem::take(&mut page.mapped) {
                    touched.cpu.insert(number);
                }
                if std::mem::take(&mut page.dma) {
                    touched.dma.insert(number);
                }
            }
            all.push(touched);
        }
        Ok(all)
    }

    fn mapped(&self, section: SectionNo) -> Result<PageSet, TrackerError> {
        let state = self.0.enter(Call::Unlocked).ok_or("dead")?;
        let mut mapped = PageSet::EMPTY;
        if state.is_unmapped(section) {
            return Err("unmapped".into());
        }
        for page in section.pages(PAGE_COUNT).iter() {
            if state.pages[page.index()].mapped {
                mapped.insert(page);
            }
        }
        Ok(mapped)
    }
}

/// The words of the pool; a dead daemon gets at none of them.
pub struct Words {
    pub life: Life,
    pub pool: PoolWords,
    pub nowhere: AtomicU64,
}

impl WordArray for Words {
    fn page_count(&self) -> u64 {
        self.pool.page_count()
    }

    fn capacity_pages(&self) -> u64 {
        self.pool.capacity_pages()
    }

    fn make_room(&self, pages: PageRange) -> Result<(), NoRoom> {
        let Some(mut state) = self.life.enter(Call::Unlocked) else {
            return Ok(());
        };
        if state.fails() {
            return Err(NoRoom {
                start: pages.start,
                end: pages.end,
                source: refused(),
            });
        }
        self.pool.make_room(pages)
    }

    fn sections_with_room(&self) -> Result<Vec<SectionNo>, NoRoom> {
        self.pool.sections_with_room()
    }

    fn cell(&self, page: PageNo) -> &AtomicU64 {
        match self.life.enter(Call::Word) {
            Some(_) => self.pool.cell(page),
            None => {
                let present = pagetide_gmem::PageWord::new(pagetide_gmem::PageState::Present);
                self.nowhere.store(present.bits(), Ordering::Relaxed);
                &self.nowhere
            }
        }
    }
}
