// SPDX-License-Identifier: Apache-2.0
//! What the tier's thread and its callers share: how the tier stands, what is stored, what is to be deleted.
//!
//! All of it is under one lock, held for some table operations and never while a duty is told.
//!
//! # What the limit counts
//! The sealed bytes of each extent of which a page is left, by extent and not by page: 32 bytes of
//! memory per section of cold pages. When a page of an extent is forgotten, its average is taken off; the
//! last page takes off the rest. Bytes of a batch count from the moment it is accepted. The server needs
//! more than that (about 100 bytes a key), so its own `maxmemory` is the bound that holds.
//!
//! # What a predecessor left
//! ([`State::hold`], [`State::recover`]) An extent of a predecessor counts with what its pages take by their words.
//! Of one that no word names, and of the versions that were under way when the predecessor died, all positions
//! are deleted: what of them is on the server is not known.
//!
//! # A server that lost its data
//! ([`State::lost`]) After a reconnect without the marker, nothing that was sent before is there. For each
//! VM the highest version sent so far is known; versions grow, so all up to it are lost, and reads of them
//! are answered without asking. A batch whose version was taken before that and which comes after it is
//! refused: it could be written, and would be taken for lost. If the marker of then comes back, somebody has given
//! the data back ([`State::found_again`]): from then on each page is asked for. What was forgotten in between stays
//! on the server.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use super::config::{FirstContact, RemoteNotes};
use crate::figures::Durability;
use crate::figures::Latencies;
use crate::{
    Batch, ExtentName, ExtentNo, Health, Place, Standing, TierError, TierFigures, TierKind,
    Version, VmId,
};

const KIND: TierKind = TierKind::Remote;
const PAGES_MAX: usize = crate::batch::EXTENT_PAGES_MAX;
const POSITION_WORDS: usize = PAGES_MAX / 64;
/// Versions of a VM that can have been under way when its daemon died: a few batches are written at a time, and the
/// version of one that was not sent is not used again.
const UNDER_WAY_MAX: u64 = 16;
const SECTOR_BYTES_U32: u32 = 512;
const _: () = assert!(SECTOR_BYTES_U32 as usize == crate::batch::SECTOR_BYTES);

/// Pages of an extent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Positions(Box<[u64; POSITION_WORDS]>);

impl Positions {
    fn none() -> Self {
        Self(Box::new([0; POSITION_WORDS]))
    }

    fn all() -> Self {
        Self(Box::new([u64::MAX; POSITION_WORDS]))
    }

    fn first(pages: usize) -> Self {
        let mut positions = Self::none();
        for position in 0..pages.min(PAGES_MAX) {
            positions.add(position);
        }
        positions
    }

    fn add(&mut self, position: usize) {
        self.0[position / 64] |= 1 << (position % 64);
    }

    fn add_all(&mut self, others: &Self) {
        for (word, other) in self.0.iter_mut().zip(others.0.iter()) {
            *word |= other;
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        (0_u16..)
            .take(PAGES_MAX)
            .filter(|&position| self.0[usize::from(position / 64)] >> (position % 64) & 1 == 1)
    }
}

/// Who wrote an extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Writer {
    /// This daemon.
    Us,
    /// A dead one, which may have been deleting pages of it.
    Predecessor,
}

/// What of an extent is stored.
struct Stored {
    pages: u16,
    bytes: u32,
    writer: Writer,
}

/// Requests that wait or are under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Request {
    /// Reads.
    Read,
    /// Writes.
    Write,
}

/// See the header.
pub(super) struct State {
    health: Health,
    limit_bytes: u64,
    stored_bytes: u64,
    stored: HashMap<ExtentName, Stored>,
    /// Extents of VMs that are not recovered yet.
    held: HashMap<VmId, Vec<ExtentName>>,
    to_delete: HashMap<ExtentName, Positions>,
    sent: HashMap<VmId, Version>,
    lost: HashMap<VmId, Version>,
    waiting: [usize; 2],
    waiting_max: [usize; 2],
    figures: TierFigures,
    latencies: [Latencies; 2],
    notes: RemoteNotes,
    first_contact: FirstContact,
}

impl State {
    pub(super) fn new(limit_bytes: u64, reads_max: usize, writes_max: usize) -> Self {
        Self {
            health: Health {
                standing: Standing::Gone {
                    reason: "it has not been reached yet".to_owned(),
                },
                since: Instant::now(),
            },
            limit_bytes,
            stored_bytes: 0,
            stored: HashMap::new(),
            held: HashMap::new(),
            to_delete: HashMap::new(),
            sent: HashMap::new(),
            lost: HashMap::new(),
            waiting: [0; 2],
            waiting_max: [reads_max, writes_max],
            figures: TierFigures::default(),
            latencies: <[Latencies; 2]>::default(),
            notes: RemoteNotes::default(),
            first_contact: FirstContact::UnderWay,
        }
    }

