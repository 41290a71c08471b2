"""Relative links and anchors in the pages resolve, and the docs site builds without warnings."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("", "docs/**/", "examples/", "helm/")
PAGES = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in ROOT.glob(f"{folder}*.md"))

_CODE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_REFERENCE = re.compile(r"^ *\[[^\]]+\]: +(\S+)", re.MULTILINE)
_ELEMENT = re.compile(r'<(?:a|img)\b[^>]*?(?:href|src)="([^"]+)"')
_ID = re.compile(r'\b(?:id|name)="([^"]+)"')


def prose(page: str) -> str:
    """Return a page without code blocks and comments."""
    return _COMMENT.sub("", _CODE.sub("", (ROOT / page).read_text(encoding="utf-8")))


def links(page: str) -> Iterator[str]:
    text = _SPAN.sub("`code`", prose(page))
    for pattern in (_LINK, _REFERENCE, _ELEMENT):
        yield from pattern.findall(text)


def anchors(page: str) -> set[str]:
    """Return the anchors that GitHub and the docs site give to headings. For equal headings, return the first
    one.
    """
    text = prose(page)
    return {slug(heading) for heading in _HEADING.findall(text)} | set(_ID.findall(text))


def slug(heading: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def problems(page: str) -> Iterator[str]:
    for link in links(page):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        path, _, anchor = link.partition("#")
        target = Path(os.path.normpath(ROOT / page / ".." / path)) if path else ROOT / page
        if not target.exists():
            yield f"{page}: {link}: no such file"
        elif not target.is_relative_to(ROOT):
            yield f"{page}: {link}: outside of the repository"
        elif anchor and anchor not in anchors(str(target.relative_to(ROOT))):
            yield f"{page}: {link}: no such heading"


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_of_page_resolve(page: str) -> None:
    assert list(problems(page)) == []


def test_link_check_reports_broken_links_and_anchors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        '# A `b-c`, d & e\n[x](#a-b-c-d--e) [x](#no) ![x](no.svg) <a href="two.md#One">\n```\n[x](no)\n```\n'
    )
    (tmp_path / "one.md").write_text(text)
    (tmp_path / "two.md").write_text("# One\n`[x](no)`\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)

    assert list(problems("two.md")) == []
    assert [problem.split(": ")[1] for problem in problems("one.md")] == ["#no", "no.svg", "two.md#One"]


@pytest.mark.slow
def test_docs_site_builds_without_warnings_or_external_fonts(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install --group docs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "https_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").glob("*.html"))
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= {path.stem for path in pages}
    for path in pages:
        assert "fonts.googleapis" not in path.read_text(encoding="utf-8")
