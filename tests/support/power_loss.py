"""A power cut for whole nodes: what their processes had not synced is gone from their directories.

A library (`POWER`) stands before fsync in every process. A sync of a file keeps its bytes elsewhere, one of a
directory keeps its list of names; `cut_power` makes the directories of dead processes of that again. As
strict as can be: nothing is there that no sync returned for, but directories and locks.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
from pathlib import Path
from typing import Final

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD: Final = -100
_NO_FOLLOW: Final = 0x100
_BASIC_AND_BIRTH: Final = 0xFFF

POWER: Final = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void name_of(const struct statx *it, char *name) {
    sprintf(name, "%llu.%lld.%u", (unsigned long long)it->stx_ino, (long long)it->stx_btime.tv_sec,
            it->stx_btime.tv_nsec);
}
static int copy_file(int fd, int out, off_t size) {
    static char piece[1 << 16];
    for (off_t at = 0; at < size;) {
        ssize_t got = pread(fd, piece, sizeof piece, at);
        if (got <= 0) break;
        if (pwrite(out, piece, got, at) != got) return -1;
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
static int keep(int fd) {
    const char *kept = getenv("KEPT_OF_SYNCS");
    struct statx it;
    char id[80], path[512], made[520];
    if (kept == NULL) return 0;
    /* A descriptor that can only be written is read by another one. */
    sprintf(path, "/proc/self/fd/%d", fd);
    if (statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS | STATX_BTIME, &it)) return -1;
    int from = open(path, O_RDONLY | O_CLOEXEC), status = -1;
    if (from < 0) return -1;
    name_of(&it, id);
    snprintf(path, sizeof path, "%s/%s", kept, id);
    snprintf(made, sizeof made, "%s.%d", path, getpid());
    pthread_mutex_lock(&lock);
    int out = open(made, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (out >= 0) {
        status = S_ISDIR(it.stx_mode) ? list_names(from, out) : copy_file(from, out, it.stx_size);
        close(out);
        if (status == 0) status = rename(made, path);
    }
    pthread_mutex_unlock(&lock);
    close(from);
    if (status) errno = EIO;
    return status;
}
int fsync(int fd) { return keep(fd); }
int fdatasync(int fd) { return keep(fd); }
"""


def cut_power(directory: Path, kept: Path) -> int:
    """Make `directory`, of which every process is dead, what was synced of it; how many files lost bytes."""
    lost = 0
    for place, _, names in list(os.walk(directory)):
        synced = _listed(kept / _id(Path(place)))
        locks = [name for name in names if name.endswith("lock")]
        restored: dict[str, bytes] = {}
        for name, file_id in synced.items():
            copy = kept / file_id
            restored[name] = copy.read_bytes() if copy.exists() else b""
        for name in names:
            path = Path(place, name)
            if name not in locks and path.is_file() and restored.get(name) != path.read_bytes():
                lost += 1
            if name not in locks:
                path.unlink()
        for name, content in restored.items():
            if name not in locks:
                Path(place, name).write_bytes(content)
    # Files are new ones now: what they hold is durable.
    shutil.rmtree(kept)
    kept.mkdir()
    for place, _, names in list(os.walk(directory)):
        entries = {name: _id(Path(place, name)) for name in names if Path(place, name).is_file()}
        for name, file_id in entries.items():
            shutil.copyfile(Path(place, name), kept / file_id)
        (kept / _id(Path(place))).write_text("".join(f"{one} {name}\n" for name, one in entries.items()))
    return lost


def _listed(path: Path) -> dict[str, str]:
    """Which file each name of a directory was, when that was synced last."""
    if not path.exists():
        return {}
    lines = [line.split(" ", 1) for line in path.read_text().splitlines()]
    return {name: file_id for file_id, name in lines}


def _id(path: Path) -> str:
    """What the library calls a file: its inode, and when that was made, for numbers of inodes come again."""
    buffer = ctypes.create_string_buffer(256)
    if _LIBC.statx(_AT_FDCWD, os.fsencode(path), _NO_FOLLOW, _BASIC_AND_BIRTH, buffer):
        raise OSError(ctypes.get_errno(), f"statx {path}")
    (inode,) = struct.unpack_from("<Q", buffer, 32)
    seconds, nanoseconds = struct.unpack_from("<qI", buffer, 80)
    return f"{inode}.{seconds}.{nanoseconds}"
