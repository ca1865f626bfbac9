/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads that use one space at the same time: each checks every byte of regions
 * of its own, and all of them do whatever they like to regions in common, handles
 * of which may be stale.
 */

#include "machine.h"

#define THREADS 4
#define ROUNDS 1500
#define SHARED 8

static gm_as_t *as;
static gm_dev_t *cpu, *gpu_dev, *nic_dev, *late_dev;
static struct device gpu, nic, late;

/* Handles in common. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static gm_region_t *shared[SHARED];

struct worker {
    pthread_t thread;
    unsigned number;
    unsigned long long state;
    unsigned done; /* callbacks; guarded by lock */
};

static unsigned chance(struct worker *worker, unsigned below)
{
    worker->state = worker->state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)(worker->state >> 33) % below;
}

/* A call with a handle that others may have destroyed. */
static void may_fail(gm_ret_t ret)
{
    CHECK(ret != GM_RET_INTERNAL && ret != GM_RET_INVALID_HANDLE && ret != GM_RET_IN_DRIVER);
    CHECK(ret != GM_RET_INVALID_ARGUMENT);
}

static void write_by(unsigned who, gm_va_t va, unsigned char byte)
{
    switch (who) {
    case 0:
        OK(gm_cpu_write(cpu, va, &byte, 1));
        break;
    case 1:
        OK(device_reach(&gpu, gpu_dev, va, GM_PROT_WRITE, &byte));
        break;
    default:
        OK(device_reach(&nic, nic_dev, va, GM_PROT_WRITE, &byte));
        break;
    }
}

static unsigned char read_by(unsigned who, gm_va_t va)
{
    unsigned char byte = 0;
    switch (who) {
    case 0:
        OK(gm_cpu_read(cpu, va, &byte, 1));
        break;
    case 1:
        OK(device_reach(&gpu, gpu_dev, va, GM_PROT_READ, &byte));
        break;
    default:
        OK(device_reach(&nic, nic_dev, va, GM_PROT_READ, &byte));
        break;
    }
    return byte;
}

/* An unmap of a region that nobody else knows of is complete. */
struct gone {
    struct worker *worker;
    gm_region_t *region;
    gm_va_t va;
};

static void check_gone(void *arg)
{
    struct gone *gone = arg;
    unsigned char byte = 0;
    CHECK(!device_access(&gpu, gone->va, GM_PROT_READ, &byte));
    CHECK(!device_access(&nic, gone->va, GM_PROT_READ, &byte));
    OK(gm_region_dealloc(gone->region));
    pthread_mutex_lock(&lock);
    gone->worker->done++;
    pthread_mutex_unlock(&lock);
    free(gone);
}

/* A region of the thread's own: pages move between the CPU and both devices, and keep their bytes. */
static unsigned own_region(struct worker *worker)
{
    static const gm_region_placement_t policies[] = {GM_REGION_UNIQUE, GM_REGION_REMOTE_ACCESS,
                                                     GM_REGION_PREFETCH};
    gm_region_t *region = NULL, *found = NULL;
    unsigned char bytes[4] = {0, 0, 0, 0};
    unsigned touched = 0;
    gm_va_t va = 0;
    OK(gm_as_alloc(as, 0, sizeof bytes * PAGE, 0, 0, 0, &region));
    OK(gm_region_begin(region, &va));
    OK(gm_as_lookup(as, va + PAGE, &found));
    CHECK(found == region);
    OK(gm_region_set_policy(region, NULL, policies[chance(worker, 3)]));
    for (int turn = 0; turn < 6; turn++) {
        unsigned page = chance(worker, 4);
        gm_va_t at = va + page * PAGE + worker->number;
        if (chance(worker, 2) == 0) {
            bytes[page] = (unsigned char)chance(worker, 256);
            write_by(chance(worker, 3), at, bytes[page]);
        }
        CHECK(read_by(chance(worker, 3), at) == bytes[page]);
        touched = 1;
    }
    if (touched != 0 && chance(worker, 2) == 0) {
        struct gone *gone = malloc(sizeof *gone);
        CHECK(gone != NULL);
        gone->worker = worker;
        gone->region = region;
        gone->va = va;
        OK(gm_region_unmap(region, GM_ASYNC, check_gone, gone));
        return 1;
    }
    OK(gm_region_dealloc(region));
    EXPECT(gm_region_dealloc(region), GM_RET_DESTROYED);
    return 0;
}

