"""Serializers read what they wrote, and undecodable bytes raise an error that names the message."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rt
from rt.v1 import groups_pb2


@dataclass
class Order:
    id: int
    product: str
    prices: list[float]


SCHEMA = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "product", "type": "string"},
        {"name": "prices", "type": {"type": "array", "items": "double"}},
    ],
}
ORDERS = st.builds(
    Order,
    st.integers(-(2**63), 2**63 - 1),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.floats(allow_nan=False, allow_infinity=False)),
)


def message(value: bytes) -> rt.Message:
    return rt.Message(7, 0, "feed1", 0, 3, "orders/1", value)


@given(ORDERS)
def test_every_serializer_round_trips_values(order: Order) -> None:
    typed: list[rt.Serializer[Order]] = [rt.JsonSerializer(Order), rt.MsgpackSerializer(Order)]
    for serializer in typed:
        assert rt.decode(message(serializer.dumps(order)), serializer) == order
    avro = rt.AvroSerializer(SCHEMA)
    assert rt.decode(message(avro.dumps(vars(order))), avro) == vars(order)
    protobuf = rt.ProtobufSerializer(groups_pb2.GroupPosition)
    row = groups_pb2.GroupPosition(name=order.product, position=abs(order.id))
    assert rt.decode(message(protobuf.dumps(row)), protobuf) == row


@pytest.mark.parametrize(
    ("serializer", "value"),
    [
        (rt.JsonSerializer(), b"{"),
        (rt.JsonSerializer(Order), b'{"id": "one", "product": "x", "prices": []}'),
        (rt.MsgpackSerializer(Order), b"\xc1"),
        (rt.AvroSerializer(SCHEMA), b"\x02\x02"),
        (rt.AvroSerializer(SCHEMA), b"\x02\x02x\x00\x00"),
        (rt.ProtobufSerializer(groups_pb2.GroupPosition), b"\xff"),
    ],
)
def test_undecodable_bytes_raise_error_with_position_session_and_topic(
    serializer: rt.Serializer[Any], value: bytes
) -> None:
    with pytest.raises(
        rt.UndecodableValue, match="position 7, session feed1, number 3, topic 'orders/1'"
    ) as raised:
        rt.decode(message(value), serializer)
    assert serializer.content_type in str(raised.value)
    assert raised.value.__cause__ is not None


def test_invalid_schema_and_message_of_wrong_type_are_rejected() -> None:
    with pytest.raises(rt.InvalidOption, match="schema"):
        rt.AvroSerializer({"type": "nothing"})
    with pytest.raises(TypeError, match="GroupPositions"):
        rt.ProtobufSerializer(groups_pb2.GroupPosition).dumps(groups_pb2.GroupPositions())  # type: ignore[arg-type]


def test_avro_serializer_without_fastavro_raises_error_naming_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "fastavro", None)
    with pytest.raises(rt.InvalidOption, match=r"rt-transport\[avro\]"):
        rt.AvroSerializer(SCHEMA)


def test_import_of_rt_and_serializer_names_loads_no_library() -> None:
    program = (
        "import sys, rt; rt.JsonSerializer, rt.AvroSerializer, rt.decode;"
        "print(sorted({'msgspec', 'fastavro', 'google.protobuf', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("serializer", [rt.JsonSerializer(Order), rt.MsgpackSerializer(Order)])
def test_typed_serializer_rejects_value_of_wrong_type(serializer: rt.Serializer[Any]) -> None:
    for wrong in ({"id": 1}, Order("one", "x", []), Order(1, "x", [None]), 5):  # type: ignore[arg-type, list-item]
        with pytest.raises(msgspec.ValidationError):
            serializer.dumps(wrong)


def test_json_serializer_rejects_nan() -> None:
    with pytest.raises(msgspec.ValidationError, match="null"):
        rt.JsonSerializer(Order).dumps(Order(1, "x", [float("nan")]))
