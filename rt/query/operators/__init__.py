"""The operators of queries, by the names that users of Rx know. Each says what it emits and what it saves."""

from __future__ import annotations

from rt.query.operators.buffers import buffer_with_count, buffer_with_time, buffer_with_time_or_count
from rt.query.operators.filtering import take, where

__all__ = ["buffer_with_count", "buffer_with_time", "buffer_with_time_or_count", "take", "where"]
