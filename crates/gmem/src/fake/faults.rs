// SPDX-License-Identifier: Apache-2.0
//! What the kernel refuses to do for a [`FakePlace`].

use super::{FakePlace, lock};
use pagetide_addr::PageNo;

impl FakePlace {
    /// From now on the kernel installs so many pages, and refuses all others.
    pub fn refuse_installs_after(&self, pages: u64) {
        lock(&self.state).installs_left = Some(pages);
    }

    /// The kernel refuses no page any more.
    pub fn refuse_no_installs(&self) {
        lock(&self.state).installs_left = None;
    }

    /// The kernel does not install `page`, and does not report it as present either.
    pub fn jam(&self, page: PageNo) {
        lock(&self.state).stuck = Some(page);
    }

    /// From now on the kernel does not tell of exactly these pages whether they are present.
    pub fn hide(&self, pages: impl IntoIterator<Item = PageNo>) {
        lock(&self.state).hidden = pages.into_iter().collect();
    }

    /// From now on the kernel discards no page.
    pub fn refuse_punches(&self) {
        lock(&self.state).refuses_punches = true;
    }

    /// Undoes [`Self::refuse_punches`].
    pub fn refuse_no_punches(&self) {
        lock(&self.state).refuses_punches = false;
    }
}
