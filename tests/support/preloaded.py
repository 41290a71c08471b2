"""C libraries between a node's processes and the system: clocks that jump, disks that fail."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long long *offset;
__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CLOCK_OFFSET_FILE");
    int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    void *mapped = mmap(NULL, 2 * sizeof *offset, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped != MAP_FAILED) offset = mapped;
}
static long long seconds(void) { return offset == NULL ? 0 : offset[0]; }
static long long asleep(void) { return offset == NULL ? 0 : offset[1]; }
static int real_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    return real(clock, now);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int status = real_gettime(clock, now);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += seconds();
    if (status == 0 && clock == CLOCK_BOOTTIME) now->tv_sec += asleep();
    return status;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec read;
    int status = clock_gettime(CLOCK_REALTIME, &read);
    if (status == 0) { now->tv_sec = read.tv_sec; now->tv_usec = read.tv_nsec / 1000; }
    return status;
}
time_t time(time_t *now) {
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    if (now != NULL) *now = read.tv_sec;
    return read.tv_sec;
}
"""

FSYNC = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
/* A sync fails once each time that a file appears. */
static int fails(void) {
    const char *path = getenv("FSYNC_FAILS_ONCE_IF");
    if (path == NULL || unlink(path) != 0) return 0;
    errno = EIO;
    return 1;
}
int fsync(int fd) { return fails() ? -1 : ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd); }
int fdatasync(int fd) { return fails() ? -1 : ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd); }
"""

FULL = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
/* While a file is there, those in a directory get no block beyond the ones they have. What is refused so is
   counted in that file: a byte each. */
#define BLOCK 4096
static off_t room(int fd, off_t offset) {
    const char *full = getenv("DISK_FULL_IF"), *below = getenv("DISK_FULL_BELOW");
    char link[64], path[4096];
    struct stat it;
    if (full == NULL || below == NULL || access(full, F_OK)) return -1;
    sprintf(link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0 || fstat(fd, &it) || !S_ISREG(it.st_mode)) return -1;
    path[length] = 0;
    if (strncmp(path, below, strlen(below)) || path[strlen(below)] != '/') return -1;
    off_t end = (it.st_size + BLOCK - 1) / BLOCK * BLOCK;
    return offset < end ? end - offset : 0;
}
static ssize_t refuse(void) {
    int fd = open(getenv("DISK_FULL_IF"), O_WRONLY | O_APPEND | O_CLOEXEC);
    if (fd >= 0) {
        if (write(fd, "x", 1) != 1) abort();
        close(fd);
    }
    errno = ENOSPC;
    return -1;
}
ssize_t pwritev64v2(int fd, const struct iovec *vectors, int count, off64_t offset, int flags) {
    ssize_t (*real)(int, const struct iovec *, int, off64_t, int) = dlsym(RTLD_NEXT, "pwritev64v2");
    struct iovec less[count + 1];
    off_t left = room(fd, offset);
    int used = 0;
    if (left < 0) return real(fd, vectors, count, offset, flags);
    for (; used < count && left > 0; used++) {
        less[used] = vectors[used];
        if ((off_t)less[used].iov_len > left) less[used].iov_len = left;
        left -= less[used].iov_len;
    }
    return used == 0 && count > 0 ? refuse() : real(fd, less, used, offset, flags);
}
ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *offset, size_t size, unsigned flags) {
    ssize_t (*real)(int, off64_t *, int, off64_t *, size_t, unsigned) = dlsym(RTLD_NEXT, "copy_file_range");
    off_t left = room(to, offset == NULL ? lseek(to, 0, SEEK_CUR) : *offset);
    if (left == 0) return refuse();
    return real(from, at, to, offset, left > 0 && (size_t)left < size ? (size_t)left : size, flags);
}
"""


def built(directory: Path, name: str, source: str) -> Path:
    """Build a library for `LD_PRELOAD`. Skip the test if there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for a library that stands before the system")
    (directory / f"{name}.c").write_text(source)
    library = directory / f"{name}.so"
    command = [
        compiler,
        "-O2",
        "-shared",
        "-fPIC",
        "-o",
        library,
        directory / f"{name}.c",
        "-ldl",
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    return library


def set_clock(path: Path, seconds: int, *, asleep_s: int = 0) -> None:
    """Shift the wall clocks of all processes that use this file by `seconds`, from now on.

    `asleep_s`: how long the machine has slept since these processes started. The clock of leases counts that.
    """
    with path.open("r+b" if path.exists() else "wb", buffering=0) as file:
        file.write(struct.pack("=qq", seconds, asleep_s))
