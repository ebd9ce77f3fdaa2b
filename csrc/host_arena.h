/* Host memory of exactly the planned size, as a C interface that pointers and sizes cross.
 *
 * The order of use is reserve, touch, release. Every function returns 0, or the errno of what
 * failed; a failed call leaves nothing behind. None of them keeps state.
 */
#ifndef SPPO_HOST_ARENA_H
#define SPPO_HOST_ARENA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SPPO_EXPORT __attribute__((visibility("default")))

/* Raised with every change of a signature or struct here or in file_tier.h;
 * sppo/kernels/native/extension.py names the number it was written for and refuses any other. */
#define SPPO_INTERFACE_VERSION 2

/* sppo_arena.numa_node where the memory is bound to no node. */
#define SPPO_ANY_NODE (-1)

typedef struct {
    void *address;       /* start, on a page boundary */
    uint64_t size_bytes; /* what was asked for, rounded up to whole pages */
    int32_t huge_pages;  /* 1: the system took the advice to use huge pages */
    int32_t numa_node;   /* the node it is bound to, or SPPO_ANY_NODE */
} sppo_arena;

SPPO_EXPORT int sppo_interface_version(void);

/* Map size_bytes of anonymous memory, rounded up to pages. No page of it is resident yet.
 *
 * huge_pages: not 0: advise huge pages; a system without them is no error (see the result).
 * numa_node: bind to this node and no other, or SPPO_ANY_NODE.
 *
 * EINVAL: a size of 0, or no such node. ENOMEM: no room, in the address space or in memory.
 * EPERM, ENOSYS: this system or its container does not let memory be bound. */
SPPO_EXPORT int sppo_arena_reserve(uint64_t size_bytes, int huge_pages, int numa_node,
                                   sppo_arena *arena);

/* Make every page resident, with num_threads threads, by writing a zero into each: so call it
 * before first use.
 *
 * A thread that the system does not grant is done without. EINVAL: no thread, or no arena. */
SPPO_EXPORT int sppo_arena_touch(const sppo_arena *arena, int num_threads);

/* Give the memory back. EINVAL: not an arena. Releasing twice is the caller's fault. */
SPPO_EXPORT int sppo_arena_release(const sppo_arena *arena);

#ifdef __cplusplus
}
#endif

#endif
