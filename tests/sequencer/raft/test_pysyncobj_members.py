"""The private PySyncObj members that rt overrides or uses are unchanged since they were reviewed.

Our class relies on the source of one PySyncObj version. The file pinned.txt lists every member that our class
overrides or uses, and every method that `_onTick` then runs without a replacement, with a hash of its source.
After an upgrade the test names the changed members: read them, decide, then run `pytest --rewrite`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import os
import pickle
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pysyncobj
import pysyncobj.journal
import pysyncobj.pickle
import pysyncobj.serializer
import pysyncobj.syncobj
import pytest
from raft_bench import Clock, Lockstep

import sequencer.raft
from sequencer.raft.core import core, pysyncobj_adapter

PINNED = Path(__file__).parents[2] / "testdata" / "raft" / "pinned.txt"
STOCK = pysyncobj.syncobj.SyncObj
OURS = core.SyncObj
HEAD = """\
# Members of PySyncObj that sequencer.raft replaces or runs, with the SHA-256 of their source.
# Made by test_pysyncobj_members.py with --rewrite, after each line that changed was read in PySyncObj.
"""


# --- Reading sources -------------------------------------------------------------------------------------


def mangled(name: str) -> str:
    """Return the mangled form of a private name in a class called SyncObj."""
    return f"_SyncObj{name}" if name.startswith("__") and not name.endswith("__") else name


@cache
def parsed(member: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(member)))


def plain(member: Any) -> Any:
    """Return the function behind a method or a property."""
    return member.fget if isinstance(member, property) else member


def of_self(tree: ast.AST) -> Iterator[str]:
    """Attributes of `self` and of `super()`, as the interpreter looks them up."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of = node.value
            is_super = isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super"
            if is_super or (isinstance(of, ast.Name) and of.id == "self"):
                yield mangled(node.attr)


def called_on_self(tree: ast.AST) -> Iterator[str]:
    """Yield properties and called methods of `self`, but not methods that are only passed on as callbacks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from of_self(ast.Expr(node.func)) if isinstance(node.func, ast.Attribute) else ()
    yield from (name for name in of_self(tree) if isinstance(STOCK.__dict__.get(name), property))


def called_on_super(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
            of = node.value.func
            if isinstance(of, ast.Name) and of.id == "super":
                yield mangled(node.attr)


def assigned(tree: ast.AST) -> Iterator[str]:
    """Attributes of `self` that are assigned."""
    for node in ast.walk(tree):
        is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_stored and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield mangled(node.attr)


def from_pysyncobj(tree: ast.AST, module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the PySyncObj classes and functions that code in `module` refers to, with the last part of their
    names.
    """
    for node in ast.walk(tree):
        name, found = "", None
        if isinstance(node, ast.Name):
            name, found = node.id, module.__dict__.get(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("pysyncobj."):
            name, found = node.attr, _resolved(ast.unparse(node))
        is_code = inspect.isclass(found) or inspect.isfunction(found)
        if is_code and found.__module__.startswith("pysyncobj") and found is not STOCK and found is not OURS:
            yield name, found


def _resolved(dotted: str) -> Any:
    found: Any = pysyncobj
    for name in dotted.split(".")[1:]:
        found = getattr(found, name)
    return found


# --- What rt relies on -----------------------------------------------------------------------------------


@cache
def overridden() -> set[str]:
    """Return the names that both our class and PySyncObj's class define."""
    both = OURS.__dict__.keys() & STOCK.__dict__.keys()
    return {name for name in both if name == "__init__" or not name.endswith("__")}


@cache
def used() -> set[str]:
    """Return the methods and properties of PySyncObj that our class refers to without replacing them."""
    names = set(of_self(parsed(OURS)))
    return {name for name in names if name in STOCK.__dict__} - overridden()


@cache
def running() -> set[str]:
    """Return the PySyncObj methods that run when our class runs: the methods that we call, and what
    `__init__` and `_onTick` call in turn.
    """
    todo = [*used(), "_onTick", *called_on_super(parsed(OURS))]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name in found or name not in STOCK.__dict__:
            continue
        found.add(name)
        called = called_on_self(parsed(plain(STOCK.__dict__[name])))
        todo += [other for other in called if other not in overridden()]
    return found


@cache
def helpers() -> dict[str, Any]:
    """Return the PySyncObj classes and functions besides `SyncObj` that our modules or the running PySyncObj
    methods refer to.
    """
    trees: list[tuple[ast.AST, ModuleType]] = [
        (ast.parse(inspect.getsource(module)), module) for module in (core, pysyncobj_adapter)
    ]
    trees += [(parsed(plain(STOCK.__dict__[name])), pysyncobj.syncobj) for name in running()]
    return dict(item for tree, module in trees for item in from_pysyncobj(tree, module))


def pins() -> dict[str, str]:
    """Return each member, with the way in which we rely on it, and the hash of its source."""
    lines: dict[str, Any] = {}
    for name in overridden() | running():
        how = "replaced" if name in overridden() else "runs"
        if name in overridden() & running():
            how = "replaced, and runs by super()"
        lines[f"SyncObj.{name.removeprefix('_SyncObj')} ({how})"] = plain(STOCK.__dict__[name])
    lines |= {f"{name} (named)": item for name, item in helpers().items()}
    return {
        name: hashlib.sha256(inspect.getsource(item).encode()).hexdigest()
        for name, item in sorted(lines.items())
    }


def kept() -> dict[str, str]:
    """Return the content of pinned.txt."""
    lines = [line for line in PINNED.read_text().splitlines() if not line.startswith("#")]
    return {name: digest for digest, name in (line.split(" ", 1) for line in lines)}


def differences(found: dict[str, str], read: dict[str, str]) -> dict[str, list[str]]:
    """Return the members to review again, by reason; empty if nothing has changed."""
    told = {
        "changed in PySyncObj": [name for name in found if found[name] != read.get(name, found[name])],
        "leaned on, and never read": sorted(found.keys() - read.keys()),
        "not leaned on any more": sorted(read.keys() - found.keys()),
    }
    return {why: names for why, names in told.items() if names}


def test_pysyncobj_members_in_use_match_pinned_hashes(request: pytest.FixtureRequest) -> None:
    found = pins()
    if request.config.getoption("--rewrite"):
        PINNED.write_text(HEAD + "".join(f"{digest} {name}\n" for name, digest in found.items()))
    assert differences(found, kept()) == {}


def test_changed_added_and_unused_pysyncobj_members_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource
    changed = STOCK.__dict__["_onTick"]
    monkeypatch.setattr(inspect, "getsource", lambda item: source(item) + "    #" * (item is changed))
    found = pins()
    found["SyncObj.new (runs)"] = found.pop("Node (named)")
    assert differences(found, kept()) == {
        "changed in PySyncObj": ["SyncObj._onTick (runs)"],
        "leaned on, and never read": ["SyncObj.new (runs)"],
        "not leaned on any more": ["Node (named)"],
    }


def test_pysyncobj_members_in_use_are_found() -> None:
    """Check the derivation itself: it must find some known members, and some known members must not run."""
    runs = running()
    assert {"_onTick", "__init__", "_applyCommand", "_checkCommandsToApply", "addOnTickCallback"} <= runs
    assert {"_SyncObj__onBecomeLeader", "_SyncObj__setState", "_SyncObj__getEntries"} <= runs
    assert {"_SyncObj__applyLogEntries", "_SyncObj__sendAppendEntries"} <= overridden()
    named = {"FastQueue", "Node", "Transport", "SyncObjConf", "RaftState", "createJournal"}
    assert named <= set(helpers())
    assert (
        not {
            "_SyncObj__onMessageReceived",
            "_SyncObj__doApplyCommand",
            "_SyncObj__loadDumpFile",
            "_SyncObj__deleteEntriesTo",
            "_SyncObj__deleteEntriesFrom",
            "_autoTickThread",
        }
        & runs
    )


def test_pysyncobj_is_imported_only_by_core_and_adapter_modules() -> None:
    package = Path(sequencer.raft.__file__ or "").parent
    leaning = {
        path.stem
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and any(alias.name.startswith("pysyncobj") for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pysyncobj"))
    }
    assert leaning == {"core", "pysyncobj_adapter"}


def test_private_methods_override_pysyncobj_methods_with_same_parameters() -> None:
    """A private method of ours would never be called if PySyncObj's class did not have it."""
    private = {
        name for name in OURS.__dict__ if name.startswith("_SyncObj__") and callable(OURS.__dict__[name])
    }
    assert private
    assert private <= set(STOCK.__dict__)
    for name in private | {"_checkCommandsToApply"}:
        ours, theirs = (inspect.signature(of.__dict__[name]).parameters for of in (OURS, STOCK))
        assert list(ours) == list(theirs), name


def test_private_attributes_exist_in_pysyncobj() -> None:
    """PySyncObj would not use an attribute that its own constructor does not create."""
    private = {name for name in of_self(parsed(OURS)) if name.startswith("_SyncObj__")}
    made = set(assigned(parsed(STOCK.__init__)))
    assert private - set(STOCK.__dict__) <= made


def test_own_attributes_do_not_collide_with_pysyncobj_attributes() -> None:
    made = {
        name
        for member in STOCK.__dict__.values()
        if inspect.isfunction(member)
        for name in assigned(parsed(member))
    }
    ours = {name for name in assigned(parsed(OURS)) if not name.startswith("_SyncObj__")}
    assert ours & (made | set(STOCK.__dict__)) == {"_poller"}
    public = {name for name in OURS.__dict__ if not name.startswith("_SyncObj__")} - {
        "__module__",
        "__doc__",
        "__init__",
    }
    ignored = {"__annotations__", "__static_attributes__", "__firstlineno__"}
    assert public & (made | set(STOCK.__dict__)) - ignored == {"_checkCommandsToApply"}


def test_replacement_journal_has_all_members_used_by_pysyncobj() -> None:
    asked = {
        node.attr
        for name in running() - {"__init__"}
        for node in ast.walk(parsed(plain(STOCK.__dict__[name])))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "__raftLog"
    }
    assert asked <= set(dir(pysyncobj_adapter.Journal)), asked
    assert {"add", "setCurrentTerm", "setRaftCommitIndex", "onOneSecondTimer"} <= asked


# --- What never runs -------------------------------------------------------------------------------------


def forbidden(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError(f"{name} was called")

    return refuse


def forbid_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pickle, pysyncobj.pickle):
        for name in ("load", "loads", "dump", "dumps"):
            monkeypatch.setattr(module, name, forbidden(f"{module.__name__}.{name}"))
    for name in ("fork", "forkpty"):
        monkeypatch.setattr(os, name, forbidden(name))
    serializer = pysyncobj.serializer.Serializer
    for name in [name for name in serializer.__dict__ if not name.startswith("__")]:
        monkeypatch.setattr(serializer, name, forbidden(name))
    for name in ("add", "clear", "deleteEntriesFrom", "deleteEntriesTo", "setCurrentTerm"):
        if name != "add":  # The constructor adds its first entry to a temporary memory journal.
            monkeypatch.setattr(pysyncobj.journal.MemoryJournal, name, forbidden(name))
    unreached = set(STOCK.__dict__) - running() - overridden()
    for name in unreached:
        if inspect.isfunction(STOCK.__dict__[name]):
            monkeypatch.setattr(STOCK, name, forbidden(name))


def test_pickling_forking_or_unreviewed_pysyncobj_code_never_runs(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elections, commands, snapshots, an install, a join and restarts run while all such code is
    forbidden.
    """
    forbid_stock(monkeypatch)
    cluster = Lockstep(clock, snapshot_ms=50, keep_entries=1)
    leader = cluster.lead()
    name = next(name for name in cluster.names if name != leader.name)
    cluster.commit(b"first", via=name)
    cluster.isolate(name)
    for turn in range(4):
        for member in cluster.members.values():
            member.log._segment_bytes = 1
        cluster.commit(b"%d" % turn, via=leader.name)
        cluster.idle(0.2)
    assert leader.log.base.index > cluster.members[name].log.last.index
    cluster.heal()
    cluster.converge()
    assert cluster.members[name].log.base.index > 1, "it was sent a snapshot"
    cluster.wipe(name)
    cluster.run(lambda: cluster.members[name].raft.is_counted_here)
    cluster.restart(leader.name, "none")
    cluster.commit(b"last")
    cluster.converge()
    assert len(cluster.members[name].commands) == 6


def test_pysyncobj_snapshot_loading_raises_assertion_error() -> None:
    """It fails for any caller."""
    method = OURS.__dict__["_SyncObj__loadDumpFile"]
    with pytest.raises(AssertionError, match="not PySyncObj's"):
        method(None, clearJournal=True)


def test_unsupported_pysyncobj_version_raises_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pysyncobj.version.VERSION", "0.3.18")
    with pytest.raises(ImportError, match=r"needs PySyncObj 0\.3\.17, not 0\.3\.18"):
        _import_again("sequencer.raft.core.pysyncobj_adapter")


def _import_again(name: str) -> ModuleType:
    """Run a module's code again, in a new module object."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
