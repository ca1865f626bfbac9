// SPDX-License-Identifier: Apache-2.0
//! Devices: `gm_dev_…`.

use crate::{
    border::{Out, array, call},
    cpu::Cpu,
    driver::{Driver, INHERITED_MAX, access_of_c, on_absent, operations},
    failure::{Failure, wrong},
    handle::Handle,
    interface::cpu::{FORMAT_CPU, is_cpu, is_predefined, refuse_predefined},
    objects::{DEVICES, Dev, Operations, Space},
    types::*,
};
use gmem::Device;
use pagetide_addr::{DeviceId, Pa, Va};
use std::{ffi::c_void, sync::Arc};

/// Creates a device with the operations of `mmu`, which are passed `mmu_data`, and the capabilities
/// `cap`: a combination of GM_DEV_CAP_ flags. Virtual functions are devices of their own.
///
/// `mmu` is copied. `mmu_data` must stay valid until gm_dev_destroy() has returned GM_RET_OK. With
/// gm_mmu_CPU it is NULL or a gm_cpu_space_t, which is copied. gm_mmu_CPU is recognized by its address:
/// copies of it are refused, and so is its format (0xffffffff) in any other gm_mmu_t.
///
/// Fails with GM_RET_INVALID_ARGUMENT, GM_RET_UNSUPPORTED (operations of a later version).
///
/// # Safety
/// `mmu` must be NULL or a gm_mmu_t as its description says, `new_dev` NULL or a place for a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_dev_create(
    mmu: *const gm_mmu_t,
    mmu_data: *mut c_void,
    cap: gm_dev_cap_t,
    new_dev: *mut *mut gm_dev_t,
) -> gm_ret_t {
    call(|| {
        let out = Out::new(new_dev)?;
        let on_absent = on_absent(cap)?;
        let handle = if is_cpu(mmu) {
            // SAFETY: with this MMU the argument is such a space, as the header demands.
            let mappings = unsafe { mappings_of(mmu_data.cast()) }?;
            let cpu = Arc::new(Cpu::new(mappings, on_absent)?);
            let device = Device::with_id(DeviceId::VCPUS, Arc::clone(&cpu) as _);
            Dev::publish(device, Operations::Cpu(cpu))?
        } else {
            // SAFETY: the header demands this of the caller.
            let mmu = unsafe { operations(mmu)? };
            if mmu.format == FORMAT_CPU {
                return Err(wrong(
                    "format",
                    "0xffffffff is that of gm_mmu_CPU, which is given itself and not as a copy",
                ));
            }
            let driver = Arc::new(Driver::new(mmu, mmu_data, on_absent)?);
            let device = Device::create(Arc::clone(&driver) as _);
            Dev::publish(device, Operations::Driver(driver))?
        };
        out.put(handle.to_c());
        Ok(())
    })
}

/// The mappings of a space of the host.
///
/// # Safety
/// `space` must be NULL, or a space whose mappings are there.
unsafe fn mappings_of<'a>(space: *const gm_cpu_space_t) -> Result<&'a [gm_mapping_t], Failure> {
    if !space.is_aligned() {
        return Err(wrong("mmu_data", "it must be a gm_cpu_space_t"));
    }
    // SAFETY: aligned; the caller guarantees that it is such a space, or NULL.
    match unsafe { space.as_ref() } {
        None => Ok(&[]),
        Some(space) if space.count > INHERITED_MAX => {
            Err(wrong("count", "a CPU has 2^20 mappings at most"))
        }
        // SAFETY: the caller guarantees that this many mappings are there.
        Some(space) => unsafe { array("mappings", space.mappings, space.count) },
    }
}

/// Destroys the device. It must not be attached, its memory must hold no pages, and no other device may
/// share a page table that it created. Its operations are not called afterwards.
///
/// Fails with GM_RET_IN_USE, GM_RET_UNSUPPORTED (gm_dev_CPU).
///
/// # Safety
/// None beyond the handle's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_dev_destroy(dev: *mut gm_dev_t) -> gm_ret_t {
    call(|| {
        let device = Dev::of_c(dev)?;
        if is_predefined(dev) {
            return Err(refuse_predefined());
        }
        device.destroy()?;
        DEVICES.remove(Handle::of_c(dev));
        Ok(())
    })
}

