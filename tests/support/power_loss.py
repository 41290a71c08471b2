"""A power cut for whole nodes: their directories lose all content that their processes had not synced.

A library (`POWER`) intercepts fsync in every process. A sync of a file saves its bytes elsewhere, and a sync
of a directory saves its list of names. `cut_power` rebuilds the directories of dead processes from these.
This is as strict as possible: except for directories and locks, only content remains for which a sync
returned.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Final

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD: Final = -100
_NO_FOLLOW: Final = 0x100
_BASIC_AND_BIRTH: Final = 0xFFF
_SECTOR_BYTES: Final = 512

POWER: Final = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER, copying = PTHREAD_MUTEX_INITIALIZER;
static void name_of(const struct statx *it, char *name) {
    sprintf(name, "%llu.%lld.%u", (unsigned long long)it->stx_ino, (long long)it->stx_btime.tv_sec,
            it->stx_btime.tv_nsec);
}
static int look(int fd, struct statx *it) {
    return statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS | STATX_BTIME, it);
}

/* What this process wrote of a file since it synced it; a file it never synced is not known here. */
#define KNOWN 65536
static struct known { unsigned long long inode; long long seconds; unsigned nanoseconds; off_t low, high; }
    known[KNOWN];
static struct known *find(const struct statx *it) {
    unsigned long long at = it->stx_ino * 2654435761u + it->stx_btime.tv_nsec;
    for (int tries = 0; tries < KNOWN; tries++, at++) {
        struct known *one = &known[at % KNOWN];
        if (one->inode == 0) {
            one->inode = it->stx_ino;
            one->seconds = it->stx_btime.tv_sec;
            one->nanoseconds = it->stx_btime.tv_nsec;
            one->high = -1;
            return one;
        }
        if (one->inode == it->stx_ino && one->seconds == it->stx_btime.tv_sec
            && one->nanoseconds == it->stx_btime.tv_nsec)
            return one;
    }
    abort();
}
/* After the write: a sync that began before it need not cover it. */
static void wrote(int fd, off_t offset, off_t length) {
    struct statx it;
    int error = errno;
    if (length > 0 && look(fd, &it) == 0 && S_ISREG(it.stx_mode)) {
        pthread_mutex_lock(&lock);
        struct known *one = find(&it);
        if (one->high >= 0) {
            if (one->high == 0 || offset < one->low) one->low = offset;
            if (offset + length > one->high) one->high = offset + length;
        }
        pthread_mutex_unlock(&lock);
    }
    errno = error;
}
ssize_t pwritev64v2(int fd, const struct iovec *vectors, int count, off64_t offset, int flags) {
    ssize_t (*real)(int, const struct iovec *, int, off64_t, int) = dlsym(RTLD_NEXT, "pwritev64v2");
    ssize_t done = real(fd, vectors, count, offset, flags);
    wrote(fd, offset, done);
    return done;
}
static ssize_t real_pwrite(int fd, const void *bytes, size_t size, off64_t offset) {
    static ssize_t (*real)(int, const void *, size_t, off64_t);
    if (real == NULL) real = (ssize_t (*)(int, const void *, size_t, off64_t))dlsym(RTLD_NEXT, "pwrite64");
    return real(fd, bytes, size, offset);
}
ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t offset) {
    ssize_t done = real_pwrite(fd, bytes, size, offset);
    wrote(fd, offset, done);
    return done;
}
ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *offset, size_t size, unsigned flags) {
    ssize_t (*real)(int, off64_t *, int, off64_t *, size_t, unsigned) = dlsym(RTLD_NEXT, "copy_file_range");
    off64_t start = offset == NULL ? 0 : *offset;
    ssize_t done = real(from, at, to, offset, size, flags);
    wrote(to, start, offset == NULL && done > 0 ? lseek(to, 0, SEEK_CUR) : done);
    return done;
}
ssize_t write(int fd, const void *bytes, size_t size) {
    ssize_t (*real)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
    ssize_t done = real(fd, bytes, size);
    off_t end = done > 0 ? lseek(fd, 0, SEEK_CUR) : 0;
    if (end > 0) wrote(fd, end - done, done);
    return done;
}
int ftruncate64(int fd, off64_t size) {
    int (*real)(int, off64_t) = dlsym(RTLD_NEXT, "ftruncate64");
    struct statx it;
    off_t before = look(fd, &it) == 0 ? (off_t)it.stx_size : size;
    int status = real(fd, size);
    if (status == 0) wrote(fd, size < before ? size : before, before < size ? size - before : before - size);
    return status;
}

static int copy_file(int fd, int out, off_t at, off_t end) {
    static char piece[1 << 16];
    while (at < end) {
        size_t size = end - at < (off_t)sizeof piece ? (size_t)(end - at) : sizeof piece;
        ssize_t got = pread(fd, piece, size, at);
        if (got <= 0) break;
        if (real_pwrite(out, piece, got, at) != got) return -1;
        at += got;
    }
    return 0;
}
static int list_names(int fd, int out) {
    int again = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *directory = again < 0 ? NULL : fdopendir(again);
    if (directory == NULL) return -1;
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        struct statx it;
        char line[512], id[80];
        if (statx(fd, entry->d_name, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS | STATX_BTIME, &it)) continue;
        if (!S_ISREG(it.stx_mode)) continue;
        name_of(&it, id);
        int length = snprintf(line, sizeof line, "%s %s\n", id, entry->d_name);
        if (write(out, line, length) != length) return -1;
    }
    closedir(directory);
    return 0;
}
/* All of it, aside and renamed. */
static int keep_whole(int from, const struct statx *it, const char *path) {
    char made[520];
    int status = -1;
    snprintf(made, sizeof made, "%s.%d", path, getpid());
    int out = open(made, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (out < 0) return -1;
    status = S_ISDIR(it->stx_mode) ? list_names(from, out) : copy_file(from, out, 0, it->stx_size);
    close(out);
    return status == 0 ? rename(made, path) : status;
}
/* What was written since the last sync, in place: if it is killed meanwhile, a part of that is kept. */
static int keep_written(int from, const struct statx *it, const char *path, off_t low, off_t high) {
    int out = open(path, O_RDWR | O_CLOEXEC), status = -1;
    if (out < 0) return -1;
    status = copy_file(from, out, low, high < (off_t)it->stx_size ? high : (off_t)it->stx_size);
    if (status == 0) status = ((int (*)(int, off64_t))dlsym(RTLD_NEXT, "ftruncate64"))(out, it->stx_size);
    close(out);
    return status;
}
static int keep(int fd) {
    const char *kept = getenv("KEPT_OF_SYNCS");
    struct statx it;
    struct known *one = NULL;
    char id[80], path[512];
    int status;
    if (kept == NULL) return 0;
    /* A descriptor that can only be written is read by another one. */
    sprintf(path, "/proc/self/fd/%d", fd);
    int from = open(path, O_RDONLY | O_CLOEXEC);
    if (from < 0) return -1;
    pthread_mutex_lock(&copying);
    pthread_mutex_lock(&lock);
    off_t low = 0, high = -1;
    if (look(fd, &it) == 0 && S_ISREG(it.stx_mode)) {
        one = find(&it);
        low = one->low, high = one->high;
        one->low = 0, one->high = 0;
    }
    pthread_mutex_unlock(&lock);
    name_of(&it, id);
    snprintf(path, sizeof path, "%s/%s", kept, id);
    status = high < 0 ? keep_whole(from, &it, path) : keep_written(from, &it, path, low, high);
    pthread_mutex_unlock(&copying);
    close(from);
    if (status) errno = EIO;
    return status;
}
int fsync(int fd) { return keep(fd); }
int fdatasync(int fd) { return keep(fd); }
"""


