"""The programs in docs/streams.md without nodes run unchanged; the others load."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "streams.md").read_text()


def test_first_program_of_page_prints_published_event_and_the_others_load(
    capsys: pytest.CaptureFixture[str],
) -> None:
    program, *others = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102 - our own page
    assert capsys.readouterr().out == "trades/AAPL b'12.50'\n"

    for other in others:
        exec(other, names)  # noqa: S102 - our own page

    (host,) = re.findall(r"```python cluster\n(.*?)```", PAGE, re.DOTALL)
    exec(host.replace("asyncio.run(serve())", ""), names)  # noqa: S102 - our own page
    assert asyncio.iscoroutinefunction(names["serve"])
