/* SPDX-License-Identifier: Apache-2.0 */
/* Every function of gmem.h does what it says. */

#include "machine.h"

static gm_as_t *space_of(gm_as_alloc_t policy)
{
    gm_as_t *as = NULL;
    OK(gm_as_create(VA_BASE, VA_END, policy, &as));
    return as;
}

static gm_region_t *region_in(gm_as_t *as, gm_va_t pages)
{
    gm_region_t *region = NULL;
    OK(gm_as_alloc(as, 0, pages * PAGE, 0, 0, 0, &region));
    return region;
}

static gm_va_t begin_of(gm_region_t *region)
{
    gm_va_t begin = 0;
    OK(gm_region_begin(region, &begin));
    return begin;
}

static void library_tells_its_version_and_sentences(void)
{
    CHECK(gm_version() == GM_VERSION);
    CHECK(gm_last_error()[0] == '\0');
    CHECK(strcmp(gm_ret_string(GM_RET_OK), gm_ret_string(GM_RET_BUSY)) != 0);
    EXPECT(gm_as_create(VA_BASE, VA_BASE, 0, NULL), GM_RET_INVALID_ARGUMENT);
    CHECK(strstr(gm_last_error(), "NULL") != NULL);
}

static void regions_are_allocated_within_their_constraints(void)
{
    gm_as_t *as = space_of(GM_AS_ALLOC_FIRST_FIT | GM_AS_ALLOC_GUARDED), *of = NULL;
    gm_region_t *first, *second = NULL, *third = NULL, *fourth = NULL;
    gm_va_t at = 0;

    /* The lowest place, with an unused page before it. */
    first = region_in(as, 3);
    CHECK(begin_of(first) == VA_BASE + PAGE);
    OK(gm_region_size(first, &at));
    CHECK(at == 3 * PAGE);
    OK(gm_region_end(first, &at));
    CHECK(at == VA_BASE + 4 * PAGE);
    OK(gm_region_as(first, &of));
    CHECK(of == as);

    /* A hint, an alignment, a border that is not crossed, a last address. */
    OK(gm_as_alloc(as, VA_BASE + 100 * PAGE, 5000, 0, 0, 0, &second));
    CHECK(begin_of(second) == VA_BASE + 100 * PAGE);
    OK(gm_region_size(second, &at));
    CHECK(at == 2 * PAGE);
    OK(gm_as_alloc(as, 0, 4 * PAGE, 16 * PAGE, 4 * PAGE, 0, &third));
    CHECK(begin_of(third) % (16 * PAGE) == 0);
    OK(gm_as_alloc(as, 0, PAGE, 0, 0, VA_BASE + 10 * PAGE - 1, &fourth));
    CHECK(begin_of(fourth) < VA_BASE + 10 * PAGE);

    OK(gm_region_dealloc(fourth));
    OK(gm_region_dealloc(third));
    OK(gm_region_dealloc(second));
    OK(gm_region_dealloc(first));
    OK(gm_as_destroy(as));
}

static void region_is_found_by_each_of_its_addresses_and_has_one_handle(void)
{
    gm_as_t *as = space_of(GM_AS_ALLOC_CACHED);
    gm_region_t *region = region_in(as, 2), *found = NULL;
    gm_va_t begin = begin_of(region);
    OK(gm_as_lookup(as, begin, &found));
    CHECK(found == region);
    OK(gm_as_lookup(as, begin + 2 * PAGE - 1, &found));
    CHECK(found == region);
    EXPECT(gm_as_lookup(as, begin + 2 * PAGE, &found), GM_RET_NOT_ALLOCATED);
    OK(gm_region_dealloc(region));
    EXPECT(gm_as_lookup(as, begin, &found), GM_RET_NOT_ALLOCATED);
    EXPECT(gm_region_dealloc(region), GM_RET_DESTROYED);
    /* The same place again is another region. */
    found = region_in(as, 2);
    CHECK(begin_of(found) == begin && found != region);
    OK(gm_region_dealloc(found));
    OK(gm_as_destroy(as));
}

