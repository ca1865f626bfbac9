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

/// Creates an empty set of mappings of the virtual address space. (Ours.)
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

/// Destroys the set. Mappings that are in it stay mapped, and are in no set then. (Ours.)
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

/// Unmaps all mappings of the set, with one invalidation a device, as gm_region_unmap() does for one.
/// Completion is told when all of them are gone.
///
/// It takes its turn behind all that was queued in the space before, without GM_ASYNC, too, and waits for
/// it: what is in the set when its turn comes is unmapped, mappings that were queued before it included,
/// and mappings of which somebody else unmaps the region at that moment are waited for. A mapping that
/// ended on its own, and whose region was mapped anew since, is not in the set and stays.
///
/// Fails with the first failure of one of them, or GM_RET_IN_USE if that failure was of somebody else's
/// unmap; all are tried, and those that failed are in the set still.
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
