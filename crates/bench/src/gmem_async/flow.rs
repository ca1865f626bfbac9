// SPDX-License-Identifier: Apache-2.0
//! A flow: the thread of a driver that maps DMA buffers and unmaps them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pagetide_addr::{Access, PAGE_BYTES, PAGE_SHIFT, Pa, PageRange};
use pagetide_gmem::{AddressSpace, Callback, GmError, MapOptions, Region, RegionRequest};
use pagetide_random::SplitMix64;

use super::iommu::Iommu;

/// Buffers of a flow: at most this many are mapped or being unmapped. Network drivers have about as many
/// receive descriptors by default.
pub(super) const BUFFERS: usize = 256;
/// Pages of four consecutive buffers: three of a packet each, one of a large segment.
const PAGES: [u64; 4] = [1, 1, 1, 16];
/// A flow without free buffers continues when this many are free again.
const REFILL: usize = BUFFERS / 4;
/// Cycles between two reads of the clock.
const CYCLES: usize = 16;

/// How a flow unmaps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// Each unmap waits for its own invalidation.
    Sync,
    /// Unmaps are queued; a thread serves the queue.
    Worker,
    /// Unmaps are queued; a flow without free buffers processes the queue.
    Caller,
}

/// Why a measurement is invalid.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    /// The space refused.
    #[error(transparent)]
    Space(#[from] GmError),
    /// The device could still reach the buffer.
    #[error("an unmap was told to be complete while the device could reach the pages still")]
    ToldTooEarly,
    /// A callback was not called.
    #[error("{missing} buffers never came back")]
    Missing {
        /// How many.
        missing: usize,
    },
}

struct Buffer {
    region: Region,
    frames: Vec<Pa>,
}

/// See the module.
pub(super) struct Flow {
    space: Arc<AddressSpace>,
    buffers: Vec<Buffer>,
    /// Unmapped buffers, the longest unmapped first.
    free: VecDeque<usize>,
    returns: Arc<Returns>,
}

/// Where callbacks put buffers.
struct Returns {
    iommu: Arc<Iommu>,
    returned: Mutex<Returned>,
    enough: Condvar,
}

#[derive(Default)]
struct Returned {
    buffers: Vec<usize>,
    latencies_ns: Vec<u32>,
    /// The flow sleeps until this many are free; 0 if it is awake.
    wanted: usize,
    broken: Option<Broken>,
}

impl Returns {
    fn lock(&self) -> MutexGuard<'_, Returned> {
        self.returned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, pages: PageRange, result: Result<(), GmError>) -> Result<(), Broken> {
        result?;
        if self.iommu.can_reach(pages) {
            return Err(Broken::ToldTooEarly);
        }
        Ok(())
    }

    fn put(&self, buffer: usize, latency_ns: u32, checked: Result<(), Broken>) {
        let mut returned = self.lock();
        returned.buffers.push(buffer);
        returned.latencies_ns.push(latency_ns);
        if let Err(broken) = checked {
            returned.broken.get_or_insert(broken);
        }
        if returned.wanted > 0 && returned.buffers.len() >= returned.wanted {
            returned.wanted = 0;
            drop(returned);
            self.enough.notify_one();
        }
    }
}

impl Flow {
    /// A flow with its own buffers. Their addresses in the space are in random order: a device completes
    /// buffers in its own order, so neighbours are seldom unmapped together.
    pub(super) fn new(
        space: &Arc<AddressSpace>,
        iommu: &Arc<Iommu>,
        seed: u64,
    ) -> Result<Self, GmError> {
        let mut buffers = Vec::with_capacity(BUFFERS);
        for pages in PAGES.iter().cycle().take(BUFFERS) {
            let region = space.alloc(&RegionRequest::of_bytes(pages * PAGE_BYTES))?;
            // This device ignores the frame numbers.
            let frame = |page: u64| Pa((region.pages().start.0 + page) << PAGE_SHIFT);
            let frames = (0..*pages).map(frame).collect();
            buffers.push(Buffer { region, frames });
        }
        SplitMix64::new(seed).shuffle(&mut buffers);
        Ok(Self {
            space: Arc::clone(space),
            buffers,
            free: (0..BUFFERS).collect(),
            returns: Arc::new(Returns {
                iommu: Arc::clone(iommu),
                returned: Mutex::default(),
                enough: Condvar::new(),
            }),
        })
    }

