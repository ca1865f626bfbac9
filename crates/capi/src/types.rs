// SPDX-License-Identifier: Apache-2.0
//! The types of `gmem.h` (GMEM 4.1, Table 2), as C sees them.
//!
//! The header's generator knows four kinds of items here: an alias of a number with constants of it
//! (flags), a transparent struct of a number with constants of it (an enumeration), a struct
//! without fields (a handle), and a struct with fields. Their documentation becomes the header's.

#![expect(
    non_camel_case_types,
    reason = "the names are those of the paper, as C writes them"
)]

use std::ffi::{c_int, c_void};

/// Version of this header: major << 16 | minor << 8 | patch.
pub const GM_VERSION: u32 = 0x00_01_00;

/// A virtual address of an address space, or a number of bytes of such.
pub type gm_va_t = u64;

/// A physical address: of the host's memory, or of a device's own.
pub type gm_pa_t = u64;

/// A virtual address space: its allocated regions, its attached devices, and its mappings.
///
/// A handle. A handle is not an address and is never dereferenced: a handle that was never issued
/// returns GM_RET_INVALID_HANDLE, one whose object was destroyed returns GM_RET_DESTROYED. This holds
/// for all four kinds of handles. They may be compared, copied, and used by any thread at any time.
#[repr(C)]
pub struct gm_as_t {
    _opaque: [u8; 0],
}

/// A device: a user of address spaces, with the operations of its MMU. A handle.
#[repr(C)]
pub struct gm_dev_t {
    _opaque: [u8; 0],
}

/// An allocated range of virtual addresses of one address space. A handle.
///
/// A region has one handle for its whole life: two handles are equal if they refer to the same region.
#[repr(C)]
pub struct gm_region_t {
    _opaque: [u8; 0],
}

/// A set of mappings of one address space that are unmapped together. A handle.
#[repr(C)]
pub struct gm_mapping_set_t {
    _opaque: [u8; 0],
}

/// The result of a call. Unless stated otherwise, a call that fails has changed nothing.
/// gm_ret_string() describes each code; gm_last_error() describes the last failure, with its addresses
/// and numbers.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct gm_ret_t(pub u32);

/// Success.
pub const GM_RET_OK: gm_ret_t = gm_ret_t(0);
/// The handle was never issued, is NULL, or is of another kind.
pub const GM_RET_INVALID_HANDLE: gm_ret_t = gm_ret_t(1);
/// The space, device, region or mapping set was destroyed.
pub const GM_RET_DESTROYED: gm_ret_t = gm_ret_t(2);
/// An argument is invalid: NULL where a value is required, an unknown flag, a range that is empty or
/// not a multiple of the page size.
pub const GM_RET_INVALID_ARGUMENT: gm_ret_t = gm_ret_t(3);
/// No free range of addresses satisfies the request.
pub const GM_RET_NO_ADDRESSES: gm_ret_t = gm_ret_t(4);
/// No physical memory is free, or none is registered.
pub const GM_RET_NO_MEMORY: gm_ret_t = gm_ret_t(5);
/// The address is not in an allocated region.
pub const GM_RET_NOT_ALLOCATED: gm_ret_t = gm_ret_t(6);
/// The device is already attached to the space (for a CPU: another CPU is attached).
pub const GM_RET_ALREADY_ATTACHED: gm_ret_t = gm_ret_t(7);
/// The device is not attached to the space.
pub const GM_RET_NOT_ATTACHED: gm_ret_t = gm_ret_t(8);
/// The device is not active in any space.
pub const GM_RET_NOT_ACTIVE: gm_ret_t = gm_ret_t(9);
/// The object is still in use.
pub const GM_RET_IN_USE: gm_ret_t = gm_ret_t(10);
/// The region is already mapped.
pub const GM_RET_ALREADY_MAPPED: gm_ret_t = gm_ret_t(11);
/// The region is not mapped.
pub const GM_RET_NOT_MAPPED: gm_ret_t = gm_ret_t(12);
/// The region, or its mapping, does not allow the access.
pub const GM_RET_DENIED: gm_ret_t = gm_ret_t(13);
/// The device cannot recover from a fault: it needs wired mappings (gm_region_map).
pub const GM_RET_CANNOT_RECOVER: gm_ret_t = gm_ret_t(14);
/// This space, device, region or library version does not support the operation.
pub const GM_RET_UNSUPPORTED: gm_ret_t = gm_ret_t(15);
/// A driver kept returning GM_MMU_BUSY: try again.
pub const GM_RET_BUSY: gm_ret_t = gm_ret_t(16);
/// An operation of a driver failed; gm_last_error() has the driver's code.
pub const GM_RET_DEVICE: gm_ret_t = gm_ret_t(17);
/// The function was called from within an operation of a driver, where it would deadlock.
pub const GM_RET_IN_DRIVER: gm_ret_t = gm_ret_t(18);
/// A bug in this library. The operation may be incomplete.
pub const GM_RET_INTERNAL: gm_ret_t = gm_ret_t(19);

