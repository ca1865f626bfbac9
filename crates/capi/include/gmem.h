/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gmem.h: one memory management for CPU and devices (GMEM).
 *
 * A driver writes the operations of its MMU (gm_mmu_t) and no memory management.
 * It makes a device of them (gm_dev_create) and attaches it to an address space
 * (gm_as_attach), where a region of addresses (gm_as_alloc) means the same to the
 * CPU and to every device: wired to the driver's pages (gm_region_map), or filled
 * page by page when somebody faults on it (gm_dev_fault).
 *
 * Functions return GM_RET_OK or why not, and may be called by any thread, several
 * at once. Where a result is given back through a pointer, it is written with
 * GM_RET_OK only. What is not in the paper is marked (Extension.).
 *
 * Two rules that no compiler checks. Hold no lock that a callback takes while calling
 * a function here, as it may run callbacks of operations that were queued before
 * (gm_region_unmap says which do). And a device that has faulted drops its TLB's entry
 * of the page before it tries again (gm_dev_fault).
 *
 * Compiles as C99 and as C++11. Made from the source of libpagetide_gmem: do not edit.
 */
#ifndef PAGETIDE_GMEM_H
#define PAGETIDE_GMEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Types ------------------------------------------------------------------------------------- */

/* Version of this header: major << 16 | minor << 8 | patch. */
#define GM_VERSION 0x000100

/* A virtual address of an address space, or a number of bytes of such. */
typedef uint64_t gm_va_t;

/* A physical address: of the host's memory, or of a device's own. */
typedef uint64_t gm_pa_t;

/*
 * A virtual address space: its allocated regions, its attached devices, and its mappings.
 *
 * A handle. A handle is not an address and is never dereferenced: a handle that was never issued
 * returns GM_RET_INVALID_HANDLE, one whose object was destroyed returns GM_RET_DESTROYED. This
 * holds for all four kinds of handles. They may be compared, copied, and used by any thread at any
 * time.
 */
typedef struct gm_as gm_as_t;

/* A device: a user of address spaces, with the operations of its MMU. A handle. */
typedef struct gm_dev gm_dev_t;

/*
 * An allocated range of virtual addresses of one address space. A handle.
 *
 * A region has one handle for its whole life: two handles are equal if they refer to the same
 * region.
 */
typedef struct gm_region gm_region_t;

/* A set of mappings of one address space that are unmapped together. A handle. */
typedef struct gm_mapping_set gm_mapping_set_t;

/*
 * The result of a call. Unless stated otherwise, a call that fails has changed nothing.
 * gm_ret_string() describes each code; gm_last_error() describes the last failure, with its
 * addresses and numbers.
 */
typedef enum gm_ret {
    /* Success. */
    GM_RET_OK = 0,
    /* The handle was never issued, is NULL, or is of another kind. */
    GM_RET_INVALID_HANDLE = 1,
    /* The space, device, region or mapping set was destroyed. */
    GM_RET_DESTROYED = 2,
    /*
     * An argument is invalid: NULL where a value is required, an unknown flag, a range that is
     * empty or not a multiple of the page size.
     */
    GM_RET_INVALID_ARGUMENT = 3,
    /* No free range of addresses satisfies the request. */
    GM_RET_NO_ADDRESSES = 4,
    /* No physical memory is free, or none is registered. */
    GM_RET_NO_MEMORY = 5,
    /* The address is not in an allocated region. */
    GM_RET_NOT_ALLOCATED = 6,
    /* The device is already attached to the space (for a CPU: another CPU is attached). */
    GM_RET_ALREADY_ATTACHED = 7,
    /* The device is not attached to the space. */
    GM_RET_NOT_ATTACHED = 8,
    /* The device is not active in any space. */
    GM_RET_NOT_ACTIVE = 9,
    /* The object is still in use. */
    GM_RET_IN_USE = 10,
    /* The region is already mapped. */
    GM_RET_ALREADY_MAPPED = 11,
    /* The region is not mapped. */
    GM_RET_NOT_MAPPED = 12,
    /* The region, or its mapping, does not allow the access. */
    GM_RET_DENIED = 13,
    /* The device cannot recover from a fault: it needs wired mappings (gm_region_map). */
    GM_RET_CANNOT_RECOVER = 14,
    /* This space, device, region or library version does not support the operation. */
    GM_RET_UNSUPPORTED = 15,
    /* A driver kept returning GM_MMU_BUSY: try again. */
    GM_RET_BUSY = 16,
    /* An operation of a driver failed; gm_last_error() has the driver's code. */
    GM_RET_DEVICE = 17,
    /* The function was called from within an operation of a driver, where it would deadlock. */
    GM_RET_IN_DRIVER = 18,
    /* A bug in this library. The operation may be incomplete. */
    GM_RET_INTERNAL = 19
} gm_ret_t;