static void wired_region_is_reached_by_every_device_until_it_is_unmapped(void)
{
    static struct device one, two, late;
    gm_as_t *as = space_of(GM_AS_ALLOC_DEFAULT);
    gm_dev_t *a = device_create(&one, GM_DEV_CAP_NONE);
    gm_dev_t *b = device_create(&two, GM_DEV_CAP_RECOVERS);
    gm_dev_t *c = device_create(&late, GM_DEV_CAP_RECOVERS);
    gm_region_t *region = region_in(as, 2);
    gm_va_t va = begin_of(region);
    gm_pa_t pages[2];
    unsigned char byte = 17;

    pages[0] = frame(5);
    pages[1] = frame(2);
    OK(gm_as_attach(as, a, GM_MMU_MODE_COHERENT, true));
    OK(gm_as_attach(as, b, GM_MMU_MODE_SHARED, true));
    OK(gm_region_map(region, GM_PROT_READ | GM_PROT_WRITE, pages, NULL, 0, NULL, NULL));
    CHECK(device_access(&one, va + PAGE + 1, GM_PROT_WRITE, &byte));
    CHECK(memory_at(frame(2))[1] == 17);
    byte = 0;
    CHECK(device_access(&two, va + PAGE + 1, GM_PROT_READ, &byte) && byte == 17);
    /* One that comes later has it, too; one that shares the table has no table of its own. */
    OK(gm_as_attach(as, c, GM_MMU_MODE_SHARED, true));
    CHECK(one.tables == 1 && two.tables == 1 && late.tables == 0);
    CHECK(device_access(&late, va + PAGE + 1, GM_PROT_READ, &byte) && byte == 17);

    /* Protection is for all, and lasts. */
    OK(gm_region_protect(region, GM_PROT_READ));
    CHECK(!device_access(&one, va, GM_PROT_WRITE, &byte));
    CHECK(!device_access(&late, va, GM_PROT_WRITE, &byte));
    CHECK(device_access(&one, va, GM_PROT_READ, &byte));
    EXPECT(device_reach(&two, b, va, GM_PROT_WRITE, &byte), GM_RET_DENIED);
    OK(gm_region_protect(region, GM_PROT_NONE));
    CHECK(!device_access(&one, va, GM_PROT_READ, &byte));
    OK(gm_region_protect(region, GM_PROT_WRITE));
    CHECK(device_access(&one, va, GM_PROT_WRITE, &byte));

    OK(gm_region_unmap(region, 0, NULL, NULL));
    CHECK(!device_access(&one, va, GM_PROT_READ, &byte));
    CHECK(!device_access(&two, va, GM_PROT_READ, &byte));
    CHECK(!device_access(&late, va, GM_PROT_READ, &byte));
    /* It is allocated still, and may be mapped again; freeing it unmaps it. */
    OK(gm_region_map(region, GM_PROT_READ, pages, NULL, 0, NULL, NULL));
    CHECK(device_access(&one, va, GM_PROT_READ, &byte));
    OK(gm_region_dealloc(region));
    CHECK(!device_access(&one, va, GM_PROT_READ, &byte));

    /* The table that `c` uses was made by `b`, whose driver must stay until `c` has left. */
    OK(gm_dev_detach(b, as));
    EXPECT(gm_dev_destroy(b), GM_RET_IN_USE);
    OK(gm_dev_detach(c, as));
    OK(gm_dev_detach(a, as));
    OK(gm_dev_destroy(a));
    OK(gm_dev_destroy(b));
    OK(gm_dev_destroy(c));
    CHECK(one.tables == 0 && two.tables == 0);
    OK(gm_as_destroy(as));
}

static int the_same_table(void *mmu_data, gm_table_t *table)
{
    *table = mmu_data;
    return 0;
}

