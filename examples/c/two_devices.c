/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A CPU and two devices in one address space.
 *
 * The GPU has memory of its own and waits when it faults: pages move to it, and
 * back to the CPU, without a copy in this program. The NIC cannot wait: it gets
 * wired buffers, which are taken from it again without waiting for each.
 *
 * Both devices are simulated by the few lines a real driver would have instead:
 * operations that write a page table, and one that empties a TLB.
 *
 *   cargo build --release -p pagetide-capi
 *   cc -Icrates/capi/include examples/c/two_devices.c -Ltarget/release \
 *      -lpagetide_gmem -Wl,-rpath,$PWD/target/release -pthread -o two_devices
 */
#include <gmem.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE 4096u
#define PAGES 256u /* of the address space */
#define VA_BEGIN 0x10000000u
#define BUFFERS 8

/* Physical memory: the host's first, then the GPU's. */
#define HOST_FRAMES 64u
#define GPU_FRAMES 16u
#define GPU_PA (HOST_FRAMES * PAGE)
static unsigned char memory[(HOST_FRAMES + GPU_FRAMES) * PAGE];

/* Ends the program if a call fails. */
static void check(gm_ret_t ret, const char *what)
{
    if (ret != GM_RET_OK) {
        fprintf(stderr, "%s: %s (%s)\n", what, gm_ret_string(ret), gm_last_error());
        exit(1);
    }
}

/* ---- A simulated device ------------------------------------------------------- */

struct translation {
    gm_pa_t pa;
    gm_prot_t prot;
};

struct device {
    const char *name;
    pthread_mutex_t lock;
    struct translation table[PAGES]; /* one space, so one table */
    struct translation tlb[PAGES];
    unsigned faults;
};

static size_t index_of(gm_va_t va)
{
    return (size_t)((va - VA_BEGIN) / PAGE);
}

static int device_map(void *mmu_data, gm_table_t table, gm_va_t va, gm_va_t size, gm_pa_t pa,
                      gm_va_t page_size, gm_prot_t prot)
{
    struct device *device = mmu_data;
    (void)table;
    (void)page_size;
    pthread_mutex_lock(&device->lock);
    for (gm_va_t at = 0; at < size; at += PAGE) {
        device->table[index_of(va + at)].pa = pa + at;
        device->table[index_of(va + at)].prot = prot;
    }
    pthread_mutex_unlock(&device->lock);
    return 0;
}

static int device_unmap(void *mmu_data, gm_table_t table, gm_va_t va, gm_va_t size)
{
    struct device *device = mmu_data;
    (void)table;
    pthread_mutex_lock(&device->lock);
    for (gm_va_t at = 0; at < size; at += PAGE)
        device->table[index_of(va + at)].prot = GM_PROT_NONE;
    pthread_mutex_unlock(&device->lock);
    return 0;
}

static int device_invalidate(void *mmu_data, gm_table_t table, const gm_range_t *ranges, size_t count)
{
    struct device *device = mmu_data;
    (void)table;
    pthread_mutex_lock(&device->lock);
    for (size_t range = 0; range < count; range++) {
        for (gm_va_t at = 0; at < ranges[range].size; at += PAGE)
            device->tlb[index_of(ranges[range].va + at)].prot = GM_PROT_NONE;
    }
    pthread_mutex_unlock(&device->lock);
    return 0;
}

static int device_prepare(void *mmu_data, gm_pa_t pa, gm_va_t size)
{
    (void)mmu_data;
    memset(memory + pa, 0, size);
    return 0;
}

static int device_copy(void *mmu_data, gm_pa_t to, gm_pa_t from, gm_va_t size)
{
    (void)mmu_data;
    memcpy(memory + to, memory + from, size);
    return 0;
}

