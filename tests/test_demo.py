"""The demo on small real data, and what it says when its checks fail."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from rt.cli.demo import demo
from rt.demo.run import Demo
from rt.demo.source import files_below, lines, share


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    for index in range(6):
        path = root / f"d{index % 2}" / f"f{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(b"line %d of file %d\n" % (line, index) for line in range(6000)))
    (root / "binary.bin").write_bytes(b"left out")
    return root


def test_every_line_has_one_publisher_and_a_place_that_can_be_found_again(data: Path) -> None:
    files = files_below(data)
    assert [path.name for path in files] == ["f0.txt", "f2.txt", "f4.txt", "f1.txt", "f3.txt", "f5.txt"]
    assert sorted(path for index in range(4) for path in share(data, index, 4)) == sorted(files)
    whole = list(lines(data, files))
    assert len(whole) == 36_000
    assert whole[6000] == ("d0/f2.txt", b"line 0 of file 2")
    assert list(lines(data, files, 35_998)) == whole[35_998:]


@pytest.mark.slow
def test_the_demo_kills_a_publisher_and_loses_nothing(data: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        demo, ["--data", str(data), "--publishers", "2", "--keep", str(tmp_path / "kept")]
    )
    assert result.exit_code == 0, result.output
    assert "36,000 messages" in result.stdout
    assert "1 kill -9" in result.stdout
    assert "nothing lost, duplicated or reordered" in result.stdout
    assert (tmp_path / "kept" / "demo" / "sessions" / "publisher-1" / "log.0.0").exists()


@pytest.mark.slow
def test_the_demo_fails_when_what_it_reads_is_not_what_was_published(data: Path, tmp_path: Path) -> None:
    run = Demo(tmp_path / "kept", data, 2)
    assert run.run(lambda count: None).problems == ()
    (data / "d0" / "f0.txt").write_bytes(b"another line\n" * 6000)
    assert any("differs from its source at message 0" in problem for problem in run._problems())
    (data / "d1" / "f1.txt").write_bytes(b"line 0 of file 1\n")
    assert any("differs" in problem or "ends at" in problem for problem in run._problems())