static void tables_are_shared_by_devices_that_fault_alike_and_made_for_each_space(void)
{
    static struct device one, two;
    gm_as_t *as = space_of(0), *other = space_of(0);
    gm_dev_t *waits = device_create(&one, GM_DEV_CAP_RECOVERS);
    gm_dev_t *cannot = device_create(&two, GM_DEV_CAP_NONE);
    gm_mmu_t mmu = device_mmu();
    gm_dev_t *simple = NULL;
    OK(gm_as_attach(as, waits, GM_MMU_MODE_SHARED, true));
    OK(gm_as_attach(as, cannot, GM_MMU_MODE_SHARED, true));
    CHECK(one.tables == 1 && two.tables == 1);
    OK(gm_dev_detach(cannot, as));
    OK(gm_dev_detach(waits, as));
    OK(gm_dev_destroy(cannot));
    OK(gm_dev_destroy(waits));
    /* A driver that makes no tables has one, for one space. */
    mmu.table_create = NULL;
    mmu.table_destroy = NULL;
    mmu.activate = NULL;
    mmu.deactivate = NULL;
    OK(gm_dev_create(&mmu, &one, GM_DEV_CAP_NONE, &simple));
    OK(gm_as_attach(as, simple, GM_MMU_MODE_COHERENT, true));
    EXPECT(gm_as_attach(other, simple, GM_MMU_MODE_COHERENT, false), GM_RET_UNSUPPORTED);
    CHECK(strstr(gm_last_error(), "table_create") != NULL);
    OK(gm_dev_detach(simple, as));
    OK(gm_as_attach(other, simple, GM_MMU_MODE_COHERENT, false));
    OK(gm_dev_detach(simple, other));
    OK(gm_dev_destroy(simple));
    /* It cannot be told of another's, so it shares none, though the format is the same. */
    waits = device_create(&two, GM_DEV_CAP_NONE);
    OK(gm_as_attach(as, waits, GM_MMU_MODE_SHARED, true));
    OK(gm_dev_create(&mmu, &one, GM_DEV_CAP_NONE, &simple));
    OK(gm_as_attach(as, simple, GM_MMU_MODE_SHARED, true));
    EXPECT(gm_as_attach(other, simple, GM_MMU_MODE_SHARED, false), GM_RET_UNSUPPORTED);
    OK(gm_dev_detach(simple, as));
    OK(gm_dev_destroy(simple));
    OK(gm_dev_detach(waits, as));
    OK(gm_dev_destroy(waits));
    /* Nor is it taken twice from one that says it made another. */
    mmu.table_create = the_same_table;
    OK(gm_dev_create(&mmu, &one, GM_DEV_CAP_NONE, &simple));
    OK(gm_as_attach(as, simple, GM_MMU_MODE_COHERENT, true));
    EXPECT(gm_as_attach(other, simple, GM_MMU_MODE_COHERENT, false), GM_RET_UNSUPPORTED);
    OK(gm_dev_detach(simple, as));
    OK(gm_as_attach(other, simple, GM_MMU_MODE_COHERENT, false));
    EXPECT(gm_dev_destroy(simple), GM_RET_IN_USE);
    OK(gm_dev_detach(simple, other));
    OK(gm_dev_destroy(simple));
    OK(gm_as_destroy(other));
    OK(gm_as_destroy(as));
}

static void large_pages_are_mapped_as_such(void)
{
    static struct device one;
    gm_as_t *as = space_of(GM_AS_ALLOC_DEFAULT);
    gm_dev_t *dev = device_create(&one, GM_DEV_CAP_NONE);
    gm_region_t *region = NULL;
    gm_pa_t page = PA_BASE; /* of 2 MiB */
    unsigned char byte = 1;
    OK(gm_as_attach(as, dev, GM_MMU_MODE_COHERENT, true));
    OK(gm_as_alloc(as, 0, 2u << 20, 2u << 20, 0, 0, &region));
    OK(gm_region_map(region, GM_PROT_READ, &page, NULL, GM_MAP_PAGE_SIZE(21), NULL, NULL));
    CHECK(one.calls[MAP] == 1);
    CHECK(device_access(&one, begin_of(region) + (1u << 20), GM_PROT_READ, &byte));
    /* A device that has no such pages cannot join, nor are others mapped with it. */
    EXPECT(gm_region_map(region, GM_PROT_READ, &page, NULL, GM_MAP_PAGE_SIZE(30), NULL, NULL),
           GM_RET_INVALID_ARGUMENT);
    OK(gm_region_dealloc(region));
    OK(gm_dev_detach(dev, as));
    OK(gm_dev_destroy(dev));
    OK(gm_as_destroy(as));
}

/* A CPU whose windows show the machine's memory from frame 0 on, `frames` of them. */
static gm_dev_t *cpu_create(const gm_cpu_space_t *inherits, unsigned frames)
{
    gm_dev_t *cpu = NULL;
    gm_cpu_space_t copy = {NULL, 0};
    if (inherits != NULL)
        copy = *inherits;
    OK(gm_dev_create(gm_mmu_CPU, &copy, GM_DEV_CAP_RECOVERS, &cpu));
    OK(gm_cpu_add_window(cpu, PA_BASE, (gm_va_t)frames * PAGE, machine_memory));
    return cpu;
}

