// SPDX-License-Identifier: Apache-2.0
//! RAM that comes and goes while a VM is attached (GMEM 4.2, use example #1).
//!
//! The VM's rounds look at the VMM's mappings each second and before each pass of
//! a reclaim. A RAM file that is new becomes a region of the address space
//! (`gm_as_alloc`), one that is mapped nowhere any more is given back
//! (`gm_region_dealloc`). Nothing of the VMM is stopped for it.
//!
//! ```text
//!   new file                                     file mapped nowhere
//!   1 looked at: refused what an attach refuses  1 region deallocated: devices lose it (busy?
//!   2 its DMA domain taken: page requests held,    next second again), stored content freed
//!     bits cleared, leases drained               2 domain retired: its page requests are refused
//!   3 identity in the pool: it is the VM's       3 identity in the pool: it is nobody's
//!   4 in the layout; registered with the         4 out of the layout; file and mapping closed,
//!     VMM's userfaultfd; our mapping watched       so the memory goes back to the host
//!   5 region allocated: words by what is
//!     present, present pages granted, waiters
//!     woken; page requests served
//! ```
//! # Until it is taken
//! A device that hears of new RAM from its front end finds the file read-write
//! and unwatched: its DMA works at once. It only is not evicted yet.
//!
//! # The same file again
//! A backend with a path may be taken out and put in again between two looks. That
//! is told by its mapping, which nobody watches, and is both columns above, one
//! after the other: its pages that were away have no content any more.
//!
//! # DMA into RAM that is gone
//! The front end takes the region from its device before the VMM unmaps it, so a
//! descriptor that names it is answered with an error by the device itself. A
//! chain that was waiting for a page there gets the refusal of its page request.
//! Bits that were taken are never set again; a lease under way keeps our mapping
//! until it ends, and writes into a file that nobody reads any more.
//!
//! # When the daemon dies in the middle
//! The identity says which files are the VM's. A successor allocates the region
//! of a file whose words are not there yet, and forgets the words of one that is
//! not in the identity or is gone. A file that was registered and is not in the
//! identity is new to it, and its first look takes it: who waits there is woken.
//! Nothing of a file is evicted before all five steps are done, because it is the
//! same thread that evicts.

use super::{
    core::{VmCore, lock},
    vm::{Shared, failed},
};
use crate::control::ControlError;
use pagetide_addr::{Access, FileKey, PageNo, PageRange};
use pagetide_gmem::{AddressSpace, Fault, Mmu, Place};
use pagetide_vmm::{
    hazards::{self, EvictionBar},
    layout::{NewRam, RamLayout, Strangers},
    place::VmPlace,
    takeover,
};
use pagetide_vpri::{DPU, DmaDomain, DmaMmu};
use std::{
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};

/// How long DMA that is under way in new RAM may take before the VM's rounds go on without it; they
/// come again.
const DRAIN_WAIT: Duration = Duration::from_secs(1);
/// Between two looks at leases.
const DRAIN_LOOK: Duration = Duration::from_micros(200);

/// What has become of a file that was unmapped.
#[derive(Clone, Copy)]
enum Fate {
    /// It is mapped nowhere.
    Gone,
    /// It was mapped anew before anybody looked: new RAM, of the same file.
    Back,
}

/// Follows the RAM of one VM; belongs to its rounds.
pub(super) struct Hotplug {
    vm: Arc<VmCore>,
    place: VmPlace,
    shared: Shared,
    strangers: Strangers,
}

impl Hotplug {
    /// For the VM `vm`, whose regions are those of its layout.
    pub(super) fn new(vm: Arc<VmCore>, shared: &Shared) -> Self {
        Self {
            place: VmPlace::new(Arc::clone(&vm.userfaultfd), Arc::clone(&vm.layout)),
            vm,
            shared: shared.clone(),
            strangers: Strangers::default(),
        }
    }

