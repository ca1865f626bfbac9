// SPDX-License-Identifier: Apache-2.0
//! [`Attachments`]: the devices of a space and the page tables they translate by.
//!
//! Each table has a slot number. A bit of a [`TableMask`] records which tables may map a page or
//! region. The bit is set before the first grant and cleared after the invalidation, so it may be
//! set needlessly but is never missing.
//!
//! Taking access away has two steps, in this order for all tables: translations are restricted in
//! the table, then each active device that uses the table invalidates its cached translations. Only
//! after both may a frame be freed or an address be reused (GMEM 5.3: strict security).

use crate::{
    device::Device,
    error::GmError,
    mmu::{Backing, Mmu, Restrict, Restricted, TableId},
    sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard, own, share},
};
use pagetide_addr::{Access, DeviceId, PageRange, PageSet, SectionNo};

/// Whose page table a device uses (GMEM 3.2).
#[doc(alias = "gm_mmu_mode_t")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// A table that devices of the same format share, made if there is none.
    Shared,
    /// A table of its own, kept coherent with the others.
    Coherent,
}

/// Most page tables of a space: one bit each in a [`TableMask`].
pub const TABLES_MAX: u32 = 64;

const _: () = assert!(TABLES_MAX == u64::BITS);

/// How often a busy device is retried before the caller gets the error. Each attempt waits some
/// microseconds by itself, so this takes some milliseconds.
const BUSY_ASKS_MAX: u32 = 1000;

/// A set of page tables.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct TableMask(u64);

impl TableMask {
    pub(crate) const NONE: Self = Self(0);

