// SPDX-License-Identifier: Apache-2.0
//! A session's rules, with a device that only writes down what it is told.

use super::*;
use crate::session::Handshake;
use pagetide_addr::Gpa;
use pagetide_sys::signal::EventSignal;
use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{MemfdFlags, memfd_create},
};
use std::{
    fs::File,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
};
use vhost::vhost_user::{
    Error, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures,
    message::{
        VhostUserInflight, VhostUserMemoryRegion, VhostUserSingleMemoryRegion,
        VhostUserVringAddrFlags,
    },
};

/// `VHOST_USER_F_PROTOCOL_FEATURES`, and one that every front end must take.
const FEATURES: u64 = 1 << 30 | REQUIRED;
const REQUIRED: u64 = 1 << 32;
/// A region with this length is refused.
const REFUSED_BYTES: u64 = 13;

#[derive(Debug, PartialEq, Eq)]
enum Told {
    Memory(usize),
    Start(u16),
    Stop(u16, Stop),
    Kick(u16),
    Call(u16),
    Ended,
}

struct Device {
    told: Vec<Told>,
    kicks: KickChange,
}

impl Device {
    fn session(kicks: KickChange) -> Session<Self> {
        let told = Vec::new();
        let mut session = Session::new(Self { told, kicks });
        session.set_features(FEATURES).unwrap();
        session
    }
}

impl Backend for Device {
    /// Number of its regions.
    type Memory = usize;

    fn offer(&self) -> Offer {
        Offer {
            features: FEATURES,
            required_features: REQUIRED,
            protocol_features: VhostUserProtocolFeatures::MQ,
            queue_count: 2,
            queues_told: 2,
            queue_size_max: 256,
            regions_max: 0,
        }
    }

    fn set_features(&mut self, _features: u64) {}

    fn config(&self, offset: u32, bytes: u32) -> Option<Vec<u8>> {
        let config = [1, 2, 3, 4];
        let part = config.get(offset as usize..offset.checked_add(bytes)? as usize);
        part.map(<[u8]>::to_vec)
    }

