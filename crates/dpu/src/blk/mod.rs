// SPDX-License-Identifier: Apache-2.0
//! The block device (virtio 1.2, 5.2): its image, its configuration space, its requests.

pub mod claim;
pub mod config;
pub mod format;
pub mod image;
pub(crate) mod request;