/// Types of access to a virtual address; the flags may be combined. GM_PROT_WRITE includes
/// GM_PROT_READ.
pub type gm_prot_t = u32;

/// No access.
pub const GM_PROT_NONE: gm_prot_t = 0;
/// Reads.
pub const GM_PROT_READ: gm_prot_t = 1;
/// Reads and writes.
pub const GM_PROT_WRITE: gm_prot_t = 2;

/// How addresses are allocated; the flags may be combined.
pub type gm_as_alloc_t = u32;

/// Any range that fits, found in constant time.
pub const GM_AS_ALLOC_DEFAULT: gm_as_alloc_t = 0;
/// The lowest range that fits.
pub const GM_AS_ALLOC_FIRST_FIT: gm_as_alloc_t = 1;
/// An unmapped guard page is kept on both sides of each region, to catch overruns.
pub const GM_AS_ALLOC_GUARDED: gm_as_alloc_t = 2;
/// Small freed regions are cached by size for later allocations.
pub const GM_AS_ALLOC_CACHED: gm_as_alloc_t = 4;

/// Which page table a device uses.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct gm_mmu_mode_t(pub u32);

/// A table shared with attached devices of the same format, provided that all or none of them can
/// recover from faults; a coherent table is created if there is none.
pub const GM_MMU_MODE_SHARED: gm_mmu_mode_t = gm_mmu_mode_t(0);
/// A table of its own, which is kept coherent with the others.
pub const GM_MMU_MODE_COHERENT: gm_mmu_mode_t = gm_mmu_mode_t(1);

/// Capabilities of a device; the flags may be combined.
pub type gm_dev_cap_t = u32;

/// No capabilities.
pub const GM_DEV_CAP_NONE: gm_dev_cap_t = 0;
/// An access that causes a translation fault waits and is retried. Devices without this capability get
/// wired mappings only.
pub const GM_DEV_CAP_RECOVERS: gm_dev_cap_t = 1;

/// How a fault treats other mappings of the page, and where the page is placed.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct gm_region_placement_t(pub u32);

/// One mapping in the whole space: other mappings are removed first, and the page migrates to the
/// memory of the faulting device, if that has memory. The default.
pub const GM_REGION_UNIQUE: gm_region_placement_t = gm_region_placement_t(0);
/// The page stays where it is; each device that faults on it maps it there.
pub const GM_REGION_REMOTE_ACCESS: gm_region_placement_t = gm_region_placement_t(1);
/// As GM_REGION_UNIQUE; the pages that follow are prefetched asynchronously.
pub const GM_REGION_PREFETCH: gm_region_placement_t = gm_region_placement_t(2);

/// What backs a region: see gm_region_state(). (Extension.)
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct gm_region_state_t(pub u32);

/// Nothing: the region was never mapped, or was unmapped.
pub const GM_REGION_NOTHING: gm_region_state_t = gm_region_state_t(0);
/// Pages supplied by the caller (gm_region_map).
pub const GM_REGION_WIRED: gm_region_state_t = gm_region_state_t(1);
/// Pages allocated by faults.
pub const GM_REGION_DEMAND: gm_region_state_t = gm_region_state_t(2);
/// Pages of a virtual machine's memory. Spaces created through this header have none.
pub const GM_REGION_PAGED: gm_region_state_t = gm_region_state_t(3);
/// The region is being unmapped; or a device failed during an unmap and may still have access, and the
/// region must be unmapped again.
pub const GM_REGION_LEAVING: gm_region_state_t = gm_region_state_t(4);

/// Flags of gm_region_map, gm_region_unmap and gm_mapping_set_unmap; GM_MAP_PAGE_SIZE adds the page
/// size of a mapping.
pub type gm_flags_t = c_int;

/// The call returns at once; see gm_region_unmap().
pub const GM_ASYNC: gm_flags_t = 1;

/// A page table, as identified by the driver that created it.
pub type gm_table_t = *mut c_void;

/// A range of virtual addresses; whole pages.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct gm_range_t {
    /// Where it begins.
    pub va: gm_va_t,
    /// Its length, in bytes.
    pub size: gm_va_t,
}

/// A mapping of consecutive addresses to consecutive frames.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct gm_mapping_t {
    /// Where it begins, at the beginning of a page.
    pub va: gm_va_t,
    /// Its length, in bytes: whole pages.
    pub size: gm_va_t,
    /// The first of its frames.
    pub pa: gm_pa_t,
    /// What it allows; not GM_PROT_NONE.
    pub prot: gm_prot_t,
}

/// Adds a mapping to the space to which the device is being attached. Passed to `inherit` of gm_mmu_t,
/// which calls it once per mapping with the `list` it was given.
pub type gm_inherit_fn =
    Option<unsafe extern "C" fn(list: *mut c_void, mapping: *const gm_mapping_t)>;

/// A result of `unmap` and `protect` of gm_mmu_t: an access is in flight; the space retries for some
/// milliseconds. No driver-defined code may have this value.
pub const GM_MMU_BUSY: c_int = 0x7fff_ffff;

