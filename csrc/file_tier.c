/* See file_tier.h.
 *
 * Uses threads and plain pread/pwrite instead of io_uring, which containers often forbid: with
 * blocks of megabytes, the cost of a system call per block is negligible.
 */
#define _GNU_SOURCE
#include "file_tier.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SECTOR ((uint64_t)SPPO_FILE_SECTOR_BYTES)
#define BOUNCE_BYTES ((uint64_t)1 << 20)
#define MOST_THREADS 64
/* Most attempts to transfer a sector whole: after a part of it, a direct transfer is misaligned. */
#define SECTOR_TRIES 16

_Static_assert(sizeof(void *) == 8 && sizeof(off_t) == 8, "files are larger than 32 bits reach");
_Static_assert(offsetof(sppo_file, size_bytes) == 8, "native_file.py lays the struct out so");
_Static_assert(offsetof(sppo_file, direct) == 16, "native_file.py lays the struct out so");
_Static_assert(offsetof(sppo_file, preallocated) == 20, "native_file.py lays the struct out so");
_Static_assert(offsetof(sppo_file, memory_alignment) == 24, "native_file.py lays it out so");
_Static_assert(offsetof(sppo_file, num_threads) == 28, "native_file.py lays the struct out so");
_Static_assert(sizeof(sppo_file) == 32, "native_file.py lays the struct out so");
_Static_assert(offsetof(sppo_file_totals, written_bytes) == 8, "native_file.py lays it out so");
_Static_assert(offsetof(sppo_file_totals, read_s) == 16, "native_file.py lays it out so");
_Static_assert(offsetof(sppo_file_totals, write_s) == 24, "native_file.py lays it out so");
_Static_assert(sizeof(sppo_file_totals) == 32, "native_file.py lays the struct out so");
_Static_assert(BOUNCE_BYTES % SECTOR == 0, "what passes through the buffer stays in sectors");

/* The first three members are constant. The file's lock protects the members up to `working`, the
 * request's own lock the others, so that a request can outlive its file. */
struct sppo_file_request {
    int write;
    unsigned char *address; /* of the byte at `begin` */
    uint64_t begin;
    uint64_t next, end; /* range that no worker has taken yet */
    sppo_file_request *behind;
    int failure;
    uint64_t working; /* blocks in transfer */

    pthread_mutex_t lock;
    pthread_cond_t done_changed;
    int done;
    int result;
    atomic_int owners; /* the file until the request is done, the caller until sppo_file_forget */
};

typedef struct {
    sppo_file_request *first, *last;
    uint64_t working; /* blocks in transfer */
    double busy_since_s, busy_s;
    uint64_t done_bytes;
} direction;

struct sppo_file_state {
    int fd;
    pid_t process;
    uint64_t size, block;
    uint64_t sector;           /* 1 with the page cache */
    uintptr_t memory_alignment; /* 1 with the page cache */
    sppo_file_io io;
    void *io_context;
    int num_threads;
    pthread_t threads[MOST_THREADS];
    pthread_mutex_t sector_lock; /* held while a sector is read, changed and written back */

    pthread_mutex_t lock; /* protects all members below */
    pthread_cond_t work_or_end;
    direction directions[2]; /* read, write */
    int turn;
    int ending;
};

typedef struct {
    sppo_file_state *file;
    unsigned char *bounce; /* BOUNCE_BYTES, allocated at first use */
} worker;

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- Transfers of any offset, address and length, in files that accept whole sectors only ---- */

static int64_t system_io(void *context, int write, int fd, void *address, uint64_t bytes,
                         uint64_t offset) {
    (void)context;
    const ssize_t count = write ? pwrite(fd, address, (size_t)bytes, (off_t)offset)
                                : pread(fd, address, (size_t)bytes, (off_t)offset);
    return count >= 0 ? count : -errno;
}

/* Transfer at least one byte, or return an errno. */
static int transfer_some(const sppo_file_state *file, int write, uint64_t offset, void *address,
                         uint64_t bytes, uint64_t *done) {
    int64_t count;
    do {
        count = file->io(file->io_context, write, file->fd, address, bytes, offset);
    } while (count == -EINTR);
    if (count < 0) return (int)-count;
    /* The file has its full size and nothing else uses it, so an end of file is an error. */
    if (count == 0 || (uint64_t)count > bytes) return EIO;
    *done = (uint64_t)count;
    return 0;
}

