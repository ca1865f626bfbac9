// SPDX-License-Identifier: Apache-2.0
//! A vhost-user front end of our own: one that writes nonsense into its rings, or asks for DMA into
//! memory that is not its to give.
#![expect(dead_code, reason = "each test file uses a part of it")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

const RAM_BYTES: u64 = 1 << 20;
const GPA: u64 = 0x4000_0000;
const VA: u64 = 0x7000_0000_0000;
const QUEUE_SIZE: u16 = 64;
// Where the parts of the ring lie in RAM.
const DESCRIPTORS: u64 = 0;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;
const BUFFER: u64 = 0x3000;
/// Where more memory begins, for the guest and for the front end, as far past [`GPA`] and [`VA`].
const MORE: u64 = 1 << 32;
const PAGE: u32 = 4096;
const SECTORS_PER_PAGE: u64 = 8;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// `VHOST_USER_F_PROTOCOL_FEATURES` and `VIRTIO_F_VERSION_1`.
const FEATURES: u64 = 1 << 30 | 1 << 32;

/// A kind of nonsense.
#[derive(Clone, Copy, Debug)]
pub enum Lie {
    /// A request without room for its status.
    NoStatus,
    /// A head that is not in the table.
    HeadBeyond,
    /// A chain that goes round.
    Loop,
    /// A buffer outside memory.
    OutsideMemory,
    /// An index that is further on than the ring is long.
    IndexTooFar,
}

/// All of them.
pub const LIES: [Lie; 5] = [
    Lie::NoStatus,
    Lie::HeadBeyond,
    Lie::Loop,
    Lie::OutsideMemory,
    Lie::IndexTooFar,
];

/// See the module.
pub struct Liar {
    ram: File,
    asked: u16,
    kick: EventFd,
    call: EventFd,
    frontend: Frontend,
}

impl Liar {
    /// Connects to the device at `socket` with memory of its own.
    pub fn connect(socket: &Path) -> Result<Self, Box<dyn std::error::Error>> {
        let ram = memfd_create("liar", MemfdFlags::CLOEXEC).expect("a memfd");
        let ram = File::from(ram);
        ram.set_len(RAM_BYTES).expect("its size");
        Self::connect_with(socket, &ram, RAM_BYTES)
    }

    /// Connects to the device at `socket` with `ram` as its memory.
    pub fn connect_with(
        socket: &Path,
        ram: &File,
        bytes: u64,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let frontend = Frontend::connect(socket, 1)?;
        let (kick, call) = (event(), event());
        let mut liar = Self {
            ram: ram.try_clone().expect("a copy"),
            asked: 0,
            kick,
            call,
            frontend,
        };
        liar.start(bytes)?;
        Ok(liar)
    }

    fn start(&mut self, bytes: u64) -> Result<(), Box<dyn std::error::Error>> {
        let front = &mut self.frontend;
        front.set_owner()?;
        front.get_features()?;
        front.set_features(FEATURES)?;
        front.get_protocol_features()?;
        let features = VhostUserProtocolFeatures::REPLY_ACK;
        front.set_protocol_features(features | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)?;
        front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        front.set_mem_table(&[VhostUserMemoryRegionInfo {
            guest_phys_addr: GPA,
            memory_size: bytes,
            userspace_addr: VA,
            mmap_offset: 0,
            mmap_handle: self.ram.as_raw_fd(),
        }])?;
        front.set_vring_num(0, QUEUE_SIZE)?;
        front.set_vring_base(0, 0)?;
        front.set_vring_addr(
            0,
            &VringConfigData {
                queue_max_size: QUEUE_SIZE,
                queue_size: QUEUE_SIZE,
                flags: 0,
                desc_table_addr: VA + DESCRIPTORS,
                used_ring_addr: VA + USED,
                avail_ring_addr: VA + AVAIL,
                log_addr: None,
            },
        )?;
        front.set_vring_kick(0, &self.kick)?;
        front.set_vring_call(0, &self.call)?;
        front.set_vring_enable(0, true)?;
        Ok(())
    }

    /// Writes nonsense and kicks.
    pub fn tell(&mut self, lie: Lie) {
        let (head, index) = match lie {
            Lie::NoStatus => {
                self.descriptor(0, BUFFER, 16, 0, 0);
                (0, 1)
            }
            Lie::HeadBeyond => (999, 1),
            Lie::Loop => {
                self.descriptor(0, BUFFER, 16, NEXT, 0);
                (0, 1)
            }
            Lie::OutsideMemory => {
                self.descriptor(0, BUFFER, 16, NEXT, 1);
                self.descriptor(1, RAM_BYTES, 4096, WRITE, 0);
                (0, 1)
            }
            Lie::IndexTooFar => (0, 1000),
        };
        self.put(AVAIL + 4, &u16::to_le_bytes(head));
        self.put(AVAIL + 2, &u16::to_le_bytes(index));
        self.kick.write(1).expect("a kick");
    }

    /// Gives the device all `bytes` of `file` as more memory.
    pub fn lend(&mut self, file: &File, bytes: u64) {
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: GPA + MORE,
            memory_size: bytes,
            userspace_addr: VA + MORE,
            mmap_offset: 0,
            mmap_handle: file.as_raw_fd(),
        };
        self.frontend.add_mem_region(&region).expect("more memory");
    }

    /// Has the device read page `page` of its disk into byte `at` of what was [lent](Self::lend),
    /// and returns the status it answers with.
    pub fn read_into_lent(&mut self, page: u64, at: u64) -> u8 {
        self.put(BUFFER, &[0; 8]);
        self.put(BUFFER + 8, &(page * SECTORS_PER_PAGE).to_le_bytes());
        self.put(BUFFER + 16, &[0xff]);
        self.descriptor(0, BUFFER, 16, NEXT, 1);
        self.descriptor(1, MORE + at, PAGE, NEXT | WRITE, 2);
        self.descriptor(2, BUFFER + 16, 1, WRITE, 0);
        let slot = u64::from(self.asked % QUEUE_SIZE);
        self.put(AVAIL + 4 + 2 * slot, &[0, 0]);
        self.asked += 1;
        self.put(AVAIL + 2, &self.asked.to_le_bytes());
        self.kick.write(1).expect("a kick");
        let deadline = Instant::now() + PATIENCE;
        while self.get::<2>(USED + 2) != self.asked.to_le_bytes() {
            assert!(Instant::now() < deadline, "the request is left hanging");
            std::thread::yield_now();
        }
        let [status] = self.get(BUFFER + 16);
        status
    }

    fn get<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.ram
            .read_exact_at(&mut bytes, at)
            .expect("memory of ours");
        bytes
    }

    fn descriptor(&self, index: u64, at: u64, len: u32, flags: u16, next: u16) {
        let fields = [
            &(GPA + at).to_le_bytes()[..],
            &len.to_le_bytes(),
            &flags.to_le_bytes(),
            &next.to_le_bytes(),
        ];
        self.put(DESCRIPTORS + 16 * index, &fields.concat());
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.ram.write_all_at(bytes, at).expect("memory of ours");
    }
}

fn event() -> EventFd {
    EventFd::new(0).expect("an eventfd")
}
