"""What is told of the cluster, its log, sessions and clients, as JSON Schema. Pure."""

from __future__ import annotations

from typing import Final

from rt.log.table import TrimReason
from sequencer.rest.log_history import STATES
from sequencer.rest.operating_schemas import CONFIGURATION
from sequencer.rest.schema_kinds import TIME, array, choice, flag, number, optional, record, text
from sequencer.steps import STEPS

ERROR: Final = record(
    "What went wrong.",
    {
        "error": text("The class of the error."),
        "what": text("What happened."),
        "where": optional(text("The parameter, path or peer.")),
        "got": optional(text("What was found.")),
        "wanted": optional(text("What is allowed.")),
        "hint": optional(text("What helps.")),
    },
)

LOG_HISTORY: Final = array(
    record(
        "A merged segment.",
        {
            "logPath": text("The file, below the data directory of any node."),
            "logTime": text("Sequencing time of its first message, RFC 3339."),
            "logTimeNs": number("The same, nanoseconds since the epoch.", low=None),
            "logPos": number("Position of its first message."),
            "logEnd": number("One past the position of its last message."),
            "logSize": number("Bytes of the segment, also when it is trimmed."),
            "logAge": number("Minutes since it was sealed; -1: it is active.", low=-1),
            "sealTime": text(f"When it was sealed. {TIME}."),
            "truncationTime": text(f"When it was trimmed. {TIME}."),
            "truncationReason": choice(
                "Why it was trimmed; empty: it is kept.",
                ["", *(reason.name.lower() for reason in TrimReason if reason)],
            ),
            "state": choice("Of its bytes.", STATES),
        },
    ),
    "Oldest first.",
)

LATEST_OUT_POSITION: Final = record(
    "The newest position.",
    {"latestOutPosition": number("Position of the last message that is merged; -1: none is.", low=-1)},
)

_PLACE: Final = record(
    "A place in an X, in front of message `number`.",
    {
        "segment": number("Y, the roll index."),
        "offset": number("Bytes from the start of the file."),
        "number": number("Number of the next message."),
    },
)

_MERGED: Final = record(
    "How far a merged log goes.",
    {
        "instruction": number("The last merge instruction."),
        "position": number("One past the last position."),
        "bytes": number("Of all merged segments."),
        "checksum": text("Running checksum of the merged log, hexadecimal."),
    },
)

ALARMS: Final = array(
    record(
        "Something that somebody should look at.",
        {
            "name": text("A constant word."),
            "severity": choice("critical: look now.", ["critical", "warning"]),
            "text": text("What it is, and what helps."),
        },
    ),
    "Critical ones first; empty: all is well.",
)

