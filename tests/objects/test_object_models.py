"""Each kind of object equals its Python model under random edits, saves, failures and reloads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from object_models import SUBJECTS, Subject, outcome

from rt.objects import CheckpointKind, MemoryStore, PersistedObjectSpace

KINDS = st.sampled_from([CheckpointKind.DIFFERENTIAL] * 4 + [CheckpointKind.FULL])
ENDS = st.sampled_from(["applied", "applied", "failed", "unknown", "unknown, applied"])
"""The outcome of a commit: whether it was applied, and what is reported to the space."""


class Machine(RuleBasedStateMachine):
    """One object that is edited, and another that is never read."""

    subject: Subject

    @initialize()
    def begin(self) -> None:
        self.store = MemoryStore()
        space = PersistedObjectSpace()
        beside = space.create_sorted_dictionary("beside")
        beside["key"] = "value"
        space.checkpoint(self.store, CheckpointKind.FULL)
        self.space = PersistedObjectSpace()
        self.space.load(self.store.reader())
        self.object: Any = self.subject.create(self.space, "it")
        self.model = self.subject.model()
        self.committed: Any = None  # the content of the object in the stored save

    @rule(data=st.data())
    def edit(self, data: Any) -> None:
        self.edit_with(data)

    @rule(data=st.data(), count=st.integers(2, 4))
    def edit_more(self, data: Any, count: int) -> None:
        for _ in range(count):
            self.edit_with(data)

    def edit_with(self, data: Any) -> None:
        if self.object is not None:
            theirs, ours = data.draw(st.sampled_from(self.subject.edits))(data.draw)
            assert outcome(theirs, self.object) == outcome(ours, self.model)

    @rule(data=st.data(), kind=KINDS, during=st.integers(0, 2), end=ENDS)
    def checkpoint(self, data: Any, kind: CheckpointKind, during: int, end: str) -> None:
        writer = self.store.begin(kind)
        self.space.save(writer)
        saved = self.look()
        for _ in range(during):
            self.edit_with(data)
        if "applied" in end:
            writer.commit()
            self.committed = saved
        else:
            writer.rollback()
        if end == "applied":
            self.space.on_saved()
        else:
            self.space.on_save_failed(unknown_outcome=end != "failed")
        self.check_store()

    def teardown(self) -> None:
        """The last checkpoint must contain everything, whether or not earlier ones succeeded."""
        if hasattr(self, "space"):
            self.space.checkpoint(self.store)
            self.committed = self.look()
            self.check_store()

    @rule()
    def crash(self) -> None:
        self.space = PersistedObjectSpace()
        self.space.load(self.store.reader())
        if self.committed is None:
            assert "it" not in self.space
            self.object = None
        else:
            self.object = self.subject.get(self.space, "it")
            assert self.look() == self.committed
        self.model = copy.deepcopy(self.modelled())

    @rule(is_made_again=st.booleans())
    def delete(self, is_made_again: bool) -> None:
        if self.object is not None:
            self.space.delete("it")
            self.object = None
        if is_made_again:
            self.object, self.model = self.subject.create(self.space, "it"), self.subject.model()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if self.object is not None:
            assert self.subject.tidy(self.look()) == self.subject.plain(self.model)

    def look(self) -> Any:
        return None if self.object is None else copy.deepcopy(self.subject.look(self.object))

    def modelled(self) -> Any:
        """A model of what is in the object after a reload."""
        if self.committed is None:
            return self.subject.model()
        seen = self.subject.look(self.object)
        if self.subject is SUBJECTS["stack"]:
            seen = seen[::-1]
        return type(self.subject.model())(seen)

    def check_store(self) -> None:
        """The stored rows equal the rows at the time of the save."""
        other = PersistedObjectSpace()
        other.load(self.store.reader())
        assert other.get_sorted_dictionary("beside")["key"] == "value"
        assert ("it" in other) == (self.committed is not None)
        if self.committed is not None:
            assert self.subject.look(self.subject.get(other, "it")) == self.committed
        whole = MemoryStore()
        other.checkpoint(whole, CheckpointKind.FULL)
        assert whole.content() == self.store.content()


@pytest.mark.parametrize("kind", SUBJECTS)
def test_object_equals_python_collection_after_random_edits_and_failed_saves(kind: str) -> None:
    class Of(Machine):
        subject = SUBJECTS[kind]

    run_state_machine_as_test(Of, settings=settings(max_examples=25, stateful_step_count=30))
