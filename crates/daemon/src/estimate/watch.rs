// SPDX-License-Identifier: Apache-2.0
//! A VM watched from outside: the only part of `estimate` that accesses one.

use std::sync::Arc;
use std::time::Instant;

use pagetide_addr::{PAGE_SHIFT, PageNo, PageRange, PageSet, SectionNo};
use pagetide_random::SplitMix64;
use pagetide_vmm::hazards::{self, EvictionBlocker, OtherProcess};
use pagetide_vmm::layout::{LiveLayout, RamLayout};
use pagetide_vmm::process::VmmProcess;
use pagetide_vmm::tracker::{NoDma, TrackerError, UnmapAndLook};
use pagetide_vmm::{Refusal, swap, takeover};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::heat::Seen;
use pagetide_report::outcome::CommandError;

/// Command name of a daemon that has a VM attached.
const DAEMON: &str = "pagetide";

/// A VM and the sections of it that are watched.
pub struct Watch {
    vmm: VmmProcess,
    layout: Arc<RamLayout>,
    tracker: UnmapAndLook,
    sections: Vec<SectionNo>,
    refusals: Vec<String>,
    warnings: Vec<String>,
}

impl Watch {
    /// Finds the VM's RAM and samples at most `most` sections of it.
    pub fn open(pid: u32, most: u64) -> Result<Self, CommandError> {
        let vmm = VmmProcess::open(pid).map_err(CommandError::refused)?;
        let layout = RamLayout::of_process(&vmm).map_err(CommandError::refused)?;
        refuse_swap(&vmm, &layout)?;
        refuse_attached(&vmm)?;
        // A daemon of ours maps the RAM of every VM whose disk it serves. That does not prevent an
        // attach.
        let ours: Vec<OtherProcess> = hazards::who_else_maps(&vmm, &layout, &[])
            .map_err(CommandError::refused)?
            .into_iter()
            .filter(|other| other.name == DAEMON)
            .collect();
        let our_pids: Vec<u32> = ours.iter().map(|other| other.pid).collect();
        let refusals = match hazards::refuse_if_shared(&vmm, &layout, &our_pids) {
            Ok(()) => vec![],
            // The estimate goes on and reports the sharing: touches by the other process are not seen.
            Err(refusal @ Refusal::SharedRam { .. }) => vec![refusal.to_string()],
            Err(other) => return Err(CommandError::refused(other)),
        };
        let layout = Arc::new(layout);
        let live = Arc::new(LiveLayout::new(RamLayout::clone(&layout)));
        let tracker = UnmapAndLook::new(&vmm, live, Arc::new(NoDma)).map_err(tracked)?;
        let count = SectionNo::count_for(layout.page_count());
        Ok(Self {
            sections: choose_sections(count, most, &mut SplitMix64::new(u64::from(pid))),
            vmm,
            layout,
            tracker,
            refusals,
            warnings: ours.iter().map(unseen_dma).collect(),
        })
    }

    /// The VM's RAM.
    pub fn layout(&self) -> &RamLayout {
        &self.layout
    }

    /// The sections watched, ascending.
    pub fn sections(&self) -> &[SectionNo] {
        &self.sections
    }

    /// Command of the VMM.
    pub fn vmm(&self) -> &str {
        self.vmm.name()
    }

