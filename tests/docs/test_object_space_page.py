"""The programs in docs/object-space.md run twice and continue from their checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from postgres_server import PostgresServer

from rt.objects import PersistedObjectSpace, PostgresStore, SqliteStore

PAGE = Path(__file__).parents[2] / "docs" / "object-space.md"


def test_program_of_page_continues_after_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        exec(program, {})  # noqa: S102 - our own page
    with SqliteStore(tmp_path / "state.db") as store:
        space = PersistedObjectSpace()
        space.load(store.reader())
        assert space.get_value("position").value == 3000
        assert space.get_dictionary("counts", keys=str, values=int) == {"AAPL": 1500, "IBM": 1500}
        assert list(space.get_queue("window")) == [("IBM", b"747"), ("IBM", b"748"), ("IBM", b"749")]


def test_postgres_program_of_page_saves_its_state_on_the_server(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    (program,) = re.findall(r"```python cluster\n(.*?)```", PAGE.read_text(), re.DOTALL)
    url, schema = re.search(r'url = "(.*)"', program), PostgresServer.schema(tmp_path)
    assert url is not None
    program = program.replace(url[1], postgres.url).replace('schema="totals"', f'schema="{schema}"')
    for _ in range(2):
        exec(program, {})  # noqa: S102 - our own page
    with PostgresStore(postgres.url, schema=schema) as store:
        space = PersistedObjectSpace()
        space.load(store.reader())
        assert space.get_value("messages").value == 3000
