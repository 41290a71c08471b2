"""Framing of messages between a node's two processes, however the stream is split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rt.errors import FormatError
from sequencer.ipc.frames import FRAME_BYTES_MAX, HEADER, FrameDecoder, frame


@given(st.lists(st.binary(max_size=40)), st.data())
def test_frames_arrive_whole_and_in_order_however_the_stream_is_split(messages, data):
    sent = b"".join(map(frame, messages))
    unframer = FrameDecoder()
    came: list[bytes] = []
    at = 0
    while at < len(sent):
        end = data.draw(st.integers(at, len(sent))) if data.draw(st.booleans()) else len(sent)
        came += unframer.feed(sent[at:end])
        at = end
    assert came == messages


def test_message_is_returned_only_after_its_last_byte():
    unframer = FrameDecoder()
    sent = frame(b"whole")
    assert list(unframer.feed(sent[:-1])) == []
    assert list(unframer.feed(sent[-1:])) == [b"whole"]


def test_length_above_limit_raises_format_error_after_earlier_messages():
    unframer = FrameDecoder()
    fed = unframer.feed(frame(b"good") + HEADER.pack(FRAME_BYTES_MAX + 1))
    assert next(fed) == b"good"
    with pytest.raises(FormatError):
        next(fed)