static int transfer_sector(const sppo_file_state *file, int write, uint64_t offset, void *address) {
    for (int i = 0; i < SECTOR_TRIES; i++) {
        uint64_t done = 0;
        const int failure = transfer_some(file, write, offset, address, SECTOR, &done);
        if (failure != 0) return failure;
        if (done == SECTOR) return 0;
    }
    return EIO;
}

static unsigned char *bounce_of(worker *me) {
    void *memory = NULL;
    if (me->bounce == NULL && posix_memalign(&memory, SECTOR, BOUNCE_BYTES) == 0)
        me->bounce = memory;
    return me->bounce;
}

/* Transfer a part of one sector. Another request may change the other bytes of the sector at the
 * same time, so writing takes a lock. */
static int transfer_part(worker *me, int write, uint64_t offset, unsigned char *address,
                         uint64_t bytes) {
    sppo_file_state *file = me->file;
    const uint64_t before = offset % SECTOR;
    unsigned char *sector = bounce_of(me);
    if (sector == NULL) return ENOMEM;
    if (!write) {
        const int failure = transfer_sector(file, 0, offset - before, sector);
        if (failure == 0) memcpy(address, sector + before, bytes);
        return failure;
    }
    pthread_mutex_lock(&file->sector_lock);
    int failure = transfer_sector(file, 0, offset - before, sector);
    if (failure == 0) {
        memcpy(sector + before, address, bytes);
        failure = transfer_sector(file, 1, offset - before, sector);
    }
    pthread_mutex_unlock(&file->sector_lock);
    return failure;
}

/* Transfer whole sectors from or to an address that is not aligned for direct transfers. */
static int transfer_bounced(worker *me, int write, uint64_t offset, unsigned char *address,
                            uint64_t bytes, uint64_t *done) {
    unsigned char *bounce = bounce_of(me);
    if (bounce == NULL) return ENOMEM;
    if (bytes > BOUNCE_BYTES) bytes = BOUNCE_BYTES;
    if (write) memcpy(bounce, address, bytes);
    const int failure = transfer_some(me->file, write, offset, bounce, bytes, done);
    if (failure == 0 && !write) memcpy(address, bounce, *done);
    return failure;
}

/* Flush written bytes to the disk and drop the range from the page cache. */
static int leave_page_cache(const sppo_file_state *file, int write, uint64_t offset,
                            uint64_t bytes) {
#ifdef __linux__
    const unsigned int all = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                             SYNC_FILE_RANGE_WAIT_AFTER;
    if (write && sync_file_range(file->fd, (off_t)offset, (off_t)bytes, all) != 0 &&
        (errno == EIO || errno == ENOSPC || errno == EDQUOT))
        return errno; /* other errors mean that the file system lacks the call: not needed */
    (void)posix_fadvise(file->fd, (off_t)offset, (off_t)bytes, POSIX_FADV_DONTNEED);
#else
    (void)file, (void)write, (void)offset, (void)bytes;
#endif
    return 0;
}

/* Disable read-ahead, whose pages would stay in the page cache. */
static void read_no_further(int fd) {
#ifdef __linux__
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
#else
    (void)fd;
#endif
}

static int transfer_block(worker *me, int write, uint64_t offset, unsigned char *address,
                          uint64_t bytes) {
    const sppo_file_state *file = me->file;
    for (uint64_t at = 0, done = 0; at < bytes; at += done) {
        const uint64_t left = bytes - at, inside = (offset + at) % file->sector;
        int failure;
        if (inside != 0 || left < file->sector) {
            done = left < file->sector - inside ? left : file->sector - inside;
            failure = transfer_part(me, write, offset + at, address + at, done);
        } else if ((uintptr_t)(address + at) % file->memory_alignment != 0) {
            const uint64_t whole = left - left % file->sector;
            failure = transfer_bounced(me, write, offset + at, address + at, whole, &done);
        } else {
            const uint64_t whole = left - left % file->sector;
            failure = transfer_some(file, write, offset + at, address + at, whole, &done);
        }
        if (failure != 0) return failure;
    }
    return file->sector == 1 ? leave_page_cache(file, write, offset, bytes) : 0;
}

