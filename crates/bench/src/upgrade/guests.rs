// SPDX-License-Identifier: Apache-2.0
//! The guests of the bench: stand-ins that time what they wait for, and stock guests beside one of those.

use super::rig::{PATIENCE, Place, Running};
use crate::{
    busy::{
        disk::{DiskCounted, IMAGE_BYTES},
        guest::{BATCH, BusyGuestOptions, Order, RamSize},
        pattern::Pattern,
        process::BusyGuest,
        ram::HugePages,
        stock::{Load, StockGuest, StockOptions},
    },
    harness::figures::to_f64,
};
use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Of the image of a stock guest's disk.
const STOCK_DISK_BYTES: u64 = 64 << 20;
/// RAM of a stock guest.
const STOCK_RAM_BYTES: u64 = 768 << 20;
/// Evicted from a stock guest before each upgrade.
const STOCK_EVICTED_BYTES: u64 = 64 << 20;
/// A run of a stock guest's load: long enough for a pass of stress-ng over its memory, on a part of a CPU.
const STOCK_RUN: Duration = Duration::from_secs(15);
/// Of a vCPU's time, how long one looks whether it goes on.
const LOOK: Duration = Duration::from_millis(20);

/// What guests have waited for, and what went wrong.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Seen {
    pub(super) faults: u64,
    pub(super) requests: u64,
    pub(super) failed_requests: u64,
    pub(super) wrong_bytes: u64,
    /// The longest that a vCPU has waited for a page.
    pub(super) fault_ns: u64,
    /// The longest that a request of a disk has taken.
    pub(super) request_ns: u64,
}

impl Seen {
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            faults: self.faults + other.faults,
            requests: self.requests + other.requests,
            failed_requests: self.failed_requests + other.failed_requests,
            wrong_bytes: self.wrong_bytes + other.wrong_bytes,
            fault_ns: self.fault_ns.max(other.fault_ns),
            request_ns: self.request_ns.max(other.request_ns),
        }
    }

    /// The longest wait for anything.
    pub(super) fn stall_us(&self) -> f64 {
        to_f64(self.fault_ns.max(self.request_ns)) / 1e3
    }
}

/// A stand-in with a disk, attached.
pub(super) struct StandIn {
    name: String,
    guest: BusyGuest,
}

impl StandIn {
    pub(super) fn start(
        place: &Place,
        running: &Running,
        number: usize,
        ram_bytes: u64,
    ) -> Result<Self, String> {
        let name = format!("stand-in-{number}");
        let disk = place.disk(&name, IMAGE_BYTES)?;
        running.add_disk(&disk)?;
        let options = BusyGuestOptions {
            ram_mib: ram_bytes >> 20,
            size: RamSize::Exact,
            vcpus: 1,
            first_cpu: number,
            batch: BATCH,
            rest_us: 0,
            time_faults: true,
            pattern: Pattern::Part { hot_permille: 1000 },
            huge_pages: HugePages::NotAdvised,
            disk: Some(disk.0),
        };
        let guest = BusyGuest::start(place.files(), &options)?;
        running.attach(&name, guest.pid())?;
        Ok(Self { name, guest })
    }

    /// Evicts its memory while its vCPU rests, and forgets what it has seen. From now on it faults.
    pub(super) fn begin(&mut self, running: &Running) -> Result<(), String> {
        self.guest.obey(&Order::Pause)?;
        running.evict(&self.name, None)?;
        self.seen()?;
        self.guest.obey(&Order::Resume).map(drop)
    }

    /// What it has seen since the last call.
    pub(super) fn seen(&mut self) -> Result<Seen, String> {
        let faults = self.guest.faults()?;
        let disk = self.disk(&Order::Disk)?;
        Ok(Seen {
            faults: faults.len() as u64,
            requests: disk.requests,
            failed_requests: disk.failed_requests,
            wrong_bytes: disk.wrong_bytes,
            fault_ns: faults.iter().copied().max().unwrap_or(0).into(),
            request_ns: disk.longest_ns,
        })
    }

    /// What its disk has done since the last call, or came to by this order.
    ///
    /// # Errors
    /// It was disconnected, which an upgrade must not do, or cannot go on for another reason than its requests.
    fn disk(&mut self, order: &Order) -> Result<DiskCounted, String> {
        let disk = self.guest.disk(order)?;
        is_sound(&disk).map_err(|reason| format!("the disk of {}: {reason}", self.name))?;
        Ok(disk)
    }

