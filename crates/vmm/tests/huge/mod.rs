// SPDX-License-Identifier: Apache-2.0
//! A VM whose RAM is in huge pages: watched without losing them, evicted without losing a byte.
//!
//! Its RAM lies on a tmpfs of the test's own that is mounted with huge pages, so that no setting of
//! the host is changed.

use super::{Attached, MIB, PATTERN, RAM_MIB, attach, live};
use crate::qemu::{Qemu, can_run};
use pagetide_addr::{PageNo, PageRange, PageSet, SectionNo};
use pagetide_sys::pagemap::{Pagemap, Translation};
use pagetide_vmm::tracker::{AccessTracker, Look, NoDma, Touched, UnmapAndLook};
use rustix::pipe::SpliceFlags;
use std::fs::File;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Sweeps after which what the kernel can make whole is whole.
const SWEEPS_MAX: u32 = 24;

struct HugeMount(tempfile::TempDir);

impl HugeMount {
    fn new() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "huge=always,size=256m", "huge"]);
        match mount.arg(dir.path()).output() {
            Ok(said) if said.status.success() => Some(Self(dir)),
            said => {
                eprintln!("SKIPPED: no tmpfs in huge pages can be mounted: {said:?}");
                None
            }
        }
    }
}

impl Drop for HugeMount {
    fn drop(&mut self) {
        let umount = Command::new("umount").arg("-l").arg(self.0.path()).status();
        if !umount.is_ok_and(|status| status.success()) {
            eprintln!("{} stays mounted", self.0.path().display());
        }
    }
}

struct Huge {
    vm: Attached,
    tracker: UnmapAndLook,
    sections: Vec<SectionNo>,
    before: Vec<u8>,
    _mount: HugeMount,
}

