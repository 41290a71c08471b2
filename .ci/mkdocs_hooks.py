"""What the docs site needs beyond Markdown as GitHub reads it.

The language of a code block may be followed by marks for the tests, as in `python cluster`. They are dropped.
A link to a file outside of docs/ is shown as text, as the site has no such page. The navigation has the pages
of `SECTIONS` that exist, and then all others.
"""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
SECTIONS = {
    "Start": ("index", "quickstart", "concepts", "guarantees", "glossary"),
    "Develop": ("python-api", "streams", "queries", "operators", "object-space", "spark"),
    "Operate": ("operations", "kubernetes", "security", "configuration", "cli", "rest-api", "metrics"),
    "On call": ("alerts-runbook", "disaster-recovery"),
    "Internals": ("architecture", "raft", "formats", "benchmarks", "code-map"),
}

_FENCE = re.compile(r"^( *(?:```+|~~~+) *\w+)[ \t]+\S.*$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\((\.\./[^)#\s]*)(?:#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Make the navigation."""
    there = {path.stem: path.name for path in sorted(DOCS.glob("*.md"))}
    sections = [
        {title: [there.pop(name) for name in names if name in there]} for title, names in SECTIONS.items()
    ]
    config["nav"] = [section for section in sections if any(section.values())] + list(there.values())
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Drop the marks of code blocks, and the links out of docs/."""
    return _LINK.sub(lambda found: found[1], _FENCE.sub(r"\1", markdown))
