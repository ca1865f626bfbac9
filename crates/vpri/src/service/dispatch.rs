// SPDX-License-Identifier: Apache-2.0
//! The dispatcher takes requests from all sources and hands them on.

use super::{
    FaultService, Handling,
    duty::Duty,
    worker::{Patience, start},
    worker_place::Home,
};
use std::{
    io,
    sync::{Arc, atomic::Ordering},
    thread::JoinHandle,
};

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
            Handling::Serialized => Some(start(
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

    fn dispatch(&self) {
        self.config.preempt.take_dispatcher();
        while !self.stopped.load(Ordering::Acquire) {
            if !self.sources.take_some_of_each(|duty| self.take_in(duty)) {
                let is_over = || self.stopped.load(Ordering::Acquire);
                self.sources.sleep(is_over);
            }
        }
    }

    /// Does what the dispatcher does, on the thread of a test.
    #[cfg(test)]
    pub(super) fn take_in_all(&self) {
        while self.sources.take_some_of_each(|duty| self.take_in(duty)) {}
    }
}

impl ServiceThread {
    /// Ends the dispatcher, and the one worker of the serialized mode. Requests still in the queues
    /// stay unanswered: stop the engines first.
    pub fn stop(self) {
        self.service.stopped.store(true, Ordering::Release);
        self.service.sources.wake();
        let mut panicked = self.dispatcher.join().is_err();
        self.service.unclaimed.end_waits();
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
