// SPDX-License-Identifier: Apache-2.0
//! The dispatcher takes requests from all sources and hands them on. This module also adds and
//! removes sources.

use super::{
    FaultService, Handling,
    duty::Duty,
    worker::{self, Home, Patience},
};
use crate::source::FaultSource;
use rustix::event::{PollFd, PollFlags, poll};
use std::{
    io,
    sync::{Arc, PoisonError, atomic::Ordering},
    thread::JoinHandle,
};

/// Most requests taken from one source before the others get their turn.
const TAKEN_IN_A_ROW: usize = 16;

/// Names a source of a service.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FaultSourceId(u64);

/// The threads of a service; ended by [`ServiceThread::stop`].
pub struct ServiceThread {
    service: Arc<FaultService>,
    dispatcher: JoinHandle<()>,
    serial: Option<JoinHandle<()>>,
}

impl FaultService {
    /// Starts the dispatcher.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(self: &Arc<Self>) -> io::Result<ServiceThread> {
        let serial = match self.config.handling {
            Handling::Affined => None,
            Handling::Serialized => Some(worker::start(
                &self.serial,
                Home::Anywhere,
                Patience::Endless,
                &self.seed(),
            )?),
        };
        let service = Arc::clone(self);
        let dispatcher = std::thread::Builder::new()
            .name("pt-iopf".into())
            .spawn(move || service.dispatch());
        let dispatcher = dispatcher.inspect_err(|_| self.serial.close())?;
        Ok(ServiceThread {
            service: Arc::clone(self),
            dispatcher,
            serial,
        })
    }

    /// Adds a source, which rings the service's doorbell when it has a request.
    pub fn add_source(&self, source: Arc<dyn FaultSource>) -> FaultSourceId {
        let id = FaultSourceId(self.next_source.fetch_add(1, Ordering::Relaxed));
        let mut sources = self.sources.write().unwrap_or_else(PoisonError::into_inner);
        sources.push((id, source));
        drop(sources);
        // A sleeping dispatcher has not armed the new source.
        self.bell.ring_anyway();
        id
    }

    /// Removes a source: when this returns, nothing more is taken from it. Requests already taken
    /// are still answered to it. Must not be called by a method of the source, nor with a lock held
    /// that those methods need.
    pub fn remove_source(&self, id: FaultSourceId) {
        let mut sources = self.sources.write().unwrap_or_else(PoisonError::into_inner);
        let removed = sources.iter().position(|(known, _)| *known == id);
        let removed = removed.map(|position| sources.swap_remove(position));
        drop(sources);
        drop(removed);
    }

    fn dispatch(&self) {
        self.config.preempt.take_dispatcher();
        while !self.stopped.load(Ordering::Acquire) {
            if !self.take_some_of_each() {
                self.sleep();
            }
        }
    }

    /// False if no source has a request.
    fn take_some_of_each(&self) -> bool {
        let sources = self.sources.read().unwrap_or_else(PoisonError::into_inner);
        let mut taken = false;
        for (_, source) in sources.iter() {
            let next = || source.next();
            for request in std::iter::from_fn(next).take(TAKEN_IN_A_ROW) {
                taken = true;
                self.take_in(Duty::new(request, source));
            }
        }
        taken
    }

    /// Does what the dispatcher does, on the thread of a test.
    #[cfg(test)]
    pub(super) fn take_in_all(&self) {
        while self.take_some_of_each() {}
    }

    fn sleep(&self) {
        self.bell.arm();
        if !self.has_request() && !self.stopped.load(Ordering::Acquire) {
            let mut polled = [PollFd::new(&self.bell, PollFlags::IN)];
            // EINTR: the queues are checked again anyway.
            if let Err(error) = poll(&mut polled, None)
                && error != rustix::io::Errno::INTR
            {
                tracing::error!(%error, "the I/O page fault service cannot sleep");
            }
        }
        if let Err(error) = self.bell.disarm() {
            tracing::error!(%error, "the I/O page fault service's doorbell is broken");
        }
        let sources = self.sources.read().unwrap_or_else(PoisonError::into_inner);
        sources.iter().for_each(|(_, source)| source.disarm());
    }

    fn has_request(&self) -> bool {
        let sources = self.sources.read().unwrap_or_else(PoisonError::into_inner);
        // Arm all sources, even if one already has a request.
        let with_request = sources.iter().filter(|(_, source)| source.arm());
        with_request.count() > 0
    }
}

impl ServiceThread {
    /// Ends the dispatcher, and the one worker of the serialized mode. Requests still in the queues
    /// stay unanswered: stop the engines first.
    pub fn stop(self) {
        self.service.stopped.store(true, Ordering::Release);
        self.service.bell.ring_anyway();
        let mut panicked = self.dispatcher.join().is_err();
        self.service.ending.end();
        self.service.serial.close();
        if let Some(serial) = self.serial {
            panicked |= serial.join().is_err();
        }
        let later = self.service.later.end();
        later.into_iter().for_each(Duty::abandon);
        if panicked {
            tracing::error!("the I/O page fault service ended by a panic");
        }
    }
}