/* ---- Requests ---- */

static void disown(sppo_file_request *request) {
    if (atomic_fetch_sub(&request->owners, 1) != 1) return;
    pthread_cond_destroy(&request->done_changed);
    pthread_mutex_destroy(&request->lock);
    free(request);
}

static void finish(sppo_file_request *request) {
    pthread_mutex_lock(&request->lock);
    request->result = request->failure;
    request->done = 1;
    pthread_cond_broadcast(&request->done_changed);
    pthread_mutex_unlock(&request->lock);
    disown(request);
}

/* Remove the first request of a queue; call with the file's lock. Workers take blocks of the first
 * request only, so no other request is ever removed. */
static void drop_first(direction *queue) {
    queue->first = queue->first->behind;
    if (queue->first == NULL) queue->last = NULL;
}

/* Mark a request as failed, so that no more blocks are started; call with the file's lock. */
static void fail(direction *queue, sppo_file_request *request, int failure) {
    if (request->failure == 0) request->failure = failure;
    if (queue->first == request) drop_first(queue);
    request->next = request->end;
}

/* Transfer one block of the queue's first request; call with the file's lock, which is released
 * during the transfer. */
static void serve_one(worker *me, direction *queue) {
    sppo_file_state *file = me->file;
    sppo_file_request *request = queue->first;
    const uint64_t offset = request->next;
    uint64_t bytes = file->block - offset % file->block;
    if (bytes > request->end - offset) bytes = request->end - offset;
    request->next += bytes;
    if (request->next == request->end) drop_first(queue);
    request->working++;
    if (queue->working++ == 0) queue->busy_since_s = now_s();
    pthread_mutex_unlock(&file->lock);

    unsigned char *address = request->address + (offset - request->begin);
    const int failure = transfer_block(me, request->write, offset, address, bytes);

    pthread_mutex_lock(&file->lock);
    if (--queue->working == 0) queue->busy_s += now_s() - queue->busy_since_s;
    if (failure == 0) queue->done_bytes += bytes;
    if (failure != 0) fail(queue, request, failure);
    if (--request->working == 0 && request->next == request->end) finish(request);
}

static void *serve(void *argument) {
    worker me = {argument, NULL};
    sppo_file_state *file = me.file;
    pthread_mutex_lock(&file->lock);
    for (;;) {
        direction *mine = &file->directions[file->turn], *other = &file->directions[!file->turn];
        direction *queue = mine->first != NULL ? mine : other;
        if (queue->first != NULL) {
            file->turn = queue == &file->directions[0];
            serve_one(&me, queue);
        } else if (file->ending) {
            break;
        } else {
            pthread_cond_wait(&file->work_or_end, &file->lock);
        }
    }
    pthread_mutex_unlock(&file->lock);
    free(me.bounce);
    return NULL;
}

int sppo_file_submit(const sppo_file *file, int write, uint64_t offset, void *address,
                     uint64_t bytes, sppo_file_request **request) {
    if (file == NULL || file->state == NULL || request == NULL) return EINVAL;
    sppo_file_state *state = file->state;
    if ((address == NULL && bytes > 0) || offset > state->size || bytes > state->size - offset)
        return EINVAL;
    if (state->process != getpid()) return ECHILD;
    sppo_file_request *made = calloc(1, sizeof(*made));
    if (made == NULL) return ENOMEM;
    made->write = write != 0;
    made->address = address;
    made->begin = made->next = offset;
    made->end = offset + bytes;
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->done_changed, NULL);
    atomic_init(&made->owners, 2);
    *request = made;
    if (bytes == 0) {
        finish(made);
        return 0;
    }
    direction *queue = &state->directions[made->write];
    pthread_mutex_lock(&state->lock);
    if (queue->last == NULL)
        queue->first = made;
    else
        queue->last->behind = made;
    queue->last = made;
    pthread_cond_broadcast(&state->work_or_end);
    pthread_mutex_unlock(&state->lock);
    return 0;
}

