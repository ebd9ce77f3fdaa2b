/* Memory pool as the allocator of torch's CPU tensors, see memory_pool.h.
 *
 * The only part of csrc compiled against torch, whose allocator interface exists in C++ only. If it
 * cannot be built, tensors stay in the C heap. The name of the library's file stands for one version
 * of torch (sppo/native_build.py).
 */
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <new>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include "memory_pool.h"

namespace {

constexpr size_t ALIGNMENT = 64; /* alignment of torch's own allocator */

std::atomic<sppo::MemoryPool *> pool{nullptr};
size_t least_pooled_bytes = 0;

void deallocate(void *block) {
    c10::profiledCPUMemoryReporter().Delete(block); /* as torch's own allocator does */
    /* Blocks allocated before the pool was installed, or too small for it, belong to the heap. */
    if (block != nullptr && !pool.load()->deallocate(block)) std::free(block);
}

struct PoolAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        void *block = nullptr;
        if (size >= least_pooled_bytes) block = pool.load()->allocate(size);
        if (block == nullptr && size > 0 && posix_memalign(&block, ALIGNMENT, size) != 0) {
            TORCH_CHECK(false, "not enough memory: a tensor of ", size, " bytes was asked for");
        }
        c10::profiledCPUMemoryReporter().New(block, size);
        return {block, block, &deallocate, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }
    void copy_data(void *to, const void *from, size_t count) const override {
        default_copy_data(to, from, count);
    }
};

} // namespace

#define SPPO_EXPORT extern "C" __attribute__((visibility("default")))

/* From now on allocate CPU tensors of at least `least_bytes` in the pool, and smaller ones in the C
 * heap. Existing tensors are not moved. Repeated calls do nothing. Returns 0, or ENOMEM. */
SPPO_EXPORT int sppo_cpu_allocator_install(uint64_t reserve_bytes, uint64_t least_bytes) {
    if (pool.load() != nullptr) return 0;
    try {
        pool = new sppo::MemoryPool(reserve_bytes); /* lives as long as the process */
    } catch (const std::bad_alloc &) {
        return ENOMEM;
    }
    least_pooled_bytes = least_bytes;
    pthread_atfork([] { pool.load()->lock(); }, [] { pool.load()->unlock(); },
                   [] { pool.load()->unlock(); });
    /* Never destroyed: tensors outlive static objects at exit. */
    c10::SetCPUAllocator(new PoolAllocator, /*priority=*/1);
    return 0;
}

/* The other functions need an installed pool. */
SPPO_EXPORT void sppo_cpu_allocator_statistics(sppo::PoolStatistics *memory) {
    *memory = pool.load()->statistics();
}

SPPO_EXPORT void sppo_cpu_allocator_reset_peak() { pool.load()->reset_peak(); }

/* Return all whole free huge pages to the system. */
SPPO_EXPORT void sppo_cpu_allocator_trim() { pool.load()->trim(); }
