"""The error classes: their documented tree, export, gRPC status, pickling, copying and text."""

import copy
import pickle
import re
from collections.abc import Iterator

import pytest

import rt
import rt.errors
from rt.errors import RtError
from rt.events import SkipForward

GRPC_STATUSES = {
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
}
DETAILS = {"where": "here", "got": 0, "expected": [1, 2], "hint": "Do this."}
SPECIAL = {
    "Gap": {"event": SkipForward(1, 5, "time")},
    "DiskFull": {"accepted": range(3, 7)},
    "Corrupt": {"path": "/log.0.0", "offset": 64},
}


def every_class(kind: type[RtError] = RtError) -> Iterator[type[RtError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == "rt.errors":
            yield from every_class(child)


CLASSES = list(every_class())


def make(kind: type[RtError]) -> RtError:
    error = kind("it went wrong", **DETAILS, **SPECIAL.get(kind.__name__, {}))
    error.add_note("a note")
    return error


def draw(kind: type[RtError], own: str = "", below: str = "") -> Iterator[str]:
    """Draw the class tree as the docstring does, without the descriptions."""
    builtin = [
        base.__name__ for base in kind.__bases__ if base.__module__ == "builtins" and kind is not RtError
    ]
    yield f"{own}{kind.__name__}{f' ({builtin[0]})' if builtin else ''}"
    children = [child for child in kind.__subclasses__() if child.__module__ == "rt.errors"]
    for child in children:
        is_last = child is children[-1]
        yield from draw(
            child, below + ("└── " if is_last else "├── "), below + ("    " if is_last else "│   ")
        )


def test_error_tree_in_docstring_matches_classes() -> None:
    drawn = re.findall(r"^ {4}([│├└─ ]*\w+(?: \(\w+\))?)(?:  |$)", rt.errors.__doc__ or "", re.MULTILINE)
    assert drawn == list(draw(RtError))
    assert len(drawn) == len(CLASSES) > 15


@pytest.mark.parametrize("kind", CLASSES)
def test_each_error_class_is_exported_by_rt(kind: type[RtError]) -> None:
    assert getattr(rt, kind.__name__) is kind
    assert kind.__name__ in rt.__all__


@pytest.mark.parametrize("kind", CLASSES)
def test_each_error_class_has_grpc_status_and_retriable_flag(kind: type[RtError]) -> None:
    assert kind.grpc_status in GRPC_STATUSES
    assert isinstance(kind.retriable, bool)


def test_retriable_errors_are_timeout_and_resource_limits() -> None:
    assert {kind.__name__ for kind in CLASSES if kind.retriable} == {
        "Timeout",
        "DiskFull",
        "TooManyFiles",
        "TooManySessions",
        "Overloaded",
    }


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_error_survives_pickling_with_all_attributes(kind: type[RtError], protocol: int) -> None:
    error = make(kind)
    back = pickle.loads(pickle.dumps(error, protocol))  # noqa: S301 - our own bytes
    assert type(back) is kind
    assert back.__dict__ == error.__dict__
    assert (str(back), back.args, back.__notes__) == (str(error), error.args, ["a note"])


@pytest.mark.parametrize("kind", CLASSES)
def test_error_survives_copy_and_deepcopy(kind: type[RtError]) -> None:
    error = make(kind)
    for back in (copy.copy(error), copy.deepcopy(error)):
        assert type(back) is kind
        assert (back.__dict__, back.args) == (error.__dict__, error.args)


@pytest.mark.parametrize("kind", CLASSES)
def test_error_text_has_message_location_got_expected_and_hint(kind: type[RtError]) -> None:
    assert str(make(kind)) == "it went wrong (at here): got 0, expected [1, 2]. Do this."
    assert make(kind).args == ("it went wrong",)


@pytest.mark.parametrize(
    ("details", "text"),
    [
        ({}, "no"),
        ({"where": ""}, "no (at )"),
        ({"got": False}, "no: got False"),
        ({"expected": 3}, "no: expected 3"),
        ({"where": "x", "expected": 3}, "no (at x): expected 3"),
        ({"hint": "Try."}, "no. Try."),
        ({"got": 1, "hint": "Try."}, "no: got 1. Try."),
        ({"got": "no. Wait.", "hint": "Try."}, "no: got no. Wait. Try."),
        ({"got": "no. Does it run?", "hint": "Try."}, "no: got no. Does it run? Try."),
    ],
)
def test_error_text_omits_unknown_details(details: dict[str, object], text: str) -> None:
    assert str(RtError("no", **details)) == text  # type: ignore[arg-type]


def test_corrupt_error_names_file_and_offset() -> None:
    error = rt.Corrupt("bad batch", path="/data/log.0.3", offset=4096, got=1, expected=2)
    assert str(error) == "bad batch (at /data/log.0.3, offset 4096): got 1, expected 2"
    assert (error.path, error.offset) == ("/data/log.0.3", 4096)


def test_errors_are_caught_as_their_builtin_python_base_classes() -> None:
    with pytest.raises(ValueError, match="too long"):
        raise rt.TopicTooLong("too long")
    with pytest.raises(TimeoutError, match="late"):
        raise rt.Timeout("late")
    assert not issubclass(rt.StorageError, OSError)