static void page_moves_to_who_faults_on_it_and_back(void)
{
    static struct device gpu;
    static const char text[] = "written by the CPU, across a border of pages";
    char back[sizeof text];
    unsigned char byte = 'W';
    gm_as_t *as = space_of(GM_AS_ALLOC_DEFAULT);
    gm_dev_t *cpu = cpu_create(NULL, 512);
    gm_dev_t *dev = device_create(&gpu, GM_DEV_CAP_RECOVERS);
    gm_region_t *region = region_in(as, 4);
    gm_va_t va = begin_of(region) + PAGE - 10;
    uint64_t used = 1;

    OK(gm_dev_register_physmem(cpu, frame(0), frame(8)));
    OK(gm_dev_register_physmem(dev, frame(512), frame(520)));
    OK(gm_as_attach(as, cpu, GM_MMU_MODE_COHERENT, true));
    OK(gm_as_attach(as, dev, GM_MMU_MODE_COHERENT, true));
    OK(gm_dev_used_physmem(cpu, &used));
    CHECK(used == 0);

    OK(gm_cpu_write(cpu, va, text, sizeof text));
    OK(gm_dev_used_physmem(cpu, &used));
    CHECK(used == 2 * PAGE);
    OK(device_reach(&gpu, dev, va, GM_PROT_READ, &byte));
    CHECK(byte == 'w');
    OK(gm_dev_used_physmem(dev, &used));
    CHECK(used == PAGE);
    CHECK(gpu.calls[COPY] == 1);
    byte = 'W';
    OK(device_reach(&gpu, dev, va, GM_PROT_WRITE, &byte));
    OK(gm_cpu_read(cpu, va, back, sizeof back));
    CHECK(strcmp(back, "Written by the CPU, across a border of pages") == 0);
    OK(gm_dev_used_physmem(dev, &used));
    CHECK(used == 0);
    CHECK(!device_access(&gpu, va, GM_PROT_READ, &byte));

    /* Memory goes back as a whole, and only if no page lies in it. */
    EXPECT(gm_dev_unregister_physmem(cpu, frame(0), frame(8)), GM_RET_IN_USE);
    EXPECT(gm_dev_unregister_physmem(dev, frame(512), frame(519)), GM_RET_INVALID_ARGUMENT);
    OK(gm_dev_unregister_physmem(dev, frame(512), frame(520)));
    EXPECT(gm_dev_unregister_physmem(dev, frame(512), frame(520)), GM_RET_INVALID_ARGUMENT);
    OK(gm_dev_register_physmem(dev, frame(512), frame(520)));

    /* With remote access it stays, and both have it: out of the windows, the CPU does not. */
    OK(gm_region_set_policy(region, dev, GM_REGION_REMOTE_ACCESS));
    OK(device_reach(&gpu, dev, va, GM_PROT_READ, &byte));
    CHECK(byte == 'W');
    OK(gm_dev_used_physmem(dev, &used));
    CHECK(used == 0);
    OK(gm_cpu_read(cpu, va, back, 10));
    OK(device_reach(&gpu, dev, va + 2 * PAGE, GM_PROT_READ, &byte));
    OK(gm_dev_used_physmem(dev, &used));
    CHECK(used == PAGE);
    EXPECT(gm_cpu_read(cpu, va + 2 * PAGE, back, 1), GM_RET_DEVICE);
    OK(gm_cpu_add_window(cpu, frame(512), 8 * PAGE, memory_at(frame(512))));
    OK(gm_cpu_read(cpu, va + 2 * PAGE, back, 1));
    OK(gm_cpu_remove_window(cpu, frame(512)));

    OK(gm_region_dealloc(region));
    OK(gm_dev_used_physmem(dev, &used));
    CHECK(used == 0);
    OK(gm_dev_detach(cpu, as));
    OK(gm_dev_detach(dev, as));
    OK(gm_dev_destroy(dev));
    OK(gm_dev_destroy(cpu));
    OK(gm_as_destroy(as));
}

