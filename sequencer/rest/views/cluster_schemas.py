"""JSON Schemas of the cluster, its log, sessions and clients."""

from __future__ import annotations

from typing import Final

from rt.log.format.segment_table import TrimReason
from sequencer.config.startup_phase import PHASES
from sequencer.rest.base.schema_kinds import TIME, array, choice, flag, number, optional, record, text
from sequencer.rest.views.admin_schemas import CONFIGURATION
from sequencer.rest.views.log_history import STATES

ERROR: Final = record(
    "An error.",
    {
        "error": text("Class of the error."),
        "what": text("The problem."),
        "where": optional(text("Parameter, field, path or peer.")),
        "got": optional(text("The value that was received.")),
        "expected": optional(text("Valid values.")),
        "hint": optional(text("Next step.")),
    },
)

LOG_HISTORY: Final = array(
    record(
        "A merged segment.",
        {
            "logPath": text("Path of the file, relative to the data directory of any node."),
            "logTime": text("Sequencing time of its first message, RFC 3339."),
            "logTimeNs": number("logTime as nanoseconds since 1970.", low=None),
            "logPos": number("Position of its first message."),
            "logEnd": number("One past the position of its last message."),
            "logSize": number("Bytes of the segment, even after it was trimmed."),
            "logAge": number("Minutes since it was sealed. -1: it is active.", low=-1),
            "sealTime": text(f"When it was sealed. {TIME}."),
            "truncationTime": text(f"When it was trimmed. {TIME}."),
            "truncationReason": choice(
                "Why it was trimmed. Empty: it is kept.",
                ["", *(reason.name.lower() for reason in TrimReason if reason)],
            ),
            "state": choice("State of the segment.", STATES),
        },
    ),
    "Oldest first.",
)

LATEST_OUT_POSITION: Final = record(
    "The newest position.",
    {"latestOutPosition": number("Position of the last merged message. -1: none.", low=-1)},
)

_PLACE: Final = record(
    "A location in a run of a session, before message `number`.",
    {
        "segment": number("Roll number of the segment file."),
        "offset": number("Byte offset in the file."),
        "number": number("Number of the next message."),
    },
)

_MERGED: Final = record(
    "The end of a merged log.",
    {
        "instruction": number("Number of the last merge instruction."),
        "position": number("One past the last merged position."),
        "bytes": number("Total bytes of all merged segments, trimmed ones included."),
        "checksum": text("Running checksum of the merged log, hexadecimal."),
    },
)

ALARMS: Final = array(
    record(
        "A condition that needs attention.",
        {
            "name": text("Name of the alarm, a constant."),
            "severity": choice("critical: act now. warning: act soon.", ["critical", "warning"]),
            "text": text("The problem and the next step."),
        },
    ),
    "Critical alarms first. Empty: no problem is known.",
)

STATUS: Final = record(
    "The cluster as this node knows it, and this node.",
    {
        "stream": text("Name of the stream."),
        "cluster": text("Cluster id, hexadecimal. Empty: not known yet."),
        "epoch": number("Cluster epoch; each reset increments it."),
        "leader": text("Name of the leader. Empty: none is known."),
        "term": number("Raft term."),
        "committed": {
            **_MERGED,
            "description": "The committed merged log, as far as this node applied it.",
        },
        "sequencedTime": text(f"Sequencing time of the last merge instruction. {TIME}."),
        "configuration": CONFIGURATION,
        "retention": record(
            "What is retained of the merged log.",
            {
                "logStart": number("First position that is kept."),
                "segments": number("Retained merged segments, including the active one."),
                "segmentsTrimmed": number("Trimmed segments that the cluster still lists."),
                "bytes": number("Bytes of the retained segments."),
                "oldestMinutes": number(
                    "Minutes since the oldest retained segment was sealed. -1: none is sealed.", low=-1
                ),
                "lastTrimTime": text(f"Time of the last trim. {TIME}."),
                "lastTrimReason": text("Reason of the last trim. Empty: nothing was trimmed."),
                "holds": number("Number of subscriber holds."),
                "holdBytes": number("Approximate bytes after the lowest hold."),
            },
        ),
        "leases": number("Number of held leases."),
        "alarms": ALARMS,
        "members": array(
            record(
                "A node, as it last reported to this node.",
                {
                    "name": text("Name of the node."),
                    "address": text("host:port of its gRPC server."),
                    "isLeader": flag("Whether it is the leader."),
                    "isConnected": flag("Whether this node is connected to it, or is it."),
                    "isCounted": flag("Whether its vote counts: its disk is admitted."),
                    "merged": {**_MERGED, "description": "Its durable merged log."},
                    "step": {
                        "type": "string",
                        "enum": list(PHASES),
                        "description": "Start-up phase. ready: it keeps up. unreachable: it does not report.",
                    },
                    "stepDone": number(
                        "Progress of the phase: bytes of a snapshot, Raft indices or positions."
                    ),
                    "stepTotal": number("End of the phase, in the unit of stepDone. 0: not known."),
                    "stopped": text("Why it has stopped merging permanently. Empty: it has not."),
                    "clock": text(f"Its clock at its last report. {TIME}."),
                    "diskBytes": number("Size of its file system."),
                    "diskFreeBytes": number("Free bytes of its file system."),
                },
            ),
            "By name.",
        ),
        "node": record(
            "This node, which answered the request.",
            {
                "name": text("Name of the node."),
                "role": text("Its Raft role."),
                "isCaughtUp": flag("Whether it applied an entry of the current term since it started."),
                "isControlUp": flag("Whether its control process is connected to its data process."),
                "appliedIndex": number("Raft index of the last applied command."),
                "mergedPosition": number("One past the last position in its merged log."),
                "durablePosition": number("One past the last position that is synced to its disk."),
                "lagMessages": number("Committed messages that this node has not merged."),
                "lagBytes": number("Approximate bytes of these messages."),
                "waitsFor": text("The input that its merger waits for. Empty: none."),
                "obstacles": array(text("A reason."), "Why it is not ready. Empty: it is ready."),
                "failure": text("Why its data process failed. Empty: it has not failed."),
                "startTime": text("When its data process started."),
                "version": text("Version of rt."),
            },
        ),
    },
)

