"""`rt systemd` writes units that systemd accepts, and the commands of the units run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from service_manager import ServiceManager

from rt.cli.commands.deployment import UNITS
from rt.cli.main import main
from sequencer.config.restart_policy import ExitStatus, RestartTimes
from sequencer.ipc.silence import HUNG_S
from sequencer.node.heartbeats import START_S_MAX
from sequencer.node.supervisor import COMMANDS

HELM = Path(__file__).parents[2] / "helm"

KEYS = frozenset(
    [
        *("Description", "After", "Wants", "StartLimitIntervalSec", "Type", "DynamicUser", "User", "Group"),
        *("UMask", "EnvironmentFile", "ExecStart", "Restart", "RestartSec", "RestartPreventExitStatus"),
        *("SuccessExitStatus", "KillMode", "TimeoutStopSec", "LimitNOFILE", "NoNewPrivileges"),
        *("CapabilityBoundingSet", "ProtectSystem", "ProtectHome", "ReadWritePaths", "PrivateTmp"),
        *("PrivateDevices", "ProtectControlGroups", "ProtectKernelModules", "ProtectKernelTunables"),
        *("RestrictSUIDSGID", "LockPersonality", "WantedBy"),
        *("NotifyAccess", "TimeoutStartSec", "WatchdogSec", "WatchdogSignal"),
    ]
)
"""Keys that the units use, all known to systemd 247. That is the version of the oldest supported Debian."""


@pytest.fixture
def units(tmp_path: Path) -> dict[str, Path]:
    assert main(["systemd", "--out", str(tmp_path / "units")]) == 0
    return {name: tmp_path / "units" / file for name, (file, _) in UNITS.items()}


def settings(unit: Path) -> dict[str, str]:
    lines = [line for line in unit.read_text().splitlines() if line and line[0] not in "#["]
    pairs = dict(line.split("=", 1) for line in lines)
    assert len(pairs) == len(lines), "no key twice"
    return pairs


def test_units_have_known_keys_only(units: dict[str, Path]) -> None:
    for unit in units.values():
        assert settings(unit).keys() <= KEYS


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", UNITS)
def test_unit_passes_systemd_analyze_verify(units: dict[str, Path], name: str) -> None:
    unit = units[name]
    instance = unit.with_name(unit.name.replace("@.", "@feed1."))
    if instance != unit:
        instance.symlink_to(unit)
    command = ["systemd-analyze", "verify", "--man=no", str(instance)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    # systemd also loads other units of this machine, which may have problems of their own.
    own = [line for line in result.stderr.splitlines() if instance.name in line or str(unit) in line]
    assert own == []


def test_node_unit_has_no_restart_after_misuse_or_divergence_and_enough_stop_time(
    units: dict[str, Path],
) -> None:
    found = settings(units["node"])
    statuses = {int(word) for word in found["RestartPreventExitStatus"].split()}
    assert statuses == {ExitStatus.MISUSED, ExitStatus.DIVERGED}
    assert int(found["TimeoutStopSec"]) > len(COMMANDS) * RestartTimes().stop_s
    assert int(found["TimeoutStartSec"]) == START_S_MAX


def test_watchdog_timeout_of_units_equals_kubernetes_liveness_timeout(units: dict[str, Path]) -> None:
    probe = yaml.safe_load((HELM / "values.yaml").read_text())["livenessProbe"]
    patience_s = probe["periodSeconds"] * probe["failureThreshold"]
    assert {int(settings(unit)["WatchdogSec"]) for unit in units.values()} == {patience_s}
    assert patience_s > 10 * HUNG_S, "a short stall is no hang"


def test_changed_unit_is_replaced_only_with_force(
    units: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    units["node"].write_text("mine")
    out = str(units["node"].parent)
    assert main(["systemd", "--out", out]) == 1
    assert "--force replaces it" in capsys.readouterr().err
    assert main(["systemd", "--out", out, "--unit", "push"]) == 0
    assert units["node"].read_text() == "mine"
    assert main(["systemd", "--out", out, "--force"]) == 0
    assert units["node"].read_text() != "mine"


def test_python_path_with_space_exits_with_2_and_writes_no_units(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "with space" / "bin" / "python"))
    assert main(["systemd", "--out", str(tmp_path / "units")]) == 2
    assert "with such a path" in capsys.readouterr().err
    assert not (tmp_path / "units").exists()


def started(unit: Path, variables: dict[str, str], root: Path) -> subprocess.Popen[str]:
    """Start the command of the unit, with directories below `root` instead of the machine's."""
    line = settings(unit)["ExecStart"]
    line = re.sub(r"/etc/rt", str(root), line)
    words = [variables[word[2:-1]] if word.startswith("${") else word for word in shlex.split(line)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RT_")}
    return subprocess.Popen(
        words, env={**environment, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
def test_push_and_pull_units_run_until_stopped_and_exit_with_success_status(
    units: dict[str, Path], tmp_path: Path
) -> None:
    """No node answers. With a wrong option or variable, the command would end with status 2 before it logs
    that.
    """
    (pki := tmp_path / "pki").mkdir()
    assert main(["certs", "init", str(pki)]) == 0
    for name, role in (("push", "publisher"), ("pull", "subscriber")):
        issue = ["certs", "issue", str(pki), "--stream", "trades", "--role", role, "--name", name]
        assert main(issue) == 0
        (tmp_path / name).mkdir()
        variables = {
            "DIRECTORY": str(tmp_path / name),
            f"RT_{name.upper()}_STREAM": "trades",
            "RT_ENDPOINTS": "127.0.0.1:1",
            "RT_CA": str(pki / "ca.crt"),
            "RT_CERT": str(pki / f"{name}.crt"),
            "RT_KEY": str(pki / f"{name}.key"),
        }
        if name == "push":
            fed = ["pub", "--path", str(tmp_path / name), "--stream", "trades", "--name", name, "--quiet"]
            source = tmp_path / "one"
            source.write_text("one\n")
            assert main([*fed, str(source)]) == 0
        with ServiceManager() as systemd:
            process = started(units[name], {**variables, "NOTIFY_SOCKET": systemd.name}, tmp_path)
            try:
                assert process.stdout is not None
                assert any("127.0.0.1:1" in line for line in process.stdout), "it ended"
                process.send_signal(signal.SIGTERM)
                process.communicate()
            finally:
                process.kill()
                process.wait()
            assert systemd.read() == ["READY=1", "STOPPING=1"]
        assert process.returncode in map(int, settings(units[name])["SuccessExitStatus"].split())


@pytest.mark.slow
def test_node_unit_exits_with_2_if_its_settings_file_is_invalid(
    units: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "node.toml").write_text("unknown = 1\n")
    process = started(units["node"], {}, tmp_path)
    output, _ = process.communicate()
    assert (process.returncode, "unknown key" in output) == (ExitStatus.MISUSED, True), output
