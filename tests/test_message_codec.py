"""The codec between values and protobuf messages: fields by annotation, and rejected field tables."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from rt.message_codec import MessageCodec, UnionCodec
from rt.v1 import sequencer_pb2 as pb


class Node(NamedTuple):
    node: str
    disk: bytes


def test_value_is_encoded_to_message_and_decoded() -> None:
    codec = MessageCodec(Node, pb.Join)
    assert pb.Join(**codec.encode(Node("n1", b"D"))) == pb.Join(node="n1", disk=b"D")
    assert codec.decode(pb.Join(node="n1")) == Node("n1", b"")


def test_field_missing_in_message_or_value_is_rejected() -> None:
    with pytest.raises(KeyError, match="node"):
        MessageCodec(Node, pb.NodeStanding)
    with pytest.raises(AssertionError, match="Node has no fields"):
        MessageCodec(Node, pb.Join, disks="disk")


def test_union_codec_without_value_for_each_oneof_field_raises_key_error() -> None:
    with pytest.raises(KeyError, match="merge"):
        UnionCodec(pb.Command, "kind", join=Node)
