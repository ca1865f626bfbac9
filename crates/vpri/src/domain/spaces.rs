// SPDX-License-Identifier: Apache-2.0
//! Domains of this process as the host's I/O address spaces: a restriction is a function call and
//! never waits for another process.

use super::{DmaDomain, DomainError, DomainTable};
use crate::space::{IoSpace, IoSpaces, LookError};
use pagetide_addr::{
    Access, DomainId, FileKey, FilePage, FilePageSet, FileRange, FileSection, Marks,
};
use std::{os::fd::BorrowedFd, sync::Arc};

impl IoSpace for DmaDomain {
    fn id(&self) -> DomainId {
        self.id
    }

    fn key(&self) -> FileKey {
        self.key
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn metadata_bytes(&self) -> u64 {
        self.attributes.bytes()
    }

    fn attach(&self) -> Result<(), DomainError> {
        Self::attach(self)
    }

    fn watch(&self) -> Result<(), DomainError> {
        Self::watch(self)
    }

    fn detach(&self) {
        Self::detach(self);
    }

    fn unmap_all(&self) {
        self.attributes.unmap_all();
    }

    fn is_any_leased(&self) -> bool {
        self.attributes.is_any_leased()
    }

    fn unmap(&self, section: FileSection, pages: &FilePageSet) -> bool {
        self.attributes.unmap(section, pages)
    }

    fn forbid_writes(&self, section: FileSection, pages: &FilePageSet) -> bool {
        self.attributes.forbid_writes(section, pages)
    }

    fn grant(&self, range: FileRange, access: Access) {
        self.attributes.grant(range, access);
    }

    fn standing_in(&self, section: FileSection) -> FilePageSet {
        self.attributes.wired_in(section)
    }

    fn standing_pages(&self) -> u64 {
        self.attributes.wired_pages()
    }

    /// DMA goes through this process' windows, so their present bits are the marks.
    fn touched(
        &self,
        pages: FileRange,
        marks: Marks,
        visit: &mut dyn FnMut(FilePage),
    ) -> Result<(), LookError> {
        let windows = self.windows();
        windows
            .iter()
            .try_for_each(|window| window.touched(pages, marks, visit))
    }
}

impl IoSpaces for DomainTable {
    fn open(
        &self,
        _file: BorrowedFd<'_>,
        key: FileKey,
        bytes: u64,
    ) -> Result<Arc<dyn IoSpace>, DomainError> {
        Self::open(self, key, bytes).map(|domain| domain as Arc<dyn IoSpace>)
    }

    fn bar(&self, key: FileKey) {
        Self::bar(self, key);
    }

    fn retire(&self, space: &dyn IoSpace) {
        if let Some(domain) = self.all().into_iter().find(|d| d.id() == space.id()) {
            Self::retire(self, &domain);
        }
    }

    /// In this process no device is made before then.
    fn all_known(&self) {}

    fn processes(&self) -> Vec<u32> {
        Vec::new()
    }

    fn eviction_blocker(&self) -> Option<String> {
        None
    }
}