/// A VM with the pattern in huge pages, all of them mapped, attached.
fn huge_vm() -> Option<Huge> {
    if !can_run() {
        return None;
    }
    let mount = HugeMount::new()?;
    let path = mount.0.path().join("ram");
    let object = format!(
        "memory-backend-file,id=ram,size={RAM_MIB}M,share=on,align=2M,mem-path={}",
        path.display()
    );
    let mut vm = attach(Qemu::with_ram_object(&object, &[]));
    vm.qemu.ask(r#"{"execute":"stop"}"#);
    let before = pattern(&mut vm);
    if mapped_huge_bytes(&vm) < PATTERN.end - PATTERN.start {
        eprintln!("SKIPPED: too few huge pages were free");
        return None;
    }
    let tracker = UnmapAndLook::new(&vm.vmm, live(&vm.layout), Arc::new(NoDma)).unwrap();
    let sections = (PATTERN.start / (2 * MIB)..PATTERN.end / (2 * MIB)).map(SectionNo);
    Some(Huge {
        vm,
        tracker,
        sections: sections.collect(),
        before,
        _mount: mount,
    })
}

/// The pattern as QEMU reads it, which maps all of it.
fn pattern(vm: &mut Attached) -> Vec<u8> {
    vm.qemu
        .guest_memory(PATTERN.start, PATTERN.end - PATTERN.start)
}

/// What of the pattern is mapped by translations of 2 MiB.
fn mapped_huge_bytes(vm: &Attached) -> u64 {
    let map = Pagemap::of_process(vm.vmm.pid()).unwrap();
    let pages = PageRange::covering(PATTERN.start, PATTERN.end - PATTERN.start).unwrap();
    let mut huge_pages = 0;
    for piece in vm.layout.pieces(pages) {
        map.mapped_runs(piece.hva, piece.pages.len(), |run| {
            huge_pages += if run.by == Translation::Huge {
                run.pages
            } else {
                0
            };
        })
        .unwrap();
    }
    // As the kernel counts it, for all of the VMM.
    assert!(huge_pages << 12 <= smaps_huge_bytes(vm));
    huge_pages << 12
}

fn smaps_huge_bytes(vm: &Attached) -> u64 {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", vm.vmm.pid())).unwrap();
    let lines = smaps
        .lines()
        .filter_map(|line| line.strip_prefix("ShmemPmdMapped:"));
    let kib = |line: &str| -> u64 { line.trim().trim_end_matches(" kB").parse().unwrap() };
    lines.map(|line| kib(line) << 10).sum()
}

impl Huge {
    /// One sweep: asks about and takes out a few pages of each section.
    fn sweep(&self) -> Vec<Touched> {
        let samples: Vec<Look> = self
            .sections
            .iter()
            .map(|section| {
                let chosen = chosen(*section);
                Look {
                    section: *section,
                    asked: chosen,
                    next: chosen,
                }
            })
            .collect();
        self.tracker.sample(&samples).unwrap().touched
    }

    /// Touches all until it is mapped as it was, with a sweep between two touches.
    fn is_whole_again(&mut self) -> bool {
        for _ in 0..SWEEPS_MAX {
            assert!(pattern(&mut self.vm) == self.before, "content");
            if mapped_huge_bytes(&self.vm) >= PATTERN.end - PATTERN.start {
                return true;
            }
            self.sweep();
        }
        false
    }
}

fn chosen(section: SectionNo) -> PageSet {
    let mut pages = PageSet::EMPTY;
    for page in section.all_pages().iter().step_by(67) {
        pages.insert(page);
    }
    pages
}

#[test]
fn vm_in_huge_pages_keeps_them_while_it_is_sampled() {
    let Some(mut huge) = huge_vm() else { return };
    let (before, in_smaps) = (mapped_huge_bytes(&huge.vm), smaps_huge_bytes(&huge.vm));
    for _ in 0..4 {
        huge.sweep();
        // All of it is out: nothing of it was used since.
        assert!(mapped_huge_bytes(&huge.vm) < before);
        let touched = huge.sweep();
        assert!(touched.iter().all(|t| t.cpu.is_empty()), "{touched:?}");
        // One page is used: its section was, and no other.
        let page = (PATTERN.start + 5 * MIB) >> 12;
        huge.vm.qemu.guest_memory(page << 12, 4096);
        let touched = huge.sweep();
        for (section, touched) in huge.sections.iter().zip(touched) {
            let used = if *section == PageNo(page).section() {
                chosen(*section)
            } else {
                PageSet::EMPTY
            };
            assert_eq!(touched.cpu, used, "{section:?}");
        }
        assert!(pattern(&mut huge.vm) == huge.before, "content");
        assert_eq!(mapped_huge_bytes(&huge.vm), before);
    }
    // A look at whole sections leaves them whole, too.
    let touched = huge.tracker.look_many(&huge.sections).unwrap();
    assert!(touched.iter().all(|t| t.cpu.len() == 512));
    assert!(pattern(&mut huge.vm) == huge.before, "content");
    assert_eq!(mapped_huge_bytes(&huge.vm), before);
    assert_eq!(smaps_huge_bytes(&huge.vm), in_smaps);
}

#[test]
fn vm_in_huge_pages_is_split_to_go_and_is_whole_again_when_it_is_back() {
    let Some(mut huge) = huge_vm() else { return };
    // Some are mapped when they are to go, some are not.
    huge.tracker.look_many(&huge.sections[..3]).unwrap();
    huge.tracker.take_out(&huge.sections).unwrap();
    for section in &huge.sections {
        let mapped = huge.tracker.mapped(*section).unwrap();
        assert!(mapped.is_empty(), "{section:?}: {mapped:?}");
    }
    // Page by page, not section by section.
    let (place, layout) = (&huge.vm.store.place, &huge.vm.layout);
    for section in &huge.sections {
        let page = section.first_page();
        let mut content = Box::new([0; 4096]);
        pagetide_gmem::Place::read(place, page.single(), content.as_mut()).unwrap();
        huge.vm.store.stored.lock().unwrap().insert(page, content);
        pagetide_gmem::Place::discard(place, page.single()).unwrap();
        assert!(!pagetide_gmem::Place::is_present(place, page).unwrap());
        let file = layout.files()[0].file();
        assert!(file.is_data(page.byte_offset() + 4096).unwrap());
    }
    assert!(pattern(&mut huge.vm) == huge.before, "content");
    assert_eq!(mapped_huge_bytes(&huge.vm), 0);
    huge.tracker.take_out(&huge.sections).unwrap();
    huge.vm.store.evict_all(huge.vm.layout.page_count());
    assert_eq!(huge.vm.layout.allocated_bytes().unwrap(), 0);
    assert!(pattern(&mut huge.vm) == huge.before, "content");
    if !huge.is_whole_again() {
        eprintln!(
            "SKIPPED the end: this kernel leaves empty page tables behind (before Linux 6.14), or \
             has no huge pages free"
        );
    }
    huge.vm.store.evict_all(huge.vm.layout.page_count());
    assert!(pattern(&mut huge.vm) == huge.before, "content");
}

#[test]
fn huge_page_that_is_used_when_it_is_to_go_stays_whole() {
    let Some(mut huge) = huge_vm() else { return };
    let (qemu, used) = (&mut huge.vm.qemu, huge.sections[3]);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Somebody who uses one page of it all the time.
            let at = used.first_page().byte_offset() + 200 * 4096;
            while !stop.load(Ordering::Relaxed) {
                qemu.guest_memory(at, 4096);
            }
        });
        huge.tracker.take_out(&huge.sections).unwrap();
        stop.store(true, Ordering::Relaxed);
    });
    for section in &huge.sections {
        let mapped = huge.tracker.mapped(*section).unwrap().len();
        let wanted = if *section == used { 512 } else { 0 };
        assert_eq!(mapped, wanted, "{section:?}");
    }
    assert!(pattern(&mut huge.vm) == huge.before, "content");
    assert_eq!(mapped_huge_bytes(&huge.vm), 2 * MIB);
}

#[test]
fn huge_page_that_is_held_does_not_go() {
    let Some(mut huge) = huge_vm() else { return };
    let section = huge.sections[2];
    let at = section.first_page().byte_offset();
    // A pipe holds one page of it, as any I/O in flight may.
    let (from, to) = std::io::pipe().unwrap();
    let path = huge._mount.0.path().join("ram");
    let file = File::open(path).unwrap();
    let mut offset = at + 100 * 4096;
    let flags = SpliceFlags::empty();
    let held = rustix::pipe::splice(&file, Some(&mut offset), &to, None, 4096, flags).unwrap();
    assert_eq!(held, 4096);
    huge.tracker.take_out(&huge.sections).unwrap();
    for other in &huge.sections {
        let mapped = huge.tracker.mapped(*other).unwrap().len();
        assert_eq!(mapped, if *other == section { 512 } else { 0 }, "{other:?}");
    }
    drop((from, to));
    huge.tracker.take_out(&[section]).unwrap();
    assert!(huge.tracker.mapped(section).unwrap().is_empty());
    assert!(pattern(&mut huge.vm) == huge.before, "content");
}
