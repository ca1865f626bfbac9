// SPDX-License-Identifier: Apache-2.0
//! The host's CPUs: `gm_mmu_CPU`, `gm_dev_CPU`, `gm_cpu_…`.
//!
//! The header has the paper's two names as macros over functions, because a variable that crosses a
//! shared library's border has two addresses.

use crate::{
    border::call,
    cpu::{Cpu, Stopped},
    failure::{Failure, unsupported, wrong},
    handle::Handle,
    objects::{DEVICES, Dev, Operations},
    types::*,
};
use gmem::{Device, GmError, MmuError, OnAbsent};
use pagetide_addr::{Access, DeviceId, PAGE_BYTES, Pa, Va};
use std::{
    ffi::c_void,
    sync::{Arc, OnceLock},
};

/// Format in `gm_mmu_CPU`, which no driver may use. It tells nothing: see [`is_cpu`].
pub(crate) const FORMAT_CPU: u32 = u32::MAX;

/// Faults that one page is asked for by one call at most, if others take it away every time.
const FAULTS_MAX: u32 = 10_000;

static MMU_CPU: gm_mmu_t = gm_mmu_t {
    struct_size: size_of::<gm_mmu_t>(),
    page_sizes: !(PAGE_BYTES - 1),
    format: FORMAT_CPU,
    reserved: 0,
    table_create: None,
    table_destroy: None,
    activate: None,
    deactivate: None,
    map: None,
    unmap: None,
    protect: None,
    invalidate: None,
    prepare: None,
    copy: None,
    inherit: None,
};

static DEV_CPU: OnceLock<Handle<Dev>> = OnceLock::new();

/// True if this is `gm_mmu_CPU`, as its address says: nothing that a driver can write into a struct of
/// its own makes what it gives as `mmu_data` be read as a `gm_cpu_space_t`.
pub(crate) fn is_cpu(mmu: *const gm_mmu_t) -> bool {
    std::ptr::eq(mmu, &raw const MMU_CPU)
}

/// True if this is `gm_dev_CPU`.
pub(crate) fn is_predefined(dev: *const gm_dev_t) -> bool {
    DEV_CPU
        .get()
        .is_some_and(|known| *known == Handle::of_c(dev))
}

pub(crate) fn refuse_predefined() -> Failure {
    unsupported("destroying gm_dev_CPU, which is predefined: detach it instead")
}

/// The MMU of the host's CPUs: see gm_mmu_CPU.
#[unsafe(no_mangle)]
pub extern "C" fn gm_mmu_cpu() -> *const gm_mmu_t {
    &raw const MMU_CPU
}

/// The predefined device of the host's CPUs: see gm_dev_CPU.
#[unsafe(no_mangle)]
pub extern "C" fn gm_dev_cpu() -> *mut gm_dev_t {
    let mut made = std::ptr::null_mut();
    let outcome = call(|| {
        made = predefined()?.to_c();
        Ok(())
    });
    // NULL is no handle: a call that uses it gets an error.
    if outcome == GM_RET_OK {
        made
    } else {
        std::ptr::null_mut()
    }
}

fn predefined() -> Result<Handle<Dev>, Failure> {
    if let Some(known) = DEV_CPU.get() {
        return Ok(*known);
    }
    let cpu = Arc::new(Cpu::new(&[], OnAbsent::Recovers)?);
    let device = Device::with_id(DeviceId::VCPUS, Arc::clone(&cpu) as _);
    let made = Dev::publish(device, Operations::Cpu(cpu))?;
    let kept = *DEV_CPU.get_or_init(|| made);
    if kept != made {
        DEVICES.remove(made);
    }
    Ok(kept)
}

fn cpu_of(device: &Dev) -> Result<&Arc<Cpu>, Failure> {
    match &device.operations {
        Operations::Cpu(cpu) => Ok(cpu),
        Operations::Driver(_) => Err(unsupported("a device that is not the CPU")),
    }
}

/// Makes the physical addresses from `pa` to before `pa + size` accessible to this CPU as the bytes
/// from `memory` on. A CPU can access no other memory, so windows onto device memory must be added,
/// too. The memory must stay valid until gm_cpu_remove_window(). (Extension.)
///
/// Fails with GM_RET_INVALID_ARGUMENT (also if the range overlaps another window), GM_RET_UNSUPPORTED
/// (the device is not a CPU).
///
/// # Safety
/// `memory` must have `size` bytes that may be read and written by any thread until the window is removed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_cpu_add_window(
    cpu: *mut gm_dev_t,
    pa: gm_pa_t,
    size: gm_va_t,
    memory: *mut c_void,
) -> gm_ret_t {
    call(|| cpu_of(Dev::of_c(cpu)?.as_ref())?.add_window(Pa(pa), size, memory.cast()))
}

