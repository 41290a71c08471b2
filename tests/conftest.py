"""What all tests share: the profile of hypothesis, `--rewrite`, scripts of decisions and golden bytes."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from scripts import Handler, replay
from xdist_schedule import Scheduling, start_order

from rt.cli import logging_setup
from rt.net import memory_guard
from sequencer.localcluster.processes import nothing_left

# Programs that tests start import `chaos` and `simulation` as the tests do.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent / "support"), os.environ.get("PYTHONPATH")])
)
# Otherwise numpy would start a thread for each processor in each of hundreds of processes.
os.environ["OPENBLAS_NUM_THREADS"] = "1"


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell started pytest in the background. The processes that tests start would ignore interrupts, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" not in os.environ:
    # Push clients outlive their publishers and retry nodes that a test has removed. They are killed when all
    # workers have ended and this process ends: no test starts them again then.
    _run = contextlib.ExitStack()
    _run.enter_context(nothing_left())
    os.environ["XDG_CONFIG_HOME"] = _run.enter_context(tempfile.TemporaryDirectory(prefix="rt_"))
    atexit.register(_run.close)

# The tests must not depend on settings of the user.
for _name in ("URL", "ENDPOINTS", "STREAM", "PATH", "TLS_DIR", "CA", "CERT", "KEY", "PROFILE"):
    os.environ.pop(f"RT_{_name}", None)
_ENVIRONMENT = dict(os.environ)
_resident_bytes = memory_guard.resident_bytes
_threads_before: set[int | None] = set()
TESTDATA = Path(__file__).parent / "testdata"

# Random draws that happen to be slow or large fail no test.
_CHANCE = [
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.large_base_example,
    HealthCheck.filter_too_much,
]
settings.register_profile(
    "rt", deadline=None, max_examples=60, suppress_health_check=_CHANCE, print_blob=True
)
settings.register_profile("rt-ci", settings.get_profile("rt"), derandomize=True)
settings.load_profile("rt-ci" if os.environ.get("CI") == "true" else "rt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what the code says now into tests/testdata; then read the diff",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> tuple[int, bool]:
        return start_order(item.nodeid, is_slow=item.get_closest_marker("slow") is not None)

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Freeze the collected objects, which stay to the end. The garbage collector then need not scan them
    again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_runtest_setup() -> None:
    """A node in this process counts only the memory that the test adds, not that of pytest and other tests.

    A command in this process writes no records of threads that existed before the test.
    """
    held = _resident_bytes()
    memory_guard.resident_bytes = lambda: max(0, _resident_bytes() - held)
    _threads_before.clear()
    _threads_before.update(thread.ident for thread in threading.enumerate())
    _threads_before.discard(threading.get_ident())


def pytest_runtest_teardown() -> None:
    """Remove the logging setup of a command that ran in this process, so that it does not affect later
    tests.
    """
    root = logging.getLogger()
    for handler in [one for one in root.handlers if type(one).__module__ == "rt.cli.logging_setup"]:
        root.removeHandler(handler)
        root.setLevel(logging.WARNING)


class _StderrHandler(logging_setup._StderrHandler):
    def filter(self, record: logging.LogRecord) -> bool | logging.LogRecord:
        return record.thread not in _threads_before and super().filter(record)


logging_setup._StderrHandler = _StderrHandler  # type: ignore[misc]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """See support/xdist_schedule.py."""
    return Scheduling(config, log)


@pytest.fixture
def no_pushes() -> None:
    """Wait until the pushes of earlier tests have ended, for tests that count this process's threads or
    descriptors.
    """
    while any(thread.name == "rt-pushing" for thread in threading.enumerate()):
        time.sleep(0.05)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """`logged("sequencer")`: the messages of that logger and its children, from this process.

    `caplog` itself may contain lines from a push process of an earlier test.
    """

    def messages(name: str) -> list[str]:
        own = (record for record in caplog.records if record.process == os.getpid())
        return [record.getMessage() for record in own if f"{record.name}.".startswith(f"{name}.")]

    return messages


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A PostgreSQL server that the tests of this process share, each with schemas of its own."""
    from postgres_server import PostgresServer, missing

    if (why := missing()) is not None:
        pytest.skip(why)
    server = PostgresServer(_ENVIRONMENT)
    yield server
    server.close()


@pytest.fixture
def run_script(request: pytest.FixtureRequest) -> Callable[[str | Path, Handler], None]:
    """`run_script("area/name.txt", answer)`: replay a script of tests/testdata; see support/scripts.py."""

    def run(name: str | Path, answer: Handler) -> None:
        replay(TESTDATA / name, answer, rewrite=request.config.getoption("--rewrite"))

    return run


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., bytes]:
    """`golden("area/name", content, text)`: the bytes of name.bin, which must equal `content`, beside
    name.txt.

    With `exact=False` the bytes may differ and mean the same: the test decodes the bytes that it gets.
    """

    def check(name: str, content: bytes, text: str, *, exact: bool = True) -> bytes:
        binary, readable = TESTDATA / f"{name}.bin", TESTDATA / f"{name}.txt"
        if request.config.getoption("--rewrite"):
            binary.parent.mkdir(parents=True, exist_ok=True)
            binary.write_bytes(content)
            readable.write_text(text)
        if exact:
            assert readable.read_text() == text
            assert binary.read_bytes() == content
        return binary.read_bytes()

    return check