SESSIONS: Final = array(
    record(
        "An incarnation of a session.",
        {
            "id": number("Id of the incarnation in this cluster."),
            "name": text("Name of the session."),
            "incarnation": text("Id chosen by the publisher, hexadecimal."),
            "dedupId": optional(text("Dedup id. Null: none.")),
            "isSuperseded": flag("Whether a newer incarnation replaced it."),
            "waitsFor": optional(number("Id of the incarnation that must be merged first. Null: none.")),
            "lastX": number("Greatest run number opened. -1: none.", low=-1),
            "lives": array(
                record(
                    "A run (one start of the publisher) that is not completely merged.",
                    {
                        "x": number("Run number."),
                        "isFenced": flag("Whether it is fenced: no node accepts more of it."),
                        "end": {**_PLACE, "type": ["object", "null"]},
                    },
                ),
                "Runs by x; the first is being merged.",
            ),
            "consumed": {
                **_PLACE,
                "type": ["object", "null"],
                "description": "How far the first run is merged. Null: not started.",
            },
            "mergedX": number("The last run number that is completely merged. -1: none.", low=-1),
            "isConnected": flag("Whether its publisher is connected to this node."),
        },
    ),
    "By id.",
)

CLIENTS: Final = array(
    record(
        "A connection to this node, or the last ended connection of a client.",
        {
            "kind": text("publisher, subscriber, or operator and node (which also pull)."),
            "name": text("Name in the certificate."),
            "certificate": text("Identity URI in the certificate."),
            "node": text("Node that it is connected to."),
            "address": text("host:port. Empty: not known."),
            "session": optional(text("Session that is pushed. Null: the client pulls.")),
            "active": flag("Whether it is connected now."),
            "connectTime": text("When it connected. RFC 3339."),
            "disconnectTime": text(f"When it disconnected. {TIME}."),
            "lastMessageTime": text(f"When bytes were last received or sent. {TIME}."),
            "position": number(
                "Pull: next position. Push: number of the next message to become durable here."
            ),
            "lag": number("Pull: messages not pulled yet. Push: messages received here and not merged yet."),
            "bytes": number("Bytes on this connection."),
            "bytesPerSecond": {"type": "number", "minimum": 0, "description": "Recent rate."},
            "lagSeconds": {
                "type": "number",
                "minimum": 0,
                "description": "It has lagged for at least this long. 0: no lag.",
            },
            "directory": text(
                "Log that it writes or reads, relative to the node's data directory. Empty: not known."
            ),
        },
    ),
    "Active connections first, then by name.",
)

READINESS: Final = record(
    "Whether this node should receive traffic.",
    {
        "ready": flag("True if and only if the HTTP status is 200."),
        "obstacles": array(text("A reason."), "Why it is not ready. Empty: it is ready."),
    },
)

LIVENESS: Final = record(
    "Whether the data process works.", {"alive": flag("True if and only if the HTTP status is 200.")}
)
