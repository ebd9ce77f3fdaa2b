/* Makes a memory pool the allocator of torch's CPU tensors, see memory_pool.h.
 *
 * A library of its own and the only part of csrc that is compiled against torch: torch offers this
 * in C++ alone. Where it cannot be built, or torch has been replaced since, the C heap serves as it
 * always does.
 */
#ifndef SPPO_CPU_ALLOCATOR_H
#define SPPO_CPU_ALLOCATOR_H

#include <stdint.h>

#define SPPO_EXPORT __attribute__((visibility("default")))

extern "C" {

typedef struct {
    uint64_t used_bytes;
    uint64_t used_peak_bytes;
    uint64_t resident_bytes;
    uint64_t resident_peak_bytes;
    uint64_t returned_bytes;
    uint64_t blocks;
} sppo_cpu_memory;

/* Version of torch that it was compiled against, e.g. "2.13.0+cpu"; the build defines
 * SPPO_TORCH_VERSION. */
SPPO_EXPORT const char *sppo_cpu_allocator_torch(void);
/* From now on torch's CPU tensors of at least `least_bytes` live in the pool; smaller ones stay in
 * the C heap. Tensors that are there stay where they are. Twice is once. 0, or ENOMEM. */
SPPO_EXPORT int sppo_cpu_allocator_install(uint64_t reserve_bytes, uint64_t least_bytes);
SPPO_EXPORT void sppo_cpu_allocator_statistics(sppo_cpu_memory *memory);
SPPO_EXPORT void sppo_cpu_allocator_reset_peak(void);
/* Give all free pages back to the system. */
SPPO_EXPORT void sppo_cpu_allocator_trim(void);
}

#endif