static void shared_region(struct worker *worker)
{
    unsigned at = chance(worker, SHARED);
    gm_pa_t page = frame(900 + at);
    unsigned char byte = 0;
    gm_region_t *region, *gone = NULL;
    gm_va_t va = 0;
    pthread_mutex_lock(&lock);
    region = shared[at];
    pthread_mutex_unlock(&lock);
    switch (chance(worker, 9)) {
    case 0:
        OK(gm_as_alloc(as, 0, PAGE, 0, 0, 0, &region));
        pthread_mutex_lock(&lock);
        gone = shared[at];
        shared[at] = region;
        pthread_mutex_unlock(&lock);
        if (gone != NULL)
            may_fail(gm_region_dealloc(gone));
        return;
    case 1:
        if (region != NULL)
            may_fail(gm_region_map(region, GM_PROT_WRITE, &page, NULL, 0, NULL, NULL));
        return;
    case 2:
        if (region != NULL)
            may_fail(gm_region_map(region, GM_PROT_READ, &page, NULL, GM_ASYNC, NULL, NULL));
        return;
    case 3:
        if (region != NULL)
            may_fail(gm_region_unmap(region, 0, NULL, NULL));
        return;
    case 4:
        if (region != NULL)
            may_fail(gm_region_unmap(region, GM_ASYNC, NULL, NULL));
        return;
    case 5:
        if (region != NULL && gm_region_begin(region, &va) == GM_RET_OK)
            may_fail(device_reach(&nic, nic_dev, va, GM_PROT_WRITE, &byte));
        return;
    case 6:
        if (region != NULL && gm_region_begin(region, &va) == GM_RET_OK)
            may_fail(gm_as_lookup(as, va, &region));
        return;
    case 7:
        if (region != NULL)
            may_fail(gm_region_protect(region, chance(worker, 4)));
        return;
    default:
        /* A failure that somebody else's operation had. */
        may_fail(gm_as_synchronize(as));
        return;
    }
}

static void come_and_go(struct worker *worker)
{
    if (chance(worker, 2) == 0)
        may_fail(gm_as_attach(as, late_dev, GM_MMU_MODE_COHERENT, true));
    else
        may_fail(gm_dev_detach(late_dev, as));
}

static void *work(void *arg)
{
    struct worker *worker = arg;
    unsigned queued = 0;
    for (int round = 0; round < ROUNDS; round++) {
        switch (chance(worker, 8)) {
        case 0:
            come_and_go(worker);
            break;
        case 1:
        case 2:
        case 3:
            queued += own_region(worker);
            break;
        default:
            shared_region(worker);
            break;
        }
    }
    may_fail(gm_as_synchronize(as));
    pthread_mutex_lock(&lock);
    CHECK(worker->done == queued);
    pthread_mutex_unlock(&lock);
    return NULL;
}

static void sharing_a_space(void)
{
    struct worker workers[THREADS];
    uint64_t used = 1;
    gm_ret_t left;
    OK(gm_as_create(VA_BASE, VA_END, GM_AS_ALLOC_CACHED, &as));
    OK(gm_dev_create(gm_mmu_CPU, NULL, GM_DEV_CAP_RECOVERS, &cpu));
    OK(gm_cpu_add_window(cpu, PA_BASE, sizeof machine_memory, machine_memory));
    gpu_dev = device_create(&gpu, GM_DEV_CAP_RECOVERS);
    nic_dev = device_create(&nic, GM_DEV_CAP_RECOVERS);
    late_dev = device_create(&late, GM_DEV_CAP_NONE);
    OK(gm_dev_register_physmem(cpu, frame(0), frame(512)));
    OK(gm_dev_register_physmem(gpu_dev, frame(512), frame(520)));
    OK(gm_as_attach(as, cpu, GM_MMU_MODE_COHERENT, true));
    OK(gm_as_attach(as, gpu_dev, GM_MMU_MODE_SHARED, true));
    OK(gm_as_attach(as, nic_dev, GM_MMU_MODE_COHERENT, true));

    for (unsigned at = 0; at < THREADS; at++) {
        workers[at].number = at;
        workers[at].state = at + 1;
        workers[at].done = 0;
        CHECK(pthread_create(&workers[at].thread, NULL, work, &workers[at]) == 0);
    }
    for (unsigned at = 0; at < THREADS; at++)
        CHECK(pthread_join(workers[at].thread, NULL) == 0);

    for (unsigned at = 0; at < SHARED; at++) {
        if (shared[at] != NULL)
            OK(gm_region_dealloc(shared[at]));
    }
    may_fail(gm_as_synchronize(as));
    OK(gm_dev_used_physmem(cpu, &used));
    CHECK(used == 0);
    OK(gm_dev_used_physmem(gpu_dev, &used));
    CHECK(used == 0);
    left = gm_dev_detach(late_dev, as);
    CHECK(left == GM_RET_OK || left == GM_RET_NOT_ATTACHED);
    OK(gm_dev_detach(cpu, as));
    OK(gm_dev_detach(gpu_dev, as));
    OK(gm_dev_detach(nic_dev, as));
    OK(gm_dev_destroy(cpu));
    OK(gm_dev_destroy(gpu_dev));
    OK(gm_dev_destroy(nic_dev));
    OK(gm_dev_destroy(late_dev));
    OK(gm_as_destroy(as));
    CHECK(gpu.tables == 0 && nic.tables == 0 && late.tables == 0);
}