/*
 * Types of access to a virtual address; the flags may be combined. GM_PROT_WRITE includes
 * GM_PROT_READ.
 */
typedef uint32_t gm_prot_t;

enum {
    /* No access. */
    GM_PROT_NONE = 0,
    /* Reads. */
    GM_PROT_READ = 1,
    /* Reads and writes. */
    GM_PROT_WRITE = 2
};

/* How addresses are allocated; the flags may be combined. */
typedef uint32_t gm_as_alloc_t;

enum {
    /* Any range that fits, found in constant time. */
    GM_AS_ALLOC_DEFAULT = 0,
    /* The lowest range that fits. */
    GM_AS_ALLOC_FIRST_FIT = 1,
    /* An unmapped guard page is kept on both sides of each region, to catch overruns. */
    GM_AS_ALLOC_GUARDED = 2,
    /* Small freed regions are cached by size for later allocations. */
    GM_AS_ALLOC_CACHED = 4
};

/* Which page table a device uses. */
typedef enum gm_mmu_mode {
    /*
     * A table shared with attached devices of the same format, provided that all or none of them
     * can recover from faults; a coherent table is created if there is none.
     */
    GM_MMU_MODE_SHARED = 0,
    /* A table of its own, which is kept coherent with the others. */
    GM_MMU_MODE_COHERENT = 1
} gm_mmu_mode_t;

/* Capabilities of a device; the flags may be combined. */
typedef uint32_t gm_dev_cap_t;

enum {
    /* No capabilities. */
    GM_DEV_CAP_NONE = 0,
    /*
     * An access that causes a translation fault waits and is retried. Devices without this
     * capability get wired mappings only.
     */
    GM_DEV_CAP_RECOVERS = 1
};

/* How a fault treats other mappings of the page, and where the page is placed. */
typedef enum gm_region_placement {
    /*
     * One mapping in the whole space: other mappings are removed first, and the page migrates to
     * the memory of the faulting device, if that has memory. The default.
     */
    GM_REGION_UNIQUE = 0,
    /* The page stays where it is; each device that faults on it maps it there. */
    GM_REGION_REMOTE_ACCESS = 1,
    /* As GM_REGION_UNIQUE; the pages that follow are prefetched asynchronously. */
    GM_REGION_PREFETCH = 2
} gm_region_placement_t;

/* What backs a region: see gm_region_state(). (Extension.) */
typedef enum gm_region_state {
    /* Nothing: the region was never mapped, or was unmapped. */
    GM_REGION_NOTHING = 0,
    /* Pages supplied by the caller (gm_region_map). */
    GM_REGION_WIRED = 1,
    /* Pages allocated by faults. */
    GM_REGION_DEMAND = 2,
    /* Pages of a virtual machine's memory. Spaces created through this header have none. */
    GM_REGION_PAGED = 3,
    /*
     * The region is being unmapped; or a device failed during an unmap and may still have access,
     * and the region must be unmapped again.
     */
    GM_REGION_LEAVING = 4
} gm_region_state_t;

