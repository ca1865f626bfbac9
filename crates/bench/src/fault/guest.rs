// SPDX-License-Identifier: Apache-2.0
//! The stand-in for a VMM: a process whose memory is laid out like a VM's, and one thread that uses it like
//! a vCPU.
//!
//! A real guest would be possible, but its clock, kernel and virtualization would be measured with it, on
//! the peer's side too. Pagetide sees the same: shared memory in a memfd, mapped once and not inherited by
//! children, and a thread named like QEMU's vCPUs, on one CPU. Orders are lines of JSON, each answered by
//! one line; the end of input ends the process.

use super::{
    content::{Content, Kind, PAGE, random_order},
    touch::{Part, Pattern, together, touch},
};
use crate::orders::say;
use pagetide_addr::{PAGE_BYTES, PageNo, to_usize};
use pagetide_sys::{cpu, lent::LentMemory};
use serde::{Deserialize, Serialize};
use std::{
    io::BufRead as _,
    os::fd::{AsFd as _, AsRawFd as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use virtio_driver::{
    VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};

/// QEMU's name for the thread of its first vCPU.
const VCPU_THREAD: &str = "CPU 0/KVM";
/// Entries of the device's queue, of which one request uses three.
const QUEUE_SIZE: u16 = 64;
/// Longest wait for one device request.
const REQUEST_WAIT: Duration = Duration::from_secs(10);

/// An order of the bench to the guest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Read the pages in the order of a pattern, timing each.
    Touch {
        /// The pattern.
        pattern: Pattern,
        /// Which pages.
        part: Part,
        /// Of the order.
        seed: u64,
    },
    /// Read each page except the last once, by several threads at a time, timing each. Their parts have
    /// equal size, their orders are random.
    TouchTogether {
        /// How many.
        threads: u64,
        /// Of their orders.
        seed: u64,
        /// Further reads beside the timed ones.
        beside: Beside,
    },
    /// Start, now that the last page is being read.
    Go,
    /// Make a device transfer a block into each page or out of it, in random order, timing each from available
    /// to used.
    ByDevice {
        /// Which way.
        direction: Direction,
        /// Which pages.
        part: Part,
        /// Socket of the device.
        socket: PathBuf,
        /// Of the order.
        seeds: Vec<u64>,
    },
    /// Write the required content to each page.
    Fill,
    /// Compare each page with its required content.
    Verify,
}

impl Order {
    /// Read all pages once.
    pub(crate) const fn touch_all(pattern: Pattern, seed: u64) -> Self {
        Self::Touch {
            pattern,
            part: Part::All,
            seed,
        }
    }
}

/// Which way a device transfers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Direction {
    /// From its image, all blocks of which are zeros: a page's content is replaced.
    IntoMemory,
    /// To its image: a page's content is needed.
    OutOfMemory,
}

/// Reads beside the timed ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Beside {
    /// Nothing.
    Nothing,
    /// The last page, first of all; [`Order::Go`] starts the others.
    LastPage,
}

/// An answer of the guest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// The memory is filled.
    Ready {
        /// Its address.
        address: u64,
    },
    /// Time for each page, in nanoseconds.
    Took {
        /// In the order of the accesses.
        ns: Vec<u32>,
    },
    /// Time for each page, and for all together.
    TookTogether {
        /// Nanoseconds of each.
        ns: Vec<u32>,
        /// Nanoseconds from the first to the last.
        wall_ns: u64,
    },
    /// Done, and every byte checked is right.
    Done,
    /// It failed.
    Failed {
        /// Why.
        reason: String,
    },
}

/// Time since `begun` in nanoseconds; the longest that fits if it is more (4 s).
pub(super) fn ns_since(begun: Instant) -> u32 {
    u32::try_from(begun.elapsed().as_nanos()).unwrap_or(u32::MAX)
}

