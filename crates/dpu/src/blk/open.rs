// SPDX-License-Identifier: Apache-2.0
//! Opening the disk of a block device that is added.

use super::{
    disk::{Disk, DiskParts},
    image::{Image, ImageError, ImageUse},
    request::SERIAL_BYTES,
};
use crate::config::{BlkConfig, DpuError};
use pagetide_addr::DeviceId;
use std::path::Path;

/// A disk in use.
pub(crate) struct DiskInUse<'a> {
    pub disk: &'a Disk,
    pub socket: &'a Path,
}

/// A disk whose image is not claimed yet.
pub(crate) struct UnclaimedDisk<'a> {
    config: &'a BlkConfig,
    image: Image,
    serial: [u8; SERIAL_BYTES],
}

impl<'a> UnclaimedDisk<'a> {
    /// Opens the image, which may take long.
    ///
    /// # Errors
    /// [`DpuError`].
    pub fn open(config: &'a BlkConfig) -> Result<Self, DpuError> {
        Ok(Self {
            config,
            serial: serial_bytes(&config.serial)?,
            image: Image::open(&config.image, config.writes, config.direct_io)?,
        })
    }

    /// Claims the image for us, unless one of `others` or another program uses it.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn claim<'b>(
        self,
        id: DeviceId,
        mut others: impl Iterator<Item = DiskInUse<'b>>,
    ) -> Result<Disk, ImageError> {
        let Self {
            config,
            mut image,
            serial,
        } = self;
        let ImageUse { sharing, content } = config.image_use;
        let other = others.find(|other| {
            let theirs = other.disk.image_use().sharing;
            !image.agrees_with(sharing, other.disk.image(), theirs)
        });
        if let Some(other) = other {
            return Err(ImageError::Served {
                path: config.image.clone(),
                socket: other.socket.to_owned(),
            });
        }
        image.claim(&config.image, sharing)?;
        image.check_content(&config.image, content)?;
        Ok(Disk::new(DiskParts {
            id,
            path: config.image.clone(),
            image,
            image_use: config.image_use,
            serial,
            serial_given: config.serial.clone(),
        }))
    }
}

fn serial_bytes(serial: &str) -> Result<[u8; SERIAL_BYTES], DpuError> {
    let mut bytes = [0; SERIAL_BYTES];
    bytes
        .get_mut(..serial.len())
        .ok_or_else(|| DpuError::Serial(serial.to_owned()))?
        .copy_from_slice(serial.as_bytes());
    Ok(bytes)
}
