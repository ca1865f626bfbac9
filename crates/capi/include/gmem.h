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
 * GM_RET_OK only. What is not in the paper is marked (Ours.).
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
 * A virtual address space: what is allocated in it, who is attached to it, and what is mapped.
 *
 * A handle. It is not an address and never followed: a handle that was never given out is answered
 * with GM_RET_INVALID_HANDLE, one whose object was destroyed with GM_RET_DESTROYED. That holds for
 * all four kinds of handles. They may be compared, copied, and used by any thread at any time.
 */
typedef struct gm_as gm_as_t;

/* A device: whoever uses address spaces, with the operations of its MMU. A handle. */
typedef struct gm_dev gm_dev_t;

/*
 * An allocated range of virtual addresses of one address space. A handle.
 *
 * A region has one handle as long as it lives: two handles are equal if the regions are the same.
 */
typedef struct gm_region gm_region_t;

/* Mappings of one address space that are unmapped together. A handle. */
typedef struct gm_mapping_set gm_mapping_set_t;

/*
 * What became of a call. Unless the function says otherwise, a call that failed has changed
 * nothing. gm_ret_string() has a sentence for each, gm_last_error() one with the numbers of the
 * case.
 */
typedef enum gm_ret {
    /* It is done. */
    GM_RET_OK = 0,
    /* A handle that was never given out, or NULL, or of another kind. */
    GM_RET_INVALID_HANDLE = 1,
    /* The space, device, region or mapping set was destroyed. */
    GM_RET_DESTROYED = 2,
    /*
     * An argument makes no sense: a NULL where there must be something, an unknown flag, a range
     * that is empty or not of whole pages.
     */
    GM_RET_INVALID_ARGUMENT = 3,
    /* No free range of addresses satisfies the request. */
    GM_RET_NO_ADDRESSES = 4,
    /* No physical memory is free, or none is registered. */
    GM_RET_NO_MEMORY = 5,
    /* The address is in no allocated region. */
    GM_RET_NOT_ALLOCATED = 6,
    /* The device is attached to the space already (a CPU: another CPU is). */
    GM_RET_ALREADY_ATTACHED = 7,
    /* The device is not attached to the space. */
    GM_RET_NOT_ATTACHED = 8,
    /* The device is active in no space. */
    GM_RET_NOT_ACTIVE = 9,
    /* Something else still uses it. */
    GM_RET_IN_USE = 10,
    /* The region is mapped already. */
    GM_RET_ALREADY_MAPPED = 11,
    /* The region is not mapped. */
    GM_RET_NOT_MAPPED = 12,
    /* The region, or its mapping, does not allow the access. */
    GM_RET_DENIED = 13,
    /* The device cannot recover from a fault: wire what it may use (gm_region_map). */
    GM_RET_CANNOT_RECOVER = 14,
    /* This space, device or region, or this version, cannot do that. */
    GM_RET_UNSUPPORTED = 15,
    /* A driver answered GM_MMU_BUSY and did not stop: try again. */
    GM_RET_BUSY = 16,
    /* An operation of a driver failed: gm_last_error() has the driver's code. */
    GM_RET_DEVICE = 17,
    /*
     * The function was called from within an operation of a driver, where it would wait for itself.
     */
    GM_RET_IN_DRIVER = 18,
    /* A mistake of this library. What the call was to do may be half done. */
    GM_RET_INTERNAL = 19
} gm_ret_t;

/* Types of access to a virtual address, to be combined. GM_PROT_WRITE includes GM_PROT_READ. */
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
    /* Some range that fits, found in constant time. */
    GM_AS_ALLOC_DEFAULT = 0,
    /* The lowest range that fits. */
    GM_AS_ALLOC_FIRST_FIT = 1,
    /* An unused page is kept on both sides of each region, to trap what runs over its ends. */
    GM_AS_ALLOC_GUARDED = 2,
    /* Small regions that are freed are kept, by size, for the next request. */
    GM_AS_ALLOC_CACHED = 4
};