static void prefetch_brings_the_pages_that_follow(void)
{
    static struct device gpu;
    gm_as_t *as = space_of(GM_AS_ALLOC_DEFAULT);
    gm_dev_t *dev = device_create(&gpu, GM_DEV_CAP_RECOVERS);
    gm_region_t *region = region_in(as, 4);
    unsigned char byte = 0;
    OK(gm_dev_register_physmem(dev, frame(512), frame(520)));
    OK(gm_as_attach(as, dev, GM_MMU_MODE_COHERENT, true));
    OK(gm_region_set_policy(region, NULL, GM_REGION_PREFETCH));
    OK(gm_dev_fault(dev, begin_of(region), GM_PROT_READ));
    OK(gm_as_synchronize(as));
    for (gm_va_t page = 0; page < 4; page++)
        CHECK(device_access(&gpu, begin_of(region) + page * PAGE, GM_PROT_READ, &byte));
    OK(gm_region_dealloc(region));
    OK(gm_dev_detach(dev, as));
    OK(gm_dev_destroy(dev));
    OK(gm_as_destroy(as));
}

static void device_is_active_in_one_space_at_a_time(void)
{
    static struct device one;
    gm_as_t *first = space_of(0), *second = space_of(0);
    gm_dev_t *dev = device_create(&one, GM_DEV_CAP_RECOVERS);
    gm_region_t *here = region_in(first, 1), *there = region_in(second, 1);
    gm_pa_t page_here = frame(1), page_there = frame(2);
    unsigned char byte = 0;
    memory_at(page_here)[0] = 'h';
    memory_at(page_there)[0] = 't';
    OK(gm_region_map(here, GM_PROT_READ, &page_here, NULL, 0, NULL, NULL));
    OK(gm_region_map(there, GM_PROT_READ, &page_there, NULL, 0, NULL, NULL));
    OK(gm_as_attach(first, dev, GM_MMU_MODE_COHERENT, true));
    OK(gm_as_attach(second, dev, GM_MMU_MODE_COHERENT, false));
    CHECK(begin_of(here) == begin_of(there));
    CHECK(device_access(&one, begin_of(here), GM_PROT_READ, &byte) && byte == 'h');
    OK(gm_dev_switch(dev, second));
    CHECK(device_access(&one, begin_of(here), GM_PROT_READ, &byte) && byte == 't');
    OK(gm_dev_detach(dev, second));
    CHECK(!device_access(&one, begin_of(here), GM_PROT_READ, &byte));
    EXPECT(gm_dev_fault(dev, begin_of(here), GM_PROT_READ), GM_RET_NOT_ACTIVE);
    OK(gm_dev_switch(dev, first));
    CHECK(device_access(&one, begin_of(here), GM_PROT_READ, &byte) && byte == 'h');
    OK(gm_dev_detach(dev, first));
    OK(gm_dev_destroy(dev));
    OK(gm_region_dealloc(here));
    OK(gm_region_dealloc(there));
    OK(gm_as_destroy(first));
    OK(gm_as_destroy(second));
}

static void mapping_set_is_unmapped_as_one(void)
{
    static struct device one;
    gm_as_t *as = space_of(0);
    gm_dev_t *dev = device_create(&one, GM_DEV_CAP_NONE);
    gm_mapping_set_t *set = NULL;
    gm_region_t *regions[3];
    gm_pa_t page = frame(3);
    unsigned char byte = 0;
    OK(gm_as_attach(as, dev, GM_MMU_MODE_COHERENT, true));
    OK(gm_mapping_set_create(as, &set));
    for (int at = 0; at < 3; at++) {
        regions[at] = region_in(as, 1);
        OK(gm_region_map(regions[at], GM_PROT_READ, &page, at < 2 ? set : NULL, 0, NULL, NULL));
    }
    one.calls[INVALIDATE] = 0;
    OK(gm_mapping_set_unmap(set, 0, NULL, NULL));
    CHECK(one.calls[INVALIDATE] == 1);
    CHECK(!device_access(&one, begin_of(regions[0]), GM_PROT_READ, &byte));
    CHECK(!device_access(&one, begin_of(regions[1]), GM_PROT_READ, &byte));
    CHECK(device_access(&one, begin_of(regions[2]), GM_PROT_READ, &byte));
    OK(gm_mapping_set_destroy(set));
    EXPECT(gm_mapping_set_unmap(set, 0, NULL, NULL), GM_RET_DESTROYED);
    for (int at = 0; at < 3; at++)
        OK(gm_region_dealloc(regions[at]));
    OK(gm_dev_detach(dev, as));
    OK(gm_dev_destroy(dev));
    OK(gm_as_destroy(as));
}

