"""The command `rt`: loading of subcommands, exit statuses, standard streams and logging."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import ModuleType

import click
import pytest
from click.testing import CliRunner, Result

import rt
from rt.cli import main as main_module
from rt.cli.main import COMMANDS_GROUP, cli, main
from rt.cli.signals import Interrupted
from rt.errors import RtError


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, arguments, env=environment)


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that installs commands: `services(name=callback, …)`. A command whose callback is
    None cannot be imported.
    """

    def install(**callbacks: Callable[[], object] | None) -> None:
        module = ModuleType("services_of_test")
        monkeypatch.setitem(sys.modules, "services_of_test", module)
        found = [EntryPoint("certs", "rt.cli.commands.certs:certs", COMMANDS_GROUP)]
        for name, callback in callbacks.items():
            if callback is not None:
                setattr(module, name, click.command(name, help=f"Help of {name}.")(callback))
            found.append(EntryPoint(name, f"services_of_test:{name}", COMMANDS_GROUP))
        monkeypatch.setattr(main_module, "entry_points", lambda **wanted: EntryPoints(found).select(**wanted))

    return install


@pytest.fixture(autouse=True)
def _logging_is_put_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_help_lists_commands_with_description() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert result.stderr == ""
    for name in ("certs", "log", "pub", "sub"):
        (line,) = [line for line in result.stdout.splitlines() if line.split()[:1] == [name]]
        assert len(line.split()) > 2
        assert "not available" not in line


def test_broken_command_leaves_other_commands_usable(services: Callable[..., None]) -> None:
    services(broken=None, whole=lambda: click.echo("done"))
    result = run("--help")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "broken" in result.stdout
    assert "Help of whole." in result.stdout
    assert run("whole").stdout == "done\n"
    assert run("certs", "--help").exit_code == 0


@pytest.mark.parametrize("arguments", [[], ["--help"], ["deep", "--option", "7"]])
def test_broken_command_reports_load_error_when_called(
    services: Callable[..., None], arguments: list[str]
) -> None:
    services(broken=None)
    result = run("broken", *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "rt: the command 'broken' cannot be loaded" in result.stderr
    assert "services_of_test" in result.stderr


def test_entry_point_without_click_command_is_reported(
    services: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    services(broken=None)
    monkeypatch.setattr(sys.modules["services_of_test"], "broken", 7, raising=False)
    assert "is not a click command" in run("broken").stderr


def raising(error: BaseException) -> Callable[[], object]:
    def callback() -> None:
        raise error

    return callback


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (RtError("it failed", where="here", hint="Fix it."), 1, "rt: it failed (at here). Fix it.\n"),
        (RtError("hostile \x1b[31m"), 1, "rt: hostile \\x1b[31m\n"),
        (ValueError("position 9 is beyond the end"), 2, "rt: position 9 is beyond the end\n"),
        (FileNotFoundError(2, "No such file", "x"), 1, "rt: [Errno 2] No such file: 'x'\n"),
        (KeyboardInterrupt(), 130, ""),
        (Interrupted(15), 143, ""),
        (BrokenPipeError(), 0, ""),
    ],
)
def test_errors_print_at_most_one_line_and_set_exit_status(
    services: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    text: str,
) -> None:
    services(work=raising(error))
    assert main(["work"]) == status
    assert capfd.readouterr().err == text


def test_assertion_error_is_propagated(services: Callable[..., None]) -> None:
    services(work=raising(AssertionError("a defect")))
    with pytest.raises(AssertionError, match="a defect"):
        main(["work"])


