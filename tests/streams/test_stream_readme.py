"""The example in README: its program loads, and does what it says with queues in memory."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rt.streams import MemoryQueues, StreamProvider
from rt.testing import virtual_time

README = Path(__file__).parents[2] / "README.md"


def test_the_example_of_readme_hands_out_what_is_published(capsys: pytest.CaptureFixture[str]) -> None:
    section = README.read_text().split("\n## Streams\n")[1].split("\n## ")[0]
    program = section.split("```python\n")[1].split("```")[0].replace("asyncio.run(serve())", "")
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102 - our README
    assert asyncio.iscoroutinefunction(names["serve"])

    async def main() -> None:
        provider = StreamProvider("pricing", MemoryQueues(1, first=0))
        provider.implicit("pricing", "trades/*", names["Pricing"])
        async with provider:
            await provider.stream("trades", "AAPL").publish([b"12.50"])
            await asyncio.sleep(5)

    virtual_time.run(main())
    assert capsys.readouterr().out == "trades/AAPL 0 b'12.50'\n"