/*
 * Flags of gm_region_map, gm_region_unmap and gm_mapping_set_unmap; GM_MAP_PAGE_SIZE adds the page
 * size of a mapping.
 */
typedef int gm_flags_t;

enum {
    /* The call returns at once; see gm_region_unmap(). */
    GM_ASYNC = 1
};

/*
 * Flag of gm_region_map: pages of 2^log2 bytes. Without it they have 4 KiB.
 */
#define GM_MAP_PAGE_SIZE(log2) ((int)(log2) << 8)

/* A page table, as identified by the driver that created it. */
typedef void *gm_table_t;

/* A range of virtual addresses; whole pages. */
typedef struct gm_range {
    /* Where it begins. */
    gm_va_t va;
    /* Its length, in bytes. */
    gm_va_t size;
} gm_range_t;

/* A mapping of consecutive addresses to consecutive frames. */
typedef struct gm_mapping {
    /* Where it begins, at the beginning of a page. */
    gm_va_t va;
    /* Its length, in bytes: whole pages. */
    gm_va_t size;
    /* The first of its frames. */
    gm_pa_t pa;
    /* What it allows; not GM_PROT_NONE. */
    gm_prot_t prot;
} gm_mapping_t;

/*
 * Adds a mapping to the space to which the device is being attached. Passed to `inherit` of
 * gm_mmu_t, which calls it once per mapping with the `list` it was given.
 */
typedef void (*gm_inherit_fn)(void *list, const gm_mapping_t *mapping);

/*
 * A result of `unmap` and `protect` of gm_mmu_t: an access is in flight; the space retries for some
 * milliseconds. No driver-defined code may have this value.
 */
#define GM_MMU_BUSY 0x7fffffff

/*
 * The operations and capabilities of one kind of MMU.
 *
 * Zero it, set `struct_size` to sizeof(gm_mmu_t), and fill in the operations: `map` and `unmap` are
 * required, all others may be NULL. gm_dev_create() copies it.
 *
 * Each operation gets the device's `mmu_data` as its first argument. It returns 0, or a
 * driver-defined code, which gm_last_error() reports. Operations are called by any thread,
 * concurrently for different pages, and with locks of the address space held: they must not call
 * functions of this header (which return GM_RET_IN_DRIVER) and must not wait for a thread that
 * does. They must not throw exceptions.
 */
