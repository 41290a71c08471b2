"""The program in docs/event-time.md runs unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "event-time.md").read_text()


def test_program_of_event_time_page_runs_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), {})  # noqa: S102 - our own page
