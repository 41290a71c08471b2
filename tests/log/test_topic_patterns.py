"""Topic patterns match as `fnmatch` does, at a bounded cost."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rt.errors import InvalidOption
from rt.log.read import topic_patterns
from rt.log.read.topic_patterns import TopicPatterns, check_topics, check_wanted

_TEXT = st.text("ab*?[]!-^\\\n", max_size=8)


@given(pattern=_TEXT, others=st.lists(st.text("abc*", max_size=4), max_size=3), topic=_TEXT)
def test_patterns_match_as_fnmatch_does(pattern: str, others: list[str], topic: str) -> None:
    try:
        found = TopicPatterns([pattern, *others])
    except InvalidOption:
        return
    expected = any(fnmatchcase(topic, each) for each in (pattern, *others))
    assert [topic in found, topic in found] == [expected] * 2


@given(names=st.lists(_TEXT), topic=_TEXT)
def test_named_topics_match_only_themselves(names: list[str], topic: str) -> None:
    found = TopicPatterns.named(names)
    assert (topic in found) == (topic in names)
    assert all(name in found for name in names)
    assert not found.has_wildcards


@pytest.mark.parametrize(
    "patterns",
    [
        ["trades/["],
        ["trades/[!"],
        ["[]"],
        ["[z-a]*"],
        ["x" * 1025],
        ["\ud800"],
        [f"{number}*" + "x" * 1000 for number in range(5)],
        ["[ab]" * 65],
        3,
        [b"trades"],
    ],
)
def test_invalid_or_too_costly_patterns_raise_invalid_option(patterns: Any) -> None:
    with pytest.raises(InvalidOption, match="topics"):
        check_topics(patterns)


@pytest.mark.parametrize("topics", [[str(n) for n in range(1025)], [str(n) * 300 for n in range(100, 200)]])
def test_pull_rejects_too_many_topics(topics: Collection[str]) -> None:
    assert check_topics(topics) is not None
    with pytest.raises(InvalidOption, match="pull"):
        check_wanted(topics)


def test_cached_match_results_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_patterns, "_TOPICS_KEPT", 100)
    monkeypatch.setattr(topic_patterns, "_CHARACTERS_KEPT", 100)
    found = TopicPatterns(["*7"])
    topics = [f"{chr(1000 + number)}{number}" for number in range(1000)]
    assert [topic for topic in topics if topic in found] == [topic for topic in topics if topic[-1] == "7"]
    assert len(found._known) <= 100
    assert len(found._accepting) <= 100
