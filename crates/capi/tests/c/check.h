/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the C tests check with. A check that fails says where and ends the
 * program with 1.
 */
#ifndef CHECK_H
#define CHECK_H

#include <gmem.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                           \
    do {                                                                           \
        if (!(condition)) {                                                        \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

static inline void expect_at(const char *file, int line, const char *call, gm_ret_t got, gm_ret_t wanted)
{
    if (got != wanted) {
        fprintf(stderr, "%s:%d: %s: %d (%s; last error: %s), not %d (%s)\n", file, line, call, (int)got,
                gm_ret_string(got), gm_last_error(), (int)wanted, gm_ret_string(wanted));
        exit(1);
    }
}

/* The call returns this code. */
#define EXPECT(call, code) expect_at(__FILE__, __LINE__, #call, (call), (code))

/* The call succeeds. */
#define OK(call) EXPECT(call, GM_RET_OK)

#endif