    /// Waits until its vCPU and its disk have done more; what it has seen meanwhile.
    ///
    /// # Errors
    /// They do not go on.
    pub(super) fn goes_on(&mut self) -> Result<Seen, String> {
        let begun = Instant::now();
        let (mut seen, mut operations) = (Seen::default(), 0);
        while operations == 0 || seen.requests == 0 {
            if begun.elapsed() > PATIENCE {
                return Err(format!("{} does not go on", self.name));
            }
            operations += self.guest.count_for(LOOK)?.operations;
            seen = seen.and(self.seen()?);
        }
        Ok(seen)
    }

    /// Compares every block, releases it and compares every byte. Returns what was wrong.
    pub(super) fn end(mut self, running: &Running) -> Result<Seen, String> {
        let verified = self.disk(&Order::VerifyDisk);
        let disk = verified.map_err(|reason| running.with_log(reason))?;
        running.detach(&self.name)?;
        self.guest.obey(&Order::Pause)?;
        self.guest.obey(&Order::VerifyAll)?;
        Ok(Seen {
            failed_requests: disk.failed_requests,
            wrong_bytes: disk.wrong_bytes,
            ..Seen::default()
        })
    }
}

/// The counts of a disk are all that there is to tell.
fn is_sound(disk: &DiskCounted) -> Result<(), String> {
    if disk.hang_ups > 0 {
        return Err(format!("it was disconnected {} times", disk.hang_ups));
    }
    match &disk.first_wrong {
        // It is counted, this time.
        Some(_) if disk.failed_requests + disk.wrong_bytes > 0 => Ok(()),
        Some(wrong) => Err(wrong.clone()),
        None => Ok(()),
    }
}

/// A stock guest that runs its load again and again on a thread of its own.
pub(super) struct Stock {
    name: &'static str,
    shared: Arc<StockShared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct StockShared {
    ends: AtomicBool,
    operations: AtomicU64,
    failed: Mutex<Option<String>>,
}

impl Stock {
    pub(super) fn start(place: &Place, running: &Running, load: Load) -> Result<Self, String> {
        let name = load.name();
        let folder = place.files().join(name);
        std::fs::create_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let disk = match load.needs_disk() {
            false => None,
            true => {
                let disk = place.disk(name, STOCK_DISK_BYTES)?;
                running.add_disk(&disk)?;
                Some(disk.0)
            }
        };
        let options = StockOptions {
            dir: &folder,
            ram_bytes: STOCK_RAM_BYTES,
            disk: disk.as_deref(),
        };
        let guest = StockGuest::start(options, load)?;
        running.attach(name, guest.pid())?;
        let shared = Arc::new(StockShared::default());
        let its = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || work(guest, &its))
            .map_err(|error| format!("no thread for {name}: {error}"))?;
        Ok(Self {
            name,
            shared,
            thread: Some(thread),
        })
    }

    /// Evicts part of its memory.
    pub(super) fn begin(&self, running: &Running) -> Result<(), String> {
        self.check()?;
        running.evict(self.name, Some(STOCK_EVICTED_BYTES))
    }

    /// Fails if its load has: it compares what it reads.
    pub(super) fn check(&self) -> Result<(), String> {
        let failed = self.shared.failed.lock();
        match &*failed.unwrap_or_else(PoisonError::into_inner) {
            None => Ok(()),
            Some(reason) => Err(format!("the guest with {}: {reason}", self.name)),
        }
    }

    /// Lets the run under way come to its end, releases it, and returns the operations of all runs.
    pub(super) fn end(mut self, running: &Running) -> Result<u64, String> {
        self.shared.ends.store(true, Relaxed);
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            return Err(format!("the thread of {} panicked", self.name));
        }
        self.check()?;
        // Its VMM has ended with the thread.
        drop(running.detach(self.name));
        Ok(self.shared.operations.load(Relaxed))
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        self.shared.ends.store(true, Relaxed);
        // Its VMM ends with the thread, after the run under way.
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            eprintln!("the thread of {} panicked", self.name);
        }
    }
}

fn work(mut guest: StockGuest, shared: &StockShared) {
    while !shared.ends.load(Relaxed) {
        match guest.count_for(STOCK_RUN) {
            Ok(counted) => {
                shared.operations.fetch_add(counted.operations, Relaxed);
            }
            Err(reason) => {
                let mut failed = shared.failed.lock().unwrap_or_else(PoisonError::into_inner);
                *failed = Some(reason);
                return;
            }
        }
    }
}
