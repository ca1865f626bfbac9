// SPDX-License-Identifier: Apache-2.0
//! Commands of control threads, executed on the engine's thread.
//!
//! A front end can cause some of them by its messages, as often as it likes: new memory, a ring
//! started or stopped, another call descriptor. They cost the engine time as requests do, so the
//! tenant is charged. While a tenant is in debt, its commands wait until its turns have paid. At
//! most one command of a front end is ever under way, so at most one waits. A command that stops a
//! ring is charged, too, but never waits: others wait for it.

use super::{
    command::{AddDevice, Command, QueueSetup, When, answer},
    device::Device,
    fair::COMMAND_COST_BYTES,
    kicks::ARRIVALS,
    queue::EngineQueue,
    thread::{Engine, Hush},
};
use crate::{kind::EnginePlace, ring::device_files};
use std::{io, os::fd::BorrowedFd, rc::Rc, sync::mpsc::Sender};

impl Engine {
    /// Executes a command of a control thread, or queues it for the tenant's turn.
    pub(super) fn obey(&mut self, command: Command) -> io::Result<()> {
        if let Some((slot, when)) = command.tenant() {
            if when == When::InItsTurn
                && self.io.fair.is_in_debt(slot)
                && let Some(device) = self.device(slot)
            {
                device.waiting.push_back(command);
                return Ok(());
            }
            self.io.fair.charge(slot, COMMAND_COST_BYTES);
        }
        self.obey_now(command)
    }

    /// Executes a tenant's command that waited for its turn, unless the tenant is still in debt;
    /// true if there was one.
    pub(super) fn obey_waiting(&mut self, slot: usize) -> io::Result<bool> {
        let mut there_was = false;
        while let Some(device) = self.device(slot)
            && !device.waiting.is_empty()
        {
            there_was = true;
            if self.io.fair.is_in_debt(slot) {
                break;
            }
            let waiting = self
                .device(slot)
                .and_then(|device| device.waiting.pop_front());
            if let Some(command) = waiting {
                self.io.fair.charge(slot, COMMAND_COST_BYTES);
                self.obey_now(command)?;
            }
        }
        Ok(there_was)
    }

    fn obey_now(&mut self, command: Command) -> io::Result<()> {
        match command {
            Command::AddDevice(add) => {
                let added = self.add_device(&add);
                answer(&add.reply, added);
            }
            Command::RemoveDevice { device, reply } => {
                let removed = self.remove_device(device);
                answer(&reply, removed);
            }
            Command::SetMemory {
                device,
                memory,
                reply,
            } => {
                self.io.scratch.forget_memory(device);
                if let Some(device) = self.device(device) {
                    device.memory = Some(Rc::new(memory));
                }
                answer(&reply, ());
            }
            Command::StartQueue {
                device,
                setup,
                reply,
            } => self.start_queue(device, *setup, &reply)?,
            Command::StopQueue {
                device,
                queue,
                how,
                reply,
            } => {
                let io = &mut self.io;
                let place = self.devices.get_mut(device).and_then(Option::as_mut);
                if let Some(place) = place
                    && let Some(stopping) = place.queues[usize::from(queue)].as_mut()
                {
                    io.begin_stop(&place.shared, stopping, how, reply);
                    if stopping.is_abandoned() {
                        io.drop_waiting(place, queue);
                    }
                }
            }
            Command::SetCall {
                device,
                queue,
                call,
                reply,
            } => {
                if let Some(device) = self.device(device)
                    && let Some(queue) = device.queues[usize::from(queue)].as_mut()
                {
                    queue.set_call(call);
                }
                answer(&reply, ());
            }
            Command::SetAssist(assist) => self.assist = Some(assist),
            Command::SetPen(pen) => self.io.reports.set_pen(pen),
            Command::Hush(hushed) => self.hush = Some(Hush::Asked(hushed)),
            Command::Speak => self.hush = None,
            Command::Look => {}
            Command::ShutDown => self.ending = true,
        }
        Ok(())
    }

    fn start_queue(
        &mut self,
        device: usize,
        setup: QueueSetup,
        reply: &Sender<()>,
    ) -> io::Result<()> {
        let token = self.kicks.new_token();
        let Some(place) = self.devices.get_mut(device).and_then(Option::as_mut) else {
            // The sender notices: the reply channel is dropped.
            return Ok(());
        };
        let number = setup.number;
        let queue = Box::new(EngineQueue::new(device, token, setup));
        place.queues[usize::from(number)] = Some(queue);
        self.active.push((device, number));
        self.kicks.listen(token, device, number);
        self.kicks.listen(token | ARRIVALS, device, number);
        place.running.push(number);
        self.io.bounces.slots.set_area(self.device_end.bounce());
        self.io.start_rings(place, number)?;
        answer(reply, ());
        Ok(())
    }

    fn device(&mut self, index: usize) -> Option<&mut Device> {
        self.devices.get_mut(index).and_then(Option::as_mut)
    }

    fn add_device(&mut self, add: &AddDevice) -> io::Result<()> {
        let ring = &mut self.io.ring;
        let slots = device_files(add.device);
        let place = EnginePlace {
            slot: add.device,
            engine: self.io.reports.engine(),
            engines: add.shared.counters.len(),
            bell: &self.bell,
        };
        let set = |slot, file: BorrowedFd<'_>| ring.set_file(slot, file);
        let kind = add.shared.kind.open_on(&place, slots, set)?;
        if self.devices.len() <= add.device {
            self.devices.resize_with(add.device + 1, || None);
        }
        self.io.fair.add(add.device);
        let (shared, engine) = (add.shared.clone(), self.io.reports.engine());
        let device = Device::new(shared, kind, add.queue_count, engine);
        self.devices[add.device] = Some(device);
        Ok(())
    }

    /// Removes a device whose queues have all been stopped.
    fn remove_device(&mut self, index: usize) -> io::Result<()> {
        self.io.scratch.forget_memory(index);
        let Some(device) = self.devices.get_mut(index).and_then(Option::take) else {
            return Ok(());
        };
        debug_assert!(device.queues.iter().all(Option::is_none));
        self.io.fair.remove(index);
        (device.kind.files().into_iter().flatten())
            .try_for_each(|slot| self.io.ring.clear_file(slot))
    }
}
