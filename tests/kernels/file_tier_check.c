/* Exercises csrc/file_tier.c under sanitizers: every call, every refusal, faults and threads.
 *
 * The one argument is the directory for the files. */
#define _GNU_SOURCE
#include "file_tier.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define KIB ((uint64_t)1 << 10)
#define SIZE (256 * KIB + 1)
#define BLOCK (16 * KIB)
#define SLOTS 24
#define CHECK(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            fprintf(stderr, "line %d: %s is not so\n", __LINE__, #condition);  \
            exit(1);                                                           \
        }                                                                      \
    } while (0)

static const char *directory;

/* In place of the system's, for what the library's sources call. */
static int no_tmpfile, fallocate_failure;

int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const int mode = va_arg(more, int);
    va_end(more);
    if (no_tmpfile && (flags & O_TMPFILE) == O_TMPFILE) {
        errno = EOPNOTSUPP;
        return -1;
    }
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int fallocate(int fd, int mode, off_t offset, off_t bytes) {
    if (fallocate_failure != 0) {
        errno = fallocate_failure;
        return -1;
    }
    return (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
}

static uint32_t random_below(uint32_t end) {
    static uint32_t state = 12345;
    state = state * 1664525u + 1013904223u;
    return (uint32_t)(((uint64_t)state * end) >> 32);
}

/* A disk that answers as `faults` says: short counts, interruptions, errors after a while. */
typedef struct {
    uint64_t most_bytes;
    int interrupt;      /* every second call */
    int failure;        /* from call number `failing_from` on */
    int failing_from;
    int empty;          /* transfers nothing and calls that no error */
    long delay_ns;
    atomic_int closed;  /* nothing moves until it is 0 */
    atomic_int asked, calls;
    int watched;        /* a direction, */
    int first_watched;  /* and its first call, where this is -1 before and one thread serves */
} faults;

static int64_t faulty_io(void *context, int write, int fd, void *address, uint64_t bytes,
                         uint64_t offset) {
    faults *disk = context;
    atomic_store(&disk->asked, 1);
    while (atomic_load(&disk->closed)) nanosleep(&(struct timespec){0, 100000}, NULL);
    const int call = atomic_fetch_add(&disk->calls, 1);
    if (write == disk->watched && disk->first_watched == -1) disk->first_watched = call;
    if (disk->delay_ns > 0) nanosleep(&(struct timespec){0, disk->delay_ns}, NULL);
    if (disk->interrupt && call % 2 == 0) return -EINTR;
    if (disk->failure != 0 && call >= disk->failing_from) return -disk->failure;
    if (disk->empty) return 0;
    const ssize_t count = write ? pwrite(fd, address, bytes, (off_t)offset)
                                : pread(fd, address, bytes, (off_t)offset);
    if (count < 0) return -errno;
    /* Told, not done: the system itself takes no odd counts past the page cache. */
    const uint64_t told = (uint64_t)count;
    return disk->most_bytes != 0 && told > disk->most_bytes ? (int64_t)disk->most_bytes : count;
}

static sppo_file opened(int num_threads, int direct, faults *disk) {
    sppo_file file = {0};
    CHECK(sppo_file_open(directory, SIZE, num_threads, direct, BLOCK, &file) == 0);
    CHECK(file.size_bytes >= SIZE && file.size_bytes % SPPO_FILE_SECTOR_BYTES == 0);
    CHECK(file.num_threads == (num_threads < 64 ? num_threads : 64));
    CHECK(file.direct <= direct && file.memory_alignment >= 1);
    if (disk != NULL) CHECK(sppo_file_set_io(&file, faulty_io, disk) == 0);
    return file;
}

static int transfer(const sppo_file *file, int write, uint64_t offset, void *address,
                    uint64_t bytes) {
    sppo_file_request *request = NULL;
    CHECK(sppo_file_submit(file, write, offset, address, bytes, &request) == 0);
    const int result = sppo_file_wait(request, -1);
    CHECK(sppo_file_wait(request, 0) == result);
    sppo_file_forget(request);
    return result;
}

/* Disjoint slots of odd sizes that share sectors, all in flight at once, against plain memory. */
static void random_slots(int num_threads, int direct, faults *disk) {
    sppo_file file = opened(num_threads, direct, disk);
    unsigned char *model = calloc(1, SIZE), *memory = calloc(1, 2 * SIZE), *found = malloc(SIZE);
    CHECK(model != NULL && memory != NULL && found != NULL);
    uint64_t moved = 0;
    for (int round = 0; round < 6; round++) {
        sppo_file_request *requests[SLOTS];
        uint64_t cuts[SLOTS + 1] = {0}, at[SLOTS], place = 0;
        for (int i = 1; i < SLOTS; i++)
            cuts[i] = cuts[i - 1] + (round % 2 ? random_below(2 * SIZE / SLOTS / 2)
                                               : 4096 * random_below(3));
        cuts[SLOTS] = SIZE;
        for (int i = 0; i < SLOTS; i++) {
            const uint64_t bytes = cuts[i + 1] - cuts[i];
            at[i] = place + (round % 3 ? random_below(64) : 0);
            place = at[i] + bytes;
            for (uint64_t j = 0; j < bytes; j++)
                memory[at[i] + j] = model[cuts[i] + j] = (unsigned char)random_below(256);
            CHECK(sppo_file_submit(&file, 1, cuts[i], memory + at[i], bytes, &requests[i]) == 0);
            moved += bytes;
        }
        for (int i = 0; i < SLOTS; i++) {
            CHECK(sppo_file_wait(requests[i], -1) == 0);
            sppo_file_forget(requests[i]);
        }
        memset(memory, 0, 2 * SIZE);
        for (int i = 0; i < SLOTS; i++)
            CHECK(sppo_file_submit(&file, 0, cuts[i], memory + at[i], cuts[i + 1] - cuts[i],
                                   &requests[i]) == 0);
        for (int i = 0; i < SLOTS; i++) {
            int result;
            while ((result = sppo_file_wait(requests[i], 0.001)) == SPPO_FILE_UNFINISHED) continue;
            CHECK(result == 0);
            sppo_file_forget(requests[i]);
            CHECK(memcmp(memory + at[i], model + cuts[i], cuts[i + 1] - cuts[i]) == 0);
        }
        CHECK(transfer(&file, 0, 0, found, SIZE) == 0);
        CHECK(memcmp(found, model, SIZE) == 0);
    }
    sppo_file_totals totals;
    CHECK(sppo_file_measure(&file, &totals) == 0);
    CHECK(totals.written_bytes == moved && totals.read_bytes == 2 * moved);
    CHECK(totals.read_s > 0 && totals.write_s > 0);
    CHECK(sppo_file_close(&file, 0) == 0);
    free(model), free(memory), free(found);
}

static void failures(int direct) {
    unsigned char *bytes = calloc(1, SIZE);
    CHECK(bytes != NULL);
    for (int failing_from = 0; failing_from < 12; failing_from += 3) {
        faults disk = {.failure = failing_from % 2 ? EIO : ENOSPC, .failing_from = failing_from};
        sppo_file file = opened(3, direct, &disk);
        CHECK(transfer(&file, 1, 0, bytes, SIZE) == disk.failure);
        CHECK(transfer(&file, 0, 1, bytes, 10) == disk.failure);
        CHECK(sppo_file_close(&file, 0) == 0);
    }
    faults nothing = {.empty = 1};
    sppo_file file = opened(2, direct, &nothing);
    CHECK(transfer(&file, 0, 0, bytes, SIZE) == EIO);
    CHECK(transfer(&file, 1, 5, bytes, 3) == EIO);
    CHECK(transfer(&file, 1, 5, bytes, 0) == 0 && transfer(&file, 0, 5, NULL, 0) == 0);
    CHECK(sppo_file_set_io(&file, NULL, NULL) == 0);
    CHECK(transfer(&file, 1, 5, bytes, 3) == 0);
    CHECK(sppo_file_close(&file, 1) == 0);
    free(bytes);
}

/* A request does not stand behind all those of the other direction that were there before it. */
static void gets_its_turn(int write) {
    faults disk = {.closed = 1, .watched = write, .first_watched = -1};
    unsigned char *bytes = calloc(3, SIZE), byte = 0;
    CHECK(bytes != NULL);
    sppo_file file = opened(1, 0, &disk);
    sppo_file_request *requests[4];
    for (uint64_t i = 0; i < 3; i++)
        CHECK(sppo_file_submit(&file, !write, 0, bytes + i * SIZE, SIZE, &requests[i]) == 0);
    while (!atomic_load(&disk.asked)) nanosleep(&(struct timespec){0, 100000}, NULL);
    CHECK(sppo_file_submit(&file, write, SIZE, &byte, 1, &requests[3]) == 0);
    atomic_store(&disk.closed, 0);
    for (int i = 0; i < 4; i++) {
        CHECK(sppo_file_wait(requests[i], -1) == 0);
        sppo_file_forget(requests[i]);
    }
    CHECK(disk.first_watched == 1);
    CHECK(sppo_file_close(&file, 0) == 0);
    free(bytes);
}

/* Closing ends what is in flight: served, or cancelled; the requests can be asked afterwards. */
static void ends(int cancel) {
    faults disk = {.delay_ns = cancel ? 20000000 : 1000000};
    unsigned char *bytes = calloc(6, SIZE);
    CHECK(bytes != NULL);
    sppo_file file = opened(2, 1, &disk);
    sppo_file_request *requests[6];
    for (uint64_t i = 0; i < 6; i++)
        CHECK(sppo_file_submit(&file, i % 2, 0, bytes + i * SIZE, SIZE, &requests[i]) == 0);
    if (cancel) {
        CHECK(sppo_file_wait(requests[5], 0) == SPPO_FILE_UNFINISHED);
        CHECK(sppo_file_wait(requests[5], 0.003) == SPPO_FILE_UNFINISHED);
    }
    sppo_file_forget(requests[4]);
    CHECK(sppo_file_close(&file, cancel) == 0);
    for (int i = 0; i < 6; i++) {
        if (i == 4) continue;
        const int result = sppo_file_wait(requests[i], -1);
        CHECK(result == 0 || (cancel && result == ECANCELED));
        CHECK(i < 5 || !cancel || result == ECANCELED);
        sppo_file_forget(requests[i]);
    }
    CHECK(sppo_file_close(&file, cancel) == EINVAL);
    free(bytes);
}

static void fork_has_no_workers(void) {
    char byte = 7;
    sppo_file file = opened(2, 1, NULL);
    const pid_t child = fork();
    if (child == 0) {
        sppo_file_request *request = NULL;
        const int asked = sppo_file_submit(&file, 1, 0, &byte, 1, &request);
        _exit(asked == ECHILD && sppo_file_close(&file, 0) == 0 ? 0 : 1);
    }
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(transfer(&file, 1, 0, &byte, 1) == 0);
    CHECK(sppo_file_close(&file, 0) == 0);
}

static int files_open(void) {
    int count = 0;
    DIR *files = opendir("/proc/self/fd");
    CHECK(files != NULL);
    while (readdir(files) != NULL) count++;
    closedir(files);
    return count;
}

static int names_in_directory(void) {
    int count = 0;
    DIR *names = opendir(directory);
    CHECK(names != NULL);
    while (readdir(names) != NULL) count++;
    closedir(names);
    return count - 2; /* . and .. */
}

/* A file system without nameless files, without a way to set space aside, or full. */
static void other_file_systems(void) {
    sppo_file file = {0};
    char bytes[100] = "bytes";
    const int before = files_open();
    no_tmpfile = 1;
    file = opened(2, 1, NULL);
    CHECK(names_in_directory() == 0 && file.preallocated);
    CHECK(transfer(&file, 1, 77, bytes, sizeof(bytes)) == 0);
    CHECK(sppo_file_close(&file, 0) == 0);
    CHECK(sppo_file_open("/no/such/directory", 1, 1, 1, BLOCK, &file) == ENOENT);
    fallocate_failure = EOPNOTSUPP;
    file = opened(2, 1, NULL);
    CHECK(!file.preallocated);
    CHECK(transfer(&file, 0, SIZE - sizeof(bytes), bytes, sizeof(bytes)) == 0 && bytes[0] == 0);
    CHECK(sppo_file_close(&file, 0) == 0);
    for (no_tmpfile = 0; no_tmpfile < 2; no_tmpfile++) {
        fallocate_failure = ENOSPC;
        CHECK(sppo_file_open(directory, SIZE, 2, 1, BLOCK, &file) == ENOSPC);
        CHECK(names_in_directory() == 0 && file.state == NULL);
    }
    no_tmpfile = fallocate_failure = 0;
    CHECK(files_open() == before);
}

static void refusals(void) {
    char byte = 0;
    sppo_file file = {0};
    sppo_file_totals totals;
    sppo_file_request *request = NULL;
    CHECK(sppo_file_open(NULL, 1, 1, 1, BLOCK, &file) == EINVAL);
    CHECK(sppo_file_open(directory, 0, 1, 1, BLOCK, &file) == EINVAL);
    CHECK(sppo_file_open(directory, 1, 0, 1, BLOCK, &file) == EINVAL);
    CHECK(sppo_file_open(directory, 1, 1, 1, 0, &file) == EINVAL);
    CHECK(sppo_file_open(directory, 1, 1, 1, 4097, &file) == EINVAL);
    CHECK(sppo_file_open(directory, 1, 1, 1, BLOCK, NULL) == EINVAL);
    CHECK(sppo_file_open(directory, UINT64_MAX, 1, 1, BLOCK, &file) == EFBIG);
    CHECK(sppo_file_open("/no/such/directory", 1, 1, 1, BLOCK, &file) == ENOENT);
    const int full = sppo_file_open(directory, (uint64_t)1 << 50, 1, 1, BLOCK, &file);
    CHECK(full == ENOSPC || full == EFBIG);
    CHECK(file.state == NULL);
    CHECK(sppo_file_submit(&file, 0, 0, &byte, 1, &request) == EINVAL);
    CHECK(sppo_file_measure(&file, &totals) == EINVAL);
    CHECK(sppo_file_set_io(&file, NULL, NULL) == EINVAL);
    CHECK(sppo_file_close(&file, 0) == EINVAL);
    CHECK(sppo_file_close(NULL, 0) == EINVAL);
    CHECK(sppo_file_wait(NULL, 0) == EINVAL);
    sppo_file_forget(NULL);
    file = opened(1, 1, NULL);
    CHECK(sppo_file_submit(&file, 0, 0, NULL, 1, &request) == EINVAL);
    CHECK(sppo_file_submit(&file, 0, 0, &byte, 1, NULL) == EINVAL);
    CHECK(sppo_file_submit(&file, 0, file.size_bytes, &byte, 1, &request) == EINVAL);
    CHECK(sppo_file_submit(&file, 0, UINT64_MAX, &byte, 2, &request) == EINVAL);
    CHECK(sppo_file_submit(&file, 0, 1, &byte, UINT64_MAX, &request) == EINVAL);
    CHECK(request == NULL);
    CHECK(sppo_file_close(&file, 0) == 0);
}

int main(int count, char **words) {
    CHECK(count == 2);
    directory = words[1];
    for (int direct = 0; direct < 2; direct++) {
        random_slots(1, direct, NULL);
        random_slots(4, direct, NULL);
        random_slots(100, direct, NULL);
        faults short_counts = {.most_bytes = 5000, .interrupt = 1};
        random_slots(3, direct, &short_counts);
        failures(direct);
    }
    gets_its_turn(0);
    gets_its_turn(1);
    ends(0);
    ends(1);
    fork_has_no_workers();
    other_file_systems();
    refusals();
    puts("ok");
    return 0;
}