    pub(super) fn health(&self) -> &Health {
        &self.health
    }

    pub(super) fn notes(&self) -> &RemoteNotes {
        &self.notes
    }

    pub(super) fn first_contact(&self) -> FirstContact {
        self.first_contact
    }

    /// An attempt to connect has ended; only the first one counts.
    pub(super) fn tried(&mut self, contact: FirstContact) {
        if self.first_contact == FirstContact::UnderWay {
            self.first_contact = contact;
        }
    }

    /// Changes how the tier stands; true if it stood otherwise.
    pub(super) fn stand(&mut self, standing: Standing) -> bool {
        if self.health.standing == standing {
            return false;
        }
        let same_kind =
            std::mem::discriminant(&self.health.standing) == std::mem::discriminant(&standing);
        if !same_kind {
            self.health.since = Instant::now();
        }
        self.health.standing = standing;
        !same_kind
    }

    /// Why `bytes` more cannot be written now, if they cannot.
    pub(super) fn refusal(&self, bytes: u64) -> Option<TierError> {
        let full = self.stored_bytes.saturating_add(bytes) > self.limit_bytes;
        match self.health.refusal(KIND) {
            None if full => Some(TierError::Full(KIND)),
            refusal => refusal,
        }
    }

    /// Counts a request in, if there is room for one more.
    pub(super) fn admit(&mut self, request: Request) -> Result<(), TierError> {
        let index = request as usize;
        if self.waiting[index] >= self.waiting_max[index] {
            self.figures.refused += 1;
            return Err(TierError::Busy(KIND));
        }
        self.waiting[index] += 1;
        Ok(())
    }

    /// Accepts a batch; its bytes count from now on.
    pub(super) fn accept(&mut self, batch: &Batch) -> Result<(), TierError> {
        let bytes = batch.bytes().len();
        if let Some(refusal) = self.refusal(bytes as u64) {
            self.figures.refused += 1;
            return Err(refusal);
        }
        self.admit(Request::Write)?;
        let before = self.stored.insert(
            batch.extent(),
            Stored {
                pages: u16::try_from(batch.len()).unwrap_or(u16::MAX),
                bytes: u32::try_from(bytes).unwrap_or(u32::MAX),
                writer: Writer::Us,
            },
        );
        assert!(before.is_none(), "a version is used for one batch");
        self.stored_bytes += bytes as u64;
        Ok(())
    }

    /// Notes that a batch is about to be sent; an error if its version was taken before the server lost
    /// its data.
    pub(super) fn send(&mut self, extent: ExtentName) -> Result<(), TierError> {
        if self.is_lost(extent) {
            return Err(TierError::Io {
                kind: KIND,
                operation: "write",
                reason: "the server has lost its data since the batch was made".to_owned(),
            });
        }
        let sent = self.sent.entry(extent.vm).or_insert(extent.version);
        *sent = extent.version.max(*sent);
        Ok(())
    }

    /// A request was told how it ended.
    pub(super) fn ended(&mut self, request: Request, took: Duration) {
        let index = request as usize;
        self.waiting[index] -= 1;
        self.latencies[index].record(took);
    }

    pub(super) fn was_read(&mut self, result: &Result<Vec<u8>, TierError>) {
        match result {
            Ok(bytes) => {
                self.figures.pages_read += 1;
                self.figures.read_bytes += bytes.len() as u64;
            }
            Err(error) => {
                self.figures.read_errors += 1;
                self.count(error);
            }
        }
    }

    pub(super) fn was_written(&mut self, pages: usize, bytes: usize) {
        self.figures.batches_written += 1;
        self.figures.pages_written += pages as u64;
        self.figures.written_bytes += bytes as u64;
    }

    /// A batch was not written: what arrived of it is to be deleted.
    pub(super) fn was_not_written(&mut self, extent: ExtentName, error: &TierError) {
        self.figures.write_errors += 1;
        self.count(error);
        if let Some(stored) = self.stored.remove(&extent) {
            self.stored_bytes -= u64::from(stored.bytes);
            self.delete(extent, &Positions::first(usize::from(stored.pages)));
        }
    }

