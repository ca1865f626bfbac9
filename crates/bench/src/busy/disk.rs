// SPDX-License-Identifier: Apache-2.0
//! The stand-in's work on a disk: blocks that are written and read at random, and compared.
//!
//! ```text
//!   the RAM   │ pages of the vCPUs … │ ring and slots │ buffers of slot 0 │ of slot 1 │ …
//!   the disk  │ block 0: slot 0's │ block 1: slot 1's │ … in turns
//! ```
//! Buffers lie in memory that the daemon evicts, and each slot has more of them than it uses at a time, so that some
//! are away when the disk wants them. A block's content follows from its number and its *version*, which a write
//! raises and which is kept outside of RAM and disk; so a block that is old, or another's, or torn, is detected. Each
//! block belongs to one slot, which has one request under way: nobody writes what another reads.
//!
//! The back end may die at any time. Then the thread connects to the next one, and its requests are done by that.

use super::ram::Ram;
use pagetide_addr::PAGE_BYTES;
use pagetide_frontend::{
    Direction, Disk, FrontendError, Outcome, RINGS_BYTES, Request, SECTOR_BYTES,
};
use pagetide_random::SplitMix64;
use pagetide_sys::{clock, mapping::SharedMapping};
use serde::{Deserialize, Serialize};
use std::{
    path::Path,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, Sender, TryRecvError, channel},
    },
    time::{Duration, Instant},
};

/// Memory of the disk, behind the pages of the vCPUs: whole sections.
pub const DISK_BYTES: u64 = 8 << 20;
/// The image must have room for these blocks.
pub const IMAGE_BYTES: u64 = BLOCKS * BLOCK_BYTES;
/// Bytes of a block.
const BLOCK_BYTES: u64 = 16 << 10;
/// Blocks of the disk.
const BLOCKS: u64 = 4096;
/// Requests under way.
const SLOTS: u16 = 6;
/// Buffers of a slot.
const BUFFERS: u64 = 64;
/// Seed of the choice of blocks.
const SEED: u64 = 17;
/// Between two tries to connect.
const CONNECT_AGAIN: Duration = Duration::from_micros(100);
/// Longest sleep without a look at the ring and at what is asked: a call is lost with the back end that died before it.
const LOOK: Duration = Duration::from_millis(20);
/// Longest time of a check in which no block is compared.
const VERIFY_WAIT: Duration = Duration::from_secs(120);

const _: () = assert!(RINGS_BYTES + SLOTS as u64 * BUFFERS * BLOCK_BYTES <= DISK_BYTES);

/// The work on a disk in an interval.
#[derive(Clone, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct DiskCounted {
    /// Requests that are done.
    pub requests: u64,
    /// Of them, those that failed.
    pub failed_requests: u64,
    /// Blocks that were compared.
    pub compared_blocks: u64,
    /// Blocks that were wrong.
    pub wrong_blocks: u64,
    /// Their wrong bytes.
    pub wrong_bytes: u64,
    /// The first of them, or what else ended the work.
    pub first_wrong: Option<String>,
    /// Longest request, in nanoseconds; one that is under way counts as far as it has come.
    pub longest_ns: u64,
    /// Times that the back end hung up.
    pub hang_ups: u64,
    /// Requests that were under way then.
    pub under_way_at_hang_up: u64,
    /// Requests that are under way now.
    pub under_way: u64,
}

impl DiskCounted {
    /// How far a check has come that does not go on.
    fn not_checked(&self) -> String {
        format!(
            "none of its blocks was compared for {} s; {} of {BLOCKS} were before, {} requests are under way, and the \
             longest up to now took {} ms",
            VERIFY_WAIT.as_secs(),
            self.compared_blocks,
            self.under_way,
            self.longest_ns / 1_000_000,
        )
    }
}

/// The thread that uses the disk, from outside.
pub struct DiskWork {
    shared: Arc<Shared>,
    checks: Sender<()>,
}

#[derive(Default)]
struct Shared {
    counted: Mutex<Counted>,
    checked: Condvar,
}

#[derive(Default)]
struct Counted {
    since: DiskCounted,
    /// All blocks were compared, as was asked.
    is_checked: bool,
}

