/* Counts the operations on files below one folder, records them, and makes one of them fail.

Loaded with LD_PRELOAD, so it sees the calls of Python, Arrow and DuckDB alike. Nothing is counted until
disk_start() is called. Calls on files outside of the folder pass unchanged. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { OPEN = 1, CREATE, READ, WRITE, TRUNCATE, SYNC, RENAME, LINK, SYMLINK, UNLINK, RMDIR, MKDIR, LIST };
enum fault { NONE, EIO_FAULT, ENOSPC_FAULT, EINTR_FAULT, SHORT_FAULT, ESTALE_FAULT, ETIMEDOUT_FAULT, EAGAIN_FAULT };
static const int error_of[] = {0, EIO, ENOSPC, EINTR, EIO, ESTALE, ETIMEDOUT, EAGAIN};

struct record {
    uint8_t kind, is_folder, failed, pad;
    uint32_t number;
    uint64_t inode, offset, length;
    uint32_t path, other, data;
};

static struct {
    pthread_mutex_t mutex;
    char root[PATH_MAX], log_path[PATH_MAX];
    size_t root_length;
    int active, fault, lasting;
    long at, count, injected;
} own = {.mutex = PTHREAD_MUTEX_INITIALIZER}, *state = &own;
static int log_file = -1, log_owner;

#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name); real; })

/* Watch the files below ``folder``, and record the operations if ``log`` is a path. */
void disk_start(const char *folder, const char *log) {
    strncpy(state->root, folder, sizeof state->root - 1);
    strncpy(state->log_path, log ? log : "", sizeof state->log_path - 1);
    state->root_length = strlen(state->root);
    state->at = -1;
    state->count = state->injected = 0;
    state->active = 1;
}
/* From now on, operation ``number`` fails, and if ``lasts``, all after it. */
void disk_arm(long number, int kind, int lasts) { state->at = number; state->fault = kind; state->lasting = lasts; }
/* Stop or continue counting, for files that the simulation itself reads. */
void disk_pause(int paused) { state->active = !paused; }
long disk_injected(void) { return state->injected; }

static int below(const char *path) {
    return strncmp(path, state->root, state->root_length) == 0
        && (path[state->root_length] == '/' || !path[state->root_length]);
}

/* Write the absolute path without "." and ".." to ``out``; return whether it is below the folder. */
static int absolute(int folder, const char *path, char *out) {
    char whole[2 * PATH_MAX];
    if (!state->active || !path) return 0;
    if (path[0] == '/') snprintf(whole, sizeof whole, "%s", path);
    else {
        char link[64], base[PATH_MAX];
        if (folder == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t size = readlink(link, base, sizeof base - 1);
        if (size < 0) return 0;
        base[size] = 0;
        snprintf(whole, sizeof whole, "%s/%s", base, path);
    }
    char *end = out; *end = 0;
    for (char *save = NULL, *part = strtok_r(whole, "/", &save); part; part = strtok_r(NULL, "/", &save)) {
        if (!strcmp(part, ".")) continue;
        if (!strcmp(part, "..")) { while (end > out && *--end != '/'); *end = 0; continue; }
        if (end + strlen(part) + 2 > out + PATH_MAX) return 0;
        end += sprintf(end, "/%s", part);
    }
    return below(out);
}

static int path_of(int file, char *out) {
    if (!state->active || file < 0 || file == log_file) return 0;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, out, PATH_MAX - 1);
    if (size < 0) return 0;
    out[size] = 0;
    return below(out);
}

static int allows(enum kind kind) {
    int fault = state->fault;
    if (fault == EIO_FAULT || fault >= ESTALE_FAULT) return 1;
    if (fault == ENOSPC_FAULT)
        return kind == CREATE || kind == WRITE || kind == MKDIR || kind == RENAME || kind == SYNC || kind == LINK;
    if (fault == EINTR_FAULT)
        return kind == OPEN || kind == CREATE || kind == READ || kind == WRITE || kind == SYNC || kind == TRUNCATE;
    return fault == SHORT_FAULT && (kind == WRITE || kind == READ);
}

