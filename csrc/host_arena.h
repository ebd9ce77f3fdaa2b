/* Host memory of exactly the planned size; C interface.
 *
 * The order of calls is reserve, touch, release. Every function returns 0, or the errno of the
 * failure; a failed call leaves nothing behind. The library keeps no state.
 */
#ifndef SPPO_HOST_ARENA_H
#define SPPO_HOST_ARENA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SPPO_EXPORT __attribute__((visibility("default")))

/* Incremented with every change of a signature or struct here or in file_tier.h;
 * sppo/kernels/native/extension.py accepts only the version that it was written for. */
#define SPPO_INTERFACE_VERSION 2

/* sppo_arena.numa_node of memory that is not bound to a node. */
#define SPPO_ANY_NODE (-1)

typedef struct {
    void *address;       /* start, on a page boundary */
    uint64_t size_bytes; /* requested size, rounded up to whole pages */
    int32_t huge_pages;  /* 1: the system accepted the advice to use huge pages */
    int32_t numa_node;   /* node that the memory is bound to, or SPPO_ANY_NODE */
} sppo_arena;

SPPO_EXPORT int sppo_interface_version(void);

/* Map size_bytes of anonymous memory, rounded up to pages. No page may be accessed before it is
 * touched.
 *
 * huge_pages: if not 0, advise huge pages; arena->huge_pages says whether the system has them.
 * numa_node: node that all memory must come from, or SPPO_ANY_NODE.
 *
 * EINVAL: a size of 0, or no such node. ENOMEM: not enough address space or memory. EPERM, ENOSYS:
 * the system or its container does not allow binding memory. */
SPPO_EXPORT int sppo_arena_reserve(uint64_t size_bytes, int huge_pages, int numa_node,
                                   sppo_arena *arena);

/* Make every page of an arena, or of a range of its pages, resident by writing a zero into each,
 * with num_threads threads; call before first use.
 *
 * If the system refuses threads, fewer are used. EINVAL: no thread, or no arena. ENOMEM: the system
 * refuses the memory (vm.overcommit_memory=2). */
SPPO_EXPORT int sppo_arena_touch(const sppo_arena *arena, int num_threads);

/* Unmap the memory. EINVAL: not an arena. The caller must not release an arena twice. */
SPPO_EXPORT int sppo_arena_release(const sppo_arena *arena);

#ifdef __cplusplus
}
#endif

#endif