impl Counted {
    fn has_come_to_its_end(&self) -> bool {
        self.is_checked || self.since.first_wrong.is_some()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Counted> {
        // Its numbers are right at any time.
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DiskWork {
    /// Begins to use the disk at `socket` in the bytes behind the pages of `ram`.
    ///
    /// # Errors
    /// There are no descriptors, or there is no thread.
    pub fn start(ram: &Ram, socket: &Path) -> Result<Self, FrontendError> {
        let (file, mapping) = ram.shared()?;
        let base = ram.pages() * PAGE_BYTES;
        let disk = Disk::new(Arc::clone(&mapping), file, base, socket)?;
        let shared = Arc::new(Shared::default());
        let (checks, asked) = channel();
        let mut work = Work {
            disk,
            ram: mapping,
            buffers: base + RINGS_BYTES,
            slots: (0..SLOTS).map(Slot::new).collect(),
            versions: vec![0; usize::try_from(BLOCKS).unwrap_or(usize::MAX)],
            random: SplitMix64::new(SEED),
            task: Task::Use,
            was_connected: false,
            shared: Arc::clone(&shared),
            asked,
        };
        // A back end that is there is connected before the vCPUs run; one that is not is waited for.
        work.follow_link();
        let thread = std::thread::Builder::new().name("disk".into());
        thread.spawn(move || {
            if let Err(error) = work.run() {
                let mut counted = work.shared.lock();
                counted.since.wrong_blocks += 1;
                let what = counted.since.first_wrong.get_or_insert_with(String::new);
                *what = format!("the disk cannot be used any more: {error}");
                work.shared.checked.notify_all();
            }
        })?;
        Ok(Self { shared, checks })
    }

    /// What was done since the last call.
    #[must_use]
    pub fn count(&self) -> DiskCounted {
        let mut counted = self.shared.lock();
        let now = DiskCounted {
            under_way: counted.since.under_way,
            first_wrong: counted.since.first_wrong.clone(),
            ..DiskCounted::default()
        };
        std::mem::replace(&mut counted.since, now)
    }

    /// Ends the use of the disk, and compares all its blocks.
    ///
    /// # Errors
    /// It does not come to an end.
    pub fn verify(&self) -> Result<DiskCounted, String> {
        self.checks
            .send(())
            .map_err(|_| "the disk's thread has ended".to_owned())?;
        let mut counted = self.shared.lock();
        loop {
            let compared = counted.since.compared_blocks;
            let goes_on = |counted: &mut Counted| !counted.has_come_to_its_end();
            let waited = (self.shared.checked).wait_timeout_while(counted, VERIFY_WAIT, goes_on);
            counted = waited.unwrap_or_else(PoisonError::into_inner).0;
            if counted.has_come_to_its_end() {
                drop(counted);
                return Ok(self.count());
            }
            if counted.since.compared_blocks == compared {
                return Err(counted.since.not_checked());
            }
        }
    }
}

/// What the thread does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Task {
    /// Writes and reads.
    Use,
    /// Waits until nothing is under way, and then compares.
    Settle,
    /// Compares all blocks, from this one on.
    Check(u64),
    Rest,
}

/// One of the requests at a time.
struct Slot {
    number: u16,
    buffer: u64,
    under_way: Option<UnderWay>,
}

struct UnderWay {
    direction: Direction,
    block: u64,
    version: u32,
    begun: Instant,
}

impl Slot {
    fn new(number: u16) -> Self {
        Self {
            number,
            buffer: 0,
            under_way: None,
        }
    }

    /// Offset of its buffer among all buffers.
    fn at(&self) -> u64 {
        (u64::from(self.number) * BUFFERS + self.buffer) * BLOCK_BYTES
    }
}

struct Work {
    disk: Disk,
    ram: Arc<SharedMapping>,
    buffers: u64,
    slots: Vec<Slot>,
    versions: Vec<u32>,
    random: SplitMix64,
    task: Task,
    was_connected: bool,
    shared: Arc<Shared>,
    asked: Receiver<()>,
}

/// What a block holds: zeros before its first write.
fn content(block: u64, version: u32) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(BLOCK_BYTES).unwrap_or(usize::MAX)];
    if version == 0 {
        return bytes;
    }
    let mut random = SplitMix64::new(block << 32 | u64::from(version));
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        let its = match at % 512 {
            // A quarter of each page compresses to nothing, the rest not at all.
            ..128 => block,
            _ => random.next_u64(),
        };
        word.copy_from_slice(&its.to_le_bytes());
    }
    bytes
}