STATUS: Final = record(
    "The cluster, as this node knows it.",
    {
        "stream": text("Name of the stream."),
        "cluster": text("Id of the cluster, hexadecimal; empty: not known yet."),
        "epoch": number("Of the cluster."),
        "leader": text("Name of the leader; empty: none is known."),
        "term": number("Of Raft."),
        "committed": {
            **_MERGED,
            "description": "What the cluster agreed on, as far as this node applied it.",
        },
        "sequencedTime": text(f"Sequencing time of the last instruction. {TIME}."),
        "configuration": CONFIGURATION,
        "archive": record(
            "The merged log against what is to be kept of it.",
            {
                "logStart": number("The first position that is kept."),
                "segments": number("Merged segments that are kept, the growing one too."),
                "segmentsTrimmed": number("Those that were trimmed, as far as they are remembered."),
                "bytes": number("Of the segments that are kept."),
                "oldestMinutes": number("Since the oldest kept one was sealed; -1: none is.", low=-1),
                "lastTrimTime": text(f"When anything was last trimmed. {TIME}."),
                "lastTrimReason": text("Why; empty: nothing was."),
                "holds": number("Subscribers that hold data back."),
                "holdBytes": number("About how many bytes lie behind the least hold."),
            },
        ),
        "leases": number("That are held."),
        "alarms": ALARMS,
        "members": array(
            record(
                "A node, as it told the one that answers.",
                {
                    "name": text("Its name."),
                    "address": text("host:port of its gRPC server."),
                    "isLeader": flag("Whether it leads."),
                    "isConnected": flag("Whether the node that answers is connected to it (or is it)."),
                    "isCounted": flag("Whether its disk counts in votes."),
                    "merged": {**_MERGED, "description": "What it has merged durably."},
                    "step": {
                        "type": "string",
                        "enum": list(STEPS),
                        "description": "Of its return; ready: it keeps up, away: it is not heard of.",
                    },
                    "stepDone": number("Of that step: bytes of a snapshot, Raft indices or positions."),
                    "stepTotal": number("Where the step ends; 0: not known."),
                    "stopped": text("Why its merger stands still for good; empty: it does not."),
                    "clock": text(f"Its clock, when it told. {TIME}."),
                    "diskBytes": number("Of its file system."),
                    "diskFreeBytes": number("Free on it."),
                },
            ),
            "By name.",
        ),
        "node": record(
            "The node that answers.",
            {
                "name": text("Its name."),
                "role": text("Its part in Raft."),
                "isCaughtUp": flag("Whether it applied anything of the present term since it started."),
                "isControlUp": flag("Whether its two processes are connected."),
                "appliedIndex": number("Raft index of the last command applied."),
                "mergedPosition": number("One past the last position in its merged log."),
                "durablePosition": number("The same, of what is on its disk for sure."),
                "lagMessages": number("Messages that are committed and not merged here yet."),
                "lagBytes": number("About how many bytes those are."),
                "waitsFor": text("The input that its merger waits for; empty: none."),
                "obstacles": array(text("A reason."), "Why it is not ready; empty: it is."),
                "failure": text("Why its data process ends; empty: it does not."),
                "startTime": text("When its data process started."),
                "version": text("Of rt."),
            },
        ),
    },
)

SESSIONS: Final = array(
    record(
        "An incarnation of a session.",
        {
            "id": number("Of the incarnation, in this cluster."),
            "name": text("Of the session."),
            "incarnation": text("Hexadecimal."),
            "dedupId": optional(text("Its dedup id; null: none.")),
            "isSuperseded": flag("A newer incarnation took over."),
            "waitsFor": optional(number("The id of the incarnation that is merged first; null: none.")),
            "lastX": number("The greatest session number opened; -1: none was.", low=-1),
            "lives": array(
                record(
                    "A start of the publisher that is not merged whole.",
                    {
                        "x": number("Session number."),
                        "isFenced": flag("No node takes more of it."),
                        "end": {**_PLACE, "type": ["object", "null"]},
                    },
                ),
                "By x; the first is being merged.",
            ),
            "consumed": {
                **_PLACE,
                "type": ["object", "null"],
                "description": "How far the first life is merged.",
            },
            "mergedX": number("The last session number that is merged whole; -1: none is.", low=-1),
            "isConnected": flag("Whether its publisher pushes to the node that answers."),
        },
    ),
    "By id.",
)

CLIENTS: Final = array(
    record(
        "A connection to the node that answers; of those that ended, each client's last.",
        {
            "kind": text("publisher or subscriber; also operator and node, which pull."),
            "name": text("Name in the certificate."),
            "certificate": text("Identity in the certificate."),
            "node": text("The node that it is connected to."),
            "address": text("host:port; empty: not known."),
            "session": optional(text("What is pushed; null: it pulls.")),
            "active": flag("Whether it is connected now."),
            "connectTime": text("When it connected."),
            "disconnectTime": text(f"When it ended. {TIME}."),
            "lastMessageTime": text(f"When bytes last came or went. {TIME}."),
            "position": number("Next position of a puller; next durable number of a publisher."),
            "lag": number("Messages behind: not pulled yet, or pushed here and not merged yet."),
            "bytes": number("On this connection."),
            "bytesPerSecond": {"type": "number", "minimum": 0, "description": "Of late."},
            "lagSeconds": {
                "type": "number",
                "minimum": 0,
                "description": "So long at least it has been behind; 0: it is not.",
            },
            "directory": text("What it writes to or reads from, below the data directory of the node."),
        },
    ),
    "Active ones first, then by name.",
)

READINESS: Final = record(
    "Whether to send traffic here.",
    {
        "ready": flag("The same as the status 200."),
        "obstacles": array(text("A reason."), "Why not."),
    },
)

LIVENESS: Final = record("Whether the process works.", {"alive": flag("The same as the status 200.")})
