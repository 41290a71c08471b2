"""Makes the table of values in the chart's README from values.yaml, with the text after `# --` above each
value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

BEGIN: Final = "<!-- values: made of values.yaml by `pytest tests/helm/test_helm_readme.py --rewrite` -->\n"
END: Final = "<!-- end of values -->\n"
_MARK: Final = "# -- "


def table(path: Path) -> str:
    """Return the table, in the order of the file. Raise ValueError for a value without a description."""
    lines = path.read_text().splitlines()
    root = yaml.compose(path.read_text())
    assert isinstance(root, yaml.MappingNode)
    rows = [f"| `{key}` | {default} | {text} |" for key, default, text in _rows(root, lines, "")]
    return "\n".join(["| value | default | |", "|---|---|---|", *rows, ""])


def with_table(readme: str, values: Path) -> str:
    """Return the README with a new table."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table(values) + END + after


def _rows(node: yaml.MappingNode, lines: list[str], prefix: str) -> Iterator[tuple[str, str, str]]:
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        text = _description(lines, key.start_mark.line)
        is_group = isinstance(value, yaml.MappingNode) and value.value
        described = is_group and any(_description(lines, inner.start_mark.line) for inner, _ in value.value)
        if text:
            yield path, "" if described else f"`{_default(value)}`", text.replace("|", r"\|")
        elif not is_group:
            raise ValueError(f"{path} in line {key.start_mark.line + 1} has no description")
        if described or (is_group and not text):
            assert isinstance(value, yaml.MappingNode)
            yield from _rows(value, lines, f"{path}.")


def _description(lines: list[str], line: int) -> str:
    """Return the comment directly above a line, joined to one line; empty if it is no description."""
    said: list[str] = []
    for text in map(str.strip, reversed(lines[:line])):
        if not text.startswith("# "):
            return ""
        said.insert(0, text.removeprefix(_MARK).removeprefix("# "))
        if text.startswith(_MARK):
            return " ".join(said)
    return ""


def _default(node: yaml.Node) -> str:
    value: Any = yaml.SafeLoader("").construct_object(node, deep=True)
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else "see values.yaml"