    pub(crate) fn contains(self, table: &Table) -> bool {
        self.0 & table.bit() != 0
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn insert(&mut self, table: &Table) {
        self.0 |= table.bit();
    }

    pub(crate) fn remove(&mut self, table: &Table) {
        self.0 &= !table.bit();
    }

    pub(crate) fn without(self, table: &Table) -> Self {
        Self(self.0 & !table.bit())
    }

    pub(crate) fn minus(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub(crate) fn unite(&mut self, other: Self) {
        self.0 |= other.0;
    }

    pub(crate) fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// A page table and the MMU that made it.
pub(crate) struct Table {
    mmu: Arc<dyn Mmu>,
    made_by: DeviceId,
    id: TableId,
    slot: u32,
    mode: Mode,
}

impl Table {
    fn bit(&self) -> u64 {
        1 << self.slot
    }

    pub(crate) fn id(&self) -> TableId {
        self.id
    }

    pub(crate) fn grant(
        &self,
        pages: PageRange,
        access: Access,
        backing: Backing,
    ) -> Result<(), GmError> {
        let granted = self.mmu.grant(self.id, pages, access, backing);
        granted.map_err(|source| GmError::device(self.made_by, source))
    }

    /// Restricts pages of one section; retries a busy device for a while.
    fn restrict(&self, section: SectionNo, pages: &PageSet, to: Restrict) -> Result<(), GmError> {
        for _ in 0..BUSY_ASKS_MAX {
            match self.mmu.restrict(self.id, section, pages, to) {
                Ok(Restricted::Done) => return Ok(()),
                Ok(Restricted::Busy) => crate::sync::yield_now(),
                Err(source) => return Err(GmError::device(self.made_by, source)),
            }
        }
        let device = self.made_by;
        Err(GmError::Busy { device })
    }

    pub(crate) fn destroy(&self) {
        self.mmu.destroy_table(self.id);
    }
}

/// Whether a device translates by its table in this space now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Activity {
    Active,
    Inactive,
}

/// A device in a space.
pub(crate) struct Attachment {
    pub(crate) device: Arc<Device>,
    pub(crate) table: Arc<Table>,
    pub(crate) activity: Activity,
}

impl Attachment {
    /// Restricts pages of one section in the device's table; the caller invalidates.
    pub(crate) fn try_restrict(
        &self,
        section: SectionNo,
        pages: &PageSet,
        to: Restrict,
    ) -> Result<Restricted, GmError> {
        let table = &self.table;
        let restricted = table.mmu.restrict(table.id, section, pages, to);
        restricted.map_err(|source| GmError::device(self.device.id(), source))
    }

    pub(crate) fn is_active(&self) -> bool {
        self.activity == Activity::Active
    }

    fn invalidate(&self, ranges: &[PageRange]) -> Result<(), GmError> {
        if self.activity == Activity::Inactive {
            return Ok(());
        }
        let invalidated = self.device.mmu().invalidate(self.table.id, ranges);
        invalidated.map_err(|source| GmError::device(self.device.id(), source))
    }
}

/// The devices of a space.
#[derive(Default)]
pub(crate) struct List(Vec<Attachment>);

impl List {
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Attachment> {
        self.0.iter()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn find(&self, device: DeviceId) -> Option<&Attachment> {
        self.0.iter().find(|known| known.device.id() == device)
    }

    /// The attachment of this very device; another device may have its number.
    pub(crate) fn find_same(&self, device: &Device) -> Option<&Attachment> {
        let same = |known: &&Attachment| std::ptr::eq(Arc::as_ptr(&known.device), device);
        self.0.iter().find(same)
    }

    pub(crate) fn find_mut(&mut self, device: DeviceId) -> Option<&mut Attachment> {
        self.0.iter_mut().find(|known| known.device.id() == device)
    }

    /// The device that represents the host's CPUs, if it is attached.
    pub(crate) fn host(&self) -> Option<&Arc<Device>> {
        self.find(DeviceId::VCPUS).map(|known| &known.device)
    }

    /// Each table once.
    pub(crate) fn tables(&self) -> impl Iterator<Item = &Arc<Table>> {
        self.firsts().map(|known| &known.table)
    }

    /// Each table that a chosen device uses, once.
    pub(crate) fn tables_of(
        &self,
        chosen: impl Fn(DeviceId) -> bool,
    ) -> impl Iterator<Item = &Arc<Table>> {
        self.tables().filter(move |table| {
            let uses = |known: &Attachment| known.table.slot == table.slot;
            self.0
                .iter()
                .any(|known| uses(known) && chosen(known.device.id()))
        })
    }

    /// For each table, the device that has used it longest.
    pub(crate) fn firsts(&self) -> impl Iterator<Item = &Attachment> {
        let is_first = |at: &usize| {
            let slot = self.0[*at].table.slot;
            self.0[..*at].iter().all(|other| other.table.slot != slot)
        };
        (0..self.0.len()).filter(is_first).map(|at| &self.0[at])
    }

    /// A table that a device with the given MMU may share.
    pub(crate) fn sharable(&self, device: &Device) -> Option<Arc<Table>> {
        let format = device.limits().format?;
        let fits = |known: &&Attachment| {
            // A device that cannot wait for a page must only use a table that faults never change.
            known.table.mode == Mode::Shared
                && known.device.limits().format == Some(format)
                && known.device.recovers() == device.recovers()
        };
        self.0
            .iter()
            .find(fits)
            .map(|known| Arc::clone(&known.table))
    }

    /// A new table for the device.
    ///
    /// # Errors
    /// [`GmError::Unsupported`] at the limit of tables, [`GmError::Device`].
    pub(crate) fn new_table(&self, device: &Device, mode: Mode) -> Result<Arc<Table>, GmError> {
        let used = |slot: &u32| self.0.iter().any(|known| known.table.slot == *slot);
        let Some(slot) = (0..TABLES_MAX).find(|slot| !used(slot)) else {
            return Err(GmError::Unsupported {
                what: "more than 64 page tables in one address space",
            });
        };
        let made = device.mmu().create_table();
        let id = made.map_err(|source| GmError::device(device.id(), source))?;
        Ok(Arc::new(Table {
            mmu: Arc::clone(device.mmu()),
            made_by: device.id(),
            id,
            slot,
            mode,
        }))
    }

    pub(crate) fn push(&mut self, attachment: Attachment) {
        self.0.push(attachment);
    }

    /// Removes the device that was attached last.
    pub(crate) fn remove_last(&mut self) -> Option<(Attachment, LastUse)> {
        let last = self.0.last()?.device.id();
        self.remove(last)
    }

    /// Removes a device; also returns whether that was the last use of its table.
    pub(crate) fn remove(&mut self, device: DeviceId) -> Option<(Attachment, LastUse)> {
        let at = self
            .0
            .iter()
            .position(|known| known.device.id() == device)?;
        let gone = self.0.remove(at);
        let slot = gone.table.slot;
        let last = if self.0.iter().any(|known| known.table.slot == slot) {
            LastUse::No
        } else {
            LastUse::Yes
        };
        Some((gone, last))
    }

    /// Takes away access to `ranges` (ascending, disjoint) in the tables of `from`. When this
    /// returns without error no device can reach them by these tables any more.
    ///
    /// # Errors
    /// The first failure, and the tables in which the pages may still be reachable. All tables are
    /// tried.
    pub(crate) fn take_away(
        &self,
        ranges: &[PageRange],
        from: TableMask,
        to: Restrict,
    ) -> Result<(), StillReached> {
        let mut failed = StillReached::nothing();
        for table in self.tables().filter(|table| from.contains(table)) {
            if let Err(error) = restrict_ranges(table, ranges, to) {
                failed.add(table, error);
            }
        }
        for known in self.0.iter().filter(|known| from.contains(&known.table)) {
            if let Err(error) = known.invalidate(ranges) {
                failed.add(&known.table, error);
            }
        }
        failed.into_result()
    }
}

impl List {
    /// Makes devices that cannot fault drop their cached translations of `ranges`: stale ones would
    /// deny access that is allowed now.
    ///
    /// # Errors
    /// The first that failed.
    pub(crate) fn refresh(&self, ranges: &[PageRange], of: TableMask) -> Result<(), GmError> {
        let stale = |known: &&Attachment| of.contains(&known.table) && !known.device.recovers();
        let mut all = self.0.iter().filter(stale);
        all.try_for_each(|known| known.invalidate(ranges))
    }

    /// Makes every active device drop its cached translations of `ranges`.
    ///
    /// # Errors
    /// The first that failed.
    pub(crate) fn invalidate(&self, ranges: &[PageRange]) -> Result<(), GmError> {
        self.0.iter().try_for_each(|known| known.invalidate(ranges))
    }
}

/// Whether this is the last use of a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LastUse {
    Yes,
    No,
}

/// Tables in which access could not be taken away.
#[derive(Debug)]
pub(crate) struct StillReached {
    pub(crate) tables: TableMask,
    first: Option<GmError>,
}

impl StillReached {
    fn nothing() -> Self {
        Self {
            tables: TableMask::NONE,
            first: None,
        }
    }

    fn add(&mut self, table: &Table, error: GmError) {
        self.tables.insert(table);
        self.first.get_or_insert(error);
    }

    fn into_result(self) -> Result<(), Self> {
        if self.first.is_none() {
            Ok(())
        } else {
            Err(self)
        }
    }

    /// The first failure.
    pub(crate) fn error(self) -> GmError {
        self.first.unwrap_or(GmError::Destroyed)
    }
}

fn restrict_ranges(table: &Table, ranges: &[PageRange], to: Restrict) -> Result<(), GmError> {
    let mut gathered: Option<(SectionNo, PageSet)> = None;
    for range in ranges {
        for (section, part) in range.by_section() {
            let set = PageSet::of_range(section, part);
            match &mut gathered {
                Some((same, pages)) if *same == section => pages.unite(&set),
                _ => {
                    if let Some((section, pages)) = gathered.replace((section, set)) {
                        table.restrict(section, &pages, to)?;
                    }
                }
            }
        }
    }
    match gathered {
        Some((section, pages)) => table.restrict(section, &pages, to),
        None => Ok(()),
    }
}

/// The list behind its lock.
#[derive(Default)]
pub(crate) struct Attachments(RwLock<List>);

impl Attachments {
    pub(crate) fn share(&self) -> RwLockReadGuard<'_, List> {
        share(&self.0)
    }

    pub(crate) fn own(&self) -> RwLockWriteGuard<'_, List> {
        own(&self.0)
    }
}

/// Sorts ranges and joins adjacent ones: one command instead of two.
pub(crate) fn coalesce(mut ranges: Vec<PageRange>) -> Vec<PageRange> {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, last| {
        let touches = next.start <= last.end;
        if touches {
            last.end = last.end.max(next.end);
        }
        touches
    });
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::PageNo;

    #[test]
    fn ranges_that_touch_or_overlap_become_one_command() {
        let range = |start, end| PageRange::new(PageNo(start), PageNo(end));
        let joined = coalesce(vec![
            range(8, 9),
            range(0, 2),
            range(5, 5),
            range(2, 4),
            range(3, 6),
        ]);
        assert_eq!(joined, [range(0, 6), range(8, 9)]);
    }
}