/* Whose page table a device uses. */
typedef enum gm_mmu_mode {
    /*
     * One that attached devices of the same format share, if both can recover from faults or
     * neither can; a coherent one is made if there is none.
     */
    GM_MMU_MODE_SHARED = 0,
    /* One of its own, which is kept coherent with the others. */
    GM_MMU_MODE_COHERENT = 1
} gm_mmu_mode_t;

/* What a device is capable of; the flags may be combined. */
typedef uint32_t gm_dev_cap_t;

enum {
    /* Nothing of the following. */
    GM_DEV_CAP_NONE = 0,
    /*
     * An access that causes a translation fault waits and is repeated. A device without this gets
     * wired mappings only.
     */
    GM_DEV_CAP_RECOVERS = 1
};

/* What a fault makes of a page's other mappings, and where the page is placed. */
typedef enum gm_region_placement {
    /*
     * One mapping in the whole space: others are destroyed first, and the page moves to the memory
     * of the device that faulted, if it has some. The default.
     */
    GM_REGION_UNIQUE = 0,
    /* The page stays where it is, and whoever faults on it maps it there. */
    GM_REGION_REMOTE_ACCESS = 1,
    /*
     * As GM_REGION_UNIQUE, and the pages that follow are brought along without being waited for.
     */
    GM_REGION_PREFETCH = 2
} gm_region_placement_t;

/* What is behind a region: see gm_region_state(). (Ours.) */
typedef enum gm_region_state {
    /* Nothing: never mapped, or unmapped. */
    GM_REGION_NOTHING = 0,
    /* Pages of the caller's (gm_region_map). */
    GM_REGION_WIRED = 1,
    /* Pages that faults have brought. */
    GM_REGION_DEMAND = 2,
    /* Pages of a virtual machine's memory. No space that is made by this header has such. */
    GM_REGION_PAGED = 3,
    /*
     * It is being unmapped at this moment; or a device failed in an unmap and may reach it still,
     * and it must be unmapped again.
     */
    GM_REGION_LEAVING = 4
} gm_region_state_t;

/*
 * Flags of gm_region_map, gm_region_unmap and gm_mapping_set_unmap; the page size of a mapping is
 * added with GM_MAP_PAGE_SIZE.
 */
typedef int gm_flags_t;

enum {
    /* The call returns at once; see gm_region_unmap for what follows. */
    GM_ASYNC = 1
};

/*
 * Flag of gm_region_map: pages of 2^log2 bytes. Without it they have 4 KiB.
 */
#define GM_MAP_PAGE_SIZE(log2) ((int)(log2) << 8)

/* A page table, as the driver that made it names it. */
typedef void *gm_table_t;

/* A range of virtual addresses, in whole pages. */
typedef struct gm_range {
    /* Where it begins. */
    gm_va_t va;
    /* Its length, in bytes. */
    gm_va_t size;
} gm_range_t;

/* A mapping: frames that follow one another, at addresses that follow one another. */
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
 * Takes the mapping for the space to which the device is being attached. Given to `inherit` of
 * gm_mmu_t, to be called as often as there are mappings, with the `list` that came with it.
 */
typedef void (*gm_inherit_fn)(void *list, const gm_mapping_t *mapping);

/*
 * An answer of `unmap` and `protect` of gm_mmu_t: an access is under way; the space asks again for
 * some milliseconds. No code of a driver's own may have this value.
 */
#define GM_MMU_BUSY 0x7fffffff

/*
 * The operations of one kind of MMU, and what it can do.
 *
 * Zero it, set `struct_size` to sizeof(gm_mmu_t), and fill in what there is: `map` and `unmap`
 * there must be, all else may be NULL. gm_dev_create() takes a copy.
 *
 * The operations get the `mmu_data` of the device first. They return 0, or a code of the driver's
 * own, of which gm_last_error() tells. They are called by any thread, by several at once for
 * different pages, and with locks of the address space held: they must not call functions of this
 * header (which answer GM_RET_IN_DRIVER), and must not wait for a thread that does. No exception
 * may leave them.
 */
