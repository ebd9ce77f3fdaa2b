/* Exercises csrc/memory_pool.cpp under sanitizers: blocks against a model, residence, threads. */
#include "memory_pool.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "line %d: %s is not so\n", __LINE__, #condition);                      \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

namespace {

constexpr size_t KIB = 1 << 10, MIB = 1 << 20, GIB = 1 << 30;

struct Block {
    unsigned char *start;
    size_t size;
    unsigned char fill;
};

/* First and last bytes tell whether anyone else was given the same memory. */
void mark(const Block &block) {
    memset(block.start, block.fill, std::min<size_t>(block.size, 64));
    memset(block.start + block.size - std::min<size_t>(block.size, 64), block.fill,
           std::min<size_t>(block.size, 64));
}

void check_mark(const Block &block) {
    for (size_t i = 0; i < std::min<size_t>(block.size, 64); i++) {
        CHECK(block.start[i] == block.fill);
        CHECK(block.start[block.size - 1 - i] == block.fill);
    }
}

void random_blocks(sppo::MemoryPool &pool, unsigned seed, int rounds) {
    std::mt19937 random(seed);
    std::vector<Block> live;
    for (int round = 0; round < rounds; round++) {
        if (live.empty() || (random() % 2 == 0 && live.size() < 24)) {
            const size_t size = 1 + random() % (random() % 4 == 0 ? 9 * MIB : 300 * KIB);
            auto *start = static_cast<unsigned char *>(pool.allocate(size));
            CHECK(start != nullptr);
            CHECK(reinterpret_cast<uintptr_t>(start) % 4096 == 0);
            live.push_back({start, size, static_cast<unsigned char>(random())});
            mark(live.back());
        } else {
            const size_t which = random() % live.size();
            check_mark(live[which]);
            CHECK(pool.deallocate(live[which].start));
            live[which] = live.back();
            live.pop_back();
        }
    }
    for (const Block &block : live) {
        check_mark(block);
        CHECK(pool.deallocate(block.start));
    }
}

/* What is resident is the most that was in use, up to a huge page for each block. */
void residence_follows_use() {
    sppo::MemoryPool pool(4 * GIB);
    for (const size_t size : {64 * MIB, 48 * MIB, 96 * MIB, 40 * MIB}) {
        void *block = pool.allocate(size);
        memset(block, 1, size);
        CHECK(pool.deallocate(block));
    }
    auto now = pool.statistics();
    CHECK(now.used_bytes == 0 && now.used_peak_bytes == 96 * MIB);
    CHECK(now.resident_peak_bytes <= 98 * MIB);

    /* Holes that do not fit give their pages back instead of growing the whole. */
    std::vector<void *> blocks;
    for (int i = 0; i < 24; i++) blocks.push_back(pool.allocate(4 * MIB));
    for (int i = 0; i < 24; i += 2) CHECK(pool.deallocate(blocks[i]));
    void *large = pool.allocate(48 * MIB);
    now = pool.statistics();
    CHECK(now.used_bytes == 96 * MIB);
    CHECK(now.resident_bytes <= 98 * MIB);
    CHECK(now.returned_bytes > 0);
    CHECK(pool.deallocate(large));
    for (int i = 1; i < 24; i += 2) CHECK(pool.deallocate(blocks[i]));

    pool.trim();
    now = pool.statistics();
    CHECK(now.used_bytes == 0 && now.resident_bytes < 2 * MIB);
    pool.reset_peak();
    CHECK(pool.statistics().used_peak_bytes == 0);
    CHECK(pool.statistics().resident_peak_bytes == pool.statistics().resident_bytes);
}

void same_sizes_fault_once() {
    sppo::MemoryPool pool(4 * GIB);
    for (int i = 0; i < 100; i++) {
        void *a = pool.allocate(30 * MIB + 17), *b = pool.allocate(10 * MIB + 5);
        CHECK(pool.deallocate(a));
        void *c = pool.allocate(30 * MIB + 17);
        CHECK(c == a);
        CHECK(pool.deallocate(b) && pool.deallocate(c));
    }
    CHECK(pool.statistics().returned_bytes == 0);
}

void refusals() {
    sppo::MemoryPool pool(GIB);
    CHECK(pool.allocate(2 * GIB) == nullptr);
    CHECK(pool.allocate(SIZE_MAX) == nullptr);
    void *most = pool.allocate(1000 * MIB);
    CHECK(most != nullptr && pool.allocate(1000 * MIB) == nullptr);
    int elsewhere = 0;
    CHECK(!pool.deallocate(&elsewhere));
    CHECK(!pool.deallocate(static_cast<char *>(most) + 4096));
    CHECK(pool.deallocate(most) && !pool.deallocate(most));
}

} // namespace

int main() {
    {
        sppo::MemoryPool pool(16 * GIB);
        for (unsigned seed = 0; seed < 5; seed++) random_blocks(pool, seed, 2000);
        CHECK(pool.statistics().used_bytes == 0);
        std::vector<std::thread> threads;
        for (unsigned i = 0; i < 4; i++) {
            threads.emplace_back([&pool, i] { random_blocks(pool, 100 + i, 1000); });
        }
        for (auto &thread : threads) thread.join();
        CHECK(pool.statistics().used_bytes == 0);
    }
    residence_follows_use();
    same_sizes_fault_once();
    refusals();
    puts("ok");
    return 0;
}
