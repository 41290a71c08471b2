"""What a process does not need, it does not import: hundreds of milliseconds and tens of MB each."""

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
def test_what_a_process_does_not_need_is_not_imported(imported: str, unused: tuple[str, ...]) -> None:
    program = f"import sys, {imported}; print(*sorted(set({unused!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_all_names_of_the_object_space_can_be_imported_without_the_extra_postgres() -> None:
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