    /// Brings the VM's regions in line with what the VMM has mapped. Returns what forbids eviction:
    /// RAM that cannot be taken. RAM that cannot be given back yet shows as a mapping that is gone.
    pub(super) fn follow(&mut self) -> Vec<EvictionBar> {
        let barred = |why: String| vec![EvictionBar::NewRam { why }];
        let layout = self.vm.layout.now();
        let (vmm, userfaultfd) = (&self.vm.vmm, &self.vm.userfaultfd);
        let news = match layout.news(vmm, userfaultfd, &mut self.strangers) {
            Ok(news) => news,
            Err(refusal) => return barred(refusal.to_string()),
        };
        let is_back = |key| {
            let is_it = |ram: &NewRam| ram.key() == key;
            news.new.as_ref().is_ok_and(|new| new.iter().any(is_it))
        };
        for key in news.gone {
            let fate = if is_back(key) { Fate::Back } else { Fate::Gone };
            // Its addresses may be those of new RAM already: that waits until this is done.
            if let Err(error) = self.remove(key, fate) {
                tracing::warn!(vm = self.vm.name, %error, "unplugged RAM is not let go yet");
                return Vec::new();
            }
        }
        let new = match news.new {
            Ok(new) => new,
            Err(refusal) => return barred(refusal.to_string()),
        };
        let refused = |ram: &NewRam| self.add(ram).err();
        let whys = new.iter().filter_map(refused);
        let barred = whys.map(|error| EvictionBar::NewRam { why: error.message });
        let changed = news.unwatched.into_iter();
        changed
            .map(|change| EvictionBar::MapsChanged { change })
            .chain(barred)
            .collect()
    }

    /// Lets go of a file that the VMM has unmapped.
    fn remove(&self, key: FileKey, fate: Fate) -> Result<(), ControlError> {
        let vm = &self.vm;
        let layout = vm.layout.now();
        let Some(pages) = layout.file(key).map(|file| file.pages()) else {
            return Ok(());
        };
        vm.whole.remove_ram(pages)?;
        let domains = vm.mmu.domains();
        if let Some(domain) = domains.iter().find(|domain| domain.key() == key) {
            vm.mmu.remove(domain.id());
            if let Some(alias) = lock(&vm.alias).as_mut() {
                alias.remove(domain);
            }
            match fate {
                Fate::Gone => {
                    self.shared.service.refuse(domain);
                    self.shared.domains.retire(domain);
                }
                // A device may have it by its new mapping already.
                Fate::Back => {
                    domain.detach();
                    self.shared.service.release(std::slice::from_ref(domain));
                }
            }
        }
        let left = layout.without(key);
        vm.remember_ram(&left)?;
        // Nobody should wait there any more; who does is to look again.
        self.place.wake(pages).map_err(failed)?;
        vm.layout.set(left);
        tracing::info!(
            vm = vm.name,
            bytes = pages.bytes(),
            first_page = pages.start.0,
            ram_bytes = vm.layout.look().len_bytes(),
            "RAM was unplugged; pages of it that were away read zeros in its file from now on"
        );
        vm.ram_changed();
        Ok(())
    }

    /// Takes a new file for the VM.
    fn add(&self, ram: &NewRam) -> Result<(), ControlError> {
        let vm = &self.vm;
        let layout = vm.layout.now();
        let first = layout.room_for(ram.page_count());
        let alone = RamLayout::default().with(ram, first).map_err(failed)?;
        let grown = layout.with(ram, first).map_err(failed)?;
        hazards::refuse_if_shared(&vm.vmm, &alone).map_err(failed)?;
        super::attach::refuse_unseen_pages(&alone)?;
        let Some(file) = alone.files().first() else {
            return Ok(());
        };
        let (key, pages) = (file.key(), file.pages());
        let opened = self
            .shared
            .domains
            .open(file.file().as_fd(), key, pages.bytes());
        let domain = opened.map_err(failed)?;
        domain.attach().map_err(failed)?;
        let joining = Joining {
            hotplug: self,
            before: &layout,
            alone: &alone,
            domain: &domain,
            pages,
        };
        if let Err(error) = joining.join(&grown) {
            joining.undo();
            return Err(error);
        }
        tracing::info!(
            vm = vm.name,
            bytes = pages.bytes(),
            first_page = pages.start.0,
            ram_bytes = grown.len_bytes(),
            "RAM was plugged in"
        );
        vm.ram_changed();
        Ok(())
    }
}

/// A file on its way to become the VM's; its domain is taken.
struct Joining<'a> {
    hotplug: &'a Hotplug,
    before: &'a RamLayout,
    /// A layout with that file only.
    alone: &'a RamLayout,
    domain: &'a Arc<DmaDomain>,
    pages: PageRange,
}

