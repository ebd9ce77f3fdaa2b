/* Disk tier: a nameless file of exactly the planned size, which worker threads read and write
 * bypassing the page cache; C interface.
 *
 * The order of calls is open, any number of submit and wait, close. Requests are cut into blocks
 * that the workers serve concurrently. Reads and writes have a queue each, and alternate. Requests
 * are not ordered: before reading a range, wait for its write. The memory of a request must stay
 * valid and unchanged until the request is done.
 *
 * The file has no name, so nothing else can open, share or remove it, and the system frees its
 * space when the process ends for any reason. All calls are thread-safe in the process that opened
 * the file, except that no other call may run on the file during and after close.
 *
 * Functions that return int return 0, or the errno of the failure.
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

/* Unit of offsets, lengths and file size if the page cache is bypassed. Parts of a sector are
 * supported, but slow: the sector is read, changed and written back, under a lock. */
#define SPPO_FILE_SECTOR_BYTES 4096

/* Result of sppo_file_wait while the request is not done. No errno is negative. */
#define SPPO_FILE_UNFINISHED (-1)

typedef struct sppo_file_state sppo_file_state;
typedef struct sppo_file_request sppo_file_request;

typedef struct {
    sppo_file_state *state;
    uint64_t size_bytes;      /* requested size, rounded up to whole sectors */
    int32_t direct;           /* 1: bypasses the page cache; 0: uses it, and drops pages after */
    int32_t preallocated;     /* 1: the space is reserved; 0: the file system cannot reserve it */
    int32_t memory_alignment; /* of addresses; others are copied through a buffer of the worker */
    int32_t num_threads;      /* number of worker threads */
} sppo_file;

typedef struct {
    uint64_t read_bytes; /* of finished blocks */
    uint64_t written_bytes;
    double read_s; /* seconds in which at least one worker was reading */
    double write_s;
} sppo_file_totals;

/* Transfer up to `bytes` bytes; return the number transferred, or minus an errno. */
typedef int64_t (*sppo_file_io)(void *context, int write, int fd, void *address, uint64_t bytes,
                                uint64_t offset);

/* Create a nameless file of size_bytes in `directory`, reserve its space, and start the workers.
 *
 * num_threads: if the system refuses threads, fewer are used, but at least one is required.
 * direct: if not 0, bypass the page cache if the file system supports it (see file->direct).
 * block_bytes: requests are cut at multiples of this size, itself a multiple of the sector size.
 *
 * EINVAL: a size, block or number of threads of 0, or blocks that are not whole sectors. ENOSPC,
 * EDQUOT: not enough space on the disk. EFBIG: larger than files may be. Other errors are those of
 * opening a file in `directory`. On failure nothing is left behind. */
SPPO_EXPORT int sppo_file_open(const char *directory, uint64_t size_bytes, int num_threads,
                               int direct, uint64_t block_bytes, sppo_file *file);

/* Start to read `bytes` bytes at `offset` into `address`, or to write them from `address`.
 *
 * *request is the handle for sppo_file_wait; release it with sppo_file_forget. EINVAL: not within
 * the file, or no address. ENOMEM. ECHILD: called in a fork of the process that opened the file,
 * where there are no workers. */
SPPO_EXPORT int sppo_file_submit(const sppo_file *file, int write, uint64_t offset, void *address,
                                 uint64_t bytes, sppo_file_request **request);

/* Wait until the request is done; return 0, or the errno of its first failed block.
 *
 * SPPO_FILE_UNFINISHED: not done within timeout_s; a timeout of 0 only polls, a negative one waits
 * without limit. ECANCELED: the file was closed before the request was done. May be called again,
 * also after close. */
SPPO_EXPORT int sppo_file_wait(sppo_file_request *request, double timeout_s);

/* Release the handle of a request, done or not; a request in flight continues. */
SPPO_EXPORT void sppo_file_forget(sppo_file_request *request);

/* Return bytes and busy times of the transfers so far. */
SPPO_EXPORT int sppo_file_measure(const sppo_file *file, sppo_file_totals *totals);

/* End all requests and the workers, close the file and free its space.
 *
 * cancel: if 0, all requests are finished; otherwise blocks that no worker has started fail with
 * ECANCELED. In a fork only the fork's descriptor is closed. EINVAL: no file, or already closed. */
SPPO_EXPORT int sppo_file_close(sppo_file *file, int cancel);

/* Transfer with `io` instead of system calls, so that tests can emulate a faulty or slow disk. Call
 * before the first request; NULL restores the system calls. */
SPPO_EXPORT int sppo_file_set_io(const sppo_file *file, sppo_file_io io, void *context);

#ifdef __cplusplus
}
#endif

#endif
