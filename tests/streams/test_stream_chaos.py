"""Streams on real clusters under faults, and the judge. `python -m chaos.streams` runs for longer."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from chaos.streams.faults import CLOCK_KINDS
from chaos.streams.notes import NO_FENCE, Call, Note, Subscribed, Wrong, decode_notes, encode_note, ranges_of
from chaos.streams.results import NOTHING, Results, read_rows
from chaos.streams.run import StreamChaos
from chaos.streams.verdict import KEEPERS, SUBSCRIPTIONS, Absence, Reader, Verdict

A = "load/east-a"
ALL = [(0, 3)]
KINDS = ("kill", "pause", "drain", "roll", "stop_cluster")


@pytest.fixture
def root() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Unix sockets need a short path.
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@pytest.mark.slow
def test_each_fault_of_hosts_nodes_and_clusters_loses_and_repeats_nothing(root: Path) -> None:
    """The smallest setup: each of two clusters is one node, whose death takes the cluster away."""
    chaos = StreamChaos(
        root, seed=3, decks=1, kinds=KINDS, nodes=1, rate_hz=50, lease_s=5.0, away_s=6.0, limit_s=math.inf
    )
    outcome = chaos.run()
    assert outcome.problems == [], str(outcome)
    assert outcome.published > 100
    assert {*KINDS, "join", "resume", "cluster_back"} <= set(outcome.faults), str(outcome)


@pytest.mark.slow
def test_clocks_of_hosts_that_jump_lose_and_repeat_nothing(root: Path) -> None:
    kinds = (*CLOCK_KINDS, "kill")
    chaos = StreamChaos(
        root, seed=5, decks=1, kinds=kinds, nodes=1, rate_hz=50, lease_s=5.0, limit_s=math.inf
    )
    outcome = chaos.run()
    assert outcome.problems == [], str(outcome)
    assert outcome.published > 100
    assert {*kinds} <= set(outcome.faults), str(outcome)
    lost = [
        line for log in root.glob("h*.log") for line in log.read_text().splitlines() if "queue_lost" in line
    ]
    assert lost, "no host noticed that it had slept past its lease"


def test_a_run_in_which_nothing_is_delivered_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamChaos, "_play", lambda _: None)
    monkeypatch.setattr("chaos.streams.cast.Cast.__enter__", lambda cast: cast)
    outcome = StreamChaos(root, seed=3, nodes=1).run()
    assert outcome.problems == ["nothing was published: the run proves nothing"]


# The judge


def call(
    subscription: str, events: Sequence[tuple[int, int]], at_s: float = 10.0, fence: int = 1, stream: str = A
) -> Call:
    return Call(at_s, at_s + 0.01, fence, subscription, stream, list(events))


def judged(*notes: tuple[str, Note], published: int = 3, limit_s: float = math.inf) -> list[str]:
    """Problems of one stream, whose keepers' results are right."""
    verdict = Verdict({A: "east"})
    verdict.published[A] += [float(number) for number in range(published)]
    for life, note in notes:
        verdict.take(life, [note])
    return verdict.problems(right(published), limit_s)


def right(count: int) -> Mapping[Reader, Sequence[tuple[int, str]]]:
    return {
        Reader(keeper, A): [(7 * number, f"{A}.{number}") for number in range(count)] for keeper in KEEPERS
    }


def all_calls(*but: str, **more: float) -> list[tuple[str, Note]]:
    notes: list[tuple[str, Note]] = [("h1.1", Subscribed(0.5, name, A)) for name in ("ledger", "tail")]
    return notes + [("h1.1", call(each, ALL, **more)) for each in SUBSCRIPTIONS if each not in but]  # type: ignore[arg-type]


def test_what_is_as_promised_is_no_problem() -> None:
    assert judged(*all_calls()) == []


@pytest.mark.parametrize(
    ("ranges", "is_right"),
    [
        ([[(0, 3)]], True),
        ([[(0, 2)], [(1, 3)]], True),  # The second host repeats an event.
        ([[(0, 1)], [(2, 3)], [(1, 3)]], False),
        ([[(0, 1), (2, 3)], [(0, 3)]], False),
        ([[(1, 3)], [(0, 3)]], False),
        ([[(0, 2)]], False),
        ([], False),
    ],
)
def test_a_consumer_without_a_token_gets_each_event_after_the_one_before(
    ranges: Sequence[Sequence[tuple[int, int]]], *, is_right: bool
) -> None:
    calls = [("h1.1", call("plain", each, 10.0 + at)) for at, each in enumerate(ranges)]
    found = judged(*all_calls("plain"), *calls)
    assert (found == []) is is_right
    assert all("plain" in problem for problem in found)


