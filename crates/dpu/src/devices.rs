// SPDX-License-Identifier: Apache-2.0
//! The devices of a DPU: their slots, image ownership, and reports.

use crate::{
    blk::{
        claim::Sharing,
        image::{Image, ImageError, ImageUse, Writes},
    },
    config::BlkConfig,
    device::{Control, DeviceState, Endpoint},
    ram::RamPolicy,
    shared::OnFault,
};
use pagetide_addr::{DeviceId, FileKey};
use pagetide_sys::guest_ram::Sealed;
use pagetide_vpri::LookUp;
use std::{path::PathBuf, sync::Arc};

/// A device and its statistics.
#[derive(Debug, Clone)]
pub struct DeviceReport {
    /// Its id, used in page requests.
    pub id: DeviceId,
    /// Its state.
    pub state: DeviceState,
    /// Why it stopped.
    pub stopped_because: Option<String>,
    /// Socket it listens on.
    pub socket: PathBuf,
    /// Image it serves.
    pub image: PathBuf,
    /// Serial number shown to the guest.
    pub serial: String,
    /// Files of guest RAM it uses now.
    pub files: Vec<FileKey>,
    /// Whether those files are sealed against shrinking; `None` without any.
    pub ram_sealed: Option<Sealed>,
    /// What it accepts as guest RAM.
    pub ram: RamPolicy,
    /// Request queues offered.
    pub queue_count: u16,
    /// Whether the guest may write.
    pub writes: Writes,
    /// What is wrong with the image, as a sentence; for example, that it was cut short.
    pub image_error: Option<String>,
    /// Whether other programs may write the image at the same time.
    pub sharing: Sharing,
    /// Whether pages are looked up before DMA.
    pub look_up: LookUp,
    /// What a queue does while one of its requests waits for pages.
    pub on_fault: OnFault,
    /// Its share of its engines beside the weights of others.
    pub weight: u32,
    /// Size of the image.
    pub capacity_bytes: u64,
    /// Requests completed.
    pub requests: u64,
    /// Bytes read from the image.
    pub read_bytes: u64,
    /// Bytes written to the image.
    pub written_bytes: u64,
    /// Requests that ended in an I/O error.
    pub failed_requests: u64,
    /// Invalid chains.
    pub malformed_requests: u64,
    /// Requests answered with an error because part of them was not in guest memory.
    pub outside_requests: u64,
    /// Requests with the kernel now.
    pub inflight_requests: u64,
    /// Chains parked now.
    pub parked_chains: u64,
    /// Page requests that a request waited for.
    pub iopfs: u64,
    /// Requests in which a fault was injected.
    pub injected_iopfs: u64,
    /// Page requests sent ahead, for requests that had not begun.
    pub prefaults: u64,
    /// Absent pages that reads covered entirely: their stored content was dropped, not brought
    /// back.
    pub overwritten_pages: u64,
    /// Requests failed because the host did not answer in time.
    pub timed_out_requests: u64,
    /// Guest RAM under standing leases for its rings.
    pub wired_bytes: u64,
    /// Records of its DMA in the access log.
    pub logged_accesses: u64,
    /// Records that were lost because they were not read in time.
    pub lost_accesses: u64,
    /// Time spent on look-ups in sampled requests (one in 61).
    pub lookup_sampled_ns: u64,
    /// Number of sampled requests.
    pub lookup_samples: u64,
}

impl DeviceReport {
    /// Mean time of a look-up, in nanoseconds; 0 before the first sample.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a mean for people")]
    pub fn lookup_ns_per_request(&self) -> f64 {
        self.lookup_sampled_ns as f64 / self.lookup_samples.max(1) as f64
    }
}

/// All devices, by slot.
#[derive(Default)]
pub(crate) struct Devices {
    pub next_id: u32,
    /// Indexed by slot.
    pub slots: Vec<Place>,
}

/// A slot for a device.
pub(crate) enum Place {
    Free,
    Here(BlkDevice),
    /// The device is being removed: its I/O is still under way, and its image is in use.
    Ending(Ending),
}

/// The remains of a device that is being removed.
pub(crate) struct Ending {
    pub control: Arc<Control>,
    pub config: BlkConfig,
}