def cut_power(directory: Path, kept: Path, draw: random.Random | None = None) -> int:
    """Reset `directory` to its synced content. Return how many files lost bytes.

    Every process of the directory must be dead. With `draw`, some files keep some sectors that were written
    since: a disk may have written any of them.
    """
    lost = 0
    for place, _, names in list(os.walk(directory)):
        synced = _listed(kept / _id(Path(place)))
        locks = [name for name in names if name.endswith("lock")]
        restored: dict[str, bytes] = {}
        for name, file_id in synced.items():
            copy = kept / file_id
            synced_bytes = copy.read_bytes() if copy.exists() else b""
            path = Path(place, name)
            is_same = draw is not None and path.is_file() and _id(path) == file_id
            restored[name] = _torn(synced_bytes, path.read_bytes(), draw) if is_same else synced_bytes
        for name in names:
            path = Path(place, name)
            if name not in locks and path.is_file() and restored.get(name) != path.read_bytes():
                lost += 1
            if name not in locks:
                path.unlink()
        for name, content in restored.items():
            if name not in locks:
                Path(place, name).write_bytes(content)
    # The files are new now: their content counts as durable.
    shutil.rmtree(kept)
    kept.mkdir()
    for place, _, names in list(os.walk(directory)):
        entries = {name: _id(Path(place, name)) for name in names if Path(place, name).is_file()}
        for name, file_id in entries.items():
            shutil.copyfile(Path(place, name), kept / file_id)
        (kept / _id(Path(place))).write_text("".join(f"{one} {name}\n" for name, one in entries.items()))
    return lost


def _torn(synced: bytes, written: bytes, draw: random.Random | None) -> bytes:
    if draw is None or synced == written or draw.random() < 0.5:
        return synced
    size = draw.choice([len(synced), len(written)])
    torn = bytearray(synced[:size].ljust(size, b"\0"))
    for at in range(0, min(size, len(written)), _SECTOR_BYTES):
        end = min(at + _SECTOR_BYTES, size, len(written))
        if draw.random() < 0.5:
            torn[at:end] = written[at:end]
    return bytes(torn)


def kept_copy(path: Path, kept: Path) -> Path:
    """Return the path of the synced bytes of a file. It does not exist if the file was never synced."""
    return kept / _id(path)


def _listed(path: Path) -> dict[str, str]:
    """Return the file id of each name in a directory, as of the directory's last sync."""
    if not path.exists():
        return {}
    lines = [line.split(" ", 1) for line in path.read_text().splitlines()]
    return {name: file_id for file_id, name in lines}


def _id(path: Path) -> str:
    """Return the library's id of a file: inode number and creation time, because inode numbers are reused."""
    buffer = ctypes.create_string_buffer(256)
    if _LIBC.statx(_AT_FDCWD, os.fsencode(path), _NO_FOLLOW, _BASIC_AND_BIRTH, buffer):
        raise OSError(ctypes.get_errno(), f"statx {path}")
    (inode,) = struct.unpack_from("<Q", buffer, 32)
    seconds, nanoseconds = struct.unpack_from("<qI", buffer, 80)
    return f"{inode}.{seconds}.{nanoseconds}"
