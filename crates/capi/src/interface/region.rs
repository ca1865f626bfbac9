// SPDX-License-Identifier: Apache-2.0
//! Regions: `gm_region_…`.

use crate::{
    border::{Out, array, call},
    callback::Wait,
    driver::access_of_c,
    failure::{Failure, unsupported, wrong},
    objects::{Area, Dev, Set},
    types::*,
};
use gmem::{MapOptions, Mapped, Placement, Protection};
use pagetide_addr::{PAGE_BYTES, Pa};
use std::ffi::{c_int, c_void};

/// Where the page size stands in the flags: GM_MAP_PAGE_SIZE of the header.
const PAGE_SIZE_SHIFT: u32 = 8;
const PAGE_SIZE_BITS: c_int = 0x3f << PAGE_SIZE_SHIFT;

fn page_bytes_of_c(flags: c_int) -> u64 {
    match (flags & PAGE_SIZE_BITS) >> PAGE_SIZE_SHIFT {
        0 => PAGE_BYTES,
        log2 => 1 << log2,
    }
}

/// Frames given by C, one a page.
///
/// # Safety
/// `pages` must be NULL or have `count` numbers behind it.
unsafe fn frames_of_c(pages: *const gm_pa_t, count: u64) -> Result<Vec<Pa>, Failure> {
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    // SAFETY: guaranteed by the caller.
    let pages = unsafe { array("pages", pages, count)? };
    Ok(pages.iter().copied().map(Pa).collect())
}

/// Creates a wired mapping from the region to physical pages, in the page tables of all devices of the
/// space, including those attached later, with the access `prot`.
///
/// `pages` has one address for each page of the region, of the page size in `flags`: 4 KiB, or
/// GM_MAP_PAGE_SIZE(log2 of it). It is copied. (In the paper these are pointers to `struct vm_page`,
/// which users of this library do not have.) If `set` is not NULL, the mapping is added to it. With
/// GM_ASYNC in `flags` the call returns at once: see gm_region_unmap().
///
/// Fails with GM_RET_ALREADY_MAPPED, GM_RET_INVALID_ARGUMENT, GM_RET_UNSUPPORTED (a device cannot map
/// pages of that size), GM_RET_DENIED (see gm_region_protect), GM_RET_DEVICE. If a device failed to
/// roll back a partial mapping, the region must be unmapped before it is used again.
///
/// # Safety
/// `pages` must be NULL or as long as said; the callback as gm_region_unmap() says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_region_map(
    region: *mut gm_region_t,
    prot: gm_prot_t,
    pages: *const gm_pa_t,
    set: *mut gm_mapping_set_t,
    flags: c_int,
    async_callback: Option<unsafe extern "C" fn(arg: *mut c_void)>,
    callback_arg: *mut c_void,
) -> gm_ret_t {
    call(|| {
        let area = Area::of_c(region)?;
        let set = if set.is_null() {
            None
        } else {
            Some(Set::of_c(set)?)
        };
        let wait = Wait::of_c(flags, PAGE_SIZE_BITS, async_callback, callback_arg)?;
        let page_bytes = page_bytes_of_c(flags);
        if page_bytes < PAGE_BYTES {
            return Err(wrong("flags", "pages have 4 KiB at least"));
        }
        let access = access_of_c(prot)
            .ok_or_else(|| wrong("prot", "it must allow something, and nothing unknown"))?;
        let options = MapOptions {
            access,
            page_bytes,
            set: set.map(|set| set.set.clone()),
        };
        let count = area.region.len_bytes() / page_bytes;
        // SAFETY: the header demands one for each page of the region.
        let frames = unsafe { frames_of_c(pages, count)? };
        match wait {
            Wait::UntilDone => area.region.map(&frames, &options)?,
            Wait::NotAtAll(callback) => area
                .space
                .queue(|| area.region.map_later(frames, options, callback))?,
        }
        Ok(())
    })
}

/// Unmaps the region, whether wired or mapped by faults. It stays allocated; pages allocated by faults
/// are freed. After GM_RET_OK no device can access it.
///
/// With GM_ASYNC in `flags` the call returns at once. Operations run in the order of the calls, many
/// unmaps with one invalidation per device. `async_callback`, if not NULL, is called with
/// `callback_arg` when the operation is complete, which for an unmap is after the invalidation and
/// never before; any thread may call it, and it may call functions of this header. It has no parameter
/// for a result, so it is called only after success: gm_as_synchronize() returns a failure,
/// gm_region_state() shows which region failed, and that region is then as after a failure without
/// GM_ASYNC. Other calls that change the region wait for operations queued before them.
///
/// Callbacks run on the space's own thread, or on any thread that waits for operations: a call of
/// gm_region_map(), gm_region_unmap(), gm_region_dealloc(), gm_region_protect(),
/// gm_mapping_set_unmap(), gm_as_synchronize(), gm_as_attach(), gm_as_destroy(), gm_dev_detach(),
/// gm_dev_fault(), gm_cpu_read() or gm_cpu_write() may run callbacks of other operations before it
/// returns. So do not call them with a lock held that a callback takes.
///
/// Fails with GM_RET_NOT_MAPPED; GM_RET_BUSY or GM_RET_DEVICE, after which a device may still have
/// access: nothing was freed, and the only operation that the region then allows is to be unmapped
/// again.
///
/// # Safety
/// Function and argument must be good until the operation is complete.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_region_unmap(
    region: *mut gm_region_t,
    flags: c_int,
    async_callback: Option<unsafe extern "C" fn(arg: *mut c_void)>,
    callback_arg: *mut c_void,
) -> gm_ret_t {
    call(|| {
        let area = Area::of_c(region)?;
        match Wait::of_c(flags, 0, async_callback, callback_arg)? {
            Wait::UntilDone => area.region.unmap()?,
            Wait::NotAtAll(callback) => area.space.queue(|| area.region.unmap_later(callback))?,
        }
        Ok(())
    })
}

