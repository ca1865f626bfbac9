// SPDX-License-Identifier: Apache-2.0
//! A disk as all threads of its device see it: the image, and whether it still has its size.

use super::{
    claim::Sharing,
    config,
    image::{Image, ImageUse, Writes},
    request::{LAYOUT, Limits, SERIAL_BYTES},
};
use crate::kind::work::{Chains, Completes, Keeping, QueueRole};
use pagetide_addr::DeviceId;
use std::{
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
};

/// What a disk is made of.
#[derive(Debug)]
pub(crate) struct DiskParts {
    pub id: DeviceId,
    /// Path of the image.
    pub path: PathBuf,
    /// Claimed.
    pub image: Image,
    pub image_use: ImageUse,
    /// As its guest reads it.
    pub serial: [u8; SERIAL_BYTES],
    /// As it was given.
    pub serial_given: String,
}

/// The disk of a block device.
#[derive(Debug, Clone)]
pub struct DiskReport {
    /// Image it serves.
    pub image: PathBuf,
    /// Serial number shown to the guest.
    pub serial: String,
    /// Whether the guest may write.
    pub writes: Writes,
    /// Whether other programs may write the image at the same time.
    pub sharing: Sharing,
    /// Size of the image.
    pub capacity_bytes: u64,
}

/// The disk of a block device.
#[derive(Debug)]
pub(crate) struct Disk {
    parts: DiskParts,
    /// Size of the image when it was found cut short; `u64::MAX` while it is complete.
    cut_bytes: AtomicU64,
}

impl Disk {
    /// A disk whose image is complete.
    pub fn new(parts: DiskParts) -> Self {
        Self {
            parts,
            cut_bytes: AtomicU64::new(u64::MAX),
        }
    }

    /// Its image.
    pub fn image(&self) -> &Image {
        &self.parts.image
    }

    /// How the operator allows the image to be used.
    pub fn image_use(&self) -> ImageUse {
        self.parts.image_use
    }

    /// Its serial number as its guest reads it.
    pub fn serial(&self) -> &[u8; SERIAL_BYTES] {
        &self.parts.serial
    }

    /// For a report.
    pub fn report(&self) -> DiskReport {
        DiskReport {
            image: self.parts.path.clone(),
            serial: self.parts.serial_given.clone(),
            writes: self.parts.image.writes,
            sharing: self.parts.image_use.sharing,
            capacity_bytes: self.parts.image.capacity_bytes(),
        }
    }

    /// See [`Kind::features`](crate::kind::Kind::features).
    pub fn features(&self) -> u64 {
        config::features(&self.parts.image)
    }

    /// See [`Kind::config`](crate::kind::Kind::config).
    pub fn config(&self, queue_count: u16, offset: u32, bytes: u32) -> Option<Vec<u8>> {
        config::read(&self.parts.image, queue_count, offset, bytes)
    }

    /// See [`Kind::role_of`](crate::kind::Kind::role_of).
    pub fn role_of(queue: u16) -> QueueRole {
        QueueRole {
            layout: LAYOUT,
            chains: Chains::Requests,
            vector: queue,
            keeping: Keeping::ToUse,
            completes: Completes::InAnyOrder,
        }
    }

    /// Gives up its image. No I/O of ours is under way.
    pub fn release(&self) {
        self.parts.image.give_up_claim(&self.parts.path);
    }

    /// The properties by which requests are decided.
    pub fn limits(&self) -> Limits {
        Limits {
            sectors: self.parts.image.sectors,
            writes: self.parts.image.writes,
        }
    }

    /// Size of the image now, at most the served size. A change is logged: the guest's I/O beyond
    /// the end fails from now on, or no longer.
    #[inline]
    pub fn look_at_size(&self) -> u64 {
        let image = &self.parts.image;
        let (now, capacity) = (image.bytes_now(), image.capacity_bytes());
        let cut = if now < capacity { now } else { u64::MAX };
        if self.cut_bytes.load(Ordering::Relaxed) != cut {
            self.tell_size(cut, capacity);
        }
        now.min(capacity)
    }

    #[cold]
    fn tell_size(&self, cut: u64, capacity: u64) {
        if self.cut_bytes.swap(cut, Ordering::Relaxed) == cut {
            return;
        }
        if cut == u64::MAX {
            tracing::warn!(
                device = self.parts.id.0,
                capacity_bytes = capacity,
                "the image has its size again; the part that was cut off reads as zeros, unless it was restored"
            );
        } else {
            tracing::error!(
                device = self.parts.id.0,
                image_bytes = cut,
                capacity_bytes = capacity,
                "somebody has cut the image short; I/O beyond its end fails until it has its size again"
            );
        }
    }

    /// What is wrong with the image, as a sentence.
    pub fn error(&self) -> Option<String> {
        let (now, capacity) = (self.look_at_size(), self.parts.image.capacity_bytes());
        (now < capacity).then(|| {
            format!(
                "the image was cut short, from {capacity} to {now} bytes: I/O beyond its end fails; restore its content, or give it its size again by truncate(1)"
            )
        })
    }
}