/// Removes the window that begins at `pa`. After GM_RET_OK its memory is no longer accessed.
/// (Extension.)
///
/// Fails with GM_RET_INVALID_ARGUMENT, GM_RET_UNSUPPORTED (the device is not a CPU).
///
/// # Safety
/// None beyond the handle's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_cpu_remove_window(cpu: *mut gm_dev_t, pa: gm_pa_t) -> gm_ret_t {
    call(|| cpu_of(Dev::of_c(cpu)?.as_ref())?.remove_window(Pa(pa)))
}

/// Reads `size` bytes at `va`, in the space in which the CPU is active, to `buffer`; faults are served
/// on the way. The part within one page is atomic with respect to writes by this CPU; an access to
/// several pages is not. (Extension.)
///
/// Fails as gm_dev_fault(), and with GM_RET_DEVICE if a page is in no window; the pages before it have
/// been copied then.
///
/// # Safety
/// `buffer` must have room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_cpu_read(
    cpu: *mut gm_dev_t,
    va: gm_va_t,
    buffer: *mut c_void,
    size: usize,
) -> gm_ret_t {
    let buffer: *mut u8 = buffer.cast();
    call(|| {
        go_through(cpu, va, buffer, size, Access::Read, |mmu, part| {
            // SAFETY: the part lies within the buffer, for which the caller is responsible.
            unsafe { mmu.copy_out(part.va, buffer.wrapping_add(part.offset), part.bytes) }
        })
    })
}

/// Writes `size` bytes from `buffer` to `va`, in the space in which the CPU is active. (Extension.)
///
/// Fails as gm_cpu_read().
///
/// # Safety
/// `buffer` must have `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gm_cpu_write(
    cpu: *mut gm_dev_t,
    va: gm_va_t,
    buffer: *const c_void,
    size: usize,
) -> gm_ret_t {
    let buffer: *const u8 = buffer.cast();
    call(|| {
        go_through(cpu, va, buffer, size, Access::Write, |mmu, part| {
            // SAFETY: the part lies within the buffer, for which the caller is responsible.
            unsafe { mmu.copy_in(part.va, buffer.wrapping_add(part.offset), part.bytes) }
        })
    })
}

/// What of an access lies in one page.
struct Part {
    va: Va,
    offset: usize,
    bytes: u64,
}

/// Makes an access page by page, and faults where it stops.
fn go_through(
    cpu: *const gm_dev_t,
    va: gm_va_t,
    buffer: *const u8,
    size: usize,
    access: Access,
    copy: impl Fn(&Cpu, &Part) -> Result<(), Stopped>,
) -> Result<(), Failure> {
    let dev = Dev::of_c(cpu)?;
    let mmu = cpu_of(&dev)?;
    if buffer.is_null() && size > 0 {
        return Err(wrong("buffer", "it must not be NULL"));
    }
    let size = size as u64;
    if va.checked_add(size).is_none() {
        return Err(wrong("size", "the range passes the end of all addresses"));
    }
    let mut offset = 0;
    while offset < size {
        let at = va + offset;
        let part = Part {
            va: Va(at),
            // Below `size`, which was a usize.
            offset: usize::try_from(offset).unwrap_or(usize::MAX),
            bytes: (PAGE_BYTES - at % PAGE_BYTES).min(size - offset),
        };
        with_faults(&dev.device, access, || copy(mmu, &part))?;
        offset += part.bytes;
    }
    Ok(())
}

fn with_faults(
    device: &Arc<Device>,
    access: Access,
    copy: impl Fn() -> Result<(), Stopped>,
) -> Result<(), Failure> {
    for _ in 0..FAULTS_MAX {
        match copy() {
            Ok(()) => return Ok(()),
            Err(Stopped::Fault(va)) => device.fault(va, access)?,
            Err(Stopped::NoWindow(_)) => {
                let source = MmuError::Driver {
                    operation: "look for a window that shows the page",
                    code: crate::cpu::NO_WINDOW,
                };
                return Err(Failure::Gmem(GmError::Device {
                    device: device.id(),
                    source: Arc::new(source),
                }));
            }
        }
    }
    let device = device.id();
    Err(Failure::Gmem(GmError::Busy { device }))
}
