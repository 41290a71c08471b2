"""Names of streams, sessions, dedup ids and leases.

The alphabet has no character with a meaning in a path, a URI or a log line, so a checked name can be used
unescaped in each. `~` is outside it: it joins a certificate's name and a suffix into a session name
(`feed1~backup`), and a certificate's dedup id and a suffix into a dedup id.
"""

from __future__ import annotations

import re

from rt.errors import InvalidName

NAME_BYTES_MAX = 128
SESSION_NAME_BYTES_MAX = 255
"""A session's directory has the session's name, and file systems do not allow longer names."""
LEASE_NAME_BYTES_MAX = NAME_BYTES_MAX + len("/host/") + SESSION_NAME_BYTES_MAX
"""Enough for the lease names that `rt.streams` makes of any group, host and queue."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_LEASE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9][A-Za-z0-9._~-]*)+", re.ASCII)
_HINT = "Use 1 to 128 letters, digits, '.', '_' or '-', starting with a letter or digit."


def is_name(text: object) -> bool:
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def check_name(text: str, *, kind: str) -> str:
    """Return `text` if it is a name; else raise `rt.InvalidName`, with `kind` in the error text."""
    if not is_name(text):
        raise InvalidName(f"not a valid name for a {kind}", got=repr(text)[:200], hint=_HINT)
    return text


def check_session_name(text: str) -> str:
    """Return `text` if it is one or two names joined by `~`, up to 255 bytes; else raise `rt.InvalidName`."""
    return _check_joined(text, "session")


def session_owner(session: str) -> str:
    """The name that a certificate needs to push this session: the part before `~`."""
    return session.partition("~")[0]


def check_hold_name(text: str) -> str:
    """Return `text` if it is a subscriber's name, or a subscriber's name, `~` and a suffix, which names a
    group's position.
    """
    return _check_joined(text, "subscriber")


def check_dedup_id(text: str) -> str:
    """Return `text` if it has the form of a session name; else raise `rt.InvalidName`."""
    return _check_joined(text, "dedup id")


def dedup_owner(dedup_id: str) -> str:
    """The dedup id that a certificate needs to use this one: the part before `~`."""
    return dedup_id.partition("~")[0]


def check_lease_name(text: str) -> str:
    """Return `text` if it is a group name and parts after slashes; else raise `rt.InvalidName`."""
    if len(text) > LEASE_NAME_BYTES_MAX or _LEASE_NAME.fullmatch(text) is None:
        hint = (
            f"Example: group/queue/q1. Letters, digits, '.', '_', '-', '~'; at most {LEASE_NAME_BYTES_MAX}."
        )
        raise InvalidName("not a valid name for a lease", got=repr(text)[:200], hint=hint)
    return text


def lease_group(name: str) -> str:
    """The group that a certificate needs to hold this lease: the part before the first slash."""
    return name.partition("/")[0]


def check_lease_owner(text: str) -> str:
    """Return `text` if it has the form of a session name; else raise `rt.InvalidName`."""
    return _check_joined(text, "lease's owner")


def _parts(text: object) -> tuple[str, str, str]:
    return text.partition("~") if isinstance(text, str) else ("", "", "")


def _check_joined(text: str, kind: str) -> str:
    owner, tilde, suffix = _parts(text)
    if not is_name(owner) or (tilde and not is_name(suffix)) or len(text) > SESSION_NAME_BYTES_MAX:
        hint = f"{_HINT} A suffix may follow '~'; at most {SESSION_NAME_BYTES_MAX} in all."
        raise InvalidName(f"not a valid name for a {kind}", got=repr(text)[:200], hint=hint)
    return text


def name_from_host(hostname: str) -> str:
    """A valid name for a host: characters outside the alphabet become `-`."""
    text = re.sub(r"[^A-Za-z0-9._-]", "-", hostname)[:NAME_BYTES_MAX].lstrip("._-")
    return text or "localhost"
