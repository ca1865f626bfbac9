// SPDX-License-Identifier: Apache-2.0
//! RAM that is plugged and unplugged while a VM is attached (GMEM 4.2, use example #1).
//!
//! The VM's reclaim thread reads the VMM's mappings each second and before each pass of a reclaim. A new
//! RAM file becomes a region of the address space (`gm_as_alloc`); one that is mapped nowhere any more
//! is given back (`gm_region_dealloc`). The VMM is not stopped for this.
//!
//! ```text
//!   new file                                     file mapped nowhere
//!   1 looked at: refused what an attach refuses; 1 region deallocated: devices lose it (busy?
//!     room made for its words                      next second again), stored content freed
//!   2 its DMA domain taken: page requests held,  2 domain retired: its page requests are refused
//!     bits cleared, leases drained
//!   3 identity in the pool: it is the VM's       3 identity in the pool: it is nobody's
//!   4 in the layout; registered with the         4 out of the layout; file and mapping closed,
//!     VMM's userfaultfd, and looked at again:      so the memory goes back to the host
//!     still mapped so? our mapping watched
//!   5 region allocated: words by what is
//!     present, present pages granted, waiters
//!     woken; page requests served
//! ```
//! # Until it is taken over
//! A device that receives new RAM from its front end finds the file read-write and unwatched: its DMA
//! works at once. That RAM is just not evicted yet. The same holds for RAM that is refused, for as long
//! as it is: the rest of the VM does not depend on it, so it blocks no eviction. It only causes a
//! warning, and is retried at growing intervals.
//!
//! A failure after step 1 is undone, the identity first: a daemon that recovers the VM must not rely on
//! a step that was undone. If a device will not release a region then, the region is a stray, and every
//! scan tries to give it back.
//!
//! # The same file again
//! A backend with a path may be unplugged and plugged again between two scans. Its mapping, which is not
//! watched, shows that. Both columns above apply then, one after the other: pages that were absent have
//! no content any more. Devices may already request pages by the new mapping, so page requests are not
//! refused in between but wait.
//!
//! # DMA into RAM that is gone
//! The front end takes the region from its device before the VMM unmaps it, so the device itself answers
//! a descriptor that names it with an error. A chain that was waiting for a page there has its page
//! request refused. Bits that were cleared are never set again. A lease under way keeps our mapping
//! until the lease ends, and writes into a file that is no longer read.
//!
//! # When the daemon dies in the middle
//! The identity says which files are the VM's. A successor allocates the region of a file that has no
//! words yet, and forgets the words of a file that is not in the identity or is gone. If there is no
//! room for the words any more, it leaves the file out, and the file is new RAM again. A file that was
//! registered but is not in the identity is new to the successor: its first scan takes the file over and
//! wakes the threads that wait there. No page of a file is evicted before all five steps are done,
//! because the same thread evicts.

use super::{
    bring_back::BringBack,
    claim::{self, drain},
    core::VmCore,
    failure::failed,
    shared::Shared,
};
use crate::control::ControlError;
use pagetide_addr::{FileKey, PageRange};
use pagetide_gmem::{AddressSpace, Mmu, Place};
use pagetide_sys::uffd::Userfaultfd;
use pagetide_vmm::{
    Refusal,
    hazards::{self, EvictionBlocker},
    layout::{NewRam, RamLayout, RamMapping, RamNews, Strangers},
    place::VmPlace,
    takeover,
};
use pagetide_vpri::{DmaMmu, IoSpace};
use std::{
    collections::BTreeMap,
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};

/// How long the reclaim thread waits for DMA under way in new RAM before it goes on without that RAM and
/// retries later.
const DRAIN_WAIT: Duration = Duration::from_secs(1);
/// RAM that was refused is tried again after this time, then after twice that, and so on: an attempt may
/// delay DMA into it.
const RETRY_MIN: Duration = Duration::from_secs(1);
/// Longest of these intervals.
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Follows the RAM of one VM; belongs to its reclaim thread.
pub(super) struct Hotplug {
    vm: Arc<VmCore>,
    place: VmPlace,
    shared: Shared,
    strangers: Strangers,
    /// New RAM that cannot be taken over, by its file.
    refused: BTreeMap<FileKey, Refused>,
    /// False while the pool names files that a predecessor had removed from the VM.
    identity_is_true: bool,
}

/// Fate of a RAM file that the VM no longer has as it was.
#[derive(Clone, Copy)]
enum Fate {
    /// It was unplugged.
    Gone,
    /// It was unplugged, and plugged again as new RAM.
    Back,
}