static void mappings_of_the_host_are_inherited_and_replicated(void)
{
    static struct device one, guest;
    gm_mapping_t mappings[2];
    gm_cpu_space_t host = {mappings, 2};
    gm_as_t *as = space_of(0);
    gm_dev_t *cpu, *dev;
    gm_region_t *found = NULL;
    unsigned char byte = 0;
    gm_va_t size = 0;
    mappings[0].va = VA_BASE + 16 * PAGE;
    mappings[0].size = 2 * PAGE;
    mappings[0].pa = frame(40);
    mappings[0].prot = GM_PROT_WRITE;
    mappings[1] = mappings[0];
    mappings[1].va += 8 * PAGE;
    mappings[1].pa = frame(50);
    mappings[1].prot = GM_PROT_READ;
    cpu = cpu_create(&host, PA_PAGES);
    dev = device_create(&one, GM_DEV_CAP_NONE);
    OK(gm_as_attach(as, dev, GM_MMU_MODE_COHERENT, true));
    OK(gm_as_attach(as, cpu, GM_MMU_MODE_COHERENT, true));
    OK(gm_cpu_write(cpu, mappings[0].va, "x", 1));
    CHECK(memory_at(frame(40))[0] == 'x');
    EXPECT(gm_cpu_write(cpu, mappings[1].va, "x", 1), GM_RET_DENIED);
    CHECK(device_access(&one, mappings[0].va, GM_PROT_READ, &byte) && byte == 'x');
    CHECK(!device_access(&one, mappings[1].va, GM_PROT_WRITE, &byte));
    OK(gm_as_lookup(as, mappings[1].va + PAGE, &found));
    OK(gm_region_size(found, &size));
    CHECK(size == 2 * PAGE);
    OK(gm_region_dealloc(found));
    OK(gm_as_lookup(as, mappings[0].va, &found));
    OK(gm_region_dealloc(found));

    /* A driver tells of them by calling back. */
    guest.inherits = NULL;
    OK(gm_dev_detach(dev, as));
    OK(gm_dev_destroy(dev));
    dev = device_create(&guest, GM_DEV_CAP_NONE);
    guest.inherits = mappings;
    guest.inherits_count = 1;
    OK(gm_as_attach(as, dev, GM_MMU_MODE_COHERENT, true));
    OK(gm_cpu_read(cpu, mappings[0].va, &byte, 1));
    CHECK(byte == 'x');
    OK(gm_as_lookup(as, mappings[0].va, &found));
    OK(gm_region_dealloc(found));
    OK(gm_dev_detach(dev, as));
    OK(gm_dev_detach(cpu, as));
    OK(gm_dev_destroy(dev));
    OK(gm_dev_destroy(cpu));
    OK(gm_as_destroy(as));
}

static gm_region_state_t state_of(gm_region_t *region)
{
    gm_region_state_t state = GM_REGION_PAGED;
    OK(gm_region_state(region, &state));
    return state;
}

static void region_tells_what_is_behind_it(void)
{
    static struct device one;
    gm_as_t *as = space_of(0);
    gm_dev_t *dev = device_create(&one, GM_DEV_CAP_RECOVERS);
    gm_region_t *region = region_in(as, 1);
    gm_pa_t page = frame(3);
    OK(gm_dev_register_physmem(dev, frame(512), frame(513)));
    OK(gm_as_attach(as, dev, GM_MMU_MODE_COHERENT, true));
    CHECK(state_of(region) == GM_REGION_NOTHING);
    OK(gm_region_map(region, GM_PROT_READ, &page, NULL, 0, NULL, NULL));
    CHECK(state_of(region) == GM_REGION_WIRED);
    let_fail(&one, INVALIDATE, 1, 9);
    EXPECT(gm_region_unmap(region, 0, NULL, NULL), GM_RET_DEVICE);
    CHECK(state_of(region) == GM_REGION_LEAVING);
    OK(gm_region_unmap(region, 0, NULL, NULL));
    CHECK(state_of(region) == GM_REGION_NOTHING);
    OK(gm_dev_fault(dev, begin_of(region), GM_PROT_READ));
    CHECK(state_of(region) == GM_REGION_DEMAND);
    OK(gm_region_dealloc(region));
    OK(gm_dev_detach(dev, as));
    OK(gm_dev_destroy(dev));
    OK(gm_as_destroy(as));
}

/*
 * A list of mappings is input: it costs what it is long, and not what it says. A TiB by pages would be
 * 2^28 entries, of some GiB.
 */
