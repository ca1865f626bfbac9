// SPDX-License-Identifier: Apache-2.0
//! Configuration of a DPU and its devices, its bounds, and errors.

use crate::{
    blk::{
        image::{DirectIo, ImageError, ImageUse, Writes},
        request::SERIAL_BYTES,
    },
    device::{EngineGone, SocketError, offer::QUEUES_MAX},
    inject::InjectionError,
    lock::LockError,
    net::{
        config::ReceiveConfig,
        link::{LinkConfig, LinkError},
    },
    ram::RamPolicy,
    ring::DEVICES_MAX,
    shared::{OnFault, WEIGHTS},
};
use pagetide_addr::DeviceId;
use pagetide_sys::socket::SocketAccess;
use pagetide_vhost_backend::ReplayError;
use pagetide_vpri::{BounceError, DomainTable, LookUp, bounce::BOUNCE_BUFFERS_MAX};
use std::{io, path::PathBuf, time::Duration};

/// Longest time an engine polls before it sleeps; beyond it a wake-up costs less.
pub const POLL_MAX: Duration = Duration::from_millis(1);
/// Most engines: more than one per CPU makes no sense, and few machines have more CPUs.
pub const ENGINES_MAX: usize = 256;
/// Default of [`DpuConfig::iopf_timeout`]: as long as a Linux guest waits for a disk of its own
/// (SCSI's `timeout`) before it gives up a command.
pub const IOPF_TIMEOUT: Duration = Duration::from_secs(30);
/// Bounds of [`DpuConfig::ring_entries`].
pub const RING_ENTRIES: std::ops::RangeInclusive<u32> = 16..=4096;

