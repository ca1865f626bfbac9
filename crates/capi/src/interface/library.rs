// SPDX-License-Identifier: Apache-2.0
//! The library itself: sentences for codes, and its version.

use crate::{failure, types::gm_ret_t};
use std::ffi::c_char;

/// Describes a code, valid or not, in a sentence. It must not be freed. (Extension.)
#[unsafe(no_mangle)]
pub extern "C" fn gm_ret_string(ret: gm_ret_t) -> *const c_char {
    failure::sentence(ret).as_ptr()
}

/// Describes the last failed call of this thread, with its addresses and numbers; "" if none failed.
/// Devices are numbered in the order of their creation. Valid until the thread's next call that fails.
/// (Extension.)
#[unsafe(no_mangle)]
pub extern "C" fn gm_last_error() -> *const c_char {
    failure::last()
}

/// The version of the library: major << 16 | minor << 8 | patch; GM_VERSION is the version of the
/// header. (Extension.)
#[unsafe(no_mangle)]
pub extern "C" fn gm_version() -> u32 {
    crate::types::GM_VERSION
}

/// Panics, to show that no panic crosses the border.
#[cfg(feature = "provoke-panic")]
#[unsafe(no_mangle)]
pub extern "C" fn gm_provoke_panic() -> gm_ret_t {
    crate::border::call(|| panic!("on purpose"))
}
