/* Exercises csrc/host_arena.c under sanitizers: every call, every refusal, every thread count. */
#define _GNU_SOURCE
#include "host_arena.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIB ((uint64_t)1 << 20)
#define CHECK(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            fprintf(stderr, "line %d: %s is not so\n", __LINE__, #condition);  \
            exit(1);                                                           \
        }                                                                      \
    } while (0)

static uint64_t resident_pages(const sppo_arena *arena) {
    const size_t pages = arena->size_bytes / (size_t)sysconf(_SC_PAGESIZE);
    unsigned char *map = malloc(pages);
    CHECK(map != NULL);
    CHECK(mincore(arena->address, arena->size_bytes, map) == 0);
    uint64_t count = 0;
    for (size_t i = 0; i < pages; i++) count += map[i] & 1u;
    free(map);
    return count;
}

static void one_size(uint64_t size, int huge_pages, int num_threads) {
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    sppo_arena arena = {0};
    CHECK(sppo_arena_reserve(size, huge_pages, SPPO_ANY_NODE, &arena) == 0);
    CHECK(arena.size_bytes == (size + page - 1) / page * page);
    CHECK(resident_pages(&arena) == 0);
    CHECK(sppo_arena_touch(&arena, num_threads) == 0);
    CHECK(resident_pages(&arena) == arena.size_bytes / page);
    unsigned char *bytes = arena.address;
    for (uint64_t i = 0; i < arena.size_bytes; i++) CHECK(bytes[i] == 0);
    memset(bytes, 0xa5, arena.size_bytes);
    CHECK(sppo_arena_release(&arena) == 0);
}

static void refusals(void) {
    sppo_arena arena = {0};
    CHECK(sppo_arena_reserve(0, 0, SPPO_ANY_NODE, &arena) == EINVAL);
    CHECK(sppo_arena_reserve(MIB, 0, SPPO_ANY_NODE, NULL) == EINVAL);
    CHECK(sppo_arena_reserve(UINT64_MAX, 0, SPPO_ANY_NODE, &arena) == ENOMEM);
    CHECK(sppo_arena_reserve((uint64_t)1 << 60, 0, SPPO_ANY_NODE, &arena) == ENOMEM);
    CHECK(sppo_arena_reserve(MIB, 0, -2, &arena) != 0);
    CHECK(sppo_arena_reserve(MIB, 0, 1022, &arena) != 0);
    CHECK(sppo_arena_reserve(MIB, 0, 1 << 30, &arena) != 0);
    CHECK(arena.address == NULL);
    CHECK(sppo_arena_touch(&arena, 1) == EINVAL);
    CHECK(sppo_arena_release(&arena) == EINVAL);
    CHECK(sppo_arena_touch(NULL, 1) == EINVAL);
    CHECK(sppo_arena_release(NULL) == EINVAL);
    CHECK(sppo_arena_reserve(MIB, 0, SPPO_ANY_NODE, &arena) == 0);
    CHECK(sppo_arena_touch(&arena, 0) == EINVAL);
    CHECK(sppo_arena_release(&arena) == 0);
}

int main(void) {
    const uint64_t sizes[] = {1, 4096, 4097, 2 * MIB, 2 * MIB + 1, 7 * MIB + 12345};
    const int threads[] = {1, 2, 3, 5, 64, 1000};
    CHECK(sppo_interface_version() == SPPO_INTERFACE_VERSION);
    for (size_t s = 0; s < sizeof(sizes) / sizeof(*sizes); s++)
        for (size_t t = 0; t < sizeof(threads) / sizeof(*threads); t++)
            one_size(sizes[s], (int)(t % 2), threads[t]);
    refusals();
    puts("ok");
    return 0;
}