/// Runs the guest with `pages` pages of memory of `kind`, its vCPU on `cpu`, until the end of input.
///
/// # Errors
/// A message.
pub fn run(kind: Kind, pages: u64, cpu: usize) -> Result<(), String> {
    let vcpu = std::thread::Builder::new()
        .name(VCPU_THREAD.into())
        .spawn(move || Vcpu::start(kind, pages, cpu)?.serve())
        .map_err(|error| format!("no thread for the vCPU: {error}"))?;
    vcpu.join()
        .map_err(|_| "the vCPU has panicked".to_owned())?
}

/// Orders still to come.
type Orders<'a> = dyn Iterator<Item = Result<Order, String>> + 'a;

struct Vcpu {
    memory: LentMemory,
    kind: Kind,
    content: Content,
    pages: u64,
}

impl Vcpu {
    fn start(kind: Kind, pages: u64, cpu: usize) -> Result<Self, String> {
        cpu::set_affinity(&[cpu]).map_err(|error| error.to_string())?;
        let mut vcpu = Self {
            memory: LentMemory::new("guest-ram", pages * PAGE_BYTES)
                .map_err(|error| error.to_string())?,
            kind,
            content: Content::of(kind)?,
            pages,
        };
        vcpu.fill()?;
        say(&Answer::Ready {
            address: vcpu.memory.address() as u64,
        })?;
        Ok(vcpu)
    }

    fn serve(&mut self) -> Result<(), String> {
        let mut orders = std::io::stdin().lock().lines().map(|line| {
            let line = line.map_err(|error| error.to_string())?;
            serde_json::from_str(&line).map_err(|error| error.to_string())
        });
        while let Some(order) = orders.next() {
            let answer = match self.obey(&order?, &mut orders) {
                Ok(answer) => answer,
                Err(reason) => Answer::Failed { reason },
            };
            say(&answer)?;
        }
        Ok(())
    }

    fn obey(&mut self, order: &Order, orders: &mut Orders) -> Result<Answer, String> {
        match order {
            Order::Touch {
                pattern,
                part,
                seed,
            } => {
                let range = part.of(self.pages);
                self.touch(range.start, &pattern.order(range.len(), *seed))
            }
            Order::TouchTogether {
                threads,
                seed,
                beside,
            } => self.touch_together(*threads, *seed, *beside, orders),
            Order::Go => Err("no touches wait for Go".to_owned()),
            Order::ByDevice {
                direction,
                part,
                socket,
                seeds,
            } => self.by_device(*direction, *part, socket, seeds),
            Order::Fill => self.fill(),
            Order::Verify => self.verify(),
        }
    }

    fn bytes(&mut self, page: PageNo) -> Result<&mut [u8], String> {
        self.memory
            .bytes_mut(page.byte_offset(), PAGE_BYTES)
            .ok_or_else(|| format!("{page} is beyond the memory"))
    }

    /// In this order of positions behind `first`.
    fn touch(&mut self, first: PageNo, order: &[PageNo]) -> Result<Answer, String> {
        let kind = self.kind;
        let mut ns = Vec::with_capacity(order.len());
        for position in order {
            let page = first.plus(position.0);
            ns.push(touch(kind, page, self.bytes(page)?)?);
        }
        Ok(Answer::Took { ns })
    }

