"""KeyboardInterrupt at any line of a save, of recording its outcome, or of a checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from rt.objects import CheckpointKind, MemoryStore, OutOfTurn, PersistedObjectSpace
from rt.query.monitoring.checkpoint_stats import MeasuredStore

KINDS = ["list", "queue", "stack", "linked_list", "set", "sorted_dictionary"]


def put(held: Any, values: str) -> None:
    if "dictionary" in type(held).__name__.lower():
        held.update(dict.fromkeys(values, 1))
    elif hasattr(held, "update"):
        held.update(values)
    else:
        held.extend(values)


TAKE = {
    "list": lambda held: held.pop(),
    "queue": lambda held: held.dequeue(),
    "stack": lambda held: held.pop(),
    "linked_list": lambda held: held.remove_first(),
    "set": lambda held: held.remove("a"),
    "sorted_dictionary": lambda held: held.pop("b"),
}


def edited() -> tuple[MemoryStore, PersistedObjectSpace]:
    """A space that was saved, and edited after that."""
    store = MemoryStore()
    space = PersistedObjectSpace()
    for kind in KINDS:
        put(getattr(space, f"create_{kind}")(kind), "abc")
    space.create_list("gone").append(1)
    space.checkpoint(store, CheckpointKind.FULL)
    for kind in KINDS:
        held = getattr(space, f"get_{kind}")(kind)
        TAKE[kind](held)
        put(held, "x")
    space.delete("gone")
    space.create_list("new").append(1)
    return store, space


def interrupted(
    line: int, call: Callable[[], object], is_of: Callable[[FrameType], bool] = lambda _: True
) -> bool:
    """Run `call` with an interrupt at line number `line` of the object space's code. Return whether that line
    was reached.

    `is_of` selects the frames whose lines count.
    """
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        if "/rt/objects/" not in frame.f_code.co_filename:
            return None
        if event == "line" and is_of(frame):
            seen += 1
            if seen == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def check(store: MemoryStore, space: PersistedObjectSpace) -> None:
    """After the next checkpoint the store equals the space."""
    for kind in KINDS:
        put(getattr(space, f"get_{kind}")(kind), "z")
    space.checkpoint(store)
    again = PersistedObjectSpace()
    again.load(store.reader())
    assert sorted(again.ids()) == sorted([*KINDS, "new"])
    for kind in KINDS:
        assert list(getattr(again, f"get_{kind}")(kind)) == list(getattr(space, f"get_{kind}")(kind)), kind
    whole = MemoryStore()
    space.checkpoint(whole, CheckpointKind.FULL)
    assert whole.content() == store.content()


@pytest.mark.slow
@pytest.mark.parametrize("kind", CheckpointKind)
def test_interrupt_at_any_line_of_save_loses_no_changes(kind: CheckpointKind) -> None:
    line, was_interrupted = 0, True
    while was_interrupted:
        line += 1
        store, space = edited()
        writer = store.begin(kind)
        was_interrupted = interrupted(line, lambda space=space, writer=writer: space.save(writer))
        if was_interrupted:
            writer.rollback()
        else:
            writer.commit()
        try:
            space.on_save_failed(unknown_outcome=not was_interrupted)
        except OutOfTurn:
            assert was_interrupted
        check(store, space)
    assert line > 100


@pytest.mark.parametrize("is_good", [True, False])
def test_interrupt_at_any_line_of_recording_outcome_loses_no_changes(is_good: bool) -> None:
    line, was_interrupted = 0, True
    while was_interrupted:
        line += 1
        store, space = edited()
        writer = store.begin(CheckpointKind.DIFFERENTIAL)
        space.save(writer)
        for kind in ("list", "queue", "stack", "linked_list"):
            TAKE[kind](getattr(space, f"get_{kind}")(kind))
        if is_good:
            writer.commit()
        else:
            writer.rollback()
        tell = space.on_saved if is_good else space.on_save_failed
        was_interrupted = interrupted(line, tell)
        if was_interrupted:
            with contextlib.suppress(OutOfTurn):
                tell()
        check(store, space)
    assert line > 30


def is_before_a_commit(frame: FrameType) -> bool:
    """Whether the frame is before a commit, and not at a bare `try`, where CPython checks no signals."""
    name, number = frame.f_code.co_filename, frame.f_lineno
    is_try = linecache.getline(name, number).strip() == "try:"
    return not is_try and (frame.f_code.co_name, name.rpartition("/")[2]) in {
        ("checkpoint", "space.py"),
        ("save", "space.py"),
        ("commit", "memory_store.py"),
    }


@pytest.mark.parametrize("kind", CheckpointKind)
def test_interrupt_in_checkpoint_leaves_no_writer_open(kind: CheckpointKind) -> None:
    for line in itertools.count(1):
        store, space = edited()
        was_interrupted = interrupted(
            line, lambda space=space, store=store: space.checkpoint(store, kind), is_before_a_commit
        )
        store.begin(kind).rollback()
        if not was_interrupted:
            break
    assert line > 15


def test_interrupt_in_measured_store_begin_leaves_no_writer_open() -> None:
    def interrupt() -> float:
        raise KeyboardInterrupt

    store = MemoryStore()
    with pytest.raises(KeyboardInterrupt):
        MeasuredStore(store, clock=interrupt).begin(CheckpointKind.FULL)
    store.begin(CheckpointKind.FULL).rollback()
