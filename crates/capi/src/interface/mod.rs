// SPDX-License-Identifier: Apache-2.0
//! The functions of `gmem.h` (GMEM 4.1).
//!
//! Names, order of arguments and types are the paper's; our additions have the paper's prefix and
//! are marked as extensions. The documentation of the functions becomes the header's, so it is written
//! for C. Each function begins with [`crate::border::call`].

#![expect(unsafe_code, reason = "exported names, and pointers that C gives")]

pub mod cpu;
pub mod device;
pub mod library;
pub mod mapping_set;
pub mod region;
pub mod space;
