"""Serialization of values, pairs and number keys: round trips and rejected input."""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rt.objects import ANY, BytesSerializer, JsonValueSerializer, NotSerializable, Serializers, StateDamaged
from rt.objects.collections.dictionary import Pairs
from rt.objects.core.slot_keys import NUMBER_MAX, decode, encode

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.text("a\ud83d\ude00\U0001f600", max_size=4)  # a pair of surrogates differs from the character
    | st.binary(max_size=20)
)
KEYS = st.recursive(
    SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.just("$"), inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal, with the same types at every level."""
    if type(one) is not type(other) or one != other:
        return False
    if isinstance(one, dict):
        return all(same(a, b) for a, b in zip(one.items(), other.items(), strict=True))
    if isinstance(one, list | tuple):
        return all(map(same, one, other))
    if isinstance(one, set | frozenset):
        return sorted(map(repr, map(type, one))) == sorted(map(repr, map(type, other)))
    return not isinstance(one, float) or math.copysign(1, one) == math.copysign(1, other)


@given(VALUES)
@example({"$": "tuple", "of": []})
@example({1: "a", "1": "b"})
@example([(), set(), frozenset(), {}, [], b"", "", 0, -0.0, 1e308, 10**4299, "\ud800", "\0"])
@example([math.inf, -math.inf])
@example({"\ud83d\ude00": 1, "\U0001f600": 2})
def test_json_values_are_restored_unchanged(value: Any) -> None:
    ANY.check(value)
    assert same(ANY.load(ANY.dump(value)), value)


def test_nan_is_restored_as_nan() -> None:
    assert math.isnan(ANY.load(ANY.dump(math.nan)))


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Colour.RED,
        Text("x"),
        OrderedDict(),
        bytearray(b"x"),
        1j,
        range(3),
        int,
        1 << 20_000,
        itself(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unserializable_values_are_rejected_alone_and_nested(value: Any) -> None:
    for each in (value, [value], (1, value), {"key": value}, {(1, 2): [value]}):
        with pytest.raises(NotSerializable):
            ANY.check(each)
        with pytest.raises(NotSerializable):
            ANY.dump(each)


def called_in(calls: int, function: Callable[[], Any]) -> Any:
    """Return the result of `function`, called below `calls` more open calls."""
    return function() if not calls else called_in(calls - 1, function)


@pytest.mark.parametrize(
    "around",
    [
        lambda value: [value],
        lambda value: (value,),
        lambda value: {1: value},
        lambda value: frozenset({value}),
    ],
    ids=["list", "tuple", "dict", "frozenset"],
)
def test_deepest_accepted_value_is_restored_on_deep_call_stack(
    around: Callable[[Any], Any],
) -> None:
    value: Any = 1
    with pytest.raises(NotSerializable, match=r"too deeply.*at most 100 levels"):
        for _ in range(1000):
            ANY.check(deeper := around(value))
            value = deeper
    assert called_in(500, lambda: ANY.load(ANY.dump(value))) == value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"nul",
        b"01",
        b"\xff",
        b'{"$":"tuple"}',
        b'{"$":"tuple","of":3}',
        b'{"$":"x","of":[]}',
        b'{"$":"bytes","of":"?"}',
        b'{"$":"bytes","of":[1]}',
        b'{"$":"float","of":"x"}',
        b'{"$":"set","of":[[1]]}',
        b'{"$":"dict","of":[[1]]}',
        b'{"$":[],"of":[]}',
        b'{"$":[],"of":"x"}',
        b"[" * 100_000,
    ],
    ids=lambda data: repr(data[:30]),
)
def test_invalid_value_bytes_are_rejected(data: bytes) -> None:
    with pytest.raises(StateDamaged):
        ANY.load(data)


def test_stored_value_of_wrong_type_is_rejected() -> None:
    serializers = Serializers()
    for kind, data in ((int, b'"1"'), (int, b"true"), (str, b"1"), (bool, b"1"), (float, b'"x"')):
        with pytest.raises(StateDamaged, match="wrong type"):
            serializers.of(kind).load(data)
    own = JsonValueSerializer(
        "own", complex, to_plain=lambda z: [z.real, z.imag], from_plain=lambda plain: complex(*plain)
    )
    assert own.load(own.dump(1 + 2j)) == 1 + 2j
    with pytest.raises(StateDamaged, match="own"):
        own.load(b"[1,2,3]")


@given(VALUES, VALUES, st.binary(max_size=10))
def test_pairs_are_restored_unchanged(key: Any, value: Any, data: bytes) -> None:
    raw = BytesSerializer("bytes")
    for pairs, pair in (
        (Pairs(ANY, ANY), (key, value)),
        (Pairs(ANY, raw), (key, data)),
        (Pairs(raw, ANY), (data, value)),
        (Pairs(raw, raw), (data, data)),
    ):
        assert same(pairs.load(pairs.dump(*pair)), pair)


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x05\0\0\0abcd", b"\xff\xff\xff\xff"])
def test_invalid_pair_bytes_are_rejected(data: bytes) -> None:
    raw = BytesSerializer("bytes")
    for pairs in (Pairs(raw, raw), Pairs(ANY, ANY)):
        with pytest.raises(StateDamaged):
            pairs.load(data)


@given(st.integers(-NUMBER_MAX, NUMBER_MAX))
def test_numbers_are_restored_from_their_keys(number: int) -> None:
    assert decode(encode(number)) == number


def test_number_keys_equal_those_of_earlier_releases() -> None:
    told = {
        9: "9",
        10: "a",
        35: "z",
        36: "A",
        61: "Z",
        62: "10",
        3843: "ZZ",
        3844: "100",
        0: "0",
        -1: "-1",
        -62: "-10",
    }
    assert {number: encode(number) for number in told} == told


@pytest.mark.parametrize(
    "key", ["", "-", "--1", "01", "-01", "00", "-0", " 1", "1 ", "é", "+1", "1.0", "Z" * 11, "Z" * 400]
)
def test_invalid_number_keys_are_rejected(key: str) -> None:
    with pytest.raises(ValueError, match="base-62"):
        decode(key)


class _Number(int): ...


def test_large_collection_with_one_unserializable_value_is_rejected() -> None:
    for good in ([*range(100)], [*map(str, range(100))], [True, None, 1.5, b"x"] * 10, [[]] * 50):
        for value in (good, tuple(good), {str(number): each for number, each in enumerate(good)}):
            ANY.check(value)
            assert ANY.load(ANY.dump(value)) == value
        for wrong in (object(), _Number(1), 1 << 20_000, -(1 << 20_000), [object()]):
            for place in (0, len(good) // 2, len(good)):
                with_wrong = [*good[:place], wrong, *good[place:]]
                for refused in (with_wrong, dict(enumerate(with_wrong)), [with_wrong], tuple(with_wrong)):
                    with pytest.raises(NotSerializable):
                        ANY.check(refused)