typedef struct gm_mmu {
    /* sizeof(gm_mmu_t), so that later versions can add to it. */
    size_t struct_size;
    /* Page sizes it can map: bit n stands for pages of 2^n bytes. 4 KiB always is among them. */
    uint64_t page_sizes;
    /*
     * Format of its page tables. Devices with the same one can share a table, and are given the
     * tables of one another (by `activate`, without which a device shares none). 0: nobody else can
     * use them. Not 0xffffffff, which is that of gm_mmu_CPU.
     */
    uint32_t format;
    /* Must be 0. */
    uint32_t reserved;
    /*
     * Makes an empty page table, another for each space. NULL: there is just one, which is called
     * NULL. To be attached to more than one space at a time a device needs this, `activate` and
     * `deactivate`; a table that another space has is not taken (GM_RET_UNSUPPORTED of
     * gm_as_attach()).
     */
    int (*table_create)(void *mmu_data, gm_table_t *table);
    /* Nobody uses the table any more. */
    void (*table_destroy)(void *mmu_data, gm_table_t table);
    /* From now on the device translates by the table, with an empty TLB. */
    int (*activate)(void *mmu_data, gm_table_t table);
    /*
     * From now on the device translates by nothing; no access by the table is under way any more.
     */
    int (*deactivate)(void *mmu_data, gm_table_t table);
    /*
     * Enters translations of `size` bytes to frames that follow one another from `pa` on, by pages
     * of `page_size` bytes. What is translated already gets the new frame and access instead; if
     * that only allows more, no `invalidate` follows, so a device that faults must drop its TLB's
     * entry of the page before it tries again.
     */
    int (*map)(void *mmu_data, gm_table_t table, gm_va_t va, gm_va_t size, gm_pa_t pa,
        gm_va_t page_size, gm_prot_t prot);
    /* Removes translations. Some of the pages may have none. May answer GM_MMU_BUSY. */
    int (*unmap)(void *mmu_data, gm_table_t table, gm_va_t va, gm_va_t size);
    /*
     * Leaves translations no more access than `prot`. Some of the pages may have none. May answer
     * GM_MMU_BUSY. NULL: they are removed, and given again when the device faults.
     */
    int (*protect)(void *mmu_data, gm_table_t table, gm_va_t va, gm_va_t size, gm_prot_t prot);
    /*
     * Forgets what TLBs of this device hold of the table for the ranges, which are ascending and
     * apart. When it returns 0, no access by a translation that is no longer in the table is under
     * way or can begin. NULL: the device has no TLB.
     */
    int (*invalidate)(void *mmu_data, gm_table_t table, const gm_range_t *ranges, size_t count);
    /*
     * Fills memory that is registered with the device with zeros. Needed for
     * gm_dev_register_physmem().
     */
    int (*prepare)(void *mmu_data, gm_pa_t pa, gm_va_t size);
    /*
     * Copies between two places, one of them in memory that is registered with the device, the
     * other perhaps in another device's or the host's. Needed for gm_dev_register_physmem().
     */
    int (*copy)(void *mmu_data, gm_pa_t to, gm_pa_t from, gm_va_t size);
    /*
     * Tells, by calling `add`, of the mappings that exist already, 2^20 at most; they become wired
     * regions of the space the device is attached to.
     */
    int (*inherit)(void *mmu_data, gm_inherit_fn add, void *list);
} gm_mmu_t;

/*
 * What `mmu_data` is for gm_mmu_CPU: mappings of a virtual address space of the host, which a
 * gm_as_t inherits as wired regions when the CPU is attached to it. gm_dev_create() takes a copy.
 */
typedef struct gm_cpu_space {
    /* The mappings; NULL if there are none. */
    const gm_mapping_t *mappings;
    /* How many: 2^20 at most. */
    size_t count;
} gm_cpu_space_t;

/* ---- Virtual address spaces -------------------------------------------------------------------- */

