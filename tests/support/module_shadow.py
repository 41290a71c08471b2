"""Functions of `time` and the like replaced for one module, so that threads which other tests left go on."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def shadow(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, **replaced: Any) -> None:
    """Have `module` alone find these functions in what it imported as `name`."""
    real = vars(getattr(module, name))
    monkeypatch.setattr(module, name, SimpleNamespace(**{**real, **replaced}))