/// Why new RAM was not taken over, and when it is tried again.
struct Refused {
    why: String,
    wait: Duration,
    at: Instant,
}

impl Hotplug {
    /// For the VM `vm`, whose regions are those of its layout.
    pub(super) fn new(vm: Arc<VmCore>, shared: &Shared) -> Self {
        Self {
            place: VmPlace::new(Arc::clone(&vm.faults.userfaultfd), Arc::clone(&vm.layout)),
            identity_is_true: vm.identity.has_files_of(&vm.layout.look()),
            vm,
            shared: shared.clone(),
            strangers: Strangers::default(),
            refused: BTreeMap::new(),
        }
    }

    /// Brings the VM's regions in line with the VMM's mappings. Returns the eviction blockers. RAM that
    /// cannot be taken over does no harm: it is not evicted, and a warning says so.
    ///
    /// # Errors
    /// [`Refusal`]: the VMM cannot be inspected.
    pub(super) fn follow(&mut self) -> Result<Vec<EvictionBlocker>, Refusal> {
        self.put_identity_right();
        for (key, refused) in &self.refused {
            if refused.at.elapsed() >= refused.wait {
                self.strangers.look_again(*key);
            }
        }
        let news = self.news()?;
        let mut warnings = self.let_go(&news);
        match &news.new {
            Ok(new) => self.take(new),
            Err(refusal) => warnings.push(not_managed(&refusal.to_string())),
        }
        let refused = self.refused.values();
        warnings.extend(refused.map(|refused| not_managed(&refused.why)));
        self.vm.gate.set_warnings(&self.vm.name, warnings);
        let changed = news.unwatched.into_iter();
        Ok(changed
            .map(|change| EvictionBlocker::MapsChanged { change })
            .collect())
    }

    /// Releases files that the VMM has unmapped, and takes over nothing new: for a detach, while no
    /// reclaim thread runs. Returns the RAM that the VM still has.
    pub(super) fn let_go_of_unplugged(&mut self) -> RamLayout {
        let news = match self.news() {
            Ok(news) => news,
            Err(error) => {
                tracing::warn!(vm = self.vm.name, %error, "cannot determine which RAM was unplugged");
                return RamLayout::clone(&self.vm.layout.look());
            }
        };
        for warning in self.let_go(&news) {
            tracing::warn!(vm = self.vm.name, "{warning}");
        }
        let layout = RamLayout::clone(&self.vm.layout.look());
        let gone = news.gone.iter();
        gone.fold(layout, |layout, key| layout.without(*key))
    }

    fn news(&mut self) -> Result<RamNews, Refusal> {
        let (vmm, userfaultfd) = (&self.vm.vmm, &self.vm.faults.userfaultfd);
        let layout = self.vm.layout.now();
        layout.news(vmm, userfaultfd, &mut self.strangers)
    }

    /// The pool may name RAM that went away while no daemon ran. It is corrected only once the VM is
    /// served again: had the recovery failed, the predecessor's program could still have recovered the
    /// VM from the unchanged pool.
    fn put_identity_right(&mut self) {
        if self.identity_is_true {
            return;
        }
        let vm = &self.vm;
        let layout = vm.layout.now();
        match vm.remember_ram(&layout) {
            Ok(()) => {
                let ram_bytes = layout.len_bytes();
                tracing::info!(
                    vm = vm.name,
                    ram_bytes,
                    "RAM that the pool named was unplugged while no daemon ran, or never taken"
                );
            }
            Err(error) => {
                tracing::error!(vm = vm.name, %error, "the pool names RAM that is not the VM's");
            }
        }
        self.identity_is_true = true;
    }

    /// Releases RAM that is gone, as far as that is possible now. Returns warnings about the rest.
    fn let_go(&mut self, news: &RamNews) -> Vec<String> {
        let mut warnings = Vec::new();
        for key in &news.gone {
            let is_it = |ram: &NewRam| ram.key() == *key;
            let fate = match &news.new {
                Ok(new) if new.iter().any(is_it) => Fate::Back,
                _ => Fate::Gone,
            };
            match self.remove(*key, fate) {
                Ok(()) => self.forget_refusals(),
                Err(error) => warnings.push(not_let_go(&error)),
            }
        }
        let strays = self.vm.space.remove_strays(&self.vm.layout.look());
        warnings.extend(strays.err().as_ref().map(not_let_go));
        warnings
    }

    /// RAM for which there was no room may fit now.
    fn forget_refusals(&mut self) {
        for key in std::mem::take(&mut self.refused).into_keys() {
            self.strangers.look_again(key);
        }
    }