typedef struct gm_mmu {
    /* sizeof(gm_mmu_t), so that later versions can add to it. */
    size_t struct_size;
    /* Supported page sizes: bit n stands for pages of 2^n bytes. 4 KiB is always supported. */
    uint64_t page_sizes;
    /*
     * Format of its page tables. Devices with the same format can share tables and are given each
     * other's tables (by `activate`; a device without it shares none). 0: the tables are private.
     * 0xffffffff is reserved for gm_mmu_CPU.
     */
    uint32_t format;
    /* Must be 0. */
    uint32_t reserved;
    /*
     * Creates an empty page table; called once per space. NULL: there is a single table, which is
     * called NULL. A device needs this, `activate` and `deactivate` to be attached to more than one
     * space at a time; a table that another space uses is refused (GM_RET_UNSUPPORTED of
     * gm_as_attach()).
     */
    int (*table_create)(void *mmu_data, gm_table_t *table);
    /* Destroys a table that is no longer used. */
    void (*table_destroy)(void *mmu_data, gm_table_t table);
    /* Makes the device translate by the table, starting with an empty TLB. */
    int (*activate)(void *mmu_data, gm_table_t table);
    /*
     * Makes the device translate by no table. When it returns, no access through the table is in
     * flight.
     */
    int (*deactivate)(void *mmu_data, gm_table_t table);
    /*
     * Maps `size` bytes to consecutive frames from `pa` on, in pages of `page_size` bytes. Existing
     * translations are replaced; if the new one only allows more, no `invalidate` follows, so a
     * device that faults must drop its TLB entry of the page before it retries.
     */
    int (*map)(void *mmu_data, gm_table_t table, gm_va_t va, gm_va_t size, gm_pa_t pa,
        gm_va_t page_size, gm_prot_t prot);
    /* Removes translations. Some of the pages may have none. May return GM_MMU_BUSY. */
    int (*unmap)(void *mmu_data, gm_table_t table, gm_va_t va, gm_va_t size);
    /*
     * Reduces translations to at most the access `prot`. Some of the pages may have none. May
     * return GM_MMU_BUSY. NULL: translations are removed instead, and mapped again when the device
     * faults.
     */
    int (*protect)(void *mmu_data, gm_table_t table, gm_va_t va, gm_va_t size, gm_prot_t prot);
    /*
     * Invalidates this device's TLB entries of the table for the ranges, which are ascending and
     * disjoint. When it returns 0, no access through a translation that was removed from the table
     * is in flight or can begin. NULL: the device has no TLB.
     */
    int (*invalidate)(void *mmu_data, gm_table_t table, const gm_range_t *ranges, size_t count);
    /* Zeroes memory that is registered with the device. Required for gm_dev_register_physmem(). */
    int (*prepare)(void *mmu_data, gm_pa_t pa, gm_va_t size);
    /*
     * Copies between two places, of which at least one is memory registered with the device; the
     * other may belong to another device or the host. Required for gm_dev_register_physmem().
     */
    int (*copy)(void *mmu_data, gm_pa_t to, gm_pa_t from, gm_va_t size);
    /*
     * Reports existing mappings, at most 2^20, by calling `add`; they become wired regions of the
     * space to which the device is attached.
     */
    int (*inherit)(void *mmu_data, gm_inherit_fn add, void *list);
} gm_mmu_t;

/*
 * The `mmu_data` of gm_mmu_CPU: mappings of a virtual address space of the host, which a gm_as_t
 * inherits as wired regions when the CPU is attached to it. gm_dev_create() copies it.
 */
typedef struct gm_cpu_space {
    /* The mappings; NULL if there are none. */
    const gm_mapping_t *mappings;
    /* Their number: at most 2^20. */
    size_t count;
} gm_cpu_space_t;

/* ---- Virtual address spaces -------------------------------------------------------------------- */

/*
 * Creates a virtual address space of the addresses from `begin` to before `end`, both multiples of
 * 4 KiB. Addresses are allocated by `policy`: a combination of GM_AS_ALLOC_ flags.
 *
 * Fails with GM_RET_INVALID_ARGUMENT.
 */
gm_ret_t gm_as_create(gm_va_t begin, gm_va_t end, gm_as_alloc_t policy, gm_as_t **new_as);

/*
 * Destroys the virtual address space, which must have no regions and no attached devices, and its
 * mapping sets. When it returns, asynchronous operations are complete and their callbacks have
 * returned (except a callback from which it was called).
 *
 * Fails with GM_RET_IN_USE.
 */
gm_ret_t gm_as_destroy(gm_as_t *as);

/*
 * Attaches the device to the virtual address space, with a page table as `mode` says. The space's
 * wired mappings are entered in it; mappings that the device already has (`inherit` of gm_mmu_t)
 * become wired regions of the space. A device can be attached to many spaces and is active in at
 * most one: if `activate` is true, it becomes active in this one.
 *
 * Fails with GM_RET_ALREADY_ATTACHED, GM_RET_NO_ADDRESSES (an inherited mapping overlaps a region),
 * GM_RET_INVALID_ARGUMENT (an inherited mapping is not a multiple of the page size),
 * GM_RET_UNSUPPORTED (the page size of a wired mapping; more than 64 page tables; a second space
 * for a driver with a single table: `table_create` of gm_mmu_t), GM_RET_DEVICE. The device is then
 * not attached, and active where it was.
 */
