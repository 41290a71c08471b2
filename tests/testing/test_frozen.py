"""Tests the helper `frozen`, which stops all processes of a group while a test copies their files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from frozen import descendants, frozen, is_still
from nodes_bench import wait_until

# The program starts only after its input can be opened. Until then the thread that starts it waits.
STARTS_A_PROGRAM = """
import os, sys

os.posix_spawn(
    "/bin/sleep", ["sleep", "600"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]
)
"""


@pytest.mark.slow
def test_frozen_stops_process_during_start_of_child_program(tmp_path: Path) -> None:
    fifo = tmp_path / "input"
    os.mkfifo(fifo)

    def begin() -> None:
        wait_until(lambda: all(is_still(pid) for pid in descendants(process.pid)), "the program is stopped")
        with open(fifo, "wb"):
            pass

    process = subprocess.Popen([sys.executable, "-c", STARTS_A_PROGRAM, str(fifo)], start_new_session=True)
    try:
        wait_until(lambda: descendants(process.pid), "the program is begun")
        beginning = threading.Thread(target=begin)
        beginning.start()
        with frozen(process.pid):
            assert is_still(process.pid)
        beginning.join()
        assert process.wait(60) == 0
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
