// SPDX-License-Identifier: Apache-2.0
//! [`Ram`]: memory whose pages may be elsewhere, as a VM's or a file's: a place and a store in one.

use super::{HOME, Machine, PAGE_WORDS};
use pagetide_addr::{PAGE_BYTES, PageNo, PageRange, to_usize};
use pagetide_gmem::{
    Content, ContentStore, Incidents, Installed, MemoryParts, PageTable, PagedMemory, Place,
    PlaceError, StoreError, Unlimited, VolatileWords,
};
use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, PoisonError},
};

#[derive(Default)]
struct Pages {
    present: BTreeSet<u64>,
    stored: HashMap<u64, Vec<u64>>,
    incidents: Vec<String>,
    is_silent: bool,
}

/// A page's slot is its frame at [`HOME`].
#[derive(Clone)]
pub struct Ram {
    machine: Machine,
    pages: Arc<Mutex<Pages>>,
}

fn words_of(bytes: &[u8]) -> Vec<u64> {
    let word = |chunk: &[u8]| u64::from_le_bytes(chunk.try_into().unwrap());
    bytes.chunks_exact(8).map(word).collect()
}

impl Ram {
    pub fn new(machine: &Machine) -> Self {
        Self {
            machine: machine.clone(),
            pages: Arc::default(),
        }
    }

    /// Memory of at most `capacity_pages` pages, none of which is in a region yet.
    pub fn memory(&self, capacity_pages: u64) -> Arc<PagedMemory> {
        let words = VolatileWords::with_capacity(capacity_pages);
        PagedMemory::new(MemoryParts {
            table: PageTable::growing(Box::new(words)),
            place: Arc::new(self.clone()),
            store: Arc::new(self.clone()),
            admission: Arc::new(Unlimited),
            incidents: Arc::new(self.clone()),
            neighbours_max: 0,
        })
    }

    fn with<R>(&self, act: impl FnOnce(&mut Pages) -> R) -> R {
        act(&mut self.pages.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Puts content into a page that is not in use yet, as a file has it before it is mapped.
    pub fn preset(&self, page: PageNo, words: impl Fn(u64) -> u64) {
        self.with(|pages| pages.present.insert(page.0));
        let content = (0..PAGE_WORDS).map(|at| words(page.byte_offset() + at * 8));
        let mut world = self.machine.world();
        world
            .memory
            .insert(HOME + page.byte_offset(), content.collect());
    }

    /// Stores a page's content elsewhere; returns what names it.
    pub fn store(&self, page: PageNo, bytes: &[u8]) -> Content {
        self.with(|pages| pages.stored.insert(page.0 + 1, words_of(bytes)));
        Content::at(page.0 + 1).unwrap()
    }

    /// The stored content of a page is gone behind everybody's back.
    pub fn lose(&self, page: PageNo) {
        self.with(|pages| pages.stored.remove(&(page.0 + 1)));
    }

    /// It cannot say which pages are present while `act` runs.
    pub fn silently<R>(&self, act: impl FnOnce() -> R) -> R {
        self.with(|pages| pages.is_silent = true);
        let done = act();
        self.with(|pages| pages.is_silent = false);
        done
    }

    pub fn stored_pages(&self) -> usize {
        self.with(|pages| pages.stored.len())
    }

    pub fn present_pages(&self) -> usize {
        self.with(|pages| pages.present.len())
    }

    pub fn incidents(&self) -> Vec<String> {
        self.with(|pages| pages.incidents.clone())
    }

    fn tell(&self, what: String) {
        self.with(|pages| pages.incidents.push(what));
    }
}

impl Place for Ram {
    fn install(&self, page: PageNo, content: &[u8; 4096]) -> Result<Installed, PlaceError> {
        if !self.with(|pages| pages.present.insert(page.0)) {
            return Ok(Installed::AlreadyThere);
        }
        let mut world = self.machine.world();
        world
            .memory
            .insert(HOME + page.byte_offset(), words_of(content));
        Ok(Installed::Installed)
    }

    fn install_zero(&self, page: PageNo) -> Result<Installed, PlaceError> {
        self.install(page, &[0; 4096])
    }

    fn install_run(&self, pages: PageRange, content: &[u8]) -> Result<u64, PlaceError> {
        let page_bytes = to_usize(PAGE_BYTES);
        let mut done = 0;
        for (page, bytes) in pages.iter().zip(content.chunks_exact(page_bytes)) {
            if self.install(page, bytes.try_into().unwrap())? == Installed::AlreadyThere {
                break;
            }
            done += 1;
        }
        Ok(done)
    }

    fn read(&self, pages: PageRange, into: &mut [u8]) -> Result<(), PlaceError> {
        let mut world = self.machine.world();
        let begin = HOME + pages.start.byte_offset();
        for (at, chunk) in (0_u64..).zip(into.chunks_exact_mut(8)) {
            chunk.copy_from_slice(&world.word(begin + at * 8).to_le_bytes());
        }
        Ok(())
    }

    fn discard(&self, pages: PageRange) -> Result<(), PlaceError> {
        self.machine.assert_unreachable(pages);
        self.with(|known| {
            known.present.retain(|page| !pages.contains(PageNo(*page)));
        });
        Ok(())
    }

    fn is_present(&self, page: PageNo) -> Result<bool, PlaceError> {
        Ok(self.with(|pages| pages.present.contains(&page.0)))
    }

    fn present_runs(&self, pages: PageRange) -> Result<Vec<PageRange>, PlaceError> {
        if self.with(|pages| pages.is_silent) {
            return Err(PlaceError::Gone);
        }
        Ok(self.with(|known| {
            let within = known.present.range(pages.start.0..pages.end.0);
            within.map(|page| PageNo(*page).single()).collect()
        }))
    }

    fn wake(&self, _pages: PageRange) -> Result<(), PlaceError> {
        Ok(())
    }

    fn poison(&self, page: PageNo) -> Result<(), PlaceError> {
        self.tell(format!("{page:?} poisoned"));
        Ok(())
    }
}

impl ContentStore for Ram {
    fn load(
        &self,
        page: PageNo,
        content: Content,
        into: &mut [u8; 4096],
    ) -> Result<(), StoreError> {
        assert_eq!(Content::at(page.0 + 1), Some(content));
        let words = self.with(|pages| pages.stored.get(&(page.0 + 1)).cloned());
        let words = words.ok_or(StoreError::Damaged {
            page,
            why: "nothing is stored for it",
        })?;
        for (chunk, word) in into.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        Ok(())
    }

    fn free(&self, content: Content) {
        self.with(|pages| {
            pages
                .stored
                .retain(|page, _| Content::at(*page) != Some(content));
        });
    }
}

impl Incidents for Ram {
    fn foreign_page(&self, page: PageNo) {
        self.tell(format!("a foreign page in {page:?}"));
    }

    fn poisoned(&self, page: PageNo, why: &StoreError) {
        self.tell(format!("{page:?} poisoned: {why}"));
    }

    fn cannot_poison(&self, page: PageNo, why: &PlaceError) {
        self.tell(format!("{page:?}: {why}"));
    }

    fn fill_failed(&self, page: PageNo, why: &dyn std::error::Error) {
        self.tell(format!("{page:?}: {why}"));
    }
}