/*
 * Creates a virtual address space of the addresses from `begin` to before `end`, which begin and
 * end pages of 4 KiB. Addresses are allocated as `policy` says: a combination of GM_AS_ALLOC_
 * flags.
 *
 * Fails with GM_RET_INVALID_ARGUMENT.
 */
gm_ret_t gm_as_create(gm_va_t begin, gm_va_t end, gm_as_alloc_t policy, gm_as_t **new_as);

/*
 * Destroys the virtual address space, which must have neither regions nor attached devices, and its
 * mapping sets. Asynchronous operations are complete and their callbacks have returned when this
 * returns (but one from within which it is called).
 *
 * Fails with GM_RET_IN_USE.
 */
gm_ret_t gm_as_destroy(gm_as_t *as);

/*
 * Attaches the device to the virtual address space, to use a page table of the kind that `mode`
 * says. The space's wired mappings are entered in it; mappings that the device has already
 * (`inherit` of gm_mmu_t) become wired regions of the space. A device can be attached to many
 * spaces and is active in one at a time: if `activate` is true, it is active here and nowhere else
 * any more.
 *
 * Fails with GM_RET_ALREADY_ATTACHED, GM_RET_NO_ADDRESSES (an inherited mapping lies where a region
 * is), GM_RET_INVALID_ARGUMENT (an inherited mapping is not of whole pages), GM_RET_UNSUPPORTED
 * (the page size of a wired mapping; more than 64 page tables; a second space for a driver that has
 * one table: `table_create` of gm_mmu_t), GM_RET_DEVICE. The device is then not attached, and
 * active where it was.
 */
gm_ret_t gm_as_attach(gm_as_t *as, gm_dev_t *dev, gm_mmu_mode_t mode, bool activate);

/*
 * Allocates a region of `size` bytes, rounded up to whole pages of 4 KiB.
 *
 * It begins at `hint` if that is not 0 and free there; else above it, if there is room; else
 * anywhere. It begins at a multiple of `align` and does not lie across a multiple of `no_cross`,
 * which are powers of two, or 0 for no such wish. `max_va` is the last address it may hold, 0 for
 * any.
 *
 * Fails with GM_RET_INVALID_ARGUMENT, GM_RET_NO_ADDRESSES.
 */
gm_ret_t gm_as_alloc(gm_as_t *as, gm_va_t hint, gm_va_t size, gm_va_t align, gm_va_t no_cross,
    gm_va_t max_va, gm_region_t **new_region);

/*
 * Searches the virtual address space for the allocated region that contains `addr`. A region that
 * was inherited gets its handle by this.
 *
 * Fails with GM_RET_NOT_ALLOCATED.
 */
gm_ret_t gm_as_lookup(gm_as_t *as, gm_va_t addr, gm_region_t **out_region);

/*
 * Waits until all asynchronous operations that were queued before are complete and their callbacks
 * have returned. (Within a callback it does not wait for callbacks.)
 *
 * Fails with the first failure of an asynchronous operation since the last call of this function,
 * which is told once. All operations are complete then, too; gm_region_state() tells of which
 * regions a device would not let go.
 */
gm_ret_t gm_as_synchronize(gm_as_t *as);

/* ---- Devices ----------------------------------------------------------------------------------- */

/*
 * Creates a device with the operations of `mmu`, which are given `mmu_data`, and the capabilities
 * `cap`: a combination of GM_DEV_CAP_ flags. Virtual functions of a device are devices of their
 * own.
 *
 * `mmu` is copied. `mmu_data` must be good until gm_dev_destroy() has returned GM_RET_OK. With
 * gm_mmu_CPU it is NULL, or a gm_cpu_space_t, which is copied. Whether `mmu` is gm_mmu_CPU is told
 * by its address, so a copy of it is refused, and so is its format (0xffffffff) in another.
 *
 * Fails with GM_RET_INVALID_ARGUMENT, GM_RET_UNSUPPORTED (operations of a later version).
 */