gm_ret_t gm_as_attach(gm_as_t *as, gm_dev_t *dev, gm_mmu_mode_t mode, bool activate);

/*
 * Allocates a region of `size` bytes, rounded up to a multiple of 4 KiB.
 *
 * It begins at `hint` if that is not 0 and the range is free; else above it if possible; else
 * anywhere. It begins at a multiple of `align` and does not cross a multiple of `no_cross`; both
 * are powers of two, or 0 for no constraint. `max_va` is the highest address that it may contain, 0
 * for any.
 *
 * Fails with GM_RET_INVALID_ARGUMENT, GM_RET_NO_ADDRESSES.
 */
gm_ret_t gm_as_alloc(gm_as_t *as, gm_va_t hint, gm_va_t size, gm_va_t align, gm_va_t no_cross,
    gm_va_t max_va, gm_region_t **new_region);

/*
 * Finds the allocated region of the virtual address space that contains `addr`. An inherited region
 * gets its handle by this call.
 *
 * Fails with GM_RET_NOT_ALLOCATED.
 */
gm_ret_t gm_as_lookup(gm_as_t *as, gm_va_t addr, gm_region_t **out_region);

/*
 * Waits until all asynchronous operations that were queued before are complete and their callbacks
 * have returned. (Called from a callback, it does not wait for callbacks.)
 *
 * Returns the first failure of an asynchronous operation since the last call of this function; each
 * failure is returned once. Even then all operations are complete; gm_region_state() shows which
 * regions a device could not release.
 */
gm_ret_t gm_as_synchronize(gm_as_t *as);

/* ---- Devices ----------------------------------------------------------------------------------- */

/*
 * Creates a device with the operations of `mmu`, which are passed `mmu_data`, and the capabilities
 * `cap`: a combination of GM_DEV_CAP_ flags. Virtual functions are devices of their own.
 *
 * `mmu` is copied. `mmu_data` must stay valid until gm_dev_destroy() has returned GM_RET_OK. With
 * gm_mmu_CPU it is NULL or a gm_cpu_space_t, which is copied. gm_mmu_CPU is recognized by its
 * address: copies of it are refused, and so is its format (0xffffffff) in any other gm_mmu_t.
 *
 * Fails with GM_RET_INVALID_ARGUMENT, GM_RET_UNSUPPORTED (operations of a later version).
 */
gm_ret_t gm_dev_create(const gm_mmu_t *mmu, void *mmu_data, gm_dev_cap_t cap, gm_dev_t **new_dev);

/*
 * Destroys the device. It must not be attached, its memory must hold no pages, and no other device
 * may share a page table that it created. Its operations are not called afterwards.
 *
 * Fails with GM_RET_IN_USE, GM_RET_UNSUPPORTED (gm_dev_CPU).
 */
gm_ret_t gm_dev_destroy(gm_dev_t *dev);

/*
 * Makes the device active in the virtual address space, to which it must be attached, instead of
 * the one in which it was active.
 *
 * Fails with GM_RET_NOT_ATTACHED; GM_RET_DEVICE, after which it is active nowhere or where it was.
 */
gm_ret_t gm_dev_switch(gm_dev_t *dev, gm_as_t *as);

/*
 * Detaches the device from the virtual address space. Its page table is destroyed unless others
 * share it. Pages in its memory stay there.
 *
 * Fails with GM_RET_NOT_ATTACHED; GM_RET_DEVICE if the device could not release its mappings: it
 * then remains attached.
 */
gm_ret_t gm_dev_detach(gm_dev_t *dev, gm_as_t *as);

