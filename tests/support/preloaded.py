"""Libraries in C that come between a node's processes and the system: clocks that jump, disks that forget."""

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
    void *mapped = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped != MAP_FAILED) offset = mapped;
}
static long long seconds(void) { return offset == NULL ? 0 : *offset; }
static int real_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    return real(clock, now);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int status = real_gettime(clock, now);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += seconds();
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


def built(directory: Path, name: str, source: str) -> Path:
    """A library for `LD_PRELOAD`; the test is skipped where there is no compiler."""
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


def set_clock(path: Path, seconds: int) -> None:
    """Have the wall clocks of all processes that look at this file be off by so much, from now on."""
    with path.open("r+b" if path.exists() else "wb", buffering=0) as file:
        file.write(struct.pack("=q", seconds))