    /// Takes over new RAM as far as possible; RAM that cannot be taken over is not tried again for a
    /// while.
    fn take(&mut self, new: &[NewRam]) {
        let is_new = |key: FileKey| new.iter().any(|ram| ram.key() == key);
        let strangers = &mut self.strangers;
        (self.refused).retain(|key, _| is_new(*key) || strangers.has(*key));
        for ram in new {
            let before = self.refused.remove(&ram.key());
            if let Err(error) = self.add(ram) {
                let wait = before.map_or(RETRY_MIN, |refused| (2 * refused.wait).min(RETRY_MAX));
                let refused = Refused {
                    why: error.message,
                    wait,
                    at: Instant::now(),
                };
                self.strangers.pass_over(ram.key());
                self.refused.insert(ram.key(), refused);
            }
        }
    }

    /// Releases a file that the VMM has unmapped.
    fn remove(&self, key: FileKey, fate: Fate) -> Result<(), ControlError> {
        let vm = &self.vm;
        let layout = vm.layout.now();
        let Some(pages) = layout.file(key).map(|file| file.pages()) else {
            return Ok(());
        };
        let service = &self.shared.service;
        let mut domains = vm.dma.mmu.domains();
        domains.retain(|domain| domain.key() == key);
        // A device may already have the file by its new mapping, and must not be refused.
        if matches!(fate, Fate::Back) {
            service.withhold(&domains);
        }
        if let Err(error) = vm.space.remove_ram(pages) {
            if matches!(fate, Fate::Back) {
                service.serve_domains(&vm.dma.tenant, &domains);
            }
            return Err(error);
        }
        for domain in &domains {
            vm.dma.mmu.remove(domain.id());
            match fate {
                Fate::Gone => {
                    service.refuse(domain);
                    self.shared.spaces.retire(&**domain);
                }
                Fate::Back => domain.detach(),
            }
        }
        if matches!(fate, Fate::Back) {
            service.release(&domains);
        }
        let left = layout.without(key);
        vm.remember_ram(&left)?;
        // No thread should wait there any more; one that does must retry its access.
        self.place.wake(pages).map_err(failed)?;
        vm.layout.set(left);
        tracing::info!(
            vm = vm.name,
            bytes = pages.bytes(),
            first_page = pages.start.0,
            ram_bytes = vm.layout.look().len_bytes(),
            "RAM was unplugged; pages of it that were absent read as zeros in its file from now on"
        );
        vm.ram_changed();
        Ok(())
    }

    /// Takes over a new file of the VM.
    fn add(&self, ram: &NewRam) -> Result<(), ControlError> {
        let vm = &self.vm;
        let layout = vm.layout.now();
        let first = layout.room_for(ram.page_count());
        let alone = RamLayout::default().with(ram, first).map_err(failed)?;
        let Some(file) = alone.files().first() else {
            return Ok(());
        };
        let (key, pages) = (file.key(), file.pages());
        refuse_if_in_the_way(&layout, &alone)?;
        let grown = layout.with(ram, first).map_err(failed)?;
        hazards::refuse_if_shared(&vm.vmm, &alone, &vm.dma.spaces.processes()).map_err(failed)?;
        claim::refuse_unseen_pages(&alone)?;
        vm.space.make_room_for(pages)?;
        let opened = self
            .shared
            .spaces
            .open(file.file().as_fd(), key, pages.bytes());
        let domain = opened.map_err(failed)?;
        claim::refuse_without_dpu(&self.shared)?;
        // Requests are held before the domain is taken: see `claim`.
        let service = &self.shared.service;
        service.hold(std::slice::from_ref(&domain));
        if let Err(error) = domain.attach() {
            service.release(std::slice::from_ref(&domain));
            return Err(failed(error));
        }
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

/// A file that is being added to the VM; its domain is taken.
struct Joining<'a> {
    hotplug: &'a Hotplug,
    before: &'a RamLayout,
    /// A layout with only that file.
    alone: &'a RamLayout,
    domain: &'a Arc<dyn IoSpace>,
    pages: PageRange,
}

impl Joining<'_> {
    fn join(&self, grown: &RamLayout) -> Result<(), ControlError> {
        let vm = &self.hotplug.vm;
        let service = &self.hotplug.shared.service;
        self.domain.unmap_all();
        drain(std::slice::from_ref(self.domain), DRAIN_WAIT)?;
        self.domain.watch().map_err(failed)?;
        vm.remember_ram(grown)?;
        vm.layout.set(grown.clone());
        takeover::watch(&vm.faults.userfaultfd, self.alone).map_err(failed)?;
        self.refuse_if_mapped_anew()?;
        vm.dma.mmu.add(self.domain, self.pages);
        vm.space.add_ram(self.pages)?;
        fill_wired(&vm.space.space, &vm.dma.mmu, self.pages);
        // Wakes faults that were read before the region existed.
        self.hotplug.place.wake(self.pages).map_err(failed)?;
        service.serve_domains(&vm.dma.tenant, std::slice::from_ref(self.domain));
        Ok(())
    }