/// Frees the region, after unmapping it if necessary. Its addresses may be allocated again, and its
/// handle is destroyed.
///
/// Fails with GM_RET_BUSY or GM_RET_DEVICE, as gm_region_unmap(): the region is still allocated.
///
/// # Safety
/// None beyond the handle's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_region_dealloc(region: *mut gm_region_t) -> gm_ret_t {
    call(|| {
        let area = Area::of_c(region)?;
        area.region.dealloc()?;
        area.space.forget(&area.region);
        Ok(())
    })
}

/// Sets the placement policy of the region's pages. `dev` is the device in whose memory a page is
/// placed when it faults; NULL: the faulting device, or the host if that has no memory. The default is
/// NULL and GM_REGION_UNIQUE.
///
/// Fails with GM_RET_NOT_ATTACHED if `dev` is not attached to the region's space.
///
/// # Safety
/// None beyond the handles'.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_region_set_policy(
    region: *mut gm_region_t,
    dev: *mut gm_dev_t,
    policy: gm_region_placement_t,
) -> gm_ret_t {
    call(|| {
        let area = Area::of_c(region)?;
        let device = if dev.is_null() {
            None
        } else {
            Some(Dev::of_c(dev)?)
        };
        let placement = match policy {
            GM_REGION_UNIQUE => Placement::Unique,
            GM_REGION_REMOTE_ACCESS => Placement::RemoteAccess,
            GM_REGION_PREFETCH => Placement::Prefetch,
            _ => return Err(wrong("policy", "there is no such policy")),
        };
        if placement == Placement::Prefetch {
            // The thread for asynchronous operations prefetches.
            area.space.serve_operations()?;
        }
        let home = device.as_ref().map(|device| &device.device);
        area.region.set_policy(placement, home)?;
        Ok(())
    })
}

/// Sets the access that the region allows, as mprotect() does for a process; with GM_PROT_NONE every
/// fault is denied. After GM_RET_OK no device has more access than that. A new region allows
/// everything. (Extension.)
///
/// Fails with GM_RET_INVALID_ARGUMENT; GM_RET_BUSY or GM_RET_DEVICE, after which a device may still
/// have its former access: call it again.
///
/// # Safety
/// None beyond the handle's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_region_protect(region: *mut gm_region_t, prot: gm_prot_t) -> gm_ret_t {
    call(|| {
        let area = Area::of_c(region)?;
        let protection = match (prot, access_of_c(prot)) {
            (GM_PROT_NONE, _) => Protection::Nothing,
            (_, Some(pagetide_addr::Access::Read)) => Protection::ReadOnly,
            (_, Some(pagetide_addr::Access::Write)) => Protection::ReadWrite,
            (_, None) => return Err(wrong("prot", "a bit of it is unknown")),
        };
        area.region.protect(protection)?;
        Ok(())
    })
}

/// Returns the first address of the region. (Extension.)
///
/// # Safety
/// `begin` must be NULL or a place for an address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_region_begin(
    region: *const gm_region_t,
    begin: *mut gm_va_t,
) -> gm_ret_t {
    call(|| {
        let out = Out::new(begin)?;
        out.put(Area::of_c(region)?.region.start().0);
        Ok(())
    })
}

/// Returns the first address after the region. (Extension.)
///
/// # Safety
/// `end` must be NULL or a place for an address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_region_end(region: *const gm_region_t, end: *mut gm_va_t) -> gm_ret_t {
    call(|| {
        let out = Out::new(end)?;
        let area = Area::of_c(region)?;
        let end = area.region.start().checked_add(area.region.len_bytes());
        let end = end.ok_or_else(|| unsupported("the last page of all addresses"))?;
        out.put(end.0);
        Ok(())
    })
}

/// Returns the size of the region in bytes. (Extension.)
///
/// # Safety
/// `size` must be NULL or a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_region_size(
    region: *const gm_region_t,
    size: *mut gm_va_t,
) -> gm_ret_t {
    call(|| {
        let out = Out::new(size)?;
        out.put(Area::of_c(region)?.region.len_bytes());
        Ok(())
    })
}

/// Returns what backs the region now; it does not wait for queued operations. After gm_as_synchronize()
/// has returned a failure, a region whose mapping failed is GM_REGION_NOTHING, and one that a device
/// could not release is GM_REGION_LEAVING. (Extension.)
///
/// # Safety
/// `state` must be NULL or a place for a state.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_region_state(
    region: *const gm_region_t,
    state: *mut gm_region_state_t,
) -> gm_ret_t {
    call(|| {
        let out = Out::new(state)?;
        out.put(match Area::of_c(region)?.region.mapped() {
            Mapped::Nothing => GM_REGION_NOTHING,
            Mapped::Wired => GM_REGION_WIRED,
            Mapped::Demand => GM_REGION_DEMAND,
            Mapped::Paged => GM_REGION_PAGED,
            Mapped::Leaving => GM_REGION_LEAVING,
        });
        Ok(())
    })
}

/// Returns the virtual address space of the region. (Extension.)
///
/// # Safety
/// `out_as` must be NULL or a place for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_region_as(
    region: *const gm_region_t,
    out_as: *mut *mut gm_as_t,
) -> gm_ret_t {
    call(|| {
        let out = Out::new(out_as)?;
        out.put(Area::of_c(region)?.space.handle().to_c());
        Ok(())
    })
}