int sppo_file_wait(sppo_file_request *request, double timeout_s) {
    if (request == NULL) return EINVAL;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until); /* clock of pthread_cond_timedwait */
    if (timeout_s > 0) {
        const double limit_s = timeout_s < 1e6 ? timeout_s : 1e6;
        until.tv_sec += (time_t)limit_s;
        until.tv_nsec += (long)((limit_s - (double)(time_t)limit_s) * 1e9);
        if (until.tv_nsec >= 1000000000L) {
            until.tv_nsec -= 1000000000L;
            until.tv_sec++;
        }
    }
    pthread_mutex_lock(&request->lock);
    int timed_out = timeout_s == 0;
    while (!request->done && !timed_out)
        if (timeout_s < 0)
            pthread_cond_wait(&request->done_changed, &request->lock);
        else
            timed_out = pthread_cond_timedwait(&request->done_changed, &request->lock, &until) != 0;
    const int result = request->done ? request->result : SPPO_FILE_UNFINISHED;
    pthread_mutex_unlock(&request->lock);
    return result;
}

void sppo_file_forget(sppo_file_request *request) {
    if (request != NULL) disown(request);
}

int sppo_file_measure(const sppo_file *file, sppo_file_totals *totals) {
    if (file == NULL || file->state == NULL || totals == NULL) return EINVAL;
    sppo_file_state *state = file->state;
    pthread_mutex_lock(&state->lock);
    const direction *reads = &state->directions[0], *writes = &state->directions[1];
    const double now = now_s();
    totals->read_bytes = reads->done_bytes;
    totals->written_bytes = writes->done_bytes;
    totals->read_s = reads->busy_s + (reads->working > 0 ? now - reads->busy_since_s : 0);
    totals->write_s = writes->busy_s + (writes->working > 0 ? now - writes->busy_since_s : 0);
    pthread_mutex_unlock(&state->lock);
    return 0;
}

/* ---- The file ---- */

/* Open a file without a name, or unlink a named one at once if the file system lacks O_TMPFILE. */
static int open_nameless(const char *directory, int *fd) {
#ifdef O_TMPFILE
    *fd = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR);
    if (*fd >= 0) return 0;
    if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL) return errno;
#endif
    static const char name[] = "/.sppo-file-tier-XXXXXX";
    char *path = malloc(strlen(directory) + sizeof(name));
    if (path == NULL) return ENOMEM;
    strcpy(path, directory);
    strcat(path, name);
    int failure = 0;
    *fd = mkostemp(path, O_CLOEXEC);
    if (*fd < 0) {
        failure = errno;
    } else if (unlink(path) != 0) {
        failure = errno;
        close(*fd);
    }
    free(path);
    return failure;
}

/* Uses fallocate, because posix_fallocate writes into every block if the file system lacks the
 * call, which takes minutes for a large file. */
static int set_space_aside(int fd, uint64_t size, int *preallocated) {
#ifdef __linux__
    int code;
    do {
        code = fallocate(fd, 0, 0, (off_t)size);
    } while (code != 0 && errno == EINTR);
    *preallocated = code == 0;
    if (code == 0) return 0;
    if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
#else
    *preallocated = 0;
#endif
    return ftruncate(fd, (off_t)size) == 0 ? 0 : errno;
}

/* Return the address alignment of direct transfers, or 0 if whole sectors do not suffice. */
static uintptr_t direct_alignment(int fd) {
#ifdef STATX_DIOALIGN
    struct statx found;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) == 0 &&
        (found.stx_mask & STATX_DIOALIGN) != 0) {
        const int fits = found.stx_dio_offset_align != 0 && found.stx_dio_mem_align != 0 &&
                         SECTOR % found.stx_dio_offset_align == 0 &&
                         SECTOR % found.stx_dio_mem_align == 0;
        return fits ? found.stx_dio_mem_align : 0;
    }
#else
    (void)fd;
#endif
    return SECTOR;
}

/* Bypass the page cache if the file system supports it. Tests a read, because some file systems
 * accept the flag and then refuse transfers. */
