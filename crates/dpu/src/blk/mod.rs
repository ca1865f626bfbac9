// SPDX-License-Identifier: Apache-2.0
//! The block device (virtio 1.2, 5.2): its image, its configuration space, its requests.

pub mod config;
pub mod image;
pub(crate) mod request;
