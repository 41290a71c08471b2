"""Writes the files that a command makes for its user to edit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import click

from rt.errors import RtError


def write_new_files(contents: Mapping[Path, bytes], *, force: bool) -> None:
    """Write each file, and make its directory if needed. Without `force` no file that differs is replaced.

    Report on stderr which files were written. If `rt.RtError` is raised, nothing was written. Also raises
    `OSError`.
    """
    for path, content in contents.items():
        if os.path.lexists(path) and not path.is_file():
            raise RtError("not a regular file", where=path, hint="Move it away, or write to another place.")
        if not force and path.exists() and path.read_bytes() != content:
            raise RtError("the file exists and differs", where=path, hint="--force replaces it.")
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        click.echo(f"Wrote {path}.", err=True)
