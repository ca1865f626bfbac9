// SPDX-License-Identifier: Apache-2.0
//! Virtual address spaces: `gm_as_…`.

use crate::{
    border::{Out, call},
    driver::has_one_table,
    failure::{Failure, unsupported, wrong},
    objects::{Dev, Operations, Space},
    types::*,
};
use gmem::{
    Activation, AddressFit, AddressSpace, AllocPolicy, Caching, GmError, Guard, Mode, Region,
    RegionRequest,
};
use pagetide_addr::Va;
use std::sync::Arc;

fn policy_of_c(policy: gm_as_alloc_t) -> Result<AllocPolicy, Failure> {
    const ALL: gm_as_alloc_t = GM_AS_ALLOC_FIRST_FIT | GM_AS_ALLOC_GUARDED | GM_AS_ALLOC_CACHED;
    if policy & !ALL != 0 {
        return Err(wrong("policy", "a bit of it is unknown"));
    }
    let has = |flag| policy & flag != 0;
    Ok(AllocPolicy {
        fit: if has(GM_AS_ALLOC_FIRST_FIT) {
            AddressFit::First
        } else {
            AddressFit::Instant
        },
        guard: if has(GM_AS_ALLOC_GUARDED) {
            Guard::Guarded
        } else {
            Guard::Unguarded
        },
        cache: if has(GM_AS_ALLOC_CACHED) {
            Caching::Cached
        } else {
            Caching::Uncached
        },
    })
}

/// Creates a virtual address space of the addresses from `begin` to before `end`, both multiples of 4
/// KiB. Addresses are allocated by `policy`: a combination of GM_AS_ALLOC_ flags.
///
/// Fails with GM_RET_INVALID_ARGUMENT.
///
/// # Safety
/// `new_as` must be NULL or a place for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_as_create(
    begin: gm_va_t,
    end: gm_va_t,
    policy: gm_as_alloc_t,
    new_as: *mut *mut gm_as_t,
) -> gm_ret_t {
    call(|| {
        let out = Out::new(new_as)?;
        let space = AddressSpace::create(Va(begin), Va(end), policy_of_c(policy)?)?;
        out.put(Space::publish(space)?.to_c());
        Ok(())
    })
}