static gm_dev_t *device_create(struct device *device, const char *name, gm_dev_cap_t cap)
{
    gm_mmu_t mmu;
    gm_dev_t *dev;
    memset(device, 0, sizeof *device);
    device->name = name;
    pthread_mutex_init(&device->lock, NULL);
    memset(&mmu, 0, sizeof mmu);
    mmu.struct_size = sizeof mmu;
    mmu.page_sizes = PAGE;
    mmu.map = device_map;
    mmu.unmap = device_unmap;
    mmu.invalidate = device_invalidate;
    mmu.prepare = device_prepare;
    mmu.copy = device_copy;
    check(gm_dev_create(&mmu, device, cap, &dev), name);
    return dev;
}

/* What the hardware does for one byte: the TLB, else the page table; 0 is a fault. */
static int translate(struct device *device, gm_va_t va, gm_prot_t access, gm_pa_t *pa)
{
    struct translation *cached = &device->tlb[index_of(va)];
    if ((cached->prot & access) == 0)
        *cached = device->table[index_of(va)];
    *pa = cached->pa + va % PAGE;
    return (cached->prot & access) != 0;
}

/* Turns a text in the address space into capitals, a byte at a time. */
static void gpu_kernel(struct device *gpu, gm_dev_t *dev, gm_va_t va, size_t length)
{
    for (size_t at = 0; at < length;) {
        gm_pa_t pa;
        pthread_mutex_lock(&gpu->lock);
        int done = translate(gpu, va + at, GM_PROT_WRITE, &pa);
        if (done && memory[pa] >= 'a' && memory[pa] <= 'z')
            memory[pa] -= 'a' - 'A';
        pthread_mutex_unlock(&gpu->lock);
        if (done) {
            at++;
        } else {
            gpu->faults++;
            check(gm_dev_fault(dev, va + at, GM_PROT_WRITE), "a fault of the GPU");
        }
    }
}

/* Sums the bytes of a page, or tells that it cannot. */
static int nic_sum(struct device *nic, gm_va_t va, unsigned *sum)
{
    *sum = 0;
    for (gm_va_t at = 0; at < PAGE; at++) {
        gm_pa_t pa;
        pthread_mutex_lock(&nic->lock);
        int done = translate(nic, va + at, GM_PROT_READ, &pa);
        if (done)
            *sum += memory[pa];
        pthread_mutex_unlock(&nic->lock);
        if (!done)
            return 0;
    }
    return 1;
}

/* ---- The story ---------------------------------------------------------------- */

static struct device gpu, nic;

static void where_it_lies(gm_dev_t *cpu_dev, gm_dev_t *gpu_dev, const char *when)
{
    uint64_t host, local;
    check(gm_dev_used_physmem(cpu_dev, &host), "memory of the host");
    check(gm_dev_used_physmem(gpu_dev, &local), "memory of the GPU");
    printf("%s: %u pages in host memory, %u in the GPU's\n", when, (unsigned)(host / PAGE),
           (unsigned)(local / PAGE));
}

static void share_a_text(gm_as_t *as, gm_dev_t *cpu_dev, gm_dev_t *gpu_dev)
{
    static const char text[] = "one address means the same to all";
    char back[sizeof text];
    gm_region_t *region;
    gm_va_t va;
    check(gm_as_alloc(as, 0, 2 * PAGE, 0, 0, 0, &region), "gm_as_alloc");
    check(gm_region_begin(region, &va), "gm_region_begin");
    va += PAGE - 10; /* across a border of pages */

    check(gm_cpu_write(cpu_dev, va, text, sizeof text), "gm_cpu_write");
    where_it_lies(cpu_dev, gpu_dev, "the CPU has written");
    gpu_kernel(&gpu, gpu_dev, va, sizeof text);
    where_it_lies(cpu_dev, gpu_dev, "the GPU has worked");
    check(gm_cpu_read(cpu_dev, va, back, sizeof back), "gm_cpu_read");
    where_it_lies(cpu_dev, gpu_dev, "the CPU has read");
    printf("the CPU reads: %s (%u faults of the GPU)\n", back, gpu.faults);
    check(gm_region_dealloc(region), "gm_region_dealloc");
}

