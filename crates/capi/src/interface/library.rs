// SPDX-License-Identifier: Apache-2.0
//! The library itself: sentences for codes, and its version.

use crate::{failure, types::gm_ret_t};
use std::ffi::c_char;

/// A sentence for a code; also for a number that is none. It is never freed. (Ours.)
#[unsafe(no_mangle)]
pub extern "C" fn gm_ret_string(ret: gm_ret_t) -> *const c_char {
    failure::sentence(ret).as_ptr()
}

/// A sentence about the last call of this thread that failed, with the numbers of the case; "" if none
/// did. Devices have numbers there, in the order they were created in. It is good until the thread's next
/// call that fails. (Ours.)
#[unsafe(no_mangle)]
pub extern "C" fn gm_last_error() -> *const c_char {
    failure::last()
}

/// The version of the library: major << 16 | minor << 8 | patch, as GM_VERSION is the header's. (Ours.)
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