/* Count an operation. Return its fault, and set errno. The caller holds the mutex. */
static int begin(enum kind kind) {
    long number = state->count++;
    if (state->at < 0 || number < state->at || (number > state->at && !state->lasting) || !allows(kind)) return NONE;
    state->injected++;
    errno = error_of[state->fault];
    return state->fault;
}

static void record(enum kind kind, int file, int is_folder, uint64_t offset, uint64_t length, const char *path,
                   const char *other, const struct iovec *data, int parts, size_t size, int failed) {
    if (!*state->log_path) return;
    int before = errno;
    if (log_file < 0 || log_owner != getpid()) {
        log_file = REAL(openat)(AT_FDCWD, state->log_path, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
        log_owner = getpid();
    }
    struct stat info = {0};
    if (file >= 0) fstat(file, &info);
    const char *from = path ? path + state->root_length : "", *to = other ? other + state->root_length : "";
    struct record head = {kind, is_folder || S_ISDIR(info.st_mode), failed, 0, state->count - 1, info.st_ino, offset,
                          length, strlen(from), strlen(to), size};
    REAL(write)(log_file, &head, sizeof head);
    REAL(write)(log_file, from, head.path);
    REAL(write)(log_file, to, head.other);
    for (int part = 0; part < parts && size; part++) {
        size_t taken = data[part].iov_len < size ? data[part].iov_len : size;
        REAL(write)(log_file, data[part].iov_base, taken);
        size -= taken;
    }
    errno = before;
}

static void lock(void) {
    pthread_mutex_lock(&state->mutex);
}
static void unlock(void) { int before = errno; pthread_mutex_unlock(&state->mutex); errno = before; }

/* --- opening ------------------------------------------------------------------------------------------- */

static int open_counted(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    if (!absolute(folder, name, path)) return REAL(openat)(folder, name, flags, mode);
    lock();
    struct stat info;
    int absent = (flags & O_CREAT) && fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW) != 0;
    int emptied = !absent && (flags & O_TRUNC);
    enum kind kind = absent ? CREATE : emptied ? TRUNCATE : OPEN;
    int file = -1;
    if (!begin(kind)) file = REAL(openat)(folder, name, flags, mode);
    record(kind, file, 0, 0, 0, path, NULL, NULL, 0, 0, file < 0);
    unlock();
    return file;
}
#define MODE(flags) mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); }
int open(const char *name, int flags, ...) { MODE(flags) return open_counted(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) return open_counted(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE(flags) return open_counted(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE(flags) return open_counted(folder, name, flags, mode); }
int __open_2(const char *name, int flags) { return open_counted(AT_FDCWD, name, flags, 0); }
int __open64_2(const char *name, int flags) { return open_counted(AT_FDCWD, name, flags, 0); }
int __openat_2(int folder, const char *name, int flags) { return open_counted(folder, name, flags, 0); }
int __openat64_2(int folder, const char *name, int flags) { return open_counted(folder, name, flags, 0); }
int creat(const char *name, mode_t mode) { return open_counted(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return creat(name, mode); }

DIR *opendir(const char *name) {
    char path[PATH_MAX];
    if (!absolute(AT_FDCWD, name, path)) return REAL(opendir)(name);
    lock();
    DIR *found = begin(LIST) ? NULL : REAL(opendir)(name);
    record(LIST, -1, 1, 0, 0, path, NULL, NULL, 0, 0, !found);
    unlock();
    return found;
}

/* --- reading and writing ------------------------------------------------------------------------------- */

static ssize_t read_counted(int file, const struct iovec *parts, int number, off_t offset, const char *path) {
    lock();
    int found = begin(READ);
    ssize_t size = -1;
    if (found == SHORT_FAULT && number > 0 && parts[0].iov_len > 1) {
        struct iovec half = {parts[0].iov_base, parts[0].iov_len / 2};
        size = offset < 0 ? REAL(readv)(file, &half, 1) : REAL(preadv)(file, &half, 1, offset);
    } else if (!found || found == SHORT_FAULT)
        size = offset < 0 ? REAL(readv)(file, parts, number) : REAL(preadv)(file, parts, number, offset);
    record(READ, -1, 0, 0, 0, path, NULL, NULL, 0, 0, size < 0);
    unlock();
    return size;
}
static ssize_t read_one(int file, void *data, size_t size, off_t offset) {
    char path[PATH_MAX];
    struct iovec part = {data, size};
    if (!path_of(file, path)) return offset < 0 ? REAL(read)(file, data, size) : REAL(pread)(file, data, size, offset);
    return read_counted(file, &part, 1, offset, path);
}
ssize_t read(int file, void *data, size_t size) { return read_one(file, data, size, -1); }
ssize_t pread(int file, void *data, size_t size, off_t offset) { return read_one(file, data, size, offset); }
ssize_t pread64(int file, void *data, size_t size, off64_t offset) { return read_one(file, data, size, offset); }
ssize_t __read_chk(int file, void *data, size_t size, size_t room) { (void)room; return read_one(file, data, size, -1); }
ssize_t __pread_chk(int file, void *data, size_t size, off_t offset, size_t room) { (void)room; return read_one(file, data, size, offset); }
ssize_t __pread64_chk(int file, void *data, size_t size, off64_t offset, size_t room) { (void)room; return read_one(file, data, size, offset); }
ssize_t readv(int file, const struct iovec *parts, int number) {
    char path[PATH_MAX];
    return path_of(file, path) ? read_counted(file, parts, number, -1, path) : REAL(readv)(file, parts, number);
}
ssize_t preadv(int file, const struct iovec *parts, int number, off_t offset) {
    char path[PATH_MAX];
    return path_of(file, path) ? read_counted(file, parts, number, offset, path) : REAL(preadv)(file, parts, number, offset);
}
ssize_t preadv64(int file, const struct iovec *parts, int number, off64_t offset) { return preadv(file, parts, number, offset); }

static ssize_t write_counted(int file, const struct iovec *parts, int number, off_t offset, const char *path) {
    lock();
    struct stat info;
    uint64_t start = offset;
    if (offset < 0) {
        fstat(file, &info);
        start = (fcntl(file, F_GETFL) & O_APPEND) ? info.st_size : lseek(file, 0, SEEK_CUR);
    }
    int found = begin(WRITE);
    ssize_t size = -1;
    if (found == SHORT_FAULT && number > 0 && parts[0].iov_len > 1) {
        struct iovec half = {parts[0].iov_base, parts[0].iov_len / 2};
        size = offset < 0 ? REAL(writev)(file, &half, 1) : REAL(pwritev)(file, &half, 1, offset);
    } else if (!found || found == SHORT_FAULT)
        size = offset < 0 ? REAL(writev)(file, parts, number) : REAL(pwritev)(file, parts, number, offset);
    record(WRITE, file, 0, start, size < 0 ? 0 : size, path, NULL, parts, number, size < 0 ? 0 : size, size < 0);
    unlock();
    return size;
}
static ssize_t write_one(int file, const void *data, size_t size, off_t offset) {
    char path[PATH_MAX];
    struct iovec part = {(void *)data, size};
    if (!path_of(file, path)) return offset < 0 ? REAL(write)(file, data, size) : REAL(pwrite)(file, data, size, offset);
    return write_counted(file, &part, 1, offset, path);
}
ssize_t write(int file, const void *data, size_t size) { return write_one(file, data, size, -1); }
ssize_t pwrite(int file, const void *data, size_t size, off_t offset) { return write_one(file, data, size, offset); }
ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) { return write_one(file, data, size, offset); }
ssize_t writev(int file, const struct iovec *parts, int number) {
    char path[PATH_MAX];
    return path_of(file, path) ? write_counted(file, parts, number, -1, path) : REAL(writev)(file, parts, number);
}
ssize_t pwritev(int file, const struct iovec *parts, int number, off_t offset) {
    char path[PATH_MAX];
    return path_of(file, path) ? write_counted(file, parts, number, offset, path) : REAL(pwritev)(file, parts, number, offset);
}
ssize_t pwritev64(int file, const struct iovec *parts, int number, off64_t offset) { return pwritev(file, parts, number, offset); }

/* Callers of these fall back to reading and writing. */
ssize_t sendfile64(int to, int from, off64_t *offset, size_t size) {
    char path[PATH_MAX];
    if (path_of(to, path)) { errno = EINVAL; return -1; }
    return REAL(sendfile64)(to, from, offset, size);
}
ssize_t sendfile(int to, int from, off_t *offset, size_t size) { return sendfile64(to, from, offset, size); }
ssize_t copy_file_range(int from, off64_t *start, int to, off64_t *offset, size_t size, unsigned flags) {
    char path[PATH_MAX];
    if (path_of(to, path)) { errno = EINVAL; return -1; }
    return REAL(copy_file_range)(from, start, to, offset, size, flags);
}

static int truncate_counted(int file, off_t length) {
    char path[PATH_MAX];
    if (!path_of(file, path)) return REAL(ftruncate)(file, length);
    lock();
    int result = begin(TRUNCATE) ? -1 : REAL(ftruncate)(file, length);
    record(TRUNCATE, file, 0, 0, length, path, NULL, NULL, 0, 0, result < 0);
    unlock();
    return result;
}
int ftruncate(int file, off_t length) { return truncate_counted(file, length); }
int ftruncate64(int file, off64_t length) { return truncate_counted(file, length); }
int fallocate(int file, int mode, off_t offset, off_t length) {
    char path[PATH_MAX];
    if (path_of(file, path)) { errno = EOPNOTSUPP; return -1; }
    return REAL(fallocate)(file, mode, offset, length);
}
int fallocate64(int file, int mode, off64_t offset, off64_t length) { return fallocate(file, mode, offset, length); }

static int sync_counted(int file, int only_data) {
    char path[PATH_MAX];
    if (!path_of(file, path)) return only_data ? REAL(fdatasync)(file) : REAL(fsync)(file);
    lock();
    int result = begin(SYNC) ? -1 : 0;  /* the real disk need not wait */
    record(SYNC, file, 0, 0, 0, path, NULL, NULL, 0, 0, result < 0);
    unlock();
    return result;
}
int fsync(int file) { return sync_counted(file, 0); }
int fdatasync(int file) { return sync_counted(file, 1); }

/* --- names --------------------------------------------------------------------------------------------- */

static int rename_counted(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    char source[PATH_MAX], target[PATH_MAX];
    if (!absolute(from_folder, from, source) || !absolute(to_folder, to, target))
        return REAL(renameat2)(from_folder, from, to_folder, to, flags);
    lock();
    int result = begin(RENAME) ? -1 : REAL(renameat2)(from_folder, from, to_folder, to, flags);
    record(RENAME, -1, 0, 0, 0, source, target, NULL, 0, 0, result < 0);
    unlock();
    return result;
}
int rename(const char *from, const char *to) { return rename_counted(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int a, const char *from, int b, const char *to) { return rename_counted(a, from, b, to, 0); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) { return rename_counted(a, from, b, to, flags); }

int linkat(int a, const char *from, int b, const char *to, int flags) {
    char source[PATH_MAX], target[PATH_MAX];
    if (!absolute(a, from, source) || !absolute(b, to, target)) return REAL(linkat)(a, from, b, to, flags);
    lock();
    int result = begin(LINK) ? -1 : REAL(linkat)(a, from, b, to, flags);
    record(LINK, -1, 0, 0, 0, source, target, NULL, 0, 0, result < 0);
    unlock();
    return result;
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int unlinkat(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    if (!absolute(folder, name, path)) return REAL(unlinkat)(folder, name, flags);
    lock();
    enum kind kind = flags & AT_REMOVEDIR ? RMDIR : UNLINK;
    int result = begin(kind) ? -1 : REAL(unlinkat)(folder, name, flags);
    record(kind, -1, 0, 0, 0, path, NULL, NULL, 0, 0, result < 0);
    unlock();
    return result;
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
int remove(const char *name) {
    int result = unlink(name);
    return result < 0 && errno == EISDIR ? rmdir(name) : result;
}

int mkdirat(int folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    if (!absolute(folder, name, path)) return REAL(mkdirat)(folder, name, mode);
    lock();
    int result = begin(MKDIR) ? -1 : REAL(mkdirat)(folder, name, mode);
    record(MKDIR, -1, 1, 0, 0, path, NULL, NULL, 0, 0, result < 0);
    unlock();
    return result;
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }
