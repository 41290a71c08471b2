"""Every kind of object against a plain collection, under edits, saves, failures and reloads at random."""

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
    precondition,
    rule,
    run_state_machine_as_test,
)
from object_models import SUBJECTS, Subject, outcome

from rt.objects import CheckpointKind, MemoryStore, PersistedObjectSpace

KINDS = st.sampled_from(CheckpointKind) | st.just(CheckpointKind.DIFFERENTIAL)


class Machine(RuleBasedStateMachine):
    """One object that is edited, and one beside it that is not even read."""

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
        self.committed: Any = None  # what a look at the object said when what is stored was saved
        self.writer: Any = None
        self.saved: Any = None

    @rule(data=st.data(), count=st.integers(1, 4))
    def edit(self, data: Any, count: int) -> None:
        if self.object is None:
            return
        for _ in range(count):
            theirs, ours = data.draw(st.sampled_from(self.subject.edits))(data.draw)
            assert outcome(theirs, self.object) == outcome(ours, self.model)

    @precondition(lambda self: self.writer is None)
    @rule(kind=KINDS)
    def save(self, kind: CheckpointKind) -> None:
        self.writer = self.store.begin(kind)
        self.space.save(self.writer)
        self.saved = self.look()

    @precondition(lambda self: self.writer is not None)
    @rule(is_applied=st.sampled_from([True, True, False]), is_told=st.sampled_from([True, True, False]))
    def end_save(self, is_applied: bool, is_told: bool) -> None:
        if is_applied:
            self.writer.commit()
            self.committed = self.saved
        else:
            self.writer.rollback()
        if is_applied and is_told:
            self.space.on_saved()
        else:
            self.space.on_save_failed(unknown_outcome=is_applied or not is_told)
        self.writer = None
        self.check_store()

    @rule()
    def crash(self) -> None:
        if self.writer is not None:
            self.writer.rollback()
            self.writer = None
        self.space = PersistedObjectSpace()
        self.space.load(self.store.reader())
        if self.committed is None:
            assert "it" not in self.space
            self.object = None
        else:
            self.object = self.subject.get(self.space, "it")
            assert self.look() == self.committed
        self.model = copy.deepcopy(self.modelled())

    @rule()
    def delete(self) -> None:
        if self.object is not None:
            self.space.delete("it")
            self.object = None

    @rule()
    def create(self) -> None:
        if self.object is None:
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
        """What is stored is what was there when it was saved, and not a row more."""
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
def test_an_object_is_like_the_collection_it_stands_for_whatever_becomes_of_its_saves(kind: str) -> None:
    class Of(Machine):
        subject = SUBJECTS[kind]

    run_state_machine_as_test(Of, settings=settings(max_examples=25, stateful_step_count=30))
