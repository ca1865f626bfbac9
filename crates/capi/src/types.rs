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

/// A virtual address space: what is allocated in it, who is attached to it, and what is mapped.
///
/// A handle. It is not an address and never followed: a handle that was never given out is answered
/// with GM_RET_INVALID_HANDLE, one whose object was destroyed with GM_RET_DESTROYED. That holds for
/// all four kinds of handles. They may be compared, copied, and used by any thread at any time.
#[repr(C)]
pub struct gm_as_t {
    _opaque: [u8; 0],
}

/// A device: whoever uses address spaces, with the operations of its MMU. A handle.
#[repr(C)]
pub struct gm_dev_t {
    _opaque: [u8; 0],
}

/// An allocated range of virtual addresses of one address space. A handle.
///
/// A region has one handle as long as it lives: two handles are equal if the regions are the same.
#[repr(C)]
pub struct gm_region_t {
    _opaque: [u8; 0],
}

/// Mappings of one address space that are unmapped together. A handle.
#[repr(C)]
pub struct gm_mapping_set_t {
    _opaque: [u8; 0],
}

/// What became of a call. Unless the function says otherwise, a call that failed has changed nothing.
/// gm_ret_string() has a sentence for each, gm_last_error() one with the numbers of the case.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct gm_ret_t(pub u32);

/// It is done.
pub const GM_RET_OK: gm_ret_t = gm_ret_t(0);
/// A handle that was never given out, or NULL, or of another kind.
pub const GM_RET_INVALID_HANDLE: gm_ret_t = gm_ret_t(1);
/// The space, device, region or mapping set was destroyed.
pub const GM_RET_DESTROYED: gm_ret_t = gm_ret_t(2);
/// An argument makes no sense: a NULL where there must be something, an unknown flag, a range that is
/// empty or not of whole pages.
pub const GM_RET_INVALID_ARGUMENT: gm_ret_t = gm_ret_t(3);
/// No free range of addresses satisfies the request.
pub const GM_RET_NO_ADDRESSES: gm_ret_t = gm_ret_t(4);
/// No physical memory is free, or none is registered.
pub const GM_RET_NO_MEMORY: gm_ret_t = gm_ret_t(5);
/// The address is in no allocated region.
pub const GM_RET_NOT_ALLOCATED: gm_ret_t = gm_ret_t(6);
/// The device is attached to the space already (a CPU: another CPU is).
pub const GM_RET_ALREADY_ATTACHED: gm_ret_t = gm_ret_t(7);
/// The device is not attached to the space.
pub const GM_RET_NOT_ATTACHED: gm_ret_t = gm_ret_t(8);
/// The device is active in no space.
pub const GM_RET_NOT_ACTIVE: gm_ret_t = gm_ret_t(9);
/// Something else still uses it.
pub const GM_RET_IN_USE: gm_ret_t = gm_ret_t(10);
/// The region is mapped already.
pub const GM_RET_ALREADY_MAPPED: gm_ret_t = gm_ret_t(11);
/// The region is not mapped.
pub const GM_RET_NOT_MAPPED: gm_ret_t = gm_ret_t(12);
/// The region, or its mapping, does not allow the access.
pub const GM_RET_DENIED: gm_ret_t = gm_ret_t(13);
/// The device cannot recover from a fault: wire what it may use (gm_region_map).
pub const GM_RET_CANNOT_RECOVER: gm_ret_t = gm_ret_t(14);
/// This space, device or region, or this version, cannot do that.
pub const GM_RET_UNSUPPORTED: gm_ret_t = gm_ret_t(15);
/// A driver answered GM_MMU_BUSY and did not stop: try again.
pub const GM_RET_BUSY: gm_ret_t = gm_ret_t(16);
/// An operation of a driver failed: gm_last_error() has the driver's code.
pub const GM_RET_DEVICE: gm_ret_t = gm_ret_t(17);
/// The function was called from within an operation of a driver, where it would wait for itself.
pub const GM_RET_IN_DRIVER: gm_ret_t = gm_ret_t(18);
/// A mistake of this library. What the call was to do may be half done.
pub const GM_RET_INTERNAL: gm_ret_t = gm_ret_t(19);

/// Types of access to a virtual address, to be combined. GM_PROT_WRITE includes GM_PROT_READ.
pub type gm_prot_t = u32;

/// No access.
pub const GM_PROT_NONE: gm_prot_t = 0;
/// Reads.
pub const GM_PROT_READ: gm_prot_t = 1;
/// Reads and writes.
pub const GM_PROT_WRITE: gm_prot_t = 2;