    /// The file's mapping was looked up a while ago. By now something else may be mapped there, and be
    /// watched in its place; none of its pages was changed yet.
    fn refuse_if_mapped_anew(&self) -> Result<(), ControlError> {
        match self.alone.maps_change(&self.hotplug.vm.vmm) {
            Ok(None) => Ok(()),
            Ok(Some(change)) => Err(ControlError::refused(format!(
                "it was mapped otherwise while it was taken: {change}"
            ))),
            Err(error) => Err(failed(error)),
        }
    }

    /// Restores the file: read-write for devices, and unwatched.
    fn undo(&self) {
        let vm = &self.hotplug.vm;
        // First of all, so that no successor relies on what is undone here.
        if let Err(error) = vm.remember_ram(self.before) {
            tracing::error!(vm = vm.name, %error, "the pool names RAM that is not the VM's");
        }
        if let Err(error) = vm.space.remove_ram(self.pages) {
            // Its region is a stray from now on; every scan tries to give it back.
            tracing::warn!(vm = vm.name, %error, "part of new RAM stays half taken");
        }
        unwatch(&vm.faults.userfaultfd, self.alone);
        vm.dma.mmu.remove(self.domain.id());
        vm.layout.set(self.before.clone());
        self.domain.detach();
        let service = &self.hotplug.shared.service;
        service.release(std::slice::from_ref(self.domain));
    }
}

fn not_managed(why: &str) -> String {
    format!("RAM that was plugged in is not managed, so nothing of it is evicted: {why}")
}

fn not_let_go(error: &ControlError) -> String {
    format!(
        "RAM that was unplugged is not released yet: {}",
        error.message
    )
}

/// New RAM waits while RAM at the same addresses, or of the same file, is being released.
fn refuse_if_in_the_way(layout: &RamLayout, alone: &RamLayout) -> Result<(), ControlError> {
    let same_file = alone
        .files()
        .iter()
        .any(|file| layout.file(file.key()).is_some());
    let overlap = |one: &RamMapping, other: &RamMapping| {
        one.hva.0 < other.hva.0 + other.len_bytes && other.hva.0 < one.hva.0 + one.len_bytes
    };
    let is_known = |new: &RamMapping| layout.mappings().any(|known| overlap(known, new));
    if same_file || alone.mappings().any(is_known) {
        return Err(ControlError::refused(
            "RAM that was unplugged in its place is not released yet",
        ));
    }
    Ok(())
}

/// Unregisters the mappings of `layout`; threads that wait there go on.
pub(super) fn unwatch(userfaultfd: &Userfaultfd, layout: &RamLayout) {
    for mapping in layout.mappings() {
        // The mapping may not have been registered, or may be unmapped already.
        if let Err(error) = userfaultfd.unregister(mapping.hva, mapping.len_bytes) {
            tracing::debug!(%error, "new RAM was not watched");
        }
    }
}

/// `layout` reduced to the file `key`.
pub(super) fn only(layout: &RamLayout, key: FileKey) -> RamLayout {
    let others = layout.files().iter().filter(|file| file.key() != key);
    others.fold(layout.clone(), |left, other| left.without(other.key()))
}

/// Fills absent pages of `pages` that hold a ring: their device keeps them wired, so they must be
/// present.
pub(super) fn fill_wired(space: &AddressSpace, mmu: &DmaMmu, pages: PageRange) {
    let mut fills = BringBack::new(space, &|| true);
    for section in pages.sections() {
        for page in mmu.wired(section).pages(section) {
            if let Err(error) = fills.begin(page.single()) {
                tracing::warn!(%error, "a ring lies in a page that is absent");
            }
        }
    }
    if let Err(error) = fills.finish() {
        tracing::warn!(%error, "a ring lies in a page that is absent");
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
        at = at.max(inside.end);
    }
    if at < pages.end {
        parts.push(PageRange::new(at, pages.end));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::PageNo;
    use pagetide_addr::{Hva, PAGE_BYTES};
    use pagetide_sys::memory_file::GuestFile;

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