/// The operations and capabilities of one kind of MMU.
///
/// Zero it, set `struct_size` to sizeof(gm_mmu_t), and fill in the operations: `map` and `unmap` are
/// required, all others may be NULL. gm_dev_create() copies it.
///
/// Each operation gets the device's `mmu_data` as its first argument. It returns 0, or a driver-defined
/// code, which gm_last_error() reports. Operations are called by any thread, concurrently for different
/// pages, and with locks of the address space held: they must not call functions of this header (which
/// return GM_RET_IN_DRIVER) and must not wait for a thread that does. They must not throw exceptions.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct gm_mmu_t {
    /// sizeof(gm_mmu_t), so that later versions can add to it.
    pub struct_size: usize,
    /// Supported page sizes: bit n stands for pages of 2^n bytes. 4 KiB is always supported.
    pub page_sizes: u64,
    /// Format of its page tables. Devices with the same format can share tables and are given each
    /// other's tables (by `activate`; a device without it shares none). 0: the tables are private.
    /// 0xffffffff is reserved for gm_mmu_CPU.
    pub format: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Creates an empty page table; called once per space. NULL: there is a single table, which is
    /// called NULL. A device needs this, `activate` and `deactivate` to be attached to more than one
    /// space at a time; a table that another space uses is refused (GM_RET_UNSUPPORTED of
    /// gm_as_attach()).
    pub table_create:
        Option<unsafe extern "C" fn(mmu_data: *mut c_void, table: *mut gm_table_t) -> c_int>,
    /// Destroys a table that is no longer used.
    pub table_destroy: Option<unsafe extern "C" fn(mmu_data: *mut c_void, table: gm_table_t)>,
    /// Makes the device translate by the table, starting with an empty TLB.
    pub activate: Option<unsafe extern "C" fn(mmu_data: *mut c_void, table: gm_table_t) -> c_int>,
    /// Makes the device translate by no table. When it returns, no access through the table is in
    /// flight.
    pub deactivate: Option<unsafe extern "C" fn(mmu_data: *mut c_void, table: gm_table_t) -> c_int>,
    /// Maps `size` bytes to consecutive frames from `pa` on, in pages of `page_size` bytes. Existing
    /// translations are replaced; if the new one only allows more, no `invalidate` follows, so a device
    /// that faults must drop its TLB entry of the page before it retries.
    pub map: Option<
        unsafe extern "C" fn(
            mmu_data: *mut c_void,
            table: gm_table_t,
            va: gm_va_t,
            size: gm_va_t,
            pa: gm_pa_t,
            page_size: gm_va_t,
            prot: gm_prot_t,
        ) -> c_int,
    >,
    /// Removes translations. Some of the pages may have none. May return GM_MMU_BUSY.
    pub unmap: Option<
        unsafe extern "C" fn(
            mmu_data: *mut c_void,
            table: gm_table_t,
            va: gm_va_t,
            size: gm_va_t,
        ) -> c_int,
    >,
    /// Reduces translations to at most the access `prot`. Some of the pages may have none. May return
    /// GM_MMU_BUSY. NULL: translations are removed instead, and mapped again when the device faults.
    pub protect: Option<
        unsafe extern "C" fn(
            mmu_data: *mut c_void,
            table: gm_table_t,
            va: gm_va_t,
            size: gm_va_t,
            prot: gm_prot_t,
        ) -> c_int,
    >,
    /// Invalidates this device's TLB entries of the table for the ranges, which are ascending and
    /// disjoint. When it returns 0, no access through a translation that was removed from the table is
    /// in flight or can begin. NULL: the device has no TLB.
    pub invalidate: Option<
        unsafe extern "C" fn(
            mmu_data: *mut c_void,
            table: gm_table_t,
            ranges: *const gm_range_t,
            count: usize,
        ) -> c_int,
    >,
    /// Zeroes memory that is registered with the device. Required for gm_dev_register_physmem().
    pub prepare:
        Option<unsafe extern "C" fn(mmu_data: *mut c_void, pa: gm_pa_t, size: gm_va_t) -> c_int>,
    /// Copies between two places, of which at least one is memory registered with the device; the other
    /// may belong to another device or the host. Required for gm_dev_register_physmem().
    pub copy: Option<
        unsafe extern "C" fn(
            mmu_data: *mut c_void,
            to: gm_pa_t,
            from: gm_pa_t,
            size: gm_va_t,
        ) -> c_int,
    >,
    /// Reports existing mappings, at most 2^20, by calling `add`; they become wired regions of the
    /// space to which the device is attached.
    pub inherit: Option<
        unsafe extern "C" fn(mmu_data: *mut c_void, add: gm_inherit_fn, list: *mut c_void) -> c_int,
    >,
}

/// The `mmu_data` of gm_mmu_CPU: mappings of a virtual address space of the host, which a gm_as_t
/// inherits as wired regions when the CPU is attached to it. gm_dev_create() copies it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct gm_cpu_space_t {
    /// The mappings; NULL if there are none.
    pub mappings: *const gm_mapping_t,
    /// Their number: at most 2^20.
    pub count: usize,
}
