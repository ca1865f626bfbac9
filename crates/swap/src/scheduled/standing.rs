// SPDX-License-Identifier: Apache-2.0
//! [`GroupState`]: how the tasks of a group stand.

use pagetide_policy::scheduler::{GroupId, WorkClass};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

/// What a group's tasks must know.
#[derive(Debug)]
pub(super) struct GroupState {
    pub(super) id: GroupId,
    pub(super) needs_reclaim: AtomicBool,
    pub(super) is_stopped: AtomicBool,
}

impl GroupState {
    /// Of a new group.
    pub(super) fn new(id: GroupId) -> Self {
        Self {
            id,
            needs_reclaim: AtomicBool::new(false),
            is_stopped: AtomicBool::new(false),
        }
    }

    /// Whether a task of `class` has to stand back.
    pub(super) fn is_hurried(&self, class: WorkClass) -> bool {
        class != WorkClass::Reclaim && self.needs_reclaim.load(SeqCst)
    }

    /// Whether no task gets a run.
    pub(super) fn is_stopped(&self) -> bool {
        self.is_stopped.load(SeqCst)
    }
}
