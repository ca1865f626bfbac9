/* SPDX-License-Identifier: Apache-2.0 */
/* For every code of gm_ret_t a call that returns it, in one table; and misuse that must not crash. */

#include "machine.h"

/* The tests' build of the library has one function more. */
extern gm_ret_t gm_provoke_panic(void);

/* A space with a device that recovers, active in it, with memory of four frames; and a region. */
struct stage {
    struct device device;
    gm_as_t *as;
    gm_dev_t *dev;
    gm_region_t *region;
    gm_va_t va;
    gm_pa_t pages[2];
};

static struct stage *stage_up(gm_dev_cap_t cap)
{
    struct stage *stage = calloc(1, sizeof *stage);
    CHECK(stage != NULL);
    stage->pages[0] = frame(8);
    stage->pages[1] = frame(9);
    OK(gm_as_create(VA_BASE, VA_END, 0, &stage->as));
    stage->dev = device_create(&stage->device, cap);
    OK(gm_dev_register_physmem(stage->dev, frame(0), frame(4)));
    OK(gm_as_attach(stage->as, stage->dev, GM_MMU_MODE_COHERENT, true));
    OK(gm_as_alloc(stage->as, 0, 2 * PAGE, 0, 0, 0, &stage->region));
    OK(gm_region_begin(stage->region, &stage->va));
    return stage;
}

static struct stage *stage(void)
{
    return stage_up(GM_DEV_CAP_RECOVERS);
}

/* What is left of it goes without a failure, whatever the code was; returns that. */
static gm_ret_t down(struct stage *stage, gm_ret_t ret)
{
    for (int operation = 0; operation < OPERATIONS; operation++)
        let_fail(&stage->device, (enum operation)operation, 0, 0);
    OK(gm_region_dealloc(stage->region));
    OK(gm_dev_detach(stage->dev, stage->as));
    OK(gm_dev_destroy(stage->dev));
    OK(gm_as_destroy(stage->as));
    CHECK(stage->device.tables == 0 && stage->device.active == NULL);
    free(stage);
    return ret;
}

static gm_ret_t map(struct stage *stage)
{
    return gm_region_map(stage->region, GM_PROT_WRITE, stage->pages, NULL, 0, NULL, NULL);
}

static gm_ret_t ok(void)
{
    struct stage *now = stage();
    return down(now, gm_dev_fault(now->dev, now->va, GM_PROT_READ));
}

static gm_ret_t invalid_handle(void)
{
    struct stage *now = stage();
    gm_region_t *found = NULL;
    return down(now, gm_as_lookup((gm_as_t *)now->dev, now->va, &found));
}

static gm_ret_t destroyed(void)
{
    gm_as_t *as = NULL;
    OK(gm_as_create(VA_BASE, VA_END, 0, &as));
    OK(gm_as_destroy(as));
    return gm_as_destroy(as);
}

static gm_ret_t invalid_argument(void)
{
    gm_as_t *as = NULL;
    return gm_as_create(VA_BASE + 1, VA_END, 0, &as);
}

static gm_ret_t no_addresses(void)
{
    struct stage *now = stage();
    gm_region_t *region = NULL;
    return down(now, gm_as_alloc(now->as, 0, 2 * (VA_END - VA_BASE), 0, 0, 0, &region));
}

static gm_ret_t no_memory(void)
{
    struct stage *now = stage();
    gm_region_t *region = NULL;
    gm_va_t va = 0;
    gm_ret_t ret;
    OK(gm_as_alloc(now->as, 0, 5 * PAGE, 0, 0, 0, &region));
    OK(gm_region_begin(region, &va));
    for (int page = 0; page < 4; page++)
        OK(gm_dev_fault(now->dev, va + (gm_va_t)page * PAGE, GM_PROT_WRITE));
    ret = gm_dev_fault(now->dev, va + 4 * PAGE, GM_PROT_WRITE);
    OK(gm_region_dealloc(region));
    return down(now, ret);
}