    fn count(&mut self, error: &TierError) {
        match error {
            TierError::Slow { .. } => self.figures.overdue += 1,
            TierError::NotThere(_) => self.notes.pages_not_there += 1,
            _ => {}
        }
    }

    pub(super) fn forget(&mut self, places: &[Place]) {
        for place in places {
            let mut positions = Positions::none();
            match usize::try_from(place.position.0) {
                Ok(position) if position < PAGES_MAX => positions.add(position),
                // No batch has so many pages.
                _ => continue,
            }
            self.delete(place.extent, &positions);
            let Entry::Occupied(mut entry) = self.stored.entry(place.extent) else {
                continue;
            };
            let stored = entry.get_mut();
            let bytes = stored.bytes / u32::from(stored.pages.max(1));
            stored.pages = stored.pages.saturating_sub(1);
            stored.bytes -= bytes;
            self.stored_bytes -= u64::from(bytes);
            if stored.pages > 0 {
                continue;
            }
            self.stored_bytes -= u64::from(stored.bytes);
            if entry.remove().writer == Writer::Predecessor {
                self.delete(place.extent, &Positions::all());
            }
        }
    }

    pub(super) fn forget_vm(&mut self, vm: VmId, extents: &[ExtentName]) {
        for &extent in extents {
            if let Some(stored) = self.stored.remove(&extent) {
                self.stored_bytes -= u64::from(stored.bytes);
            }
            self.delete(extent, &Positions::all());
        }
        self.held.remove(&vm);
        self.sent.remove(&vm);
        self.lost.remove(&vm);
    }

    fn delete(&mut self, extent: ExtentName, positions: &Positions) {
        if self.is_lost(extent) {
            return;
        }
        self.to_delete
            .entry(extent)
            .or_insert_with(Positions::none)
            .add_all(positions);
    }

    /// Up to `extents` extents of which pages are to be deleted.
    pub(super) fn take_deletions(&mut self, extents: usize) -> Vec<(ExtentName, Positions)> {
        let names: Vec<_> = self.to_delete.keys().take(extents).copied().collect();
        names
            .into_iter()
            .filter_map(|name| self.to_delete.remove_entry(&name))
            .collect()
    }

    /// Deletions that did not reach the server.
    pub(super) fn put_deletions_back(&mut self, deletions: Vec<(ExtentName, Positions)>) {
        for (extent, positions) in deletions {
            self.delete(extent, &positions);
        }
    }

    /// See [`super::RemoteTier::hold`].
    pub(super) fn hold(&mut self, vm: VmId, last: Version, extents: Vec<ExtentName>) {
        let entered: HashSet<u64> = extents.iter().map(|extent| extent.version.0).collect();
        let first = last.0.saturating_sub(UNDER_WAY_MAX) + 1;
        for version in (first..=last.0).filter(|version| !entered.contains(version)) {
            let extent = ExtentName {
                vm,
                number: ExtentNo(0),
                version: Version(version),
            };
            self.delete(extent, &Positions::all());
        }
        self.held.insert(vm, extents);
        self.sent.insert(vm, last);
    }

    /// All pages of a VM that was held are at these places.
    pub(super) fn recover(&mut self, vm: VmId, places: &[Place]) {
        for place in places {
            let bytes = u32::from(place.sectors) * SECTOR_BYTES_U32;
            let stored = self.stored.entry(place.extent).or_insert(Stored {
                pages: 0,
                bytes: 0,
                writer: Writer::Predecessor,
            });
            stored.pages += 1;
            stored.bytes += bytes;
            self.stored_bytes += u64::from(bytes);
        }
        for extent in self.held.remove(&vm).unwrap_or_default() {
            if !self.stored.contains_key(&extent) {
                self.delete(extent, &Positions::all());
            }
        }
    }

    /// The server has lost what was sent so far.
    pub(super) fn lost_all(&mut self) {
        self.lost = self.sent.clone();
        self.to_delete.clear();
        self.lost_some();
    }

    /// True if there are pages that are not asked for.
    pub(super) fn has_lost(&self) -> bool {
        !self.lost.is_empty()
    }

    /// Somebody has given the server back what it had lost, or a part of it: each page is asked for.
    pub(super) fn found_again(&mut self) {
        self.lost.clear();
    }

    /// The server has lost some pages or all: each is asked for.
    pub(super) fn lost_some(&mut self) {
        self.notes.losses += 1;
        self.notes.last_loss = Some(Instant::now());
    }

    /// True if the server lost its data since this extent was sent.
    pub(super) fn is_lost(&self, extent: ExtentName) -> bool {
        self.lost
            .get(&extent.vm)
            .is_some_and(|&lost| extent.version <= lost)
    }