static void try_direct(sppo_file_state *file) {
#ifdef O_DIRECT
    const int flags = fcntl(file->fd, F_GETFL);
    const uintptr_t alignment = direct_alignment(file->fd);
    void *sector = NULL;
    if (flags < 0 || alignment == 0 || fcntl(file->fd, F_SETFL, flags | O_DIRECT) != 0) return;
    if (posix_memalign(&sector, SECTOR, SECTOR) == 0 &&
        pread(file->fd, sector, SECTOR, 0) == (ssize_t)SECTOR) {
        file->sector = SECTOR;
        file->memory_alignment = alignment;
    } else {
        (void)fcntl(file->fd, F_SETFL, flags);
    }
    free(sector);
#else
    (void)file;
#endif
}

/* Start the workers with all signals blocked: the program's other threads handle signals. */
static int start_threads(sppo_file_state *file, int num_threads) {
    sigset_t all, before;
    int failure = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (file->num_threads < num_threads && failure == 0) {
        failure = pthread_create(&file->threads[file->num_threads], NULL, serve, file);
        if (failure == 0) file->num_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return file->num_threads > 0 ? 0 : failure;
}

static void end_state(sppo_file_state *file) {
    pthread_cond_destroy(&file->work_or_end);
    pthread_mutex_destroy(&file->lock);
    pthread_mutex_destroy(&file->sector_lock);
    close(file->fd);
    free(file);
}

int sppo_file_open(const char *directory, uint64_t size_bytes, int num_threads, int direct,
                   uint64_t block_bytes, sppo_file *file) {
    if (directory == NULL || file == NULL || size_bytes == 0 || num_threads < 1 ||
        block_bytes == 0 || block_bytes % SECTOR != 0)
        return EINVAL;
    if (size_bytes > (uint64_t)INT64_MAX - SECTOR) return EFBIG;
    const uint64_t size = (size_bytes + SECTOR - 1) / SECTOR * SECTOR;
    sppo_file_state *state = calloc(1, sizeof(*state));
    if (state == NULL) return ENOMEM;
    int preallocated = 0;
    int failure = open_nameless(directory, &state->fd);
    if (failure != 0) {
        free(state);
        return failure;
    }
    state->process = getpid();
    state->size = size;
    state->block = block_bytes;
    state->sector = state->memory_alignment = 1;
    state->io = system_io;
    pthread_mutex_init(&state->sector_lock, NULL);
    pthread_mutex_init(&state->lock, NULL);
    pthread_cond_init(&state->work_or_end, NULL);
    failure = set_space_aside(state->fd, size, &preallocated);
    if (failure == 0) {
        if (direct) try_direct(state);
        if (state->sector == 1) read_no_further(state->fd);
        failure = start_threads(state, num_threads < MOST_THREADS ? num_threads : MOST_THREADS);
    }
    if (failure != 0) {
        end_state(state);
        return failure;
    }
    *file = (sppo_file){state, size, state->sector != 1, preallocated,
                        (int32_t)state->memory_alignment, state->num_threads};
    return 0;
}

int sppo_file_close(sppo_file *file, int cancel) {
    if (file == NULL || file->state == NULL) return EINVAL;
    sppo_file_state *state = file->state;
    file->state = NULL;
    if (state->process != getpid()) {
        /* Threads that do not exist in the fork may have held locks: do not free the memory. */
        close(state->fd);
        return 0;
    }
    pthread_mutex_lock(&state->lock);
    state->ending = 1;
    for (int i = 0; i < 2 && cancel; i++) {
        direction *queue = &state->directions[i];
        while (queue->first != NULL) {
            sppo_file_request *request = queue->first;
            fail(queue, request, ECANCELED);
            if (request->working == 0) finish(request);
        }
    }
    pthread_cond_broadcast(&state->work_or_end);
    pthread_mutex_unlock(&state->lock);
    for (int i = 0; i < state->num_threads; i++) pthread_join(state->threads[i], NULL);
    end_state(state);
    return 0;
}

int sppo_file_set_io(const sppo_file *file, sppo_file_io io, void *context) {
    if (file == NULL || file->state == NULL) return EINVAL;
    pthread_mutex_lock(&file->state->lock);
    file->state->io = io != NULL ? io : system_io;
    file->state->io_context = context;
    pthread_mutex_unlock(&file->state->lock);
    return 0;
}