@pytest.mark.parametrize(("first", "is_right"), [(0, True), (1, True), (2, False)])
def test_a_subscription_from_the_end_gets_what_was_published_after_it(first: int, *, is_right: bool) -> None:
    """It existed at 0.5 s. Event 1 was published at 1 s."""
    found = judged(*all_calls("tail"), ("h1.1", call("tail", [(first, 3)])))
    assert (found == []) is is_right


def test_two_hosts_with_a_valid_lease_at_a_time_are_a_problem() -> None:
    second = [
        ("h2.1", call("plain", [(1, 2)], 11.0, fence=2)),
        ("h1.1", call("plain", [(2, 3)], 12.0, fence=1)),
    ]
    assert any("valid fence 1 after fence 2" in problem for problem in judged(*all_calls(), *second))
    same = ("h2.1", call("plain", [(1, 2)], 11.0, fence=1))
    assert any("both had the fence 1" in problem for problem in judged(*all_calls(), same))
    late = [*second[:1], ("h1.1", call("plain", [(2, 3)], 12.0, fence=NO_FENCE))]
    assert judged(*all_calls(), *late) == []


def test_a_gap_is_a_problem() -> None:
    assert judged(*all_calls(), ("h1.1", Wrong(1.0, "was told of a gap"))) == ["h1.1: was told of a gap"]


@pytest.mark.parametrize("rows", [[0, 1], [0, 1, 1, 2], [0, 2, 1], [1, 2]])
def test_results_have_each_event_once(rows: Sequence[int]) -> None:
    verdict = Verdict({A: "east"})
    verdict.published[A] += [0.0, 1.0, 2.0]
    for life, note in all_calls():
        verdict.take(life, [note])
    wrong = {Reader("ledger", A): [(7 * number, f"{A}.{number}") for number in rows]}
    assert any("'ledger'" in problem for problem in verdict.problems({**right(3), **wrong}))


def test_a_queue_that_is_not_served_in_time_is_a_problem_unless_its_cluster_was_away() -> None:
    assert any("after it was published" in problem for problem in judged(*all_calls(), limit_s=8.0))
    assert judged(*all_calls(), limit_s=10.5) == []
    verdict = Verdict({A: "east"})
    verdict.published[A] += [0.0, 1.0, 2.0]
    watch = verdict.watch("kill", "kill of h1", 1.5, "east")
    for life, note in all_calls():
        verdict.take(life, [note])
    verdict.absences.append(Absence("east", 0.0, 9.0))
    assert watch.waiting == set()
    assert watch.slowest_s == pytest.approx(8.51)
    assert verdict.problems(right(3), 9.0) == []
    assert verdict.problems(right(3), 8.0) == ["served again 8.5 s after kill of h1"]


def test_a_watch_waits_for_an_event_that_was_published_after_the_fault() -> None:
    verdict = Verdict({A: "east"})
    verdict.published[A] += [0.0, 1.0, 2.0]
    watch = verdict.watch("kill", "kill of h1", 1.5, "east")
    for subscription in SUBSCRIPTIONS:
        verdict.take("h2.1", [call(subscription, [(0, 2)])])
    assert watch.waiting == verdict.readers("east")
    assert watch.slowest_s == math.inf
    assert not verdict.has_all()


# Notes and results


def test_notes_come_back_as_they_were() -> None:
    notes = [call("plain", ranges_of([0, 1, 2, 7, 8, 3])), Subscribed(1.0, "tail", A), Wrong(2.0, "é\n")]
    assert list(decode_notes(b"".join(map(encode_note, notes)))) == notes
    assert ranges_of([0, 1, 2, 7, 8, 3]) == [(0, 3), (7, 9), (3, 4)]


def test_results_of_a_writer_that_missed_the_newest_line_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "results"
    first, second = Results(path), Results(path)
    assert first.last == second.last == NOTHING
    assert first.append([(0, "a"), (3, "b")])
    assert not second.append([(0, "a")])
    assert second.last == 3
    assert second.append([(4, "c")])
    with path.open("ab") as file:
        file.write(b"\n4 5:d 6:")  # A kill tore the line.
    assert not first.append([(4, "c"), (5, "d")])
    assert first.last == 4
    assert first.append([(5, "d")])
    assert read_rows(path) == [(0, "a"), (3, "b"), (4, "c"), (5, "d")]
    for one in (first, second):
        one.close()