/// Destroys the virtual address space, which must have no regions and no attached devices, and its
/// mapping sets. When it returns, asynchronous operations are complete and their callbacks have
/// returned (except a callback from which it was called).
///
/// Fails with GM_RET_IN_USE.
///
/// # Safety
/// None beyond the handle's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_as_destroy(r#as: *mut gm_as_t) -> gm_ret_t {
    call(|| Space::of_c(r#as)?.end())
}

/// Attaches the device to the virtual address space, with a page table as `mode` says. The space's
/// wired mappings are entered in it; mappings that the device already has (`inherit` of gm_mmu_t)
/// become wired regions of the space. A device can be attached to many spaces and is active in at most
/// one: if `activate` is true, it becomes active in this one.
///
/// Fails with GM_RET_ALREADY_ATTACHED, GM_RET_NO_ADDRESSES (an inherited mapping overlaps a region),
/// GM_RET_INVALID_ARGUMENT (an inherited mapping is not a multiple of the page size),
/// GM_RET_UNSUPPORTED (the page size of a wired mapping; more than 64 page tables; a second space for a
/// driver with a single table: `table_create` of gm_mmu_t), GM_RET_DEVICE. The device is then not
/// attached, and active where it was.
///
/// # Safety
/// `activate` must be a bool of C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_as_attach(
    r#as: *mut gm_as_t,
    dev: *mut gm_dev_t,
    mode: gm_mmu_mode_t,
    activate: bool,
) -> gm_ret_t {
    call(|| {
        let space = Space::of_c(r#as)?;
        let device = Dev::of_c(dev)?;
        let mode = match mode {
            GM_MMU_MODE_SHARED => Mode::Shared,
            GM_MMU_MODE_COHERENT => Mode::Coherent,
            _ => return Err(wrong("mode", "there is no such mode")),
        };
        let activation = if activate {
            Activation::Now
        } else {
            Activation::Later
        };
        let _held = device.hold();
        let attached = space.space.attach(&device.device, mode, activation);
        attached.map_err(|error| why_not_attached(&device, error))
    })
}

/// What the interface says of a device by its number, in words of C.
fn why_not_attached(device: &Dev, error: GmError) -> Failure {
    match (&device.operations, error) {
        // All CPUs have one number: the attached one may be another.
        (Operations::Cpu(_), GmError::AlreadyAttached { .. }) => Failure::CpuAttached,
        (Operations::Driver(_), error) if has_one_table(&error) => unsupported(
            "a second address space for a driver that has one page table (table_create, activate and \
             deactivate of gm_mmu_t make it able to)",
        ),
        (_, error) => error.into(),
    }
}

/// Allocates a region of `size` bytes, rounded up to a multiple of 4 KiB.
///
/// It begins at `hint` if that is not 0 and the range is free; else above it if possible; else
/// anywhere. It begins at a multiple of `align` and does not cross a multiple of `no_cross`; both are
/// powers of two, or 0 for no constraint. `max_va` is the highest address that it may contain, 0 for
/// any.
///
/// Fails with GM_RET_INVALID_ARGUMENT, GM_RET_NO_ADDRESSES.
///
/// # Safety
/// `new_region` must be NULL or a place for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_as_alloc(
    r#as: *mut gm_as_t,
    hint: gm_va_t,
    size: gm_va_t,
    align: gm_va_t,
    no_cross: gm_va_t,
    max_va: gm_va_t,
    new_region: *mut *mut gm_region_t,
) -> gm_ret_t {
    call(|| {
        let out = Out::new(new_region)?;
        let space = Space::of_c(r#as)?;
        let region = space.space.alloc(&RegionRequest {
            hint: (hint != 0).then_some(Va(hint)),
            align,
            no_cross,
            max: (max_va != 0).then_some(Va(max_va)),
            ..RegionRequest::of_bytes(size)
        })?;
        out.put(publish(&space, &region)?);
        Ok(())
    })
}

/// A new region that gets no handle is given back.
fn publish(space: &Arc<Space>, region: &Region) -> Result<*mut gm_region_t, Failure> {
    match space.handle_of(region) {
        Ok(Some(handle)) => Ok(handle.to_c()),
        // Another thread has looked it up and freed it meanwhile.
        Ok(None) => Err(GmError::Destroyed.into()),
        Err(failure) => {
            region.dealloc()?;
            Err(failure)
        }
    }
}

/// Finds the allocated region of the virtual address space that contains `addr`. An inherited region
/// gets its handle by this call.
///
/// Fails with GM_RET_NOT_ALLOCATED.
///
/// # Safety
/// `out_region` must be NULL or a place for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_as_lookup(
    r#as: *mut gm_as_t,
    addr: gm_va_t,
    out_region: *mut *mut gm_region_t,
) -> gm_ret_t {
    call(|| {
        let out = Out::new(out_region)?;
        let space = Space::of_c(r#as)?;
        loop {
            let found = space.space.lookup(Va(addr))?;
            // Otherwise it was freed just now, and the next look-up shows whether there is another:
            // every turn but the last means that another thread made progress.
            if let Some(handle) = space.handle_of(&found)? {
                out.put(handle.to_c());
                return Ok(());
            }
        }
    })
}

/// Waits until all asynchronous operations that were queued before are complete and their callbacks
/// have returned. (Called from a callback, it does not wait for callbacks.)
///
/// Returns the first failure of an asynchronous operation since the last call of this function; each
/// failure is returned once. Even then all operations are complete; gm_region_state() shows which
/// regions a device could not release.
///
/// # Safety
/// None beyond the handle's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_as_synchronize(r#as: *mut gm_as_t) -> gm_ret_t {
    call(|| Ok(Space::of_c(r#as)?.space.synchronize()?))
}
