/* SPDX-License-Identifier: Apache-2.0 */
/* Asynchronous operations: order, batches, callbacks, and what becomes of failures. */

#include "machine.h"

#define MANY 64

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static int gate_open = 1;
static unsigned called;

static struct device one;
static gm_as_t *as;
static gm_dev_t *dev;

static gm_region_t *region_in_as(gm_va_t pages)
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

static void set_gate(int open)
{
    pthread_mutex_lock(&lock);
    gate_open = open;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

static unsigned calls(void)
{
    pthread_mutex_lock(&lock);
    unsigned now = called;
    pthread_mutex_unlock(&lock);
    return now;
}

static void count(void *arg)
{
    (void)arg;
    pthread_mutex_lock(&lock);
    called++;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

/* Counts, and stays until the gate opens. */
static void wait_at_gate(void *arg)
{
    count(arg);
    pthread_mutex_lock(&lock);
    while (!gate_open)
        pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
}

static void wait_for_calls(unsigned wanted)
{
    pthread_mutex_lock(&lock);
    while (called < wanted)
        pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
}

/* The argument is the region: nobody reaches it any more. */
static void check_gone(void *arg)
{
    unsigned char byte = 0;
    CHECK(!device_access(&one, begin_of(arg), GM_PROT_READ, &byte));
    count(arg);
}

static void set_up(void)
{
    OK(gm_as_create(VA_BASE, VA_END, GM_AS_ALLOC_CACHED, &as));
    dev = device_create(&one, GM_DEV_CAP_NONE);
    OK(gm_as_attach(as, dev, GM_MMU_MODE_COHERENT, true));
    called = 0;
}

static void take_down(void)
{
    OK(gm_dev_detach(dev, as));
    OK(gm_dev_destroy(dev));
    OK(gm_as_destroy(as));
    CHECK(one.tables == 0);
}

static void mapping_is_there_when_the_callback_is_called_and_gone_when_it_is_again(void)
{
    gm_region_t *region;
    gm_pa_t page = frame(1);
    unsigned char byte = 0;
    set_up();
    region = region_in_as(1);
    OK(gm_region_map(region, GM_PROT_READ, &page, NULL, GM_ASYNC, count, NULL));
    wait_for_calls(1);
    CHECK(device_access(&one, begin_of(region), GM_PROT_READ, &byte));
    OK(gm_region_unmap(region, GM_ASYNC, check_gone, region));
    OK(gm_as_synchronize(as));
    CHECK(calls() == 2);
    /* Without a callback, synchronize tells. */
    OK(gm_region_map(region, GM_PROT_READ, &page, NULL, GM_ASYNC, NULL, NULL));
    OK(gm_as_synchronize(as));
    CHECK(device_access(&one, begin_of(region), GM_PROT_READ, &byte));
    /* What is called without GM_ASYNC comes after what was queued. */
    OK(gm_region_unmap(region, GM_ASYNC, count, NULL));
    OK(gm_region_map(region, GM_PROT_READ, &page, NULL, 0, NULL, NULL));
    CHECK(device_access(&one, begin_of(region), GM_PROT_READ, &byte));
    OK(gm_region_dealloc(region));
    take_down();
}

static void unmaps_that_wait_together_are_one_invalidation(void)
{
    gm_region_t *first, *regions[MANY];
    gm_pa_t page = frame(1);
    unsigned char byte = 0;
    set_up();
    first = region_in_as(1);
    OK(gm_region_map(first, GM_PROT_READ, &page, NULL, 0, NULL, NULL));
    for (int at = 0; at < MANY; at++) {
        regions[at] = region_in_as(1);
        OK(gm_region_map(regions[at], GM_PROT_READ, &page, NULL, 0, NULL, NULL));
        CHECK(device_access(&one, begin_of(regions[at]), GM_PROT_READ, &byte));
    }
    /* The first callback keeps the thread that carries operations out. */
    set_gate(0);
    OK(gm_region_unmap(first, GM_ASYNC, wait_at_gate, NULL));
    wait_for_calls(1);
    one.calls[INVALIDATE] = 0;
    for (int at = 0; at < MANY; at++)
        OK(gm_region_unmap(regions[at], GM_ASYNC, check_gone, regions[at]));
    /* Nothing is done yet: TLB and table are as they were. */
    CHECK(calls() == 1);
    for (int at = 0; at < MANY; at++)
        CHECK(device_access(&one, begin_of(regions[at]), GM_PROT_READ, &byte));
    set_gate(1);
    OK(gm_as_synchronize(as));
    CHECK(calls() == 1 + MANY);
    CHECK(one.calls[INVALIDATE] == 1);
    OK(gm_region_dealloc(first));
    for (int at = 0; at < MANY; at++)
        OK(gm_region_dealloc(regions[at]));
    take_down();
}

static void failure_is_told_once_by_synchronize_and_not_by_the_callback(void)
{
    gm_region_t *region;
    gm_pa_t page = frame(1);
    unsigned char byte = 0;
    set_up();
    region = region_in_as(1);
    let_fail(&one, MAP, 1, 12);
    OK(gm_region_map(region, GM_PROT_READ, &page, NULL, GM_ASYNC, count, NULL));
    EXPECT(gm_as_synchronize(as), GM_RET_DEVICE);
    CHECK(strstr(gm_last_error(), "12") != NULL);
    OK(gm_as_synchronize(as));
    CHECK(calls() == 0);

    OK(gm_region_map(region, GM_PROT_READ, &page, NULL, 0, NULL, NULL));
    CHECK(device_access(&one, begin_of(region), GM_PROT_READ, &byte));
    let_fail(&one, INVALIDATE, 1, 13);
    OK(gm_region_unmap(region, GM_ASYNC, count, NULL));
    EXPECT(gm_as_synchronize(as), GM_RET_DEVICE);
    /* The TLB has it still, so it cannot be used for anything else. */
    CHECK(device_access(&one, begin_of(region), GM_PROT_READ, &byte));
    EXPECT(gm_region_map(region, GM_PROT_READ, &page, NULL, 0, NULL, NULL), GM_RET_ALREADY_MAPPED);
    OK(gm_region_unmap(region, GM_ASYNC, check_gone, region));
    OK(gm_as_synchronize(as));
    CHECK(calls() == 1);
    /* The first of two failures. */
    OK(gm_region_unmap(region, GM_ASYNC, count, NULL));
    let_fail(&one, MAP, 1, 14);
    OK(gm_region_map(region, GM_PROT_READ, &page, NULL, GM_ASYNC, count, NULL));
    EXPECT(gm_as_synchronize(as), GM_RET_NOT_MAPPED);
    OK(gm_as_synchronize(as));
    CHECK(calls() == 1);
    OK(gm_region_dealloc(region));
    take_down();
}

static void mapping_set_goes_with_one_callback(void)
{
    gm_mapping_set_t *set = NULL;
    gm_region_t *regions[3];
    gm_pa_t page = frame(1);
    unsigned char byte = 0;
    set_up();
    OK(gm_mapping_set_create(as, &set));
    for (int at = 0; at < 3; at++) {
        regions[at] = region_in_as(1);
        OK(gm_region_map(regions[at], GM_PROT_READ, &page, set, GM_ASYNC, NULL, NULL));
    }
    OK(gm_mapping_set_unmap(set, GM_ASYNC, count, NULL));
    OK(gm_as_synchronize(as));
    CHECK(calls() == 1);
    for (int at = 0; at < 3; at++) {
        CHECK(!device_access(&one, begin_of(regions[at]), GM_PROT_READ, &byte));
        OK(gm_region_dealloc(regions[at]));
    }
    OK(gm_mapping_set_destroy(set));
    take_down();
}

static void regions_that_failed_are_told_by_their_states(void)
{
    gm_region_t *regions[3];
    gm_pa_t page = frame(1);
    gm_region_state_t states[3];
    set_up();
    for (int at = 0; at < 3; at++) {
        regions[at] = region_in_as(1);
        if (at == 1)
            let_fail(&one, MAP, 1, 15);
        OK(gm_region_map(regions[at], GM_PROT_READ, &page, NULL, GM_ASYNC, count, NULL));
        if (at == 1) {
            EXPECT(gm_as_synchronize(as), GM_RET_DEVICE);
        } else {
            OK(gm_as_synchronize(as));
        }
    }
    CHECK(calls() == 2);
    let_fail(&one, UNMAP, 1, 16);
    OK(gm_region_unmap(regions[0], GM_ASYNC, count, NULL));
    EXPECT(gm_as_synchronize(as), GM_RET_DEVICE);
    CHECK(calls() == 2);
    for (int at = 0; at < 3; at++)
        OK(gm_region_state(regions[at], &states[at]));
    CHECK(states[0] == GM_REGION_LEAVING);
    CHECK(states[1] == GM_REGION_NOTHING);
    CHECK(states[2] == GM_REGION_WIRED);
    for (int at = 0; at < 3; at++)
        OK(gm_region_dealloc(regions[at]));
    take_down();
}

/* A set's unmap takes its turn: what was queued for the set before it goes, too. */
static void mapping_set_without_async_goes_after_what_was_queued(void)
{
    gm_mapping_set_t *set = NULL;
    gm_region_t *first, *queued;
    gm_pa_t page = frame(1);
    gm_region_state_t state = GM_REGION_LEAVING;
    set_up();
    OK(gm_mapping_set_create(as, &set));
    first = region_in_as(1);
    queued = region_in_as(1);
    OK(gm_region_map(first, GM_PROT_READ, &page, NULL, 0, NULL, NULL));
    /* Whoever carries operations out stays in a callback; the map behind it waits. */
    set_gate(0);
    OK(gm_region_unmap(first, GM_ASYNC, wait_at_gate, NULL));
    wait_for_calls(1);
    OK(gm_region_map(queued, GM_PROT_READ, &page, set, GM_ASYNC, count, NULL));
    OK(gm_mapping_set_unmap(set, 0, NULL, NULL));
    OK(gm_region_state(queued, &state));
    CHECK(state == GM_REGION_NOTHING);
    set_gate(1);
    OK(gm_as_synchronize(as));
    CHECK(calls() == 2);
    /* One that was mapped anew since is not in the set. */
    OK(gm_region_map(queued, GM_PROT_READ, &page, set, 0, NULL, NULL));
    OK(gm_region_unmap(queued, 0, NULL, NULL));
    OK(gm_region_map(queued, GM_PROT_READ, &page, NULL, 0, NULL, NULL));
    OK(gm_mapping_set_unmap(set, 0, NULL, NULL));
    OK(gm_region_state(queued, &state));
    CHECK(state == GM_REGION_WIRED);
    OK(gm_region_dealloc(first));
    OK(gm_region_dealloc(queued));
    OK(gm_mapping_set_destroy(set));
    take_down();
}

static gm_ret_t outcomes[3];

/* Uses the interface: another region, synchronize, and the region's end. */
static void use_the_interface(void *arg)
{
    gm_region_t *another = NULL;
    outcomes[0] = gm_as_alloc(as, 0, PAGE, 0, 0, 0, &another);
    outcomes[1] = gm_as_synchronize(as);
    OK(gm_region_dealloc(another));
    outcomes[2] = gm_region_dealloc(arg);
    count(arg);
}

static void leave(void *arg)
{
    OK(gm_region_dealloc(arg));
    OK(gm_dev_detach(dev, as));
    outcomes[0] = gm_as_destroy(as);
    count(arg);
}

static void callback_may_use_the_interface_and_even_end_the_space(void)
{
    gm_region_t *region;
    gm_pa_t page = frame(1);
    set_up();
    region = region_in_as(1);
    OK(gm_region_map(region, GM_PROT_READ, &page, NULL, 0, NULL, NULL));
    OK(gm_region_unmap(region, GM_ASYNC, use_the_interface, region));
    OK(gm_as_synchronize(as));
    CHECK(calls() == 1);
    for (int at = 0; at < 3; at++)
        OK(outcomes[at]);
    region = region_in_as(1);
    OK(gm_region_map(region, GM_PROT_READ, &page, NULL, 0, NULL, NULL));
    OK(gm_region_unmap(region, GM_ASYNC, leave, region));
    wait_for_calls(2);
    OK(outcomes[0]);
    EXPECT(gm_as_synchronize(as), GM_RET_DESTROYED);
    OK(gm_dev_destroy(dev));
    CHECK(one.tables == 0);
}

static void more_operations_than_the_queue_holds_are_all_carried_out(void)
{
    gm_region_t *region;
    gm_pa_t page = frame(1);
    set_up();
    region = region_in_as(1);
    for (int turn = 0; turn < 10000; turn++) {
        OK(gm_region_map(region, GM_PROT_READ, &page, NULL, GM_ASYNC, count, NULL));
        OK(gm_region_unmap(region, GM_ASYNC, count, NULL));
    }
    OK(gm_as_synchronize(as));
    CHECK(calls() == 20000);
    OK(gm_region_dealloc(region));
    take_down();
}

int main(void)
{
    mapping_is_there_when_the_callback_is_called_and_gone_when_it_is_again();
    unmaps_that_wait_together_are_one_invalidation();
    failure_is_told_once_by_synchronize_and_not_by_the_callback();
    regions_that_failed_are_told_by_their_states();
    mapping_set_goes_with_one_callback();
    mapping_set_without_async_goes_after_what_was_queued();
    callback_may_use_the_interface_and_even_end_the_space();
    more_operations_than_the_queue_holds_are_all_carried_out();
    puts("asynchronous: all as said");
    return 0;
}