static void inherited_mapping_costs_nothing_for_its_length_and_is_of_whole_pages(void)
{
    const gm_va_t tebibyte = (gm_va_t)1 << 40;
    gm_mapping_t mapping;
    gm_cpu_space_t host = {&mapping, 1};
    gm_as_t *as = NULL;
    gm_dev_t *cpu;
    gm_region_t *found = NULL;
    gm_va_t size = 0;
    char byte = 0;
    OK(gm_as_create(tebibyte, 4 * tebibyte, 0, &as));
    mapping.va = 2 * tebibyte;
    mapping.size = tebibyte;
    mapping.pa = PA_BASE;
    mapping.prot = GM_PROT_READ;
    cpu = cpu_create(&host, 1);
    OK(gm_as_attach(as, cpu, GM_MMU_MODE_COHERENT, true));
    OK(gm_as_lookup(as, 3 * tebibyte - 1, &found));
    OK(gm_region_size(found, &size));
    CHECK(size == tebibyte);
    memory_at(frame(0))[7] = 't';
    OK(gm_cpu_read(cpu, mapping.va + 7, &byte, 1));
    CHECK(byte == 't');
    OK(gm_region_dealloc(found));
    EXPECT(gm_cpu_read(cpu, mapping.va + 7, &byte, 1), GM_RET_NOT_ALLOCATED);
    OK(gm_dev_detach(cpu, as));
    OK(gm_dev_destroy(cpu));

    mapping.size = 100;
    cpu = cpu_create(&host, 1);
    EXPECT(gm_as_attach(as, cpu, GM_MMU_MODE_COHERENT, true), GM_RET_INVALID_ARGUMENT);
    EXPECT(gm_as_lookup(as, mapping.va, &found), GM_RET_NOT_ALLOCATED);
    EXPECT(gm_dev_detach(cpu, as), GM_RET_NOT_ATTACHED);
    OK(gm_dev_destroy(cpu));
    OK(gm_as_destroy(as));
}

static void predefined_cpu_is_one_and_cannot_be_destroyed(void)
{
    gm_as_t *as = space_of(0);
    gm_region_t *region = region_in(as, 1);
    gm_dev_t *another = cpu_create(NULL, 1);
    char back = 0;
    CHECK(gm_dev_CPU != NULL && gm_dev_CPU == gm_dev_cpu());
    CHECK(gm_mmu_CPU == gm_mmu_cpu());
    OK(gm_cpu_add_window(gm_dev_CPU, PA_BASE, PAGE, machine_memory));
    OK(gm_dev_register_physmem(gm_dev_CPU, frame(0), frame(1)));
    OK(gm_as_attach(as, gm_dev_CPU, GM_MMU_MODE_SHARED, true));
    EXPECT(gm_as_attach(as, another, GM_MMU_MODE_SHARED, true), GM_RET_ALREADY_ATTACHED);
    CHECK(strstr(gm_last_error(), "a space has one") != NULL);
    OK(gm_dev_destroy(another));
    OK(gm_cpu_write(gm_dev_CPU, begin_of(region), "c", 1));
    OK(gm_cpu_read(gm_dev_CPU, begin_of(region), &back, 1));
    CHECK(back == 'c');
    OK(gm_region_dealloc(region));
    OK(gm_dev_detach(gm_dev_CPU, as));
    EXPECT(gm_dev_destroy(gm_dev_CPU), GM_RET_UNSUPPORTED);
    OK(gm_dev_unregister_physmem(gm_dev_CPU, frame(0), frame(1)));
    OK(gm_cpu_remove_window(gm_dev_CPU, PA_BASE));
    OK(gm_as_destroy(as));
}

int main(void)
{
    library_tells_its_version_and_sentences();
    regions_are_allocated_within_their_constraints();
    region_is_found_by_each_of_its_addresses_and_has_one_handle();
    wired_region_is_reached_by_every_device_until_it_is_unmapped();
    tables_are_shared_by_devices_that_fault_alike_and_made_for_each_space();
    large_pages_are_mapped_as_such();
    page_moves_to_who_faults_on_it_and_back();
    prefetch_brings_the_pages_that_follow();
    device_is_active_in_one_space_at_a_time();
    mapping_set_is_unmapped_as_one();
    mappings_of_the_host_are_inherited_and_replicated();
    region_tells_what_is_behind_it();
    inherited_mapping_costs_nothing_for_its_length_and_is_of_whole_pages();
    predefined_cpu_is_one_and_cannot_be_destroyed();
    puts("functions: all as said");
    return 0;
}
