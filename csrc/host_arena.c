/* See host_arena.h.
 *
 * C, not C++: a fresh machine has gcc and often no g++, and nothing here needs more than system
 * calls and threads.
 */
#define _GNU_SOURCE
#include "host_arena.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __linux__
#include <sys/syscall.h>
#endif

/* Alignment of the threads' shares, so that no two threads touch the same huge page. */
#define SHARE_BYTES ((uintptr_t)2 << 20)
#define MOST_THREADS 64
#define MOST_NODES 1024
#define BITS_PER_WORD (sizeof(unsigned long) * CHAR_BIT)
#define BIND_POLICY 2 /* MPOL_BIND of <linux/mempolicy.h>, which not every machine has */

_Static_assert(sizeof(void *) == 8, "arenas are larger than 32-bit addresses reach");
_Static_assert(sizeof(size_t) == sizeof(uint64_t), "sizes cross the interface as uint64_t");
_Static_assert(offsetof(sppo_arena, size_bytes) == 8, "extension.py lays the struct out so");
_Static_assert(offsetof(sppo_arena, huge_pages) == 16, "extension.py lays the struct out so");
_Static_assert(offsetof(sppo_arena, numa_node) == 20, "extension.py lays the struct out so");
_Static_assert(sizeof(sppo_arena) == 24, "extension.py lays the struct out so");
_Static_assert(MOST_NODES % BITS_PER_WORD == 0, "node masks are whole words");

int sppo_interface_version(void) { return SPPO_INTERFACE_VERSION; }

static size_t page_bytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static int advise_huge_pages(void *address, size_t size) {
#ifdef MADV_HUGEPAGE
    return madvise(address, size, MADV_HUGEPAGE) == 0;
#else
    (void)address, (void)size;
    return 0;
#endif
}

/* Uses the system call, so that libnuma is not needed. */
static int bind_to_node(void *address, size_t size, int node) {
#ifdef SYS_mbind
    unsigned long mask[MOST_NODES / BITS_PER_WORD] = {0};
    if (node < 0 || node >= MOST_NODES - 1) return EINVAL;
    mask[(size_t)node / BITS_PER_WORD] = 1UL << ((size_t)node % BITS_PER_WORD);
    /* The kernel reads one bit less than the given number of bits. */
    long rc = syscall(SYS_mbind, address, size, BIND_POLICY, mask, (unsigned long)MOST_NODES, 0UL);
    return rc == 0 ? 0 : errno;
#else
    (void)address, (void)size, (void)node;
    return ENOSYS;
#endif
}

int sppo_arena_reserve(uint64_t size_bytes, int huge_pages, int numa_node, sppo_arena *arena) {
    const size_t page = page_bytes();
    if (arena == NULL || size_bytes == 0) return EINVAL;
    if (size_bytes > (uint64_t)PTRDIFF_MAX - page) return ENOMEM;
    const size_t size = ((size_t)size_bytes + page - 1) / page * page;
    /* The caller may map addresses for memory that it never needs, so the system counts none before
     * it is touched, not even with vm.overcommit_memory=2. */
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *address = mmap(NULL, size, PROT_NONE, flags, -1, 0);
    if (address == MAP_FAILED) return errno;
    const int advised = huge_pages && advise_huge_pages(address, size);
    if (numa_node != SPPO_ANY_NODE) {
        const int failure = bind_to_node(address, size, numa_node);
        if (failure != 0) {
            munmap(address, size);
            return failure;
        }
    }
    *arena = (sppo_arena){address, size, advised, numa_node};
    return 0;
}

typedef struct {
    uintptr_t begin, end; /* page-aligned addresses */
    size_t page;
} share;

static void *touch_share(void *argument) {
    const share *mine = argument;
    for (uintptr_t at = mine->begin; at < mine->end; at += mine->page) {
        /* Write without reading: a read would fault first, for the zero page. */
        *(volatile unsigned char *)at = 0;
    }
    return NULL;
}

int sppo_arena_touch(const sppo_arena *arena, int num_threads) {
    if (arena == NULL || arena->address == NULL || num_threads < 1) return EINVAL;
    pthread_t threads[MOST_THREADS];
    share shares[MOST_THREADS];
    int started[MOST_THREADS];
    const uintptr_t begin = (uintptr_t)arena->address, end = begin + arena->size_bytes;
    if (mprotect(arena->address, arena->size_bytes, PROT_READ | PROT_WRITE) != 0) return errno;
    const uintptr_t blocks = (end - begin + SHARE_BYTES - 1) / SHARE_BYTES;
    uintptr_t count = num_threads < MOST_THREADS ? (uintptr_t)num_threads : MOST_THREADS;
    if (count > blocks) count = blocks;

    uintptr_t next = begin;
    for (uintptr_t i = 0; i < count; i++) {
        uintptr_t stop = (begin + (i + 1) * blocks / count * SHARE_BYTES) & ~(SHARE_BYTES - 1);
        if (stop > end || i + 1 == count) stop = end;
        if (stop < next) stop = next;
        shares[i] = (share){next, stop, page_bytes()};
        next = stop;
        /* The calling thread touches the last share itself. */
        started[i] = i + 1 < count &&
                     pthread_create(&threads[i], NULL, touch_share, &shares[i]) == 0;
        if (!started[i]) touch_share(&shares[i]);
    }
    for (uintptr_t i = 0; i < count; i++)
        if (started[i]) pthread_join(threads[i], NULL);
    return 0;
}

int sppo_arena_release(const sppo_arena *arena) {
    if (arena == NULL || arena->address == NULL || arena->size_bytes == 0) return EINVAL;
    return munmap(arena->address, (size_t)arena->size_bytes) == 0 ? 0 : errno;
}
