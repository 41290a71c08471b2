"""The example in README, run as it stands: stopped, and gone on with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rt.log.columns import Message
from rt.objects import PersistedObjectSpace, SqliteStore

README = Path(__file__).parents[2] / "README.md"


def message(position: int) -> Message:
    return Message(position, 0, "feed", position, f"t{position % 2}", b"%d" % position)


def test_the_example_in_the_readme_goes_on_where_it_was(tmp_path: Path) -> None:
    section = README.read_text().split("\n## The object space\n")[1].split("\n## ")[0]
    program = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    asked: list[int] = []

    def messages(start: int) -> Iterator[Message]:
        asked.append(start)
        return map(message, range(start, start + 1500))

    for _ in range(2):
        exec(program, {"directory": str(tmp_path), "messages": messages})  # noqa: S102 - our README
    assert asked == [0, 1500]
    with SqliteStore(tmp_path / "state.db") as store:
        space = PersistedObjectSpace()
        space.load(store.reader())
        assert space.get_value("position").value == 3000
        assert space.get_dictionary("counts", keys=str, values=int) == {"t0": 1500, "t1": 1500}
        assert list(space.get_queue("window")) == [("t1", b"2997"), ("t0", b"2998"), ("t1", b"2999")]