/// How addresses are allocated; the flags may be combined.
pub type gm_as_alloc_t = u32;

/// Some range that fits, found in constant time.
pub const GM_AS_ALLOC_DEFAULT: gm_as_alloc_t = 0;
/// The lowest range that fits.
pub const GM_AS_ALLOC_FIRST_FIT: gm_as_alloc_t = 1;
/// An unused page is kept on both sides of each region, to trap what runs over its ends.
pub const GM_AS_ALLOC_GUARDED: gm_as_alloc_t = 2;
/// Small regions that are freed are kept, by size, for the next request.
pub const GM_AS_ALLOC_CACHED: gm_as_alloc_t = 4;

/// Whose page table a device uses.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct gm_mmu_mode_t(pub u32);

/// One that attached devices of the same format share, if both can recover from faults or neither can; a
/// coherent one is made if there is none.
pub const GM_MMU_MODE_SHARED: gm_mmu_mode_t = gm_mmu_mode_t(0);
/// One of its own, which is kept coherent with the others.
pub const GM_MMU_MODE_COHERENT: gm_mmu_mode_t = gm_mmu_mode_t(1);

/// What a device is capable of; the flags may be combined.
pub type gm_dev_cap_t = u32;

/// Nothing of the following.
pub const GM_DEV_CAP_NONE: gm_dev_cap_t = 0;
/// An access that causes a translation fault waits and is repeated. A device without this gets wired
/// mappings only.
pub const GM_DEV_CAP_RECOVERS: gm_dev_cap_t = 1;

/// What a fault makes of a page's other mappings, and where the page is placed.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct gm_region_placement_t(pub u32);

/// One mapping in the whole space: others are destroyed first, and the page moves to the memory of the
/// device that faulted, if it has some. The default.
pub const GM_REGION_UNIQUE: gm_region_placement_t = gm_region_placement_t(0);
/// The page stays where it is, and whoever faults on it maps it there.
pub const GM_REGION_REMOTE_ACCESS: gm_region_placement_t = gm_region_placement_t(1);
/// As GM_REGION_UNIQUE, and the pages that follow are brought along without being waited for.
pub const GM_REGION_PREFETCH: gm_region_placement_t = gm_region_placement_t(2);

/// What is behind a region: see gm_region_state(). (Ours.)
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct gm_region_state_t(pub u32);

/// Nothing: never mapped, or unmapped.
pub const GM_REGION_NOTHING: gm_region_state_t = gm_region_state_t(0);
/// Pages of the caller's (gm_region_map).
pub const GM_REGION_WIRED: gm_region_state_t = gm_region_state_t(1);
/// Pages that faults have brought.
pub const GM_REGION_DEMAND: gm_region_state_t = gm_region_state_t(2);
/// Pages of a virtual machine's memory. No space that is made by this header has such.
pub const GM_REGION_PAGED: gm_region_state_t = gm_region_state_t(3);
/// It is being unmapped at this moment; or a device failed in an unmap and may reach it still, and it
/// must be unmapped again.
pub const GM_REGION_LEAVING: gm_region_state_t = gm_region_state_t(4);

/// Flags of gm_region_map, gm_region_unmap and gm_mapping_set_unmap; the page size of a mapping is
/// added with GM_MAP_PAGE_SIZE.
pub type gm_flags_t = c_int;

/// The call returns at once; see gm_region_unmap for what follows.
pub const GM_ASYNC: gm_flags_t = 1;

/// A page table, as the driver that made it names it.
pub type gm_table_t = *mut c_void;

/// A range of virtual addresses, in whole pages.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct gm_range_t {
    /// Where it begins.
    pub va: gm_va_t,
    /// Its length, in bytes.
    pub size: gm_va_t,
}

/// A mapping: frames that follow one another, at addresses that follow one another.
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

/// Takes the mapping for the space to which the device is being attached. Given to `inherit` of
/// gm_mmu_t, to be called as often as there are mappings, with the `list` that came with it.
pub type gm_inherit_fn =
    Option<unsafe extern "C" fn(list: *mut c_void, mapping: *const gm_mapping_t)>;

/// An answer of `unmap` and `protect` of gm_mmu_t: an access is under way; the space asks again for
/// some milliseconds. No code of a driver's own may have this value.
pub const GM_MMU_BUSY: c_int = 0x7fff_ffff;

