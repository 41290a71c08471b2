"""Replaces functions of `time` and the like in one module, not for threads left by other tests."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def shadow(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, **replaced: Any) -> None:
    """Replace functions of the module that `module` imported as `name`, for `module` only."""
    real = vars(getattr(module, name))
    monkeypatch.setattr(module, name, SimpleNamespace(**{**real, **replaced}))