/// How a block differs from what it should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct WrongBlock {
    first_byte: usize,
    bytes: u64,
}

impl WrongBlock {
    fn of(found: &[u8], wanted: &[u8]) -> Option<Self> {
        // Nearly all are equal, and this is the fastest way to know.
        if found == wanted {
            return None;
        }
        let mut differ = (0..wanted.len()).filter(|byte| found.get(*byte) != wanted.get(*byte));
        let first_byte = differ.next()?;
        Some(Self {
            first_byte,
            bytes: 1 + differ.count() as u64,
        })
    }

    fn told(self, was: &UnderWay) -> String {
        format!(
            "block {} is wrong from byte {} on (version {})",
            was.block, self.first_byte, was.version
        )
    }
}

impl Work {
    fn run(&mut self) -> Result<(), FrontendError> {
        loop {
            self.follow_link();
            let mut has_done = false;
            while let Some((slot, outcome)) = self.disk.take_done()? {
                self.ended(slot, outcome)?;
                has_done = true;
            }
            match self.asked.try_recv() {
                Ok(()) => self.task = Task::Settle,
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
            self.go_on()?;
            if !has_done {
                let longest = match self.disk.has_hung_up() {
                    true => CONNECT_AGAIN,
                    false => LOOK,
                };
                self.disk.wait(longest)?;
            }
        }
    }

    /// Connects again if the back end is gone.
    fn follow_link(&mut self) {
        if !self.disk.has_hung_up() {
            return;
        }
        if self.was_connected {
            self.was_connected = false;
            let mut counted = self.shared.lock();
            counted.since.hang_ups += 1;
            counted.since.under_way_at_hang_up += self.disk.under_way() as u64;
        }
        // One that is not there yet, or dies in the middle, is tried again.
        match self.disk.connect() {
            Ok(()) => self.was_connected = true,
            Err(error) => tracing::trace!(%error, "the disk is away"),
        }
    }

    fn go_on(&mut self) -> Result<(), FrontendError> {
        let is_idle = self.disk.under_way() == 0;
        if self.task == Task::Settle && is_idle {
            self.task = Task::Check(0);
        }
        for number in 0..self.slots.len() {
            if self.slots[number].under_way.is_some() {
                continue;
            }
            match self.task {
                Task::Use => {
                    let (block, direction) = self.chosen(number as u64);
                    self.begin(number, block, direction)?;
                }
                Task::Check(block) if block < BLOCKS => {
                    self.begin(number, block, Direction::Read)?;
                    self.task = Task::Check(block + 1);
                }
                Task::Settle | Task::Check(_) | Task::Rest => {}
            }
        }
        let is_idle = self.disk.under_way() == 0;
        if self.task == Task::Check(BLOCKS) && is_idle {
            self.task = Task::Rest;
            self.shared.lock().is_checked = true;
            self.shared.checked.notify_all();
        }
        let under_way = self.slots.iter().filter_map(|slot| slot.under_way.as_ref());
        let ages = under_way.map(|request| clock::ns(request.begun.elapsed()));
        let oldest_ns = ages.max().unwrap_or(0);
        let mut counted = self.shared.lock();
        counted.since.under_way = self.disk.under_way() as u64;
        counted.since.longest_ns = counted.since.longest_ns.max(oldest_ns);
        Ok(())
    }

    /// One of the slot's blocks, and what to do with it.
    fn chosen(&mut self, slot: u64) -> (u64, Direction) {
        let slots = u64::from(SLOTS);
        let block = self.random.below((BLOCKS - slot).div_ceil(slots)) * slots + slot;
        let direction = match self.random.below(2) {
            0 => Direction::Read,
            _ => Direction::Write,
        };
        (block, direction)
    }

    fn begin(
        &mut self,
        number: usize,
        block: u64,
        direction: Direction,
    ) -> Result<(), FrontendError> {
        let slot = &mut self.slots[number];
        slot.buffer = (slot.buffer + 1) % BUFFERS;
        let data = self.buffers + slot.at();
        let place = usize::try_from(block).unwrap_or(usize::MAX);
        if direction == Direction::Write {
            self.versions[place] += 1;
        }
        let version = self.versions[place];
        let bytes = match direction {
            Direction::Write => content(block, version),
            // What a read leaves undone shows.
            Direction::Read => vec![0xa5; usize::try_from(BLOCK_BYTES).unwrap_or(usize::MAX)],
        };
        self.ram.copy_to(data, &bytes)?;
        let request = Request {
            direction,
            sector: block * BLOCK_BYTES / SECTOR_BYTES,
            data,
            bytes: u32::try_from(BLOCK_BYTES).unwrap_or(u32::MAX),
        };
        slot.under_way = Some(UnderWay {
            direction,
            block,
            version,
            begun: Instant::now(),
        });
        let number = slot.number;
        self.disk.begin(number, &request)
    }

    fn ended(&mut self, number: u16, outcome: Outcome) -> Result<(), FrontendError> {
        let slot = &mut self.slots[usize::from(number)];
        let at = self.buffers + slot.at();
        let Some(was) = slot.under_way.take() else {
            return Err(FrontendError::NotFree(number));
        };
        let wrong = match (was.direction, outcome) {
            (Direction::Read, Outcome::Done) => {
                let wanted = content(was.block, was.version);
                let mut found = vec![0; wanted.len()];
                self.ram.copy_from(at, &mut found)?;
                WrongBlock::of(&found, &wanted)
            }
            (Direction::Read | Direction::Write, _) => None,
        };
        let mut counted = self.shared.lock();
        let since = &mut counted.since;
        since.requests += 1;
        since.longest_ns = since.longest_ns.max(clock::ns(was.begun.elapsed()));
        if let Outcome::Failed(status) = outcome {
            since.failed_requests += 1;
            let what = || format!("a request for block {} ended with {status}", was.block);
            since.first_wrong.get_or_insert_with(what);
        }
        since.compared_blocks += u64::from(was.direction == Direction::Read);
        if let Some(wrong) = wrong {
            since.wrong_blocks += 1;
            since.wrong_bytes += wrong.bytes;
            since.first_wrong.get_or_insert_with(|| wrong.told(&was));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn content_tells_blocks_and_versions_apart() {
        let all: BTreeSet<Vec<u8>> = (0..4)
            .flat_map(|block| (1..4).map(move |version| content(block, version)))
            .collect();
        assert_eq!(all.len(), 12);
        assert!(content(7, 0).iter().all(|byte| *byte == 0));
        assert_eq!(content(7, 1).len() as u64, BLOCK_BYTES);
    }

    #[test]
    fn wrong_bytes_of_a_block_are_counted_from_the_first_on() {
        let wanted = content(3, 1);
        assert_eq!(WrongBlock::of(&wanted, &wanted), None);
        let mut found = wanted.clone();
        for byte in [7, 9, 4096] {
            found[byte] ^= 1;
        }
        let wrong = WrongBlock {
            first_byte: 7,
            bytes: 3,
        };
        assert_eq!(WrongBlock::of(&found, &wanted), Some(wrong));
    }

    #[test]
    fn requests_wait_for_a_back_end_and_are_told() {
        let ram = Ram::with_tail(
            pagetide_addr::SECTION_PAGES,
            DISK_BYTES,
            super::super::ram::HugePages::NotAdvised,
            super::super::content::Mix::Halves,
        )
        .unwrap();
        let work = DiskWork::start(&ram, Path::new("/nowhere")).unwrap();
        // Nobody listens: its requests stay under way, and are told so.
        let begun = Instant::now();
        while work.count().under_way < u64::from(SLOTS) {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
        // And how old they are, each time.
        while work.count().longest_ns < 1_000_000 {
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
    }
}