/// Makes the device active in the virtual address space, to which it must be attached, instead of the
/// one in which it was active.
///
/// Fails with GM_RET_NOT_ATTACHED; GM_RET_DEVICE, after which it is active nowhere or where it was.
///
/// # Safety
/// None beyond the handles'.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_dev_switch(dev: *mut gm_dev_t, r#as: *mut gm_as_t) -> gm_ret_t {
    call(|| {
        let device = Dev::of_c(dev)?;
        let space = Space::of_c(r#as)?;
        device.device.switch(&space.space)?;
        Ok(())
    })
}

/// Detaches the device from the virtual address space. Its page table is destroyed unless others share
/// it. Pages in its memory stay there.
///
/// Fails with GM_RET_NOT_ATTACHED; GM_RET_DEVICE if the device could not release its mappings: it then
/// remains attached.
///
/// # Safety
/// None beyond the handles'.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_dev_detach(dev: *mut gm_dev_t, r#as: *mut gm_as_t) -> gm_ret_t {
    call(|| {
        let device = Dev::of_c(dev)?;
        let space = Space::of_c(r#as)?;
        device.device.detach(&space.space)?;
        Ok(())
    })
}

/// Serves an address translation fault of the device at `addr` for the access `access`: GM_PROT_READ or
/// GM_PROT_WRITE. After GM_RET_OK the device should retry the access. The mapping may be gone again by
/// then, as others may have faulted. Before it retries, the device must drop its TLB entry of the page:
/// a translation that only allows more than before comes without `invalidate`.
///
/// Fails with GM_RET_NOT_ACTIVE, GM_RET_CANNOT_RECOVER, GM_RET_NOT_ALLOCATED, GM_RET_DENIED,
/// GM_RET_NOT_MAPPED (the region is being unmapped, or must be unmapped again after a failure),
/// GM_RET_NO_MEMORY, GM_RET_BUSY, GM_RET_DEVICE.
///
/// # Safety
/// None beyond the handle's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_dev_fault(
    dev: *mut gm_dev_t,
    addr: gm_va_t,
    access: gm_prot_t,
) -> gm_ret_t {
    call(|| {
        let device = Dev::of_c(dev)?;
        let access = access_of_c(access)
            .ok_or_else(|| wrong("access", "it must be GM_PROT_READ or GM_PROT_WRITE"))?;
        device.device.fault(Va(addr), access)?;
        Ok(())
    })
}

/// Registers memory of the device, from `begin` to before `end`, in whole frames of 4 KiB: pages on
/// which it faults are placed there (gm_region_set_policy). Memory registered with the CPU is host
/// memory, where pages of devices without memory are placed; it must be in a window
/// (gm_cpu_add_window). gm_dev_unregister_physmem() and gm_dev_destroy() release it.
///
/// Fails with GM_RET_INVALID_ARGUMENT (also if part of it is already registered), GM_RET_UNSUPPORTED
/// (the driver has no `prepare` or no `copy`).
///
/// # Safety
/// None beyond the handle's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_dev_register_physmem(
    dev: *mut gm_dev_t,
    begin: gm_pa_t,
    end: gm_pa_t,
) -> gm_ret_t {
    call(|| {
        let device = Dev::of_c(dev)?;
        let memory = device.memory()?;
        device.device.register_physmem(Pa(begin), Pa(end), memory)?;
        Ok(())
    })
}

/// Releases memory that was registered with the device, by the same range; it must hold no pages.
/// (Extension.)
///
/// Fails with GM_RET_INVALID_ARGUMENT if this range was not registered, GM_RET_IN_USE.
///
/// # Safety
/// None beyond the handle's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_dev_unregister_physmem(
    dev: *mut gm_dev_t,
    begin: gm_pa_t,
    end: gm_pa_t,
) -> gm_ret_t {
    call(|| {
        let device = Dev::of_c(dev)?;
        device.device.unregister_physmem(Pa(begin), Pa(end))?;
        Ok(())
    })
}

/// Returns how many bytes of the device's registered memory hold pages. (Extension.)
///
/// # Safety
/// `bytes` must be NULL or a place for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_dev_used_physmem(dev: *const gm_dev_t, bytes: *mut u64) -> gm_ret_t {
    call(|| {
        let out = Out::new(bytes)?;
        out.put(Dev::of_c(dev)?.device.used_memory_bytes());
        Ok(())
    })
}
