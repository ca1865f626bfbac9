/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A machine in miniature, for the tests: physical memory of which a part is the
 * host's and a part each device's, and devices that translate by page tables of
 * their own through a TLB that forgets nothing by itself. So whoever forgets an
 * invalidation is found out.
 *
 * Any operation of a driver can be made to fail, once or for ever.
 */
#ifndef MACHINE_H
#define MACHINE_H

#include "check.h"
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define PAGE 4096u
#define VA_BASE 0x40000000u /* of the address spaces of the tests */
#define VA_PAGES 4096u
#define VA_END (VA_BASE + VA_PAGES * PAGE)

#define PA_BASE 0x100000000u /* of all physical memory */
#define PA_PAGES 1024u
#define FORMAT_SOFT 7u

static unsigned char machine_memory[PA_PAGES * PAGE];

static inline unsigned char *memory_at(gm_pa_t pa)
{
    CHECK(pa >= PA_BASE && pa < PA_BASE + sizeof machine_memory);
    return machine_memory + (pa - PA_BASE);
}

/* The frame with this number. */
static inline gm_pa_t frame(unsigned number)
{
    CHECK(number < PA_PAGES);
    return PA_BASE + (gm_pa_t)number * PAGE;
}

/* What a page table or a TLB says of a page. */
struct entry {
    gm_pa_t pa;
    gm_prot_t prot; /* GM_PROT_NONE: nothing */
};

struct table {
    pthread_mutex_t lock;
    struct entry entries[VA_PAGES];
};

/* Operations that can be made to fail. */
enum operation {
    CREATE_TABLE,
    ACTIVATE,
    DEACTIVATE,
    MAP,
    UNMAP,
    PROTECT,
    INVALIDATE,
    PREPARE,
    COPY,
    INHERIT,
    OPERATIONS
};

struct device {
    pthread_mutex_t lock; /* of what follows; before a table's */
    struct table *active;
    struct entry tlb[VA_PAGES];
    int failures_left[OPERATIONS]; /* negative: for ever */
    int fails_with[OPERATIONS];
    unsigned calls[OPERATIONS];
    int tables;                         /* of its making */
    const gm_mapping_t *inherits;       /* what `inherit` tells of */
    size_t inherits_count;
    gm_dev_t *calls_back;               /* a device that `map` faults with, against the rules */
    gm_ret_t called_back;
};

/* The next `times` calls of an operation answer `code`. */
static inline void let_fail(struct device *device, enum operation operation, int times, int code)
{
    pthread_mutex_lock(&device->lock);
    device->failures_left[operation] = times;
    device->fails_with[operation] = code;
    pthread_mutex_unlock(&device->lock);
}

/* Counts a call; its failure, or 0. The device is locked. */
static inline int outcome(struct device *device, enum operation operation)
{
    device->calls[operation]++;
    if (device->failures_left[operation] == 0)
        return 0;
    if (device->failures_left[operation] > 0)
        device->failures_left[operation]--;
    return device->fails_with[operation];
}

static inline int begun(struct device *device, enum operation operation)
{
    pthread_mutex_lock(&device->lock);
    int code = outcome(device, operation);
    pthread_mutex_unlock(&device->lock);
    return code;
}

static inline size_t index_of(gm_va_t va)
{
    CHECK(va >= VA_BASE && va < VA_END);
    return (size_t)((va - VA_BASE) / PAGE);
}

static inline int device_table_create(void *mmu_data, gm_table_t *table)
{
    struct device *device = mmu_data;
    int code = begun(device, CREATE_TABLE);
    if (code != 0)
        return code;
    struct table *made = calloc(1, sizeof *made);
    CHECK(made != NULL);
    pthread_mutex_init(&made->lock, NULL);
    pthread_mutex_lock(&device->lock);
    device->tables++;
    pthread_mutex_unlock(&device->lock);
    *table = made;
    return 0;
}

static inline void device_table_destroy(void *mmu_data, gm_table_t table)
{
    struct device *device = mmu_data;
    struct table *gone = table;
    pthread_mutex_lock(&device->lock);
    CHECK(device->active != gone);
    device->tables--;
    pthread_mutex_unlock(&device->lock);
    pthread_mutex_destroy(&gone->lock);
    free(gone);
}

static inline int device_activate(void *mmu_data, gm_table_t table)
{
    struct device *device = mmu_data;
    pthread_mutex_lock(&device->lock);
    int code = outcome(device, ACTIVATE);
    if (code == 0) {
        CHECK(device->active == NULL);
        device->active = table;
        memset(device->tlb, 0, sizeof device->tlb);
    }
    pthread_mutex_unlock(&device->lock);
    return code;
}

static inline int device_deactivate(void *mmu_data, gm_table_t table)
{
    struct device *device = mmu_data;
    pthread_mutex_lock(&device->lock);
    int code = outcome(device, DEACTIVATE);
    if (code == 0) {
        CHECK(device->active == table);
        device->active = NULL;
        memset(device->tlb, 0, sizeof device->tlb);
    }
    pthread_mutex_unlock(&device->lock);
    return code;
}

static inline int device_map(void *mmu_data, gm_table_t table, gm_va_t va, gm_va_t size, gm_pa_t pa,
                             gm_va_t page_size, gm_prot_t prot)
{
    struct device *device = mmu_data;
    struct table *into = table;
    CHECK(va % page_size == 0 && size % page_size == 0 && pa % page_size == 0);
    CHECK(prot == GM_PROT_READ || prot == (GM_PROT_READ | GM_PROT_WRITE));
    if (device->calls_back != NULL)
        device->called_back = gm_dev_fault(device->calls_back, va, GM_PROT_READ);
    int code = begun(device, MAP);
    if (code != 0)
        return code;
    pthread_mutex_lock(&into->lock);
    for (gm_va_t done = 0; done < size; done += PAGE) {
        struct entry entry = {pa + done, prot};
        into->entries[index_of(va + done)] = entry;
    }
    pthread_mutex_unlock(&into->lock);
    return 0;
}