#define HERE (VA_BASE + 32 * PAGE)

static int looking; /* guarded by lock */

static int still_looking(void)
{
    pthread_mutex_lock(&lock);
    int now = looking;
    pthread_mutex_unlock(&lock);
    return now;
}

/* Finds whatever region is just there. */
static void *look(void *arg)
{
    (void)arg;
    while (still_looking()) {
        gm_region_t *found = NULL, *again = NULL;
        gm_va_t begin = 0;
        gm_ret_t ret = gm_as_lookup(as, HERE, &found);
        if (ret == GM_RET_NOT_ALLOCATED)
            continue;
        OK(ret);
        ret = gm_region_begin(found, &begin);
        CHECK(ret == GM_RET_DESTROYED || (ret == GM_RET_OK && begin == HERE));
        if (gm_as_lookup(as, HERE, &again) == GM_RET_OK && again != found)
            EXPECT(gm_region_begin(found, &begin), GM_RET_DESTROYED);
    }
    return NULL;
}

/* A handle is good until its region is freed, whoever looks it up, and never after. */
static void handle_of_a_region_while_others_look_it_up(void)
{
    struct worker workers[2];
    OK(gm_as_create(VA_BASE, VA_END, GM_AS_ALLOC_DEFAULT, &as));
    looking = 1;
    for (unsigned at = 0; at < 2; at++)
        CHECK(pthread_create(&workers[at].thread, NULL, look, &workers[at]) == 0);
    for (int turn = 0; turn < 20000; turn++) {
        gm_region_t *region = NULL, *found = NULL;
        gm_va_t begin = 0;
        OK(gm_as_alloc(as, HERE, PAGE, 0, 0, 0, &region));
        OK(gm_region_begin(region, &begin));
        CHECK(begin == HERE);
        OK(gm_as_lookup(as, HERE, &found));
        CHECK(found == region);
        OK(gm_region_dealloc(region));
        EXPECT(gm_region_begin(region, &begin), GM_RET_DESTROYED);
    }
    pthread_mutex_lock(&lock);
    looking = 0;
    pthread_mutex_unlock(&lock);
    for (unsigned at = 0; at < 2; at++)
        CHECK(pthread_join(workers[at].thread, NULL) == 0);
    OK(gm_as_destroy(as));
}

static unsigned called; /* guarded by lock */

static void count(void *arg)
{
    (void)arg;
    pthread_mutex_lock(&lock);
    called++;
    pthread_mutex_unlock(&lock);
}

static unsigned calls(void)
{
    pthread_mutex_lock(&lock);
    unsigned now = called;
    pthread_mutex_unlock(&lock);
    return now;
}

/* Queues until the space is gone; how often that went well. */
static void *queue(void *arg)
{
    struct worker *worker = arg;
    gm_mapping_set_t *set = NULL;
    worker->done = 0;
    if (gm_mapping_set_create(as, &set) != GM_RET_OK)
        return NULL;
    for (;;) {
        gm_ret_t ret = gm_mapping_set_unmap(set, GM_ASYNC, count, NULL);
        if (ret == GM_RET_DESTROYED)
            return NULL;
        OK(ret);
        worker->done++;
    }
}

/* What was queued is carried out, also at the very moment in which the space ends. */
static void operations_queued_while_the_space_ends(void)
{
    for (int turn = 0; turn < 200; turn++) {
        struct worker workers[2];
        OK(gm_as_create(VA_BASE, VA_END, GM_AS_ALLOC_DEFAULT, &as));
        called = 0;
        for (unsigned at = 0; at < 2; at++)
            CHECK(pthread_create(&workers[at].thread, NULL, queue, &workers[at]) == 0);
        /* Every other space ends while both are at it, the rest at any moment. */
        while (turn % 2 == 0 && calls() < 4)
            OK(gm_as_synchronize(as));
        OK(gm_as_destroy(as));
        for (unsigned at = 0; at < 2; at++)
            CHECK(pthread_join(workers[at].thread, NULL) == 0);
        CHECK(called == workers[0].done + workers[1].done);
    }
}

int main(void)
{
    sharing_a_space();
    handle_of_a_region_while_others_look_it_up();
    operations_queued_while_the_space_ends();
    puts("threads: every byte as written");
    return 0;
}