    fn map(&mut self, regions: &[(RegionShape, BorrowedFd<'_>)]) -> Result<usize> {
        match regions
            .iter()
            .any(|(shape, _)| shape.bytes == REFUSED_BYTES)
        {
            true => Err(Error::InvalidParam),
            false => Ok(regions.len()),
        }
    }

    fn use_memory(&mut self, memory: usize) -> Result<()> {
        self.told.push(Told::Memory(memory));
        Ok(())
    }

    fn start(&mut self, queue: u16, ring: &RingSettings) -> Result<Runs> {
        assert!(ring.addresses.is_some() && ring.kick.is_some());
        self.told.push(Told::Start(queue));
        Ok(Runs::Yes)
    }

    fn stop(&mut self, queue: u16, how: Stop) -> Result<u16> {
        self.told.push(Told::Stop(queue, how));
        Ok(77)
    }

    fn set_kick(&mut self, queue: u16, _kick: &Arc<OwnedFd>) -> KickChange {
        self.told.push(Told::Kick(queue));
        self.kicks
    }

    fn set_call(&mut self, queue: u16, _call: Option<EventSignal>) -> Result<()> {
        self.told.push(Told::Call(queue));
        Ok(())
    }

    fn end(&mut self) {
        self.told.push(Told::Ended);
    }
}

fn event() -> Option<File> {
    Some(eventfd(0, EventfdFlags::NONBLOCK).unwrap().into())
}

fn memory() -> File {
    memfd_create("session", MemfdFlags::CLOEXEC).unwrap().into()
}

fn set_addresses(session: &mut Session<Device>, at: u64) -> Result<()> {
    let flags = VhostUserVringAddrFlags::empty();
    session.set_vring_addr(0, flags, at, at + 1, at + 2, 0)
}

/// A session whose queue 0 runs, and of which nothing has been written down yet.
fn running(kicks: KickChange) -> Session<Device> {
    let mut session = Device::session(kicks);
    session.set_vring_num(0, 64).unwrap();
    set_addresses(&mut session, 0x1000).unwrap();
    session.set_vring_kick(0, event()).unwrap();
    session.set_vring_enable(0, true).unwrap();
    assert_eq!(told(&mut session), [Told::Start(0)]);
    session
}

fn told(session: &mut Session<Device>) -> Vec<Told> {
    std::mem::take(&mut session.backend.told)
}

#[test]
fn ring_starts_when_the_last_of_its_settings_comes_in_any_order() {
    type Setting = fn(&mut Session<Device>) -> Result<()>;
    let settings: [Setting; 3] = [
        |session| set_addresses(session, 0x1000),
        |session| session.set_vring_kick(0, event()),
        |session| session.set_vring_enable(0, true),
    ];
    for order in [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ] {
        let mut session = Device::session(KickChange::Done);
        for (nth, setting) in order.into_iter().enumerate() {
            settings[setting](&mut session).unwrap();
            let expected: &[Told] = if nth == 2 { &[Told::Start(0)] } else { &[] };
            assert_eq!(told(&mut session), expected, "{order:?}");
        }
    }
}

#[test]
fn ring_is_enabled_from_the_start_without_protocol_features() {
    let mut session = Device::session(KickChange::Done);
    session.set_features(REQUIRED).unwrap();
    set_addresses(&mut session, 0x1000).unwrap();
    session.set_vring_kick(0, event()).unwrap();
    assert_eq!(told(&mut session), [Told::Start(0)]);
}

#[test]
fn ring_waits_for_the_features_that_a_front_end_must_take() {
    let mut session = Device::session(KickChange::Done);
    session.features = 0;
    set_addresses(&mut session, 0x1000).unwrap();
    session.set_vring_kick(0, event()).unwrap();
    assert_eq!(told(&mut session), []);
    session.set_features(REQUIRED).unwrap();
    assert_eq!(told(&mut session), [Told::Start(0)]);
}

#[test]
fn protocol_features_that_were_not_offered_are_refused() {
    let mut session = Device::session(KickChange::Done);
    let slots = VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
    let both = (VhostUserProtocolFeatures::MQ | slots).bits();
    assert!(session.set_protocol_features(both).is_err());
    assert!(session.handshake == Handshake::Missing);
    let offered = VhostUserProtocolFeatures::MQ.bits();
    session.set_protocol_features(offered).unwrap();
    assert!(session.handshake == Handshake::Made);
}

#[test]
fn what_a_running_ring_needs_is_taken_away_only_after_it_has_stopped() {
    let mut session = running(KickChange::Done);
    session.set_vring_enable(0, false).unwrap();
    assert_eq!(told(&mut session), [Told::Stop(0, Stop::Drain)]);

    let mut session = running(KickChange::Done);
    let base = session.get_vring_base(0).unwrap().num;
    assert_eq!(base, 77);
    assert_eq!(told(&mut session), [Told::Stop(0, Stop::Drain)]);
    session.set_vring_enable(0, true).unwrap();
    assert_eq!(told(&mut session), [], "its kick is gone");

    let mut session = running(KickChange::Done);
    session.set_mem_table(&[], Vec::new(), None).unwrap();
    let replaced = [Told::Stop(0, Stop::Drain), Told::Memory(0), Told::Start(0)];
    assert_eq!(told(&mut session), replaced);

    let mut session = running(KickChange::Done);
    session.reset_device().unwrap();
    assert_eq!(told(&mut session), [Told::Stop(0, Stop::Abandon)]);
}

#[test]
fn settings_of_a_running_ring_change_only_if_they_stay_the_same() {
    let mut session = running(KickChange::Done);
    session.set_vring_num(0, 64).unwrap();
    set_addresses(&mut session, 0x1000).unwrap();
    assert!(session.set_vring_num(0, 32).is_err());
    assert!(set_addresses(&mut session, 0x2000).is_err());
    assert_eq!(told(&mut session), []);
}

#[test]
fn sizes_queues_and_bases_out_of_range_are_refused() {
    let mut session = Device::session(KickChange::Done);
    for size in [0, 3, 512, 1 << 16, u32::MAX] {
        assert!(session.set_vring_num(0, size).is_err(), "{size}");
    }
    for queue in [2, 1 << 16, u32::MAX] {
        assert!(session.set_vring_num(queue, 64).is_err(), "{queue}");
        assert!(session.get_vring_base(queue).is_err(), "{queue}");
    }
    assert!(session.set_vring_base(0, 1 << 16).is_err());
}

#[test]
fn another_kick_descriptor_restarts_a_ring_only_if_the_device_needs_that() {
    let mut session = running(KickChange::Done);
    session.set_vring_kick(0, event()).unwrap();
    assert_eq!(told(&mut session), [Told::Kick(0)]);

    let mut session = running(KickChange::NeedsRestart);
    session.set_vring_kick(0, event()).unwrap();
    let restarted = [Told::Kick(0), Told::Stop(0, Stop::Drain), Told::Start(0)];
    assert_eq!(told(&mut session), restarted);
}

#[test]
fn call_descriptor_reaches_the_device_only_while_the_ring_runs() {
    let mut session = running(KickChange::Done);
    session.set_vring_call(1, event()).unwrap();
    assert_eq!(told(&mut session), []);
    session.set_vring_call(0, event()).unwrap();
    assert_eq!(told(&mut session), [Told::Call(0)]);
}

#[test]
fn descriptor_that_is_no_eventfd_is_refused_and_left_to_be_closed_elsewhere() {
    let mut session = Device::session(KickChange::Done);
    let (socket, _other) = UnixStream::pair().unwrap();
    let socket = OwnedFd::from(socket).into();
    assert!(session.set_vring_kick(0, Some(socket)).is_err());
    assert!(session.set_vring_call(0, Some(memory())).is_err());
    assert!(session.set_vring_err(0, Some(memory())).is_err());
    assert!(session.set_vring_kick(0, None).is_err(), "none at all");
    assert_eq!(session.take_discarded().len(), 3);
    assert!(session.rings[0].kick.is_none() && session.rings[0].call.is_none());
}

#[test]
fn refused_memory_changes_nothing_and_its_descriptors_are_closed_elsewhere() {
    let mut session = running(KickChange::Done);
    let regions = [1, REFUSED_BYTES].map(|bytes| VhostUserMemoryRegion::new(0, bytes, 0, 0));
    let files = vec![memory(), memory()];
    assert!(session.set_mem_table(&regions, files, None).is_err());
    assert_eq!(told(&mut session), []);
    assert_eq!(session.take_discarded().len(), 2);
    assert_eq!(session.rings[0].runs, Runs::Yes);
}

#[test]
fn device_that_keeps_no_record_and_takes_no_single_regions_refuses_them_and_says_so() {
    let mut session = running(KickChange::Done);
    let region = VhostUserSingleMemoryRegion::new(0, 4096, 0, 0);
    assert!(session.add_mem_region(&region, memory(), None).is_err());
    assert!(
        session.was_answered(),
        "it waits for the answer, and may stay"
    );
    assert!(session.remove_mem_region(&region).is_err());
    assert!(session.was_answered());
    assert!(!session.was_answered(), "only for that message");
    let inflight = VhostUserInflight::new(4096, 0, 2, 64);
    assert!(session.get_inflight_fd(&inflight).is_err());
    assert!(session.set_inflight_fd(&inflight, memory()).is_err());
    assert!(session.get_max_mem_slots().is_err());
    assert_eq!(session.take_discarded().len(), 2);
    assert_eq!(told(&mut session), []);
}

#[test]
fn features_that_were_not_offered_or_that_lack_a_required_one_are_refused() {
    let mut session = Device::session(KickChange::Done);
    assert!(session.set_features(FEATURES | 1).is_err());
    assert!(session.set_features(FEATURES & !REQUIRED).is_err());
    assert_eq!(session.features, FEATURES, "as before");
}

#[test]
fn configuration_is_read_within_its_bounds_only() {
    let mut session = Device::session(KickChange::Done);
    let flags = vhost::vhost_user::message::VhostUserConfigFlags::empty();
    assert_eq!(session.get_config(1, 2, flags).unwrap(), [2, 3]);
    for (offset, bytes) in [(3, 2), (u32::MAX, 1), (1, u32::MAX)] {
        assert!(session.get_config(offset, bytes, flags).is_err());
    }
    assert!(session.set_config(0, &[9], flags).is_err());
}

#[test]
fn session_that_has_ended_stops_its_rings_once_and_obeys_nothing_more() {
    let mut session = running(KickChange::Done);
    session.end();
    let ended = [Told::Stop(0, Stop::Abandon), Told::Memory(0), Told::Ended];
    assert_eq!(told(&mut session), ended);
    session.end();
    session.set_vring_kick(0, event()).unwrap();
    session.set_vring_enable(0, true).unwrap();
    let region = VhostUserMemoryRegion::new(0, 4096, 0, 0);
    assert!(
        session
            .set_mem_table(&[region], vec![memory()], None)
            .is_err()
    );
    let single = VhostUserSingleMemoryRegion::new(0, 4096, 0, 0);
    assert!(session.add_mem_region(&single, memory(), None).is_err());
    assert!(session.remove_mem_region(&single).is_err());
    assert_eq!(told(&mut session), []);
}

#[test]
fn region_of_a_message_keeps_its_four_numbers_apart() {
    let wire = VhostUserMemoryRegion::new(1, 2, 3, 4);
    let expected = RegionShape {
        gpa: Gpa(1),
        bytes: 2,
        frontend: pagetide_addr::FrontendVa(3),
        file_offset: 4,
    };
    assert_eq!(RegionShape::from(&wire), expected);
}

/// A session that another process goes on with, from its first message on, and one that cannot be given away.
mod parked {
    use super::*;
    use crate::{ParkError, ReplayError};
    use std::io::{Read, Write};

    fn memfd() -> File {
        memfd_create("ram", MemfdFlags::CLOEXEC).unwrap().into()
    }

    fn event() -> File {
        eventfd(0, EventfdFlags::CLOEXEC).unwrap().into()
    }

    fn inode(file: &impl std::os::fd::AsFd) -> u64 {
        rustix::fs::fstat(file).unwrap().st_ino
    }

    /// A device that records requests in flight.
    struct Recording(Device);

    impl Backend for Recording {
        type Memory = usize;

        fn offer(&self) -> Offer {
            Offer {
                protocol_features: VhostUserProtocolFeatures::MQ
                    | VhostUserProtocolFeatures::INFLIGHT_SHMFD,
                ..self.0.offer()
            }
        }

        fn set_features(&mut self, features: u64) {
            self.0.set_features(features);
        }

        fn config(&self, offset: u32, bytes: u32) -> Option<Vec<u8>> {
            self.0.config(offset, bytes)
        }

        fn map(&mut self, regions: &[(RegionShape, BorrowedFd<'_>)]) -> Result<usize> {
            self.0.map(regions)
        }

        fn use_memory(&mut self, memory: usize) -> Result<()> {
            self.0.use_memory(memory)
        }

        fn start(&mut self, queue: u16, ring: &RingSettings) -> Result<Runs> {
            self.0.start(queue, ring)
        }

        fn stop(&mut self, queue: u16, how: Stop) -> Result<u16> {
            self.0.stop(queue, how)
        }

        fn set_call(&mut self, queue: u16, call: Option<EventSignal>) -> Result<()> {
            self.0.set_call(queue, call)
        }

        fn set_inflight(&mut self, _: &VhostUserInflight, _: BorrowedFd<'_>) -> Result<()> {
            Ok(())
        }
    }

    fn recording() -> Recording {
        Recording(Device {
            told: Vec::new(),
            kicks: KickChange::Done,
        })
    }

    /// A session with everything set and its first ring running.
    fn set_up() -> Session<Recording> {
        let mut session = Session::new(recording());
        session.set_features(FEATURES).unwrap();
        let protocol = VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        session.set_protocol_features(protocol.bits()).unwrap();
        let inflight = VhostUserInflight::new(4096, 64, 2, 256);
        session.set_inflight_fd(&inflight, memfd()).unwrap();
        let regions = [
            VhostUserMemoryRegion::new(0x1000, 0x2000, 0x7000, 0),
            VhostUserMemoryRegion::new(0x9000, 0x3000, 0xf000, 4096),
        ];
        session
            .set_mem_table(&regions, vec![memfd(), memfd()], None)
            .unwrap();
        session.set_vring_num(0, 128).unwrap();
        session.set_vring_base(0, 5).unwrap();
        let flags = VhostUserVringAddrFlags::empty();
        session
            .set_vring_addr(0, flags, 0x7000, 0x7200, 0x7400, 0)
            .unwrap();
        session.set_vring_call(0, Some(event())).unwrap();
        session.set_vring_err(0, Some(event())).unwrap();
        session.set_vring_kick(0, Some(event())).unwrap();
        session.set_vring_enable(0, true).unwrap();
        assert_eq!(session.rings[0].runs, Runs::Yes);
        session
    }

    /// Everything in a record that can be compared.
    fn facts(record: &Record) -> String {
        let memory: Vec<_> = (record.memory.iter())
            .map(|(shape, file)| (*shape, inode(file)))
            .collect();
        let inflight = record.inflight.as_ref().map(|inflight| {
            let InflightRecord {
                bytes,
                file_offset,
                queues,
                queue_size,
                file,
            } = inflight;
            (*bytes, *file_offset, *queues, *queue_size, inode(file))
        });
        let rings: Vec<_> = (record.rings.iter())
            .map(|ring| {
                let of = |fd: &Option<OwnedFd>| fd.as_ref().map(inode);
                let kick = ring.kick.as_ref().map(|kick| inode(&**kick));
                let fds = (kick, of(&ring.call), of(&ring.error));
                (ring.size, ring.base, ring.addresses, fds, ring.enabled)
            })
            .collect();
        let features = (record.features, record.protocol_features);
        format!("{features:x?} {memory:x?} {inflight:?} {rings:x?}")
    }

    #[test]
    fn session_that_is_resumed_is_where_it_was_and_reads_on_from_its_connection() {
        let record = set_up().park().unwrap();
        assert_eq!(record.rings[0].base, 77, "as its ring was stopped");
        let before = facts(&record);
        let (mut front, stream) = UnixStream::pair().unwrap();
        // Sent while nobody reads.
        front.write_all(&words([17, 1, 0])).unwrap();
        let mut connection = Connection::resume(stream, recording(), &record).unwrap();
        assert!(matches!(connection.serve_one(), Served::Yes));
        let mut answer = [0; 20];
        front.read_exact(&mut answer).unwrap();
        assert_eq!(&answer[12..], &2_u64.to_ne_bytes(), "GET_QUEUE_NUM");
        drop(record);
        let again = connection.session().park().unwrap();
        assert_eq!(facts(&again), before);
        assert!(matches!(connection.session().park(), Err(ParkError::Over)));
    }

    fn words(words: [u32; 3]) -> Vec<u8> {
        words.into_iter().flat_map(u32::to_ne_bytes).collect()
    }

    #[test]
    fn session_that_has_only_begun_is_resumed_where_it_was() {
        for features in [0, FEATURES] {
            let mut session = Session::new(recording());
            if features != 0 {
                session.set_features(features).unwrap();
            }
            let record = session.park().unwrap();
            let before = facts(&record);
            let (_front, stream) = UnixStream::pair().unwrap();
            let connection = Connection::resume(stream, recording(), &record).unwrap();
            assert_eq!(facts(&connection.session().park().unwrap()), before);
        }
    }

    #[test]
    fn ring_without_a_record_of_its_requests_runs_on() {
        let mut session = set_up();
        session.inflight = None;
        let refused = session.park().unwrap_err();
        assert!(
            matches!(refused, ParkError::NoRecord { queue: 0 }),
            "{refused:?}"
        );
        assert_eq!(session.rings[0].runs, Runs::Yes);
        session.end();
        assert!(session.memory.is_empty(), "its files are closed");
        assert!(matches!(session.park(), Err(ParkError::Over)));
    }

    #[test]
    fn device_that_does_not_obey_any_more_says_which_message() {
        let mut record = set_up().park().unwrap();
        record.memory[0].0.bytes = REFUSED_BYTES;
        let (_front, stream) = UnixStream::pair().unwrap();
        let refused = Connection::resume(stream, recording(), &record).err();
        let named = matches!(
            refused,
            Some(ReplayError::Refused {
                message: "SET_MEM_TABLE",
                ..
            })
        );
        assert!(named, "{refused:?}");
    }

    #[test]
    fn memory_of_a_whole_table_is_resumed_region_by_region_as_it_was() {
        let mut session = set_up();
        let regions: Vec<_> = (0..32)
            .map(|at| VhostUserMemoryRegion::new(at << 20, 0x1000, 0x7000 + (at << 20), 0))
            .collect();
        let files = regions.iter().map(|_| memfd()).collect();
        session.set_mem_table(&regions, files, None).unwrap();
        let record = session.park().unwrap();
        let before = facts(&record);
        let (_front, stream) = UnixStream::pair().unwrap();
        let connection = Connection::resume(stream, recording(), &record).unwrap();
        assert_eq!(facts(&connection.session().park().unwrap()), before);
    }

    #[test]
    fn ring_that_was_enabled_before_the_feature_for_that_was_given_up_runs_on() {
        let mut session = set_up();
        session.set_features(REQUIRED).unwrap();
        let record = session.park().unwrap();
        let (_front, stream) = UnixStream::pair().unwrap();
        let connection = Connection::resume(stream, recording(), &record).unwrap();
        let session = connection.session().clone();
        session.end();
        assert!(matches!(session.park(), Err(ParkError::Over)));
    }

    #[test]
    fn in_flight_region_is_not_replaced_under_a_ring_that_runs() {
        let mut session = set_up();
        let inflight = VhostUserInflight::new(4096, 0, 1, 64);
        assert!(session.set_inflight_fd(&inflight, memfd()).is_err());
        assert_eq!(session.take_discarded().len(), 1);
        session.set_vring_enable(0, false).unwrap();
        session.set_inflight_fd(&inflight, memfd()).unwrap();
    }

    #[test]
    fn ring_that_was_reset_stays_so_in_the_next_process() {
        type Reset = fn(&mut Session<Recording>) -> Result<()>;
        let resets: [Reset; 2] = [Session::reset_owner, Session::reset_device];
        for features in [FEATURES, REQUIRED] {
            for reset in resets {
                let mut session = set_up();
                session.set_features(features).unwrap();
                reset(&mut session).unwrap();
                session.set_vring_base(0, 5).unwrap();
                session.start_all().unwrap();
                assert_eq!(session.rings[0].runs, Runs::No);
                let record = session.park().unwrap();
                assert!(record.rings[0].kick.is_none());
                let (_front, stream) = UnixStream::pair().unwrap();
                let connection = Connection::resume(stream, recording(), &record).unwrap();
                let again = connection.session().park().unwrap();
                assert_eq!(again.rings[0].base, 5, "a ring that was started is at 77");
                assert_eq!(facts(&again), facts(&record));
            }
        }
    }

    #[test]
    fn program_that_offers_less_than_was_accepted_is_told_from_a_front_end_that_misbehaves() {
        let resumed = |change: fn(&mut Record)| {
            let mut record = set_up().park().unwrap();
            change(&mut record);
            let (_front, stream) = UnixStream::pair().unwrap();
            Connection::resume(stream, recording(), &record).err()
        };
        let changes: [fn(&mut Record); 4] = [
            |record| record.features |= 1,
            |record| record.protocol_features = Some(1 << 15),
            |record| record.rings.push(RingSettings::default()),
            |record| record.rings[1].size = 512,
        ];
        for change in changes {
            let refused = resumed(change);
            let lacks = matches!(refused, Some(ReplayError::NotOffered { .. }));
            assert!(lacks, "{refused:?}");
        }
        assert!(resumed(|_| {}).is_none());
    }
}