static gm_ret_t not_allocated(void)
{
    struct stage *now = stage();
    return down(now, gm_dev_fault(now->dev, now->va + 2 * PAGE, GM_PROT_READ));
}

static gm_ret_t already_attached(void)
{
    struct stage *now = stage();
    return down(now, gm_as_attach(now->as, now->dev, GM_MMU_MODE_SHARED, false));
}

static gm_ret_t not_attached(void)
{
    struct stage *now = stage();
    gm_as_t *other = NULL;
    gm_ret_t ret;
    OK(gm_as_create(VA_BASE, VA_END, 0, &other));
    ret = gm_dev_switch(now->dev, other);
    OK(gm_as_destroy(other));
    return down(now, ret);
}

static gm_ret_t not_active(void)
{
    struct stage *now = stage();
    gm_ret_t ret;
    OK(gm_dev_detach(now->dev, now->as));
    OK(gm_as_attach(now->as, now->dev, GM_MMU_MODE_COHERENT, false));
    ret = gm_dev_fault(now->dev, now->va, GM_PROT_READ);
    return down(now, ret);
}

static gm_ret_t in_use(void)
{
    struct stage *now = stage();
    return down(now, gm_as_destroy(now->as));
}

static gm_ret_t already_mapped(void)
{
    struct stage *now = stage();
    OK(map(now));
    return down(now, map(now));
}

static gm_ret_t not_mapped(void)
{
    struct stage *now = stage();
    return down(now, gm_region_unmap(now->region, 0, NULL, NULL));
}

static gm_ret_t denied(void)
{
    struct stage *now = stage();
    OK(gm_region_protect(now->region, GM_PROT_READ));
    return down(now, gm_dev_fault(now->dev, now->va, GM_PROT_WRITE));
}

static gm_ret_t cannot_recover(void)
{
    struct stage *now = stage_up(GM_DEV_CAP_NONE);
    return down(now, gm_dev_fault(now->dev, now->va, GM_PROT_READ));
}

static gm_ret_t unsupported(void)
{
    struct device device;
    gm_mmu_t mmu = device_mmu();
    gm_dev_t *dev = NULL;
    gm_ret_t ret;
    device_init(&device);
    mmu.copy = NULL;
    OK(gm_dev_create(&mmu, &device, 0, &dev));
    ret = gm_dev_register_physmem(dev, frame(0), frame(1));
    OK(gm_dev_destroy(dev));
    return ret;
}

static gm_ret_t busy(void)
{
    struct stage *now = stage();
    unsigned char byte = 3;
    gm_ret_t ret;
    OK(map(now));
    let_fail(&now->device, UNMAP, -1, GM_MMU_BUSY);
    ret = gm_region_unmap(now->region, 0, NULL, NULL);
    /* Nothing was freed: the access that was under way ends well. */
    CHECK(device_access(&now->device, now->va, GM_PROT_WRITE, &byte));
    EXPECT(map(now), GM_RET_ALREADY_MAPPED);
    let_fail(&now->device, UNMAP, 3, GM_MMU_BUSY);
    OK(gm_region_unmap(now->region, 0, NULL, NULL));
    CHECK(!device_access(&now->device, now->va, GM_PROT_READ, &byte));
    return down(now, ret);
}

static gm_ret_t device(void)
{
    struct stage *now = stage();
    gm_ret_t ret;
    let_fail(&now->device, MAP, 1, -5);
    ret = map(now);
    CHECK(strstr(gm_last_error(), "map") != NULL && strstr(gm_last_error(), "-5") != NULL);
    return down(now, ret);
}

static gm_ret_t in_driver(void)
{
    struct stage *now = stage();
    gm_ret_t ret;
    now->device.calls_back = now->dev;
    OK(gm_dev_fault(now->dev, now->va, GM_PROT_READ));
    now->device.calls_back = NULL;
    ret = now->device.called_back;
    return down(now, ret);
}

static gm_ret_t internal(void)
{
    gm_ret_t ret = gm_provoke_panic();
    /* The next call works as ever. */
    CHECK(ok() == GM_RET_OK);
    return ret;
}

