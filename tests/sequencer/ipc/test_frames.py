"""Messages between a node's two processes come out as they went in, however they were cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rt.errors import FormatError
from sequencer.ipc.framing import FRAME_BYTES_MAX, HEADER, FrameDecoder, frame


@given(st.lists(st.binary(max_size=40)), st.data())
def test_frames_cut_anywhere_come_out_whole_and_in_order(messages, data):
    sent = b"".join(map(frame, messages))
    unframer = FrameDecoder()
    came: list[bytes] = []
    at = 0
    while at < len(sent):
        end = data.draw(st.integers(at, len(sent))) if data.draw(st.booleans()) else len(sent)
        came += unframer.feed(sent[at:end])
        at = end
    assert came == messages


def test_a_message_comes_out_with_its_last_byte_and_not_before():
    unframer = FrameDecoder()
    sent = frame(b"whole")
    assert list(unframer.feed(sent[:-1])) == []
    assert list(unframer.feed(sent[-1:])) == [b"whole"]


def test_a_length_above_the_limit_is_refused_behind_the_messages_before_it():
    unframer = FrameDecoder()
    fed = unframer.feed(frame(b"good") + HEADER.pack(FRAME_BYTES_MAX + 1))
    assert next(fed) == b"good"
    with pytest.raises(FormatError):
        next(fed)
