// SPDX-License-Identifier: Apache-2.0
//! A driver that posts nonsense, nothing, or far too little, and records that were exchanged: the device of that guest
//! may lose packets or stop, no byte is written where no buffer is, and others go on.

mod support;

use pagetide_addr::FilePage;
use pagetide_dpu::{
    DeviceState, Dpu, DpuConfig, LinkConfig, NicConfig, NicReport, OnReceiveFault, ParkedDevice,
    Prefault, RamPolicy, ReceiveConfig, SocketAccess,
};
use pagetide_vpri::{DomainTable, Doorbell, HostEnd, LookUp};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use support::*;

const HEADER: u32 = 12;
const F_MRG_RXBUF: u64 = 1 << 15;
const RX: usize = 0;
const TX: usize = 1;
const ALL: [OnReceiveFault; 4] = [
    OnReceiveFault::Drop,
    OnReceiveFault::Pause,
    OnReceiveFault::BackupRing,
    OnReceiveFault::OutOfOrder,
];

struct Tenant {
    config: NicConfig,
    guest: Guest,
    connection: Connection,
    sending: u64,
}

fn config(dir: &Path, name: &str, on_fault: OnReceiveFault) -> NicConfig {
    NicConfig {
        socket: dir.join(name),
        pairs: 1,
        link: LinkConfig::Loop,
        receive: ReceiveConfig {
            on_fault,
            prefault: Prefault::Off,
            ..ReceiveConfig::default()
        },
        look_up: LookUp::On,
        ram: RamPolicy::default(),
        access: SocketAccess::default(),
    }
}

impl Tenant {
    fn new(rig: &Rig, name: &str, on_fault: OnReceiveFault) -> Self {
        let config = config(rig.dir.path(), name, on_fault);
        rig.dpu.add_nic(&config).unwrap();
        let mut guest = Guest::new();
        let connection = Connection::open_nic(&config.socket, &mut guest, 1, F_MRG_RXBUF);
        let sending = guest.room(70_000);
        Self {
            config,
            guest,
            connection,
            sending,
        }
    }

    fn send(&mut self, data: &[u8]) {
        let whole = [&[0; HEADER as usize][..], data].concat();
        self.guest.put(self.sending, &whole);
        let bytes = u32::try_from(whole.len()).unwrap();
        let queue = &mut self.connection.queues[TX];
        let head = queue.submit(&self.guest, &[(self.sending, bytes, 0)]);
        assert_eq!(queue.wait_used(&self.guest), (head, 0));
    }

    fn post(&mut self, at: u64, bytes: u32) -> u16 {
        self.connection.queues[RX].submit(&self.guest, &[(at, bytes, WRITE)])
    }

    fn nic(&self, rig: &Rig) -> NicReport {
        let report = rig.report(&self.config.socket);
        report.backing.nic().unwrap().clone()
    }
}

/// A packet of a number, long enough to have one.
fn packet(number: u32, bytes: usize) -> Vec<u8> {
    let mut packet = vec![u8::try_from(number % 251).unwrap(); bytes];
    packet[..4].copy_from_slice(&number.to_le_bytes());
    packet
}

#[test]
fn buffers_that_overlap_are_filled_one_after_the_other() {
    for on_fault in ALL {
        let rig = Rig::new(1);
        let mut tenant = Tenant::new(&rig, "nic.sock", on_fault);
        let at = tenant.guest.room(8192);
        // All begin in one place, or in the middle of another, and two are one and the same.
        for (offset, bytes) in [(0, 2048), (0, 2048), (100, 2048), (1, 4095), (0, 8192)] {
            tenant.post(at + offset, bytes);
        }
        for number in 0..5 {
            tenant.send(&packet(number, 200));
            let (_, bytes) = tenant.connection.queues[RX].wait_used(&tenant.guest);
            assert_eq!(bytes, HEADER + 200);
        }
        assert_eq!(
            rig.report(&tenant.config.socket).state,
            DeviceState::Connected
        );
        // The last one began at the beginning.
        let got = tenant.guest.get(at + u64::from(HEADER), 200);
        assert_eq!(got, packet(4, 200));
    }
}

#[test]
fn driver_that_posts_nothing_costs_the_room_of_its_link_and_no_more() {
    for on_fault in ALL {
        let rig = Rig::new(1);
        let mut tenant = Tenant::new(&rig, "nic.sock", on_fault);
        for number in 0..1500 {
            tenant.send(&packet(number, 100));
        }
        let nic = tenant.nic(&rig);
        assert_eq!((nic.stored_packets, nic.stored_peak_bytes), (0, 0));
        assert_eq!((nic.fault_drops, nic.unfit_drops), (0, 0));
        // One is staged; the link has the others, as far as it has room.
        assert_eq!(nic.sent_packets + nic.send_drops, 1500);
        assert!((1000..1100).contains(&nic.sent_packets), "{nic:?}");
        // What was kept comes in order once there are buffers.
        for number in 0..u32::try_from(nic.sent_packets).unwrap() {
            let at = tenant.sending + 8192;
            tenant.post(at, 2048);
            tenant.connection.queues[RX].wait_used(&tenant.guest);
            let got = tenant.guest.get(at + u64::from(HEADER), 4);
            assert_eq!(got, number.to_le_bytes());
        }
    }
}

