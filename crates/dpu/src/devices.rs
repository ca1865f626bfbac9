// SPDX-License-Identifier: Apache-2.0
//! The devices of a DPU: their slots, and reports.

use crate::{
    blk::open::DiskInUse,
    config::DeviceConfig,
    device::{Control, DeviceState, Endpoint},
    kind::Backing,
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
    /// What is behind it.
    pub backing: Backing,
    /// What is wrong with that, as a sentence; for example, that an image was cut short.
    pub backing_error: Option<String>,
    /// Files of guest RAM it uses now.
    pub files: Vec<FileKey>,
    /// Whether those files are sealed against shrinking; `None` without any.
    pub ram_sealed: Option<Sealed>,
    /// What it accepts as guest RAM.
    pub ram: RamPolicy,
    /// Request queues offered.
    pub queue_count: u16,
    /// Whether pages are looked up before DMA.
    pub look_up: LookUp,
    /// What a queue does while one of its requests waits for pages.
    pub on_fault: OnFault,
    /// Its share of its engines beside the weights of others.
    pub weight: u32,
    /// Requests completed.
    pub requests: u64,
    /// Bytes moved to the guest: those read from the image of a disk.
    pub read_bytes: u64,
    /// Bytes moved from the guest: those written to the image of a disk.
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
    /// The serial number by which its guest knows it, if its kind has one.
    #[must_use]
    pub fn serial(&self) -> Option<&str> {
        self.backing.disk().map(|disk| disk.serial.as_str())
    }

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
    Here(Device),
    /// The device is being removed: its I/O is still under way, and what is behind it in use.
    Ending(Arc<Control>),
}

/// A device in service.
pub(crate) struct Device {
    pub config: DeviceConfig,
    pub endpoint: Endpoint,
}

impl Devices {
    /// Devices that are not being removed.
    pub fn here(&self) -> impl Iterator<Item = &Device> {
        self.slots.iter().filter_map(|place| match place {
            Place::Here(device) => Some(device),
            Place::Free | Place::Ending(_) => None,
        })
    }

    /// Every device, also those that are being removed.
    fn all(&self) -> impl Iterator<Item = &Control> {
        self.slots.iter().filter_map(|place| match place {
            Place::Free => None,
            Place::Here(device) => Some(&**device.endpoint.control()),
            Place::Ending(control) => Some(&**control),
        })
    }

    /// Every disk in use.
    pub fn disks(&self) -> impl Iterator<Item = DiskInUse<'_>> {
        self.all().filter_map(|control| {
            Some(DiskInUse {
                disk: control.shared.kind.disk()?,
                socket: &control.socket,
            })
        })
    }

    /// Takes out a device that is to be removed.
    pub fn take(&mut self, id: DeviceId) -> Option<(usize, Device)> {
        let is_it = |place: &Place| matches!(place, Place::Here(device) if device.id() == id);
        let slot = self.slots.iter().position(is_it)?;
        match std::mem::replace(&mut self.slots[slot], Place::Free) {
            Place::Here(device) => {
                self.slots[slot] = Place::Ending(device.endpoint.control().clone());
                Some((slot, device))
            }
            Place::Free | Place::Ending(_) => None,
        }
    }
}

impl Device {
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
            backing: shared.kind.backing(),
            backing_error: shared.kind.error(),
            files: control.files(),
            ram_sealed: control.sealed(),
            ram: self.config.ram,
            queue_count: self.config.queue_count,
            look_up: self.config.look_up,
            on_fault: self.config.on_fault,
            weight: shared.weight(),
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
