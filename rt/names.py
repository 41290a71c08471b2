"""Names of streams, sessions and dedup groups: which are allowed, and how a session is named.

The alphabet leaves out everything with a meaning in a path, a URI or a log line, so that a checked name can
stand in each of them as it is. `~` is outside it: it joins a certificate's name and a suffix into a session
name, `feed1~backup`, and a dedup id of a certificate and a suffix into one of many dedup ids.
"""

from __future__ import annotations

import re
from typing import NewType

from rt.errors import InvalidName

Position = NewType("Position", int)
"""Ordinal of a message in the merged stream, from 0, dense."""
Number = NewType("Number", int)
"""Ordinal of a message in its session."""
Offset = NewType("Offset", int)
"""A byte place in a segment."""

NAME_BYTES_MAX = 128
SESSION_NAME_BYTES_MAX = 255
"""A session's directory carries its name, and file systems take no longer one."""
LEASE_NAME_BYTES_MAX = NAME_BYTES_MAX + len("/host/") + SESSION_NAME_BYTES_MAX
"""Whatever group, host and queue are called, `rt.streams` names leases after them."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_LEASE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9][A-Za-z0-9._~-]*)+", re.ASCII)
_HINT = "Use 1 to 128 letters, digits, '.', '_' or '-', beginning with a letter or digit."


def is_name(text: str) -> bool:
    """Whether `text` is a name."""
    return _NAME.fullmatch(text) is not None


def check_name(text: str, *, kind: str) -> str:
    """Return `text`; `rt.InvalidName` if it is no name. `kind` says in the error what it names."""
    if not is_name(text):
        raise InvalidName(f"not a name for a {kind}", got=repr(text)[:200], hint=_HINT)
    return text


def check_session_name(text: str) -> str:
    """Return `text`, a name or two names joined by `~`, of up to 255 bytes; `rt.InvalidName` otherwise."""
    return _check_joined(text, "session")


def session_owner(session: str) -> str:
    """The name that a certificate must carry to push this session: what stands before `~`."""
    return session.partition("~")[0]


def check_dedup_id(text: str) -> str:
    """Return `text`, which is made like a session's name; `rt.InvalidName` otherwise."""
    return _check_joined(text, "dedup id")


def dedup_owner(dedup_id: str) -> str:
    """The dedup id that a certificate must carry to use this one: what stands before `~`."""
    return dedup_id.partition("~")[0]


def check_lease_name(text: str) -> str:
    """Return `text`: a group's name and more behind it, each behind a slash; `rt.InvalidName` otherwise."""
    if len(text) > LEASE_NAME_BYTES_MAX or _LEASE_NAME.fullmatch(text) is None:
        hint = f"As in group/queue/q1: letters, digits, '.', '_', '-', '~'; at most {LEASE_NAME_BYTES_MAX}."
        raise InvalidName("not a name for a lease", got=repr(text)[:200], hint=hint)
    return text


def lease_group(name: str) -> str:
    """The group that a certificate must carry to hold this lease: what stands before the first slash."""
    return name.partition("/")[0]


def check_lease_owner(text: str) -> str:
    """Return `text`, which is made like a session's name; `rt.InvalidName` otherwise."""
    return _check_joined(text, "lease's owner")


def _check_joined(text: str, kind: str) -> str:
    owner, tilde, suffix = text.partition("~")
    if not is_name(owner) or (tilde and not is_name(suffix)) or len(text) > SESSION_NAME_BYTES_MAX:
        hint = f"{_HINT} A suffix may follow '~'; at most {SESSION_NAME_BYTES_MAX} in all."
        raise InvalidName(f"not a name for a {kind}", got=repr(text)[:200], hint=hint)
    return text


def name_from_host(hostname: str) -> str:
    """The nearest name to a host's: what is outside the alphabet becomes `-`."""
    text = re.sub(r"[^A-Za-z0-9._-]", "-", hostname)[:NAME_BYTES_MAX].lstrip("._-")
    return text or "localhost"