impl Joining<'_> {
    fn join(&self, grown: &RamLayout) -> Result<(), ControlError> {
        let vm = &self.hotplug.vm;
        let service = &self.hotplug.shared.service;
        service.hold(std::slice::from_ref(self.domain));
        self.domain.attributes().unmap_all();
        self.drain()?;
        vm.remember_ram(grown)?;
        vm.layout.set(grown.clone());
        takeover::watch(&vm.userfaultfd, self.alone).map_err(failed)?;
        if let Some(alias) = lock(&vm.alias).as_mut() {
            alias.add(self.domain).map_err(failed)?;
        }
        vm.mmu.add(self.domain, self.pages);
        vm.whole.add_ram(self.pages)?;
        fill_wired(&vm.space, &vm.mmu, self.pages);
        // Faults that were read before the region was there.
        self.hotplug.place.wake(self.pages).map_err(failed)?;
        service.serve_domains(&vm.tenant, std::slice::from_ref(self.domain));
        Ok(())
    }

    /// Waits until no DMA is under way that began before the bits were cleared.
    fn drain(&self) -> Result<(), ControlError> {
        let begun = Instant::now();
        while self.domain.attributes().is_any_leased() {
            if begun.elapsed() > DRAIN_WAIT {
                return Err(ControlError::refused(
                    "a device has I/O in flight in new RAM that does not finish: see to its image's storage",
                ));
            }
            std::thread::sleep(DRAIN_LOOK);
        }
        Ok(())
    }

    /// Leaves the file as it was before: read-write for devices, watched by nobody.
    fn undo(&self) {
        let vm = &self.hotplug.vm;
        if let Err(error) = vm.whole.remove_ram(self.pages) {
            tracing::error!(vm = vm.name, %error, "part of new RAM stays half taken");
        }
        for mapping in self.alone.mappings() {
            // It may not have come to that, or be unmapped again.
            if let Err(error) = vm.userfaultfd.unregister(mapping.hva, mapping.len_bytes) {
                tracing::debug!(vm = vm.name, %error, "new RAM was not watched");
            }
        }
        if let Some(alias) = lock(&vm.alias).as_mut() {
            alias.remove(self.domain);
        }
        vm.mmu.remove(self.domain.id());
        vm.layout.set(self.before.clone());
        if let Err(error) = vm.remember_ram(self.before) {
            tracing::error!(vm = vm.name, %error, "the pool names RAM that is not the VM's");
        }
        self.domain.detach();
        let service = &self.hotplug.shared.service;
        service.release(std::slice::from_ref(self.domain));
    }
}

/// Fills pages among `pages` that nobody has touched though a ring lies there: its device keeps them,
/// so they must be there.
pub(super) fn fill_wired(space: &AddressSpace, mmu: &DmaMmu, pages: PageRange) {
    for section in pages.sections() {
        for page in mmu.wired(section).pages(section) {
            let fault = Fault {
                device: DPU,
                pages: page.single(),
                access: Access::Write,
            };
            space.fault(&fault, None);
        }
    }
}

/// The parts of `pages` that are in no file of `layout`.
pub(super) fn outside(layout: &RamLayout, pages: PageRange) -> Vec<PageRange> {
    let mut parts = Vec::new();
    let mut at = pages.start;
    for file in layout.files() {
        let inside = file.pages().intersect(pages);
        if inside.is_empty() {
            continue;
        }
        if at < inside.start {
            parts.push(PageRange::new(at, inside.start));
        }
        at = PageNo(at.0.max(inside.end.0));
    }
    if at < pages.end {
        parts.push(PageRange::new(at, pages.end));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::{Hva, PAGE_BYTES};
    use pagetide_sys::memory_file::GuestFile;
    use pagetide_vmm::layout::RamMapping;

    #[test]
    fn what_is_outside_all_files_is_told_in_parts() {
        let mut layout = RamLayout::default();
        for (first, pages) in [(0_u64, 600_u64), (1024, 512), (2048, 10)] {
            let bytes = pages * PAGE_BYTES;
            let mapping = RamMapping {
                hva: Hva((first + 1) * PAGE_BYTES),
                len_bytes: bytes,
                file: 0,
                file_offset: 0,
            };
            let file = GuestFile::new_memfd("outside", bytes).unwrap();
            let ram = NewRam::new(file, bytes, vec![mapping]).unwrap();
            layout = layout.with(&ram, PageNo(first)).unwrap();
        }
        let of = |start, end| {
            let parts = outside(&layout, PageRange::new(PageNo(start), PageNo(end)));
            let numbers = parts.iter().map(|part| (part.start.0, part.end.0));
            numbers.collect::<Vec<_>>()
        };
        assert_eq!(of(0, 600), []);
        assert_eq!(of(512, 1024), [(600, 1024)]);
        assert_eq!(of(1536, 2048), [(1536, 2048)]);
        assert_eq!(of(590, 2560), [(600, 1024), (1536, 2048), (2058, 2560)]);
    }
}