static pthread_mutex_t done_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned done;

/* A buffer is unmapped and invalidated: now, and not earlier, it may be used for something else. */
static void buffer_done(void *arg)
{
    check(gm_region_dealloc(arg), "gm_region_dealloc");
    pthread_mutex_lock(&done_lock);
    done++;
    pthread_mutex_unlock(&done_lock);
}

static void lend_buffers(gm_as_t *as)
{
    gm_region_t *buffers[BUFFERS];
    gm_va_t va[BUFFERS];
    unsigned sum, total = 0, reached = 0;
    for (unsigned at = 0; at < BUFFERS; at++) {
        gm_pa_t frame = (HOST_FRAMES - BUFFERS + at) * PAGE;
        memset(memory + frame, (int)at, PAGE);
        check(gm_as_alloc(as, 0, PAGE, 0, 0, 0, &buffers[at]), "gm_as_alloc");
        check(gm_region_begin(buffers[at], &va[at]), "gm_region_begin");
        check(gm_region_map(buffers[at], GM_PROT_READ, &frame, NULL, 0, NULL, NULL), "gm_region_map");
    }
    for (unsigned at = 0; at < BUFFERS; at++) {
        if (nic_sum(&nic, va[at], &sum))
            total += sum / PAGE;
    }
    printf("the NIC has summed %u buffers to %u\n", BUFFERS, total);

    for (unsigned at = 0; at < BUFFERS; at++)
        check(gm_region_unmap(buffers[at], GM_ASYNC, buffer_done, buffers[at]), "gm_region_unmap");
    check(gm_as_synchronize(as), "gm_as_synchronize");
    for (unsigned at = 0; at < BUFFERS; at++)
        reached += (unsigned)nic_sum(&nic, va[at], &sum);
    printf("%u callbacks; the NIC reaches %u of the buffers\n", done, reached);
}

int main(void)
{
    gm_as_t *as;
    gm_dev_t *cpu_dev, *gpu_dev, *nic_dev;
    check(gm_as_create(VA_BEGIN, VA_BEGIN + PAGES * PAGE, GM_AS_ALLOC_GUARDED, &as), "gm_as_create");

    /* The host's memory: the CPU sees it through a window, and faults are served from part of it. */
    cpu_dev = gm_dev_CPU;
    check(gm_cpu_add_window(cpu_dev, 0, HOST_FRAMES * PAGE, memory), "gm_cpu_add_window");
    check(gm_dev_register_physmem(cpu_dev, 0, (HOST_FRAMES - BUFFERS) * PAGE), "memory of the host");
    gpu_dev = device_create(&gpu, "GPU", GM_DEV_CAP_RECOVERS);
    check(gm_dev_register_physmem(gpu_dev, GPU_PA, GPU_PA + GPU_FRAMES * PAGE), "memory of the GPU");
    nic_dev = device_create(&nic, "NIC", GM_DEV_CAP_NONE);
    check(gm_as_attach(as, cpu_dev, GM_MMU_MODE_COHERENT, true), "the CPU");
    check(gm_as_attach(as, gpu_dev, GM_MMU_MODE_COHERENT, true), "the GPU");
    check(gm_as_attach(as, nic_dev, GM_MMU_MODE_COHERENT, true), "the NIC");

    share_a_text(as, cpu_dev, gpu_dev);
    lend_buffers(as);

    check(gm_dev_detach(nic_dev, as), "the NIC");
    check(gm_dev_detach(gpu_dev, as), "the GPU");
    check(gm_dev_detach(cpu_dev, as), "the CPU");
    check(gm_dev_destroy(nic_dev), "the NIC");
    check(gm_dev_destroy(gpu_dev), "the GPU");
    check(gm_as_destroy(as), "gm_as_destroy");
    return 0;
}
