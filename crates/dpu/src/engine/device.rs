// SPDX-License-Identifier: Apache-2.0
//! A device on one engine: its queues, its memory, and what waits for its turn.

use super::{command::Command, queue::EngineQueue, request::Request};
use crate::{
    kind::OnEngine, memory::DeviceMemory, parked::QueueKey, ring::Job, shared::DeviceShared,
    slo::recorder::Recorder,
};
use std::{collections::VecDeque, rc::Rc, sync::Arc};

/// A device on one engine.
pub(crate) struct Device {
    pub shared: Arc<DeviceShared>,
    /// What it has of its kind.
    pub kind: OnEngine,
    pub memory: Option<Rc<DeviceMemory>>,
    /// Boxed, because a queue is taken out of its place while it is served.
    pub queues: Vec<Option<Box<EngineQueue>>>,
    /// Numbers of the existing queues, in the order of their turns.
    pub running: Vec<u16>,
    /// Index in `running` of the queue whose turn is next.
    pub next_queue: usize,
    /// Slow operations that have not begun; they count as in flight.
    pub slow: VecDeque<Box<Job<Request>>>,
    /// Commands of its front end that wait for the tenant's turn.
    pub waiting: VecDeque<Command>,
    pub recorder: Recorder,
    /// It has something to report to its account.
    pub has_news: bool,
}

impl Device {
    /// A device without memory and without running queues, on engine number `engine`.
    pub fn new(shared: Arc<DeviceShared>, kind: OnEngine, queue_count: u16, engine: usize) -> Self {
        Self {
            shared,
            kind,
            memory: None,
            queues: (0..queue_count).map(|_| None).collect(),
            running: Vec::new(),
            next_queue: 0,
            slow: VecDeque::new(),
            waiting: VecDeque::new(),
            recorder: Recorder::new(engine),
            has_news: false,
        }
    }

    /// Takes the queue of `key` out of its place, if that queue is still there.
    pub fn take_queue(&mut self, key: QueueKey) -> Option<Box<EngineQueue>> {
        let slot = self.queues.get_mut(usize::from(key.queue))?;
        if slot.as_ref()?.key != key {
            return None;
        }
        slot.take()
    }

    /// Puts a queue back that was taken out.
    pub fn put_back(&mut self, queue: Box<EngineQueue>) {
        let number = usize::from(queue.key.queue);
        self.queues[number] = Some(queue);
    }
}