/// A device in service.
pub(crate) struct BlkDevice {
    pub config: BlkConfig,
    pub endpoint: Endpoint,
}

impl Devices {
    /// Devices that are not being removed.
    pub fn here(&self) -> impl Iterator<Item = &BlkDevice> {
        self.slots.iter().filter_map(|place| match place {
            Place::Here(device) => Some(device),
            Place::Free | Place::Ending(_) => None,
        })
    }

    /// Every image in use.
    pub fn images(&self) -> impl Iterator<Item = (&Image, &BlkConfig)> {
        self.slots.iter().filter_map(|place| match place {
            Place::Free => None,
            Place::Here(device) => {
                let control = device.endpoint.control();
                Some((&control.shared.image, &device.config))
            }
            Place::Ending(ending) => Some((&ending.control.shared.image, &ending.config)),
        })
    }

    /// Takes out a device that is to be removed.
    pub fn take(&mut self, id: DeviceId) -> Option<(usize, BlkDevice)> {
        let is_it = |place: &Place| matches!(place, Place::Here(device) if device.id() == id);
        let slot = self.slots.iter().position(is_it)?;
        match std::mem::replace(&mut self.slots[slot], Place::Free) {
            Place::Here(device) => {
                self.slots[slot] = Place::Ending(Ending {
                    control: device.endpoint.control().clone(),
                    config: device.config.clone(),
                });
                Some((slot, device))
            }
            Place::Free | Place::Ending(_) => None,
        }
    }

    /// Claims an image for us, unless a device of ours or another program uses it.
    pub fn claim(&self, image: &mut Image, config: &BlkConfig) -> Result<(), ImageError> {
        let ImageUse { sharing, content } = config.image_use;
        let mut images = self.images();
        let other = images
            .find(|(theirs, other)| !image.agrees_with(sharing, theirs, other.image_use.sharing));
        if let Some((_, other)) = other {
            return Err(ImageError::Served {
                path: config.image.clone(),
                socket: other.socket.clone(),
            });
        }
        image.claim(&config.image, sharing)?;
        image.check_content(&config.image, content)
    }
}

impl BlkDevice {
    pub fn id(&self) -> DeviceId {
        self.endpoint.control().shared.id
    }

    pub fn report(&self) -> DeviceReport {
        let control = self.endpoint.control();
        let shared = &control.shared;
        DeviceReport {
            id: shared.id,
            state: control.state(),
            stopped_because: shared.stopped_because(),
            socket: self.config.socket.clone(),
            image: self.config.image.clone(),
            serial: self.config.serial.clone(),
            files: control.files(),
            ram_sealed: control.sealed(),
            ram: self.config.ram,
            queue_count: self.config.queue_count,
            writes: self.config.writes,
            image_error: shared.image_error(),
            sharing: self.config.image_use.sharing,
            look_up: self.config.look_up,
            on_fault: self.config.on_fault,
            weight: shared.weight(),
            capacity_bytes: shared.image.capacity_bytes(),
            requests: shared.total(|c| &c.requests),
            read_bytes: shared.total(|c| &c.read_bytes),
            written_bytes: shared.total(|c| &c.written_bytes),
            failed_requests: shared.total(|c| &c.errors),
            malformed_requests: shared.total(|c| &c.malformed),
            outside_requests: shared.total(|c| &c.outside),
            inflight_requests: shared.total(|c| &c.in_flight),
            parked_chains: shared.total(|c| &c.parked),
            iopfs: shared.total(|c| &c.iopfs),
            injected_iopfs: shared.total(|c| &c.injected_iopfs),
            prefaults: shared.total(|c| &c.prefaults),
            overwritten_pages: shared.total(|c| &c.overwritten_pages),
            timed_out_requests: shared.total(|c| &c.timed_out),
            wired_bytes: shared.total(|c| &c.wired_bytes),
            logged_accesses: shared.total(|c| &c.logged),
            lost_accesses: shared.total(|c| &c.unlogged),
            lookup_sampled_ns: shared.total(|c| &c.lookup_ns),
            lookup_samples: shared.total(|c| &c.lookup_samples),
        }
    }
}
