"""Makes the pods of a release the members of its cluster: `scale.py remove` and `scale.py match`, in jobs.

`remove` removes each member whose pod goes. `match` does this too, then adds each pod that is no member yet.
Members that are no pods of the release stay. It reads the members before each step and requests one change
at a time, so it may be killed and started again. The cluster finishes a requested change without it.

Environment:
- `SCALE_NODES`: NAME=HOST:PORT,... of the Raft port of each pod that must be a member, by ordinal.
- `SCALE_RAISES`: `true` permits it to raise the feature level.
- `SCALE_SECONDS`: it fails after this time.
- Endpoints and certificates, as `rt` reads them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, NoReturn

LEVEL: Final = 2
"""The feature level that permits changes of the members."""
POLL_S: Final = 1.0
COMMAND_S: Final = 120.0
CANCEL: Final = ("member", "cancel")


class Wait(NamedTuple):
    """Nothing can be done now."""

    why: str


class Run(NamedTuple):
    """The next step."""

    words: tuple[str, ...]
    """Of `rt`."""


class Done(NamedTuple):
    """Nothing is left to do."""


def decide(status: Mapping[str, Any], nodes: Mapping[str, str], *, adds: bool) -> Wait | Run | Done:
    """The next step. `status`: of `rt member list --json`. `nodes`: Raft address by name, by ordinal."""
    members = {member["name"]: member for member in status["members"]}
    if not any(member["isLeader"] for member in members.values()):
        return Wait("The nodes have no leader.")
    change = status["memberChange"]
    if change is not None:
        if _is_surplus(change["adds"], nodes):
            return Run(CANCEL)
        return Wait(f"Change {change['number']}: {status['memberChangeWaitsFor'] or 'it is carried out'}.")
    surplus = sorted((name for name in members if _is_surplus(name, nodes)), key=_ordinal)
    if surplus:
        return Run(("member", "remove", surplus[-1], "--no-wait"))
    for name, address in nodes.items() if adds else ():
        if name not in members or members[name]["role"] != "voter":
            return Run(("member", "add", name, address, "--no-wait"))
    return Done()


def _is_surplus(name: str, nodes: Mapping[str, str]) -> bool:
    """Whether it is the name of a pod of the release whose ordinal is too high."""
    release = next(iter(nodes)).rpartition("-")[0]
    prefix, _, ordinal = name.rpartition("-")
    return name not in nodes and prefix == release and ordinal.isdecimal()


def _ordinal(name: str) -> int:
    return int(name.rpartition("-")[2])


class CommandFailed(Exception):
    """`rt` failed. The message is its error."""


def run_rt(*words: str) -> str:
    """The output of the command. Raises `CommandFailed`."""
    command = ["rt", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        raise CommandFailed(f"{' '.join(command)}: no answer within {COMMAND_S:.0f} s.") from None
    if done.returncode != 0:
        status = f"{' '.join(command)}: exit status {done.returncode}."
        raise CommandFailed(done.stderr.strip() or status)
    return done.stdout.strip()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def fail(text: str) -> NoReturn:
    say(f"Failed: {text}")
    sys.exit(1)


class Scaling:
    """The steps until the members are `nodes`."""

    def __init__(self, nodes: Mapping[str, str], *, adds: bool, raises: bool) -> None:
        self._nodes, self._adds, self._raises = nodes, adds, raises
        self._settled: int | None = None
        """Number of the last change that ended. None: not read yet."""

    def step(self) -> str | None:
        """Take the next step. Returns what must happen before another one, or None if none is left."""
        status = json.loads(run_rt("member", "list", "--json"))
        self._check_settled(status["settledMemberChange"])
        step = decide(status, self._nodes, adds=self._adds)
        match step:
            case Wait(why):
                return why
            case Run(words):
                self._check_level()
                say(f"rt {' '.join(words)}: {run_rt(*words)}")
                if words == CANCEL:
                    self._settled = int(status["memberChange"]["number"])
                return "The cluster must start it."
            case Done():
                return None

    def _check_settled(self, settled: Mapping[str, Any] | None) -> None:
        """Fail if a change ended without being carried out since this program started."""
        before, self._settled = self._settled, 0 if settled is None else int(settled["number"])
        if settled is not None and before is not None and self._settled > before and settled["why"]:
            fail(f"change {self._settled} of the members was not carried out whole: {settled['why']}.")

    def _check_level(self) -> None:
        level = json.loads(run_rt("features", "list", "--json"))["featureLevel"]
        if level >= LEVEL:
            return
        if not self._raises:
            fail(
                f"the cluster has feature level {level}, and changes of the members need level {LEVEL}. "
                f"A level is never lowered. Run `rt features raise {LEVEL}`, or set "
                "scaling.raiseFeatureLevel=true and upgrade."
            )
        say(run_rt("features", "raise", str(LEVEL)))


def main(mode: str) -> None:
    nodes = dict(each.split("=") for each in os.environ["SCALE_NODES"].split(","))
    raises = os.environ["SCALE_RAISES"] == "true"
    deadline = time.monotonic() + float(os.environ["SCALE_SECONDS"])
    scaling = Scaling(nodes, adds={"remove": False, "match": True}[mode], raises=raises)
    said = ""
    while True:
        try:
            why = scaling.step()
        except CommandFailed as error:
            why = str(error)
        if why is None:
            say("Done.")
            return
        if why != said:
            say(why)
        said = why
        if time.monotonic() > deadline:
            fail(f"the members are not as they should be in time. Last: {why}")
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(sys.argv[1])