#[test]
fn longest_packet_into_many_small_buffers_comes_whole_or_not_at_all() {
    for on_fault in ALL {
        let rig = Rig::new(1);
        let mut tenant = Tenant::new(&rig, "nic.sock", on_fault);
        let data = packet(7, 65_000);
        // Too small even if the ring is full of them.
        let tiny: Vec<u16> = (0..QUEUE_SIZE)
            .map(|_| {
                let at = tenant.guest.room(64);
                tenant.post(at, 64)
            })
            .collect();
        tenant.send(&data);
        eventually("it is lost", || tenant.nic(&rig).unfit_drops == 1);
        tenant.send(&packet(8, 60));
        for head in &tiny[..2] {
            assert_eq!(
                tenant.connection.queues[RX].wait_used(&tenant.guest).0,
                *head
            );
        }
        drop(tenant);
        // Just enough: a thousand bytes each.
        let mut tenant = Tenant::new(&rig, "other.sock", on_fault);
        let places: Vec<(u16, u64)> = (0..QUEUE_SIZE)
            .map(|_| {
                let at = tenant.guest.room(1040);
                (tenant.post(at, 1040), at)
            })
            .collect();
        tenant.send(&data);
        let mut whole = Vec::new();
        let buffers = (65_000 + HEADER).div_ceil(1040);
        for number in 0..buffers {
            let queue = &mut tenant.connection.queues[RX];
            let (head, bytes) = match number {
                0 => queue.wait_used(&tenant.guest),
                // All are there with the first one.
                _ => queue.poll_used(&tenant.guest).expect("all at once"),
            };
            let (_, at) = places.iter().find(|(its, _)| *its == head).unwrap();
            whole.extend(tenant.guest.get(*at, bytes as usize));
        }
        assert_eq!(
            u32::from(u16::from_le_bytes([whole[10], whole[11]])),
            buffers
        );
        assert!(whole[HEADER as usize..] == data, "{on_fault:?}");
    }
}

struct Next {
    dpu: Dpu,
    /// Nobody asks at them: no page is absent.
    _ends: Vec<HostEnd>,
}

/// A DPU that goes on with what another one has parked.
fn next_dpu(dir: &Path, parked: Vec<ParkedDevice>, on_fault: OnReceiveFault) -> Next {
    let bell = Arc::new(Doorbell::new().unwrap());
    let dpu_config = DpuConfig::new(dir.to_owned());
    let domains = Arc::new(DomainTable::new(dpu_config.engine_count));
    let (dpu, ends) = Dpu::start(&dpu_config, domains, &bell).unwrap();
    for device in parked {
        let name = device.socket.file_name().unwrap().to_str().unwrap();
        let config = config(dir, name, on_fault);
        dpu.add_parked_nic(&config, &mut Some(device)).unwrap();
    }
    Next { dpu, _ends: ends }
}

fn records(dir: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(dir)
        .unwrap()
        .flatten()
        .map(|entry| entry.path());
    let is_record = |path: &PathBuf| path.extension().is_some_and(|end| end == "held");
    files.filter(is_record).collect()
}

#[test]
fn record_of_another_tenant_makes_no_device_write_where_it_has_no_buffer() {
    let on_fault = OnReceiveFault::OutOfOrder;
    let rig = Rig::new(1);
    rig.host.hold();
    let mut tenants = ["a.sock", "b.sock"].map(|name| Tenant::new(&rig, name, on_fault));
    let mut buffers: Vec<Vec<u64>> = Vec::new();
    for (which, tenant) in tenants.iter_mut().enumerate() {
        let domain = tenant.guest.domain(&rig);
        // Some are held: the pages of the first ones are out. How many differs.
        let places: Vec<u64> = (0..8).map(|_| tenant.guest.room(2048)).collect();
        for (at, place) in places.iter().enumerate() {
            if at < 2 + which {
                take_away(&domain, FilePage::containing(*place).byte_offset(), 2048);
            }
            tenant.post(*place, 2048);
        }
        for number in 0..3 {
            tenant.send(&packet(number, 100));
            tenant.connection.queues[RX].wait_used(&tenant.guest);
        }
        buffers.push(places);
    }
    rig.dpu.hush(Duration::from_secs(20)).unwrap();
    let parked = rig.dpu.park();
    let records = records(rig.dir.path());
    assert_eq!(records.len(), 2, "{records:?}");
    let contents: Vec<Vec<u8>> = records.iter().map(|path| fs::read(path).unwrap()).collect();
    fs::write(&records[0], &contents[1]).unwrap();
    fs::write(&records[1], &contents[0]).unwrap();
    // Whatever is no buffer keeps what it has: a page behind everything that the guest uses.
    let canary = RAM_BYTES - 4096;
    for tenant in &tenants {
        tenant.guest.put(canary, &[0xaa; 4096]);
    }
    let next = next_dpu(rig.dir.path(), parked, on_fault);
    next.dpu.admit();
    for (tenant, places) in tenants.iter_mut().zip(&buffers) {
        // Nothing of the other tenant's is believed: the ring goes on where its own used index says.
        tenant.send(&packet(9, 100));
        let (head, bytes) = tenant.connection.queues[RX].wait_used(&tenant.guest);
        assert_eq!(bytes, HEADER + 100);
        let ring = &tenant.connection.queues[RX];
        let at = ring.address_of(&tenant.guest, head) - GPA;
        assert!(places.contains(&at), "{at:#x} is no buffer of this guest");
        let got = tenant.guest.get(at + u64::from(HEADER), 100);
        assert_eq!(got, packet(9, 100));
        assert!(
            tenant
                .guest
                .get(canary, 4096)
                .iter()
                .all(|byte| *byte == 0xaa)
        );
    }
    for report in next.dpu.devices() {
        assert_eq!(report.state, DeviceState::Connected);
    }
}