    /// How touches are detected.
    pub fn tracker(&self) -> &'static str {
        UnmapAndLook::NAME
    }

    /// Reasons for which an attach would refuse the VM.
    pub fn refusals(&self) -> &[String] {
        &self.refusals
    }

    /// Effects that the figures do not include.
    pub fn warnings(&self) -> Vec<String> {
        let of_layout = self.layout.warnings().iter().cloned();
        of_layout.chain(self.warnings.iter().cloned()).collect()
    }

    /// Current eviction blockers, other than reasons for refusal.
    pub fn eviction_blockers(&self) -> Result<Vec<String>, CommandError> {
        let blockers =
            hazards::check(&self.vmm, &self.layout, &[]).map_err(CommandError::refused)?;
        Ok(blockers
            .into_iter()
            .filter(|blocker| !matches!(blocker, EvictionBlocker::MappedByAnother { .. }))
            .map(|blocker| blocker.to_string())
            .collect())
    }

    /// Waits until `deadline`; an error if the VMM ends meanwhile.
    pub fn wait_until(&self, deadline: Instant) -> Result<(), CommandError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).map_err(CommandError::failed)?;
            let mut polled = [PollFd::new(self.vmm.fd(), PollFlags::IN)];
            match poll(&mut polled, Some(&timeout)) {
                Ok(0) if left.is_zero() => return Ok(()),
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => {
                    return Err(CommandError::Failed(format!(
                        "process {} ({}) ended during the estimate: there is nothing to report",
                        self.vmm.pid(),
                        self.vmm.name()
                    )));
                }
                Err(error) => return Err(CommandError::failed(error)),
            }
        }
    }

    /// Which pages are resident and which were touched since the last look.
    pub fn look(&self) -> Result<Vec<Seen>, CommandError> {
        refuse_swap(&self.vmm, &self.layout)?;
        let touched = self.tracker.look_many(&self.sections).map_err(tracked)?;
        let sections = self.sections.iter().zip(touched);
        sections
            .map(|(section, touched)| {
                let mut resident = self.resident(*section)?;
                let touched = touched.by_anybody();
                // A page may have become resident between the two queries.
                resident.unite(&touched);
                Ok(Seen { resident, touched })
            })
            .collect()
    }

    /// Pages of a section that have memory.
    fn resident(&self, section: SectionNo) -> Result<PageSet, CommandError> {
        let mut resident = PageSet::EMPTY;
        let pages = section.pages(self.layout.page_count());
        for piece in self.layout.pieces(pages) {
            let file = self.layout.files()[piece.file].file();
            let runs = file
                .present_runs(piece.file_offset, piece.pages.bytes())
                .map_err(CommandError::failed)?;
            for (start, len) in runs {
                let first = piece.pages.start.0 + ((start - piece.file_offset) >> PAGE_SHIFT);
                let run = PageRange::new(PageNo(first), PageNo(first + (len >> PAGE_SHIFT)));
                resident.unite(&PageSet::of_range(section, run));
            }
        }
        Ok(resident)
    }
}

/// A VM is attached if a userfaultfd of ours is open in its VMM, whichever process maps its RAM, and
/// even if the daemon has died.
fn refuse_attached(vmm: &VmmProcess) -> Result<(), CommandError> {
    match takeover::find_inside(vmm).map_err(CommandError::refused)? {
        None => Ok(()),
        Some(_) => Err(CommandError::Refused(format!(
            "process {} is attached to a pagetide daemon, whose tracker an estimate would disturb: \
             see `pagetide vm show`, or detach it first",
            vmm.pid()
        ))),
    }
}

fn unseen_dma(daemon: &OtherProcess) -> String {
    format!(
        "process {} ({}) serves a disk of this VM and has its RAM mapped too: pages that its DMA has touched are not \
         unmapped by a look, so they count as in use for as long as it runs",
        daemon.pid, daemon.name
    )
}

/// Refuses pages that can go to swap: unmapping would evict them.
fn refuse_swap(vmm: &VmmProcess, layout: &RamLayout) -> Result<(), CommandError> {
    match swap::in_reach(vmm.pid(), layout.swappable_keys()) {
        Ok(None) => Ok(()),
        Ok(Some(reach)) => Err(CommandError::Refused(format!(
            "looking at the RAM of VMM {} ({}) would send it to kernel swap: {reach}",
            vmm.pid(),
            vmm.name()
        ))),
        Err(error) => Err(CommandError::Failed(format!(
            "cannot tell whether process {} can go to kernel swap: {error}",
            vmm.pid()
        ))),
    }
}

fn tracked(error: TrackerError) -> CommandError {
    match error {
        TrackerError::Unmap(_) => CommandError::Refused(format!(
            "touches of this VM cannot be detected: {error}; start the VMM without locked memory"
        )),
        other => CommandError::failed(other),
    }
}

/// One random section from each of `most` equal parts of `count`; all if there are no more than `most`.
fn choose_sections(count: u64, most: u64, random: &mut SplitMix64) -> Vec<SectionNo> {
    if count <= most {
        return (0..count).map(SectionNo).collect();
    }
    (0..most)
        .map(|part| {
            let (start, end) = (part * count / most, (part + 1) * count / most);
            SectionNo(start + random.below(end - start))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_chosen_one_in_each_part_without_repetition() {
        let mut random = SplitMix64::new(5);
        for (count, most) in [(0, 4), (3, 4), (4, 4), (5, 4), (1_000, 256), (257, 256)] {
            let chosen = choose_sections(count, most, &mut random);
            assert_eq!(chosen.len() as u64, count.min(most));
            assert!(chosen.windows(2).all(|pair| pair[0] < pair[1]), "{count}");
            assert!(chosen.iter().all(|section| section.0 < count));
        }
    }

    #[test]
    fn process_that_is_gone_or_no_vmm_is_refused() {
        for pid in [u32::MAX, std::process::id()] {
            let refused = Watch::open(pid, 4).err();
            assert!(matches!(refused, Some(CommandError::Refused(_))), "{pid}");
        }
    }
}