    /// The answer is sent before the page that is read beside has been filled.
    fn touch_together(
        &mut self,
        threads: u64,
        seed: u64,
        beside: Beside,
        orders: &mut Orders,
    ) -> Result<Answer, String> {
        let (kind, last) = (self.kind, PageNo(self.pages - 1));
        let all = self.memory.bytes_mut(0, self.pages * PAGE_BYTES);
        let all: &[u8] = all.ok_or("the memory is shorter than it was")?;
        let (others, held) = all.split_at(last.index() * PAGE);
        let timed = || {
            let done = together(kind, others, PageNo(0), threads, seed)?;
            Ok(Answer::TookTogether {
                ns: done.ns,
                wall_ns: done.wall_ns,
            })
        };
        if beside == Beside::Nothing {
            return timed();
        }
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| touch(kind, last, held));
            match orders.next() {
                Some(Ok(Order::Go)) => say(&timed()?)?,
                other => return Err(format!("{other:?} instead of an order to go")),
            }
            reading
                .join()
                .map_err(|_| "a vCPU has panicked".to_owned())??;
            Ok(Answer::Done)
        })
    }

    fn fill(&mut self) -> Result<Answer, String> {
        for page in (0..self.pages).map(PageNo) {
            let content = self.content.page(page);
            self.bytes(page)?.copy_from_slice(&content);
        }
        Ok(Answer::Done)
    }

    fn verify(&mut self) -> Result<Answer, String> {
        for page in (0..self.pages).map(PageNo) {
            let wanted = self.content.page(page);
            if self.bytes(page)? != wanted {
                return Err(format!("{page} has wrong content"));
            }
        }
        Ok(Answer::Done)
    }

    /// One connection for all passes: the device's process maps the RAM for the duration of the connection.
    fn by_device(
        &mut self,
        direction: Direction,
        part: Part,
        socket: &Path,
        seeds: &[u64],
    ) -> Result<Answer, String> {
        let failed = |error: std::io::Error| format!("the device: {error}");
        let features = VirtioFeatureFlags::VERSION_1.bits()
            | VirtioFeatureFlags::RING_EVENT_IDX.bits()
            | VirtioBlkFeatureFlags::MQ.bits();
        let path = socket.to_str().ok_or("the socket's path is not UTF-8")?;
        let mut transport: Box<VirtioBlkTransport> =
            Box::new(VhostUser::new(path, features).map_err(failed)?);
        let mut queues =
            VirtioBlkQueue::setup_queues(transport.as_mut(), 1, QUEUE_SIZE).map_err(failed)?;
        let len = to_usize(self.pages * PAGE_BYTES);
        let (address, file) = (self.memory.address(), self.memory.as_fd().as_raw_fd());
        transport
            .map_mem_region(address, len, file, 0)
            .map_err(failed)?;
        let mut queue = queues.swap_remove(0);
        queue.set_used_notif_enabled(false);
        let mut ns = Vec::new();
        for seed in seeds {
            let range = part.of(self.pages);
            for position in random_order(range.len(), *seed) {
                let page = range.start.plus(position.0);
                ns.push(self.transfer(transport.as_ref(), &mut queue, direction, page)?);
            }
        }
        Ok(Answer::Took { ns })
    }

    fn transfer(
        &mut self,
        transport: &VirtioBlkTransport,
        queue: &mut VirtioBlkQueue<'_, ()>,
        direction: Direction,
        page: PageNo,
    ) -> Result<u32, String> {
        let failed = |error: std::io::Error| format!("a device's request for {page}: {error}");
        let kick = transport.get_submission_notifier(0);
        let wanted = match direction {
            Direction::IntoMemory => 0,
            Direction::OutOfMemory => self.kind.first_word(page),
        };
        let bytes = self.bytes(page)?;
        let begun = Instant::now();
        let queued = match direction {
            Direction::IntoMemory => queue.read(page.byte_offset(), bytes, ()),
            Direction::OutOfMemory => queue.write(page.byte_offset(), bytes, ()),
        };
        queued.map_err(failed)?;
        if queue.avail_notif_needed() {
            kick.notify().map_err(failed)?;
        }
        let mut looks = 0_u32;
        loop {
            if let Some(done) = queue.completions().next() {
                let taken = ns_since(begun);
                let first = self.bytes(page)?.first_chunk::<8>();
                return match done.ret {
                    0 if first == Some(&wanted.to_ne_bytes()) => Ok(taken),
                    0 => Err(format!("{page} does not hold what it must")),
                    errno => Err(format!("a request for {page} ended with {errno}")),
                };
            }
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(1 << 16) && begun.elapsed() > REQUEST_WAIT {
                return Err(format!("a request for {page} does not end"));
            }
            std::hint::spin_loop();
        }
    }
}

const _: () = assert!(PAGE as u64 == PAGE_BYTES);
