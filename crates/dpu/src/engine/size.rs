// SPDX-License-Identifier: Apache-2.0
//! Whether the image still reaches as far as a write goes; [`crate::blk::image`] explains why.

use super::{
    Device, Io,
    chain::{Kind, Request},
};
use crate::ring::{Job, Operation};

/// Size of an image as last seen by an engine.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ImageSize {
    /// [`Io::now_ns`] of that check: one check serves everything that is taken together.
    seen_ns: u64,
    bytes: u64,
}

impl Io {
    /// True if the image has its first `end` bytes.
    pub fn reaches(&self, device: &mut Device, end: u64) -> bool {
        if device.image_size.seen_ns != self.now_ns {
            device.image_size = ImageSize {
                seen_ns: self.now_ns,
                bytes: device.shared.look_at_size(),
            };
        }
        end <= device.image_size.bytes
    }

    /// True if the rest of a job ends within the image.
    pub fn rest_is_within(&self, device: &mut Device, job: &Job<Request>) -> bool {
        let step = &job.request.step;
        let end = match (job.request.kind, step.operation) {
            (Kind::Write, _) => step.offset + job.dma.left(),
            (Kind::Empty { .. }, Operation::Allocate { bytes, .. }) => step.offset + bytes,
            _ => return true,
        };
        self.reaches(device, end)
    }
}
