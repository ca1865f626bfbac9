// SPDX-License-Identifier: Apache-2.0
//! A space with its simulated IOMMU and its flows, measured once.

use std::sync::Arc;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use pagetide_addr::{PAGE_BYTES, Va};
use pagetide_gmem::{Activation, AddressSpace, AllocPolicy, Caching, Device, Mmu, Mode};

use crate::harness::latencies::Latencies;

use super::flow::{Broken, Flow, Way};
use super::iommu::{Iommu, Serving};

/// Pages of the space: more than the buffers of all flows need.
const SPACE_PAGES: u64 = 1 << 15;
/// Unmaps of the flow that waits, between changes of the way.
const WAITS: usize = 50;

/// See the module.
pub(super) struct Rig {
    space: Arc<AddressSpace>,
    iommu: Arc<Iommu>,
    flows: Vec<Flow>,
}

/// The combined result of the flows.
pub(super) struct Measured {
    pub(super) unmaps_per_second: f64,
    pub(super) cpu_us_per_unmap: f64,
    pub(super) invalidations_per_unmap: f64,
    pub(super) latency_p50_us: f64,
    pub(super) latency_p99_us: f64,
}

/// Whether a thread serves the queue while a flow waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Worker {
    None,
    Serving,
}

impl Rig {
    /// With an IOMMU whose commands take `command_ns`.
    pub(super) fn new(flows: usize, command_ns: u64, serving: Serving) -> Result<Self, Broken> {
        let policy = AllocPolicy {
            cache: Caching::Cached,
            ..AllocPolicy::default()
        };
        let space = AddressSpace::create(Va(0), Va(SPACE_PAGES * PAGE_BYTES), policy)?;
        let iommu = Arc::new(Iommu::new(SPACE_PAGES, command_ns, serving));
        let mmu: Arc<dyn Mmu> = Arc::clone(&iommu) as Arc<dyn Mmu>;
        space.attach(&Device::create(mmu), Mode::Coherent, Activation::Now)?;
        let flows = (1..=flows as u64).map(|seed| Flow::new(&space, &iommu, seed));
        Ok(Self {
            flows: flows.collect::<Result<_, _>>()?,
            space,
            iommu,
        })
    }

    /// All flows map and unmap for `slice`.
    pub(super) fn measure(mut self, way: Way, slice: Duration) -> Result<Measured, Broken> {
        let worker = match way {
            Way::Worker => Worker::Serving,
            Way::Sync | Way::Caller => Worker::None,
        };
        let (begun, cpu) = (Instant::now(), pagetide_sys::cpu::process_time());
        let end = begun + slice;
        let flows = &mut self.flows;
        let latencies_ns = served(&self.space, worker, || {
            std::thread::scope(|scope| {
                let threads: Vec<_> = flows
                    .iter_mut()
                    .map(|flow| scope.spawn(move || flow.run_until(way, end)))
                    .collect();
                let done: Vec<_> = threads.into_iter().map(joined).collect();
                done.into_iter().collect::<Result<Vec<_>, Broken>>()
            })
        })?;
        let (seconds, cpu) = (
            begun.elapsed().as_secs_f64(),
            pagetide_sys::cpu::process_time() - cpu,
        );
        let latencies: Latencies = latencies_ns.concat().into_iter().collect();
        #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
        let (unmaps, commands) = (latencies.count() as f64, self.iommu.commands() as f64);
        if self.iommu.was_granted_too_early() {
            return Err(Broken::ToldTooEarly);
        }
        Ok(Measured {
            unmaps_per_second: unmaps / seconds,
            cpu_us_per_unmap: cpu.as_secs_f64() * 1e6 / unmaps,
            invalidations_per_unmap: commands / unmaps,
            latency_p50_us: latencies.us(500),
            latency_p99_us: latencies.us(990),
        })
    }

    /// One flow unmaps and waits, for `slice`: latencies of `unmap`, and of `unmap_later` with
    /// `synchronize`, in alternation.
    pub(super) fn wait(
        mut self,
        worker: Worker,
        slice: Duration,
    ) -> Result<[Latencies; 2], Broken> {
        let Some(flow) = self.flows.first_mut() else {
            return Ok(Default::default());
        };
        let times_ns = served(&self.space, worker, || {
            let mut times_ns = [Vec::new(), Vec::new()];
            let begun = Instant::now();
            while begun.elapsed() < slice {
                for (way, times_ns) in [Way::Sync, Way::Caller].into_iter().zip(&mut times_ns) {
                    times_ns.append(&mut flow.wait_for_each(way, WAITS)?);
                }
            }
            Ok::<_, Broken>(times_ns)
        })?;
        Ok(times_ns.map(|times| times.into_iter().collect()))
    }
}

/// Runs `work`, optionally while a thread serves the queue.
fn served<T>(space: &AddressSpace, worker: Worker, work: impl FnOnce() -> T) -> T {
    if worker == Worker::None {
        return work();
    }
    std::thread::scope(|scope| {
        scope.spawn(|| space.serve_operations());
        let done = work();
        space.stop_operations();
        done
    })
}

fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    match thread.join() {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
