// SPDX-License-Identifier: Apache-2.0
//! Mapping sets: `gm_mapping_set_…`.

use crate::{
    border::{Out, call},
    callback::Wait,
    handle::Handle,
    objects::{Set, Space},
    types::*,
};
use std::ffi::{c_int, c_void};

/// Creates an empty set of mappings of the virtual address space. (Extension.)
///
/// # Safety
/// `new_set` must be NULL or a place for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_mapping_set_create(
    r#as: *mut gm_as_t,
    new_set: *mut *mut gm_mapping_set_t,
) -> gm_ret_t {
    call(|| {
        let out = Out::new(new_set)?;
        out.put(Space::of_c(r#as)?.new_set()?.to_c());
        Ok(())
    })
}

/// Destroys the set. Its mappings stay mapped, and are then in no set. (Extension.)
///
/// # Safety
/// None beyond the handle's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_mapping_set_destroy(set: *mut gm_mapping_set_t) -> gm_ret_t {
    call(|| {
        let known = Set::of_c(set)?;
        known.space.drop_set(Handle::of_c(set));
        Ok(())
    })
}

/// Unmaps all mappings of the set, with one invalidation per device, as gm_region_unmap() does for one.
/// Completion is signalled when all of them are unmapped.
///
/// The operation is queued behind all operations queued in the space before it, even without GM_ASYNC,
/// and waits for them. It unmaps what is in the set when it runs, including mappings that were queued
/// before it, and waits for mappings whose region another caller is unmapping at that moment. A mapping
/// that was unmapped individually, and whose region was mapped again since, is not in the set and
/// stays.
///
/// Returns the first failure, or GM_RET_IN_USE if that was a failure of another caller's unmap; all are
/// attempted, and those that failed remain in the set.
///
/// # Safety
/// As gm_region_unmap().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_mapping_set_unmap(
    set: *mut gm_mapping_set_t,
    flags: c_int,
    async_callback: Option<unsafe extern "C" fn(arg: *mut c_void)>,
    callback_arg: *mut c_void,
) -> gm_ret_t {
    call(|| {
        let known = Set::of_c(set)?;
        match Wait::of_c(flags, 0, async_callback, callback_arg)? {
            Wait::UntilDone => known.set.unmap()?,
            Wait::NotAtAll(callback) => known.space.queue(|| known.set.unmap_later(callback))?,
        }
        Ok(())
    })
}