/*
 * Serves an address translation fault of the device at `addr` for the access `access`: GM_PROT_READ
 * or GM_PROT_WRITE. After GM_RET_OK the device should retry the access. The mapping may be gone
 * again by then, as others may have faulted. Before it retries, the device must drop its TLB entry
 * of the page: a translation that only allows more than before comes without `invalidate`.
 *
 * Fails with GM_RET_NOT_ACTIVE, GM_RET_CANNOT_RECOVER, GM_RET_NOT_ALLOCATED, GM_RET_DENIED,
 * GM_RET_NOT_MAPPED (the region is being unmapped, or must be unmapped again after a failure),
 * GM_RET_NO_MEMORY, GM_RET_BUSY, GM_RET_DEVICE.
 */
gm_ret_t gm_dev_fault(gm_dev_t *dev, gm_va_t addr, gm_prot_t access);

/*
 * Registers memory of the device, from `begin` to before `end`, in whole frames of 4 KiB: pages on
 * which it faults are placed there (gm_region_set_policy). Memory registered with the CPU is host
 * memory, where pages of devices without memory are placed; it must be in a window
 * (gm_cpu_add_window). gm_dev_unregister_physmem() and gm_dev_destroy() release it.
 *
 * Fails with GM_RET_INVALID_ARGUMENT (also if part of it is already registered), GM_RET_UNSUPPORTED
 * (the driver has no `prepare` or no `copy`).
 */
gm_ret_t gm_dev_register_physmem(gm_dev_t *dev, gm_pa_t begin, gm_pa_t end);

/*
 * Releases memory that was registered with the device, by the same range; it must hold no pages.
 * (Extension.)
 *
 * Fails with GM_RET_INVALID_ARGUMENT if this range was not registered, GM_RET_IN_USE.
 */
gm_ret_t gm_dev_unregister_physmem(gm_dev_t *dev, gm_pa_t begin, gm_pa_t end);

/* Returns how many bytes of the device's registered memory hold pages. (Extension.) */
gm_ret_t gm_dev_used_physmem(const gm_dev_t *dev, uint64_t *bytes);

/* ---- Regions ----------------------------------------------------------------------------------- */

/*
 * Creates a wired mapping from the region to physical pages, in the page tables of all devices of
 * the space, including those attached later, with the access `prot`.
 *
 * `pages` has one address for each page of the region, of the page size in `flags`: 4 KiB, or
 * GM_MAP_PAGE_SIZE(log2 of it). It is copied. (In the paper these are pointers to `struct vm_page`,
 * which users of this library do not have.) If `set` is not NULL, the mapping is added to it. With
 * GM_ASYNC in `flags` the call returns at once: see gm_region_unmap().
 *
 * Fails with GM_RET_ALREADY_MAPPED, GM_RET_INVALID_ARGUMENT, GM_RET_UNSUPPORTED (a device cannot
 * map pages of that size), GM_RET_DENIED (see gm_region_protect), GM_RET_DEVICE. If a device failed
 * to roll back a partial mapping, the region must be unmapped before it is used again.
 */
gm_ret_t gm_region_map(gm_region_t *region, gm_prot_t prot, const gm_pa_t *pages,
    gm_mapping_set_t *set, int flags, void (*async_callback)(void *arg), void *callback_arg);

/*
 * Unmaps the region, whether wired or mapped by faults. It stays allocated; pages allocated by
 * faults are freed. After GM_RET_OK no device can access it.
 *
 * With GM_ASYNC in `flags` the call returns at once. Operations run in the order of the calls, many
 * unmaps with one invalidation per device. `async_callback`, if not NULL, is called with
 * `callback_arg` when the operation is complete, which for an unmap is after the invalidation and
 * never before; any thread may call it, and it may call functions of this header. It has no
 * parameter for a result, so it is called only after success: gm_as_synchronize() returns a
 * failure, gm_region_state() shows which region failed, and that region is then as after a failure
 * without GM_ASYNC. Other calls that change the region wait for operations queued before them.
 *
 * Callbacks run on the space's own thread, or on any thread that waits for operations: a call of
 * gm_region_map(), gm_region_unmap(), gm_region_dealloc(), gm_region_protect(),
 * gm_mapping_set_unmap(), gm_as_synchronize(), gm_as_attach(), gm_as_destroy(), gm_dev_detach(),
 * gm_dev_fault(), gm_cpu_read() or gm_cpu_write() may run callbacks of other operations before it
 * returns. So do not call them with a lock held that a callback takes.
 *
 * Fails with GM_RET_NOT_MAPPED; GM_RET_BUSY or GM_RET_DEVICE, after which a device may still have
 * access: nothing was freed, and the only operation that the region then allows is to be unmapped
 * again.
 */
