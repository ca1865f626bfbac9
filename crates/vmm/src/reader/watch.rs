// SPDX-License-Identifier: Apache-2.0
//! The thread that ends a fault reader: on request, or when the VMM has ended.
//!
//! A reader waits in `read`, which only a signal ends; so it is interrupted until it reports that it has
//! ended.

use pagetide_sys::interrupt;
use pagetide_sys::process::ProcessFd;
use rustix::event::{PollFd, PollFlags, poll};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use super::ReaderCounters;

/// Pause between two attempts to interrupt the reader; one is enough except in a race.
const INTERRUPT_AGAIN: Duration = Duration::from_millis(1);

/// Why a reader ends.
pub(super) enum End {
    Stopped,
    VmmGone,
}

/// Makes the watcher end the reader.
pub(super) fn signal(stop: &OwnedFd) {
    // An eventfd's counter cannot be full after a few writes.
    let told = rustix::io::write(stop, &1_u64.to_ne_bytes());
    debug_assert!(told.is_ok(), "{told:?}");
}

/// State shared between the watcher and the reader.
#[derive(Debug, Default)]
pub(super) struct WatchState {
    over: AtomicU8,
    ended: AtomicBool,
}

impl WatchState {
    const STOP: u8 = 1;
    const GONE: u8 = 2;

    pub(super) fn end(&self) -> Option<End> {
        match self.over.load(Ordering::Relaxed) {
            Self::STOP => Some(End::Stopped),
            Self::GONE => Some(End::VmmGone),
            _ => None,
        }
    }

    pub(super) fn say_ended(&self) {
        self.ended.store(true, Ordering::Release);
    }
}

/// The thread that notifies the reader of the end.
pub(super) struct Watch {
    pub(super) vmm: ProcessFd,
    pub(super) stop: Arc<OwnedFd>,
    pub(super) told: Arc<WatchState>,
    pub(super) counters: Arc<ReaderCounters>,
}

impl Watch {
    pub(super) fn run(self) {
        let over = loop {
            let mut polled = [
                PollFd::from_borrowed_fd(self.vmm.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.stop.as_fd(), PollFlags::IN),
            ];
            match poll(&mut polled, None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                // Both descriptors are ours: better no reader than one that never ends.
                Err(error) => {
                    tracing::error!(%error, "the watcher of a fault reader cannot wait");
                    break WatchState::STOP;
                }
            }
            let [vmm, stop] = polled.map(|p| p.revents());
            if !vmm.is_empty() {
                break WatchState::GONE;
            }
            if !stop.is_empty() {
                break WatchState::STOP;
            }
        };
        self.told.over.store(over, Ordering::Relaxed);
        while !self.told.ended.load(Ordering::Acquire) {
            let thread = self.counters.thread.load(Ordering::Relaxed);
            if let Some(thread) = u32::try_from(thread).ok().filter(|thread| *thread > 0)
                && let Err(error) = interrupt::interrupt(thread)
            {
                tracing::error!(%error, "a fault reader cannot be interrupted");
            }
            std::thread::sleep(INTERRUPT_AGAIN);
        }
    }
}