gm_ret_t gm_dev_create(const gm_mmu_t *mmu, void *mmu_data, gm_dev_cap_t cap, gm_dev_t **new_dev);

/*
 * Destroys the device, which must be attached nowhere; no page may lie in its memory, and no other
 * device share a page table of its making. Its operations are not called again then.
 *
 * Fails with GM_RET_IN_USE, GM_RET_UNSUPPORTED (gm_dev_CPU).
 */
gm_ret_t gm_dev_destroy(gm_dev_t *dev);

/*
 * Activates the device in the virtual address space, to which it is attached; it is active nowhere
 * else then.
 *
 * Fails with GM_RET_NOT_ATTACHED; GM_RET_DEVICE, and is then active nowhere or where it was.
 */
gm_ret_t gm_dev_switch(gm_dev_t *dev, gm_as_t *as);

/*
 * Detaches the device from the virtual address space. Its page table is destroyed, unless others
 * share it. Pages that lie in its memory stay there.
 *
 * Fails with GM_RET_NOT_ATTACHED; GM_RET_DEVICE if it would not let go: it is then attached still.
 */
gm_ret_t gm_dev_detach(gm_dev_t *dev, gm_as_t *as);

/*
 * Serves an address translation fault of the device at `addr`, which wanted `access`: GM_PROT_READ
 * or GM_PROT_WRITE. GM_RET_OK says that the device should repeat the access. It is not promised
 * that the mapping still is there then, as others may have faulted meanwhile. Before it does, it
 * must drop what its TLB holds of the page: a translation that only allows more than before comes
 * without `invalidate`.
 *
 * Fails with GM_RET_NOT_ACTIVE, GM_RET_CANNOT_RECOVER, GM_RET_NOT_ALLOCATED, GM_RET_DENIED,
 * GM_RET_NOT_MAPPED (the region is being unmapped, or has to be unmapped again after a failure),
 * GM_RET_NO_MEMORY, GM_RET_BUSY, GM_RET_DEVICE.
 */
gm_ret_t gm_dev_fault(gm_dev_t *dev, gm_va_t addr, gm_prot_t access);

/*
 * Registers memory of the device, from `begin` to before `end`, in whole frames of 4 KiB: pages
 * that it faults on are placed there (gm_region_set_policy). Memory that is registered with the CPU
 * is the host's, where pages of devices without memory are placed; windows must show it
 * (gm_cpu_add_window). gm_dev_unregister_physmem() and gm_dev_destroy() give it back.
 *
 * Fails with GM_RET_INVALID_ARGUMENT (also if part of it is registered already), GM_RET_UNSUPPORTED
 * (the driver has no `prepare` or no `copy`).
 */
gm_ret_t gm_dev_register_physmem(gm_dev_t *dev, gm_pa_t begin, gm_pa_t end);

/*
 * Takes memory back that was registered with the device, as the range that was registered; it must
 * hold no page. (Ours.)
 *
 * Fails with GM_RET_INVALID_ARGUMENT if just that was not registered, GM_RET_IN_USE.
 */
gm_ret_t gm_dev_unregister_physmem(gm_dev_t *dev, gm_pa_t begin, gm_pa_t end);

/* Tells how many bytes of the device's registered memory hold pages. (Ours.) */
gm_ret_t gm_dev_used_physmem(const gm_dev_t *dev, uint64_t *bytes);

/* ---- Regions ----------------------------------------------------------------------------------- */

/*
 * Creates a wired mapping from the region to physical pages, in the page tables of all devices of
 * the space, those that are attached later included. `prot` says what it allows.
 *
 * `pages` has one address for each page of the region, of the page size that `flags` says: 4 KiB,
 * or GM_MAP_PAGE_SIZE(log2 of it). It is copied. (In the paper these are pointers to `struct
 * vm_page`, which a user of this library does not have.) If `set` is not NULL, the mapping joins
 * it. With GM_ASYNC in `flags` the call returns at once: see gm_region_unmap().
 *
 * Fails with GM_RET_ALREADY_MAPPED, GM_RET_INVALID_ARGUMENT, GM_RET_UNSUPPORTED (a device cannot
 * map pages of that size), GM_RET_DENIED (see gm_region_protect), GM_RET_DEVICE. If a device would
 * not take back what it had got, the region must be unmapped before it is used again.
 */
