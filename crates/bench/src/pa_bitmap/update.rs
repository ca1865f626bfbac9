// SPDX-License-Identifier: Apache-2.0
//! Updates by the host while an engine does DMA all the time.

use super::{NAME, PaBitmapBenchOptions, Random, Times, rig::Rig};
use crate::{
    blk::process::SideCpus,
    harness::{
        figures::{rounded, to_f64},
        report::BenchReport,
        rounds::progress,
    },
};
use pagetide_addr::{
    Access, FilePage, FileRange, FileSection, PAGE_BYTES, SECTION_PAGES, to_usize,
};
use pagetide_sys::{
    cpu::{CpuError, Urgency, set_affinity, set_urgency},
    membarrier::{self, MembarrierError},
};
use pagetide_vpri::{
    Attribute, Busy, DomainError, EnginePort, LookUp, PaBitmap, PageAttributes, RamWindow,
    Restriction,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

/// Sections that the engine works on, the first ones. They need memory (16 MiB), so there are few.
pub(super) const ENGINE_SECTIONS: u64 = 8;
/// Pages of a GiB.
const GIB_PAGES: u64 = 512 * SECTION_PAGES;

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum UpdateError {
    /// A thread's CPU.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// The fence.
    #[error(transparent)]
    Fence(#[from] MembarrierError),
    /// The engine's port.
    #[error(transparent)]
    Domain(#[from] DomainError),
    /// The engine's DMA.
    #[error(transparent)]
    Dma(#[from] pagetide_sys::mapping::MappingError),
    /// The driver and the function.
    #[error("events: {0}")]
    Ends(String),
    /// A thread's priority.
    #[error("a thread's priority: {0}")]
    Urgency(#[from] std::io::Error),
    /// A thread of the bench.
    #[error("a thread of the bench panicked; see its message above")]
    Panic,
}

/// Measures updates, and adds them to `report`.
///
/// # Errors
/// [`UpdateError`].
pub fn measure(
    rig: &Rig,
    options: &PaBitmapBenchOptions,
    report: &mut BenchReport,
) -> Result<(), UpdateError> {
    rig.window.domain().attributes().grant_all();
    let at = SideCpus::choose();
    let engine = Engine::default();
    let result = thread::scope(|scope| {
        let dma = scope.spawn(|| engine.work(&rig.window, at.backend, Urgency::Ordinary));
        let host = scope.spawn(|| {
            set_affinity(&[at.frontend])?;
            membarrier::register()?;
            engine.wait_for_first();
            let (updates, rate) = engine.during(|| Updates::measure(rig, options.updates));
            Ok::<_, UpdateError>((updates?, rate))
        });
        let updates = host.join().map_err(|_| UpdateError::Panic);
        engine.stop.store(true, Ordering::Relaxed);
        dma.join().map_err(|_| UpdateError::Panic)??;
        updates?
    });
    let (updates, dmas_per_second) = result?;
    updates.describe(report);
    let figures = &mut report.figures;
    figures.insert("dmas_per_second".into(), dmas_per_second.round().into());
    figures.insert("engine_cpu".into(), at.backend.into());
    figures.insert("host_cpu".into(), at.frontend.into());
    of_whole_gibs(options, report);
    Ok(())
}

/// An engine that copies pages of its sections, each under a lease, as fast as it can.
#[derive(Default)]
pub(super) struct Engine {
    pub(super) stop: AtomicBool,
    dmas: AtomicU64,
}

impl Engine {
    /// Runs `something`, and returns the DMA rate meanwhile.
    fn during<T>(&self, something: impl FnOnce() -> T) -> (T, f64) {
        let before = self.dmas.load(Ordering::Relaxed);
        let began = Instant::now();
        let done = something();
        let dmas = self.dmas.load(Ordering::Relaxed) - before;
        (done, to_f64(dmas) / began.elapsed().as_secs_f64())
    }

    /// Waits until it works, or has failed to.
    pub(super) fn wait_for_first(&self) {
        while self.dmas.load(Ordering::Relaxed) == 0 && !self.stop.load(Ordering::Relaxed) {
            thread::yield_now();
        }
    }

    /// Works on `window` until it is stopped.
    pub(super) fn work(
        &self,
        window: &Arc<RamWindow>,
        cpu: usize,
        urgency: Urgency,
    ) -> Result<(), UpdateError> {
        let worked = self.copy_pages(window, cpu, urgency);
        self.stop.store(true, Ordering::Relaxed);
        worked
    }

    fn copy_pages(
        &self,
        window: &Arc<RamWindow>,
        cpu: usize,
        urgency: Urgency,
    ) -> Result<(), UpdateError> {
        set_affinity(&[cpu])?;
        if urgency != Urgency::Ordinary {
            set_urgency(urgency)?;
        }
        let port = EnginePort::new(Arc::clone(window), 0, LookUp::On)?;
        let mut random = Random(5);
        let mut buffer = vec![0; to_usize(PAGE_BYTES)];
        while !self.stop.load(Ordering::Relaxed) {
            let page = FilePage(random.next(0, 12) % (ENGINE_SECTIONS * SECTION_PAGES));
            // Refused while the host has the section.
            if let Some(lease) = port.lease(page.single(), Access::Write) {
                let copied = port.window().copy_from(page.byte_offset(), &mut buffer);
                port.release(lease);
                copied?;
                self.dmas.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }
}

/// The measurements.
#[derive(Default)]
struct Updates {
    page: Times,
    section: Times,
    section_bits: Times,
    membarrier: Times,
    grant: Times,
    wait: Times,
    wait_engine: Times,
    engine_busy: u64,
}

impl Updates {
    fn measure(rig: &Rig, count: u32) -> Result<Self, MembarrierError> {
        let attributes = rig.window.domain().attributes();
        let mut random = Random(6);
        let mut updates = Self::default();
        let sections = (1 << rig.pages_log2) / SECTION_PAGES - ENGINE_SECTIONS;
        for i in 0..count {
            let number = random.next(0, rig.pages_log2) % sections + ENGINE_SECTIONS;
            let section = FileSection(number).all_pages();
            let page = section.start.plus(u64::from(i) % SECTION_PAGES).single();
            updates.one(attributes, page);
            updates.one(attributes, section);
            updates.parts(attributes, section)?;
            // The engine's own sections only in one update in ten: it must work most of the time.
            if i % 10 == 0 {
                let own = FileSection(u64::from(i / 10) % ENGINE_SECTIONS).all_pages();
                let restriction = attributes.begin_unmap(&[own]);
                let (busy, wait) = timed_wait(restriction);
                updates.engine_busy += u64::from(!busy.is_empty());
                updates.wait_engine.add(wait);
                attributes.grant(own, Access::Write);
            }
        }
        Ok(updates)
    }

    /// The parts of an update of `section`, one after the other. No other thread leases the section, so
    /// nothing relies on this fence.
    fn parts(
        &mut self,
        attributes: &PageAttributes,
        section: FileRange,
    ) -> Result<(), MembarrierError> {
        let began = Instant::now();
        attributes.bitmap().unmap_range(section);
        self.section_bits.add(began.elapsed());
        let began = Instant::now();
        membarrier::heavy()?;
        self.membarrier.add(began.elapsed());
        attributes.grant(section, Access::Write);
        Ok(())
    }

    fn one(&mut self, attributes: &PageAttributes, pages: FileRange) {
        let began = Instant::now();
        let restriction = attributes.begin_unmap(&[pages]);
        let update = began.elapsed();
        let (busy, wait) = timed_wait(restriction);
        debug_assert!(busy.is_empty(), "nobody else leases {pages:?}");
        self.wait.add(wait);
        let began = Instant::now();
        attributes.grant(pages, Access::Write);
        let grant = began.elapsed();
        if pages.len() == 1 {
            self.page.add(update);
        } else {
            self.section.add(update);
            self.grant.add(grant);
        }
    }

    fn describe(&self, report: &mut BenchReport) {
        let figures = &mut report.figures;
        for (name, times) in [
            ("update_4kib_us", &self.page),
            ("update_2mib_us", &self.section),
            ("bits_2mib_us", &self.section_bits),
            ("membarrier_us", &self.membarrier),
            ("grant_2mib_us", &self.grant),
            ("lease_wait_us", &self.wait),
            ("lease_wait_engine_us", &self.wait_engine),
        ] {
            figures.insert(name.into(), times.report_us());
        }
        let waits = to_f64(self.wait_engine.0.len().max(1) as u64);
        let busy = rounded(to_f64(self.engine_busy) / waits);
        figures.insert("lease_wait_engine_busy_share".into(), busy.into());
        progress(
            NAME,
            format_args!("an update of 2 MiB takes {}", self.section.report_us()),
        );
    }
}

fn timed_wait(restriction: Restriction<'_>) -> (Vec<Busy>, std::time::Duration) {
    let began = Instant::now();
    let busy = restriction.wait();
    (busy, began.elapsed())
}

/// The cost for whole GiBs with a common state, and without one yet.
fn of_whole_gibs(options: &PaBitmapBenchOptions, report: &mut BenchReport) {
    let pages = 1 << options.pages_log2;
    let bitmap = PaBitmap::new(pages, Attribute::ReadWrite);
    let (mut uniform, mut first, mut dense) =
        (Times::default(), Times::default(), Times::default());
    let timed = |times: &mut Times, change: &dyn Fn()| {
        let began = Instant::now();
        change();
        times.add(began.elapsed());
    };
    for gib in (0..pages).step_by(to_usize(GIB_PAGES)) {
        let whole = FileRange::new(FilePage(gib), FilePage(gib + GIB_PAGES));
        timed(&mut uniform, &|| bitmap.unmap_range(whole));
        timed(&mut first, &|| {
            bitmap.grant(whole.start.single(), Access::Write)
        });
        timed(&mut dense, &|| bitmap.unmap_range(whole));
    }
    for (name, times) in [
        ("bits_1gib_uniform_us", uniform),
        ("bits_first_4kib_of_gib_us", first),
        ("bits_1gib_us", dense),
    ] {
        report.figures.insert(name.into(), times.report_us());
    }
}
