/* Memory for tensors of any size, as few resident pages as their bytes need.
 *
 * A C heap answers the temporaries of a layer with about twice their size: blocks of many
 * megabytes, aligned, of a few sizes that come and go in turn, leave holes that the next one misses
 * by a few bytes. Returning each to the system instead costs its page faults. This pool keeps freed
 * pages for the next block, and where the holes do not fit it gives back as many pages as it newly
 * takes: what is resident is the most bytes that were ever in use at once, and no more as long as holes
 * are of whole huge pages (2 MiB); smaller ones cannot be given back.
 *
 * One range of addresses, reserved once; blocks are found by best fit in it. Any thread may call.
 */
#ifndef SPPO_MEMORY_POOL_H
#define SPPO_MEMORY_POOL_H

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace sppo {

struct PoolStatistics {
    uint64_t used_bytes = 0;          /* in blocks that are out */
    uint64_t used_peak_bytes = 0;     /* since reset_peak */
    uint64_t resident_bytes = 0;      /* pages that were touched and not given back */
    uint64_t resident_peak_bytes = 0; /* since reset_peak */
    uint64_t returned_bytes = 0;      /* given back to the system, ever: each is a page fault to come */
    uint64_t blocks = 0;              /* handed out, ever */
};

class MemoryPool {
public:
    /* Reserve addresses for up to `reserve_bytes`; halves the wish until the system grants it.
     * Throws std::bad_alloc where not even a gibibyte is to be had. Nothing is resident yet. */
    explicit MemoryPool(uint64_t reserve_bytes);
    ~MemoryPool();
    MemoryPool(const MemoryPool &) = delete;
    MemoryPool &operator=(const MemoryPool &) = delete;

    /* A block on a page boundary, or nullptr where the addresses are used up. `size` > 0. */
    void *allocate(size_t size);
    /* Take a block back. False: it is none of this pool's. */
    bool deallocate(void *block);
    /* Give all free pages back. */
    void trim();
    void reset_peak();
    PoolStatistics statistics();
    /* Around fork(): no other thread may be inside when the process is copied. */
    void lock() { mutex_.lock(); }
    void unlock() { mutex_.unlock(); }

private:
    struct Free {
        size_t size;
        bool resident;
    };
    using FreeMap = std::map<uintptr_t, Free>;

    uintptr_t take_resident(size_t size);
    uintptr_t take_growing(size_t size);
    uintptr_t best_window(size_t size) const;
    void give_back(size_t wanted);
    void insert(uintptr_t address, size_t size, bool resident);
    FreeMap::iterator erase(FreeMap::iterator node);

    std::mutex mutex_;
    uintptr_t start_ = 0;
    uintptr_t end_ = 0;
    FreeMap free_; /* by address; neighbours differ in residence, otherwise they are one */
    std::set<std::pair<size_t, uintptr_t>> resident_; /* the resident ones of free_, by size */
    std::unordered_map<uintptr_t, size_t> used_;
    PoolStatistics statistics_;
};

} // namespace sppo

#endif