static const struct row {
    gm_ret_t code;
    gm_ret_t (*call)(void);
} rows[] = {
    {GM_RET_OK, ok},
    {GM_RET_INVALID_HANDLE, invalid_handle},
    {GM_RET_DESTROYED, destroyed},
    {GM_RET_INVALID_ARGUMENT, invalid_argument},
    {GM_RET_NO_ADDRESSES, no_addresses},
    {GM_RET_NO_MEMORY, no_memory},
    {GM_RET_NOT_ALLOCATED, not_allocated},
    {GM_RET_ALREADY_ATTACHED, already_attached},
    {GM_RET_NOT_ATTACHED, not_attached},
    {GM_RET_NOT_ACTIVE, not_active},
    {GM_RET_IN_USE, in_use},
    {GM_RET_ALREADY_MAPPED, already_mapped},
    {GM_RET_NOT_MAPPED, not_mapped},
    {GM_RET_DENIED, denied},
    {GM_RET_CANNOT_RECOVER, cannot_recover},
    {GM_RET_UNSUPPORTED, unsupported},
    {GM_RET_BUSY, busy},
    {GM_RET_DEVICE, device},
    {GM_RET_IN_DRIVER, in_driver},
    {GM_RET_INTERNAL, internal},
};

static void every_code_is_returned_by_its_call(void)
{
    const char *none = gm_ret_string((gm_ret_t)1000);
    size_t count = sizeof rows / sizeof rows[0];
    for (size_t at = 0; at < count; at++) {
        gm_ret_t got = rows[at].call();
        if (got != rows[at].code) {
            fprintf(stderr, "row %u: %d and not %d\n", (unsigned)at, (int)got, (int)rows[at].code);
            exit(1);
        }
        CHECK((size_t)rows[at].code == at);
        CHECK(strcmp(gm_ret_string(rows[at].code), none) != 0);
    }
    /* There is no code that the table lacks. */
    CHECK(strcmp(gm_ret_string((gm_ret_t)count), none) == 0);
}

static void do_nothing(void *arg)
{
    (void)arg;
}