static inline int device_unmap(void *mmu_data, gm_table_t table, gm_va_t va, gm_va_t size)
{
    struct device *device = mmu_data;
    struct table *from = table;
    int code = begun(device, UNMAP);
    if (code != 0)
        return code;
    pthread_mutex_lock(&from->lock);
    for (gm_va_t done = 0; done < size; done += PAGE)
        from->entries[index_of(va + done)].prot = GM_PROT_NONE;
    pthread_mutex_unlock(&from->lock);
    return 0;
}

static inline int device_protect(void *mmu_data, gm_table_t table, gm_va_t va, gm_va_t size,
                                 gm_prot_t prot)
{
    struct device *device = mmu_data;
    struct table *in = table;
    int code = begun(device, PROTECT);
    if (code != 0)
        return code;
    pthread_mutex_lock(&in->lock);
    for (gm_va_t done = 0; done < size; done += PAGE)
        in->entries[index_of(va + done)].prot &= prot;
    pthread_mutex_unlock(&in->lock);
    return 0;
}

static inline int device_invalidate(void *mmu_data, gm_table_t table, const gm_range_t *ranges,
                                    size_t count)
{
    struct device *device = mmu_data;
    pthread_mutex_lock(&device->lock);
    int code = outcome(device, INVALIDATE);
    if (code == 0) {
        CHECK(device->active == table);
        for (size_t at = 0; at < count; at++) {
            CHECK(at == 0 || ranges[at].va > ranges[at - 1].va + ranges[at - 1].size);
            for (gm_va_t done = 0; done < ranges[at].size; done += PAGE)
                device->tlb[index_of(ranges[at].va + done)].prot = GM_PROT_NONE;
        }
    }
    pthread_mutex_unlock(&device->lock);
    return code;
}

static inline int device_prepare(void *mmu_data, gm_pa_t pa, gm_va_t size)
{
    int code = begun(mmu_data, PREPARE);
    if (code == 0)
        memset(memory_at(pa), 0, size);
    return code;
}

static inline int device_copy(void *mmu_data, gm_pa_t to, gm_pa_t from, gm_va_t size)
{
    int code = begun(mmu_data, COPY);
    if (code == 0)
        memcpy(memory_at(to), memory_at(from), size);
    return code;
}

static inline int device_inherit(void *mmu_data, gm_inherit_fn add, void *list)
{
    struct device *device = mmu_data;
    int code = begun(device, INHERIT);
    for (size_t at = 0; code == 0 && at < device->inherits_count; at++)
        add(list, &device->inherits[at]);
    return code;
}

/* All operations of a device of this machine. */
static inline gm_mmu_t device_mmu(void)
{
    gm_mmu_t mmu;
    memset(&mmu, 0, sizeof mmu);
    mmu.struct_size = sizeof mmu;
    mmu.page_sizes = PAGE | (2u << 20);
    mmu.format = FORMAT_SOFT;
    mmu.table_create = device_table_create;
    mmu.table_destroy = device_table_destroy;
    mmu.activate = device_activate;
    mmu.deactivate = device_deactivate;
    mmu.map = device_map;
    mmu.unmap = device_unmap;
    mmu.protect = device_protect;
    mmu.invalidate = device_invalidate;
    mmu.prepare = device_prepare;
    mmu.copy = device_copy;
    mmu.inherit = device_inherit;
    return mmu;
}

static inline void device_init(struct device *device)
{
    memset(device, 0, sizeof *device);
    pthread_mutex_init(&device->lock, NULL);
}

/* A device of this machine, with those capabilities. */
static inline gm_dev_t *device_create(struct device *device, gm_dev_cap_t cap)
{
    gm_mmu_t mmu = device_mmu();
    gm_dev_t *dev = NULL;
    device_init(device);
    OK(gm_dev_create(&mmu, device, cap, &dev));
    return dev;
}

/*
 * One access of a device to one byte, through TLB and page table; 0 if it faults.
 */
static inline int device_access(struct device *device, gm_va_t va, gm_prot_t access,
                                unsigned char *byte)
{
    size_t at = index_of(va);
    pthread_mutex_lock(&device->lock);
    struct entry entry = device->tlb[at];
    if ((entry.prot & access) == 0 && device->active != NULL) {
        pthread_mutex_lock(&device->active->lock);
        entry = device->active->entries[at];
        pthread_mutex_unlock(&device->active->lock);
        device->tlb[at] = entry;
    }
    int done = (entry.prot & access) != 0;
    if (done && access == GM_PROT_WRITE)
        memory_at(entry.pa)[va % PAGE] = *byte;
    else if (done)
        *byte = memory_at(entry.pa)[va % PAGE];
    pthread_mutex_unlock(&device->lock);
    return done;
}

/* As device_access, with as many faults as it takes; the code of a fault that is refused. */
static inline gm_ret_t device_reach(struct device *device, gm_dev_t *dev, gm_va_t va,
                                    gm_prot_t access, unsigned char *byte)
{
    while (!device_access(device, va, access, byte)) {
        gm_ret_t ret = gm_dev_fault(dev, va, access);
        if (ret != GM_RET_OK)
            return ret;
    }
    return GM_RET_OK;
}

#endif
