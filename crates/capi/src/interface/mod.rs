// SPDX-License-Identifier: Apache-2.0
//! The functions of `gmem.h` (GMEM 4.1).
//!
//! Names, order of arguments and types are the paper's; what is ours has the
//! paper's prefix and says so. The documentation of the functions is the
//! header's, so it speaks of C. Each begins with [`crate::border::call`].

#![expect(unsafe_code, reason = "exported names, and pointers that C gives")]

pub mod cpu;
pub mod device;
pub mod library;
pub mod mapping_set;
pub mod region;
pub mod space;
