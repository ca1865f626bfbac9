// SPDX-License-Identifier: Apache-2.0
//! The block device (virtio 1.2, 5.2): its image, its configuration space, its requests.

pub mod claim;
pub mod config;
pub(crate) mod disk;
pub mod format;
pub mod image;
pub(crate) mod on_engine;
pub(crate) mod open;
pub(crate) mod request;
