/* See memory_pool.h. */
#include "memory_pool.h"

#include <algorithm>
#include <new>

#include <sys/mman.h>

namespace sppo {

namespace {

/* Blocks are whole pages. Pages are taken from and returned to the system in whole huge pages, so
 * that no huge page is split. */
constexpr size_t PAGE = size_t{4} << 10;
constexpr size_t HUGE_PAGE = size_t{2} << 20;
constexpr uint64_t LEAST_RESERVE = uint64_t{1} << 30;

uintptr_t up(uintptr_t value, size_t unit) { return (value + unit - 1) / unit * unit; }
uintptr_t down(uintptr_t value, size_t unit) { return value / unit * unit; }

void *address_of(uintptr_t value) { return reinterpret_cast<void *>(value); }

} // namespace

MemoryPool::MemoryPool(uint64_t reserve_bytes) {
    /* Without MAP_NORESERVE, systems with strict overcommit would refuse unused addresses. */
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    for (uint64_t size = up(reserve_bytes, HUGE_PAGE); size >= LEAST_RESERVE; size /= 2) {
        void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (memory == MAP_FAILED) continue;
        start_ = up(reinterpret_cast<uintptr_t>(memory), HUGE_PAGE);
        end_ = down(reinterpret_cast<uintptr_t>(memory) + size, HUGE_PAGE);
        break;
    }
    if (start_ == 0) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(address_of(start_), end_ - start_, MADV_HUGEPAGE); /* a system without them is no error */
#endif
    free_[start_] = {end_ - start_, false};
}

MemoryPool::~MemoryPool() { munmap(address_of(start_), end_ - start_); }

void *MemoryPool::allocate(size_t size) {
    if (size > end_ - start_) return nullptr;
    size = up(size, PAGE);
    std::lock_guard<std::mutex> guard(mutex_);
    uintptr_t address = take_resident(size);
    if (address == 0) address = take_growing(size);
    if (address == 0) return nullptr;
    used_[address] = size;
    auto &s = statistics_;
    s.used_bytes += size;
    s.used_peak_bytes = std::max(s.used_peak_bytes, s.used_bytes);
    s.resident_peak_bytes = std::max(s.resident_peak_bytes, s.resident_bytes);
    return address_of(address);
}

bool MemoryPool::deallocate(void *block) {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = used_.find(reinterpret_cast<uintptr_t>(block));
    if (found == used_.end()) return false;
    statistics_.used_bytes -= found->second;
    insert(found->first, found->second, true);
    used_.erase(found);
    return true;
}

void MemoryPool::trim() {
    std::lock_guard<std::mutex> guard(mutex_);
    give_back(end_ - start_);
}

void MemoryPool::reset_peak() {
    std::lock_guard<std::mutex> guard(mutex_);
    statistics_.used_peak_bytes = statistics_.used_bytes;
    statistics_.resident_peak_bytes = statistics_.resident_bytes;
}

PoolStatistics MemoryPool::statistics() {
    std::lock_guard<std::mutex> guard(mutex_);
    return statistics_;
}

/* Allocate in the smallest resident hole of at least `size`; return its address, or 0. */
uintptr_t MemoryPool::take_resident(size_t size) {
    const auto fit = resident_.lower_bound({size, 0});
    if (fit == resident_.end()) return 0;
    const auto [hole, address] = *fit;
    erase(free_.find(address));
    if (hole > size) insert(address + size, hole - size, true);
    return address;
}

/* Allocate in free addresses that are not all resident; return the address, or 0. Returns as many
 * resident bytes to the system as become resident. */
uintptr_t MemoryPool::take_growing(size_t size) {
    const uintptr_t address = best_window(size);
    if (address == 0) return 0;
    const uintptr_t stop = address + size;
    size_t grown = 0;
    for (auto node = free_.find(address); node != free_.end() && node->first < stop;) {
        const auto [from, range] = *node;
        const uintptr_t to = from + range.size;
        node = erase(node);
        uintptr_t touched = to;
        if (!range.resident) {
            /* Touching the first byte of a huge page makes the whole page resident. */
            touched = std::min(up(stop, HUGE_PAGE), to);
            grown += touched - from;
        }
        if (to <= stop) continue;
        if (to > touched) insert(touched, to - touched, false);
        if (touched > stop) insert(stop, touched - stop, true);
        break; /* the last range; inserted ranges may have been merged with the next one */
    }
    statistics_.resident_bytes += grown;
    give_back(grown);
    return address;
}

/* Return the start of `size` contiguous free bytes with the most resident bytes, or 0. */
uintptr_t MemoryPool::best_window(size_t size) const {
    uintptr_t best = 0;
    size_t best_resident = 0;
    for (auto first = free_.begin(); first != free_.end(); ++first) {
        const uintptr_t begin = first->first;
        uintptr_t reach = begin;
        size_t resident = 0;
        for (auto node = first; node != free_.end() && node->first == reach && reach < begin + size;
             ++node) {
            if (node->second.resident) {
                resident += std::min<size_t>(node->second.size, begin + size - reach);
            }
            reach += node->second.size;
        }
        if (reach - begin >= size && (best == 0 || resident > best_resident)) {
            best = begin;
            best_resident = resident;
        }
    }
    return best;
}

/* Return up to `wanted` bytes of free resident huge pages to the system, largest holes first. */
void MemoryPool::give_back(size_t wanted) {
    std::pair<size_t, uintptr_t> below{SIZE_MAX, 0};
    while (wanted >= HUGE_PAGE) {
        const auto fit = resident_.lower_bound(below);
        if (fit == resident_.begin()) return;
        below = *std::prev(fit);
        const auto [hole, address] = below;
        const uintptr_t from = up(address, HUGE_PAGE);
        const uintptr_t whole = down(address + hole, HUGE_PAGE);
        if (whole <= from) continue;
        const uintptr_t to = std::min<uintptr_t>(whole, from + down(wanted, HUGE_PAGE));
        if (madvise(address_of(from), to - from, MADV_DONTNEED) != 0) return;
        erase(free_.find(address));
        if (from > address) insert(address, from - address, true);
        insert(from, to - from, false);
        if (address + hole > to) insert(to, address + hole - to, true);
        statistics_.resident_bytes -= to - from;
        statistics_.returned_bytes += to - from;
        wanted -= to - from;
    }
}

/* Add a free range, merged with adjacent ranges of the same residence. */
void MemoryPool::insert(uintptr_t address, size_t size, bool resident) {
    auto next = free_.lower_bound(address);
    if (next != free_.end() && next->first == address + size && next->second.resident == resident) {
        size += next->second.size;
        next = erase(next);
    }
    if (next != free_.begin()) {
        const auto before = std::prev(next);
        if (before->first + before->second.size == address && before->second.resident == resident) {
            address = before->first;
            size += before->second.size;
            erase(before);
        }
    }
    free_[address] = {size, resident};
    if (resident) resident_.insert({size, address});
}

MemoryPool::FreeMap::iterator MemoryPool::erase(FreeMap::iterator node) {
    if (node->second.resident) resident_.erase({node->second.size, node->first});
    return free_.erase(node);
}

} // namespace sppo
