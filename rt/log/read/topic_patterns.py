"""A selection of topics: names, and patterns with `*`, `?` and `[…]`, as in `fnmatch`.

Invariants:
- Matching takes one step for each character of a topic, for any patterns: they are one automaton, with a bit
  for each state. So patterns of a peer do not cause high processor load.
- The number of cached answers, and the patterns, are bounded.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator
from fnmatch import translate
from typing import Final, NoReturn

from rt.errors import InvalidOption
from rt.log.format.constants import TOPIC_BYTES_MAX

WANTED_MAX: Final = 1024
"""Topics and patterns that a pull may name. If a client needs more, it pulls all topics and filters them
itself.
"""
WANTED_BYTES_MAX: Final = 2**16
"""Total bytes of these topics and patterns. A node keeps them as long as the pull runs."""
PATTERN_CHARACTERS_MAX: Final = 4096
"""Total characters of all patterns with a wildcard. The automaton has a bit for each character."""
SETS_MAX: Final = 64
"""Number of `[…]` of more than one character in all patterns together. A character is looked up in each,
once.
"""

_TOPICS_KEPT: Final = 16_384
_CHARACTERS_KEPT: Final = 4096
_NO_CHARACTER: Final = "(?s:(?!)"
"""The start of the expression that `fnmatch` makes of a set without any character."""


class TopicPatterns:
    """Contains the topics that match one of `patterns`. A pattern without wildcards is a topic's name.

    `[*]` stands for a `*`, `[?]` for a `?`, and `[[]` for a `[`. `rt.InvalidOption` for a pattern that can
    match nothing, and for too many patterns.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns: Final = tuple(sorted(set(patterns)))
        names = set[str]()
        self._ends = self._starts = self._loops = self._any = 0
        """States, as bits. `_ends`: a topic that ends there matches. `_starts`: patterns start there.
        `_loops`: a `*` stays there. `_any`: a `?` leads to the next state.
        """
        self._literals: dict[str, int] = {}
        """For each character, the states from which it leads to the next state."""
        self._sets: list[tuple[re.Pattern[str], int]] = []
        states = characters = 0
        for pattern in self.patterns:
            tokens = list(_tokens(pattern))
            if all(token.startswith("=") for token in tokens):
                names.add("".join(token[1:] for token in tokens))
                continue
            characters += len(pattern)
            if characters > PATTERN_CHARACTERS_MAX:
                _refuse(
                    "patterns that are too long together", characters, f"{PATTERN_CHARACTERS_MAX} characters"
                )
            states = self._add(tokens, states)
        if len(self._sets) > SETS_MAX:
            _refuse("too many sets in patterns", len(self._sets), f"{SETS_MAX} at most")
        self.names: Final = frozenset(names)
        self._known: dict[str, bool] = {}
        self._accepting: dict[str, int] = {}

    @classmethod
    def named(cls, names: Iterable[str]) -> TopicPatterns:
        """Exactly these topics, even if their names have wildcard characters."""
        return cls(re.sub(r"([*?[])", r"[\1]", name) for name in names)

    @property
    def has_wildcards(self) -> bool:
        return self._ends != 0

    def __contains__(self, topic: object) -> bool:
        if topic in self.names:
            return True
        if not self._ends or not isinstance(topic, str):
            return False
        found = self._known.get(topic)
        if found is None:
            if len(self._known) >= _TOPICS_KEPT:
                self._known.clear()
            found = self._known[topic] = self._matches(topic)
        return found

    def _add(self, tokens: list[str], state: int) -> int:
        """Add a pattern whose first state is `state`. Returns the next free one."""
        self._starts |= 1 << state
        for token in tokens:
            bit = 1 << state
            match token[0]:
                case "*":
                    self._loops |= bit
                    continue
                case "?":
                    self._any |= bit
                case "[":
                    self._sets.append((re.compile(token[1:]), bit))
                case _:
                    self._literals[token[1]] = self._literals.get(token[1], 0) | bit
            state += 1
        self._ends |= 1 << state
        return state + 1

    def _matches(self, topic: str) -> bool:
        states = self._starts
        for character in topic:
            accepting = self._accepting.get(character)
            if accepting is None:
                accepting = self._look_up(character)
            states = (states & accepting) << 1 | states & self._loops
            if not states:
                return False
        return states & self._ends != 0

    def _look_up(self, character: str) -> int:
        """The states from which a character leads to the next state."""
        found = self._any | self._literals.get(character, 0)
        for expression, bit in self._sets:
            if expression.match(character):
                found |= bit
        if len(self._accepting) >= _CHARACTERS_KEPT:
            self._accepting.clear()
        self._accepting[character] = found
        return found


def check_topics(topics: Collection[str]) -> TopicPatterns:
    """Check topics and patterns, given as a collection, or a single one, given as a string.
    `rt.InvalidOption`.
    """
    found = [topics] if isinstance(topics, str) else None
    if found is None:
        with contextlib.suppress(TypeError):
            found = list(topics)
    if found is None or not all(isinstance(topic, str) for topic in found):
        _refuse("not topics", repr(topics)[:200], "a topic or pattern, or a collection of them")
    return TopicPatterns(found)


def check_wanted(topics: Collection[str]) -> TopicPatterns:
    """Check the topics and patterns of a pull. `rt.InvalidOption` if they are too much for a node."""
    if len(topics) > WANTED_MAX:
        _refuse("too many topics for a pull", len(topics), f"{WANTED_MAX} at most")
    found = TopicPatterns(topics)
    size = sum(len(topic.encode()) for topic in topics)
    if size > WANTED_BYTES_MAX:
        _refuse("topics of a pull that are too long together", size, f"{WANTED_BYTES_MAX} bytes at most")
    return found


def _tokens(pattern: str) -> Iterator[str]:
    """The tokens of a pattern: `*`, `?`, `[` and the expression of a set, or `=` and a character."""
    try:
        size = len(pattern.encode())
    except UnicodeEncodeError:
        _refuse("not a pattern of topics", ascii(pattern)[:200], "text that UTF-8 can encode")
    if size > TOPIC_BYTES_MAX:
        _refuse(
            "a topic or pattern that is too long",
            f"{size} bytes: {pattern[:50]!r}",
            f"{TOPIC_BYTES_MAX} at most",
        )
    at = 0
    while at < len(pattern):
        end = at + 1
        if pattern[at] == "[":
            first = at + 2 if pattern.startswith("!", at + 1) else at + 1
            end = pattern.find("]", first + 1) + 1
            expression = translate(pattern[at:end])
            if not end or expression.startswith(_NO_CHARACTER):
                _refuse(
                    "a pattern with a set that matches nothing",
                    repr(pattern)[:200],
                    "[abc], [a-z] or [!a-z]; [[] for a [",
                )
            yield f"={pattern[first]}" if end == at + 3 else f"[{expression}"
        else:
            yield pattern[at] if pattern[at] in "*?" else f"={pattern[at]}"
        at = end


def _refuse(what: str, got: object, expected: str) -> NoReturn:
    raise InvalidOption(what, where="topics", got=got, expected=expected)
