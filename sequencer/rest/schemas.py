"""What the answers look like, as JSON Schema (the dialect of OpenAPI 3.1).

Pure. Every field of a record is always there; one that is unknown is "", 0 or null as its description says.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from sequencer.rest.log_history import STATES

Schema: TypeAlias = dict[str, Any]


def text(description: str) -> Schema:
    """A string."""
    return {"type": "string", "description": description}


def number(description: str, *, low: int | None = 0) -> Schema:
    """A whole number, of 64 bits, from `low`."""
    bounds = {} if low is None else {"minimum": low}
    return {"type": "integer", "format": "int64", "description": description, **bounds}


def flag(description: str) -> Schema:
    """True or false."""
    return {"type": "boolean", "description": description}


def optional(schema: Schema) -> Schema:
    """The same, or null."""
    kind = schema["type"]
    return {**schema, "type": [kind, "null"]}


def array(items: Schema, description: str) -> Schema:
    """A list."""
    return {"type": "array", "items": items, "description": description}


def record(description: str, fields: dict[str, Schema]) -> Schema:
    """An object with just these fields."""
    return {
        "type": "object",
        "description": description,
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


_TIME: Final = "RFC 3339, nanoseconds; empty: never"

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
            "sealTime": text(f"When it was sealed. {_TIME}."),
            "truncationTime": text(f"When it was trimmed. {_TIME}."),
            "truncationReason": text("Why it was trimmed; empty: it is kept."),
            "state": {"type": "string", "enum": list(STATES), "description": "Of its bytes."},
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
        "sequencedTime": text(f"Sequencing time of the last instruction. {_TIME}."),
        "configuration": record(
            "What commands change.",
            {
                "rollBytes": number("A merged segment is followed by the next at that size."),
                "rollMinutes": number("And at that age; 0: never by age."),
                "sessionBytesMax": number("Most bytes of one session in one instruction."),
            },
        ),
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
                    "stopped": text("Why its merger stands still for good; empty: it does not."),
                    "clock": text(f"Its clock, when it told. {_TIME}."),
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
            "disconnectTime": text(f"When it ended. {_TIME}."),
            "lastMessageTime": text(f"When bytes last came or went. {_TIME}."),
            "position": number("Next position of a puller; next durable number of a publisher."),
            "lag": number("Messages behind: not pulled yet, or pushed here and not merged yet."),
            "bytes": number("On this connection."),
            "bytesPerSecond": {"type": "number", "minimum": 0, "description": "Of late."},
            "directory": text("Its directory; empty: it did not tell."),
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