gm_ret_t gm_region_map(gm_region_t *region, gm_prot_t prot, const gm_pa_t *pages,
    gm_mapping_set_t *set, int flags, void (*async_callback)(void *arg), void *callback_arg);

/*
 * Unmaps the region, be it wired or mapped by faults. It stays allocated; pages that faults brought
 * are freed. With GM_RET_OK no device can reach it any more.
 *
 * With GM_ASYNC in `flags` the call returns at once, and the operation is carried out in the order
 * of the calls, many unmaps with one invalidation a device. `async_callback`, if not NULL, is
 * called with `callback_arg` when the operation is complete, which for an unmap is after the
 * invalidation and never before; any thread may be the one that calls it, and it may call functions
 * of this header. A function without a result cannot tell of a failure, so it is called after
 * success only: a failure is told by gm_as_synchronize(), gm_region_state() tells which region it
 * was, and the region then is as after a failure without GM_ASYNC. Other calls that change the
 * region wait for what was queued before them.
 *
 * Callbacks run on the space's own thread, or on any thread that does the waiting work itself: a
 * call of gm_region_map(), gm_region_unmap(), gm_region_dealloc(), gm_region_protect(),
 * gm_mapping_set_unmap(), gm_as_synchronize(), gm_as_attach(), gm_as_destroy(), gm_dev_detach(),
 * gm_dev_fault(), gm_cpu_read() or gm_cpu_write() may run callbacks of other operations before it
 * returns. So call them with no lock held that a callback takes.
 *
 * Fails with GM_RET_NOT_MAPPED; GM_RET_BUSY or GM_RET_DEVICE, after which a device may reach it
 * still: nothing was freed, and the region can do nothing but be unmapped again.
 */
gm_ret_t gm_region_unmap(gm_region_t *region, int flags, void (*async_callback)(void *arg),
    void *callback_arg);

/*
 * Frees the region; it is unmapped before if need be. Its addresses may be allocated again, and its
 * handle is of nothing.
 *
 * Fails with GM_RET_BUSY or GM_RET_DEVICE, as gm_region_unmap(): the region is allocated still.
 */
gm_ret_t gm_region_dealloc(gm_region_t *region);

/*
 * Sets what a fault makes of the region's pages. `dev` says in whose memory a page is placed that
 * is faulted on; NULL: in that of the faulting device, or of the host if it has none. The default
 * is NULL and GM_REGION_UNIQUE.
 *
 * Fails with GM_RET_NOT_ATTACHED if `dev` is not attached to the region's space.
 */
gm_ret_t gm_region_set_policy(gm_region_t *region, gm_dev_t *dev, gm_region_placement_t policy);

/*
 * Says what may be done with the region from now on, as mprotect() does for a process; GM_PROT_NONE
 * lets every fault be denied. With GM_RET_OK no device has more access than that. A new region
 * allows everything. (Ours.)
 *
 * Fails with GM_RET_INVALID_ARGUMENT; GM_RET_BUSY or GM_RET_DEVICE, after which a device may keep
 * what access it had: protect it again.
 */
gm_ret_t gm_region_protect(gm_region_t *region, gm_prot_t prot);

/* Tells where the region begins. (Ours.) */
gm_ret_t gm_region_begin(const gm_region_t *region, gm_va_t *begin);

/* Tells where the region ends: the first address behind it. (Ours.) */
gm_ret_t gm_region_end(const gm_region_t *region, gm_va_t *end);

/* Tells how long the region is, in bytes. (Ours.) */
gm_ret_t gm_region_size(const gm_region_t *region, gm_va_t *size);