/// The operations of one kind of MMU, and what it can do.
///
/// Zero it, set `struct_size` to sizeof(gm_mmu_t), and fill in what there is: `map` and `unmap` there
/// must be, all else may be NULL. gm_dev_create() takes a copy.
///
/// The operations get the `mmu_data` of the device first. They return 0, or a code of the driver's
/// own, of which gm_last_error() tells. They are called by any thread, by several at once for different
/// pages, and with locks of the address space held: they must not call functions of this header (which
/// answer GM_RET_IN_DRIVER), and must not wait for a thread that does. No exception may leave them.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct gm_mmu_t {
    /// sizeof(gm_mmu_t), so that later versions can add to it.
    pub struct_size: usize,
    /// Page sizes it can map: bit n stands for pages of 2^n bytes. 4 KiB always is among them.
    pub page_sizes: u64,
    /// Format of its page tables. Devices with the same one can share a table, and are given the tables
    /// of one another (by `activate`, without which a device shares none). 0: nobody else can use them. Not 0xffffffff, which is that of gm_mmu_CPU.
    pub format: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Makes an empty page table, another for each space. NULL: there is just one, which is called NULL.
    /// To be attached to more than one space at a time a device needs this, `activate` and `deactivate`;
    /// a table that another space has is not taken (GM_RET_UNSUPPORTED of gm_as_attach()).
    pub table_create:
        Option<unsafe extern "C" fn(mmu_data: *mut c_void, table: *mut gm_table_t) -> c_int>,
    /// Nobody uses the table any more.
    pub table_destroy: Option<unsafe extern "C" fn(mmu_data: *mut c_void, table: gm_table_t)>,
    /// From now on the device translates by the table, with an empty TLB.
    pub activate: Option<unsafe extern "C" fn(mmu_data: *mut c_void, table: gm_table_t) -> c_int>,
    /// From now on the device translates by nothing; no access by the table is under way any more.
    pub deactivate: Option<unsafe extern "C" fn(mmu_data: *mut c_void, table: gm_table_t) -> c_int>,
    /// Enters translations of `size` bytes to frames that follow one another from `pa` on, by pages of
    /// `page_size` bytes. What is translated already gets the new frame and access instead; if that only
    /// allows more, no `invalidate` follows, so a device that faults must drop its TLB's entry of the
    /// page before it tries again.
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
    /// Removes translations. Some of the pages may have none. May answer GM_MMU_BUSY.
    pub unmap: Option<
        unsafe extern "C" fn(
            mmu_data: *mut c_void,
            table: gm_table_t,
            va: gm_va_t,
            size: gm_va_t,
        ) -> c_int,
    >,
    /// Leaves translations no more access than `prot`. Some of the pages may have none. May answer
    /// GM_MMU_BUSY. NULL: they are removed, and given again when the device faults.
    pub protect: Option<
        unsafe extern "C" fn(
            mmu_data: *mut c_void,
            table: gm_table_t,
            va: gm_va_t,
            size: gm_va_t,
            prot: gm_prot_t,
        ) -> c_int,
    >,
    /// Forgets what TLBs of this device hold of the table for the ranges, which are ascending and apart.
    /// When it returns 0, no access by a translation that is no longer in the table is under way or can
    /// begin. NULL: the device has no TLB.
    pub invalidate: Option<
        unsafe extern "C" fn(
            mmu_data: *mut c_void,
            table: gm_table_t,
            ranges: *const gm_range_t,
            count: usize,
        ) -> c_int,
    >,
    /// Fills memory that is registered with the device with zeros. Needed for
    /// gm_dev_register_physmem().
    pub prepare:
        Option<unsafe extern "C" fn(mmu_data: *mut c_void, pa: gm_pa_t, size: gm_va_t) -> c_int>,
    /// Copies between two places, one of them in memory that is registered with the device, the other
    /// perhaps in another device's or the host's. Needed for gm_dev_register_physmem().
    pub copy: Option<
        unsafe extern "C" fn(
            mmu_data: *mut c_void,
            to: gm_pa_t,
            from: gm_pa_t,
            size: gm_va_t,
        ) -> c_int,
    >,
    /// Tells, by calling `add`, of the mappings that exist already, 2^20 at most; they become wired
    /// regions of the space the device is attached to.
    pub inherit: Option<
        unsafe extern "C" fn(mmu_data: *mut c_void, add: gm_inherit_fn, list: *mut c_void) -> c_int,
    >,
}

/// What `mmu_data` is for gm_mmu_CPU: mappings of a virtual address space of the host, which a gm_as_t
/// inherits as wired regions when the CPU is attached to it. gm_dev_create() takes a copy.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct gm_cpu_space_t {
    /// The mappings; NULL if there are none.
    pub mappings: *const gm_mapping_t,
    /// How many: 2^20 at most.
    pub count: usize,
}