gm_ret_t gm_region_unmap(gm_region_t *region, int flags, void (*async_callback)(void *arg),
    void *callback_arg);

/*
 * Frees the region, after unmapping it if necessary. Its addresses may be allocated again, and its
 * handle is destroyed.
 *
 * Fails with GM_RET_BUSY or GM_RET_DEVICE, as gm_region_unmap(): the region is still allocated.
 */
gm_ret_t gm_region_dealloc(gm_region_t *region);

/*
 * Sets the placement policy of the region's pages. `dev` is the device in whose memory a page is
 * placed when it faults; NULL: the faulting device, or the host if that has no memory. The default
 * is NULL and GM_REGION_UNIQUE.
 *
 * Fails with GM_RET_NOT_ATTACHED if `dev` is not attached to the region's space.
 */
gm_ret_t gm_region_set_policy(gm_region_t *region, gm_dev_t *dev, gm_region_placement_t policy);

/*
 * Sets the access that the region allows, as mprotect() does for a process; with GM_PROT_NONE every
 * fault is denied. After GM_RET_OK no device has more access than that. A new region allows
 * everything. (Extension.)
 *
 * Fails with GM_RET_INVALID_ARGUMENT; GM_RET_BUSY or GM_RET_DEVICE, after which a device may still
 * have its former access: call it again.
 */
gm_ret_t gm_region_protect(gm_region_t *region, gm_prot_t prot);

/* Returns the first address of the region. (Extension.) */
gm_ret_t gm_region_begin(const gm_region_t *region, gm_va_t *begin);

/* Returns the first address after the region. (Extension.) */
gm_ret_t gm_region_end(const gm_region_t *region, gm_va_t *end);

/* Returns the size of the region in bytes. (Extension.) */
gm_ret_t gm_region_size(const gm_region_t *region, gm_va_t *size);

/*
 * Returns what backs the region now; it does not wait for queued operations. After
 * gm_as_synchronize() has returned a failure, a region whose mapping failed is GM_REGION_NOTHING,
 * and one that a device could not release is GM_REGION_LEAVING. (Extension.)
 */
gm_ret_t gm_region_state(const gm_region_t *region, gm_region_state_t *state);

/* Returns the virtual address space of the region. (Extension.) */
gm_ret_t gm_region_as(const gm_region_t *region, gm_as_t **out_as);

/* ---- Mapping sets ------------------------------------------------------------------------------ */

/* Creates an empty set of mappings of the virtual address space. (Extension.) */
gm_ret_t gm_mapping_set_create(gm_as_t *as, gm_mapping_set_t **new_set);

/* Destroys the set. Its mappings stay mapped, and are then in no set. (Extension.) */
gm_ret_t gm_mapping_set_destroy(gm_mapping_set_t *set);

/*
 * Unmaps all mappings of the set, with one invalidation per device, as gm_region_unmap() does for
 * one. Completion is signalled when all of them are unmapped.
 *
 * The operation is queued behind all operations queued in the space before it, even without
 * GM_ASYNC, and waits for them. It unmaps what is in the set when it runs, including mappings that
 * were queued before it, and waits for mappings whose region another caller is unmapping at that
 * moment. A mapping that was unmapped individually, and whose region was mapped again since, is not
 * in the set and stays.
 *
 * Returns the first failure, or GM_RET_IN_USE if that was a failure of another caller's unmap; all
 * are attempted, and those that failed remain in the set.
 */