/*
 * Tells what is behind the region at this moment; what is queued for it is not waited for. After
 * gm_as_synchronize() has told of a failure, a region whose mapping failed is GM_REGION_NOTHING,
 * and one that a device would not let go is GM_REGION_LEAVING. (Ours.)
 */
gm_ret_t gm_region_state(const gm_region_t *region, gm_region_state_t *state);

/* Tells which virtual address space the region is of. (Ours.) */
gm_ret_t gm_region_as(const gm_region_t *region, gm_as_t **out_as);

/* ---- Mapping sets ------------------------------------------------------------------------------ */

/* Creates an empty set of mappings of the virtual address space. (Ours.) */
gm_ret_t gm_mapping_set_create(gm_as_t *as, gm_mapping_set_t **new_set);

/* Destroys the set. Mappings that are in it stay mapped, and are in no set then. (Ours.) */
gm_ret_t gm_mapping_set_destroy(gm_mapping_set_t *set);

/*
 * Unmaps all mappings of the set, with one invalidation a device, as gm_region_unmap() does for
 * one. Completion is told when all of them are gone.
 *
 * It takes its turn behind all that was queued in the space before, without GM_ASYNC, too, and
 * waits for it: what is in the set when its turn comes is unmapped, mappings that were queued
 * before it included, and mappings of which somebody else unmaps the region at that moment are
 * waited for. A mapping that ended on its own, and whose region was mapped anew since, is not in
 * the set and stays.
 *
 * Fails with the first failure of one of them, or GM_RET_IN_USE if that failure was of somebody
 * else's unmap; all are tried, and those that failed are in the set still.
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
 * From now on the physical addresses from `pa` to before `pa + size` are the bytes from `memory`
 * on, for this CPU. It reaches nothing else, so what it is to reach of a device's memory must be
 * shown, too. The memory must be good until gm_cpu_remove_window(). (Ours.)
 *
 * Fails with GM_RET_INVALID_ARGUMENT (also if part of it is shown already), GM_RET_UNSUPPORTED (the
 * device is not a CPU).
 */
gm_ret_t gm_cpu_add_window(gm_dev_t *cpu, gm_pa_t pa, gm_va_t size, void *memory);

/*
 * Removes the window that begins at `pa`. With GM_RET_OK its memory is not touched any more.
 * (Ours.)
 *
 * Fails with GM_RET_INVALID_ARGUMENT, GM_RET_UNSUPPORTED (the device is not a CPU).
 */
gm_ret_t gm_cpu_remove_window(gm_dev_t *cpu, gm_pa_t pa);

/*
 * Copies `size` bytes at `va` of the space in which the CPU is active to `buffer`, as the CPU would
 * read them: faults are served on the way. What lies in one page is copied as a whole, with no
 * write by this CPU in between; several pages are not. (Ours.)
 *
 * Fails as gm_dev_fault(), and with GM_RET_DEVICE if no window shows a page; the pages before that
 * one were copied then.
 */
gm_ret_t gm_cpu_read(gm_dev_t *cpu, gm_va_t va, void *buffer, size_t size);

/*
 * Copies `size` bytes from `buffer` to `va` of the space in which the CPU is active, as the CPU
 * would write them. (Ours.)
 *
 * Fails as gm_cpu_read().
 */
gm_ret_t gm_cpu_write(gm_dev_t *cpu, gm_va_t va, const void *buffer, size_t size);

/* ---- This library ------------------------------------------------------------------------------ */

/* A sentence for a code; also for a number that is none. It is never freed. (Ours.) */
const char *gm_ret_string(gm_ret_t ret);

/*
 * A sentence about the last call of this thread that failed, with the numbers of the case; "" if
 * none did. Devices have numbers there, in the order they were created in. It is good until the
 * thread's next call that fails. (Ours.)
 */
const char *gm_last_error(void);

/*
 * The version of the library: major << 16 | minor << 8 | patch, as GM_VERSION is the header's.
 * (Ours.)
 */
uint32_t gm_version(void);

#ifdef __cplusplus
}
#endif

#endif /* PAGETIDE_GMEM_H */
