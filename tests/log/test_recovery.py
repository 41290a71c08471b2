"""Recovery after a crash: which segment tails are cut, and which are corrupt."""

from collections.abc import Callable

import pytest
from batches import Said, session_bytes, session_header
from hypothesis import given
from hypothesis import strategies as st
from scripts import Case

import rt
from rt.log.scan.scanner import SessionScanner
from rt.log.write.recovery_checks import TornTail, judge_tail


def answer(case: Case) -> str:
    assert case.command == "judge"
    try:
        tail = judge_tail(
            path="log.3.1",
            verified_end=case.number("verified"),
            size_bytes=case.number("size"),
            durable_end=case.number("durable"),
            problem=case.arguments.get("problem"),
        )
    except rt.Corrupt as error:
        return f"Damaged\n{error}"
    cut = f"cut {tail.torn_bytes} bytes" if tail.torn_bytes else "keep all"
    return f"{cut}, go on at {tail.end}"


def test_segment_tails_are_judged_as_in_script(run_script: Callable) -> None:
    run_script("recovery/judge_tail.txt", answer)


BATCHES = 4
HEADER = session_header()
RUNS = [[Said("t", b"batch %d, message %d" % (index, i)) for i in range(3)] for index in range(BATCHES)]
DATA = session_bytes(HEADER, RUNS)
STARTS = [len(session_bytes(HEADER, RUNS[:index])) for index in range(BATCHES + 1)]


def harm(data: bytes, line: str) -> bytes:
    """Apply a line of the script to the bytes after the header. Batches are counted from 0."""
    what, *numbers = line.split()
    which, *more = map(int, numbers)
    if what == "lengthen":
        return data + bytes(which)
    start, end = STARTS[which : which + 2]
    if what == "flip":
        return data[: start + more[0]] + bytes([data[start + more[0]] ^ 1]) + data[start + more[0] + 1 :]
    if what == "cut":
        return data[: start + more[0]]
    if what == "zero":
        return data[:start] + bytes(end - start) + data[end:]
    if what == "leave-out":
        return data[:start] + data[end:]
    if what == "overwrite":
        return data[:start] + DATA[STARTS[more[0]] : STARTS[more[0] + 1]] + data[end:]
    assert what == "repeat", line
    return data + DATA[start:end]


def recover(case: Case) -> str:
    assert case.command == "recover"
    data = DATA
    for line in case.lines:
        data = harm(data, line)
    scanner = SessionScanner(HEADER)
    scan = scanner.scan(memoryview(data))
    assert scanner.boundary - 64 in STARTS
    kept = STARTS.index(scanner.boundary - 64)
    try:
        tail = judge_tail(
            path="log.3.1",
            verified_end=scanner.boundary,
            size_bytes=64 + len(data),
            durable_end=64 + STARTS[case.number("synced")],
            problem=scan.problem,
        )
    except rt.Corrupt as error:
        return f"damaged at batch {kept}: {error.what}"
    assert (tail.end, scanner.next) == (scanner.boundary, 3 * kept)
    return f"keeps {kept} batches, cuts {tail.torn_bytes} bytes"


def test_corrupt_segments_are_recovered_as_in_script(run_script: Callable) -> None:
    run_script("recovery/damaged_segments.txt", recover)


places = st.integers(0, 10_000)


@given(places, places, places, st.none() | st.just("bad"))
def test_judge_tail_cuts_only_unverified_bytes_after_durable_end(
    verified: int, torn: int, durable: int, problem: str | None
) -> None:
    def judge() -> TornTail:
        return judge_tail(
            path="log.0.0",
            verified_end=verified,
            size_bytes=verified + torn,
            durable_end=durable,
            problem=problem,
        )

    if verified < durable:
        with pytest.raises(rt.Corrupt) as caught:
            judge()
        assert (caught.value.path, caught.value.offset) == ("log.0.0", verified)
    else:
        assert judge() == TornTail(verified, torn)
