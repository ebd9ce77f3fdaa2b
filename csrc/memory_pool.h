/* Memory pool for tensors of any size that keeps few more pages resident than are in use.
 *
 * A C heap takes about twice the size of a layer's temporaries: aligned blocks of many megabytes,
 * in a few sizes that alternate, leave holes that are too small for the next block by a few bytes.
 * Returning each block to the system instead costs page faults. This pool keeps freed pages for the
 * next block. If no hole fits, it returns as many free pages to the system as it newly takes, so
 * the resident bytes are the most bytes ever in use at once, unless holes are smaller than a huge
 * page (2 MiB), which cannot be returned.
 *
 * The pool is one range of addresses, reserved once; blocks are found by best fit. Thread-safe.
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
    uint64_t used_bytes = 0;          /* in allocated blocks */
    uint64_t used_peak_bytes = 0;     /* since reset_peak */
    uint64_t resident_bytes = 0;      /* pages that were touched and not returned to the system */
    uint64_t resident_peak_bytes = 0; /* since reset_peak */
    uint64_t returned_bytes = 0;      /* ever returned to the system; reuse costs page faults */
};

class MemoryPool {
public:
    /* Reserve addresses for up to `reserve_bytes`; halves the size until the system accepts it.
     * Throws std::bad_alloc if the system refuses a gibibyte. No page is resident yet. */
    explicit MemoryPool(uint64_t reserve_bytes);
    ~MemoryPool();
    MemoryPool(const MemoryPool &) = delete;
    MemoryPool &operator=(const MemoryPool &) = delete;

    /* Return a page-aligned block, or nullptr if no free range is large enough. `size` > 0. */
    void *allocate(size_t size);
    /* Free a block. Returns false if the block is not of this pool. */
    bool deallocate(void *block);
    /* Return all whole free huge pages to the system. */
    void trim();
    void reset_peak();
    PoolStatistics statistics();
    /* For use around fork(): no other thread may hold the lock when the process is copied. */
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
    FreeMap free_; /* by address; adjacent ranges of equal residence are merged */
    std::set<std::pair<size_t, uintptr_t>> resident_; /* resident ranges of free_, by size */
    std::unordered_map<uintptr_t, size_t> used_;
    PoolStatistics statistics_;
};

} // namespace sppo

#endif