@pytest.mark.parametrize("arguments", [["nope"], ["--nope"], ["sub", "--nope"], ["pub"], ["log", "verify"]])
def test_invalid_arguments_exit_with_2(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "Usage: rt" in err


@pytest.mark.parametrize(
    ("redirected", "expected"),
    [
        ("--version >&-", "stdin or stdout is closed: got Bad file descriptor"),
        ("--help >/dev/full", "cannot write to stdout: got No space left on device"),
        ("certs show ca.crt >&-", "stdin or stdout is closed: got Bad file descriptor"),
        ("certs show ca.crt >/dev/full", "cannot write to stdout: got No space left on device"),
        ("sub data/s/sessions/p >&-", "stdin or stdout is closed: got Bad file descriptor"),
        ("sub data/s/sessions/p >/dev/full", "cannot write to stdout: got No space left on device"),
        ("log stat data/s/sessions/p >&-", "stdin or stdout is closed: got Bad file descriptor"),
        ("pub --path d --stream s --quiet <&-", "stdin or stdout is closed: got Bad file descriptor"),
    ],
)
def test_closed_or_full_standard_stream_is_reported_in_one_line(
    redirected: str, expected: str, tmp_path: Path
) -> None:
    assert run("certs", "init", str(tmp_path)).exit_code == 0
    with rt.Publisher(tmp_path / "data", "s", publisher_id="p") as publisher:
        publisher.publish(b"1")
    ended = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} -m rt {redirected}"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", f"rt: {expected}\n")


def test_opened_files_never_get_descriptor_of_closed_stderr(tmp_path: Path) -> None:
    program = "import os; from rt.cli.main import main; main(['--version']); print(os.open('/', os.O_RDONLY))"
    command = ["/bin/sh", "-c", f'{sys.executable} -c "{program}" 2>&- <&-']
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert int(ended.stdout.split()[-1]) > 2


def test_version_option_prints_package_version() -> None:
    assert run("--version").stdout == f"rt {rt.__version__}\n"


def log_something() -> None:
    logger = logging.getLogger("rt.test")
    logger.warning("disk_full path=%s", "/x")
    logger.info("quiet thing")
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("it failed")


def test_logs_are_written_to_stderr_as_text(services: Callable[..., None]) -> None:
    services(work=log_something)
    result = run("work")
    assert result.stdout == ""
    first, second, *traceback = result.stderr.splitlines()
    assert first.endswith("Z warning rt.test disk_full path=/x")
    assert second.endswith("Z error rt.test it failed")
    assert traceback[-1] == "ValueError: why"


def test_logs_are_written_to_stderr_as_one_json_object_per_line(services: Callable[..., None]) -> None:
    services(work=log_something)
    result = run("--log-format", "json", "--log-level", "INFO", "work")
    entries = [json.loads(line) for line in result.stderr.splitlines()]
    assert [(entry["level"], entry["event"], entry["message"]) for entry in entries] == [
        ("warning", "disk_full", "disk_full path=/x"),
        ("info", None, "quiet thing"),
        ("error", None, "it failed"),
    ]
    assert entries[0]["logger"] == "rt.test"
    assert entries[0]["time"].endswith("Z")
    assert "ValueError: why" in entries[2]["exception"]


def test_log_level_is_read_from_environment_unless_given_as_option(services: Callable[..., None]) -> None:
    services(work=log_something)
    assert "quiet thing" not in run("work").stderr
    assert "quiet thing" in run("work", RT_LOG_LEVEL="info").stderr
    assert "quiet thing" not in run("--log-level", "error", "work", RT_LOG_LEVEL="info").stderr


def test_failure_is_logged_with_traceback_at_debug_level(services: Callable[..., None]) -> None:
    services(work=raising(RtError("it failed")))
    assert "Traceback" not in run("work").stderr
    assert "Traceback" in run("--log-level", "debug", "work").stderr


@pytest.mark.slow
def test_importing_main_loads_no_subcommand() -> None:
    code = (
        "import sys, rt.cli.main; print(*sorted(name for name in sys.modules if name.startswith('rt.cli.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {
        *("rt.cli.formats", "rt.cli.formats.console", "rt.cli.formats.tables"),
        *("rt.cli.logging_setup", "rt.cli.main", "rt.cli.options", "rt.cli.signals"),
        "rt.cli.standard_streams",
    }


@pytest.mark.slow
def test_package_runs_as_module() -> None:
    command = [sys.executable, "-m", "rt", "log", "stat", "/"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("rt: no log directory (at /).")