static void null_handles_and_null_results_are_refused(void)
{
    struct stage *now = stage();
    gm_mmu_t mmu = device_mmu();
    gm_as_t *as = NULL;
    gm_dev_t *dev = NULL;
    gm_region_t *region = NULL;
    gm_mapping_set_t *set = NULL;
    gm_region_state_t state = GM_REGION_NOTHING;
    gm_va_t va = 0;
    uint64_t bytes = 0;
    char byte = 0;

    EXPECT(gm_as_destroy(NULL), GM_RET_INVALID_HANDLE);
    EXPECT(gm_as_attach(NULL, now->dev, GM_MMU_MODE_SHARED, true), GM_RET_INVALID_HANDLE);
    EXPECT(gm_as_attach(now->as, NULL, GM_MMU_MODE_SHARED, true), GM_RET_INVALID_HANDLE);
    EXPECT(gm_as_alloc(NULL, 0, PAGE, 0, 0, 0, &region), GM_RET_INVALID_HANDLE);
    EXPECT(gm_as_lookup(NULL, 0, &region), GM_RET_INVALID_HANDLE);
    EXPECT(gm_as_synchronize(NULL), GM_RET_INVALID_HANDLE);
    EXPECT(gm_dev_destroy(NULL), GM_RET_INVALID_HANDLE);
    EXPECT(gm_dev_switch(NULL, now->as), GM_RET_INVALID_HANDLE);
    EXPECT(gm_dev_switch(now->dev, NULL), GM_RET_INVALID_HANDLE);
    EXPECT(gm_dev_detach(NULL, now->as), GM_RET_INVALID_HANDLE);
    EXPECT(gm_dev_detach(now->dev, NULL), GM_RET_INVALID_HANDLE);
    EXPECT(gm_dev_fault(NULL, 0, GM_PROT_READ), GM_RET_INVALID_HANDLE);
    EXPECT(gm_dev_register_physmem(NULL, frame(0), frame(1)), GM_RET_INVALID_HANDLE);
    EXPECT(gm_dev_unregister_physmem(NULL, frame(0), frame(1)), GM_RET_INVALID_HANDLE);
    EXPECT(gm_dev_used_physmem(NULL, &bytes), GM_RET_INVALID_HANDLE);
    EXPECT(gm_region_map(NULL, GM_PROT_READ, now->pages, NULL, 0, NULL, NULL), GM_RET_INVALID_HANDLE);
    EXPECT(gm_region_unmap(NULL, 0, NULL, NULL), GM_RET_INVALID_HANDLE);
    EXPECT(gm_region_dealloc(NULL), GM_RET_INVALID_HANDLE);
    EXPECT(gm_region_set_policy(NULL, NULL, GM_REGION_UNIQUE), GM_RET_INVALID_HANDLE);
    EXPECT(gm_region_protect(NULL, GM_PROT_READ), GM_RET_INVALID_HANDLE);
    EXPECT(gm_region_begin(NULL, &va), GM_RET_INVALID_HANDLE);
    EXPECT(gm_region_end(NULL, &va), GM_RET_INVALID_HANDLE);
    EXPECT(gm_region_size(NULL, &va), GM_RET_INVALID_HANDLE);
    EXPECT(gm_region_as(NULL, &as), GM_RET_INVALID_HANDLE);
    EXPECT(gm_region_state(NULL, &state), GM_RET_INVALID_HANDLE);
    EXPECT(gm_mapping_set_create(NULL, &set), GM_RET_INVALID_HANDLE);
    EXPECT(gm_mapping_set_destroy(NULL), GM_RET_INVALID_HANDLE);
    EXPECT(gm_mapping_set_unmap(NULL, 0, NULL, NULL), GM_RET_INVALID_HANDLE);
    EXPECT(gm_cpu_add_window(NULL, PA_BASE, PAGE, machine_memory), GM_RET_INVALID_HANDLE);
    EXPECT(gm_cpu_remove_window(NULL, PA_BASE), GM_RET_INVALID_HANDLE);
    EXPECT(gm_cpu_read(NULL, VA_BASE, &byte, 1), GM_RET_INVALID_HANDLE);
    EXPECT(gm_cpu_write(NULL, VA_BASE, &byte, 1), GM_RET_INVALID_HANDLE);

    EXPECT(gm_as_create(VA_BASE, VA_END, 0, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_as_alloc(now->as, 0, PAGE, 0, 0, 0, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_as_lookup(now->as, now->va, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_dev_create(&mmu, &now->device, 0, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_dev_create(NULL, NULL, 0, &dev), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_dev_used_physmem(now->dev, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_region_begin(now->region, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_region_end(now->region, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_region_size(now->region, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_region_as(now->region, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_region_state(now->region, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_mapping_set_create(now->as, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_region_map(now->region, GM_PROT_READ, NULL, NULL, 0, NULL, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_cpu_add_window(gm_dev_CPU, PA_BASE, PAGE, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_cpu_read(gm_dev_CPU, VA_BASE, NULL, 1), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_cpu_write(gm_dev_CPU, VA_BASE, NULL, 1), GM_RET_INVALID_ARGUMENT);
    CHECK(as == NULL && dev == NULL && region == NULL && set == NULL);
    down(now, GM_RET_OK);
}

static void unknown_flags_and_values_are_refused(void)
{
    struct stage *now = stage();
    gm_as_t *as = NULL;
    gm_dev_t *dev = NULL;
    gm_mmu_t mmu = device_mmu();
    gm_region_t *region = now->region;
    struct {
        gm_mmu_t mmu;
        void *later;
    } larger = {device_mmu(), NULL};

    EXPECT(gm_as_create(VA_BASE, VA_END, 8, &as), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_as_create(VA_END, VA_BASE, 0, &as), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_as_attach(now->as, now->dev, (gm_mmu_mode_t)9, true), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_as_alloc(now->as, 0, 0, 0, 0, 0, &region), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_as_alloc(now->as, 0, PAGE, 3, 0, 0, &region), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_as_alloc(now->as, 0, PAGE, 0, 3, 0, &region), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_as_alloc(now->as, 1, PAGE, 0, 0, 0, &region), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_as_alloc(now->as, 0, UINT64_MAX, 0, 0, 0, &region), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_dev_create(&mmu, NULL, 2, &dev), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_dev_fault(now->dev, now->va, GM_PROT_NONE), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_dev_fault(now->dev, now->va, 4), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_dev_register_physmem(now->dev, frame(2), frame(2)), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_dev_register_physmem(now->dev, frame(3), frame(5)), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_region_map(region, GM_PROT_NONE, now->pages, NULL, 0, NULL, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_region_map(region, 4, now->pages, NULL, 0, NULL, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_region_map(region, GM_PROT_READ, now->pages, NULL, 2, NULL, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_region_map(region, GM_PROT_READ, now->pages, NULL, GM_MAP_PAGE_SIZE(11), NULL, NULL),
           GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_region_map(region, GM_PROT_READ, now->pages, NULL, GM_MAP_PAGE_SIZE(63), NULL, NULL),
           GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_region_map(region, GM_PROT_READ, now->pages, NULL, -1, NULL, NULL), GM_RET_INVALID_ARGUMENT);
    /* A callback is for asynchronous calls. */
    EXPECT(gm_region_map(region, GM_PROT_READ, now->pages, NULL, 0, do_nothing, NULL),
           GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_region_unmap(region, GM_MAP_PAGE_SIZE(12), NULL, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_region_unmap(region, 0, do_nothing, NULL), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_region_set_policy(region, NULL, (gm_region_placement_t)3), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_region_protect(region, 4), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_cpu_add_window(now->dev, PA_BASE, PAGE, machine_memory), GM_RET_UNSUPPORTED);
    EXPECT(gm_cpu_remove_window(now->dev, PA_BASE), GM_RET_UNSUPPORTED);
    EXPECT(gm_cpu_remove_window(gm_dev_CPU, 1), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_cpu_read(now->dev, VA_BASE, &mmu, 1), GM_RET_UNSUPPORTED);
    EXPECT(gm_cpu_read(gm_dev_CPU, UINT64_MAX, &mmu, 2), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_cpu_read(gm_dev_CPU, VA_BASE, &mmu, 1), GM_RET_NOT_ACTIVE);

    /* The struct may be longer than this version's, if what is behind is not used. */
    mmu.struct_size -= 1;
    EXPECT(gm_dev_create(&mmu, NULL, 0, &dev), GM_RET_INVALID_ARGUMENT);
    mmu = device_mmu();
    mmu.reserved = 1;
    EXPECT(gm_dev_create(&mmu, NULL, 0, &dev), GM_RET_INVALID_ARGUMENT);
    mmu = device_mmu();
    mmu.map = NULL;
    EXPECT(gm_dev_create(&mmu, NULL, 0, &dev), GM_RET_INVALID_ARGUMENT);
    larger.mmu.struct_size = sizeof larger;
    OK(gm_dev_create(&larger.mmu, NULL, 0, &dev));
    OK(gm_dev_destroy(dev));
    larger.later = &larger;
    EXPECT(gm_dev_create(&larger.mmu, NULL, 0, &dev), GM_RET_UNSUPPORTED);
    down(now, GM_RET_OK);
}

/* Nothing that stands in a driver's own struct lets its `mmu_data` be read as a gm_cpu_space_t. */
static void driver_with_the_format_of_the_cpu_is_refused_and_is_no_cpu(void)
{
    gm_mapping_t mapping = {VA_BASE, PAGE, PA_BASE, GM_PROT_READ};
    gm_cpu_space_t endless = {&mapping, (1u << 20) + 1};
    uint64_t mine[2] = {8, 4}; /* as a gm_cpu_space_t: four mappings at address 8 */
    gm_mmu_t mmu = device_mmu();
    gm_dev_t *dev = NULL;
    mmu.format = 0xffffffff;
    EXPECT(gm_dev_create(&mmu, mine, GM_DEV_CAP_RECOVERS, &dev), GM_RET_INVALID_ARGUMENT);
    CHECK(strstr(gm_last_error(), "gm_mmu_CPU") != NULL);
    mmu = *gm_mmu_CPU;
    EXPECT(gm_dev_create(&mmu, mine, GM_DEV_CAP_RECOVERS, &dev), GM_RET_INVALID_ARGUMENT);
    mmu = device_mmu();
    mmu.format = 0xfffffffe;
    OK(gm_dev_create(&mmu, mine, GM_DEV_CAP_RECOVERS, &dev));
    EXPECT(gm_cpu_remove_window(dev, PA_BASE), GM_RET_UNSUPPORTED);
    OK(gm_dev_destroy(dev));
    OK(gm_dev_create(gm_mmu_CPU, NULL, GM_DEV_CAP_RECOVERS, &dev));
    EXPECT(gm_cpu_remove_window(dev, PA_BASE), GM_RET_INVALID_ARGUMENT);
    OK(gm_dev_destroy(dev));
    /* Of a count that no list has, nothing is read. */
    EXPECT(gm_dev_create(gm_mmu_CPU, &endless, GM_DEV_CAP_RECOVERS, &dev), GM_RET_INVALID_ARGUMENT);
    endless.count = SIZE_MAX;
    EXPECT(gm_dev_create(gm_mmu_CPU, &endless, GM_DEV_CAP_RECOVERS, &dev), GM_RET_INVALID_ARGUMENT);
}

static void device_that_fails_at_any_operation_leaves_a_space_that_can_be_used(void)
{
    /* Each operation fails at its first, second, third call from here on. */
    for (int operation = 0; operation < OPERATIONS; operation++) {
        for (int good = 0; good < 3; good++) {
            struct stage *now = stage();
            static struct device late;
            gm_dev_t *other = device_create(&late, GM_DEV_CAP_NONE);
            int told = 0;
            for (int turn = 0; turn < 8; turn++) {
                if (turn >= good) {
                    let_fail(&now->device, (enum operation)operation, 1, 77);
                    let_fail(&late, (enum operation)operation, 1, 77);
                }
                told += gm_dev_fault(now->dev, now->va, GM_PROT_WRITE) == GM_RET_DEVICE;
                told += gm_as_attach(now->as, other, GM_MMU_MODE_COHERENT, true) == GM_RET_DEVICE;
                told += gm_region_unmap(now->region, 0, NULL, NULL) == GM_RET_DEVICE;
                told += map(now) == GM_RET_DEVICE;
                told += gm_region_protect(now->region, GM_PROT_READ) == GM_RET_DEVICE;
                told += gm_region_protect(now->region, GM_PROT_WRITE) == GM_RET_DEVICE;
                told += gm_region_unmap(now->region, 0, NULL, NULL) == GM_RET_DEVICE;
                told += gm_dev_detach(other, now->as) == GM_RET_DEVICE;
            }
            CHECK(told > 0 || operation == COPY);
            for (int each = 0; each < OPERATIONS; each++)
                let_fail(&late, (enum operation)each, 0, 0);
            gm_ret_t left = gm_dev_detach(other, now->as);
            CHECK(left == GM_RET_OK || left == GM_RET_NOT_ATTACHED);
            OK(gm_dev_destroy(other));
            CHECK(late.tables == 0 && late.active == NULL);
            down(now, GM_RET_OK);
        }
    }
}

int main(void)
{
    every_code_is_returned_by_its_call();
    null_handles_and_null_results_are_refused();
    unknown_flags_and_values_are_refused();
    driver_with_the_format_of_the_cpu_is_refused_and_is_no_cpu();
    device_that_fails_at_any_operation_leaves_a_space_that_can_be_used();
    puts("codes: every one has its call");
    return 0;
}
