"""Processes do not import modules they do not need: these cost hundreds of ms and tens of MB each."""

from __future__ import annotations

import subprocess
import sys

import pytest

NETWORK = ("grpc", "google.protobuf", "rt.v1")


@pytest.mark.parametrize(
    ("imported", "unused"),
    [
        ("rt", NETWORK),
        ("rt.net.tls", NETWORK),
        ("rt.net.dev_pki", NETWORK),
        ("rt.net.grpc_options", NETWORK),
        ("rt.streams", ("rt.streams.simulate",)),
        ("rt.cli.main", (*NETWORK, "numpy")),
        ("sequencer.node.cli", (*NETWORK, "numpy", "aiohttp")),
        ("sequencer.localcluster.node_main", (*NETWORK, "numpy")),
        ("replicator.cli.push", ("numpy", "aiohttp")),
        ("replicator.cli.pull", ("numpy", "aiohttp")),
        ("sequencer.control.process", ("numpy", "aiohttp")),
        ("sequencer.data.process", ("aiohttp",)),
    ],
)
def test_importing_module_does_not_import_unneeded_modules(imported: str, unused: tuple[str, ...]) -> None:
    program = f"import sys, {imported}; print(*sorted(set({unused!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_object_space_names_are_imported_without_postgres_extra() -> None:
    program = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from rt.objects import *\n"
        "import rt\n"
        "SqliteStore, MemoryStore\n"
        "try:\n    from rt.objects import PostgresStore\n"
        "except rt.RtError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'rt-transport[postgres]'" in done.stdout