    /// Notes what the server keeps across its end; true if it has not been known.
    pub(super) fn keeps(&mut self, durability: Durability) -> bool {
        std::mem::replace(&mut self.notes.durability, durability) != durability
    }

    pub(super) fn figures(&self) -> TierFigures {
        let latency = |request: Request| self.latencies[request as usize].latency();
        TierFigures {
            limit_bytes: self.limit_bytes,
            stored_bytes: self.stored_bytes,
            read_latency: latency(Request::Read),
            write_latency: latency(Request::Write),
            losses: self.notes.losses,
            pages_not_there: self.notes.pages_not_there,
            durability: Some(self.notes.durability),
            ..self.figures
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ExtentNo, Position, Room, SectorNo};
    use pagetide_random::SplitMix64;

    fn extent(vm: u128, version: u64) -> ExtentName {
        ExtentName {
            vm: VmId(vm),
            number: ExtentNo(1),
            version: Version(version),
        }
    }

    fn place(extent: ExtentName, position: u32) -> Place {
        Place {
            extent,
            position: Position(position),
            start: SectorNo(0),
            sectors: 0,
        }
    }

    fn batch(extent: ExtentName, lengths: &[usize]) -> Batch {
        let mut batch = Batch::new(
            extent,
            Room {
                kind: KIND,
                start: SectorNo(0),
                sectors: 0,
                pages: 512,
            },
        );
        for &length in lengths {
            batch.push(&vec![1; length]).unwrap();
        }
        batch
    }

    fn working(limit_bytes: u64) -> State {
        let mut state = State::new(limit_bytes, 4, 1000);
        assert!(state.stand(Standing::Working));
        state
    }

    #[test]
    fn standing_keeps_its_time_while_only_its_reason_changes() {
        let mut state = State::new(1, 1, 1);
        let since = state.health().since;
        let gone = |reason: &str| Standing::Gone {
            reason: reason.to_owned(),
        };
        assert!(!state.stand(gone("other")));
        assert_eq!(state.health().since, since);
        assert!(state.stand(Standing::Working));
        assert!(!state.stand(Standing::Working));
        assert!(state.stand(gone("again")));
        assert!(state.health().since >= since);
    }

    #[test]
    fn limit_and_standing_refuse_batches() {
        let mut state = working(100);
        let first = batch(extent(1, 1), &[60]);
        state.accept(&first).unwrap();
        let second = batch(extent(1, 2), &[41]);
        assert_eq!(state.accept(&second), Err(TierError::Full(KIND)));
        state.was_not_written(first.extent(), &TierError::Busy(KIND));
        state.accept(&second).unwrap();
        state.stand(Standing::Slow { bound_ms: 5 });
        let third = batch(extent(1, 3), &[1]);
        assert!(matches!(state.accept(&third), Err(TierError::Slow { .. })));
        assert_eq!(state.figures().refused, 2);
    }

    #[test]
    fn requests_beyond_the_queue_are_refused() {
        let mut state = working(1 << 20);
        for _ in 0..4 {
            state.admit(Request::Read).unwrap();
        }
        assert_eq!(state.admit(Request::Read), Err(TierError::Busy(KIND)));
        state.ended(Request::Read, Duration::from_micros(7));
        state.admit(Request::Read).unwrap();
        assert_eq!(state.figures().read_latency.max_us, 7);
    }

    #[test]
    fn loss_covers_what_was_sent_before_and_refuses_late_batches() {
        let mut state = working(1 << 20);
        for version in [4, 6] {
            state.send(extent(1, version)).unwrap();
        }
        state.send(extent(2, 3)).unwrap();
        state.forget(&[place(extent(1, 4), 0)]);
        state.lost_all();
        assert!(state.take_deletions(9).is_empty());
        for (name, lost) in [
            (extent(1, 5), true),
            (extent(1, 7), false),
            (extent(2, 3), true),
            (extent(2, 4), false),
            (extent(3, 1), false),
        ] {
            assert_eq!(state.is_lost(name), lost, "{name:?}");
            assert_eq!(state.send(name).is_err(), lost, "{name:?}");
        }
        assert_eq!(state.notes().losses, 1);
        state.forget_vm(VmId(1), &[]);
        assert!(!state.is_lost(extent(1, 5)));
        assert!(state.has_lost() && state.is_lost(extent(2, 3)));
        state.found_again();
        assert!(!state.has_lost());
        assert!(state.send(extent(2, 3)).is_ok());
    }

    #[test]
    fn stored_bytes_and_deletions_equal_a_naive_model_under_random_operations() {
        let mut random = SplitMix64::new(0x5eed);
        for _ in 0..20 {
            let mut state = working(u64::MAX);
            let mut pages: Vec<Place> = Vec::new();
            let mut deleted = HashSet::new();
            let mut expected_deleted = HashSet::new();
            for version in 1..200 {
                match random.below(4) {
                    0 | 1 => {
                        let lengths: Vec<_> = (0..=random.below(9))
                            .map(|_| 1 + random.index(4112))
                            .collect();
                        let batch = batch(extent(1, version), &lengths);
                        state.accept(&batch).unwrap();
                        let positions = batch.pages().map(|page| page.position.0);
                        if random.below(5) == 0 {
                            state.was_not_written(batch.extent(), &TierError::Busy(KIND));
                            expected_deleted
                                .extend(positions.map(|position| (batch.extent(), position)));
                        } else {
                            pages.extend(positions.map(|position| place(batch.extent(), position)));
                        }
                    }
                    2 if !pages.is_empty() => {
                        let index = random.index(pages.len());
                        let gone = pages.swap_remove(index);
                        state.forget(&[gone]);
                        expected_deleted.insert((gone.extent, gone.position.0));
                    }
                    _ => {
                        let taken = state.take_deletions(3);
                        if random.below(2) == 0 {
                            state.put_deletions_back(taken);
                        } else {
                            for (name, positions) in taken {
                                deleted.extend(
                                    positions.iter().map(|position| (name, u32::from(position))),
                                );
                            }
                        }
                    }
                }
                assert_eq!(state.figures().stored_bytes == 0, pages.is_empty());
                assert!(state.figures().stored_bytes >= pages.len() as u64);
            }
            state.forget(&pages);
            assert_eq!(state.figures().stored_bytes, 0);
            expected_deleted.extend(pages.iter().map(|page| (page.extent, page.position.0)));
            for (name, positions) in state.take_deletions(usize::MAX) {
                deleted.extend(positions.iter().map(|position| (name, u32::from(position))));
            }
            assert_eq!(deleted, expected_deleted);
        }
    }

    #[test]
    fn extents_of_a_predecessor_count_by_their_pages_and_what_no_word_names_is_deleted() {
        let mut state = working(1 << 20);
        let vm = VmId(1);
        let [named, unnamed] = [30, 25].map(|version| extent(1, version));
        let number = |extent: ExtentName, number| ExtentName {
            number: ExtentNo(number),
            ..extent
        };
        state.hold(vm, Version(32), vec![named, unnamed]);
        let deleted = |state: &mut State| {
            let taken = state.take_deletions(usize::MAX);
            let mut versions: Vec<u64> = taken
                .iter()
                .inspect(|(_, positions)| assert_eq!(positions.iter().count(), PAGES_MAX))
                .map(|(extent, _)| extent.version.0)
                .collect();
            versions.sort_unstable();
            versions
        };
        let under_way: Vec<u64> = (17..=32).filter(|it| ![25, 30].contains(it)).collect();
        assert_eq!(deleted(&mut state), under_way);
        assert_eq!(state.figures().stored_bytes, 0);
        let at = |position, sectors| Place {
            sectors,
            ..place(named, position)
        };
        let places = [at(0, 2), at(400, 9)];
        state.recover(vm, &places);
        assert_eq!(deleted(&mut state), [25]);
        assert_eq!(state.figures().stored_bytes, 11 * 512);
        // Versions of before are lost with the server, those from now on are not.
        assert!(state.send(extent(1, 33)).is_ok());
        state.forget(&places[..1]);
        assert_eq!(state.take_deletions(9)[0].1.iter().count(), 1);
        state.forget(&places[1..]);
        // What the dead daemon was deleting goes with the last page.
        assert_eq!(deleted(&mut state), [30]);
        assert_eq!(state.figures().stored_bytes, 0);
        state.forget(&[at(4096, 1), place(extent(7, 7), 1)]);
        assert_eq!(state.take_deletions(9).len(), 1);
        state.forget_vm(vm, &[number(extent(1, 40), 3)]);
        assert_eq!(deleted(&mut state), [40]);
    }

    #[test]
    fn vm_that_never_wrote_has_nothing_to_delete_when_it_is_held() {
        let mut state = working(1 << 20);
        state.hold(VmId(1), Version(0), Vec::new());
        assert!(state.take_deletions(9).is_empty());
        state.hold(VmId(2), Version(2), Vec::new());
        assert_eq!(state.take_deletions(9).len(), 2);
    }
}
