/* Memory pool as the allocator of torch's CPU tensors, see memory_pool.h.
 *
 * A library of its own and the only part of csrc compiled against torch, whose allocator interface
 * exists in C++ only. If it cannot be built, tensors stay in the C heap. The name of its file stands
 * for one version of torch (sppo/native_build.py).
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

/* From now on allocate CPU tensors of at least `least_bytes` in the pool, and smaller ones in the C
 * heap. Existing tensors are not moved. Repeated calls do nothing. Returns 0, or ENOMEM. */
SPPO_EXPORT int sppo_cpu_allocator_install(uint64_t reserve_bytes, uint64_t least_bytes);
SPPO_EXPORT void sppo_cpu_allocator_statistics(sppo_cpu_memory *memory);
SPPO_EXPORT void sppo_cpu_allocator_reset_peak(void);
/* Return all whole free huge pages to the system. */
SPPO_EXPORT void sppo_cpu_allocator_trim(void);
}

#endif
