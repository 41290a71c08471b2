"""Values as messages: what the annotations of their fields say, and tables that do not fit are refused."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from rt.message_codec import MessageCodec, UnionCodec
from rt.v1 import sequencer_pb2 as pb


class Node(NamedTuple):
    node: str
    disk: bytes


def test_a_value_is_a_message_of_its_fields() -> None:
    codec = MessageCodec(Node, pb.Join)
    assert pb.Join(**codec.encode(Node("n1", b"D"))) == pb.Join(node="n1", disk=b"D")
    assert codec.decode(pb.Join(node="n1")) == Node("n1", b"")


def test_a_field_that_the_message_or_the_value_does_not_have_is_refused() -> None:
    with pytest.raises(KeyError, match="node"):
        MessageCodec(Node, pb.NodeStanding)
    with pytest.raises(AssertionError, match="Node has no fields"):
        MessageCodec(Node, pb.Join, disks="disk")


def test_a_union_has_a_value_for_each_field_of_its_oneof() -> None:
    with pytest.raises(KeyError, match="merge"):
        UnionCodec(pb.Command, "kind", join=Node)