/// Why the DPU cannot do what was requested.
#[derive(Debug, thiserror::Error)]
pub enum DpuError {
    /// A setting is out of its bounds.
    #[error("{setting} is {value}; it must be {must}")]
    Setting {
        /// Its name.
        setting: &'static str,
        /// Its value.
        value: u64,
        /// The allowed values.
        must: &'static str,
    },
    /// An engine's lock.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// An engine's ring or thread could not be created.
    #[error(
        "engine {engine} could not be started: {source} (Linux 6.1 or later with io_uring allowed is needed)"
    )]
    Engine {
        /// Its number.
        engine: usize,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The link of a network device.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The serial number is too long.
    #[error("serial number {0:?} is longer than {SERIAL_BYTES} bytes")]
    Serial(String),
    /// All device slots are in use.
    #[error("there are {DEVICES_MAX} devices already")]
    TooManyDevices,
    /// An injection of faults is invalid.
    #[error(transparent)]
    Injection(#[from] InjectionError),
    /// No such device.
    #[error("there is no device {0:?}")]
    NoSuchDevice(DeviceId),
    /// The device's files could not be put into an engine's file table.
    #[error("an engine could not take the device's files: {0}")]
    Table(io::Error),
    /// No memory for bounce buffers.
    #[error(transparent)]
    Bounce(#[from] BounceError),
    /// The session of a front end that was handed over cannot be led to where it was.
    #[error(transparent)]
    Resume(#[from] ReplayError),
    /// I/O under way is not done in time.
    #[error(
        "I/O of images that engine {engine} has begun is not done within {waited_ms} ms: an image's disk does not answer"
    )]
    Unanswered {
        /// The engine.
        engine: usize,
        /// How long it was waited for.
        waited_ms: u64,
    },
    /// An engine has ended.
    #[error(transparent)]
    Gone(#[from] EngineGone),
}

/// Configuration of the DPU.
#[derive(Debug, Clone)]
pub struct DpuConfig {
    /// Engine threads; must be the number that the [`DomainTable`] was created for.
    pub engine_count: usize,
    /// Longest time an engine polls with nothing to do before it sleeps.
    pub poll_max: Duration,
    /// Most requests of an engine with the kernel at a time.
    pub ring_entries: u32,
    /// Most outstanding page requests of an engine.
    pub fault_queue_entries: usize,
    /// Bounce buffers of an engine, 4 KiB each, for reads under way into absent pages. With 0, such
    /// pages are brought back first, as for a write. Only for a host in this process: a host
    /// elsewhere supplies its own slots (`pagetide_vpri::HostEnd::set_bounce`).
    pub bounce_buffers: u32,
    /// Directory for the engines' lock files.
    pub state_dir: PathBuf,
    /// CPUs of the engines, used in turn; empty: the kernel chooses.
    pub cpus: Vec<usize>,
    /// How long a request waits for its pages before it fails with an I/O error; `None` means
    /// forever. The time stands still while no host is there
    /// ([`HostPresence`](pagetide_vpri::queue::HostPresence)).
    pub iopf_timeout: Option<Duration>,
}

impl DpuConfig {
    /// One engine, with default values.
    #[must_use]
    pub fn new(state_dir: PathBuf) -> Self {
        Self {
            engine_count: 1,
            poll_max: Duration::from_micros(60),
            ring_entries: 256,
            fault_queue_entries: 1024,
            bounce_buffers: 0,
            state_dir,
            cpus: Vec::new(),
            iopf_timeout: Some(IOPF_TIMEOUT),
        }
    }

    pub(crate) fn check(&self, domains: &DomainTable) -> Result<(), DpuError> {
        let setting = |setting, value, must| DpuError::Setting {
            setting,
            value,
            must,
        };
        let engines = self.engine_count;
        if engines == 0 || engines > ENGINES_MAX || engines != domains.engine_count() {
            let must = "from 1 to 256, and what the domain table was made for";
            return Err(setting("engine_count", engines as u64, must));
        }
        if self.poll_max > POLL_MAX {
            let value = u64::try_from(self.poll_max.as_micros()).unwrap_or(u64::MAX);
            return Err(setting("poll_max_us", value, "at most 1000"));
        }
        if !RING_ENTRIES.contains(&self.ring_entries) {
            let value = u64::from(self.ring_entries);
            return Err(setting("ring_entries", value, "from 16 to 4096"));
        }
        let entries = self.fault_queue_entries;
        if !(1..=65_536).contains(&entries) {
            let must = "from 1 to 65536";
            return Err(setting("fault_queue_entries", entries as u64, must));
        }
        if self.bounce_buffers > BOUNCE_BUFFERS_MAX {
            let value = u64::from(self.bounce_buffers);
            return Err(setting("bounce_buffers", value, "at most 1048576"));
        }
        Ok(())
    }
}

/// What devices of all kinds are configured by.
#[derive(Debug, Clone)]
pub(crate) struct DeviceConfig {
    pub socket: PathBuf,
    pub queue_count: u16,
    pub look_up: LookUp,
    pub on_fault: OnFault,
    pub ram: RamPolicy,
}

/// Configuration of a block device.
#[derive(Debug, Clone)]
pub struct BlkConfig {
    /// Unix socket to listen on.
    pub socket: PathBuf,
    /// Image file or block device.
    pub image: PathBuf,
    /// Request queues offered.
    pub queue_count: u16,
    /// Whether the guest may write.
    pub writes: Writes,
    /// Whether pages are looked up before DMA.
    pub look_up: LookUp,
    /// Serial number shown to the guest, at most 20 bytes.
    pub serial: String,
    /// Whether I/O goes past the page cache.
    pub direct_io: DirectIo,
    /// What a queue does while one of its requests waits for pages.
    pub on_fault: OnFault,
    /// What it accepts as guest RAM.
    pub ram: RamPolicy,
    /// How the operator allows the image to be used.
    pub image_use: ImageUse,
    /// Who may connect to the socket.
    pub access: SocketAccess,
}

/// Configuration of a network device. Its sending queues pause on a fault, so that packets keep
/// their order. See [`crate::net`] for what it does with packets.
#[derive(Debug, Clone)]
pub struct NicConfig {
    /// Unix socket to listen on.
    pub socket: PathBuf,
    /// Queue pairs offered, at most [`PAIRS_MAX`](crate::PAIRS_MAX).
    pub pairs: u16,
    /// What it is linked to.
    pub link: LinkConfig,
    /// How it receives.
    pub receive: ReceiveConfig,
    /// Whether pages are looked up before DMA.
    pub look_up: LookUp,
    /// What it accepts as guest RAM.
    pub ram: RamPolicy,
    /// Who may connect to the socket.
    pub access: SocketAccess,
}

impl NicConfig {
    pub(crate) fn device(&self) -> DeviceConfig {
        DeviceConfig {
            socket: self.socket.clone(),
            queue_count: 2 * self.pairs,
            look_up: self.look_up,
            on_fault: OnFault::Pause,
            ram: self.ram,
        }
    }
}

impl BlkConfig {
    pub(crate) fn device(&self) -> DeviceConfig {
        DeviceConfig {
            socket: self.socket.clone(),
            queue_count: self.queue_count,
            look_up: self.look_up,
            on_fault: self.on_fault,
            ram: self.ram,
        }
    }
}

pub(crate) fn check_queues(queue_count: u16) -> Result<(), DpuError> {
    if (1..=QUEUES_MAX).contains(&queue_count) {
        return Ok(());
    }
    Err(DpuError::Setting {
        setting: "queue_count",
        value: u64::from(queue_count),
        must: "from 1 to 64",
    })
}

/// Checks that a weight is allowed.
///
/// # Errors
/// [`DpuError::Setting`].
pub fn check_weight(weight: u32) -> Result<(), DpuError> {
    if WEIGHTS.contains(&weight) {
        return Ok(());
    }
    Err(DpuError::Setting {
        setting: "weight",
        value: u64::from(weight),
        must: "from 1 to 1000",
    })
}
