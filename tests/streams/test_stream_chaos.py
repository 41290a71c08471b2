"""Chaos runs of streams on real clusters, and the verdict on their results."""

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
def test_chaos_run_has_no_problems_under_host_node_and_cluster_faults(root: Path) -> None:
    """The smallest setup: each of two clusters has one node, whose failure makes the cluster unavailable."""
    chaos = StreamChaos(
        root, seed=3, decks=1, kinds=KINDS, nodes=1, rate_hz=50, lease_s=5.0, away_s=6.0, limit_s=math.inf
    )
    outcome = chaos.run()
    assert outcome.problems == [], str(outcome)
    assert outcome.published > 100
    assert {*KINDS, "join", "resume", "cluster_back"} <= set(outcome.faults), str(outcome)


@pytest.mark.slow
def test_chaos_run_has_no_problems_while_host_clocks_jump(root: Path) -> None:
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


def test_chaos_run_without_published_events_reports_problem(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamChaos, "_play", lambda _: None)
    monkeypatch.setattr("chaos.streams.cast.Cast.__enter__", lambda cast: cast)
    outcome = StreamChaos(root, seed=3, nodes=1).run()
    assert outcome.problems == ["nothing was published: the run proves nothing"]


# Verdict


def call(
    subscription: str, events: Sequence[tuple[int, int]], at_s: float = 10.0, fence: int = 1, stream: str = A
) -> Call:
    return Call(at_s, at_s + 0.01, fence, subscription, stream, list(events))


def judged(*notes: tuple[str, Note], published: int = 3, limit_s: float = math.inf) -> list[str]:
    """Return the problems of one stream, given correct results of its keepers."""
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


def test_verdict_has_no_problems_if_calls_and_results_are_correct() -> None:
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
def test_verdict_reports_skipped_or_missing_events_of_consumer_without_token(
    ranges: Sequence[Sequence[tuple[int, int]]], *, is_right: bool
) -> None:
    calls = [("h1.1", call("plain", each, 10.0 + at)) for at, each in enumerate(ranges)]
    found = judged(*all_calls("plain"), *calls)
    assert (found == []) is is_right
    assert all("plain" in problem for problem in found)


@pytest.mark.parametrize(("first", "is_right"), [(0, True), (1, True), (2, False)])
def test_verdict_expects_events_published_after_subscription_from_end(first: int, *, is_right: bool) -> None:
    """The subscription existed at 0.5 s. Event 1 was published at 1 s."""
    found = judged(*all_calls("tail"), ("h1.1", call("tail", [(first, 3)])))
    assert (found == []) is is_right


def test_verdict_reports_two_hosts_with_valid_lease_at_same_time() -> None:
    second = [
        ("h2.1", call("plain", [(1, 2)], 11.0, fence=2)),
        ("h1.1", call("plain", [(2, 3)], 12.0, fence=1)),
    ]
    assert any("valid fence 1 after fence 2" in problem for problem in judged(*all_calls(), *second))
    same = ("h2.1", call("plain", [(1, 2)], 11.0, fence=1))
    assert any("both had the fence 1" in problem for problem in judged(*all_calls(), same))
    late = [*second[:1], ("h1.1", call("plain", [(2, 3)], 12.0, fence=NO_FENCE))]
    assert judged(*all_calls(), *late) == []


def test_verdict_reports_gap() -> None:
    assert judged(*all_calls(), ("h1.1", Wrong(1.0, "was told of a gap"))) == ["h1.1: was told of a gap"]


@pytest.mark.parametrize("rows", [[0, 1], [0, 1, 1, 2], [0, 2, 1], [1, 2]])
def test_verdict_reports_repeated_missing_or_reordered_results(rows: Sequence[int]) -> None:
    verdict = Verdict({A: "east"})
    verdict.published[A] += [0.0, 1.0, 2.0]
    for life, note in all_calls():
        verdict.take(life, [note])
    wrong = {Reader("ledger", A): [(7 * number, f"{A}.{number}") for number in rows]}
    assert any("'ledger'" in problem for problem in verdict.problems({**right(3), **wrong}))


def test_verdict_reports_late_delivery_unless_cluster_was_absent() -> None:
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


def test_watch_waits_for_event_published_after_fault() -> None:
    verdict = Verdict({A: "east"})
    verdict.published[A] += [0.0, 1.0, 2.0]
    watch = verdict.watch("kill", "kill of h1", 1.5, "east")
    for subscription in SUBSCRIPTIONS:
        verdict.take("h2.1", [call(subscription, [(0, 2)])])
    assert watch.waiting == verdict.readers("east")
    assert watch.slowest_s == math.inf
    assert not verdict.has_all()


# Notes and results


def test_notes_survive_encoding_and_decoding() -> None:
    notes = [call("plain", ranges_of([0, 1, 2, 7, 8, 3])), Subscribed(1.0, "tail", A), Wrong(2.0, "é\n")]
    assert list(decode_notes(b"".join(map(encode_note, notes)))) == notes
    assert ranges_of([0, 1, 2, 7, 8, 3]) == [(0, 3), (7, 9), (3, 4)]


def test_results_append_fails_if_writer_missed_newest_line(tmp_path: Path) -> None:
    path = tmp_path / "results"
    first, second = Results(path), Results(path)
    assert first.last == second.last == NOTHING
    assert first.append([(0, "a"), (3, "b")])
    assert not second.append([(0, "a")])
    assert second.last == 3
    assert second.append([(4, "c")])
    with path.open("ab") as file:
        file.write(b"\n4 5:d 6:")  # A line that was cut off by a kill.
    assert not first.append([(4, "c"), (5, "d")])
    assert first.last == 4
    assert first.append([(5, "d")])
    assert read_rows(path) == [(0, "a"), (3, "b"), (4, "c"), (5, "d")]
    for one in (first, second):
        one.close()