    /// Maps and unmaps until `end`; returns when all unmaps are complete, with the time of each from the
    /// call to the callback.
    pub(super) fn run_until(&mut self, way: Way, end: Instant) -> Result<Vec<u32>, Broken> {
        while Instant::now() < end {
            for _ in 0..CYCLES {
                self.map_and_unmap(way)?;
            }
        }
        self.space.synchronize()?;
        self.take_returned()?;
        match BUFFERS - self.free.len() {
            0 => Ok(std::mem::take(&mut self.returns.lock().latencies_ns)),
            missing => Err(Broken::Missing { missing }),
        }
    }

    /// Time until `count` unmaps were known to be complete, each alone: waited for, or queued and the
    /// queue waited for.
    pub(super) fn wait_for_each(&mut self, way: Way, count: usize) -> Result<Vec<u32>, Broken> {
        let mut times_ns = Vec::with_capacity(count);
        for _ in 0..count {
            let buffer = self.map_next()?;
            let begun = Instant::now();
            match way {
                Way::Sync => self.buffers[buffer].region.unmap()?,
                Way::Worker | Way::Caller => {
                    self.unmap_later(buffer, begun)?;
                    self.space.synchronize()?;
                }
            }
            times_ns.push(ns_since(begun));
            if way == Way::Sync {
                self.free.push_back(buffer);
            }
            self.take_returned()?;
        }
        self.returns.lock().latencies_ns.clear();
        Ok(times_ns)
    }

    fn map_and_unmap(&mut self, way: Way) -> Result<(), Broken> {
        if self.free.is_empty() {
            match way {
                Way::Sync => {}
                Way::Worker => self.wait_for_refill(),
                Way::Caller => self.space.synchronize()?,
            }
            self.take_returned()?;
        }
        let buffer = self.map_next()?;
        let begun = Instant::now();
        if way != Way::Sync {
            return self.unmap_later(buffer, begun);
        }
        let region = &self.buffers[buffer].region;
        let result = region.unmap();
        let latency_ns = ns_since(begun);
        let checked = self.returns.check(region.pages(), result);
        self.returns.put(buffer, latency_ns, checked);
        Ok(())
    }

    fn map_next(&mut self) -> Result<usize, Broken> {
        let Some(number) = self.free.pop_front() else {
            return Err(Broken::Missing { missing: BUFFERS });
        };
        let buffer = &self.buffers[number];
        let options = MapOptions::new(Access::Write);
        buffer.region.map(&buffer.frames, &options)?;
        Ok(number)
    }

    fn unmap_later(&self, number: usize, begun: Instant) -> Result<(), Broken> {
        let region = &self.buffers[number].region;
        let (returns, pages) = (Arc::clone(&self.returns), region.pages());
        let callback: Callback = Box::new(move |result| {
            let latency_ns = ns_since(begun);
            let checked = returns.check(pages, result);
            returns.put(number, latency_ns, checked);
        });
        region.unmap_later(Some(callback))?;
        Ok(())
    }

    fn wait_for_refill(&self) {
        let mut returned = self.returns.lock();
        if returned.buffers.len() >= REFILL {
            return;
        }
        returned.wanted = REFILL;
        while returned.wanted > 0 {
            let waited = self.returns.enough.wait(returned);
            returned = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn take_returned(&mut self) -> Result<(), Broken> {
        let mut returned = self.returns.lock();
        self.free.extend(returned.buffers.drain(..));
        returned.broken.take().map_or(Ok(()), Err)
    }
}

fn ns_since(begun: Instant) -> u32 {
    u32::try_from(begun.elapsed().as_nanos()).unwrap_or(u32::MAX)
}