gm_ret_t gm_mapping_set_unmap(gm_mapping_set_t *set, int flags,
    void (*async_callback)(void *arg), void *callback_arg);

/* ---- The host's CPUs --------------------------------------------------------------------------- */

/* The MMU of the host's CPUs: see gm_mmu_CPU. */
const gm_mmu_t *gm_mmu_cpu(void);

/*
 * The MMU of the host's CPUs, predefined: gm_dev_create(gm_mmu_CPU, &space,
 * GM_DEV_CAP_RECOVERS, &cpu) makes a device of them, where `space` is a gm_cpu_space_t whose mappings
 * an address space inherits, or NULL. A program cannot hand its own page tables to a library, so such a
 * CPU has a table like any device, and reaches memory at addresses of the space by gm_cpu_read() and
 * gm_cpu_write(). One CPU can be attached to a space.
 */
#define gm_mmu_CPU (gm_mmu_cpu())

/* The predefined device of the host's CPUs: see gm_dev_CPU. */
gm_dev_t *gm_dev_cpu(void);

/*
 * The host's CPUs as a device, predefined, with no mappings to inherit. As any device it is active in
 * one space at a time: a program with several spaces makes a CPU for each, of gm_mmu_CPU.
 */
#define gm_dev_CPU (gm_dev_cpu())

/*
 * Makes the physical addresses from `pa` to before `pa + size` accessible to this CPU as the bytes
 * from `memory` on. A CPU can access no other memory, so windows onto device memory must be added,
 * too. The memory must stay valid until gm_cpu_remove_window(). (Extension.)
 *
 * Fails with GM_RET_INVALID_ARGUMENT (also if the range overlaps another window),
 * GM_RET_UNSUPPORTED (the device is not a CPU).
 */
gm_ret_t gm_cpu_add_window(gm_dev_t *cpu, gm_pa_t pa, gm_va_t size, void *memory);

/*
 * Removes the window that begins at `pa`. After GM_RET_OK its memory is no longer accessed.
 * (Extension.)
 *
 * Fails with GM_RET_INVALID_ARGUMENT, GM_RET_UNSUPPORTED (the device is not a CPU).
 */
gm_ret_t gm_cpu_remove_window(gm_dev_t *cpu, gm_pa_t pa);

/*
 * Reads `size` bytes at `va`, in the space in which the CPU is active, to `buffer`; faults are
 * served on the way. The part within one page is atomic with respect to writes by this CPU; an
 * access to several pages is not. (Extension.)
 *
 * Fails as gm_dev_fault(), and with GM_RET_DEVICE if a page is in no window; the pages before it
 * have been copied then.
 */
gm_ret_t gm_cpu_read(gm_dev_t *cpu, gm_va_t va, void *buffer, size_t size);

/*
 * Writes `size` bytes from `buffer` to `va`, in the space in which the CPU is active. (Extension.)
 *
 * Fails as gm_cpu_read().
 */
gm_ret_t gm_cpu_write(gm_dev_t *cpu, gm_va_t va, const void *buffer, size_t size);

/* ---- This library ------------------------------------------------------------------------------ */

/* Describes a code, valid or not, in a sentence. It must not be freed. (Extension.) */
const char *gm_ret_string(gm_ret_t ret);

/*
 * Describes the last failed call of this thread, with its addresses and numbers; "" if none failed.
 * Devices are numbered in the order of their creation. Valid until the thread's next call that
 * fails. (Extension.)
 */
const char *gm_last_error(void);

/*
 * The version of the library: major << 16 | minor << 8 | patch; GM_VERSION is the version of the
 * header. (Extension.)
 */
uint32_t gm_version(void);

#ifdef __cplusplus
}
#endif

#endif /* PAGETIDE_GMEM_H */
