// SPDX-License-Identifier: Apache-2.0
//! The host's update as the paper measures it: through the event queue to the device and back.
//!
//! ```text
//!   host: driver                              device: function                engine
//!   UNMAP into the ring, kick ─────────────► woken, bits cleared, fence ◄───── asked, or interrupted
//!   polls for 20 µs, then sleeps ◄────────── status into the ring, call         copies pages under leases
//! ```
//! Driver and function are those of the product, with their rings in shared memory and their eventfds. A time
//! is from the call until the driver has the status, after which no DMA of the pages begins and none is under
//! way. The queue is empty before each: the grant that follows an update is waited for, untimed.
//!
//! *Idle* there is no engine. *With DMA* an engine copies pages of other sections all the time, on the
//! device's CPU. It gives way to the function's thread there, for a DPU's engines do not take the time of its
//! event queue.
//!
//! The paper's 1.7 µs are a PCIe write and a read. Ours has no PCIe, and two sleeping threads to wake.

use super::{
    NAME, PaBitmapBenchOptions, Random, Times,
    update::{ENGINE_SECTIONS, Engine, UpdateError},
};
use crate::{
    blk::process::SideCpus,
    harness::{
        report::BenchReport,
        rounds::{WarmUp, progress, silent_rounds},
    },
};
use pagetide_addr::{Access, FilePage, FilePageSet, FileSection, PAGE_BYTES, SECTION_PAGES};
use pagetide_sys::{cpu, memory_file::GuestFile};
use pagetide_vpri::{DomainTable, Doorbell, IoSpace, IoSpaces as _, RamWindow};
use pagetide_vpri_function::{
    driver::Driver,
    function::{FunctionParts, FunctionServer},
};
use std::{
    os::fd::AsFd as _,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

/// Longest wait for the function to answer its driver.
const CONNECT_WAIT: Duration = Duration::from_secs(20);
/// Slices of each kind, in turns.
const SLICES: u32 = 10;
/// Pages of a GiB: the first update in one makes its words.
const GIB_PAGES: usize = 512 * 512;

/// A function and its driver, in threads of this process. Ends in this order.
struct Ends {
    space: Arc<dyn IoSpace>,
    window: Arc<RamWindow>,
    _driver: Arc<Driver>,
    _function: FunctionServer,
    _file: GuestFile,
    _dir: tempfile::TempDir,
}

fn wrong(error: &dyn std::fmt::Display) -> UpdateError {
    UpdateError::Ends(error.to_string())
}

impl Ends {
    /// The function's thread is on the calling thread's CPU.
    fn new(pages_log2: u32) -> Result<Self, UpdateError> {
        let bytes = PAGE_BYTES << pages_log2;
        let file = GuestFile::new_memfd("bench-pa-bitmap-events", bytes).map_err(|e| wrong(&e))?;
        let dir = tempfile::tempdir().map_err(|e| wrong(&e))?;
        let socket = dir.path().join("vpri.sock");
        let [bell, host_bell] = [Doorbell::new(), Doorbell::new()];
        let domains = Arc::new(DomainTable::new(1));
        let function = FunctionServer::start(FunctionParts {
            socket: socket.clone(),
            domains: Arc::clone(&domains),
            hosts: Vec::new(),
            engine_count: 0,
            bell: Arc::new(bell.map_err(|e| wrong(&e))?),
        });
        let function = function.map_err(|e| wrong(&e))?;
        let host_bell = Arc::new(host_bell.map_err(|e| wrong(&e))?);
        let driver = Driver::start(&socket, host_bell).map_err(|e| wrong(&e))?;
        let connected = driver.wait_connected(CONNECT_WAIT);
        connected.map_err(|e| wrong(&e))?;
        let key = file.key().map_err(|e| wrong(&e))?;
        let space = driver.open(file.as_fd(), key, bytes)?;
        space.attach()?;
        driver.all_known();
        let window = domains.map_whole(file.as_fd())?;
        Ok(Self {
            space,
            window,
            _driver: driver,
            _function: function,
            _file: file,
            _dir: dir,
        })
    }

    /// Grants the whole sections, and waits until the device has done so.
    fn grant(&self, section: FileSection) {
        self.space.grant(section.all_pages(), Access::Write);
        let _standing = self.space.standing_in(section);
    }

    /// Unmaps `pages` of `section`, and returns how long that took.
    fn unmap(&self, section: FileSection, pages: &FilePageSet) -> Result<Duration, UpdateError> {
        let began = Instant::now();
        let is_done = self.space.unmap(section, pages);
        let took = began.elapsed();
        if is_done {
            return Ok(took);
        }
        Err(UpdateError::Ends("the device keeps a page".into()))
    }
}

/// Round trips of one kind.
#[derive(Default)]
struct Trips {
    page: Times,
    section: Times,
}

impl Trips {
    fn add(&mut self, ends: &Ends, count: u32, pages_log2: u32) -> Result<(), UpdateError> {
        let mut random = Random(8);
        let sections = (1 << pages_log2) / SECTION_PAGES - ENGINE_SECTIONS;
        for i in 0..count {
            let number = random.next(u64::from(i), pages_log2) % sections + ENGINE_SECTIONS;
            let section = FileSection(number);
            let all = section.all_pages();
            let page = all.start.plus(u64::from(i) % SECTION_PAGES).single();
            let one = FilePageSet::of_range(section, page);
            self.page.add(ends.unmap(section, &one)?);
            ends.grant(section);
            let whole = FilePageSet::of_range(section, all);
            self.section.add(ends.unmap(section, &whole)?);
            ends.grant(section);
        }
        Ok(())
    }
}

/// Measures round trips, and adds them to `report`.
///
/// # Errors
/// [`UpdateError`].
pub fn measure(
    options: &PaBitmapBenchOptions,
    report: &mut BenchReport,
) -> Result<(), UpdateError> {
    let at = SideCpus::choose();
    let [idle, with_dma] = thread::scope(|scope| {
        let host = scope.spawn(|| {
            // Its threads stay where they are started.
            cpu::set_affinity(&[at.backend])?;
            let ends = Ends::new(options.pages_log2)?;
            cpu::set_affinity(&[at.frontend])?;
            let wanted = FileSection(0)
                .all_pages()
                .start
                .run(1 << options.pages_log2);
            ends.space.grant(wanted, Access::Write);
            for first in (0..1 << options.pages_log2).step_by(GIB_PAGES) {
                let section = FilePage(first).section();
                let one = FilePageSet::of_range(section, FilePage(first).single());
                ends.unmap(section, &one)?;
                ends.grant(section);
            }
            in_turns(&ends, options, at)
        });
        host.join().map_err(|_| UpdateError::Panic)?
    })?;
    for (name, of) in [
        (
            "update_round_trip_4kib_us",
            (|trips| &trips.page) as fn(&Trips) -> &Times,
        ),
        ("update_round_trip_2mib_us", |trips| &trips.section),
    ] {
        let mut told = of(&idle).report_us();
        told["with_dma"] = of(&with_dma).report_us();
        progress(NAME, format_args!("{name}: {told}"));
        report.figures.insert(name.into(), told);
    }
    Ok(())
}

/// Round trips without and with an engine's DMA, in turns.
fn in_turns(
    ends: &Ends,
    options: &PaBitmapBenchOptions,
    at: SideCpus,
) -> Result<[Trips; 2], UpdateError> {
    let [mut idle, mut with_dma] = [Trips::default(), Trips::default()];
    let count = options.updates.div_ceil(SLICES).max(1);
    for round in silent_rounds(SLICES as usize, WarmUp::None) {
        for has_dma in round.turns([false, true]) {
            if has_dma {
                beside_dma(ends, at, || with_dma.add(ends, count, options.pages_log2))?;
            } else {
                idle.add(ends, count, options.pages_log2)?;
            }
        }
    }
    Ok([idle, with_dma])
}

fn beside_dma(
    ends: &Ends,
    at: SideCpus,
    trips: impl FnOnce() -> Result<(), UpdateError>,
) -> Result<(), UpdateError> {
    let engine = Engine::default();
    thread::scope(|scope| {
        let dma = scope.spawn(|| engine.work(&ends.window, at.backend, cpu::Urgency::Yielding(19)));
        engine.wait_for_first();
        let done = trips();
        engine.stop.store(true, Ordering::Relaxed);
        dma.join().map_err(|_| UpdateError::Panic)??;
        done
    })
}
