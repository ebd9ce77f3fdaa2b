/* A nameless file of exactly the planned size, read and written by worker threads past the page
 * cache: the disk tier, as a C interface that pointers and sizes cross.
 *
 * The order of use is open, submit and wait as often as needed, close. Requests are cut into
 * blocks that the workers share, so that several are with the disk at once; reads and writes wait
 * in a queue each and take turns. Nothing orders one request after another: who reads what was
 * written waits for the write first, and the memory of a request is the library's until it is
 * done.
 *
 * The file has no name, so nothing else can open, share or remove it, and the system frees its
 * space when the process ends, however it ends. All calls are safe from any thread of the process
 * that opened the file, except that nothing else may run on it during and after close.
 *
 * Functions that return int return 0, or the errno of what failed.
 */
#ifndef SPPO_FILE_TIER_H
#define SPPO_FILE_TIER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef SPPO_EXPORT
#define SPPO_EXPORT __attribute__((visibility("default")))
#endif

/* Offsets, lengths and the size of the file count in these where the page cache is passed by. A
 * part of a sector is right too, but slow: it is read, changed and written back, one at a time. */
#define SPPO_FILE_SECTOR_BYTES 4096

/* What sppo_file_wait returns while the request is not done. No errno is negative. */
#define SPPO_FILE_UNFINISHED (-1)

typedef struct sppo_file_state sppo_file_state;
typedef struct sppo_file_request sppo_file_request;

typedef struct {
    sppo_file_state *state;
    uint64_t size_bytes;      /* what was asked for, rounded up to whole sectors */
    int32_t direct;           /* 1: past the page cache; 0: through it, and out of it again */
    int32_t preallocated;     /* 1: the disk has set the space aside; 0: it has no way to */
    int32_t memory_alignment; /* of addresses; others pass through a buffer of the worker */
    int32_t num_threads;      /* that serve */
} sppo_file;

typedef struct {
    uint64_t read_bytes; /* of blocks that are done */
    uint64_t written_bytes;
    double read_s; /* in which at least one worker was reading */
    double write_s;
} sppo_file_totals;

/* One transfer of up to `bytes` bytes: the number transferred, or minus an errno. */
typedef int64_t (*sppo_file_io)(void *context, int write, int fd, void *address, uint64_t bytes,
                                uint64_t offset);

/* Make a nameless file of size_bytes in `directory`, space set aside, and start the workers.
 *
 * num_threads: a thread that the system does not grant is done without, except the first.
 * direct: not 0: past the page cache where the file system takes that (see the result).
 * block_bytes: requests are cut at multiples of it; a multiple of a sector.
 *
 * EINVAL: a size, block or number of threads of 0, or blocks that are no whole sectors. ENOSPC,
 * EDQUOT: the disk has no room. EFBIG: larger than files may be. Else what the system says of
 * `directory`. Nothing is left behind. */
SPPO_EXPORT int sppo_file_open(const char *directory, uint64_t size_bytes, int num_threads,
                               int direct, uint64_t block_bytes, sppo_file *file);

/* Ask for `bytes` bytes at `offset` to be read into, or written from, `address`.
 *
 * *request is what to wait with; give it to sppo_file_forget in the end. EINVAL: not within the
 * file, or no address. ENOMEM. ECHILD: in a fork of the process that opened the file, which has
 * none of its workers. */
SPPO_EXPORT int sppo_file_submit(const sppo_file *file, int write, uint64_t offset, void *address,
                                 uint64_t bytes, sppo_file_request **request);

/* Wait until the request is done: 0, or the errno of its first block that failed.
 *
 * SPPO_FILE_UNFINISHED: it was not within timeout_s; 0 only asks, less than 0 waits for ever.
 * ECANCELED: the file was closed before it was done. It may be asked again, also after close. */
SPPO_EXPORT int sppo_file_wait(sppo_file_request *request, double timeout_s);

/* The last use of a request, done or not: it goes on, but nothing can ask for it any more. */
SPPO_EXPORT void sppo_file_forget(sppo_file_request *request);

/* What was transferred so far. */
SPPO_EXPORT int sppo_file_measure(const sppo_file *file, sppo_file_totals *totals);

/* End all requests, the workers and the file; its space is free again.
 *
 * cancel: 0: requests are served to their end; else blocks that no worker has begun fail with
 * ECANCELED. In a fork only the fork's descriptor is closed. EINVAL: no file, or closed before. */
SPPO_EXPORT int sppo_file_close(sppo_file *file, int cancel);

/* Transfer with `io` instead of the system, which lets a test play a faulty or a slow disk. Before
 * the first request; NULL goes back to the system. */
SPPO_EXPORT int sppo_file_set_io(const sppo_file *file, sppo_file_io io, void *context);

#ifdef __cplusplus
}
#endif

#endif
