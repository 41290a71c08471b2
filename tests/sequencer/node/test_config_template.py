"""`rt node --init`: the file contains every setting with its default, and `rt node` reads it."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

from rt.cli.main import main
from sequencer.config.config import NodeConfig
from sequencer.config.config_loader import KEYS, build_config, from_file
from sequencer.config.config_template import DEFAULTS, REQUIRED, SECTIONS, config_template
from sequencer.state.configuration import Configuration


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("RT_")]:
        monkeypatch.delenv(variable)


def loaded(text: str, directory: Path) -> NodeConfig:
    path = directory / "node.toml"
    path.write_text(text)
    return build_config(from_file(str(path)))


def test_template_contains_every_setting_once() -> None:
    known = {*KEYS}
    assert {key for settings in SECTIONS.values() for key in settings} | {"members"} == known
    assert REQUIRED.keys() | DEFAULTS.keys() == known
    text = config_template({})
    for key in known - {"members"}:
        assert len(re.findall(rf"^#?{key} = ", text, re.MULTILINE)) == 1, key


def test_commented_settings_of_template_are_the_defaults(tmp_path: Path) -> None:
    text = config_template({})
    plain = loaded(text, tmp_path)
    uncommented = loaded(re.sub(r"^#(\w+ = )", r"\1", text, flags=re.MULTILINE), tmp_path)
    shared = Configuration()
    for key in DEFAULTS:
        expected = getattr(shared, key) if getattr(plain, key) is None else getattr(plain, key)
        assert getattr(uncommented, key) == expected, key


def test_options_and_variables_become_values_of_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RT_MEMBERS", "n1=127.0.0.1:1,127.0.0.1:2")
    monkeypatch.setenv("RT_RETENTION_BYTES", "90Gi")
    monkeypatch.chdir(tmp_path)
    assert main(["node", "--init", "--name", "n1", "--directory", "data", "--rest-port", "0"]) == 0
    found = tomllib.loads(capsys.readouterr().out)
    assert found["members"] == {"n1": {"raft": "127.0.0.1:1", "data": "127.0.0.1:2"}}
    assert (found["directory"], found["rest_port"]) == (str(tmp_path / "data"), 0)
    assert found["retention_bytes"] == 90 << 30
    assert found["stream"] == REQUIRED["stream"]


def test_invalid_value_or_force_without_init_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["node", "--init", "--rest-port", "x"]) == 2
    assert "invalid port (at --rest-port)" in capsys.readouterr().err
    assert main(["node", "--force"]) == 2
    assert "need --init" in capsys.readouterr().err


def test_differing_output_file_is_replaced_only_with_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "n1.toml"
    assert main(["node", "--init", "--out", str(out)]) == 0
    assert main(["node", "--init", "--out", str(out)]) == 0, "it is the same"
    out.write_text("mine")
    assert main(["node", "--init", "--out", str(out)]) == 1
    assert "--force replaces it" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main(["node", "--init", "--out", str(out), "--force"]) == 0
    assert out.read_text() == config_template({})


@pytest.mark.parametrize("kind", ["fifo", "link to nothing"])
def test_fifo_or_dangling_link_as_output_file_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    out = tmp_path / "node.toml"
    if kind == "fifo":
        os.mkfifo(out)
    else:
        out.symlink_to(tmp_path / "none")
    assert main(["node", "--init", "--out", str(out), "--force"]) == 1
    assert f"not a regular file (at {out})" in capsys.readouterr().err
