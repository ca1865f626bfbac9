// SPDX-License-Identifier: Apache-2.0
//! Limits of one turn of the queues, with a driver that posts useless chains.

use super::{PAGES, limits, request};
use crate::{
    frontend::ring::{Descriptor, Notify, Ring, RingPlace, WRITE},
    function::{
        core::FunctionCore,
        memory::FunctionMemory,
        requests::SourceNo,
        state::{PageRequestSources, State},
    },
    wire::{Code, Event, FAULT_QUEUE, LOG_QUEUE, LogRecord, Service},
};
use pagetide_addr::{Access, DeviceId, DomainId, FileKey, FrontendVa, Gpa, PAGE_BYTES};
use pagetide_sys::mapping::SharedMapping;
use pagetide_vhost_backend::{RegionShape, RingAddresses, RingSettings, Runs};
use pagetide_vpri::{AccessLog, DeviceEnd, DomainTable, Doorbell, Logged, fault_queue};
use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{MemfdFlags, SealFlags},
};
use std::{os::fd::AsFd, sync::Arc};

/// Entries of the queue, all but the last of which are useless.
const ENTRIES: u16 = 64;
/// Far fewer than the entries.
const A_TURN_MAX: u64 = 16;
const BYTES: u64 = 16 * PAGE_BYTES;
const BUFFERS: u64 = 8 * PAGE_BYTES;

/// A function without its thread, whose only queue is full.
struct Rig {
    state: State,
    log: Arc<AccessLog>,
    engine: DeviceEnd,
    space: DomainId,
}

impl Rig {
    fn new(queue: u16) -> Self {
        let bell = || Arc::new(Doorbell::new().unwrap());
        let host_bell = bell();
        let (engine, host) = fault_queue(8, bell(), host_bell);
        let core = FunctionCore::new(Arc::new(DomainTable::new(1)), limits());
        let log = Arc::new(AccessLog::new(1));
        let sources = PageRequestSources {
            hosts: vec![host],
            engine_count: 1,
        };
        let mut state = State::new(core, sources, Arc::clone(&log));
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("function", flags).unwrap();
        rustix::fs::ftruncate(&file, BYTES).unwrap();
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        let mapping = Arc::new(SharedMapping::new(file.as_fd(), BYTES).unwrap());
        let shape = RegionShape {
            gpa: Gpa(0),
            frontend: FrontendVa(0),
            bytes: BYTES,
            file_offset: 0,
        };
        state.outside.memory =
            FunctionMemory::new(&[(shape, file.as_fd())], state.core.domains()).unwrap();
        fill(mapping);
        let place = RingPlace::at(0, ENTRIES);
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let settings = RingSettings {
            size: ENTRIES,
            addresses: Some(RingAddresses {
                descriptors: FrontendVa(place.descriptors),
                avail: FrontendVa(place.available),
                used: FrontendVa(place.used),
            }),
            kick: Some(Arc::new(eventfd(0, flags).unwrap())),
            ..RingSettings::default()
        };
        assert_eq!(state.start(queue, &settings).unwrap(), Runs::Yes);
        let mut rig = Self {
            state,
            log,
            engine,
            space: DomainId(0),
        };
        rig.tell(&Event::Begin);
        let name = FileKey { dev: 1, ino: 2 };
        let page_count = PAGES;
        let number = rig.tell(&Event::Create { name, page_count });
        rig.space = DomainId(u32::try_from(number).unwrap());
        rig.tell(&Event::Ready);
        rig
    }

    fn tell(&mut self, event: &Event<'_>) -> u64 {
        let status = self.state.core.event(event, &mut self.state.outside).status;
        assert_eq!(status.code, Code::Ok, "{event:?}");
        status.value
    }

    fn useless(&self) -> u64 {
        self.state.figures.useless_chains
    }
}

/// Chains of 8 bytes, and one of 64.
fn fill(mapping: Arc<SharedMapping>) {
    let place = RingPlace::at(0, ENTRIES);
    let mut ring = Ring::new(mapping, place, Notify::Flags);
    for head in 0..ENTRIES {
        let len = if head + 1 == ENTRIES { 64 } else { 8 };
        let buffer = Descriptor {
            address: BUFFERS + 64 * u64::from(head),
            len,
            flags: WRITE,
            next: 0,
        };
        ring.describe(head, buffer).unwrap();
        ring.publish(head, len).unwrap();
    }
    assert!(ring.show().unwrap());
}

#[test]
fn engine_that_assists_passes_a_few_useless_chains_and_leaves_the_rest_to_the_thread() {
    let mut rig = Rig::new(FAULT_QUEUE);
    rig.engine.submit(request(1, rig.space, 5)).unwrap();
    let own = SourceNo(0)..SourceNo(1);
    assert!(rig.state.send_requests(own).unwrap(), "there is more");
    assert!((1..=A_TURN_MAX).contains(&rig.useless()));
    assert_eq!(rig.state.core.figures().requests_sent, 0);
    // The thread comes back until it is done, and may do other work in between.
    let mut before = rig.useless();
    while rig.state.work().unwrap() {
        assert!(rig.useless() - before <= A_TURN_MAX);
        before = rig.useless();
    }
    assert_eq!(rig.useless(), u64::from(ENTRIES) - 1);
    assert_eq!(rig.state.core.figures().requests_sent, 1);
}

#[test]
fn records_wait_a_turn_for_a_chain_behind_many_useless_ones_and_none_is_lost() {
    let mut rig = Rig::new(LOG_QUEUE);
    rig.log.turn_on();
    let record = LogRecord {
        time_ns: 1,
        device: DeviceId(2),
        space: rig.space,
        address: 3,
        len_bytes: 512,
        access: Access::Read,
        service: Service::Block,
    };
    assert_eq!(rig.log.pen(0).unwrap().record(&record), Logged::Kept);
    assert!(rig.state.send_records().unwrap(), "there is more");
    assert!((1..=A_TURN_MAX).contains(&rig.useless()));
    assert!(rig.log.has_any());
    while rig.state.work().unwrap() {}
    assert_eq!(rig.useless(), u64::from(ENTRIES) - 1);
    assert!(!rig.log.has_any());
    assert_eq!(rig.log.lost(), 0);
}
